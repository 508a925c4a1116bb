//! Collects the declarations of a file, its imports and the library.

use std::collections::HashSet;

use beeline_syntax::ast::{self, Initial, Unit};
use beeline_syntax::{Diagnostic, Diagnostics, FileId, Sources, Span, parse};

use super::Loader;
use super::evaluate::constant;
use super::types::{Constant, Field, Record, Type, World, scalar};
use crate::library;
use crate::tree::words;

/// Largest number of files of one compilation.
const MOST_FILES: usize = 200;

/// Everything `file` sees, and its own tree.
pub(super) fn collect(
    sources: &mut Sources,
    file: FileId,
    loader: Loader<'_>,
    found: &mut Diagnostics,
) -> (World, Unit) {
    let mut world = World::new();
    let root = parse(sources, file, found);
    let mut loaded: HashSet<String> = HashSet::new();
    let mut units = vec![root];
    let mut at = 0;
    while at < units.len() {
        let mut wanted: Vec<(String, Option<Span>)> =
            units[at].imports.iter().map(|(name, span)| (name.clone(), Some(*span))).collect();
        if at == 0 {
            for instance in &units[0].instances {
                let own = units[0].elements.iter().any(|e| e.name.text == instance.element.text);
                if let Some(name) = library::file_of(&instance.element.text).filter(|_| !own) {
                    wanted.push((name.to_owned(), None));
                }
            }
        }
        for (name, span) in wanted {
            if units.len() > MOST_FILES || !loaded.insert(name.clone()) {
                continue;
            }
            let text = library::text(&name).map(str::to_owned).or_else(|| loader(&name));
            match (text, span) {
                (Some(text), _) => {
                    let file = sources.add(name, text);
                    units.push(parse(sources, file, found));
                }
                (None, Some(span)) => found.push(
                    Diagnostic::error("no-such-file", span, format!("cannot read {name:?}"))
                        .help("a file beside this one, or a library file such as \"headers.np\""),
                ),
                (None, None) => {}
            }
        }
        at += 1;
    }
    // Imports first, so that a file's own names may use them.
    for unit in units.iter().rev() {
        declare(&mut world, unit, found);
    }
    (world, units.swap_remove(0))
}

fn declare(world: &mut World, unit: &Unit, found: &mut Diagnostics) {
    for variable in &unit.constants {
        add_constant(world, variable, found);
    }
    for record in &unit.records {
        add_record(world, record, found);
    }
    for function in &unit.functions {
        let name = &function.name;
        if let Some(first) = world.functions.insert(name.text.clone(), function.clone()) {
            twice(found, "function", name, first.name.span);
        }
    }
    for element in &unit.elements {
        let name = &element.name;
        // A file's own element hides the library's.
        if let Some(first) = world.elements.insert(name.text.clone(), element.clone())
            && first.name.span.file == name.span.file
        {
            twice(found, "element", name, first.name.span);
        }
    }
}

fn twice(found: &mut Diagnostics, what: &str, name: &ast::Name, first: Span) {
    found.push(
        Diagnostic::error("twice", name.span, format!("a second {what} named {:?}", name.text))
            .other(first, "the first"),
    );
}

/// The type a name stands for.
pub(super) fn resolve(
    world: &World,
    ty: &ast::TypeName,
    local: &dyn Fn(&str) -> Option<u64>,
    found: &mut Diagnostics,
) -> Option<Type> {
    if let Some(width) = &ty.width {
        let bits = constant(world, width, local, found)?;
        if ty.name.text != "uint" || !(1..=64).contains(&bits) {
            found.push(Diagnostic::error(
                "bad-width",
                width.span,
                format!("uint##{bits} is no type: a number has 1 to 64 bits"),
            ));
            return None;
        }
        return Some(Type::Scalar(u32::try_from(bits).unwrap_or(64)));
    }
    if let Some(scalar) = scalar(&ty.name.text) {
        return Some(scalar);
    }
    if let Some(at) = world.by_name.get(&ty.name.text) {
        return Some(Type::Record(*at));
    }
    let help = match ty.name.text.as_str() {
        "int" | "long" | "short" | "char" => "numbers are unsigned: uint, ulong, ushort, uchar",
        "float" | "double" => "there are no fractions",
        _ => "declare it with struct or union, or import its file",
    };
    found.push(
        Diagnostic::error(
            "unknown-type",
            ty.name.span,
            format!("no type is named {:?}", ty.name.text),
        )
        .help(help),
    );
    None
}

/// Said of a memory without room.
pub(super) const TOO_LARGE: &str = "a memory of more than a gigabyte";

/// True for a memory of at most a gigabyte, an entry being whole words of 64 bits.
pub(super) fn has_room(dimensions: &[u32], bits: u32) -> bool {
    // Counted without wrapping around: machine code trusts each dimension by itself.
    let bytes = dimensions
        .iter()
        .try_fold(words(bits) as u64 * 8, |bytes, size| bytes.checked_mul(u64::from(*size)));
    bytes.is_some_and(|bytes| bytes <= 1 << 30)
}

/// A dimension of an array.
pub(super) fn dimension(
    world: &World,
    expression: &ast::Expression,
    local: &dyn Fn(&str) -> Option<u64>,
    found: &mut Diagnostics,
) -> Option<u32> {
    let count = constant(world, expression, local, found)?;
    let fits = u32::try_from(count).ok().filter(|count| (1..=1 << 26).contains(count));
    if fits.is_none() {
        found.push(Diagnostic::error(
            "bad-size",
            expression.span,
            format!("an array of {count} entries: 1 to {} are possible", 1 << 26),
        ));
    }
    fits
}

fn add_record(world: &mut World, record: &ast::Record, found: &mut Diagnostics) {
    if let Some(first) = world.by_name.get(&record.name.text) {
        match world.records[*first].span {
            Some(span) => twice(found, "structure", &record.name, span),
            None => found.push(Diagnostic::error(
                "twice",
                record.name.span,
                format!("{:?} is a built-in type", record.name.text),
            )),
        }
        return;
    }
    let mut fields: Vec<Field> = Vec::new();
    let mut bits = 0_u32;
    for field in &record.fields {
        let Some(mut ty) = resolve(world, &field.ty, &|_| None, found) else { continue };
        for size in field.dimensions.iter().rev() {
            let Some(count) = dimension(world, size, &|_| None, found) else { continue };
            ty = Type::Array(Box::new(ty), count);
        }
        if let Some(other) = fields.iter().find(|other| other.name == field.name.text) {
            found.push(Diagnostic::error(
                "twice",
                field.name.span,
                format!("a second field named {:?}", other.name),
            ));
        }
        let width = world.bits(&ty);
        let offset = if record.union { 0 } else { bits };
        bits = if record.union { bits.max(width) } else { bits.saturating_add(width) };
        fields.push(Field { name: field.name.text.clone(), offset, ty });
    }
    if bits == 0 || bits > 1 << 16 {
        found.push(Diagnostic::error(
            "bad-size",
            record.name.span,
            format!("a structure of {bits} bits: 1 to {} are possible", 1 << 16),
        ));
        return;
    }
    let span = Some(record.name.span);
    world.add(Record { name: record.name.text.clone(), bits, fields, span });
}

fn add_constant(world: &mut World, variable: &ast::Variable, found: &mut Diagnostics) {
    if let Some(first) = world.constants.get(&variable.name.text) {
        let span = first.span;
        twice(found, "constant", &variable.name, span);
        return;
    }
    if let Some(value) = constant_of(world, variable, &|_| None, found) {
        world.constants.insert(variable.name.text.clone(), value);
    }
}

/// The value of a constant's declaration.
pub(super) fn constant_of(
    world: &World,
    variable: &ast::Variable,
    local: &dyn Fn(&str) -> Option<u64>,
    found: &mut Diagnostics,
) -> Option<Constant> {
    let ty = resolve(world, &variable.ty, local, found)?;
    let span = variable.name.span;
    if !matches!(ty, Type::Bool | Type::Scalar(_)) {
        found.push(Diagnostic::error("bad-constant", span, "a constant is a number or a table"));
        return None;
    }
    let mut dimensions = Vec::new();
    for size in &variable.dimensions {
        dimensions.push(dimension(world, size, local, found)?);
    }
    if !has_room(&dimensions, world.bits(&ty)) {
        found.push(Diagnostic::error("bad-size", span, TOO_LARGE));
        return None;
    }
    let entries: u64 = dimensions.iter().map(|d| u64::from(*d)).product();
    let values: Option<Vec<u64>> = match &variable.initial {
        Some(Initial::Value(value)) if dimensions.is_empty() => {
            constant(world, value, local, found).map(|value| vec![value])
        }
        Some(Initial::List(list)) if !dimensions.is_empty() => {
            list.iter().map(|value| constant(world, value, local, found)).collect()
        }
        _ => {
            found.push(Diagnostic::error(
                "bad-constant",
                span,
                "a constant needs a value, a table needs a list in braces",
            ));
            None
        }
    };
    let mut values = values?;
    if values.len() as u64 > entries {
        found.push(Diagnostic::error(
            "bad-constant",
            span,
            format!("{} values for {entries} entries", values.len()),
        ));
    }
    let all = crate::tree::mask(world.bits(&ty));
    values.iter_mut().for_each(|value| *value &= all);
    Some(Constant { ty, dimensions, values, span })
}

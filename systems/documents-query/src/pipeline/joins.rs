//! Stages that look beside a document: into its arrays, and into other collections.

use bson::{Bson, Document};

use super::{Flow, Outside, Pipeline, Stage};
use crate::error::{Code, Result, bad, fail};
use crate::expression::{Expression, MISSING, Scope};
use crate::matching::Filter;
use crate::memory::{Lease, size_of};
use crate::value::key;

#[derive(Clone, Debug)]
pub(super) struct Unwind {
    pub path: Vec<String>,
    pub index: Option<Vec<String>>,
    pub keep_empty: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Lookup {
    pub from: Option<String>,
    pub fields: Option<(Vec<String>, Vec<String>)>,
    pub variables: Vec<(String, Expression)>,
    pub pipeline: Pipeline,
    pub into: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct GraphLookup {
    pub from: String,
    pub start: Expression,
    pub connect_from: Vec<String>,
    pub connect_to: Vec<String>,
    pub into: Vec<String>,
    pub depth: Option<i64>,
    pub depth_field: Option<Vec<String>>,
    pub restrict: Option<Filter>,
}

impl Unwind {
    /// Hands over one document for each element, until `take` says that it is enough.
    pub fn apply(
        &self,
        mut document: Document,
        take: &mut dyn FnMut(Document) -> Result<Flow>,
    ) -> Result<Flow> {
        let with_index = |mut new: Document, at: Option<usize>| {
            if let Some(index) = &self.index {
                let number = at.map_or(Bson::Null, |at| Bson::Int64(at as i64));
                crate::path::set(&mut new, index, number);
            }
            new
        };
        match crate::path::plain(&document, &self.path) {
            Some(Bson::Array(all)) if !all.is_empty() => {
                let all = all.clone();
                // The copies need not carry the array that they are made of.
                crate::path::set(&mut document, &self.path, Bson::Null);
                for (at, element) in all.into_iter().enumerate() {
                    let mut new = document.clone();
                    crate::path::set(&mut new, &self.path, element);
                    if take(with_index(new, Some(at)))? == Flow::Enough {
                        return Ok(Flow::Enough);
                    }
                }
                Ok(Flow::More)
            }
            Some(Bson::Array(_)) if self.keep_empty => {
                remove_plain(&mut document, &self.path);
                take(with_index(document, None))
            }
            Some(Bson::Null) | None if self.keep_empty => take(with_index(document, None)),
            Some(Bson::Array(_) | Bson::Null) | None => Ok(Flow::More),
            Some(_) => take(with_index(document, None)),
        }
    }
}

fn remove_plain(document: &mut Document, path: &[String]) {
    match path {
        [] => {}
        [last] => drop(document.remove(last)),
        [first, rest @ ..] => {
            if let Some(Bson::Document(inner)) = document.get_mut(first) {
                remove_plain(inner, rest);
            }
        }
    }
}

/// A filter for equality with what a lookup's local field holds.
fn equal_to(field: &[String], local: Bson) -> Result<Filter> {
    let condition = match local {
        Bson::Array(all) => {
            let plain: Vec<Bson> = all
                .into_iter()
                .filter(|value| !matches!(value, Bson::RegularExpression(_)))
                .collect();
            bson::doc! { "$in": plain }
        }
        MISSING => bson::doc! { "$eq": Bson::Null },
        value => bson::doc! { "$eq": value },
    };
    Filter::parse(&bson::doc! { field.join("."): condition })
}

impl Lookup {
    /// The document with what was found.
    pub fn apply(
        &self,
        mut document: Document,
        scope: &Scope<'_>,
        outside: &mut dyn Outside,
    ) -> Result<Document> {
        let mut variables = scope.variables().cloned().unwrap_or_default();
        for (name, expression) in &self.variables {
            variables.insert(name.clone(), expression.evaluate(&scope.rooted(&document))?);
        }
        let mut pipeline = self.pipeline.fresh();
        if let Some((local, foreign)) = &self.fields {
            let value = crate::path::get_in(&document, local).unwrap_or(MISSING);
            pipeline.stages.insert(0, Stage::Match(equal_to(foreign, value)?));
        }
        let found = match &self.from {
            Some(from) => outside.read(from, &pipeline, &variables)?,
            None => pipeline.run_made(&Scope::with_variables(&variables), outside)?,
        };
        let found = Bson::Array(found.into_iter().map(Bson::Document).collect());
        crate::path::set(&mut document, &self.into, found);
        Ok(document)
    }
}

impl Pipeline {
    /// Runs a pipeline that begins with `$documents`, which makes its input.
    ///
    /// Errors: those of its stages.
    pub(super) fn run_made(
        mut self,
        scope: &Scope<'_>,
        outside: &mut dyn Outside,
    ) -> Result<Vec<Document>> {
        let input = match self.take_source() {
            Some((name, argument)) if name == "$documents" => made(&argument, scope)?,
            _ => return bad("a pipeline without a collection begins with $documents"),
        };
        self.run(input, scope, outside)
    }
}

/// The documents that the argument of a `$documents` stage makes.
///
/// Errors: those of its expressions, something other than an array of objects.
pub fn made(argument: &Document, scope: &Scope<'_>) -> Result<Vec<Document>> {
    let all = Expression::parse(argument.get("argument").unwrap_or(&Bson::Null))?;
    let Bson::Array(all) = all.evaluate(scope)? else {
        return fail(Code::TypeMismatch, "$documents takes an array");
    };
    all.into_iter()
        .map(|one| match one {
            Bson::Document(document) => Ok(document),
            _ => fail(Code::TypeMismatch, "$documents holds objects"),
        })
        .collect()
}

impl GraphLookup {
    /// The document with what was found.
    pub fn apply(
        &self,
        mut document: Document,
        scope: &Scope<'_>,
        outside: &mut dyn Outside,
    ) -> Result<Document> {
        let variables = scope.variables().cloned().unwrap_or_default();
        let start = self.start.evaluate(&scope.rooted(&document))?;
        let mut frontier = match start {
            Bson::Array(all) => all,
            value => vec![value],
        };
        let mut met = std::collections::BTreeMap::new();
        let mut lease = Lease::default();
        let mut depth = 0;
        while !frontier.is_empty() && self.depth.is_none_or(|most| depth <= most) {
            let mut filter =
                equal_to(&self.connect_to, Bson::Array(std::mem::take(&mut frontier)))?;
            if let Some(restrict) = &self.restrict {
                filter = Filter::And(vec![filter, restrict.clone()]);
            }
            for mut found in outside.read(&self.from, &Pipeline::of_filter(filter), &variables)? {
                let id = key(found.get("_id").unwrap_or(&Bson::Null));
                if met.contains_key(&id) {
                    continue;
                }
                match crate::path::get_in(&found, &self.connect_from) {
                    Some(Bson::Array(all)) => frontier.extend(all),
                    Some(value) => frontier.push(value),
                    None => {}
                }
                if let Some(field) = &self.depth_field {
                    crate::path::set(&mut found, field, Bson::Int64(depth));
                }
                lease.grow(size_of(&found) + id.len(), || outside.memory())?;
                met.insert(id, found);
            }
            depth += 1;
        }
        let found = Bson::Array(met.into_values().map(Bson::Document).collect());
        crate::path::set(&mut document, &self.into, found);
        Ok(document)
    }
}

pub(super) fn redact(
    document: Document,
    expression: &Expression,
    scope: &Scope<'_>,
) -> Result<Option<Document>> {
    let verdict = expression.evaluate(&scope.rooted(&document))?;
    match verdict.as_str() {
        Some("keep") => Ok(Some(document)),
        Some("prune") => Ok(None),
        Some("descend") => {
            let mut out = Document::new();
            for (name, value) in document {
                if let Some(kept) = redact_value(value, expression, scope)? {
                    out.insert(name, kept);
                }
            }
            Ok(Some(out))
        }
        _ => bad("$redact must evaluate to $$DESCEND, $$PRUNE, or $$KEEP"),
    }
}

fn redact_value(value: Bson, expression: &Expression, scope: &Scope<'_>) -> Result<Option<Bson>> {
    Ok(match value {
        Bson::Document(inner) => redact(inner, expression, scope)?.map(Bson::Document),
        Bson::Array(all) => {
            let mut kept = Vec::new();
            for one in all {
                kept.extend(redact_value(one, expression, scope)?);
            }
            Some(Bson::Array(kept))
        }
        other => Some(other),
    })
}

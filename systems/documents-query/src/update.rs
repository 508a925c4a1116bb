//! What an update makes of a document.
//!
//! An update is parsed once: operators, a replacement, or a pipeline. Operators are applied in the
//! order of their paths, each on the concrete paths that `$`, `$[]` and `$[name]` stand for.

use bson::{Bson, Document};

use crate::error::{Code, Result, bad, fail};
use crate::expression::Scope;
use crate::matching::Filter;
use crate::path;
use crate::pipeline::{NoOutside, Pipeline};

mod apply;
mod operators;

pub use operators::Operator;

/// A parsed update.
#[derive(Clone, Debug)]
pub enum Update {
    /// Operators on paths, in the order of the paths.
    Operators(Vec<(Vec<String>, Operator)>),
    /// A whole new document.
    Replacement(Document),
    /// Stages that make the new document.
    Pipeline(Box<Pipeline>),
}

/// What an update is applied with.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The query, for `$`.
    pub filter: &'a Filter,
    /// Those of `$[name]`.
    pub array_filters: &'a ArrayFilters,
    /// The document is being inserted: `$setOnInsert` counts.
    pub inserting: bool,
    /// Variables of the command, and the time.
    pub scope: &'a Scope<'a>,
}

/// Filters by name, for `$[name]`.
#[derive(Clone, Debug, Default)]
pub struct ArrayFilters {
    filters: Vec<(String, Filter)>,
}

impl ArrayFilters {
    /// Parses `arrayFilters`.
    ///
    /// Errors: a filter with no name or several, two of one name.
    pub fn parse(sources: &[Bson]) -> Result<Self> {
        let mut filters: Vec<(String, Filter)> = Vec::new();
        for source in sources {
            let Bson::Document(source) = source else {
                return fail(Code::TypeMismatch, "arrayFilters holds objects");
            };
            let mut names = Vec::new();
            names_of(source, &mut names);
            names.dedup();
            let [name] = names.as_slice() else {
                return fail(
                    Code::FailedToParse,
                    format!(
                        "Error parsing array filter :: caused by :: Expected a single top-level field name, found '{}'",
                        names.join("' and '")
                    ),
                );
            };
            if !name.chars().next().is_some_and(|first| first.is_ascii_lowercase())
                || !name.chars().all(|letter| letter.is_ascii_alphanumeric())
            {
                return bad(format!(
                    "Error parsing array filter :: caused by :: The top-level field name must be an alphanumeric string beginning with a lowercase letter, found '{name}'"
                ));
            }
            if filters.iter().any(|(known, _)| known == name) {
                return fail(
                    Code::FailedToParse,
                    format!(
                        "Found multiple array filters with the same top-level field name {name}"
                    ),
                );
            }
            filters.push((name.clone(), Filter::parse(source)?));
        }
        Ok(Self { filters })
    }

    fn allows(&self, name: &str, element: &Bson) -> Result<bool> {
        match self.filters.iter().find(|(known, _)| known == name) {
            Some((_, filter)) => Ok(filter.matches(&bson::doc! { name: element.clone() })),
            None => bad(format!("No array filter found for identifier '{name}' in path")),
        }
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.filters.iter().map(|(name, _)| name.as_str())
    }
}

fn names_of(source: &Document, names: &mut Vec<String>) {
    for (name, value) in source {
        if name.starts_with('$') {
            if let Bson::Array(all) = value {
                all.iter().filter_map(Bson::as_document).for_each(|inner| names_of(inner, names));
            }
        } else if let Some(first) = name.split('.').next() {
            names.push(first.to_owned());
        }
    }
    names.sort();
}

impl Update {
    /// Parses an update.
    ///
    /// Errors: unknown operators, paths that collide, filters of no use, fields that begin with `$`
    /// beside those that do not.
    pub fn parse(source: &Bson, array_filters: &ArrayFilters) -> Result<Self> {
        match source {
            Bson::Array(stages) => {
                let pipeline = Pipeline::parse(stages)?;
                if !pipeline.is_update() {
                    return fail(
                        Code::InvalidOptions,
                        "an update's pipeline may only hold $addFields, $set, $project, $unset, $replaceRoot, $replaceWith",
                    );
                }
                Ok(Self::Pipeline(Box::new(pipeline)))
            }
            Bson::Document(document) => {
                let operators = document.keys().next().is_some_and(|first| first.starts_with('$'));
                if !operators {
                    if let Some(name) = document.keys().find(|name| name.starts_with('$')) {
                        return fail(
                            Code::DollarPrefixedFieldName,
                            format!(
                                "The dollar ($) prefixed field '{name}' in '{name}' is not allowed in the context of an update's replacement document. Consider using an aggregation pipeline with $replaceWith."
                            ),
                        );
                    }
                    return Ok(Self::Replacement(document.clone()));
                }
                let parsed = operators::parse(document)?;
                for name in array_filters.names() {
                    let wanted = format!("$[{name}]");
                    if !parsed.iter().any(|(parts, _)| parts.contains(&wanted)) {
                        return fail(
                            Code::FailedToParse,
                            format!(
                                "The array filter for identifier '{name}' was not used in the update {document}"
                            ),
                        );
                    }
                }
                Ok(Self::Operators(parsed))
            }
            other => fail(
                Code::FailedToParse,
                format!("Update argument must be either an object or an array, found {other}"),
            ),
        }
    }

    /// True for a whole new document.
    #[must_use]
    pub fn is_replacement(&self) -> bool {
        matches!(self, Self::Replacement(_))
    }

    /// Top-level fields it may change; `None` when it may change all.
    #[must_use]
    pub fn fields(&self) -> Option<Vec<&str>> {
        match self {
            Self::Operators(all) => {
                let mut fields: Vec<&str> =
                    all.iter().filter_map(|(parts, _)| parts.first()).map(String::as_str).collect();
                for (_, operator) in all {
                    if let Operator::Rename(to) = operator {
                        fields.extend(to.first().map(String::as_str));
                    }
                }
                Some(fields)
            }
            _ => None,
        }
    }

    /// The new document.
    ///
    /// Errors: operators that do not fit what is there, a changed identifier.
    pub fn apply(&self, document: &Document, context: &Context<'_>) -> Result<Document> {
        let mut new = match self {
            Self::Replacement(replacement) => {
                let mut new = Document::new();
                if let Some(id) = document.get("_id") {
                    new.insert("_id", id.clone());
                }
                new.extend(replacement.clone());
                new
            }
            Self::Pipeline(pipeline) => {
                let mut pipeline = (**pipeline).clone();
                let mut out = Vec::new();
                pipeline.push(document.clone(), context.scope, &mut NoOutside, &mut out)?;
                pipeline.finish(context.scope, &mut NoOutside, &mut out)?;
                match out.pop() {
                    Some(mut new) => {
                        if let (None, Some(id)) = (new.get("_id"), document.get("_id")) {
                            let mut with_id = bson::doc! { "_id": id.clone() };
                            with_id.extend(new);
                            new = with_id;
                        }
                        new
                    }
                    None => document.clone(),
                }
            }
            Self::Operators(operators) => {
                let mut new = document.clone();
                for (parts, operator) in operators {
                    if matches!(operator, Operator::SetOnInsert(_)) && !context.inserting {
                        continue;
                    }
                    let mut paths = Vec::new();
                    apply::expand(&new, document, parts, context, &mut paths)?;
                    for concrete in paths {
                        operator.apply(&mut new, &concrete, context)?;
                    }
                }
                new
            }
        };
        keep_id(document, &mut new, self.is_replacement())?;
        crate::memory::check_nesting(&new)?;
        Ok(new)
    }

    /// The document an upsert inserts: the query's equalities, then the update.
    ///
    /// Errors: as [`Update::apply`]; two equalities on one path.
    pub fn insertion(&self, context: &Context<'_>) -> Result<Document> {
        let mut seed = Document::new();
        let mut clash = None;
        let whole = self.is_replacement();
        context.filter.equalities(&mut |parts, value| {
            if parts.first().is_some_and(|first| first.is_empty()) || (whole && parts != ["_id"]) {
                return;
            }
            if path::plain(&seed, parts).is_some() {
                clash = Some(parts.join("."));
            }
            path::set(&mut seed, parts, value.clone());
        });
        if let Some(path) = clash {
            return fail(
                Code::NotSingleValueField,
                format!("cannot infer query fields to set, path '{path}' is matched twice"),
            );
        }
        self.apply(&seed, &Context { inserting: true, ..*context })
    }
}

fn keep_id(before: &Document, after: &mut Document, replacing: bool) -> Result<()> {
    let Some(id) = before.get("_id") else { return Ok(()) };
    match after.get("_id") {
        Some(new) if crate::value::compare(id, new).is_eq() => Ok(()),
        Some(_) if replacing => fail(
            Code::ImmutableField,
            "After applying the update, the (immutable) field '_id' was found to have been altered to a different value",
        ),
        _ => fail(
            Code::ImmutableField,
            "Performing an update on the path '_id' would modify the immutable field '_id'",
        ),
    }
}

#[cfg(test)]
mod tests;

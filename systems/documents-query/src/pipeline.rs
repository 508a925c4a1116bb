//! The stages of an aggregation.
//!
//! A pipeline is pushed one document at a time and finished once; stages that need all of their
//! input (`$group`, `$sort`) keep it, the others hand on at once. What lies outside (other
//! collections) is reached through [`Outside`].

use bson::{Bson, Document};

use crate::error::{Code, Result, bad, fail};
use crate::expression::{Expression, MISSING, Scope};
use crate::matching::Filter;
use crate::projection::Projection;
use crate::sort::Order;
use crate::value::{compare, key, type_name};

mod accumulator;
mod group;
mod parse;

pub use accumulator::Accumulator;
use group::Group;

/// Most bytes the documents of one stage that keeps its input may take.
pub const MOST_KEPT_BYTES: usize = 256 << 20;
/// Deepest nesting of pipelines in pipelines.
const DEEPEST: usize = 20;

/// Other collections.
pub trait Outside {
    /// What a pipeline makes of a collection of the same database.
    ///
    /// Errors: the pipeline's, the store's.
    fn read(
        &mut self,
        collection: &str,
        pipeline: &Pipeline,
        variables: &Document,
    ) -> Result<Vec<Document>>;
}

/// Where there is nothing outside.
#[derive(Debug)]
pub struct NoOutside;

impl Outside for NoOutside {
    fn read(&mut self, _: &str, _: &Pipeline, _: &Document) -> Result<Vec<Document>> {
        fail(Code::InvalidOptions, "this pipeline may not read other collections")
    }
}

/// A parsed pipeline, and what its stages keep.
#[derive(Clone, Debug, Default)]
pub struct Pipeline {
    stages: Vec<Stage>,
}

/// Where the results of a pipeline go, other than to the client.
#[derive(Clone, Debug)]
pub enum Sink {
    /// Replaces a collection: database (or the pipeline's), name.
    Out(Option<String>, String),
    /// Merges into a collection.
    Merge(Box<Merge>),
}

/// `$merge`.
#[derive(Clone, Debug)]
pub struct Merge {
    /// Its database, if not the pipeline's.
    pub database: Option<String>,
    /// The collection.
    pub collection: String,
    /// The fields that tell which document it is; empty: `_id`.
    pub on: Vec<String>,
    /// What happens to one that is there: `replace`, `keepExisting`, `merge`, `fail`, `pipeline`.
    pub matched: String,
    /// The pipeline of `whenMatched`.
    pub pipeline: Option<Pipeline>,
    /// Its variables.
    pub variables: Vec<(String, Expression)>,
    /// What happens to one that is not: `insert`, `discard`, `fail`.
    pub unmatched: String,
}

#[derive(Clone, Debug)]
enum Stage {
    Match(Filter),
    Project(Projection),
    Group(Group),
    Sort(Order, Option<usize>, Kept),
    Limit(u64, u64),
    Skip(u64, u64),
    Unwind(Unwind),
    Lookup(Box<Lookup>),
    GraphLookup(Box<GraphLookup>),
    Count(String, u64),
    Facet(Vec<(String, Pipeline, Vec<Document>)>),
    BucketAuto(Box<Group>, usize, Kept),
    Bucket(Box<Group>),
    ReplaceRoot(Expression),
    Sample(usize, Vec<Document>, u64),
    UnionWith(String, Pipeline),
    Redact(Expression),
    Sink(Sink),
    /// A stage that makes documents: handled by whoever runs the pipeline.
    Source(String, Document),
}

/// Documents a stage keeps, and how much they take.
#[derive(Clone, Debug, Default)]
struct Kept {
    documents: Vec<Document>,
    bytes: usize,
}

impl Kept {
    fn push(&mut self, document: Document) -> Result<()> {
        self.bytes += size_of(&document);
        if self.bytes > MOST_KEPT_BYTES {
            return fail(
                Code::ExceededMemoryLimit,
                format!(
                    "a stage would keep more than {MOST_KEPT_BYTES} bytes; narrow its input first"
                ),
            );
        }
        self.documents.push(document);
        Ok(())
    }
}

/// About how many bytes a document takes in memory.
fn size_of(document: &Document) -> usize {
    document.iter().map(|(name, value)| name.len() + 64 + size_of_value(value)).sum()
}

fn size_of_value(value: &Bson) -> usize {
    match value {
        Bson::String(text) => text.len(),
        Bson::Document(inner) => size_of(inner),
        Bson::Array(all) => all.iter().map(|value| 32 + size_of_value(value)).sum(),
        Bson::Binary(binary) => binary.bytes.len(),
        _ => 0,
    }
}

#[derive(Clone, Debug)]
struct Unwind {
    path: Vec<String>,
    index: Option<Vec<String>>,
    keep_empty: bool,
}

#[derive(Clone, Debug)]
struct Lookup {
    from: Option<String>,
    fields: Option<(Vec<String>, Vec<String>)>,
    variables: Vec<(String, Expression)>,
    pipeline: Pipeline,
    into: Vec<String>,
}

#[derive(Clone, Debug)]
struct GraphLookup {
    from: String,
    start: Expression,
    connect_from: Vec<String>,
    connect_to: Vec<String>,
    into: Vec<String>,
    depth: Option<i64>,
    depth_field: Option<Vec<String>>,
    restrict: Option<Filter>,
}

/// Whether more is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Go on.
    More,
    /// A limit was reached: nothing that is pushed would come out.
    Enough,
}

impl Pipeline {
    /// Parses stages.
    ///
    /// Errors: an unknown stage, one that stands where it may not, those of expressions.
    pub fn parse(stages: &[Bson]) -> Result<Self> {
        parse::pipeline(stages, 0)
    }

    /// A pipeline of one filter.
    #[must_use]
    pub fn of_filter(filter: Filter) -> Self {
        Self { stages: vec![Stage::Match(filter)] }
    }

    /// True when there is no stage.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.stages.is_empty()
    }

    /// True when an update may use it.
    #[must_use]
    pub fn is_update(&self) -> bool {
        self.stages.iter().all(|stage| matches!(stage, Stage::Project(_) | Stage::ReplaceRoot(_)))
    }

    /// Takes the filter the pipeline begins with, so that its source can use an index.
    pub fn take_filter(&mut self) -> Option<Filter> {
        match self.stages.first() {
            Some(Stage::Match(_)) => match self.stages.remove(0) {
                Stage::Match(filter) => Some(filter),
                _ => None,
            },
            _ => None,
        }
    }

    /// The order and the limit the pipeline begins with (behind its filter), for its source.
    #[must_use]
    pub fn leading_sort(&self) -> Option<&Order> {
        match self.stages.first() {
            Some(Stage::Sort(order, ..)) => Some(order),
            _ => None,
        }
    }

    /// Takes the sort the pipeline begins with: its source delivers in that order.
    pub fn drop_leading_sort(&mut self) {
        if let Some(Stage::Sort(_, limit, _)) = self.stages.first() {
            match limit {
                Some(limit) => self.stages[0] = Stage::Limit(*limit as u64, 0),
                None => drop(self.stages.remove(0)),
            }
        }
    }

    /// Takes the source stage it begins with (`$changeStream`, `$documents`, `$indexStats`, ...).
    pub fn take_source(&mut self) -> Option<(String, Document)> {
        match self.stages.first() {
            Some(Stage::Source(..)) => match self.stages.remove(0) {
                Stage::Source(name, argument) => Some((name, argument)),
                _ => None,
            },
            _ => None,
        }
    }

    /// Takes the sink it ends with.
    pub fn take_sink(&mut self) -> Option<Sink> {
        match self.stages.last() {
            Some(Stage::Sink(_)) => match self.stages.pop() {
                Some(Stage::Sink(sink)) => Some(sink),
                _ => None,
            },
            _ => None,
        }
    }

    /// True when only the number of its input's documents is asked for.
    #[must_use]
    pub fn counts_only(&self) -> bool {
        matches!(self.stages.first(), Some(Stage::Count(..)))
    }

    /// Top-level fields of its input that it can see; `None` when it may see all.
    #[must_use]
    pub fn needs(&self) -> Option<Vec<&str>> {
        let mut needed = Vec::new();
        for stage in &self.stages {
            match stage {
                Stage::Match(filter) => needed.extend(filter.fields()?),
                Stage::Count(..) => return Some(needed),
                Stage::Group(group) => {
                    return group.fields().map(|fields| {
                        needed.extend(fields);
                        needed
                    });
                }
                Stage::Limit(..) | Stage::Skip(..) => {}
                Stage::Sort(order, ..) => {
                    needed.extend(
                        order
                            .fields
                            .iter()
                            .filter_map(|(path, _)| path.first())
                            .map(String::as_str),
                    );
                }
                Stage::Project(projection) => {
                    return projection.keeps_only().map(|fields| {
                        needed.extend(fields);
                        needed
                    });
                }
                _ => return None,
            }
        }
        None
    }

    /// The same with nothing kept.
    #[must_use]
    pub fn fresh(&self) -> Self {
        self.clone()
    }

    /// Runs a whole input through it.
    ///
    /// Errors: those of its stages.
    pub fn run(
        mut self,
        input: Vec<Document>,
        scope: &Scope<'_>,
        outside: &mut dyn Outside,
    ) -> Result<Vec<Document>> {
        let mut out = Vec::new();
        for document in input {
            if self.push(document, scope, outside, &mut out)? == Flow::Enough {
                break;
            }
        }
        self.finish(scope, outside, &mut out)?;
        Ok(out)
    }

    /// Pushes one document in; what comes out is appended to `out`.
    ///
    /// Errors: those of its stages.
    pub fn push(
        &mut self,
        document: Document,
        scope: &Scope<'_>,
        outside: &mut dyn Outside,
        out: &mut Vec<Document>,
    ) -> Result<Flow> {
        push_through(&mut self.stages, document, scope, outside, out)
    }

    /// Says that there is no more; what was kept comes out.
    ///
    /// Errors: those of its stages.
    pub fn finish(
        &mut self,
        scope: &Scope<'_>,
        outside: &mut dyn Outside,
        out: &mut Vec<Document>,
    ) -> Result<()> {
        for at in 0..self.stages.len() {
            let (done, rest) = self.stages.split_at_mut(at + 1);
            let Some(stage) = done.last_mut() else { continue };
            for document in stage.finish(scope, outside)? {
                if push_through(rest, document, scope, outside, out)? == Flow::Enough {
                    break;
                }
            }
        }
        Ok(())
    }
}

fn push_through(
    stages: &mut [Stage],
    document: Document,
    scope: &Scope<'_>,
    outside: &mut dyn Outside,
    out: &mut Vec<Document>,
) -> Result<Flow> {
    let Some((stage, rest)) = stages.split_first_mut() else {
        out.push(document);
        return Ok(Flow::More);
    };
    match stage {
        Stage::Match(filter) => {
            if filter.matches_in(&document, scope)? {
                push_through(rest, document, scope, outside, out)
            } else {
                Ok(Flow::More)
            }
        }
        Stage::Project(projection) => {
            let new = projection.apply(&document, None, scope)?;
            push_through(rest, new, scope, outside, out)
        }
        Stage::ReplaceRoot(expression) => {
            let new = match expression.evaluate(&scope.rooted(&document))? {
                Bson::Document(new) => new,
                other => {
                    let found = if other == MISSING { "missing" } else { type_name(&other) };
                    return bad(format!(
                        "'newRoot' expression must evaluate to an object, but resulting value was of type: {found}"
                    ));
                }
            };
            push_through(rest, new, scope, outside, out)
        }
        Stage::Limit(limit, passed) => {
            if *passed >= *limit {
                return Ok(Flow::Enough);
            }
            *passed += 1;
            let last = *passed >= *limit;
            let flow = push_through(rest, document, scope, outside, out)?;
            Ok(if last { Flow::Enough } else { flow })
        }
        Stage::Skip(skip, passed) => {
            if *passed < *skip {
                *passed += 1;
                return Ok(Flow::More);
            }
            push_through(rest, document, scope, outside, out)
        }
        Stage::Unwind(unwind) => {
            let unwind = unwind.clone();
            for new in unwind.apply(document) {
                if push_through(rest, new, scope, outside, out)? == Flow::Enough {
                    return Ok(Flow::Enough);
                }
            }
            Ok(Flow::More)
        }
        Stage::Lookup(lookup) => {
            let new = lookup.apply(document, scope, outside)?;
            push_through(rest, new, scope, outside, out)
        }
        Stage::GraphLookup(lookup) => {
            let new = lookup.apply(document, scope, outside)?;
            push_through(rest, new, scope, outside, out)
        }
        Stage::Redact(expression) => match redact(document, expression, scope)? {
            Some(new) => push_through(rest, new, scope, outside, out),
            None => Ok(Flow::More),
        },
        Stage::Group(group) => group.push(&document, scope).map(|()| Flow::More),
        Stage::Bucket(group) => group.push(&document, scope).map(|()| Flow::More),
        Stage::Sort(order, limit, kept) => {
            kept.push(document)?;
            if let Some(limit) = *limit
                && kept.documents.len() >= limit.saturating_mul(2).max(1024)
            {
                order.sort(&mut kept.documents);
                kept.documents.truncate(limit);
                kept.bytes = kept.documents.iter().map(size_of).sum();
            }
            Ok(Flow::More)
        }
        Stage::BucketAuto(_, _, kept) => kept.push(document).map(|()| Flow::More),
        Stage::Count(_, count) => {
            *count += 1;
            Ok(Flow::More)
        }
        Stage::Facet(facets) => {
            for (_, pipeline, results) in facets {
                pipeline.push(document.clone(), scope, outside, results)?;
            }
            Ok(Flow::More)
        }
        Stage::Sample(size, kept, seen) => {
            *seen += 1;
            if kept.len() < *size {
                kept.push(document);
            } else if *size > 0 {
                let at = rand::random_range(0..*seen) as usize;
                if at < *size {
                    kept[at] = document;
                }
            }
            Ok(Flow::More)
        }
        Stage::UnionWith(..) => push_through(rest, document, scope, outside, out),
        Stage::Sink(_) => fail(Code::FailedToParse, "$out and $merge can only be the last stage"),
        Stage::Source(name, _) => fail(
            Code::FailedToParse,
            format!("{name} is only valid as the first stage in a pipeline"),
        ),
    }
}

impl Stage {
    fn finish(&mut self, scope: &Scope<'_>, outside: &mut dyn Outside) -> Result<Vec<Document>> {
        match self {
            Self::Group(group) => Ok(group.finish()),
            Self::Bucket(group) => {
                let mut all = group.finish();
                all.sort_by(|a, b| {
                    compare(
                        a.get("_id").unwrap_or(&Bson::Null),
                        b.get("_id").unwrap_or(&Bson::Null),
                    )
                });
                Ok(all)
            }
            Self::Sort(order, limit, kept) => {
                let mut documents = std::mem::take(kept).documents;
                order.sort(&mut documents);
                documents.truncate(limit.unwrap_or(usize::MAX));
                Ok(documents)
            }
            Self::BucketAuto(group, buckets, kept) => {
                let documents = std::mem::take(kept).documents;
                group::bucket_auto(group, *buckets, documents, scope)
            }
            Self::Count(name, count) => {
                if *count == 0 {
                    return Ok(Vec::new());
                }
                let count = i32::try_from(*count).map_or(Bson::Int64(*count as i64), Bson::Int32);
                Ok(vec![bson::doc! { name.clone(): count }])
            }
            Self::Facet(facets) => {
                let mut whole = Document::new();
                for (name, pipeline, results) in facets {
                    pipeline.finish(scope, outside, results)?;
                    let results = std::mem::take(results).into_iter().map(Bson::Document).collect();
                    whole.insert(name.clone(), Bson::Array(results));
                }
                Ok(vec![whole])
            }
            Self::Sample(_, kept, _) => {
                let mut kept = std::mem::take(kept);
                for at in (1..kept.len()).rev() {
                    kept.swap(at, rand::random_range(0..=at));
                }
                Ok(kept)
            }
            Self::UnionWith(collection, pipeline) => {
                let empty = Document::new();
                outside.read(collection, pipeline, scope.variables().unwrap_or(&empty))
            }
            _ => Ok(Vec::new()),
        }
    }
}

impl Unwind {
    fn apply(&self, document: Document) -> Vec<Document> {
        let found = crate::path::plain(&document, &self.path).cloned();
        let with = |element: Option<&Bson>, at: Option<usize>| {
            let mut new = document.clone();
            if let Some(element) = element {
                crate::path::set(&mut new, &self.path, element.clone());
            }
            if let Some(index) = &self.index {
                let number = at.map_or(Bson::Null, |at| Bson::Int64(at as i64));
                crate::path::set(&mut new, index, number);
            }
            new
        };
        match &found {
            Some(Bson::Array(all)) if !all.is_empty() => {
                all.iter().enumerate().map(|(at, one)| with(Some(one), Some(at))).collect()
            }
            Some(Bson::Array(_)) if self.keep_empty => {
                let mut new = with(None, None);
                remove_plain(&mut new, &self.path);
                vec![new]
            }
            Some(Bson::Null) | None if self.keep_empty => vec![with(None, None)],
            Some(Bson::Array(_) | Bson::Null) | None => Vec::new(),
            Some(_) => vec![with(None, None)],
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
    fn apply(
        &self,
        mut document: Document,
        scope: &Scope<'_>,
        outside: &mut dyn Outside,
    ) -> Result<Document> {
        let mut variables = scope.variables().cloned().unwrap_or_default();
        for (name, expression) in &self.variables {
            let value = expression.evaluate(&scope.rooted(&document))?;
            variables.insert(name.clone(), if value == MISSING { Bson::Null } else { value });
        }
        let mut pipeline = self.pipeline.fresh();
        if let Some((local, foreign)) = &self.fields {
            let value = crate::path::get_in(&document, local).unwrap_or(MISSING);
            pipeline.stages.insert(0, Stage::Match(equal_to(foreign, value)?));
        }
        let found = match &self.from {
            Some(from) => outside.read(from, &pipeline, &variables)?,
            None => pipeline.run(Vec::new(), &Scope::with_variables(&variables), outside)?,
        };
        let found = Bson::Array(found.into_iter().map(Bson::Document).collect());
        crate::path::set(&mut document, &self.into, found);
        Ok(document)
    }
}

impl GraphLookup {
    fn apply(
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
                met.insert(id, found);
            }
            depth += 1;
        }
        let found = Bson::Array(met.into_values().map(Bson::Document).collect());
        crate::path::set(&mut document, &self.into, found);
        Ok(document)
    }
}

fn redact(
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

#[cfg(test)]
mod tests;

//! The stages of an aggregation.
//!
//! A pipeline is pushed one document at a time and finished once; stages that need all of their
//! input (`$group`, `$sort`) keep it, the others hand on at once. What lies outside (other
//! collections) is reached through [`Outside`].

use std::sync::Arc;

use bson::{Bson, Document};

use crate::error::{Code, Result, bad, fail};
use crate::expression::{Expression, MISSING, Scope};
use crate::matching::Filter;
use crate::memory::{Lease, Memory, check_nesting, size_of};
use crate::projection::Projection;
use crate::sort::Order;
use crate::value::{compare, type_name};

mod accumulator;
mod group;
mod joins;
mod parse;

pub use accumulator::Accumulator;
use group::Group;
pub use joins::made;
use joins::{GraphLookup, Lookup, Unwind, redact};

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

    /// What the documents that stages keep are counted against.
    fn memory(&self) -> Arc<Memory> {
        Memory::alone()
    }
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
    Facet(Vec<(String, Pipeline, Vec<Document>)>, Lease),
    BucketAuto(Box<Group>, usize, Kept),
    Bucket(Box<Group>),
    ReplaceRoot(Expression),
    Sample(usize, Kept, u64),
    UnionWith(Option<String>, Pipeline),
    Redact(Expression),
    Sink(Sink),
    /// A stage that makes documents: handled by whoever runs the pipeline.
    Source(String, Document),
}

/// Documents a stage keeps, and how much they take.
#[derive(Clone, Debug, Default)]
struct Kept {
    documents: Vec<Document>,
    lease: Lease,
}

impl Kept {
    fn push(&mut self, document: Document, outside: &dyn Outside) -> Result<()> {
        self.lease.grow(size_of(&document), || outside.memory())?;
        self.documents.push(document);
        Ok(())
    }

    /// Counts again what is left.
    fn recount(&mut self) {
        self.lease.shrink_to(self.documents.iter().map(size_of).sum());
    }
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

/// Pushes a document through stages, from the first on. A loop, so that as many stages as a
/// pipeline may have need no more stack than one; only `$unwind` calls itself.
fn push_through(
    stages: &mut [Stage],
    mut document: Document,
    scope: &Scope<'_>,
    outside: &mut dyn Outside,
    out: &mut Vec<Document>,
) -> Result<Flow> {
    let (mut rest, mut flow) = (stages, Flow::More);
    while let Some((stage, after)) = rest.split_first_mut() {
        rest = after;
        match stage {
            Stage::Match(filter) => {
                if !filter.matches_in(&document, scope)? {
                    return Ok(flow);
                }
            }
            Stage::Project(projection) => {
                document = projection.apply(&document, None, scope)?;
                check_nesting(&document)?;
            }
            Stage::ReplaceRoot(expression) => {
                document = match expression.evaluate(&scope.rooted(&document))? {
                    Bson::Document(new) => new,
                    other => {
                        let found = if other == MISSING { "missing" } else { type_name(&other) };
                        return bad(format!(
                            "'newRoot' expression must evaluate to an object, but resulting value was of type: {found}"
                        ));
                    }
                };
            }
            Stage::Limit(limit, passed) => {
                if *passed >= *limit {
                    return Ok(Flow::Enough);
                }
                *passed += 1;
                if *passed >= *limit {
                    flow = Flow::Enough;
                }
            }
            Stage::Skip(skip, passed) => {
                if *passed < *skip {
                    *passed += 1;
                    return Ok(flow);
                }
            }
            Stage::Unwind(unwind) => {
                let mut lease = Lease::default();
                let unwound = unwind.apply(document, &mut |new| {
                    let before = out.len();
                    let flow = push_through(rest, new, scope, outside, out)?;
                    for made in out.get(before..).unwrap_or_default() {
                        lease.grow(size_of(made), || outside.memory())?;
                    }
                    Ok(flow)
                })?;
                return Ok(if flow == Flow::Enough { flow } else { unwound });
            }
            Stage::Lookup(lookup) => {
                document = lookup.apply(document, scope, outside)?;
                check_nesting(&document)?;
            }
            Stage::GraphLookup(lookup) => {
                document = lookup.apply(document, scope, outside)?;
                check_nesting(&document)?;
            }
            Stage::Redact(expression) => match redact(document, expression, scope)? {
                Some(new) => document = new,
                None => return Ok(flow),
            },
            Stage::Group(group) => return group.push(&document, scope, outside).map(|()| flow),
            Stage::Bucket(group) => return group.push(&document, scope, outside).map(|()| flow),
            Stage::Sort(order, limit, kept) => {
                kept.push(document, outside)?;
                if let Some(limit) = *limit
                    && kept.documents.len() >= limit.saturating_mul(2).max(1024)
                {
                    order.sort(&mut kept.documents);
                    kept.documents.truncate(limit);
                    kept.recount();
                }
                return Ok(flow);
            }
            Stage::BucketAuto(_, _, kept) => return kept.push(document, outside).map(|()| flow),
            Stage::Count(_, count) => {
                *count += 1;
                return Ok(flow);
            }
            Stage::Facet(facets, lease) => {
                for (_, pipeline, results) in facets {
                    let before = results.len();
                    pipeline.push(document.clone(), scope, outside, results)?;
                    for made in results.get(before..).unwrap_or_default() {
                        lease.grow(size_of(made), || outside.memory())?;
                    }
                }
                return Ok(flow);
            }
            Stage::Sample(size, kept, seen) => {
                *seen += 1;
                if kept.documents.len() < *size {
                    kept.push(document, outside)?;
                } else if *size > 0 {
                    let at = rand::random_range(0..*seen) as usize;
                    if at < *size {
                        kept.lease.grow(size_of(&document), || outside.memory())?;
                        let old = std::mem::replace(&mut kept.documents[at], document);
                        kept.lease.shrink(size_of(&old));
                    }
                }
                return Ok(flow);
            }
            Stage::UnionWith(..) => {}
            Stage::Sink(_) => {
                return fail(Code::FailedToParse, "$out and $merge can only be the last stage");
            }
            Stage::Source(name, _) => {
                return fail(
                    Code::FailedToParse,
                    format!("{name} is only valid as the first stage in a pipeline"),
                );
            }
        }
    }
    out.push(document);
    Ok(flow)
}

impl Stage {
    fn finish(&mut self, scope: &Scope<'_>, outside: &mut dyn Outside) -> Result<Vec<Document>> {
        match self {
            Self::Group(group) => nested_within(group.finish()),
            Self::Bucket(group) => {
                let mut all = nested_within(group.finish())?;
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
                // What is kept counts until the buckets are made of it.
                let mut kept = std::mem::take(kept);
                let documents = std::mem::take(&mut kept.documents);
                group::bucket_auto(group, *buckets, documents, scope, outside)
                    .and_then(nested_within)
            }
            Self::Count(name, count) => {
                if *count == 0 {
                    return Ok(Vec::new());
                }
                let count = i32::try_from(*count).map_or(Bson::Int64(*count as i64), Bson::Int32);
                Ok(vec![bson::doc! { name.clone(): count }])
            }
            Self::Facet(facets, _) => {
                let mut whole = Document::new();
                for (name, pipeline, results) in facets {
                    pipeline.finish(scope, outside, results)?;
                    let results = std::mem::take(results).into_iter().map(Bson::Document).collect();
                    whole.insert(name.clone(), Bson::Array(results));
                }
                nested_within(vec![whole])
            }
            Self::Sample(_, kept, _) => {
                let mut kept = std::mem::take(kept).documents;
                for at in (1..kept.len()).rev() {
                    kept.swap(at, rand::random_range(0..=at));
                }
                Ok(kept)
            }
            Self::UnionWith(collection, pipeline) => {
                let empty = Document::new();
                match collection {
                    Some(collection) => {
                        outside.read(collection, pipeline, scope.variables().unwrap_or(&empty))
                    }
                    None => pipeline.fresh().run_made(scope, outside),
                }
            }
            _ => Ok(Vec::new()),
        }
    }
}

/// Documents that a stage made, if none is nested too deeply: each stage may nest what came in.
fn nested_within(documents: Vec<Document>) -> Result<Vec<Document>> {
    documents.iter().try_for_each(check_nesting)?;
    Ok(documents)
}

#[cfg(test)]
mod tests;

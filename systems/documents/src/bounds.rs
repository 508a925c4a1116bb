//! A plan as `explain` shows it: its stages, and the bounds of its indexes in words.

use beeline_documents_query::Filter;
use beeline_documents_query::matching::{Predicate, Sign};
use beeline_documents_query::value::compare;
use bson::{Bson, Document, doc};

use crate::catalog::Direction;
use crate::plan::{Plan, Source, predicates};
use crate::write::shown;

impl Plan {
    /// As `explain` shows it; `source` is the filter as it was given.
    #[must_use]
    pub fn explained(&self, source: &Document, filter: Option<&Filter>) -> Document {
        let mut leaf = match &self.source {
            Source::Nothing => return doc! { "stage": "EOF" },
            Source::Records if self.is_whole() => {
                return doc! { "stage": "COLLSCAN", "filter": source.clone(), "direction": self.direction() };
            }
            Source::Union(plans) => {
                let branches = plans.iter().map(|plan| Bson::Document(plan.leaf(None)));
                doc! { "stage": "OR", "inputStages": branches.collect::<Vec<Bson>>() }
            }
            Source::Records | Source::Index(_) => self.leaf(filter),
        };
        if !matches!(self.source, Source::Union(_)) {
            leaf.insert("stretches", self.stretches.len() as i32);
        }
        doc! { "stage": "FETCH", "filter": source.clone(), "inputStage": leaf }
    }

    fn direction(&self) -> &'static str {
        if self.backward { "backward" } else { "forward" }
    }

    /// The walk through one index.
    fn leaf(&self, filter: Option<&Filter>) -> Document {
        let id = || vec![(vec!["_id".to_owned()], Direction::Up)];
        match &self.source {
            Source::Index(index) => doc! {
                "stage": "IXSCAN",
                "keyPattern": index.key(),
                "indexName": index.name.clone(),
                "isMultiKey": index.multikey,
                "isUnique": index.unique,
                "isSparse": index.sparse,
                "isPartial": index.partial.is_some(),
                "indexVersion": 2,
                "direction": self.direction(),
                "indexBounds": bounds(filter, &index.fields, index.multikey),
            },
            _ => doc! {
                "stage": "IXSCAN",
                "keyPattern": { "_id": 1 },
                "indexName": "_id_",
                "isMultiKey": false,
                "isUnique": true,
                "isSparse": false,
                "isPartial": false,
                "indexVersion": 2,
                "direction": self.direction(),
                "indexBounds": bounds(filter, &id(), false),
            },
        }
    }
}

/// The bounds of each field of an index, as the planner takes them from a filter.
fn bounds(
    filter: Option<&Filter>,
    fields: &[(Vec<String>, Direction)],
    multikey: bool,
) -> Document {
    let mut shown = Document::new();
    let mut open = filter;
    for (at, (path, direction)) in fields.iter().enumerate() {
        let mut all = Vec::new();
        if let Some(filter) = open.filter(|_| !multikey || at == 0) {
            predicates(filter, path, &mut all);
        }
        let (mut intervals, points) = intervals(&all, multikey);
        if intervals.is_empty() {
            intervals = vec![Shown::everything()];
        }
        if !points {
            open = None;
        }
        let words = intervals.iter().map(|one| one.words(*direction == Direction::Down));
        shown.insert(path.join("."), words.map(Bson::String).collect::<Vec<Bson>>());
    }
    shown
}

/// One interval of values; its ends, and whether they belong.
struct Shown {
    low: (Bson, bool),
    high: (Bson, bool),
}

impl Shown {
    fn everything() -> Self {
        Self { low: (Bson::MinKey, true), high: (Bson::MaxKey, true) }
    }

    fn point(value: &Bson) -> Self {
        Self { low: (value.clone(), true), high: (value.clone(), true) }
    }

    fn words(&self, down: bool) -> String {
        let (first, last) = if down { (&self.high, &self.low) } else { (&self.low, &self.high) };
        let left = if first.1 { '[' } else { '(' };
        let right = if last.1 { ']' } else { ')' };
        format!("{left}{}, {}{right}", shown(&first.0), shown(&last.0))
    }
}

/// What a conjunction of predicates leaves of one field, and whether that is single values.
fn intervals(predicates: &[&Predicate], multikey: bool) -> (Vec<Shown>, bool) {
    let mut points: Option<Vec<Shown>> = None;
    let mut range: Option<Shown> = None;
    for predicate in predicates {
        match predicate {
            Predicate::Eq(value) if !matches!(value, Bson::Array(_)) => {
                points = Some(vec![Shown::point(value)]);
            }
            Predicate::In(values, patterns) if patterns.is_empty() && points.is_none() => {
                let mut values: Vec<&Bson> = values.iter().collect();
                values.sort_by(|a, b| compare(a, b));
                points = Some(values.into_iter().map(Shown::point).collect());
            }
            Predicate::Compare(sign, value) if range.is_none() || !multikey => {
                let known = range.take().unwrap_or_else(|| of_type(value));
                let inside = matches!(sign, Sign::Gte | Sign::Lte);
                range = Some(match sign {
                    Sign::Gt | Sign::Gte => Shown { low: (value.clone(), inside), ..known },
                    Sign::Lt | Sign::Lte => Shown { high: (value.clone(), inside), ..known },
                });
            }
            _ => {}
        }
    }
    match points {
        Some(points) => (points, true),
        None => (range.into_iter().collect(), false),
    }
}

/// All values of a value's type.
fn of_type(value: &Bson) -> Shown {
    let (low, high, inside) = match value {
        Bson::Int32(_) | Bson::Int64(_) | Bson::Double(_) | Bson::Decimal128(_) => {
            (Bson::Double(f64::NEG_INFINITY), Bson::Double(f64::INFINITY), true)
        }
        Bson::String(_) => (Bson::String(String::new()), Bson::Document(Document::new()), false),
        Bson::DateTime(_) => (bson::DateTime::MIN.into(), bson::DateTime::MAX.into(), true),
        Bson::Boolean(_) => (false.into(), true.into(), true),
        _ => (Bson::MinKey, Bson::MaxKey, true),
    };
    Shown { low: (low, true), high: (high, inside) }
}

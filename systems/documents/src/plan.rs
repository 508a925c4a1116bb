//! Which way a query takes: by `_id`, through an index, or over the whole collection.
//!
//! Invariant: a plan only ever narrows what is looked at; every document it meets is matched
//! against the whole filter. So a plan may be slow and cannot be wrong, and an index never changes
//! a result.

use std::ops::Bound;
use std::sync::Arc;

use beeline_documents_query::Filter;
use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::matching::{Predicate, Sign};
use beeline_documents_query::path::position;
use beeline_documents_query::sort::Order;
use beeline_documents_query::value::{append_key, key, rank};
use bson::{Bson, Document, doc};

use crate::catalog::{Collection, Direction, Index};
use crate::index::append_part;
use crate::layout::{kind, numbered};
use crate::store::{Stretch, behind};

/// Most stretches of one plan; more values in an `$in` are looked for in each document instead.
const MOST_STRETCHES: usize = 50_000;

/// Rank of regular expressions in the order of BSON.
const REGEX_RANK: u8 = 52;

/// A way through a collection.
#[derive(Clone, Debug)]
pub struct Plan {
    /// What is walked.
    pub source: Source,
    /// The parts of it, in the order they are walked.
    pub stretches: Vec<Stretch>,
    /// From the last to the first.
    pub backward: bool,
    /// What comes out is in the order that was asked for.
    pub sorted: bool,
}

/// What a plan walks.
#[derive(Clone, Debug)]
pub enum Source {
    /// The documents themselves.
    Records,
    /// The entries of an index.
    Index(Arc<Index>),
    /// What the branches of a disjunction walk, each in its own stretches: documents and entries.
    Union(Vec<Plan>),
    /// Nothing can match.
    Nothing,
}

/// A stretch of one field's sortable keys: prefixes, and whether keys that begin with them belong.
#[derive(Clone, Debug)]
struct Interval {
    low: (Vec<u8>, bool),
    high: (Vec<u8>, bool),
}

impl Interval {
    fn point(value: &Bson) -> Self {
        let at = key(value);
        Self { low: (at.clone(), true), high: (at, true) }
    }

    /// Everything of a value's type.
    fn of_type(value: &Bson) -> Self {
        Self::of_rank(rank(value))
    }

    fn of_rank(rank: u8) -> Self {
        let at = vec![rank];
        Self { low: (at.clone(), true), high: (at, true) }
    }

    fn is_point(&self) -> bool {
        self.low == self.high && self.low.0.len() > 1
    }

    /// The keys of an index field below `prefix`.
    fn stretch(&self, prefix: &[u8], direction: Direction) -> Option<Stretch> {
        let turned = |(bytes, inside): &(Vec<u8>, bool)| {
            (bytes.iter().map(|byte| !byte).collect::<Vec<u8>>(), *inside)
        };
        let (low, high) = match direction {
            Direction::Down => (turned(&self.high), turned(&self.low)),
            _ => (self.low.clone(), self.high.clone()),
        };
        let whole = |part: &[u8]| [prefix, part].concat();
        let from = if low.1 { whole(&low.0) } else { behind(&whole(&low.0))? };
        let to = match if high.1 { behind(&whole(&high.0)) } else { Some(whole(&high.0)) } {
            Some(to) => Bound::Excluded(to),
            None => Bound::Unbounded,
        };
        Some(Stretch { from: Bound::Included(from), to })
    }
}

/// The intervals that a predicate allows; `None` when it allows anything.
fn intervals(predicate: &Predicate) -> Option<Vec<Interval>> {
    match predicate {
        Predicate::Eq(Bson::Array(_)) => None,
        Predicate::Eq(value) => Some(vec![Interval::point(value)]),
        Predicate::In(values, patterns)
            if patterns.is_empty() && values.len() <= MOST_STRETCHES =>
        {
            if values.iter().any(|value| matches!(value, Bson::Array(_))) {
                return None;
            }
            let mut points: Vec<Interval> = values.iter().map(Interval::point).collect();
            points.sort_by(|a, b| a.low.cmp(&b.low));
            points.dedup_by(|a, b| a.low == b.low);
            Some(points)
        }
        Predicate::Compare(_, Bson::MinKey | Bson::MaxKey | Bson::Array(_) | Bson::Null) => None,
        // An array may hold elements on both sides, so documents stay whole-typed.
        Predicate::Compare(sign, value) => {
            let at = key(value);
            let all = Interval::of_type(value);
            Some(vec![match sign {
                Sign::Lt => Interval { high: (at, false), ..all },
                Sign::Lte => Interval { high: (at, true), ..all },
                Sign::Gt => Interval { low: (at, false), ..all },
                Sign::Gte => Interval { low: (at, true), ..all },
            }])
        }
        Predicate::Regex(pattern) => {
            let prefix = pattern.prefix()?;
            let mut low = key(&Bson::String(prefix));
            // Without the mark of the end, strings that go on belong too.
            low.truncate(low.len().saturating_sub(2));
            // A stored pattern equal to this one matches as well.
            Some(vec![
                Interval { low: (low.clone(), true), high: (low, true) },
                Interval::of_rank(REGEX_RANK),
            ])
        }
        Predicate::All(parts) => parts.iter().find_map(intervals),
        _ => None,
    }
}

/// The predicates of a conjunction on a path.
pub(crate) fn predicates<'f>(filter: &'f Filter, path: &[String], out: &mut Vec<&'f Predicate>) {
    match filter {
        Filter::And(parts) => parts.iter().for_each(|part| predicates(part, path, out)),
        Filter::Or(parts) if parts.len() == 1 => predicates(&parts[0], path, out),
        // What one element satisfies is satisfied by an entry of that element.
        Filter::Field(own, Predicate::ElementValue(parts)) if own.as_slice() == path => {
            out.extend(parts);
        }
        Filter::Field(own, Predicate::ElementMatch(inner)) => {
            // A number below an array is a position in an element that is an array itself, which an
            // index does not look into.
            if let Some(below) = path.strip_prefix(own.as_slice())
                && below.first().is_some_and(|first| position(first).is_none())
            {
                predicates(inner, below, out);
            }
        }
        Filter::Field(own, predicate) if own.as_slice() == path => out.push(predicate),
        _ => {}
    }
}

/// The best intervals for a path. Where an array may be, only one predicate can be used.
fn bounds(filter: &Filter, path: &[String], multikey: bool) -> Option<Vec<Interval>> {
    let mut all = Vec::new();
    predicates(filter, path, &mut all);
    let mut best: Option<Vec<Interval>> = None;
    let mut range: Option<Interval> = None;
    for predicate in all {
        let Some(found) = intervals(predicate) else { continue };
        let points = found.iter().all(Interval::is_point);
        if points {
            if best.as_ref().is_none_or(|best| found.len() < best.len()) {
                best = Some(found);
            }
        } else if let [one] = found.as_slice() {
            range = Some(match range {
                Some(known) if !multikey => narrower(&known, one),
                Some(known) => known,
                None => one.clone(),
            });
        } else if range.is_none() && best.is_none() {
            best = Some(found);
        }
    }
    best.or_else(|| range.map(|range| vec![range]))
}

fn narrower(a: &Interval, b: &Interval) -> Interval {
    // A bound that is inside beats none of its prefix; the larger low and the smaller high win.
    let low = match a.low.0.cmp(&b.low.0) {
        std::cmp::Ordering::Less => b.low.clone(),
        std::cmp::Ordering::Greater => a.low.clone(),
        std::cmp::Ordering::Equal => (a.low.0.clone(), a.low.1 && b.low.1),
    };
    let end = |high: &(Vec<u8>, bool)| {
        if high.1 { behind(&high.0).unwrap_or_else(|| vec![u8::MAX; 4]) } else { high.0.clone() }
    };
    let high = if end(&a.high) <= end(&b.high) { a.high.clone() } else { b.high.clone() };
    Interval { low, high }
}

/// Chooses a plan.
///
/// Errors: a hint that names no index.
pub fn choose(
    collection: &Collection,
    filter: &Filter,
    order: Option<&Order>,
    hint: Option<&Bson>,
) -> Result<Plan> {
    let order = order.filter(|order| !order.is_empty());
    if matches!(filter, Filter::Constant(false)) {
        return Ok(Plan {
            source: Source::Nothing,
            stretches: Vec::new(),
            backward: false,
            sorted: true,
        });
    }
    if let Some(hint) = hint {
        return hinted(collection, filter, order, hint);
    }
    if collection.capped.is_none()
        && let Some(plan) = by_id(collection, filter, order)
        && (plan.sorted || plan.stretches.len() <= 1)
        && bounds(filter, &["_id".to_owned()], false)
            .is_some_and(|all| all.iter().all(Interval::is_point))
    {
        return Ok(plan);
    }
    let mut best: Option<(usize, Plan)> = None;
    for index in &collection.indexes {
        if index.ready
            && !index.hidden
            && let Some((score, plan)) = by_index(index, filter, order)
            && score > 0
            && best.as_ref().is_none_or(|(known, _)| score > *known)
        {
            best = Some((score, plan));
        }
    }
    if collection.capped.is_none()
        && let Some(plan) = by_id(collection, filter, order)
        && best.as_ref().is_none_or(|(score, _)| *score < 20)
    {
        let bounded = bounds(filter, &["_id".to_owned()], false).is_some();
        if bounded || plan.sorted && order.is_some() {
            return Ok(plan);
        }
    }
    if let Some((_, plan)) = best {
        if let Source::Index(index) = &plan.source {
            index.uses.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
        return Ok(plan);
    }
    if let Some(branches) = disjunction(filter)
        && let Some(plan) = union(collection, branches, order)?
    {
        return Ok(plan);
    }
    Ok(whole(collection, order))
}

/// The branches of a filter of which every selected document satisfies one.
fn disjunction(filter: &Filter) -> Option<&[Filter]> {
    match filter {
        Filter::Or(branches) => Some(branches),
        Filter::And(parts) => parts.iter().find_map(disjunction),
        _ => None,
    }
}

/// A plan for each branch, one behind the other; `None` where a branch needs the whole collection.
fn union(
    collection: &Collection,
    branches: &[Filter],
    order: Option<&Order>,
) -> Result<Option<Plan>> {
    if collection.capped.is_some() {
        return Ok(None);
    }
    let (mut plans, mut stretches) = (Vec::with_capacity(branches.len()), Vec::new());
    for branch in branches {
        let plan = choose(collection, branch, None, None)?;
        if plan.is_whole() {
            return Ok(None);
        }
        match plan.source {
            Source::Nothing => continue,
            Source::Union(below) => plans.extend(below),
            _ => plans.push(plan.clone()),
        }
        stretches.extend(plan.stretches);
        if stretches.len() > MOST_STRETCHES {
            return Ok(None);
        }
    }
    let sorted = order.is_none();
    let mut plan = Plan { source: Source::Union(plans), stretches, backward: false, sorted };
    plan.arrange();
    Ok(Some(plan))
}

/// The whole collection.
fn whole(collection: &Collection, order: Option<&Order>) -> Plan {
    let natural = order.and_then(|order| match order.fields.as_slice() {
        [(path, down)] if path.as_slice() == ["$natural"] => Some(*down),
        _ => None,
    });
    Plan {
        source: Source::Records,
        stretches: vec![Stretch::of_prefix(&numbered(kind::RECORD, collection.id, &[]))],
        backward: natural.unwrap_or(false),
        sorted: order.is_none() || natural.is_some(),
    }
}

fn hinted(
    collection: &Collection,
    filter: &Filter,
    order: Option<&Order>,
    hint: &Bson,
) -> Result<Plan> {
    let named = |index: &Index| match hint {
        Bson::String(name) => index.name == *name,
        Bson::Document(key) => index.key() == *key,
        _ => false,
    };
    match hint {
        Bson::Document(key) if key.contains_key("$natural") => {
            let mut plan = whole(collection, order);
            if order.is_none() {
                plan.backward =
                    key.get("$natural").and_then(beeline_documents_query::value::integral)
                        == Some(-1);
            }
            return Ok(plan);
        }
        Bson::Document(key) if key.is_empty() => return choose(collection, filter, order, None),
        Bson::String(name) if name == "_id_" => {
            return Ok(by_id(collection, filter, order).unwrap_or_else(|| whole(collection, order)));
        }
        Bson::Document(key) if *key == doc! { "_id": 1 } => {
            return Ok(by_id(collection, filter, order).unwrap_or_else(|| whole(collection, order)));
        }
        _ => {}
    }
    let Some(index) =
        collection.indexes.iter().find(|index| index.ready && !index.hidden && named(index))
    else {
        return fail(
            Code::BadValue,
            "error processing query: planner returned error :: caused by :: hint provided does not correspond to an existing index",
        );
    };
    // An index without all documents serves a hint too: what it lacks is not found, as with MongoDB.
    let plan = by_index_with(index, filter, order, true);
    match plan {
        Some((_, plan)) => {
            index.uses.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Ok(plan)
        }
        None => Ok(whole(collection, order)),
    }
}

fn by_id(collection: &Collection, filter: &Filter, order: Option<&Order>) -> Option<Plan> {
    if collection.capped.is_some() {
        return None;
    }
    let prefix = numbered(kind::RECORD, collection.id, &[]);
    let path = ["_id".to_owned()];
    let backward = match order.map(|order| order.fields.as_slice()) {
        Some([(field, down)]) if field.as_slice() == path => Some(*down),
        _ => None,
    };
    let stretches: Vec<Stretch> = match bounds(filter, &path, false) {
        Some(found) => found.iter().filter_map(|one| one.stretch(&prefix, Direction::Up)).collect(),
        None if backward.is_some() => vec![Stretch::of_prefix(&prefix)],
        None => return None,
    };
    let mut plan = Plan {
        source: Source::Records,
        stretches,
        backward: backward.unwrap_or(false),
        sorted: order.is_none() || backward.is_some(),
    };
    plan.arrange();
    Some(plan)
}

fn by_index(index: &Arc<Index>, filter: &Filter, order: Option<&Order>) -> Option<(usize, Plan)> {
    by_index_with(index, filter, order, false)
}

fn by_index_with(
    index: &Arc<Index>,
    filter: &Filter,
    order: Option<&Order>,
    forced: bool,
) -> Option<(usize, Plan)> {
    if !forced && !covers(index, filter) {
        return None;
    }
    let mut prefixes = vec![numbered(kind::INDEX, index.id, &[])];
    let mut used = 0;
    let mut equal = 0;
    let mut last: Option<(Vec<Interval>, Direction)> = None;
    for (at, (path, direction)) in index.fields.iter().enumerate() {
        // Where arrays are, bounds of two fields may be met by different elements.
        if index.multikey && at > 0 {
            break;
        }
        let Some(found) = bounds(filter, path, index.multikey) else { break };
        // Each value of one field with each of another would be too many: those before are enough.
        if prefixes.len() * found.len() > MOST_STRETCHES {
            break;
        }
        used += 1;
        let points = found.iter().all(Interval::is_point);
        if *direction == Direction::Hashed {
            if !points {
                used -= 1;
                break;
            }
            let mut values = Vec::new();
            predicate_values(filter, path, &mut values)?;
            prefixes = product(
                &prefixes,
                values.iter().map(|value| {
                    let mut part = Vec::new();
                    append_part(&mut part, value, Direction::Hashed);
                    part
                }),
            );
            equal += 1;
            continue;
        }
        if points {
            prefixes = product(
                &prefixes,
                found.iter().map(|one| match direction {
                    Direction::Down => one.low.0.iter().map(|byte| !byte).collect(),
                    _ => one.low.0.clone(),
                }),
            );
            equal += 1;
            continue;
        }
        last = Some((found, *direction));
        break;
    }
    let stretches: Vec<Stretch> = match &last {
        None => prefixes.iter().map(|prefix| Stretch::of_prefix(prefix)).collect(),
        Some((found, direction)) => prefixes
            .iter()
            .flat_map(|prefix| found.iter().filter_map(|one| one.stretch(prefix, *direction)))
            .collect(),
    };
    let direction = order.and_then(|order| delivers(index, order, equal, prefixes.len() == 1));
    let sorted = order.is_none() || direction.is_some();
    if used == 0 && direction.is_none() && !forced {
        return None;
    }
    let bound = usize::from(last.is_some());
    let score = equal * 20
        + bound * 8
        + usize::from(direction.is_some()) * 6
        + usize::from(index.unique && equal == index.fields.len()) * 4;
    let mut plan = Plan {
        source: Source::Index(Arc::clone(index)),
        stretches,
        backward: direction.unwrap_or(false),
        sorted,
    };
    plan.arrange();
    Some((score, plan))
}

impl Plan {
    /// True when it walks all documents.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.source, Source::Records)
            && self.stretches.len() == 1
            && matches!((&self.stretches[0].from, &self.stretches[0].to), (Bound::Included(from), Bound::Excluded(_)) if from.len() == crate::layout::NUMBERED)
    }

    /// Every index whose entries it walks.
    pub fn indexes(&self) -> Box<dyn Iterator<Item = &Arc<Index>> + '_> {
        match &self.source {
            Source::Index(index) => Box::new(std::iter::once(index)),
            Source::Union(plans) => Box::new(plans.iter().flat_map(Self::indexes)),
            Source::Records | Source::Nothing => Box::new(std::iter::empty()),
        }
    }

    fn arrange(&mut self) {
        let start = |stretch: &Stretch| match &stretch.from {
            Bound::Included(from) | Bound::Excluded(from) => from.clone(),
            Bound::Unbounded => Vec::new(),
        };
        self.stretches.retain(|stretch| !stretch.is_empty());
        self.stretches.sort_by_cached_key(start);
        self.stretches.dedup();
        if self.backward {
            self.stretches.reverse();
        }
    }
}

fn product(prefixes: &[Vec<u8>], parts: impl Iterator<Item = Vec<u8>> + Clone) -> Vec<Vec<u8>> {
    prefixes
        .iter()
        .flat_map(|prefix| parts.clone().map(move |part| [prefix.as_slice(), &part].concat()))
        .collect()
}

fn predicate_values(filter: &Filter, path: &[String], out: &mut Vec<Bson>) -> Option<()> {
    let mut all = Vec::new();
    predicates(filter, path, &mut all);
    for predicate in all {
        match predicate {
            Predicate::Eq(value) => {
                *out = vec![value.clone()];
                return Some(());
            }
            Predicate::In(values, patterns) if patterns.is_empty() => *out = values.clone(),
            _ => {}
        }
    }
    (!out.is_empty()).then_some(())
}

/// Whether every document the filter selects has an entry.
fn covers(index: &Index, filter: &Filter) -> bool {
    if let Some((source, _)) = &index.partial
        && !implies(filter, source)
    {
        return false;
    }
    !index.sparse
        || index.fields.iter().any(|(path, _)| {
            let mut all = Vec::new();
            predicates(filter, path, &mut all);
            all.iter().any(|predicate| match predicate {
                Predicate::Eq(value) => *value != Bson::Null,
                Predicate::In(values, _) => values.iter().all(|value| *value != Bson::Null),
                Predicate::Compare(_, value) => {
                    !matches!(value, Bson::Null | Bson::MinKey | Bson::MaxKey)
                }
                Predicate::Exists | Predicate::Regex(_) => true,
                _ => false,
            })
        })
}

/// Whether every part of the partial filter follows from a part of the query.
fn implies(filter: &Filter, partial: &Document) -> bool {
    let Ok(wanted) = Filter::parse(partial) else { return false };
    let parts = match &wanted {
        Filter::And(parts) => parts.as_slice(),
        one => std::slice::from_ref(one),
    };
    parts.iter().all(|part| {
        let Filter::Field(path, needed) = part else { return false };
        let mut given = Vec::new();
        predicates(filter, path, &mut given);
        given.iter().any(|given| follows(given, needed))
    })
}

fn follows(given: &Predicate, needed: &Predicate) -> bool {
    match (given, needed) {
        (Predicate::Eq(value), needed) if !matches!(value, Bson::Null | Bson::Array(_)) => {
            needed.on_element(value)
        }
        (Predicate::Compare(sign, value), Predicate::Compare(wanted, bound)) => {
            let inside = needed.on_element(value);
            match (sign, wanted) {
                (Sign::Gt, Sign::Gt) => {
                    inside || rank(value) == rank(bound) && key(value) == key(bound)
                }
                (Sign::Lt, Sign::Lt) => {
                    inside || rank(value) == rank(bound) && key(value) == key(bound)
                }
                (Sign::Gt | Sign::Gte, Sign::Gt | Sign::Gte)
                | (Sign::Lt | Sign::Lte, Sign::Lt | Sign::Lte) => inside,
                _ => false,
            }
        }
        (Predicate::Compare(_, value), Predicate::Exists) => !matches!(value, Bson::Null),
        (Predicate::Exists | Predicate::Regex(_), Predicate::Exists) => true,
        (Predicate::In(values, patterns), needed) => {
            patterns.is_empty()
                && values.iter().all(|value| {
                    !matches!(value, Bson::Null | Bson::Array(_)) && needed.on_element(value)
                })
        }
        _ => false,
    }
}

/// Whether an index delivers an order behind `equal` fields that have one value: backward or not.
fn delivers(index: &Index, order: &Order, equal: usize, single: bool) -> Option<bool> {
    if index.multikey || index.sparse && equal == 0 || index.partial.is_some() && equal == 0 {
        return None;
    }
    let same = |at: usize, (path, down): &(Vec<String>, bool)| -> Option<bool> {
        let (own, direction) = index.fields.get(at)?;
        (own == path && *direction != Direction::Hashed)
            .then_some((*direction == Direction::Down) != *down)
    };
    // Fields of one value may stand before, or be named in the order.
    let skip = if single { 0..=equal } else { 0..=0 };
    skip.into_iter().find_map(|start| {
        let mut backward = None;
        for (at, field) in order.fields.iter().enumerate() {
            let turned = same(start + at, field)?;
            if start + at < equal && single {
                continue;
            }
            if *backward.get_or_insert(turned) != turned {
                return None;
            }
        }
        Some(backward.unwrap_or(false))
    })
}

/// The key of the record that `_id` names.
#[must_use]
pub fn record_key(collection: &Collection, id: &Bson) -> Vec<u8> {
    let mut at = numbered(kind::RECORD, collection.id, &[]);
    append_key(&mut at, id);
    at
}

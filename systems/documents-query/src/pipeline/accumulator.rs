//! Accumulators: what `$group` computes of each group.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use bson::{Bson, Document};

use crate::decimal::Operation;
use crate::error::{Code, Result, bad, fail};
use crate::expression::{Expression, MISSING, Scope, deviation, is_nullish};
use crate::memory::size_of_value;
use crate::sort::Order;
use crate::value::{arithmetic, compare, integral, is_number, key, number};

/// Which accumulator, and its parts that do not change from group to group.
#[derive(Clone, Debug)]
pub struct Accumulator {
    kind: Kind,
    argument: Expression,
    order: Order,
    count: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Sum,
    Avg,
    Min,
    Max,
    First,
    Last,
    Push,
    AddToSet,
    StdDevPop,
    StdDevSamp,
    MergeObjects,
    FirstN,
    LastN,
    MinN,
    MaxN,
    Top,
    TopN,
    Bottom,
    BottomN,
}

/// What an accumulator knows of one group.
#[derive(Clone, Debug)]
pub enum State {
    /// A value, absent at first.
    Value(Option<Bson>),
    /// A sum and how many there were.
    Sum(Bson, i64),
    /// All values.
    Values(Vec<Bson>),
    /// Values without repetition.
    Set(BTreeSet<Vec<u8>>, Vec<Bson>),
    /// Numbers.
    Numbers(Vec<f64>),
    /// A document.
    Merged(Document),
    /// Values with what they are sorted by.
    Sorted(Vec<(Vec<Bson>, Bson)>),
}

impl Accumulator {
    /// Parses `{ $sum: expression }`.
    ///
    /// Errors: an unknown accumulator, a wrong argument.
    pub fn parse(field: &str, source: &Bson) -> Result<Self> {
        let (name, argument) = match source {
            Bson::Document(inner) if inner.len() == 1 => match inner.iter().next() {
                Some(pair) => pair,
                None => return fail(Code::GroupField, "an accumulator is missing"),
            },
            Bson::Document(inner) if inner.len() > 1 => {
                return fail(
                    Code::GroupField,
                    format!("The field '{field}' must specify one accumulator"),
                );
            }
            _ => {
                return fail(
                    Code::GroupField,
                    format!("The field '{field}' must be an accumulator object"),
                );
            }
        };
        let kind = match name.as_str() {
            "$sum" => Kind::Sum,
            "$avg" => Kind::Avg,
            "$min" => Kind::Min,
            "$max" => Kind::Max,
            "$first" => Kind::First,
            "$last" => Kind::Last,
            "$push" => Kind::Push,
            "$addToSet" => Kind::AddToSet,
            "$stdDevPop" => Kind::StdDevPop,
            "$stdDevSamp" => Kind::StdDevSamp,
            "$mergeObjects" => Kind::MergeObjects,
            "$count" => {
                return Ok(Self {
                    kind: Kind::Sum,
                    argument: Expression::Literal(Bson::Int32(1)),
                    order: Order::default(),
                    count: 0,
                });
            }
            "$firstN" => Kind::FirstN,
            "$lastN" => Kind::LastN,
            "$minN" => Kind::MinN,
            "$maxN" => Kind::MaxN,
            "$top" => Kind::Top,
            "$topN" => Kind::TopN,
            "$bottom" => Kind::Bottom,
            "$bottomN" => Kind::BottomN,
            "$accumulator" => {
                return fail(
                    Code::CommandNotSupported,
                    "$accumulator is not supported: this server runs no JavaScript",
                );
            }
            other => {
                return fail(Code::GroupAccumulator, format!("unknown group operator '{other}'"));
            }
        };
        let named = matches!(
            kind,
            Kind::FirstN
                | Kind::LastN
                | Kind::MinN
                | Kind::MaxN
                | Kind::Top
                | Kind::TopN
                | Kind::Bottom
                | Kind::BottomN
        );
        if !named {
            return Ok(Self {
                kind,
                argument: Expression::parse(argument)?,
                order: Order::default(),
                count: 0,
            });
        }
        let Bson::Document(given) = argument else { return bad(format!("{name} takes an object")) };
        let input = given.get("input").or_else(|| given.get("output"));
        let Some(input) = input else { return bad(format!("{name} lacks its input")) };
        let order = match given.get("sortBy") {
            Some(Bson::Document(order)) => Order::parse(order)?,
            _ if matches!(kind, Kind::Top | Kind::TopN | Kind::Bottom | Kind::BottomN) => {
                return bad(format!("Missing value for 'sortBy' in {name}"));
            }
            _ => Order::default(),
        };
        let count = match given.get("n").map(integral) {
            Some(Some(count)) if count > 0 => count as usize,
            None if matches!(kind, Kind::Top | Kind::Bottom) => 1,
            _ => return bad(format!("'n' must be greater than 0 in {name}")),
        };
        Ok(Self { kind, argument: Expression::parse(input)?, order, count })
    }

    /// What it is computed from.
    #[must_use]
    pub fn argument(&self) -> &Expression {
        &self.argument
    }

    /// True when it looks only at its argument.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.order.is_empty()
    }

    /// Of no documents.
    #[must_use]
    pub fn start(&self) -> State {
        match self.kind {
            Kind::Sum | Kind::Avg => State::Sum(Bson::Int32(0), 0),
            Kind::Min | Kind::Max | Kind::First | Kind::Last => State::Value(None),
            Kind::Push | Kind::FirstN | Kind::LastN | Kind::MinN | Kind::MaxN => {
                State::Values(Vec::new())
            }
            Kind::AddToSet => State::Set(BTreeSet::new(), Vec::new()),
            Kind::StdDevPop | Kind::StdDevSamp => State::Numbers(Vec::new()),
            Kind::MergeObjects => State::Merged(Document::new()),
            Kind::Top | Kind::TopN | Kind::Bottom | Kind::BottomN => State::Sorted(Vec::new()),
        }
    }

    /// With one document more; returns about how many bytes the state grew by.
    ///
    /// Errors: those of its expression.
    pub fn add(&self, state: &mut State, document: &Document, scope: &Scope<'_>) -> Result<usize> {
        if matches!((&*state, self.kind), (State::Value(Some(_)), Kind::First)) {
            return Ok(0);
        }
        let value = self.argument.evaluate(&scope.rooted(document))?;
        // An upper bound: what takes the place of another value is counted too.
        let mut grown = 0;
        match state {
            State::Sum(sum, count) => {
                if is_number(&value) {
                    *sum = arithmetic(sum, &value, Operation::Add, false).unwrap_or(Bson::Null);
                    *count += 1;
                }
            }
            State::Value(best) => match self.kind {
                Kind::First | Kind::Last => {
                    let old = best.as_ref().map_or(0, size_of_value);
                    grown = size_of_value(&value).saturating_sub(old);
                    *best = Some(if value == MISSING { Bson::Null } else { value })
                }
                _ if is_nullish(&value) => {}
                kind => {
                    let wanted = if kind == Kind::Max { Ordering::Greater } else { Ordering::Less };
                    if best.as_ref().is_none_or(|best| compare(&value, best) == wanted) {
                        let old = best.as_ref().map_or(0, size_of_value);
                        grown = size_of_value(&value).saturating_sub(old);
                        *best = Some(value);
                    }
                }
            },
            State::Values(all) => {
                match self.kind {
                    Kind::Push if value == MISSING => return Ok(0),
                    Kind::MinN | Kind::MaxN if is_nullish(&value) => return Ok(0),
                    Kind::FirstN if all.len() >= self.count => return Ok(0),
                    _ => {}
                }
                if self.kind != Kind::LastN || all.len() < self.count {
                    grown = 112 + size_of_value(&value);
                }
                all.push(if value == MISSING { Bson::Null } else { value });
                if self.kind == Kind::LastN && all.len() > self.count {
                    all.remove(0);
                }
            }
            State::Set(seen, all) => {
                let place = key(&value);
                let bytes = place.len() + 160 + size_of_value(&value);
                if value != MISSING && seen.insert(place) {
                    grown = bytes;
                    all.push(value);
                }
            }
            State::Numbers(all) => {
                grown = size_of::<f64>();
                all.extend(number(&value));
            }
            State::Merged(merged) => match value {
                Bson::Document(inner) => {
                    let before = crate::memory::size_of(merged);
                    merged.extend(inner);
                    grown = crate::memory::size_of(merged).saturating_sub(before);
                }
                value if is_nullish(&value) => {}
                _ => return bad("$mergeObjects requires object inputs"),
            },
            State::Sorted(all) => {
                if all.len() <= self.count {
                    grown = 256 + size_of_value(&value);
                }
                all.push((
                    self.order.key(document),
                    if value == MISSING { Bson::Null } else { value },
                ));
                if all.len() > self.count.saturating_mul(2).max(64) {
                    self.trim(all);
                }
            }
        }
        Ok(grown)
    }

    fn trim(&self, all: &mut Vec<(Vec<Bson>, Bson)>) {
        all.sort_by(|(a, _), (b, _)| self.order.compare_keys(a, b));
        if matches!(self.kind, Kind::Bottom | Kind::BottomN) {
            all.drain(..all.len().saturating_sub(self.count));
        } else {
            all.truncate(self.count);
        }
    }

    /// The result.
    #[must_use]
    pub fn result(&self, state: State) -> Bson {
        match state {
            State::Sum(sum, _) if self.kind == Kind::Sum => sum,
            State::Sum(_, 0) => Bson::Null,
            State::Sum(sum, count) => {
                arithmetic(&sum, &Bson::Int64(count), Operation::Divide, false)
                    .unwrap_or(Bson::Null)
            }
            State::Value(value) => value.unwrap_or(Bson::Null),
            State::Values(mut all) => {
                match self.kind {
                    Kind::MinN => all.sort_by(compare),
                    Kind::MaxN => all.sort_by(|a, b| compare(b, a)),
                    _ => return Bson::Array(all),
                }
                all.truncate(self.count);
                Bson::Array(all)
            }
            State::Set(_, all) => Bson::Array(all),
            State::Numbers(all) => deviation(&all, self.kind == Kind::StdDevSamp),
            State::Merged(merged) => Bson::Document(merged),
            State::Sorted(mut all) => {
                self.trim(&mut all);
                let mut values = all.into_iter().map(|(_, value)| value);
                match self.kind {
                    Kind::Top => values.next().unwrap_or(Bson::Null),
                    Kind::Bottom => values.next_back().unwrap_or(Bson::Null),
                    _ => Bson::Array(values.collect()),
                }
            }
        }
    }
}

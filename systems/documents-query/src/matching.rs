//! Which documents a filter selects.
//!
//! A filter is parsed once into [`Filter`]; [`Filter::matches`] allocates nothing for plain
//! comparisons. Comparisons look at one kind of type only (type bracketing), arrays are looked
//! into, null stands for missing too.

use std::cmp::Ordering;

use bson::{Bson, Document};

use crate::error::{Code, Result, bad, fail};
use crate::expression::{Expression, Scope};
use crate::path;
use crate::regex::Pattern;
use crate::schema::Schema;
use crate::value::{compare, integral, is_number, number, rank, truthy, type_number};

mod parse;

pub use parse::type_codes;

/// Deepest nesting of a filter.
const DEEPEST: usize = 100;

/// A parsed filter.
#[derive(Clone, Debug)]
pub enum Filter {
    /// All of them.
    And(Vec<Filter>),
    /// Any of them.
    Or(Vec<Filter>),
    /// None of them.
    Nor(Vec<Filter>),
    /// A predicate on what a path reaches.
    Field(Vec<String>, Predicate),
    /// An aggregation expression that must be true.
    Expression(Box<Expression>),
    /// A schema the document must follow.
    Schema(Box<Schema>),
    /// Nothing or everything.
    Constant(bool),
}

/// What a value must be.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "named after MongoDB's operators")]
pub enum Predicate {
    Eq(Bson),
    Compare(Sign, Bson),
    /// One of the values, which are in the order of BSON, or what a pattern matches.
    In(Vec<Bson>, Vec<Pattern>),
    Exists,
    Type(Vec<i32>, bool),
    Mod(i64, i64),
    Regex(Pattern),
    Size(i64),
    Not(Box<Predicate>),
    All(Vec<Predicate>),
    ElementMatch(Box<Filter>),
    ElementValue(Vec<Predicate>),
    Bits(BitTest, Vec<u8>),
}

/// The four comparisons.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named after MongoDB's operators")]
pub enum Sign {
    Lt,
    Lte,
    Gt,
    Gte,
}

impl Sign {
    fn holds(self, order: Ordering) -> bool {
        match self {
            Self::Lt => order == Ordering::Less,
            Self::Lte => order != Ordering::Greater,
            Self::Gt => order == Ordering::Greater,
            Self::Gte => order != Ordering::Less,
        }
    }
}

/// The four questions about bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "named after MongoDB's operators")]
pub enum BitTest {
    AllSet,
    AllClear,
    AnySet,
    AnyClear,
}

impl Filter {
    /// Parses a filter. `variables` are those of a command's `let`.
    ///
    /// Errors: what MongoDB refuses, with its code.
    pub fn parse(filter: &Document) -> Result<Self> {
        parse::filter(filter, 0)
    }

    /// A filter that selects everything.
    #[must_use]
    pub fn all() -> Self {
        Self::And(Vec::new())
    }

    /// True when it selects everything.
    #[must_use]
    pub fn is_all(&self) -> bool {
        matches!(self, Self::And(parts) if parts.is_empty()) || matches!(self, Self::Constant(true))
    }

    /// Whether it selects the document. An expression that fails selects nothing.
    #[must_use]
    pub fn matches(&self, document: &Document) -> bool {
        self.matches_in(document, &Scope::default()).unwrap_or(false)
    }

    /// Whether it selects the document, with variables.
    ///
    /// Errors: those of an expression in it.
    pub fn matches_in(&self, document: &Document, scope: &Scope) -> Result<bool> {
        Ok(match self {
            Self::And(parts) => {
                for part in parts {
                    if !part.matches_in(document, scope)? {
                        return Ok(false);
                    }
                }
                true
            }
            Self::Or(parts) => any(parts, document, scope)?,
            Self::Nor(parts) => !any(parts, document, scope)?,
            Self::Field(path, predicate) => predicate.on(document, path),
            Self::Expression(expression) => truthy(&expression.evaluate(&scope.rooted(document))?),
            Self::Schema(schema) => schema.allows(document),
            Self::Constant(value) => *value,
        })
    }

    /// The values that equality on `field` allows, from the conjunction alone; for an upsert.
    pub fn equalities<'a>(&'a self, visit: &mut dyn FnMut(&'a [String], &'a Bson)) {
        match self {
            Self::And(parts) => parts.iter().for_each(|part| part.equalities(visit)),
            Self::Or(parts) if parts.len() == 1 => parts[0].equalities(visit),
            Self::Field(path, predicate) => match predicate {
                Predicate::Eq(value) => visit(path, value),
                Predicate::In(values, patterns) if patterns.is_empty() && values.len() == 1 => {
                    visit(path, &values[0]);
                }
                Predicate::All(parts) => {
                    for part in parts {
                        if let (Predicate::Eq(value), 1) = (part, parts.len()) {
                            visit(path, value);
                        }
                    }
                }
                _ => {}
            },
            _ => {}
        }
    }

    /// The filter with the equalities that its expressions imply beside it, for the choice of an
    /// index; `None` where they imply none. It selects what the filter selects and may select more.
    #[must_use]
    pub fn implied(&self, scope: &Scope<'_>) -> Option<Self> {
        let mut all = Vec::new();
        self.implies(scope, &mut all);
        (!all.is_empty()).then(|| {
            all.push(self.clone());
            Self::And(all)
        })
    }

    fn implies(&self, scope: &Scope<'_>, out: &mut Vec<Self>) {
        match self {
            Self::And(parts) => parts.iter().for_each(|part| part.implies(scope, out)),
            Self::Expression(expression) => expression.equalities(scope, &mut |path, value| {
                out.push(Self::Field(path.to_vec(), Predicate::Eq(value)));
            }),
            _ => {}
        }
    }

    /// Top-level fields the filter looks at; `None` when it may look at all.
    #[must_use]
    pub fn fields(&self) -> Option<Vec<&str>> {
        match self {
            Self::And(parts) | Self::Or(parts) | Self::Nor(parts) => {
                let mut all = Vec::new();
                for part in parts {
                    all.extend(part.fields()?);
                }
                Some(all)
            }
            Self::Field(path, _) => Some(path.first().map(String::as_str).into_iter().collect()),
            Self::Constant(_) => Some(Vec::new()),
            Self::Expression(_) | Self::Schema(_) => None,
        }
    }

    /// What `$` stands for in a path that begins with `array`: the position of the first element
    /// of that array that satisfied the filter. Where the filter says nothing of that array, the
    /// position in another array that the filter looks into, as with MongoDB.
    #[must_use]
    pub fn position(&self, document: &Document, array: &[String]) -> Option<usize> {
        self.position_in(document, Some(array)).or_else(|| self.position_in(document, None))
    }

    fn position_in(&self, document: &Document, array: Option<&[String]>) -> Option<usize> {
        match self {
            Self::And(parts) => parts.iter().find_map(|part| part.position_in(document, array)),
            Self::Or(parts) => parts
                .iter()
                .filter(|part| part.matches(document))
                .find_map(|part| part.position_in(document, array)),
            Self::Field(field, predicate) => {
                let array = match array {
                    Some(array) => field.starts_with(array).then_some(array)?,
                    None => outermost_array(document, field)?,
                };
                let Some(Bson::Array(elements)) = path::plain(document, array) else { return None };
                let rest = &field[array.len()..];
                elements.iter().position(|element| match element {
                    _ if rest.is_empty() => predicate.picks(element),
                    Bson::Document(inner) => predicate.on(inner, rest),
                    _ => false,
                })
            }
            _ => None,
        }
    }
}

/// The part of a path at which it first meets an array.
fn outermost_array<'a>(document: &Document, field: &'a [String]) -> Option<&'a [String]> {
    (1..=field.len())
        .map(|length| &field[..length])
        .find(|part| matches!(path::plain(document, part), Some(Bson::Array(_))))
}

fn any(parts: &[Filter], document: &Document, scope: &Scope) -> Result<bool> {
    for part in parts {
        if part.matches_in(document, scope)? {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Predicate {
    /// On what `path` reaches in a document.
    #[must_use]
    pub fn on(&self, document: &Document, path: &[String]) -> bool {
        match self {
            Self::Not(inner) => !inner.on(document, path),
            Self::All(parts) => parts.iter().all(|part| part.on(document, path)),
            // Null stands for missing; a path that reaches nothing at all, through an array of
            // scalars, is neither.
            _ => path::reach(document, path, &mut |found| self.on_reached(found)),
        }
    }

    /// On a value at the end of a path: itself, or an element where it is an array.
    fn on_reached(&self, found: Option<&Bson>) -> bool {
        match (self, found) {
            (Self::Exists, found) => found.is_some(),
            (Self::Size(size), Some(Bson::Array(elements))) => elements.len() as i64 == *size,
            (Self::Size(_), _) => false,
            (Self::ElementMatch(_) | Self::ElementValue(_), Some(Bson::Array(elements))) => {
                elements.iter().any(|element| self.picks(element))
            }
            (Self::ElementMatch(_) | Self::ElementValue(_), _) => false,
            (Self::Type(codes, _), Some(Bson::Array(elements))) => {
                codes.contains(&4) || elements.iter().any(|element| self.on_element(element))
            }
            (_, Some(value @ Bson::Array(elements))) => {
                elements.iter().any(|element| self.on_element(element)) || self.on_element(value)
            }
            (_, Some(value)) => self.on_element(value),
            (_, None) => self.on_missing(),
        }
    }

    /// As an element of an array is looked at by `$elemMatch` and `$pull`: arrays in it too.
    #[must_use]
    pub fn on_value(&self, value: &Bson) -> bool {
        match self {
            Self::Not(inner) => !inner.on_value(value),
            Self::All(parts) => parts.iter().all(|part| part.on_value(value)),
            _ => self.on_reached(Some(value)),
        }
    }

    /// Whether this element of an array is one for which the array satisfies the predicate.
    fn picks(&self, element: &Bson) -> bool {
        match (self, element) {
            (Self::ElementMatch(filter), Bson::Document(inner)) => filter.matches(inner),
            (Self::ElementMatch(filter), Bson::Array(inner)) => filter.matches(&numbered(inner)),
            (Self::ElementMatch(_), _) => false,
            (Self::ElementValue(parts), _) => parts.iter().all(|part| part.on_element(element)),
            (Self::All(parts), _) => parts.iter().any(|part| part.picks(element)),
            _ => self.on_element(element),
        }
    }

    fn on_missing(&self) -> bool {
        match self {
            Self::Eq(value) => matches!(value, Bson::Null | Bson::Undefined),
            Self::Compare(Sign::Lte | Sign::Gte, value) => matches!(value, Bson::Null),
            Self::In(values, _) => is_among(values, &Bson::Null),
            _ => false,
        }
    }

    /// On exactly this value.
    #[must_use]
    pub fn on_element(&self, value: &Bson) -> bool {
        match self {
            Self::Eq(wanted) => {
                rank(wanted) == rank(value) && compare(value, wanted) == Ordering::Equal
            }
            Self::Compare(sign, bound) => match bound {
                Bson::MinKey | Bson::MaxKey => sign.holds(compare(value, bound)),
                _ if rank(bound) != rank(value) => false,
                _ if is_nan(bound) || is_nan(value) => {
                    matches!(sign, Sign::Lte | Sign::Gte) && is_nan(bound) && is_nan(value)
                }
                _ => sign.holds(compare(value, bound)),
            },
            Self::In(values, patterns) => {
                is_among(values, value)
                    || patterns.iter().any(|pattern| matches_pattern(pattern, value))
            }
            Self::Exists => true,
            Self::Type(codes, numbers) => {
                codes.contains(&type_number(value)) || (*numbers && is_number(value))
            }
            Self::Mod(divisor, remainder) => truncated(value)
                .is_some_and(|value| value.checked_rem(*divisor).unwrap_or(0) == *remainder),
            Self::Regex(pattern) => matches_pattern(pattern, value),
            Self::Not(inner) => !inner.on_element(value),
            Self::All(parts) => parts.iter().all(|part| part.on_element(value)),
            Self::Bits(test, positions) => bits(*test, positions, value),
            Self::Size(_) | Self::ElementMatch(_) | Self::ElementValue(_) => {
                self.on_reached(Some(value))
            }
        }
    }
}

fn is_among(values: &[Bson], value: &Bson) -> bool {
    values.binary_search_by(|one| compare(one, value)).is_ok()
}

fn is_nan(value: &Bson) -> bool {
    number(value).is_some_and(f64::is_nan)
}

fn numbered(elements: &[Bson]) -> Document {
    elements.iter().enumerate().map(|(at, value)| (at.to_string(), value.clone())).collect()
}

fn matches_pattern(pattern: &Pattern, value: &Bson) -> bool {
    match value {
        Bson::String(text) | Bson::Symbol(text) => pattern.is_match(text),
        Bson::RegularExpression(regex) => {
            regex.pattern.as_str() == pattern.pattern && regex.options.as_str() == pattern.options
        }
        _ => false,
    }
}

fn truncated(value: &Bson) -> Option<i64> {
    match value {
        Bson::Double(value) if value.is_finite() && value.abs() < 9.2e18 => {
            Some(value.trunc() as i64)
        }
        Bson::Decimal128(_) => {
            let value = number(value)?;
            (value.is_finite() && value.abs() < 9.2e18).then_some(value.trunc() as i64)
        }
        other => integral(other),
    }
}

/// `positions` are bit numbers; a negative number's sign goes on for ever.
fn bits(test: BitTest, positions: &[u8], value: &Bson) -> bool {
    let is_set = |position: u8| -> Option<bool> {
        match value {
            Bson::Binary(binary) => {
                let byte = binary.bytes.get(usize::from(position / 8)).copied().unwrap_or(0);
                Some(byte >> (position % 8) & 1 == 1)
            }
            other => integral(other).map(|whole| whole >> position.min(63) & 1 == 1),
        }
    };
    if !matches!(value, Bson::Binary(_)) && integral(value).is_none() {
        return false;
    }
    let mut states = positions.iter().filter_map(|position| is_set(*position));
    match test {
        BitTest::AllSet => states.all(|set| set),
        BitTest::AllClear => states.all(|set| !set),
        BitTest::AnySet => states.any(|set| set),
        BitTest::AnyClear => states.any(|set| !set),
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    fn selects(filter: Document, document: Document) -> bool {
        Filter::parse(&filter).unwrap().matches(&document)
    }

    #[test]
    fn comparisons_keep_to_one_kind_of_type() {
        assert!(selects(doc! { "a": { "$gt": 1 } }, doc! { "a": 1.5 }));
        assert!(!selects(doc! { "a": { "$gt": 1 } }, doc! { "a": "x" }));
        assert!(selects(doc! { "a": { "$lte": Bson::Null } }, doc! {}));
        assert!(selects(doc! { "a": { "$gt": 1, "$lt": 3 } }, doc! { "a": [0, 5] }));
        assert!(!selects(
            doc! { "a": { "$elemMatch": { "$gt": 1, "$lt": 3 } } },
            doc! { "a": [0, 5] }
        ));
        assert!(selects(doc! { "a": { "$lt": Bson::MaxKey } }, doc! { "a": "x" }));
    }

    #[test]
    fn null_stands_for_missing_and_not_for_an_array_of_scalars() {
        assert!(selects(doc! { "a": Bson::Null }, doc! {}));
        assert!(selects(doc! { "a.b": Bson::Null }, doc! { "a": 1 }));
        assert!(!selects(doc! { "a.b": Bson::Null }, doc! { "a": [1] }));
        assert!(selects(doc! { "a": { "$ne": 1 } }, doc! {}));
        assert!(!selects(doc! { "a": { "$ne": 1 } }, doc! { "a": [1, 2] }));
        assert!(selects(doc! { "a": { "$exists": false } }, doc! { "b": 1 }));
    }

    #[test]
    fn arrays_are_matched_whole_by_element_and_by_position() {
        let document = doc! { "a": [1, [2, 3]], "d": [ { "x": 1, "y": 2 }, { "x": 3 } ] };
        assert!(selects(doc! { "a": [1, [2, 3]] }, document.clone()));
        assert!(selects(doc! { "a": [2, 3] }, document.clone()));
        assert!(selects(doc! { "a.0": 1 }, document.clone()));
        assert!(selects(doc! { "d.x": 3 }, document.clone()));
        assert!(selects(doc! { "d": { "$elemMatch": { "x": 1, "y": 2 } } }, document.clone()));
        assert!(!selects(doc! { "d": { "$elemMatch": { "x": 3, "y": 2 } } }, document.clone()));
        assert!(selects(doc! { "a": { "$all": [1, [2, 3]] } }, document.clone()));
        assert!(selects(doc! { "a": { "$size": 2 } }, document));
    }

    #[test]
    fn the_other_operators_answer() {
        assert!(selects(doc! { "a": { "$in": [1, Bson::Null] } }, doc! {}));
        assert!(selects(doc! { "a": { "$nin": [1] } }, doc! { "a": 2 }));
        assert!(selects(doc! { "a": { "$mod": [4, 1] } }, doc! { "a": 5 }));
        assert!(selects(
            doc! { "a": { "$regex": "^b", "$options": "i" } },
            doc! { "a": ["x", "Bc"] }
        ));
        assert!(selects(doc! { "a": { "$not": { "$gt": 3 } } }, doc! {}));
        assert!(selects(doc! { "a": { "$type": "number" } }, doc! { "a": 5_i64 }));
        assert!(selects(doc! { "a": { "$type": "array" } }, doc! { "a": [] }));
        assert!(selects(doc! { "a": { "$bitsAllSet": 5 } }, doc! { "a": 7 }));
        assert!(selects(doc! { "a": { "$bitsAnyClear": [1, 3] } }, doc! { "a": 2 }));
        assert!(selects(doc! { "$or": [ { "a": 1 }, { "b": 1 } ] }, doc! { "b": 1 }));
        assert!(selects(doc! { "$nor": [ { "a": 1 } ] }, doc! { "b": 1 }));
        assert!(selects(doc! { "$expr": { "$gt": ["$a", "$b"] } }, doc! { "a": 2, "b": 1 }));
    }

    #[test]
    fn what_mongodb_refuses_is_refused() {
        for filter in [
            doc! { "$foo": 1 },
            doc! { "a": { "$foo": 1 } },
            doc! { "$and": [] },
            doc! { "a": { "$in": 1 } },
            doc! { "a": { "$mod": [0, 1] } },
            doc! { "a": { "$regex": "(" } },
            doc! { "a": { "$size": -1 } },
            doc! { "a": { "$gt": 1, "b": 1 } },
        ] {
            assert!(Filter::parse(&filter).is_err(), "{filter}");
        }
    }
}

//! Shard keys: what of a document says where it lies, and which stretches of them a filter can match.
//!
//! A key is bytes that compare as its values do (the sortable keys of the store), one field behind the
//! other. Invariant: a document that a filter matches has its key in one of the filter's stretches; they may
//! be wider than that, never narrower.

use beeline_documents::hash_of;
use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::path;
use beeline_documents_query::value::{append_key, integral, key};
use bson::{Bson, Document};

/// Combinations of values that a filter is taken apart into, at most.
const MOST_POINTS: usize = 1000;

/// The pattern of a collection's shard keys.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardKey {
    fields: Vec<Field>,
}

#[derive(Clone, Debug, PartialEq)]
struct Field {
    name: String,
    path: Vec<String>,
    hashed: bool,
}

/// Keys from `low` on, up to those that begin with `high`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Stretch {
    /// The first.
    pub low: Vec<u8>,
    /// What the last begin with.
    pub high: Vec<u8>,
}

impl Stretch {
    /// Whether some key of `from` up to, and without, `to` lies in it.
    #[must_use]
    pub fn meets(&self, from: &[u8], to: &[u8]) -> bool {
        to > self.low.as_slice() && (from <= self.high.as_slice() || from.starts_with(&self.high))
    }
}

/// What a filter says of one field.
enum Said {
    Points(Vec<Vec<u8>>),
    Between(Vec<u8>, Vec<u8>),
    Nothing,
}

impl ShardKey {
    /// Parses `{ path: 1, ... }` or `{ path: "hashed" }`.
    ///
    /// Errors: no field, another direction, a hashed field beside others.
    pub fn parse(pattern: &Document) -> Result<Self> {
        let mut fields = Vec::new();
        for (name, direction) in pattern {
            let hashed = direction.as_str() == Some("hashed");
            if !hashed && integral(direction) != Some(1) {
                return fail(
                    Code::BadValue,
                    format!(
                        "Unsupported shard key pattern {pattern}. Each field is 1 or \"hashed\""
                    ),
                );
            }
            fields.push(Field { name: name.clone(), path: path::split(name)?, hashed });
        }
        if fields.is_empty() || fields.len() > 1 && fields.iter().any(|field| field.hashed) {
            return fail(
                Code::BadValue,
                "a shard key has fields, and a hashed one stands alone in this router",
            );
        }
        Ok(Self { fields })
    }

    /// As it was parsed.
    #[must_use]
    pub fn pattern(&self) -> Document {
        let direction = |hashed: bool| if hashed { Bson::from("hashed") } else { Bson::Int32(1) };
        self.fields.iter().map(|field| (field.name.clone(), direction(field.hashed))).collect()
    }

    /// Whether it is hashed.
    #[must_use]
    pub fn is_hashed(&self) -> bool {
        self.fields.iter().any(|field| field.hashed)
    }

    /// Whether an index over these fields begins with the whole key: only then values that are unique in each
    /// shard are unique in all of them.
    #[must_use]
    pub fn begins(&self, index: &Document) -> bool {
        !self.is_hashed()
            && self.fields.len() <= index.len()
            && self.fields.iter().zip(index.keys()).all(|(field, name)| field.name == *name)
    }

    /// Whether a change of this path may change the key.
    #[must_use]
    pub fn is_touched_by(&self, changed: &str) -> bool {
        let within = |long: &str, short: &str| {
            long.strip_prefix(short).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        self.fields.iter().any(|field| within(&field.name, changed) || within(changed, &field.name))
    }

    /// The key of a document. A field that is not there counts as null.
    ///
    /// Errors: an array on the way.
    pub fn of(&self, document: &Document) -> Result<Vec<u8>> {
        let mut out = Vec::new();
        for field in &self.fields {
            let mut value = Some(document);
            let (last, way) = match field.path.split_last() {
                Some(split) => split,
                None => return fail(Code::BadValue, "a shard key has a path"),
            };
            for part in way {
                value = match value.and_then(|document| document.get(part)) {
                    Some(Bson::Document(inner)) => Some(inner),
                    Some(Bson::Array(_)) => return Self::array(field),
                    _ => None,
                };
            }
            let value = match value.and_then(|document| document.get(last)) {
                Some(Bson::Array(_)) => return Self::array(field),
                Some(value) => value.clone(),
                None => Bson::Null,
            };
            out.extend(field.part(&value));
        }
        Ok(out)
    }

    fn array<T>(field: &Field) -> Result<T> {
        fail(
            Code::ShardKeyNotFound,
            format!("Shard key cannot contain array values or array descendants: {}", field.name),
        )
    }

    /// The key that bounds stand for, as `{ path: value, ... }`; a hashed field holds the hash itself.
    ///
    /// Errors: other fields than the pattern's.
    pub fn bound(&self, bound: &Document) -> Result<Vec<u8>> {
        let same = bound.len() == self.fields.len()
            && self.fields.iter().all(|field| bound.contains_key(&field.name));
        if !same {
            let pattern = self.pattern();
            return fail(
                Code::BadValue,
                format!("{bound} is no bound of chunks of the shard key {pattern}"),
            );
        }
        let mut out = Vec::new();
        for field in &self.fields {
            append_key(&mut out, bound.get(&field.name).unwrap_or(&Bson::Null));
        }
        Ok(out)
    }

    /// All of the same value, as the ends of all keys have it.
    #[must_use]
    pub fn all(&self, value: &Bson) -> Document {
        self.fields.iter().map(|field| (field.name.clone(), value.clone())).collect()
    }

    /// Where what a filter matches can lie; true: at exactly one key.
    #[must_use]
    pub fn stretches(&self, filter: &Document) -> (Vec<Stretch>, bool) {
        let mut beginnings: Vec<Vec<u8>> = vec![Vec::new()];
        let least = key(&Bson::MinKey);
        // The first key that begins so has the least values behind it.
        let first = |mut key: Vec<u8>, fields: usize| {
            (fields..self.fields.len()).for_each(|_| key.extend(&least));
            key
        };
        let whole = |beginnings: Vec<Vec<u8>>, fields: usize| {
            let same = |key: Vec<u8>| Stretch { low: first(key.clone(), fields), high: key };
            beginnings.into_iter().map(same).collect::<Vec<_>>()
        };
        for (at, field) in self.fields.iter().enumerate() {
            match field.said(filter) {
                Said::Points(points) if beginnings.len() * points.len() <= MOST_POINTS => {
                    beginnings = beginnings
                        .iter()
                        .flat_map(|head| points.iter().map(move |tail| [&head[..], tail].concat()))
                        .collect();
                }
                Said::Between(low, high) => {
                    let between = |head: &Vec<u8>| Stretch {
                        low: first([&head[..], &low].concat(), at + 1),
                        high: [&head[..], &high].concat(),
                    };
                    return (beginnings.iter().map(between).collect(), false);
                }
                Said::Points(_) | Said::Nothing => return (whole(beginnings, at), false),
            }
        }
        let exact = beginnings.len() == 1;
        (whole(beginnings, self.fields.len()), exact)
    }
}

impl Field {
    fn part(&self, value: &Bson) -> Vec<u8> {
        if self.hashed { key(&Bson::Int64(hash_of(value))) } else { key(value) }
    }

    fn said(&self, filter: &Document) -> Said {
        let mut found = Said::Nothing;
        for (name, value) in filter {
            let said = match (name.as_str(), value) {
                ("$and", Bson::Array(all)) => all
                    .iter()
                    .filter_map(Bson::as_document)
                    .fold(Said::Nothing, |known, one| both(known, self.said(one))),
                (name, value) if name == self.name => self.said_of(value),
                _ => Said::Nothing,
            };
            found = both(found, said);
        }
        found
    }

    fn said_of(&self, value: &Bson) -> Said {
        let Bson::Document(operators) = value else { return self.points(&[value]) };
        if !operators.keys().next().is_some_and(|name| name.starts_with('$')) {
            return self.points(&[value]);
        }
        let mut found = Said::Nothing;
        for (name, value) in operators {
            let ends = || (key(&Bson::MinKey), key(&Bson::MaxKey));
            let said = match (name.as_str(), value) {
                ("$eq", value) => self.points(&[value]),
                ("$in", Bson::Array(all)) => self.points(&all.iter().collect::<Vec<_>>()),
                ("$gt" | "$gte", value) if !self.hashed && is_plain(value) => {
                    Said::Between(key(value), ends().1)
                }
                ("$lt" | "$lte", value) if !self.hashed && is_plain(value) => {
                    Said::Between(ends().0, key(value))
                }
                _ => Said::Nothing,
            };
            found = both(found, said);
        }
        found
    }

    fn points(&self, values: &[&Bson]) -> Said {
        if values.len() > MOST_POINTS || !values.iter().all(|value| is_plain(value)) {
            return Said::Nothing;
        }
        Said::Points(values.iter().map(|value| self.part(value)).collect())
    }
}

/// A value that equals what it is, and compares with its own kind; arrays and patterns do not.
fn is_plain(value: &Bson) -> bool {
    !matches!(value, Bson::Array(_) | Bson::RegularExpression(_))
}

/// What two conditions say together, or one of them.
fn both(one: Said, other: Said) -> Said {
    match (one, other) {
        (Said::Points(points), _) | (_, Said::Points(points)) => Said::Points(points),
        (Said::Between(low, high), Said::Between(other_low, other_high)) => {
            Said::Between(low.max(other_low), high.min(other_high))
        }
        (Said::Between(low, high), Said::Nothing) | (Said::Nothing, Said::Between(low, high)) => {
            Said::Between(low, high)
        }
        (Said::Nothing, Said::Nothing) => Said::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use beeline_documents_query::Filter;
    use bson::doc;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_pattern_has_fields_and_a_hashed_one_stands_alone() {
        for pattern in
            [doc! {}, doc! { "a": -1 }, doc! { "a": "text" }, doc! { "a": "hashed", "b": 1 }]
        {
            assert!(ShardKey::parse(&pattern).is_err(), "{pattern}");
        }
        let pattern = doc! { "a.b": 1, "c": 1 };
        let key = ShardKey::parse(&pattern).unwrap();
        assert_eq!(key.pattern(), pattern);
        assert!(key.begins(&doc! { "a.b": 1, "c": 1, "d": 1 }) && !key.begins(&doc! { "c": 1 }));
        assert!(key.is_touched_by("a") && key.is_touched_by("a.b.x") && key.is_touched_by("c"));
        assert!(!key.is_touched_by("ab") && !key.is_touched_by("a.c") && !key.is_touched_by("d"));
        assert_eq!(key.of(&doc! { "a": [1] }).unwrap_err().code, Code::ShardKeyNotFound);
        assert_eq!(key.of(&doc! { "a": { "b": [1] } }).unwrap_err().code, Code::ShardKeyNotFound);
        assert_eq!(
            key.of(&doc! { "a": 5 }).unwrap(),
            key.of(&doc! { "a": { "b": null } }).unwrap()
        );
    }

    #[test]
    fn only_a_filter_with_every_field_is_exact() {
        let key = ShardKey::parse(&doc! { "a": 1, "b": 1 }).unwrap();
        for (filter, stretches, exact) in [
            (doc! { "a": 1, "b": 2 }, 1, true),
            (doc! { "a": { "$in": [1, 2] }, "b": { "$eq": 2 } }, 2, false),
            (doc! { "$and": [{ "a": 1 }, { "b": 2 }] }, 1, true),
            (doc! { "a": 1 }, 1, false),
            (doc! { "b": 1 }, 1, false),
            (doc! { "a": { "$gt": 1, "$lte": 3 } }, 1, false),
            (doc! { "a": { "$in": [] } }, 0, false),
        ] {
            let found = key.stretches(&filter);
            assert_eq!((found.0.len(), found.1), (stretches, exact), "{filter}");
        }
        let hashed = ShardKey::parse(&doc! { "a": "hashed" }).unwrap();
        assert!(hashed.stretches(&doc! { "a": 1.0 }).1);
        assert_eq!(hashed.stretches(&doc! { "a": 1 }), hashed.stretches(&doc! { "a": 1.0 }));
        assert_eq!(hashed.stretches(&doc! { "a": { "$gt": 1 } }).0[0].high, Vec::<u8>::new());
    }

    fn value() -> impl Strategy<Value = Bson> {
        prop_oneof![
            (-3_i32..4).prop_map(Bson::Int32),
            (-3_i32..4).prop_map(|n| Bson::Double(f64::from(n) / 2.0)),
            prop::sample::select(vec!["", "a", "b", "ab"]).prop_map(Bson::from),
            Just(Bson::Null),
            any::<bool>().prop_map(Bson::Boolean),
        ]
    }

    fn condition() -> impl Strategy<Value = Bson> {
        prop_oneof![
            value(),
            (prop::sample::select(vec!["$gt", "$gte", "$lt", "$lte", "$eq", "$ne"]), value())
                .prop_map(|(name, value)| Bson::Document(doc! { name: value })),
            (value(), value()).prop_map(|(a, b)| Bson::Document(doc! { "$gte": a, "$lt": b })),
            prop::collection::vec(value(), 0..3)
                .prop_map(|all| Bson::Document(doc! { "$in": all })),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// The invariant of the module.
        #[test]
        fn what_a_filter_matches_lies_in_its_stretches(
            a in value(), b in value(),
            conditions in prop::collection::vec((prop::sample::select(vec!["a", "b"]), condition()), 0..4),
            hashed in any::<bool>(), lacks in any::<bool>(),
        ) {
            let document = if lacks { doc! { "b": b } } else { doc! { "a": a, "b": b } };
            let all: Vec<Document> =
                conditions.into_iter().map(|(name, value)| doc! { name: value }).collect();
            let filter = if all.is_empty() { doc! {} } else { doc! { "$and": all } };
            let pattern = if hashed { doc! { "a": "hashed" } } else { doc! { "a": 1, "b": 1 } };
            let key = ShardKey::parse(&pattern).unwrap();
            if Filter::parse(&filter).unwrap().matches(&document) {
                let at = key.of(&document).unwrap();
                let next = [&at[..], &[0]].concat();
                let (stretches, _) = key.stretches(&filter);
                prop_assert!(stretches.iter().any(|one| one.meets(&at, &next)), "{filter} {document}");
            }
        }
    }
}

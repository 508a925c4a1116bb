//! Sort orders: of documents by paths, of values.

use std::cmp::Ordering;

use bson::{Bson, Document};

use crate::error::{Code, Result, bad, fail};
use crate::path;
use crate::value::{compare, integral};

/// A sort order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Order {
    /// Paths, and whether each goes down.
    pub fields: Vec<(Vec<String>, bool)>,
    /// Values are sorted whole; true: downwards.
    pub whole: Option<bool>,
}

impl Order {
    /// Parses `{ path: 1 | -1, ... }`.
    ///
    /// Errors: a direction that is neither, more than 32 paths, `$meta`.
    pub fn parse(source: &Document) -> Result<Self> {
        let mut fields = Vec::new();
        for (name, direction) in source {
            if name.starts_with('$') && name != "$natural" {
                return fail(
                    Code::BadValue,
                    format!("FieldPath field names may not start with '$': {name}"),
                );
            }
            fields.push((path::split(name)?, descending(direction)?));
        }
        if fields.len() > 32 {
            return bad("a sort has at most 32 fields");
        }
        Ok(Self { fields, whole: None })
    }

    /// Parses a direction for values.
    ///
    /// Errors: a direction that is neither 1 nor -1.
    pub fn whole(direction: &Bson) -> Result<Self> {
        Ok(Self { fields: Vec::new(), whole: Some(descending(direction)?) })
    }

    /// True when it asks for nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.fields.is_empty()
    }

    /// What a document is sorted by: of an array its least element, or its greatest downwards.
    #[must_use]
    pub fn key(&self, document: &Document) -> Vec<Bson> {
        self.fields.iter().map(|(parts, down)| sort_value(document, parts, *down)).collect()
    }

    /// Compares what [`Order::key`] returned.
    #[must_use]
    pub fn compare_keys(&self, a: &[Bson], b: &[Bson]) -> Ordering {
        for ((a, b), (_, down)) in a.iter().zip(b).zip(&self.fields) {
            let order = if *down { compare(b, a) } else { compare(a, b) };
            if order != Ordering::Equal {
                return order;
            }
        }
        Ordering::Equal
    }

    /// Sorts documents; those equal keep their order.
    pub fn sort(&self, documents: &mut Vec<Document>) {
        let mut keyed: Vec<(Vec<Bson>, Document)> =
            documents.drain(..).map(|document| (self.key(&document), document)).collect();
        keyed.sort_by(|(a, _), (b, _)| self.compare_keys(a, b));
        documents.extend(keyed.into_iter().map(|(_, document)| document));
    }

    /// Sorts values, by paths where they are documents.
    pub fn sort_values(&self, values: &mut [Bson]) {
        match self.whole {
            Some(true) => values.sort_by(|a, b| compare(b, a)),
            Some(false) => values.sort_by(compare),
            None => values.sort_by(|a, b| {
                let none = Document::new();
                let of = |value: &Bson| self.key(value.as_document().unwrap_or(&none));
                self.compare_keys(&of(a), &of(b))
            }),
        }
    }
}

fn descending(direction: &Bson) -> Result<bool> {
    match integral(direction) {
        Some(1) => Ok(false),
        Some(-1) => Ok(true),
        Some(_) => fail(
            Code::BadValue,
            "$sort key ordering must be 1 (for ascending) or -1 (for descending)",
        ),
        None => {
            fail(Code::FailedToParse, format!("Illegal key in $sort specification: {direction}"))
        }
    }
}

fn sort_value(document: &Document, parts: &[String], down: bool) -> Bson {
    if let Some(value) = path::plain(document, parts)
        && !matches!(value, Bson::Array(_))
    {
        return value.clone();
    }
    let mut values = Vec::new();
    path::index_values(document, parts, &mut values);
    let wanted = if down { Ordering::Greater } else { Ordering::Less };
    let mut best = Bson::Null;
    for (at, value) in values.into_iter().enumerate() {
        if at == 0 || compare(&value, &best) == wanted {
            best = value;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn arrays_sort_by_their_least_or_greatest_element() {
        let mut documents = vec![doc! { "a": [5, 1] }, doc! { "a": 3 }, doc! {}, doc! { "a": [] }];
        Order::parse(&doc! { "a": 1 }).unwrap().sort(&mut documents);
        assert_eq!(documents, [doc! { "a": [] }, doc! {}, doc! { "a": [5, 1] }, doc! { "a": 3 }]);
        Order::parse(&doc! { "a": -1 }).unwrap().sort(&mut documents);
        assert_eq!(documents[0], doc! { "a": [5, 1] });
        assert!(Order::parse(&doc! { "a": 2 }).is_err());
    }
}

//! `$group`, `$bucket`, `$bucketAuto`.

use std::collections::HashMap;

use bson::{Bson, Document};

use super::accumulator::{Accumulator, State};
use super::{DEEPEST, Outside};
use crate::error::{Result, bad};
use crate::expression::{Expression, MISSING, Scope};
use crate::memory::{Lease, size_of_value};
use crate::value::{compare, key};

/// A grouping and the groups it has so far.
#[derive(Clone, Debug)]
pub(super) struct Group {
    pub id: Expression,
    pub fields: Vec<(String, Accumulator)>,
    pub buckets: Option<Buckets>,
    places: HashMap<Vec<u8>, usize>,
    groups: Vec<(Bson, Vec<State>)>,
    lease: Lease,
}

/// Bounds of `$bucket`, and where what is outside goes.
#[derive(Clone, Debug)]
pub(super) struct Buckets {
    pub bounds: Vec<Bson>,
    pub other: Option<Bson>,
}

impl Group {
    pub fn new(
        id: Expression,
        fields: Vec<(String, Accumulator)>,
        buckets: Option<Buckets>,
    ) -> Self {
        Self {
            id,
            fields,
            buckets,
            places: HashMap::new(),
            groups: Vec::new(),
            lease: Lease::default(),
        }
    }

    /// Top-level fields it looks at; `None` when it may look at all.
    pub fn fields(&self) -> Option<Vec<&str>> {
        let mut needed = Vec::new();
        seen(&self.id, &mut needed, 0)?;
        for (_, accumulator) in &self.fields {
            if !accumulator.is_plain() {
                return None;
            }
            seen(accumulator.argument(), &mut needed, 0)?;
        }
        Some(needed)
    }

    pub fn push(
        &mut self,
        document: &Document,
        scope: &Scope<'_>,
        outside: &dyn Outside,
    ) -> Result<()> {
        let mut id = self.id.evaluate(&scope.rooted(document))?;
        if let Some(buckets) = &self.buckets {
            id = buckets.place(&id)?;
        }
        if id == MISSING {
            id = Bson::Null;
        }
        let place = key(&id);
        let at = match self.places.get(&place) {
            Some(at) => *at,
            None => {
                let bytes = place.len() * 2 + 128 + self.fields.len() * 64;
                self.lease.grow(bytes, || outside.memory())?;
                self.groups.push((id, self.fields.iter().map(|(_, one)| one.start()).collect()));
                self.places.insert(place, self.groups.len() - 1);
                self.groups.len() - 1
            }
        };
        for ((_, accumulator), state) in self.fields.iter().zip(&mut self.groups[at].1) {
            let bytes = accumulator.add(state, document, scope)?;
            self.lease.grow(bytes, || outside.memory())?;
        }
        Ok(())
    }

    pub fn finish(&mut self) -> Vec<Document> {
        self.places.clear();
        self.lease.shrink_to(0);
        std::mem::take(&mut self.groups)
            .into_iter()
            .map(|(id, states)| {
                let mut document = Document::new();
                document.insert("_id", id);
                for ((name, accumulator), state) in self.fields.iter().zip(states) {
                    document.insert(name.clone(), accumulator.result(state));
                }
                document
            })
            .collect()
    }
}

/// Collects the top-level fields an expression looks at.
fn seen<'a>(expression: &'a Expression, out: &mut Vec<&'a str>, depth: usize) -> Option<()> {
    if depth > DEEPEST {
        return None;
    }
    match expression {
        Expression::Literal(_) => {}
        Expression::Field(parts) => out.extend(parts.first().map(String::as_str)),
        Expression::Document(fields) => {
            for (_, value) in fields {
                seen(value, out, depth + 1)?;
            }
        }
        Expression::Array(all) | Expression::Call(_, all) => {
            for value in all {
                seen(value, out, depth + 1)?;
            }
        }
        _ => return None,
    }
    Some(())
}

impl Buckets {
    fn place(&self, value: &Bson) -> Result<Bson> {
        let below = self.bounds.iter().take_while(|bound| compare(bound, value).is_le()).count();
        if below > 0 && below < self.bounds.len() {
            return Ok(self.bounds[below - 1].clone());
        }
        match &self.other {
            Some(other) => Ok(other.clone()),
            None => bad(
                "$switch could not find a matching branch for an input, and no default was specified.",
            ),
        }
    }
}

pub(super) fn bucket_auto(
    group: &mut Group,
    buckets: usize,
    documents: Vec<Document>,
    scope: &Scope<'_>,
    outside: &dyn Outside,
) -> Result<Vec<Document>> {
    let mut lease = Lease::default();
    let mut keyed = Vec::with_capacity(documents.len());
    for document in documents {
        let value = group.id.evaluate(&scope.rooted(&document))?;
        lease.grow(64 + size_of_value(&value), || outside.memory())?;
        keyed.push((if value == MISSING { Bson::Null } else { value }, document));
    }
    keyed.sort_by(|(a, _), (b, _)| compare(a, b));
    let (mut out, mut at) = (Vec::new(), 0);
    for bucket in 0..buckets {
        if at >= keyed.len() {
            break;
        }
        let left = buckets - bucket;
        let mut end = at + (keyed.len() - at).div_ceil(left).max(1);
        while end < keyed.len() && compare(&keyed[end].0, &keyed[end - 1].0).is_eq() {
            end += 1;
        }
        let end = end.min(keyed.len());
        let upper = keyed.get(end).unwrap_or(&keyed[end - 1]).0.clone();
        let mut states: Vec<State> = group.fields.iter().map(|(_, one)| one.start()).collect();
        for (_, document) in &keyed[at..end] {
            for ((_, accumulator), state) in group.fields.iter().zip(&mut states) {
                let bytes = accumulator.add(state, document, scope)?;
                lease.grow(bytes, || outside.memory())?;
            }
        }
        let mut document = bson::doc! { "_id": { "min": keyed[at].0.clone(), "max": upper } };
        for ((name, accumulator), state) in group.fields.iter().zip(states) {
            document.insert(name.clone(), accumulator.result(state));
        }
        out.push(document);
        at = end;
    }
    Ok(out)
}

//! A pipeline over several shards, taken apart: what each shard does, how their documents come together, and
//! what is left for the router.
//!
//! Invariant: the parts together make what the whole would make over all documents.

use beeline_documents_query::error::Code;
use beeline_documents_query::sort::Order;
use beeline_documents_query::value::integral;
use bson::{Bson, Document, doc};

use crate::error::{Result, refuse};

/// Stages that look at one document at a time.
const SINGLE: &[&str] = &[
    "$match",
    "$project",
    "$addFields",
    "$set",
    "$unset",
    "$unwind",
    "$replaceRoot",
    "$replaceWith",
    "$redact",
];
/// Stages that need all documents, and no other collection: the router runs them.
const GATHERED: &[&str] = &[
    "$group",
    "$sort",
    "$limit",
    "$skip",
    "$count",
    "$sortByCount",
    "$bucket",
    "$bucketAuto",
    "$facet",
    "$sample",
];

/// What becomes of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Split {
    /// Each shard's.
    pub(crate) shards: Vec<Bson>,
    /// The order in which the shards' documents come together.
    pub(crate) order: Option<Document>,
    /// The router's.
    pub(crate) router: Vec<Bson>,
}

fn stage_of(stage: &Bson) -> Result<(&str, &Bson)> {
    match stage.as_document().map(|stage| (stage.len(), stage.iter().next())) {
        Some((1, Some((name, argument)))) => Ok((name, argument)),
        _ => refuse(
            Code::StageShape,
            "A pipeline stage specification object must contain exactly one field.",
        ),
    }
}

/// Refuses what reads or writes other collections, also inside of `$facet`.
fn check(stages: &[Bson]) -> Result<()> {
    for stage in stages {
        let (name, argument) = stage_of(stage)?;
        if !SINGLE.contains(&name) && !GATHERED.contains(&name) {
            return refuse(
                Code::CommandNotSupported,
                format!(
                    "{name} over a sharded collection is not supported by this router, unless the pipeline begins with a $match of the whole shard key"
                ),
            );
        }
        if let ("$facet", Bson::Document(facets)) = (name, argument) {
            for inner in facets.values().filter_map(Bson::as_array) {
                check(inner)?;
            }
        }
    }
    Ok(())
}

/// Takes a pipeline apart.
///
/// Errors: a stage that needs another collection, or is none.
pub(crate) fn split(stages: &[Bson]) -> Result<Split> {
    check(stages)?;
    let single = |stage: &Bson| stage_of(stage).is_ok_and(|(name, _)| SINGLE.contains(&name));
    let alone = stages.iter().take_while(|stage| single(stage)).count();
    let mut shards = stages[..alone].to_vec();
    let rest = &stages[alone..];
    let Some(first) = rest.first() else {
        return Ok(Split { shards, order: None, router: Vec::new() });
    };
    match stage_of(first)? {
        ("$sort", Bson::Document(order)) => {
            // A sort that cannot be is the shards' to refuse.
            let _ = Order::parse(order)?;
            shards.push(first.clone());
            if let Some(most) = most_of(&rest[1..]) {
                shards.push(Bson::Document(doc! { "$limit": most }));
            }
            Ok(Split { shards, order: Some(order.clone()), router: rest[1..].to_vec() })
        }
        ("$limit" | "$skip", _) => {
            if let Some(most) = most_of(rest) {
                shards.push(Bson::Document(doc! { "$limit": most }));
            }
            Ok(Split { shards, order: None, router: rest.to_vec() })
        }
        ("$group", Bson::Document(group)) => match halves(group) {
            Some((there, here)) => {
                shards.push(there);
                let router = here.into_iter().chain(rest[1..].iter().cloned()).collect();
                Ok(Split { shards, order: None, router })
            }
            None => Ok(Split { shards, order: None, router: rest.to_vec() }),
        },
        ("$count", Bson::String(name)) => {
            shards.push(first.clone());
            let sum = doc! { "$group": { "_id": null, name: { "$sum": format!("${name}") } } };
            let mut router = vec![sum.into(), doc! { "$unset": "_id" }.into()];
            router.extend(rest[1..].iter().cloned());
            Ok(Split { shards, order: None, router })
        }
        _ => Ok(Split { shards, order: None, router: rest.to_vec() }),
    }
}

/// How many documents at most pass the limits and skips that stages begin with.
fn most_of(stages: &[Bson]) -> Option<i64> {
    let mut skipped = 0_i64;
    for stage in stages {
        match stage_of(stage).ok()? {
            ("$skip", number) => skipped = skipped.checked_add(integral(number)?)?,
            ("$limit", number) => return skipped.checked_add(integral(number)?),
            _ => return None,
        }
    }
    None
}

/// A grouping as the shards' part and the router's; `None` where a part of it needs all documents at once.
fn halves(group: &Document) -> Option<(Bson, Vec<Bson>)> {
    let mut there = doc! { "_id": group.get("_id")?.clone() };
    let mut here = doc! { "_id": "$_id" };
    let mut shown = doc! { "_id": 1 };
    for (name, accumulator) in group.iter().filter(|(name, _)| *name != "_id") {
        // A path would be taken for a field of a field.
        if name.contains('.') || name.starts_with('$') {
            return None;
        }
        let Bson::Document(accumulator) = accumulator else { return None };
        let mut all = accumulator.iter();
        let (Some((operator, argument)), None) = (all.next(), all.next()) else { return None };
        let field = format!("${name}");
        shown.insert(name, 1);
        match operator.as_str() {
            "$sum" | "$min" | "$max" => {
                there.insert(name, accumulator.clone());
                here.insert(name, doc! { operator: field });
            }
            "$count" => {
                there.insert(name, accumulator.clone());
                here.insert(name, doc! { "$sum": field });
            }
            "$avg" => {
                let (sum, count) = (format!("{name}__sum"), format!("{name}__count"));
                let counted = doc! { "$cond": [{ "$isNumber": argument.clone() }, 1, 0] };
                there.insert(&sum, doc! { "$sum": argument.clone() });
                there.insert(&count, doc! { "$sum": counted });
                here.insert(&sum, doc! { "$sum": format!("${sum}") });
                here.insert(&count, doc! { "$sum": format!("${count}") });
                let (sum, count) = (format!("${sum}"), format!("${count}"));
                let divided = doc! { "$divide": [sum, count.clone()] };
                shown.insert(name, doc! { "$cond": [{ "$eq": [count, 0] }, Bson::Null, divided] });
            }
            _ => return None,
        }
    }
    let here = vec![doc! { "$group": here }.into(), doc! { "$project": shown }.into()];
    Some((doc! { "$group": there }.into(), here))
}

#[cfg(test)]
mod tests {
    use beeline_documents_query::expression::Scope;
    use beeline_documents_query::pipeline::{NoOutside, Pipeline};
    use proptest::prelude::*;

    use super::*;

    fn run(stages: &[Bson], documents: Vec<Document>) -> Vec<Document> {
        let none = Document::new();
        let pipeline = Pipeline::parse(stages).unwrap();
        pipeline.run(documents, &Scope::with_variables(&none), &mut NoOutside).unwrap()
    }

    #[test]
    fn what_needs_another_collection_is_refused() {
        let lookup = doc! { "$lookup": { "from": "x", "as": "y", "pipeline": [] } };
        for stages in [
            vec![lookup.clone()],
            vec![doc! { "$match": {} }, doc! { "$facet": { "a": [lookup] } }],
            vec![doc! { "$out": "x" }],
            vec![doc! { "$unionWith": "x" }],
            vec![doc! { "$changeStream": {} }],
        ] {
            let stages: Vec<Bson> = stages.into_iter().map(Bson::Document).collect();
            assert_eq!(split(&stages).unwrap_err().code, Code::CommandNotSupported as i32);
        }
    }

    fn stages() -> impl Strategy<Value = Vec<Document>> {
        let single = prop::sample::select(vec![
            doc! { "$match": { "n": { "$gt": 2 } } },
            doc! { "$addFields": { "m": { "$multiply": ["$n", 2] } } },
            doc! { "$project": { "n": 1, "g": 1 } },
        ]);
        let gathered = prop::sample::select(vec![
            vec![doc! { "$sort": { "n": 1, "_id": 1 } }, doc! { "$skip": 2 }, doc! { "$limit": 3 }],
            vec![doc! { "$sort": { "n": -1, "_id": 1 } }],
            vec![
                doc! { "$group": { "_id": "$g", "s": { "$sum": "$n" }, "a": { "$avg": "$n" }, "c": { "$count": {} }, "x": { "$max": "$n" }, "i": { "$min": "$t" }, "at": { "$avg": "$t" } } },
                doc! { "$sort": { "_id": 1 } },
            ],
            vec![
                doc! { "$sort": { "_id": 1 } },
                doc! { "$group": { "_id": "$g", "f": { "$first": "$n" }, "p": { "$push": "$n" } } },
                doc! { "$sort": { "_id": 1 } },
            ],
            vec![
                doc! { "$group": { "_id": null, "n": { "$sum": "$n" }, "sd": { "$stdDevPop": "$n" } } },
                doc! { "$project": { "n": 1 } },
            ],
            vec![
                doc! { "$count": "all" },
                doc! { "$addFields": { "more": { "$add": ["$all", 1] } } },
            ],
            vec![doc! { "$sortByCount": "$g" }, doc! { "$sort": { "count": -1, "_id": 1 } }],
            vec![
                doc! { "$sort": { "_id": 1 } },
                doc! { "$facet": { "few": [{ "$limit": 2 }], "sum": [{ "$group": { "_id": null, "n": { "$sum": "$n" } } }] } },
            ],
            vec![],
        ]);
        (prop::collection::vec(single, 0..3), gathered).prop_map(|(mut one, all)| {
            one.extend(all);
            one
        })
    }

    proptest! {
        /// The invariant of the module.
        #[test]
        fn the_parts_make_what_the_whole_makes(
            stages in stages(),
            documents in prop::collection::vec((0_i32..8, 0_u8..3, 0_usize..3), 0..20),
        ) {
            let all: Vec<(Document, usize)> = documents
                .into_iter()
                .enumerate()
                .map(|(id, (n, g, shard))| {
                    let g = ["x", "y", "z"][usize::from(g)];
                    (doc! { "_id": id as i32, "n": n, "g": g, "t": if n > 5 { Bson::from("t") } else { Bson::Int32(n) } }, shard)
                })
                .collect();
            let stages: Vec<Bson> = stages.into_iter().map(Bson::Document).collect();
            let mut whole = run(&stages, all.iter().map(|(one, _)| one.clone()).collect());
            let Split { shards, order, router } = split(&stages).unwrap();
            let mut gathered = Vec::new();
            for shard in 0..3 {
                let own = all.iter().filter(|(_, at)| *at == shard).map(|(one, _)| one.clone());
                gathered.extend(run(&shards, own.collect()));
            }
            if let Some(order) = order {
                Order::parse(&order).unwrap().sort(&mut gathered);
            }
            let mut parts = run(&router, gathered);
            if !stages.iter().any(|stage| stage.as_document().unwrap().contains_key("$sort")) {
                whole.sort_by_key(Document::to_string);
                parts.sort_by_key(Document::to_string);
            }
            prop_assert_eq!(whole, parts);
        }
    }
}

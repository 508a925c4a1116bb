//! Pipelines, stage by stage, on documents at hand.

use bson::{Bson, bson, doc};

use super::*;

struct Others(Vec<Document>);

impl Outside for Others {
    fn read(
        &mut self,
        collection: &str,
        pipeline: &Pipeline,
        variables: &Document,
    ) -> Result<Vec<Document>> {
        assert_eq!(collection, "other");
        pipeline.fresh().run(self.0.clone(), &Scope::with_variables(variables), &mut NoOutside)
    }
}

fn run(stages: Bson, input: Vec<Document>) -> Vec<Document> {
    let Bson::Array(stages) = stages else { unreachable!() };
    let mut others = Others(vec![
        doc! { "_id": 1, "k": 1, "n": "one" },
        doc! { "_id": 2, "k": 2, "n": "two", "up": 1 },
    ]);
    Pipeline::parse(&stages).unwrap().run(input, &Scope::default(), &mut others).unwrap()
}

fn numbers() -> Vec<Document> {
    (1..=6).map(|n| doc! { "_id": n, "g": n % 2, "v": n * 10, "l": [n, n + 1] }).collect()
}

#[test]
fn groups_are_summed_and_collected() {
    let mut out = run(
        bson!([
            { "$match": { "_id": { "$lte": 4 } } },
            { "$group": { "_id": "$g", "sum": { "$sum": "$v" }, "avg": { "$avg": "$v" }, "all": { "$push": "$_id" },
                "n": { "$sum": 1 }, "top": { "$top": { "sortBy": { "v": -1 }, "output": "$v" } } } },
            { "$sort": { "_id": 1 } },
        ]),
        numbers(),
    );
    assert_eq!(
        out.remove(0),
        doc! { "_id": 0, "sum": 60, "avg": 30.0, "all": [2, 4], "n": 2, "top": 40 }
    );
    assert_eq!(
        out.remove(0),
        doc! { "_id": 1, "sum": 40, "avg": 20.0, "all": [1, 3], "n": 2, "top": 30 }
    );
}

#[test]
fn stages_follow_each_other() {
    let out = run(
        bson!([{ "$sort": { "v": -1 } }, { "$skip": 1 }, { "$limit": 2 }, { "$project": { "v": 1, "_id": 0 } }]),
        numbers(),
    );
    assert_eq!(out, [doc! { "v": 50 }, doc! { "v": 40 }]);
    let out = run(
        bson!([{ "$limit": 1 }, { "$unwind": { "path": "$l", "includeArrayIndex": "at" } }, { "$project": { "l": 1, "at": 1 } }]),
        numbers(),
    );
    assert_eq!(
        out,
        [doc! { "_id": 1, "l": 1, "at": 0_i64 }, doc! { "_id": 1, "l": 2, "at": 1_i64 }]
    );
    assert_eq!(run(bson!([{ "$count": "n" }]), numbers()), [doc! { "n": 6 }]);
    assert_eq!(
        run(bson!([{ "$replaceRoot": { "newRoot": { "x": "$v" } } }, { "$limit": 1 }]), numbers()),
        [doc! { "x": 10 }]
    );
    assert_eq!(
        run(bson!([{ "$sortByCount": "$g" }]), numbers()[..3].to_vec()),
        [doc! { "_id": 1, "count": 2 }, doc! { "_id": 0, "count": 1 }]
    );
    assert_eq!(run(bson!([{ "$sample": { "size": 3 } }]), numbers()).len(), 3);
}

#[test]
fn other_collections_are_looked_up_and_appended() {
    let out = run(
        bson!([{ "$limit": 2 }, { "$lookup": { "from": "other", "localField": "_id", "foreignField": "k", "as": "o" } }, { "$project": { "o.n": 1 } }]),
        numbers(),
    );
    assert_eq!(
        out,
        [doc! { "_id": 1, "o": [ { "n": "one" } ] }, doc! { "_id": 2, "o": [ { "n": "two" } ] }]
    );
    let out = run(
        bson!([{ "$limit": 1 }, { "$lookup": { "from": "other", "let": { "x": "$_id" }, "pipeline": [{ "$match": { "$expr": { "$gt": ["$k", "$$x"] } } }], "as": "o" } }]),
        numbers(),
    );
    assert_eq!(out[0].get_array("o").unwrap().len(), 1);
    assert_eq!(run(bson!([{ "$limit": 1 }, { "$unionWith": "other" }]), numbers()).len(), 3);
    let out = run(
        bson!([{ "$limit": 1 }, { "$graphLookup": { "from": "other", "startWith": 2, "connectFromField": "up", "connectToField": "_id", "as": "o" } }]),
        numbers(),
    );
    assert_eq!(out[0].get_array("o").unwrap().len(), 2);
}

#[test]
fn facets_and_buckets_part_the_input() {
    let out = run(
        bson!([{ "$facet": { "n": [{ "$count": "n" }], "first": [{ "$limit": 1 }, { "$project": { "_id": 1 } }] } }]),
        numbers(),
    );
    assert_eq!(out, [doc! { "n": [ { "n": 6 } ], "first": [ { "_id": 1 } ] }]);
    let out = run(
        bson!([{ "$bucket": { "groupBy": "$v", "boundaries": [0, 25, 45], "default": "more" } }]),
        numbers(),
    );
    assert_eq!(
        out,
        [
            doc! { "_id": 0, "count": 2 },
            doc! { "_id": 25, "count": 2 },
            doc! { "_id": "more", "count": 2 }
        ]
    );
    let out = run(bson!([{ "$bucketAuto": { "groupBy": "$v", "buckets": 2 } }]), numbers());
    assert_eq!(
        out,
        [
            doc! { "_id": { "min": 10, "max": 40 }, "count": 3 },
            doc! { "_id": { "min": 40, "max": 60 }, "count": 3 }
        ]
    );
}

#[test]
fn what_cannot_be_run_is_refused() {
    for stages in [
        bson!([{ "$nope": 1 }]),
        bson!([{ "$limit": 0 }]),
        bson!([{ "$group": { "x": { "$sum": 1 } } }]),
        bson!([{ "$out": "x" }, { "$limit": 1 }]),
        bson!([{ "$limit": 1 }, { "$changeStream": {} }]),
        bson!([{ "$match": {}, "$limit": 1 }]),
        bson!([{ "$unwind": "x" }]),
    ] {
        let Bson::Array(stages) = stages else { unreachable!() };
        assert!(Pipeline::parse(&stages).is_err(), "{stages:?}");
    }
}

#[test]
fn what_is_missing_joins_what_is_missing_and_not_null() {
    let pipeline = bson!([
        { "$lookup": { "from": "other", "let": { "up": "$up" }, "as": "found",
            "pipeline": [{ "$match": { "$expr": { "$eq": ["$up", "$$up"] } } }, { "$project": { "_id": 1 } }] } },
    ]);
    let found = run(pipeline, vec![doc! { "_id": 1 }, doc! { "_id": 2, "up": Bson::Null }]);
    assert_eq!(found[0], doc! { "_id": 1, "found": [{ "_id": 1 }] });
    assert_eq!(found[1], doc! { "_id": 2, "up": Bson::Null, "found": [] });
}

#[test]
fn a_pipeline_inside_may_begin_with_documents_of_its_own() {
    let made = bson!([{ "$documents": [{ "a": 1 }, { "a": 2 }] }, { "$match": { "a": 2 } }]);
    let joined = run(
        bson!([{ "$lookup": { "pipeline": made.clone(), "as": "made" } }]),
        vec![doc! { "_id": 1 }],
    );
    assert_eq!(joined, [doc! { "_id": 1, "made": [{ "a": 2 }] }]);
    let beside = run(bson!([{ "$unionWith": { "pipeline": made } }]), vec![doc! { "_id": 1 }]);
    assert_eq!(beside, [doc! { "_id": 1 }, doc! { "a": 2 }]);
    let Bson::Array(nothing) = bson!([{ "$lookup": { "pipeline": [], "as": "made" } }]) else {
        unreachable!()
    };
    let nothing = Pipeline::parse(&nothing).unwrap();
    nothing.run(vec![doc! {}], &Scope::default(), &mut NoOutside).unwrap_err();
}

#[test]
fn a_change_stream_is_filtered_and_not_grouped() {
    let parsed = |stage: Bson| {
        let Bson::Array(stages) = bson!([{ "$changeStream": {} }, stage]) else { unreachable!() };
        Pipeline::parse(&stages).map(|_| ()).map_err(|error| error.code)
    };
    assert_eq!(parsed(bson!({ "$match": { "operationType": "insert" } })), Ok(()));
    assert_eq!(parsed(bson!({ "$group": { "_id": 1 } })), Err(Code::IllegalOperation));
    assert_eq!(parsed(bson!({ "$limit": 1 })), Err(Code::IllegalOperation));
}

/// Nothing outside, and little memory.
struct Little(Arc<Memory>);

impl Outside for Little {
    fn read(&mut self, _: &str, _: &Pipeline, _: &Document) -> Result<Vec<Document>> {
        fail(Code::InvalidOptions, "there is nothing outside")
    }

    fn memory(&self) -> Arc<Memory> {
        Memory::of_operation(&self.0)
    }
}

#[test]
fn what_stages_keep_is_bounded_and_given_back() {
    let text = "x".repeat(10_000);
    let list: Vec<i32> = (0..2000).collect();
    for stages in [
        bson!([{ "$sort": { "v": 1 } }]),
        bson!([{ "$group": { "_id": 1, "all": { "$push": "$v" } } }]),
        bson!([{ "$group": { "_id": "$_id", "first": { "$first": "$v" } } }]),
        bson!([{ "$facet": { "all": [] } }]),
        bson!([{ "$sample": { "size": 1000 } }]),
        bson!([{ "$unwind": "$l" }]),
    ] {
        let node = Memory::of_node(1 << 20);
        let Bson::Array(stages) = stages else { unreachable!() };
        let mut pipeline = Pipeline::parse(&stages).unwrap();
        let mut out = Vec::new();
        let refused = (0..200).find_map(|n| {
            let document = doc! { "_id": n, "v": text.clone(), "l": list.clone() };
            pipeline
                .push(document, &Scope::default(), &mut Little(Arc::clone(&node)), &mut out)
                .err()
        });
        assert_eq!(refused.expect("it is refused").code, Code::ExceededMemoryLimit, "{stages:?}");
        drop(pipeline);
        assert_eq!(node.used(), 0, "{stages:?}");
    }
}

#[test]
fn stages_cannot_nest_a_document_without_bounds() {
    let nest = |stage: Bson| Bson::Array(vec![stage; 400]);
    for stage in [
        bson!({ "$replaceWith": { "a": "$$ROOT" } }),
        bson!({ "$addFields": { "a": { "a": "$a" } } }),
        bson!({ "$group": { "_id": "$_id" } }),
        bson!({ "$facet": { "a": [] } }),
    ] {
        let Bson::Array(stages) = nest(stage.clone()) else { unreachable!() };
        let done = Pipeline::parse(&stages).unwrap().run(
            vec![doc! { "_id": 1, "a": 1 }],
            &Scope::default(),
            &mut NoOutside,
        );
        if stage.as_document().is_some_and(|stage| stage.contains_key("$group")) {
            assert_eq!(done.unwrap(), [doc! { "_id": 1 }]);
        } else {
            assert_eq!(done.unwrap_err().code, Code::Overflow, "{stage}");
        }
    }
}

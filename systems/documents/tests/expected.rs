//! What programs written for MongoDB expect of this server.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use bson::{Bson, DateTime, Document, bson, doc, oid::ObjectId};

use common::Client;

fn filled(documents: Vec<Document>) -> Client {
    let client = Client::new();
    let reply = client.run(doc! { "insert": "c", "documents": documents });
    assert_eq!(reply.get_f64("ok").unwrap(), 1.0, "{reply}");
    client
}

fn index(client: &Client, mut specification: Document) -> Document {
    if !specification.contains_key("name") {
        let name: Vec<String> =
            specification.get_document("key").unwrap().keys().cloned().collect();
        specification.insert("name", name.join("_"));
    }
    client.run(doc! { "createIndexes": "c", "indexes": [specification] })
}

/// The stages of the plan that wins, from the root to the first leaf.
fn stages(client: &Client, command: Document) -> Vec<String> {
    let reply = client.run(doc! { "explain": command, "verbosity": "queryPlanner" });
    let planner = reply.get_document("queryPlanner").unwrap_or_else(|_| panic!("{reply}"));
    let mut stage = planner.get_document("winningPlan").unwrap();
    let mut all = vec![stage.get_str("stage").unwrap().to_owned()];
    loop {
        stage = match (stage.get("inputStage"), stage.get("inputStages")) {
            (Some(Bson::Document(below)), _) => below,
            (_, Some(Bson::Array(below))) => below[0].as_document().unwrap(),
            _ => return all,
        };
        all.push(stage.get_str("stage").unwrap().to_owned());
    }
}

#[test]
fn a_disjunction_goes_through_the_indexes_of_its_branches() {
    let documents =
        (0..2000_i32).map(|n| doc! { "_id": n, "a": n % 500, "b": [n % 400, -n], "c": n });
    let client = filled(documents.collect());
    for key in ["a", "b"] {
        assert_eq!(index(&client, doc! { "key": { key: 1 } }).get_f64("ok").unwrap(), 1.0);
    }
    let filter = doc! { "c": { "$gte": 0 }, "$or": [{ "a": 7 }, { "b": { "$in": [7, -3] } }, { "_id": { "$lt": 2 } }] };
    let find = doc! { "find": "c", "filter": filter.clone() };
    assert_eq!(stages(&client, find.clone()), ["FETCH", "OR", "IXSCAN"]);
    let reply = client.run(doc! { "explain": find, "verbosity": "executionStats" });
    let looked = reply.get_document("executionStats").unwrap();
    assert!(looked.get_i64("totalDocsExamined").unwrap() <= 12, "{looked}");
    let mut found: Vec<i32> = client
        .find("c", &filter, &doc! {})
        .iter()
        .map(|document| document.get_i32("_id").unwrap())
        .collect();
    assert_eq!(client.find("c", &filter, &doc! { "c": -1 }).len(), found.len());
    found.sort_unstable();
    assert_eq!(found, [0, 1, 3, 7, 407, 507, 807, 1007, 1207, 1507, 1607]);
    // A branch that no index serves needs the whole collection, and so does the disjunction.
    let find = doc! { "find": "c", "filter": { "$or": [{ "a": 7 }, { "c": 7 }] } };
    assert_eq!(stages(&client, find), ["COLLSCAN"]);
}

#[test]
fn what_one_element_must_satisfy_is_looked_for_in_an_index() {
    let documents = (0..100_i32).map(
        |n| doc! { "_id": n, "l": [{ "x": n, "y": 1 }, { "x": -n, "y": 2 }], "t": [n, n + 1] },
    );
    let client = filled(documents.collect());
    index(&client, doc! { "key": { "l.x": 1 } });
    index(&client, doc! { "key": { "t": 1 } });
    let find = |filter: Document| doc! { "find": "c", "filter": filter };
    let filter = doc! { "l": { "$elemMatch": { "x": -5, "y": 2 } } };
    assert_eq!(stages(&client, find(filter.clone())), ["FETCH", "IXSCAN"]);
    assert_eq!(client.find("c", &filter, &doc! {}).len(), 1);
    let filter = doc! { "t": { "$elemMatch": { "$gt": 98, "$lt": 100 } } };
    assert_eq!(stages(&client, find(filter.clone())), ["FETCH", "IXSCAN"]);
    assert_eq!(client.find("c", &filter, &doc! {}).len(), 2);
}

#[test]
fn an_index_that_is_there_is_told_from_one_that_conflicts() {
    let client = filled(vec![doc! { "_id": 1, "a": 1 }]);
    let code = |specification: Document| {
        let reply = index(&client, specification);
        reply.get_i32("code").unwrap_or(0)
    };
    assert_eq!(code(doc! { "key": { "a": 1 }, "unique": true, "sparse": false }), 0);
    // The same, said otherwise.
    assert_eq!(code(doc! { "key": { "a": 1 }, "unique": 1 }), 0);
    assert_eq!(code(doc! { "key": { "a": 1 }, "unique": true, "background": true }), 0);
    assert_eq!(code(doc! { "key": { "a": 1 } }), 86);
    assert_eq!(code(doc! { "key": { "b": 1 }, "name": "a" }), 86);
    assert_eq!(code(doc! { "key": { "a": 1 }, "unique": true, "expireAfterSeconds": 5 }), 85);
    assert_eq!(code(doc! { "key": { "a": 1 }, "unique": true, "name": "z" }), 85);
}

#[test]
fn a_partial_index_has_no_negation() {
    let client = filled(vec![doc! { "_id": 1, "a": [3, 5] }, doc! { "_id": 2, "a": 5 }]);
    for refused in [
        doc! { "a": { "$ne": 3 } },
        doc! { "a": { "$nin": [3] } },
        doc! { "a": { "$not": { "$gt": 3 } } },
        doc! { "a": { "$exists": false } },
        doc! { "$and": [{ "a": 1 }, { "a": { "$regex": "x" } }] },
    ] {
        let specification = doc! { "key": { "a": 1 }, "partialFilterExpression": refused.clone() };
        assert_eq!(index(&client, specification).get_i32("code").unwrap_or(0), 67, "{refused}");
    }
    let specification = doc! { "key": { "a": 1 }, "partialFilterExpression": { "a": { "$gt": 4 }, "$or": [{ "a": 5 }, { "a": { "$in": [7] } }] } };
    assert_eq!(index(&client, specification).get_f64("ok").unwrap(), 1.0);
    assert_eq!(client.find("c", &doc! { "a": 5 }, &doc! {}).len(), 2);
}

#[test]
fn a_duplicate_key_is_shown_as_programs_read_it() {
    let client = Client::new();
    index(&client, doc! { "key": { "a": 1, "b": 1 }, "unique": true });
    let id = ObjectId::parse_str("5f0000000000000000000001").unwrap();
    for (value, shown) in [
        (Bson::ObjectId(id), "ObjectId('5f0000000000000000000001')"),
        (Bson::DateTime(DateTime::from_millis(1_577_836_800_000)), "new Date(1577836800000)"),
        (bson!("x"), "\"x\""),
        (bson!({ "c": [1, "y"] }), "{ c: [ 1, \"y\" ] }"),
    ] {
        let insert = doc! { "insert": "c", "documents": [{ "a": value.clone() }, { "a": value }] };
        let reply = client.run(insert);
        let error = reply.get_array("writeErrors").unwrap()[0].as_document().unwrap();
        assert_eq!(
            error.get_str("errmsg").unwrap(),
            format!(
                "E11000 duplicate key error collection: d.c index: a_b dup key: {{ a: {shown}, b: null }}"
            )
        );
    }
}

#[test]
fn a_plan_is_told_from_its_root_to_the_bounds_of_its_index() {
    let client = filled((0..20_i32).map(|n| doc! { "_id": n, "a": n, "b": -n }).collect());
    index(&client, doc! { "key": { "a": 1, "b": -1 } });
    let find = |rest: Document| {
        let mut find =
            doc! { "find": "c", "filter": { "a": { "$gte": 5, "$lt": 8 }, "b": { "$lt": 0 } } };
        find.extend(rest);
        find
    };
    assert_eq!(
        stages(&client, find(doc! { "skip": 1, "limit": 5, "projection": { "a": 1 } })),
        ["LIMIT", "PROJECTION_SIMPLE", "SKIP", "FETCH", "IXSCAN"]
    );
    assert_eq!(
        stages(&client, find(doc! { "sort": { "c": 1 }, "limit": 5 })),
        ["SORT", "FETCH", "IXSCAN"]
    );
    let reply = client.run(doc! { "explain": find(doc! {}), "verbosity": "executionStats" });
    let planner = reply.get_document("queryPlanner").unwrap();
    let scan =
        planner.get_document("winningPlan").unwrap().get_document("inputStage").unwrap().clone();
    assert_eq!(
        scan.get_document("indexBounds").unwrap(),
        &doc! { "a": ["[5, 8)"], "b": ["[MaxKey, MinKey]"] }
    );
    let looked = reply.get_document("executionStats").unwrap();
    assert_eq!(looked.get_document("executionStages").unwrap().get_i64("nReturned").unwrap(), 3);
    let bounds = |filter: Document| {
        let find = doc! { "find": "c", "filter": filter };
        let reply = client.run(doc! { "explain": find, "verbosity": "queryPlanner" });
        let plan = reply.get_document("queryPlanner").unwrap().get_document("winningPlan").unwrap();
        plan.get_document("inputStage").unwrap().get_document("indexBounds").unwrap().clone()
    };
    assert_eq!(
        bounds(doc! { "a": { "$in": [7, 3] }, "b": { "$gt": -3 } }),
        doc! { "a": ["[3, 3]", "[7, 7]"], "b": ["[inf.0, -3)"] }
    );
    assert_eq!(bounds(doc! { "_id": { "$gt": "x" } }), doc! { "_id": ["(\"x\", {})"] });
    let update = doc! { "update": "c", "updates": [{ "q": { "a": 3 }, "u": { "$set": { "z": 1 } }, "multi": true }] };
    assert_eq!(stages(&client, update.clone()), ["UPDATE", "FETCH", "IXSCAN"]);
    let reply = client.run(doc! { "explain": update, "verbosity": "executionStats" });
    let parsed = reply.get_document("queryPlanner").unwrap().get_document("parsedQuery").unwrap();
    assert_eq!(parsed, &doc! { "a": 3 });
    let looked = reply.get_document("executionStats").unwrap();
    let root = looked.get_document("executionStages").unwrap();
    assert_eq!(root.get_i64("nWouldModify").unwrap(), 1);
    let delete = doc! { "delete": "c", "deletes": [{ "q": {}, "limit": 1 }] };
    assert_eq!(stages(&client, delete), ["DELETE", "COLLSCAN"]);
    assert_eq!(
        stages(&client, doc! { "count": "c", "query": { "a": 3 } }),
        ["COUNT", "FETCH", "IXSCAN"]
    );
    assert_eq!(client.run(doc! { "count": "c" }).get_i32("n").unwrap(), 20);
}

#[test]
fn a_refused_document_is_told_why() {
    let client = Client::new();
    let schema = doc! { "required": ["n"], "properties": { "n": { "bsonType": "int" } } };
    client.run(doc! { "create": "c", "validator": { "$jsonSchema": schema } });
    let reply = client.run(doc! { "insert": "c", "documents": [{ "_id": 7, "n": "x" }] });
    let error = reply.get_array("writeErrors").unwrap()[0].as_document().unwrap();
    assert_eq!(error.get_i32("code").unwrap(), 121);
    assert_eq!(
        error.get_document("errInfo").unwrap(),
        &doc! { "failingDocumentId": 7, "details": { "operatorName": "$jsonSchema", "schemaRulesNotSatisfied": [
        { "operatorName": "properties", "propertiesNotSatisfied": [
            { "propertyName": "n", "details": [
                { "operatorName": "bsonType", "specifiedAs": { "bsonType": "int" }, "reason": "type did not match", "consideredValue": "x", "consideredType": "string" } ] } ] } ] } }
    );
}

#[test]
fn monitors_find_the_counters_that_they_read() {
    let client = filled((0..5_i32).map(|n| doc! { "_id": n }).collect());
    let before = client.run(doc! { "serverStatus": 1 });
    assert_eq!(client.find("c", &doc! {}, &doc! {}).len(), 5);
    let after = client.run(doc! { "serverStatus": 1 });
    let grown = |name: &str| {
        let of =
            |status: &Document| status.get_document("opcounters").unwrap().get_i64(name).unwrap();
        of(&after) - of(&before)
    };
    assert_eq!([grown("query"), grown("getmore"), grown("insert")], [1, 1, 0]);
    assert!(after.get_document("asserts").is_ok() && !after.contains_key("repl"));
    index(&client, doc! { "key": { "a": 1 } });
    let figures = client.run(doc! { "collStats": "c" });
    let sizes: Vec<&String> = figures.get_document("indexSizes").unwrap().keys().collect();
    assert_eq!(sizes, ["_id_", "a"]);
    let command = doc! { "aggregate": "c", "pipeline": [{ "$indexStats": {} }], "cursor": {} };
    let reply = client.run(command);
    for one in reply.get_document("cursor").unwrap().get_array("firstBatch").unwrap() {
        let one = one.as_document().unwrap();
        assert_eq!(one.get_str("host").unwrap(), "test");
        assert_eq!(one.get_document("spec").unwrap().get("name"), one.get("name"));
    }
}

#[test]
fn an_expression_that_is_an_equality_goes_through_an_index() {
    let values = [
        bson!(5),
        bson!(5.0),
        bson!([5]),
        bson!("5"),
        Bson::Null,
        bson!([[5], 5]),
        bson!({ "x": 5 }),
    ];
    let mut documents: Vec<Document> =
        values.into_iter().enumerate().map(|(n, a)| doc! { "_id": n as i32, "a": a }).collect();
    documents.push(doc! { "_id": 7 });
    let client = filled(documents);
    let queries = [
        doc! { "$expr": { "$eq": ["$a", 5] } },
        doc! { "$expr": { "$eq": ["5", "$a"] } },
        doc! { "$expr": { "$and": [{ "$eq": ["$a", { "$literal": 5 }] }, { "$gt": ["$_id", 0] }] } },
        doc! { "$expr": { "$eq": ["$a", { "x": 5 }] } },
        doc! { "$expr": { "$eq": ["$a", Bson::Null] } },
        doc! { "$expr": { "$eq": ["$a", [5]] } },
        doc! { "$expr": { "$eq": ["$a", "$nothing"] } },
        doc! { "$expr": { "$eq": ["$_id", 3] } },
    ];
    let ids = |filter: &Document| -> Vec<i32> {
        let found = client.find("c", filter, &doc! { "_id": 1 });
        found.iter().map(|document| document.get_i32("_id").unwrap()).collect()
    };
    let before: Vec<Vec<i32>> = queries.iter().map(ids).collect();
    let wanted: [&[i32]; 8] = [&[0, 1], &[3], &[1], &[6], &[4], &[2], &[7], &[3]];
    assert_eq!(before, wanted);
    index(&client, doc! { "key": { "a": 1 }, "sparse": true });
    assert_eq!(queries.iter().map(ids).collect::<Vec<_>>(), wanted);
    let find = |filter: &Document| doc! { "find": "c", "filter": filter.clone() };
    assert_eq!(stages(&client, find(&queries[0])), ["FETCH", "IXSCAN"]);
    assert_eq!(stages(&client, find(&queries[2])), ["FETCH", "IXSCAN"]);
    assert_eq!(stages(&client, find(&queries[4])), ["COLLSCAN"]);
    let mut with = find(&doc! { "$expr": { "$eq": ["$a", "$$x"] } });
    with.insert("let", doc! { "x": 5 });
    assert_eq!(stages(&client, with), ["FETCH", "IXSCAN"]);
    let joined = client.run(doc! { "aggregate": "c", "cursor": {}, "pipeline": [
        { "$match": { "_id": { "$in": [0, 7] } } },
        { "$lookup": { "from": "c", "let": { "a": "$a" }, "as": "same",
            "pipeline": [{ "$match": { "$expr": { "$eq": ["$a", "$$a"] } } }, { "$project": { "_id": 1 } }] } },
        { "$project": { "same": "$same._id" } },
    ] });
    let batch = joined.get_document("cursor").unwrap().get_array("firstBatch").unwrap().clone();
    assert_eq!(
        batch,
        [doc! { "_id": 0, "same": [0, 1] }, doc! { "_id": 7, "same": [7] }].map(Bson::Document)
    );
}

#[test]
fn many_values_are_found_among_many_documents() {
    let client = filled((0..3000_i32).map(|n| doc! { "_id": n, "a": n, "l": [n, -1] }).collect());
    let mixed: Vec<Bson> = (0..60_000_i32)
        .map(|n| match n % 3 {
            0 => Bson::Int32(n / 10),
            1 => Bson::Double(f64::from(n) + 0.5),
            _ => Bson::String(n.to_string()),
        })
        .chain([Bson::Null])
        .collect();
    let wanted = (0..3000).filter(|n| (n * 10..n * 10 + 10).any(|n| n % 3 == 0)).count();
    assert_eq!(client.find("c", &doc! { "a": { "$in": mixed.clone() } }, &doc! {}).len(), wanted);
    assert_eq!(client.find("c", &doc! { "l": { "$in": mixed.clone() } }, &doc! {}).len(), wanted);
    let few = mixed[..30_000].to_vec();
    let by_id = client.find("c", &doc! { "_id": { "$in": few.clone() } }, &doc! {}).len();
    assert_eq!(by_id, client.find("c", &doc! { "a": { "$in": few.clone() } }, &doc! {}).len());
    let find = doc! { "find": "c", "filter": { "_id": { "$in": few } } };
    assert_eq!(stages(&client, find), ["FETCH", "IXSCAN"]);
    // A compound index does not take each value of one field with each of the other.
    index(&client, doc! { "key": { "a": 1, "l": 1 } });
    index(&client, doc! { "key": { "a": 1, "b": 1 } });
    let half: Vec<i32> = (0..1500).collect();
    let many: Vec<Bson> = (0..1000_i32).map(Bson::Int32).chain([Bson::Null]).collect();
    let both = doc! { "a": { "$in": half }, "b": { "$in": many } };
    assert_eq!(client.find("c", &both, &doc! {}).len(), 1500);
    let reply = client
        .run(doc! { "explain": { "find": "c", "filter": both }, "verbosity": "queryPlanner" });
    let planner = reply.get_document("queryPlanner").unwrap();
    let plan = planner.get_document("winningPlan").unwrap().get_document("inputStage").unwrap();
    assert_eq!(plan.get_i32("stretches").unwrap(), 1500);
    let none = doc! { "nothing": { "$in": mixed } };
    assert_eq!(client.find("c", &none, &doc! {}).len(), 3000);
}

//! Random commands against a collection with indexes, the same without, and a plain list of
//! documents: all three say the same. So an index never changes a result.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use beeline_documents_query::Filter;
use beeline_documents_query::expression::Scope;
use beeline_documents_query::sort::Order;
use beeline_documents_query::update::{ArrayFilters, Context as UpdateContext, Update};
use bson::{Bson, Document, doc};
use proptest::prelude::*;

use common::Client;

fn value() -> impl Strategy<Value = Bson> {
    let leaf = prop_oneof![
        4 => (-3..6_i32).prop_map(Bson::Int32),
        1 => Just(Bson::Null),
        1 => Just(Bson::Double(1.5)),
        1 => Just(Bson::Int64(2)),
        2 => "[a-c]{0,2}".prop_map(Bson::String),
        1 => any::<bool>().prop_map(Bson::Boolean),
    ];
    leaf.prop_recursive(2, 8, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Bson::Array),
            prop::collection::vec(("[xy]", inner), 0..3)
                .prop_map(|fields| Bson::Document(fields.into_iter().collect())),
        ]
    })
}

/// Arrays whose elements lie on both sides of a bound, and values below arrays: where an index is
/// easiest to get wrong.
fn spread() -> impl Strategy<Value = Bson> {
    let number = || (-2..6_i32).prop_map(Bson::Int32);
    let below = || {
        prop_oneof![
            number(),
            prop::collection::vec(number(), 0..3).prop_map(Bson::Array),
            Just(Bson::Null)
        ]
    };
    let object = || below().prop_map(|value| Bson::Document(doc! { "x": value }));
    prop_oneof![
        3 => prop::collection::vec(number(), 1..4).prop_map(Bson::Array),
        1 => object(),
        2 => prop::collection::vec(prop_oneof![object(), number()], 0..4).prop_map(Bson::Array),
    ]
}

fn document() -> impl Strategy<Value = Document> {
    let held = prop_oneof![3 => value(), 2 => spread()];
    prop::collection::vec(("[abc]", held), 0..4).prop_map(|fields| fields.into_iter().collect())
}

fn field() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["a", "b", "c", "a.x", "a.y", "b.0", "_id"]).prop_map(str::to_owned)
}

fn condition() -> impl Strategy<Value = Bson> {
    let plain = value();
    let operator = prop_oneof![
        (prop::sample::select(vec!["$eq", "$ne", "$gt", "$gte", "$lt", "$lte"]), value())
            .prop_map(|(name, value)| doc! { name: value }),
        prop::collection::vec(value(), 0..4).prop_map(|all| doc! { "$in": all }),
        prop::collection::vec(value(), 0..3).prop_map(|all| doc! { "$nin": all }),
        any::<bool>().prop_map(|there| doc! { "$exists": there }),
        (value(), value()).prop_map(|(low, high)| doc! { "$gte": low, "$lt": high }),
        (-2..5_i32, 0..3_i32).prop_map(|(low, width)| doc! { "$gt": low, "$lt": low + width }),
        (-2..5_i32, 0..3_i32).prop_map(|(low, width)| doc! { "$gte": low, "$lte": low + width }),
        Just(doc! { "$eq": Bson::Null }),
        Just(doc! { "$in": [Bson::Null, Bson::Int32(1)] }),
        Just(doc! { "$lte": Bson::Null }),
        "[a-c]{1,2}".prop_map(|start| doc! { "$regex": format!("^{start}") }),
        (-1..4_i32).prop_map(|least| doc! { "$elemMatch": { "$gte": least, "$lt": least + 2 } }),
        Just(doc! { "$size": 2 }),
        (prop::sample::select(vec!["x", "y", "0"]), value())
            .prop_map(|(name, value)| doc! { "$elemMatch": { name: value } }),
        (-1..4_i32).prop_map(|least| doc! { "$elemMatch": { "x": { "$gt": least, "$lt": 4 } } }),
    ];
    prop_oneof![1 => plain, 3 => operator.prop_map(Bson::Document)]
}

fn filter() -> impl Strategy<Value = Document> {
    let all = || {
        prop::collection::vec((field(), condition()), 0..3)
            .prop_map(|fields| fields.into_iter().collect::<Document>())
    };
    prop_oneof![
        4 => all(),
        1 => prop::collection::vec(all(), 1..3).prop_map(|parts| doc! { "$or": parts }),
    ]
}

fn update() -> impl Strategy<Value = Document> {
    let name = || prop::sample::select(vec!["a", "b", "c", "a.x", "b.y"]);
    prop_oneof![
        (name(), value()).prop_map(|(name, value)| doc! { "$set": { name: value } }),
        name().prop_map(|name| doc! { "$unset": { name: "" } }),
        name().prop_map(|name| doc! { "$inc": { name: 1 } }),
        (name(), value()).prop_map(|(name, value)| doc! { "$push": { name: value } }),
        (name(), value()).prop_map(|(name, value)| doc! { "$addToSet": { name: value } }),
        (name(), value()).prop_map(|(name, value)| doc! { "$pull": { name: value } }),
        (name(), value()).prop_map(|(name, value)| doc! { "$max": { name: value } }),
    ]
}

#[derive(Clone, Debug)]
enum Step {
    Insert(Document),
    Update(Document, Document),
    Delete(Document, bool),
    Find(Document, Document),
    Index(Document),
}

fn index() -> impl Strategy<Value = Document> {
    prop::sample::select(vec![
        doc! { "key": { "a": 1 } },
        doc! { "key": { "b": 1 } },
        doc! { "key": { "a": 1, "b": -1 } },
        doc! { "key": { "a.x": 1 } },
        doc! { "key": { "a.x": -1, "b": 1 } },
        doc! { "key": { "b": -1 }, "sparse": true },
        doc! { "key": { "a.x": 1, "c": 1 }, "sparse": true },
        doc! { "key": { "c": 1 }, "sparse": true },
        doc! { "key": { "c": 1 }, "partialFilterExpression": { "c": { "$gt": 1 } } },
        doc! { "key": { "b": 1 }, "partialFilterExpression": { "a": { "$exists": true } } },
        doc! { "key": { "a": "hashed" } },
        doc! { "key": { "b": 1, "a": -1, "_id": 1 } },
    ])
}

/// How many cases: more where there is time for them.
fn cases() -> u32 {
    ProptestConfig::default().cases.max(400)
}

fn step() -> impl Strategy<Value = Step> {
    let sort = prop::sample::select(vec![
        doc! {},
        doc! { "_id": 1 },
        doc! { "_id": -1 },
        doc! { "a": 1, "_id": 1 },
        doc! { "a": -1, "_id": 1 },
        doc! { "b": 1, "a": -1, "_id": 1 },
        doc! { "b": 1, "_id": 1 },
        doc! { "c": -1, "_id": 1 },
    ]);
    prop_oneof![
        6 => document().prop_map(Step::Insert),
        2 => (filter(), update()).prop_map(|(filter, update)| Step::Update(filter, update)),
        1 => (filter(), any::<bool>()).prop_map(|(filter, one)| Step::Delete(filter, one)),
        6 => (filter(), sort).prop_map(|(filter, sort)| Step::Find(filter, sort)),
        1 => index().prop_map(Step::Index),
    ]
}

/// The plain model: a list in the order of `_id`.
#[derive(Default)]
struct Plain {
    documents: Vec<Document>,
}

impl Plain {
    fn find(&self, filter: &Document, sort: &Document) -> Vec<Document> {
        let filter = Filter::parse(filter).unwrap();
        let mut found: Vec<Document> =
            self.documents.iter().filter(|one| filter.matches(one)).cloned().collect();
        Order::parse(sort).unwrap().sort(&mut found);
        found
    }

    fn update(&mut self, filter: &Document, update: &Document) {
        let filter = Filter::parse(filter).unwrap();
        let none = ArrayFilters::default();
        let update = Update::parse(&Bson::Document(update.clone()), &none).unwrap();
        let context = UpdateContext {
            filter: &filter,
            array_filters: &none,
            inserting: false,
            scope: &Scope::default(),
        };
        for one in &mut self.documents {
            if filter.matches(one)
                && let Ok(new) = update.apply(one, &context)
            {
                *one = new;
            } else if filter.matches(one) {
                // The first that fails ends an update of several.
                return;
            }
        }
    }
}

fn ids(documents: &[Document]) -> Vec<i32> {
    let mut ids: Vec<i32> = documents.iter().map(|one| one.get_i32("_id").unwrap()).collect();
    ids.sort_unstable();
    ids
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(cases()))]
    #[test]
    fn commands_say_what_a_plain_list_says_with_and_without_indexes(indexes in prop::collection::vec(index(), 0..4), steps in prop::collection::vec(step(), 1..60)) {
        let client = Client::new();
        let mut plain = Plain::default();
        let mut next = 0;
        for name in ["plain", "indexed"] {
            client.run(doc! { "create": name });
        }
        for specification in indexes {
            client.run(doc! { "createIndexes": "indexed", "indexes": [specification] });
        }
        for step in steps {
            match step {
                Step::Insert(mut document) => {
                    document.remove("_id");
                    let mut whole = doc! { "_id": next };
                    whole.extend(document);
                    next += 1;
                    // An index refuses arrays in parallel: such a document is in none of the three.
                    let indexed = client.run(doc! { "insert": "indexed", "documents": [whole.clone()] });
                    if indexed.contains_key("writeErrors") {
                        continue;
                    }
                    client.run(doc! { "insert": "plain", "documents": [whole.clone()] });
                    plain.documents.push(whole);
                }
                Step::Update(filter, update) => {
                    // One document at a time, by its number, so that what fails fails alike.
                    for id in ids(&client.find("plain", &filter, &doc! {})) {
                        let only = doc! { "_id": id };
                        let command = |name: &str| doc! { "update": name, "updates": [ { "q": only.clone(), "u": update.clone() } ] };
                        let indexed = client.run(command("indexed"));
                        let parallel = matches!(indexed.get_array("writeErrors"), Ok(errors)
                            if errors[0].as_document().unwrap().get_i32("code").unwrap() == 171
                                || errors[0].as_document().unwrap().get_i32("code").unwrap() == 16766);
                        if parallel {
                            continue;
                        }
                        client.run(command("plain"));
                        plain.update(&only, &update);
                    }
                }
                Step::Delete(filter, one) => {
                    let found = plain.find(&filter, &doc! { "_id": 1 });
                    let doomed: Vec<i32> = ids(&found).into_iter().take(if one { 1 } else { usize::MAX }).collect();
                    for name in ["plain", "indexed"] {
                        let q = if one { doc! { "_id": { "$in": doomed.clone() } } } else { filter.clone() };
                        let reply = client.run(doc! { "delete": name, "deletes": [ { "q": q, "limit": 0 } ] });
                        prop_assert_eq!(reply.get_i32("n").unwrap() as usize, doomed.len(), "{} {}", name, &filter);
                    }
                    plain.documents.retain(|one| !doomed.contains(&one.get_i32("_id").unwrap()));
                }
                Step::Find(filter, sort) => {
                    let wanted = plain.find(&filter, &sort);
                    for name in ["plain", "indexed"] {
                        let found = client.find(name, &filter, &sort);
                        if sort.is_empty() {
                            prop_assert_eq!(ids(&found), ids(&wanted), "{} {}", name, &filter);
                        } else {
                            prop_assert_eq!(&found, &wanted, "{} {} {}", name, &filter, &sort);
                        }
                        let counted = client.run(doc! { "count": name, "query": filter.clone() });
                        prop_assert_eq!(counted.get_i32("n").unwrap() as usize, wanted.len());
                    }
                }
                Step::Index(specification) => {
                    client.run(doc! { "createIndexes": "indexed", "indexes": [specification] });
                }
            }
        }
        let report = client.run(doc! { "validate": "indexed" });
        prop_assert!(report.get_bool("valid").unwrap(), "{}", report);
    }
}

//! Updates, operator by operator, on documents at hand.

use bson::{Bson, Document, bson, doc};

use super::*;

fn updated(update: Bson, document: Document) -> Document {
    try_update(update, doc! {}, &[], document).unwrap()
}

fn try_update(
    update: Bson,
    filter: Document,
    filters: &[Bson],
    document: Document,
) -> Result<Document> {
    let array_filters = ArrayFilters::parse(filters)?;
    let filter = Filter::parse(&filter)?;
    let context = Context {
        filter: &filter,
        array_filters: &array_filters,
        inserting: false,
        scope: &Scope::default(),
    };
    Update::parse(&update, &array_filters)?.apply(&document, &context)
}

#[test]
fn fields_are_set_removed_and_renamed() {
    let document = doc! { "_id": 1, "a": 1, "b": { "c": 2 } };
    assert_eq!(
        updated(bson!({ "$set": { "b.d": 3, "x.y": 1 } }), document.clone()),
        doc! { "_id": 1, "a": 1, "b": { "c": 2, "d": 3 }, "x": { "y": 1 } }
    );
    assert_eq!(
        updated(bson!({ "$unset": { "b.c": "" } }), document.clone()),
        doc! { "_id": 1, "a": 1, "b": {} }
    );
    assert_eq!(
        updated(bson!({ "$rename": { "a": "z.w" } }), document.clone()),
        doc! { "_id": 1, "b": { "c": 2 }, "z": { "w": 1 } }
    );
    assert_eq!(
        updated(bson!({ "$set": { "l.2": 5 } }), doc! { "_id": 1, "l": [1] }),
        doc! { "_id": 1, "l": [1, Bson::Null, 5] }
    );
}

#[test]
fn numbers_grow_in_their_type() {
    assert_eq!(
        updated(bson!({ "$inc": { "a": 1, "n": 2.5 } }), doc! { "_id": 1, "a": i32::MAX }),
        doc! { "_id": 1, "a": 2_147_483_648_i64, "n": 2.5 }
    );
    assert_eq!(
        updated(bson!({ "$mul": { "a": 3, "n": 2_i64 } }), doc! { "_id": 1, "a": 2 }),
        doc! { "_id": 1, "a": 6, "n": 0_i64 }
    );
    assert_eq!(
        updated(
            bson!({ "$min": { "a": 1 }, "$max": { "b": 9 } }),
            doc! { "_id": 1, "a": 2, "b": 2 }
        ),
        doc! { "_id": 1, "a": 1, "b": 9 }
    );
    assert_eq!(
        updated(bson!({ "$bit": { "a": { "and": 6, "or": 1 } } }), doc! { "_id": 1, "a": 12 }),
        doc! { "_id": 1, "a": 5 }
    );
    let error =
        try_update(bson!({ "$inc": { "a": 1 } }), doc! {}, &[], doc! { "a": "x" }).unwrap_err();
    assert_eq!(error.code, Code::TypeMismatch);
}

#[test]
fn arrays_are_pushed_pulled_and_sorted() {
    let document = doc! { "_id": 1, "l": [3, 1] };
    assert_eq!(
        updated(bson!({ "$push": { "l": 2 } }), document.clone()),
        doc! { "_id": 1, "l": [3, 1, 2] }
    );
    assert_eq!(
        updated(
            bson!({ "$push": { "l": { "$each": [2, 0], "$sort": 1, "$slice": -3 } } }),
            document.clone()
        ),
        doc! { "_id": 1, "l": [1, 2, 3] }
    );
    assert_eq!(
        updated(bson!({ "$push": { "l": { "$each": [9], "$position": 0 } } }), document.clone()),
        doc! { "_id": 1, "l": [9, 3, 1] }
    );
    assert_eq!(
        updated(bson!({ "$addToSet": { "l": { "$each": [1, 4] } } }), document.clone()),
        doc! { "_id": 1, "l": [3, 1, 4] }
    );
    assert_eq!(
        updated(bson!({ "$pull": { "l": { "$gte": 2 } } }), document.clone()),
        doc! { "_id": 1, "l": [1] }
    );
    assert_eq!(
        updated(
            bson!({ "$pull": { "l": { "x": 1 } } }),
            doc! { "l": [ { "x": 1, "y": 1 }, { "x": 2 } ] }
        ),
        doc! { "l": [ { "x": 2 } ] }
    );
    assert_eq!(
        updated(bson!({ "$pop": { "l": -1 } }), document.clone()),
        doc! { "_id": 1, "l": [1] }
    );
    assert_eq!(
        updated(bson!({ "$pullAll": { "l": [3, 1] } }), document),
        doc! { "_id": 1, "l": [] }
    );
}

#[test]
fn a_position_is_that_of_the_element_that_was_matched() {
    let document = doc! { "_id": 1, "l": [1, 5, 7], "m": [1, 2, 3],
    "d": [ { "k": 1, "w": 9 }, { "k": 2, "w": 8 }, { "k": 2, "w": 9 } ] };
    for (filter, at) in [
        (doc! { "d": { "$elemMatch": { "k": 2, "w": 9 } } }, 2),
        (doc! { "d.k": 2 }, 1),
        (doc! { "d": { "$all": [{ "$elemMatch": { "w": 8 } }] } }, 1),
        (doc! { "_id": 1, "$or": [{ "d": { "$elemMatch": { "k": 3 } } }, { "d.w": 8 }] }, 1),
        // An array that the filter does not look into takes the position in one that it does.
        (doc! { "l": { "$elemMatch": { "$gt": 1, "$lt": 6 } } }, 1),
        (doc! { "l": 7 }, 2),
    ] {
        let update = bson!({ "$set": { "d.$.new": true } });
        let found = try_update(update, filter.clone(), &[], document.clone()).unwrap();
        for (place, element) in found.get_array("d").unwrap().iter().enumerate() {
            let changed = element.as_document().unwrap().contains_key("new");
            assert_eq!(changed, place == at, "{filter}");
        }
    }
    let update = bson!({ "$set": { "m.$": 0 } });
    assert!(try_update(update, doc! { "_id": 1 }, &[], document).is_err());
}

#[test]
fn positions_stand_for_elements() {
    let document =
        doc! { "_id": 1, "l": [1, 5, 7], "d": [ { "k": 1, "v": 0 }, { "k": 2, "v": 0 } ] };
    assert_eq!(
        try_update(
            bson!({ "$set": { "l.$": 0 } }),
            doc! { "l": { "$gt": 4 } },
            &[],
            document.clone()
        )
        .unwrap()
        .get("l"),
        Some(&bson!([1, 0, 7]))
    );
    assert_eq!(
        try_update(bson!({ "$set": { "d.$.v": 9 } }), doc! { "d.k": 2 }, &[], document.clone())
            .unwrap()
            .get("d"),
        Some(&bson!([ { "k": 1, "v": 0 }, { "k": 2, "v": 9 } ]))
    );
    assert_eq!(
        try_update(bson!({ "$inc": { "l.$[]": 1 } }), doc! {}, &[], document.clone())
            .unwrap()
            .get("l"),
        Some(&bson!([2, 6, 8]))
    );
    let filters = [bson!({ "e.k": 1 })];
    assert_eq!(
        try_update(bson!({ "$set": { "d.$[e].v": 4 } }), doc! {}, &filters, document.clone())
            .unwrap()
            .get("d"),
        Some(&bson!([ { "k": 1, "v": 4 }, { "k": 2, "v": 0 } ]))
    );
    assert!(try_update(bson!({ "$set": { "l.$": 0 } }), doc! {}, &[], document.clone()).is_err());
    assert!(try_update(bson!({ "$set": { "a": 0 } }), doc! {}, &filters, document).is_err());
}

#[test]
fn replacements_and_pipelines_keep_the_identifier() {
    assert_eq!(updated(bson!({ "x": 1 }), doc! { "_id": 7, "a": 1 }), doc! { "_id": 7, "x": 1 });
    assert_eq!(
        updated(
            bson!([{ "$set": { "b": { "$add": ["$a", 1] } } }, { "$unset": "a" }]),
            doc! { "_id": 7, "a": 1 }
        ),
        doc! { "_id": 7, "b": 2 }
    );
    for update in
        [bson!({ "_id": 8 }), bson!({ "$set": { "_id": 8 } }), bson!({ "$unset": { "_id": 1 } })]
    {
        assert_eq!(
            try_update(update, doc! {}, &[], doc! { "_id": 7 }).unwrap_err().code,
            Code::ImmutableField
        );
    }
}

#[test]
fn conflicts_are_refused() {
    for update in [
        bson!({ "$set": { "a": 1 }, "$inc": { "a": 1 } }),
        bson!({ "$set": { "a": 1, "a.b": 1 } }),
        bson!({ "$rename": { "a": "b" }, "$set": { "b": 1 } }),
    ] {
        assert_eq!(
            try_update(update, doc! {}, &[], doc! {}).unwrap_err().code,
            Code::ConflictingUpdateOperators
        );
    }
    assert!(try_update(bson!({ "$nope": { "a": 1 } }), doc! {}, &[], doc! {}).is_err());
    assert_eq!(
        try_update(bson!({ "$set": { "a.b": 1 } }), doc! {}, &[], doc! { "a": 1 })
            .unwrap_err()
            .code,
        Code::PathNotViable
    );
}

#[test]
fn an_upsert_starts_from_the_query() {
    let filter = Filter::parse(&doc! { "a": 1, "b.c": { "$eq": 2 }, "d": { "$gt": 1 } }).unwrap();
    let none = ArrayFilters::default();
    let context = Context {
        filter: &filter,
        array_filters: &none,
        inserting: false,
        scope: &Scope::default(),
    };
    let update =
        Update::parse(&bson!({ "$set": { "x": 1 }, "$setOnInsert": { "y": 2 } }), &none).unwrap();
    assert_eq!(
        update.insertion(&context).unwrap(),
        doc! { "a": 1, "b": { "c": 2 }, "x": 1, "y": 2 }
    );
    let update = Update::parse(&bson!({ "x": 1 }), &none).unwrap();
    assert_eq!(update.insertion(&context).unwrap(), doc! { "x": 1 });
}

#[test]
fn an_update_does_not_nest_a_document_past_the_bound() {
    let none = ArrayFilters::default();
    let filter = Filter::all();
    let scope = Scope::default();
    let context =
        Context { filter: &filter, array_filters: &none, inserting: false, scope: &scope };
    let mut deep = bson::doc! {};
    for _ in 0..100 {
        deep = bson::doc! { "a": deep };
    }
    let path = vec!["a"; 100].join(".");
    let grow = |value: Bson| {
        Update::parse(&Bson::Document(bson::doc! { "$set": { &path: value } }), &none).unwrap()
    };
    let document = bson::doc! { "_id": 1 };
    assert!(grow(Bson::Int32(1)).apply(&document, &context).is_ok());
    let refused = grow(Bson::Document(deep)).apply(&document, &context).unwrap_err();
    assert_eq!(refused.code, Code::Overflow);
}

//! What shells and tools ask by the way, and what administrators type.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use bson::{Bson, Document, doc};

use common::Client;

#[test]
fn shells_and_administrators_are_answered_or_told_what_to_do_instead() {
    let client = Client::new();
    let was = doc! { "was": 0, "slowms": 100, "sampleRate": 1.0, "ok": 1.0 };
    for (asked, answer) in [
        (doc! { "rolesInfo": 1 }, doc! { "roles": [], "ok": 1.0 }),
        (doc! { "rolesInfo": { "role": "read", "db": "d" } }, doc! { "roles": [], "ok": 1.0 }),
        (
            doc! { "getDefaultRWConcern": 1, "$db": "admin" },
            doc! {
                "defaultReadConcern": { "level": "local" },
                "defaultWriteConcern": { "w": "majority", "wtimeout": 0 },
                "defaultWriteConcernSource": "implicit", "defaultReadConcernSource": "implicit",
                "ok": 1.0,
            },
        ),
        (doc! { "profile": -1 }, was.clone()),
        (doc! { "profile": 0 }, was.clone()),
        (doc! { "profile": -1.0 }, was),
        (doc! { "fsync": 1, "$db": "admin" }, doc! { "numFiles": 1, "ok": 1.0 }),
        (doc! { "fsync": 1, "lock": false }, doc! { "numFiles": 1, "ok": 1.0 }),
    ] {
        assert_eq!(client.run(asked.clone()), answer, "{asked}");
    }
    for (asked, code, instead) in [
        (doc! { "profile": 1 }, 115, "beeline_command_seconds"),
        (doc! { "profile": 2, "slowms": 10 }, 115, "beeline_command_seconds"),
        (doc! { "profile": "on" }, 115, "beeline_command_seconds"),
        (doc! { "fsync": 1, "lock": true }, 115, "mongodump copies collections"),
        (doc! { "fsyncUnlock": 1 }, 115, "mongodump copies collections"),
        (doc! { "shutdown": 1, "$db": "admin" }, 115, "send beeline serve a signal"),
        (doc! { "fsyncLock": 1 }, 59, "no such command: 'fsyncLock'"),
        (doc! { "find": "oplog.rs", "$db": "local" }, 115, "open a change stream"),
        (
            doc! { "aggregate": "oplog.rs", "pipeline": [], "cursor": {}, "$db": "local" },
            115,
            "dump without --oplog",
        ),
        (doc! { "top": 1 }, 59, "no such command: 'top'"),
    ] {
        let reply = client.run(asked.clone());
        let (ok, told) = (reply.get_f64("ok").unwrap(), reply.get_i32("code").unwrap());
        assert_eq!((ok, told), (0.0, code), "{asked}: {reply}");
        assert!(reply.get_str("errmsg").unwrap().contains(instead), "{asked}: {reply}");
    }
}

#[test]
fn what_is_answered_is_listed() {
    let reply = Client::new().run(doc! { "listCommands": 1 });
    let listed: &Document = reply.get_document("commands").unwrap();
    for name in ["rolesInfo", "getDefaultRWConcern", "profile", "fsync"] {
        assert!(matches!(listed.get(name), Some(Bson::Document(_))), "{name}: {reply}");
    }
}

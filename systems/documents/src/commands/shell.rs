//! What shells and tools ask by the way, and what administrators type: answered from what this node is.

use beeline_documents_query::error::{Code, Result, fail};
use bson::doc;

use super::Context;
use crate::engine::whole_field;
use crate::reply::Reply;

/// Runs one of them.
///
/// Errors: what this node does not do, each with what to do in its place; no command of this name.
pub(super) fn run(context: &Context<'_>, name: &str) -> Result<Reply> {
    match name {
        // Roles are kept with users and not looked at, so there are none to tell of.
        "rolesInfo" => Ok(Reply::Document(doc! { "roles": [], "ok": 1.0 })),
        "getDefaultRWConcern" => Ok(Reply::Document(doc! {
            "defaultReadConcern": { "level": "local" },
            "defaultWriteConcern": { "w": "majority", "wtimeout": 0 },
            "defaultWriteConcernSource": "implicit", "defaultReadConcernSource": "implicit", "ok": 1.0,
        })),
        "profile" => match whole_field(&context.request.body, "profile") {
            Some(-1 | 0) => {
                Ok(Reply::Document(doc! { "was": 0, "slowms": 100, "sampleRate": 1.0, "ok": 1.0 }))
            }
            _ => fail(
                Code::CommandNotSupported,
                "profiling is not supported: beeline_command_seconds at /metrics tells how long commands take",
            ),
        },
        // No plan is kept from one query to the next, and the collector gives space back by itself.
        "planCacheClear" | "planCacheClearFilters" => Ok(Reply::ok()),
        "planCacheListFilters" => Ok(Reply::Document(doc! { "filters": [], "ok": 1.0 })),
        "compact" => Ok(Reply::Document(doc! { "bytesFreed": 0, "ok": 1.0 })),
        "reIndex" => fail(
            Code::IllegalOperation,
            "reIndex is only allowed on a standalone server: drop the indexes and create them again",
        ),
        // A write that was acknowledged is as durable as the node promises already.
        "fsync" if !context.flag("lock") => Ok(Reply::Document(doc! { "numFiles": 1, "ok": 1.0 })),
        "fsync" | "fsyncUnlock" => fail(
            Code::CommandNotSupported,
            "writes cannot be held: mongodump copies collections while others write",
        ),
        "shutdown" => fail(
            Code::CommandNotSupported,
            "a client of documents cannot stop the node: send beeline serve a signal to end",
        ),
        "" => fail(Code::CommandNotFound, "no such command: ''"),
        other => fail(Code::CommandNotFound, format!("no such command: '{other}'")),
    }
}

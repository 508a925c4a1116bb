//! For tests of the short ways: the answer to which theirs must be equal.

use std::sync::Arc;

use bson::Document;

use super::{Context, Identity, Request, Session, run};
use crate::Engine;

/// A field beside those of a reply.
pub const EXTRA: &[u8] = b"\x10extra\0\x07\0\0\0";

/// The answer of the way that takes every command.
pub fn run_plainly(engine: &Arc<Engine>, body: Document) -> Vec<u8> {
    let identity = Identity { address: "test".to_owned(), most_connections: 1, replica_set: None };
    let mut context = Context {
        engine,
        session: &mut Session::default(),
        identity: &identity,
        database: String::new(),
        request: Request { body, ..Request::default() },
        may_wait: false,
    };
    let mut out = Vec::new();
    run(&mut context).write(EXTRA, &mut out);
    out
}

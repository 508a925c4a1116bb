//! Users of the node, in the row that holds what is the node's own.

use std::ops::ControlFlow;

use beeline_documents_query::error::Result;
use bson::Document;

use crate::engine::Engine;
use crate::layout::{SYSTEM_ROW, kind, word};
use crate::scan::decode;
use crate::scram::Credential;
use crate::store::{Change, Stretch, with_row};
use crate::write::encode;

fn key(name: &str) -> Vec<u8> {
    word(kind::RECORD, name.as_bytes())
}

/// What is stored of a user.
///
/// Errors: the store's.
pub fn find(engine: &Engine, name: &str) -> Result<Option<Document>> {
    with_row(engine.store(), SYSTEM_ROW, |row| {
        let mut bytes = Vec::new();
        if row.get(&key(name), &mut bytes)? { decode(&bytes).map(Some) } else { Ok(None) }
    })
}

/// The credential of a user.
///
/// Errors: the store's.
pub(crate) fn credential(engine: &Engine, name: &str) -> Result<Option<Credential>> {
    Ok(find(engine, name)?
        .and_then(|user| Credential::from_document(user.get_document("SCRAM-SHA-256").ok()?)))
}

/// Keeps a user.
///
/// Errors: the store's.
pub fn put(engine: &Engine, name: &str, user: &Document) -> Result<()> {
    let bytes = encode(user)?;
    with_row(engine.store(), SYSTEM_ROW, |row| {
        row.apply(&[Change::put(key(name), bytes)]).map(drop)
    })
}

/// Forgets a user; false when there is none.
///
/// Errors: the store's.
pub fn remove(engine: &Engine, name: &str) -> Result<bool> {
    let known = find(engine, name)?.is_some();
    with_row(engine.store(), SYSTEM_ROW, |row| row.apply(&[Change::delete(key(name))]).map(drop))?;
    Ok(known)
}

/// The names of all users.
///
/// Errors: the store's.
pub fn names(engine: &Engine) -> Result<Vec<String>> {
    let mut names = Vec::new();
    with_row(engine.store(), SYSTEM_ROW, |row| {
        row.range(&Stretch::of_prefix(&[kind::RECORD]), false, &mut |key, _| {
            names.push(String::from_utf8_lossy(&key[1..]).into_owned());
            ControlFlow::Continue(())
        })
    })?;
    Ok(names)
}

//! The query language of the document store, as pure functions over BSON.
//!
//! Place: `systems`, below `documents`, which adds storage, sessions and sockets. Nothing here reads
//! a clock beside `$$NOW`, opens a file or waits.
//!
//! ```text
//! value, decimal, path, regex    the order of BSON, keys that sort alike, dotted paths
//! matching, schema               which documents a filter selects
//! projection, sort, expression   what is returned of them
//! update                         what becomes of them
//! pipeline                       stages of an aggregation
//! check                          bytes of a stranger, before they become a document
//! ```
//!
//! Invariant: no input makes it panic or recurse without bound: [`check`] bounds the nesting of
//! what arrives, parsers bound that of what is written in it.

#![forbid(unsafe_code)]

pub mod check;
pub mod decimal;
pub mod error;
pub mod expression;
pub mod matching;
pub mod memory;
pub mod path;
pub mod pipeline;
pub mod projection;
pub mod regex;
pub mod schema;
pub mod sort;
pub mod update;
pub mod value;
pub mod violations;

pub use error::{Code, QueryError, Result};
pub use matching::Filter;

//! KV-Direct.
#![forbid(unsafe_code)]

pub mod bucket;
pub mod function;
pub mod memory;
pub mod slab;
pub mod packet;
pub mod processor;
mod sync;
pub mod station;
pub mod table;

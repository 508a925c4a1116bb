//! Crash-point enumeration over the key-value store on a simulated pool.
//!
//! Each history runs once and is recorded. Then, for every fence and for the legal subsets of
//! what was not flushed there, the store is opened from that image and has to show one of the
//! states between the last acknowledged one and the next. Known bugs are put back to show that
//! the suite sees them.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod bugs;
mod evicted;
mod expiries;
mod histories;
mod namespaces;
mod row_ends;
mod row_times;
mod rows;
mod streams;
mod world;

//! Network functions at run time.
//!
//! Place: `systems`, above the compiler. [`load`] reads a source file with its imports;
//! [`pcap`] reads and writes captures; [`engine`] runs a graph over ports.

#![forbid(unsafe_code)]

pub mod engine;
pub mod load;
pub mod pcap;

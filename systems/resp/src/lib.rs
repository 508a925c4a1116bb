//! The Redis protocol: codec, commands and their semantics over a keyspace.
#![forbid(unsafe_code)]

pub mod args;
pub mod extended;
pub mod glob;
pub mod number;
pub mod output;
pub mod parser;

pub use args::{Args, ArgsBuffer, Span};
pub use output::{Output, Version};
pub use parser::{Limits, ProtocolError, RequestParser};

//! The meaning of elements and graphs.
//!
//! Place: `compiler`, between the syntax tree and everything that optimises or emits. No clock,
//! thread, socket or file.
//!
//! - [`tree`]: the typed tree of an element: variables of any width, memories, structured control.
//! - [`lower`]: syntax tree to typed tree, with every check; [`graph`]: instances and channels.
//! - [`interpreter`]: **the meaning of the language**. Every back end is compared with it.
//! - [`flits`]: packets to flits and back. [`library`]: the elements that come with the compiler.
//!
//! Invariants: a lowered element names no variable, memory or port of another element; every value
//! has between 1 and 64 bits; wider things are sequences of 64-bit words, least significant first.

#![forbid(unsafe_code)]

pub mod flits;
pub mod graph;
pub mod interpreter;
pub mod library;
pub mod lower;
pub mod run;
pub mod tree;

pub use graph::{Channel, Graph, Node, Peer};
pub use lower::{Loader, compile};
pub use tree::Element;

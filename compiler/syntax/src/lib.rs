//! Source text of elements and graphs: lexer, parser, syntax tree, diagnostics.
//!
//! Place: `compiler`, the front. Nothing here knows types or meanings; `beeline-ir` lowers the tree.
//!
//! - [`source`]: files and spans; - [`diagnostic`]: what is wrong, shown with its line, or as JSON;
//! - [`lexer`], [`parser`]: text to [`ast`]. The grammar stands in `docs/nf-language.md`.
//!
//! Invariants: every text ends in a tree and a list of diagnostics, in time linear in its length;
//! no text makes the parser panic or recurse deeper than [`parser::DEEPEST`].

#![forbid(unsafe_code)]

pub mod ast;
pub mod diagnostic;
pub mod lexer;
pub mod parser;
pub mod source;

pub use diagnostic::{Diagnostic, Diagnostics};
pub use parser::parse;
pub use source::{FileId, Sources, Span};

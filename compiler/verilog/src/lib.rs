//! Verilog-2005 of scheduled elements and graphs.
//!
//! Place: `compiler`, a back end. Text only: programs that simulate or synthesise it are started by
//! `systems/nf`. [`module`] writes one element's pipeline, [`graph`] the top with its channels and
//! the chain of signals, [`mod@bench`] a test bench that plays items from files and logs every channel,
//! [`wire`] one that exchanges items with another program.
//!
//! Invariant: the text describes the machine of `beeline-passes`' cycle model, clock for clock.

#![forbid(unsafe_code)]

pub mod bench;
pub mod graph;
pub mod module;
pub mod wire;

/// Modules that every design contains: the channel and a link of the chain of signals.
pub const COMMON: &str = include_str!("common.v");

/// A name that Verilog takes.
#[must_use]
pub fn name(text: &str) -> String {
    let plain: String =
        text.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
    if plain.starts_with(|c: char| c.is_ascii_digit()) { format!("_{plain}") } else { plain }
}

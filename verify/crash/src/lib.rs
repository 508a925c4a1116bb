//! Crash suites that span crates.

#![forbid(unsafe_code)]

//! Crash suites that span crates.

//! What guests of the lab run against each other. Each program is a test that does nothing unless
//! the environment tells it what to do; the lab reads what it prints.
//!
//! - `node::client`: puts and gets on a node, for ever: says what was acknowledged, what failed and
//!   how long that took, and what is wrong.
//! - `pair::pair`: one end of a queue pair of any provider; the other end is in the other guest.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod node;
mod pair;

/// One line, at once, whole.
fn say(line: &str) {
    use std::io::Write as _;
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(format!("@{line}\n").as_bytes());
    let _ = out.flush();
}

//! The example runs, over the providers that every host has.

#![allow(clippy::unwrap_used, reason = "a test")]

#[path = "../examples/two_nodes.rs"]
mod two_nodes;

#[test]
fn two_nodes_reach_each_other() {
    for url in ["shm://", "tcp://"] {
        let (read, text, count) = two_nodes::run(url).unwrap();
        assert_eq!((read.as_str(), text.as_str(), count), ("hello", "HELLO", 7), "{url}");
    }
}

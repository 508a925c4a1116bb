//! A shard that cannot start is noticed before the node is said to be ready.
//!
//! In a binary of its own: fault points are global to the process.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use beeline_env::{FaultAction, fault};
use beeline_node::{Node, NodeError};
use common::{Client, config, start};

#[test]
fn a_node_whose_shard_cannot_start_does_not_start_and_leaves_nothing_running() {
    let mut config = config(3);
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    config.redis.as_mut().unwrap().address = free;
    // The second of the threads that get there.
    let armed = fault::arm("node.shard.start", FaultAction::Fail, 1);
    let error = Node::start(&config).unwrap_err();
    assert!(
        matches!(&error, NodeError::System { action, .. } if action.contains("shard")),
        "{error}"
    );
    assert!(std::net::TcpStream::connect(free).is_err(), "the door was opened");
    drop(armed);
    let node = start(3);
    assert_eq!(Client::connect(&node).ask("PING"), "+PONG");
    assert_eq!(node.handle().health(), Ok(()));
    node.stop();
}

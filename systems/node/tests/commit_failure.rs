//! A shard that cannot make writes durable acknowledges nothing and leaves nobody waiting.
//!
//! In a binary of its own: fault points are global to the process.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use beeline_env::{FaultAction, fault};
use beeline_node::PipelineOrder;
use common::{Client, assert_quiet, keys_of_shards, start_with};

#[test]
fn a_failed_commit_is_an_error_at_every_door_and_other_shards_go_on() {
    // A pipeline in strict order runs under both shards' locks; here it is to be forwarded.
    let node = start_with(2, |door| door.pipeline_order = PipelineOrder::Relaxed);
    let keys = keys_of_shards(&node, "k");
    // Connections are dealt in turn: the first lives on shard 0, the second on shard 1.
    let mut local = Client::connect(&node);
    assert_eq!(local.ask("PING"), "+PONG");
    let mut remote = Client::connect(&node);
    assert_eq!(remote.ask(&format!("SET {} before", keys[0])), "+OK");
    assert_eq!(remote.ask(&format!("SET {} before", keys[1])), "+OK");
    assert_eq!(node.handle().stats().loops.forwarded_commands, 1);

    let armed = fault::arm("kv.commit.before_fence", FaultAction::Fail, 0);
    // Forwarded: the reply says so, and what surrounds it is answered in order.
    remote.send(&format!("PING\r\nSET {} lost\r\nPING\r\n", keys[0]));
    remote.expect("+PONG\r\n");
    assert!(remote.reply().starts_with("-MISCONF"));
    remote.expect("+PONG\r\n");
    drop(armed);

    let ill = node.handle().health().unwrap_err();
    assert!(ill.starts_with("shard 0 could not make writes durable"), "{ill}");

    // The shard promises nothing any more: no read shows what is not durable, nobody hangs.
    let refused = remote.ask(&format!("GET {}", keys[0]));
    assert!(refused.starts_with("-MISCONF"), "{refused}");
    local.send("PING\r\n");
    assert_eq!(local.rest(), b"", "a connection of the broken shard is closed");
    // The other one goes on, alone.
    assert_eq!(remote.ask(&format!("GET {}", keys[1])), "before");
    assert_eq!(remote.ask(&format!("SET {} after", keys[1])), "+OK");
    remote.send(&format!("MGET {} {}\r\n", keys[0], keys[1]));
    assert!(remote.reply().starts_with("-MISCONF"));
    assert_eq!(remote.rest(), b"");

    assert_quiet(&node, "a shard is broken and nothing is asked for");
    node.stop();
}

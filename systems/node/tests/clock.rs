//! Somebody sets the wall clock of a running node.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use beeline_node::Node;
use common::{Client, Shifted, config, start_shifted};

const HOUR: Duration = Duration::from_secs(3600);

fn start(shards: usize, idle_timeout: Option<Duration>) -> (Node, Arc<Shifted>) {
    let mut config = config(shards);
    config.redis.as_mut().unwrap().idle_timeout = idle_timeout;
    start_shifted(&config)
}

#[test]
fn keys_follow_the_wall_clock_forward_and_never_come_back() {
    let (node, clock) = start(2, None);
    let mut client = Client::connect(&node);
    for key in 0..20 {
        assert_eq!(client.ask(&format!("SET short:{key} v EX 3600")), "+OK");
        assert_eq!(client.ask(&format!("SET long:{key} v EX 86400")), "+OK");
        assert_eq!(client.ask(&format!("SET kept:{key} v")), "+OK");
    }
    clock.jump(2 * HOUR, true);
    for key in 0..20 {
        assert_eq!(client.ask(&format!("EXISTS short:{key}")), ":0");
        assert_eq!(client.ask(&format!("EXISTS long:{key}")), ":1");
    }
    clock.jump(5 * HOUR, false);
    for key in 0..20 {
        assert_eq!(client.ask(&format!("EXISTS short:{key}")), ":0", "an expired key came back");
        assert_eq!(client.ask(&format!("EXISTS kept:{key}")), ":1");
        assert_eq!(client.ask(&format!("SET new:{key} v PX 30")), "+OK");
    }
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(client.ask("EXISTS new:0 new:7 new:19"), ":0");
    assert_eq!(client.ask("INCR n"), ":1");
    node.stop();
}

#[test]
fn a_jump_closes_no_client_as_idle() {
    let (node, clock) = start(2, Some(Duration::from_secs(600)));
    let mut clients: Vec<Client> = (0..8).map(|_| Client::connect(&node)).collect();
    for client in &mut clients {
        assert_eq!(client.ask("PING"), "+PONG");
    }
    clock.jump(2 * HOUR, true);
    // Longer than the second between two looks for idle clients.
    std::thread::sleep(Duration::from_millis(2500));
    for client in &mut clients {
        assert_eq!(client.ask("PING"), "+PONG");
    }
    node.stop();
}

#[test]
fn a_jump_back_does_not_prolong_a_pause() {
    let (node, clock) = start(2, None);
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("CLIENT PAUSE 300 ALL"), "+OK");
    clock.jump(10 * HOUR, false);
    let mut other = Client::connect(&node);
    other.stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    assert_eq!(other.ask("PING"), "+PONG");
    assert_eq!(client.ask("SET k v"), "+OK");
    node.stop();
}

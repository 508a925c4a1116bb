//! What an operator asks first: which commands ran, failed, and took long.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::time::Duration;

use beeline_node::Node;
use beeline_observe::Distribution;
use beeline_pmem::Durability;
use common::{Client, config, keys_of_shards, start, start_with};

#[test]
fn commands_are_counted_wherever_they_ran_and_a_part_of_them_is_timed() {
    let node = start(2);
    let keys = keys_of_shards(&node, "k");
    let mut client = Client::connect(&node);
    // Of either shard, one of them forwarded; in a transaction; refused; failed.
    for key in &keys {
        assert_eq!(client.ask(&format!("SET {key} text")), "+OK");
        assert!(client.ask(&format!("INCR {key}")).starts_with("-ERR value is not an integer"));
    }
    assert!(client.ask("GET").starts_with("-ERR wrong number"));
    assert!(client.ask("HGET a").starts_with("-ERR wrong number"));
    let stats = client.ask("INFO commandstats");
    for (begin, end) in [
        ("cmdstat_set:calls=2,usec=", "rejected_calls=0,failed_calls=0"),
        ("cmdstat_incr:calls=2,usec=", "rejected_calls=0,failed_calls=2"),
        ("cmdstat_get:calls=0,usec=0,usec_per_call=0.00,", "rejected_calls=1,failed_calls=0"),
    ] {
        let line = stats.split("\r\n").find(|line| line.starts_with(begin));
        assert!(line.is_some_and(|line| line.ends_with(end)), "{begin}: {stats}");
    }
    // Where no slow log is asked for: at least the first call of each shard's executor.
    let latencies = client.ask("INFO latencystats");
    for command in ["set", "incr"] {
        let line = format!("latency_percentiles_usec_{command}:p50=");
        assert!(latencies.contains(&line), "{latencies}");
    }
    let times = node.handle().command_times();
    let set = times.iter().find(|time| time.name == "set").unwrap();
    assert_eq!((set.calls, set.classes.iter().map(|(_, calls)| calls).sum::<u64>()), (2, 2));
    assert!(client.ask("INFO errorstats").contains("errorstat_ERR:count=4\r\n"));
    assert!(!client.ask("INFO").contains("cmdstat_"), "only for those who ask");
    assert!(client.ask("INFO all").contains("cmdstat_"));
    assert_eq!(client.ask("SLOWLOG LEN"), ":0");

    // From here on commands are timed, and every one of them is slow.
    assert_eq!(client.ask("CONFIG SET slowlog-log-slower-than 0 slowlog-max-len 3"), "+OK");
    for key in &keys {
        assert_eq!(client.ask(&format!("GET {key}")), "text");
    }
    assert_eq!(client.ask("SLOWLOG LEN"), ":2");
    assert_eq!(client.ask("SLOWLOG LEN"), ":3", "no more than were asked for");
    assert_eq!(client.ask("SLOWLOG LEN"), ":3");
    let mut other = Client::connect(&node);
    other.send("SLOWLOG GET 1\r\n");
    other.expect("*1\r\n*6\r\n");
    assert!(client.ask("INFO latencystats").contains("latency_percentiles_usec_get:p50="));
    node.stop();
}

#[test]
fn a_reset_begins_anew() {
    let node = start(1);
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("PING"), "+PONG");
    assert!(client.ask("NOSUCH").starts_with("-ERR unknown command"));
    assert_eq!(client.ask("CONFIG RESETSTAT"), "+OK");
    assert!(!client.ask("INFO commandstats").contains("cmdstat_ping"));
    assert!(!client.ask("INFO errorstats").contains("errorstat_"));
    assert_eq!(client.ask("CONFIG SET slowlog-log-slower-than 100000000"), "+OK");
    assert_eq!(client.ask("PING"), "+PONG");
    assert_eq!(client.ask("SLOWLOG LEN"), ":0");
    assert_eq!(client.ask("SLOWLOG RESET"), "+OK");
    client.send("LATENCY HISTOGRAM ping\r\n");
    client.expect("*2\r\n$4\r\nping\r\n*4\r\n$5\r\ncalls\r\n:1\r\n$14\r\nhistogram_usec\r\n");
    node.stop();
}

#[test]
fn the_slow_log_is_on_from_the_start_where_the_node_is_told_so() {
    let node = start_with(1, |door| door.slow_log = Some(Duration::ZERO));
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("PING"), "+PONG");
    assert_eq!(client.ask("SLOWLOG LEN"), ":1");
    assert_eq!(client.ask("CONFIG GET slowlog-log-slower-than"), "[slowlog-log-slower-than,0]");
    node.stop();
}

#[test]
fn turns_are_timed_and_commits_where_they_wait_for_the_medium() {
    for durability in [Durability::None, Durability::Power] {
        let mut config = config(2);
        config.pool.durability = durability;
        config.pool.emulate_durability = durability != Durability::None;
        // As long as a slow medium takes.
        config.pool.write_delay_ns = if durability == Durability::None { 0 } else { 100_000 };
        let node = Node::start(&config).unwrap();
        let mut client = Client::connect(&node);
        for number in 0..20 {
            assert_eq!(client.ask(&format!("SET key{number} value")), "+OK");
        }
        let (mut turns, mut commits) = (Distribution::default(), Distribution::default());
        for times in node.handle().loop_times() {
            turns.add(&Distribution::from(&times.node_turn_seconds.snapshot()));
            commits.add(&Distribution::from(&times.node_commit_seconds.snapshot()));
        }
        // The last turn is counted by the next one.
        assert!(turns.count() >= 19, "{turns:?}");
        match durability {
            Durability::None => assert_eq!(commits.count(), 0, "{commits:?}"),
            // Twenty waited. A turn with nothing to commit counts too where the clock itself is slow.
            _ => {
                let others = commits.count().checked_sub(20).expect("a commit for each request");
                let shortest = commits.quantile_ns(others * 1000 / commits.count() + 1);
                assert!(shortest >= 100_000, "{commits:?}");
            }
        }
        node.stop();
    }
}

#[test]
fn the_slow_log_keeps_no_passwords() {
    let node = start(1);
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("CONFIG SET slowlog-log-slower-than 0"), "+OK");
    // Whether a command succeeds does not matter: what a client sent was meant as a password.
    for request in [
        "AUTH hunter2",
        "AUTH default hunter2",
        "HELLO 2 AUTH default hunter2",
        "CONFIG SET requirepass hunter2",
    ] {
        client.ask(request);
    }
    assert_eq!(client.ask("SET shown hunter3"), "+OK");
    let kept = client.ask("SLOWLOG GET 100");
    assert!(kept.contains("hunter3"), "what is no password is shown: {kept}");
    assert!(kept.contains("(redacted)"), "{kept}");
    assert!(!kept.contains("hunter2"), "{kept}");
    node.stop();
}

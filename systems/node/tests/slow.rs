//! What an operator asks first: which commands ran, failed, and took long.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use common::{Client, keys_of_shards, start};

#[test]
fn commands_are_counted_wherever_they_ran_and_timed_where_the_slow_log_is_on() {
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
    for line in [
        "cmdstat_set:calls=2,usec=0,usec_per_call=0.00,rejected_calls=0,failed_calls=0",
        "cmdstat_incr:calls=2,usec=0,usec_per_call=0.00,rejected_calls=0,failed_calls=2",
        "cmdstat_get:calls=0,usec=0,usec_per_call=0.00,rejected_calls=1,failed_calls=0",
    ] {
        assert!(stats.contains(line), "{line}: {stats}");
    }
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
    assert_eq!(client.ask("CONFIG SET slowlog-log-slower-than 1000000"), "+OK");
    assert_eq!(client.ask("PING"), "+PONG");
    assert_eq!(client.ask("SLOWLOG LEN"), ":0");
    assert_eq!(client.ask("SLOWLOG RESET"), "+OK");
    client.send("LATENCY HISTOGRAM ping\r\n");
    client.expect("*2\r\n$4\r\nping\r\n*4\r\n$5\r\ncalls\r\n:1\r\n$14\r\nhistogram_usec\r\n");
    node.stop();
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

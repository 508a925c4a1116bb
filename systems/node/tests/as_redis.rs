//! What clients of Redis rely on beside the replies: watched keys, pauses, what INFO and CLIENT LIST
//! say, values too large.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends at its first failure")]

mod common;

use std::time::Duration;

use common::{Client, config, eventually, keys_of_shards, start, start_shifted};

fn info(client: &mut Client, section: &str, name: &str) -> String {
    let text = client.ask(&format!("INFO {section}"));
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.unwrap_or_else(|| panic!("{name} is not in {text}")).trim().to_owned()
}

#[test]
fn a_flush_counts_for_a_watched_absent_key_only_if_the_key_was_there_meanwhile() {
    for shards in [1, 3] {
        let node = start(shards);
        let keys = keys_of_shards(&node, "w");
        let (mut client, mut other) = (Client::connect(&node), Client::connect(&node));
        for key in &keys {
            let exec = |client: &mut Client, others: &[&str], other: &mut Client| {
                assert_eq!(client.ask(&format!("WATCH {key}")), "+OK");
                for request in others {
                    let reply = other.ask(&request.replace("KEY", key));
                    assert!(!reply.starts_with('-'), "{request}: {reply}");
                }
                client.send("MULTI\r\nPING\r\nEXEC\r\n");
                assert_eq!((client.reply(), client.reply()), ("+OK".into(), "+QUEUED".into()));
                client.reply()
            };
            assert_eq!(other.ask("FLUSHALL"), "+OK");
            for (others, wanted) in [
                (&["FLUSHDB"][..], "[+PONG]"),
                (&["FLUSHALL", "FLUSHALL"], "[+PONG]"),
                (&["SET stranger 1", "FLUSHDB"], "[+PONG]"),
                (&["SET KEY 1", "FLUSHDB"], "*-1"),
                (&["SET KEY 1", "DEL KEY", "FLUSHDB"], "*-1"),
                (&["FLUSHDB", "SET KEY 1", "DEL KEY"], "*-1"),
                (&["SET KEY 1", "DEL KEY"], "*-1"),
                (&["SELECT 1", "SET KEY 1", "FLUSHDB", "SELECT 0"], "[+PONG]"),
            ] {
                assert_eq!(exec(&mut client, others, &mut other), wanted, "{others:?} of {key}");
            }
            // A key that is there and is flushed changed.
            assert_eq!(other.ask(&format!("SET {key} 1")), "+OK");
            assert_eq!(exec(&mut client, &["FLUSHALL"], &mut other), "*-1");
        }
        node.stop();
    }
}

#[test]
fn no_key_expires_while_clients_are_paused() {
    let (node, clock) = start_shifted(&config(2));
    let keys = keys_of_shards(&node, "e");
    let (mut client, mut held) = (Client::connect(&node), Client::connect(&node));
    assert_eq!(client.ask("CLIENT PAUSE 600000 WRITE"), "+OK");
    assert_eq!(client.ask("CLIENT UNPAUSE"), "+OK");
    for key in &keys {
        assert_eq!(client.ask(&format!("SET {key} v EX 600")), "+OK");
    }
    assert_eq!(client.ask("CLIENT PAUSE 600000 WRITE"), "+OK");
    clock.jump(Duration::from_secs(3600), true);
    // Upkeep, which would delete them, comes ten times a second.
    std::thread::sleep(Duration::from_millis(1500));
    for key in &keys {
        // Its time is past, so it is absent to readers, and still not deleted.
        assert_eq!(client.ask(&format!("GET {key}")), "$-1");
    }
    assert_eq!(info(&mut client, "stats", "expired_keys"), "0");
    assert_eq!(info(&mut client, "clients", "blocked_clients"), "0");
    held.send("SET other 1\r\n");
    eventually("the held client is counted", || {
        info(&mut client, "clients", "blocked_clients") == "1"
    });
    assert_eq!(client.ask("CLIENT UNPAUSE"), "+OK");
    held.expect("+OK\r\n");
    eventually("the keys expire", || info(&mut client, "stats", "expired_keys") == "2");
    eventually("nobody is held", || info(&mut client, "clients", "blocked_clients") == "0");
    // A pause that runs out by itself ends as well.
    assert_eq!(client.ask(&format!("SET {} v PX 100", keys[0])), "+OK");
    assert_eq!(client.ask("CLIENT PAUSE 1200 WRITE"), "+OK");
    eventually("the key expires", || info(&mut client, "stats", "expired_keys") == "3");
    node.stop();
}

#[test]
fn client_list_shows_names_and_databases_of_every_shards_clients_at_once() {
    let node = start(3);
    let mut clients: Vec<Client> = (0..6).map(|_| Client::connect(&node)).collect();
    for round in 0..20 {
        for at in 0..clients.len() {
            let client = &mut clients[at];
            assert_eq!(client.ask(&format!("CLIENT SETNAME n{round}-{at}")), "+OK");
            assert_eq!(client.ask(&format!("SELECT {}", round % 16)), "+OK");
            let list = clients[(at + 1) % 6].ask("CLIENT LIST");
            let line = list.lines().find(|line| line.contains(&format!("name=n{round}-{at} ")));
            let line = line.unwrap_or_else(|| panic!("n{round}-{at} is not in {list}"));
            assert!(line.contains(&format!(" db={} ", round % 16)), "{line}");
        }
    }
    let list = clients[0].ask("CLIENT LIST");
    assert!(!list.contains("argv-mem") && !list.contains("qbuf=0 qbuf-free=0 "), "{list}");
    node.stop();
}

#[test]
fn a_value_beyond_a_segment_is_an_error_and_the_connection_goes_on() {
    for shards in [1, 2] {
        let node = start(shards);
        for key in &keys_of_shards(&node, "k") {
            let mut client = Client::connect(&node);
            let long = "x".repeat(5 << 20);
            let length = long.len();
            client.send(&format!(
                "*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${length}\r\n{long}\r\n",
                key.len()
            ));
            let reply = client.reply();
            assert!(reply.starts_with("-ERR a value of 5242880 bytes is longer"), "{reply}");
            assert_eq!(client.ask(&format!("GET {key}")), "$-1");
            assert_eq!(client.ask(&format!("SET {key} short")), "+OK");
        }
        node.stop();
    }
}

#[test]
fn a_write_above_the_memory_limit_is_refused_when_it_is_queued() {
    let mut config = config(1);
    config.max_memory_bytes = 2 << 20;
    let node = beeline_node::Node::start(&config).unwrap();
    let mut client = Client::connect(&node);
    for at in 0..100 {
        client.ask(&format!("SET k{at} {}", "x".repeat(50_000)));
    }
    let refused = client.ask(&format!("SET more {}", "x".repeat(50_000)));
    assert!(refused.starts_with("-OOM"), "{refused}");
    assert_eq!(client.ask("CONFIG SET maxmemory 1mb"), "+OK");
    assert_eq!(client.ask("MULTI"), "+OK");
    assert_eq!(client.ask("GET k1").as_str(), "+QUEUED");
    assert_eq!(client.ask("SET k1 v"), "-OOM command not allowed when used memory > 'maxmemory'.");
    let aborted = client.ask("EXEC");
    assert!(aborted.starts_with("-EXECABORT"), "{aborted}");
    // What frees is queued.
    client.send("MULTI\r\nDEL k1\r\nEXEC\r\n");
    let replies = [client.reply(), client.reply(), client.reply()];
    assert_eq!(replies, ["+OK", "+QUEUED", "[:1]"]);
    node.stop();
}

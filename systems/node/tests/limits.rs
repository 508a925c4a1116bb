//! Readers too slow, replies too large, clients too many: each bounded, each told, none in the
//! others' way.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::time::{Duration, Instant};

use beeline_node::{Node, PipelineOrder};
use common::{Client, PATIENCE, eventually, keys_of_shards, start, start_with};

#[test]
fn large_replies_of_any_shard_arrive_whole_however_deep_the_pipeline() {
    for shards in [1, 2, 3] {
        let node = start_with(shards, |door| door.output_limit_bytes = 2 << 20);
        let keys = keys_of_shards(&node, "big");
        let mut client = Client::connect(&node);
        for key in &keys {
            assert_eq!(client.ask(&format!("SET {key} {}", "x".repeat(30_000))), "+OK");
        }
        let writer = client.stream.try_clone().unwrap();
        let requests: String =
            (0..1500).map(|at| format!("GET {}\r\n", keys[at % keys.len()])).collect();
        let sender = std::thread::spawn(move || {
            std::io::Write::write_all(&mut &writer, requests.as_bytes()).unwrap();
        });
        for _ in 0..1500 {
            assert_eq!(client.reply().len(), 30_000);
        }
        sender.join().unwrap();
        assert_eq!(node.handle().stats().loops.output_limit_disconnections, 0);
        node.stop();
    }
}

#[test]
fn huge_replies_of_another_shard_after_many_small_ones_close_nobody() {
    huge_replies_after_small_ones(PipelineOrder::Strict);
    // The same, forwarded.
    assert!(huge_replies_after_small_ones(PipelineOrder::Relaxed) >= 800);
}

/// Returns how many commands were forwarded.
fn huge_replies_after_small_ones(order: PipelineOrder) -> u64 {
    let node = start_with(2, |door| {
        door.output_limit_bytes = 1 << 20;
        door.pipeline_order = order;
    });
    let keys = keys_of_shards(&node, "key");
    // The first connection lives on shard 0, the second on shard 1: one of them is far from each.
    let mut clients = [Client::connect(&node), Client::connect(&node)];
    for (client, key) in clients.iter_mut().zip(keys.iter().rev()) {
        assert_eq!(client.ask(&format!("SET {key} {}", "x".repeat(50_000))), "+OK");
        client.send(&format!("STRLEN {key}\r\n").repeat(500));
        client.send(&format!("GET {key}\r\n").repeat(300));
        // Unread for long enough that everything the node will make is made.
        std::thread::sleep(Duration::from_millis(300));
        (0..500).for_each(|_| assert_eq!(client.reply(), ":50000"));
        (0..300).for_each(|_| assert_eq!(client.reply().len(), 50_000));
    }
    let loops = node.handle().stats().loops;
    assert_eq!(loops.output_limit_disconnections, 0);
    node.stop();
    loops.forwarded_commands
}

#[test]
fn limits_on_requests_change_for_connections_that_are_there() {
    let node = start(1);
    let (mut control, mut client) = (Client::connect(&node), Client::connect(&node));
    let long = "x".repeat(1_500_000);
    let request = format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n{long}\r\n", long.len());
    client.send(&request);
    assert_eq!(client.reply(), "+OK");
    assert_eq!(control.ask("CONFIG SET proto-max-bulk-len 1mb"), "+OK");
    // Its head alone: the connection ends there, and what follows would meet a closed socket.
    client.send(&request[..request.len() - long.len() - 2]);
    assert_eq!(client.reply(), "-ERR Protocol error: invalid bulk length");
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("PING"), "+PONG");
    assert_eq!(control.ask("CONFIG SET proto-max-bulk-len 2mb"), "+OK");
    assert_eq!(control.ask("CONFIG SET client-query-buffer-limit 1mb"), "+OK");
    // Closed without a word, as by Redis.
    let _ = std::io::Write::write_all(&mut &client.stream, request.as_bytes());
    assert_eq!(client.rest(), b"");
    assert_eq!(control.ask("GET k").len(), long.len());
    node.stop();
}

#[test]
fn one_reply_beyond_the_limit_is_an_error_that_names_it() {
    for shards in [1, 2] {
        let node = start_with(shards, |door| door.output_limit_bytes = 1 << 20);
        let keys = keys_of_shards(&node, "big");
        let mut client = Client::connect(&node);
        let value = "x".repeat(60_000);
        for key in &keys {
            assert_eq!(client.ask(&format!("SET {key} {value}")), "+OK");
        }
        // At one shard, forwarded, and over all shards; behind an awaited reply and not.
        let mut requests: Vec<String> =
            keys.iter().map(|key| format!("MGET{}", format!(" {key}").repeat(200))).collect();
        requests.push(format!("MGET{}", format!(" {}", keys.join(" ")).repeat(100)));
        for request in &requests {
            for before in ["", "INCR counter\r\n", "DBSIZE\r\n"] {
                client.send(before);
                client.send(&format!("{request}\r\nPING\r\n"));
                if !before.is_empty() {
                    assert!(client.reply().starts_with(':'));
                }
                let reply = client.reply();
                assert!(reply.contains("client-output-buffer-limit"), "{}", &reply[..60]);
                assert_eq!(client.reply(), "+PONG");
            }
        }
        let mut transaction = String::from("MULTI\r\n");
        for _ in 0..30 {
            transaction += &format!("GET {}\r\n", keys[0]);
        }
        client.send(&format!("{transaction}EXEC\r\n"));
        (0..31).for_each(|_| drop(client.reply()));
        assert!(client.reply().contains("client-output-buffer-limit"));
        assert_eq!(
            client.ask("CONFIG SET client-output-buffer-limit 'normal 7 0 0'")[..4],
            *"-ERR"
        );
        assert_eq!(client.ask("CONFIG SET client-output-buffer-limit 'normal 0 0 0'"), "+OK");
        assert_eq!(client.ask(&requests[0]).len(), 200 * (value.len() + 1) + 1);
        node.stop();
    }
}

#[test]
fn a_client_that_never_stops_sending_is_served_in_bounded_memory() {
    // Requests of six bytes: thousands fit one read, more than the share of a turn.
    let node = start(2);
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("CONFIG SET client-query-buffer-limit 1mb"), "+OK");
    let mut client = Client::connect(&node);
    let writer = client.stream.try_clone().unwrap();
    const BATCHES: usize = 200;
    let sender = std::thread::spawn(move || {
        let requests = "PING\r\n".repeat(5000);
        for _ in 0..BATCHES {
            std::io::Write::write_all(&mut &writer, requests.as_bytes()).unwrap();
        }
    });
    client.expect(&"+PONG\r\n".repeat(5000 * BATCHES));
    sender.join().unwrap();
    node.stop();
}

#[test]
fn one_client_too_many_is_told_and_a_place_that_frees_is_taken() {
    let node = start_with(2, |door| door.max_clients = 3);
    let mut clients: Vec<Client> = (0..3).map(|_| Client::connect(&node)).collect();
    for client in &mut clients {
        assert_eq!(client.ask("PING"), "+PONG");
    }
    let refused = Client::connect(&node).rest();
    assert_eq!(refused, b"-ERR max number of clients reached\r\n");
    clients.pop();
    eventually("a place is free again", || {
        let mut next = Client::connect(&node);
        next.send("PING\r\n");
        next.rest_or_pong()
    });
    assert!(node.handle().stats().loops.connections_rejected >= 1);
    node.stop();
}

#[test]
fn connections_come_and_go_without_a_trace() {
    let node = start(3);
    let address = node.redis_address().unwrap();
    let threads: Vec<_> = (0..4)
        .map(|own| {
            std::thread::spawn(move || {
                for round in 0..150 {
                    let mut client = Client::to(address);
                    let key = format!("churn{own}");
                    match round % 5 {
                        0 => assert_eq!(client.ask(&format!("SET {key} {round}")), "+OK"),
                        1 => client.send(&format!("INCR {key}\r\nDBSIZE\r\nGET {key}\r\n")),
                        2 => client.send("*3\r\n$3\r\nSET\r\n$1000\r\nhalf"),
                        3 => client.send("*1\r\n:\r\n"),
                        _ => {
                            client.send("QUIT\r\n");
                            assert_eq!(client.rest(), b"+OK\r\n");
                        }
                    }
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    eventually("all clients are counted off", || node.handle().stats().connected_clients == 0);
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("CLIENT LIST").lines().count(), 1);
    node.stop();
}

#[test]
fn killed_clients_go_and_nobody_else() {
    let node = start(3);
    let mut clients: Vec<Client> = (0..6).map(|_| Client::connect(&node)).collect();
    let ids: Vec<String> =
        clients.iter_mut().map(|client| client.ask("CLIENT ID")[1..].to_owned()).collect();
    // Others, by number; a client with forwarded commands on their way.
    let mut victim = clients.remove(1);
    victim.send(&"INCR a\r\nINCR b\r\nINCR c\r\n".repeat(100));
    assert_eq!(clients[0].ask(&format!("CLIENT KILL ID {}", ids[1])), ":1");
    victim.rest();
    eventually("the victim is gone", || node.handle().stats().connected_clients == 5);
    assert_eq!(clients[0].ask(&format!("CLIENT KILL ID {}", ids[1])), ":0");
    // Itself, answered first, with what follows unexecuted.
    clients[1].send(&format!("CLIENT KILL ID {} SKIPME no\r\nSET after 1\r\n", ids[2]));
    assert_eq!(clients[1].rest(), b":1\r\n");
    assert_eq!(clients[0].ask("GET after"), "$-1");
    // Not shown any more once it does not count any more.
    eventually("the one that ended itself is gone", || {
        node.handle().stats().connected_clients == 4
    });
    // Everyone but itself.
    assert_eq!(clients[0].ask("CLIENT KILL TYPE normal"), ":3");
    eventually("one client is left", || node.handle().stats().connected_clients == 1);
    assert_eq!(clients[0].ask("PING"), "+PONG");
    assert_eq!(clients[0].ask("CLIENT KILL 127.0.0.1:1"), "-ERR No such client");
    node.stop();
}

#[test]
fn a_node_stops_in_time_with_stuck_clients_and_owes_nothing_to_the_others() {
    for shards in [1, 3] {
        let node = start_with(shards, |door| door.output_limit_bytes = 1 << 20);
        let mut stuck = Client::connect(&node);
        assert_eq!(stuck.ask(&format!("SET big {}", "x".repeat(60_000))), "+OK");
        stuck.send(&"GET big\r\n".repeat(500));
        let mut paused = Client::connect(&node);
        assert_eq!(paused.ask("CLIENT PAUSE 60000 WRITE"), "+OK");
        paused.send("SET a 1\r\n");
        let mut half = Client::connect(&node);
        half.send("*2\r\n$3\r\nGET\r\n$10\r\n");
        std::thread::sleep(Duration::from_millis(100));
        let begin = Instant::now();
        node.stop();
        assert!(begin.elapsed() < Duration::from_secs(10), "stuck clients held the node up");
    }
    // Nobody owes anything: no need to wait.
    let node = start(3);
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("MSET a 1 b 2 c 3"), "+OK");
    node.stop();
    assert_eq!(client.rest(), b"");
}

#[test]
fn errors_of_the_node_carry_one_code() {
    let node = start(1);
    let mut client = Client::connect(&node);
    let rewrite = client.ask("CONFIG REWRITE");
    assert_eq!(rewrite, "-ERR The server is running without a config file");
    assert_eq!(client.ask("SHUTDOWN ABORT"), "-ERR No shutdown in progress.");
    assert_eq!(client.ask("SHUTDOWN SAVE NOSAVE"), "-ERR syntax error");
    node.stop();
}

#[test]
fn statistics_that_were_reset_begin_again_in_info_only() {
    let node = start(2);
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("GET nothing"), "$-1");
    assert_eq!(client.ask("NONSENSE")[..4], *"-ERR");
    let errors = |client: &mut Client| client.ask("INFO stats").contains("total_error_replies:1");
    eventually("errors are counted", || errors(&mut client));
    let before = node.handle().stats().loops.commands;
    assert_eq!(client.ask("CONFIG RESETSTAT"), "+OK");
    let stats = client.ask("INFO stats");
    assert!(stats.contains("total_commands_processed:1\r"), "{stats}");
    assert!(stats.contains("keyspace_misses:0\r"), "{stats}");
    assert!(stats.contains("total_error_replies:0\r"), "{stats}");
    assert!(node.handle().stats().loops.commands > before);
    node.stop();
}

#[test]
fn a_node_that_stops_sends_the_replies_its_shards_still_owe_each_other() {
    for _ in 0..10 {
        let mut config = common::config(3);
        config.shutdown_wait = 2 * PATIENCE;
        let node = Node::start(&config).unwrap();
        let keys = keys_of_shards(&node, "owed");
        let mut clients: Vec<Client> = (0..6).map(|_| Client::connect(&node)).collect();
        for client in &mut clients {
            assert_eq!(client.ask("PING"), "+PONG");
        }
        for client in &mut clients {
            client.send(&format!("INCR {}\r\nINCR {}\r\nINCR {}\r\n", keys[0], keys[1], keys[2]));
        }
        // Whatever was taken in is answered: complete replies, then the end.
        let stopper = std::thread::spawn(move || {
            let begin = Instant::now();
            node.stop();
            begin.elapsed()
        });
        for client in &mut clients {
            let replies = client.rest();
            let lines = replies.iter().filter(|&&byte| byte == b'\n').count();
            assert!(lines == 3 || lines == 0, "{}", String::from_utf8_lossy(&replies));
        }
        assert!(stopper.join().unwrap() < PATIENCE, "somebody waited in vain");
    }
}

/// A shard that owes nothing says so once, and others rest on that word: one that took requests in later
/// could send them to a thread that has ended.
#[test]
fn a_node_that_stops_takes_in_no_request_that_comes_later() {
    let mut config = common::config(2);
    config.shutdown_wait = 2 * PATIENCE;
    let node = Node::start(&config).unwrap();
    let keys = keys_of_shards(&node, "late");
    // The first connection lives on shard 0, which owes its replies until they are read.
    let [mut owed, mut late] = [Client::connect(&node), Client::connect(&node)];
    assert_eq!(owed.ask(&format!("SET {} {}", keys[0], "x".repeat(60_000))), "+OK");
    assert_eq!(late.ask("PING"), "+PONG");
    owed.send(&format!("GET {}\r\n", keys[0]).repeat(500));
    assert_eq!(owed.reply().len(), 60_000);
    let stopper = std::thread::spawn(move || node.stop());
    late.stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    let answers = |late: &mut Client| {
        late.send("PING\r\n");
        let came = late.rest_or_pong();
        std::thread::sleep(Duration::from_millis(20));
        came
    };
    let answered = (0..100).take_while(|_| answers(&mut late)).count();
    assert!(answered < 100, "a node that stops went on serving");
    (1..500).for_each(|_| assert_eq!(owed.reply().len(), 60_000));
    stopper.join().unwrap();
    assert_eq!(late.rest(), b"");
}

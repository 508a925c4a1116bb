//! Replies come in request order, once each, whatever hops, waits and modes are in between.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use beeline_kv_direct::{LocalStore, OnReply};
use beeline_node::PipelineOrder;
use common::{Client, keys_of_shards, start, start_with};

#[test]
fn client_reply_off_and_skip_hold_for_commands_of_other_shards_too() {
    for shards in [1, 2, 3, 8] {
        let node = start(shards);
        let keys = keys_of_shards(&node, "k");
        let mut client = Client::connect(&node);
        for key in &keys {
            client.send(&format!(
                "CLIENT REPLY SKIP\r\nSET {key} 1\r\nINCR {key}\r\nCLIENT REPLY OFF\r\nINCR {key}\r\n\
                 GET {key}\r\nPING\r\nMGET {key} other\r\nCLIENT REPLY ON\r\nINCR {key}\r\n"
            ));
            client.expect(":2\r\n+OK\r\n:4\r\n");
        }
        client.send("PING\r\n");
        client.expect("+PONG\r\n");
        node.stop();
    }
}

#[test]
fn commands_over_all_shards_anywhere_in_a_long_pipeline_neither_hang_nor_overtake() {
    // The share of one turn is 256 requests: a command that waits for others stands at, before and
    // after its end.
    for shards in [2, 3, 8] {
        let node = start(shards);
        let keys = keys_of_shards(&node, "k");
        for round in 0..60 {
            let mut client = Client::connect(&node);
            let (mut requests, mut wanted) = (String::new(), String::new());
            let mut count = 0;
            for at in 1..=1100 {
                if at % 256 == (254 + round % 5) % 256 {
                    requests += "DBSIZE\r\n";
                    wanted += &format!(":{}\r\n", keys.len().min(count));
                } else {
                    requests += &format!("SET {} v{at}\r\n", keys[count % keys.len()]);
                    wanted += "+OK\r\n";
                    count += 1;
                }
            }
            client.send("FLUSHALL\r\n");
            client.expect("+OK\r\n");
            client.send(&requests);
            client.expect(&wanted);
        }
        node.stop();
    }
}

#[test]
fn many_clients_keep_exact_sums_and_their_own_order() {
    const CLIENTS: usize = 8;
    const ROUNDS: usize = 60;
    for shards in [1, 2, 3, 8] {
        let node = start(shards);
        let keys = keys_of_shards(&node, "sum");
        let address = node.redis_address().unwrap();
        let threads: Vec<_> = (0..CLIENTS)
            .map(|own| {
                let keys = keys.clone();
                std::thread::spawn(move || {
                    let mut client = Client::to(address);
                    let mut last = vec![0; keys.len()];
                    for round in 0..ROUNDS {
                        let mut requests = String::new();
                        for key in &keys {
                            requests += &format!("INCR {key}\r\nSET own{own}:{key} {round}\r\n");
                            requests += &format!("GET own{own}:{key}\r\nGET {key}\r\n");
                        }
                        client.send(&requests);
                        for seen in &mut last {
                            let incremented: i64 = client.reply()[1..].parse().unwrap();
                            assert!(incremented > *seen, "a counter went back");
                            assert_eq!(client.reply(), "+OK");
                            assert_eq!(client.reply(), round.to_string());
                            let read: i64 = client.reply().parse().unwrap();
                            assert!(read >= incremented, "a read went behind an own write");
                            *seen = read;
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let mut client = Client::connect(&node);
        for key in &keys {
            assert_eq!(client.ask(&format!("GET {key}")), (CLIENTS * ROUNDS).to_string());
        }
        node.stop();
    }
}

/// Pairs in which a reader saw a pointer to data that was not there yet, of `pairs`. The writer
/// pipelines `SET data n, SET pointer n`; data and pointer lie in different shards, the pointer in
/// that of the writer's connection.
fn torn_pairs(order: PipelineOrder, pairs: u64) -> u64 {
    let node = start_with(2, |door| door.pipeline_order = order);
    let keys = keys_of_shards(&node, "k");
    // Connections are dealt out to the shards in turn.
    let (mut first, mut second) = (Client::connect(&node), Client::connect(&node));
    let (done, torn) = (AtomicBool::new(false), AtomicU64::new(0));
    let (data, pointer) = (&keys[1], &keys[0]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let number = |text: &str| text.parse::<u64>().unwrap_or(0);
            while !done.load(Ordering::Acquire) {
                // Both at one moment.
                let both = second.ask(&format!("MGET {pointer} {data}"));
                let (pointed, there) =
                    both.trim_matches(['[', ']']).split_once(',').unwrap_or_default();
                let (pointed, there) = (number(pointed), number(there));
                torn.fetch_add(u64::from(there < pointed), Ordering::Relaxed);
            }
        });
        for chunk in 0..pairs / 100 {
            if torn.load(Ordering::Relaxed) > 0 {
                break;
            }
            let mut requests = String::new();
            for number in chunk * 100 + 1..=chunk * 100 + 100 {
                requests += &format!("SET {data} {number}\r\nSET {pointer} {number}\r\n");
            }
            first.send(&requests);
            first.expect(&"+OK\r\n".repeat(200));
        }
        done.store(true, Ordering::Release);
    });
    node.stop();
    torn.into_inner()
}

#[test]
fn a_pipeline_takes_effect_in_its_order_whatever_shards_its_keys_are_in() {
    assert_eq!(torn_pairs(PipelineOrder::Strict, 40_000), 0, "data was behind its pointer");
    // The same without the rule shows that the reader would have seen it.
    let torn = torn_pairs(PipelineOrder::Relaxed, 4_000_000);
    assert!(torn > 0, "the reader never saw what it looks for");
}

#[test]
fn a_value_acknowledged_to_one_client_is_read_by_the_next() {
    // Two clients on different shards take turns on one register: reads never miss the write that
    // was acknowledged before they began.
    let node = start(3);
    let keys = keys_of_shards(&node, "register");
    let mut clients: Vec<Client> = (0..6).map(|_| Client::connect(&node)).collect();
    for round in 0..300 {
        let key = &keys[round % keys.len()];
        let writer = round % clients.len();
        assert_eq!(clients[writer].ask(&format!("SET {key} {round}")), "+OK");
        for client in &mut clients {
            assert_eq!(client.ask(&format!("GET {key}")), round.to_string());
        }
    }
    node.stop();
}

#[test]
fn watched_keys_of_any_shard_stop_exec_when_another_client_wins() {
    const CLIENTS: usize = 6;
    const ROUNDS: usize = 25;
    for shards in [1, 2, 3] {
        let node = start(shards);
        let keys = keys_of_shards(&node, "w");
        let (first, second) = (keys[0].clone(), keys[keys.len() - 1].clone());
        let address = node.redis_address().unwrap();
        let threads: Vec<_> = (0..CLIENTS)
            .map(|_| {
                let (first, second) = (first.clone(), format!("{second}b"));
                std::thread::spawn(move || {
                    let mut client = Client::to(address);
                    for _ in 0..ROUNDS {
                        loop {
                            assert_eq!(client.ask(&format!("WATCH {first} {second}")), "+OK");
                            let read = client.ask(&format!("GET {first}"));
                            let value: i64 = read.parse().unwrap_or(0);
                            let next = value + 1;
                            client.send(&format!(
                                "MULTI\r\nSET {first} {next}\r\nSET {second} {next}\r\nEXEC\r\n"
                            ));
                            assert_eq!(client.reply(), "+OK");
                            assert_eq!(client.reply(), "+QUEUED");
                            assert_eq!(client.reply(), "+QUEUED");
                            if client.reply() == "[+OK,+OK]" {
                                break;
                            }
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let mut client = Client::connect(&node);
        let total = (CLIENTS * ROUNDS).to_string();
        assert_eq!(client.ask(&format!("MGET {first} {second}b")), format!("[{total},{total}]"));
        node.stop();
    }
}

#[test]
fn a_watched_key_that_came_and_went_counts_as_changed() {
    let node = start(2);
    let (mut client, mut other) = (Client::connect(&node), Client::connect(&node));
    for key in keys_of_shards(&node, "fleeting") {
        for (between, outcome) in [("GET x", "[+OK]"), ("DEL x", "[+OK]"), ("SET", "*-1")] {
            assert_eq!(client.ask(&format!("WATCH {key}")), "+OK");
            if between == "SET" {
                assert_eq!(other.ask(&format!("SET {key} 1")), "+OK");
                assert_eq!(other.ask(&format!("DEL {key}")), ":1");
            } else {
                other.ask(&between.replace('x', &key));
            }
            client.send("MULTI\r\nSET done 1\r\nEXEC\r\n");
            client.expect("+OK\r\n+QUEUED\r\n");
            assert_eq!(client.reply(), outcome, "after {between}");
        }
    }
    node.stop();
}

#[test]
fn commands_count_once_wherever_they_ran() {
    let node = start(3);
    let keys = keys_of_shards(&node, "c");
    let mut client = Client::connect(&node);
    for key in &keys {
        assert_eq!(client.ask(&format!("SET {key} 1")), "+OK");
    }
    let stats = node.handle().stats().loops;
    assert_eq!((stats.commands, stats.forwarded_commands), (3, 2));
    node.stop();
}

#[test]
fn a_client_in_the_place_of_one_that_left_waits_for_its_own_replies() {
    const KEYS: usize = 20_000;
    let node = start(2);
    let keys = keys_of_shards(&node, "k");
    // Connections go to the shards in turn: even ones to the first, odd ones to the second.
    let mut clients: Vec<Client> = (0..120).map(|_| Client::connect(&node)).collect();
    let mut requests = String::new();
    for key in 0..KEYS {
        requests += &format!("SET key{key} v\r\n");
    }
    clients[1].send(&requests);
    clients[1].expect(&"+OK\r\n".repeat(KEYS));
    for _ in 0..6 {
        // The second shard is busy for long, and the first has a queue of requests that it runs
        // one by one.
        clients[1].send(&format!("SCAN {} COUNT 1000000\r\n", 1_u64 << 48).repeat(10));
        for client in clients.iter_mut().step_by(2).skip(1) {
            client.send("INFO\r\n");
        }
        // One of those who wait leaves, so that its place is taken by another client, whose second
        // request waits for the busy shard's reply to its first.
        let mut successors = Vec::new();
        for _ in 0..5 {
            let mut leaving = Client::connect(&node);
            let _odd = Client::connect(&node);
            leaving.send("INFO\r\n");
            rustix::net::sockopt::set_socket_linger(&leaving.stream, Some(Duration::ZERO)).unwrap();
            drop(leaving);
            let mut successor = Client::connect(&node);
            let _odd = Client::connect(&node);
            successor.send(&format!("GET {1}\r\nMGET {0} {1}\r\n", keys[0], keys[1]));
            successors.push(successor);
        }
        for mut successor in successors {
            successor.expect("$-1\r\n*2\r\n$-1\r\n$-1\r\n");
        }
        for client in clients.iter_mut().step_by(2).skip(1) {
            assert!(client.reply().contains("redis_version"));
        }
        for _ in 0..10 {
            assert!(clients[1].reply().starts_with('['));
        }
    }
    node.stop();
}

/// A direct store that answers late, and notes what it was asked while it had not answered.
#[derive(Debug)]
struct LateStore {
    asked: Sender<OnReply>,
    under_way: Arc<AtomicU64>,
    overtaken: AtomicU64,
    processors_asked: AtomicU64,
}

impl LateStore {
    fn new() -> (Arc<Self>, Receiver<OnReply>) {
        let (asked, answers) = channel();
        let (overtaken, processors_asked) = (AtomicU64::new(0), AtomicU64::new(0));
        let store = Self { asked, under_way: Arc::default(), overtaken, processors_asked };
        (Arc::new(store), answers)
    }
}

impl LocalStore for LateStore {
    fn processors(&self) -> u32 {
        2
    }

    fn submit(&self, processor: u32, _packet: Vec<u8>, _reply_limit: usize, done: OnReply) {
        let before = self.under_way.fetch_add(1, Ordering::SeqCst);
        self.overtaken.fetch_add(u64::from(before > 0), Ordering::SeqCst);
        self.processors_asked.fetch_or(1 << processor, Ordering::SeqCst);
        self.asked.send(done).unwrap();
    }
}

#[test]
fn a_pipeline_to_the_direct_store_takes_effect_in_its_order_whatever_processors_its_keys_have() {
    const REQUESTS: usize = 100;
    // In the relaxed order requests of one pipeline are with several processors at once: that the
    // store would see them shows that it looks.
    for (order, kept) in [(PipelineOrder::Strict, true), (PipelineOrder::Relaxed, false)] {
        let node = start_with(1, |door| door.pipeline_order = order);
        let (store, answers) = LateStore::new();
        let under_way = Arc::clone(&store.under_way);
        node.handle().serve_direct(Arc::clone(&store) as Arc<dyn LocalStore>);
        let answering = std::thread::spawn(move || {
            for done in answers.iter().take(REQUESTS) {
                std::thread::sleep(Duration::from_millis(2));
                under_way.fetch_sub(1, Ordering::SeqCst);
                done(None);
            }
        });
        let mut client = Client::connect(&node);
        let requests: String = (0..REQUESTS).map(|at| format!("DIRECT.GET k{at}\r\n")).collect();
        client.send(&requests);
        for _ in 0..REQUESTS {
            assert!(client.reply().contains("did not answer"));
        }
        answering.join().unwrap();
        // Each is counted where the others are, whoever answers it; so is one that is not even asked.
        client.send("DIRECT.GET k extra\r\nDIRECT.ADD k x\r\nINFO commandstats\r\n");
        assert!(client.reply().contains("wrong number of arguments"));
        assert!(client.reply().contains("not an integer"));
        let stats = client.reply();
        for line in [
            "cmdstat_direct.get:calls=100,usec=0,usec_per_call=0.00,rejected_calls=1,failed_calls=100",
            "cmdstat_direct.add:calls=1,usec=0,usec_per_call=0.00,rejected_calls=0,failed_calls=1",
        ] {
            assert!(stats.contains(line), "{line}: {stats}");
        }
        assert_eq!(store.processors_asked.load(Ordering::SeqCst), 0b11);
        assert_eq!(store.overtaken.load(Ordering::SeqCst) == 0, kept, "{order:?}");
        node.stop();
    }
}

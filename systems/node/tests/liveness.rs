//! Nothing sleeps through work, and nothing burns a core without work.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::time::{Duration, Instant};

use beeline_node::Node;
use common::{
    Client, assert_quiet, eventually, keys_of_shards, start, start_with, turns_while_quiet,
};

#[test]
fn a_connection_dealt_while_its_shard_is_busy_is_served_without_further_news() {
    // One shard, clients that keep it working, and connections that come in pairs: none waits for
    // somebody else's news.
    let node = start(1);
    let address = node.redis_address().unwrap();
    let threads: Vec<_> = (0..3)
        .map(|_| {
            std::thread::spawn(move || {
                for _ in 0..400 {
                    let mut client = Client::to(address);
                    let mut second = Client::to(address);
                    second.send("PING\r\n");
                    client.send("PING\r\n");
                    client.expect("+PONG\r\n");
                    second.expect("+PONG\r\n");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    eventually("closed connections are counted off", || {
        node.handle().stats().connected_clients == 0
    });
    node.stop();
}

#[test]
fn an_idle_node_sleeps_with_and_without_clients() {
    for shards in [1, 3] {
        let node = start(shards);
        assert_quiet(&node, "nobody is connected");
        let mut clients: Vec<Client> = (0..20).map(|_| Client::connect(&node)).collect();
        for client in &mut clients {
            assert_eq!(client.ask("SET k v"), "+OK");
            assert_eq!(client.ask("DBSIZE"), ":1");
        }
        assert_quiet(&node, "clients are silent");
        for client in &mut clients {
            client.send("*2\r\n$3\r\nGET\r\n$100\r\nhalf a request");
        }
        assert_quiet(&node, "requests are half sent");
        node.stop();
    }
}

#[test]
fn what_other_threads_change_wakes_a_shards_thread_for_its_upkeep_and_not_each_time() {
    let node = start(1);
    let handle = node.handle();
    std::thread::sleep(Duration::from_millis(300));
    let (before, began) = (handle.stats().loops.turns, Instant::now());
    for _ in 0..1000 {
        handle.with_shards(&[0], |_| ());
        std::thread::sleep(Duration::from_micros(200));
    }
    let turns = handle.stats().loops.turns - before;
    // Upkeep is due ten times a second, and takes the thread a few turns each time.
    let most = 50 + began.elapsed().as_millis() / 5;
    assert!(u128::from(turns) <= most, "{turns} turns for 1000 changes, {most} at most");
    // It was looked after all the same.
    assert!(turns > 0, "no turn at all");
    node.stop();
}

#[test]
fn paused_clients_cost_nothing_and_lose_nothing() {
    let node = start(2);
    let keys = keys_of_shards(&node, "p");
    let mut control = Client::connect(&node);
    const PAUSE: Duration = Duration::from_secs(6);
    let began = Instant::now();
    assert_eq!(control.ask(&format!("CLIENT PAUSE {} WRITE", PAUSE.as_millis())), "+OK");
    let mut writers: Vec<Client> = (0..4).map(|_| Client::connect(&node)).collect();
    for (index, writer) in writers.iter_mut().enumerate() {
        writer.send(&format!("GET absent\r\nSET {} {index}\r\nPING\r\n", keys[index % 2]));
        writer.expect("$-1\r\n");
    }
    let mut half = Client::connect(&node);
    half.send("SET half closed\r\n");
    half.stream.shutdown(std::net::Shutdown::Write).unwrap();
    // A held-back client that goes away, and another in its place.
    let mut gone = Client::connect(&node);
    gone.send("SET gone 1\r\n");
    eventually("the request is held back", || node.handle().stats().loops.held_clients == 6);
    drop(gone);
    let mut follower = Client::connect(&node);
    assert_eq!(follower.ask("PING"), "+PONG");
    assert_quiet(&node, "requests are held back");
    // Longer than the time after which quiet connections give memory back.
    std::thread::sleep(Duration::from_millis(1700));
    let value = control.ask(&format!("GET {}", keys[0]));
    assert!(value == "$-1" || began.elapsed() >= PAUSE, "{value}: a write went on");
    for writer in &mut writers {
        writer.expect("+OK\r\n+PONG\r\n");
    }
    assert_eq!(half.rest(), b"+OK\r\n");
    assert_eq!(follower.ask("PING"), "+PONG");
    node.stop();
}

#[test]
fn clients_that_do_not_read_cost_nothing() {
    for shards in [1, 2] {
        let node = start_with(shards, |door| door.output_limit_bytes = 1 << 20);
        let mut client = Client::connect(&node);
        let value = "x".repeat(10_000);
        assert_eq!(client.ask(&format!("SET big {value}")), "+OK");
        let mut greedy = Client::connect(&node);
        greedy.send(&"GET big\r\n".repeat(3000));
        assert_quiet(&node, "a client does not read");
        greedy.stream.shutdown(std::net::Shutdown::Write).unwrap();
        assert_quiet(&node, "a half-closed client does not read");
        let replies = greedy.rest();
        assert_eq!(replies.len(), 3000 * (value.len() + "$10000\r\n\r\n".len()));
        eventually("the half-closed client is gone", || {
            node.handle().stats().connected_clients == 1
        });
        node.stop();
    }
}

#[test]
fn half_closed_and_closing_clients_cost_nothing() {
    let node = start(2);
    let mut control = Client::connect(&node);
    assert_eq!(control.ask("CLIENT PAUSE 60000 WRITE"), "+OK");
    let mut clients = Vec::new();
    for _ in 0..5 {
        // Held back, its end of file unread behind more requests.
        let mut client = Client::connect(&node);
        client.send("SET a 1\r\nGET a\r\n");
        client.stream.shutdown(std::net::Shutdown::Write).unwrap();
        clients.push(client);
    }
    assert_quiet(&node, "half-closed clients are held back");
    assert_eq!(control.ask("CLIENT UNPAUSE"), "+OK");
    for client in &mut clients {
        assert_eq!(client.rest(), b"+OK\r\n$1\r\n1\r\n");
    }
    eventually("all but one are gone", || node.handle().stats().connected_clients == 1);
    assert_quiet(&node, "all is done");
    node.stop();
}

#[test]
fn deleted_and_expired_keys_leave_a_quiet_node() {
    let node = start(2);
    let mut client = Client::connect(&node);
    let value = "x".repeat(1000);
    for _ in 0..3 {
        let mut requests = String::new();
        for key in 0..2000 {
            requests += &format!("SET key{key} {value} PX 200\r\n");
        }
        client.send(&requests);
        client.expect(&"+OK\r\n".repeat(2000));
        std::thread::sleep(Duration::from_millis(250));
    }
    eventually("keys expire without being asked for", || client.ask("DBSIZE") == ":0");
    eventually("upkeep comes to an end", || turns_while_quiet(&node) < 100);
    node.stop();
}

#[test]
fn keys_of_sleeping_shards_expire_however_they_got_there() {
    let node = start(3);
    let keys = keys_of_shards(&node, "e");
    let mut client = Client::connect(&node);
    for round in 0..8 {
        // Within a tenth of a second of each other: upkeep has just been.
        for key in &keys {
            if round % 2 == 0 {
                assert_eq!(client.ask(&format!("SET {key} 1 PX 150")), "+OK");
            } else {
                client.send(&format!(
                    "MULTI\r\nSET {0} 1 PX 150\r\nSET {1} 1 PX 150\r\n",
                    key, keys[0]
                ));
                client.send("EXEC\r\n");
                client.expect("+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n+OK\r\n+OK\r\n");
            }
        }
        // Counted without a look at the keys or a word to their shards.
        eventually("keys expire by themselves", || node.handle().stats().store.total.keys == 0);
        std::thread::sleep(Duration::from_millis(30 * round));
    }
    assert_quiet(&node, "all keys expired");
    node.stop();
}

#[test]
fn a_client_that_connects_after_a_long_sleep_is_not_taken_for_idle() {
    // Long beside the pauses below: a test that gets no processor for a second is not idle either.
    let node = start_with(1, |door| door.idle_timeout = Some(Duration::from_secs(2)));
    let mut early = Client::connect(&node);
    assert_eq!(early.ask("PING"), "+PONG");
    eventually("an idle client is closed", || node.handle().stats().connected_clients == 0);
    assert_eq!(early.rest(), b"");
    std::thread::sleep(Duration::from_millis(3500));
    let mut late = Client::connect(&node);
    for _ in 0..5 {
        std::thread::sleep(Duration::from_millis(150));
        assert_eq!(late.ask("PING"), "+PONG");
    }
    node.stop();
}

#[test]
fn names_given_in_a_row_show_up_in_other_shards_lists() {
    let node = start(2);
    let mut named = Client::connect(&node);
    let mut lister = Client::connect(&node);
    assert_eq!(named.ask("CLIENT SETINFO LIB-NAME lib"), "+OK");
    assert_eq!(named.ask("SELECT 3"), "+OK");
    assert_eq!(named.ask("CLIENT SETNAME somebody"), "+OK");
    eventually("the other shard lists the name", || {
        let list = lister.ask("CLIENT LIST");
        list.contains("name=somebody") && list.contains("db=3")
    });
    assert_quiet(&node, "names are published");
    node.stop();
}

#[test]
fn shards_that_poll_without_end_let_each_other_run() {
    // Longer than any machine is up: every shard polls all the time, eight on a few cores.
    let mut config = common::config(4);
    config.spin = Duration::from_secs(100 * 365 * 24 * 3600);
    let nodes = [Node::start(&config).unwrap(), Node::start(&config).unwrap()];
    let mut clients: Vec<Client> = nodes.iter().map(Client::connect).collect();
    for round in 0..50 {
        for client in &mut clients {
            assert_eq!(client.ask(&format!("SET key{round} {round}")), "+OK");
            assert_eq!(client.ask(&format!("GET key{round}")), round.to_string());
        }
    }
    for node in nodes {
        let loops = node.handle().stats().loops;
        assert!(loops.yields > 0, "{loops:?}");
        node.stop();
    }
}

#[test]
fn a_shortage_wakes_a_sleeping_shard_that_holds_garbage() {
    const VALUE: usize = 10_000;
    let mut config = common::config(2);
    config.pool.segment_bytes = 64 << 10;
    config.pool.capacity_bytes = 96 * u64::from(config.pool.segment_bytes);
    let node = Node::start(&config).unwrap();
    // Connections go to the shards in turn, so each client wakes one shard only.
    let (mut filler, mut sleeper) = (Client::connect(&node), Client::connect(&node));
    let keys = |shard: usize| {
        let (shards, seed) = (node.shards(), node.hash_seed());
        (0..).map(|number| format!("key{number}")).filter(move |key| {
            let hash = beeline_kv::hash_key(seed, 0, key.as_bytes());
            beeline_kv::shard_of_hash(hash, shards) == shard
        })
    };
    // Every second value of the second shard is overwritten: a little garbage everywhere, less
    // than is worth collecting while there is room.
    let value = "v".repeat(VALUE);
    let theirs: Vec<String> = keys(1).take(60).collect();
    for key in theirs.iter().chain(theirs.iter().step_by(2)) {
        assert_eq!(sleeper.ask(&format!("SET {key} {value}")), "+OK");
    }
    eventually("both shards sleep for good", || turns_while_quiet(&node) == 0);
    let collected = node.handle().stats().store.total.segments_collected;
    let mut refused = false;
    for key in keys(0).take(2000) {
        refused |= filler.ask(&format!("SET {key} {value}")).starts_with("-OOM");
        if refused {
            // Nothing of the first shard's is garbage: what makes room lies with the other one.
            eventually("the other shard gives up garbage", || {
                filler.ask(&format!("SET {key} {value}")) == "+OK"
            });
            break;
        }
    }
    assert!(refused, "the pool never filled");
    assert!(node.handle().stats().store.total.segments_collected > collected);
    for key in &theirs {
        assert_eq!(sleeper.ask(&format!("STRLEN {key}")), format!(":{VALUE}"));
    }
    node.stop();
}

//! A second protocol in the shard threads: what the node gives the Redis door it gives any wire.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends at its first failure")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use beeline_kv::PutOptions;
use beeline_node::wire::{
    After, Args, ArgsBuffer, Effect, Head, Keyspace, Opened, Output, Refusal, Route, Scope,
    ShardSet, Step, Store, Wire, WirePlan, WireSession, WireWorker,
};
use beeline_node::{Node, WireDoor};
use common::{Client, config, keys_of_shards};

/// Lines: `put KEY VALUE`, `get KEY`, `all KEY KEY...`, `fill KEY LENGTH`, `bye`; `half KEY VALUE` panics
/// in the middle of a batch.
#[derive(Debug)]
struct Lines {
    carried: Arc<AtomicU64>,
}

impl Wire for Lines {
    fn name(&self) -> &'static str {
        "lines"
    }

    fn full(&self) -> Vec<u8> {
        b"full\n".to_vec()
    }

    fn worker(&self, _shard: usize) -> Box<dyn WireWorker> {
        Box::new(Worker { carried: Arc::clone(&self.carried) })
    }
}

#[derive(Debug)]
struct Worker {
    carried: Arc<AtomicU64>,
}

impl WireWorker for Worker {
    fn open(&mut self, opened: Opened) -> Box<dyn WireSession> {
        assert!(opened.id > 0 && opened.address.contains(':'));
        Box::new(Session { room: vec![0; 4096], received: Vec::new(), request: ArgsBuffer::new() })
    }

    fn execute_carried(
        &mut self,
        head: Head,
        request: Args<'_>,
        keyspace: &mut Keyspace<'_>,
        out: &mut Output,
    ) {
        assert_eq!(head, Head([7; 8]));
        self.carried.fetch_add(1, Ordering::Relaxed);
        run(request, keyspace, out);
    }

    fn errors(&self) -> u64 {
        0
    }
}

#[derive(Debug)]
struct Session {
    room: Vec<u8>,
    received: Vec<u8>,
    request: ArgsBuffer,
}

fn run(request: Args<'_>, keyspace: &mut Keyspace<'_>, out: &mut Output) {
    let mut value = |key: &[u8]| {
        let entry = keyspace.lookup(0, key).unwrap()?;
        let mut value = Vec::new();
        keyspace.read_value(&entry, &mut value).unwrap();
        Some(value)
    };
    if request.is(0, "put") {
        let value = [request.get(2)];
        keyspace.put(0, request.get(1), &value, PutOptions::default()).unwrap();
        out.part(b"ok");
    } else if request.is(0, "half") {
        keyspace.begin_batch();
        keyspace.put(0, request.get(1), &[request.get(2)], PutOptions::default()).unwrap();
        panic!("a fault of the wire");
    } else if request.is(0, "fill") {
        let length: usize = String::from_utf8_lossy(request.get(2)).parse().unwrap();
        (0..length / 1000).for_each(|_| out.part(&[b'x'; 1000]));
    } else {
        for key in request.from(1) {
            out.part(&value(key).unwrap_or_else(|| b"none".to_vec()));
            out.part(b";");
        }
    }
    out.part(b"\n");
}

impl WireSession for Session {
    fn room(&mut self) -> &mut [u8] {
        &mut self.room
    }

    fn received(&mut self, count: usize) -> Result<(), String> {
        self.received.extend_from_slice(&self.room[..count]);
        Ok(())
    }

    fn pending_bytes(&self) -> usize {
        self.received.len()
    }

    fn advance(&mut self, out: &mut Output) -> Step {
        let Some(end) = self.received.iter().position(|&byte| byte == b'\n') else {
            return Step::Incomplete;
        };
        let line: Vec<u8> = self.received.drain(..=end).collect();
        let words: Vec<&[u8]> = line[..end].split(|&byte| byte == b' ').collect();
        if !matches!(words[0], b"put" | b"get" | b"all" | b"fill" | b"bye" | b"half") {
            out.raw(b"nonsense\n");
            return Step::Broken;
        }
        self.request.clear();
        assert!(self.request.push_words(&words));
        Step::Request
    }

    fn plan(&mut self, store: &Store) -> WirePlan {
        let request = self.request.get(0);
        let put = request.is(0, "put");
        let shards: Vec<usize> = request
            .from(1)
            .take(if put { 1 } else { 9 })
            .map(|key| store.shard_of(0, key))
            .collect();
        let route = match shards.as_slice() {
            [] => Route::Here,
            _ if request.is(0, "fill") || request.is(0, "half") => Route::Shard(shards[0]),
            [one] => Route::Shard(*one),
            several => {
                let mut set = ShardSet::new();
                several.iter().for_each(|&shard| set.insert(shard));
                Route::Shards(set)
            }
        };
        let effect = if put { Effect::Write } else { Effect::Read };
        WirePlan { route, scope: Scope::Keys, effect, writes: put, portable: true }
    }

    fn execute(&mut self, keyspace: &mut Keyspace<'_>, out: &mut Output) -> After {
        let request = self.request.get(0);
        if request.is(0, "bye") {
            out.raw(b"bye\n");
            return After::Close;
        }
        run(request, keyspace, out);
        After::Continue
    }

    fn carry(&self) -> (Head, Args<'_>) {
        (Head([7; 8]), self.request.get(0))
    }

    fn refuse(&mut self, refusal: &Refusal<'_>, out: &mut Output) {
        out.raw(format!("refused {refusal:?}\n").as_bytes());
    }
}

struct Both {
    node: Node,
    carried: Arc<AtomicU64>,
}

impl Both {
    fn start(shards: usize, output_limit_bytes: usize) -> Self {
        let carried = Arc::<AtomicU64>::default();
        let wire = Arc::new(Lines { carried: Arc::clone(&carried) });
        let door = WireDoor { address: "127.0.0.1:0".parse().unwrap(), wire };
        let mut config = config(shards);
        if let Some(redis) = &mut config.redis {
            (redis.max_clients, redis.output_limit_bytes) = (6, output_limit_bytes);
        }
        Self { node: Node::start_with(&config, vec![door]).unwrap(), carried }
    }

    fn lines(&self) -> Client {
        Client::to(self.node.wire_address("lines").unwrap())
    }
}

#[test]
fn a_second_wire_shares_the_keys_the_hops_and_the_order_with_the_first() {
    for shards in [1, 2, 3] {
        let both = Both::start(shards, 0);
        let keys = keys_of_shards(&both.node, "k");
        let (mut lines, mut redis) = (both.lines(), Client::connect(&both.node));
        for round in 0..50 {
            let (mut requests, mut wanted) = (String::new(), String::new());
            for key in &keys {
                requests += &format!("put {key} {round}\nget {key}\n");
                wanted += &format!("ok\n{round};\n");
            }
            requests += &format!("all {}\nget absent\n", keys.join(" "));
            wanted += &format!("{}\nnone;\n", format!("{round};").repeat(keys.len()));
            lines.send(&requests);
            lines.expect(&wanted);
            for key in &keys {
                assert_eq!(redis.ask(&format!("GET {key}")), round.to_string());
                assert_eq!(redis.ask(&format!("SET {key} r{round}")), "+OK");
                // One at a time: carried to the shard of its key.
                lines.send(&format!("get {key}\n"));
                lines.expect(&format!("r{round};\n"));
            }
        }
        let carried = both.carried.load(Ordering::Relaxed);
        assert_eq!(carried >= 50 * (shards as u64 - 1), shards > 1 || carried == 0, "{carried}");
        assert_eq!(both.node.handle().stats().loops.error_replies, 0);
        both.node.stop();
    }
}

#[test]
fn a_second_wire_is_refused_in_its_own_words() {
    let both = Both::start(2, 64 << 10);
    let keys = keys_of_shards(&both.node, "k");
    let mut lines = both.lines();
    for key in &keys {
        // Here and carried: past the limit on unread replies.
        lines.send(&format!("fill {key} 100000\n"));
        lines.expect("refused ReplyTooLarge\n");
        lines.send(&format!("put {key} 1\n"));
        lines.expect("ok\n");
    }
    let mut broken = both.lines();
    broken.send("what\nget k\n");
    assert_eq!(broken.rest(), b"nonsense\n");
    let mut polite = both.lines();
    polite.send("bye\n");
    assert_eq!(polite.rest(), b"bye\n");
    // The limit on clients counts all wires.
    common::eventually("clients that left are gone", || {
        both.node.handle().stats().connected_clients == 1
    });
    let _held: Vec<Client> = (0..5).map(|_| Client::connect(&both.node)).collect();
    common::eventually("five more", || both.node.handle().stats().connected_clients == 6);
    assert_eq!(both.lines().rest(), b"full\n");
    both.node.stop();
}

/// Whether a client, or the node itself, asks that the node is stopped.
fn is_asked_to_stop(node: &Node) -> bool {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let handle = node.handle();
    let asked = handle.shutdown_requested();
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(&asked, PollFlags::IN)], Some(&now)).unwrap() > 0
}

#[test]
fn a_shard_whose_thread_panics_asks_for_the_end_says_why_and_keeps_what_it_acknowledged() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(2);
    config.data_directory = directory.path().to_owned();
    config.pool.kind = Some(beeline_pmem::PoolKind::File);
    config.pool.durability = beeline_pmem::Durability::Process;
    config.pool.capacity_bytes = 64 << 20;
    let start = || {
        let wire = Arc::new(Lines { carried: Arc::default() });
        let door = WireDoor { address: "127.0.0.1:0".parse().unwrap(), wire };
        Node::start_with(&config, vec![door]).unwrap()
    };
    let node = start();
    let keys = keys_of_shards(&node, "k");
    let mut redis = Client::connect(&node);
    for key in &keys {
        assert_eq!(redis.ask(&format!("SET {key} before")), "+OK");
    }
    assert_eq!((node.handle().failure(), is_asked_to_stop(&node)), (None, false));
    let mut lines = Client::to(node.wire_address("lines").unwrap());
    lines.send(&format!("half {} half\n", keys[0]));
    common::eventually("the node asks for its end", || is_asked_to_stop(&node));
    let handle = node.handle();
    let failure = handle.failure().unwrap();
    assert!(failure.starts_with("the thread of shard 0 panicked"), "{failure}");
    assert!(handle.health().unwrap_err().starts_with("shard 0"));
    drop(handle);
    // What the thread left half done is not closed in good order.
    node.stop();
    let node = start();
    let mut redis = Client::connect(&node);
    for key in &keys {
        assert_eq!(redis.ask(&format!("GET {key}")), "before");
    }
    assert_eq!(node.handle().failure(), None);
    node.stop();
}

#[test]
fn a_pause_of_writes_holds_every_wire() {
    let both = Both::start(2, 0);
    let keys = keys_of_shards(&both.node, "k");
    let (mut lines, mut redis) = (both.lines(), Client::connect(&both.node));
    assert_eq!(redis.ask("CLIENT PAUSE 60000 WRITE"), "+OK");
    lines.send(&format!("get {0}\nput {0} 1\n", keys[0]));
    lines.expect("none;\n");
    lines.stream.set_read_timeout(Some(Duration::from_millis(1200))).unwrap();
    assert!(std::io::Read::read(&mut lines.stream, &mut [0]).is_err(), "a write went on");
    assert_eq!(redis.ask("CLIENT UNPAUSE"), "+OK");
    lines.stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
    lines.expect("ok\n");
    both.node.stop();
}

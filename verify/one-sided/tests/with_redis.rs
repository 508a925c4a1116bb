//! One-sided clients and Redis clients of one node at `power` on files: nothing that one of them is told rests on
//! what is not persisted, be it the other one's.
//!
//! In a binary of its own: fault points are global to the process.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends at its first failure")]

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use beeline_env::{ArmedFault, FaultAction, fault};
use beeline_fabric::{ConnectInfo, Device};
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_kv::Eviction;
use beeline_kv_client::{
    Answer, Client, ClientError, ClientOptions, Command, ConnectError, Connector, PutOptions,
};
use beeline_node::{FabricIncoming, Node, NodeConfig, RedisDoor};
use beeline_pmem::{Durability, PoolKind, PoolOptions};

const PATIENCE: Duration = Duration::from_secs(20);
const SYNC: &str = "pmem.file.sync";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !done() {
        assert!(begin.elapsed() < PATIENCE, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A node of one shard whose commits wait for files, and the device of its one-sided clients.
struct OnFiles {
    node: Arc<Node>,
    device: Arc<dyn Device>,
    config: NodeConfig,
    directory: tempfile::TempDir,
    _alone: MutexGuard<'static, ()>,
}

fn on_files() -> OnFiles {
    let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let config = NodeConfig {
        data_directory: directory.path().to_owned(),
        pool: PoolOptions {
            kind: Some(PoolKind::File),
            durability: Durability::Power,
            // The machine's directory for temporary files may be in memory.
            emulate_durability: true,
            segment_bytes: 1 << 20,
            capacity_bytes: 128 << 20,
            ..PoolOptions::default()
        },
        shards: 1,
        pin_shards: false,
        spin: Duration::from_micros(20),
        max_memory_bytes: 0,
        feed_bytes: 0,
        eviction: Eviction::NoEviction,
        cooperative_write_back: true,
        accept_damage: false,
        fabric: Default::default(),
        shutdown_wait: PATIENCE,
        redis: Some(RedisDoor::at("127.0.0.1:0".parse().unwrap())),
        replication: None,
    };
    let node = Arc::new(Node::start(&config).unwrap());
    let device = ShmDevice::in_process(ShmConfig::default()).unwrap();
    let files = OnFiles { node, device, config, directory, _alone: alone };
    assert_eq!(files.redis().ask("SET warm value"), "+OK");
    files
}

/// Reaches the node without a bootstrap exchange.
#[derive(Debug)]
struct Here {
    node: Arc<Node>,
    device: Arc<dyn Device>,
}

impl Connector for Here {
    fn device(&mut self) -> Result<Arc<dyn Device>, ConnectError> {
        Ok(Arc::clone(&self.device))
    }

    fn exchange(
        &mut self,
        shard: u16,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), ConnectError> {
        let (sender, answer) = channel();
        self.node.handle().accept_fabric(FabricIncoming {
            shard: usize::from(shard),
            device: Arc::clone(&self.device),
            peer: info.clone(),
            payload: hello.to_vec(),
            reply: Box::new(move |accepted| drop(sender.send(accepted))),
        });
        let accepted = answer.recv().unwrap().unwrap();
        Ok((accepted.connect_info.unwrap(), accepted.payload))
    }
}

impl OnFiles {
    fn one_sided(&self) -> Client {
        let here = Here { node: Arc::clone(&self.node), device: Arc::clone(&self.device) };
        let options = ClientOptions {
            timeout: PATIENCE,
            spin: Duration::ZERO,
            reconnect: false,
            ..ClientOptions::default()
        };
        Client::connect(Box::new(here), options).unwrap()
    }

    /// Logs have their segments, and upkeep nothing to commit: what is held later is a client's.
    fn come_to_rest(&self) {
        eventually("the node comes to rest", || {
            let turns = || self.node.handle().stats().loops.turns;
            let before = turns();
            std::thread::sleep(Duration::from_millis(300));
            turns() - before < 60
        });
    }

    fn redis(&self) -> Redis {
        let stream = TcpStream::connect(self.node.redis_address().unwrap()).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_nodelay(true).unwrap();
        Redis(stream)
    }

    /// What a later start finds.
    fn restart(self) -> Self {
        let Self { node, device, config, directory, _alone } = self;
        let node = Arc::into_inner(node).unwrap();
        node.stop();
        let node = Arc::new(Node::start(&config).unwrap());
        Self { node, device, config, directory, _alone }
    }
}

struct Redis(TcpStream);

impl Redis {
    fn send(&mut self, request: &str) {
        self.0.write_all(format!("{request}\r\n").as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            let mut byte = [0];
            self.0.read_exact(&mut byte).unwrap();
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap().trim_end().to_owned()
    }

    /// A line, or a value.
    fn reply(&mut self) -> String {
        let line = self.line();
        if line.starts_with('$') && line != "$-1" { self.line() } else { line }
    }

    fn ask(&mut self, request: &str) -> String {
        self.send(request);
        self.reply()
    }

    /// No byte of a reply has come.
    fn is_silent(&self) -> bool {
        self.0.set_nonblocking(true).unwrap();
        let peeked = self.0.peek(&mut [0]);
        self.0.set_nonblocking(false).unwrap();
        matches!(peeked, Err(error) if error.kind() == ErrorKind::WouldBlock)
    }
}

fn until_passed(armed: &ArmedFault, what: &str) {
    eventually(what, || armed.hits() > 0);
}

fn put<'a>(key: &'a str, value: &'a str) -> Command<'a> {
    let (key, value) = (key.as_bytes(), value.as_bytes());
    Command::Put { database: 0, key, value, options: PutOptions::default() }
}

/// Answers that have come by now.
fn answers(client: &mut Client) -> Vec<Result<Option<Vec<u8>>, ClientError>> {
    let mut all = Vec::new();
    let _ = client.poll(&mut |_, answer: Result<Answer<'_>, ClientError>| {
        all.push(answer.map(|answer| match answer {
            Answer::Value { bytes, .. } => Some(bytes.to_vec()),
            _ => None,
        }));
    });
    all
}

fn answer(client: &mut Client) -> Result<Option<Vec<u8>>, ClientError> {
    let mut came = Vec::new();
    eventually("an answer", || {
        came.append(&mut answers(client));
        !came.is_empty()
    });
    assert_eq!(came.len(), 1);
    came.remove(0)
}

#[test]
fn what_one_kind_of_client_wrote_is_shown_to_the_other_once_it_is_persisted() {
    let files = on_files();
    let (mut client, mut redis, mut other) = (files.one_sided(), files.redis(), files.redis());
    for key in ["key", "both"] {
        assert_eq!(redis.ask(&format!("SET {key} before")), "+OK");
    }
    assert!(client.put(0, b"key", b"between", PutOptions::default()).is_ok());
    files.come_to_rest();
    // A put: a client that reads it waits with it.
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    client.submit(put("key", "after")).unwrap();
    client.flush();
    until_passed(&held, "the put's commit synchronises");
    redis.send("GET key");
    other.send("SET both after");
    // While it waits its shard serves no client: a request in the socket is no reply.
    assert!(answers(&mut client).is_empty() && redis.is_silent() && other.is_silent());
    drop(held);
    assert!(answer(&mut client).unwrap().is_none());
    assert_eq!((redis.reply(), other.reply()), ("after".to_owned(), "+OK".to_owned()));
    // A SET: its shard serves on, and a one-sided get of it has to wait.
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    redis.send("SET key third");
    until_passed(&held, "the SET's commit synchronises");
    client.submit(Command::Get { database: 0, key: b"key" }).unwrap();
    client.submit(put("both", "third")).unwrap();
    client.flush();
    eventually("its shard waits with the get", || {
        other.send("PING");
        std::thread::sleep(Duration::from_millis(200));
        other.is_silent() || other.reply() != "+PONG"
    });
    assert!(answers(&mut client).is_empty() && redis.is_silent());
    drop(held);
    assert_eq!((redis.reply(), other.reply()), ("+OK".into(), "+PONG".into()));
    let mut came = Vec::new();
    eventually("both answers", || {
        came.append(&mut answers(&mut client));
        came.len() == 2
    });
    assert_eq!(came.remove(0).unwrap().unwrap(), b"third");
    assert!(came.remove(0).unwrap().is_none());
    drop(client);
    let files = files.restart();
    let mut redis = files.redis();
    assert_eq!((redis.ask("GET key"), redis.ask("GET both")), ("third".into(), "third".into()));
}

#[test]
fn a_failed_synchronisation_is_an_error_for_both_kinds_of_client() {
    let files = on_files();
    let (mut client, mut redis) = (files.one_sided(), files.redis());
    assert_eq!(redis.ask("SET key before"), "+OK");
    files.come_to_rest();
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    redis.send("SET key lost");
    until_passed(&held, "the SET's commit synchronises");
    client.submit(put("key", "lost too")).unwrap();
    client.submit(Command::Get { database: 0, key: b"key" }).unwrap();
    client.flush();
    let failing = fault::arm(SYNC, FaultAction::Fail, 0);
    drop(held);
    let mut came = Vec::new();
    eventually("both answers", || {
        came.append(&mut answers(&mut client));
        came.len() == 2
    });
    assert!(came.iter().all(Result::is_err), "{came:?}");
    // The one that was held up may have ended well before the next one failed.
    let reply = redis.reply();
    assert!(reply == "+OK" || reply.starts_with("-MISCONF"), "{reply}");
    drop(failing);
}

//! A node in this process, reached over real sockets.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use beeline_node::{Node, NodeConfig};
use common::{config, start};

mod common;

fn start_in(shards: usize, directory: &std::path::Path) -> Node {
    let config = NodeConfig { data_directory: directory.to_owned(), ..config(shards) };
    Node::start(&config).unwrap()
}

struct Client(TcpStream);

impl Client {
    fn connect(node: &Node) -> Self {
        let stream = TcpStream::connect(node.redis_address().unwrap()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        Self(stream)
    }

    fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).unwrap();
    }

    fn expect(&mut self, reply: &str) {
        let mut received = vec![0; reply.len()];
        self.0.read_exact(&mut received).unwrap();
        assert_eq!(String::from_utf8_lossy(&received), reply);
    }
}

#[test]
fn a_pipeline_over_all_shards_is_answered_in_order() {
    for shards in [1, 2, 3] {
        let node = start(shards);
        let mut client = Client::connect(&node);
        let (mut requests, mut replies) = (String::new(), String::new());
        for i in 0..500 {
            requests += &format!("SET key{i} value{i}\r\nGET key{i}\r\nPING\r\n");
            let value = format!("value{i}");
            replies += &format!("+OK\r\n${}\r\n{value}\r\n+PONG\r\n", value.len());
        }
        requests += "DBSIZE\r\n";
        replies += ":500\r\n";
        client.send(&requests);
        client.expect(&replies);
        node.stop();
    }
}

#[test]
fn commands_over_several_shards_act_as_one() {
    let node = start(3);
    let mut client = Client::connect(&node);
    client.send("MSET a 1 b 2 c 3 d 4 e 5\r\nMGET a b c d e x\r\n");
    client.expect("+OK\r\n*6\r\n$1\r\n1\r\n$1\r\n2\r\n$1\r\n3\r\n$1\r\n4\r\n$1\r\n5\r\n$-1\r\n");
    client.send("MULTI\r\nINCR a\r\nINCR b\r\nINCR c\r\nEXEC\r\nDEL a b c d e\r\nDBSIZE\r\n");
    client.expect("+OK\r\n+QUEUED\r\n+QUEUED\r\n+QUEUED\r\n*3\r\n:2\r\n:3\r\n:4\r\n:5\r\n:0\r\n");
    client.send("INFO keyspace\r\n");
    client.expect("$12\r\n# Keyspace\r\n\r\n");
    node.stop();
}

#[test]
fn concurrent_transactions_over_all_shards_neither_block_nor_interleave() {
    let node = start(3);
    let threads: Vec<_> = (0..4)
        .map(|_| {
            let mut client = Client::connect(&node);
            std::thread::spawn(move || {
                for _ in 0..100 {
                    client.send("MULTI\r\nINCR a\r\nINCR b\r\nINCR c\r\nINCR d\r\nEXEC\r\n");
                    let mut received = String::new();
                    while received.matches("\r\n").count() < 10 {
                        let mut bytes = [0; 256];
                        let count = client.0.read(&mut bytes).unwrap();
                        received += std::str::from_utf8(&bytes[..count]).unwrap();
                    }
                    let numbers: Vec<_> =
                        received.lines().filter(|line| line.starts_with(':')).collect();
                    assert_eq!(numbers.len(), 4, "{received}");
                    assert!(numbers.iter().all(|number| *number == numbers[0]), "{received}");
                }
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    let mut client = Client::connect(&node);
    client.send("MGET a d\r\n");
    client.expect("*2\r\n$3\r\n400\r\n$3\r\n400\r\n");
    node.stop();
}

#[test]
fn a_half_closed_client_gets_its_replies_and_a_broken_one_its_error() {
    let node = start(2);
    let mut client = Client::connect(&node);
    client.send("SET k v\r\nGET k\r\nGET z\r\n");
    client.0.shutdown(std::net::Shutdown::Write).unwrap();
    let mut all = String::new();
    client.0.read_to_string(&mut all).unwrap();
    assert_eq!(all, "+OK\r\n$1\r\nv\r\n$-1\r\n");

    let mut broken = Client::connect(&node);
    broken.send("*1\r\n:4\r\nPING\r\n");
    let mut all = String::new();
    broken.0.read_to_string(&mut all).unwrap();
    assert_eq!(all, "-ERR Protocol error: expected '$', got ':'\r\n");
    let mut other = Client::connect(&node);
    other.send("GET k\r\n");
    other.expect("$1\r\nv\r\n");
    node.stop();
}

#[test]
fn snapshots_are_written_while_clients_wait_and_in_the_background() {
    let directory = tempfile::tempdir().unwrap();
    let node = start_in(2, directory.path());
    let mut client = Client::connect(&node);
    client.send("MSET a 1 b 2 c 3\r\nSAVE\r\n");
    client.expect("+OK\r\n+OK\r\n");
    let path = directory.path().join(beeline_node::SNAPSHOT_FILE_NAME);
    assert_eq!(beeline_kv::check_snapshot(&path).unwrap().records, 3);
    client.send("SET d 4\r\nBGSAVE\r\n");
    client.expect("+OK\r\n+Background saving started\r\n");
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    while beeline_kv::check_snapshot(&path).unwrap().records != 4 {
        assert!(std::time::Instant::now() < deadline, "the background snapshot never came");
        std::thread::sleep(Duration::from_millis(5));
    }
    node.stop();
}

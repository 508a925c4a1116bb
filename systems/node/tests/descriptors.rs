//! A node that runs out of descriptors keeps its clients, and takes the next one when it can.
//!
//! In a binary of its own: the limit is the process's.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use common::{Client, eventually, start};
use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, socket_with};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[test]
fn without_descriptors_new_clients_wait_and_old_ones_are_served() {
    let node = start(2);
    let mut early = Client::connect(&node);
    assert_eq!(early.ask("SET k v"), "+OK");
    let maximum = getrlimit(Resource::Nofile).maximum;
    setrlimit(Resource::Nofile, Rlimit { current: Some(200), maximum }).unwrap();
    // Who comes last has his descriptor already.
    let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
    let late = socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
    // Each takes a descriptor here and one at the node, until there is none for either. The kernel
    // completes connections that nobody accepts.
    // Looked at twice: `accept` has a descriptor for a moment where nobody is waiting.
    let (mut clients, mut refused) = (Vec::new(), 0);
    while refused < 2 {
        let Ok(stream) = std::net::TcpStream::connect(node.redis_address().unwrap()) else {
            refused += 1;
            std::thread::sleep(std::time::Duration::from_millis(20));
            continue;
        };
        refused = 0;
        clients.push(stream);
        assert!(clients.len() < 400, "the limit holds nobody up");
    }
    connect(&late, &node.redis_address().unwrap()).unwrap();
    assert_eq!(early.ask("GET k"), "v");
    let served = node.handle().stats().connected_clients;
    assert!(served < clients.len() + 2, "somebody waits");
    drop(clients);
    let mut late = Client::from(std::net::TcpStream::from(late));
    assert_eq!(late.ask("GET k"), "v");
    eventually("the others are counted off", || node.handle().stats().connected_clients == 2);
    node.stop();
}

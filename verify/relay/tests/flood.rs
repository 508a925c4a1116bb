//! A relay's doors, at which anybody on the host may knock: abstract names have no permissions. One
//! test: the names of a process's relay are fixed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::os::fd::AsFd;

use beeline_fabric::ConnectInfo;
use beeline_os::control_socket::{ControlSocket, Received};
use beeline_os::poller::Waker;
use beeline_sockets::relayed::relay_name;
use beeline_sockets_relay::network::Network;
use beeline_sockets_relay::{Relay, Settings};

/// Reaches nobody.
#[derive(Debug)]
struct Nobody;

impl Network for Nobody {
    fn find(&self, _host: usize) {}

    fn join(&self, _host: usize, _link: u64, _info: ConnectInfo, _hello: Vec<u8>) {}

    fn confirm(&self, _host: usize, _link: u64, _words: Vec<u8>) {}
}

#[test]
fn whoever_connects_without_end_keeps_no_relay_at_its_door() {
    let name = format!("beeline-flood-{}", std::process::id());
    // SAFETY: no other thread of this process runs yet.
    unsafe { std::env::set_var(beeline_sockets::control::NAME_VARIABLE, name) };
    let nobody = |_| -> Result<Box<dyn Network>, std::io::Error> { Ok(Box::new(Nobody)) };
    let mut relay = Relay::begin(Settings::default(), nobody).unwrap();
    let askers: Vec<ControlSocket> = (0..100)
        .map(|_| ControlSocket::connect(relay_name().as_bytes()).expect("room in the backlog"))
        .collect();
    let stop = Waker::new().unwrap();
    stop.wake();
    // One look at its doors, at which it finds that it is to stop.
    relay.run(Some(stop.as_fd())).unwrap();
    let hung_up = |asker: &&ControlSocket| {
        let (mut record, mut fds) = ([0; 8], Vec::new());
        matches!(asker.receive(&mut record, &mut fds), Ok(Received::Closed))
    };
    // Sixty-four may ask at a time. It came to none beyond: the others wait where they did.
    assert_eq!(askers.iter().filter(hung_up).count(), 0);
}

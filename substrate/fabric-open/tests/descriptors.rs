//! Callers that come when the process has no descriptor left: nobody spins on them, and they are
//! served when there is one again. One child for each door, because limits are the process's.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::fs::File;
use std::io::Read;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use beeline_fabric_open::{Bootstrap, BootstrapConfig, open};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::process::{Resource, Rlimit, setrlimit};

const CHILD: &str = "BEELINE_DESCRIPTORS_TEST_CHILD";

/// Runs `test` of this file again in a child; true in the child itself.
fn in_child(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        let limit = Rlimit { current: Some(96), maximum: Some(96) };
        setrlimit(Resource::Nofile, limit).unwrap();
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

/// A socket that needs no further descriptor to connect.
fn caller() -> OwnedFd {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::INET, SocketType::STREAM, flags, None).unwrap()
}

fn all_descriptors() -> Vec<File> {
    let mut held = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        held.push(file);
    }
    held
}

/// Processor time of this process.
fn busy() -> Duration {
    let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(usage.tv_sec).unwrap(), u32::try_from(usage.tv_nsec).unwrap())
}

/// Calls `door` with no descriptor left, and tells what it costs the process to be called.
fn call_in_vain(door: SocketAddr) {
    let callers: Vec<OwnedFd> = (0..3).map(|_| caller()).collect();
    let held = all_descriptors();
    for caller in &callers {
        // In progress is well enough: the kernel completes it.
        let _ = rustix::net::connect(caller, &door);
    }
    let before = busy();
    std::thread::sleep(Duration::from_secs(3));
    let spent = busy() - before;
    assert!(spent < Duration::from_secs(1), "{spent:?} of 3 s were spent on callers in vain");
    drop(held);
}

/// Waits until the door hangs up on a caller that says nonsense: it was accepted.
fn is_served(door: SocketAddr) {
    let start = Instant::now();
    let mut stream = std::net::TcpStream::connect(door).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    std::io::Write::write_all(&mut stream, &[0xEE; 256]).unwrap();
    let mut answer = Vec::new();
    // Closed, with or without a word.
    let _ = stream.read_to_end(&mut answer);
    assert!(start.elapsed() < Duration::from_secs(15), "a caller is served when there is room");
}

#[test]
fn the_bootstrap_does_not_spin_on_callers_it_has_no_descriptor_for() {
    if !in_child("the_bootstrap_does_not_spin_on_callers_it_has_no_descriptor_for") {
        return;
    }
    let tcp = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
    let config = BootstrapConfig { tcp, ..BootstrapConfig::default() };
    let bootstrap = Bootstrap::listen(config, Vec::new(), Vec::new()).unwrap();
    let door = bootstrap.address().unwrap();
    call_in_vain(door);
    is_served(door);
}

#[test]
fn a_tcp_device_does_not_spin_on_callers_it_has_no_descriptor_for() {
    if !in_child("a_tcp_device_does_not_spin_on_callers_it_has_no_descriptor_for") {
        return;
    }
    // A port that was free a moment ago.
    let door = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let _device = open(&format!("tcp://{door}")).unwrap();
    call_in_vain(door);
    is_served(door);
}

#[test]
fn strangers_do_not_hold_all_descriptors() {
    if !in_child("strangers_do_not_hold_all_descriptors") {
        return;
    }
    let door = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let _device = open(&format!("tcp://{door}")).unwrap();
    // Each takes a descriptor here and one at the door.
    let callers: Vec<OwnedFd> = (0..40).map(|_| caller()).collect();
    for caller in &callers {
        let _ = rustix::net::connect(caller, &door);
    }
    let start = Instant::now();
    // A quarter of 96 at the door, 40 here: the rest is free.
    while all_descriptors().len() < 15 {
        assert!(start.elapsed() < Duration::from_secs(20), "strangers hold all descriptors");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(Duration::from_secs(1));
    assert!(all_descriptors().len() >= 15, "strangers hold all descriptors");
}

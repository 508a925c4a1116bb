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
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
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
    costs_little(|| {
        for caller in &callers {
            // In progress is well enough: the kernel completes it.
            let _ = rustix::net::connect(caller, &door);
        }
    });
}

/// Runs `call` with no descriptor left, and looks at what the process does then.
fn costs_little(call: impl FnOnce()) {
    let held = all_descriptors();
    call();
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

/// The name of a device's socket: every process of the host may call it.
fn shm_door(device: &dyn beeline_fabric::Device) -> Vec<u8> {
    let domain = device.allocate_protection_domain().unwrap();
    let queue = device.create_completion_queue(16).unwrap();
    let options = beeline_fabric::QueuePairOptions::default();
    let pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
    // Bytes 32 to 48 of the connection data.
    let digits = pair.connect_info().0[32..48].iter().map(|byte| format!("{byte:02x}")).collect();
    [b"beeline-shm-".to_vec(), String::into_bytes(digits)].concat()
}

#[test]
fn a_shm_device_does_not_spin_on_callers_it_has_no_descriptor_for() {
    if !in_child("a_shm_device_does_not_spin_on_callers_it_has_no_descriptor_for") {
        return;
    }
    let device = open("shm://").unwrap();
    let name = SocketAddrUnix::new_abstract_name(&shm_door(device.as_ref())).unwrap();
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let caller = || {
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    };
    let call = |caller: &OwnedFd| rustix::net::connect(caller, &name).unwrap();
    let callers: Vec<OwnedFd> = (0..3).map(|_| caller()).collect();
    costs_little(|| callers.iter().for_each(call));
    // And is served when there is room again: one that speaks nonsense is hung up on.
    let late = caller();
    call(&late);
    rustix::net::send(&late, &[0xEE; 64], rustix::net::SendFlags::NOSIGNAL).unwrap();
    let start = Instant::now();
    let mut byte = [0; 1];
    while rustix::net::recv(&late, &mut byte[..], rustix::net::RecvFlags::DONTWAIT)
        == Err(rustix::io::Errno::AGAIN)
    {
        assert!(start.elapsed() < Duration::from_secs(20), "a caller is served when there is room");
        std::thread::sleep(Duration::from_millis(10));
    }
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

//! What runs out: room on disk, descriptors, patience with clients that do not read; and who may
//! connect. Limits are a process's, so some of these run in a child.

#![allow(dead_code, clippy::unwrap_used, reason = "helpers of tests, shared between suites")]

mod common;

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use beeline_objects::{Alone, Client, ObjectsError, Store, StoreOptions};
use common::{Home, NOW, SOON, bytes, id};
use rustix::process::{Resource, Rlimit, setrlimit};

const CHILD: &str = "BEELINE_OBJECTS_LIMITS_CHILD";

/// Says why a test did not run, past the test runner's capture.
fn skipped(reason: &str) {
    let _ = std::io::stderr().write_fmt(format_args!("skipped: {reason}\n"));
}

/// Runs `test` of this file again in a child; true in the child itself.
fn in_child(test: &str) -> bool {
    if std::env::var_os(CHILD).is_some() {
        return true;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args([test, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    false
}

/// Processor time of this process.
fn busy() -> Duration {
    let usage = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(usage.tv_sec).unwrap(), u32::try_from(usage.tv_nsec).unwrap())
}

/// A small disk of the test's own, gone with the value.
struct Disk(tempfile::TempDir);

impl Disk {
    /// None, and a reason, without the right to mount.
    fn mount(options: &str) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(folder.path())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !mounted {
            skipped("mounting a tmpfs needs root");
        }
        mounted.then(|| Self(folder))
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

fn options(socket: PathBuf, spill_directory: PathBuf) -> StoreOptions {
    StoreOptions {
        socket,
        socket_mode: 0o600,
        memory_bytes: 8 << 20,
        spill_directory,
        spill_bytes: 1 << 30,
        spin: Duration::from_micros(20),
        max_clients: 1000,
        processors: Vec::new(),
    }
}

#[test]
fn a_full_disk_holds_creates_up_and_loses_nothing_and_with_room_they_go_on() {
    let Some(disk) = Disk::mount("size=4m") else { return };
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("objects.sock");
    let filler = disk.0.path().join("filler");
    std::fs::write(&filler, vec![0; 3 << 20]).unwrap();
    let store = Store::start(options(socket.clone(), disk.0.path().join("spill")), |handle| {
        Box::new(Alone(handle))
    })
    .unwrap();
    let client = Client::connect(&socket).unwrap();
    // More than memory takes, and what is too much for the disk.
    let mut kept = 0;
    // Long for a store that gets to its work, and spills while there is room.
    let bound = Duration::from_secs(2);
    while client.put(id(kept), &bytes(kept, 1 << 20), b"", bound).is_ok() {
        kept += 1;
        assert!(kept < 100, "a disk of a megabyte takes everything");
    }
    let refused = client.create(id(1000), 1 << 20, b"", bound);
    assert!(matches!(refused, Err(ObjectsError::Full { .. })), "{refused:?}");
    // One on disk cannot come back, since nothing can make room for it; those in memory are served.
    let listed = client.list().unwrap();
    assert_eq!(listed.iter().filter(|entry| entry.sealed).count(), kept as usize);
    assert!(listed.iter().any(|entry| entry.spilled), "nothing was spilled");
    for entry in listed.iter().filter(|entry| !entry.spilled) {
        let seed = u32::from_le_bytes(entry.id.0[..4].try_into().unwrap());
        assert!(client.get(entry.id, SOON).unwrap().to_vec() == bytes(seed, 1 << 20));
    }
    // A create that waits goes on by itself when there is room.
    let waits = std::thread::spawn({
        let client = client.clone();
        move || client.put(id(1001), &bytes(1001, 1 << 20), b"", 3 * SOON)
    });
    std::thread::sleep(Duration::from_millis(100));
    std::fs::remove_file(&filler).unwrap();
    waits.join().unwrap().unwrap();
    for number in 0..kept {
        assert!(client.get(id(number), SOON).unwrap().to_vec() == bytes(number, 1 << 20));
    }
    store.handle().publish();
    client.ping().unwrap();
    let metrics = store.handle().metrics();
    assert!(metrics.objects_failed_spills.value() > 0, "the disk was never full");
    assert_eq!(metrics.objects_lost_objects.value(), 0);
}

/// Not a test of its own: another user's process tries to connect.
#[test]
fn another_user() {
    let Some(socket) = std::env::var_os("BEELINE_OBJECTS_LIMITS_SOCKET") else { return };
    let code = match Client::connect(Path::new(&socket)) {
        Ok(client) => {
            client.put(id(7), b"of another user", b"", SOON).unwrap();
            assert_eq!(client.get(id(1), NOW).unwrap().to_vec(), b"of the owner");
            40
        }
        Err(ref error @ ObjectsError::Connect { ref source, .. })
            if source.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            let text = error.to_string();
            assert!(text.contains("--objects-socket-mode") && !text.contains("running"), "{text}");
            41
        }
        Err(error) => panic!("{error}"),
    };
    std::process::exit(code);
}

#[test]
fn another_user_connects_only_where_the_sockets_rights_let_him() {
    if !rustix::process::geteuid().is_root() {
        return skipped("a second user needs root");
    }
    let home = tempfile::tempdir().unwrap();
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    // Where the other user can run it.
    let program = home.path().join("tests");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    for (mode, expected) in [(0o600, 41), (0o660, 41), (0o666, 40)] {
        let socket = home.path().join("objects.sock");
        let mut options = options(socket.clone(), home.path().join("spill"));
        options.socket_mode = mode;
        let store = Store::start(options, |handle| Box::new(Alone(handle))).unwrap();
        let owner = Client::connect(&socket).unwrap();
        owner.put(id(1), b"of the owner", b"", SOON).unwrap();
        let status = Command::new(&program)
            .args(["another_user", "--exact"])
            .env("BEELINE_OBJECTS_LIMITS_SOCKET", &socket)
            .current_dir("/")
            .uid(65_534)
            .gid(65_534)
            .stdout(Stdio::null())
            .status()
            .unwrap();
        assert_eq!(status.code(), Some(expected), "rights {mode:o}");
        if expected == 40 {
            assert_eq!(owner.get(id(7), NOW).unwrap().to_vec(), b"of another user");
        }
        drop(store);
    }
}

#[test]
fn without_descriptors_served_clients_go_on_and_new_ones_wait_and_nothing_spins() {
    if !in_child("without_descriptors_served_clients_go_on_and_new_ones_wait_and_nothing_spins") {
        return;
    }
    let home = Home::new(16 << 20, 0);
    let served = home.client();
    served.put(id(1), b"before", b"", SOON).unwrap();
    let limit = Rlimit { current: Some(128), maximum: Some(128) };
    setrlimit(Resource::Nofile, limit).unwrap();
    let waiting = beeline_os::control_socket::ControlSocket::connect_path(&home.socket()).unwrap();
    let other = beeline_os::control_socket::ControlSocket::connect_path(&home.socket()).unwrap();
    home.await_figure("clients", |m| m.objects_clients.value(), 3);
    let mut held = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        held.push(file);
    }
    // One place, for a caller that the store then cannot accept.
    held.pop();
    let late = beeline_os::control_socket::ControlSocket::connect_path(&home.socket()).unwrap();
    let before = busy();
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        served.put(id(2), b"meanwhile", b"", SOON).unwrap();
        assert_eq!(served.get(id(2), NOW).unwrap().to_vec(), b"meanwhile");
        served.delete(id(2)).unwrap();
        std::thread::sleep(Duration::from_millis(50));
    }
    let spent = busy() - before;
    assert!(spent < Duration::from_secs(1), "{spent:?} of 2 s were spent on a caller in vain");
    held.clear();
    home.await_figure("clients", |m| m.objects_clients.value(), 4);
    drop((waiting, other, late));
    home.await_figure("clients", |m| m.objects_clients.value(), 1);
    assert!(home.client().get(id(1), NOW).is_ok());
}

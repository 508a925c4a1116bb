//! Clients that are killed, and stores that end, under load: nothing leaks, and nothing is served
//! that was not sealed.

#![allow(dead_code, clippy::unwrap_used, reason = "helpers of tests, shared between suites")]

mod common;

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use beeline_objects::{Client, ObjectId, ObjectsError};
use common::{Home, SOON, bytes};

const SOCKET: &str = "BEELINE_TEST_OBJECTS_SOCKET";

/// Not a test of its own: what a child does until it is killed.
#[test]
fn child() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let client = Client::connect(Path::new(&socket)).unwrap();
    let mut held = Vec::new();
    for round in 0_u32.. {
        let id = ObjectId::random().unwrap();
        // The first bytes of the id say what the contents are.
        let seed = u32::from_le_bytes([id.0[0], id.0[1], id.0[2], 0]);
        let length = 100 + (seed as usize * 37) % 200_000;
        match client.create(id, length as u64, b"", Duration::from_millis(200)) {
            Ok(mut buffer) => {
                buffer.write_at(0, &bytes(seed, length)).unwrap();
                // One in eight is never sealed.
                if !round.is_multiple_of(8) {
                    if buffer.seal().is_err() {
                        return;
                    }
                } else {
                    std::mem::forget(buffer);
                }
            }
            Err(ObjectsError::Full { .. }) => held.clear(),
            Err(ObjectsError::StoreGone) => return,
            Err(error) => panic!("{error}"),
        }
        let Ok(list) = client.list() else { return };
        for entry in list.iter().filter(|entry| entry.sealed).take(3) {
            if let Ok(object) = client.get(entry.id, Duration::ZERO) {
                check(entry.id, &object.to_vec());
                held.push(object);
            }
        }
        held.truncate(20);
    }
}

fn check(id: ObjectId, contents: &[u8]) {
    let seed = u32::from_le_bytes([id.0[0], id.0[1], id.0[2], 0]);
    let length = 100 + (seed as usize * 37) % 200_000;
    assert!(contents == bytes(seed, length), "object {id} is not what was sealed");
}

fn spawn(socket: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(SOCKET, socket)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// One after the other: descriptors are counted, and they are the process's.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn clients_killed_under_load_leave_their_sealed_objects_and_nothing_else() {
    if std::env::var_os(SOCKET).is_some() {
        return;
    }
    let _alone = alone();
    for spill_bytes in [0, 1 << 30] {
        let home = Home::new(16 << 20, spill_bytes);
        let client = home.client();
        home.await_figure("clients", |m| m.objects_clients.value(), 1);
        let before = descriptors();
        let rounds = if std::env::var_os("BEELINE_DEEP").is_some() { 200 } else { 12 };
        for round in 0..rounds {
            let mut children = [spawn(&home.socket()), spawn(&home.socket())];
            let start = Instant::now();
            // Killed at another moment each time; the first ones hardly live.
            while start.elapsed() < Duration::from_millis(10 + 13 * (round % 12)) {
                std::thread::sleep(Duration::from_millis(3));
            }
            if round + 1 == rounds {
                // On a busy machine none may have come that far.
                home.await_figure("sealed", |m| m.objects_seals.value().min(1), 1);
            }
            for child in &mut children {
                child.kill().unwrap();
                child.wait().unwrap();
            }
        }
        home.await_figure("clients", |m| m.objects_clients.value(), 1);
        home.await_figure("waiting", |m| m.objects_waiting_requests.value(), 0);
        let mut left = client.list().unwrap();
        assert!(!left.is_empty(), "the children did nothing");
        // Those on disk last: where it is full they need room in memory.
        left.sort_by_key(|entry| entry.spilled);
        for entry in &left {
            assert!(entry.sealed && entry.references == 0, "{entry:?}");
            check(entry.id, &client.get(entry.id, SOON).unwrap().to_vec());
            client.delete(entry.id).unwrap();
        }
        home.await_figure("used", |m| m.objects_used_bytes.value(), 0);
        home.await_figure("disk", |m| m.objects_disk_bytes.value(), 0);
        // What is left are segments of this process at most, each with one descriptor.
        let metrics = home.store.as_ref().unwrap().handle().metrics();
        let now = descriptors();
        let segments = usize::try_from(metrics.objects_segments.value()).unwrap();
        assert!(
            now <= before + segments,
            "{now} descriptors, {before} before, {segments} segments"
        );
    }
}

#[test]
fn a_client_ends_with_its_process_though_another_holds_its_socket() {
    if std::env::var_os(SOCKET).is_some() {
        return;
    }
    let _alone = alone();
    let home = Home::new(16 << 20, 0);
    // This process takes the child's descriptors over, as a child of the child would have them.
    let mut child = spawn(&home.socket());
    home.await_figure("clients", |m| m.objects_clients.value(), 1);
    // By its first object the child has its socket.
    home.await_figure("sealed", |m| m.objects_seals.value().min(1), 1);
    let stolen: Vec<_> = beeline_os::process::open(i32::try_from(child.id()).unwrap())
        .into_iter()
        .flat_map(|process| {
            (3..40).filter_map(move |number| {
                rustix::process::pidfd_getfd(
                    &process,
                    number,
                    rustix::process::PidfdGetfdFlags::empty(),
                )
                .ok()
            })
        })
        .collect();
    child.kill().unwrap();
    child.wait().unwrap();
    let is_socket = |stolen: &std::os::fd::OwnedFd| {
        let status = rustix::fs::fstat(stolen).unwrap();
        rustix::fs::FileType::from_raw_mode(status.st_mode).is_socket()
    };
    assert!(stolen.iter().any(is_socket), "the child's socket cannot be taken over here");
    home.await_figure("clients", |m| m.objects_clients.value(), 0);
    drop(stolen);
}

#[test]
fn a_store_that_ends_under_load_ends_its_clients_in_order() {
    if std::env::var_os(SOCKET).is_some() {
        return;
    }
    let _alone = alone();
    let mut home = Home::new(16 << 20, 0);
    for _ in 0..3 {
        let mut child = spawn(&home.socket());
        home.await_figure("sealed", |m| m.objects_seals.value().min(5), 5);
        home.store = None;
        let start = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < SOON, "the client goes on without its store");
            std::thread::sleep(Duration::from_millis(5));
        }
        home.start(16 << 20, 0);
    }
}

//! A child of a client's process. The only test of this file: it looks at all that its process mapped.

#![allow(dead_code, clippy::unwrap_used, reason = "helpers of tests, shared between suites")]

mod common;

use std::time::{Duration, Instant};

use beeline_objects::{Buffer, Client, Object, ObjectsError};
use common::{Home, SOON, id};

/// The writable mappings of segments in this process: where each begins, and its bytes.
fn writable_segments() -> Vec<(usize, usize)> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let of_writers =
        |line: &&str| line.contains("memfd:beeline-objects ") && line.contains(" rw-s ");
    let range = |line: &str| {
        let (from, to) = line.split_whitespace().next()?.split_once('-')?;
        let [from, to] = [from, to].map(|text| usize::from_str_radix(text, 16).unwrap());
        Some((from, to - from))
    };
    maps.lines().filter(of_writers).filter_map(range).collect()
}

/// Whether the connection's helper thread runs; it keeps the connection.
fn is_helped() -> bool {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let name = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm"));
    tasks.filter_map(|task| name(task).ok()).any(|name| name.trim() == "objects-client")
}

/// What goes wrong in a child that maps memory of its own where its parent's segments were, writes to
/// its parent's buffer, and drops all it inherited: 1: the addresses are taken, 2: its memory is gone,
/// 4: it may write.
fn child(segments: &[(usize, usize)], mut buffer: Buffer, object: Object, client: Client) -> i32 {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    let place = |start: usize| std::ptr::with_exposed_provenance_mut::<libc::c_void>(start);
    let free = segments.iter().all(|(start, length)| {
        // SAFETY: a new mapping that replaces none.
        let own = unsafe { libc::mmap(place(*start), *length, rights, flags, -1, 0) };
        own == place(*start)
    });
    let refused = matches!(buffer.write_at(0, &[1]), Err(ObjectsError::Forked));
    drop((buffer, object, client));
    let kept = segments.iter().all(|(start, _)| {
        let mut there = 0_u8;
        // SAFETY: the kernel writes one byte for the one page, or says that it is not mapped.
        unsafe { libc::mincore(place(*start), 4096, &raw mut there) == 0 }
    });
    i32::from(!free) | i32::from(!kept) << 1 | i32::from(!refused) << 2
}

#[test]
fn a_child_writes_nothing_through_its_parents_client_and_keeps_what_it_mapped_itself() {
    let mut home = Home::new(64 << 20, 0);
    let client = home.client();
    client.put(id(1), &[7; 300_000], b"", SOON).unwrap();
    let object = client.get(id(1), SOON).unwrap();
    let buffer = client.create(id(2), 100_000, b"", SOON).unwrap();
    let mut inherited = Some((buffer, object, client));
    // With the store, and after it: then the last of the connection goes with the values here.
    for gone in [false, true] {
        if gone {
            home.store = None;
            let start = Instant::now();
            while is_helped() {
                assert!(start.elapsed() < SOON, "the end of the store is not noticed");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let segments = writable_segments();
        assert_eq!(segments.len(), if gone { 1 } else { 2 }, "the client's, and the store's");
        // SAFETY: the child calls nothing that another thread's lock could hold up but the allocator,
        // which the C library keeps usable across `fork`, and ends by `_exit`.
        let forked = unsafe { libc::fork() };
        if forked == 0 {
            let (buffer, object, client) = inherited.take().unwrap();
            let code = child(&segments, buffer, object, client);
            // SAFETY: ends the child without running what its parent registered.
            unsafe { libc::_exit(code) }
        }
        let mut status = 0;
        // SAFETY: a child of ours, and the status is ours.
        assert_eq!(unsafe { libc::waitpid(forked, &raw mut status, 0) }, forked);
        assert_eq!(status >> 8, 0, "what the number says is told at `child`");
    }
    let (mut buffer, object, _client) = inherited.unwrap();
    buffer.write_at(0, &[1; 100_000]).unwrap();
    assert!(matches!(buffer.seal(), Err(ObjectsError::StoreGone)));
    assert_eq!(object.to_vec(), vec![7; 300_000]);
}

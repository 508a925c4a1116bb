//! An idle connection costs its heartbeats and nothing else. Alone in its binary: it counts what
//! all library threads do.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::time::Duration;

use beeline_fabric::{Device as _, QueuePairOptions, Role};
use beeline_fabric_ntb::{NtbConfig, NtbDevice};

const BOUND: Duration = Duration::from_secs(20);

/// How often the library threads of this process have slept so far, and how many there are.
fn library_sleeps() -> (u64, usize) {
    let (mut sleeps, mut threads) = (0, 0);
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(name) = std::fs::read_to_string(task.path().join("comm")) else { continue };
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
        if name.trim() != "beeline-ntb" {
            continue;
        }
        threads += 1;
        let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches"));
        let count = line.and_then(|line| line.split_whitespace().nth(1)).unwrap();
        sleeps += count.parse::<u64>().unwrap();
    }
    (sleeps, threads)
}

/// The fewest sleeps of all library threads in one of several half seconds.
fn fewest() -> u64 {
    let mut before = library_sleeps();
    let mut fewest = u64::MAX;
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(500));
        let after = library_sleeps();
        if after.1 == 2 && before.1 == 2 {
            fewest = fewest.min(after.0 - before.0);
        }
        before = after;
        if fewest == 0 {
            break;
        }
    }
    fewest
}

#[test]
fn library_threads_of_idle_connections_wake_for_heartbeats_only() {
    let ends: Vec<_> = (0..2)
        .map(|_| {
            let device = NtbDevice::open(NtbConfig::default()).unwrap();
            let domain = device.allocate_protection_domain().unwrap();
            let queue = device.create_completion_queue(64).unwrap();
            let options = QueuePairOptions::default();
            let pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
            (device, queue, pair)
        })
        .collect();
    let [mut near, mut far] = <[_; 2]>::try_from(ends).unwrap();
    far.2.connect(&near.2.connect_info(), Role::Passive).unwrap();
    near.2.connect(&far.2.connect_info(), Role::Active).unwrap();
    near.2.wait_connected(BOUND).unwrap();
    far.2.wait_connected(BOUND).unwrap();
    near.1.arm().unwrap();
    let connected = fewest();
    // Two threads, each beating four times a second, and a beat is no ring.
    assert!(connected <= 6, "{connected} wake-ups in half a second without any work");
    // Without a connection there is nothing to beat for.
    drop(near.2);
    drop(far.2);
    assert_eq!(fewest(), 0, "wake-ups in half a second without connections");
}

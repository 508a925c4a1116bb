//! An idle connection costs its heartbeats and nothing else. Alone in its binary: it counts what
//! all library threads do.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::time::{Duration, Instant};

use beeline_fabric::{Device as _, QueuePairOptions, Role};
use beeline_fabric_ntb::{NtbConfig, NtbDevice};

const BOUND: Duration = Duration::from_secs(60);

/// The library threads of this process: how many there are, how many of them sleep, and how often they
/// have slept so far.
fn library() -> (usize, usize, u64) {
    let (mut threads, mut asleep, mut sleeps) = (0, 0, 0);
    for task in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let read = |file: &str| std::fs::read_to_string(task.path().join(file));
        let (Ok(name), Ok(status)) = (read("comm"), read("status")) else { continue };
        if name.trim() != "beeline-ntb" {
            continue;
        }
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_whitespace().nth(1)).unwrap().to_owned()
        };
        threads += 1;
        asleep += usize::from(field("State") == "S");
        sleeps += field("voluntary_ctxt_switches").parse::<u64>().unwrap();
    }
    (threads, asleep, sleeps)
}

/// Looks in a row, 200 ms apart or more, that have to find the same threads in the same sleep.
const LOOKS: u32 = 6;

/// Waits until both threads sleep and sleep on: whatever wakes one at least once a second fails. A
/// thread that the system lets wait for a processor is not asleep, so a busy machine hides nothing.
fn rest() {
    let begun = Instant::now();
    let (mut before, mut still) = (library(), 0);
    while still < LOOKS {
        assert!(begun.elapsed() < BOUND, "wake-ups although nothing happens: {before:?}");
        std::thread::sleep(Duration::from_millis(200));
        let now = library();
        still = if now == before && (now.0, now.1) == (2, 2) { still + 1 } else { 0 };
        before = now;
    }
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
    // Two threads, each beating four times a second, and a beat is no ring. As many as they are in the
    // time it takes, however long that is, and what the connecting leaves behind.
    let (begun, before) = (Instant::now(), library().2);
    std::thread::sleep(Duration::from_secs(5));
    let (woken, elapsed) = (library().2 - before, begun.elapsed());
    let most = (8 * elapsed.as_millis() / 1000) as u64 + 24;
    assert!(woken <= most, "{woken} wake-ups in {elapsed:?} without any work");
    // Without a connection there is nothing to beat for.
    drop(near.2);
    drop(far.2);
    rest();
}

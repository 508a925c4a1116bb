//! Pipelines fill units that several shards apply at the same time, and members die in the middle of that.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use beeline_verify_clients::resp::encode;
use beeline_verify_clients::{Connection, Reply, deep, eventually, note};
use rustix::process::Signal;

use super::members::{Cluster, PATIENCE};
use super::open_again;

/// Counters of one writer: over all shards.
const COUNTERS: usize = 48;

fn counter(writer: usize, index: usize) -> String {
    format!("wave{writer}-{index}")
}

/// What a writer knows of one of its counters.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    acknowledged: i64,
    unknown: i64,
}

/// Increments all its counters, in one pipeline after another.
struct Writer {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<Vec<Known>>,
}

impl Writer {
    fn start(writer: usize, address: SocketAddr) -> Self {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&rounds));
        let thread = std::thread::spawn(move || {
            let pipeline: Vec<u8> = (0..COUNTERS)
                .flat_map(|index| encode(&[b"INCR", counter(writer, index).as_bytes()]))
                .collect();
            let mut known = vec![Known::default(); COUNTERS];
            let mut client: Option<Connection> = None;
            while !stopped.load(Ordering::Relaxed) {
                let Some(open) = open_again(&mut client, address) else { continue };
                let sent = open.send(&pipeline);
                let mut alive = sent.is_ok();
                for known in &mut known {
                    match alive.then(|| open.reply()) {
                        Some(Ok(Reply::Integer(count))) => {
                            known.acknowledged += 1;
                            let most = known.acknowledged + known.unknown;
                            assert!(
                                (known.acknowledged..=most).contains(&count),
                                "{count} {known:?}"
                            );
                        }
                        Some(Ok(_)) => known.unknown += 1,
                        Some(Err(_)) | None => {
                            known.unknown += 1;
                            alive = false;
                        }
                    }
                }
                if alive {
                    counted.fetch_add(1, Ordering::Relaxed);
                } else {
                    client = None;
                }
            }
            known
        });
        Self { stop, rounds, thread }
    }
}

fn go_on<'a>(writers: impl Iterator<Item = &'a Writer>, rounds: u64) {
    let count = |writer: &Writer| writer.rounds.load(Ordering::Relaxed);
    let goals: Vec<_> = writers.map(|writer| (writer, count(writer) + rounds)).collect();
    eventually("the writers go on", PATIENCE, || {
        goals.iter().all(|(writer, goal)| count(writer) >= *goal).then_some(())
    });
}

#[test]
fn members_killed_while_shards_apply_at_the_same_time_lose_and_repeat_nothing() {
    const MOST_KILLS: usize = 60;
    let mut cluster = Cluster::new(0, &["--shards", "3"]);
    let writers: Vec<_> =
        (0..3).map(|index| Writer::start(index, cluster.places[index].resp)).collect();
    let kills = if deep() { 24 } else { 5 };
    // Until a kill has left some of a run in the store and not all of it.
    let (mut parts, mut round, mut left) = (0, 0, Vec::new());
    while round < kills || left.is_empty() {
        assert!(round < MOST_KILLS, "no kill came in the middle of a run");
        go_on(writers.iter(), 3);
        let victim = if round == 0 { cluster.leader() } else { round % 3 };
        parts += cluster.info(victim, "log_parts").parse::<u64>().unwrap();
        let others = || {
            let others = writers.iter().enumerate().filter(|(index, _)| *index != victim);
            others.map(|(_, writer)| writer)
        };
        if cluster.leader() != victim {
            // What is agreed on while it stands still is one run, in the middle of which it ends.
            cluster.members[victim].as_ref().unwrap().signal(Signal::STOP);
            go_on(others(), 60);
            cluster.members[victim].as_ref().unwrap().signal(Signal::CONT);
            std::thread::sleep(Duration::from_millis(2 + 3 * (round as u64 % 6)));
        }
        cluster.kill(victim);
        go_on(others(), 3);
        cluster.start(victim);
        cluster.leader();
        let entries = cluster.info(victim, "log_left_at_start").parse::<u64>().unwrap();
        left.extend((entries > 0).then_some(entries));
        round += 1;
    }
    go_on(writers.iter(), 3);
    let ends: Vec<Vec<Known>> = writers
        .into_iter()
        .map(|writer| {
            writer.stop.store(true, Ordering::Relaxed);
            writer.thread.join().unwrap()
        })
        .collect();
    for (writer, known) in ends.iter().enumerate() {
        for (index, known) in known.iter().enumerate() {
            let name = counter(writer, index);
            let counts: Vec<i64> = (0..3)
                .map(|member| cluster.ask(member, &["GET", &name]).text().parse().unwrap())
                .collect();
            let most = known.acknowledged + known.unknown;
            assert!(counts.iter().all(|count| *count == counts[0]), "{name}: {counts:?}");
            assert!(
                (known.acknowledged..=most).contains(&counts[0]),
                "{name}: {counts:?} {known:?}"
            );
        }
    }
    for member in 0..3 {
        assert_eq!(cluster.info(member, "log_divergences"), "0", "{}", cluster.described());
    }
    note(&format!(
        "{round} kills of members; those had applied {parts} parts of waves, and {} had begun entries beyond their \
         position: {left:?}",
        left.len()
    ));
}

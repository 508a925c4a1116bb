//! How many round trips, verbs and bytes an operation takes, counted at both ends on every
//! provider (BOOM §3.1, §3.2; §1 for the baselines).
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking; each uses a part of the shared harness"
)]

mod common;

use beeline_kv::entry::{FIRST_ENTRY, slot_bytes_for};
use beeline_kv::wire::{Protocol, REPLY_BYTES, REQUEST_HEADER_BYTES, RequestKind};
use beeline_kv_client::{Client, ClientCounters, Command};
use beeline_kv_server::ServerCounters;
use common::{Provider, Rig, RigOptions};

const PUTS: u64 = 50;
const GETS: u64 = 30;
const KEY: usize = 8;
const VALUE: usize = 100;
/// Header, key and value.
const ENTRY: u64 = 48 + KEY as u64 + VALUE as u64;

struct Counted {
    client: ClientCounters,
    server: ServerCounters,
}

/// What `work` adds to the counters at both ends.
fn counted(rig: &Rig, client: &mut Client, work: impl FnOnce(&mut Client)) -> Counted {
    let (before, served) = (client.counters(), rig.server_counters());
    work(client);
    let (after, serving) = (client.counters(), rig.server_counters());
    Counted {
        client: ClientCounters {
            gets: after.gets - before.gets,
            puts: after.puts - before.puts,
            others: after.others - before.others,
            grants: after.grants - before.grants,
            retries: after.retries - before.retries,
            sends: after.sends - before.sends,
            writes: after.writes - before.writes,
            reads: after.reads - before.reads,
            receives: after.receives - before.receives,
            placements: after.placements - before.placements,
            round_trips: after.round_trips - before.round_trips,
            bytes_out: after.bytes_out - before.bytes_out,
            bytes_in: after.bytes_in - before.bytes_in,
            appends: after.appends - before.appends,
            appended_bytes: after.appended_bytes - before.appended_bytes,
            overwrites: after.overwrites - before.overwrites,
            reconnects: after.reconnects - before.reconnects,
        },
        server: ServerCounters {
            receives: serving.receives - served.receives,
            placements: serving.placements - served.placements,
            sends: serving.sends - served.sends,
            writes: serving.writes - served.writes,
            bytes_in: serving.bytes_in - served.bytes_in,
            bytes_out: serving.bytes_out - served.bytes_out,
            announcements: serving.announcements - served.announcements,
            rejected: serving.rejected - served.rejected,
            ..ServerCounters::default()
        },
    }
}

fn key(number: u64) -> [u8; KEY] {
    number.to_le_bytes()
}

/// A client with its segment granted, so that what follows is only the operation itself.
fn warm(rig: &Rig, protocol: Protocol) -> Client {
    let mut client = rig.speaking(protocol);
    rig.put(&mut client, b"warm", b"up");
    client
}

fn puts(rig: &Rig, client: &mut Client) {
    for number in 0..PUTS {
        rig.put(client, &key(number), &[7; VALUE]);
    }
}

fn gets(rig: &Rig, client: &mut Client) {
    for number in 0..GETS {
        assert_eq!(rig.get(client, &key(number)), Some(vec![7; VALUE]));
    }
}

#[test]
fn a_boom_put_is_one_write_with_immediate_and_one_reply() {
    for provider in Provider::all() {
        let rig = Rig::new(provider, &RigOptions::default());
        let mut client = warm(&rig, Protocol::Boom);
        let seen = counted(&rig, &mut client, |client| puts(&rig, client));
        assert_eq!(
            seen.client,
            ClientCounters {
                puts: PUTS,
                writes: PUTS,
                receives: PUTS,
                round_trips: PUTS,
                bytes_out: PUTS * ENTRY,
                bytes_in: PUTS * REPLY_BYTES as u64,
                appends: PUTS,
                appended_bytes: PUTS * slot_bytes_for(KEY, VALUE),
                ..ClientCounters::default()
            },
            "{provider:?}"
        );
        assert_eq!(
            seen.server,
            ServerCounters {
                placements: PUTS,
                sends: PUTS,
                bytes_in: PUTS * ENTRY,
                bytes_out: PUTS * REPLY_BYTES as u64,
                announcements: PUTS,
                ..ServerCounters::default()
            },
            "{provider:?}"
        );
    }
}

#[test]
fn a_boom_get_is_one_send_and_one_write_by_the_server() {
    for provider in Provider::all() {
        let rig = Rig::new(provider, &RigOptions::default());
        let mut client = warm(&rig, Protocol::Boom);
        puts(&rig, &mut client);
        let seen = counted(&rig, &mut client, |client| gets(&rig, client));
        let request = (REQUEST_HEADER_BYTES + KEY) as u64;
        assert_eq!(
            seen.client,
            ClientCounters {
                gets: GETS,
                sends: GETS,
                placements: GETS,
                round_trips: GETS,
                bytes_out: GETS * request,
                bytes_in: GETS * ENTRY,
                ..ClientCounters::default()
            },
            "{provider:?}"
        );
        assert_eq!(
            seen.server,
            ServerCounters {
                receives: GETS,
                writes: GETS,
                bytes_in: GETS * request,
                bytes_out: GETS * ENTRY,
                ..ServerCounters::default()
            },
            "{provider:?}"
        );
    }
}

#[test]
fn segments_are_asked_for_once_per_segment_of_bytes_written() {
    for provider in Provider::all() {
        let options = RigOptions { capacity_bytes: 256 << 20, ..RigOptions::default() };
        let rig = Rig::new(provider, &options);
        let mut client = rig.client();
        let mut next = 0_u64;
        while next < 10_000 {
            for _ in 0..client.options().window {
                let (key, value) = (key(next), [1; 40]);
                let put = beeline_kv_client::Command::Put {
                    database: 0,
                    key: &key,
                    value: &value,
                    options: beeline_kv_client::PutOptions::default(),
                };
                client.submit(put).unwrap();
                next += 1;
            }
            rig.drain(&mut client);
        }
        let written = next * slot_bytes_for(KEY, 40);
        let per_segment = u64::from(options.segment_bytes - FIRST_ENTRY) / slot_bytes_for(KEY, 40)
            * slot_bytes_for(KEY, 40);
        let counters = client.counters();
        assert_eq!(counters.appended_bytes, written, "{provider:?}");
        assert_eq!(counters.grants, written.div_ceil(per_segment), "{provider:?}");
        assert_eq!(rig.server_counters().of(RequestKind::Grant), counters.grants, "{provider:?}");
    }
}

#[test]
fn the_oblivious_baseline_takes_one_round_trip_for_each_operation() {
    for provider in Provider::all() {
        let rig = Rig::new(provider, &RigOptions::default());
        let mut client = warm(&rig, Protocol::Oblivious);
        let seen = counted(&rig, &mut client, |client| puts(&rig, client));
        assert_eq!((seen.client.writes, seen.client.receives), (PUTS, PUTS), "{provider:?}");
        assert_eq!(seen.client.round_trips, PUTS, "{provider:?}");
        assert_eq!(seen.client.grants, 0, "{provider:?}");
        let seen = counted(&rig, &mut client, |client| gets(&rig, client));
        assert_eq!((seen.client.writes, seen.client.placements), (GETS, GETS), "{provider:?}");
        assert_eq!((seen.server.writes, seen.server.sends), (GETS, 0), "{provider:?}");
        assert_eq!(seen.client.round_trips, GETS, "{provider:?}");
    }
}

#[test]
fn the_two_phase_baseline_takes_two_round_trips_for_each_operation() {
    for provider in Provider::all() {
        if !provider.protocols().contains(&Protocol::TwoPhase) {
            continue;
        }
        let rig = Rig::new(provider, &RigOptions::default());
        let mut client = warm(&rig, Protocol::TwoPhase);
        let seen = counted(&rig, &mut client, |client| puts(&rig, client));
        assert_eq!((seen.client.sends, seen.client.writes), (PUTS, PUTS), "{provider:?}");
        assert_eq!(seen.client.receives, 2 * PUTS, "{provider:?}");
        assert_eq!(seen.client.round_trips, 2 * PUTS, "{provider:?}");
        let seen = counted(&rig, &mut client, |client| gets(&rig, client));
        assert_eq!((seen.client.sends, seen.client.reads), (GETS, GETS), "{provider:?}");
        assert_eq!((seen.server.sends, seen.server.writes), (GETS, 0), "{provider:?}");
        assert_eq!(seen.client.round_trips, 2 * GETS, "{provider:?}");
        assert_eq!(seen.client.bytes_in, GETS * (48 + ENTRY), "{provider:?}");
    }
}

/// Answers that come in two groups are followed by requests in two groups, for as long as the
/// connection lives: each party then finds less at a look, and more lines change hands for each
/// request.
#[test]
fn answers_to_what_was_found_at_one_look_are_found_at_one_look() {
    const TOGETHER: u64 = 7;
    let rig = Rig::new(Provider::Shm, &RigOptions::default());
    let mut client = warm(&rig, Protocol::Boom);
    puts(&rig, &mut client);
    // The server comes to know where results go.
    gets(&rig, &mut client);
    for round in 0..100 {
        for number in 0..TOGETHER {
            let key = key(number);
            client.submit(Command::Get { database: 0, key: &key }).unwrap();
        }
        client.flush();
        rig.nodes.borrow_mut().iter_mut().for_each(|node| {
            node.step();
        });
        let found = client.poll(&mut |_, answer| assert!(answer.is_ok())).unwrap();
        assert_eq!(found as u64, TOGETHER, "round {round}");
    }
}

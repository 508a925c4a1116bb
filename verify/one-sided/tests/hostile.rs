//! Clients that mean harm, or are broken: each harms nothing but its own unacknowledged writes,
//! and what it wrote itself into the segment it holds.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking; each uses a part of the shared harness"
)]

mod common;

use std::time::Duration;

use beeline_env::Randomness;
use beeline_kv::entry::{Draft, FIRST_ENTRY, HEADER_BYTES};
use beeline_kv::wire::{
    Announcement, Place, Protocol, REQUEST_HEADER_BYTES, ReplyStatus, Request, RequestKind,
};
use beeline_kv_client::{Client, ClientError, Command};
use beeline_kv_server::ServerOptions;
use common::raw::{Raw, at, entry};
use common::{Outcome, Provider, Rig, RigOptions};

/// A bystander's data must be there before, while and after the hostile client does its worst.
struct Bystander {
    client: Client,
    puts: u32,
}

impl Bystander {
    fn new(rig: &Rig) -> Self {
        let mut this = Self { client: rig.client(), puts: 0 };
        this.check(rig);
        this
    }

    fn check(&mut self, rig: &Rig) {
        self.puts += 1;
        let value = self.puts.to_le_bytes();
        rig.put(&mut self.client, b"bystander", &value);
        assert_eq!(rig.get(&mut self.client, b"bystander").as_deref(), Some(&value[..]));
    }
}

fn everywhere(test: impl Fn(&Rig, &mut Bystander)) {
    for provider in Provider::all() {
        let rig = Rig::new(provider, &RigOptions::default());
        let mut bystander = Bystander::new(&rig);
        test(&rig, &mut bystander);
        bystander.check(&rig);
    }
}

#[test]
fn the_raw_client_works_when_it_behaves() {
    everywhere(|rig, bystander| {
        let mut raw = Raw::connect(rig, 16, 16);
        let grant = raw.grant(rig);
        let reply = raw.announce(rig, &grant, FIRST_ENTRY, &entry(b"key", b"value", 0));
        assert_eq!(reply.status, ReplyStatus::NotFound, "taken in, and new");
        assert_eq!(rig.get(&mut bystander.client, b"key").as_deref(), Some(&b"value"[..]));
    });
}

#[test]
fn garbage_that_is_announced_is_rejected_and_the_tail_stays() {
    everywhere(|rig, bystander| {
        let mut raw = Raw::connect(rig, 16, 16);
        let grant = raw.grant(rig);
        let mut random = Randomness::new(11);
        for length in [16_usize, 48, 64, 200, 4000] {
            let mut bytes = vec![0; length];
            random.fill(&mut bytes);
            let reply = raw.announce(rig, &grant, FIRST_ENTRY, &bytes);
            assert_eq!(reply.status, ReplyStatus::Rejected, "{length}");
        }
        // Every single flipped bit of a good entry is noticed, but for version and seal, which
        // the server sets.
        let good = entry(b"key", b"value", 0);
        for bit in 16 * 8..(48 + 8) * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let reply = raw.announce(rig, &grant, FIRST_ENTRY, &bytes);
            assert_eq!(reply.status, ReplyStatus::Rejected, "bit {bit}");
        }
        assert_eq!(rig.get(&mut bystander.client, b"key"), None);
        let reply = raw.announce(rig, &grant, FIRST_ENTRY, &good);
        assert_eq!(reply.status, ReplyStatus::NotFound);
        assert_eq!(rig.get(&mut bystander.client, b"key").as_deref(), Some(&b"value"[..]));
    });
}

#[test]
fn kinds_that_hashes_have_are_refused_by_name() {
    everywhere(|rig, bystander| {
        let mut raw = Raw::connect(rig, 16, 16);
        let grant = raw.grant(rig);
        for kind in [1, 2, 63] {
            let mut bytes = Vec::new();
            let draft = Draft { key: b"hash", value: &[0; 16], kind, ..Draft::default() };
            draft.form(&mut bytes).unwrap();
            let reply = raw.announce(rig, &grant, FIRST_ENTRY, &bytes);
            assert_eq!(reply.status, ReplyStatus::ReservedKind, "{kind}");
        }
        assert_eq!(rig.get(&mut bystander.client, b"hash"), None);
        let reply = raw.announce(rig, &grant, FIRST_ENTRY, &entry(b"hash", b"a string", 0));
        assert_eq!(reply.status, ReplyStatus::NotFound, "the tail stayed");
    });
}

#[test]
fn false_offsets_are_rejected() {
    everywhere(|rig, bystander| {
        let mut raw = Raw::connect(rig, 16, 16);
        let grant = raw.grant(rig);
        let good = entry(b"key", b"value", 0);
        assert_eq!(raw.announce(rig, &grant, FIRST_ENTRY, &good).status, ReplyStatus::NotFound);
        let tail = FIRST_ENTRY + good.len() as u32;
        let last = rig.store.pool().segment_bytes() - 16;
        for offset in [0, 16, 48, FIRST_ENTRY + 16, tail + 16, 4096, last, (1 << 30) - 16] {
            for in_place in [false, true] {
                let announcement = Announcement { in_place, grant: grant.grant, offset }.encode();
                // The bytes go to the tail; only the announcement lies.
                raw.write(at(&grant, tail), &good, Some(announcement));
                let status = raw.reply(rig).status;
                assert_eq!(status, ReplyStatus::Rejected, "{offset} {in_place}");
            }
        }
        // The newest entry announced once more, as append and as overwrite (C1).
        for in_place in [false, true] {
            let announcement =
                Announcement { in_place, grant: grant.grant, offset: FIRST_ENTRY }.encode();
            raw.write(at(&grant, tail), &good, Some(announcement));
            assert_eq!(raw.reply(rig).status, ReplyStatus::Rejected);
        }
        assert_eq!(rig.get(&mut bystander.client, b"key").as_deref(), Some(&b"value"[..]));
    });
}

#[test]
fn an_announcement_without_a_grant_is_stale() {
    everywhere(|rig, _| {
        let mut raw = Raw::connect(rig, 16, 16);
        let nowhere = Place { key: raw.memory.remote_key().0, offset: 0 };
        let _ = nowhere;
        let grant = raw.grant(rig);
        let good = entry(b"key", b"value", 0);
        for number in 0..Announcement::GRANTS {
            if number == grant.grant {
                continue;
            }
            let announcement = Announcement { in_place: false, grant: number, offset: FIRST_ENTRY };
            raw.write(at(&grant, FIRST_ENTRY), &good, Some(announcement.encode()));
            assert_eq!(raw.reply(rig).status, ReplyStatus::StaleGrant);
        }
    });
}

#[test]
fn a_forged_version_and_seal_are_replaced() {
    everywhere(|rig, bystander| {
        let mut raw = Raw::connect(rig, 16, 16);
        let grant = raw.grant(rig);
        let mut forged = entry(b"bystander", b"mine", 0);
        forged[..8].copy_from_slice(&u64::MAX.to_le_bytes());
        forged[8..16].fill(0xEE);
        let reply = raw.announce(rig, &grant, FIRST_ENTRY, &forged);
        assert_eq!(reply.status, ReplyStatus::Ok);
        assert!(reply.version < 1 << 32, "the server counts versions");
        // An ordinary put by somebody else is newer.
        bystander.check(rig);
    });
}

#[test]
fn a_key_of_another_shard_is_refused() {
    for provider in Provider::all() {
        let rig = Rig::new(provider, &RigOptions { shards: 2, ..RigOptions::default() });
        let mut bystander = Bystander::new(&rig);
        let mut raw = Raw::connect(&rig, 16, 16);
        let grant = raw.grant(&rig);
        let foreign = (0..100_u8)
            .map(|number| [b'k', number])
            .find(|key| bystander.client.shard_of(0, key) == 1)
            .unwrap();
        let reply = raw.announce(&rig, &grant, FIRST_ENTRY, &entry(&foreign, b"v", 0));
        assert_eq!(reply.status, ReplyStatus::WrongShard);
        let request = raw.request(RequestKind::Get, &foreign);
        assert_eq!(raw.ask(&rig, request, &foreign).status, ReplyStatus::WrongShard);
        assert_eq!(rig.get(&mut bystander.client, &foreign), None);
        bystander.check(&rig);
    }
}

#[test]
fn malformed_requests_end_their_own_connection() {
    everywhere(|rig, bystander| {
        let mut random = Randomness::new(5);
        let mut ended = 0;
        for round in 0..60_u64 {
            let mut raw = Raw::connect(rig, 16, 16);
            let mut bytes = vec![0; random.below(200) as usize];
            random.fill(&mut bytes);
            if let (0, Some(kind)) = (round % 2, bytes.first_mut()) {
                // Half of them begin like a request.
                *kind = 1 + random.below(RequestKind::ALL.len() as u64) as u8;
            }
            raw.send(&bytes).unwrap();
            raw.idle(rig, 50);
            ended += u32::from(raw.broken);
            drop(raw);
            bystander.check(rig);
        }
        assert!(ended > 20, "most were ended: {ended}");
        assert!(rig.server_counters().expelled > 20);
        rig.until("hostile connections are closed", || rig.nodes.borrow()[0].server.clients() == 1);
    });
}

#[test]
fn a_request_longer_than_agreed_ends_its_own_connection() {
    everywhere(|rig, bystander| {
        let mut raw = Raw::connect(rig, 16, 16);
        raw.send(&[1; 5000]).unwrap();
        raw.until_broken(rig);
        bystander.check(rig);
    });
}

#[test]
fn a_flood_is_bounded_by_the_window_and_others_are_served() {
    everywhere(|rig, bystander| {
        let mut raw = Raw::connect(rig, 8, 200);
        assert_eq!(raw.welcome.window, 8);
        let ping = Request::new(RequestKind::Ping, 1).encode();
        let mut posted = 0;
        for _ in 0..400 {
            posted += u32::from(raw.send(&ping).is_ok());
        }
        assert!(posted > 100, "far beyond the window: {posted}");
        for _ in 0..20 {
            bystander.check(rig);
            raw.poll();
        }
        // Each was answered or the connection ended; nothing piled up.
        let served = rig.server_counters().of(RequestKind::Ping);
        assert!(served <= 400);
    });
}

#[test]
fn a_result_address_that_is_not_the_clients_ends_its_own_connection() {
    everywhere(|rig, bystander| {
        for forge in 0..3 {
            let mut raw = Raw::connect(rig, 16, 16);
            let mut request = raw.request(RequestKind::Get, b"bystander");
            match forge {
                0 => request.result.key ^= 0x5555,
                1 => request.result.offset = u64::MAX - 8,
                _ => request.result.offset = (1 << 20) - 4,
            }
            let mut bytes = request.encode().to_vec();
            bytes.extend_from_slice(b"bystander");
            raw.send(&bytes).unwrap();
            raw.until_broken(rig);
            bystander.check(rig);
        }
    });
}

#[test]
fn a_client_that_reads_no_replies_loses_its_connection_only() {
    for provider in Provider::all() {
        let server = ServerOptions {
            receiver_not_ready_timeout: Duration::from_millis(50),
            ..ServerOptions::default()
        };
        let rig = Rig::new(provider, &RigOptions { server, ..RigOptions::default() });
        let mut bystander = Bystander::new(&rig);
        let mut raw = Raw::connect(&rig, 16, 0);
        let ping = Request::new(RequestKind::Ping, 1).encode();
        for _ in 0..16 {
            raw.send(&ping).unwrap();
        }
        rig.until("the deaf client is closed", || {
            bystander.check(&rig);
            raw.poll();
            rig.nodes.borrow()[0].server.clients() == 1
        });
    }
}

#[test]
fn a_client_that_disappears_leaves_what_was_acknowledged() {
    everywhere(|rig, bystander| {
        let mut raw = Raw::connect(rig, 16, 16);
        let grant = raw.grant(rig);
        let good = entry(b"key", b"value", 0);
        raw.announce(rig, &grant, FIRST_ENTRY, &good);
        // One more, written and never announced.
        let tail = FIRST_ENTRY + good.len() as u32;
        raw.write(at(&grant, tail), &entry(b"key", b"never announced", 0), None);
        raw.idle(rig, 20);
        drop(raw);
        rig.until("the server notices", || rig.nodes.borrow()[0].server.clients() == 1);
        assert_eq!(rig.get(&mut bystander.client, b"key").as_deref(), Some(&b"value"[..]));
    });
}

#[test]
fn a_hanging_clients_segment_is_taken_back_when_the_pool_runs_short() {
    for provider in Provider::all() {
        let server = ServerOptions {
            idle_grant: Duration::ZERO,
            reclaim_above_percent: 0,
            ..ServerOptions::default()
        };
        let rig = Rig::new(provider, &RigOptions { server, ..RigOptions::default() });
        let mut raw = Raw::connect(&rig, 16, 16);
        let grant = raw.grant(&rig);
        let good = entry(b"key", b"value", 0);
        raw.announce(&rig, &grant, FIRST_ENTRY, &good);
        rig.nodes.borrow_mut()[0].maintain();
        assert_eq!(rig.server_counters().reclaimed, 1);
        // It wakes up and goes on as if nothing had happened: the write finds no key, or the
        // announcement a grant that is over.
        let tail = FIRST_ENTRY + good.len() as u32;
        let announcement = Announcement { in_place: false, grant: grant.grant, offset: tail };
        raw.write(at(&grant, tail), &entry(b"key", b"late", 0), Some(announcement.encode()));
        let mut refused = false;
        rig.until("the late write is refused", || {
            raw.poll();
            let stale = raw.replies.iter().any(|reply| reply.status == ReplyStatus::StaleGrant);
            refused = raw.broken || stale;
            refused
        });
        let mut bystander = Bystander::new(&rig);
        assert_eq!(rig.get(&mut bystander.client, b"key").as_deref(), Some(&b"value"[..]));
    }
}

#[test]
fn an_honest_client_goes_on_after_its_segment_was_taken_back() {
    for provider in Provider::all() {
        let server = ServerOptions {
            idle_grant: Duration::ZERO,
            reclaim_above_percent: 0,
            ..ServerOptions::default()
        };
        let rig = Rig::new(provider, &RigOptions { server, ..RigOptions::default() });
        let mut client = rig.client();
        let mut lost = 0;
        for round in 0..5_u8 {
            loop {
                let options = beeline_kv_client::PutOptions::default();
                let put = Command::Put { database: 0, key: b"key", value: &[round], options };
                match rig.run(&mut client, put) {
                    Outcome::Stored(_) => break,
                    Outcome::Failed(error) if error.is_retryable() => lost += 1,
                    other => panic!("{other:?}"),
                }
                assert!(lost < 20, "retries do not end");
            }
            rig.nodes.borrow_mut()[0].maintain();
            assert_eq!(rig.get(&mut client, b"key"), Some(vec![round]), "{provider:?}");
        }
        assert!(rig.server_counters().reclaimed >= 4);
    }
}

#[test]
fn scribbling_over_ones_own_acknowledged_entry_is_detected_and_stays_there() {
    everywhere(|rig, bystander| {
        if rig.provider == Provider::Apart {
            return;
        }
        let mut raw = Raw::connect(rig, 16, 16);
        let grant = raw.grant(rig);
        let good = entry(b"spoiled", b"value", 0);
        raw.announce(rig, &grant, FIRST_ENTRY, &good);
        let next = FIRST_ENTRY + good.len() as u32;
        raw.announce(rig, &grant, next, &entry(b"neighbour", b"whole", 0));
        // One byte of the value, without a word to anybody.
        raw.write(at(&grant, FIRST_ENTRY + HEADER_BYTES + 7 + 2), b"X", None);
        raw.idle(rig, 50);
        let get = Command::Get { database: 0, key: b"spoiled" };
        let outcome = rig.run(&mut bystander.client, get);
        let Outcome::Failed(ClientError::Damaged) = outcome else { panic!("{outcome:?}") };
        assert_eq!(rig.server_counters().of(RequestKind::VerifiedGet), 1, "the server looked too");
        let neighbour = rig.get(&mut bystander.client, b"neighbour");
        assert_eq!(neighbour.as_deref(), Some(&b"whole"[..]));
        // The lengths: no byte beyond the slot may leave the server.
        let mut long = entry(b"spoiled", b"value", 0);
        long[28..32].copy_from_slice(&60_000_u32.to_le_bytes());
        raw.write(at(&grant, FIRST_ENTRY), &long, None);
        raw.idle(rig, 50);
        let sent = rig.server_counters().bytes_out;
        let outcome = rig.run(&mut bystander.client, get);
        assert!(
            matches!(outcome, Outcome::Failed(ClientError::Damaged) | Outcome::Missing),
            "{outcome:?}"
        );
        assert!(rig.server_counters().bytes_out - sent < 1000, "nothing beyond the slot is sent");
        // A put by somebody else heals the key.
        rig.put(&mut bystander.client, b"spoiled", b"healed");
        let healed = rig.get(&mut bystander.client, b"spoiled");
        assert_eq!(healed.as_deref(), Some(&b"healed"[..]));
    });
}

#[test]
fn scribbling_over_the_buffer_that_stands_for_a_segment_reaches_nothing() {
    let rig = Rig::new(Provider::Apart, &RigOptions::default());
    let mut bystander = Bystander::new(&rig);
    let mut raw = Raw::connect(&rig, 16, 16);
    let grant = raw.grant(&rig);
    raw.announce(&rig, &grant, FIRST_ENTRY, &entry(b"key", b"value", 0));
    raw.write(at(&grant, FIRST_ENTRY + HEADER_BYTES), &[7; 200], None);
    raw.idle(&rig, 50);
    assert_eq!(rig.get(&mut bystander.client, b"key").as_deref(), Some(&b"value"[..]));
    // Nor does announcing it once more.
    let again = Announcement { in_place: true, grant: grant.grant, offset: FIRST_ENTRY }.encode();
    raw.write(at(&grant, FIRST_ENTRY), &entry(b"key", b"forged", 0), Some(again));
    assert_eq!(raw.reply(&rig).status, ReplyStatus::Rejected);
    assert_eq!(rig.get(&mut bystander.client, b"key").as_deref(), Some(&b"value"[..]));
}

#[test]
fn asking_for_segments_without_writing_takes_one_segment() {
    everywhere(|rig, _| {
        let before = rig.store.pool().used_bytes();
        let mut raw = Raw::connect(rig, 16, 16);
        let first = raw.grant(rig);
        for _ in 0..100 {
            assert_eq!(raw.grant(rig).place, first.place);
        }
        let segment = u64::from(rig.store.pool().segment_bytes());
        assert_eq!(rig.store.pool().used_bytes() - before, segment);
    });
}

#[test]
fn the_old_segments_key_is_dead_after_the_next_grant() {
    everywhere(|rig, bystander| {
        let mut raw = Raw::connect(rig, 16, 16);
        let first = raw.grant(rig);
        raw.announce(rig, &first, FIRST_ENTRY, &entry(b"key", b"value", 0));
        let second = raw.grant(rig);
        assert_ne!(first.place, second.place);
        raw.write(at(&first, FIRST_ENTRY), &entry(b"key", b"forged", 0), None);
        raw.idle(rig, 50);
        // Refused by the provider, or, where the client has the file mapped, found out by the
        // checksum and seal. Never shown.
        let get = Command::Get { database: 0, key: b"key" };
        match rig.run(&mut bystander.client, get) {
            Outcome::Value(value) => assert_eq!(value, b"value"),
            Outcome::Failed(ClientError::Damaged) => {}
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn two_phase_promises_that_are_not_kept_block_nobody_else() {
    everywhere(|rig, bystander| {
        let mut raw = Raw::speaking(rig, Protocol::TwoPhase, 8, 64);
        for round in 0..7 {
            let request =
                Request { argument: 60 << 10, ..Request::new(RequestKind::Allocate, round) };
            raw.send(&request.encode()).unwrap();
            raw.idle(rig, 10);
            bystander.check(rig);
        }
        // Four fit the segment; the rest waits for those and always will.
        assert_eq!(raw.replies.len(), 4);
        drop(raw);
        rig.until("the server notices", || rig.nodes.borrow()[0].server.clients() == 1);
    });
}

#[test]
fn requests_of_another_protocol_end_the_connection() {
    everywhere(|rig, bystander| {
        let foreign = [
            (Protocol::Boom, RequestKind::Allocate),
            (Protocol::Boom, RequestKind::Put),
            (Protocol::TwoPhase, RequestKind::Grant),
            (Protocol::TwoPhase, RequestKind::Delete),
        ];
        for (protocol, kind) in foreign {
            let mut raw = Raw::speaking(rig, protocol, 8, 8);
            raw.send(&Request::new(kind, 1).encode()).unwrap();
            raw.until_broken(rig);
            bystander.check(rig);
        }
    });
}

#[test]
fn an_oblivious_request_slot_is_bounded_and_its_contents_are_checked() {
    everywhere(|rig, bystander| {
        for attack in 0..3 {
            let mut raw = Raw::speaking(rig, Protocol::Oblivious, 8, 8);
            let area = raw.welcome.area_key;
            let mut request = Request::new(RequestKind::Put, 1);
            request.key_bytes = 3;
            request.argument = 5;
            let mut bytes = request.encode().to_vec();
            bytes.extend_from_slice(b"keyvalue");
            let slot = match attack {
                0 => 8,
                1 => {
                    bytes.truncate(REQUEST_HEADER_BYTES + 2);
                    0
                }
                _ => {
                    bytes.push(0);
                    0
                }
            };
            raw.write(Place { key: area, offset: 0 }, &bytes, Some(slot));
            raw.until_broken(rig);
            bystander.check(rig);
        }
    });
}

#[test]
fn hellos_that_ask_for_too_much_get_less_or_nothing() {
    let rig = Rig::new(Provider::Sim, &RigOptions::default());
    let device = rig.device();
    let domain = device.allocate_protection_domain().unwrap();
    let queue = device.create_completion_queue(64).unwrap();
    let options = beeline_fabric::QueuePairOptions::default();
    let qp = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
    let mut random = Randomness::new(3);
    for _ in 0..500 {
        let mut bytes = vec![0; random.below(100) as usize];
        random.fill(&mut bytes);
        assert!(common::hello(&rig, &qp.connect_info(), &bytes).0.is_none());
    }
    let hello = beeline_kv::wire::Hello {
        protocol: Protocol::Boom,
        window: u16::MAX,
        shard: 0,
        request_bytes: u32::MAX,
        slot_bytes: 0,
    };
    assert!(common::hello(&rig, &qp.connect_info(), &hello.encode()).0.is_none());
    let hello = beeline_kv::wire::Hello { request_bytes: 48 + 65_535, ..hello };
    let (info, welcome) = common::hello(&rig, &qp.connect_info(), &hello.encode());
    assert!(info.is_some());
    assert!(welcome.unwrap().window <= 16, "a megabyte for requests, not more");
}

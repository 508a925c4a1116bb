//! One-sided clients that lie, scribble and vanish: what they harm is what they wrote themselves.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // helpers of tests

use std::sync::{Arc, Mutex};

use beeline_kv::entry::{APPENDED, Draft, FIRST_ENTRY, Header, TOMBSTONE, checksum_whole};
use beeline_kv::{
    ClientLog, Keyspace, NamespaceOptions, Notice, PutOptions, RejectReason, Shard, Store,
    StoreOptions, audit,
};
use beeline_pmem::{Pool, PoolOptions};

const SEGMENT: u32 = 64 << 10;

fn open(pool: &Pool, shards: usize) -> (Arc<Store>, Vec<Arc<Mutex<Shard>>>) {
    let options = StoreOptions { shards, ..StoreOptions::default() };
    let (store, shards, _) = Store::open(pool.clone(), options).unwrap();
    (store, shards)
}

fn pool(segments: u64) -> Pool {
    Pool::dram(&PoolOptions::volatile(SEGMENT, segments * u64::from(SEGMENT))).unwrap()
}

fn draft(key: &[u8], value: &[u8], slot_bytes: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    Draft { key, value, slot_bytes, ..Draft::default() }.form(&mut bytes).unwrap();
    bytes
}

fn write(log: &ClientLog, offset: u32, bytes: &[u8]) {
    log.segment().unwrap().store(offset as usize, bytes);
}

fn put(shard: &mut Shard, log: &mut ClientLog, key: &[u8], value: &[u8]) -> u32 {
    let offset = log.tail();
    write(log, offset, &draft(key, value, 0));
    shard.accept(log, Notice { offset }).unwrap();
    shard.commit().unwrap();
    offset
}

fn refuse(shard: &mut Shard, log: &mut ClientLog, offset: u32) -> RejectReason {
    shard.accept(log, Notice { offset }).unwrap_err().reason
}

fn get(shard: &mut Shard, key: &[u8]) -> Option<Vec<u8>> {
    let entry = shard.lookup(0, key).unwrap()?;
    let mut value = Vec::new();
    shard.read_value(&entry, &mut value).ok()?;
    Some(value)
}

#[test]
fn an_announcement_without_a_sound_entry_is_refused() {
    let pool = pool(16);
    let (_, shards) = open(&pool, 1);
    let mut shard = shards[0].lock().unwrap();
    let mut log = shard.open_client_log();
    assert_eq!(refuse(&mut shard, &mut log, FIRST_ENTRY), RejectReason::NoSegment);
    shard.grant(&mut log).unwrap();
    let tail = log.tail();
    assert_eq!(refuse(&mut shard, &mut log, tail), RejectReason::Header, "an empty place");
    for offset in [0, 1, tail + 16, tail + 1, SEGMENT - 16, SEGMENT, u32::MAX] {
        assert_eq!(refuse(&mut shard, &mut log, offset), RejectReason::Offset, "{offset}");
    }
    let good = draft(b"key", b"value", 0);
    for at in 20..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        write(&log, tail, &bad);
        let covered = at < 48 + 3 + 5;
        let outcome = shard.accept(&mut log, Notice { offset: tail });
        if covered {
            let reason = outcome.unwrap_err().reason;
            let expected = [RejectReason::Header, RejectReason::Checksum];
            assert!(expected.contains(&reason), "byte {at}: {reason:?}");
        } else {
            // Padding is nobody's business: start over with a fresh log.
            outcome.unwrap();
            break;
        }
    }
    // Lengths that reach beyond the segment.
    let tail = log.tail();
    let huge = Header {
        slot_bytes: SEGMENT,
        key_length: 3,
        value_length: SEGMENT - 64,
        ..Header::default()
    };
    write(&log, tail, &huge.encode());
    assert_eq!(refuse(&mut shard, &mut log, tail), RejectReason::Header);
    assert!(shard.stats().entries_rejected > 40);
}

#[test]
fn a_key_of_another_shard_is_refused() {
    let pool = pool(16);
    let (store, shards) = open(&pool, 2);
    let foreign =
        (0..100_u32).map(|n| n.to_le_bytes()).find(|key| store.shard_of(0, key) == 1).unwrap();
    let mut shard = shards[0].lock().unwrap();
    let mut log = shard.open_client_log();
    shard.grant(&mut log).unwrap();
    write(&log, FIRST_ENTRY, &draft(&foreign, b"x", 0));
    assert_eq!(refuse(&mut shard, &mut log, FIRST_ENTRY), RejectReason::WrongShard);
}

#[test]
fn the_newest_copy_and_a_copy_being_read_are_not_given_up() {
    let pool = pool(16);
    let (_, shards) = open(&pool, 1);
    let mut shard = shards[0].lock().unwrap();
    let mut log = shard.open_client_log();
    shard.grant(&mut log).unwrap();
    let first = put(&mut shard, &mut log, b"key", &[1; 100]);
    let entry = shard.lookup(0, b"key").unwrap().unwrap();
    let guard = shard.begin_read(&entry).unwrap();
    let second = put(&mut shard, &mut log, b"key", &[2; 100]);
    let slot = second - first;

    // C1: the newest. (The entry itself is the client's to spoil.)
    write(&log, second, &draft(b"key", &[3; 90], slot));
    assert_eq!(refuse(&mut shard, &mut log, second), RejectReason::Newest);
    let third = put(&mut shard, &mut log, b"key", &[4; 100]);

    // C3: the first copy is being read, and the client is told so.
    assert_eq!(shard.smallest_version_read(entry.hash), Some(guard.version()));
    write(&log, first, &draft(b"key", &[5; 90], slot));
    assert_eq!(refuse(&mut shard, &mut log, first), RejectReason::BeingRead);
    shard.end_read(guard);
    assert_eq!(shard.smallest_version_read(entry.hash), None);

    // C2: a slot keeps its length, and nothing longer fits in.
    write(&log, first, &draft(b"key", &[6; 20], slot - 16));
    assert_eq!(refuse(&mut shard, &mut log, first), RejectReason::SlotLength);
    write(&log, first, &draft(b"key", &[6; 200], slot + 112));
    assert_eq!(refuse(&mut shard, &mut log, first), RejectReason::Header);

    // Another key's slot is not a place for this one.
    let other = put(&mut shard, &mut log, b"yek", &[7; 100]);
    put(&mut shard, &mut log, b"yek", &[8; 100]);
    write(&log, other, &draft(b"key", &[9; 90], slot));
    assert_eq!(refuse(&mut shard, &mut log, other), RejectReason::Newest);
    assert_eq!(get(&mut shard, b"key").unwrap(), [4; 100]);
    assert_eq!(third, second + slot);

    // With all three conditions met it is taken.
    write(&log, first, &draft(b"key", &[10; 60], slot));
    let accepted = shard.accept(&mut log, Notice { offset: first }).unwrap();
    assert!(accepted.in_place);
    assert_eq!(get(&mut shard, b"key").unwrap(), [10; 60]);
}

#[test]
fn a_forged_version_or_seal_counts_for_nothing() {
    let pool = pool(16);
    let (_, shards) = open(&pool, 1);
    let segment = {
        let mut shard = shards[0].lock().unwrap();
        shard.put(0, b"victim", &[b"theirs"], PutOptions::default()).unwrap();
        shard.commit().unwrap();
        let mut log = shard.open_client_log();
        let segment = shard.grant(&mut log).unwrap();
        let own = put(&mut shard, &mut log, b"mine", b"value");
        // A copy of a sealed entry elsewhere, and entries that claim the largest versions.
        let mut sealed = vec![0; 64];
        segment.read(own as usize, &mut sealed);
        write(&log, log.tail(), &sealed);
        for (number, key) in [b"victim".as_slice(), b"planted"].into_iter().enumerate() {
            let mut forged = draft(key, b"forged", 0);
            forged[0..8].copy_from_slice(&u64::MAX.to_le_bytes());
            forged[8..16].copy_from_slice(&0xDEAD_BEEF_u64.to_le_bytes());
            write(&log, log.tail() + 64 + number as u32 * 64, &forged);
        }
        shard.close_client_log(log);
        segment
    };
    drop(shards);
    let (store, shards) = open(&pool, 1);
    {
        let mut shard = shards[0].lock().unwrap();
        assert_eq!(get(&mut shard, b"victim").unwrap(), b"theirs");
        assert_eq!(get(&mut shard, b"mine").unwrap(), b"value");
        assert_eq!(get(&mut shard, b"planted"), None);
        assert_eq!(shard.len(0), 2);
    }
    assert!(audit(&store, &shards).is_empty());
    drop(segment);
}

/// Gives `entry` four last bytes with which it has this checksum: a crc is linear, so those bits are
/// found that together make the difference.
fn mend_checksum(entry: &mut [u8], wanted: u32) {
    let at = entry.len() - 4;
    let with = |entry: &mut [u8], bits: u32| {
        entry[at..].copy_from_slice(&bits.to_le_bytes());
        checksum_whole(entry)
    };
    let plain = with(entry, 0);
    // By leading bit: what the bits change, and the bits.
    let mut basis = [(0, 0); 32];
    let reduce = |basis: &[(u32, u32); 32], mut pair: (u32, u32)| {
        while pair.0 != 0 && basis[pair.0.ilog2() as usize].0 != 0 {
            let other = basis[pair.0.ilog2() as usize];
            pair = (pair.0 ^ other.0, pair.1 ^ other.1);
        }
        pair
    };
    for bit in 0..32 {
        let pair = reduce(&basis, (with(entry, 1 << bit) ^ plain, 1 << bit));
        basis[pair.0.ilog2() as usize] = pair;
    }
    let (left, bits) = reduce(&basis, (plain ^ wanted, 0));
    assert_eq!((left, with(entry, bits)), (0, wanted));
}

#[test]
fn an_accepted_entry_that_is_made_one_of_a_stream_or_a_service_counts_for_nothing() {
    const LOG: u32 = 400;
    const SYSTEM: u32 = 16;
    let read = |shard: &mut Shard| {
        let mut values = Vec::new();
        let mut keys = Keyspace::single(shard);
        let visit = |entry: beeline_kv::StreamEntry<'_>| {
            values.push(entry.value.to_vec());
            std::ops::ControlFlow::Continue(())
        };
        keys.read_stream(LOG, b"", 0, visit).unwrap();
        values
    };
    let appended = |generation: u64, position: u64| {
        let key = [generation.to_be_bytes(), position.to_be_bytes()].concat();
        (APPENDED, LOG, key, vec![0; 8])
    };
    let record = [b"namespace:".as_slice(), &LOG.to_be_bytes()].concat();
    let forgeries = [
        // The last position there could be.
        appended(1, u64::MAX),
        // A newer head of the stream, of another generation.
        (0, LOG, Vec::new(), vec![0; 16]),
        // The namespace of streams, cleared later.
        (0, SYSTEM, record, [[1, 4].as_slice(), &[0; 22]].concat()),
    ];
    // The entry that comes next: generations are small numbers, which can be guessed.
    let forgeries = (1..9).map(|generation| appended(generation, 1)).chain(forgeries);
    for (flags, namespace, key, value) in forgeries {
        let pool = pool(16);
        let (_, shards) = open(&pool, 1);
        {
            let mut shard = shards[0].lock().unwrap();
            let mut keys = Keyspace::single(&mut shard);
            let options = NamespaceOptions { stream: true, ..NamespaceOptions::default() };
            keys.create_namespace(LOG, options).unwrap();
            keys.append_in(LOG, b"", &[b"theirs"]).unwrap();
            keys.commit().unwrap();
            let mut log = shard.open_client_log();
            let segment = shard.grant(&mut log).unwrap();
            let own = put(&mut shard, &mut log, b"own", &[1; 61]);
            put(&mut shard, &mut log, b"behind", b"value");
            let mut bytes = [0; 48];
            segment.read(own as usize, &mut bytes);
            let sealed = Header::decode(&bytes);
            let header = Header {
                flags,
                namespace,
                key_length: key.len() as u16,
                value_length: value.len() as u32,
                ..sealed
            };
            let mut forged = [header.encode().as_slice(), &key, &value].concat();
            mend_checksum(&mut forged, sealed.checksum);
            write(&log, own, &forged);
            shard.close_client_log(log);
        }
        drop(shards);
        let (store, shards) = open(&pool, 1);
        {
            let mut shard = shards[0].lock().unwrap();
            assert_eq!(read(&mut shard), [b"theirs"], "{flags} {namespace}");
            assert_eq!(get(&mut shard, b"behind").unwrap(), b"value");
            assert!(get(&mut shard, b"own").is_none());
        }
        let findings = audit(&store, &shards);
        assert!(findings.is_empty(), "{findings:#?}");
    }
}

#[test]
fn a_client_that_scribbles_over_everything_spoils_only_what_it_wrote() {
    for seed in 1..40_u64 {
        let pool = pool(24);
        let (_, shards) = open(&pool, 1);
        let keys: Vec<Vec<u8>> = (0..30).map(|n| format!("honest {n}").into_bytes()).collect();
        let segment = {
            let mut shard = shards[0].lock().unwrap();
            let mut honest = shard.open_client_log();
            shard.grant(&mut honest).unwrap();
            let mut hostile = shard.open_client_log();
            let segment = shard.grant(&mut hostile).unwrap();
            for (n, key) in keys.iter().enumerate() {
                put(&mut shard, &mut honest, key, &[n as u8; 40]);
                put(&mut shard, &mut hostile, format!("own {n}").as_bytes(), &[n as u8; 50]);
            }
            // Between commits: random words all over the segment, headers above all.
            let mut random = seed;
            for _ in 0..400 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                let at = (random >> 40) as usize % (4800 / 8) * 8;
                segment.store_u64(at, random);
            }
            for n in 0..30 {
                // Never a panic and never another key's value.
                let found = get(&mut shard, format!("own {n}").as_bytes());
                assert!(found.is_none_or(|value| value == [n as u8; 50]));
            }
            for (n, key) in keys.iter().enumerate() {
                assert_eq!(get(&mut shard, key).unwrap(), [n as u8; 40]);
            }
            shard.close_client_log(hostile);
            shard.close_client_log(honest);
            // The collector takes both apart.
            for _ in 0..100 {
                for n in 0..8 {
                    shard.put(0, &[n], &[&[0; 7000]], PutOptions::default()).unwrap();
                }
                shard.maintain(1 << 20).unwrap();
            }
            for (n, key) in keys.iter().enumerate() {
                assert_eq!(get(&mut shard, key).unwrap(), [n as u8; 40]);
            }
            assert!(shard.stats().segments_collected > 0);
            segment
        };
        // And goes on after the server's restart.
        drop(shards);
        let (store, shards) = open(&pool, 1);
        for at in (0..8000).step_by(8) {
            segment.store_u64(at, seed.wrapping_mul(at as u64));
        }
        {
            let mut shard = shards[0].lock().unwrap();
            for (n, key) in keys.iter().enumerate() {
                assert_eq!(get(&mut shard, key).unwrap(), [n as u8; 40]);
            }
        }
        drop((store, shards));
        let (_store, shards) = open(&pool, 1);
        let mut shard = shards[0].lock().unwrap();
        for (n, key) in keys.iter().enumerate() {
            assert_eq!(get(&mut shard, key).unwrap(), [n as u8; 40]);
        }
    }
}

#[test]
fn a_client_that_hangs_on_to_its_segment_does_not_stop_the_store() {
    let pool = pool(10);
    let (_, shards) = open(&pool, 1);
    let mut shard = shards[0].lock().unwrap();
    let mut log = shard.open_client_log();
    shard.grant(&mut log).unwrap();
    put(&mut shard, &mut log, b"held", b"value");
    for turn in 0..400_u32 {
        shard.put(0, &[(turn % 5) as u8], &[&[1; 9000]], PutOptions::default()).unwrap();
        shard.commit().unwrap();
    }
    assert_eq!(get(&mut shard, b"held").unwrap(), b"value");
    shard.close_client_log(log);
}

#[test]
fn a_client_deletes_with_a_tombstone() {
    let pool = pool(10);
    let (_, shards) = open(&pool, 1);
    let mut shard = shards[0].lock().unwrap();
    let mut log = shard.open_client_log();
    shard.grant(&mut log).unwrap();
    put(&mut shard, &mut log, b"key", b"value");
    let mut bytes = Vec::new();
    Draft { key: b"key", tombstone: true, ..Draft::default() }.form(&mut bytes).unwrap();
    assert_eq!(bytes[27], TOMBSTONE);
    let offset = log.tail();
    write(&log, offset, &bytes);
    shard.accept(&mut log, Notice { offset }).unwrap();
    assert!(shard.lookup(0, b"key").unwrap().is_none());
    assert_eq!(shard.len(0), 0);
}

#[test]
fn an_entry_of_a_kind_that_rows_have_is_refused_and_harms_no_row() {
    let pool = pool(16);
    let (_, shards) = open(&pool, 1);
    let mut shard = shards[0].lock().unwrap();
    let mut log = shard.open_client_log();
    shard.grant(&mut log).unwrap();
    let tail = log.tail();
    for kind in 0..=u8::MAX {
        let mut bytes = Vec::new();
        let value = [0xEE; 16];
        Draft { key: b"h", value: &value, kind, ..Draft::default() }.form(&mut bytes).unwrap();
        if beeline_kv::is_row_kind(kind) {
            write(&log, tail, &bytes);
            assert_eq!(refuse(&mut shard, &mut log, tail), RejectReason::Kind, "{kind}");
        }
    }
    assert!(shard.lookup(0, b"h").unwrap().is_none());
    put(&mut shard, &mut log, b"h", b"a string");
    assert_eq!(get(&mut shard, b"h").as_deref(), Some(&b"a string"[..]));
}

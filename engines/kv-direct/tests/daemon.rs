//! The daemon is off the path of requests: they are served while it is stopped, until a class runs out.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::collections::HashMap;
use std::sync::Arc;

use beeline_kv_direct::memory::HostMemory;
use beeline_kv_direct::slab::SlabDaemon;
use beeline_kv_direct::{
    Functions, PacketWriter, Processor, ProcessorOptions, ReplyReader, Request, Status,
};

type Pairs = HashMap<u32, usize>;

fn value(key: u32, length: usize) -> Vec<u8> {
    vec![key as u8 ^ length as u8; length]
}

/// Executes the requests in packets of 32; their statuses.
fn execute(processor: &mut Processor<HostMemory>, puts: &[(u32, Option<usize>)]) -> Vec<Status> {
    let mut statuses = Vec::new();
    for part in puts.chunks(32) {
        let mut packet = PacketWriter::new(1 << 20, 1 << 20);
        for (key, length) in part {
            let key_bytes = key.to_le_bytes();
            let pushed = match length {
                Some(length) => packet.push(&Request::put(&key_bytes, &value(*key, *length))),
                None => packet.push(&Request::delete(&key_bytes)),
            };
            assert!(pushed);
        }
        let mut reply = Vec::new();
        assert!(processor.process(packet.finish(0), &mut reply, 1 << 20));
        statuses.extend(ReplyReader::new(&reply).unwrap().1.map(|(status, _)| status));
    }
    statuses
}

fn all_are_there(processor: &mut Processor<HostMemory>, pairs: &Pairs) {
    for (key, length) in pairs {
        let (place, key_bytes) = (processor.table().place(&key.to_le_bytes()), key.to_le_bytes());
        let held = processor.table().get(place, &key_bytes, <[u8]>::to_vec);
        assert_eq!(held, Some(value(*key, *length)), "key {key}");
    }
}

#[test]
fn requests_are_served_while_the_daemon_is_stopped_until_a_class_runs_out() {
    let options = ProcessorOptions { memory_bytes: 16 << 20, ..ProcessorOptions::default() };
    let functions = Arc::new(Functions::default());
    let (mut processor, pools) = Processor::new(&options, functions, true).unwrap();
    let daemon = SlabDaemon::start(pools).unwrap();
    let mut pairs = Pairs::new();
    let lengths = [20, 90, 200, 900];
    for key in 0..4000_u32 {
        let length = lengths[key as usize % 4];
        assert_eq!(execute(&mut processor, &[(key, Some(length))]), [Status::Ok]);
        pairs.insert(key, length);
    }
    // The daemon stops: what follows, nothing but the processor's thread does.
    drop(daemon);
    let waits = processor.table().slabs().counters().waits;
    for round in 0..50_000_u32 {
        let key = round.wrapping_mul(7919) % 4000;
        let length = pairs[&key];
        let steps = [(key, None), (key, Some(length))];
        assert_eq!(execute(&mut processor, &steps), [Status::Ok, Status::Ok], "round {round}");
    }
    assert_eq!(processor.table().slabs().counters().waits, waits, "nothing waited for the daemon");
    all_are_there(&mut processor, &pairs);
    // New pairs, until a class runs out: the new ones are refused, and what was acknowledged is there.
    let mut refused = 0;
    for key in 4000..60_000_u32 {
        match execute(&mut processor, &[(key, Some(900))])[..] {
            [Status::Ok] => drop(pairs.insert(key, 900)),
            [status] => {
                assert_eq!(status, Status::OutOfMemory);
                refused += 1;
            }
            _ => panic!("one result"),
        }
    }
    assert!(refused > 0 && pairs.len() > 4000, "{refused} refused, {} stored", pairs.len());
    all_are_there(&mut processor, &pairs);
    // Room is made by the processor alone: the freed blocks are its own.
    for key in 0..100_u32 {
        let length = pairs[&key];
        assert_eq!(execute(&mut processor, &[(key, None)]), [Status::Ok]);
        assert_eq!(execute(&mut processor, &[(key, Some(length))]), [Status::Ok]);
    }
    all_are_there(&mut processor, &pairs);
}

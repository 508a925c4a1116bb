//! The direct store: packets, replies, datagrams, greetings; a processor executes what was taken.

use std::sync::Arc;
use std::time::Duration;

use beeline_kv_direct::datagram::{Datagram, Tokens, answer};
use beeline_kv_direct::function::number;
use beeline_kv_direct::map::AdoptWriter;
use beeline_kv_direct::processor::moves::{FORCED, PLAIN};
use beeline_kv_direct::wire::Hello;
use beeline_kv_direct::{
    Functions, HashRing, Kind, PacketWriter, Processor, ProcessorOptions, ReplyReader, Request,
    ServerMap, Status, Width,
};

const REPLY_LIMIT: usize = 60_000;

/// A processor survives any packet, and its reply has a result for each operation within the limit.
pub fn packets(bytes: &[u8]) -> bool {
    let _ = Hello::decode(bytes);
    let _ = answer(bytes);
    if let Some((_, results)) = ReplyReader::new(bytes) {
        let _ = results.count();
    }
    let from = ([127, 0, 0, 1], 9).into();
    if let Datagram::Challenge(challenge) = Tokens::default().look(bytes, from, Duration::ZERO) {
        assert!(challenge.len() <= bytes.len(), "a challenge is no longer than what it answers");
    }
    let options = ProcessorOptions { memory_bytes: 8 << 20, ..ProcessorOptions::default() };
    let functions = Arc::new(Functions::default());
    let (mut processor, _) = Processor::new(&options, functions, false).expect("8 MiB of memory");
    let mut reply = Vec::new();
    // Every other input meets a processor whose keys move.
    if !bytes.len().is_multiple_of(2) {
        let ring = |count: usize| HashRing::new((0..count).map(|server| format!("s{server}")));
        let map = ServerMap { state: 1, me: "s1".to_owned(), old: ring(1), ring: ring(2) };
        let mut set = PacketWriter::new(1 << 16, REPLY_LIMIT);
        assert!(set.push(&Request::control(Kind::SetMap, PLAIN, &map.encode())));
        assert!(processor.process(set.finish(1), &mut reply, REPLY_LIMIT));
    }
    if !processor.process(bytes, &mut reply, REPLY_LIMIT) {
        return false;
    }
    assert!(reply.len() <= REPLY_LIMIT, "the limit on replies holds");
    assert_eq!(reply[..6], bytes[..6], "id and count are those of the packet");
    let count = usize::from(u16::from_le_bytes([bytes[4], bytes[5]]));
    let (_, results) = ReplyReader::new(&reply).expect("a reply has a header");
    let statuses: Vec<Status> = results.map(|(status, _)| status).collect();
    assert_eq!(statuses.len(), count, "each operation has its result");
    let malformed = statuses.iter().position(|status| *status == Status::Malformed);
    let behind = malformed.map_or(&[][..], |at| &statuses[at..]);
    assert!(behind.iter().all(|status| *status == Status::Malformed), "nothing behind it runs");
    count > 0 && malformed.is_none()
}

/// Packets of every operation.
pub fn packet_seeds() -> Vec<Vec<u8>> {
    let one = 1_u64.to_le_bytes();
    let both = [0; 16];
    let with =
        |kind, function, value| Request::with_function(kind, b"n", function, Width::Eight, value);
    let requests = [
        Request::put(b"n", &one),
        Request::get(b"n"),
        with(Kind::UpdateScalar, number::ADD, &one),
        with(Kind::UpdateScalar, number::COMPARE_AND_SWAP, &both),
        with(Kind::UpdateVectorByScalar, number::MAX, &one),
        with(Kind::UpdateVector, number::XOR, &one).without_return(),
        with(Kind::Reduce, number::ADD, &one),
        with(Kind::Filter, number::ADD, &[]),
        Request::put(b"long", &[7; 600]),
        Request::delete(b"n"),
    ];
    let mut whole = PacketWriter::new(1 << 16, REPLY_LIMIT);
    let mut seeds = Vec::new();
    for request in requests {
        let mut alone = PacketWriter::new(1 << 16, REPLY_LIMIT);
        // The same twice: sizes and values are those of the operation before.
        assert!(alone.push(&request) && alone.push(&request) && whole.push(&request));
        seeds.push(alone.finish(7).to_vec());
    }
    seeds.push(whole.finish(8).to_vec());
    let rings = [1, 2].map(|count| HashRing::new((0..count).map(|server| format!("s{server}"))));
    let [old, ring] = rings;
    let map = ServerMap { state: 1, me: "s1".to_owned(), old, ring };
    let mut pairs = AdoptWriter::new(3, 1);
    (0..20_u8).for_each(|key| assert!(pairs.push(&[key], &[key; 40], 1 << 12)));
    for request in [
        Request::control(Kind::Map, PLAIN, &[]),
        Request::control(Kind::SetMap, PLAIN, &map.encode()),
        Request::control(Kind::SetMap, FORCED, &ServerMap { state: 2, ..map.clone() }.encode()),
        Request::control(Kind::Adopt, &[7; 8], pairs.bytes()),
    ] {
        let mut alone = PacketWriter::new(1 << 16, REPLY_LIMIT);
        assert!(alone.push(&request));
        seeds.push(alone.finish(9).to_vec());
    }
    seeds
}

//! The processor against a plain map that executes one operation at a time.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::packet::{PacketWriter, ReplyReader};

fn small(buckets: u32, bytes: u64) -> Processor<HostMemory> {
    let options = TableOptions { inline_threshold: 16, ..TableOptions::default() };
    let memory = HostMemory::new(bytes).unwrap();
    let (first, end) = layout(bytes, options.index_permille);
    let slabs = SlabCache::new(Arc::new(SlabPools::new(first, end)), false);
    let table = Table::new(memory, slabs, options).with_buckets(buckets);
    Processor::over(table, Arc::new(Functions::default()))
}

/// The meaning of the operations.
#[derive(Default)]
struct Plain {
    pairs: HashMap<Vec<u8>, Vec<u8>>,
    functions: Functions,
}

impl Plain {
    fn execute(&mut self, request: &Request<'_>) -> (Status, Option<Vec<u8>>) {
        let function = *self.functions.get(request.function, request.width);
        let width = request.width.bytes();
        match request.kind {
            Kind::Put => {
                self.pairs.insert(request.key.to_vec(), request.value.to_vec());
                return (Status::Ok, None);
            }
            Kind::Delete => {
                let existed = self.pairs.remove(request.key).is_some();
                return (if existed { Status::Ok } else { Status::NotFound }, None);
            }
            Kind::Reduce if function.reduce.is_none() => return (Status::UnknownFunction, None),
            Kind::Filter if function.filter.is_none() => return (Status::UnknownFunction, None),
            kind if kind.writes() && function.update.is_none() => {
                return (Status::UnknownFunction, None);
            }
            _ => {}
        }
        let Some(value) = self.pairs.get_mut(request.key) else { return (Status::NotFound, None) };
        let before = value.clone();
        let parameter = request.value;
        let done = match request.kind {
            Kind::Get => return (Status::Ok, Some(before)),
            Kind::Reduce => {
                let mut sum = parameter.to_vec();
                let done = sum.len() == width && function.reduce.unwrap()(value, &mut sum);
                return if done { (Status::Ok, Some(sum)) } else { (Status::LengthMismatch, None) };
            }
            Kind::Filter => {
                let mut kept = Vec::new();
                let done = function.filter.unwrap()(value, &mut kept);
                return if done {
                    (Status::Ok, Some(kept))
                } else {
                    (Status::LengthMismatch, None)
                };
            }
            Kind::UpdateScalar => {
                let swap = request.function == number::COMPARE_AND_SWAP;
                value.len() == width
                    && parameter.len() == if swap { 2 * width } else { width }
                    && function.update.unwrap()(value, parameter)
            }
            Kind::UpdateVectorByScalar => {
                parameter.len() == width && function.update.unwrap()(value, parameter)
            }
            _ => {
                parameter.len() == value.len()
                    && request.function != number::COMPARE_AND_SWAP
                    && function.update.unwrap()(value, parameter)
            }
        };
        if !done {
            *value = before;
            return (Status::LengthMismatch, None);
        }
        (Status::Ok, (!request.no_return).then_some(before))
    }
}

#[derive(Clone, Debug)]
struct Made {
    kind: u8,
    key: u8,
    length: usize,
    function: u8,
    width: u8,
    quiet: bool,
}

fn made() -> impl Strategy<Value = Made> {
    let lengths = prop_oneof![Just(4_usize), Just(8), Just(16), 0_usize..600];
    (0_u8..12, 0_u8..6, lengths, 0_u8..13, 0_u8..4, any::<bool>()).prop_map(
        |(kind, key, length, function, width, quiet)| Made {
            kind,
            key,
            length,
            function,
            width,
            quiet,
        },
    )
}

fn kind_of(code: u8) -> Kind {
    [
        Kind::Get,
        Kind::Put,
        Kind::Put,
        Kind::Put,
        Kind::Delete,
        Kind::UpdateScalar,
        Kind::UpdateScalar,
        Kind::UpdateScalar,
        Kind::UpdateVectorByScalar,
        Kind::UpdateVector,
        Kind::Reduce,
        Kind::Filter,
    ][usize::from(code)]
}

/// Runs the operations in packets of `batch`, and the plain map beside them.
fn compare(processor: &mut Processor<HostMemory>, plain: &mut Plain, made: &[Made], batch: usize) {
    let mut reply = Vec::new();
    for part in made.chunks(batch) {
        let mut writer = PacketWriter::new(1 << 20, 1 << 20);
        let mut expected = Vec::new();
        for one in part {
            let kind = kind_of(one.kind);
            let width = Width::of_code(one.width).unwrap();
            let key = vec![one.key; usize::from(one.key) * 3 + 1];
            let length = match kind {
                _ if !kind.has_value() => 0,
                Kind::Put => one.length,
                Kind::UpdateScalar if one.function == number::COMPARE_AND_SWAP => width.bytes() * 2,
                Kind::UpdateVector => one.length,
                _ => width.bytes(),
            };
            let value: Vec<u8> = (0..length).map(|i| (i as u8).wrapping_mul(one.key) & 3).collect();
            let request = if kind.has_function() {
                Request::with_function(kind, &key, one.function, width, &value)
            } else {
                Request { value: &value, ..Request { kind, ..Request::get(&key) } }
            };
            let request = if one.quiet { request.without_return() } else { request };
            assert!(writer.push(&request));
            let (status, bytes) = plain.execute(&request);
            expected.push((status, bytes.filter(|_| !one.quiet)));
        }
        assert!(processor.process(writer.finish(7), &mut reply, 1 << 20));
        let (id, results) = ReplyReader::new(&reply).unwrap();
        assert_eq!(id, 7);
        for (at, ((status, bytes), (want, value))) in results.zip(expected).enumerate() {
            assert_eq!((status, bytes.map(<[u8]>::to_vec)), (want, value), "{:?}", part[at]);
        }
    }
    for (key, value) in &plain.pairs {
        let place = processor.table().place(key);
        let held = processor.table().get(place, key, <[u8]>::to_vec);
        assert_eq!(held.as_ref(), Some(value), "memory holds what the last operation left");
    }
    assert_eq!(processor.table().counters().pairs, plain.pairs.len() as u64);
    assert_eq!(processor.station().in_flight(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn results_equal_those_of_one_operation_after_the_other(
        operations in proptest::collection::vec(made(), 1..300),
        batch in 1_usize..300,
        buckets in 1_u32..5,
    ) {
        let mut processor = small(buckets, 8 << 20);
        compare(&mut processor, &mut Plain::default(), &operations, batch);
    }

    #[test]
    fn hostile_packets_change_nothing_and_panic_nowhere(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        count in 0_u16..400,
    ) {
        let mut processor = small(3, 8 << 20);
        let mut packet = vec![1, 0, 0, 0];
        packet.extend(count.to_le_bytes());
        packet.extend(bytes);
        let mut reply = Vec::new();
        if processor.process(&packet, &mut reply, 1 << 20) {
            let (id, results) = ReplyReader::new(&reply).unwrap();
            prop_assert_eq!((id, results.count()), (1, usize::from(count)));
        }
        prop_assert_eq!(processor.station().in_flight(), 0);
    }
}

/// The million operations that a check runs; a hundred million with `BEELINE_DEEP=1`.
#[test]
fn a_million_operations_agree_with_a_plain_map() {
    let rounds = if std::env::var_os("BEELINE_DEEP").is_some() { 5000 } else { 50 };
    let mut state = 42_u64;
    let mut random = move |below: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % below
    };
    let mut processor = small(4096, 64 << 20);
    let mut plain = Plain::default();
    for _ in 0..rounds {
        let operations: Vec<Made> = (0..20_000)
            .map(|_| Made {
                kind: random(12) as u8,
                key: random(30) as u8,
                length: [4, 8, 16, random(600) as usize][random(4) as usize],
                function: random(13) as u8,
                width: random(4) as u8,
                quiet: random(2) == 0,
            })
            .collect();
        let batch = random(250) as usize + 1;
        compare(&mut processor, &mut plain, &operations, batch);
    }
    let counters = processor.counters();
    assert_eq!(counters.operations, rounds * 20_000);
    assert!(counters.forwarded > 100_000 && counters.write_backs > 10_000, "{counters:?}");
}

#[test]
fn fetch_and_add_returns_each_number_once_and_writes_back_once() {
    let mut processor = small(64, 8 << 20);
    let mut reply = Vec::new();
    let mut writer = PacketWriter::new(1 << 16, 1 << 20);
    writer.push(&Request::put(b"n", &0_u64.to_le_bytes()));
    processor.process(writer.finish(0), &mut reply, 1 << 20);
    writer.clear();
    let one = 1_u64.to_le_bytes();
    let add = Request::with_function(Kind::UpdateScalar, b"n", number::ADD, Width::Eight, &one);
    for _ in 0..100 {
        assert!(writer.push(&add));
    }
    processor.process(writer.finish(1), &mut reply, 1 << 20);
    let (_, results) = ReplyReader::new(&reply).unwrap();
    for (expected, (status, bytes)) in results.enumerate() {
        assert_eq!(status, Status::Ok);
        assert_eq!(bytes, Some(&(expected as u64).to_le_bytes()[..]));
    }
    let counters = processor.counters();
    assert_eq!((counters.pipelined, counters.forwarded, counters.write_backs), (2, 99, 1));
    let place = processor.table().place(b"n");
    assert_eq!(processor.table().get(place, b"n", <[u8]>::to_vec).unwrap(), 100_u64.to_le_bytes());
}

#[test]
fn a_forwarded_put_that_outgrows_its_block_is_acknowledged_only_where_it_fits() {
    let mut processor = small(64, 4 << 20);
    let mut reply = Vec::new();
    let mut writer = PacketWriter::new(1 << 20, 1 << 20);
    // Fill the memory.
    let mut filled = 0_u32;
    for length in [300, 1500] {
        loop {
            writer.clear();
            for _ in 0..64 {
                writer.push(&Request::put(&filled.to_le_bytes(), &vec![1; length]));
                filled += 1;
            }
            processor.process(writer.finish(0), &mut reply, 1 << 20);
            let mut results = ReplyReader::new(&reply).unwrap().1;
            if results.any(|(status, _)| status == Status::OutOfMemory) {
                break;
            }
        }
    }
    // A hot key whose puts grow, all in one packet: each either fits or is refused.
    writer.clear();
    let key = 0_u32.to_le_bytes();
    let lengths = [300, 400, 1500, 310, 1900, 20];
    for length in lengths {
        writer.push(&Request::put(&key, &vec![length as u8; length]));
        writer.push(&Request::get(&key));
    }
    processor.process(writer.finish(0), &mut reply, 1 << 20);
    let results: Vec<_> = ReplyReader::new(&reply).unwrap().1.collect();
    let mut last = vec![1; 300];
    let mut refused = 0;
    for (pair, length) in results.chunks(2).zip(lengths) {
        match pair[0].0 {
            Status::Ok => last = vec![length as u8; length],
            status => {
                assert_eq!(status, Status::OutOfMemory);
                refused += 1;
            }
        }
        assert_eq!(pair[1], (Status::Ok, Some(&last[..])), "after a put of {length} bytes");
    }
    assert!(refused > 0, "memory was full");
    let place = processor.table().place(&key);
    assert_eq!(processor.table().get(place, &key, <[u8]>::to_vec).unwrap(), last);
}

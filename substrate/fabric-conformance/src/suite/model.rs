//! Random sequences of operations against a plain model: two byte vectors.

use beeline_env::Randomness;
use beeline_fabric::{LocalData, MemoryRegion, Operation, Status, WorkRequest};

use crate::context::{ALL, Context, Pair, contents, part, store, visible};
use crate::harness::{ItemResult, Stop, ensure, ensure_eq};

const LENGTH: u64 = 4096;

/// Remote memory, local results and the inbox, as they should be.
struct Model {
    remote: Vec<u8>,
    local: Vec<u8>,
    inbox: Vec<u8>,
}

fn index(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

fn word(bytes: &[u8], at: u64) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[index(at)..index(at) + 8]);
    u64::from_ne_bytes(word)
}

fn put(bytes: &mut [u8], at: u64, new: &[u8]) {
    bytes[index(at)..index(at) + new.len()].copy_from_slice(new);
}

/// A range inside the regions.
fn range(random: &mut Randomness) -> (u64, u64) {
    let offset = random.below(LENGTH);
    let length = match random.below(4) {
        0 => random.below(9),
        1 => random.below(65),
        _ => random.below(LENGTH),
    };
    (offset, length.min(LENGTH - offset))
}

struct Regions {
    target: MemoryRegion,
    source: MemoryRegion,
    results: MemoryRegion,
    inbox: MemoryRegion,
}

pub(crate) fn random_sequences_do_what_the_model_does(context: &Context<'_>) -> ItemResult {
    let seeds = if Context::deep() { 500 } else { 12 };
    for seed in 0..seeds {
        run(context, seed).map_err(|stop| Stop::failed(format!("model seed {seed}: {stop}")))?;
    }
    Ok(())
}

fn run(context: &Context<'_>, seed: u64) -> ItemResult {
    let mut random = Randomness::new(seed);
    let mut pair = context.pair()?;
    let mut start = vec![0; index(LENGTH)];
    random.fill(&mut start);
    let regions = Regions {
        target: pair.far.region_of(&start, ALL)?,
        source: pair.near.region(index(LENGTH), ALL)?,
        results: pair.near.region(index(LENGTH), ALL)?,
        inbox: pair.far.region(index(LENGTH), ALL)?,
    };
    let mut model =
        Model { remote: start, local: vec![0; index(LENGTH)], inbox: vec![0; index(LENGTH)] };
    for _ in 0..25 {
        batch(context, &mut pair, &regions, &mut model, &mut random)?;
        ensure!(contents(&regions.target) == model.remote, "the target's memory differs");
        ensure!(contents(&regions.results) == model.local, "the local results differ");
        ensure!(contents(&regions.inbox) == model.inbox, "the messages differ");
    }
    Ok(())
}

/// Posts up to 20 operations, waits for all, and does the same to the model.
fn batch(
    context: &Context<'_>,
    pair: &mut Pair,
    regions: &Regions,
    model: &mut Model,
    random: &mut Randomness,
) -> ItemResult {
    let mut fresh = vec![0; index(LENGTH)];
    random.fill(&mut fresh);
    store(&regions.source, 0, &fresh);
    let inline_limit = u64::from(pair.near.device.attributes().max_inline_bytes);
    let mut signalled = Vec::new();
    let mut arrivals = Vec::new();
    for wr_id in 0..random.between(1, 20) {
        let (offset, length) = range(random);
        let remote = regions.target.remote_address(offset);
        let source_at = random.below(LENGTH - length + 1);
        let bytes = fresh[index(source_at)..index(source_at + length)].to_vec();
        let split = random.below(length + 1);
        let entries = [
            part(&regions.source, source_at, split),
            part(&regions.source, source_at + split, length - split),
        ];
        let local = if length <= inline_limit && random.chance(1, 2) {
            LocalData::Inline(&bytes)
        } else {
            LocalData::Gather(&entries)
        };
        let result_at = random.below(LENGTH - length + 1);
        let aligned = random.below(LENGTH / 8) * 8;
        let word_at = random.below(LENGTH / 8) * 8;
        let result_word = part(&regions.results, word_at, 8);
        let word_remote = regions.target.remote_address(aligned);
        let old = word(&model.remote, aligned);
        let operation = match random.below(8) {
            0 | 1 => {
                put(&mut model.remote, offset, &bytes);
                Operation::Write { local, remote }
            }
            2 => {
                put(&mut model.remote, offset, &bytes);
                let immediate = u32::try_from(random.below(1 << 32)).unwrap_or(0);
                pair.b.post_empty_receive(wr_id)?;
                arrivals.push((wr_id, length, Some(immediate)));
                Operation::WriteWithImmediate { local, remote, immediate }
            }
            3 | 4 => {
                let read = model.remote[index(offset)..index(offset + length)].to_vec();
                put(&mut model.local, result_at, &read);
                Operation::Read { local: part(&regions.results, result_at, length), remote }
            }
            5 => {
                let addend = random.next_u64();
                put(&mut model.local, word_at, &old.to_ne_bytes());
                put(&mut model.remote, aligned, &old.wrapping_add(addend).to_ne_bytes());
                Operation::FetchAndAdd { local: result_word, remote: word_remote, addend }
            }
            6 => {
                let expected = if random.chance(1, 2) { old } else { random.next_u64() };
                let desired = random.next_u64();
                put(&mut model.local, word_at, &old.to_ne_bytes());
                if expected == old {
                    put(&mut model.remote, aligned, &desired.to_ne_bytes());
                }
                let (local, remote) = (result_word, word_remote);
                Operation::CompareAndSwap { local, remote, expected, desired }
            }
            _ => {
                pair.b.post_receive(wr_id, &regions.inbox, offset, LENGTH - offset)?;
                put(&mut model.inbox, offset, &bytes);
                let immediate = random.chance(1, 2).then_some(7);
                arrivals.push((wr_id, length, immediate));
                Operation::Send { local, immediate }
            }
        };
        let request = if random.chance(1, 3) {
            WorkRequest::unsignalled(wr_id, operation)
        } else {
            signalled.push(wr_id);
            WorkRequest::new(wr_id, operation)
        };
        pair.a.qp.post_send(&[request])?;
    }
    let last = 1_000;
    let flush = visible(regions.target.remote_address(0), LENGTH);
    pair.a.qp.post_send(&[WorkRequest::new(last, flush)])?;
    signalled.push(last);
    let done = context.completions(&pair.a.queue, signalled.len(), &[&pair.b.queue])?;
    for (completion, wr_id) in done.iter().zip(signalled) {
        ensure_eq!((completion.wr_id, completion.status), (wr_id, Status::Success), "completion");
    }
    let arrived = context.completions(&pair.b.queue, arrivals.len(), &[&pair.a.queue])?;
    for (completion, expected) in arrived.iter().zip(arrivals) {
        let seen = (completion.wr_id, completion.length, completion.immediate);
        ensure_eq!(seen, expected, "arrival");
    }
    Ok(())
}

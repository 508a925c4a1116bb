//! Clients that record what they asked and got, over keys that hold numbers.
#![allow(dead_code, reason = "each suite uses a part")]

use std::collections::HashMap;
use std::time::Instant;

use beeline_env::Randomness;
use beeline_kv_direct::function::number;
use beeline_kv_direct::{DirectClient, Kind, PacketWriter, ReplyReader, Request, Status, Width};
use beeline_verify_one_sided::linear::{Action, Call, is_linearizable};

/// By key: its calls.
pub type History = HashMap<u64, Vec<Call>>;

/// A drawn operation: key, action, and the bytes of its parameter.
#[derive(Clone, Debug)]
pub struct Drawn {
    pub key: [u8; 8],
    pub action: Action,
    bytes: Vec<u8>,
}

impl Drawn {
    pub fn new(random: &mut Randomness, keys: u64) -> Self {
        let key = random.below(keys).to_le_bytes();
        let small = random.below(4);
        let action = match random.below(10) {
            0..3 => Action::Get,
            3..5 => Action::Put(small),
            5 => Action::Delete,
            6..8 => Action::Add(1),
            _ => Action::Swap(small, small + 1),
        };
        let bytes = match action {
            Action::Get | Action::Delete => vec![],
            Action::Put(number) | Action::Add(number) => number.to_le_bytes().to_vec(),
            Action::Swap(old, new) => [old.to_le_bytes(), new.to_le_bytes()].concat(),
        };
        Self { key, action, bytes }
    }

    pub fn request(&self) -> Request<'_> {
        let update = |function| {
            Request::with_function(
                Kind::UpdateScalar,
                &self.key,
                function,
                Width::Eight,
                &self.bytes,
            )
        };
        match self.action {
            Action::Get => Request::get(&self.key),
            Action::Put(_) => Request::put(&self.key, &self.bytes),
            Action::Delete => Request::delete(&self.key),
            Action::Add(_) => update(number::ADD),
            Action::Swap(..) => update(number::COMPARE_AND_SWAP),
        }
    }

    /// What the result says of the value before.
    pub fn before(&self, status: Status, bytes: Option<&[u8]>) -> Option<u64> {
        let bytes = bytes.map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap()));
        match (status, self.action) {
            (Status::Ok, Action::Put(_)) | (Status::NotFound, _) => None,
            (Status::Ok, Action::Delete) => Some(0),
            (Status::Ok, _) => Some(bytes.expect("a result has the value before")),
            (status, action) => panic!("{action:?}: {status:?}"),
        }
    }
}

/// Batches of `client` until `stop` says so after a batch.
pub fn run(
    client: &mut DirectClient,
    number: u32,
    keys: u64,
    clock: Instant,
    mut stop: impl FnMut(usize) -> bool,
) -> History {
    let mut random = Randomness::new(u64::from(number) + 77);
    let mut history = History::new();
    let now = || u64::try_from(clock.elapsed().as_nanos()).unwrap();
    let mut batches = 0;
    while !stop(batches) {
        batches += 1;
        let drawn: Vec<Drawn> =
            (0..=random.below(12)).map(|_| Drawn::new(&mut random, keys)).collect();
        let requests: Vec<Request<'_>> = drawn.iter().map(Drawn::request).collect();
        let begin = now();
        let mut results = vec![None; drawn.len()];
        client
            .execute(&requests, &mut |index, status, bytes| {
                assert!(results[index].is_none(), "one result for each operation");
                results[index] = Some((drawn[index].before(status, bytes), now()));
            })
            .unwrap();
        for (one, result) in drawn.iter().zip(results) {
            let (before, end) = result.expect("each operation has a result");
            let (action, result) = (one.action, Some(before));
            let call = Call { client: number, begin, end, action, result };
            history.entry(u64::from_le_bytes(one.key)).or_default().push(call);
        }
    }
    history
}

/// The same by a caller of the server's own process.
pub fn run_local(
    handle: &beeline_direct::DirectHandle,
    number: u32,
    keys: u64,
    clock: Instant,
    batches: usize,
) -> History {
    let mut random = Randomness::new(u64::from(number) + 77);
    let mut history = History::new();
    let now = || u64::try_from(clock.elapsed().as_nanos()).unwrap();
    for _ in 0..batches {
        let drawn: Vec<Drawn> = (0..8).map(|_| Drawn::new(&mut random, keys)).collect();
        let mut packet = PacketWriter::new(1 << 14, 1 << 18);
        drawn.iter().for_each(|one| assert!(packet.push(&one.request())));
        let begin = now();
        let reply = handle.execute(0, packet.finish(1).to_vec(), 1 << 18).unwrap();
        let end = now();
        for (one, (status, bytes)) in drawn.iter().zip(ReplyReader::new(&reply).unwrap().1) {
            let (action, result) = (one.action, Some(one.before(status, bytes)));
            let call = Call { client: number, begin, end, action, result };
            history.entry(u64::from_le_bytes(one.key)).or_default().push(call);
        }
    }
    history
}

/// One history of many.
pub fn joined(histories: impl IntoIterator<Item = History>) -> History {
    let mut all = History::new();
    for (key, calls) in histories.into_iter().flatten() {
        all.entry(key).or_default().extend(calls);
    }
    all
}

/// Keys whose history no order explains; all began absent.
pub fn unexplained(history: &History) -> Vec<u64> {
    let wrong = |(_, calls): &(&u64, &Vec<Call>)| !is_linearizable(None, calls);
    history.iter().filter(wrong).map(|(key, _)| *key).collect()
}

pub fn calls(history: &History) -> usize {
    history.values().map(Vec::len).sum()
}

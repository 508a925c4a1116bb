//! Loads: one request after the other, several outstanding, mixtures; and which key comes next.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use beeline_env::Randomness;
use beeline_kv_client::{Answer, Client, ClientCounters, ClientError, Command, PutOptions, Token};
use beeline_observe::LatencyRecorder;

/// Keys are 8 bytes, as in YCSB's short form and the paper's index experiments.
pub const KEY_BYTES: usize = 8;
/// A request that takes longer is lost.
const BOUND: Duration = Duration::from_secs(20);

/// Which key comes next.
#[derive(Clone, Debug)]
pub struct Keys {
    random: Randomness,
    count: u64,
    /// Of each key, the share of requests up to and including it; empty for a uniform choice.
    cumulative: Vec<f64>,
}

impl Keys {
    /// All of `count` keys alike.
    pub fn uniform(count: u64, seed: u64) -> Self {
        Self { random: Randomness::new(seed), count, cumulative: Vec::new() }
    }

    /// The n-th most wanted of `count` keys is wanted `1/n^exponent` times as often as the first.
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    pub fn zipf(count: u64, exponent: f64, seed: u64) -> Self {
        let mut sum = 0.0;
        let mut cumulative: Vec<f64> = (1..=count)
            .map(|rank| {
                sum += (rank as f64).powf(-exponent);
                sum
            })
            .collect();
        cumulative.iter_mut().for_each(|share| *share /= sum);
        Self { random: Randomness::new(seed), count, cumulative }
    }

    /// The next key's number.
    #[expect(clippy::cast_precision_loss, reason = "53 random bits")]
    pub fn next(&mut self) -> u64 {
        if self.cumulative.is_empty() {
            return self.random.below(self.count);
        }
        let draw = (self.random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        (self.cumulative.partition_point(|share| *share <= draw) as u64).min(self.count - 1)
    }

    /// Whether something of `percent` happens.
    fn chance(&mut self, percent: u64) -> bool {
        self.random.chance(percent, 100)
    }
}

/// The bytes of key `number`.
pub fn key(number: u64) -> [u8; KEY_BYTES] {
    // Spread, so that neighbours in rank are not neighbours elsewhere.
    number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()
}

/// Stores every key once.
pub fn fill(client: &mut Client, count: u64, value: &[u8]) -> anyhow::Result<()> {
    for number in 0..count {
        client.put(0, &key(number), value, PutOptions::default())?;
    }
    Ok(())
}

/// Puts or gets, one after the other: `percent` of the requests are gets.
pub fn latency(
    client: &mut Client,
    keys: &mut Keys,
    operations: u64,
    percent: u64,
    value: &[u8],
) -> anyhow::Result<LatencyRecorder> {
    let mut recorder = LatencyRecorder::new();
    let mut result = Vec::with_capacity(value.len());
    for _ in 0..operations {
        let key = key(keys.next());
        let get = percent == 100 || (percent > 0 && keys.chance(percent));
        let start = Instant::now();
        if get {
            let found = client.get_into(0, &key, &mut result)?;
            ensure!(found.is_some(), "a key that was stored is gone");
        } else {
            client.put(0, &key, value, PutOptions::default())?;
        }
        recorder.record_ns(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    }
    Ok(recorder)
}

/// Requests per second with `outstanding` of them at a time; `percent` are gets. A `crowded` client
/// gives its processor up while it waits: the shard it waits for may need it.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn rate(
    client: &mut Client,
    keys: &mut Keys,
    operations: u64,
    percent: u64,
    value: &[u8],
    outstanding: usize,
    crowded: bool,
) -> anyhow::Result<f64> {
    let (mut submitted, mut delivered) = (0_u64, 0_u64);
    let mut failed = None;
    let mut deliver = |_: Token, answer: Result<Answer<'_>, ClientError>| {
        if let Err(error) = answer {
            failed = Some(error);
        }
    };
    let start = Instant::now();
    let mut quiet = 0_u32;
    let mut silent_since: Option<Instant> = None;
    while delivered < operations {
        while submitted < operations && submitted - delivered < outstanding as u64 {
            let key = key(keys.next());
            let command = if percent == 100 || (percent > 0 && keys.chance(percent)) {
                Command::Get { database: 0, key: &key }
            } else {
                Command::Put { database: 0, key: &key, value, options: PutOptions::default() }
            };
            client.submit(command)?;
            submitted += 1;
        }
        let count = client.poll(&mut deliver)?;
        delivered += count as u64;
        quiet = if count == 0 { quiet + 1 } else { 0 };
        if quiet == 0 {
            silent_since = None;
            continue;
        }
        if crowded {
            std::thread::yield_now()
        } else {
            std::hint::spin_loop()
        }
        if quiet.is_multiple_of(1 << 14) {
            let since = silent_since.get_or_insert_with(Instant::now);
            (since.elapsed() < BOUND).then_some(()).context("the node is silent")?;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(operations as f64 / seconds),
    }
}

/// What one operation costs on the wire, as counted between two looks at a client's counters.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn cost(before: ClientCounters, after: ClientCounters) -> String {
    let operations = (after.puts + after.gets - before.puts - before.gets).max(1) as f64;
    let verbs = |c: &ClientCounters| c.sends + c.writes + c.reads + c.receives + c.placements;
    let per = |after: u64, before: u64| (after - before) as f64 / operations;
    format!(
        "{:.2} trips {:.2} verbs {:.0} B",
        per(after.round_trips, before.round_trips),
        per(verbs(&after), verbs(&before)),
        per(after.bytes_out + after.bytes_in, before.bytes_out + before.bytes_in)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zipf_choice_prefers_the_first_keys_as_much_as_its_exponent_says() {
        let mut keys = Keys::zipf(1000, 1.0, 1);
        let mut first = 0;
        let mut tenth = 0;
        for _ in 0..200_000 {
            match keys.next() {
                0 => first += 1,
                9 => tenth += 1,
                key => assert!(key < 1000),
            }
        }
        let ratio = f64::from(first) / f64::from(tenth);
        assert!((8.0..12.5).contains(&ratio), "the first is wanted {ratio} times the tenth");
    }

    #[test]
    fn a_uniform_choice_reaches_every_key() {
        let mut keys = Keys::uniform(16, 2);
        let mut seen = [false; 16];
        (0..2_000).for_each(|_| seen[usize::try_from(keys.next()).unwrap()] = true);
        assert!(seen.iter().all(|seen| *seen));
    }
}

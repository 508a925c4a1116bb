//! What a process cost so far: processor time, and how often its threads slept and were displaced.

use std::fmt;
use std::ops::{Add, Sub};
use std::str::FromStr;
use std::time::{Duration, Instant};

use anyhow::Context as _;

/// The sum over the threads of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// Nanoseconds on a processor.
    pub processor_ns: u64,
    /// Switches because a thread waited.
    pub slept: u64,
    /// Switches because another thread had its turn, yields included.
    pub displaced: u64,
    /// Bytes that the process copied between its buffers and a lane's blocks, where it says so.
    pub copied_bytes: u64,
}

impl Costs {
    /// Of this process.
    ///
    /// Errors: the system's.
    pub fn of_this_process() -> anyhow::Result<Self> {
        Self::of("self")
    }

    /// Of the process with this number.
    ///
    /// Errors: it is gone.
    pub fn of(process: &str) -> anyhow::Result<Self> {
        let mut all = Self::default();
        let folder = format!("/proc/{process}/task");
        for thread in std::fs::read_dir(&folder).with_context(|| folder.clone())? {
            let path = thread?.path();
            let read = |name: &str| std::fs::read_to_string(path.join(name));
            let (Ok(schedule), Ok(status)) = (read("schedstat"), read("status")) else { continue };
            let row = |name: &str| {
                let found = status.lines().find_map(|line| line.strip_prefix(name));
                found.and_then(|value| value.trim().parse().ok()).unwrap_or(0)
            };
            let first = schedule.split_whitespace().next().and_then(|word| word.parse().ok());
            all = all
                + Self {
                    processor_ns: first.unwrap_or(0),
                    slept: row("voluntary_ctxt_switches:"),
                    displaced: row("nonvoluntary_ctxt_switches:"),
                    copied_bytes: 0,
                };
        }
        Ok(all)
    }
}

/// What an asking process measured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Figure {
    /// In the unit of its work.
    pub value: f64,
    /// Of round trips whose costs are told: 99 in 100 took no longer, microseconds.
    pub p99_us: Option<f64>,
}

impl From<f64> for Figure {
    fn from(value: f64) -> Self {
        Self { value, p99_us: None }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}", self.value)?;
        self.p99_us.map_or(Ok(()), |p99| write!(formatter, ",{p99}"))
    }
}

impl FromStr for Figure {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let number =
            |text: &str| text.parse::<f64>().with_context(|| format!("{text:?} is no number"));
        match text.split_once(',') {
            Some((value, p99)) => Ok(Self { value: number(value)?, p99_us: Some(number(p99)?) }),
            None => number(text).map(Self::from),
        }
    }
}

/// How long each round took, one after the other, where that is asked for: a look at the clock for each.
#[derive(Debug)]
pub struct Rounds {
    times: Option<Vec<Duration>>,
    last: Instant,
}

impl Rounds {
    /// The first round begins.
    pub fn begin(asked: bool) -> Self {
        Self { times: asked.then(Vec::new), last: Instant::now() }
    }

    /// What went by since the last round is not part of the next.
    pub fn resume(&mut self) {
        self.last = Instant::now();
    }

    /// A round is over, and the next one begins.
    #[inline]
    pub fn over(&mut self) {
        if let Some(times) = &mut self.times {
            let now = Instant::now();
            times.push(now - self.last);
            self.last = now;
        }
    }

    /// The time that 99 in 100 rounds did not take longer than, microseconds.
    pub fn p99_us(self) -> Option<f64> {
        let mut times = self.times?;
        times.sort_unstable();
        let index = (times.len() * 99).div_ceil(100).checked_sub(1)?;
        times.get(index).map(|time| time.as_secs_f64() * 1e6)
    }
}

impl Add for Costs {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            processor_ns: self.processor_ns + other.processor_ns,
            slept: self.slept + other.slept,
            displaced: self.displaced + other.displaced,
            copied_bytes: self.copied_bytes + other.copied_bytes,
        }
    }
}

impl Sub for Costs {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        Self {
            processor_ns: self.processor_ns.saturating_sub(other.processor_ns),
            slept: self.slept.saturating_sub(other.slept),
            displaced: self.displaced.saturating_sub(other.displaced),
            copied_bytes: self.copied_bytes.saturating_sub(other.copied_bytes),
        }
    }
}

impl fmt::Display for Costs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { processor_ns, slept, displaced, copied_bytes } = self;
        write!(formatter, "{processor_ns} {slept} {displaced} {copied_bytes}")
    }
}

impl FromStr for Costs {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let numbers = text.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>();
        let numbers = numbers.with_context(|| format!("{text:?} is no cost"))?;
        let [processor_ns, slept, displaced, copied_bytes] = numbers[..] else {
            anyhow::bail!("{text:?} is no cost");
        };
        Ok(Self { processor_ns, slept, displaced, copied_bytes })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::Command;

    use super::*;

    #[test]
    fn a_process_that_sleeps_is_seen_to_and_costs_come_back_from_text() {
        // Of another process: threads of this one, and their costs, come and go with other tests.
        let (piped, mut byte) = (std::process::Stdio::piped, [0]);
        let mut cat = Command::new("cat").stdin(piped()).stdout(piped()).spawn().unwrap();
        let (mut to, mut from) = (cat.stdin.take().unwrap(), cat.stdout.take().unwrap());
        let costs = || Costs::of(&cat.id().to_string()).unwrap();
        let before = costs();
        for _ in 0..3 {
            let last = costs();
            to.write_all(b"x").unwrap();
            from.read_exact(&mut byte).unwrap();
            let deadline = Instant::now() + Duration::from_secs(60);
            while costs().slept == last.slept {
                assert!(Instant::now() < deadline, "it waits and is not seen to: {last}");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        let spent = costs() - before;
        drop(to);
        assert!(cat.wait().unwrap().success());
        assert!(spent.slept >= 3 && spent.processor_ns > 0, "{spent}");
        let spent = Costs { copied_bytes: 5, ..spent };
        assert_eq!(spent.to_string().parse::<Costs>().unwrap(), spent);
        assert!("1 2".parse::<Costs>().is_err());
    }

    #[test]
    fn the_99th_percentile_is_the_round_that_99_in_100_are_not_longer_than() {
        for (rounds, expected) in [(1_u64, 1.0), (100, 99.0), (200, 198.0), (1000, 990.0)] {
            let times = (1..=rounds).rev().map(Duration::from_micros).collect();
            let all = Rounds { times: Some(times), last: Instant::now() };
            let p99 = all.p99_us().unwrap();
            assert!((p99 - expected).abs() < 0.01, "{rounds}: {p99}");
        }
        assert_eq!(Rounds::begin(false).p99_us(), None);
        let figure = Figure { value: 2.5, p99_us: Some(7.25) };
        assert_eq!(figure.to_string().parse::<Figure>().unwrap(), figure);
        assert_eq!("2.5".parse::<Figure>().unwrap(), Figure::from(2.5));
    }
}

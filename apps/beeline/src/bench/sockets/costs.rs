//! What a process cost so far: processor time, and how often its threads slept and were displaced.

use std::fmt;
use std::ops::{Add, Sub};
use std::str::FromStr;

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
                };
        }
        Ok(all)
    }
}

impl Add for Costs {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            processor_ns: self.processor_ns + other.processor_ns,
            slept: self.slept + other.slept,
            displaced: self.displaced + other.displaced,
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
        }
    }
}

impl fmt::Display for Costs {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {} {}", self.processor_ns, self.slept, self.displaced)
    }
}

impl FromStr for Costs {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let numbers = text.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>();
        let numbers = numbers.with_context(|| format!("{text:?} is no cost"))?;
        let [processor_ns, slept, displaced] = numbers[..] else {
            anyhow::bail!("{text:?} is no cost");
        };
        Ok(Self { processor_ns, slept, displaced })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::process::Command;
    use std::time::{Duration, Instant};

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
        assert_eq!(spent.to_string().parse::<Costs>().unwrap(), spent);
        assert!("1 2".parse::<Costs>().is_err());
    }
}

//! RMongo's Algorithm 2: how large a channel's registered region is, from the load of the host.
//!
//! ```text
//! factor = (1 - network / B) * (1 - used / total)
//! 0 < factor < threshold   size = S * factor * k        the host is loaded
//! threshold <= factor      size = S
//! factor <= 0              the least size               nothing is left
//! ```
//!
//! The size jumps at the threshold, as the paper's does. It applies to channels that are connected from
//! then on; no region shrinks while a peer may write it.
//!
//! Source: spec/rmongo.md 3.2.

use std::time::{Duration, Instant};

/// Least size, bytes.
pub const LEAST_BYTES: u64 = 64 << 10;
/// Sizes are multiples of this.
pub const PAGE_BYTES: u64 = 4096;
/// Least time over which the network is measured.
const WINDOW: Duration = Duration::from_millis(100);

/// The load of a host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Memory in use, bytes.
    pub memory_used: f64,
    /// All memory, bytes.
    pub memory_total: f64,
    /// Bits the network moves each second.
    pub network_used: f64,
}

impl Load {
    /// A host that does nothing.
    pub const IDLE: Self = Self { memory_used: 0.0, memory_total: 1.0, network_used: 0.0 };
}

/// The constants of the formula.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RegisterOptions {
    /// S, bytes. Default 64 MiB.
    pub base_bytes: u64,
    /// k, above 0, below 1. Default 0.8.
    pub regularisation: f64,
    /// The factor below which the host counts as loaded. Default 0.5.
    pub overload_threshold: f64,
    /// B, bits each second. Default 100 G.
    pub bandwidth: f64,
}

impl Default for RegisterOptions {
    fn default() -> Self {
        Self {
            base_bytes: 64 << 20,
            regularisation: 0.8,
            overload_threshold: 0.5,
            bandwidth: 100e9,
        }
    }
}

/// The size of a region for this load, bytes.
#[must_use]
pub fn register_size(options: &RegisterOptions, load: &Load) -> u64 {
    let free_memory = 1.0 - load.memory_used / load.memory_total;
    let free_network = 1.0 - load.network_used / options.bandwidth;
    let factor = free_memory * free_network;
    // Two shortages do not make plenty.
    let exhausted = factor.is_nan() || free_memory <= 0.0 || free_network <= 0.0;
    let size = if exhausted {
        0.0
    } else if factor < options.overload_threshold {
        options.base_bytes as f64 * factor * options.regularisation
    } else {
        options.base_bytes as f64
    };
    (size as u64).next_multiple_of(PAGE_BYTES).max(LEAST_BYTES)
}

/// Where the load is read.
pub trait Meters: std::fmt::Debug {
    /// The load now.
    fn load(&mut self) -> Load;
    /// Time to look at what is measured over a while, so that the load of a later moment is not that of a long past.
    fn look(&mut self) {}
}

/// Meters that a test sets, and that say always the same.
impl Meters for Load {
    fn load(&mut self) -> Load {
        *self
    }
}

/// The host's own: `/proc/meminfo` and the interface counters of `/proc/net/dev`.
#[derive(Debug, Default)]
pub struct ProcMeters {
    last: Option<(Instant, [u64; 2])>,
    bits_per_second: f64,
}

impl Meters for ProcMeters {
    fn load(&mut self) -> Load {
        let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let (memory_used, memory_total) = memory_of(&memory).unwrap_or((0.0, 1.0));
        self.look();
        Load { memory_used, memory_total, network_used: self.bits_per_second }
    }

    fn look(&mut self) {
        let network = std::fs::read_to_string("/proc/net/dev").unwrap_or_default();
        self.note(Instant::now(), bytes_of(&network));
    }
}

impl ProcMeters {
    /// Takes counters of received and sent bytes; the larger of both rates counts.
    fn note(&mut self, now: Instant, bytes: [u64; 2]) {
        let Some((then, before)) = self.last else {
            self.last = Some((now, bytes));
            return;
        };
        let passed = now.saturating_duration_since(then);
        if passed < WINDOW {
            return;
        }
        let moved = bytes.iter().zip(before).map(|(now, then)| now.saturating_sub(then)).max();
        self.bits_per_second = moved.unwrap_or(0) as f64 * 8.0 / passed.as_secs_f64();
        self.last = Some((now, bytes));
    }
}

/// Used and total memory, of the text of `/proc/meminfo`.
fn memory_of(text: &str) -> Option<(f64, f64)> {
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        let kib: f64 = line.split_whitespace().next()?.parse().ok()?;
        Some(kib * 1024.0)
    };
    let total = field("MemTotal:").filter(|total| *total > 0.0)?;
    Some((total - field("MemAvailable:")?, total))
}

/// Bytes received and sent by all interfaces but loopback, of the text of `/proc/net/dev`.
fn bytes_of(text: &str) -> [u64; 2] {
    let mut sum = [0_u64; 2];
    for line in text.lines() {
        let Some((name, figures)) = line.split_once(':') else { continue };
        if name.trim() == "lo" {
            continue;
        }
        let figures: Vec<u64> =
            figures.split_whitespace().map_while(|figure| figure.parse().ok()).collect();
        sum[0] += figures.first().copied().unwrap_or(0);
        sum[1] += figures.get(8).copied().unwrap_or(0);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 64 << 20;

    #[test]
    fn the_formula_holds_line_by_line() {
        let options = RegisterOptions::default();
        // Memory used of 100, network used in gigabits, size.
        let share = |factor: f64| ((S as f64 * factor * 0.8) as u64).next_multiple_of(4096);
        let table = [
            (0.0, 0.0, S),
            (40.0, 0.0, S),
            (50.0, 0.0, S),
            (50.1, 0.0, share(0.499)),
            (0.0, 60.0, share(0.4)),
            (50.0, 50.0, share(0.25)),
            (90.0, 90.0, share(0.01)),
            (99.9, 99.9, LEAST_BYTES),
            (100.0, 0.0, LEAST_BYTES),
            (0.0, 100.0, LEAST_BYTES),
            (0.0, 250.0, LEAST_BYTES),
            (110.0, 250.0, LEAST_BYTES),
        ];
        for (memory, gigabits, size) in table {
            let load =
                Load { memory_used: memory, memory_total: 100.0, network_used: gigabits * 1e9 };
            let found = register_size(&options, &load);
            assert!(
                found.abs_diff(size) <= PAGE_BYTES && found.is_multiple_of(PAGE_BYTES),
                "{memory} % and {gigabits} Gbit/s: {found}, not {size}"
            );
        }
    }

    #[test]
    fn a_loaded_host_gets_less_and_never_less_than_the_least() {
        let options = RegisterOptions { base_bytes: 1 << 20, ..RegisterOptions::default() };
        let mut last = u64::MAX;
        for percent in 0..=100 {
            let load = Load { memory_used: f64::from(percent), memory_total: 100.0, ..Load::IDLE };
            let size = register_size(&options, &load);
            assert!(size <= last && size >= LEAST_BYTES);
            last = size;
        }
        let unknown = Load { memory_total: 0.0, ..Load::IDLE };
        assert_eq!(register_size(&options, &unknown), LEAST_BYTES);
    }

    #[test]
    fn the_files_of_proc_are_read() {
        let memory = "MemTotal:       1000 kB\nMemFree: 1 kB\nMemAvailable:    250 kB\n";
        assert_eq!(memory_of(memory), Some((750.0 * 1024.0, 1000.0 * 1024.0)));
        assert_eq!(memory_of("MemTotal: x kB"), None);
        let network = "Inter-|   Receive\n face |bytes\n    lo: 9 1 0 0 0 0 0 0 9 1\n  eth0: 100 2 0 0 0 0 0 0 50 3\n";
        assert_eq!(bytes_of(network), [100, 50]);
        assert!(ProcMeters::default().load().memory_total > 1.0);
    }

    #[test]
    fn the_network_is_measured_over_a_tenth_of_a_second_at_least() {
        let (mut meters, start) = (ProcMeters::default(), Instant::now());
        meters.note(start, [0, 0]);
        meters.note(start + Duration::from_millis(99), [1000, 0]);
        assert_eq!(meters.bits_per_second, 0.0);
        meters.note(start + Duration::from_millis(200), [1000, 2000]);
        assert!((meters.bits_per_second - 80_000.0).abs() < 1.0);
    }
}

//! Time: the system's, or one that a test moves.

use std::fmt::Debug;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, Timespec, clock_gettime};

/// Two readings of time.
///
/// Durations and time-outs use `monotonic_ns`; what is shown to people or kept on disk (expiry)
/// uses `unix_ms`, which may jump in both directions when somebody sets the clock.
pub trait Clock: Send + Sync + Debug {
    /// Nanoseconds since an arbitrary start; never goes back.
    fn monotonic_ns(&self) -> u64;

    /// Milliseconds since 1970-01-01 00:00 UTC; may jump.
    fn unix_ms(&self) -> u64;
}

/// The kernel's clocks, read through the vDSO (no system call on ordinary machines).
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

fn whole_seconds(time: &Timespec) -> u64 {
    u64::try_from(time.tv_sec).unwrap_or(0)
}

fn nanoseconds_part(time: &Timespec) -> u64 {
    u64::try_from(time.tv_nsec).unwrap_or(0)
}

impl Clock for SystemClock {
    fn monotonic_ns(&self) -> u64 {
        let now = clock_gettime(ClockId::Monotonic);
        whole_seconds(&now).saturating_mul(1_000_000_000).saturating_add(nanoseconds_part(&now))
    }

    fn unix_ms(&self) -> u64 {
        let now = clock_gettime(ClockId::Realtime);
        whole_seconds(&now).saturating_mul(1000).saturating_add(nanoseconds_part(&now) / 1_000_000)
    }
}

/// A clock that stands still until told otherwise.
///
/// [`ManualClock::advance`] moves both readings, as passing time does; the `unix` calls move only
/// the wall clock, in either direction, as a person or NTP does.
#[derive(Debug, Default)]
pub struct ManualClock {
    monotonic_ns: AtomicU64,
    /// `unix_ms = monotonic_ns / 1e6 + unix_minus_monotonic_ms`.
    unix_minus_monotonic_ms: AtomicI64,
}

impl ManualClock {
    /// A clock whose monotonic reading is 0 and whose wall clock shows `unix_ms`.
    #[must_use]
    pub fn new(unix_ms: u64) -> Self {
        let clock = Self::default();
        clock.set_unix_ms(unix_ms);
        clock
    }

    fn elapsed_ms(&self) -> i64 {
        i64::try_from(self.monotonic_ns.load(Ordering::Acquire) / 1_000_000).unwrap_or(i64::MAX)
    }

    /// Lets `duration` pass.
    pub fn advance(&self, duration: Duration) {
        let ns = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        self.monotonic_ns.fetch_add(ns, Ordering::AcqRel);
    }

    /// Lets time pass until the monotonic reading is at least `monotonic_ns`.
    pub fn advance_to_ns(&self, monotonic_ns: u64) {
        self.monotonic_ns.fetch_max(monotonic_ns, Ordering::AcqRel);
    }

    /// Sets the wall clock, forward or backward. The monotonic reading stays.
    pub fn set_unix_ms(&self, unix_ms: u64) {
        let unix_ms = i64::try_from(unix_ms).unwrap_or(i64::MAX);
        let offset = unix_ms.saturating_sub(self.elapsed_ms());
        self.unix_minus_monotonic_ms.store(offset, Ordering::Release);
    }

    /// Moves the wall clock by `milliseconds`, forward or backward. The monotonic reading stays.
    pub fn jump_unix_ms(&self, milliseconds: i64) {
        self.unix_minus_monotonic_ms.fetch_add(milliseconds, Ordering::AcqRel);
    }
}

impl Clock for ManualClock {
    fn monotonic_ns(&self) -> u64 {
        self.monotonic_ns.load(Ordering::Acquire)
    }

    fn unix_ms(&self) -> u64 {
        let offset = self.unix_minus_monotonic_ms.load(Ordering::Acquire);
        u64::try_from(self.elapsed_ms().saturating_add(offset)).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_system_clock_runs_forward_and_shows_this_century() {
        let clock = SystemClock;
        let first = clock.monotonic_ns();
        assert!(clock.monotonic_ns() >= first);
        let year_2000_ms = 946_684_800_000;
        assert!(clock.unix_ms() > year_2000_ms);
    }

    #[test]
    fn passing_time_moves_both_readings_of_a_manual_clock() {
        let clock = ManualClock::new(1_000);
        clock.advance(Duration::from_millis(250));
        assert_eq!(clock.monotonic_ns(), 250_000_000);
        assert_eq!(clock.unix_ms(), 1_250);
        clock.advance_to_ns(100);
        assert_eq!(clock.monotonic_ns(), 250_000_000, "monotonic time never goes back");
    }

    #[test]
    fn a_wall_clock_jump_leaves_monotonic_time_alone() {
        let clock = ManualClock::new(10_000);
        clock.advance(Duration::from_secs(1));
        clock.jump_unix_ms(-5_000);
        assert_eq!(clock.unix_ms(), 6_000);
        clock.jump_unix_ms(86_400_000);
        assert_eq!(clock.unix_ms(), 86_406_000);
        clock.jump_unix_ms(-100_000_000);
        assert_eq!(clock.unix_ms(), 0, "before 1970 reads as 1970");
        clock.set_unix_ms(42);
        assert_eq!(clock.unix_ms(), 42);
        assert_eq!(clock.monotonic_ns(), 1_000_000_000);
    }
}

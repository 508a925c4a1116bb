//! Monotonic time in nanoseconds.

use rustix::time::{ClockId, Timespec, clock_gettime};

fn nanoseconds(time: Timespec) -> u64 {
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let rest = u64::try_from(time.tv_nsec).unwrap_or(0);
    seconds.saturating_mul(1_000_000_000).saturating_add(rest)
}

/// Now, exact.
pub fn now_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::Monotonic))
}

/// Now, up to one scheduler tick (4 ms) behind; a fifth of the price.
pub(crate) fn coarse_ns() -> u64 {
    nanoseconds(clock_gettime(ClockId::MonotonicCoarse))
}

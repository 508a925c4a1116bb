//! A high-dynamic-range recorder of latencies, with its summary.
//!
//! For benches and clients, which want exact percentiles; a serving shard uses
//! [`crate::Histogram`], which is smaller and readable from other threads.

use hdrhistogram::Histogram;
use serde::Serialize;

/// Longest latency told apart, nanoseconds; longer ones count as this.
pub const MAX_NS: u64 = 60_000_000_000;

/// Records latencies in nanoseconds with three significant digits, up to [`MAX_NS`].
#[derive(Clone, Debug)]
pub struct LatencyRecorder {
    histogram: Histogram<u64>,
}

impl Default for LatencyRecorder {
    fn default() -> Self {
        Self::new()
    }
}

impl LatencyRecorder {
    /// An empty recorder. All memory is taken now; recording allocates nothing.
    #[must_use]
    pub fn new() -> Self {
        match Histogram::new_with_bounds(1, MAX_NS, 3) {
            Ok(histogram) => Self { histogram },
            Err(error) => unreachable!("the bounds are constants the library accepts: {error}"),
        }
    }

    /// Records one latency. At a fixed offered load, measure from the moment the request was due,
    /// so that queueing delay is included.
    pub fn record_ns(&mut self, nanoseconds: u64) {
        self.histogram.saturating_record(nanoseconds.clamp(1, MAX_NS));
    }

    /// Adds all latencies of `other`.
    pub fn merge(&mut self, other: &Self) {
        let added = self.histogram.add(&other.histogram);
        assert!(added.is_ok(), "recorders share their bounds");
    }

    /// Latencies recorded.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.histogram.len()
    }

    /// The latency that `fraction` (0..=1) of the recorded ones do not exceed, nanoseconds.
    #[must_use]
    pub fn quantile_ns(&self, fraction: f64) -> u64 {
        self.histogram.value_at_quantile(fraction)
    }

    /// Every distinct recorded latency (nanoseconds) with its count, ascending: for plots.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.histogram.iter_recorded().map(|v| (v.value_iterated_to(), v.count_at_value()))
    }

    /// The figures a report shows.
    #[must_use]
    pub fn summary(&self) -> LatencySummary {
        LatencySummary {
            count: self.histogram.len(),
            min_ns: self.histogram.min(),
            mean_ns: self.histogram.mean(),
            p50_ns: self.quantile_ns(0.5),
            p99_ns: self.quantile_ns(0.99),
            p999_ns: self.quantile_ns(0.999),
            max_ns: self.histogram.max(),
        }
    }
}

/// Percentiles of a [`LatencyRecorder`], nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencySummary {
    /// Latencies recorded.
    pub count: u64,
    /// Least.
    pub min_ns: u64,
    /// Mean.
    pub mean_ns: f64,
    /// Half are no longer.
    pub p50_ns: u64,
    /// 99 % are no longer.
    pub p99_ns: u64,
    /// 99.9 % are no longer.
    pub p999_ns: u64,
    /// Longest.
    pub max_ns: u64,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn quantiles_agree_with_a_sorted_list(mut all in proptest::collection::vec(1u64..10_000_000_000, 1..300)) {
            let mut recorder = LatencyRecorder::new();
            for &latency in &all {
                recorder.record_ns(latency);
            }
            all.sort_unstable();
            for fraction in [0.5, 0.99, 1.0] {
                #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a few hundred")]
                let index = ((fraction * all.len() as f64).ceil() as usize).max(1) - 1;
                let (exact, read) = (all[index], recorder.quantile_ns(fraction));
                prop_assert!(read.abs_diff(exact) <= exact / 500 + 1, "{read} for {exact}");
            }
        }
    }

    #[test]
    fn merging_adds_the_counts_and_keeps_the_extremes() {
        let (mut left, mut right) = (LatencyRecorder::new(), LatencyRecorder::new());
        left.record_ns(10);
        right.record_ns(u64::MAX);
        right.record_ns(0);
        left.merge(&right);
        let summary = left.summary();
        assert_eq!((summary.count, summary.min_ns), (3, 1));
        assert!(summary.max_ns >= MAX_NS);
    }
}

//! Counters, gauges and histograms: plain cells, one writer each, any number of readers.
//!
//! A shard owns its own [`MetricSet`] and is the only thread that writes to it, so an increment is
//! a load, an add and a store without a lock prefix. A scrape reads the cells from another thread
//! at any moment: each value is whole, and values of one scrape may be a few operations apart.
//!
//! ```
//! beeline_observe::metrics! {
//!     /// What one door counts.
//!     pub struct DoorMetrics in "beeline_door" {
//!         counter commands: Count, "Commands executed.";
//!         gauge connections: Count, "Connections open now.";
//!         histogram command_seconds: Seconds, "Time from parsed to answered.";
//!     }
//! }
//! let door = DoorMetrics::default();
//! door.commands.add(2);
//! assert_eq!(door.commands.value(), 2);
//! assert_eq!(DoorMetrics::DESCRIPTORS[0].name, "beeline_door_commands_total");
//! ```

use std::sync::atomic::{AtomicU64, Ordering};

/// What a cell's number means. Cells of [`Unit::Seconds`] hold nanoseconds and are shown in
/// seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Things.
    Count,
    /// Bytes.
    Bytes,
    /// Held in nanoseconds, shown in seconds.
    Seconds,
}

/// How a metric behaves over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows; its name ends in `_total`.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts observations by size.
    Histogram,
}

impl Kind {
    /// As Prometheus writes it.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// The one declaration of a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Full name, `beeline_<crate>_<noun>_<unit>`, with `_total` for counters.
    pub name: &'static str,
    /// One sentence.
    pub help: &'static str,
    /// Behaviour over time.
    pub kind: Kind,
    /// Meaning of the number.
    pub unit: Unit,
}

/// A number that only grows.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `amount`. One thread writes a counter; a second writer would lose counts, so use
    /// [`Counter::add_shared`] where several do.
    pub fn add(&self, amount: u64) {
        // Relaxed: the cell publishes nothing but itself.
        let now = self.0.load(Ordering::Relaxed);
        self.0.store(now.wrapping_add(amount), Ordering::Relaxed);
    }

    /// Adds `amount` from any thread, at the price of a locked instruction.
    pub fn add_shared(&self, amount: u64) {
        self.0.fetch_add(amount, Ordering::Relaxed);
    }

    /// Takes over a total counted elsewhere (a statistics structure copied at scrape time).
    pub fn publish(&self, total: u64) {
        self.0.store(total, Ordering::Relaxed);
    }

    /// The total.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A number that goes up and down.
#[derive(Debug, Default)]
pub struct Gauge(AtomicU64);

impl Gauge {
    /// Sets the number.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The number.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// Upper bounds of a histogram are powers of two of nanoseconds from this exponent (1.024 us) ...
const FIRST_EXPONENT: u32 = 10;
/// ... to this one (about 1.07 s); larger observations count in the last, unbounded bucket.
const LAST_EXPONENT: u32 = 30;
/// Buckets with a bound, and the unbounded one.
pub const HISTOGRAM_BUCKETS: usize = (LAST_EXPONENT - FIRST_EXPONENT + 2) as usize;

/// Observations by size, in power-of-two buckets; one writer.
#[derive(Debug)]
pub struct Histogram {
    buckets: [AtomicU64; HISTOGRAM_BUCKETS],
    sum: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: std::array::from_fn(|_| AtomicU64::new(0)), sum: AtomicU64::new(0) }
    }
}

/// The first bucket that holds an observation.
fn bucket_of(nanoseconds: u64) -> usize {
    let ceiling = u64::BITS - nanoseconds.saturating_sub(1).leading_zeros();
    (ceiling.saturating_sub(FIRST_EXPONENT) as usize).min(HISTOGRAM_BUCKETS - 1)
}

impl Histogram {
    /// Counts one observation of `nanoseconds`. One thread writes a histogram.
    pub fn record_ns(&self, nanoseconds: u64) {
        let cell = &self.buckets[bucket_of(nanoseconds)];
        cell.store(cell.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        let sum = self.sum.load(Ordering::Relaxed);
        self.sum.store(sum.saturating_add(nanoseconds), Ordering::Relaxed);
    }

    /// Counts one observation of `nanoseconds` from any thread, at the price of two locked
    /// instructions.
    pub fn record_shared_ns(&self, nanoseconds: u64) {
        self.buckets[bucket_of(nanoseconds)].fetch_add(1, Ordering::Relaxed);
        self.sum.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// A copy for a scrape.
    #[must_use]
    pub fn snapshot(&self) -> HistogramSnapshot {
        HistogramSnapshot {
            buckets: std::array::from_fn(|i| self.buckets[i].load(Ordering::Relaxed)),
            sum_ns: self.sum.load(Ordering::Relaxed),
        }
    }
}

/// Observations of a [`Histogram`] at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistogramSnapshot {
    /// Observations per bucket, not cumulated.
    pub buckets: [u64; HISTOGRAM_BUCKETS],
    /// Sum of all observations.
    pub sum_ns: u64,
}

impl HistogramSnapshot {
    /// Inclusive upper bound of a bucket in nanoseconds; `None` for the unbounded one.
    #[must_use]
    pub fn upper_bound_ns(bucket: usize) -> Option<u64> {
        (bucket < HISTOGRAM_BUCKETS - 1).then(|| 1 << (FIRST_EXPONENT as usize + bucket))
    }
}

/// Observations by size, with bounds of any kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distribution {
    /// Inclusive upper bounds in nanoseconds, ascending, each with its observations, not cumulated;
    /// `u64::MAX` is unbounded.
    pub buckets: Vec<(u64, u64)>,
    /// Sum of all observations, nanoseconds.
    pub sum_ns: u64,
}

impl Distribution {
    /// Observations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.buckets.iter().map(|(_, count)| count).sum()
    }

    /// The bound that `thousandths` of the observations do not pass, nanoseconds; of the unbounded
    /// bucket the last bound that there is. 0 without observations.
    #[must_use]
    pub fn quantile_ns(&self, thousandths: u64) -> u64 {
        let wanted = (self.count().saturating_mul(thousandths)).div_ceil(1000).max(1);
        let (mut met, mut last) = (0, 0);
        for &(bound, count) in &self.buckets {
            met += count;
            last = if bound == u64::MAX { last } else { bound };
            if met >= wanted {
                return last;
            }
        }
        0
    }

    /// Adds the observations of a distribution with the same bounds.
    pub fn add(&mut self, other: &Self) {
        if self.buckets.is_empty() {
            self.buckets.clone_from(&other.buckets);
        } else {
            for ((_, mine), (_, theirs)) in self.buckets.iter_mut().zip(&other.buckets) {
                *mine += theirs;
            }
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
    }
}

impl From<&HistogramSnapshot> for Distribution {
    fn from(snapshot: &HistogramSnapshot) -> Self {
        let bound = |bucket| HistogramSnapshot::upper_bound_ns(bucket).unwrap_or(u64::MAX);
        let counts = snapshot.buckets.iter().enumerate();
        Self {
            buckets: counts.map(|(bucket, count)| (bound(bucket), *count)).collect(),
            sum_ns: snapshot.sum_ns,
        }
    }
}

/// One distribution of several that share a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labelled {
    /// Their declaration.
    pub descriptor: Descriptor,
    /// What tells it from the others: names and values.
    pub labels: Vec<(&'static str, String)>,
    /// The observations.
    pub distribution: Distribution,
    /// How many there were in all, where a part of them is observed.
    pub calls: u64,
}

/// A cell read for a scrape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// Of a counter or gauge; nanoseconds when the unit is seconds.
    Number(u64),
    /// Of a histogram.
    Histogram(HistogramSnapshot),
}

/// Cells declared together by [`crate::metrics!`].
pub trait MetricSet: std::fmt::Debug + Send + Sync + 'static {
    /// The declarations, in order.
    fn descriptors(&self) -> &'static [Descriptor];

    /// The values now, in the order of the declarations.
    fn values(&self) -> Vec<Value>;

    /// Distributions with labels, beside the declared cells.
    fn labelled(&self) -> Vec<Labelled> {
        Vec::new()
    }
}

/// Declares a set of metrics: each once, with its kind, unit and help text. A counter's name gets
/// `_total`; a unit other than `Count` must already end the field's name (`..._bytes`,
/// `..._seconds`), which is checked when the program is compiled.
#[macro_export]
macro_rules! metrics {
    (
        $(#[$meta:meta])*
        $vis:vis struct $set:ident in $prefix:literal {
            $($kind:ident $field:ident : $unit:ident, $help:literal;)*
        }
    ) => {
        $(#[$meta])*
        #[derive(Debug, Default)]
        #[repr(align(128))]
        $vis struct $set {
            $(#[doc = $help] pub $field: $crate::metrics!(@cell $kind),)*
        }

        impl $set {
            /// The declarations, in order.
            pub const DESCRIPTORS: &'static [$crate::Descriptor] = &[
                $($crate::Descriptor {
                    name: $crate::metrics!(@name $kind, $prefix, $field),
                    help: $help,
                    kind: $crate::metrics!(@kind $kind),
                    unit: $crate::Unit::$unit,
                },)*
            ];
        }

        const _: () = $crate::metric::assert_names($set::DESCRIPTORS);

        impl $crate::MetricSet for $set {
            fn descriptors(&self) -> &'static [$crate::Descriptor] {
                Self::DESCRIPTORS
            }

            fn values(&self) -> Vec<$crate::Value> {
                vec![$($crate::metrics!(@value $kind, self.$field),)*]
            }
        }
    };
    (@cell counter) => { $crate::Counter };
    (@cell gauge) => { $crate::Gauge };
    (@cell histogram) => { $crate::Histogram };
    (@kind counter) => { $crate::Kind::Counter };
    (@kind gauge) => { $crate::Kind::Gauge };
    (@kind histogram) => { $crate::Kind::Histogram };
    (@name counter, $prefix:literal, $field:ident) => {
        concat!($prefix, "_", stringify!($field), "_total")
    };
    (@name $kind:ident, $prefix:literal, $field:ident) => {
        concat!($prefix, "_", stringify!($field))
    };
    (@value histogram, $cell:expr) => { $crate::Value::Histogram($cell.snapshot()) };
    (@value $kind:ident, $cell:expr) => { $crate::Value::Number($cell.value()) };
}

/// Stops the compilation where a name and its unit disagree.
pub const fn assert_names(descriptors: &[Descriptor]) {
    let mut i = 0;
    while i < descriptors.len() {
        let name = strip(descriptors[i].name.as_bytes(), b"_total");
        assert!(starts(name, b"beeline_"), "a metric's name starts with beeline_");
        match descriptors[i].unit {
            Unit::Count => {}
            Unit::Bytes => assert!(ends(name, b"_bytes"), "bytes: the name ends in _bytes"),
            Unit::Seconds => assert!(ends(name, b"_seconds"), "seconds: the name ends in _seconds"),
        }
        i += 1;
    }
}

const fn starts(name: &[u8], start: &[u8]) -> bool {
    name.len() >= start.len() && equal(name.split_at(start.len()).0, start)
}

const fn ends(name: &[u8], end: &[u8]) -> bool {
    name.len() >= end.len() && equal(name.split_at(name.len() - end.len()).1, end)
}

const fn strip<'a>(name: &'a [u8], end: &[u8]) -> &'a [u8] {
    if ends(name, end) { name.split_at(name.len() - end.len()).0 } else { name }
}

const fn equal(left: &[u8], right: &[u8]) -> bool {
    let mut i = 0;
    while i < right.len() {
        if left[i] != right[i] {
            return false;
        }
        i += 1;
    }
    left.len() == right.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_observation_lands_in_the_first_bucket_that_holds_it() {
        for (nanoseconds, bucket) in
            [(0, 0), (1, 0), (1024, 0), (1025, 1), (2048, 1), (1 << 30, 20), (1 << 31, 21)]
        {
            let histogram = Histogram::default();
            histogram.record_ns(nanoseconds);
            let snapshot = histogram.snapshot();
            assert_eq!(snapshot.buckets[bucket], 1, "{nanoseconds} ns");
            if let Some(bound) = HistogramSnapshot::upper_bound_ns(bucket) {
                assert!(nanoseconds <= bound);
            }
            assert_eq!(snapshot.sum_ns, nanoseconds);
        }
    }

    #[test]
    fn a_quantile_is_the_bound_of_the_bucket_it_falls_into() {
        let histogram = Histogram::default();
        for _ in 0..90 {
            histogram.record_ns(1_000);
        }
        for _ in 0..9 {
            histogram.record_shared_ns(3_000);
        }
        histogram.record_shared_ns(1 << 40);
        let distribution = Distribution::from(&histogram.snapshot());
        assert_eq!(distribution.count(), 100);
        let quantiles =
            [500, 900, 901, 990, 999, 1000].map(|share| distribution.quantile_ns(share));
        assert_eq!(quantiles, [1024, 1024, 4096, 4096, 1 << 30, 1 << 30]);
        let mut twice = distribution.clone();
        twice.add(&distribution);
        assert_eq!((twice.count(), twice.sum_ns), (200, 2 * distribution.sum_ns));
        assert_eq!(Distribution::default().quantile_ns(990), 0);
    }

    #[test]
    fn a_name_that_disagrees_with_its_unit_is_refused() {
        let wrong = Descriptor {
            name: "beeline_kv_value_size",
            help: "Wrong.",
            kind: Kind::Gauge,
            unit: Unit::Bytes,
        };
        assert!(std::panic::catch_unwind(|| assert_names(&[wrong])).is_err());
        let right = Descriptor { name: "beeline_kv_value_bytes", ..wrong };
        assert_names(&[right]);
    }
}

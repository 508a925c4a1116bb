//! Tracing set-up, metric registry, latency recorder.
//!
//! Place: `foundation`. Crates above declare what they count with [`metrics!`]; `apps/beeline`
//! puts the sets of a running node into one [`Registry`] and serves its text at `/metrics`.
//!
//! - [`trace`]: where log lines go and which are wanted.
//! - [`metric`]: counters, gauges and histograms as plain cells with one writer each.
//! - [`commands`]: how long the commands of a service take.
//! - [`registry`]: the sets of one process and their Prometheus text; [`registry::markdown`]
//!   renders `docs/metrics.md` from the same declarations.
//! - [`latency`]: a high-dynamic-range recorder with its summary.
//!
//! Invariant: the data path counts; it does not log, lock or allocate.

#![forbid(unsafe_code)]

pub mod commands;
pub mod latency;
pub mod metric;
pub mod registry;
pub mod trace;

pub use commands::{COMMAND_SECONDS, CommandTimes, command_seconds};
pub use latency::{LatencyRecorder, LatencySummary};
pub use metric::{
    Counter, Descriptor, Distribution, Gauge, Histogram, HistogramSnapshot, Kind, Labelled,
    MetricSet, Unit, Value,
};
pub use registry::Registry;
pub use trace::{TraceError, TraceOptions};

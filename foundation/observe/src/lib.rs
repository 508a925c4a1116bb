//! Tracing set-up, metric registry, latency recorder.
//!
//! Place: `foundation`. Crates above declare what they count with [`metrics!`]; `apps/beeline`
//! puts the sets of a running node into one [`Registry`] and serves its text at `/metrics`.
//!
//! - [`trace`]: where log lines go and which are wanted.
//! - [`metric`]: counters, gauges and histograms as plain cells with one writer each.
//! - [`registry`]: the sets of one process and their Prometheus text; [`registry::markdown`]
//!   renders `docs/metrics.md` from the same declarations.
//! - [`latency`]: a high-dynamic-range recorder with its summary.
//!
//! Invariant: the data path counts; it does not log, lock or allocate.

#![forbid(unsafe_code)]

pub mod latency;
pub mod metric;
pub mod registry;
pub mod trace;

pub use latency::{LatencyRecorder, LatencySummary};
pub use metric::{Counter, Descriptor, Gauge, Histogram, Kind, MetricSet, Unit, Value};
pub use registry::Registry;
pub use trace::{TraceError, TraceOptions};

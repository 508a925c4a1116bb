//! Tracing set-up, metric registry, latency recorder.

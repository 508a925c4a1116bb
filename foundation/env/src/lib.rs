//! Injected clock, seeded randomness and fault points.

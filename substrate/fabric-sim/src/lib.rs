//! Fabric provider in virtual time, seeded and deterministic.

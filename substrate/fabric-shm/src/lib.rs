//! Fabric provider over memory that both processes map.

//! From the typed tree to scheduled hardware.
//!
//! Place: `compiler`, between the meaning and the back ends for hardware. No clock, thread, socket
//! or file. A pass is a file with a switch in [`Options`]:
//!
//! | pass | file | switch |
//! |---|---|---|
//! | placement | `place` | `placement` |
//! | scattering, rearrangement | `scatter` | `scatter` |
//! | unroll, flatten | `unroll`, `build` | `unroll` |
//! | predicated form | `build`, `ssa` | always |
//! | clean-up | `clean`, `ssa` | `clean` |
//! | exclusive accesses | `merge` | `merge` |
//! | delayed write | `delay` | `delay` |
//! | replication, of a graph | `replicate` | by instance |
//! | `.async` blocks, of a graph | `outline` | by graph |
//! | modulo schedule | `schedule` | always |
//!
//! [`cycle`] runs scheduled hardware clock by clock; the Verilog back end writes the same schedule.

#![forbid(unsafe_code)]

pub mod build;
mod clean;
pub mod cycle;
mod delay;
pub mod hardware;
mod merge;
pub mod outline;
mod place;
pub mod replicate;
mod scatter;
pub mod schedule;
pub mod ssa;
pub mod unroll;

pub use build::NotHardware;
pub use hardware::{Collision, Hardware, Options, hardware};

//! Modulo schedule: in which cycle of an iteration each operation runs, and how many cycles lie
//! between iterations.
//!
//! Operations chain inside a cycle while their delays fit the clock. A memory has one read port
//! (data a fixed number of cycles after the address) and one write port (visible to reads whose
//! address comes in a later cycle). For an initiation interval II:
//!
//! - a register read in cycle r and written in cycle w needs `r <= w <= r + II - 1`;
//! - a read of memory in cycle r and a write in cycle w: `w + 1 <= r + n II` where the write of the
//!   iteration n before must be seen (n is 1, or what forwarding covers), `r <= w` where the read
//!   stands first, `w + 1 <= r` where the write does;
//! - ports serve one access a cycle, modulo II.
//!
//! The least II from 1 on with a schedule is taken (`solve` finds it). What kept the next smaller one
//! out is the *limiting chain* (`limit`).

mod limit;
mod solve;

use std::collections::HashMap;

use beeline_ir::tree::Binary;
use serde::Serialize;

use crate::ssa::{Body, Op, StateId, ValueId};
use solve::Problem;

/// What a memory is to the schedule.
#[derive(Clone, Debug)]
pub struct MemoryTiming {
    /// Name, for the limiting chain.
    pub name: String,
    /// Cycles from address to data.
    pub latency: u32,
    /// Iterations back whose writes are forwarded; 0 for none.
    pub forwarded: u32,
    /// A read sees a write of its own cycle.
    pub transparent: bool,
    /// No dependence between iterations.
    pub independent: bool,
    /// Lives in registers: any number of reads, data in the same cycle.
    pub constant: bool,
}

/// The target's clock and what operations cost, in picoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Length of a cycle.
    pub period_ps: u32,
}

impl Default for Target {
    /// 180 MHz, the specification's release clock.
    fn default() -> Self {
        Self { period_ps: 5_555 }
    }
}

impl Target {
    /// Delay of an operation.
    #[must_use]
    pub fn delay(&self, body: &Body, value: ValueId) -> u32 {
        let node = body.node(value);
        match node.op {
            Op::Constant(_)
            | Op::State(_)
            | Op::Fetched(_)
            | Op::Item(..)
            | Op::Signal(_)
            | Op::Resize(_)
            | Op::Extract(..)
            | Op::Insert(..) => 0,
            Op::Data(..) => 900,
            Op::Unary(..) => 150,
            Op::Select(..) => 300,
            Op::Binary(operator, a, b) => {
                let bits = body.bits(a);
                match operator {
                    Binary::And | Binary::Or | Binary::Xor => 250,
                    Binary::Add | Binary::Subtract | Binary::Less | Binary::LessEqual => {
                        500 + 12 * bits
                    }
                    Binary::Equal | Binary::NotEqual => 350 + 100 * (bits.max(2).ilog2() / 2),
                    Binary::Multiply => 2_500 + 30 * bits,
                    Binary::ShiftLeft | Binary::ShiftRight => {
                        if body.constant_of(b).is_some() {
                            0
                        } else {
                            200 * bits.max(2).ilog2()
                        }
                    }
                    Binary::Divide | Binary::Remainder => 700 * bits,
                }
            }
        }
    }
}

/// When everything happens.
#[derive(Clone, Debug, Default)]
pub struct Schedule {
    /// Cycles between iterations.
    pub interval: u32,
    /// Cycles of an iteration, from the first to the one its outputs leave in.
    pub depth: u32,
    /// Cycle of each value; constants have 0.
    pub cycle: Vec<u32>,
    /// Cycle in which each read's address is given.
    pub read_cycle: Vec<u32>,
    /// Cycle of each write.
    pub write_cycle: Vec<u32>,
    /// Cycle in which each register is written.
    pub update_cycle: HashMap<StateId, u32>,
    /// Cycle in which outputs leave: the last.
    pub emit_cycle: u32,
    /// Cycle in which each input is fetched.
    pub fetch_cycle: HashMap<u32, u32>,
    /// Longest path inside a cycle, by the table.
    pub longest_ps: u32,
    /// What kept a smaller interval out.
    pub limit: Option<Limit>,
}

/// Why the interval is not smaller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// The register or memory.
    pub name: String,
    /// `recurrence`, `memory` or `port`.
    pub kind: &'static str,
    /// From the read to the write, an operation each.
    pub chain: Vec<String>,
}

/// Largest interval tried.
const MOST: u32 = 64;
/// An interval at which iterations do not overlap.
const APART: u32 = 1_000_000;

/// Schedules a body; `pipelined` false takes the depth as the interval.
#[must_use]
pub fn schedule(
    body: &Body,
    memories: &[MemoryTiming],
    names: &dyn Fn(StateId) -> String,
    target: Target,
    pipelined: bool,
) -> Schedule {
    let problem = Problem::new(body, memories, target);
    let mut unmet = None;
    let mut found = None;
    if pipelined {
        for interval in 1..=MOST {
            match problem.solve(interval) {
                Ok(schedule) => {
                    found = Some(schedule);
                    break;
                }
                Err(why) => unmet = Some(why),
            }
        }
    }
    let mut schedule = found.unwrap_or_else(|| {
        // Without overlap every dependence between iterations holds.
        let mut apart = problem.solve(APART).unwrap_or_default();
        apart.interval = apart.depth;
        apart
    });
    schedule.limit = unmet.map(|unmet| problem.limit(&unmet, names));
    schedule
}

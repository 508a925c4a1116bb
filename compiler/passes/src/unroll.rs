//! Unroll or flatten: what becomes of each loop.
//!
//! A loop whose number of turns has a bound is unrolled where its copies stay small, or where
//! `#pragma unroll` asks; any other loop is flattened: one turn (or `#pragma flatten K`, or
//! `#pragma unroll K` of a loop that is not unrolled fully) an iteration.

use std::collections::HashMap;

use beeline_ir::tree::{Element, Label, LoopInfo, Stmt};
use serde::Serialize;

/// Statements that unrolling may make of one loop without a pragma.
pub const LARGEST: u64 = 6_000;

/// What becomes of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum LoopPlan {
    /// So many copies.
    Unroll(u32),
    /// So many copies in one iteration, which then ends.
    Flatten(u32),
}

/// The plan of every loop of an element.
#[derive(Clone, Debug, Default)]
pub struct Plans {
    of: HashMap<Label, LoopPlan>,
    /// For reports: line of the loop, plan, and why, in the order of the source.
    pub list: Vec<(LoopInfo, LoopPlan, &'static str)>,
}

impl Plans {
    /// The plan of a loop.
    #[must_use]
    pub fn of(&self, label: Label) -> LoopPlan {
        self.of.get(&label).copied().unwrap_or(LoopPlan::Flatten(1))
    }
}

/// Decides for every loop; with `unroll` off, all are flattened.
#[must_use]
pub fn plan(element: &Element, unroll: bool) -> Plans {
    let mut plans = Plans::default();
    size_of(&element.handler, unroll, &mut plans);
    if let Some(signal) = &element.signal {
        // A signal runs in one go: its loops are unrolled wherever a bound is known.
        size_of(signal, true, &mut plans);
    }
    plans
}

/// Statements of a block with its loops as planned.
fn size_of(block: &[Stmt], unroll: bool, plans: &mut Plans) -> u64 {
    let mut size = 0_u64;
    for stmt in block {
        size += 1;
        match stmt {
            Stmt::If { then, otherwise, .. } => {
                size += size_of(then, unroll, plans) + size_of(otherwise, unroll, plans);
            }
            Stmt::Scope { body, .. } | Stmt::Async(body) => size += size_of(body, unroll, plans),
            Stmt::Loop { label, body, info } => {
                let turn = size_of(body, unroll, plans);
                let (plan, why) = decide(info, turn, unroll);
                size += match plan {
                    LoopPlan::Unroll(count) | LoopPlan::Flatten(count) => turn * u64::from(count),
                };
                plans.of.insert(*label, plan);
                plans.list.push((info.clone(), plan, why));
            }
            _ => {}
        }
    }
    size
}

fn decide(info: &LoopInfo, turn: u64, unroll: bool) -> (LoopPlan, &'static str) {
    if !unroll {
        return (LoopPlan::Flatten(1), "unrolling is off");
    }
    if let Some(copies) = info.flatten {
        return (LoopPlan::Flatten(copies), "#pragma flatten");
    }
    match (info.bound, info.unroll) {
        (Some(bound), Some(0)) => (LoopPlan::Unroll(bound), "#pragma unroll"),
        (Some(bound), Some(copies)) if copies >= bound => {
            (LoopPlan::Unroll(bound), "#pragma unroll")
        }
        (_, Some(copies)) if copies > 0 => (LoopPlan::Flatten(copies), "#pragma unroll in part"),
        (Some(bound), None) if turn * u64::from(bound) <= LARGEST => {
            let why = if info.exact { "its count is known" } else { "its count is bounded" };
            (LoopPlan::Unroll(bound), why)
        }
        (Some(_), _) => (LoopPlan::Flatten(1), "too large to unroll"),
        (None, _) => (LoopPlan::Flatten(1), "its count is unknown"),
    }
}

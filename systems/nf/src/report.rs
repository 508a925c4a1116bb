//! What the compiler decided, and what it costs: for people and for programs.

use beeline_ir::graph::Graph;
use beeline_passes::hardware::Report;
use beeline_passes::{Hardware, NotHardware, Options, hardware};
use serde::Serialize;

/// A node's report.
#[derive(Clone, Debug, Serialize)]
pub struct NodeReport {
    /// Instance.
    pub instance: String,
    /// What the passes decided.
    #[serde(flatten)]
    pub report: Report,
    /// Interval with every pass off, times the turns of its loops where those are known.
    pub naive_interval: u64,
    /// Clock the delay table allows, in megahertz: modelled.
    pub modelled_mhz: f64,
}

/// Reports every node.
///
/// Errors: an element that cannot be hardware.
pub fn report(graph: &Graph, options: &Options) -> Result<Vec<NodeReport>, NotHardware> {
    graph
        .nodes
        .iter()
        .map(|node| {
            let optimised = hardware(&node.element, options)?;
            let naive = hardware(&node.element, &Options::naive())?;
            Ok(NodeReport {
                instance: node.name.clone(),
                naive_interval: naive_interval(&naive),
                modelled_mhz: 1e6 / f64::from(optimised.report.longest_ps.max(1_000)),
                report: optimised.report,
            })
        })
        .collect()
}

/// The interval of a naive element; each loop of known length takes an iteration a turn.
fn naive_interval(naive: &Hardware) -> u64 {
    let mut turns = 1_u64;
    beeline_ir::tree::walk(&naive.element.handler, &mut |stmt| {
        if let beeline_ir::tree::Stmt::Loop { info, .. } = stmt {
            turns += u64::from(info.bound.unwrap_or(1));
        }
    });
    u64::from(naive.report.interval) * turns
}

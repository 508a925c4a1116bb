//! The clock that an element reaches on a chip, by Yosys and nextpnr: an estimate, of an iCE40 HX8K.
//!
//! An element has more ports than the chip has pins, so a harness stands around it: a shift register
//! feeds its inputs, another one folds its outputs. The harness adds a table of four inputs to a path
//! at most. An element that does not fit the chip is told as such, not guessed.

use std::fmt::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use beeline_ir::graph::Graph;
use beeline_passes::Hardware;
use beeline_verilog::COMMON;
use beeline_verilog::module::{module, module_name};
use serde::Serialize;

/// The chip.
pub const CHIP: &str = "iCE40 HX8K";
/// Its logic cells.
pub const CELLS: u64 = 7_680;
/// Its block memories.
pub const MEMORIES: u64 = 32;
/// Bits of a block memory.
const MEMORY_BITS: u64 = 4_096;

/// Timing failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TimingError {
    /// A program is missing.
    #[error("{0} is not installed: cargo xtask setup installs it")]
    Absent(&'static str),
    /// Files and processes.
    #[error("timing: {0}")]
    Io(#[from] std::io::Error),
    /// What it said.
    #[error("{program} failed with {instance}: {output}")]
    Program {
        /// Which.
        program: &'static str,
        /// The instance.
        instance: String,
        /// The end of its output.
        output: String,
    },
}

/// One instance.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timing {
    /// Instance.
    pub instance: String,
    /// The chip of the estimate.
    pub chip: &'static str,
    /// Megahertz of the median seed; none where the element does not fit.
    pub mhz: Option<f64>,
    /// Logic cells of the element and its harness; none where its memories alone do not fit.
    pub cells: Option<u64>,
    /// Block memories.
    pub memories: u64,
}

/// The first of the programs that is missing.
#[must_use]
pub fn missing() -> Option<&'static str> {
    let here = |program: &str| {
        let mut version = Command::new(program);
        version.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
        version.status().is_ok()
    };
    ["yosys", "nextpnr-ice40"].into_iter().find(|program| !here(program))
}

/// The harness around an element.
fn harness(hardware: &Hardware, top: &str) -> String {
    let element = &hardware.element;
    let inputs: u32 = element.inputs.iter().map(|port| port.bits + 1).sum();
    let ready = u32::try_from(element.outputs.len()).unwrap_or(0);
    // Inputs, their valid bits, the outputs' ready bits, the signal and its valid bit.
    let width = inputs + ready + 513;
    let outputs: u32 = element.outputs.iter().map(|port| port.bits + 1).sum();
    let back = outputs + u32::try_from(element.inputs.len()).unwrap_or(0) + 513;
    let mut text = format!(
        "module harness (input clk, input rst, input si, output so);\n    reg [{}:0] s;\n    \
         always @(posedge clk) s <= {{s[{}:0], si}};\n    wire [{}:0] o;\n    reg [{}:0] f;\n    \
         always @(posedge clk) f <= {{f[{}:0], 1'b0}} ^ o;\n    assign so = f[{}];\n",
        width - 1,
        width - 2,
        back - 1,
        back - 1,
        back - 2,
        back - 1
    );
    let mut ports = vec![".clk(clk)".to_owned(), ".rst(rst)".to_owned()];
    let (mut at, mut out) = (0, 0);
    for (number, port) in element.inputs.iter().enumerate() {
        let (first, last) = (at, at + port.bits - 1);
        ports.push(format!(
            ".in{number}_data(s[{last}:{first}]), .in{number}_valid(s[{}]), .in{number}_ready(o[{out}])",
            last + 1
        ));
        (at, out) = (last + 2, out + 1);
    }
    for (number, port) in element.outputs.iter().enumerate() {
        let (first, last) = (out, out + port.bits - 1);
        ports.push(format!(
            ".out{number}_data(o[{last}:{first}]), .out{number}_valid(o[{}]), .out{number}_ready(s[{at}])",
            last + 1
        ));
        (at, out) = (at + 1, last + 2);
    }
    ports.push(format!(
        ".sig_valid(s[{at}]), .sig_data(s[{}:{}]), .ans_valid(o[{out}]), .ans_data(o[{}:{}])",
        at + 512,
        at + 1,
        out + 512,
        out + 1
    ));
    let _ = writeln!(text, "    {top} u ({});\nendmodule", ports.join(", "));
    text
}

/// Estimates one instance: the median of `seeds` placements.
///
/// Errors: a program is missing, or fails.
pub fn timing(
    graph: &Graph,
    node: usize,
    hardware: &Hardware,
    seeds: u32,
) -> Result<Timing, TimingError> {
    if let Some(program) = missing() {
        return Err(TimingError::Absent(program));
    }
    let instance = graph.nodes[node].name.clone();
    let top = module_name(&instance);
    let mut found = Timing { instance, chip: CHIP, mhz: None, cells: None, memories: 0 };
    let blocks = hardware.memories.iter().filter(|memory| memory.latency > 0);
    let bits: u64 = blocks.map(|memory| u64::from(memory.entries) * u64::from(memory.bits)).sum();
    found.memories = bits.div_ceil(MEMORY_BITS);
    if found.memories > MEMORIES {
        // Yosys would look for a place for every bit of them.
        return Ok(found);
    }
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("element.v");
    let text = format!("{COMMON}\n{}\n{}", module(hardware, &top), harness(hardware, &top));
    std::fs::write(&path, text)?;
    let script =
        "read_verilog element.v; synth_ice40 -top harness -json element.json; tee -o stat stat";
    said(folder.path(), "yosys", &["-q", "-p", script], &found.instance)?;
    let stat = std::fs::read_to_string(folder.path().join("stat"))?;
    let cells = |name: &str| -> u64 {
        let of = |line: &str| {
            let (cell, count) = line.trim().split_once(char::is_whitespace)?;
            if cell.starts_with(name) { count.trim().parse::<u64>().ok() } else { None }
        };
        stat.lines().filter_map(of).sum()
    };
    let (luts, flip_flops) = (cells("SB_LUT4"), cells("SB_DFF"));
    (found.cells, found.memories) = (Some(luts.max(flip_flops)), cells("SB_RAM40"));
    if luts > CELLS || flip_flops > CELLS || found.memories > MEMORIES {
        return Ok(found);
    }
    let mut all = Vec::new();
    for seed in 1..=seeds.max(1) {
        let seed = seed.to_string();
        let arguments = [
            "--hx8k",
            "--package",
            "ct256",
            "--json",
            "element.json",
            "--pcf-allow-unconstrained",
            "--timing-allow-fail",
            "--report",
            "report.json",
            "--freq",
            "180",
            "--quiet",
            "--seed",
            &seed,
        ];
        match said(folder.path(), "nextpnr-ice40", &arguments, &found.instance) {
            Ok(()) => {}
            // Tables and flip-flops that cannot share cells are more than the chip has.
            Err(TimingError::Program { output, .. }) if output.contains("Unable to place") => {
                return Ok(found);
            }
            Err(error) => return Err(error),
        }
        let report = std::fs::read_to_string(folder.path().join("report.json"))?;
        let parsed: serde_json::Value = serde_json::from_str(&report).unwrap_or_default();
        let clocks = parsed["fmax"].as_object().into_iter().flatten();
        let least = clocks.filter_map(|(_, clock)| clock["achieved"].as_f64());
        let Some(mhz) = least.min_by(f64::total_cmp) else {
            let output = "its report names no clock".to_owned();
            let instance = found.instance;
            return Err(TimingError::Program { program: "nextpnr-ice40", instance, output });
        };
        all.push(mhz);
    }
    all.sort_by(f64::total_cmp);
    found.mhz = all.get(all.len() / 2).copied();
    Ok(found)
}

fn said(
    folder: &Path,
    program: &'static str,
    arguments: &[&str],
    instance: &str,
) -> Result<(), TimingError> {
    let run = Command::new(program).args(arguments).current_dir(folder).output()?;
    if run.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&run.stderr).into_owned();
    let output = said.lines().rev().take(3).collect::<Vec<_>>().join(" / ");
    Err(TimingError::Program { program, instance: instance.to_owned(), output })
}

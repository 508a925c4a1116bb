//! What each element takes of a chip: counted by Yosys.
//!
//! Logic is mapped to tables of six inputs, without a chip's carry chains or multipliers, so the
//! counts compare elements with each other; they are no promise about a chip. Memories stay
//! memories, and Yosys counts their bits.

use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use beeline_ir::graph::Graph;
use beeline_passes::Hardware;
use beeline_verilog::COMMON;
use beeline_verilog::module::{module, module_name};
use serde::Serialize;

/// Counting failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AreaError {
    /// The program is missing.
    #[error("yosys is not installed: cargo xtask setup installs it")]
    Absent,
    /// Files and processes.
    #[error("counting: {0}")]
    Io(#[from] std::io::Error),
    /// What it said.
    #[error("yosys failed with {instance}: {output}")]
    Program {
        /// The instance.
        instance: String,
        /// The end of its output.
        output: String,
    },
}

/// One instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Area {
    /// Instance.
    pub instance: String,
    /// Tables of six inputs.
    pub luts: u64,
    /// Flip-flops.
    pub flip_flops: u64,
    /// Bits of memories.
    pub memory_bits: u64,
}

/// True where Yosys can be run.
#[must_use]
pub fn is_here() -> bool {
    let mut version = Command::new("yosys");
    version.arg("-V").stdout(Stdio::null()).stderr(Stdio::null());
    version.status().is_ok_and(|status| status.success())
}

/// Counts one instance.
///
/// Errors: no Yosys; it fails.
pub fn area(graph: &Graph, node: usize, hardware: &Hardware) -> Result<Area, AreaError> {
    let name = &graph.nodes[node].name;
    area_of(&module(hardware, &module_name(name)), name)
}

/// Counts the module of an instance, which the compiler or a person wrote.
///
/// Errors: no Yosys; it fails.
pub fn area_of(text: &str, instance: &str) -> Result<Area, AreaError> {
    if !is_here() {
        return Err(AreaError::Absent);
    }
    let (name, top) = (instance, module_name(instance));
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("element.v");
    let mut file = std::fs::File::create(&path)?;
    file.write_all(COMMON.as_bytes())?;
    file.write_all(text.as_bytes())?;
    let text = count(&path, &top, name)?;
    let mut area = Area { instance: name.to_owned(), ..Area::default() };
    for line in text.lines() {
        if let Some((_, bits)) = line.split_once("Number of memory bits:") {
            area.memory_bits = area.memory_bits.max(bits.trim().parse().unwrap_or(0));
        }
        let mut words = line.split_whitespace();
        let (Some(cell), Some(Ok(number)), None) =
            (words.next(), words.next().map(str::parse::<u64>), words.next())
        else {
            continue;
        };
        if cell == "$lut" {
            area.luts += number;
        } else if cell.contains("DFF") {
            area.flip_flops += number;
        }
    }
    Ok(area)
}

fn count(path: &Path, top: &str, instance: &str) -> Result<String, AreaError> {
    // The memories are counted before they are cells, and the cells at the end.
    let stat = path.with_extension("stat").display().to_string();
    let script = format!(
        "read_verilog -DNO_ZEROS {}; hierarchy -top {top}; proc; flatten; opt -fast; opt_clean; \
         tee -o {stat} stat; memory -nomap; \
         opt -fast; techmap; opt -fast; abc -fast -lut 6; opt_clean; tee -a {stat} stat",
        path.display()
    );
    let run = Command::new("yosys").args(["-q", "-p", &script]).output()?;
    if !run.status.success() {
        let said = String::from_utf8_lossy(&run.stderr).into_owned();
        let output = said.lines().rev().take(3).collect::<Vec<_>>().join(" / ");
        return Err(AreaError::Program { instance: instance.to_owned(), output });
    }
    Ok(std::fs::read_to_string(path.with_extension("stat"))?)
}

//! `beeline nf build`.

use std::path::PathBuf;
use std::time::Instant;

use beeline_nf::build::{Mode, build};

use super::check::compiled;
use crate::exit::{Exit, Failure};
use crate::output::{Output, table};

/// Arguments of `build`.
#[derive(Debug, clap::Args)]
pub struct BuildArguments {
    /// Source file.
    pub file: PathBuf,
    /// debug: 50 MHz; release: 180 MHz. Both clocks are fixed.
    #[arg(long, value_name = "MODE", default_value = "release", value_parser = ["debug", "release"])]
    pub mode: String,
    /// Folder for the design and for what the next build takes over; made if it is missing.
    #[arg(long, short, value_name = "FOLDER", default_value = "out")]
    pub out: PathBuf,
}

/// Runs it.
pub fn run(arguments: &BuildArguments, output: Output) -> Result<Exit, Failure> {
    let began = Instant::now();
    let loaded = compiled(&arguments.file)?;
    let mode = if arguments.mode == "debug" { Mode::Debug } else { Mode::Release };
    let built = build(&loaded, began, (&arguments.file, &arguments.out), mode)
        .map_err(|error| Failure::new(Exit::Failed, error))?;
    if output.json {
        output.object(&built)?;
        return Ok(Exit::Done);
    }
    let rows: Vec<Vec<String>> = built
        .stages
        .iter()
        .map(|stage| {
            vec![
                stage.stage.to_owned(),
                format!("{:.0}", stage.milliseconds),
                stage.made.to_string(),
                stage.reused.to_string(),
            ]
        })
        .collect();
    output.bytes(table(&["stage", "ms", "made", "reused"], &rows).as_bytes())?;
    for area in &built.areas {
        output.line(format!(
            "{}: {} LUT6, {} flip-flops, {} memory bits (counted by Yosys)",
            area.instance, area.luts, area.flip_flops, area.memory_bits
        ))?;
    }
    output.line(format!("{} at {} MHz", arguments.out.join("design.v").display(), built.mhz))?;
    Ok(Exit::Done)
}

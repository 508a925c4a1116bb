//! `beeline nf debug`.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::PathBuf;

use beeline_nf::debug::{DebugError, Debugger, HELP};
use serde::Serialize;

use super::check::compiled;
use super::run::{commands_of, port};
use crate::exit::{Exit, Failure};
use crate::output::{Output, complain};

/// Arguments of `debug`.
#[derive(Debug, clap::Args)]
pub struct DebugArguments {
    /// Source file.
    pub file: PathBuf,
    /// Captures of the graph's inputs and outputs.
    #[arg(long = "port", value_name = "NAME=FILE", value_parser = port)]
    pub ports: Vec<(String, PathBuf)>,
    /// Commands for the graph's functions, one a line, before the first packet.
    #[arg(long, value_name = "FILE")]
    pub commands: Option<PathBuf>,
}

#[derive(Serialize)]
struct Answer<'a> {
    command: &'a str,
    answer: Option<String>,
    error: Option<String>,
}

/// Runs it: commands come from standard input.
pub fn run(arguments: &DebugArguments, output: Output) -> Result<Exit, Failure> {
    let loaded = compiled(&arguments.file)?;
    let commands = commands_of(arguments.commands.as_deref())?;
    let mut debugger = Debugger::new(&loaded.compiled.graph, &arguments.ports, &commands)?;
    let input = std::io::stdin();
    let asks = input.is_terminal() && !output.json;
    if asks {
        complain(HELP);
    }
    let mut exit = Exit::Done;
    let mut line = String::new();
    while !debugger.ended() {
        if asks {
            let mut shown = std::io::stderr().lock();
            let _ = write!(shown, "> ");
            let _ = shown.flush();
        }
        line.clear();
        if input.lock().read_line(&mut line)? == 0 {
            break;
        }
        let command = line.trim();
        let (answer, error) = match debugger.command(command) {
            Ok(answer) => (Some(answer), None),
            Err(error @ DebugError::Command(_)) => (None, Some(error.to_string())),
            Err(error) => return Err(error.into()),
        };
        if output.json {
            output.object(&Answer { command, answer, error })?;
        } else if let Some(answer) = answer.filter(|answer| !answer.is_empty()) {
            output.line(answer)?;
        } else if let Some(error) = error {
            complain(error);
            if !asks {
                exit = Exit::Failed;
            }
        }
    }
    debugger.finish()?;
    Ok(exit)
}

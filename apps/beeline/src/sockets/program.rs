//! `beeline run`: becomes the program, with the library preloaded.

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;

use super::monitor;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// File name of the library.
const LIBRARY: &str = "libbeeline_sockets_preload.so";

/// `beeline run`.
#[derive(Clone, Debug, clap::Args)]
pub struct RunArguments {
    /// At its end, each process says on standard error how many connections were accelerated.
    #[arg(long)]
    pub verbose: bool,
    /// The library; by default the one beside this program, or in ../lib.
    #[arg(long, value_name = "FILE", env = "BEELINE_SOCKETS_LIBRARY")]
    pub library: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

/// The command. Returns only when the program could not be started.
pub fn run(arguments: &RunArguments, output: Output) -> Result<Exit, Failure> {
    let library = library(arguments)?;
    let (program, rest) = arguments.command.split_first().context("a program to run")?;
    if let Err(error) = monitor::ensure() {
        // The program runs as it would without us.
        output.note(format!("beeline: {error:#}; connections stay with the kernel"));
    }
    let mut preload = library.into_os_string();
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    let mut command = Command::new(program);
    command.args(rest).env("LD_PRELOAD", preload);
    if arguments.verbose {
        command.env("BEELINE_SOCKETS_VERBOSE", "1");
    }
    let error = command.exec();
    let named = program.to_string_lossy().into_owned();
    Err(Failure::new(Exit::Failed, anyhow::Error::from(error).context(named)))
}

fn library(arguments: &RunArguments) -> Result<PathBuf, Failure> {
    let missing = |text: String| Failure::new(Exit::Usage, anyhow::anyhow!(text));
    if let Some(given) = &arguments.library {
        let whole = given.canonicalize();
        return whole.map_err(|error| missing(format!("{}: {error}", given.display())));
    }
    let own = std::env::current_exe().context("finding this program")?;
    let folder = own.parent().context("finding this program's folder")?;
    let candidates = [folder.join(LIBRARY), folder.join("../lib").join(LIBRARY)];
    candidates.into_iter().find(|candidate| candidate.is_file()).ok_or_else(|| {
        missing(format!(
            "{LIBRARY} is not beside {}: build it with cargo build -p beeline-sockets-preload, or \
             name it with --library",
            own.display()
        ))
    })
}

//! `beeline run`: becomes the program, with the library preloaded.

use std::ffi::OsString;
use std::io::{ErrorKind, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context as _;
use beeline_sockets::{control, introduce, young};

use super::{embedded, monitor};
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
    /// The library; by default the one beside this program, or in ../lib, or the one inside it.
    #[arg(long, value_name = "FILE", env = "BEELINE_SOCKETS_LIBRARY")]
    pub library: Option<PathBuf>,
    /// The program and its arguments.
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    pub command: Vec<OsString>,
}

/// The command. Returns only when the program could not be started.
pub fn run(arguments: &RunArguments, output: Output) -> Result<Exit, Failure> {
    variables()?;
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
    let advice = match error.kind() {
        ErrorKind::NotFound if named.contains('/') => "; is its path right?",
        ErrorKind::NotFound => "; give its path, or a name that is on PATH",
        ErrorKind::PermissionDenied => "; a program is a file that may be executed",
        _ => "",
    };
    // As shells and env say it.
    let exit = match error.kind() {
        ErrorKind::NotFound => Exit::NoProgram,
        _ => Exit::NotExecutable,
    };
    Err(Failure::new(exit, anyhow::anyhow!("{named}: {error}{advice}")))
}

/// Whether a variable's value makes sense.
type Rule = fn(&str) -> bool;

/// The library goes by its defaults where a variable makes no sense: it may not speak up in a program.
/// So this is said before there is one.
fn variables() -> Result<(), Failure> {
    let is_number = |text: &str| text.parse::<u32>().is_ok();
    let is_name = |text: &str| text.len() <= control::LONGEST_NAME;
    let rules: [(&str, Rule, &str); 3] = [
        (young::VARIABLE, is_number, "a number of calls, or 0 for asking at once"),
        (introduce::VARIABLE, is_number, "a number of milliseconds, 10 to 60000"),
        (control::NAME_VARIABLE, is_name, "a name of at most 100 bytes"),
    ];
    for (name, rule, wanted) in rules {
        let Some(value) = std::env::var_os(name) else { continue };
        if !value.to_str().is_some_and(rule) {
            let error = anyhow::anyhow!("{name}={} is not {wanted}", value.display());
            return Err(Failure::new(Exit::Usage, error));
        }
    }
    Ok(())
}

fn library(arguments: &RunArguments) -> Result<PathBuf, Failure> {
    let missing = |text: String| Failure::new(Exit::Usage, anyhow::anyhow!(text));
    if let Some(given) = &arguments.library {
        let whole = given.canonicalize().and_then(|path| Ok((is_object(&path)?, path)));
        return match whole {
            Ok((true, path)) => Ok(path),
            // The loader would say so in every program, and go on without.
            Ok(_) => {
                Err(missing(format!("{}: no library; --library takes {LIBRARY}", given.display())))
            }
            Err(error) => {
                Err(missing(format!("{}: {error}; --library takes {LIBRARY}", given.display())))
            }
        };
    }
    let own = std::env::current_exe().context("finding this program")?;
    let folder = own.parent().context("finding this program's folder")?;
    let candidates = [folder.join(LIBRARY), folder.join("../lib").join(LIBRARY)];
    if let Some(beside) = candidates.into_iter().find(|candidate| candidate.is_file()) {
        return Ok(beside);
    }
    embedded::library()?.ok_or_else(|| {
        missing(format!(
            "{LIBRARY} is not beside {}: build it with cargo build -p beeline-sockets-preload, or \
             name it with --library",
            own.display()
        ))
    })
}

/// True for a file that the loader may take.
fn is_object(path: &Path) -> std::io::Result<bool> {
    let mut head = [0; 4];
    let read = std::fs::File::open(path)?.read(&mut head)?;
    Ok(head[..read] == *b"\x7fELF")
}

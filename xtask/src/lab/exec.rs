//! `lab exec`: one program of the host's in a fresh guest.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::error::LabError;
use super::guest::{Echo, Guest, Link, Memory, Options, quoted};

/// The exit code of a command that was not done in time, and of a guest that did not boot.
const LATE: u8 = 124;

/// What `lab exec` takes.
#[derive(Debug, clap::Args)]
pub struct ExecArguments {
    /// A soft-RoCE device, rxe0, on the guest's network card.
    #[arg(long)]
    rdma: bool,
    /// Connected guests; each runs the program. LAB_GUEST (0 or 1), LAB_SELF and LAB_PEER
    /// (addresses) tell them apart.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=2))]
    guests: u8,
    /// An NVDIMM on this file, made if it is not there, with a DAX file system at /mnt/dax.
    #[arg(long, value_name = "FILE")]
    nvdimm: Option<PathBuf>,
    /// Size of the NVDIMM.
    #[arg(long, default_value_t = 512, value_name = "MIB")]
    nvdimm_size: u64,
    /// A shared memory window (ivshmem); LAB_WINDOW names the file to map in the guest.
    #[arg(long)]
    ivshmem: bool,
    /// Size of the window.
    #[arg(long, default_value_t = 64, value_name = "MIB")]
    ivshmem_size: u64,
    /// Virtual processors of each guest.
    #[arg(long, default_value_t = 2)]
    cpus: u32,
    /// Main memory of each guest.
    #[arg(long, default_value_t = 1024, value_name = "MIB")]
    memory: u64,
    /// Seconds the program may take.
    #[arg(long, default_value_t = 300, value_name = "SECONDS")]
    limit: u64,
    /// A variable for the program's environment; repeatable.
    #[arg(long = "env", value_name = "NAME=VALUE")]
    environment: Vec<String>,
    /// The program and its arguments; it starts in this directory.
    #[arg(last = true, required = true)]
    command: Vec<String>,
}

/// The command.
pub fn run(arguments: &ExecArguments) -> ExitCode {
    if let Some(lacking) = super::lacking() {
        warn(&lacking);
        return ExitCode::from(LATE);
    }
    match execute(arguments) {
        Ok(status) => ExitCode::from(u8::try_from(status).unwrap_or(1)),
        Err(error) => {
            warn(&error.to_string());
            ExitCode::from(LATE)
        }
    }
}

fn warn(line: &str) {
    use std::io::Write as _;
    let _ = writeln!(std::io::stderr().lock(), "lab: {line}");
}

fn execute(arguments: &ExecArguments) -> Result<i32, LabError> {
    let started = Instant::now();
    let here = std::env::current_dir().map_err(LabError::host("finding this directory"))?;
    let shared = tempfile::Builder::new()
        .prefix("beeline-lab-")
        .tempdir()
        .map_err(LabError::host("making a folder"))?;
    let absolute = |path: &PathBuf| here.join(path);
    let nvdimm = |number: u8| {
        arguments.nvdimm.as_ref().map(|file| {
            let mut path = absolute(file).into_os_string();
            if number > 0 {
                path.push(format!(".{number}"));
            }
            Memory { path: path.into(), mebibytes: arguments.nvdimm_size }
        })
    };
    let wire = shared.path().join("wire");
    let mut guests = Vec::new();
    for number in 0..arguments.guests {
        let (link, echo) = match (arguments.guests, number) {
            (1, _) => (Link::Alone, Echo::Through),
            (_, 0) => (Link::Listen(wire.clone()), Echo::Named("0| ".to_owned())),
            _ => (Link::Call(wire.clone()), Echo::Named(format!("{number}| "))),
        };
        guests.push(Guest::boot(&Options {
            number: number.into(),
            processors: arguments.cpus,
            mebibytes: arguments.memory,
            link,
            rdma: arguments.rdma,
            nvdimm: nvdimm(number),
            disk: None,
            window: arguments.ivshmem.then(|| Memory {
                path: shared.path().join("window"),
                mebibytes: arguments.ivshmem_size,
            }),
            bell: None,
            echo,
        })?);
    }
    warn(&format!("{} up after {:.1} s", plural(guests.len()), started.elapsed().as_secs_f64()));
    let line = line(&here, &arguments.environment, &arguments.command);
    for guest in &mut guests {
        guest.start(&line)?;
    }
    let deadline = Instant::now() + Duration::from_secs(arguments.limit);
    let mut status = 0;
    for guest in &mut guests {
        let left = deadline.saturating_duration_since(Instant::now());
        let finished = guest.finish(left)?;
        if status == 0 {
            status = finished.status;
        }
    }
    Ok(status)
}

fn plural(guests: usize) -> String {
    if guests == 1 { "guest".to_owned() } else { format!("{guests} guests") }
}

/// A line for the guest's shell that runs `command` in `directory`.
pub fn line(directory: &std::path::Path, environment: &[String], command: &[String]) -> String {
    let words: Vec<String> = environment.iter().chain(command).map(|word| quoted(word)).collect();
    format!("cd {} && exec env {}", quoted(&directory.to_string_lossy()), words.join(" "))
}

//! `cargo xtask`: the chores of this workspace, each ending in one table.
//!
//! - `check`: what every change must pass, in minutes.
//! - `test`: the tests alone.
//! - `deep`: model checkers, sanitizers, wide runs; hours if let.
//! - `setup`: fetches the clients the end-to-end tests use, and what the lab needs.
//! - `lab`: suites and programs in virtual machines with RDMA, an NVDIMM, a shared window.
//!
//! Every row says passed, failed, or skipped and why; a checker says how much it ran, so that an
//! empty run is visible.

#![forbid(unsafe_code)]

mod check;
mod deep;
mod lab;
mod setup;
mod skips;
mod step;
mod tools;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// The chores of this workspace.
#[derive(Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Format, lints, documentation, layers and fast tests; one guest of the lab.
    Check(check::CheckArguments),
    /// All fast tests.
    Test,
    /// Miri, loom, sanitizers, wide seeds and crash points, fuzzing, kill loops, the lab.
    Deep(deep::DeepArguments),
    /// Fetch what the end-to-end tests use: redis-server, redis-cli, redis-py, strace; and the lab.
    Setup(setup::SetupArguments),
    /// Virtual machines with soft-RoCE, an NVDIMM, a shared memory window.
    #[command(subcommand)]
    Lab(lab::LabTask),
}

fn main() -> ExitCode {
    let report = match Cli::parse().task {
        Task::Check(arguments) => check::check(&arguments),
        Task::Test => check::test(),
        Task::Deep(arguments) if arguments.list => {
            deep::list(&arguments);
            return ExitCode::SUCCESS;
        }
        Task::Deep(arguments) => deep::run(&arguments),
        Task::Setup(arguments) => setup::run(&arguments),
        Task::Lab(task) => return lab::run(&task),
    };
    report.finish()
}

/// Where cargo puts what it builds: `CARGO_TARGET_DIR`, else `target` of the workspace.
fn target() -> PathBuf {
    let given = std::env::var_os("CARGO_TARGET_DIR").filter(|given| !given.is_empty());
    root().join(given.map_or_else(|| PathBuf::from("target"), PathBuf::from))
}

/// The root of the workspace.
fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.parent().map_or_else(|| own.to_owned(), Path::to_owned)
}

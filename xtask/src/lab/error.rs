//! What can go wrong with the lab.

use std::time::Duration;

/// Why a guest could not be booted or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LabError {
    /// Something the lab needs is not on this machine; a run is skipped, not failed.
    #[error("{what} is not here; {remedy}")]
    Missing {
        /// What is lacking.
        what: String,
        /// How to get it.
        remedy: String,
    },
    /// A file, socket or process of the host.
    #[error("{doing}: {source}")]
    Host {
        /// What was being done.
        doing: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// The package held something unexpected.
    #[error("the kernel package: {problem}")]
    Kernel {
        /// What is wrong with it.
        problem: String,
    },
    /// The guest did not come up, or not with what was asked for.
    #[error("guest {guest} did not boot: {problem}\n{console}")]
    Boot {
        /// Its number.
        guest: usize,
        /// What it or the host noticed.
        problem: String,
        /// The end of its console.
        console: String,
    },
    /// A command did not end in time.
    #[error("guest {guest}: not done after {limit:?}: {command}")]
    Late {
        /// Its number.
        guest: usize,
        /// The time it had.
        limit: Duration,
        /// What it ran.
        command: String,
    },
    /// A command did not say something in time.
    #[error("guest {guest}: {what} not heard after {limit:?}\n{errors}")]
    Unheard {
        /// Its number.
        guest: usize,
        /// The time it had.
        limit: Duration,
        /// What was waited for.
        what: String,
        /// What its commands complained of.
        errors: String,
    },
    /// The guest ended while it was needed.
    #[error("guest {guest} ended\n{console}")]
    Gone {
        /// Its number.
        guest: usize,
        /// The end of its console.
        console: String,
    },
    /// A step that has to work did not.
    #[error("{command} failed: {errors}")]
    Failed {
        /// What was run.
        command: String,
        /// What it complained of.
        errors: String,
    },
    /// A command cannot be sent to a guest.
    #[error("a command for a guest is one line: {command:?}")]
    Command {
        /// The command.
        command: String,
    },
}

impl LabError {
    /// An error of the host's, with what was being done.
    pub fn host(doing: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let doing = doing.into();
        move |source| Self::Host { doing, source }
    }
}

//! `lab run`: the suites.

use std::time::Duration;

use super::guest::{Guest, Options};
use crate::step::{Outcome, Report};

/// What `lab run` takes.
#[derive(Debug, clap::Args)]
pub struct RunArguments {
    /// Suites to run; all where none is named.
    suites: Vec<String>,
}

/// The command.
pub fn run(arguments: &RunArguments) -> Report {
    let mut report = Report::default();
    if let Some(lacking) = super::lacking() {
        report.skip("lab", &lacking);
        return report;
    }
    let _ = arguments;
    match Guest::boot(&Options { rdma: true, ..Options::plain() }) {
        Err(error) => report.add("verbs", Outcome::Failed(error.to_string())),
        Ok(mut guest) => {
            let done = guest.run("ibv_devinfo", Duration::from_secs(30));
            report.add("verbs", Outcome::Failed(format!("{done:?}")));
        }
    }
    report
}

//! `beeline doctor`: what this host offers, and what would make Beeline faster on it.
//!
//! Each probe looks at one thing, changes nothing, and reports a [`Finding`]: what was seen, a
//! verdict, and what to change where something can be.

mod host;
pub use host::processor_name;
pub use storage::{existing, free_bytes};
mod limits;
mod storage;
mod transport;

use serde::Serialize;

use crate::config::ServeConfig;
use crate::exit::{Exit, Failure};
use crate::output::{Output, table};

/// How good what was seen is for Beeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// As good as it gets.
    Ok,
    /// Works; could be faster or larger.
    CouldBeFaster,
    /// Hardware that this host lacks and that Beeline works well without.
    Optional,
    /// Not there; Beeline does without, at a cost that the advice names.
    Missing,
    /// `beeline serve` with this configuration would not start or not work.
    Broken,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::CouldBeFaster => "could be faster",
            Self::Optional => "optional",
            Self::Missing => "missing",
            Self::Broken => "broken",
        }
    }
}

/// What one probe saw.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub what: &'static str,
    /// What was seen.
    pub seen: String,
    /// How good that is.
    pub verdict: Verdict,
    /// What to change, where something can be.
    pub advice: Option<String>,
}

impl Finding {
    /// All is well.
    pub fn ok(what: &'static str, seen: impl Into<String>) -> Self {
        Self { what, seen: seen.into(), verdict: Verdict::Ok, advice: None }
    }

    /// Something can be changed.
    pub fn advise(
        what: &'static str,
        verdict: Verdict,
        seen: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { what, seen: seen.into(), verdict, advice: Some(advice.into()) }
    }
}

/// Runs every probe for a node configured as `config`.
pub fn examine(config: &ServeConfig) -> Vec<Finding> {
    let mut findings = Vec::new();
    host::probe(&mut findings);
    limits::probe(config, &mut findings);
    storage::probe(config, &mut findings);
    transport::probe(config, &mut findings);
    findings
}

/// The command.
pub fn run(config: &ServeConfig, output: Output) -> Result<Exit, Failure> {
    let findings = examine(config);
    if output.json {
        for finding in &findings {
            output.object(finding)?;
        }
        return Ok(exit(&findings));
    }
    let rows: Vec<Vec<String>> = findings
        .iter()
        .map(|f| vec![f.verdict.word().to_owned(), f.what.to_owned(), f.seen.clone()])
        .collect();
    output.bytes(table(&["VERDICT", "WHAT", "SEEN"], &rows).as_bytes())?;
    let advice: Vec<String> = findings
        .iter()
        .filter_map(|f| f.advice.as_ref().map(|advice| format!("  {}: {advice}", f.what)))
        .collect();
    if !advice.is_empty() {
        output.line("\nWhat to change:")?;
        output.line(advice.join("\n"))?;
    }
    let count = |verdict| findings.iter().filter(|f| f.verdict == verdict).count();
    output.line(format!(
        "\n{} ok, {} could be faster, {} optional, {} missing, {} broken",
        count(Verdict::Ok),
        count(Verdict::CouldBeFaster),
        count(Verdict::Optional),
        count(Verdict::Missing),
        count(Verdict::Broken)
    ))?;
    Ok(exit(&findings))
}

fn exit(findings: &[Finding]) -> Exit {
    if findings.iter().any(|f| f.verdict == Verdict::Broken) { Exit::Failed } else { Exit::Done }
}

/// The trimmed contents of a small system file; `None` where it cannot be read.
fn read(path: &str) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Environment, FileLayer, ServeFlags};

    fn config(flags: &ServeFlags) -> ServeConfig {
        ServeConfig::load(flags, &FileLayer::default(), &Environment::default()).unwrap().0
    }

    fn free_ports(data: &std::path::Path) -> ServeFlags {
        ServeFlags::default()
            .with("data", data.display().to_string())
            .with("resp-address", "127.0.0.1:0")
            .with("http-address", "off")
            .with("fabric-address", "off")
    }

    #[test]
    fn every_subject_is_examined_and_whatever_is_not_ok_comes_with_advice() {
        let directory = tempfile::tempdir().unwrap();
        let findings = examine(&config(&free_ports(directory.path())));
        for what in [
            "processor",
            "cache-line write-back",
            "clock source",
            "transparent huge pages",
            "open files",
            "locked memory",
            "memory maps",
            "DAX",
            "data directory",
            "memfd",
            "pidfd",
            "io_uring",
            "userfaultfd",
            "fabric verbs (RDMA)",
            "PCIe windows (NTB)",
            "fabric shm",
            "fabric tcp",
            "fabric ntb",
            "processor share",
            "memory limit",
        ] {
            assert!(findings.iter().any(|f| f.what == what), "{what} was not examined");
        }
        for finding in &findings {
            let fine = finding.verdict == Verdict::Ok;
            assert!(fine || finding.advice.is_some(), "{finding:?} lacks advice");
        }
        let left = std::fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(left, 0, "a probe leaves nothing behind");
    }

    #[test]
    fn every_flag_that_is_advised_exists() {
        use clap::CommandFactory as _;
        let mut command = crate::cli::Cli::command();
        command.build();
        let serve = command.find_subcommand("serve").unwrap();
        let known: Vec<&str> = serve.get_arguments().filter_map(|flag| flag.get_long()).collect();
        let sources = [
            include_str!("host.rs"),
            include_str!("limits.rs"),
            include_str!("storage.rs"),
            include_str!("transport.rs"),
        ];
        let mut advised = 0;
        for flag in sources.iter().flat_map(|source| source.split("--").skip(1)) {
            let end = flag.find(|c: char| !(c.is_ascii_lowercase() || c == '-'));
            let flag = &flag[..end.unwrap_or(flag.len())];
            if !flag.is_empty() {
                assert!(known.contains(&flag), "--{flag} is advised and does not exist");
                advised += 1;
            }
        }
        assert!(advised > 10, "{advised}");
    }

    #[test]
    fn hardware_that_is_not_needed_is_optional() {
        let directory = tempfile::tempdir().unwrap();
        let findings = examine(&config(&free_ports(directory.path())));
        for what in ["fabric verbs (RDMA)", "PCIe windows (NTB)", "DAX"] {
            let finding = findings.iter().find(|finding| finding.what == what).unwrap();
            assert_ne!(finding.verdict, Verdict::Missing, "{finding:?}");
        }
    }

    #[test]
    fn a_taken_port_is_broken() {
        let directory = tempfile::tempdir().unwrap();
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = taken.local_addr().unwrap().to_string();
        let flags = free_ports(directory.path()).with("resp-address", address);
        let findings = examine(&config(&flags));
        let port = findings.iter().find(|f| f.what == "RESP port").unwrap();
        assert_eq!(port.verdict, Verdict::Broken);
        assert_eq!(exit(&findings), Exit::Failed);
    }
}

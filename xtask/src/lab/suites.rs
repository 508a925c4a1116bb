//! `lab run`: the suites.

pub(super) mod migrate;
mod packets;
mod peers;
mod perftest;
mod pmem;
mod power;
mod sockets;
mod verbs;
mod window;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::error::LabError;
use super::exec::line;
use super::guest::{Guest, Memory, Options};
use crate::root;
use crate::step::{Counts, Outcome, Report, say};

/// What `lab run` takes.
#[derive(Debug, clap::Args)]
pub struct RunArguments {
    /// Suites to run; all but `perftest` where none is named.
    #[arg(value_enum)]
    suites: Vec<Suite>,
    /// What `check` runs: one guest, a minute or two.
    #[arg(long, conflicts_with = "suites")]
    short: bool,
}

/// A group of tests that share guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Suite {
    /// perftest and the conformance suite on soft-RoCE, in one guest.
    Verbs,
    /// Durable memory on an NVDIMM with DAX.
    Pmem,
    /// The power cut in the middle of a load.
    Power,
    /// Two guests: a client and a node whose cable is pulled, whose wire is bad, whose power is cut.
    Peers,
    /// Two guests with a memory window between them.
    Window,
    /// Two guests: unmodified programs whose connections run through the window.
    Packets,
    /// Two guests: unmodified programs whose connections run over soft-RoCE.
    Sockets,
    /// Two guests: a running program and its connections move from one to the other.
    Migrate,
    /// perftest beside the verbs provider; only by name, because it measures.
    Perftest,
}

impl Suite {
    /// Every suite that tests, in the order in which they run.
    const ALL: &[Self] = &[
        Self::Verbs,
        Self::Pmem,
        Self::Power,
        Self::Peers,
        Self::Window,
        Self::Packets,
        Self::Sockets,
        Self::Migrate,
    ];

    /// Packages whose tests it runs.
    fn packages(self) -> &'static [&'static str] {
        match self {
            Self::Verbs => &[
                "beeline-fabric-verbs",
                "beeline-fabric-tcp",
                "beeline-fabric-shm",
                "beeline-verify-one-sided",
            ],
            Self::Pmem => &["beeline-pmem"],
            Self::Perftest => &["beeline-fabric-verbs"],
            Self::Power => &["beeline-verify-crash"],
            Self::Sockets | Self::Migrate => &["beeline-sockets"],
            Self::Packets => &["beeline-ntb"],
            Self::Peers => &["beeline-verify-lab", "beeline-fabric-verbs"],
            Self::Window => &["beeline-verify-lab", "beeline-fabric-ntb"],
        }
    }
}

/// The command.
pub fn run(arguments: &RunArguments) -> Report {
    let mut report = Report::default();
    if arguments.short {
        short(&mut report);
        return report;
    }
    let suites = if arguments.suites.is_empty() { Suite::ALL } else { &arguments.suites };
    whole(&mut report, suites);
    report
}

/// What `deep` runs: everything.
pub fn deep(report: &mut Report) {
    whole(report, Suite::ALL);
}

fn whole(report: &mut Report, suites: &[Suite]) {
    let packages: Vec<&str> = suites.iter().flat_map(|suite| suite.packages()).copied().collect();
    let Some(binaries) = prepare(report, &packages) else { return };
    for suite in suites {
        match suite {
            Suite::Verbs => verbs::run(report, &binaries),
            Suite::Pmem => pmem::run(report, &binaries),
            Suite::Power => power::run(report, &binaries),
            Suite::Peers => peers::run(report, &binaries),
            Suite::Window => window::run(report, &binaries),
            Suite::Packets => packets::run(report),
            Suite::Sockets => sockets::run(report, &binaries),
            Suite::Migrate => migrate::run(report, &binaries),
            Suite::Perftest => perftest::run(report),
        }
    }
}

/// What `check` runs, in a minute or two: one guest with a soft-RoCE device and an NVDIMM, the
/// conformance suite on the one and the pool's suites on the other.
pub fn short(report: &mut Report) {
    let Some(binaries) = prepare(report, &[]) else { return };
    with_nvdimm(report, "guest", verbs::options(), |rows, guest| {
        verbs::conformance(rows, guest, &binaries);
        pmem::suites(rows, guest, &binaries);
    });
}

/// Sees whether guests can boot here and builds the tests of `packages`, of all where none is
/// named: `check` has built those already.
fn prepare(report: &mut Report, packages: &[&str]) -> Option<Binaries> {
    if let Some(lacking) = super::lacking() {
        report.skip("lab", &lacking);
        return None;
    }
    match Binaries::build(packages) {
        Ok(binaries) => Some(binaries),
        Err(why) => {
            report.add("lab", Outcome::Failed(why));
            None
        }
    }
}

/// Boots a guest with a new NVDIMM and runs `body` on it.
fn with_nvdimm(
    report: &mut Report,
    suite: &'static str,
    options: Options,
    body: impl FnOnce(&mut Rows<'_>, &mut Guest),
) {
    let mut rows = Rows { report, suite };
    let folder = match tempfile::tempdir() {
        Ok(folder) => folder,
        Err(error) => return rows.check("boot", || Err(LabError::host("a folder")(error))),
    };
    let nvdimm = Some(Memory { path: folder.path().join("nvdimm"), mebibytes: 512 });
    match Guest::boot(&Options { nvdimm, ..options }) {
        Ok(mut guest) => body(&mut rows, &mut guest),
        Err(error) => rows.check("boot", || Err(error)),
    }
}

/// A program that holds tests.
#[derive(Clone, Debug)]
struct Binary {
    package: String,
    name: String,
    program: PathBuf,
    /// The package's folder, in which its tests start.
    folder: PathBuf,
}

/// The test programs of this workspace.
#[derive(Debug)]
struct Binaries(Vec<Binary>);

impl Binaries {
    /// Builds them for those of `packages` that there are.
    fn build(packages: &[&str]) -> Result<Self, String> {
        let known = workspace()?;
        let mut command = Command::new("cargo");
        command.args(["test", "--quiet", "--no-run", "--message-format", "json"]);
        if packages.is_empty() {
            command.args(["--workspace", "--exclude", "beeline-verify-architecture"]);
        }
        for package in packages.iter().filter(|package| known.contains_key(**package)) {
            command.args(["--package", package]);
        }
        let output = command
            .current_dir(root())
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .map_err(|error| format!("cargo: {error}"))?;
        if !output.status.success() {
            return Err("the tests do not build".to_owned());
        }
        let mut binaries = Vec::new();
        for line in String::from_utf8_lossy(&output.stdout).lines() {
            let Ok(message) = serde_json::from_str::<serde_json::Value>(line) else { continue };
            let Some(program) = message["executable"].as_str() else { continue };
            let (Some(manifest), Some(name)) =
                (message["manifest_path"].as_str(), message["target"]["name"].as_str())
            else {
                continue;
            };
            let found = known.iter().find(|(_, known)| known.as_os_str() == manifest);
            if let (Some((package, manifest)), true) = (found, message["profile"]["test"] == true) {
                binaries.push(Binary {
                    package: package.clone(),
                    name: name.to_owned(),
                    program: program.into(),
                    folder: manifest.parent().map(PathBuf::from).unwrap_or_default(),
                });
            }
        }
        Ok(Self(binaries))
    }

    fn of(&self, package: &str) -> Vec<&Binary> {
        self.0.iter().filter(|binary| binary.package == package).collect()
    }

    fn find(&self, package: &str, name: &str) -> Option<&Binary> {
        self.0.iter().find(|binary| binary.package == package && binary.name == name)
    }
}

/// Builds the program itself; false where it does not build.
fn build_program() -> bool {
    build("beeline")
}

/// Builds a package; false where it does not build.
fn build(package: &str) -> bool {
    build_with(&["--package", package])
}

/// As `cargo build` with `arguments`; false where it does not build.
fn build_with(arguments: &[&str]) -> bool {
    let built = Command::new("cargo")
        .args(["build", "--quiet"])
        .args(arguments)
        .current_dir(root())
        .stdin(Stdio::null())
        .status();
    built.is_ok_and(|status| status.success())
}

/// Packages of the workspace and their manifests.
fn workspace() -> Result<BTreeMap<String, PathBuf>, String> {
    let output = Command::new("cargo")
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root())
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cargo: {error}"))?;
    let found: serde_json::Value = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("cargo metadata: {error}"))?;
    let packages = found["packages"].as_array().cloned().unwrap_or_default();
    let pair = |package: &serde_json::Value| {
        Some((package["name"].as_str()?.to_owned(), package["manifest_path"].as_str()?.into()))
    };
    Ok(packages.iter().filter_map(pair).collect())
}

/// Rows of one suite.
struct Rows<'a> {
    report: &'a mut Report,
    suite: &'static str,
}

impl Rows<'_> {
    fn name(&self, row: &str) -> String {
        format!("lab {}: {row}", self.suite)
    }

    fn skip(&mut self, row: &str, reason: &str) {
        let name = self.name(row);
        self.report.skip(&name, reason);
    }

    /// A row from what `check` finds; what it returns says how much was looked at.
    fn check(
        &mut self,
        row: &str,
        check: impl FnOnce() -> Result<Result<String, String>, LabError>,
    ) {
        let name = self.name(row);
        say(&format!("\n== {name}"));
        let started = Instant::now();
        let outcome = match check() {
            Ok(Ok(seen)) => {
                say(&seen);
                Outcome::Passed
            }
            Ok(Err(why)) => Outcome::Failed(why),
            Err(error) => Outcome::Failed(error.to_string()),
        };
        let seconds = started.elapsed().as_secs();
        self.report.add_counted(&name, outcome, Counts::default(), seconds);
    }

    /// A row for the tests of one program.
    fn tests(
        &mut self,
        guest: &mut Guest,
        binary: &Binary,
        environment: &[&str],
        arguments: &[&str],
        limit: Duration,
    ) {
        let name = self.name(&format!("{} {}", binary.package, binary.name));
        say(&format!("\n== {name}"));
        let started = Instant::now();
        let mut command = vec![binary.program.to_string_lossy().into_owned()];
        command.extend(arguments.iter().map(|&word| word.to_owned()));
        let environment: Vec<String> = environment.iter().map(|&word| word.to_owned()).collect();
        let mut counts = Counts::default();
        let finished = guest.run(&line(&binary.folder, &environment, &command), limit);
        let outcome = match finished {
            Err(error) => Outcome::Failed(error.to_string()),
            Ok(finished) => {
                for line in finished.output.lines() {
                    counts.read(line);
                }
                for line in finished.errors.lines().filter(|line| line.contains("skipped: ")) {
                    counts.read(line);
                }
                let last = finished.output.lines().rev().find(|line| !line.is_empty());
                say(last.unwrap_or_default());
                if finished.status == 0 && counts.passed > 0 {
                    Outcome::Passed
                } else {
                    say(&finished.output);
                    say(&finished.errors);
                    let failed = counts.failures.join(", ");
                    Outcome::Failed(format!("status {}: {failed}", finished.status))
                }
            }
        };
        let seconds = started.elapsed().as_secs();
        self.report.add_counted(&name, outcome, counts, seconds);
    }
}

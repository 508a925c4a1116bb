//! One step: a command with a time limit, its output passed through, its tests counted.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use crate::root;
use crate::skips::Machine;

/// How a step ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It did what it should.
    Passed,
    /// It did not.
    Failed(String),
    /// It could not run here.
    Skipped(String),
}

/// A row of the closing table.
#[derive(Clone, Debug)]
pub struct Row {
    name: String,
    outcome: Outcome,
    counts: Counts,
    seconds: u64,
    /// What it might have taken; zero for what was no step.
    limit: Duration,
    /// Seconds it took when it was last timed; zero where that was not written down.
    usually: u64,
}

impl Row {
    /// True when the step did what it should.
    pub fn passed(&self) -> bool {
        self.outcome == Outcome::Passed
    }

    /// What the table calls it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How it ended.
    pub fn outcome(&self) -> &Outcome {
        &self.outcome
    }
}

/// A longer line is no amount.
const LONGEST_AMOUNT: usize = 200;
/// Lines of amounts shown for one row.
const MOST_AMOUNTS: usize = 60;

/// Tests as the test harness counted them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Passed, those among them that skipped themselves included.
    pub passed: u64,
    /// Failed.
    pub failed: u64,
    /// Not run by default.
    pub ignored: u64,
    /// Suites that reported.
    pub suites: u64,
    /// Names of failed tests.
    pub failures: Vec<String>,
    /// Tests that skipped themselves, as they said it: name and reason.
    pub skipped: Vec<String>,
    /// How much was run, in the checkers' own words: seeds, crash images, rounds, executions.
    pub amounts: Vec<String>,
    /// The test whose output the harness is showing.
    showing: Option<String>,
}

impl Counts {
    /// Takes in one line of output: the test harness's (with `--show-output`, what passed tests
    /// printed), libFuzzer's, and lines of ours that say `ran: ` or `skipped: `.
    pub fn read(&mut self, line: &str) {
        let line = line.trim_end();
        if let Some((name, reason)) = line.split_once("skipped: ") {
            let name = name.trim_end_matches([' ', '.', ':']);
            self.skipped.push(if name.is_empty() {
                reason.to_owned()
            } else {
                format!("{name}: {reason}")
            });
            return;
        }
        self.read_amounts(line);
        if let Some(rest) = line.strip_prefix("test result: ") {
            self.suites += 1;
            let number = |word: &str| {
                let end = rest.find(word)?;
                rest[..end].trim_end().rsplit([' ', '.']).next()?.parse::<u64>().ok()
            };
            self.passed += number(" passed").unwrap_or(0);
            self.failed += number(" failed").unwrap_or(0);
            self.ignored += number(" ignored").unwrap_or(0);
        } else if let Some(name) =
            line.strip_prefix("test ").and_then(|rest| rest.strip_suffix(" ... FAILED"))
        {
            self.failures.push(name.to_owned());
        }
    }

    fn read_amounts(&mut self, line: &str) {
        // A name of the harness may stand before what a test writes straight to the stream.
        if let Some((_, amount)) = line.split_once("ran: ") {
            self.amounts.push(amount.to_owned());
        } else if let Some(head) = line.strip_prefix("---- ") {
            self.showing = head.strip_suffix(" stdout ----").map(str::to_owned);
        } else if line == "successes:" || line == "failures:" || line.starts_with("test result:") {
            self.showing = None;
        } else if let Some(test) = &self.showing
            && !line.is_empty()
            && line.len() <= LONGEST_AMOUNT
        {
            self.amounts.push(format!("{test}: {line}"));
        } else if line.starts_with("Done ") && line.contains(" runs in ") {
            self.amounts.push(line.to_owned());
        } else if line.starts_with('#') && line.contains("\tDONE ") {
            let coverage = line.split_once("DONE").map_or("", |(_, rest)| rest.trim());
            self.amounts.push(coverage.to_owned());
        }
    }

    fn text(&self) -> String {
        if self.suites == 0 {
            return String::new();
        }
        format!("{} tests in {} suites", self.passed + self.failed, self.suites)
    }
}

/// A command to run.
#[derive(Debug)]
pub struct Step {
    name: String,
    program: String,
    arguments: Vec<String>,
    environment: BTreeMap<String, String>,
    limit: Duration,
    usually: u64,
    amounts: Vec<String>,
    needs_tests: bool,
    needs_output: Option<String>,
    directory: Option<std::path::PathBuf>,
}

impl Step {
    /// `line` split at spaces, run at the root of the workspace.
    pub fn new(name: &str, line: &str) -> Self {
        let mut words = line.split_whitespace().map(str::to_owned);
        Self {
            name: name.to_owned(),
            program: words.next().unwrap_or_default(),
            arguments: words.collect(),
            environment: BTreeMap::new(),
            limit: Duration::from_secs(45 * 60),
            usually: 0,
            amounts: Vec::new(),
            needs_tests: false,
            needs_output: None,
            directory: None,
        }
    }

    /// Runs the step elsewhere than at the root of the workspace.
    pub fn directory(mut self, directory: &std::path::Path) -> Self {
        self.directory = Some(directory.to_owned());
        self
    }

    /// Turns the step around: it has to fail, and say this. For checkers shown a planted bug.
    pub fn fails_with(mut self, text: &str) -> Self {
        self.needs_output = Some(text.to_owned());
        self
    }

    /// Sets an environment variable.
    pub fn set(mut self, name: &str, value: &str) -> Self {
        self.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Ends the step, failed, after so many minutes.
    pub fn minutes(mut self, minutes: u64) -> Self {
        self.limit = Duration::from_secs(60 * minutes);
        self
    }

    /// Adds minutes to the limit.
    pub fn more_minutes(mut self, minutes: u64) -> Self {
        self.limit += Duration::from_secs(60 * minutes);
        self
    }

    /// Says in the table how long the step took when it was timed.
    pub fn usually(mut self, seconds: u64) -> Self {
        self.usually = seconds;
        self
    }

    /// Says in the table how much was asked for, where the checker itself does not.
    pub fn amount(mut self, text: &str) -> Self {
        self.amounts.push(text.to_owned());
        self
    }

    /// Fails the step when not a single test ran.
    pub fn tests(mut self) -> Self {
        self.needs_tests = true;
        self
    }

    /// Runs the step, its output passing through to ours.
    pub fn run(&self) -> Row {
        say(&format!("\n== {}: {} {}", self.name, self.program, self.arguments.join(" ")));
        let start = Instant::now();
        let mut counts = Counts { amounts: self.amounts.clone(), ..Counts::default() };
        let mut outcome = match self.drive(&mut counts) {
            Ok(outcome) => outcome,
            Err(error) => Outcome::Failed(format!("{}: {error}", self.program)),
        };
        if self.needs_tests && outcome == Outcome::Passed && counts.passed == 0 {
            outcome = Outcome::Failed("not a single test ran".to_owned());
        }
        let seconds = start.elapsed().as_secs();
        let (limit, usually) = (self.limit, self.usually);
        Row { name: self.name.clone(), outcome, counts, seconds, limit, usually }
    }

    fn drive(&self, counts: &mut Counts) -> std::io::Result<Outcome> {
        // One pipe for both streams keeps their order.
        let (reader, writer) = std::io::pipe()?;
        let mut command = Command::new(&self.program);
        command
            .args(&self.arguments)
            .envs(&self.environment)
            .current_dir(self.directory.clone().unwrap_or_else(root))
            .stdin(Stdio::null())
            .stdout(writer.try_clone()?)
            .stderr(writer)
            .process_group(0);
        let mut child = command.spawn()?;
        // Our copies of the writing end go with the command.
        drop(command);
        let group = child.id();
        let limit = self.limit;
        let (done, ended) = std::sync::mpsc::channel::<()>();
        let guard = std::thread::spawn(move || {
            let late = ended.recv_timeout(limit) == Err(std::sync::mpsc::RecvTimeoutError::Timeout);
            if late {
                // The whole group: what a test started ends with it.
                let _ = Command::new("kill").args(["-KILL", "--", &format!("-{group}")]).status();
            }
            late
        });
        let mut said = false;
        for line in BufReader::new(reader).split(b'\n') {
            let line = line?;
            let line = String::from_utf8_lossy(&line);
            counts.read(&line);
            said |= self.needs_output.as_ref().is_some_and(|text| line.contains(text.as_str()));
            say(&line);
        }
        let status = child.wait()?;
        let _ = done.send(());
        let late = guard.join().unwrap_or(false);
        Ok(if late {
            Outcome::Failed(format!("not done after {} minutes", limit.as_secs() / 60))
        } else if let Some(text) = &self.needs_output {
            if said && !status.success() {
                counts.amounts.push("caught".to_owned());
                Outcome::Passed
            } else {
                Outcome::Failed(format!("the planted bug was not caught: no {text:?}"))
            }
        } else if status.success() {
            Outcome::Passed
        } else if counts.failed > 0 {
            Outcome::Failed(format!("failed: {}", counts.failures.join(", ")))
        } else {
            Outcome::Failed(status.to_string())
        })
    }
}

/// The rows so far.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<Row>,
}

impl Report {
    /// Runs a step and keeps its row.
    pub fn run(&mut self, step: &Step) {
        let row = step.run();
        self.rows.push(row);
    }

    /// Keeps a row made elsewhere.
    pub fn keep(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// A row that did not need a command.
    pub fn add(&mut self, name: &str, outcome: Outcome) {
        self.rows.push(Row {
            name: name.to_owned(),
            outcome,
            counts: Counts::default(),
            seconds: 0,
            limit: Duration::ZERO,
            usually: 0,
        });
    }

    /// A row that passed, and what there is to say of it.
    pub fn done(&mut self, name: &str, said: &str) {
        let counts = Counts { amounts: vec![said.to_owned()], ..Counts::default() };
        self.add_counted(name, Outcome::Passed, counts, 0);
    }

    /// A row for something that counted its own tests.
    pub fn add_counted(&mut self, name: &str, outcome: Outcome, counts: Counts, seconds: u64) {
        let (limit, usually) = (Duration::ZERO, 0);
        self.rows.push(Row { name: name.to_owned(), outcome, counts, seconds, limit, usually });
    }

    /// A row for what cannot run here.
    pub fn skip(&mut self, name: &str, reason: &str) {
        self.add(name, Outcome::Skipped(reason.to_owned()));
    }

    /// The rows so far.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Adds a failed row for every skip of a test that `machine` could have run.
    pub fn refuse_skips(&mut self, machine: &Machine) {
        let mut refused = Vec::new();
        for row in &self.rows {
            if let Outcome::Skipped(why) = &row.outcome {
                refused.push(format!("{}: {why}", row.name));
            }
            refused.extend(row.counts.skipped.iter().map(|line| format!("{}: {line}", row.name)));
        }
        refused.retain(|line| machine.could_run(line));
        for line in refused {
            self.add("no skips", Outcome::Failed(line));
        }
    }

    /// Prints the table and the line of totals; fails when a row did.
    pub fn finish(self) -> ExitCode {
        say(&format!("\n{}", self.text()));
        let failed = self.rows.iter().any(|row| matches!(row.outcome, Outcome::Failed(_)));
        if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }

    /// The table, then what was skipped inside suites, then `N passed, N failed, N skipped`: tests
    /// where a row ran tests, else the row itself.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let (mut passed, mut failed, mut skipped) = (0, 0, 0);
        for row in &self.rows {
            let (word, detail) = match &row.outcome {
                Outcome::Passed => ("passed", row.counts.text()),
                Outcome::Failed(why) => ("FAILED", why.clone()),
                Outcome::Skipped(why) => ("skipped", why.clone()),
            };
            let limit = match (row.limit.as_secs() / 60, row.usually) {
                (0, _) => String::new(),
                (minutes, 0) => format!("of {minutes} min"),
                (minutes, usually) => format!("of {minutes} min, usually {usually} s"),
            };
            let (name, seconds) = (&row.name, row.seconds);
            text.push_str(&format!("{word:<8} {name:<24} {seconds:>5} s {limit:<10} {detail}\n"));
            for amount in row.counts.amounts.iter().take(MOST_AMOUNTS) {
                text.push_str(&format!("{:<18} {amount}\n", ""));
            }
            if row.counts.amounts.len() > MOST_AMOUNTS {
                let more = row.counts.amounts.len() - MOST_AMOUNTS;
                text.push_str(&format!("{:<18} and {more} lines more above\n", ""));
            }
            // A test that skipped itself counts as passed for the harness; not for us.
            let skipped_here = row.counts.skipped.len() as u64;
            passed += row.counts.passed.saturating_sub(skipped_here);
            skipped += row.counts.ignored + skipped_here;
            failed += row.counts.failed;
            match row.outcome {
                Outcome::Passed if row.counts.suites == 0 => passed += 1,
                Outcome::Failed(_) if row.counts.failed == 0 => failed += 1,
                Outcome::Skipped(_) => skipped += 1,
                _ => {}
            }
        }
        for row in &self.rows {
            for line in &row.counts.skipped {
                text.push_str(&format!("skipped  {}: {line}\n", row.name));
            }
        }
        text.push_str(&format!("\n{passed} passed, {failed} failed, {skipped} skipped"));
        text
    }
}

/// A line on standard output; nobody reading is no reason to stop.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}");
    let _ = out.flush();
}

/// True when `line` runs and succeeds here.
pub fn works(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let Some(program) = words.next() else { return false };
    Command::new(program)
        .args(words)
        .current_dir(root())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_harness_lines_are_counted() {
        let mut counts = Counts::default();
        counts.read("test layers::a ... FAILED");
        counts.read(
            "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; 0 filtered out",
        );
        counts.read("test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!((counts.passed, counts.failed, counts.ignored, counts.suites), (15, 1, 2, 2));
        assert_eq!(counts.failures, ["layers::a"]);
    }

    #[test]
    fn what_the_checkers_ran_is_collected() {
        let mut counts = Counts::default();
        for line in [
            "test kill ... ran: 200 rounds, 5 writes",
            "successes:",
            "",
            "---- crash::images stdout ----",
            "12 images at 3 points",
            "",
            "successes:",
            "    crash::images",
            "failures:",
            "---- other stdout ----",
            "test result: FAILED. 1 passed; 1 failed; 0 ignored",
            "not an amount",
            "#4096\tDONE   cov: 12 ft: 34 corp: 5/6b",
            "Done 4096 runs in 2 second(s)",
        ] {
            counts.read(line);
        }
        assert_eq!(
            counts.amounts,
            [
                "200 rounds, 5 writes",
                "crash::images: 12 images at 3 points",
                "cov: 12 ft: 34 corp: 5/6b",
                "Done 4096 runs in 2 second(s)"
            ]
        );
    }

    #[test]
    fn a_test_that_skipped_itself_is_no_passed_test() {
        let mut counts = Counts::default();
        counts.read("conformance::a_read ... skipped: there is no device");
        counts.read("skipped: not root");
        counts.read("test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
        assert_eq!(counts.skipped, ["conformance::a_read: there is no device", "not root"]);
        let mut report = Report::default();
        let (name, outcome) = ("tests".to_owned(), Outcome::Passed);
        let (seconds, limit, usually) = (1, Duration::ZERO, 0);
        report.rows.push(Row { name, outcome, counts, seconds, limit, usually });
        assert!(report.text().ends_with("1 passed, 0 failed, 2 skipped"), "{}", report.text());
    }

    #[test]
    fn a_skip_of_what_this_machine_could_run_fails_the_report() {
        let machine = Machine::with_root_alone();
        let counts = |skipped: &[&str]| Counts {
            passed: 3,
            suites: 1,
            skipped: skipped.iter().map(|line| (*line).to_owned()).collect(),
            ..Counts::default()
        };
        let mut report = Report::default();
        let forgiven = [
            "disk: a file system can be mounted by root only",
            "reads: there is no RDMA device",
            "soak: a long one: `cargo xtask deep` runs it",
        ];
        report.add_counted("tests", Outcome::Passed, counts(&forgiven), 1);
        report.skip("lab", "QEMU is not installed");
        report.refuse_skips(&machine);
        let failures = |report: &Report| {
            report.rows.iter().filter(|row| matches!(row.outcome, Outcome::Failed(_))).count()
        };
        assert_eq!(failures(&report), 0, "{}", report.text());
        report.add_counted(
            "more",
            Outcome::Passed,
            counts(&["rights: a second user needs root"]),
            1,
        );
        report.refuse_skips(&machine);
        assert_eq!(failures(&report), 1, "{}", report.text());
        assert!(report.text().contains("more: rights: a second user needs root"));
    }

    #[test]
    fn totals_count_tests_where_there_are_some_and_rows_elsewhere() {
        let mut report = Report::default();
        report.add("format", Outcome::Passed);
        report.add("docs", Outcome::Failed("broken link".to_owned()));
        report.skip("miri", "not installed");
        report.rows.push(Row {
            name: "tests".to_owned(),
            outcome: Outcome::Passed,
            counts: Counts {
                passed: 10,
                suites: 2,
                skipped: vec!["disk_full: not root".to_owned()],
                ..Counts::default()
            },
            seconds: 3,
            limit: Duration::from_secs(600),
            usually: 2,
        });
        let text = report.text();
        assert!(text.ends_with("10 passed, 1 failed, 2 skipped"), "{text}");
        assert!(
            text.contains("3 s of 10 min, usually 2 s")
                && text.contains("FAILED   docs")
                && text.contains("disk_full: not root"),
            "{text}"
        );
    }

    #[test]
    fn a_step_that_hangs_is_ended() {
        let mut step = Step::new("hang", "sleep 600");
        step.limit = Duration::from_millis(200);
        let row = step.run();
        assert!(matches!(row.outcome, Outcome::Failed(why) if why.contains("not done")));
    }

    #[test]
    fn a_step_without_a_test_is_a_failure_where_tests_are_expected() {
        let row = Step::new("empty", "true").tests().run();
        assert!(matches!(row.outcome, Outcome::Failed(_)), "{row:?}");
    }
}

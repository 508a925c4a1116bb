//! `deep`: what takes longer than a change should wait for.
//!
//! Every row says how much it ran: tests, and below them the checkers' own counts of executions,
//! seeds, crash images, rounds and inputs; how long it took, and how long it took when it was
//! timed, building included, beside other builds on a machine of two cores. Three times that and a
//! quarter of an hour more is a row's limit; an hour, where it was not timed. `--quick` is about a
//! tenth of everything, to see that every row works.

use crate::lab;
use crate::root;
use crate::step::{Report, Step, say, works};
use crate::tools;

/// What `deep` takes.
#[derive(Debug, clap::Args)]
pub struct DeepArguments {
    /// Run only the rows whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Say which rows there are and how long each took, and run none.
    #[arg(long)]
    pub list: bool,
    /// Minutes for each decoder, once with mutations and once guided by coverage.
    #[arg(long, default_value_t = 1, value_name = "MINUTES")]
    fuzz_minutes: u64,
    /// Cases of each property test in the wide row.
    #[arg(long, default_value_t = 1000, value_name = "COUNT")]
    cases: u64,
    /// Rounds of kill -9 for each kind of client.
    #[arg(long, default_value_t = 200, value_name = "COUNT")]
    rounds: u64,
    /// About a tenth of everything.
    #[arg(long)]
    quick: bool,
}

/// Crates whose rings and codecs run on the heap, so that Miri can follow them.
const ON_THE_HEAP: &str = "--package beeline-ring --package beeline-wire --package beeline-env";
/// Crates with loom models.
const WITH_LOOM: &str =
    "--package beeline-ring --package beeline-sockets --package beeline-kv-direct";
/// Crates that touch raw memory.
const RAW: &str = "--package beeline-os --package beeline-ring --package beeline-pmem \
                   --package beeline-fabric-engine --package beeline-fabric-shm \
                   --package beeline-fabric-tcp --package beeline-kv \
                   --package beeline-verify-one-sided";
/// Crates whose threads share memory within one process.
const THREADED: &str = "--package beeline-ring --package beeline-pmem --package beeline-kv \
                        --package beeline-fabric-tcp --package beeline-node \
                        --package beeline-sockets --package beeline-kv-direct";
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// One line of what there is to run.
struct Row {
    name: &'static str,
    /// How much it runs where no flag says otherwise.
    amount: &'static str,
    /// Seconds it took; zero where it was not timed.
    took: u64,
    run: fn(&Row, &mut Report, &DeepArguments),
}

/// All of them, in the order in which they run.
const ROWS: &[Row] = &[
    Row {
        name: "miri",
        amount: "rings, codecs, clocks and chance; 4 cases of each property",
        took: 155,
        run: miri,
    },
    Row {
        name: "loom",
        amount: "every interleaving of the lock-free parts with three preemptions at most",
        took: 115,
        run: loom,
    },
    Row {
        name: "address sanitizer",
        amount: "what touches raw memory; 32 cases of each property",
        took: 340,
        run: address_sanitizer,
    },
    Row {
        name: "thread sanitizer",
        amount: "threads that share memory; 16 cases of each property",
        took: 1170,
        run: thread_sanitizer,
    },
    Row {
        name: "hostile streams",
        amount: "a minute of random frames at the tcp provider",
        took: 80,
        run: |row, report, arguments| {
            let what = "--package beeline-fabric-tcp --test hostile";
            report.run(&row.long(what, arguments));
        },
    },
    Row {
        name: "kills and faults",
        amount: "200 rounds of kill -9 for each kind of client, 12 for clusters, 140 in snapshots \
                 and restores",
        took: 260,
        run: |row, report, arguments| {
            program(report);
            report.run(&row.long("--package beeline-verify-clients", arguments));
        },
    },
    Row {
        name: "mutations",
        amount: "a minute of mutated inputs for each of 10 decoders",
        took: 265,
        run: |row, report, arguments| {
            let seconds = if arguments.quick { 5 } else { arguments.fuzz_minutes * 60 };
            let step = row.long("--package beeline-verify-fuzz", arguments);
            // The planted bug's panic is no news.
            let step = step.set("RUST_BACKTRACE", "0");
            let more = 8 * arguments.fuzz_minutes.saturating_sub(1);
            report.run(&step.set("BEELINE_FUZZ_SECONDS", &seconds.to_string()).more_minutes(more));
        },
    },
    Row {
        name: "log clusters",
        amount: "12,500 seeds of whole clusters of 3, 5 and 7 servers, 1,000 of the whole stack; \
                 planted bugs",
        took: 480,
        run: |row, report, arguments| {
            let what = "--package beeline-verify-log --lib --test clusters --test stack \
                        --test planted_bugs --test over_fabric --test servers --test membership";
            report.run(&row.long(what, arguments));
        },
    },
    Row {
        name: "log processes",
        amount: "clusters of processes: 90 s of kills over each provider, 20 rounds of stops and of \
                 whole clusters killed; links cut, disks full",
        took: 350,
        run: |row, report, arguments| {
            let what = "--package beeline-verify-log --test processes --test cut_off";
            report.run(&row.long(what, arguments));
        },
    },
    Row {
        name: "document channels",
        amount: "5,000 seeds of the documents' transport over simulated fabric, and 5,000 with each of six \
                 bugs put back",
        // Of the same tests in the tests' own profile, built before.
        took: 62,
        run: |row, report, arguments| {
            report.run(&row.long("--package beeline-documents-channel --lib", arguments));
        },
    },
    Row {
        name: "sockets",
        amount: "a minute of idle times and bursts for each way to wait; a million connections; \
                 1000 cases of each property",
        took: 1065,
        run: |row, report, arguments| {
            let what = "--package beeline-sockets --package beeline-sockets-monitor";
            report.run(&row.long(what, arguments));
        },
    },
    Row {
        name: "wide",
        amount: "all other tests in their long form, a hundred million operations of the direct store \
                 beside a plain map and ten million packets through the balancer among them; 1000 \
                 cases of each property",
        took: 1230,
        run: |row, report, arguments| {
            program(report);
            let most = "--workspace --exclude beeline-verify-clients \
                        --exclude beeline-verify-fuzz --exclude beeline-verify-log \
                        --exclude beeline-verify-crash --exclude beeline-verify-one-sided \
                        --exclude beeline-sockets --exclude beeline-sockets-monitor \
                        --exclude beeline-documents-channel";
            report.run(&row.long(most, arguments));
        },
    },
    Row {
        name: "crash points",
        amount: "up to 12 crash images at each of 40 points of 400 histories; 800 rounds of kill -9 of \
                 a store; the one-sided store",
        took: 1170,
        run: |row, report, arguments| {
            let what = "--package beeline-verify-crash --package beeline-verify-one-sided";
            report.run(&row.long(what, arguments));
        },
    },
    Row {
        name: "fuzz",
        amount: "a minute for each of 10 decoders, guided by coverage",
        took: 1010,
        run: fuzz,
    },
    Row {
        name: "lab",
        amount: "all suites in virtual machines",
        took: 2500,
        run: |_, report, _| lab::suites::deep(report),
    },
];

impl Row {
    /// With the time it took, and a limit far beyond it.
    fn step(&self, line: &str) -> Step {
        let limit = if self.took > 0 { 15 + self.took / 20 } else { 60 };
        Step::new(self.name, line).usually(self.took).minutes(limit)
    }

    /// Tests in their long form, with what they print.
    fn long(&self, what: &str, arguments: &DeepArguments) -> Step {
        let program = root().join("target/deep/beeline");
        let cases = if arguments.quick { 100 } else { arguments.cases };
        let rounds = if arguments.quick { 20 } else { arguments.rounds };
        let step = self
            .step(&format!("cargo test --profile deep --no-fail-fast {what} -- --show-output"))
            .amount(&format!("{cases} cases of each property that names no number of its own"))
            .set("BEELINE_PROGRAM", &program.to_string_lossy())
            .set("BEELINE_ROUNDS", &rounds.to_string())
            .set("PROPTEST_CASES", &cases.to_string())
            .tests();
        if arguments.quick { step } else { step.set("BEELINE_DEEP", "1") }
    }
}

impl DeepArguments {
    fn rows(&self) -> impl Iterator<Item = &'static Row> {
        // `fuzz resp` is one of the decoders of the row `fuzz`.
        let only = self.only.as_deref();
        let wanted =
            move |name: &str| only.is_none_or(|only| name.contains(only) || only.starts_with(name));
        ROWS.iter().filter(move |row| wanted(row.name))
    }
}

/// Says what there is to run.
pub fn list(arguments: &DeepArguments) {
    for row in arguments.rows() {
        let took = if row.took > 0 { format!("{} s", row.took) } else { "not timed".to_owned() };
        say(&format!("{:<18} {took:>9}  {}", row.name, row.amount));
    }
}

/// The command.
pub fn run(arguments: &DeepArguments) -> Report {
    let mut report = Report::default();
    for row in arguments.rows() {
        (row.run)(row, &mut report, arguments);
    }
    report
}

/// Builds the program that tests in their long form start.
fn program(report: &mut Report) {
    let line = "cargo build --profile deep --package beeline";
    report.run(&Step::new("program", line).usually(160).minutes(30));
}

fn miri(row: &Row, report: &mut Report, _: &DeepArguments) {
    if !works("cargo +nightly miri --version") {
        let reason = "needs `rustup +nightly component add miri rust-src`: Miri comes with rustup \
                      only, not from crates.io, PyPI or Debian";
        report.skip("miri", reason);
        return;
    }
    report.run(
        &row.step(&format!("cargo +nightly miri test {ON_THE_HEAP} --lib --no-fail-fast"))
            .set("MIRIFLAGS", "-Zmiri-disable-isolation")
            .set("PROPTEST_CASES", "4")
            .amount("4 cases of each property")
            .set("CARGO_TARGET_DIR", "target/miri")
            .tests(),
    );
}

fn loom(row: &Row, report: &mut Report, arguments: &DeepArguments) {
    let line = format!("cargo test --release {WITH_LOOM} --lib -- --test-threads 1");
    report.run(
        &row.step(&line)
            .set("RUSTFLAGS", "--cfg loom")
            .set("LOOM_MAX_PREEMPTIONS", if arguments.quick { "2" } else { "3" })
            .set("CARGO_TARGET_DIR", "target/loom")
            .tests(),
    );
}

/// Compiles a planted bug with `flags` and runs it: the sanitizer has to say `finding`.
fn planted(report: &mut Report, file: &str, rustc: &str, flags: &str, finding: &str, set: &Sets) {
    let name = format!("planted {file}");
    let program = format!("target/planted-{file}");
    let line = format!(
        "{rustc} --edition 2024 -Copt-level=1 {flags} xtask/planted/{file}.rs -o {program}"
    );
    let with = |step: Step| set.iter().fold(step, |step, (key, value)| step.set(key, value));
    let compiled = with(Step::new(&name, &line)).minutes(5).run();
    if compiled.passed() {
        report.run(&with(Step::new(&name, &program)).minutes(5).fails_with(finding));
    } else {
        report.keep(compiled);
    }
}

type Sets = Vec<(&'static str, String)>;

/// The pinned compiler brings the runtime; a standard library without instruments misses what
/// happens inside it and nothing else.
fn address_sanitizer(row: &Row, report: &mut Report, _: &DeepArguments) {
    let set: Sets = vec![("RUSTC_BOOTSTRAP", "1".to_owned())];
    let finding = "AddressSanitizer: heap-buffer-overflow";
    planted(report, "overflow", "rustc", "-Zsanitizer=address", finding, &set);
    let line = format!("cargo test --target {TARGET} {RAW} --lib --tests --no-fail-fast");
    report.run(
        &row.step(&line)
            .set("RUSTC_BOOTSTRAP", "1")
            .set("RUSTFLAGS", "-Zsanitizer=address")
            .set("PROPTEST_CASES", "32")
            .amount("32 cases of each property")
            .set("CARGO_TARGET_DIR", "target/address-sanitizer")
            .tests(),
    );
}

/// Without an instrumented standard library it reports races that are none; and where memory is
/// unmapped by a bare system call it does not hear of it, and takes the next mapping at the same
/// address for the one that is gone. So the C library, which it listens to, makes the calls here.
fn thread_sanitizer(row: &Row, report: &mut Report, _: &DeepArguments) {
    let Some(compiler) = tools::with_library_source() else {
        let reason = "needs the standard library's source: `cargo xtask setup --deep`, or \
                      `rustup component add rust-src`";
        report.skip(row.name, reason);
        return;
    };
    let rustc = compiler.rustc.display().to_string();
    let flags = "-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer";
    let finding = "ThreadSanitizer: data race";
    planted(report, "race", &rustc, flags, finding, &compiler.environment);
    let quiet = root().join("xtask/planted/thread-sanitizer.txt");
    let line =
        format!("cargo test -Zbuild-std --target {TARGET} {THREADED} --lib --tests --no-fail-fast");
    let step = compiler
        .environment
        .iter()
        .fold(row.step(&line), |step, (key, value)| step.set(key, value));
    report.run(
        &step
            .set("RUSTFLAGS", "-Zsanitizer=thread --cfg rustix_use_libc")
            .set("TSAN_OPTIONS", &format!("suppressions={}", quiet.display()))
            .set("PROPTEST_CASES", "16")
            .amount("16 cases of each property")
            .set("CARGO_TARGET_DIR", "target/thread-sanitizer")
            .tests(),
    );
}

fn fuzz(row: &Row, report: &mut Report, arguments: &DeepArguments) {
    if !tools::has_cargo_fuzz() {
        let reason = "needs cargo-fuzz: `cargo xtask setup --deep`; the same decoders run in the \
                      mutations row";
        report.skip(row.name, reason);
        return;
    }
    let Ok(targets) = std::fs::read_dir(root().join("fuzz/fuzz_targets")) else {
        report.skip(row.name, "no fuzz targets");
        return;
    };
    let mut names: Vec<String> = targets
        .flatten()
        .filter_map(|entry| Some(entry.path().file_stem()?.to_str()?.to_owned()))
        .collect();
    names.sort();
    let seconds = if arguments.quick { 20 } else { arguments.fuzz_minutes * 60 };
    for target in names {
        let name = format!("fuzz {target}");
        let asked = arguments.only.as_deref().is_none_or(|only| name.contains(only));
        if !asked {
            continue;
        }
        let seeds = Step::new(
            &name,
            &format!(
                "cargo run --quiet --profile deep --package beeline-verify-fuzz --example seeds -- \
                 {target} fuzz/corpus/{target}"
            ),
        )
        .minutes(20)
        .run();
        if !seeds.passed() {
            report.keep(seeds);
            continue;
        }
        report.run(
            &Step::new(
                &name,
                &format!(
                    "cargo fuzz run {target} -- -max_total_time={seconds} -timeout=20 \
                     -max_len=65536 -rss_limit_mb=4096"
                ),
            )
            // What cargo-fuzz asks of the compiler is not stable.
            .set("RUSTC_BOOTSTRAP", "1")
            .set("PATH", &tools::path())
            .minutes(arguments.fuzz_minutes + 20),
        );
    }
}

//! `deep`: what takes longer than a change should wait for.
//!
//! Every row says how much it ran: tests, and below them the checkers' own counts of executions,
//! seeds, crash images, rounds and inputs; and of how many minutes. The counts are meant for
//! rows that take half of their time or less on two cores, building included; not every row was
//! timed. `--quick` is about a tenth of everything, to see that every row works.

use crate::lab;
use crate::root;
use crate::step::{Report, Step, works};
use crate::tools;

/// What `deep` takes.
#[derive(Debug, clap::Args)]
pub struct DeepArguments {
    /// Run only the rows whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Minutes for each decoder, once with mutations and once guided by coverage.
    #[arg(long, default_value_t = 5, value_name = "MINUTES")]
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
const WITH_LOOM: &str = "--package beeline-ring";
/// Crates that touch raw memory.
const RAW: &str = "--package beeline-os --package beeline-ring --package beeline-pmem \
                   --package beeline-fabric-engine --package beeline-fabric-shm \
                   --package beeline-fabric-tcp --package beeline-kv \
                   --package beeline-verify-one-sided";
/// Crates whose threads share memory within one process.
const THREADED: &str = "--package beeline-ring --package beeline-pmem --package beeline-kv \
                        --package beeline-fabric-tcp --package beeline-node";
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// The command.
pub fn run(arguments: &DeepArguments) -> Report {
    let mut report = Report::default();
    let wanted = |name: &str| {
        let only = arguments.only.as_deref();
        only.is_none_or(|only| name.contains(only) || only.starts_with(name))
    };
    if wanted("miri") {
        miri(&mut report);
    }
    if wanted("loom") {
        loom(&mut report, arguments);
    }
    if wanted("address sanitizer") {
        address_sanitizer(&mut report);
    }
    if wanted("thread sanitizer") {
        thread_sanitizer(&mut report);
    }
    if ["hostile streams", "kills and faults", "wide"].into_iter().any(wanted) {
        let line = "cargo build --profile deep --package beeline";
        report.run(&Step::new("program", line).minutes(30));
    }
    if wanted("hostile streams") {
        report.run(
            &shown("hostile streams", "--package beeline-fabric-tcp --test hostile", arguments)
                .minutes(20),
        );
    }
    if wanted("kills and faults") {
        report.run(
            &shown("kills and faults", "--package beeline-verify-clients", arguments).minutes(60),
        );
    }
    if wanted("mutations") {
        let seconds = if arguments.quick { 5 } else { arguments.fuzz_minutes * 60 };
        report.run(
            &shown("mutations", "--package beeline-verify-fuzz", arguments)
                .set("BEELINE_FUZZ_SECONDS", &seconds.to_string())
                .minutes(15 + 8 * arguments.fuzz_minutes),
        );
    }
    if wanted("log seeds") {
        let what = "--package beeline-verify-log --lib --test clusters --test planted_bugs \
                    --test over_fabric --test servers";
        report.run(&shown("log seeds", what, arguments).minutes(30));
    }
    if wanted("log processes") {
        let what = "--package beeline-verify-log --test processes --test cut_off";
        report.run(&shown("log processes", what, arguments).minutes(30));
    }
    if wanted("wide") {
        let most = "--workspace --no-fail-fast --exclude beeline-verify-clients \
                    --exclude beeline-verify-fuzz --exclude beeline-verify-log";
        report.run(&shown("wide seeds, crash points", most, arguments).minutes(90));
    }
    if wanted("fuzz") {
        fuzz(&mut report, arguments);
    }
    if wanted("lab") {
        lab::suites::deep(&mut report);
    }
    report
}

/// Tests in their long form, with what they print.
fn shown(name: &str, what: &str, arguments: &DeepArguments) -> Step {
    let program = root().join("target/deep/beeline");
    let cases = if arguments.quick { 100 } else { arguments.cases };
    let step = Step::new(name, &format!("cargo test --profile deep {what} -- --show-output"))
        .amount(&format!("{cases} cases of each property that names no number of its own"))
        .set("BEELINE_PROGRAM", &program.to_string_lossy())
        .set("BEELINE_ROUNDS", &(if arguments.quick { 20 } else { arguments.rounds }).to_string())
        .set("PROPTEST_CASES", &cases.to_string())
        .tests();
    if arguments.quick { step } else { step.set("BEELINE_DEEP", "1") }
}

fn miri(report: &mut Report) {
    if !works("cargo +nightly miri --version") {
        let reason = "needs `rustup +nightly component add miri rust-src`: Miri comes with rustup \
                      only, not from crates.io, PyPI or Debian";
        report.skip("miri", reason);
        return;
    }
    report.run(
        &Step::new("miri", &format!("cargo +nightly miri test {ON_THE_HEAP} --lib"))
            .set("MIRIFLAGS", "-Zmiri-disable-isolation")
            .set("PROPTEST_CASES", "16")
            .amount("16 cases of each property")
            .set("CARGO_TARGET_DIR", "target/miri")
            .minutes(20)
            .tests(),
    );
}

fn loom(report: &mut Report, arguments: &DeepArguments) {
    let line = format!("cargo test --release {WITH_LOOM} --lib -- --test-threads 1");
    report.run(
        &Step::new("loom", &line)
            .set("RUSTFLAGS", "--cfg loom")
            .set("LOOM_MAX_PREEMPTIONS", if arguments.quick { "2" } else { "3" })
            .set("CARGO_TARGET_DIR", "target/loom")
            .minutes(20)
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
fn address_sanitizer(report: &mut Report) {
    let set: Sets = vec![("RUSTC_BOOTSTRAP", "1".to_owned())];
    let finding = "AddressSanitizer: heap-buffer-overflow";
    planted(report, "overflow", "rustc", "-Zsanitizer=address", finding, &set);
    let line = format!("cargo test --target {TARGET} {RAW} --lib --tests");
    report.run(
        &Step::new("address sanitizer", &line)
            .set("RUSTC_BOOTSTRAP", "1")
            .set("RUSTFLAGS", "-Zsanitizer=address")
            .set("PROPTEST_CASES", "32")
            .amount("32 cases of each property")
            .set("CARGO_TARGET_DIR", "target/address-sanitizer")
            .minutes(30)
            .tests(),
    );
}

/// Without an instrumented standard library it reports races that are none; and where memory is
/// unmapped by a bare system call it does not hear of it, and takes the next mapping at the same
/// address for the one that is gone. So the C library, which it listens to, makes the calls here.
fn thread_sanitizer(report: &mut Report) {
    let name = "thread sanitizer";
    let Some(compiler) = tools::with_library_source() else {
        let reason = "needs the standard library's source: `cargo xtask setup --deep`, or \
                      `rustup component add rust-src`";
        report.skip(name, reason);
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
        .fold(Step::new(name, &line), |step, (key, value)| step.set(key, value));
    report.run(
        &step
            .set("RUSTFLAGS", "-Zsanitizer=thread --cfg rustix_use_libc")
            .set("TSAN_OPTIONS", &format!("suppressions={}", quiet.display()))
            .set("PROPTEST_CASES", "16")
            .amount("16 cases of each property")
            .set("CARGO_TARGET_DIR", "target/thread-sanitizer")
            .minutes(30)
            .tests(),
    );
}

fn fuzz(report: &mut Report, arguments: &DeepArguments) {
    if !tools::has_cargo_fuzz() {
        let reason = "needs cargo-fuzz: `cargo xtask setup --deep`; the same decoders run in the \
                      mutations row";
        report.skip("fuzz", reason);
        return;
    }
    let Ok(targets) = std::fs::read_dir(root().join("fuzz/fuzz_targets")) else {
        report.skip("fuzz", "no fuzz targets");
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

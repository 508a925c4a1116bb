//! `deep`: what takes longer than a change should wait for.

use crate::lab;
use crate::root;
use crate::step::{Report, Step, works};

/// What `deep` takes.
#[derive(Debug, clap::Args)]
pub struct DeepArguments {
    /// Run only the rows whose name contains this.
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Minutes for each fuzzing target.
    #[arg(long, default_value_t = 5)]
    fuzz_minutes: u64,
}

/// Crates whose rings and codecs run on the heap, so that Miri can follow them.
const ON_THE_HEAP: &str = "--package beeline-ring --package beeline-wire --package beeline-env";
/// Crates with loom models.
const WITH_LOOM: &str = "--package beeline-ring";
/// Crates that touch raw memory.
const RAW: &str = "--package beeline-os --package beeline-ring --package beeline-pmem \
                   --package beeline-fabric-shm --package beeline-fabric-tcp";

/// The command.
pub fn run(arguments: &DeepArguments) -> Report {
    let mut report = Report::default();
    let wanted =
        |name: &str| arguments.only.as_ref().is_none_or(|only| name.contains(only.as_str()));
    if wanted("miri") {
        miri(&mut report);
    }
    if wanted("loom") {
        report.run(
            &Step::new("loom", &format!("cargo test --release {WITH_LOOM} --lib --tests"))
                .set("RUSTFLAGS", "--cfg loom")
                .set("LOOM_MAX_PREEMPTIONS", "3")
                .set("CARGO_TARGET_DIR", "target/loom")
                .minutes(60)
                .tests(),
        );
    }
    if wanted("address sanitizer") {
        sanitizer(&mut report, "address sanitizer", "address");
    }
    if wanted("thread sanitizer") {
        thread_sanitizer(&mut report);
    }
    if wanted("wide") {
        report.run(
            &Step::new(
                "wide seeds, crash points, kills",
                "cargo test --release --workspace --no-fail-fast",
            )
            .set("BEELINE_DEEP", "1")
            .set("PROPTEST_CASES", "20000")
            .minutes(180)
            .tests(),
        );
    }
    if wanted("fuzz") {
        fuzz(&mut report, arguments.fuzz_minutes);
    }
    if wanted("lab") {
        lab::suites::deep(&mut report);
    }
    report
}

fn miri(report: &mut Report) {
    if !works("cargo +nightly miri --version") {
        report.skip("miri", "needs `rustup +nightly component add miri rust-src`");
        return;
    }
    report.run(
        &Step::new("miri", &format!("cargo +nightly miri test {ON_THE_HEAP} --lib"))
            .set("MIRIFLAGS", "-Zmiri-disable-isolation")
            .set("PROPTEST_CASES", "16")
            .set("CARGO_TARGET_DIR", "target/miri")
            .minutes(60)
            .tests(),
    );
}

fn sanitizer(report: &mut Report, name: &str, kind: &str) {
    if !works("cargo +nightly --version") {
        report.skip(name, "needs a nightly toolchain");
        return;
    }
    report.run(
        &Step::new(
            name,
            &format!("cargo +nightly test --target x86_64-unknown-linux-gnu {RAW} --lib --tests"),
        )
        .set("RUSTFLAGS", &format!("-Zsanitizer={kind}"))
        .set("CARGO_TARGET_DIR", &format!("target/{kind}-sanitizer"))
        .minutes(60)
        .tests(),
    );
}

fn thread_sanitizer(report: &mut Report) {
    let name = "thread sanitizer";
    // Without an instrumented standard library it reports races that are none.
    let source = "rustc +nightly --print sysroot";
    let sysroot = std::process::Command::new("sh").args(["-c", source]).output();
    let there = sysroot.ok().is_some_and(|output| {
        let root = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        std::path::Path::new(&root).join("lib/rustlib/src/rust/library").is_dir()
    });
    if !there {
        report.skip(name, "needs `rustup +nightly component add rust-src`");
        return;
    }
    report.run(
        &Step::new(
            name,
            "cargo +nightly test -Zbuild-std --target x86_64-unknown-linux-gnu \
             --package beeline-ring --lib --tests",
        )
        .set("RUSTFLAGS", "-Zsanitizer=thread")
        .set("CARGO_TARGET_DIR", "target/thread-sanitizer")
        .minutes(60)
        .tests(),
    );
}

fn fuzz(report: &mut Report, minutes: u64) {
    let Ok(targets) = std::fs::read_dir(root().join("fuzz/fuzz_targets")) else {
        report.skip("fuzz", "no fuzz targets; the decoders' property tests run in the wide row");
        return;
    };
    if !works("cargo +nightly fuzz --version") {
        report.skip("fuzz", "needs `cargo install cargo-fuzz` and a nightly toolchain");
        return;
    }
    for target in targets.flatten() {
        let path = target.path();
        let Some(name) = path.file_stem().and_then(|stem| stem.to_str()) else { continue };
        let seconds = minutes * 60;
        report.run(
            &Step::new(
                &format!("fuzz {name}"),
                &format!("cargo +nightly fuzz run {name} -- -max_total_time={seconds}"),
            )
            .minutes(minutes + 15),
        );
    }
}

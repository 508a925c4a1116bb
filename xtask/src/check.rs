//! `check` and `test`.

use crate::lab;
use crate::skips::Machine;
use crate::step::{Report, Step};
use crate::target;

/// What `check` takes.
#[derive(Debug, clap::Args)]
pub struct CheckArguments {
    /// Fail where a test skipped itself that this machine could run: with the rights that it is seen
    /// to give, and what `setup` could fetch.
    #[arg(long)]
    no_skips: bool,
}

/// Format, lints, documentation, then all fast tests, the layer test among them; then,
/// where guests can boot, one with an RDMA device and an NVDIMM.
pub fn check(arguments: &CheckArguments) -> Report {
    let mut report = Report::default();
    report.run(&Step::new("format", "cargo fmt --all --check"));
    report.run(&Step::new(
        "lints",
        "cargo clippy --quiet --workspace --all-targets -- --deny warnings",
    ));
    report.run(
        &Step::new(
            "documentation",
            "cargo doc --quiet --workspace --no-deps --document-private-items",
        )
        // Private items are documented too, so links to them lead somewhere.
        .set("RUSTDOCFLAGS", "--deny warnings --allow rustdoc::private_intra_doc_links"),
    );
    tests(&mut report);
    lab::suites::short(&mut report);
    if arguments.no_skips {
        report.refuse_skips(&Machine::probe());
    }
    report
}

/// All fast tests.
pub fn test() -> Report {
    let mut report = Report::default();
    tests(&mut report);
    report
}

fn tests(report: &mut Report) {
    // The integration tests of apps/beeline make cargo build the program itself as well; the
    // end-to-end suites use that one.
    let program = target().join("debug/beeline");
    let common = |step: Step| step.set("BEELINE_PROGRAM", &program.to_string_lossy()).tests();
    report.run(&common(Step::new(
        "layers and tidiness",
        "cargo test --quiet --package beeline-verify-architecture",
    )));
    report.run(&common(Step::new(
        "tests",
        "cargo test --workspace --no-fail-fast --exclude beeline-verify-architecture",
    )));
}

//! One guest with a soft-RoCE device.

use std::time::Duration;

use super::{Binaries, Rows};
use crate::lab::guest::{Guest, Options};
use crate::root;
use crate::step::Report;

const BOUND: Duration = Duration::from_secs(600);

/// A guest with a soft-RoCE device; the conformance suite registers much memory.
pub(super) fn options() -> Options {
    Options { rdma: true, mebibytes: 3072, ..Options::plain() }
}

pub(super) fn run(report: &mut Report, binaries: &Binaries) {
    // With an NVDIMM, so that memory of a DAX file system meets the device.
    super::with_nvdimm(report, "verbs", options(), |rows, guest| suites(rows, guest, binaries));
}

fn suites(rows: &mut Rows<'_>, guest: &mut Guest, binaries: &Binaries) {
    rows.check("device", || {
        let found = guest.run("ibv_devinfo -d rxe0", Duration::from_secs(60))?;
        let active = found.output.contains("PORT_ACTIVE");
        Ok(if active { Ok("rxe0 is active".to_owned()) } else { Err(format!("{found:?}")) })
    });
    // The tools' own word that the device works: what fails here is not ours.
    for tool in ["ib_write_lat", "ib_read_lat", "ib_atomic_lat"] {
        rows.check(tool, || {
            let call = format!("{tool} -d rxe0 -x 1 -F -n 100");
            let call = if tool == "ib_atomic_lat" { call } else { format!("{call} -s 8") };
            let both = format!("{call} >/run/server 2>&1 & sleep 1; {call} $LAB_SELF && wait");
            let done = guest.run(&both, Duration::from_secs(90))?;
            let result = done.output.lines().find(|line| line.trim_start().starts_with("8 "));
            Ok(match (done.status, result) {
                (0, Some(result)) => Ok(result.trim().to_owned()),
                _ => Err(format!("{done:?}")),
            })
        });
    }
    conformance(rows, guest, binaries);
    // The tiny setting of the benchmark: its operations and its checks, no figure.
    if super::build_program() {
        for url in ["shm://", "tcp://", "ntb://", "verbs://"] {
            rows.check(&format!("key-value, {url}"), || {
                let bench = "bench kv --quick --parts headline --repetitions 1 --fabric";
                let call = format!("{}/target/debug/beeline {bench} {url}", root().display());
                let done = guest.run(&call, BOUND)?;
                Ok(match done.status {
                    0 => Ok(done.output.trim().to_owned()),
                    _ => Err(format!("{}\n{}", done.output, done.errors)),
                })
            });
        }
    }
    // The same verbs, messages and bytes for an operation over every provider, this device's too.
    if let Some(counts) = binaries.find("beeline-verify-one-sided", "counts") {
        let needed = "BEELINE_NEEDS_RDMA=1";
        rows.tests(guest, counts, &[needed], &["--test-threads", "1"], BOUND);
    }
    for package in ["beeline-fabric-tcp", "beeline-fabric-shm"] {
        if let Some(binary) = binaries.find(package, "conformance") {
            rows.tests(guest, binary, &[], &[], BOUND);
        }
    }
}

/// Every test of the provider, in a guest with a device.
pub(super) fn conformance(rows: &mut Rows<'_>, guest: &mut Guest, binaries: &Binaries) {
    let provider = binaries.of("beeline-fabric-verbs");
    if provider.is_empty() {
        rows.skip("verbs conformance", "there is no verbs provider yet");
    }
    for binary in provider {
        rows.tests(guest, binary, &[], &["--test-threads", "1"], BOUND);
    }
}

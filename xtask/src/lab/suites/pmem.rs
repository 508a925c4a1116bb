//! Durable memory on an NVDIMM: the suites of the pool, every file of theirs on DAX.

use std::time::Duration;

use super::{Binaries, Rows, with_nvdimm};
use crate::lab::guest::{Guest, Options};
use crate::step::Report;

pub(super) fn run(report: &mut Report, binaries: &Binaries) {
    with_nvdimm(report, "pmem", Options::plain(), |rows, guest| suites(rows, guest, binaries));
}

/// The suites, in a guest with an NVDIMM.
pub(super) fn suites(rows: &mut Rows<'_>, guest: &mut Guest, binaries: &Binaries) {
    rows.check("DAX", || {
        let mounted = guest.run("grep /mnt/dax /proc/mounts", Duration::from_secs(30))?;
        let dax = mounted.output.contains("dax=always");
        let text = mounted.output.trim().to_owned();
        Ok(if dax { Ok(text) } else { Err(format!("not DAX: {text}")) })
    });
    for binary in binaries.of("beeline-pmem") {
        let environment = ["TMPDIR=/mnt/dax", "BEELINE_POOL_KIND=dax"];
        rows.tests(guest, binary, &environment, &[], Duration::from_secs(300));
    }
}

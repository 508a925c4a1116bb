//! The power cut in the middle of a load.
//!
//! A guest runs the stress suite's child: threads that change a store and say, before, what they
//! are about to do and, after, what was committed. Their words leave the guest as they are written.
//! Then QEMU is ended, and the next guest on the same memory judges: what was acknowledged has to
//! be there, what was deleted stays deleted, and no batch is there in part.
//!
//! On the NVDIMM nothing that was stored is ever lost (its file outlives QEMU), so what this shows
//! is that files, names and mappings are there. On the disk everything is lost that was not
//! synchronised, and a store at a lower level has to lose something: the test of the test.

use std::path::Path;
use std::time::Duration;

use super::{Binaries, Binary, Rows};
use crate::lab::error::LabError;
use crate::lab::exec::line;
use crate::lab::guest::{Finished, Guest, Memory, Options};
use crate::step::Report;

/// Where a store lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Medium {
    Nvdimm,
    Disk,
}

impl Medium {
    fn pool(self) -> &'static str {
        match self {
            Self::Nvdimm => "/mnt/dax/pool",
            Self::Disk => "/mnt/disk/pool",
        }
    }

    /// How the pool describes itself.
    fn kind(self) -> &'static str {
        match self {
            Self::Nvdimm => "pool: dax, durability power",
            Self::Disk => "pool: file, durability power",
        }
    }
}

pub(super) fn run(report: &mut Report, binaries: &Binaries) {
    let mut rows = Rows { report, suite: "power" };
    let Some(stress) = binaries.find("beeline-verify-crash", "stress") else {
        return rows.skip("cut", "the stress suite is not there");
    };
    let rounds = 4;
    rows.check("cut, on the NVDIMM", || {
        cut(stress, Medium::Nvdimm, "power", rounds).map(|judged| passed(judged, Medium::Nvdimm))
    });
    rows.check("cut, on a disk", || {
        cut(stress, Medium::Disk, "power", rounds).map(|judged| passed(judged, Medium::Disk))
    });
    rows.check("a lower level loses", || {
        let judged = cut(stress, Medium::Disk, "process", 1)?;
        let lost = judged.errors.lines().find(|line| line.contains("acknowledged Put"));
        Ok(match (judged.status, lost) {
            (0, _) => Err("nothing was lost: the power was not cut".to_owned()),
            (_, Some(lost)) => Ok(format!("the judge found: {lost}")),
            _ => Err(format!("{}\n{}", judged.output, judged.errors)),
        })
    });
}

/// The judge's verdict, with its figures where there is nothing to complain of.
fn passed(judged: Finished, medium: Medium) -> Result<String, String> {
    let found = |start: &str| {
        judged.output.lines().find_map(|line| line.find(start).map(|at| line[at..].to_owned()))
    };
    match (judged.status, found("judged: "), found(medium.kind())) {
        (0, Some(figures), Some(pool)) => Ok(format!("{figures}; {pool}")),
        _ => Err(format!("{}\n{}", judged.output, judged.errors)),
    }
}

/// Loads and cuts so many times; what the last judge said.
fn cut(
    stress: &Binary,
    medium: Medium,
    durability: &str,
    rounds: u64,
) -> Result<Finished, LabError> {
    let folder = tempfile::tempdir().map_err(LabError::host("making a folder"))?;
    let memory = Memory { path: folder.path().join("medium"), mebibytes: 512 };
    let mut said = Vec::new();
    for round in 0..rounds {
        let mut guest = boot(medium, &memory)?;
        let orders = orders(medium, durability, round);
        guest.start(&command(stress, "child::child", &[orders]))?;
        // Once it works, it works for a while; a few seconds more each round.
        let committed = |output: &str| output.contains("@A ");
        guest.output_after(0, Duration::from_secs(120), "an acknowledgement", committed)?;
        std::thread::sleep(Duration::from_millis(3000 + 1700 * round));
        let text = guest.cut_power();
        let file = folder.path().join(format!("said.{round}"));
        std::fs::write(&file, text).map_err(LabError::host("keeping what was said"))?;
        said.push(file);
    }
    let mut guest = boot(medium, &memory)?;
    let files: Vec<String> = said.iter().map(|file| file.to_string_lossy().into_owned()).collect();
    let said = format!("BEELINE_STRESS_SAID={}", files.join(":"));
    let orders = orders(medium, durability, rounds);
    guest.run(&command(stress, "judge::judge", &[orders, said]), Duration::from_secs(120))
}

fn boot(medium: Medium, memory: &Memory) -> Result<Guest, LabError> {
    let there = |wanted: Medium| (medium == wanted).then(|| memory.clone());
    Guest::boot(&Options {
        nvdimm: there(Medium::Nvdimm),
        disk: there(Medium::Disk),
        ..Options::plain()
    })
}

/// What the suite's programs are told: seed, shards, segments, prepared segments, the clock (far
/// later each round), milliseconds (more than there will be), no planted bug, level, folder.
fn orders(medium: Medium, durability: &str, round: u64) -> String {
    let (seed, shards, clock) = (round + 1, 1 + round % 3, (round + 1) * 1_000_000_000);
    let pool = medium.pool();
    format!("BEELINE_STRESS_CHILD={seed} {shards} 20 2 {clock} 600000 0 {durability} {pool}")
}

fn command(stress: &Binary, test: &str, environment: &[String]) -> String {
    let program = stress.program.to_string_lossy().into_owned();
    let words = [&program, "--exact", test, "--nocapture", "--test-threads=1"];
    line(Path::new(&stress.folder), environment, &words.map(str::to_owned))
}

//! Guests joined by a memory window: looked at by a timer, then with interrupts.

use std::path::Path;
use std::time::Duration;

use super::peers::{Check, SOON, World, pair};
use super::{Binaries, Binary, Rows};
use crate::lab::bell::Server;
use crate::lab::error::LabError;
use crate::lab::exec::line;
use crate::lab::guest::{Guest, Link, Memory, Options};
use crate::step::Report;

const MEBIBYTES: u64 = 64;

pub(super) fn run(report: &mut Report, binaries: &Binaries) {
    let mut rows = Rows { report, suite: "window" };
    let Some(programs) = binaries.find("beeline-verify-lab", "guests") else {
        return rows.skip("ntb", "the guests' programs are not there");
    };
    for (how, options) in
        [("by a timer", plain as fn(&Path) -> Made), ("by interrupts", with_interrupts)]
    {
        rows.check(&format!("queue pair over ntb, woken {how}"), || {
            let folder = tempfile::tempdir().map_err(LabError::host("making a folder"))?;
            let devices = ["ntb://WINDOW?side=0", "ntb://WINDOW?side=1"];
            pair(programs, options(folder.path())?, &devices, |_| Ok(()))
        });
        if let Some(test) = binaries.find("beeline-fabric-ntb", "two_hosts") {
            rows.check(&format!("beeline-fabric-ntb two_hosts, woken {how}"), || {
                let folder = tempfile::tempdir().map_err(LabError::host("making a folder"))?;
                both(test, &options(folder.path())?)
            });
        }
    }
    if super::build_program() {
        node(&mut rows, programs);
    } else {
        rows.check("node", || Ok(Err("beeline does not build".to_owned())));
    }
    let Some(conformance) = binaries.find("beeline-fabric-ntb", "conformance_fixed") else {
        return;
    };
    let Ok(folder) = tempfile::tempdir() else { return };
    match plain(folder.path()).and_then(|options| Guest::boot(&options)) {
        Ok(mut guest) => rows.tests(
            &mut guest,
            conformance,
            &[],
            &["--test-threads", "1"],
            Duration::from_secs(600),
        ),
        Err(error) => rows.check("boot", || Err(error)),
    }
}

pub(super) type Made = Result<Options, LabError>;

pub(super) fn plain(folder: &Path) -> Made {
    let window = Memory { path: folder.join("window"), mebibytes: MEBIBYTES };
    Ok(Options { window: Some(window), ..Options::plain() })
}

pub(super) fn with_interrupts(folder: &Path) -> Made {
    let server = Server::start(folder, MEBIBYTES);
    let server = server.map_err(LabError::host("serving a window"))?;
    Ok(Options { bell: Some(server.socket().to_owned()), ..Options::plain() })
}

/// A test of which each of two guests runs one half.
fn both(test: &Binary, options: &Options) -> Check {
    let folder = tempfile::tempdir().map_err(LabError::host("making a folder"))?;
    let wire = folder.path().join("wire");
    let near = Options { link: Link::Listen(wire.clone()), ..options.clone() };
    let mut near = Guest::boot(&near)?;
    let far = Options { number: 1, link: Link::Call(wire), ..options.clone() };
    let mut far = Guest::boot(&far)?;
    let command = line(&test.folder, &[], &[test.program.to_string_lossy().into_owned()]);
    near.start(&command)?;
    far.start(&command)?;
    let ends = [near.finish(SOON)?, far.finish(SOON)?];
    let failed = ends.iter().find(|end| end.status != 0 || end.errors.contains("skipped"));
    Ok(match failed {
        Some(end) => Err(format!("{}\n{}", end.output, end.errors)),
        None => Ok(ends[0].errors.trim().to_owned()),
    })
}

/// A node that serves one end of the window, a client that finds the other, and what befalls them.
fn node(rows: &mut Rows<'_>, programs: &Binary) {
    let booted =
        tempfile::tempdir().map_err(LabError::host("making a folder")).and_then(|folder| {
            let options = with_interrupts(folder.path())?;
            Ok((World::boot(options)?, folder))
        });
    let (mut world, _folder) = match booted {
        Ok(booted) => booted,
        Err(error) => return rows.check("boot", || Err(error)),
    };
    rows.check("the window is found and chosen", || {
        world.chosen("over ntb, because both ends have a memory window")
    });
    if let Err(error) = world.start_client(programs, "ntb") {
        return rows.check("a client of a node", || Err(error));
    }
    rows.check("a client of a node", || world.works("first"));
    rows.check("interrupts", || {
        let count = "grep vfio-msix /proc/interrupts";
        let seen = [world.client.run(count, SOON)?, world.node.run(count, SOON)?];
        let raised = |line: &str| {
            let counts = line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok());
            counts.sum::<u64>()
        };
        let [client, node] = seen.map(|done| raised(&done.output));
        let found = format!("{client} in the client's guest, {node} in the node's");
        Ok(if client > 0 && node > 0 { Ok(found) } else { Err(found) })
    });
    rows.check("the network's cable pulled", || {
        world.node.cable(false)?;
        let works = world.works("through the window alone");
        world.node.cable(true)?;
        works
    });
    rows.check("the node's power cut", || match world.cut_power()? {
        Err(why) => Ok(Err(why)),
        Ok(broken) => {
            Ok(world.works("after its restart")?.map(|works| format!("{broken}; {works}")))
        }
    });
    rows.check("nothing wrong", || world.nothing_wrong());
}

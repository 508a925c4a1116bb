//! Two guests on one wire, and what happens when the wire or one of them fails.

use std::path::Path;
use std::time::Duration;

use super::{Binaries, Binary, Rows};
use crate::lab::error::LabError;
use crate::lab::exec::line;
use crate::lab::guest::{Finished, Guest, Link, Memory, Options};
use crate::root;
use crate::step::Report;

/// For what a guest does in a second or two.
pub(super) const SOON: Duration = Duration::from_secs(120);
/// The conformance suite, each call of whose far ends crosses the wire.
const APART: Duration = Duration::from_secs(1800);
/// The client's own bound, with what emulated processors and reconnecting add.
const NOTICED_MS: u64 = 30_000;
/// How `beeline` exits when it reaches nobody.
const UNREACHABLE: i32 = 3;

pub(super) type Check = Result<Result<String, String>, LabError>;

/// A node in guest 1, a client that puts and gets in guest 0; then a pair of guests for each
/// provider that crosses a wire.
pub(super) fn run(report: &mut Report, binaries: &Binaries) {
    let mut rows = Rows { report, suite: "peers" };
    let Some(programs) = binaries.find("beeline-verify-lab", "guests") else {
        return rows.skip("client", "the guests' programs are not there");
    };
    if !super::build_program() {
        return rows.check("node", || Ok(Err("beeline does not build".to_owned())));
    }
    device(&mut rows, programs);
    apart(&mut rows, binaries);
    for provider in ["verbs", "tcp"] {
        node(&mut rows, programs, provider);
    }
    rows.check("queue pair over tcp", || {
        let devices = ["tcp://10.9.0.1", "tcp://10.9.0.2"];
        pair(programs, Options::plain(), &devices, |guest| guest.cable(false))
    });
    rows.check("queue pair over verbs", || {
        let devices = ["verbs://", "verbs://"];
        pair(programs, super::verbs::options(), &devices, |guest| guest.cable(false))
    });
}

/// A node and its client over one provider, and everything that befalls them.
fn node(rows: &mut Rows<'_>, programs: &Binary, provider: &str) {
    let named = |row: &str| format!("{row}, {provider}");
    let machine = match provider {
        "verbs" => super::verbs::options(),
        _ => Options::plain(),
    };
    let booted = World::boot(machine).and_then(|mut world| {
        world.start_client(programs, provider)?;
        Ok(world)
    });
    let mut world = match booted {
        Ok(world) => world,
        Err(error) => return rows.check(&named("boot"), || Err(error)),
    };
    rows.check(&named("a client of a node"), || world.works("first"));
    rows.check(&named("loss and delay"), || {
        let shaped = world.client.run(
            "modprobe sch_netem && tc qdisc add dev eth0 root netem loss 3% delay 3ms",
            SOON,
        )?;
        if shaped.status != 0 {
            return Ok(Err(shaped.errors));
        }
        let seen = world.works("under loss");
        world.client.run("tc qdisc del dev eth0 root", SOON)?;
        seen
    });
    rows.check(&named("the cable pulled"), || {
        let broken = world.breaks(|world| world.node.cable(false));
        world.node.cable(true)?;
        Ok(match (broken?, world.works("plugged in again")?) {
            (Ok(broken), Ok(works)) => Ok(format!("{broken}; {works}")),
            (Err(why), _) | (_, Err(why)) => Err(why),
        })
    });
    rows.check(&named("the node's power cut"), || match world.cut_power()? {
        Err(why) => Ok(Err(why)),
        Ok(broken) => {
            Ok(world.works("after its restart")?.map(|works| format!("{broken}; {works}")))
        }
    });
    rows.check(&named("nothing wrong"), || world.nothing_wrong());
}

/// The conformance suite of verbs with one end in each guest: every second node of an item, and all
/// its peer processes, are in the other one.
fn apart(rows: &mut Rows<'_>, binaries: &Binaries) {
    let Some(conformance) = binaries.find("beeline-fabric-verbs", "conformance") else {
        return rows.skip("conformance between two guests", "there is no verbs provider");
    };
    let booted = tempfile::tempdir().map_err(LabError::host("making a folder"));
    let booted = booted.and_then(|folder| {
        let wire = folder.path().join("wire");
        let link = Link::Listen(wire.clone());
        let near = Guest::boot(&Options { link, ..super::verbs::options() })?;
        let link = Link::Call(wire);
        let mut far = Guest::boot(&Options { number: 1, link, ..super::verbs::options() })?;
        let port = ["BEELINE_CONFORMANCE_AGENT=4792".to_owned()];
        let agent = program(conformance, "conformance_peer_process", &port);
        far.start(&format!("({agent}) & true"))?;
        far.finish(SOON)?;
        Ok((near, far, folder))
    });
    let (mut near, _far, _folder) = match booted {
        Ok(booted) => booted,
        Err(error) => return rows.check("boot, for the conformance suite", || Err(error)),
    };
    let far = "BEELINE_CONFORMANCE_FAR=10.9.0.2:4792";
    rows.tests(&mut near, conformance, &[far], &["--test-threads", "1"], APART);
}

/// The node's RDMA device is removed under its clients, and comes back.
fn device(rows: &mut Rows<'_>, programs: &Binary) {
    let mut world = match World::boot(super::verbs::options()) {
        Ok(world) => world,
        Err(error) => return rows.check("boot, for a device that goes", || Err(error)),
    };
    // Beside the client that takes the best there is, one that insists on tcp.
    let url = "BEELINE_LAB_NODE=tcp://10.9.0.2:4790".to_owned();
    let beside = [url, "BEELINE_LAB_PREFIX=beside".to_owned()];
    let beside = program(programs, "node::client", &beside);
    rows.check("the RDMA device is found and chosen", || {
        world.client.start(&format!("({beside} >/run/beside) & true"))?;
        world.client.finish(SOON)?;
        world.start_client(programs, "auto")?;
        let works = world.works("first")?;
        Ok(works.and(world.chosen("over verbs, because both ends have an RDMA device")?))
    });
    rows.check("the node's RDMA device removed: on over tcp", || {
        // Returns when everybody has let go of the device, so the client's connection over it is
        // gone by then; the client dials anew inside a call, which need not fail.
        world.node.run("(rdma link delete rxe0; echo done >/run/removed) & true", SOON)?;
        let gone = "for i in $(seq 600); do [ -e /run/removed ] && exit; sleep 0.1; done; exit 1";
        if world.node.run(gone, SOON)?.status != 0 {
            return Ok(Err("the node keeps the device".to_owned()));
        }
        let works = world.works("with the device gone")?;
        let chosen = world.chosen("over tcp, because")?;
        Ok(works.and_then(|works| chosen.map(|chosen| format!("{works}; {chosen}"))))
    });
    rows.check("the device is back: over verbs again", || {
        let add = "rdma link add rxe0 type rxe netdev eth0 && sleep 2";
        let added = world.node.run(add, SOON)?;
        if added.status != 0 {
            return Ok(Err(added.errors));
        }
        world.chosen("over verbs, because both ends have an RDMA device")
    });
    rows.check("the client over tcp noticed nothing", || {
        // The other client's lines come in between: what is counted goes to the errors. Before its
        // first success the node may not have been there yet.
        let counted = "grep -c @ok /run/beside >&2; \
                       ! sed -n '/@ok/,$p' /run/beside | grep -E '@error|@wrong' >&2";
        let counted = world.client.run(counted, SOON)?;
        let seen = counted.errors.trim().replace('\n', ", ");
        Ok(if counted.status == 0 { Ok(format!("{seen} acknowledged")) } else { Err(seen) })
    });
    rows.check("nothing wrong with the device gone and back", || world.nothing_wrong());
}

/// A node with a durable store, and its client.
pub(super) struct World {
    pub(super) client: Guest,
    pub(super) node: Guest,
    node_options: Options,
    /// The wire's socket and the NVDIMM's file.
    _folder: tempfile::TempDir,
}

impl World {
    /// A guest with a node, and the guest for its client.
    pub(super) fn boot(machine: Options) -> Result<Self, LabError> {
        let folder = tempfile::tempdir().map_err(LabError::host("making a folder"))?;
        let wire = folder.path().join("wire");
        // The client's end stays; the node's calls it, again after a restart.
        let client = Options { link: Link::Listen(wire.clone()), ..machine.clone() };
        let client = Guest::boot(&client)?;
        let memory = Memory { path: folder.path().join("memory"), mebibytes: 512 };
        let link = Link::Call(wire);
        let node_options = Options { number: 1, link, nvdimm: Some(memory), ..machine };
        let node = start_node(&node_options)?;
        Ok(Self { client, node, node_options, _folder: folder })
    }

    /// The client that does not give up.
    pub(super) fn start_client(
        &mut self,
        programs: &Binary,
        provider: &str,
    ) -> Result<(), LabError> {
        let environment = [format!("BEELINE_LAB_NODE={provider}://10.9.0.2:4790")];
        let command = program(programs, "node::client", &environment);
        self.client.start(&format!("({command}) & true"))?;
        self.client.finish(SOON)?;
        Ok(())
    }

    /// A client that asks now is told `expected` of the choice of provider.
    pub(super) fn chosen(&mut self, expected: &str) -> Check {
        let put = "target/debug/beeline kv put seen here --verbose --connect auto://10.9.0.2:4790";
        let words: Vec<String> = put.split_whitespace().map(str::to_owned).collect();
        let put = line(&root(), &[], &words);
        let mut done = self.client.run(&put, SOON)?;
        // A node that has just been started does not listen yet, or still reads its store.
        for _ in 0..30 {
            if done.status != UNREACHABLE {
                break;
            }
            std::thread::sleep(Duration::from_secs(1));
            done = self.client.run(&put, SOON)?;
        }
        let said = done.errors.trim().to_owned();
        let as_expected = done.status == 0 && said.contains(expected);
        Ok(if as_expected { Ok(said) } else { Err(format!("{done:?}")) })
    }

    /// Nothing the client ever saw was wrong.
    pub(super) fn nothing_wrong(&self) -> Check {
        let said = self.client.output_after(0, SOON, "anything", |said| !said.is_empty())?;
        let wrong: Vec<&str> = said.lines().filter(|line| line.contains("@wrong")).collect();
        let ok = said.lines().filter(|line| line.contains("@ok")).count();
        Ok(if wrong.is_empty() {
            Ok(format!("{ok} puts acknowledged and read back"))
        } else {
            Err(wrong[..wrong.len().min(4)].join("\n"))
        })
    }

    /// Two hundred more operations succeed; none is wrong.
    pub(super) fn works(&mut self, when: &str) -> Check {
        let mark = self.client.mark();
        let count = |said: &str| said.matches("@ok").count();
        let bad = |said: &str| said.contains("@wrong");
        let enough = |said: &str| count(said) >= 200 || bad(said);
        let said = self.client.output_after(mark, SOON, "200 acknowledgements", enough)?;
        Ok(match said.lines().find(|line| bad(line)) {
            Some(wrong) => Err(wrong.to_owned()),
            None => Ok(format!("{when}: {} acknowledged", count(&said))),
        })
    }

    /// After `fault` an operation fails, within its bound.
    fn breaks(&mut self, fault: impl FnOnce(&mut Self) -> Result<(), LabError>) -> Check {
        let mark = self.client.mark();
        fault(self)?;
        self.failed_since(mark)
    }

    fn failed_since(&self, mark: usize) -> Check {
        let whole = |said: &str| said.rfind('\n').is_some_and(|end| said[..end].contains("@error"));
        let said = self.client.output_after(mark, SOON, "an error", whole)?;
        let error = said.lines().find_map(|line| line.split_once("@error ")).unwrap_or_default().1;
        let spent_ms = error.split(' ').next().and_then(|word| word.parse::<u64>().ok());
        Ok(match spent_ms {
            Some(ms) if ms <= NOTICED_MS => Ok(format!("noticed after {error}")),
            _ => Err(format!("not noticed within {NOTICED_MS} ms: {error}")),
        })
    }

    /// Ends the node's machine, and boots another on the same memory.
    pub(super) fn cut_power(&mut self) -> Check {
        let mark = self.client.mark();
        self.node.kill();
        let broken = self.failed_since(mark)?;
        self.node = start_node(&self.node_options)?;
        Ok(broken)
    }
}

fn start_node(options: &Options) -> Result<Guest, LabError> {
    let mut node = Guest::boot(options)?;
    let serve = "target/debug/beeline serve --data /mnt/dax/node --durability power --shards 1 \
                 --segment-size 1MiB --fabric-address 10.9.0.2:4790 --resp-address off \
                 --http-address off --documents-address off --without direct";
    let words: Vec<String> = serve.split_whitespace().map(str::to_owned).collect();
    let window = options.window.is_some() || options.bell.is_some();
    let window = if window { " --fabric-window \"$LAB_WINDOW\"" } else { "" };
    node.start(&format!("({}{window}) & true", line(&root(), &[], &words)))?;
    node.finish(SOON)?;
    Ok(node)
}

pub(super) fn program(binary: &Binary, test: &str, environment: &[String]) -> String {
    let program = binary.program.to_string_lossy().into_owned();
    let words = [&program, "--exact", test, "--nocapture", "--test-threads=1"];
    line(Path::new(&binary.folder), environment, &words.map(str::to_owned))
}

/// Runs the two ends of a queue pair on two guests: every kind of operation, then writes until
/// `fault` at the other guest's, and at last that guest's end: the pair has to break.
pub(super) fn pair(
    programs: &Binary,
    options: Options,
    devices: &[&str; 2],
    fault: impl FnOnce(&mut Guest) -> Result<(), LabError>,
) -> Check {
    let folder = tempfile::tempdir().map_err(LabError::host("making a folder"))?;
    let wire = folder.path().join("wire");
    let link = Link::Listen(wire.clone());
    let mut near = Guest::boot(&Options { link, ..options.clone() })?;
    let mut far = Guest::boot(&Options { number: 1, link: Link::Call(wire), ..options })?;
    let device = |number: usize| format!("BEELINE_LAB_DEVICE={}", devices[number]);
    far.start(&program(programs, "pair::pair", &[device(1)]))?;
    far.output_after(0, SOON, "listening", |said| said.contains("@listening"))?;
    let call = "BEELINE_LAB_CALL=10.9.0.2".to_owned();
    near.start(&program(programs, "pair::pair", &[device(0), call]))?;
    let writing = |said: &str| said.contains("@writing") || said.contains("FAILED");
    let said = near.output_after(0, SOON, "the operations", writing)?;
    let Some(done) = said.lines().find_map(|line| line.split_once("@operations ")) else {
        return Ok(Err(said));
    };
    fault(&mut far)?;
    far.kill();
    let Finished { output, errors, .. } = near.finish(SOON)?;
    Ok(match output.lines().find_map(|line| line.split_once("@broken ")) {
        Some(broken) => Ok(format!("{} operations; broken after (ms) {}", done.1, broken.1)),
        None => Err(format!("{output}\n{errors}")),
    })
}

//! A running program moves to another guest, and its connections with it: CRIU between two guests.

use std::time::{Duration, Instant};

use super::peers::{Check, SOON};
use super::{Binaries, Rows};
use crate::lab::error::LabError;
use crate::lab::exec::line;
use crate::lab::guest::{Finished, Guest, Link, Options};
use crate::root;
use crate::setup::is_here;
use crate::step::{Report, say};

const SCRIPT: &str = "verify/clients/python/sockets_migrate.py";
const CONTAINER: &str = "xtask/src/lab/guest/container.sh";
/// The address that moves with the server.
const SERVER: &str = "10.8.0.5";
/// The client's, which stays in guest 0.
const CLIENT: &str = "10.8.0.1";
/// CRIU on emulated processors takes some seconds each way.
const LONG: Duration = Duration::from_secs(240);
/// Bytes that have to come back after each move.
const ENOUGH: u64 = 300_000;
/// What the client's connections do, see the script.
const KINDS: &str = "pour,turns,quiet,young";

/// Programs that move other programs; only this suite needs them.
pub(in crate::lab) const PROGRAMS: &[(&str, &str)] = &[("criu", "criu"), ("nft", "nftables")];

/// Where the server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In a container of its own, in this guest.
    Own(usize),
    /// In the client's container, in guest 0: the server's address is there as a second one.
    Client,
}

impl Place {
    fn guest(self) -> usize {
        match self {
            Self::Own(guest) => guest,
            Self::Client => 0,
        }
    }

    fn container(self) -> &'static str {
        match self {
            Self::Own(_) => "server",
            Self::Client => "client",
        }
    }
}

/// How bytes go after a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The kernel's connection.
    Kernel,
    /// Two relays.
    Relays,
    /// A segment of both programs.
    Segment,
}

/// A server in a container of guest 1, its client in one of guest 0; the server moves.
pub(super) fn run(report: &mut Report, _binaries: &Binaries) {
    use Place::{Client, Own};

    let mut rows = Rows { report, suite: "migrate" };
    if let Some((program, _)) = PROGRAMS.iter().find(|(program, _)| !is_here(program)) {
        let why = format!("{program} is not here; run `cargo xtask lab setup`");
        return rows.skip("moves", &why);
    }
    if !super::build("beeline") || !super::build("beeline-sockets-preload") {
        return rows.check("programs", || Ok(Err("beeline does not build".to_owned())));
    }
    let mut world = match World::boot() {
        Ok(world) => world,
        Err(error) => return rows.check("boot", || Err(error)),
    };
    for server in ["threads", "epoll"] {
        rows.check(&format!("there and back, {server}, plain"), || {
            world.moves(server, &[(Own(0), Way::Kernel), (Own(1), Way::Kernel)])
        });
    }
    if let Some(why) = world.cannot_recall() {
        return rows.skip("under the library", &why);
    }
    if let Err(error) = world.accelerate() {
        return rows.check("monitors", || Err(error));
    }
    for server in ["threads", "epoll"] {
        rows.check(&format!("from relays to relays and back, {server}"), || {
            world.moves(server, &[(Own(0), Way::Relays), (Own(1), Way::Relays)])
        });
        rows.check(&format!("from relays to a segment and back, {server}"), || {
            world.moves(server, &[(Client, Way::Segment), (Own(1), Way::Relays)])
        });
    }
    rows.check("both ends in one container", || world.both_ends());
}

struct World {
    guests: [Guest; 2],
    /// The server's process: a number that is free in both guests.
    process: u32,
    /// Programs run under `beeline run`, and containers have monitors.
    accelerated: bool,
    /// The client's guest.
    client: usize,
    /// How many bytes had come back when somebody looked.
    seen: u64,
    _folder: tempfile::TempDir,
}

fn script(words: &str) -> String {
    let words = words.split_whitespace().map(str::to_owned);
    let command = ["sh", CONTAINER].map(str::to_owned).into_iter().chain(words);
    line(&root(), &[], &command.collect::<Vec<_>>())
}

fn well(finished: Finished, what: &str) -> Result<Finished, LabError> {
    if finished.status == 0 {
        return Ok(finished);
    }
    Err(LabError::Failed { command: what.to_owned(), errors: finished.errors })
}

impl World {
    fn boot() -> Result<Self, LabError> {
        let folder = tempfile::tempdir().map_err(LabError::host("making a folder"))?;
        let wire = folder.path().join("wire");
        let client = Options { link: Link::Listen(wire.clone()), ..Options::plain() };
        let client = Guest::boot(&client)?;
        let server = Options { number: 1, link: Link::Call(wire), ..Options::plain() };
        let guests = [client, Guest::boot(&server)?];
        let (process, accelerated, client) = (20_000, false, 0);
        let mut world = Self { guests, process, accelerated, client, seen: 0, _folder: folder };
        for guest in [0, 1] {
            world.script(guest, "wire")?;
        }
        world.script(0, &format!("make client {CLIENT} 01"))?;
        world.script(0, "attach client")?;
        Ok(world)
    }

    /// Why accelerated connections cannot be moved, if they cannot.
    fn cannot_recall(&mut self) -> Option<String> {
        let command = "sockets recall --help".split(' ').map(str::to_owned);
        let beeline = ["target/debug/beeline".to_owned()].into_iter().chain(command);
        let asked = self.guests[1].run(&line(&root(), &[], &beeline.collect::<Vec<_>>()), SOON);
        match asked {
            Ok(done) if done.status == 0 => None,
            Ok(_) => Some("there is no `beeline sockets recall`".to_owned()),
            Err(error) => Some(error.to_string()),
        }
    }

    /// From now on programs are accelerated.
    fn accelerate(&mut self) -> Result<(), LabError> {
        self.accelerated = true;
        self.script(0, &format!("monitor client {CLIENT} {SERVER}")).map(|_| ())
    }

    fn script(&mut self, guest: usize, words: &str) -> Result<String, LabError> {
        let finished = self.guests[guest].run(&script(words), LONG)?;
        well(finished, words).map(|finished| finished.output.trim().to_owned())
    }

    /// `words` of the script, as a command.
    fn program(&self, words: &str) -> String {
        let run = if self.accelerated { "target/debug/beeline run -- " } else { "" };
        format!("{run}python3 {SCRIPT} {words}")
    }

    /// The server's container in `guest`, on no wire yet.
    fn make(&mut self, guest: usize) -> Result<(), LabError> {
        self.script(guest, &format!("make server {SERVER} 05"))?;
        if self.accelerated {
            self.script(guest, &format!("monitor server {SERVER} {CLIENT}"))?;
        }
        Ok(())
    }

    /// Starts `program` in the server's container in guest 1; nothing is left of what ran before.
    fn serve(&mut self, program: &str) -> Result<(), LabError> {
        for guest in [0, 1] {
            let left = format!(
                "touch /run/stop; ({}); rm -f /run/stop /run/still /run/progress /run/ended",
                script("remove server")
            );
            self.guests[guest].run(&format!("({left}) 2>&1"), SOON)?;
        }
        self.process += 1000;
        self.seen = 0;
        self.make(1)?;
        self.script(1, "attach server")?;
        let program = self.program(program);
        self.script(1, &format!("serve server {} {program}", self.process)).map(|_| ())
    }

    /// Starts the server and its client; returns once bytes came back.
    fn begin(&mut self, server: &str) -> Result<(), LabError> {
        self.client = 0;
        self.serve(&format!("{server} {SERVER} 6000"))?;
        let listening = "for i in $(seq 600); do ip netns exec server ss -ltnH sport = :6000 | \
                         grep -q . && exit; sleep 0.1; done; exit 1";
        well(self.guests[1].run(listening, SOON)?, "the server listens")?;
        let client = self.program(&format!("client {SERVER} 6000 {KINDS} /run"));
        let client = script(&format!("run client {client}"));
        let client = format!("({client} >/run/client 2>&1 &) & true");
        well(self.guests[0].run(&client, SOON)?, "the client")?;
        self.more()
    }

    /// How many bytes came back on the slowest of the busy connections.
    fn progress(&mut self) -> Result<u64, LabError> {
        let look = "cat /run/progress; ! cat /run/ended >&2";
        let seen = self.guests[self.client].run(look, SOON)?;
        Ok(well(seen, "the client")?.output.trim().parse().unwrap_or(0))
    }

    /// Waits until more bytes came back than there were when somebody looked, or now.
    fn more(&mut self) -> Result<(), LabError> {
        let before = self.progress()?.max(self.seen);
        let deadline = Instant::now() + LONG;
        loop {
            self.seen = self.progress()?.max(self.seen);
            if self.seen >= before + ENOUGH {
                return Ok(());
            }
            if Instant::now() > deadline {
                let command = format!("{} bytes came back, {before} before", self.seen);
                return Err(LabError::Late { guest: self.client, limit: LONG, command });
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// What the relay of `place` moved, and how many connections its monitor introduced.
    fn counts(&mut self, place: Place) -> Result<(u64, u64), LabError> {
        let words = format!("run {} target/debug/beeline sockets status --json", place.container());
        let said = self.script(place.guest(), &words)?;
        let status: serde_json::Value = serde_json::from_str(&said).unwrap_or_default();
        let count = |value: &serde_json::Value| value.as_u64().unwrap_or(0);
        let relay = &status["relay"];
        let moved = count(&relay["sent_bytes"]) + count(&relay["received_bytes"]);
        Ok((moved, count(&status["paired"])))
    }

    /// Waits until bytes of the client in `place` go the way they should.
    fn goes(&mut self, place: Place, way: Way) -> Result<Result<(), String>, LabError> {
        let deadline = Instant::now() + LONG;
        let mut moved = None;
        loop {
            self.more()?;
            if way == Way::Kernel {
                return Ok(Ok(()));
            }
            let (bytes, paired) = self.counts(place)?;
            let before = *moved.get_or_insert(bytes);
            let there = match way {
                Way::Segment => paired >= 2,
                _ => bytes >= before + ENOUGH,
            };
            if there {
                return Ok(Ok(()));
            }
            if Instant::now() > deadline {
                return Ok(Err(format!(
                    "bytes come back, but not by {way:?}: {} over the relays, {paired} introduced",
                    bytes - before
                )));
            }
        }
    }

    /// Brings the server's connections back to the kernel, where they are not there anyway.
    fn recall(&mut self, from: Place) -> Result<(), LabError> {
        if !self.accelerated {
            return Ok(());
        }
        let words = format!(
            "run {} target/debug/beeline sockets recall --pid {} --hold 120s",
            from.container(),
            self.process
        );
        let said = self.script(from.guest(), &words)?;
        say(&said);
        Ok(())
    }

    /// Moves the server; returns the size of the images, in KiB.
    fn migrate(&mut self, from: Place, to: Place) -> Result<String, LabError> {
        self.recall(from)?;
        let size =
            self.script(from.guest(), &format!("dump {} {}", from.container(), self.process))?;
        match from {
            Place::Own(guest) => self.script(guest, "detach server")?,
            Place::Client => self.script(0, &format!("move-out client {SERVER}"))?,
        };
        if from.guest() != to.guest() {
            self.guests[to.guest()].start(&script("take"))?;
            self.script(from.guest(), "give")?;
            well(self.guests[to.guest()].finish(SOON)?, "take")?;
        }
        if let Place::Own(guest) = from {
            self.script(guest, "remove server")?;
        }
        match to {
            Place::Own(guest) => {
                self.make(guest)?;
                self.script(guest, "restore server attach")?;
            }
            Place::Client => {
                self.script(0, &format!("move-in client {SERVER}"))?;
                self.script(0, "restore client open")?;
            }
        }
        Ok(size)
    }

    /// Lets the client come to its end, and the server be gone from where it is.
    fn end(&mut self, at: Place, sizes: &[String]) -> Check {
        let ended = "touch /run/stop; for i in $(seq 1500); do [ -e /run/ended ] && break; \
                     sleep 0.1; done; cat /run/ended /run/client";
        let said = self.guests[self.client].run(ended, LONG)?.output.trim().to_owned();
        if let Place::Own(guest) = at {
            self.script(guest, "remove server")?;
        }
        Ok(if said.contains("came back") {
            Ok(format!("{said}; images of {} KiB", sizes.join(" and ")))
        } else {
            Err(said)
        })
    }

    fn moves(&mut self, server: &str, moves: &[(Place, Way)]) -> Check {
        self.begin(server)?;
        let (mut at, mut sizes) = (Place::Own(1), Vec::new());
        let first = if self.accelerated { Way::Relays } else { Way::Kernel };
        if let Err(why) = self.goes(Place::Client, first)? {
            return Ok(Err(format!("before: {why}")));
        }
        for &(to, way) in moves {
            sizes.push(self.migrate(at, to)?);
            at = to;
            if let Err(why) = self.goes(Place::Client, way)? {
                return Ok(Err(format!("in {to:?}: {why}")));
            }
        }
        self.end(at, &sizes)
    }

    /// A client and a server of one container move as one.
    fn both_ends(&mut self) -> Check {
        self.client = 1;
        self.serve(&format!("pair {SERVER} 6000 {KINDS} /run"))?;
        let (mut at, mut sizes) = (Place::Own(1), Vec::new());
        self.more()?;
        if let Err(why) = self.goes(at, Way::Segment)? {
            return Ok(Err(format!("before: {why}")));
        }
        for to in [Place::Own(0), Place::Own(1)] {
            // A file that is open has to be there afterwards.
            let still = "touch /run/still; sleep 0.5; rm -f /run/progress";
            self.guests[at.guest()].run(still, SOON)?;
            self.guests[to.guest()].run("rm -f /run/still", SOON)?;
            sizes.push(self.migrate(at, to)?);
            (at, self.client) = (to, to.guest());
            if let Err(why) = self.goes(at, Way::Segment)? {
                return Ok(Err(format!("in {to:?}: {why}")));
            }
        }
        self.end(at, &sizes)
    }
}

//! The same operations beside other stores: mongo-java-server, a reimplementation in Java of MongoDB's wire that
//! keeps documents in memory (it is no MongoDB), and PostgreSQL's `jsonb`, whose durability follows `--durability`.
//!
//! Every server runs on the first core, every client on the second, or on more of them (`--server-cores`,
//! `--client-cores`): this build's client over the MongoDB wire and over fabric, pymongo, and for PostgreSQL its own
//! `pgbench` with prepared statements. A peer that is not here is left out and said. A server that does nothing
//! ([`canned`]) shows what wire and driver cost, and so how far apart servers can be seen to be.
//!
//! Over fabric the client has a thread for each connection, as over the wire, and once more one thread for all of
//! them, as `pgbench` has: it posts a command on each channel, polls all, and posts the next where an outcome came.

pub(super) mod canned;

use std::cell::{Cell, RefCell};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Instant;

use anyhow::Context as _;
use beeline_documents_client::{Begun, Client, Options};
use bson::{Bson, doc};

use super::{
    Bench, Better, Contender, DocumentsArguments, Kind, Peer, Row, cpu_seconds,
    ended_children_seconds, free_port,
};
use crate::bench::turns::{pin, pin_to_several};
use canned::Nothing;

const KINDS: [Kind; 2] = [Kind::Insert, Kind::Find];
/// Rounds of mongo-java-server that are not counted.
const WARM: usize = 2;

/// A program that ends with the benchmark.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A program that says "ready", is told a line and answers one.
struct Scripted {
    program: Running,
    ask: ChildStdin,
    told: BufReader<ChildStdout>,
}

impl Scripted {
    fn start(command: &mut Command) -> anyhow::Result<Self> {
        let name = command.get_program().display().to_string();
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut program = Running(command.spawn().with_context(|| name.clone())?);
        let ask = program.0.stdin.take().context("its input")?;
        let told = BufReader::new(program.0.stdout.take().context("its output")?);
        let mut started = Self { program, ask, told };
        let said = started.line()?;
        anyhow::ensure!(said == "ready", "{name} ended: its message stands above");
        Ok(started)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.told.read_line(&mut line)?;
        Ok(line.trim().to_owned())
    }

    fn figure(&mut self, words: &str) -> anyhow::Result<f64> {
        writeln!(self.ask, "{words}")?;
        let line = self.line()?;
        line.parse().with_context(|| format!("process {} ended", self.program.0.id()))
    }
}

/// mongo-java-server, from Maven.
struct JavaServer {
    program: Scripted,
    address: String,
}

impl JavaServer {
    fn start(arguments: &DocumentsArguments, folder: &Path) -> anyhow::Result<Self> {
        let port = free_port()?;
        let mut command = Command::new(&arguments.java);
        match &arguments.java_server {
            Some(made) => {
                command.arg("-cp").arg(format!("{0}/classes:{0}/jars/*", made.display()));
                command.arg("Server");
            }
            None => {
                fetch(folder)?;
                command.args(["-cp", "jars/*", "Server.java"]).current_dir(folder);
            }
        }
        command.arg(port.to_string()).stderr(Stdio::null());
        let program = Scripted::start(&mut command)?;
        Ok(Self { program, address: format!("mongodb://127.0.0.1:{port}") })
    }
}

/// Has Maven fetch mongo-java-server.
fn fetch(folder: &Path) -> anyhow::Result<()> {
    std::fs::write(folder.join("pom.xml"), include_str!("peers/pom.xml"))?;
    std::fs::write(folder.join("Server.java"), include_str!("peers/Server.java"))?;
    let jars = Command::new("mvn")
        .args(["-q", "-B", "dependency:copy-dependencies", "-DoutputDirectory=jars"])
        .current_dir(folder)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .context("mvn")?;
    anyhow::ensure!(jars.success(), "mvn could not fetch de.bwaldvogel:mongo-java-server");
    Ok(())
}

/// PostgreSQL with one table of `jsonb`.
struct Postgres {
    bin: PathBuf,
    port: u16,
    scripts: [PathBuf; 2],
    server: Running,
}

impl Postgres {
    fn start(arguments: &DocumentsArguments, folder: &Path) -> anyhow::Result<Self> {
        let bin = match &arguments.postgres {
            Some(bin) => bin.clone(),
            None => debian().context("no /usr/lib/postgresql/*/bin: install postgresql")?,
        };
        let (data, port) = (folder.join("postgres"), free_port()?);
        // It does not run as root.
        let root = is_root();
        std::fs::create_dir_all(&data)?;
        if root {
            std::os::unix::fs::chown(&data, Some(NOBODY), Some(NOBODY))?;
            std::os::unix::fs::chown(folder, Some(NOBODY), Some(NOBODY))?;
        }
        let program = |name: &str| {
            let mut command = Command::new(bin.join(name));
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            command.current_dir(folder);
            if root {
                command.uid(NOBODY).gid(NOBODY);
            }
            command
        };
        let made = program("initdb")
            .args(["--no-sync", "-A", "trust", "-U", "bench", "-D"])
            .arg(&data)
            .status()
            .context("initdb")?;
        anyhow::ensure!(made.success(), "initdb failed");
        let fsync = if arguments.durability == "power" { "fsync=on" } else { "fsync=off" };
        let server = program("postgres")
            .args(["-p", &port.to_string(), "-c", fsync, "-c", "max_connections=200", "-c"])
            .arg("shared_buffers=256MB")
            .args(["-c", "listen_addresses=127.0.0.1", "-c"])
            .arg(format!("unix_socket_directories={}", data.display()))
            .arg("-D")
            .arg(&data)
            .spawn()
            .context("postgres")?;
        let scripts = [folder.join("insert.sql"), folder.join("find.sql")];
        std::fs::write(
            &scripts[0],
            "\\set n :n + 1\n\\set id :client_id * :each + :n\n\
             INSERT INTO records VALUES (:id, jsonb_build_object('n', 0, 'text', :text::text));\n",
        )?;
        std::fs::write(
            &scripts[1],
            "\\set id random(1, :count)\nSELECT doc FROM records WHERE id = :id;\n",
        )?;
        let postgres = Self { bin, port, scripts, server: Running(server) };
        let start = Instant::now();
        while let Err(error) = postgres.order("SELECT 1") {
            anyhow::ensure!(start.elapsed().as_secs() < 30, "postgres does not answer: {error:#}");
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        postgres.order("CREATE TABLE records (id bigint PRIMARY KEY, doc jsonb NOT NULL)")?;
        Ok(postgres)
    }

    fn program(&self, name: &str) -> Command {
        let mut command = Command::new(self.bin.join(name));
        command
            .args(["-U", "bench", "-h", "127.0.0.1", "-p", &self.port.to_string()])
            .stdin(Stdio::null());
        command
    }

    fn order(&self, words: &str) -> anyhow::Result<()> {
        let said = self.program("psql").args(["-q", "-d", "postgres", "-c", words]).output()?;
        anyhow::ensure!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        Ok(())
    }

    /// Transactions each second, as `pgbench` tells them; insertions begin with an empty table.
    fn rate(&self, kind: Kind, connections: u32, each: u32, size: usize) -> anyhow::Result<f64> {
        if kind == Kind::Insert {
            self.order("TRUNCATE records")?;
        }
        let script = &self.scripts[usize::from(kind == Kind::Find)];
        let said = self
            .program("pgbench")
            .args(["-n", "-M", "prepared", "-j", "1", "-c", &connections.to_string()])
            .args(["-t", &each.to_string(), "-D", &format!("text={}", "x".repeat(size))])
            .args(["-D", &format!("count={}", connections * each), "-D", "n=0", "-D"])
            .args([&format!("each={each}"), "-f"])
            .arg(script)
            .arg("postgres")
            .output()
            .context("pgbench")?;
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        rate_of(&text)
            .with_context(|| format!("pgbench: {text}{}", String::from_utf8_lossy(&said.stderr)))
    }
}

/// The user that PostgreSQL runs as where this program is root's.
const NOBODY: u32 = 65_534;

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata("/proc/self").is_ok_and(|own| own.uid() == 0)
}

/// The programs of Debian's PostgreSQL, of the newest version.
fn debian() -> Option<PathBuf> {
    let versions = std::fs::read_dir("/usr/lib/postgresql").ok()?.flatten();
    let mut found: Vec<PathBuf> =
        versions.map(|one| one.path().join("bin")).filter(|bin| bin.is_dir()).collect();
    found.sort();
    found.pop()
}

/// Transactions each second, out of what `pgbench` says.
fn rate_of(text: &str) -> anyhow::Result<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("tps = ")).context("no tps")?;
    Ok(line.split(' ').next().unwrap_or_default().parse()?)
}

impl Bench<'_> {
    /// One document inserted, one found by `_id`, over many connections.
    pub(super) fn peers(&self) -> anyhow::Result<()> {
        let folder = tempfile::tempdir_in(&self.arguments.data)?;
        let say = |name: &str, error: &anyhow::Error| {
            self.output.note(format_args!("{name} is left out: {error:#}"));
        };
        // Servers inherit the first cores.
        pin_to_several(0, self.arguments.servers())?;
        let peers = &self.arguments.peers;
        let java = match peers.contains(&Peer::Java) || peers.contains(&Peer::Pymongo) {
            true => JavaServer::start(self.arguments, folder.path())
                .inspect_err(|error| say("java", error))
                .ok(),
            false => None,
        };
        let postgres = match peers.contains(&Peer::Postgres) {
            true => Postgres::start(self.arguments, folder.path())
                .inspect_err(|error| say("PostgreSQL", error))
                .ok(),
            false => None,
        };
        let nothing = match peers.contains(&Peer::Nothing) {
            true => Nothing::start(self.arguments.servers(), self.arguments.size)
                .inspect_err(|error| say("the server that does nothing", error))
                .ok(),
            false => None,
        };
        pin_to_several(self.arguments.servers(), self.arguments.client_cores)?;
        let connections = self.arguments.options.size(64, 4);
        let each = self.arguments.options.size(1000, 10);
        let (size, text) = (self.arguments.size, self.text());
        let at = |address: &str| -> anyhow::Result<Client> {
            Ok(Client::connect(address, Options { retry_writes: false, ..Options::default() })?)
        };
        let own = Some(self.node.child.id());
        // Of both turns and both ends, so that servers are compared also where the clients' core is the limit.
        let (used, turn_of) = (RefCell::new([Used::default(); 2]), Cell::new(0));
        let note = |processes: Processes, work: Work<'_>| -> anyhow::Result<f64> {
            let before = processes.used();
            let rate = work()?;
            used.borrow_mut()[turn_of.get()].add(processes.used(), before);
            Ok(rate)
        };
        let java_id = java.as_ref().map(|java| java.program.program.0.id());
        let run = |side: Side<'_>, kind: Kind| -> anyhow::Result<f64> {
            let many = |kind: Kind| match side.by_one {
                true => by_one_thread(&|| at(side.address), kind, (connections, each), &text),
                false => self.many_at(&|| at(side.address), kind, connections, each, &text),
            };
            if side.keeps {
                let mut client = at(side.address)?;
                if kind == Kind::Insert {
                    let dropped = client.run("bench", doc! { "drop": "records" });
                    dropped.map(drop).or_else(not_there)?;
                } else if count(&mut client)? != i64::from(connections * each) {
                    anyhow::ensure!(
                        count(&mut client)? == 0,
                        "the collection holds something else"
                    );
                    many(Kind::Insert)?;
                }
            }
            note(Processes { server: side.process, client: Driver::Own }, &|| many(kind))
        };
        let case = |kind: Kind, client: &str| {
            format!("{} of {size} B, {connections} connections, {client}", kind.word())
        };
        let row_of =
            |(kind, each): (Kind, u32), client: &str, peer: &str, mine: Turn<'_>, its: Turn<'_>| {
                *used.borrow_mut() = [Used::default(); 2];
                let figures = self.turns(&mut [
                    Contender::new("beeline", || {
                        turn_of.set(0);
                        mine(kind)
                    }),
                    Contender::new("peer", || {
                        turn_of.set(1);
                        its(kind)
                    }),
                ])?;
                let mut row =
                    Row::new(case(kind, client), "beeline", "op/s", Better::Higher, &figures[0])
                        .against(peer, &figures[0], &figures[1])
                        .beside("durability", self.arguments.durability.clone());
                let all = f64::from(connections * each) * f64::from(self.arguments.options.turns());
                let used = used.borrow();
                let parts = |used: &Used| {
                    [
                        ("server processor time/op", used.server / all * 1e6),
                        ("client processor time/op", used.client / all * 1e6),
                    ]
                };
                for ((name, here), (_, there)) in parts(&used[0]).into_iter().zip(parts(&used[1])) {
                    if here > 0.0 && there > 0.0 {
                        let peer = format!("peer {there:.1}, {:.2} times", there / here);
                        row = row.beside(name, format!("{here:.1} us ({peer})"));
                    }
                }
                self.push(row)
            };
        let row = |kind: Kind, client: &str, peer: &str, mine: Turn<'_>, its: Turn<'_>| {
            row_of((kind, each), client, peer, mine, its)
        };
        let side = |address, process, by_one| Side { address, process, by_one, keeps: true };
        let wire = |kind: Kind| run(side(&self.node.wire, own, false), kind);
        let fabric = |kind: Kind| run(side(&self.node.fabric, own, false), kind);
        let one = |kind: Kind| run(side(&self.node.fabric, own, true), kind);
        if let Some(java) = java.as_ref().filter(|_| peers.contains(&Peer::Java)) {
            let its = |kind: Kind| run(side(&java.address, java_id, false), kind);
            // What its compiler does first is no part of the figures.
            for kind in KINDS.into_iter().cycle().take(WARM * KINDS.len()) {
                its(kind)?;
            }
            for kind in KINDS {
                let peer = "mongo-java-server (memory)";
                row(kind, "this client over the wire", peer, &wire, &its)?;
                row(kind, "this client over fabric; over the wire", peer, &fabric, &its)?;
                let client = "one thread of this client over fabric; over the wire";
                row(kind, client, peer, &one, &its)?;
            }
        }
        if let Some(nothing) = &nothing {
            let id = Some(nothing.program.program.0.id());
            let its = |kind: Kind| {
                let side = Side { keeps: false, ..side(&nothing.address, id, false) };
                run(side, kind)
            };
            for kind in KINDS {
                row(kind, "this client over the wire", NOTHING, &wire, &its)?;
            }
        }
        if let Some(postgres) = &postgres {
            let server = Some(postgres.server.0.id());
            let its = |kind: Kind| {
                let processes = Processes { server, client: Driver::Ended };
                if kind == Kind::Find {
                    postgres.rate(Kind::Insert, connections, each, size)?;
                }
                note(processes, &|| postgres.rate(kind, connections, each, size))
            };
            for kind in KINDS {
                let peer = "PostgreSQL jsonb";
                row(kind, "this client over the wire; pgbench", peer, &wire, &its)?;
                row(kind, "one thread of this client over fabric; pgbench", peer, &one, &its)?;
            }
        }
        if peers.contains(&Peer::Itself) {
            for kind in KINDS {
                let client = "one thread over fabric; a thread for each over the wire";
                row(kind, client, "this store over the wire", &one, &wire)?;
            }
        }
        let script = folder.path().join("driver.py");
        std::fs::write(&script, include_str!("peers/driver.py"))?;
        let python = match peers.contains(&Peer::Pymongo) {
            true => Scripted::start(Command::new(&self.arguments.python).arg(&script))
                .inspect_err(|error| say("pymongo", error))
                .ok(),
            false => None,
        };
        if let Some(python) = python {
            let driver = Driver::Process(python.program.0.id());
            let python = RefCell::new(python);
            let each = self.arguments.options.size(200, 10);
            let ask = |address: &str, server: Option<u32>, kind: Kind| {
                let words = |word: &str| format!("{address} {word} {connections} {each} {size}");
                let say = |word: &str| python.borrow_mut().figure(&words(word));
                if kind == Kind::Find {
                    say("insert")?;
                }
                let word = if kind == Kind::Find { "find" } else { "insert" };
                note(Processes { server, client: driver }, &|| say(word))
            };
            let mine = |kind: Kind| ask(&self.node.wire, own, kind);
            let by = |kind: Kind, peer: &str, its: Turn<'_>| {
                row_of((kind, each), "pymongo", peer, &mine, its)
            };
            for kind in KINDS {
                if let Some(java) = &java {
                    let its = |kind: Kind| ask(&java.address, java_id, kind);
                    by(kind, "mongo-java-server (memory)", &its)?;
                }
                if let Some(nothing) = &nothing {
                    let id = Some(nothing.program.program.0.id());
                    by(kind, NOTHING, &|kind: Kind| ask(&nothing.address, id, kind))?;
                }
            }
        }
        // Other parts begin with none.
        let dropped = at(&self.node.wire)?.run("bench", doc! { "drop": "records" });
        dropped.map(drop).or_else(not_there)?;
        pin(self.arguments.servers())?;
        Ok(())
    }
}

/// As rows name the server of [`canned`].
const NOTHING: &str = "a server that does nothing";

/// The process that drives a server.
#[derive(Clone, Copy)]
enum Driver {
    /// This one.
    Own,
    /// Another one.
    Process(u32),
    /// One that this process starts, and that ends with its turn.
    Ended,
}

/// What a turn is made of.
#[derive(Clone, Copy)]
struct Processes {
    server: Option<u32>,
    client: Driver,
}

impl Processes {
    fn used(self) -> Used {
        let client = match self.client {
            Driver::Own => cpu_seconds(std::process::id()),
            Driver::Process(process) => cpu_seconds(process),
            Driver::Ended => ended_children_seconds(std::process::id()),
        };
        Used { server: self.server.map_or(0.0, of_family), client }
    }
}

/// Processor time of a process and its children, those that ended among them.
fn of_family(process: u32) -> f64 {
    let path = format!("/proc/{process}/task/{process}/children");
    let children = std::fs::read_to_string(path).unwrap_or_default();
    let of = |process: u32| cpu_seconds(process) + ended_children_seconds(process);
    of(process) + children.split_whitespace().filter_map(|id| id.parse().ok()).map(of).sum::<f64>()
}

/// Seconds of processor time.
#[derive(Clone, Copy, Debug, Default)]
struct Used {
    server: f64,
    client: f64,
}

impl Used {
    fn add(&mut self, after: Self, before: Self) {
        self.server += after.server - before.server;
        self.client += after.client - before.client;
    }
}

/// A server, and how it is driven.
#[derive(Clone, Copy)]
struct Side<'s> {
    address: &'s str,
    process: Option<u32>,
    /// One thread has all connections.
    by_one: bool,
    /// It keeps what it is given.
    keeps: bool,
}

/// Documents of the collection.
fn count(client: &mut Client) -> anyhow::Result<i64> {
    let counted = client.run("bench", doc! { "count": "records" })?;
    match counted.get("n") {
        Some(Bson::Int32(n)) => Ok(i64::from(*n)),
        Some(Bson::Int64(n)) => Ok(*n),
        Some(Bson::Double(n)) => Ok(*n as i64),
        _ => anyhow::bail!("a count without a number: {counted}"),
    }
}

/// What is measured of a turn.
type Work<'w> = &'w dyn Fn() -> anyhow::Result<f64>;

/// One turn of a contender.
type Turn<'t> = &'t dyn Fn(Kind) -> anyhow::Result<f64>;

/// Every connection does its share, all driven by this thread; operations each second. Connecting is not counted.
fn by_one_thread(
    connect: &dyn Fn() -> anyhow::Result<Client>,
    kind: Kind,
    (connections, each): (u32, u32),
    text: &str,
) -> anyhow::Result<f64> {
    let mut clients = Vec::new();
    for _ in 0..connections {
        clients.push((connect()?, None::<Begun>, 0));
    }
    let start = Instant::now();
    let mut left = connections * each;
    while left > 0 {
        for (number, (client, begun, done)) in (0_u32..).zip(&mut clients) {
            if let Some(mut waits) = begun.take() {
                if !client.is_ready(&mut waits) {
                    *begun = Some(waits);
                    continue;
                }
                match kind {
                    Kind::Insert => drop(client.finish_insert_one(waits)?),
                    _ => {
                        let found = client.finish_find_one(waits)?;
                        anyhow::ensure!(found.is_some(), "a document that was inserted is found");
                    }
                }
                left -= 1;
            }
            if *done == each {
                continue;
            }
            let id = i64::from(number * each + *done);
            *done += 1;
            *begun = Some(match kind {
                Kind::Insert => {
                    let document = doc! { "_id": id, "n": 0, "text": text };
                    client.begin_insert_one("bench", "records", document)?
                }
                _ => client.begin_find_one("bench", "records", &doc! { "_id": id })?,
            });
        }
    }
    Ok(f64::from(connections * each) / start.elapsed().as_secs_f64())
}

/// There is no collection the first time.
fn not_there(error: beeline_documents_client::ClientError) -> anyhow::Result<()> {
    match error.to_string().contains("ns not found") {
        true => Ok(()),
        false => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_of_pgbench_is_read() {
        let text = "scaling factor: 1\ntps = 12345.678901 (without initial connection time)\n";
        assert!((rate_of(text).unwrap() - 12345.678901).abs() < 1e-9);
        assert!(rate_of("pgbench: error").is_err());
    }
}

//! `beeline bench documents`: the same commands over fabric and over the MongoDB wire.
//!
//! One node of this program, on the first core; its clients, all of one kind, on the second. Both contenders
//! are the client of this build: what differs is what carries the commands. The paper's experiments are
//! four operations, by records and by connections (spec/rmongo.md 5.2), as ratios.

mod members;
mod peers;
mod scan;

use std::cell::RefCell;
use std::io::{BufRead as _, Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::Context as _;
use beeline_documents_client::{Client, Options};
use bson::{Document, doc};

use super::ports::free_port;
use super::report::{Better, Report, Row};
use super::turns::{Contender, alternate, pin, pin_to_several, unpin};
use super::{BenchOptions, finish};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct DocumentsArguments {
    /// Parts to run.
    #[arg(
        long,
        value_name = "PARTS",
        value_delimiter = ',',
        default_value = "latency,records,connections"
    )]
    pub parts: Vec<Part>,
    /// Records of each operation, in the part of records.
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "100,1000,10000")]
    pub records: Vec<u32>,
    /// Connections, each with a thread.
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,10,100")]
    pub connections: Vec<u32>,
    /// Documents in the part of scans.
    #[arg(long, default_value_t = 1_000_000)]
    pub documents: u32,
    /// Bytes of a document, about; 100 at most in the part of scans.
    #[arg(long, default_value_t = 1000)]
    pub size: usize,
    /// What the node promises: none, process or power.
    #[arg(long, default_value = "process")]
    pub durability: String,
    /// What carries the commands beside the wire: auto, shm, tcp or verbs.
    #[arg(long, default_value = "auto")]
    pub provider: String,
    /// Where the node is met over fabric: an address of an RDMA device, for verbs.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1")]
    pub fabric_host: std::net::IpAddr,
    /// Where the node's pool lies.
    #[arg(long, value_name = "DIRECTORY", default_value = "/dev/shm")]
    pub data: PathBuf,
    /// What stands beside this store in the part of peers.
    #[arg(
        long,
        value_name = "PEERS",
        value_delimiter = ',',
        default_value = "java,postgres,nothing,itself,pymongo"
    )]
    pub peers: Vec<Peer>,
    /// Folder of PostgreSQL's programs; Debian's newest unless it is named.
    #[arg(long, value_name = "DIRECTORY")]
    pub postgres: Option<PathBuf>,
    /// Folder with `classes` and `jars` of mongo-java-server, where Maven is not to be asked for them.
    #[arg(long, value_name = "DIRECTORY")]
    pub java_server: Option<PathBuf>,
    /// The Java that runs it.
    #[arg(long, value_name = "PROGRAM", default_value = "java")]
    pub java: PathBuf,
    /// Cores of the servers, from the first on; the node has as many shards. All clients stay on the core behind them,
    /// but for the part of peers.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub server_cores: usize,
    /// Cores of the clients in the part of peers, behind the servers': with one, the clients may be what limits
    /// both servers.
    #[arg(long, value_name = "COUNT", default_value_t = 1)]
    pub client_cores: usize,
    /// A Python with pymongo, for the part of peers.
    #[arg(long, value_name = "PROGRAM", default_value = "target/clients-venv/bin/python")]
    pub python: PathBuf,
    /// Only answers at this port, with canned replies: the server that does nothing.
    #[arg(long, value_name = "PORT", hide = true)]
    pub answer_at: Option<u16>,
    #[command(flatten)]
    pub options: BenchOptions,
}

impl DocumentsArguments {
    /// Cores of the servers: one at least.
    fn servers(&self) -> usize {
        self.server_cores.max(1)
    }
}

/// Parts of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// One client, one command at a time: the median of each operation.
    Latency,
    /// One client, more and more records.
    Records,
    /// More and more connections.
    Connections,
    /// Many documents: loading, scanning, grouping, an index.
    Scan,
    /// An insert and a find over 64 connections, beside mongo-java-server (by Maven and java) and PostgreSQL.
    Peers,
    /// Two replica sets of three members each: lag, and copies of everything.
    Members,
}

/// What the part of peers compares with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Peer {
    /// mongo-java-server, by this client.
    Java,
    /// PostgreSQL's jsonb, by pgbench.
    Postgres,
    /// A server with canned replies and no store, by this client and by pymongo.
    Nothing,
    /// This store over the MongoDB wire, beside itself over fabric.
    Itself,
    /// pymongo beside this client, at mongo-java-server and at the server that does nothing.
    Pymongo,
}

/// The paper's four.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Insert,
    Find,
    Update,
    Delete,
}

const KINDS: [Kind; 4] = [Kind::Insert, Kind::Find, Kind::Update, Kind::Delete];

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::Insert => "insert",
            Self::Find => "find by _id",
            Self::Update => "update by _id",
            Self::Delete => "delete by _id",
        }
    }
}

/// A node of this program, and its pool; both end with it.
struct Node {
    child: Child,
    folder: PathBuf,
    fabric: String,
    wire: String,
    http: u16,
}

impl Node {
    fn start(arguments: &DocumentsArguments) -> anyhow::Result<Self> {
        let folder =
            arguments.data.join(format!(".beeline-bench-documents-{}", std::process::id()));
        let (fabric, wire, http) = (free_port()?, free_port()?, free_port()?);
        let at = std::net::SocketAddr::new(arguments.fabric_host, fabric);
        let program = std::env::current_exe().context("the path of this program")?;
        let mut command = Command::new(program);
        command
            .args(["serve", "--json", "--quiet", "--resp-address", "127.0.0.1:0"])
            .args(["--shards", &arguments.servers().to_string()])
            .args(["--http-address", &format!("127.0.0.1:{http}"), "--without", "objects,direct"])
            .args(["--fabric-address", &at.to_string()])
            .args(["--documents-address", &format!("127.0.0.1:{wire}")])
            .args(["--durability", &arguments.durability, "--data"])
            .arg(&folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = command.spawn().context("starting beeline serve")?;
        let out = child.stdout.take().context("its standard output")?;
        let mut line = String::new();
        std::io::BufReader::new(out).read_line(&mut line)?;
        let node = Self {
            child,
            folder,
            fabric: format!("{}://{at}", arguments.provider),
            wire: format!("mongodb://127.0.0.1:{wire}"),
            http,
        };
        anyhow::ensure!(!line.is_empty(), "beeline serve did not start; its message stands above");
        Ok(node)
    }

    fn client(&self, fabric: bool) -> anyhow::Result<Client> {
        let address = if fabric { &self.fabric } else { &self.wire };
        Ok(Client::connect(address, Options { retry_writes: false, ..Options::default() })?)
    }

    /// Times its threads gave up a core, of their own will or not.
    fn switches(&self) -> u64 {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let status = |task: std::io::Result<std::fs::DirEntry>| {
            std::fs::read_to_string(task.ok()?.path().join("status")).ok()
        };
        let texts = tasks.into_iter().flatten().filter_map(status);
        texts.map(|text| switches_of(&text)).sum()
    }
}

impl Node {
    /// Processor time that it used so far.
    fn cpu_seconds(&self) -> f64 {
        cpu_seconds(self.child.id())
    }

    /// Memory registered for its fabric clients: pinned, where a card reads and writes it.
    fn registered_bytes(&self) -> anyhow::Result<u64> {
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", self.http))?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        let name = "beeline_documents_channel_registered_bytes ";
        let value = text.lines().find_map(|line| line.strip_prefix(name));
        value
            .and_then(|value| value.trim().parse::<f64>().ok())
            .map(|bytes| bytes as u64)
            .context("no figure of registered memory")
    }

    /// Memory that it holds, pages of its pool among them.
    fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let kib = |text: String| {
            let line =
                text.lines().find_map(|line| line.strip_prefix("VmRSS:")?.strip_suffix("kB"));
            line.and_then(|kib| kib.trim().parse::<u64>().ok())
        };
        status.ok().and_then(kib).unwrap_or(0) * 1024
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Both kinds of context switches, of the text of `/proc/…/status`.
fn switches_of(text: &str) -> u64 {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(name, _)| name.ends_with("voluntary_ctxt_switches"))
        .filter_map(|(_, count)| count.trim().parse::<u64>().ok())
        .sum()
}

/// Processor time that a process used so far.
fn cpu_seconds(process: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.map_or(0.0, |text| cpu_seconds_of(&text))
}

/// Processor time of the children of a process that ended.
fn ended_children_seconds(process: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
    stat.map_or(0.0, |text| seconds_of(&text, 13))
}

/// User and system time, of the text of `/proc/…/stat`.
fn cpu_seconds_of(text: &str) -> f64 {
    seconds_of(text, 11)
}

/// The sum of two fields of ticks, counted behind the name.
fn seconds_of(text: &str, first: usize) -> f64 {
    // The name in parentheses may hold spaces.
    let fields: Vec<&str> =
        text.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
    let ticks = |at: usize| fields.get(at).and_then(|field| field.parse::<f64>().ok());
    (ticks(first).unwrap_or(0.0) + ticks(first + 1).unwrap_or(0.0)) / TICKS
}

/// Ticks a second in `/proc`, on Linux everywhere.
const TICKS: f64 = 100.0;

struct Bench<'a> {
    arguments: &'a DocumentsArguments,
    node: Node,
    report: RefCell<Report>,
    output: Output,
}

/// The command.
pub fn run(arguments: &DocumentsArguments, output: Output) -> Result<Exit, Failure> {
    if let Some(port) = arguments.answer_at {
        peers::canned::serve(port, arguments.servers(), arguments.size)?;
        return Ok(Exit::Done);
    }
    pin_to_several(0, arguments.servers())?;
    let node = Node::start(arguments)?;
    pin(arguments.servers())?;
    let provider = node.client(true)?.transport().to_owned();
    let report = RefCell::new(Report::new("documents", provider));
    let bench = Bench { arguments, node, report, output };
    for part in &arguments.parts {
        match part {
            Part::Latency => bench.latency(),
            Part::Records => bench.records(),
            Part::Connections => bench.connections(),
            Part::Scan => bench.scan(),
            Part::Peers => bench.peers(),
            Part::Members => bench.members(),
        }
        .with_context(|| format!("part {part:?}"))?;
    }
    unpin()?;
    let report = bench.report.into_inner();
    drop(bench.node);
    finish(&report, &arguments.options, output)
}

/// One operation on the record with this number.
fn operate(client: &mut Client, kind: Kind, id: u32, text: &str) -> anyhow::Result<()> {
    let mut records = client.collection("bench", "records");
    let done = match kind {
        Kind::Insert => {
            records.insert_one(doc! { "_id": i64::from(id), "n": 0, "text": text })?;
            true
        }
        Kind::Find => records.find_one(doc! { "_id": i64::from(id) })?.is_some(),
        Kind::Update => {
            let change = doc! { "$inc": { "n": 1 } };
            records.update_one(doc! { "_id": i64::from(id) }, change, false)?.modified == 1
        }
        Kind::Delete => records.delete_one(doc! { "_id": i64::from(id) })? == 1,
    };
    anyhow::ensure!(done, "{} of record {id} found nothing", kind.word());
    Ok(())
}

impl Bench<'_> {
    fn text(&self) -> String {
        "x".repeat(self.arguments.size)
    }

    fn push(&self, row: Row) -> anyhow::Result<()> {
        self.report.borrow_mut().tell(row, self.output)
    }

    fn turns(&self, contenders: &mut [Contender<'_>]) -> anyhow::Result<Vec<Vec<f64>>> {
        alternate(self.arguments.options.turns(), contenders, self.output)
    }

    /// Figures of the four operations, over fabric and over the wire by turns: a turn is a round of all four on fresh
    /// records, each measured by `measure`, which is told the contender's place and the operation.
    fn rounds(
        &self,
        measure: &dyn Fn(usize, usize) -> anyhow::Result<f64>,
    ) -> anyhow::Result<[[Vec<f64>; 2]; 4]> {
        let figures = RefCell::new(<[[Vec<f64>; 2]; 4]>::default());
        let turn = |which: usize| {
            for kind in 0..KINDS.len() {
                let figure = measure(which, kind)?;
                figures.borrow_mut()[kind][which].push(figure);
            }
            Ok(0.0)
        };
        self.turns(&mut [
            Contender::new("fabric", || turn(0)),
            Contender::new("wire", || turn(1)),
        ])?;
        Ok(figures.into_inner())
    }

    fn latency(&self) -> anyhow::Result<()> {
        let count = self.arguments.options.size(5_000, 50);
        let text = self.text();
        let clients =
            [RefCell::new(self.node.client(true)?), RefCell::new(self.node.client(false)?)];
        let switches = RefCell::new([[0_u64; 2]; 4]);
        let figures = self.rounds(&|which, kind| {
            let mut client = clients[which].borrow_mut();
            let before = self.node.switches();
            let mut times = Vec::with_capacity(count as usize);
            for id in 0..count {
                let start = Instant::now();
                operate(&mut client, KINDS[kind], id, &text)?;
                times.push(start.elapsed().as_secs_f64() * 1e6);
            }
            switches.borrow_mut()[kind][which] += self.node.switches() - before;
            times.sort_by(f64::total_cmp);
            Ok(times[times.len() / 2])
        })?;
        for (at, kind) in KINDS.into_iter().enumerate() {
            let all = f64::from(count) * f64::from(self.arguments.options.turns());
            let [here, there] = switches.borrow()[at].map(|switches| switches as f64 / all);
            let mut row = Row::new(
                format!("{} of {} B, p50", kind.word(), self.arguments.size),
                "fabric",
                "us",
                Better::Lower,
                &figures[at][0],
            )
            .against("MongoDB wire", &figures[at][0], &figures[at][1])
            .beside("server switches/op", format!("{here:.2} (wire {there:.2})"));
            if let Some(counters) = clients[0].borrow().counters() {
                let requests = counters.requests.max(1) as f64;
                row = row
                    .beside("client copies/op", format!("{:.2}", counters.copies as f64 / requests))
                    .beside(
                        "client writes/op",
                        format!("{:.2}", counters.writes as f64 / requests),
                    );
            }
            if kind == Kind::Find {
                row = row.beside("aim", "4 us over shm");
            }
            self.push(row)?;
        }
        Ok(())
    }

    fn records(&self) -> anyhow::Result<()> {
        let text = self.text();
        let clients =
            [RefCell::new(self.node.client(true)?), RefCell::new(self.node.client(false)?)];
        for &records in &self.arguments.records {
            let records = self.arguments.options.size(records, records.min(50));
            let figures = self.rounds(&|which, kind| {
                let mut client = clients[which].borrow_mut();
                let start = Instant::now();
                if KINDS[kind] == Kind::Find {
                    // One query for all of them, as in the paper.
                    let all = client
                        .collection("bench", "records")
                        .find(doc! {}, Document::new())?
                        .count();
                    anyhow::ensure!(all == records as usize, "{all} records found");
                } else {
                    for id in 0..records {
                        operate(&mut client, KINDS[kind], id, &text)?;
                    }
                }
                Ok(f64::from(records) / start.elapsed().as_secs_f64())
            })?;
            for (at, kind) in KINDS.into_iter().enumerate() {
                let word = if kind == Kind::Find { "query of all" } else { kind.word() };
                let case = format!("{word}, {records} records");
                let row = Row::new(case, "fabric", "op/s", Better::Higher, &figures[at][0])
                    .against("MongoDB wire", &figures[at][0], &figures[at][1]);
                self.push(row)?;
            }
        }
        Ok(())
    }

    fn connections(&self) -> anyhow::Result<()> {
        let text = self.text();
        for &connections in &self.arguments.connections {
            let connections = self.arguments.options.size(connections, connections.min(4)).max(1);
            let each_does = self.arguments.options.size((20_000 / connections).clamp(50, 1000), 10);
            let pinned = self.registered_by(connections)?;
            let cpu = RefCell::new([[0.0; 2]; 4]);
            let figures = self.rounds(&|which, kind| {
                let before = self.node.cpu_seconds();
                let rate = self.many(which == 0, KINDS[kind], connections, each_does, &text);
                cpu.borrow_mut()[kind][which] += self.node.cpu_seconds() - before;
                rate
            })?;
            for (at, kind) in KINDS.into_iter().enumerate() {
                let case = format!("{}, {connections} connections", kind.word());
                let all =
                    f64::from(connections * each_does) * f64::from(self.arguments.options.turns());
                let [here, there] = cpu.borrow()[at].map(|seconds| seconds / all * 1e6);
                let row = Row::new(case, "fabric", "op/s", Better::Higher, &figures[at][0])
                    .against("MongoDB wire", &figures[at][0], &figures[at][1])
                    .beside("server processor time/op", format!("{here:.1} us (wire {there:.1})"))
                    .beside("server memory registered", format!("{:.1} MB", pinned as f64 / 1e6));
                self.push(row)?;
            }
        }
        Ok(())
    }

    /// Memory that the node registers while so many fabric clients are connected.
    fn registered_by(&self, connections: u32) -> anyhow::Result<u64> {
        let clients: anyhow::Result<Vec<Client>> =
            (0..connections).map(|_| self.node.client(true)).collect();
        let _clients = clients?;
        self.node.registered_bytes()
    }

    /// Every connection does its share; operations each second. Connecting is not counted.
    fn many(
        &self,
        fabric: bool,
        kind: Kind,
        connections: u32,
        each_does: u32,
        text: &str,
    ) -> anyhow::Result<f64> {
        let node = &self.node;
        self.many_at(&|| node.client(fabric), kind, connections, each_does, text)
    }

    /// The same with clients that `connect` makes.
    fn many_at(
        &self,
        connect: &(dyn Fn() -> anyhow::Result<Client> + Sync),
        kind: Kind,
        connections: u32,
        each_does: u32,
        text: &str,
    ) -> anyhow::Result<f64> {
        let ready = std::sync::Barrier::new(connections as usize + 1);
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..connections)
                .map(|number| {
                    let ready = &ready;
                    scope.spawn(move || {
                        let client = connect();
                        ready.wait();
                        let mut client = client?;
                        for id in 0..each_does {
                            operate(&mut client, kind, number * each_does + id, text)?;
                        }
                        Ok::<_, anyhow::Error>(())
                    })
                })
                .collect();
            ready.wait();
            let start = Instant::now();
            for thread in threads {
                let ended = thread.join();
                ended.map_err(|_| anyhow::anyhow!("a client's thread panicked"))??;
            }
            Ok(f64::from(connections * each_does) / start.elapsed().as_secs_f64())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_and_system_time_count() {
        let fields = "R 1 2 3 4 5 6 7 8 9 10 250 50 60 10";
        let text = format!("17 (a (b) c) {fields}");
        assert!((cpu_seconds_of(&text) - 3.0).abs() < 1e-9);
        assert!((seconds_of(&text, 13) - 0.7).abs() < 1e-9, "those of children that ended");
        assert_eq!(cpu_seconds_of("x"), 0.0);
    }

    #[test]
    fn both_kinds_of_switches_count() {
        let text = "Name:\tx\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t5\n";
        assert_eq!(switches_of(text), 12);
    }
}

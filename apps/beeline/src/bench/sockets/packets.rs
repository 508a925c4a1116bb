//! `--lane packets`: connections through a memory window, between two network namespaces of this host
//! with a proxy in each, against kernel TCP through a veth pair between the same namespaces, and
//! against the window alone.
//!
//! A third way between the same namespaces are the relays of the ring lane over an `ntb://` link of their own.
//!
//! Four parties (two programs, two proxies) share the cores with nothing else; the peers are given
//! the same cores. Beside each figure stands what it cost: processor time, sleeps and displacements
//! of every party for each round or send, and packets for each visit of a thread.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::super::report::{Better, Report, Row};
use super::super::turns::{Contender, alternate, online};
use super::costs::{Costs, Figure};
use super::{Part, SocketsArguments, Transport, Work, modes, name, packet_programs, window};
use crate::output::Output;

pub(super) const SUBJECT: &str = "packets";
pub(super) const PEER: &str = "kernel TCP through veth";
pub(super) const ADDRESSES: [&str; 2] = ["10.78.0.1", "10.78.0.2"];
const PATIENCE: Duration = Duration::from_secs(20);
/// Bytes of each direction of the window.
const WINDOW_BYTES: usize = 16 << 20;
/// Bytes of the window between relays, both directions.
const RELAY_WINDOW_BYTES: u64 = 64 << 20;
const RELAYS: &str = "relays over ntb";

/// A process that is ended with its owner.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A relay, which outlives the monitor that started it.
struct Relay(i32);

impl Drop for Relay {
    fn drop(&mut self) {
        if let Some(process) = rustix::process::Pid::from_raw(self.0) {
            let _ = rustix::process::kill_process(process, rustix::process::Signal::KILL);
        }
    }
}

/// Two network namespaces with a cable between them, removed at the end.
struct Namespaces([String; 2]);

fn ip(words: &[&str]) -> anyhow::Result<()> {
    let output = Command::new("ip").args(words).output();
    let output = output.context("ip, which makes the two network namespaces, cannot be run")?;
    let said = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "ip {}: {}", words.join(" "), said.trim());
    Ok(())
}

impl Namespaces {
    fn make() -> anyhow::Result<Self> {
        let names = ["a", "b"].map(|end| format!("bench{}{end}", std::process::id()));
        let all = Self(names);
        for name in &all.0 {
            ip(&["netns", "add", name]).context("this bench wants two hosts: run it as root")?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
        }
        let [one, other] = &all.0;
        let pair = ["link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns"];
        ip(&[&["-n", one][..], &pair, &[other]].concat())?;
        for (name, address) in all.0.iter().zip(ADDRESSES) {
            ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", "cable"])?;
            ip(&["-n", name, "link", "set", "cable", "up"])?;
        }
        Ok(all)
    }

    fn command(&self, side: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0[side]]).arg(program);
        command.env("BEELINE_SOCKETS_MONITOR", format!("beeline-bench-{}", std::process::id()));
        command.env("BEELINE_SOCKETS_ASK_AFTER", "0");
        command
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            let _ = Command::new("ip").args(["netns", "del", name]).stderr(Stdio::null()).status();
        }
    }
}

/// Both hosts, with proxies whose link is up.
pub(super) struct Hosts<'a> {
    // Ended before the namespaces go.
    proxies: Vec<Ended>,
    _monitors: Vec<Ended>,
    /// Monitors with relays, for programs that go by their name.
    relays: (Vec<Ended>, Vec<Relay>),
    namespaces: Namespaces,
    folder: tempfile::TempDir,
    pub(super) arguments: &'a SocketsArguments,
}

/// Rows of a proxy's status.
#[derive(Clone, Debug, Default)]
struct Status(serde_json::Value);

impl Status {
    /// The sum of a counter over all partitions.
    fn sum(&self, row: &str) -> u64 {
        let rows = self.0["proxy"].as_object();
        let ends = rows.into_iter().flatten().filter(|(name, _)| {
            name.starts_with("other, partition ") && name.ends_with(&format!(": {row}"))
        });
        ends.filter_map(|(_, value)| value.as_str()?.parse::<u64>().ok()).sum()
    }
}

/// What carries the connections of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    Packets,
    /// As packets, by the lane's own calls.
    Lane,
    Relays,
    Kernel,
}

impl<'a> Hosts<'a> {
    /// `more`: of both lists of peers.
    pub(super) fn start(arguments: &'a SocketsArguments, more: &str) -> anyhow::Result<Self> {
        let namespaces = Namespaces::make()?;
        let folder = tempfile::tempdir().context("a folder for the window")?;
        let own = std::env::current_exe().context("finding this program")?;
        let (proxies, _monitors, relays) = (Vec::new(), Vec::new(), Default::default());
        let mut hosts = Self { proxies, _monitors, relays, namespaces, folder, arguments };
        for side in 0..2 {
            let mut monitor = hosts.namespaces.command(side, &own);
            monitor.args(["--quiet", "sockets", "monitor"]).stdin(Stdio::null());
            hosts._monitors.push(Ended(monitor.spawn().context("starting a monitor")?));
            let (peers, window) = hosts.configure(side, more)?;
            let mut proxy = hosts.namespaces.command(side, &own);
            proxy.args(["--quiet", "sockets", "proxy", "--window", &window, "--peers"]).arg(peers);
            hosts.proxies.push(Ended(proxy.stdin(Stdio::null()).spawn()?));
        }
        let until = Instant::now() + PATIENCE;
        while !(0..2).all(|side| hosts.status(side).0["proxy"]["link to other"] == "up") {
            anyhow::ensure!(Instant::now() < until, "the link between the proxies did not come up");
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(hosts)
    }

    fn configure(&self, side: usize, more: &str) -> anyhow::Result<(std::path::PathBuf, String)> {
        let peers = self.folder.path().join(format!("{side}.toml"));
        let [own, other] = [ADDRESSES[side], ADDRESSES[1 - side]];
        let text = format!(
            "addresses = [\"{own}\"]\nlisten = \"{own}:9090\"\n{more}\n[[peers]]\n\
             name = \"other\"\naddresses = [\"{other}\"]\nmonitor = \"{other}:9090\"\n"
        );
        std::fs::write(&peers, text).context("writing the list of peers")?;
        let file = self.folder.path().join("window");
        Ok((peers, format!("ntb://{}?side={side}&size={WINDOW_BYTES}", file.display())))
    }

    fn status(&self, side: usize) -> Status {
        let Ok(own) = std::env::current_exe() else { return Status::default() };
        let mut command = self.namespaces.command(side, own);
        command.args(["sockets", "status", "--json"]).stderr(Stdio::null());
        let text = command.output().map(|output| output.stdout).unwrap_or_default();
        Status(serde_json::from_slice(&text).unwrap_or_default())
    }

    /// Monitors with relays that have a window of their own, beside the proxies.
    fn start_relays(&mut self) -> anyhow::Result<()> {
        let own = std::env::current_exe().context("finding this program")?;
        let window = self.folder.path().join("relays");
        let file = std::fs::File::create(&window).context("a window for relays")?;
        file.set_len(RELAY_WINDOW_BYTES).context("room for a window")?;
        for side in 0..2 {
            let url =
                |host: &str| format!("ntb://{host}:4791?window={}&side={side}", window.display());
            let text = format!(
                "listen = \"{}\"\n[[hosts]]\naddresses = [\"{}\"]\nrelay = \"{}\"\n",
                url(ADDRESSES[side]),
                ADDRESSES[1 - side],
                url(ADDRESSES[1 - side]),
            );
            let path = self.folder.path().join(format!("hosts-{side}.toml"));
            std::fs::write(&path, text).context("writing the list of hosts")?;
            let mut monitor = self.namespaces.command(side, &own);
            monitor.args(["--quiet", "sockets", "monitor", "--hosts"]).arg(&path);
            monitor.env("BEELINE_SOCKETS_MONITOR", relays()).stdin(Stdio::null());
            let monitor = monitor.spawn().context("starting a monitor with a relay")?;
            self.relays.0.push(Ended(monitor));
        }
        let process = |side: usize| {
            let mut command = self.namespaces.command(side, &own);
            command.args(["sockets", "status", "--json"]).stderr(Stdio::null());
            let output = command.env("BEELINE_SOCKETS_MONITOR", relays()).output();
            let text = output.map(|output| output.stdout).unwrap_or_default();
            let status: serde_json::Value = serde_json::from_slice(&text).unwrap_or_default();
            status["relay"]["process"].as_i64()
        };
        let until = Instant::now() + PATIENCE;
        let mut found = Vec::new();
        while found.len() < 2 {
            anyhow::ensure!(Instant::now() < until, "the relays did not begin");
            std::thread::sleep(Duration::from_millis(50));
            found = (0..2).filter_map(process).collect();
        }
        let relay = |process: i64| Relay(i32::try_from(process).unwrap_or(0));
        self.relays.1 = found.into_iter().map(relay).collect();
        Ok(())
    }

    /// `program` at a host, under `beeline run` where neither the kernel nor its own calls carry it.
    pub(super) fn program(
        &self,
        side: usize,
        by: By,
        program: impl AsRef<std::ffi::OsStr>,
    ) -> anyhow::Result<Command> {
        if matches!(by, By::Kernel | By::Lane) {
            return Ok(self.namespaces.command(side, program));
        }
        let own = std::env::current_exe().context("finding this program")?;
        let mut command = self.namespaces.command(side, &own);
        command.args(["--quiet", "run"]);
        if let Some(library) = &self.arguments.library {
            command.arg("--library").arg(library);
        }
        if by == By::Relays {
            command.env("BEELINE_SOCKETS_MONITOR", relays());
        }
        command.arg("--").arg(program.as_ref());
        Ok(command)
    }

    /// `bench sockets-peer` at a host.
    fn peer(&self, side: usize, by: By, words: &[String]) -> anyhow::Result<Command> {
        let own = std::env::current_exe().context("finding this program")?;
        let mut command = self.program(side, by, own)?;
        command.args(["bench", "sockets-peer", "--costs", "--transport", &name(Transport::Tcp)]);
        command.args(words);
        if by == By::Lane {
            command.arg("--by-lane");
        }
        Ok(command)
    }

    fn serve(&self, by: By, words: &[String]) -> anyhow::Result<Server> {
        let mut command = self.peer(1, by, words)?;
        command.args(["--serve", "--listen", &format!("{}:0", ADDRESSES[1])]);
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(child.stdout.take().context("the server's output")?);
        let child = Ended(child);
        let mut address = String::new();
        said.read_line(&mut address)?;
        Ok(Server { child, said, address: address.trim().to_owned() })
    }

    /// One conversation: the figure, and what the programs and the proxies spent.
    pub(super) fn turn(&self, by: By, words: &[String]) -> anyhow::Result<Turn> {
        let server = self.serve(by, words)?;
        let before = self.proxies_costs();
        let mut asker = self.peer(0, by, words)?;
        asker.args(["--to", &server.address]);
        let output = asker.stderr(Stdio::inherit()).output().context("starting a peer")?;
        let proxies = self.proxies_costs() - before;
        anyhow::ensure!(output.status.success(), "the asking process failed: {}", output.status);
        let text = String::from_utf8_lossy(&output.stdout);
        let (figure, costs) = text.trim().split_once(' ').context("a figure and its cost")?;
        let programs = costs.parse::<Costs>()? + server.costs()?;
        Ok(Turn { figure: figure.parse()?, programs, proxies })
    }

    /// Bytes that both proxies copied so far.
    pub(super) fn copied(&self) -> u64 {
        [0, 1].map(|side| self.status(side).sum("bytes copied")).iter().sum()
    }

    fn proxies_costs(&self) -> Costs {
        // `ip netns exec` becomes the program. A process of its own that the proxy started is part of it.
        let all = self.proxies.iter().flat_map(|proxy| family(proxy.0.id()));
        all.filter_map(|process| Costs::of(&process.to_string()).ok())
            .fold(Costs::default(), |sum, one| sum + one)
    }
}

/// A process and its children.
fn family(process: u32) -> Vec<u32> {
    let mut all = vec![process];
    let path = format!("/proc/{process}/task/{process}/children");
    let children = std::fs::read_to_string(path).unwrap_or_default();
    all.extend(children.split_whitespace().filter_map(|word| word.parse::<u32>().ok()));
    all
}

struct Server {
    child: Ended,
    said: BufReader<std::process::ChildStdout>,
    address: String,
}

impl Server {
    /// What it says at its end.
    fn costs(mut self) -> anyhow::Result<Costs> {
        let mut text = String::new();
        self.said.read_to_string(&mut text)?;
        self.child.0.wait()?;
        text.trim().parse()
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Turn {
    pub(super) figure: Figure,
    pub(super) programs: Costs,
    proxies: Costs,
}

/// What happens in one case.
struct Case<'a> {
    title: String,
    work: Work,
    size: usize,
    /// Of the subject, and of the kernel's.
    rounds: [u64; 2],
    unit: &'static str,
    better: Better,
    /// The window alone, and what it is called.
    bare: Option<(&'a str, Bare)>,
    /// Also by relays, so often.
    relays: Option<u64>,
}

/// The name of the monitors with relays.
fn relays() -> String {
    format!("beeline-bench-{}-relays", std::process::id())
}

/// Measures the window alone: rounds and bytes of a message in, the figure out.
type Bare = fn(u64, usize) -> anyhow::Result<f64>;

pub(super) fn words(work: Work, size: usize, rounds: u64) -> Vec<String> {
    ["--work", &name(work), "--size", &size.to_string(), "--rounds", &rounds.to_string()]
        .map(str::to_owned)
        .into()
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn measure(
    hosts: &Hosts<'_>,
    case: &Case<'_>,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let figure = |turn: &Turn| {
        // The peers count sends; large ones are told in bytes.
        let value = turn.figure.value;
        if case.unit == "GB/s" { value * case.size as f64 / 1e9 } else { value }
    };
    let (mut tails, mut kernels_tails) = (Vec::new(), Vec::new());
    let (mut own, mut kernels) = (Turn::default(), Turn::default());
    let before = [0, 1].map(|side| hosts.status(side));
    let mut contenders = vec![
        Contender::new(SUBJECT, || {
            own = hosts.turn(By::Packets, &words(case.work, case.size, case.rounds[0]))?;
            tails.extend(own.figure.p99_us);
            Ok(figure(&own))
        }),
        Contender::new(PEER, || {
            kernels = hosts.turn(By::Kernel, &words(case.work, case.size, case.rounds[1]))?;
            kernels_tails.extend(kernels.figure.p99_us);
            Ok(figure(&kernels))
        }),
    ];
    if let Some(rounds) = case.relays {
        contenders.push(Contender::new(RELAYS, move || {
            Ok(figure(&hosts.turn(By::Relays, &words(case.work, case.size, rounds))?))
        }));
    }
    if let Some((title, turn)) = case.bare {
        contenders.push(Contender::new(title, move || turn(case.rounds[0], case.size)));
    }
    let names: Vec<String> = contenders.iter().map(|contender| contender.name.to_owned()).collect();
    let turns = hosts.arguments.options.turns();
    let figures = alternate(turns, &mut contenders, output)?;
    drop(contenders);
    let after = [0, 1].map(|side| hosts.status(side));
    let grown = |row: &str| -> f64 {
        let sum = |all: &[Status; 2]| all.iter().map(|status| status.sum(row)).sum::<u64>();
        (sum(&after) - sum(&before)) as f64 / f64::from(turns)
    };
    let each = |count: f64| format!("{:.3}", count / case.rounds[0] as f64);
    let carried = grown("packets sent");
    anyhow::ensure!(carried > 0.0, "nothing went through the window: {}", hosts.reason());
    let us = |ns: u64, rounds: u64| format!("{:.3}", ns as f64 / 1e3 / rounds as f64);
    for (peer, theirs) in names.iter().zip(&figures).skip(1) {
        let mut row = Row::new(&case.title, SUBJECT, case.unit, case.better, &figures[0])
            .against(peer, &figures[0], theirs)
            .beside("cores", online().min(2));
        if peer == PEER {
            row = row
                .beside("programs_us", us(own.programs.processor_ns, case.rounds[0]))
                .beside("proxies_us", us(own.proxies.processor_ns, case.rounds[0]))
                .beside("programs_sleeps", each(own.programs.slept as f64))
                .beside("proxies_sleeps", each(own.proxies.slept as f64))
                .beside("switches", each((own.programs.displaced + own.proxies.displaced) as f64))
                .beside("kernel_us", us(kernels.programs.processor_ns, case.rounds[1]))
                .beside("packets", each(carried))
                .beside("credits", each(grown("credits sent")))
                .beside("program_rings", each(grown("rings to programs")))
                .beside(
                    "packets_a_turn",
                    format!("{:.2}", carried / grown("turns with work").max(1.0)),
                )
                .beside("drops", grown("drops"));
            if !tails.is_empty() {
                row = row.p99("us", &tails, &kernels_tails);
            }
        }
        report.push(row);
    }
    Ok(())
}

impl Hosts<'_> {
    fn reason(&self) -> String {
        self.status(0).0["proxy"].to_string()
    }
}

/// The command.
pub fn run(
    arguments: &SocketsArguments,
    parts: &[Part],
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let mut hosts = Hosts::start(arguments, "")?;
    if parts.contains(&Part::Data) {
        hosts.start_relays()?;
    }
    for part in parts {
        match part {
            Part::Data => data(&hosts, report, output)?,
            Part::Redis => packet_programs::redis(&hosts, &arguments.options, report, output)?,
            Part::Nginx => packet_programs::nginx(&hosts, &arguments.options, report, output)?,
            Part::Sizes => sizes(&hosts, report, output)?,
            Part::Modes => modes::modes(&hosts, report, output)?,
            Part::Breakdown => breakdown(&hosts, report, output)?,
            Part::Isolation => isolation(&hosts, report, output)?,
            Part::Idle => idle(&hosts, report)?,
            // Behind the others, since it needs proxies of its own.
            _ => {}
        }
    }
    drop(hosts);
    if parts.contains(&Part::Partitions) {
        partitions(arguments, report, output)?;
    }
    if parts.contains(&Part::Slicing) {
        slicing(arguments, report, output)?;
    }
    if parts.contains(&Part::Threads) {
        threads(arguments, report, output)?;
    }
    Ok(())
}

fn data(hosts: &Hosts<'_>, report: &mut Report, output: Output) -> anyhow::Result<()> {
    let rounds = |full: u64, kernel: u64| {
        [full, kernel].map(|rounds| hosts.arguments.options.size(rounds, 100))
    };
    let cases = [
        Case {
            title: "8 B round trip".to_owned(),
            work: Work::PingPong,
            size: 8,
            rounds: rounds(50_000, 20_000),
            unit: "us",
            better: Better::Lower,
            bare: Some(("bare window", window::ping_pong)),
            relays: Some(rounds(20_000, 0)[0]),
        },
        Case {
            title: "8 B sends".to_owned(),
            work: Work::Messages,
            size: 8,
            rounds: rounds(500_000, 200_000),
            unit: "op/s",
            better: Better::Higher,
            bare: None,
            relays: Some(rounds(200_000, 0)[0]),
        },
        Case {
            title: "64 KiB sends".to_owned(),
            work: Work::Messages,
            size: 64 << 10,
            rounds: rounds(20_000, 20_000),
            unit: "GB/s",
            better: Better::Higher,
            bare: Some(("memory copies through the window", window::stream)),
            relays: Some(rounds(10_000, 0)[0]),
        },
    ];
    cases.iter().try_for_each(|case| measure(hosts, case, report, output))
}

fn sizes(hosts: &Hosts<'_>, report: &mut Report, output: Output) -> anyhow::Result<()> {
    for size in [64, 512, 4 << 10, 32 << 10] {
        let case = Case {
            title: format!("{size} B round trip"),
            work: Work::PingPong,
            size,
            rounds: [20_000, 10_000].map(|rounds| hosts.arguments.options.size(rounds, 50)),
            unit: "us",
            better: Better::Lower,
            bare: None,
            relays: None,
        };
        measure(hosts, &case, report, output)?;
    }
    Ok(())
}

fn breakdown(hosts: &Hosts<'_>, report: &mut Report, output: Output) -> anyhow::Result<()> {
    let case = Case {
        title: "8 B round trip after 1 ms of silence: every party sleeps".to_owned(),
        work: Work::Pauses,
        size: 8,
        rounds: [1_000; 2].map(|rounds| hosts.arguments.options.size(rounds, 20)),
        unit: "us",
        better: Better::Lower,
        bare: None,
        relays: None,
    };
    measure(hosts, &case, report, output)
}

/// Round trips of a small message while another connection sends without pause, over one partition.
fn isolation(hosts: &Hosts<'_>, report: &mut Report, output: Output) -> anyhow::Result<()> {
    let options = &hosts.arguments.options;
    let rounds = options.size(2_000, 20);
    let mut contenders = vec![
        Contender::new(SUBJECT, || beside_a_stream(hosts, By::Packets, rounds)),
        Contender::new(PEER, || beside_a_stream(hosts, By::Kernel, rounds)),
        Contender::new("packets, alone", || {
            Ok(hosts.turn(By::Packets, &words(Work::PingPong, 8, rounds))?.figure.value)
        }),
    ];
    let figures = alternate(options.turns(), &mut contenders, output)?;
    let case = "8 B round trip beside a stream of 64 KiB sends";
    for (peer, theirs) in contenders.iter().zip(&figures).skip(1) {
        let row = Row::new(case, SUBJECT, "us", Better::Lower, &figures[0]);
        report.push(row.against(peer.name, &figures[0], theirs).beside("cores", online().min(2)));
    }
    Ok(())
}

/// Microseconds of a small round trip while another connection sends 64 KiB without pause.
fn beside_a_stream(hosts: &Hosts<'_>, by: By, rounds: u64) -> anyhow::Result<f64> {
    // More than the round trips take; ended with them.
    let stream = words(Work::Messages, 64 << 10, 1 << 30);
    let server = hosts.serve(by, &stream)?;
    let mut asker = hosts.peer(0, by, &stream)?;
    asker.args(["--to", &server.address]).stdout(Stdio::null()).stderr(Stdio::null());
    let _asker = Ended(asker.spawn()?);
    std::thread::sleep(Duration::from_millis(50));
    Ok(hosts.turn(by, &words(Work::PingPong, 8, rounds))?.figure.value)
}

/// The same with slots in which a message of the stream is cut into many, and with slots that take half of one: what
/// slicing is for.
fn slicing(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let rounds = arguments.options.size(2_000, 20);
    // One pair of hosts at a time, so the two do not alternate.
    let mut figures = Vec::new();
    for slot in [4096, 32_768] {
        let hosts = Hosts::start(arguments, &format!("slot_bytes = {slot}\nqueue_blocks = 64"))?;
        let turn = || beside_a_stream(&hosts, By::Packets, rounds);
        let mut alone = vec![Contender::new(SUBJECT, turn)];
        figures.extend(alternate(arguments.options.turns(), &mut alone, output)?);
    }
    let case = "8 B round trip beside a stream of 64 KiB sends, slots of 4 KiB";
    let row = Row::new(case, SUBJECT, "us", Better::Lower, &figures[0]);
    let row = row.against("slots of 32 KiB", &figures[0], &figures[1]);
    report.push(row.beside("cores", online().min(2)));
    Ok(())
}

/// Round trips and large sends where each partition has two threads.
fn threads(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let options = &arguments.options;
    let cases = [
        ("8 B round trip", Work::PingPong, 8, options.size(50_000, 100), "us", Better::Lower),
        (
            "64 KiB sends",
            Work::Messages,
            64 << 10,
            options.size(20_000, 100),
            "op/s",
            Better::Higher,
        ),
    ];
    let mut figures = vec![Vec::new(); cases.len()];
    for count in [2, 1] {
        let hosts = Hosts::start(arguments, &format!("threads_of_a_partition = {count}"))?;
        for (all, &(_, work, size, rounds, ..)) in figures.iter_mut().zip(&cases) {
            let turn = || -> anyhow::Result<f64> {
                Ok(hosts.turn(By::Packets, &words(work, size, rounds))?.figure.value)
            };
            let mut alone = vec![Contender::new(SUBJECT, turn)];
            all.extend(alternate(options.turns(), &mut alone, output)?);
        }
    }
    for ((title, .., unit, better), figures) in cases.into_iter().zip(&figures) {
        let case = format!("{title}, two threads a partition");
        let row = Row::new(case, SUBJECT, unit, better, &figures[0]);
        let row = row.against("one thread that alternates", &figures[0], &figures[1]);
        report.push(row.beside("cores", online()));
    }
    Ok(())
}

/// Processor time of both proxies for each second in which connections are open and silent.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn idle(hosts: &Hosts<'_>, report: &mut Report) -> anyhow::Result<()> {
    let seconds = hosts.arguments.options.size(5_u64, 1);
    let words = words(Work::Pauses, 8, 1 << 40);
    let server = hosts.serve(By::Packets, &words)?;
    let mut asker = hosts.peer(0, By::Packets, &words)?;
    let asker = Ended(asker.args(["--to", &server.address]).stdout(Stdio::null()).spawn()?);
    let until = Instant::now() + PATIENCE;
    while hosts.status(1).sum("connections") == 0 {
        anyhow::ensure!(Instant::now() < until, "nothing was connected: {}", hosts.reason());
        std::thread::sleep(Duration::from_millis(20));
    }
    let stopped = rustix::process::Pid::from_raw(i32::try_from(asker.0.id())?);
    let stop = rustix::process::Signal::STOP;
    rustix::process::kill_process(stopped.context("a process")?, stop)?;
    std::thread::sleep(Duration::from_millis(200));
    let before = hosts.proxies_costs();
    std::thread::sleep(Duration::from_secs(seconds));
    let spent = hosts.proxies_costs() - before;
    let part = spent.processor_ns as f64 / 1e6 / seconds as f64;
    let row =
        Row::new("idle: processor time of both proxies", SUBJECT, "ms/s", Better::Lower, &[part]);
    report.push(row.beside("sleeps_a_second", spent.slept / seconds));
    Ok(())
}

/// Four connections at once over more and more partitions.
fn partitions(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    const FLOWS: usize = 4;
    for partitions in [1, 2, 4] {
        let hosts = Hosts::start(arguments, &format!("partitions = {partitions}"))?;
        let rounds = arguments.options.size(100_000, 100);
        let all = |by: By| -> anyhow::Result<f64> {
            std::thread::scope(|scope| {
                let hosts = &hosts;
                let flows: Vec<_> = (0..FLOWS)
                    .map(|_| {
                        let words = words(Work::Messages, 1024, rounds);
                        scope.spawn(move || hosts.turn(by, &words))
                    })
                    .collect();
                let mut sum = 0.0;
                for flow in flows {
                    sum += flow
                        .join()
                        .map_err(|_| anyhow::anyhow!("a thread panicked"))??
                        .figure
                        .value;
                }
                Ok(sum)
            })
        };
        let mut contenders = vec![
            Contender::new(SUBJECT, || all(By::Packets)),
            Contender::new(PEER, || all(By::Kernel)),
        ];
        let figures = alternate(arguments.options.turns(), &mut contenders, output)?;
        drop(contenders);
        let used = (0..partitions).filter(|index| {
            let row = format!("other, partition {index}: packets sent");
            let status = hosts.status(0);
            status.0["proxy"][&row].as_str().is_some_and(|count| count != "0")
        });
        let case = format!("1 KiB sends over {FLOWS} connections, {partitions} partitions");
        let row = Row::new(case, SUBJECT, "op/s", Better::Higher, &figures[0])
            .against(PEER, &figures[0], &figures[1])
            .beside("cores", online().min(2))
            .beside("partitions_used", used.count());
        report.push(row);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_all_partitions_are_added() {
        let text = r#"{"proxy": {"other, partition 0: packets sent": "7",
            "other, partition 1: packets sent": "5", "other, partition 1: drops": "1"}}"#;
        let status = Status(serde_json::from_str(text).unwrap());
        assert_eq!(status.sum("packets sent"), 12);
        assert_eq!(status.sum("drops"), 1);
        assert_eq!(Status::default().sum("drops"), 0);
        assert!(family(std::process::id()).contains(&std::process::id()));
    }
}

//! Processes that are ended or stopped: from SIGKILL or SIGSTOP of the leader to the next commit,
//! and a follower that comes back.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};

use super::Bench;
use super::rig::Data;
use crate::bench::ports::free_port;
use crate::bench::report::{Better, Row, shown};
use crate::bench::turns::online;

const PATIENCE: Duration = Duration::from_secs(60);

/// One connection to a member.
struct Line(BufReader<TcpStream>);

impl Line {
    fn open(address: SocketAddr) -> anyhow::Result<Self> {
        let stream = TcpStream::connect_timeout(&address, Duration::from_millis(500))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        Ok(Self(BufReader::new(stream)))
    }

    fn ask(&mut self, line: &str) -> anyhow::Result<String> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes())?;
        let mut answer = String::new();
        anyhow::ensure!(self.0.read_line(&mut answer)? > 0, "the member is gone");
        Ok(answer.trim_end().to_owned())
    }
}

/// Members as processes.
pub struct Processes {
    data: Data,
    logs: Vec<SocketAddr>,
    clients: Vec<SocketAddr>,
    slot_bytes: u64,
    provider: &'static str,
    children: Vec<Option<Child>>,
}

impl Drop for Processes {
    fn drop(&mut self) {
        for node in 0..self.children.len() {
            self.kill(node);
        }
    }
}

impl Processes {
    /// `members` over shared memory with data below `parent`.
    pub fn start(parent: &Path, members: usize, slot_bytes: u64) -> anyhow::Result<Self> {
        Self::over("shm", parent, members, slot_bytes)
    }

    fn over(
        provider: &'static str,
        parent: &Path,
        members: usize,
        slot_bytes: u64,
    ) -> anyhow::Result<Self> {
        let free = || -> anyhow::Result<SocketAddr> {
            Ok(SocketAddr::from(([127, 0, 0, 1], free_port()?)))
        };
        let all = || (0..members).map(|_| free()).collect::<anyhow::Result<Vec<_>>>();
        let (logs, clients) = (all()?, all()?);
        let children = (0..members).map(|_| None).collect();
        let data = Data::new(parent)?;
        let mut processes = Self { data, logs, clients, slot_bytes, provider, children };
        for node in 0..members {
            processes.spawn(node)?;
        }
        Ok(processes)
    }

    fn spawn(&mut self, node: usize) -> anyhow::Result<()> {
        let logs: Vec<_> = self.logs.iter().map(SocketAddr::to_string).collect();
        let folder = self.data.path().join(node.to_string());
        let child = Command::new(std::env::current_exe()?)
            .args(["bench", "log-member"])
            .arg(folder)
            .args([node.to_string(), self.slot_bytes.to_string()])
            .arg(self.clients[node].to_string())
            .args(["--logs", &logs.join(","), "--provider", self.provider])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(self.said(node))?)
            .spawn()
            .context("starting a member")?;
        self.children[node] = Some(child);
        Ok(())
    }

    /// The file with what a member has to say.
    fn said(&self, node: usize) -> PathBuf {
        self.data.path().join(format!("{node}.log"))
    }

    /// Each member's role and the last lines it said.
    fn described(&self) -> String {
        let describe = |node| {
            let role = match self.status(node) {
                Ok((role, applied)) => format!("{role}, {applied} applied"),
                Err(error) => format!("{error:#}"),
            };
            let said = std::fs::read_to_string(self.said(node)).unwrap_or_default();
            let lines: Vec<_> = said.lines().collect();
            let last = lines[lines.len().saturating_sub(8)..].join("\n  ");
            format!("member {node}: {role}\n  {last}")
        };
        (0..self.children.len()).map(describe).collect::<Vec<_>>().join("\n")
    }

    fn kill(&mut self, node: usize) {
        if let Some(mut child) = self.children[node].take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    fn signal(&self, node: usize, signal: Signal) -> anyhow::Result<()> {
        let child = self.children[node].as_ref().context("the member runs")?;
        let id = Pid::from_raw(i32::try_from(child.id())?).context("a process has an id")?;
        kill_process(id, signal).context("signalling a member")
    }

    fn running(&self) -> Vec<usize> {
        (0..self.children.len()).filter(|node| self.children[*node].is_some()).collect()
    }

    fn status(&self, node: usize) -> anyhow::Result<(String, u64)> {
        let answer = Line::open(self.clients[node])?.ask("status ?")?;
        let (role, applied) = answer.split_once(' ').context("a status has two words")?;
        Ok((role.to_owned(), applied.parse()?))
    }

    /// The leader among these.
    pub fn leader(&self, nodes: &[usize]) -> anyhow::Result<usize> {
        let start = Instant::now();
        loop {
            let leads = |node: &&usize| self.status(**node).is_ok_and(|(role, _)| role == "Leader");
            if let Some(leader) = nodes.iter().find(leads) {
                return Ok(*leader);
            }
            anyhow::ensure!(
                start.elapsed() < PATIENCE,
                "no leader within {PATIENCE:?}\n{}",
                self.described()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Commits through a socket, one after another: microseconds at p50.
    pub fn commits_us(&self, leader: usize, bytes: usize, count: u32) -> anyhow::Result<f64> {
        let mut line = Line::open(self.clients[leader])?;
        let mut latencies = Vec::new();
        for _ in 0..count {
            let start = Instant::now();
            let mut answer = line.ask(&format!("put {bytes}"))?;
            while answer != "ok" {
                // Another leads: a member that waited long for a processor suspected this one.
                anyhow::ensure!(start.elapsed() < PATIENCE, "{answer}");
                line = Line::open(self.clients[self.leader(&self.running())?])?;
                answer = line.ask(&format!("put {bytes}"))?;
            }
            latencies.push(start.elapsed().as_nanos() as f64 / 1e3);
        }
        latencies.sort_by(f64::total_cmp);
        Ok(latencies[latencies.len() / 2])
    }
}

/// What happens to the leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Ends,
    /// Its memory goes on answering where the provider needs no processor for it.
    Stops,
}

/// Other work on the same processors, until it is dropped: a busy thread for each, and a client of
/// each member that writes.
struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Load {
    fn start(clients: &[SocketAddr]) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        for _ in 0..online() {
            let stop = Arc::clone(&stop);
            threads.push(std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            }));
        }
        for address in clients.iter().copied() {
            let stop = Arc::clone(&stop);
            threads.push(std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let Ok(mut line) = Line::open(address) else {
                        std::thread::sleep(Duration::from_millis(20));
                        continue;
                    };
                    while !stop.load(Ordering::Relaxed) {
                        match line.ask("put 64") {
                            Ok(answer) if answer == "ok" => {}
                            // It does not lead, or stands still.
                            Ok(_) => std::thread::sleep(Duration::from_millis(5)),
                            Err(_) => break,
                        }
                    }
                }
            }));
        }
        Self { stop, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A client that panicked makes the load lighter, and nothing else.
            let _ = thread.join();
        }
    }
}

/// Ends or stops the leader; milliseconds until another member commits.
fn fail_over(processes: &mut Processes, nodes: &[usize], fate: Fate) -> anyhow::Result<f64> {
    let leader = processes.leader(nodes)?;
    processes.commits_us(leader, 8, 10)?;
    let leader = processes.leader(nodes)?;
    let mut others = Vec::new();
    for node in nodes.iter().copied().filter(|node| *node != leader) {
        others.push(Line::open(processes.clients[node])?);
    }
    // All followers have been heard of since they came back.
    std::thread::sleep(Duration::from_millis(400));
    let start = Instant::now();
    match fate {
        Fate::Ends => processes.kill(leader),
        Fate::Stops => processes.signal(leader, Signal::STOP)?,
    }
    'committed: loop {
        for line in &mut others {
            if line.ask("put 8").is_ok_and(|answer| answer == "ok") {
                break 'committed;
            }
        }
        anyhow::ensure!(start.elapsed() < PATIENCE, "no commit within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
    let figure = start.elapsed().as_secs_f64() * 1e3;
    match fate {
        Fate::Ends => processes.spawn(leader)?,
        Fate::Stops => processes.signal(leader, Signal::CONT)?,
    }
    let back = Instant::now();
    while processes.status(leader).is_ok_and(|(role, _)| role != "Follower")
        || processes.status(leader).is_err()
    {
        anyhow::ensure!(back.elapsed() < PATIENCE, "a member did not come back");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(figure)
}

/// Fail-over times.
pub fn rows(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let count = bench.options.size(bench.options.amount(None, 40, 12), 1);
    let mut rows = Vec::new();
    for members in bench.arguments.members.iter().copied().filter(|members| *members > 2) {
        let mut processes = Processes::start(&bench.arguments.data, members, 2048)?;
        let nodes: Vec<_> = (0..members).collect();
        let mut figures = Vec::new();
        for _ in 0..count {
            figures.push(fail_over(&mut processes, &nodes, Fate::Ends)?);
        }
        let case = format!("end of the leader to the next commit, {members} members");
        let row = Row::new(case, "log", "ms", Better::Lower, &figures);
        rows.push(shown(row.beside("processes", members), bench.output));
    }
    Ok(rows)
}

/// Times to the next commit when the leader is stopped and its memory may answer: on an idle
/// machine and beside other work, over each provider.
pub fn stopped(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let count = bench.options.size(bench.options.amount(None, 50, 12), 1);
    let nodes = [0, 1, 2];
    let mut rows = Vec::new();
    for provider in ["shm", "tcp"] {
        for busy in [false, true] {
            let mut processes = Processes::over(provider, &bench.arguments.data, 3, 2048)?;
            processes.leader(&nodes)?;
            let _load = busy.then(|| Load::start(&processes.clients));
            let mut figures = Vec::new();
            for _ in 0..count {
                figures.push(fail_over(&mut processes, &nodes, Fate::Stops)?);
            }
            let load = if busy { "under load" } else { "idle" };
            let longest = figures.iter().copied().fold(0.0, f64::max);
            bench.output.note(format!("{provider}, {load}: longest of {count}: {longest:.0} ms"));
            let case = format!("stop of the leader to the next commit over {provider}, {load}");
            rows.push(shown(Row::new(case, "log", "ms", Better::Lower, &figures), bench.output));
        }
    }
    Ok(rows)
}

/// A follower that missed much: MB/s until it has everything.
pub fn catch_up(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let mib = bench.options.amount(bench.arguments.missed_mib, 1024, 64);
    let mib = bench.options.size(mib, 1);
    let mut figures = Vec::new();
    for _ in 0..bench.options.size(1, 1) {
        let command = 16 << 10;
        let mut processes = Processes::start(&bench.arguments.data, 3, 20 << 10)?;
        let leader = processes.leader(&[0, 1, 2])?;
        let away = if leader == 0 { 1 } else { 0 };
        processes.kill(away);
        let count = u32::try_from((mib << 20) / command)?;
        processes.commits_us(leader, command as usize, count)?;
        let (_, wanted) = processes.status(leader)?;
        let start = Instant::now();
        processes.spawn(away)?;
        while processes.status(away).map_or(0, |(_, applied)| applied) < wanted {
            anyhow::ensure!(start.elapsed() < 2 * PATIENCE, "the member did not catch up");
            std::thread::sleep(Duration::from_millis(5));
        }
        figures.push((mib << 20) as f64 / 1e6 / start.elapsed().as_secs_f64());
    }
    let case = format!("a follower that missed {mib} MiB, from its start to having all");
    Ok(vec![Row::new(case, "log", "MB/s", Better::Higher, &figures)])
}

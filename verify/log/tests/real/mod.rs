//! Clusters of real processes, and clients that note what they saw.

#![allow(dead_code, reason = "each suite uses a part")]

pub mod network;
pub mod switch;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_verify_clients::free_port;
use beeline_verify_log::linear::{Call, Operation, is_linearizable};
use beeline_verify_log::machine::{Item, Key};

/// Nothing takes longer.
pub const LIMIT: Duration = Duration::from_secs(30);
pub const KEYS: u64 = 3;

pub fn deep() -> bool {
    std::env::var_os("BEELINE_DEEP").is_some()
}

/// Says that a test did not run; `cargo xtask` counts the line.
pub fn skip(test: &str, reason: &str) {
    let _ = writeln!(std::io::stderr(), "{test} ... skipped: {reason}");
}

/// A line for the table of `cargo xtask`.
pub fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "ran: {line}");
}

pub fn eventually<T>(what: &str, mut question: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(start.elapsed() < LIMIT, "{what}: not within {LIMIT:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// One connection to a member.
#[derive(Debug)]
pub struct Line(BufReader<TcpStream>);

impl Line {
    pub fn open(address: SocketAddr, patience: Duration) -> Option<Self> {
        let stream = TcpStream::connect_timeout(&address, patience).ok()?;
        stream.set_read_timeout(Some(patience)).ok()?;
        stream.set_write_timeout(Some(patience)).ok()?;
        stream.set_nodelay(true).ok()?;
        Some(Self(BufReader::new(stream)))
    }

    /// Asks; `None` when the connection is of no use any more.
    pub fn ask(&mut self, line: &str) -> Option<String> {
        self.0.get_mut().write_all(format!("{line}\n").as_bytes()).ok()?;
        let mut answer = String::new();
        let read = self.0.read_line(&mut answer).ok()?;
        (read > 0 && answer.ends_with('\n')).then(|| answer.trim_end().to_owned())
    }
}

#[derive(Clone, Debug)]
pub struct Shape {
    pub provider: &'static str,
    pub slots: u64,
    pub slot_bytes: u64,
    /// Runs member n, from 1, in front of its command.
    pub wrap: fn(usize) -> Vec<String>,
    /// Address of member n.
    pub host: fn(usize) -> String,
    pub power: bool,
}

impl Shape {
    pub fn new(provider: &'static str) -> Self {
        Self {
            provider,
            slots: 256,
            slot_bytes: 2048,
            wrap: |_| Vec::new(),
            host: |_| "127.0.0.1".to_owned(),
            power: false,
        }
    }
}

#[derive(Debug)]
struct Process {
    child: Child,
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Members from 1 on; they die with this.
#[derive(Debug)]
pub struct Cluster {
    shape: Shape,
    home: tempfile::TempDir,
    /// Where a member's folder is, if not below `home`.
    pub folders: Vec<PathBuf>,
    log: Vec<String>,
    pub clients: Vec<SocketAddr>,
    founders: usize,
    processes: Vec<Option<Process>>,
}

impl Cluster {
    /// `founders` members that run, and room for up to `all`.
    pub fn new(shape: Shape, founders: usize, all: usize) -> Self {
        let mut cluster = Self::cold(shape, founders, all);
        for node in 1..=founders {
            cluster.start(node);
        }
        cluster
    }

    pub fn cold(shape: Shape, founders: usize, all: usize) -> Self {
        let home = tempfile::tempdir().unwrap();
        let log = (1..=all).map(|node| format!("{}:{}", (shape.host)(node), free_port())).collect();
        let address = |node| format!("{}:{}", (shape.host)(node), free_port()).parse().unwrap();
        let clients = (1..=all).map(address).collect();
        let folders = (1..=all).map(|node| home.path().join(node.to_string())).collect();
        let processes = (0..all).map(|_| None).collect();
        Self { shape, home, folders, log, clients, founders, processes }
    }

    pub fn folder(&self, node: usize) -> PathBuf {
        self.folders[node - 1].clone()
    }

    pub fn log_address(&self, node: usize) -> &str {
        &self.log[node - 1]
    }

    pub fn start(&mut self, node: usize) {
        let one = |node: usize| format!("{node}={}", self.log[node - 1]);
        let founders = (1..=self.founders).map(one).collect::<Vec<_>>().join(",");
        let members = if node <= self.founders { founders } else { "-".to_owned() };
        self.start_with(node, members);
    }

    /// As a server that waits to join, whatever it was.
    pub fn start_joining(&mut self, node: usize) {
        self.start_with(node, "-".to_owned());
    }

    /// Its disk is lost.
    pub fn wipe(&mut self, node: usize) {
        assert!(!self.is_up(node), "it would go on with files that have no name");
        std::fs::remove_dir_all(self.folder(node)).unwrap();
    }

    fn start_with(&mut self, node: usize, members: String) {
        let mut words = (self.shape.wrap)(node);
        words.push(env!("CARGO_BIN_EXE_beeline-log-member").to_owned());
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(self.folder(node));
        command.args([&node.to_string(), "77", self.shape.provider, &self.log[node - 1]]);
        command.arg(self.clients[node - 1].to_string());
        command.args([self.shape.slots.to_string(), self.shape.slot_bytes.to_string(), members]);
        if self.shape.power {
            command.env("BEELINE_LOG_DURABILITY", "power");
        }
        // A port or a lock of the process before may take a moment.
        eventually("the member starts", || {
            let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = String::new();
            BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
            if line.trim() != "ready" {
                let _ = child.wait();
                return None;
            }
            self.processes[node - 1] = Some(Process { child });
            Some(())
        });
    }

    pub fn pid(&self, node: usize) -> u32 {
        self.processes[node - 1].as_ref().unwrap().child.id()
    }

    pub fn is_up(&self, node: usize) -> bool {
        self.processes[node - 1].is_some()
    }

    /// SIGKILL, and the end seen.
    pub fn kill(&mut self, node: usize) {
        self.processes[node - 1] = None;
    }

    pub fn signal(&self, node: usize, signal: libc::c_int) {
        let pid = libc::pid_t::try_from(self.pid(node)).unwrap();
        // SAFETY: no memory is involved; the process is a child of ours that was not waited for.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    /// Whether the kernel says that the process stands still.
    pub fn is_stopped(&self, node: usize) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid(node))).unwrap();
        stat.rsplit(')').next().unwrap().trim_start().starts_with(['T', 't'])
    }

    pub fn stop(&self, node: usize) {
        self.signal(node, libc::SIGSTOP);
        eventually("the process stands still", || self.is_stopped(node).then_some(()));
    }

    pub fn go_on(&self, node: usize) {
        self.signal(node, libc::SIGCONT);
    }

    pub fn ask(&self, node: usize, line: &str) -> Option<String> {
        Line::open(self.clients[node - 1], Duration::from_secs(12))?.ask(line)
    }

    /// A field of a member's status.
    pub fn field(&self, node: usize, name: &str) -> Option<String> {
        let answer = self.ask(node, "status")?;
        let prefix = format!("{name}=");
        answer.split(' ').find_map(|word| Some(word.strip_prefix(&prefix)?.to_owned()))
    }

    pub fn number(&self, node: usize, name: &str) -> u64 {
        self.field(node, name).and_then(|text| text.parse().ok()).unwrap_or_default()
    }

    /// The leader among these, once there is one that can commit.
    pub fn leader_of(&self, nodes: &[usize]) -> usize {
        eventually("a leader", || {
            nodes.iter().copied().find(|node| {
                let leads = self.field(*node, "role").as_deref() == Some("Leader");
                leads && self.ask(*node, "read 200").is_some_and(|answer| answer.starts_with("ok"))
            })
        })
    }

    pub fn leader(&self) -> usize {
        let up: Vec<_> = (1..=self.processes.len()).filter(|node| self.is_up(*node)).collect();
        self.leader_of(&up)
    }

    /// Appends without a session, by whoever leads among `nodes`.
    pub fn append(&self, nodes: &[usize], key: Key, item: Item, padding: usize) {
        let line = format!("append {} 0 {key} {item} {padding}", u64::MAX);
        let mut links: Vec<(usize, Line)> = Vec::new();
        eventually("an append", || {
            for node in nodes {
                let at = links.iter().position(|(known, _)| known == node);
                let mut link = match at {
                    Some(at) => links.swap_remove(at).1,
                    None => Line::open(self.clients[node - 1], Duration::from_secs(3))?,
                };
                match link.ask(&line) {
                    Some(answer) if answer.starts_with("ok") => return Some(()),
                    Some(_) => links.push((*node, link)),
                    None => {}
                }
            }
            None
        });
    }

    /// Whether a member follows another that leads. Which one may change on a loaded machine,
    /// where members suspect each other for nothing.
    pub fn follows(&self, node: usize) -> Option<()> {
        let leader: usize = self.field(node, "leader")?.parse().ok()?;
        let other = leader != node && (1..=self.clients.len()).contains(&leader);
        (other && self.field(leader, "role")? == "Leader").then_some(())
    }

    /// What a member has applied of a list.
    pub fn list(&self, node: usize, key: Key) -> Option<Vec<Item>> {
        let answer = self.ask(node, &format!("stale {key}"))?;
        let items = answer.strip_prefix("ok")?.trim();
        items.split(',').filter(|item| !item.is_empty()).map(|item| item.parse().ok()).collect()
    }

    /// Until these members have applied the same.
    pub fn converge(&self, nodes: &[usize]) -> Vec<Vec<Item>> {
        eventually("all members have applied the same", || {
            let lists = |node: &usize| -> Option<Vec<Vec<Item>>> {
                (0..KEYS as Key).map(|key| self.list(*node, key)).collect()
            };
            let first = lists(&nodes[0])?;
            let same = nodes.iter().all(|node| lists(node).as_ref() == Some(&first));
            same.then_some(first)
        })
    }
}

/// Clients that append and read until they are told to stop.
#[derive(Debug)]
pub struct Clients {
    stop: Arc<AtomicBool>,
    pub done: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Vec<(Key, Call)>>>,
}

/// Which members clients ask.
pub type Known = Arc<Mutex<Vec<SocketAddr>>>;

struct Client {
    number: u32,
    members: Known,
    at: usize,
    line: Option<Line>,
}

impl Client {
    /// Asks one member after another until one answers `ok` or `fail`, or `give_up` says so.
    fn ask(&mut self, line: &str, give_up: impl Fn() -> bool) -> Option<String> {
        loop {
            let members = self.members.lock().unwrap().clone();
            let address = members[self.at % members.len()];
            if self.line.is_none() {
                self.line = Line::open(address, Duration::from_millis(1200));
            }
            let answer = self.line.as_mut().and_then(|link| link.ask(line));
            match answer {
                Some(answer) if !answer.starts_with("retry") => return Some(answer),
                _ if give_up() => return None,
                _ => {
                    self.line = None;
                    self.at += 1;
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
        }
    }

    fn run(mut self, stop: &AtomicBool, done: &AtomicU64, start: Instant) -> Vec<(Key, Call)> {
        let now_ns = || start.elapsed().as_nanos() as u64;
        let mut history = Vec::new();
        let mut item = self.number << 20;
        let hurry = Instant::now() + 10 * LIMIT;
        let late = || Instant::now() > hurry;
        'session: while !stop.load(Ordering::Relaxed) {
            let Some(name) = self.ask("open", late) else { break };
            let Some(name) = name.strip_prefix("ok ").map(str::to_owned) else { continue };
            let mut sequence = 0;
            while !stop.load(Ordering::Relaxed) {
                item += 1;
                let key = (item % KEYS as u32) as Key;
                let from_ns = now_ns();
                let call = |to_ns, operation| (key, Call { from_ns, to_ns, operation });
                if item.is_multiple_of(3) {
                    let Some(answer) = self.ask(&format!("read {key}"), late) else { break };
                    let Some(list) = answer.strip_prefix("ok") else { continue };
                    let list = list.trim().split(',').filter(|item| !item.is_empty());
                    let list = list.map(|item| item.parse().unwrap()).collect();
                    history.push(call(now_ns(), Operation::Read(list)));
                } else {
                    sequence += 1;
                    let line = format!("append {name} {sequence} {key} {item} 40");
                    let answer = self.ask(&line, late).unwrap_or_default();
                    match answer.strip_prefix("ok ").and_then(|length| length.parse().ok()) {
                        Some(length) => {
                            let operation = Operation::Append(item, Some(length));
                            history.push(call(now_ns(), operation));
                        }
                        None => {
                            // Refused now; an earlier try may have run.
                            history.push(call(u64::MAX, Operation::Append(item, None)));
                            continue 'session;
                        }
                    }
                }
                done.fetch_add(1, Ordering::Relaxed);
                // Short histories are searched quickly.
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        history
    }
}

impl Clients {
    pub fn start(members: &Known, count: u32) -> Self {
        let (stop, done) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let start = Instant::now();
        let one = |number: u32| {
            let (stop, done, members) = (Arc::clone(&stop), Arc::clone(&done), members.clone());
            let client = Client { number: number + 1, members, at: number as usize, line: None };
            std::thread::spawn(move || client.run(&stop, &done, start))
        };
        let threads = (0..count).map(one).collect();
        Self { stop, done, threads }
    }

    pub fn progress(&self) -> u64 {
        self.done.load(Ordering::Relaxed)
    }

    /// Waits until so many more operations are answered.
    pub fn go_on(&self, more: u64) {
        let from = self.progress();
        eventually("clients go on", || (self.progress() >= from + more).then_some(()));
    }

    /// Ends them; what they saw has to be linearizable, and what they were told has to be in
    /// `lists`. Returns how many operations were answered.
    pub fn check(self, lists: impl FnOnce() -> Vec<Vec<Item>>) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        let histories: Vec<_> =
            self.threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let lists = lists();
        let mut answered = 0;
        for key in 0..KEYS as Key {
            let of_key = histories.iter().flatten().filter(|(of, _)| *of == key);
            let mut calls: Vec<Call> = of_key.map(|(_, call)| call.clone()).collect();
            let end_ns = u64::MAX - 1;
            let list = lists[usize::from(key)].clone();
            for call in &calls {
                if let Operation::Append(item, Some(_)) = &call.operation {
                    let times = list.iter().filter(|found| *found == item).count();
                    assert_eq!(times, 1, "key {key}: item {item} was acknowledged");
                }
            }
            answered += calls.iter().filter(|call| call.to_ns < end_ns).count();
            let operation = Operation::Read(list);
            calls.push(Call { from_ns: end_ns - 1, to_ns: end_ns, operation });
            assert!(is_linearizable(&calls), "key {key}: the history is not linearizable");
        }
        answered
    }
}

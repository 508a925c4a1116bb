//! `beeline sockets recall`: brings a process's connections back to the kernel, so that it can be moved.
//!
//! It is neither end's, and asks neither: it takes copies of both sockets (`pidfd_getfd`), one connection's
//! at a time, the segment from the monitor, and does what `beeline_sockets::recall` says. Between hosts the
//! relays do it. The monitor introduces nothing of these processes meanwhile, so that what is the kernel's
//! stays so. What the monitor does not know of is looked for in the processes themselves: they have it
//! mapped.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::SocketAddr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use beeline_sockets::recall::{NotRecalled, recall, stop_waiting};
use beeline_sockets::relayed::Request;
use beeline_sockets::segment::{STATE_MATCHING, STATE_OPEN, STATE_PAIRED, STATE_RETURNED, Segment};
use beeline_sockets::{control, introduce};
use rustix::net::sockopt::{socket_cookie, socket_type};
use rustix::net::{SocketType, getpeername, getsockname};
use rustix::process::{
    Pid, PidfdFlags, PidfdGetfdFlags, Resource, getrlimit, pidfd_getfd, pidfd_open, setrlimit,
};
use serde::Serialize;

use crate::config::Knob as _;
use crate::config::values::Span;
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::{Output, table};
use crate::sockets::mapped::{self, Mapped};

/// Longest wait for two relays.
const PATIENCE: Duration = Duration::from_secs(5);
/// The monitor is asked so often before it is taken not to answer.
const QUESTIONS: u32 = 4;
/// An end that stays may ask anew after so long.
const STAYS: Duration = Duration::from_secs(1);

/// What to bring back.
#[derive(Debug, clap::Args)]
pub struct RecallArguments {
    /// A process; its children, and theirs, are meant too.
    #[arg(long, required = true, value_name = "PID")]
    pid: Vec<u32>,
    /// How long these connections, and new ones of these processes, stay with the kernel, unless they are
    /// restored elsewhere before: an hour at most for new ones. 0s: no longer.
    #[arg(long, default_value = "60s", value_parser = Span::parse, value_name = "TIME")]
    hold: Span,
}

#[derive(Serialize)]
struct Line {
    process: u32,
    own: String,
    peer: String,
    outcome: String,
    #[serde(skip)]
    has_failed: bool,
}

impl Line {
    fn failed(process: u32, own: String, peer: &str, error: &anyhow::Error) -> Self {
        let outcome = format!("accelerated still: {error:#}");
        Self { process, own, peer: peer.to_owned(), outcome, has_failed: true }
    }
}

/// One socket of one of the processes.
struct Found {
    process: u32,
    inode: u64,
    socket: OwnedFd,
    own: SocketAddr,
    peer: SocketAddr,
}

/// Where sockets are: by their number in `/proc`, a process and a descriptor of its.
type Places = HashMap<u64, Vec<(u32, i32)>>;

fn inode_of(link: &std::path::Path) -> Option<u64> {
    link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
}

fn numbers_in(folder: &str) -> impl Iterator<Item = u32> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn sockets_of(process: u32) -> Vec<(u64, i32)> {
    let folder = format!("/proc/{process}/fd");
    let link = |fd: u32| std::fs::read_link(format!("{folder}/{fd}")).ok();
    numbers_in(&folder)
        .filter_map(|fd| Some((inode_of(&link(fd)?)?, i32::try_from(fd).ok()?)))
        .collect()
}

/// The sockets of every process that we may look into.
fn places() -> Places {
    let mut places = Places::new();
    for process in numbers_in("/proc") {
        for (inode, fd) in sockets_of(process) {
            places.entry(inode).or_default().push((process, fd));
        }
    }
    places
}

/// Processes and all their descendants.
fn with_descendants(roots: &[u32]) -> BTreeSet<u32> {
    let parent = |process: u32| -> Option<u32> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    let parents: BTreeMap<u32, u32> =
        numbers_in("/proc").filter_map(|process| Some((process, parent(process)?))).collect();
    let mut all: BTreeSet<u32> = roots.iter().copied().collect();
    loop {
        let more: Vec<u32> = parents
            .iter()
            .filter(|(process, parent)| all.contains(parent) && !all.contains(process))
            .map(|(&process, _)| process)
            .collect();
        if more.is_empty() {
            return all;
        }
        all.extend(more);
    }
}

/// An address as `/proc/net/tcp` and `tcp6` write it: words in the machine's order.
fn address(text: &str) -> Option<SocketAddr> {
    let (host, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words: Option<Vec<u32>> = (0..host.len() / 8)
        .map(|at| u32::from_str_radix(host.get(at * 8..at * 8 + 8)?, 16).ok())
        .collect();
    let host = match words?.as_slice() {
        [word] => std::net::IpAddr::from(word.to_ne_bytes()),
        [one, two, three, four] => {
            let mut bytes = [0; 16];
            for (place, word) in bytes.chunks_exact_mut(4).zip([one, two, three, four]) {
                place.copy_from_slice(&word.to_ne_bytes());
            }
            std::net::IpAddr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(SocketAddr::new(host, port))
}

/// One end as the kernel lists it.
#[derive(Clone, Copy)]
struct Listed {
    /// Neither end has ended its direction.
    is_whole: bool,
    /// Number of the socket; 0: it is nobody's any more.
    inode: u64,
}

/// Connections of this network namespace that have begun, by own and other address.
fn listed() -> HashMap<(SocketAddr, SocketAddr), Listed> {
    const ESTABLISHED: &str = "01";
    // Of which an end was shut or closed: they end, or wait for the other one's end.
    const HALF_OVER: [&str; 5] = ["04", "05", "08", "09", "0B"];
    let mut known = HashMap::new();
    for file in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(file).unwrap_or_default().lines().skip(1) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let [_, own, peer, state, ..] = words.as_slice() else { continue };
            let is_whole = *state == ESTABLISHED;
            if !is_whole && !HALF_OVER.contains(state) {
                continue;
            }
            let inode = words.get(9).and_then(|word| word.parse().ok());
            if let (Some(own), Some(peer), Some(inode)) = (address(own), address(peer), inode) {
                known.insert((own, peer), Listed { is_whole, inode });
            }
        }
    }
    known
}

fn copy(process: u32, fd: i32) -> anyhow::Result<OwnedFd> {
    let refused = || {
        format!(
            "no copy of descriptor {fd} of process {process}: this takes the rights of a debugger \
             (root, or kernel.yama.ptrace_scope=0)"
        )
    };
    let number = i32::try_from(process).ok().and_then(Pid::from_raw).context("no process")?;
    let handle = pidfd_open(number, PidfdFlags::empty()).with_context(refused)?;
    pidfd_getfd(handle, fd, PidfdGetfdFlags::empty()).with_context(refused)
}

/// As many as we may have: each process looked into takes some for a moment.
fn allow_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Refused, what does not fit says so.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// Its numbers of processes and its network are ours.
fn shares_namespaces(process: u32) -> anyhow::Result<()> {
    for (kind, flag) in [("net", "--net"), ("pid", "--pid")] {
        let of = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/{kind}"));
        let theirs = of(&process.to_string())
            .with_context(|| format!("there is no process {process}, or it is not yours"))?;
        if theirs != of("self")? {
            bail!(
                "process {process} is in another {kind} namespace: run this as `nsenter --target \
                 {process} {flag} beeline sockets recall ...`"
            );
        }
    }
    Ok(())
}

fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Own and other address of a connected internet socket.
fn ends_of(socket: &OwnedFd) -> Option<(SocketAddr, SocketAddr)> {
    let internet =
        |address: rustix::net::SocketAddrAny| SocketAddr::try_from(address).ok().map(canonical);
    Some((internet(getsockname(socket).ok()?)?, internet(getpeername(socket).ok()??)?))
}

/// True when nobody has the other end of a connection, and this one's kernel has heard of it: what is left is
/// to read the rest. The memory moves with the program, and nobody else writes there.
fn is_left(found: &Found, ends: &HashMap<(SocketAddr, SocketAddr), Listed>) -> bool {
    let far = ends.get(&(found.peer, found.own));
    let own = ends.get(&(found.own, found.peer));
    far.is_none_or(|far| far.inode == 0) && own.is_some_and(|own| !own.is_whole)
}

fn is_gone(error: &anyhow::Error) -> bool {
    use rustix::io::Errno;
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<Errno>())
        .any(|errno| matches!(*errno, Errno::BADF | Errno::SRCH))
}

/// What is known of a call's processes.
struct Scene {
    hold: Duration,
    processes: BTreeSet<u32>,
    places: Places,
    ends: HashMap<(SocketAddr, SocketAddr), Listed>,
    /// Segments that were found to be a connection's of theirs.
    known: HashSet<u64>,
    /// Processes with a connection that is not known to be accelerated.
    plain: BTreeSet<u32>,
    /// Sockets whose connection has ended, by the kernel's number.
    ended: HashSet<u64>,
}

/// The segment of a socket as the monitor or a relay has it, however busy they are.
fn told(socket: &OwnedFd) -> anyhow::Result<Option<Segment>> {
    let mut asked = 1;
    loop {
        match introduce::resumed(socket.as_fd()) {
            Err(_) if asked < QUESTIONS => asked += 1,
            answer => return answer.context("the monitor, or the relay, does not answer"),
        }
    }
}

/// Whether a connection is accelerated. One that only waits for its other end would be later: it stops
/// waiting, if it is to stay the kernel's for a while.
fn is_accelerated(segment: &Segment, hold: Duration) -> anyhow::Result<bool> {
    let begun = Instant::now();
    loop {
        match segment.state().load(Ordering::Acquire) {
            STATE_PAIRED => return Ok(true),
            // Its relay and another agree on it at this moment.
            STATE_MATCHING if begun.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(1));
            }
            STATE_MATCHING => bail!("the relays did not agree on it in {} s", PATIENCE.as_secs()),
            STATE_OPEN if hold.is_zero() || stop_waiting(segment, hold) => return Ok(false),
            STATE_OPEN => {}
            _ => return Ok(false),
        }
    }
}

/// Nothing of `process` is introduced for the time of `hold`.
fn hold_back(process: u32, hold: Duration) -> anyhow::Result<()> {
    let number = i32::try_from(process).ok().and_then(Pid::from_raw).context("no process")?;
    let handle = match pidfd_open(number, PidfdFlags::empty()) {
        // It ended meanwhile.
        Err(rustix::io::Errno::SRCH) => return Ok(()),
        handle => handle.with_context(|| format!("process {process}"))?,
    };
    introduce::hold(handle.as_fd(), hold).with_context(|| {
        format!(
            "the monitor at {} does not hold process {process} back: one of an earlier version has to \
             be restarted (connections stay); one in another process namespace cannot",
            control::name()
        )
    })
}

impl Scene {
    fn begin(roots: &[u32], hold: Duration) -> Self {
        Self {
            hold,
            processes: with_descendants(roots),
            places: places(),
            ends: listed(),
            known: HashSet::new(),
            plain: BTreeSet::new(),
            ended: HashSet::new(),
        }
    }

    /// Descriptor `fd` of `process`, socket `inode`, if it is a connected TCP socket.
    fn find(&mut self, process: u32, inode: u64, fd: i32) -> anyhow::Result<Option<Found>> {
        let socket = match copy(process, fd) {
            // Closed meanwhile.
            Err(error) if is_gone(&error) => return Ok(None),
            socket => socket?,
        };
        if socket_type(&socket) != Ok(SocketType::STREAM) {
            return Ok(None);
        }
        let ends = ends_of(&socket);
        if ends.is_none() {
            self.ended.extend(socket_cookie(&socket));
        }
        Ok(ends.map(|(own, peer)| Found { process, inode, socket, own, peer }))
    }

    /// Who has a socket.
    fn holders(&self, inode: u64) -> &[(u32, i32)] {
        self.places.get(&inode).map_or(&[], Vec::as_slice)
    }

    /// What those who have a socket have mapped: not all of them need the library.
    fn mapped_by_holders(&self, inode: u64) -> impl Iterator<Item = Mapped> {
        self.holders(inode).iter().flat_map(|(process, _)| mapped::of(*process))
    }

    /// The segment of a socket that neither monitor nor relay knows of, and the two sockets it says it
    /// belongs to.
    fn untold(&self, found: &Found) -> anyhow::Result<Option<(Segment, [u64; 2])>> {
        let cookie = socket_cookie(&found.socket)?;
        for one in self.mapped_by_holders(found.inode) {
            if let Some(cookies) = one.carries()
                && let Some(side) = cookies.iter().position(|other| *other == cookie)
            {
                return Ok(Some((one.take(side)?, cookies)));
            }
        }
        Ok(None)
    }

    /// What became of one connection; `None` for one that is not accelerated.
    fn bring_back(&mut self, found: &Found) -> anyhow::Result<Option<&'static str>> {
        let (segment, cookies) = match told(&found.socket)? {
            Some(segment) => (segment, None),
            None => match self.untold(found)? {
                Some((segment, cookies)) => (segment, Some(cookies)),
                None => {
                    self.plain.insert(found.process);
                    return Ok(None);
                }
            },
        };
        self.known.insert(segment.file());
        shares_namespaces(found.process)?;
        if !is_accelerated(&segment, self.hold)? {
            return Ok(None);
        }
        if let Some(cookie) = segment.relayed() {
            return self.by_relays(&segment, cookie);
        }
        // The list is no moment's: one that seems to be left out is looked for once more.
        if is_left(found, &self.ends) && is_left(found, &listed()) {
            return Ok(Some("over: its other end was closed"));
        }
        let far = self.ends.get(&(found.peer, found.own)).map(|listed| listed.inode);
        let far = far.filter(|inode| !self.holders(*inode).is_empty());
        let far = far.context("no process that may be looked into has its other end")?;
        let other = self.other_end(found, far)?;
        if let Some(cookies) = cookies {
            // Told by nobody but the ends' programs: then both of them are to have it.
            let cookie = socket_cookie(&other)?;
            let has = self.mapped_by_holders(far).any(|one| one.file == segment.file());
            if !has || !cookies.contains(&cookie) {
                bail!("the monitor does not know its memory, and its two ends do not agree on it");
            }
        }
        let moves = self.holders(far).iter().any(|(process, _)| self.processes.contains(process));
        let holds = [self.hold, if moves { self.hold } else { STAYS }];
        // As that end sees it: its own is the first of two.
        match recall(&segment, [found.socket.as_fd(), other.as_fd()], holds) {
            Ok(()) => Ok(Some("with the kernel")),
            Err(NotRecalled::Kernels) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// A copy of the other end, of the first of its holders that can be had one from.
    fn other_end(&self, found: &Found, far: u64) -> anyhow::Result<OwnedFd> {
        let mut outcome = Err(anyhow!("nobody has its other end"));
        for &(process, fd) in self.holders(far) {
            let other = shares_namespaces(process).and_then(|()| copy(process, fd));
            match other {
                Ok(other) if ends_of(&other) == Some((found.peer, found.own)) => {
                    return Ok(other);
                }
                Ok(_) => outcome = Err(anyhow!("its other end is elsewhere by now; try again")),
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    fn by_relays(&self, segment: &Segment, cookie: u64) -> anyhow::Result<Option<&'static str>> {
        let hold_ms = u64::try_from(self.hold.as_millis()).unwrap_or(u64::MAX);
        introduce::tell_relay(&Request::Recall { cookie, hold_ms })
            .context("the relay does not answer")?;
        let begun = Instant::now();
        loop {
            match segment.state().load(Ordering::Acquire) {
                STATE_RETURNED => return Ok(Some("with the kernel")),
                STATE_PAIRED => {}
                _ => return Ok(None),
            }
            if begun.elapsed() > PATIENCE {
                bail!("the relays did not bring it back in {} s", PATIENCE.as_secs());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Everything that `process` has: what became of each connection, save of those that were not
    /// accelerated.
    fn bring_back_all(&mut self, process: u32, seen: &mut HashSet<u64>, lines: &mut Vec<Line>) {
        for (inode, fd) in sockets_of(process) {
            if !seen.insert(inode) {
                continue;
            }
            // One at a time: a copy that lies here keeps the kernel from ending what its program closes.
            let found = match self.find(process, inode, fd) {
                Ok(Some(found)) => found,
                Ok(None) => continue,
                Err(error) => {
                    lines.push(Line::failed(process, format!("descriptor {fd}"), "-", &error));
                    // What one is refused all are.
                    return;
                }
            };
            let (own, peer) = (found.own.to_string(), found.peer.to_string());
            lines.push(match self.bring_back(&found) {
                Ok(None) => continue,
                Ok(Some(outcome)) => {
                    Line { process, own, peer, outcome: outcome.to_owned(), has_failed: false }
                }
                Err(error) => Line::failed(process, own, &peer, &error),
            });
        }
    }

    /// Segments that carry a connection of a process, and nobody knows which: an earlier checkpoint was
    /// restored with them, or a monitor's name was another's. A process that handed its sockets on may have
    /// old ones.
    fn unaccounted(&self) -> impl Iterator<Item = (u32, usize)> {
        self.plain.iter().filter_map(|&process| {
            let all = mapped::of(process);
            let carries = |one: &Mapped| {
                let cookies = one.carries();
                cookies.is_some_and(|two| !two.iter().any(|cookie| self.ended.contains(cookie)))
            };
            let unknown = |one: &&Mapped| !self.known.contains(&one.file) && carries(one);
            let count = all.iter().filter(unknown).count();
            (count > 0).then_some((process, count))
        })
    }
}

/// `beeline sockets recall`.
pub fn run(arguments: &RecallArguments, output: Output) -> Result<Exit, Failure> {
    for &process in &arguments.pid {
        shares_namespaces(process).or_exit(Exit::Usage)?;
    }
    introduce::dial()
        .with_context(|| format!("no monitor of this user answers at {}", control::name()))
        .or_exit(Exit::Unreachable)?;
    allow_descriptors();
    let mut scene = Scene::begin(&arguments.pid, arguments.hold.0);
    let processes = scene.processes.clone();
    for &process in &processes {
        hold_back(process, arguments.hold.0).or_exit(Exit::Failed)?;
    }
    let (mut seen, mut lines) = (HashSet::new(), Vec::new());
    for &process in &processes {
        scene.bring_back_all(process, &mut seen, &mut lines);
    }
    for (process, count) in scene.unaccounted() {
        let error = anyhow!(
            "neither monitor nor relay know these, nor which of its connections they are; let the process \
             close them, or stay"
        );
        lines.push(Line::failed(process, format!("{count} of its connections"), "-", &error));
    }
    let failed = lines.iter().filter(|line| line.has_failed).count();
    if output.json {
        for line in &lines {
            output.object(line)?;
        }
    } else {
        let rows: Vec<Vec<String>> = lines
            .into_iter()
            .map(|line| vec![line.process.to_string(), line.own, line.peer, line.outcome])
            .collect();
        output.bytes(table(&["PROCESS", "OWN END", "OTHER END", "NOW"], &rows).as_bytes())?;
    }
    if failed > 0 {
        let error = anyhow!("{failed} of them could not be brought back; the rest are");
        return Err(Failure::new(Exit::Failed, error));
    }
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_kernels_table_are_read() {
        assert_eq!(address("0100007F:1F90"), Some("127.0.0.1:8080".parse().unwrap()));
        let mapped = "0000000000000000FFFF00000100007F:0050";
        assert_eq!(address(mapped), Some("127.0.0.1:80".parse().unwrap()));
        let six = "00000000000000000000000001000000:0016";
        assert_eq!(address(six), Some("[::1]:22".parse().unwrap()));
        for bad in ["", "0100007F", "0100007F:x", "01:16"] {
            assert_eq!(address(bad), None, "{bad}");
        }
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let ends = (stream.local_addr().unwrap(), stream.peer_addr().unwrap());
        let inode = listed().get(&ends).unwrap().inode;
        let me = std::process::id();
        assert!(sockets_of(me).iter().any(|(number, _)| *number == inode));
        assert!(places().get(&inode).unwrap().iter().any(|(process, _)| *process == me));
    }

    #[test]
    fn a_childs_child_is_found() {
        let mut shell =
            std::process::Command::new("sh").args(["-c", "sleep 20 & wait"]).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while with_descendants(&[shell.id()]).len() < 2 && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        let all = with_descendants(&[shell.id()]);
        assert!(all.len() >= 2 && all.contains(&shell.id()), "{all:?}");
        let sleeper = all.iter().copied().find(|one| *one != shell.id()).unwrap();
        let pid = Pid::from_raw(i32::try_from(sleeper).unwrap()).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        shell.kill().unwrap();
        shell.wait().unwrap();
    }
}

//! A graph between network interfaces, with signals while packets flow.
//!
//! One thread: it takes what the interfaces have, runs the graph until nothing moves, sends what
//! comes out, answers a signal, and sleeps in `poll` when there is nothing to do; `host` elements run
//! on another one (see [`crate::sides`]). A packet the device cannot take (too long, device down) is
//! counted and dropped; the others go on.
//!
//! A reload exchanges the graph and keeps the interfaces: another thread compiles the new file while
//! packets flow; then the run takes no packet from the interfaces until what is inside has come out,
//! hands the state over, and goes on with the new graph. What arrives meanwhile waits in the
//! interfaces' rings.

mod control;
pub(crate) mod ports;

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::thread::Scope;
use std::time::{Duration, Instant};

use beeline_ir::graph::Graph;
use beeline_ir::run::{BATCH, Machine, Moved, RunError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::functions::{CommandError, Manager, Signalled as _};
use crate::reload::{Carried, Handover};
use crate::sides::split::TooManyCrossings;
use crate::sides::{LinkOptions, Machines, Make, Plan, Sides, SidesError};
use crate::statistics::{COMMAND, Statistics};
use control::{Asker, LONGEST, Request, listen, next, signalled, told};
pub use control::{ask, command};
use ports::Ports;

/// A run ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LiveError {
    /// An interface.
    #[error("{name}: {source}")]
    Device {
        /// Which.
        name: String,
        /// Why.
        source: io::Error,
    },
    /// The socket for signals.
    #[error("{}: {source}", path.display())]
    Control {
        /// Where.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A handler.
    #[error(transparent)]
    Run(#[from] RunError),
    /// The two sides of a graph.
    #[error(transparent)]
    Sides(#[from] SidesError),
    /// Machine code.
    #[error(transparent)]
    Native(#[from] beeline_native::NativeError),
    /// Channels between the sides.
    #[error(transparent)]
    Crossings(#[from] TooManyCrossings),
    /// A name.
    #[error("the graph has no input or output named {0} that carries packets")]
    NoSuchPort(String),
    /// A port twice.
    #[error("{0} is named twice")]
    Twice(String),
    /// A command before the run.
    #[error("{command}: {source}")]
    Command {
        /// The command.
        command: String,
        /// Why not.
        source: crate::functions::CommandError,
    },
    /// Waiting.
    #[error("waiting for packets: {0}")]
    Wait(io::Error),
}

/// What has passed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Passed {
    /// Packets in.
    pub received: u64,
    /// Packets out.
    pub sent: u64,
    /// Packets that a device did not take.
    pub refused: u64,
    /// Packets that came while a device's ring was full.
    #[serde(default)]
    pub missed: u64,
    /// Flits that were no packet.
    pub malformed: u64,
    /// Signals answered.
    pub signals: u64,
    /// Commands answered.
    pub commands: u64,
    /// Reloads.
    #[serde(default)]
    pub reloads: u64,
}

/// Reads and compiles a file; why not, in words.
pub type Load<'a> = &'a (dyn Fn(&Path) -> Result<Graph, String> + Sync);

/// What a run is told beside its ports.
#[derive(Clone, Copy)]
pub struct Surroundings<'a> {
    /// Where signals and commands come.
    pub control: Option<&'a Path>,
    /// Commands before the first packet.
    pub commands: &'a [String],
    /// Hears what the user should know: an interface that went, or came back.
    pub notify: &'a (dyn Fn(&str) + Sync),
    /// Ends the run.
    pub stop: &'a AtomicBool,
    /// The threads, and the link to `host` elements.
    pub link: LinkOptions,
    /// How long the run looks for packets before it sleeps.
    pub spin: Duration,
    /// Compiles the file of a reload; none where there is none.
    pub load: Option<Load<'a>>,
}

impl std::fmt::Debug for Surroundings<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Surroundings").field("control", &self.control).finish_non_exhaustive()
    }
}

/// How long a run looks for packets before it sleeps, where nothing else is asked for.
pub const SPIN: Duration = Duration::from_micros(50);

/// The word that begins a reload: `reload PATH`, then lines of instances that begin anew.
pub const RELOAD: &str = "reload";
/// The word that sets an element back: `reset INSTANCE`.
pub const RESET: &str = "reset";

/// A graph that waits to take over.
struct Prepared<M> {
    graph: Graph,
    machines: Machines<M>,
    handover: Handover,
}

/// What a thread that prepares a graph tells.
type Preparing<M> = Receiver<Result<Box<Prepared<M>>, String>>;

/// What outlives a graph.
struct World<'a, M> {
    around: Surroundings<'a>,
    make: Make<'a, M>,
    ports: Ports,
    socket: Option<UnixDatagram>,
    manager: Manager,
    passed: Passed,
    buffer: Vec<u8>,
    /// An answer that waits until the graph has the whole command.
    late: Option<(Asker, Result<String, String>)>,
    /// A reload under way, and what asked for it.
    preparing: Option<(Asker, Preparing<M>)>,
}

/// Why a graph ended.
enum Ended<M> {
    Stopped,
    Reloaded(Box<Next<M>>),
}

struct Next<M> {
    prepared: Prepared<M>,
    carried: Arc<Carried>,
    manager: Manager,
    asker: Asker,
    began: Instant,
}

/// Runs until told to stop. An interface that disappears is named, and waited for; the others go on.
///
/// Errors: a port that is not there; the sockets; a command; a handler that does not end.
pub fn run<M: Machine + Send + 'static>(
    graph: &Graph,
    make: Make<'_, M>,
    ports: &[(String, String)],
    around: Surroundings<'_>,
) -> Result<Passed, LiveError> {
    let plan = Plan::threaded(graph, around.link.threads)?;
    let machines = Machines::make(&plan, make)?;
    let opened = Ports::open(&plan, ports)?;
    for (name, way) in opened.ways() {
        (around.notify)(&format!("{name}: {way}"));
    }
    for name in opened.missing(graph) {
        (around.notify)(&format!("{name} has no interface: what is sent there stays in the graph"));
    }
    let socket = around.control.map(listen).transpose()?;
    let mut world = World {
        around,
        make,
        ports: opened,
        socket,
        manager: Manager::of(graph),
        passed: Passed::default(),
        buffer: vec![0; LONGEST],
        late: None,
        preparing: None,
    };
    let outcome = std::thread::scope(|scope| generations(scope, &mut world, graph, machines));
    if let Some(path) = around.control {
        let _ = std::fs::remove_file(path);
    }
    outcome?;
    world.passed.missed = world.ports.missed();
    Ok(world.passed)
}

/// One graph after the other.
fn generations<'s, 'a: 's, M: Machine + Send + 'static>(
    scope: &'s Scope<'s, 'a>,
    world: &mut World<'a, M>,
    graph: &Graph,
    machines: Machines<M>,
) -> Result<(), LiveError> {
    let link = world.around.link;
    let plan = Plan::threaded(graph, link.threads)?;
    let mut sides = Sides::start(&plan, machines, link, None)?;
    for text in world.around.commands {
        let failed = |source| LiveError::Command { command: text.clone(), source };
        world.manager.command(text, &mut sides).map_err(failed)?;
        while world.manager.apply(&mut sides, 1_024)? {}
    }
    let mut ended = generation(scope, world, sides)?;
    while let Ended::Reloaded(next) = ended {
        let Next { prepared, carried, manager, asker, began } = *next;
        let Prepared { graph, machines, handover } = prepared;
        let plan = Plan::threaded(&graph, link.threads)?;
        let mut sides = Sides::start(&plan, machines, link, Some(carried))?;
        world.manager = manager;
        // Before the first packet, so that none meets half of the rules.
        while world.manager.apply(&mut sides, 1_024)? {}
        world.ports.lead_to(&plan);
        world.passed.reloads += 1;
        world.passed.commands += 1;
        let words =
            format!("{}; {} ms without packets", handover.told(), began.elapsed().as_millis());
        if let Some(socket) = &world.socket {
            told(socket, &asker, Ok(&words));
        }
        (world.around.notify)(&format!("reloaded: {words}"));
        ended = generation(scope, world, sides)?;
    }
    Ok(())
}

/// Turns of packets before the control socket is looked at, and before what waits is sent at last.
const TURNS: u32 = 16;
/// Looks for packets instead of sleeping, where the processor is free for it.
///
/// The next packet may be near, and to be woken takes longer than to look. Where another thread wants
/// the processor it is the other way round: a thread that spins uses up its share and then waits for
/// whole slices of the others, a thread that slept is let in at once.
#[derive(Debug, Default)]
struct Spinning {
    /// The first and the last look without a packet.
    since: Option<(Instant, Instant)>,
    /// The processor was lost between two looks: no spinning until then.
    shared_until: Option<Instant>,
}

/// Between two looks no longer passes on a processor of one's own.
const LOST: Duration = Duration::from_micros(300);
/// How long a processor that was lost counts as shared.
const SHARED: Duration = Duration::from_millis(100);

impl Spinning {
    /// Something moved, or the run slept.
    fn moved(&mut self) {
        self.since = None;
    }

    /// True where to look again, for at most `spin` from the first look on.
    fn again(&mut self, spin: Duration) -> bool {
        if spin.is_zero() {
            return false;
        }
        let now = Instant::now();
        let (first, last) = self.since.unwrap_or((now, now));
        self.since = Some((first, now));
        if now.duration_since(last) > LOST {
            self.shared_until = Some(now + SHARED);
        }
        let shared = self.shared_until.is_some_and(|until| now < until);
        !shared && now.duration_since(first) < spin
    }
}

/// Busy times between two looks for errors of the interfaces.
const ASKED: u32 = 1_024;
/// Turns without movement, at the pace of an idle run, after which a wait is named.
const STUCK: u32 = 20;
/// Signals applied between two turns.
const SIGNALS: usize = 256;
/// Longest time in which what is inside comes out.
const DRAIN: Duration = Duration::from_secs(5);

/// Runs a graph until the end, or until another one takes over.
fn generation<'s, 'a: 's, M: Machine + Send + 'static>(
    scope: &'s Scope<'s, 'a>,
    world: &mut World<'a, M>,
    mut sides: Sides<'_, M>,
) -> Result<Ended<M>, LiveError> {
    let (mut still, mut named) = (0_u32, false);
    let mut turns = 0_u32;
    let mut spinning = Spinning::default();
    while !world.around.stop.load(Ordering::Relaxed) {
        let (mut moved, mut round) = (false, Moved::default());
        for _ in 0..TURNS {
            let mut now = world.ports.receive(sides.card(), true, &mut world.passed)?;
            (_, round) = sides.rounds(BATCH)?;
            now |= round.fetched || round.wrote;
            now |= world.ports.send(sides.card(), &mut world.passed);
            moved |= now;
            if !now {
                break;
            }
        }
        world.ports.flush(&mut world.passed);
        moved |= asked(scope, world, &mut sides)?;
        if let Some((prepared, asker)) = world.prepared() {
            moved = true;
            let began = Instant::now();
            match take_over(world, &mut sides, &prepared)? {
                Ok(manager) => {
                    let frames = sides.into_frames();
                    let handover = prepared.handover.clone();
                    let carried = Arc::new(Carried { handover, frames });
                    let next = Next { prepared: *prepared, carried, manager, asker, began };
                    return Ok(Ended::Reloaded(Box::new(next)));
                }
                Err(why) => world.answer(&asker, Err(&why)),
            }
        }
        turns = turns.wrapping_add(1);
        if moved {
            (still, named) = (0, false);
            spinning.moved();
            if turns.is_multiple_of(ASKED) {
                world.ports.ask()?;
                world.ports.look(world.around.notify);
            }
            continue;
        }
        if spinning.again(world.around.spin) {
            std::hint::spin_loop();
            continue;
        }
        spinning.moved();
        still += 1;
        // Packets of another port may end the wait, so the run goes on.
        if still == STUCK && round.blocked && !named {
            named = true;
            let waits = sides.waits();
            if !waits.is_empty() {
                (world.around.notify)(&format!("nothing moves: {}", waits.join("; ")));
            }
        }
        if sides.may_sleep() {
            wait(world, &sides)?;
        }
        world.ports.ask()?;
        world.ports.look(world.around.notify);
    }
    Ok(Ended::Stopped)
}

/// Empties the graph and looks whether the new one can take over; its manager. The old one goes on
/// where it cannot.
fn take_over<M: Machine + Send + 'static>(
    world: &mut World<'_, M>,
    sides: &mut Sides<'_, M>,
    prepared: &Prepared<M>,
) -> Result<Result<Manager, String>, LiveError> {
    let mut failed = None;
    let World { ports, passed, .. } = world;
    let drained = sides.drain(DRAIN, |card| {
        let received = ports.receive(card, false, passed).unwrap_or_else(|error| {
            failed = Some(error);
            false
        });
        let sent = ports.send(card, passed);
        ports.flush(passed);
        sent | received
    });
    if let Some(error) = failed {
        return Err(error);
    }
    match drained {
        Ok(()) => {}
        Err(crate::sides::DrainError::Run(error)) => return Err(error.into()),
        Err(error) => return Ok(Err(error.to_string())),
    }
    let handover = &prepared.handover;
    let old = sides.plan().whole();
    if let Err(error) = handover.check_inputs(old, &|node| sides.frame(node)) {
        return Ok(Err(error.to_string()));
    }
    let manager = world.manager.handed_over(&prepared.graph, &|node| handover.keeps(node));
    Ok(manager.map_err(|error| error.to_string()))
}

/// Answers what was asked at the socket; true where something happened.
fn asked<'s, 'a: 's, M: Machine + Send + 'static>(
    scope: &'s Scope<'s, 'a>,
    world: &mut World<'a, M>,
    sides: &mut Sides<'_, M>,
) -> Result<bool, LiveError> {
    // A few signals a turn, so that packets do not wait for a large change; its answer goes when the
    // graph has it whole.
    if world.manager.apply(sides, SIGNALS)? {
        return Ok(true);
    }
    if let Some((asker, answer)) = world.late.take() {
        let answer = answer.as_ref().map(String::as_str).map_err(String::as_str);
        world.answer(&asker, answer);
        return Ok(true);
    }
    let Some(socket) = &world.socket else { return Ok(false) };
    let Some((asker, request)) = next(socket, &mut world.buffer) else { return Ok(false) };
    let graph = sides.plan().whole();
    match request {
        Request::Nothing => signalled(socket, &asker, None),
        Request::Signal(signal) => {
            let id = signal[0] & 0xffff;
            let is = |node: &beeline_ir::graph::Node| u64::from(node.id) == id && node.signalled;
            let answer = match graph.nodes.iter().position(is) {
                Some(node) => Some(sides.signal_now(node, signal)?),
                None => None,
            };
            signalled(socket, &asker, answer);
            world.passed.signals += u64::from(answer.is_some());
        }
        Request::Words(text) => {
            let (first, rest) = text.split_once(' ').unwrap_or((text.as_str(), ""));
            let answer = match first {
                COMMAND => {
                    world.passed.missed = world.ports.missed();
                    let counted = Statistics::of(sides, world.passed);
                    Ok(serde_json::to_string(&counted).unwrap_or_default())
                }
                RESET => reset(world, sides, rest)?,
                RELOAD => match world.begin_reload(scope, graph, asker.clone(), rest) {
                    Ok(()) => return Ok(true),
                    Err(why) => Err(why),
                },
                _ => match world.manager.command(&text, sides) {
                    Err(CommandError::Run(error)) => return Err(error.into()),
                    answer => answer.map_err(|error| error.to_string()),
                },
            };
            world.late = Some((asker, answer));
        }
    }
    Ok(true)
}

/// Sets an element back; of a function whose tables the manager fills, all of its elements, and the
/// manager fills them again.
fn reset<M: Machine + Send + 'static>(
    world: &mut World<'_, M>,
    sides: &mut Sides<'_, M>,
    name: &str,
) -> Result<Result<String, String>, LiveError> {
    let graph = sides.plan().whole();
    let Some(node) = graph.node_named(name) else {
        return Ok(Err(format!("the graph has no instance {name}")));
    };
    let nodes = world.manager.together(node);
    let manager = match world.manager.handed_over(graph, &|other| !nodes.contains(&other)) {
        Ok(manager) => manager,
        Err(error) => return Ok(Err(error.to_string())),
    };
    for node in &nodes {
        sides.reset(*node)?;
    }
    world.manager = manager;
    // At once, so that no packet meets tables without rules.
    while world.manager.apply(sides, 1_024)? {}
    let names: Vec<&str> = nodes.iter().map(|node| graph.nodes[*node].name.as_str()).collect();
    Ok(Ok(format!("set back: {}", names.join(", "))))
}

impl<'a, M: Machine + Send + 'static> World<'a, M> {
    fn answer(&mut self, asker: &Asker, answer: Result<&str, &str>) {
        if let Some(socket) = &self.socket {
            told(socket, asker, answer);
        }
        self.passed.commands += 1;
    }

    /// Compiles a file on a thread of its own.
    fn begin_reload<'s>(
        &mut self,
        scope: &'s Scope<'s, 'a>,
        running: &Graph,
        asker: Asker,
        text: &str,
    ) -> Result<(), String>
    where
        'a: 's,
    {
        let Some(load) = self.around.load else {
            return Err("this run does not reload".to_owned());
        };
        if self.preparing.is_some() {
            return Err("another reload is under way".to_owned());
        }
        let mut lines = text.lines();
        let path = PathBuf::from(lines.next().unwrap_or_default());
        let restart: Vec<String> = lines.map(str::to_owned).collect();
        let (running, make, threads) = (running.clone(), self.make, self.around.link.threads);
        let (sender, receiver) = sync_channel(1);
        scope.spawn(move || {
            let prepared = prepare(&running, (&path, &restart), load, (make, threads));
            // A run that has ended meanwhile does not need it.
            let _ = sender.send(prepared.map(Box::new));
        });
        self.preparing = Some((asker, receiver));
        Ok(())
    }

    /// The graph of a reload, once it is compiled and fits the ports.
    fn prepared(&mut self) -> Option<(Box<Prepared<M>>, Asker)> {
        let (_, receiver) = self.preparing.as_ref()?;
        let outcome = match receiver.try_recv() {
            Ok(outcome) => outcome,
            Err(TryRecvError::Empty) => return None,
            Err(TryRecvError::Disconnected) => Err("the compiler ended early".to_owned()),
        };
        let (asker, _) = self.preparing.take()?;
        let fits = outcome.and_then(|prepared| {
            self.ports.fit(&prepared.graph)?;
            Ok(prepared)
        });
        match fits {
            Ok(prepared) => Some((prepared, asker)),
            Err(why) => {
                self.answer(&asker, Err(&why));
                None
            }
        }
    }
}

/// A new graph, compiled, and what goes over to it.
fn prepare<M>(
    running: &Graph,
    (path, restart): (&Path, &[String]),
    load: Load<'_>,
    (make, threads): (Make<'_, M>, usize),
) -> Result<Prepared<M>, String> {
    let graph = load(path)?;
    let mut restart = restart.to_vec();
    // Tables that one manager fills begin together.
    let manager = Manager::of(&graph);
    for name in restart.clone() {
        if let Some(node) = graph.node_named(&name) {
            let together = manager.together(node).into_iter();
            restart.extend(together.map(|node| graph.nodes[node].name.clone()));
        }
    }
    let handover = Handover::plan(running, &graph, &restart).map_err(|error| error.to_string())?;
    let words = |error: &dyn std::fmt::Display| error.to_string();
    let plan = Plan::threaded(&graph, threads).map_err(|error| words(&error))?;
    let machines = Machines::make(&plan, make).map_err(|error| words(&error))?;
    Ok(Prepared { graph, machines, handover })
}

/// Sleeps until a packet, a signal or an item of the host's side comes.
fn wait<M: Machine + Send + 'static>(
    world: &World<'_, M>,
    sides: &Sides<'_, M>,
) -> Result<(), LiveError> {
    let mut list: Vec<PollFd<'_>> = world.ports.watched().collect();
    if let Some(socket) = &world.socket {
        list.push(PollFd::from_borrowed_fd(socket.as_fd(), PollFlags::IN));
    }
    list.extend(sides.bells().map(|bell| PollFd::from_borrowed_fd(bell, PollFlags::IN)));
    // Short, so that a stop is seen soon, and a file that is being compiled.
    let short = if world.preparing.is_some() { 1_000_000 } else { 50_000_000 };
    let limit = Timespec { tv_sec: 0, tv_nsec: short };
    match poll(&mut list, Some(&limit)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(LiveError::Wait(error.into())),
    }
}

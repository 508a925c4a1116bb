//! A host: members of many clusters on a fixed number of threads.
//!
//! ```text
//!  Host ── open, close ──▶ thread 1   members of clusters 1, 3, 5 …    one completion queue,
//!    │                     thread 2   members of clusters 2, 4, 6 …    one beat, one sleep
//!  Entrance ◀─ greetings, told apart by their cluster
//! ```
//!
//! A cluster without work rests ([`beeline_paxos::Replica::rest`]): its members take no turns. The thread
//! itself goes on beating, and looks at the beats of the threads that the leaders of its members run on:
//! once per such thread, however many leaders it has. A thousand idle clusters cost what one costs. A
//! thread whose beat stands still for as long as a leader's may is reported to each member that follows
//! a leader there, and each campaigns after a random while.
//!
//! Invariants: a member lives on one thread and is turned by it alone; a host has one member of a cluster
//! at most; a thread ends after its members, and is never joined by itself.

mod resident;
mod thread;
mod watch;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use beeline_fabric::{ConnectInfo, Device};
use beeline_paxos::{ClusterId, Options};

use self::resident::Resident;
use self::thread::{Setup, Task, Worker};
use crate::contact::Contact;
use crate::ground::{FewThreads, Jobs};
use crate::handle::{Bell, Handle, Request};
use crate::hello::Hello;
use crate::home::Home;
use crate::machine::StateMachine;
use crate::node::{Config, Node, NodeError, Seat};
use crate::transport::Transport;

/// How a host runs its members.
#[derive(Debug)]
pub struct HostConfig {
    /// Of the protocol, for every member.
    pub options: Options,
    /// The fabric that the members share.
    pub device: Arc<dyn Device>,
    /// How connection data reaches other hosts.
    pub transport: Arc<dyn Transport>,
    /// Where what may take long is done. Default: up to 16 threads, which go when they have nothing to do.
    pub jobs: Arc<dyn Jobs>,
    /// Requests of one member that wait at most. Default 4096.
    pub queue: usize,
    /// Default 1.
    pub threads: usize,
    /// A leader that was asked for nothing for so long rests. Default 1 s.
    pub rest: Duration,
}

impl HostConfig {
    /// The defaults.
    #[must_use]
    pub fn new(device: Arc<dyn Device>, transport: Arc<dyn Transport>) -> Self {
        let (options, jobs) = (Options::default(), Arc::new(FewThreads::new(16)));
        let rest = Duration::from_secs(1);
        Self { options, device, transport, jobs, queue: 4096, threads: 1, rest }
    }
}

/// What one thread did and has.
#[derive(Debug, Default)]
struct Counts {
    wakeups: AtomicU64,
    turns: AtomicU64,
    members: AtomicU64,
    resting: AtomicU64,
    silences: AtomicU64,
    lines: AtomicU64,
}

/// What one thread of a host did, and has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadStatus {
    /// It slept so often, and woke.
    pub wakeups: u64,
    /// Turns of members.
    pub turns: u64,
    /// Members that it has.
    pub members: u64,
    /// Those of them that rest.
    pub resting: u64,
    /// Threads of other hosts that were taken for dead because their beats stood still.
    pub silences: u64,
    /// Control connections to threads of other hosts, which all its members share.
    pub lines: u64,
}

struct Member {
    handle: Handle,
    thread: usize,
    ended: Receiver<Result<(), NodeError>>,
}

/// The members of a host, by cluster; nothing while one is being opened.
type Members = Mutex<HashMap<ClusterId, Option<Member>>>;

fn lock(members: &Members) -> MutexGuard<'_, HashMap<ClusterId, Option<Member>>> {
    members.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Thread {
    tasks: Sender<Task>,
    bell: Bell,
    counts: Arc<Counts>,
    thread: Option<JoinHandle<()>>,
}

impl Thread {
    fn is_this(&self) -> bool {
        let current = std::thread::current().id();
        self.thread.as_ref().is_some_and(|thread| thread.thread().id() == current)
    }

    fn send(&self, task: Task) -> bool {
        let sent = self.tasks.send(task).is_ok();
        self.bell.ring();
        sent
    }
}

/// See the module's documentation. Dropping it stops its members.
pub struct Host {
    config: Config,
    threads: Vec<Thread>,
    members: Arc<Members>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members = lock(&self.members).len();
        f.debug_struct("Host").field("members", &members).finish_non_exhaustive()
    }
}

/// Where other hosts' greetings go: told apart by their cluster. Cheap to clone; keeps no host alive.
#[derive(Clone)]
pub struct Entrance(Arc<Members>);

impl fmt::Debug for Entrance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Entrance").finish_non_exhaustive()
    }
}

impl Entrance {
    /// Takes what another host's [`Transport::exchange`] carried here, as [`Handle::accept`] does.
    pub fn accept(
        &self,
        info: ConnectInfo,
        hello: Vec<u8>,
        reply: impl FnOnce(Result<(ConnectInfo, Vec<u8>), String>) + Send + 'static,
    ) {
        let cluster = match Hello::cluster_of(&hello) {
            Ok(cluster) => cluster,
            Err(error) => return reply(Err(error.to_string())),
        };
        let member =
            lock(&self.0).get(&cluster).and_then(Option::as_ref).map(|of| of.handle.clone());
        match member {
            Some(handle) => handle.accept(info, hello, reply),
            None => reply(Err(format!("this host has no member of cluster {:016x}", cluster.0))),
        }
    }
}

fn on_own_thread() -> NodeError {
    let reason = "a host's own thread cannot wait for a member of it: ask from another thread";
    NodeError::System(std::io::Error::other(reason))
}

fn gone() -> NodeError {
    NodeError::System(std::io::Error::other("the host's thread has ended"))
}

impl Host {
    /// Starts the threads.
    ///
    /// Errors: [`NodeError`].
    pub fn start(config: HostConfig) -> Result<Self, NodeError> {
        let HostConfig { options, device, transport, jobs, queue, threads, rest } = config;
        let contact = Contact::default();
        let config = Config { options, device, transport, jobs, contact, queue };
        let (none, members) = (Vec::new(), Arc::default());
        let mut host = Self { config, threads: none, members };
        for number in 0..threads.max(1) {
            let all = u16::try_from(threads.max(1)).unwrap_or(u16::MAX);
            let thread = host.start_thread((number, all), rest)?;
            host.threads.push(thread);
        }
        Ok(host)
    }

    fn start_thread(
        &self,
        (number, threads): (usize, u16),
        rest: Duration,
    ) -> Result<Thread, NodeError> {
        let (tasks, queue) = channel();
        let bell = Bell::new().map_err(NodeError::System)?;
        let counts = Arc::<Counts>::default();
        let (sender, started) = channel();
        let setup = Setup {
            device: Arc::clone(&self.config.device),
            options: self.config.options,
            rest,
            threads,
            bell: bell.clone(),
            counts: Arc::clone(&counts),
            tasks: queue,
        };
        let run = move || match Worker::new(setup) {
            Ok(worker) => {
                let _ = sender.send(Ok(()));
                worker.run();
            }
            Err(error) => {
                let _ = sender.send(Err(error));
            }
        };
        let named = std::thread::Builder::new().name(format!("log-host-{number}"));
        let thread = Some(named.spawn(run).map_err(NodeError::System)?);
        let thread = Thread { tasks, bell, counts, thread };
        started.recv().map_err(|_| gone())??;
        Ok(thread)
    }

    /// Opens a member on one of the threads, by its cluster; `contact` is how it is reached.
    ///
    /// Errors: [`NodeError`]; [`NodeError::Twice`].
    pub fn open<S: StateMachine + 'static>(
        &self,
        home: Home,
        contact: Contact,
        machine: S,
    ) -> Result<Handle, NodeError> {
        let cluster = home.cluster();
        let number = (cluster.0 % self.threads.len() as u64) as usize;
        let thread = &self.threads[number];
        if thread.is_this() {
            return Err(on_own_thread());
        }
        match lock(&self.members).entry(cluster) {
            Entry::Occupied(_) => return Err(NodeError::Twice { cluster }),
            Entry::Vacant(place) => {
                place.insert(None);
            }
        }
        let opened = self.open_on(thread, home, contact, machine);
        let mut members = lock(&self.members);
        match opened {
            Ok((handle, ended)) => {
                let member = Member { handle: handle.clone(), thread: number, ended };
                members.insert(cluster, Some(member));
                Ok(handle)
            }
            Err(error) => {
                members.remove(&cluster);
                Err(error)
            }
        }
    }

    fn open_on<S: StateMachine + 'static>(
        &self,
        thread: &Thread,
        home: Home,
        contact: Contact,
        machine: S,
    ) -> Result<(Handle, Receiver<Result<(), NodeError>>), NodeError> {
        let config = self.config.at(contact);
        let (sender, opened) = channel();
        let open = move |seat: Seat| {
            let opening = Node::open_at(home, config, machine, Some(seat));
            let (node, handle) = match opening {
                Ok(opened) => opened,
                Err(error) => {
                    let _ = sender.send(Err(error));
                    return None;
                }
            };
            let (tells, ended) = channel();
            let resident = Resident::new(node, handle.clone(), tells);
            let _ = sender.send(Ok((handle, ended)));
            Some(resident)
        };
        if !thread.send(Task::Open(Box::new(open))) {
            return Err(gone());
        }
        opened.recv().map_err(|_| gone())?
    }

    /// Where greetings of other hosts go.
    #[must_use]
    pub fn entrance(&self) -> Entrance {
        Entrance(Arc::clone(&self.members))
    }

    /// False once the member ended by itself, or where there is none: [`Host::close`] tells why.
    #[must_use]
    pub fn is_running(&self, cluster: ClusterId) -> bool {
        let members = lock(&self.members);
        let member = members.get(&cluster).and_then(Option::as_ref);
        member.is_some_and(|member| member.handle.status().role != beeline_paxos::RoleName::Stopped)
    }

    /// Stops a member, and tells how it ended. On a thread of this host it does not wait for that.
    ///
    /// Errors: [`NodeError`], if the member had ended by itself.
    pub fn close(&self, cluster: ClusterId) -> Result<(), NodeError> {
        let Some(member) = lock(&self.members).remove(&cluster).flatten() else { return Ok(()) };
        member.handle.mailbox.send(Request::Stop);
        if self.threads[member.thread].is_this() {
            return Ok(());
        }
        member.ended.recv().unwrap_or_else(|_| Err(gone()))
    }

    /// What each thread did, and has.
    #[must_use]
    pub fn threads(&self) -> Vec<ThreadStatus> {
        let of = |thread: &Thread| {
            let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
            let Counts { wakeups, turns, members, resting, silences, lines } =
                thread.counts.as_ref();
            let (wakeups, turns) = (get(wakeups), get(turns));
            let (members, resting) = (get(members), get(resting));
            let (silences, lines) = (get(silences), get(lines));
            ThreadStatus { wakeups, turns, members, resting, silences, lines }
        };
        self.threads.iter().map(of).collect()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        lock(&self.members).clear();
        for thread in &self.threads {
            thread.send(Task::Stop);
        }
        for thread in &mut self.threads {
            // The last owner may be a closure that is told something on one of these threads: that one
            // ends once it returns.
            if !thread.is_this()
                && let Some(thread) = thread.thread.take()
            {
                let _ = thread.join();
            }
        }
    }
}

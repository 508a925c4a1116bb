//! A member on a thread of its own, asleep unless there is something to do.

use std::sync::PoisonError;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_os::poller::{Interest, Poller};
use beeline_paxos::RoleName;

use crate::handle::{Handle, Request};
use crate::home::Home;
use crate::machine::StateMachine;
use crate::node::{Config, Node, NodeError};

/// How long it looks for more before it sleeps.
const SPIN: Duration = Duration::from_micros(20);

/// Between two tries to hand the leadership over.
const BETWEEN_TRIES: Duration = Duration::from_millis(5);

/// A running member. Dropping it stops it.
#[derive(Debug)]
pub struct Server {
    handle: Handle,
    thread: Option<JoinHandle<Result<(), NodeError>>>,
}

impl Server {
    /// Starts a member on a thread of its own; returns once it runs.
    ///
    /// Errors: [`NodeError`].
    pub fn start<S: StateMachine + 'static>(
        home: Home,
        config: Config,
        machine: S,
    ) -> Result<(Self, Handle), NodeError> {
        let (sender, started) = channel();
        let name = format!("log-{}", home.id());
        let run = move || {
            // Queue pairs are made on the thread that uses them.
            let (node, handle) = match Node::open(home, config, machine) {
                Ok(opened) => opened,
                Err(error) => {
                    let _ = sender.send(Err(error));
                    return Ok(());
                }
            };
            let _ended = Ended(handle.clone());
            let _ = sender.send(Ok(handle));
            let ended = run(node);
            if let Err(error) = &ended {
                tracing::error!(%error, "the log has stopped");
            }
            ended
        };
        let thread = std::thread::Builder::new().name(name).spawn(run);
        let thread = Some(thread.map_err(NodeError::System)?);
        let gone = || NodeError::System(std::io::Error::other("the log's thread ended at once"));
        let handle = started.recv().map_err(|_| gone())??;
        Ok((Self { handle: handle.clone(), thread }, handle))
    }

    /// False once the member ended by itself: [`Server::stop`] tells why.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Gives the leadership, if this member has it, to the member that lags least, so that nobody
    /// has to miss it first: for a member that is about to stop. Returns whether another one leads
    /// at the end; gives up after `limit`.
    #[must_use]
    pub fn hand_over(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        loop {
            let status = self.handle.status();
            if status.leader != Some(status.id) || !self.is_running() {
                return status.leader.is_some();
            }
            let others = status.members.iter().filter(|member| member.id != status.id);
            let ready = others.filter(|member| member.connected && member.lag.is_some());
            let left = deadline.saturating_duration_since(Instant::now());
            let Some(to) = ready.min_by_key(|member| member.lag).filter(|_| !left.is_zero()) else {
                return false;
            };
            if self.handle.transfer_wait(to.id, left).is_ok() {
                return true;
            }
            std::thread::sleep(BETWEEN_TRIES.min(left));
        }
    }

    /// Stops the member, and tells how it ended.
    ///
    /// Errors: [`NodeError`], if it had ended by itself.
    pub fn stop(mut self) -> Result<(), NodeError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), NodeError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        self.handle.mailbox.send(Request::Stop);
        let panicked = || NodeError::System(std::io::Error::other("the log's thread panicked"));
        thread.join().unwrap_or_else(|_| Err(panicked()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Whoever wants to know how it ended asks `stop`.
        let _ = self.end();
    }
}

/// What everybody sees of a member whose thread ended, however it did.
struct Ended(Handle);

impl Drop for Ended {
    fn drop(&mut self) {
        let mut status = self.0.status.lock().unwrap_or_else(PoisonError::into_inner);
        status.role = RoleName::Stopped;
        (status.leader, status.leader_contact) = (None, None);
    }
}

fn run<S: StateMachine>(mut node: Node<S>) -> Result<(), NodeError> {
    let start = Instant::now();
    let now_ns = || u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let mut poller = Poller::new(4).map_err(NodeError::System)?;
    for descriptor in node.descriptors() {
        poller.add(descriptor, 0, Interest::READ).map_err(NodeError::System)?;
    }
    let mut busy_ns = now_ns();
    while !node.is_stopping() {
        if node.turn(now_ns())? {
            busy_ns = now_ns();
            continue;
        }
        if now_ns().saturating_sub(busy_ns) < SPIN.as_nanos() as u64 {
            std::thread::yield_now();
            continue;
        }
        node.arm()?;
        // What came before arming makes no event.
        if !node.turn(now_ns())? {
            let idle = Duration::from_nanos(node.idle_ns(now_ns()));
            poller.wait(Some(idle)).map_err(NodeError::System)?;
        }
        node.disarm()?;
    }
    Ok(())
}

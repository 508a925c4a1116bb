//! A member on a thread of its own, asleep unless there is something to do.

use std::sync::PoisonError;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_os::poller::{Interest, Poller};
use beeline_paxos::{NodeId, RoleName};

use crate::handle::{Handle, Request};
use crate::home::Home;
use crate::machine::StateMachine;
use crate::node::{Config, Node, NodeError};
use crate::status::Status;

/// How long it looks for more before it sleeps.
const SPIN: Duration = Duration::from_micros(20);

/// Between two tries to hand the leadership over.
const BETWEEN_TRIES: Duration = Duration::from_millis(5);

/// A member that is about to stop waits so long for a majority to be connected again: longer than the
/// higher id of two lets the lower one dial first, shorter than an orderly stop may take.
const RECONNECTING: Duration = Duration::from_millis(300);

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

    /// Gives the leadership, if this member has it, to the member that lags least, so that the others
    /// need not miss this one first: for a member that is about to stop. Returns whether another
    /// member is known to lead at the end.
    ///
    /// Waits up to `limit` while another leader may come about: through an election under way, or a
    /// majority of members that are connected and not yet reached. Where too few members are
    /// connected for any leader, it waits for 300 ms, in which a connection that broke a moment ago
    /// is made anew, and gives up. A member that is alone in its cluster waits for nothing.
    #[must_use]
    pub fn hand_over(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let mut hopeful = Instant::now();
        loop {
            let status = self.handle.status();
            let left = deadline.saturating_duration_since(Instant::now());
            let step = handing_over(&status);
            match step {
                HandingOver::Done => return true,
                HandingOver::Alone => return false,
                _ if left.is_zero() || !self.is_running() => return false,
                HandingOver::Lonely if hopeful.elapsed() >= RECONNECTING => return false,
                HandingOver::Lonely => {}
                HandingOver::Waiting => hopeful = Instant::now(),
                HandingOver::Give(to) => {
                    hopeful = Instant::now();
                    if self.handle.transfer_wait(to, left).is_ok() {
                        return true;
                    }
                }
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

/// How far a member is that wants another one to lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandingOver {
    /// Another one leads.
    Done,
    /// This member leads, and can give the leadership to that one.
    Give(NodeId),
    /// An election, or the leader's access to a connected member's log, is under way.
    Waiting,
    /// Too few members are connected for any leader.
    Lonely,
    /// There is no other member.
    Alone,
}

/// Decides by what the log says of itself, which may be a moment old: none of the answers that wait
/// is final.
fn handing_over(status: &Status) -> HandingOver {
    let others = || status.members.iter().filter(|member| member.id != status.id);
    match status.leader {
        Some(leader) if leader != status.id => return HandingOver::Done,
        Some(_) => {
            let ready = others().filter(|member| member.connected && member.lag.is_some());
            if let Some(to) = ready.min_by_key(|member| member.lag) {
                return HandingOver::Give(to.id);
            }
        }
        None => {}
    }
    // A member that has just started has told of no members yet.
    if others().next().is_none() && !status.members.is_empty() {
        return HandingOver::Alone;
    }
    let connected = status.members.iter().filter(|member| member.connected).count();
    if connected > status.members.len() / 2 { HandingOver::Waiting } else { HandingOver::Lonely }
}

/// What everybody sees of a member whose thread ended, however it did.
pub(crate) struct Ended(pub(crate) Handle);

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

#[cfg(test)]
mod tests {
    use beeline_paxos::{ClusterId, Position, Term};

    use super::*;
    use crate::contact::Contact;
    use crate::status::{Counters, MemberStatus};

    /// What member 1 says; of the others whether each is connected, and its lag.
    fn says(leader: Option<u16>, others: &[(bool, Option<u64>)]) -> Status {
        let member = |id, connected, lag| MemberStatus {
            id: NodeId(id),
            contact: Contact::default(),
            connected,
            confirmed: None,
            lag,
            short: false,
            problem: None,
        };
        let others = (2..).zip(others).map(|(id, (connected, lag))| member(id, *connected, *lag));
        Status {
            id: NodeId(1),
            cluster: ClusterId(1),
            role: RoleName::Follower,
            term: Term(1),
            leader: leader.map(NodeId),
            leader_contact: None,
            last: Position::NONE,
            committed: Position::NONE,
            applied: Position::NONE,
            snapshot: Position::NONE,
            short: false,
            sessions: 0,
            members: std::iter::once(member(1, true, None)).chain(others).collect(),
            counters: Counters::default(),
        }
    }

    /// Each of these moments passes by itself on a slow machine.
    #[test]
    fn a_moment_without_a_leader_or_a_ready_member_ends_no_hand_over() {
        let (gone, near, ready) = ((false, None), (true, None), (true, Some(7)));
        for (what, leader, others, expected) in [
            ("another leads", Some(2), vec![near, near], HandingOver::Done),
            ("the least lag", Some(1), vec![ready, (true, Some(3))], HandingOver::Give(NodeId(3))),
            ("an election", None, vec![near, near], HandingOver::Waiting),
            ("an election without the dead", None, vec![near, gone], HandingOver::Waiting),
            ("each promised itself to another", Some(1), vec![near, near], HandingOver::Waiting),
            ("one is restarted", Some(1), vec![near, gone], HandingOver::Waiting),
            ("the only other one is restarted", Some(1), vec![gone], HandingOver::Lonely),
            ("no majority", None, vec![near, gone, gone, gone], HandingOver::Lonely),
            ("all are dead", None, vec![gone, gone], HandingOver::Lonely),
            ("a cluster of one", Some(1), vec![], HandingOver::Alone),
        ] {
            assert_eq!(handing_over(&says(leader, &others)), expected, "{what}");
        }
        let started = Status { members: Vec::new(), ..says(None, &[]) };
        assert_eq!(handing_over(&started), HandingOver::Lonely, "no members told of yet");
    }
}

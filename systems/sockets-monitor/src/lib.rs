//! The monitor: one per user and network namespace. It introduces the two ends of a connection to
//! each other by handing both the same segment, and takes no part afterwards: an established
//! connection does not notice its death.
//!
//! ```text
//! end A ── "attach" + its kernel socket ──►  monitor: addresses from the kernel; unknown: makes a
//!       ◄── segment, side 0 ───────────────           segment and waits for the other
//! end B ── "attach" + its kernel socket ──►           the mirror image waits: the same segment
//!       ◄── segment, side 1 ───────────────
//! ```
//!
//! Place: `systems`. *Absent:* payload, threads, any descriptor of a program beyond the question it
//! came with: a kept copy would hide the program's death from its peer.
//!
//! Invariants: a question is answered from what the kernel says of the socket that came with it,
//! never from the record's words; only this user (or root) is answered; every list is bounded.

#![forbid(unsafe_code)]

pub mod file;
mod held;
pub mod hosts;
mod kept;
mod pairing;
pub mod policy;
mod relaying;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use beeline_os::control_socket::{ControlListener, ControlSocket, Received};
use beeline_sockets::control::{Answer, LONGEST_HOLD_SECONDS, Question, Status, name};
use rustix::event::{PollFd, PollFlags, poll};

pub use file::FileError;
pub use hosts::Hosts;
pub use pairing::Settings;
use pairing::{Outcome, Pairing, Refusal};
pub use policy::Policy;
pub use relaying::{Elsewhere, RelayProgram, is_here};

/// Most questions being asked at once; further ones wait in the listener's backlog.
const MOST_QUESTIONS: usize = 256;
/// Most that are greeted between two looks at everything else.
const GREETED_AT_A_TIME: usize = 64;
/// Most records of an answer: more might not fit the asker's buffer, and nobody waits for it.
const MOST_ANSWERS: usize = 128;
/// Longest time a connection to the monitor may stay without asking.
const PATIENCE: Duration = Duration::from_secs(5);

/// Why a monitor could not begin or go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MonitorError {
    /// There is one already.
    #[error("a monitor of this user runs already")]
    Running,
    /// The kernel refused.
    #[error("{call}: {source}")]
    Call {
        /// What was asked of the kernel.
        call: &'static str,
        /// Its answer.
        #[source]
        source: std::io::Error,
    },
}

impl MonitorError {
    /// True when trying again can help without changing anything.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        false
    }
}

/// A monitor.
#[derive(Debug)]
pub struct Monitor {
    listener: ControlListener,
    uid: u32,
    pairing: Pairing,
    open: Vec<(ControlSocket, Instant)>,
    began: Instant,
    status: Status,
}

impl Monitor {
    /// Takes the name of this user's monitor.
    ///
    /// Errors: [`MonitorError::Running`]; the kernel's.
    pub fn begin(settings: Settings) -> Result<Self, MonitorError> {
        let uid = rustix::process::geteuid().as_raw();
        let listener =
            ControlListener::bind(name().as_bytes()).map_err(|source| match source.kind() {
                std::io::ErrorKind::AddrInUse => MonitorError::Running,
                _ => MonitorError::Call { call: "binding the monitor's name", source },
            })?;
        pairing::allow_descriptors();
        Ok(Self {
            listener,
            uid,
            pairing: Pairing::new(settings),
            open: Vec::new(),
            began: Instant::now(),
            status: Status { process: std::process::id(), ..Status::default() },
        })
    }

    /// Answers questions until `stop` is readable (for ever without one).
    ///
    /// Errors: the kernel's, of waiting.
    pub fn run(&mut self, stop: Option<BorrowedFd<'_>>) -> Result<(), MonitorError> {
        loop {
            let readable = PollFlags::IN;
            let mut entries = Vec::with_capacity(self.open.len() + 2);
            let full = self.open.len() >= MOST_QUESTIONS;
            let listening = if full { PollFlags::empty() } else { readable };
            let listener = self.listener.as_fd();
            entries.push(PollFd::from_borrowed_fd(listener, listening));
            if let Some(stop) = stop {
                entries.push(PollFd::from_borrowed_fd(stop, readable));
            }
            let first = entries.len();
            let relay = self.pairing.relay();
            entries.extend(relay.map(|relay| PollFd::from_borrowed_fd(relay, readable)));
            let first_open = entries.len();
            entries.extend(self.open.iter().map(|(socket, _)| PollFd::new(socket, readable)));
            // Without questions under way and ends that wait, nothing is due soon; without
            // connections whose end is to be noticed, nothing is due at all: sleep.
            let soon = !self.open.is_empty()
                || self.pairing.is_waiting()
                || self.pairing.is_without_relay();
            let tv_sec = if soon { 1 } else { 10 };
            let bound = rustix::event::Timespec { tv_sec, tv_nsec: 0 };
            let bounded = soon || self.pairing.is_keeping();
            match poll(&mut entries, bounded.then_some(&bound)) {
                Ok(_) => {}
                Err(rustix::io::Errno::INTR) => continue,
                Err(error) => {
                    return Err(MonitorError::Call { call: "poll", source: error.into() });
                }
            }
            let ready: Vec<bool> = entries.iter().map(|e| !e.revents().is_empty()).collect();
            drop(entries);
            if stop.is_some() && ready.get(1) == Some(&true) {
                return Ok(());
            }
            let answered: Vec<usize> =
                (0..self.open.len()).filter(|i| ready.get(first_open + i) == Some(&true)).collect();
            if first_open > first && ready.get(first) == Some(&true) {
                self.pairing.relaying().into_iter().for_each(relaying::Relaying::lost);
            }
            for index in answered.into_iter().rev() {
                let (socket, _) = self.open.swap_remove(index);
                self.hear(&socket);
            }
            self.open.retain(|(_, since)| since.elapsed() < PATIENCE);
            if ready.first() == Some(&true) {
                self.greet();
            }
            self.pairing.expire();
            if self.pairing.is_without_relay() {
                self.pairing.relaying().into_iter().for_each(relaying::Relaying::keep_up);
            }
        }
    }

    fn greet(&mut self) {
        let room = MOST_QUESTIONS.saturating_sub(self.open.len());
        // Out of descriptors: the asker's patience ends, and it stays with the kernel.
        for socket in self.listener.waiting(room.min(GREETED_AT_A_TIME)) {
            let known = socket.peer().is_ok_and(|peer| peer.uid == self.uid || peer.uid == 0);
            if known {
                self.open.push((socket, Instant::now()));
            }
        }
    }

    fn hear(&mut self, socket: &ControlSocket) {
        let (mut record, mut descriptors) = ([0; 64], Vec::new());
        let Ok(Received::Record(length)) = socket.receive(&mut record, &mut descriptors) else {
            return;
        };
        let Ok(question) = Question::decode(record.get(..length).unwrap_or_default()) else {
            return;
        };
        let answer = |answer: &Answer, with: Option<BorrowedFd<'_>>| {
            // An asker that does not listen has gone on without us.
            let _ = socket.send(&answer.encode(), with.as_slice());
        };
        match question {
            Question::Attach => {
                let (process, uid) =
                    socket.peer().map_or((0, u32::MAX), |peer| (peer.pid, peer.uid));
                match self.attach(descriptors.first(), process, uid) {
                    Ok((side, memory)) => {
                        answer(&Answer::Segment { side }, Some(memory.as_fd()));
                    }
                    Err(Some(Refusal::NoHosts)) => answer(&Answer::NoHosts, None),
                    Err(_) => answer(&Answer::Plain, None),
                }
            }
            Question::Resume | Question::Look => {
                let process = socket.peer().map_or(0, |peer| peer.pid);
                let taker = (question == Question::Resume).then_some(process);
                let about = descriptors.first();
                let known = about.and_then(|socket| self.pairing.resume(socket, taker));
                match known {
                    Some((side, memory)) => {
                        answer(&Answer::Segment { side }, Some(memory.as_fd()));
                    }
                    None => answer(&Answer::Plain, None),
                }
            }
            Question::Hold { seconds } => {
                let time = Duration::from_secs(seconds.min(LONGEST_HOLD_SECONDS).into());
                let process = descriptors.pop();
                if process.is_some_and(|process| self.pairing.held().hold(process, time)) {
                    answer(&Answer::End, None);
                }
            }
            Question::Status => {
                self.status.up_seconds = self.began.elapsed().as_secs();
                self.status.waiting = self.pairing.waiting();
                self.status.kept = self.pairing.kept();
                self.status.relayed = self.pairing.handed();
                answer(&Answer::Status(self.status), None);
            }
            Question::Connections => {
                for connection in self.pairing.introduced() {
                    answer(&Answer::Connection(*connection), None);
                }
                answer(&Answer::End, None);
            }
            Question::Traffic => {
                let mut all: Vec<_> = self.pairing.traffic().collect();
                all.sort_by_key(|(_, [one, other])| std::cmp::Reverse(one.saturating_add(*other)));
                for (connection, moved) in all.into_iter().take(MOST_ANSWERS) {
                    answer(&Answer::Traffic(connection, moved), None);
                }
                answer(&Answer::End, None);
            }
        }
    }

    fn attach(
        &mut self,
        about: Option<&OwnedFd>,
        process: i32,
        uid: u32,
    ) -> Result<(u8, OwnedFd), Option<Refusal>> {
        self.status.asked += 1;
        let outcome = about.map(|socket| self.pairing.ask(socket, process, uid));
        match outcome {
            Some(Ok(Outcome::First(memory) | Outcome::Relayed(memory))) => Ok((0, memory)),
            Some(Ok(Outcome::Second(memory))) => {
                self.status.paired += 1;
                Ok((1, memory))
            }
            Some(Err(error)) => {
                tracing::debug!(%error, process, "a connection stays with the kernel");
                self.status.refused += 1;
                let count = match error {
                    Refusal::Denied => Some(&mut self.status.denied),
                    Refusal::NoHosts => Some(&mut self.status.no_hosts),
                    Refusal::Stranger(_) => Some(&mut self.status.strangers),
                    Refusal::OverTcp(_) => Some(&mut self.status.over_tcp),
                    Refusal::Held => Some(&mut self.status.held),
                    _ => None,
                };
                if let Some(count) = count {
                    *count += 1;
                }
                Err(Some(error))
            }
            None => {
                self.status.refused += 1;
                Err(None)
            }
        }
    }
}

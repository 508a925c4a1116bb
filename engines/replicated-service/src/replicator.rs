//! A service's commands and reads, by way of a thread of its own: for services that need no more.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::courier::Courier;
use crate::failure::Failure;
use crate::group::Group;
use crate::lane::{Lane, Late};
use crate::machine::Tag;
use crate::unit::{self, LaneName};

/// Between two looks whose time is over, while a request waits.
const LOOK: Duration = Duration::from_millis(50);
/// What the courier says of a unit within this time after the requests' own is more exact than what
/// is known without it.
const GRACE: Duration = Duration::from_millis(250);

/// Told what became of a request, once, on the replicator's thread; it must not block.
type Told<T> = Box<dyn FnOnce(Result<T, Failure>) + Send>;

enum Ask {
    Propose {
        command: Vec<u8>,
        told: Told<Vec<u8>>,
        came: Instant,
    },
    Barrier {
        told: Told<()>,
        came: Instant,
    },
    /// The courier is back.
    Landed {
        number: u64,
        outcome: Result<Vec<u8>, Failure>,
    },
    Passed {
        ticket: u64,
        outcome: Result<(), Failure>,
    },
    Stop,
}

/// What the courier is sent for.
enum Errand {
    Unit { number: u64, unit: Vec<u8> },
    Barrier { ticket: u64 },
}

/// The way into the log for one service of one member. Commands that come while others are under way
/// travel together; from one caller they take effect in their order. Each is told what became of it
/// within the group's time for requests, and a quarter of a second.
#[derive(Debug)]
pub struct Replicator {
    sender: Sender<Ask>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Ask {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Ask")
    }
}

impl Replicator {
    /// Starts the thread. `format` is that of the service's commands; `lane` tells several
    /// replicators of one service and member apart.
    ///
    /// Errors: no thread could be made.
    pub fn start(group: &Arc<Group>, (service, format): (Tag, u8), lane: u16) -> io::Result<Self> {
        let name = LaneName { service, node: group.options().node, lane };
        let (sender, receiver) = mpsc::channel();
        let courier = Courier::new(Arc::clone(group), name);
        let (errands, errand) = mpsc::channel();
        let back = sender.clone();
        let thread = std::thread::Builder::new().name(format!("carry-{}", service.0));
        let carrier = thread.spawn(move || carry(courier, &errand, &back))?;
        let worker = Worker {
            group: Arc::clone(group),
            lane: Lane::new(name, format),
            began: Instant::now(),
            receiver,
            errands,
            stopping: false,
        };
        let thread = std::thread::Builder::new().name(format!("replicate-{}", service.0));
        let thread = Some(thread.spawn(move || worker.run(carrier))?);
        Ok(Self { sender, thread })
    }

    /// Has a command applied everywhere; `told` gets its reply.
    pub fn propose(
        &self,
        command: Vec<u8>,
        told: impl FnOnce(Result<Vec<u8>, Failure>) + Send + 'static,
    ) {
        let (told, came): (Told<Vec<u8>>, _) = (Box::new(told), Instant::now());
        if let Err(mpsc::SendError(Ask::Propose { told, .. })) =
            self.sender.send(Ask::Propose { command, told, came })
        {
            told(Err(Failure::Failed));
        }
    }

    /// `told` is called when this member's state has everything that was acknowledged anywhere
    /// before this call: then it may be read.
    pub fn barrier(&self, told: impl FnOnce(Result<(), Failure>) + Send + 'static) {
        let (told, came): (Told<()>, _) = (Box::new(told), Instant::now());
        if let Err(mpsc::SendError(Ask::Barrier { told, .. })) =
            self.sender.send(Ask::Barrier { told, came })
        {
            told(Err(Failure::Failed));
        }
    }

    /// [`Replicator::propose`], waited for.
    ///
    /// Errors: [`Failure`].
    pub fn propose_wait(&self, command: Vec<u8>) -> Result<Vec<u8>, Failure> {
        let (sender, receiver) = mpsc::channel();
        self.propose(command, move |outcome| {
            let _ = sender.send(outcome);
        });
        receiver.recv().unwrap_or(Err(Failure::Failed))
    }

    /// [`Replicator::barrier`], waited for.
    ///
    /// Errors: [`Failure`].
    pub fn barrier_wait(&self) -> Result<(), Failure> {
        let (sender, receiver) = mpsc::channel();
        self.barrier(move |outcome| {
            let _ = sender.send(outcome);
        });
        receiver.recv().unwrap_or(Err(Failure::Failed))
    }
}

impl Drop for Replicator {
    /// What was asked for is carried first, for no longer than a request may take.
    fn drop(&mut self) {
        let _ = self.sender.send(Ask::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Carries what it is sent for, one after another, until no more comes.
fn carry(mut courier: Courier, errands: &Receiver<Errand>, back: &Sender<Ask>) {
    while let Ok(errand) = errands.recv() {
        let news = match errand {
            Errand::Unit { number, unit } => {
                Ask::Landed { number, outcome: courier.deliver(number, &unit, false) }
            }
            Errand::Barrier { ticket } => Ask::Passed { ticket, outcome: courier.pass() },
        };
        if back.send(news).is_err() {
            return;
        }
    }
}

struct Worker {
    group: Arc<Group>,
    lane: Lane<Told<Vec<u8>>, Told<()>>,
    began: Instant,
    receiver: Receiver<Ask>,
    errands: Sender<Errand>,
    stopping: bool,
}

impl Worker {
    fn run(mut self, carrier: JoinHandle<()>) {
        while !self.stopping || self.lane.is_awaited() {
            let ask = if self.lane.is_awaited() {
                self.receiver.recv_timeout(LOOK)
            } else {
                self.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match ask {
                Ok(ask) => self.take(ask),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
            while let Ok(ask) = self.receiver.try_recv() {
                self.take(ask);
            }
            self.end_late();
            // The courier lives as long as this thread keeps the way to it.
            if let Some((number, unit)) = self.lane.next_unit(self.group.incarnation()) {
                let _ = self.errands.send(Errand::Unit { number, unit });
            }
            if let Some(ticket) = self.lane.next_barrier() {
                let _ = self.errands.send(Errand::Barrier { ticket });
            }
        }
        drop(self.errands);
        let _ = carrier.join();
    }

    fn note_time(&mut self, at: Instant) {
        let since = at.saturating_duration_since(self.began);
        self.lane.note_time(nanoseconds(since));
    }

    /// Tells those whose time is over.
    fn end_late(&mut self) {
        self.note_time(Instant::now());
        let limit = self.group.options().request_timeout;
        let late = self.lane.late(nanoseconds(limit), nanoseconds(GRACE));
        let Late { undone, unknown, readers } = late;
        undone.into_iter().for_each(|told| told(Err(Failure::NotTaken)));
        unknown.into_iter().for_each(|told| told(Err(Failure::TimedOut)));
        readers.into_iter().for_each(|told| told(Err(Failure::TimedOut)));
    }

    fn take(&mut self, ask: Ask) {
        match ask {
            Ask::Propose { command, told, came } => {
                self.note_time(came);
                let limit = self.group.state().map_or(0, |state| state.command_limit_bytes);
                // Before the log is there: what any log takes.
                let limit = if limit == 0 { 4096 } else { limit };
                let pushed =
                    self.lane.push(told, false, limit, |out| out.extend_from_slice(&command));
                if let Err((told, failure)) = pushed {
                    told(Err(failure));
                }
            }
            Ask::Barrier { told, came } => {
                self.note_time(came);
                self.lane.await_barrier(told);
            }
            Ask::Landed { number, outcome } => self.landed(number, &outcome),
            Ask::Passed { ticket, outcome } => {
                for told in self.lane.passed(ticket) {
                    told(outcome.clone());
                }
            }
            Ask::Stop => self.stopping = true,
        }
    }

    fn landed(&mut self, number: u64, outcome: &Result<Vec<u8>, Failure>) {
        let askers = self.lane.landed(number);
        match outcome {
            Ok(replies) => {
                let mut replies = unit::parts(replies);
                for told in askers {
                    let reply = replies.next().map(<[u8]>::to_vec);
                    if let Some(told) = told {
                        told(reply.ok_or(Failure::ReplyLost));
                    }
                }
            }
            Err(failure) => {
                askers.into_iter().flatten().for_each(|told| told(Err(failure.clone())));
            }
        }
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

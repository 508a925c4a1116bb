//! A service's commands and reads, by way of a thread of its own: for services that need no more.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::JoinHandle;

use crate::courier::{Clock, Courier, Forward};
use crate::failure::Failure;
use crate::group::Group;
use crate::lane::Lane;
use crate::machine::Tag;
use crate::unit::{self, LaneName};

/// Told what became of a request, once, on the replicator's thread; it must not block.
type Told<T> = Box<dyn FnOnce(Result<T, Failure>) + Send>;

enum Ask {
    Propose { command: Vec<u8>, told: Told<Vec<u8>> },
    Barrier { told: Told<()> },
    Stop,
}

/// The way into the log for one service of one member. Commands that come while others are under way
/// travel together; from one caller they take effect in their order.
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
    pub fn start(
        group: &Arc<Group>,
        (service, format): (Tag, u8),
        lane: u16,
        clock: Clock,
        forward: impl Forward + 'static,
    ) -> io::Result<Self> {
        let name = LaneName { service, node: group.options().node, lane };
        let (sender, receiver) = mpsc::channel();
        let courier = Courier::new(Arc::clone(group), name, clock, forward);
        let worker = Worker {
            group: Arc::clone(group),
            lane: Lane::new(name, format),
            courier,
            receiver,
            stopping: false,
        };
        let thread = std::thread::Builder::new().name(format!("replicate-{}", service.0));
        let thread = Some(thread.spawn(move || worker.run())?);
        Ok(Self { sender, thread })
    }

    /// Has a command applied everywhere; `told` gets its reply.
    pub fn propose(
        &self,
        command: Vec<u8>,
        told: impl FnOnce(Result<Vec<u8>, Failure>) + Send + 'static,
    ) {
        let told: Told<Vec<u8>> = Box::new(told);
        if let Err(mpsc::SendError(Ask::Propose { told, .. })) =
            self.sender.send(Ask::Propose { command, told })
        {
            told(Err(Failure::Failed));
        }
    }

    /// `told` is called when this member's state has everything that was acknowledged anywhere
    /// before this call: then it may be read.
    pub fn barrier(&self, told: impl FnOnce(Result<(), Failure>) + Send + 'static) {
        let told: Told<()> = Box::new(told);
        if let Err(mpsc::SendError(Ask::Barrier { told })) = self.sender.send(Ask::Barrier { told })
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

struct Worker<F> {
    group: Arc<Group>,
    lane: Lane<Told<Vec<u8>>, Told<()>>,
    courier: Courier<F>,
    receiver: Receiver<Ask>,
    stopping: bool,
}

impl<F: Forward> Worker<F> {
    fn run(mut self) {
        while !self.stopping {
            let Ok(ask) = self.receiver.recv() else { return };
            self.take(ask);
            while let Ok(ask) = self.receiver.try_recv() {
                self.take(ask);
            }
            while let Some((number, unit)) = self.lane.next_unit(self.group.incarnation()) {
                let outcome = self.courier.deliver(number, &unit, false);
                let askers = self.lane.landed(number);
                match &outcome {
                    Ok(replies) => {
                        let mut replies = unit::parts(replies);
                        for told in askers {
                            let reply = replies.next().map(<[u8]>::to_vec);
                            told(reply.ok_or(Failure::ReplyLost));
                        }
                    }
                    Err(failure) => {
                        askers.into_iter().for_each(|told| told(Err(failure.clone())));
                    }
                }
            }
            if let Some(ticket) = self.lane.next_barrier() {
                let outcome = self.courier.pass();
                for told in self.lane.passed(ticket) {
                    told(outcome.clone());
                }
            }
        }
    }

    fn take(&mut self, ask: Ask) {
        match ask {
            Ask::Propose { command, told } => {
                let limit = self.group.state().map_or(0, |state| state.command_limit_bytes);
                // Before the log is there: what any log takes.
                let limit = if limit == 0 { 4096 } else { limit };
                let pushed =
                    self.lane.push(told, false, limit, |out| out.extend_from_slice(&command));
                if let Err((told, failure)) = pushed {
                    told(Err(failure));
                }
            }
            Ask::Barrier { told } => self.lane.readers.push(told),
            Ask::Stop => self.stopping = true,
        }
    }
}

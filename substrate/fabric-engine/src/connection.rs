//! A connection: an engine behind a lock, and its ties to the completion queues.
//!
//! The lock is the one exception to "data calls take no lock": a connection must stay alive when
//! its application does not look, so the library's thread shares it. In the ordinary case nobody
//! contends: the application's thread takes it with one atomic operation, and the library's thread
//! only ever tries.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use beeline_fabric::QueuePairState;
use rustix::event::epoll::{self, EventData, EventFlags};

use crate::engine::{End, Engine, EngineSetup, Interest, Stage};
use crate::handshake::Nonce;
use crate::queue::{Delivery, QueueState};
use crate::stream::Watch;

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) qp_num: u32,
    pub(crate) nonce: Nonce,
    state: AtomicU8,
    /// On the receive queue's list of those that put an acknowledgement off.
    deferred: AtomicBool,
    /// Mirror of the engine's `owed`: an acknowledgement put off has not travelled since.
    owes: AtomicBool,
    engine: Mutex<Engine>,
    /// Asks a polled stream for news without the lock; set when there is a stream.
    watch: OnceLock<Option<Arc<dyn Watch>>>,
    pub(crate) send_queue: Arc<QueueState>,
    pub(crate) receive_queue: Arc<QueueState>,
}

/// Who moves the connection, and so who learns of the outcome by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mover {
    /// The application, in `poll` or `wait`: it takes the completions right after. An
    /// acknowledgement may wait for its next call, since that may carry it for nothing.
    Poll,
    /// The application, in a poll after arming: as `Poll`, but it may sleep next.
    ArmedPoll,
    /// The application, in another call.
    Call,
    /// The library's thread.
    Library,
}

fn state_code(state: QueuePairState) -> u8 {
    match state {
        QueuePairState::Init => 0,
        QueuePairState::ReadyToSend => 1,
        QueuePairState::Error => 2,
    }
}

impl Connection {
    pub(crate) fn new(
        mut setup: EngineSetup,
        send_queue: Arc<QueueState>,
        receive_queue: Arc<QueueState>,
    ) -> Arc<Self> {
        Arc::new_cyclic(|myself| {
            setup.connection = myself.clone();
            Self {
                qp_num: setup.qp_num,
                nonce: setup.nonce,
                state: AtomicU8::new(state_code(QueuePairState::Init)),
                deferred: AtomicBool::new(false),
                owes: AtomicBool::new(false),
                engine: Mutex::new(Engine::new(setup)),
                watch: OnceLock::new(),
                send_queue,
                receive_queue,
            }
        })
    }

    /// The state, without the lock.
    pub(crate) fn state(&self) -> QueuePairState {
        // Acquire: pairs with the release store in `settle`, so that whoever sees the state sees
        // what led to it.
        match self.state.load(Ordering::Acquire) {
            0 => QueuePairState::Init,
            1 => QueuePairState::ReadyToSend,
            _ => QueuePairState::Error,
        }
    }

    /// True when driving a polled stream may move something.
    pub(crate) fn has_news(&self) -> bool {
        self.watch.get().and_then(Option::as_ref).is_some_and(|watch| watch.has_news())
    }

    /// Runs `work` on the engine, waiting for the lock (the library holds it for one bounded
    /// piece of work at most), and sees to the consequences.
    pub(crate) fn with<R>(&self, mover: Mover, work: impl FnOnce(&mut Engine) -> R) -> R {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        self.finish(engine, mover, work)
    }

    /// As [`Connection::with`]; `None` when somebody else holds the lock.
    pub(crate) fn try_with<R>(
        &self,
        mover: Mover,
        work: impl FnOnce(&mut Engine) -> R,
    ) -> Option<R> {
        let engine = match self.engine.try_lock() {
            Ok(engine) => engine,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(self.finish(engine, mover, work))
    }

    fn finish<R>(
        &self,
        mut engine: MutexGuard<'_, Engine>,
        mover: Mover,
        work: impl FnOnce(&mut Engine) -> R,
    ) -> R {
        let result = work(&mut engine);
        self.settle(&mut engine, mover);
        result
    }

    /// Taken off the list: pays what is still owed. False when somebody else holds the lock and
    /// `mover` must not wait; the debt is then on the list again.
    pub(crate) fn pay(&self, mover: Mover) -> bool {
        self.deferred.store(false, Ordering::Relaxed);
        if mover == Mover::Library {
            let paid = self.try_with(mover, |_| ()).is_some();
            if !paid && !self.deferred.swap(true, Ordering::Relaxed) {
                self.receive_queue.defer(self.qp_num);
            }
            return paid;
        }
        if self.owes.load(Ordering::Relaxed) {
            self.with(mover, |_| ());
        }
        true
    }

    /// A shared receive queue has receives again.
    pub(crate) fn receive_posted(&self) {
        self.with(Mover::Call, |engine| {
            engine.resume_peer();
            engine.transmit_or_end();
        });
    }

    /// Everything that follows from a change of the engine.
    fn settle(&self, engine: &mut Engine, mover: Mover) {
        if engine.owed {
            if mover == Mover::Poll {
                // Relaxed, here and below: the flags are written under the lock or by the thread
                // that reads them next; the list itself is what the library goes by.
                if !self.deferred.swap(true, Ordering::Relaxed) {
                    self.receive_queue.defer(self.qp_num);
                }
            } else {
                engine.stage_owed();
                engine.transmit_or_end();
            }
        }
        self.owes.store(engine.owed, Ordering::Relaxed);
        let before = self.state();
        let mut state = engine.state();
        let mut delivered = self.deliver(engine, mover);
        if !delivered {
            // A queue overran: its queue pairs are broken.
            engine.end(End::Disconnected);
            state = engine.state();
            delivered = self.deliver(engine, mover);
        }
        self.update_interest(engine);
        if state != before || !delivered {
            self.state.store(state_code(state), Ordering::Release);
            if mover == Mover::Library {
                self.send_queue.signal();
                self.receive_queue.signal();
            }
        }
        if let Some(deadline) = engine.deadline_ns() {
            self.send_queue.schedule(deadline);
        }
    }

    /// Hands gathered completions over; false when a queue overran.
    fn deliver(&self, engine: &mut Engine, mover: Mover) -> bool {
        if engine.gathered.send.is_empty() && engine.gathered.receive.is_empty() {
            return true;
        }
        if engine.state() == QueuePairState::Error {
            // Whoever sees an error completion sees the state.
            self.state.store(state_code(QueuePairState::Error), Ordering::Release);
        }
        let delivery = match mover {
            Mover::Poll | Mover::ArmedPoll => Delivery::Quiet,
            Mover::Call | Mover::Library => Delivery::Signal,
        };
        let sent = self.send_queue.push(&mut engine.gathered.send, delivery);
        let received = self.receive_queue.push(&mut engine.gathered.receive, delivery);
        sent && received
    }

    /// Keeps the epoll sets at what the engine waits for; closes the stream of a dead one.
    fn update_interest(&self, engine: &mut Engine) {
        let wants_to_send = engine.wants_to_send();
        let Some(stream) = &mut engine.stream else { return };
        if wants_to_send != engine.wants_room {
            engine.wants_room = wants_to_send;
            engine.watches_room = stream.wants_room(wants_to_send);
        }
        if engine.interest == Interest::None {
            // The first look at a fresh stream, or the last at a closed one: set once.
            let _ = self.watch.get_or_init(|| stream.watch());
        }
        let wanted = match engine.stage {
            Stage::Idle | Stage::Closed => Interest::None,
            _ if wants_to_send && !engine.watches_room => Interest::ReadAndWrite,
            _ => Interest::Read,
        };
        if wanted != engine.interest {
            let flags = match wanted {
                Interest::ReadAndWrite => EventFlags::IN | EventFlags::OUT,
                _ => EventFlags::IN,
            };
            let data = EventData::new_u64(u64::from(self.qp_num));
            let same = Arc::ptr_eq(&self.send_queue, &self.receive_queue);
            let both = [Some(&self.receive_queue), (!same).then_some(&self.send_queue)];
            for queue in both.into_iter().flatten() {
                let set = queue.streams();
                let outcome = match (engine.interest, wanted) {
                    (_, Interest::None) => epoll::delete(set, stream.readiness()),
                    (Interest::None, _) => epoll::add(set, stream.readiness(), data, flags),
                    _ => epoll::modify(set, stream.readiness(), data, flags),
                };
                if let Err(error) = outcome {
                    tracing::warn!(qp_num = self.qp_num, %error, "readiness set refused a stream");
                }
            }
            engine.interest = wanted;
        }
        if engine.stage == Stage::Closed {
            engine.stream = None;
        }
    }
}

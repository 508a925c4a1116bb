//! Persistent flushes of files, off the threads that poll.
//!
//! `fdatasync` takes milliseconds, or seconds. The target tells the initiator to wait
//! ([`WaitReason::Busy`]), as for any request that it cannot execute yet, and a thread of the device
//! synchronises; when that is over the request is asked for again, and finds its outcome.
//!
//! Invariants: flushes of one file run one after another, in the order asked for, on one thread at a
//! time, so that a slow file holds up its own only; the threads are [`MOST_THREADS`] at most; of a
//! connection that is gone nothing is kept waiting.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::connection::{Connection, Mover};
use crate::engine::Engine;
use crate::frame::WaitReason;
use crate::region::Entry;
use crate::transmit::Response;

/// Files that are synchronised at once; as many slow ones hold up the rest.
const MOST_THREADS: usize = 32;
/// How long a thread without work stays.
const STAY: Duration = Duration::from_secs(2);

/// What a [`Persister`] does.
pub(crate) trait Work: Send + 'static {
    /// Names the file.
    fn object(&self) -> usize;

    /// Whether the caller still waits for the outcome.
    fn is_wanted(&self) -> bool;

    /// Does it.
    fn run(self);
}

/// A flush that a peer asked for.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) entry: Arc<Entry>,
    pub(crate) offset: usize,
    pub(crate) length: usize,
    pub(crate) connection: Weak<Connection>,
    pub(crate) request: u32,
}

impl Work for Job {
    fn object(&self) -> usize {
        self.entry.memory().anchor().addr().get()
    }

    fn is_wanted(&self) -> bool {
        self.connection.strong_count() > 0
    }

    fn run(self) {
        let Self { entry, offset, length, connection, request } = self;
        let succeeded = entry.memory().persist(offset, length).is_ok();
        drop(entry);
        if let Some(connection) = connection.upgrade() {
            connection.with(Mover::Call, |engine| {
                engine.persisted(request, succeeded);
                engine.transmit_or_end();
            });
        }
    }
}

/// What became of the flush under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Persisting {
    pub(crate) request: u32,
    pub(crate) outcome: Option<bool>,
}

#[derive(Debug)]
struct State<W> {
    /// Flushes that wait, by file; a file is here while it has any, or one is under way.
    files: HashMap<usize, VecDeque<W>>,
    /// Files with flushes and no thread.
    ready: VecDeque<usize>,
    threads: usize,
    /// Of these, those that sleep.
    idle: usize,
    /// The device is gone; what was asked for is done first.
    ended: bool,
}

#[derive(Debug)]
struct Shared<W> {
    state: Mutex<State<W>>,
    news: Condvar,
}

impl<W> Shared<W> {
    fn lock(&self) -> MutexGuard<'_, State<W>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The device's threads for flushes; started as they are needed.
#[derive(Debug)]
pub(crate) struct Persister<W>(Arc<Shared<W>>);

impl<W> Default for Persister<W> {
    fn default() -> Self {
        let state = State {
            files: HashMap::new(),
            ready: VecDeque::new(),
            threads: 0,
            idle: 0,
            ended: false,
        };
        Self(Arc::new(Shared { state: Mutex::new(state), news: Condvar::new() }))
    }
}

impl<W> Drop for Persister<W> {
    fn drop(&mut self) {
        self.0.lock().ended = true;
        self.0.news.notify_all();
    }
}

impl<W: Work> Persister<W> {
    /// Hands a flush over; false where there is no thread to be had.
    pub(crate) fn begin(&self, work: W) -> bool {
        let file = work.object();
        let mut state = self.0.lock();
        if let Some(waiting) = state.files.get_mut(&file) {
            waiting.retain(W::is_wanted);
            waiting.push_back(work);
            return true;
        }
        if state.idle <= state.ready.len() && state.threads < MOST_THREADS {
            let shared = Arc::clone(&self.0);
            let builder = std::thread::Builder::new().name("fabric-persist".to_owned());
            match builder.spawn(move || run(&shared)) {
                Ok(_) => state.threads += 1,
                Err(_) if state.threads == 0 => return false,
                Err(_) => {}
            }
        }
        state.files.insert(file, VecDeque::from([work]));
        state.ready.push_back(file);
        drop(state);
        self.0.news.notify_one();
        true
    }
}

/// A thread's life: one flush of one file after another, files in turn.
fn run<W: Work>(shared: &Shared<W>) {
    let mut state = shared.lock();
    loop {
        while let Some(file) = state.ready.pop_front() {
            let work = state.files.get_mut(&file).and_then(VecDeque::pop_front);
            drop(state);
            if let Some(work) = work {
                work.run();
            }
            state = shared.lock();
            if state.files.get(&file).is_some_and(|waiting| !waiting.is_empty()) {
                state.ready.push_back(file);
            } else {
                state.files.remove(&file);
            }
        }
        if state.ended {
            break;
        }
        state.idle += 1;
        let waited = shared.news.wait_timeout(state, STAY);
        let (woken, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
        state = woken;
        state.idle -= 1;
        if timeout.timed_out() && state.ready.is_empty() {
            break;
        }
    }
    state.threads -= 1;
}

impl Engine {
    /// A flush is under way, and its request waits.
    pub(crate) fn is_persisting(&self) -> bool {
        self.persisting.is_some_and(|persisting| persisting.outcome.is_none())
    }

    /// Begins to persist a range of a file for `request`, unless that has been done; true when the
    /// request has to wait.
    pub(crate) fn must_wait_to_persist(
        &mut self,
        request: u32,
        entry: Arc<Entry>,
        (offset, length): (u64, u64),
    ) -> bool {
        if let Some(persisting) = self.persisting
            && persisting.request == request
        {
            return persisting.outcome.is_none();
        }
        let job = Job {
            entry,
            offset: offset as usize,
            length: length as usize,
            connection: Weak::clone(&self.connection),
            request,
        };
        let begun = self.regions.persister.begin(job);
        self.persisting = begun.then_some(Persisting { request, outcome: None });
        begun
    }

    /// The outcome for `request`, where a thread saw to it.
    pub(crate) fn take_persisted(&mut self, request: u32) -> Option<bool> {
        let persisting = self.persisting.take_if(|persisting| persisting.request == request)?;
        persisting.outcome
    }

    pub(crate) fn persisted(&mut self, request: u32, succeeded: bool) {
        let Some(persisting) = &mut self.persisting else { return };
        if persisting.request != request {
            return;
        }
        persisting.outcome = Some(succeeded);
        if self.dropping == Some(WaitReason::Busy) && !self.resumed {
            self.resumed = true;
            let request = self.expected_request;
            self.transmitter.responses.push_back(Response::Resume { request });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    use super::*;

    const BOUND: Duration = Duration::from_secs(20);

    /// Says that it began, and waits until it is let go.
    struct Flush {
        file: usize,
        wanted: bool,
        begun: Sender<usize>,
        gate: Receiver<()>,
    }

    impl Work for Flush {
        fn object(&self) -> usize {
            self.file
        }

        fn is_wanted(&self) -> bool {
            self.wanted
        }

        fn run(self) {
            let _ = self.begun.send(self.file);
            let _ = self.gate.recv();
        }
    }

    #[test]
    fn a_file_that_does_not_come_to_an_end_holds_up_no_other() {
        let persister = Persister::default();
        let (begun, news) = channel();
        let flush = |file, wanted| {
            let (open, gate) = channel();
            assert!(persister.begin(Flush { file, wanted, begun: begun.clone(), gate }));
            open
        };
        let _stuck = flush(1, true);
        assert_eq!(news.recv_timeout(BOUND), Ok(1));
        // Behind it, and of a connection that is gone by the time the next comes.
        let _behind = flush(1, false);
        for round in 0..100 {
            let file = 2 + round % 3;
            // Let go before it begins.
            drop(flush(file, true));
            assert_eq!(news.recv_timeout(BOUND), Ok(file), "file 1 holds up others");
            // Until its thread is free again, under the lock that a new flush takes.
            let begun = Instant::now();
            while persister.0.lock().files.contains_key(&file) {
                assert!(begun.elapsed() < BOUND, "the flush of file {file} has no end");
                std::thread::yield_now();
            }
        }
        let _last = flush(1, true);
        let state = persister.0.lock();
        assert_eq!(state.files.get(&1).map(VecDeque::len), Some(1), "what nobody wants is kept");
        assert!(state.threads <= 2, "{} threads for two flushes at a time", state.threads);
    }

    #[test]
    fn flushes_of_one_file_run_one_at_a_time_and_all_of_them_though_the_device_goes() {
        let persister = Persister::default();
        let (begun, news) = channel();
        let mut gates = Vec::new();
        for _ in 0..3 {
            let (open, gate) = channel();
            gates.push(open);
            assert!(persister.begin(Flush { file: 7, wanted: true, begun: begun.clone(), gate }));
        }
        drop(persister);
        drop(begun);
        for gate in gates {
            assert_eq!(news.recv_timeout(BOUND), Ok(7));
            assert!(news.try_recv().is_err(), "two at a time");
            drop(gate);
        }
        assert!(news.recv_timeout(BOUND).is_err(), "the thread stays after its device");
    }
}

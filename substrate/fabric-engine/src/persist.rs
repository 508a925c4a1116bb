//! Persistent flushes of files, off the threads that poll.
//!
//! `fdatasync` takes milliseconds, or seconds. The target tells the initiator to wait
//! ([`WaitReason::Busy`]), as for any request that it cannot execute yet, and a thread of the device
//! synchronises; when that is over the request is asked for again, and finds its outcome.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::connection::{Connection, Mover};
use crate::engine::Engine;
use crate::frame::WaitReason;
use crate::region::Entry;
use crate::transmit::Response;

/// A flush that a peer asked for.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) entry: Arc<Entry>,
    pub(crate) offset: usize,
    pub(crate) length: usize,
    pub(crate) connection: Weak<Connection>,
    pub(crate) request: u32,
}

/// What became of the flush under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Persisting {
    pub(crate) request: u32,
    pub(crate) outcome: Option<bool>,
}

/// The device's thread for flushes; started with the first.
#[derive(Debug, Default)]
pub(crate) struct Persister(Mutex<Option<Sender<Job>>>);

impl Persister {
    /// Hands a flush over; false where there is no thread to be had.
    pub(crate) fn begin(&self, job: Job) -> bool {
        let mut jobs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if jobs.is_none() {
            let (sender, queue) = channel::<Job>();
            // Ends when the device is gone and what was asked for is done.
            let run = move || queue.into_iter().for_each(run);
            let thread = std::thread::Builder::new().name("fabric-persist".to_owned()).spawn(run);
            *jobs = thread.ok().map(|_| sender);
        }
        jobs.as_ref().is_some_and(|jobs| jobs.send(job).is_ok())
    }
}

fn run(job: Job) {
    let Job { entry, offset, length, connection, request } = job;
    let succeeded = entry.memory().persist(offset, length).is_ok();
    drop(entry);
    if let Some(connection) = connection.upgrade() {
        connection.with(Mover::Call, |engine| {
            engine.persisted(request, succeeded);
            engine.transmit_or_end();
        });
    }
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

//! Sending requests and waiting for their replies, by any number of threads.
//!
//! A thread polls the ring for a short while, because the store usually answers within
//! microseconds; then one thread sleeps for all of them, and wakes the others.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{self, BufReader, Read as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use beeline_os::control_socket::{ControlSocket, Received};
use beeline_os::one_writer::ForkMark;
use rustix::event::{PollFd, PollFlags, poll};

use super::ClientOptions;
use super::memory::{Mapped, Segments};
use super::small::Small;
use crate::error::ObjectsError;
use crate::id::ObjectId;
use crate::link::{Copying, Link, Sleeper};
use crate::wire::{
    ENTRY_BYTES, Entry, LAST_TAG, RECORD_BYTES, Record, RecordKind, Reply, Request, decode_news,
};

/// Looks at the ring between two looks at the clock.
const LOOKS: u32 = 64;
/// How long a sleeper sleeps before it looks whether the store is still there.
const NAP: Duration = Duration::from_millis(200);
/// How long a segment may take from the socket, which the store sent before the reply.
const SEGMENT_PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Inner {
    link: Link,
    next_tag: u32,
    /// Requests under way, and replies that nobody took yet.
    replies: HashMap<u32, Option<Reply>>,
    news: VecDeque<ObjectId>,
    /// A thread sleeps until the store wakes it.
    sleeper: bool,
}

#[derive(Debug, Default)]
struct Memory {
    segments: Segments,
    listings: HashMap<u64, Vec<Entry>>,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Shared {
    inner: Mutex<Inner>,
    answered: Condvar,
    memory: Mutex<Memory>,
    arrived: Condvar,
    socket: ControlSocket,
    sleeper: Sleeper,
    gone: AtomicBool,
    ended: AtomicBool,
    next_question: AtomicU64,
    pub(super) small: Mutex<Small>,
    /// Held while a listing is under way: the store keeps a copy of each.
    listing: Mutex<()>,
    pub(super) mark: Arc<ForkMark>,
    pub(super) welcome: Record,
    pub(super) path: PathBuf,
    pub(super) options: ClientOptions,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(super) fn new(
        socket: ControlSocket,
        link: Link,
        welcome: Record,
        path: &Path,
        options: ClientOptions,
    ) -> io::Result<Self> {
        let sleeper = link.sleeper();
        let inner = Inner {
            link,
            next_tag: 1,
            replies: HashMap::new(),
            news: VecDeque::new(),
            sleeper: false,
        };
        Ok(Self {
            inner: Mutex::new(inner),
            answered: Condvar::new(),
            memory: Mutex::new(Memory::default()),
            arrived: Condvar::new(),
            socket,
            sleeper,
            gone: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            next_question: AtomicU64::new(1),
            small: Mutex::default(),
            listing: Mutex::default(),
            mark: Arc::new(ForkMark::new()?),
            welcome,
            path: path.to_owned(),
            options,
        })
    }

    pub(super) fn is_gone(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    pub(super) fn check(&self) -> Result<(), ObjectsError> {
        if !self.mark.is_own_process() {
            return Err(ObjectsError::Forked);
        }
        if self.is_gone() { Err(ObjectsError::StoreGone) } else { Ok(()) }
    }

    fn lose(&self) {
        self.gone.store(true, Ordering::Release);
        // With the lock a thread is either before its look at `gone`, or asleep.
        drop(lock(&self.inner));
        self.sleeper.wake();
        self.answered.notify_all();
        drop(lock(&self.memory));
        self.arrived.notify_all();
    }

    /// Ends the helper.
    pub(super) fn end(&self) {
        if self.mark.is_own_process() {
            self.ended.store(true, Ordering::Release);
            // The helper finds the socket's end, and so does the store.
            let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        }
    }

    // ── requests ───────────────────────────────────────────────────────────────────────────────

    /// Sends a request and waits for its reply; the store bounds the time.
    pub(super) fn ask(&self, request: &Request) -> Result<Reply, ObjectsError> {
        let tag = self.submit(request)?;
        self.reply(tag)
    }

    /// Sends a request that has a reply; its number.
    pub(super) fn submit(&self, request: &Request) -> Result<u32, ObjectsError> {
        self.check()?;
        let mut inner = lock(&self.inner);
        let tag = loop {
            let tag = inner.next_tag;
            inner.next_tag = if tag + 1 == LAST_TAG { 1 } else { tag + 1 };
            if !inner.replies.contains_key(&tag) {
                break tag;
            }
        };
        inner.replies.insert(tag, None);
        let pushed = self.push(inner, tag, request);
        if pushed.is_err() {
            lock(&self.inner).replies.remove(&tag);
        }
        pushed.map(|()| tag)
    }

    /// Wakes the store ahead of a request that comes soon.
    pub(super) fn rouse(&self) {
        if lock(&self.inner).link.rouse() {
            self.ring();
        }
    }

    /// Says that the calling thread copies into an object, until the value is dropped.
    pub(super) fn copying(&self) -> Copying {
        self.sleeper.copy()
    }

    /// Wakes the store, which said that it sleeps.
    fn ring(&self) {
        // A full socket wakes it as well, and one that is gone is noticed by the helper.
        let _ = self.socket.send(&Record::new(RecordKind::Ring, 0, 0, 0).encode(), &[]);
    }

    /// Sends a request without a reply.
    pub(super) fn tell(&self, request: &Request) -> Result<(), ObjectsError> {
        self.check()?;
        // A number no other request gets: nothing comes back.
        self.push(lock(&self.inner), LAST_TAG, request)
    }

    fn push<'a>(
        &'a self,
        mut inner: MutexGuard<'a, Inner>,
        tag: u32,
        request: &Request,
    ) -> Result<(), ObjectsError> {
        let mut looks = 0_u32;
        loop {
            let room = inner.link.has_room();
            if room.map_err(|_| ObjectsError::Protocol { what: "its count of requests" })? {
                break;
            }
            // The store takes requests only while its replies are read.
            drain(&mut inner);
            looks += 1;
            if looks.is_multiple_of(LOOKS) {
                drop(inner);
                if self.is_gone() {
                    return Err(ObjectsError::StoreGone);
                }
                std::thread::yield_now();
                inner = lock(&self.inner);
            }
        }
        if inner.link.push(tag, &request.encode()) {
            self.ring();
        }
        Ok(())
    }

    /// Waits for the reply to `tag`.
    pub(super) fn reply(&self, tag: u32) -> Result<Reply, ObjectsError> {
        let outcome = self.until(None, |inner| match inner.replies.get(&tag) {
            Some(Some(reply)) => Some(*reply),
            _ => None,
        });
        lock(&self.inner).replies.remove(&tag);
        outcome?.ok_or(ObjectsError::StoreGone)
    }

    /// The next news, within `timeout`.
    pub(super) fn news(&self, timeout: Duration) -> Result<Option<ObjectId>, ObjectsError> {
        let deadline = Instant::now().checked_add(timeout);
        self.until(deadline, |inner| inner.news.pop_front())
    }

    /// Waits until `find` finds something; `None` when the time is over.
    fn until<T>(
        &self,
        deadline: Option<Instant>,
        find: impl Fn(&mut Inner) -> Option<T>,
    ) -> Result<Option<T>, ObjectsError> {
        let mut inner = lock(&self.inner);
        let mut spinning: Option<Instant> = None;
        loop {
            for _ in 0..LOOKS {
                drain(&mut inner);
                if let Some(found) = find(&mut inner) {
                    return Ok(Some(found));
                }
                std::hint::spin_loop();
            }
            if !self.mark.is_own_process() {
                return Err(ObjectsError::Forked);
            }
            if self.is_gone() {
                return Err(ObjectsError::StoreGone);
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(None);
            }
            let since = *spinning.get_or_insert(now);
            if now - since < self.options.spin {
                drop(inner);
                std::thread::yield_now();
                inner = lock(&self.inner);
                continue;
            }
            let nap = deadline.map_or(NAP, |deadline| (deadline - now).min(NAP));
            if inner.sleeper {
                let waited = self.answered.wait_timeout(inner, nap);
                inner = waited.unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            if !inner.link.sleep() {
                continue;
            }
            inner.sleeper = true;
            drop(inner);
            self.sleeper.wait(nap);
            inner = lock(&self.inner);
            inner.sleeper = false;
            inner.link.wake();
            drain(&mut inner);
            self.answered.notify_all();
        }
    }

    // ── memory ─────────────────────────────────────────────────────────────────────────────────

    /// The segment a reply names.
    pub(super) fn segment(&self, number: u32) -> Result<Arc<Mapped>, ObjectsError> {
        let mut memory = lock(&self.memory);
        let start = Instant::now();
        loop {
            if let Some(mapped) = memory.segments.get(&number) {
                return Ok(Arc::clone(mapped));
            }
            if self.is_gone() {
                return Err(ObjectsError::StoreGone);
            }
            if start.elapsed() > SEGMENT_PATIENCE {
                return Err(ObjectsError::Protocol { what: "a segment that never came" });
            }
            let waited = self.arrived.wait_timeout(memory, NAP);
            memory = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The last mapping of a segment is gone.
    pub(super) fn unmapped(&self, number: u32) {
        if self.mark.is_own_process() && !self.is_gone() {
            self.send(Record::new(RecordKind::Unmapped, number.into(), 0, 0));
        }
    }

    fn send(&self, record: Record) {
        loop {
            match self.socket.send(&record.encode(), &[]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let _ = poll(&mut [PollFd::new(&self.socket, PollFlags::OUT)], None);
                }
                // A store that is gone is noticed by the helper.
                _ => return,
            }
        }
    }

    pub(super) fn list(&self) -> Result<Vec<Entry>, ObjectsError> {
        self.check()?;
        let _turn = lock(&self.listing);
        let question = self.next_question.fetch_add(1, Ordering::Relaxed);
        self.send(Record::new(RecordKind::List, question, 0, 0));
        let mut memory = lock(&self.memory);
        loop {
            if let Some(listing) = memory.listings.remove(&question) {
                return Ok(listing);
            }
            if self.is_gone() {
                return Err(ObjectsError::StoreGone);
            }
            let waited = self.arrived.wait_timeout(memory, NAP);
            memory = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    // ── the helper ─────────────────────────────────────────────────────────────────────────────

    /// Takes what the store sends over the socket, until the client ends or the store does.
    pub(super) fn help(self: &Arc<Self>) {
        let (mut bytes, mut descriptors) = ([0; RECORD_BYTES], Vec::new());
        while !self.ended.load(Ordering::Acquire) {
            if poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], None).is_err() {
                continue;
            }
            loop {
                let record = match self.socket.receive(&mut bytes, &mut descriptors) {
                    Ok(Received::Empty) => break,
                    Ok(Received::Record(length)) => Record::decode(&bytes[..length]),
                    Ok(Received::Closed) | Err(_) => return self.lose(),
                };
                if let Err(error) = self.take(record, &mut descriptors) {
                    tracing::error!(%error, "the object store's memory cannot be used");
                    return self.lose();
                }
            }
        }
        // Nobody asks any more.
        self.lose();
    }

    fn take(
        self: &Arc<Self>,
        record: Option<Record>,
        descriptors: &mut Vec<OwnedFd>,
    ) -> io::Result<()> {
        let record = record.ok_or(io::ErrorKind::InvalidData)?;
        let number = u32::try_from(record.a).unwrap_or(0);
        match record.kind {
            RecordKind::Segment => {
                let descriptor = descriptors.pop().ok_or(io::ErrorKind::InvalidData)?;
                let writes = record.c == 1;
                let (mark, home) = (Arc::clone(&self.mark), Arc::downgrade(self));
                let mapped = Mapped::new(number, record.b, descriptor, writes, mark, home)?;
                let old = lock(&self.memory).segments.insert(number, Arc::new(mapped));
                drop(old);
                self.arrived.notify_all();
                if writes {
                    self.send(Record::new(RecordKind::Mapped, number.into(), 0, 0));
                }
            }
            RecordKind::Retire => {
                let gone = lock(&self.memory).segments.remove(&number);
                // Unmapped here, unless a buffer still uses the segment.
                drop(gone);
            }
            RecordKind::CallIn => self.called_in(),
            RecordKind::Listing => {
                let descriptor = descriptors.pop().ok_or(io::ErrorKind::InvalidData)?;
                let listing = read_listing(descriptor, record.b)?;
                self.send(Record::new(RecordKind::Listed, record.a, 0, 0));
                lock(&self.memory).listings.insert(record.a, listing);
                self.arrived.notify_all();
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        Ok(())
    }
}

/// Takes what waits in the ring.
fn drain(inner: &mut Inner) {
    while let Some(message) = inner.link.take() {
        if message.tag == 0 {
            inner.news.push_back(decode_news(&message));
        } else if let (Some(place), Some(reply)) =
            (inner.replies.get_mut(&message.tag), Reply::decode(&message))
        {
            *place = Some(reply);
        }
    }
}

fn read_listing(descriptor: OwnedFd, entries: u64) -> io::Result<Vec<Entry>> {
    use std::io::Seek as _;
    let mut file = File::from(descriptor);
    file.rewind()?;
    let mut file = BufReader::with_capacity(64 << 10, file);
    let mut listing = Vec::new();
    let mut bytes = [0; ENTRY_BYTES];
    for _ in 0..entries {
        file.read_exact(&mut bytes)?;
        listing.push(Entry::decode(&bytes));
    }
    Ok(listing)
}

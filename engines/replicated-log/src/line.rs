//! Lines: one control connection between a thread of this host and a thread of another, for the members of all
//! clusters that both have.
//!
//! ```text
//!  member of 10 ─┐                               ┌─▶ member of 10     a frame names its cluster;
//!  member of 11 ─┼─▶ line ═══ queue pair ═══▶ line ─▶ member of 11    what a read finds goes to the first
//!  member of 12 ─┘  (waiting)                    └─▶ member of 12     that waits for one
//! ```
//!
//! The member that dials makes the line, and the members of its thread that dial the same thread meanwhile wait
//! for it ([`Lines::to`]). A line that broke is gone at once: its members find that it is not ready, and are
//! told so.
//!
//! Invariants: completions of a queue pair come in the order of the posts, so reads are answered in the order
//! of their list, and a buffer whose turn is here again is free; what finds no room waits: reads without
//! bound, of which a member has few at a time, messages up to [`MOST_WAITING`].

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::rc::Rc;

use beeline_fabric::{
    ConnectInfo, LocalData, MemoryRegion, Operation, PostError, QueuePair, QueuePairState,
    ReceiveRequest, RemoteAddress, RemoteKey, Role, ScatterGatherEntry, WorkCompletion,
    WorkRequest,
};
use beeline_os::memory::{copy_in, copy_out, load_u64};
use beeline_paxos::NodeId;

use crate::error::LogError;
use crate::frame::{Frame, MAX_FRAME_BYTES};

const MESSAGE_BYTES: u64 = (MAX_FRAME_BYTES as u64).next_multiple_of(64);
/// Messages that may be on their way to this thread, and from it.
const RECEIVES: u64 = 256;
const SENDS: u64 = 128;
/// Reads on their way.
const READS: u64 = 256;
/// Messages that wait for room; more are dropped, as messages may be.
const MOST_WAITING: usize = 4096;
/// What a read brings lies on a cache line of its own.
const LANDING_BYTES: u64 = 64;
const SENDS_OFFSET: u64 = RECEIVES * MESSAGE_BYTES;
const LANDINGS_OFFSET: u64 = SENDS_OFFSET + SENDS * MESSAGE_BYTES;
/// Memory of a line, bytes.
pub(crate) const LINE_BYTES: usize = (LANDINGS_OFFSET + READS * LANDING_BYTES) as usize;
/// Requests that may be outstanding on a line's queue pair: to be sent, and to be received.
pub(crate) const LINE_DEPTHS: (u32, u32) = ((SENDS + READS) as u32, RECEIVES as u32);
/// Marks completions of messages and of reads; others are receives, by their buffer.
const SENT: u64 = u64::MAX;
const READ: u64 = u64::MAX - 1;

/// What a read is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sought {
    /// A member's status words.
    Status,
    /// The beat of the thread that a member runs on.
    Beat,
}

/// The member that reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reader {
    /// The member's name on its thread.
    pub(crate) member: u64,
    /// Of which peer.
    pub(crate) peer: NodeId,
    pub(crate) sought: Sought,
}

/// What came over the lines of a thread.
#[derive(Debug)]
pub(crate) enum LineNews {
    /// Over line `line`.
    Frame { line: u64, frame: Frame },
    /// Two words; `None`: the line broke.
    Read { reader: Reader, words: Option<[u64; 2]> },
    /// These members use a line that broke.
    Broken { members: Vec<u64> },
}

#[derive(Debug)]
struct Line {
    qp: Box<dyn QueuePair>,
    region: MemoryRegion,
    /// The thread at the other end, once that is known.
    host: u64,
    /// Messages posted, and those of them whose buffers are free again.
    posted: u64,
    sent: u64,
    /// Reads posted.
    read: u64,
    reading: VecDeque<Reader>,
    to_read: VecDeque<(Reader, RemoteKey)>,
    to_send: VecDeque<Vec<u8>>,
    members: HashSet<u64>,
}

impl Line {
    fn post_receive(&mut self, index: u64) -> Result<(), PostError> {
        let (offset, length) = (index * MESSAGE_BYTES, MESSAGE_BYTES);
        let buffer = Some(ScatterGatherEntry { region: &self.region, offset, length });
        self.qp.post_receive(&[ReceiveRequest { wr_id: index, buffer }])
    }

    /// Posts what has room.
    fn pump(&mut self) -> Result<(), PostError> {
        while self.posted - self.sent < SENDS
            && let Some(bytes) = self.to_send.pop_front()
        {
            let offset = SENDS_OFFSET + self.posted % SENDS * MESSAGE_BYTES;
            copy_in(self.region.memory().as_ref(), offset as usize, &bytes);
            let length = bytes.len() as u64;
            let entries = [ScatterGatherEntry { region: &self.region, offset, length }];
            let operation = Operation::Send { local: LocalData::Gather(&entries), immediate: None };
            self.qp.post_send(&[WorkRequest::new(SENT, operation)])?;
            self.posted += 1;
        }
        while (self.reading.len() as u64) < READS
            && let Some((reader, key)) = self.to_read.pop_front()
        {
            let offset = LANDINGS_OFFSET + self.read % READS * LANDING_BYTES;
            let length = match reader.sought {
                Sought::Status => 16,
                Sought::Beat => 8,
            };
            let local = ScatterGatherEntry { region: &self.region, offset, length };
            let remote = RemoteAddress { key, offset: 0 };
            // Listed first: where this fails it is told as a read that failed.
            self.reading.push_back(reader);
            self.qp.post_send(&[WorkRequest::new(READ, Operation::Read { local, remote })])?;
            self.read += 1;
        }
        Ok(())
    }

    /// The members that wait for a read that will not come.
    fn readers(&mut self) -> impl Iterator<Item = Reader> {
        let waiting = std::mem::take(&mut self.to_read).into_iter().map(|(reader, _)| reader);
        std::mem::take(&mut self.reading).into_iter().chain(waiting)
    }
}

/// How a thread of another host is reached from this thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// Through this line.
    Line(u64),
    /// A member is making a line.
    Wait,
    /// The caller makes one.
    New,
}

#[derive(Clone, Copy, Debug)]
struct Dialled {
    /// None yet: a member is dialling.
    line: Option<u64>,
    /// One that is not ready by then is given up.
    until_ns: u64,
}

#[derive(Debug, Default)]
struct Inner {
    lines: HashMap<u64, Line>,
    of: HashMap<u32, u64>,
    /// Dialled threads, by address and number.
    dialled: HashMap<(String, u64), Dialled>,
    /// How many threads the host at an address has.
    threads: HashMap<String, u64>,
    news: VecDeque<LineNews>,
}

impl Inner {
    fn is_ready(&self, id: u64) -> bool {
        self.lines.get(&id).is_some_and(|line| line.qp.state() == QueuePairState::ReadyToSend)
    }

    fn end(&mut self, id: u64) {
        let Some(mut line) = self.lines.remove(&id) else { return };
        self.of.remove(&line.qp.qp_num());
        self.dialled.retain(|_, dialled| dialled.line != Some(id));
        let failed = line.readers().map(|reader| LineNews::Read { reader, words: None });
        self.news.extend(failed);
        self.news.push_back(LineNews::Broken { members: line.members.drain().collect() });
    }

    fn thread_of(&self, address: &str, cluster: u64) -> (String, u64) {
        let threads = self.threads.get(address).copied().unwrap_or(1);
        (address.to_owned(), cluster % threads.max(1))
    }
}

/// The lines of a thread. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lines(Rc<RefCell<Inner>>);

impl Lines {
    /// How the thread at `address` that has the member of `cluster` is reached. After [`Route::New`] others wait
    /// until `until_ns`, or until [`Lines::made`] or [`Lines::given_up`].
    pub(crate) fn to(&self, address: &str, cluster: u64, now_ns: u64, until_ns: u64) -> Route {
        let mut inner = self.0.borrow_mut();
        let place = inner.thread_of(address, cluster);
        if let Some(Dialled { line, until_ns }) = inner.dialled.get(&place).copied() {
            match line {
                Some(id) if inner.is_ready(id) => return Route::Line(id),
                _ if now_ns < until_ns => return Route::Wait,
                Some(id) => inner.end(id),
                None => {}
            }
        }
        inner.dialled.insert(place, Dialled { line: None, until_ns });
        Route::New
    }

    /// A name for a line that is to be made: no other thread draws the same but by chance, and then the line is
    /// refused at one of its ends.
    pub(crate) fn draw(&self) -> u64 {
        use std::hash::{BuildHasher, RandomState};
        let inner = self.0.borrow();
        RandomState::new().hash_one(inner.lines.len()).max(1)
    }

    /// Line `id` leads to the thread at `address` that has the member of `cluster`, of `threads`.
    pub(crate) fn made(&self, id: u64, address: &str, cluster: u64, threads: u64) {
        let mut inner = self.0.borrow_mut();
        let before = inner.thread_of(address, cluster);
        inner.threads.insert(address.to_owned(), threads);
        let place = inner.thread_of(address, cluster);
        let dialled = inner.dialled.remove(&before);
        let until_ns = dialled.map_or(0, |dialled| dialled.until_ns);
        inner.dialled.insert(place, Dialled { line: Some(id), until_ns });
    }

    /// No line came about, or the one that was named is not known there.
    pub(crate) fn given_up(&self, address: &str, cluster: u64) {
        let mut inner = self.0.borrow_mut();
        let place = inner.thread_of(address, cluster);
        inner.dialled.remove(&place);
    }

    /// Takes a queue pair and its memory as line `id`. Its completions are this thread's lines' from now on.
    ///
    /// Errors: [`LogError::Post`].
    pub(crate) fn add(
        &self,
        id: u64,
        qp: Box<dyn QueuePair>,
        region: MemoryRegion,
    ) -> Result<ConnectInfo, LogError> {
        let mut line = Line {
            qp,
            region,
            host: 0,
            posted: 0,
            sent: 0,
            read: 0,
            reading: VecDeque::new(),
            to_read: VecDeque::new(),
            to_send: VecDeque::new(),
            members: HashSet::new(),
        };
        for index in 0..RECEIVES {
            line.post_receive(index)?;
        }
        let info = line.qp.connect_info();
        let mut inner = self.0.borrow_mut();
        inner.of.insert(line.qp.qp_num(), id);
        inner.lines.insert(id, line);
        Ok(info)
    }

    /// Connects line `id` to its other end, on thread `host`.
    ///
    /// Errors: [`LogError::Fabric`].
    pub(crate) fn connect(
        &self,
        id: u64,
        host: u64,
        info: &ConnectInfo,
        role: Role,
    ) -> Result<(), LogError> {
        let mut inner = self.0.borrow_mut();
        if let Some(line) = inner.lines.get_mut(&id) {
            line.host = host;
            line.qp.connect(info, role)?;
        }
        Ok(())
    }

    /// Lets a line go that nothing came of.
    pub(crate) fn remove(&self, id: u64) {
        self.0.borrow_mut().end(id);
    }

    /// Whether there is a line `id` to thread `host`.
    pub(crate) fn leads_to(&self, id: u64, host: u64) -> bool {
        self.0.borrow().lines.get(&id).is_some_and(|line| line.host == host)
    }

    /// `member` uses line `id`: it is told when that breaks.
    pub(crate) fn use_line(&self, id: u64, member: u64) {
        if let Some(line) = self.0.borrow_mut().lines.get_mut(&id) {
            line.members.insert(member);
        }
    }

    pub(crate) fn is_ready(&self, id: u64) -> bool {
        self.0.borrow().is_ready(id)
    }

    /// Sends a message, or drops it.
    pub(crate) fn send(&self, id: u64, bytes: &[u8]) {
        self.with(id, |line| {
            if line.to_send.len() < MOST_WAITING {
                line.to_send.push_back(bytes.to_vec());
            }
            line.pump()
        });
    }

    /// Reads; what comes of it is told by [`Lines::news`]. False if there is no such line.
    pub(crate) fn read(&self, id: u64, reader: Reader, key: RemoteKey) -> bool {
        if !self.is_ready(id) {
            return false;
        }
        self.with(id, |line| {
            line.to_read.push_back((reader, key));
            line.pump()
        });
        true
    }

    fn with(&self, id: u64, act: impl FnOnce(&mut Line) -> Result<(), PostError>) {
        let mut inner = self.0.borrow_mut();
        let Some(line) = inner.lines.get_mut(&id) else { return };
        if act(line).is_err() {
            inner.end(id);
        }
    }

    /// Takes a completion; false if it is of no line.
    pub(crate) fn take(&self, completion: &WorkCompletion) -> bool {
        let mut inner = self.0.borrow_mut();
        let Some(id) = inner.of.get(&completion.qp_num).copied() else { return false };
        let Inner { lines, news, .. } = &mut *inner;
        let Some(line) = lines.get_mut(&id) else { return true };
        if !completion.is_success() {
            inner.end(id);
            return true;
        }
        match completion.wr_id {
            SENT => line.sent += 1,
            READ => {
                if let Some(reader) = line.reading.pop_front() {
                    let place = (line.read - line.reading.len() as u64 - 1) % READS;
                    let offset = (LANDINGS_OFFSET + place * LANDING_BYTES) as usize;
                    let memory = line.region.memory().as_ref();
                    let words = Some([load_u64(memory, offset), load_u64(memory, offset + 8)]);
                    news.push_back(LineNews::Read { reader, words });
                }
            }
            buffer if buffer < RECEIVES => {
                let length = completion.length.min(MESSAGE_BYTES);
                let mut bytes = vec![0; length as usize];
                let offset = (buffer * MESSAGE_BYTES) as usize;
                copy_out(line.region.memory().as_ref(), offset, &mut bytes);
                if let Some(frame) = Frame::decode(&bytes) {
                    news.push_back(LineNews::Frame { line: id, frame });
                }
                if line.post_receive(buffer).is_err() {
                    inner.end(id);
                    return true;
                }
            }
            _ => {}
        }
        if line.pump().is_err() {
            inner.end(id);
        }
        true
    }

    /// What came, in order.
    pub(crate) fn news(&self) -> Option<LineNews> {
        self.0.borrow_mut().news.pop_front()
    }

    /// How many lines there are.
    pub(crate) fn count(&self) -> usize {
        self.0.borrow().lines.len()
    }
}

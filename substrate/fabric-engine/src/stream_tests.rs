//! The target's half over a stream that stops wherever it likes, and an initiator's over a peer
//! that puts it off.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use beeline_fabric::{Access, MemoryRegion, QueuePairOptions, Status};
use beeline_os::memory::{copy_in, load_u64};
use beeline_os::{MemoryObject, Persistence, SharedMemory};

use crate::engine::{Engine, EngineSetup, Outstanding, Request, Source, Stage};
use crate::frame::{Frame, HEADER_BYTES, Message, WaitReason};
use crate::region::RegionTable;
use crate::stream::{Moved, Part, Stream};

const LENGTH: usize = 16 << 10;
const OLD: u64 = 0x0101_0101_0101_0101;

/// Gives its bytes in the pieces it was told to, one for each call; what the memory looks like
/// before each is checked.
#[derive(Debug)]
struct Chunks {
    readiness: OwnedFd,
    bytes: Vec<u8>,
    /// Where the stream stops.
    stops: Vec<usize>,
    given: usize,
    memory: Arc<SharedMemory>,
    torn: Arc<Mutex<Option<(usize, usize, u64)>>>,
}

impl Chunks {
    fn waiting(&self) -> usize {
        self.stops.first().map_or(0, |stop| stop - self.given)
    }
}

impl Stream for Chunks {
    fn readiness(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }

    fn connected(&mut self) -> Option<std::io::Result<()>> {
        Some(Ok(()))
    }

    fn prepare(&mut self, _transport_timeout: Duration) -> std::io::Result<()> {
        Ok(())
    }

    fn available(&mut self) -> usize {
        self.waiting()
    }

    unsafe fn receive(&mut self, parts: &mut [Part], _sleep: bool) -> Moved {
        for place in (0..LENGTH).step_by(8) {
            let word = load_u64(self.memory.as_ref(), place);
            if word != OLD && word != u64::MAX {
                let mut torn = self.torn.lock().unwrap();
                torn.get_or_insert((self.given, place, word));
            }
        }
        let mut moved = 0;
        for part in parts {
            let length = part.iov_len.min(self.waiting());
            let bytes = &self.bytes[self.given..self.given + length];
            // SAFETY: the caller vouches for the part.
            unsafe { part.iov_base.cast::<u8>().copy_from(bytes.as_ptr(), length) };
            self.given += length;
            moved += length;
        }
        if self.waiting() == 0 && !self.stops.is_empty() {
            self.stops.remove(0);
        }
        if moved == 0 { Moved::Later } else { Moved::Bytes(moved) }
    }

    unsafe fn send(&mut self, parts: &mut [Part]) -> Moved {
        Moved::Bytes(parts.iter().map(|part| part.iov_len).sum())
    }

    fn finish_sending(&mut self) {}

    fn shut_down(&mut self) {}
}

fn chunks(bytes: Vec<u8>, stops: Vec<usize>, memory: &Arc<SharedMemory>) -> Chunks {
    Chunks {
        readiness: std::fs::File::open("/dev/null").unwrap().into(),
        bytes,
        stops,
        given: 0,
        memory: Arc::clone(memory),
        torn: Arc::default(),
    }
}

fn engine(options: QueuePairOptions) -> (Engine, Arc<RegionTable>) {
    let regions = Arc::<RegionTable>::default();
    let engine = Engine::new(EngineSetup {
        qp_num: 1,
        nonce: [0; 16],
        domain: 1,
        options,
        regions: Arc::clone(&regions),
        shared_receives: None,
        connection: Weak::new(),
    });
    (engine, regions)
}

fn write_frame(region: &MemoryRegion, offset: u64, length: u64) -> Vec<u8> {
    let remote = region.remote_address(offset);
    let message = Message::Write { remote, length, immediate: None };
    let frame = Frame { sequence: 0, request: 0, acknowledged: 0, acknowledge: true, message };
    let mut bytes = frame.encode().to_vec();
    bytes.resize(bytes.len() + length as usize, 0xFF);
    bytes
}

/// Receives all of one write whose stream stops at these places of its payload.
fn placed_whole(offset: u64, length: u64, stops: &[usize]) {
    let (mut engine, regions) = engine(QueuePairOptions::default());
    let memory = Arc::new(SharedMemory::allocate("words", LENGTH).unwrap());
    copy_in(memory.as_ref(), 0, &[1; LENGTH]);
    let region = regions.register(memory.clone(), Access::all(), 1).unwrap();
    let bytes = write_frame(&region, offset, length);
    let stops = stops.iter().map(|stop| HEADER_BYTES + stop).chain([bytes.len()]).collect();
    let stream = chunks(bytes, stops, &memory);
    let torn = Arc::clone(&stream.torn);
    engine.stage = Stage::Ready;
    engine.stream = Some(Box::new(stream));
    for _ in 0..200 {
        engine.receive(usize::MAX, false).unwrap();
    }
    assert_eq!(engine.expected_request, 1, "the write at {offset}+{length} was executed");
    let torn = *torn.lock().unwrap();
    // Words at the edges that the write covers in part come out in part.
    let edge = |place: usize| (place as u64) < offset || place as u64 + 8 > offset + length;
    assert!(
        torn.is_none_or(|(_, place, _)| edge(place)),
        "write at {offset}+{length}: a torn word (bytes given, place, value) {torn:x?}"
    );
    let mut found = vec![0; LENGTH];
    beeline_os::memory::copy_out(memory.as_ref(), 0, &mut found);
    for (place, byte) in found.iter().enumerate() {
        let inside = (offset..offset + length).contains(&(place as u64));
        assert_eq!(*byte, if inside { 0xFF } else { 1 }, "byte {place}");
    }
}

#[test]
fn a_word_is_placed_whole_wherever_the_stream_stops() {
    for offset in 0..16 {
        for length in [1, 8, 9, 16, 23, 40] {
            for stop in 0..length as usize {
                placed_whole(offset, length, &[stop]);
            }
        }
        // Byte by byte.
        let every: Vec<usize> = (1..40).collect();
        placed_whole(offset, 40, &every);
    }
}

#[test]
fn words_of_long_writes_are_placed_whole_wherever_the_stream_stops() {
    for offset in [0, 3, 8] {
        for at in 0..10 {
            // Long enough to go straight to its place, in several pieces.
            placed_whole(offset, 9000, &[at, 2500 + at, 5300 - at, 5301, 5309 + at]);
            placed_whole(offset, 9003, &[3000 + at, 3001 + at, 8999]);
        }
    }
}

/// A file that nobody has persisted yet.
#[derive(Debug)]
struct SlowFile(SharedMemory, Mutex<std::sync::mpsc::Receiver<bool>>);

// SAFETY: the inner object's.
unsafe impl MemoryObject for SlowFile {
    fn base(&self) -> std::ptr::NonNull<u8> {
        self.0.base()
    }

    fn length_bytes(&self) -> usize {
        self.0.length_bytes()
    }

    fn persistence(&self) -> Persistence {
        Persistence::File
    }

    fn persist(&self, _offset: usize, _length: usize) -> std::io::Result<()> {
        match self.1.lock().unwrap().recv() {
            Ok(true) => Ok(()),
            _ => Err(std::io::ErrorKind::Other.into()),
        }
    }
}

fn flush_frame(region: &MemoryRegion, sequence: u32) -> Vec<u8> {
    let (remote, length) = (region.remote_address(0), 8);
    let kind = beeline_fabric::FlushKind::Persistent;
    let message = Message::Flush { remote, length, kind };
    Frame { sequence, request: 0, acknowledged: 0, acknowledge: true, message }.encode().to_vec()
}

#[test]
fn a_thread_that_polls_does_not_wait_for_a_file_to_be_synchronised() {
    for succeeds in [true, false] {
        let (mut engine, regions) = engine(QueuePairOptions::default());
        let (finish, finished) = std::sync::mpsc::channel();
        let inner = SharedMemory::allocate("slow", 4096).unwrap();
        let memory = Arc::new(SlowFile(inner, Mutex::new(finished)));
        let region = regions.register(memory, Access::all(), 1).unwrap();
        let entry = regions.find(region.remote_key()).unwrap();
        engine.stage = Stage::Ready;
        // Returns, though nobody lets the synchronisation end.
        assert!(engine.must_wait_to_persist(0, Arc::clone(&entry), (0, 8)));
        assert!(engine.must_wait_to_persist(0, Arc::clone(&entry), (0, 8)), "once is enough");
        assert!(engine.is_persisting());
        finish.send(succeeds).unwrap();
        engine.persisted(0, succeeds);
        assert!(!engine.must_wait_to_persist(0, entry, (0, 8)));
        assert_eq!(engine.take_persisted(0), Some(succeeds));
        assert_eq!(engine.take_persisted(0), None);
    }
}

#[test]
fn a_flush_of_a_file_is_answered_with_wait_and_asked_for_again() {
    let (mut engine, regions) = engine(QueuePairOptions::default());
    let (finish, finished) = std::sync::mpsc::channel();
    let inner = SharedMemory::allocate("slow", 4096).unwrap();
    let region = regions
        .register(Arc::new(SlowFile(inner, Mutex::new(finished))), Access::all(), 1)
        .unwrap();
    let memory = Arc::new(SharedMemory::allocate("words", LENGTH).unwrap());
    copy_in(memory.as_ref(), 0, &[1; LENGTH]);
    let bytes = flush_frame(&region, 0);
    engine.stage = Stage::Ready;
    engine.stream = Some(Box::new(chunks(bytes, vec![HEADER_BYTES], &memory)));
    engine.receive(usize::MAX, false).unwrap();
    assert_eq!(engine.dropping, Some(WaitReason::Busy));
    assert_eq!(engine.expected_request, 0, "it waits");
    engine.transmit().unwrap();
    assert!(!engine.resumed, "and goes on waiting while the file is synchronised");
    finish.send(true).unwrap();
    engine.persisted(0, true);
    assert!(engine.resumed);
}

#[test]
fn a_peer_that_always_says_something_does_not_put_off_the_end_of_a_request() {
    let options = QueuePairOptions {
        transport_timeout: Duration::from_millis(30),
        receiver_not_ready_timeout: Duration::from_millis(30),
        ..QueuePairOptions::default()
    };
    let (mut engine, _regions) = engine(options);
    engine.stage = Stage::Ready;
    engine.note_oldest();
    let remote = beeline_fabric::RemoteAddress { key: beeline_fabric::RemoteKey(1), offset: 0 };
    engine.outstanding.push_back(Outstanding {
        wr_id: 7,
        signalled: true,
        request: Request::Write {
            source: Source::Inline { slot: 0, length: 8 },
            remote,
            immediate: Some(1),
        },
        end_position: 0,
        placed: false,
    });
    engine.staged = 1;
    engine.unplaced = 1;
    let start = std::time::Instant::now();
    let mut turn = 0_u32;
    while engine.stage == Stage::Ready {
        // A new reason each time, and bytes that arrive all the time.
        let reason = if turn.is_multiple_of(2) { WaitReason::Busy } else { WaitReason::NotReady };
        engine.staged = 1;
        engine.told_to_wait(0, reason).unwrap();
        engine.progress_ns = crate::clock::coarse_ns();
        engine.check_deadlines(crate::clock::now_ns());
        turn += 1;
        assert!(start.elapsed() < Duration::from_secs(20), "the request never ended");
        std::thread::sleep(Duration::from_millis(1));
    }
    let completion = engine.gathered.send.first().unwrap();
    assert_eq!(completion.wr_id, 7);
    assert!(completion.status != Status::Success);
}

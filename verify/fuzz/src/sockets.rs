//! User-space sockets: records between library and monitor, and the segment that two ends of a
//! connection share.

use std::cell::RefCell;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;

use beeline_os::Mapping;
use beeline_os::mapping::Protection;
use beeline_sockets::connection::{self, Connection};
use beeline_sockets::control::{Answer, Introduced, Question, Status};
use beeline_sockets::segment::{Segment, length_bytes};
use beeline_sockets::{poll, receive, send};
use beeline_sockets_relay::message::{self, Ground, Record, record_bytes};

/// A record is refused, or means what its spelling says.
pub fn records(bytes: &[u8]) -> bool {
    let question = Question::decode(bytes);
    if let Ok(question) = question {
        // The last two bytes of the head are for later versions, in all but one.
        let spelled = if matches!(question, Question::Hold { .. }) { 8 } else { 6 };
        assert_eq!(question.encode()[..spelled], bytes[..spelled], "a question has one spelling");
    }
    let answer = Answer::decode(bytes);
    if let Ok(answer) = answer {
        assert_eq!(Answer::decode(&answer.encode()), Ok(answer), "an answer comes back");
    }
    question.is_ok() || answer.is_ok()
}

pub fn record_seeds() -> Vec<Vec<u8>> {
    let held = Question::Hold { seconds: 60 };
    let questions = [Question::Attach, Question::Resume, Question::Status, Question::Traffic, held];
    let introduced = Introduced {
        first: ([127, 0, 0, 1], 80).into(),
        first_process: 1,
        second: ([10, 0, 0, 7], 40_000).into(),
        second_process: 2,
    };
    let answers = [
        Answer::Segment { side: 1 },
        Answer::Plain,
        Answer::Status(Status { process: 7, asked: 9, ..Status::default() }),
        Answer::Connection(introduced),
        Answer::Traffic(introduced, [1, 2]),
        Answer::End,
    ];
    let questions = questions.iter().map(|question| question.encode().to_vec());
    questions.chain(answers.iter().map(Answer::encode)).collect()
}

const RING: usize = 4096;
/// Behind the mapping of an end: an access beyond the segment ends the process.
const LENGTH: usize = length_bytes(RING);
/// Bytes before the rings that hold words.
const WORDS: usize = 1536;

/// One end of a connection; the segment is written over by the other.
struct Victim {
    stream: TcpStream,
    _peer: TcpStream,
    connection: Connection,
    memory: Mapping,
}

impl Victim {
    fn new() -> Option<Self> {
        let memory = Mapping::memfd("fuzz", LENGTH).ok()?;
        Segment::format(&memory).ok()?;
        let copy = memory.descriptor()?.try_clone().ok()?;
        let own = Mapping::shared(copy, LENGTH, Protection::ReadWrite).ok()?;
        let listener = TcpListener::bind("127.0.0.1:0").ok()?;
        let stream = TcpStream::connect(listener.local_addr().ok()?).ok()?;
        let peer = listener.accept().ok()?.0;
        let connection = Connection::new(Segment::take(own, 1).ok()?, stream.as_raw_fd());
        Some(Self { stream, _peer: peer, connection, memory })
    }

    fn write(&self, place: usize, bytes: &[u8]) {
        if let Some(memory) = self.memory.descriptor() {
            let _ = rustix::io::pwrite(memory, bytes, place as u64);
        }
    }
}

thread_local! {
    static VICTIM: RefCell<Option<Victim>> = const { RefCell::new(None) };
}

/// Sixteen-byte steps: what to do, where, and eight bytes to write there. Whatever the other end
/// writes, calls on a connection end, with a count that fits or an error.
pub fn segment(bytes: &[u8]) -> bool {
    VICTIM.with_borrow_mut(|victim| {
        if victim.is_none() {
            *victim = Victim::new();
        }
        let Some(known) = victim.as_ref() else { return false };
        // A fresh segment each time, but for the header.
        known.write(16, &[0; LENGTH - 16]);
        known.write(16, &[1]);
        known.connection.kernel_ended.store(false, std::sync::atomic::Ordering::Relaxed);
        known.connection.pending_error.store(0, std::sync::atomic::Ordering::Relaxed);
        let (mut moved, mut shut) = (false, false);
        for step in bytes.as_chunks::<16>().0.iter().take(256) {
            moved |= play(known, step);
            shut |= step[0] % 8 == 7 && step[8] == 0;
        }
        if shut {
            // Perhaps in the kernel, for good.
            *victim = None;
        }
        moved
    })
}

fn play(victim: &Victim, step: &[u8; 16]) -> bool {
    let [what, _, low, high, size @ .., _, _] = step;
    let place = usize::from(u16::from_le_bytes([*low, *high]));
    let value = &step[8..];
    let room = usize::from(u16::from_le_bytes([size[0], size[1]])) % 6000;
    let (fd, connection) = (victim.stream.as_raw_fd(), &victim.connection);
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    match what % 8 {
        // Words of either end, but for the two that say who holds a half: a wrong one is waited
        // for.
        0 | 1 => {
            let place = 16 + (place % (WORDS - 16)) / 4 * 4;
            let holder = [1024 + 64, 1024 + 128];
            if !holder.contains(&place) {
                let many =
                    if place.is_multiple_of(8) && !holder.contains(&(place + 4)) { 8 } else { 4 };
                victim.write(place, &value[..many]);
            }
            false
        }
        // The rings.
        2 | 3 => {
            victim.write(4096 + place % (2 * RING - 8), value);
            false
        }
        // What may be a header, where the reader stands.
        4 => {
            let head =
                connection.segment.own().receiving.head.load(std::sync::atomic::Ordering::Relaxed);
            let place = 4096 + usize::try_from(head % RING as u64).unwrap_or(0) / 8 * 8;
            let header = (1_u64 << 32 | (room % 4200) as u64).to_le_bytes();
            victim.write(place, &header);
            false
        }
        5 => {
            let mut bytes = vec![0; room];
            let piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: room }];
            let flags = flags | if value[0] & 1 == 0 { 0 } else { libc::MSG_PEEK };
            // SAFETY: the piece is `bytes`, which outlives the call.
            let taken = unsafe { receive::receive(fd, connection, &piece, flags) };
            assert!(taken.is_ok_and(|taken| taken <= room) || taken.is_err(), "no more than asked");
            taken.is_ok_and(|taken| taken > 0)
        }
        6 => {
            let bytes = vec![7_u8; room];
            let base = bytes.as_ptr().cast_mut().cast();
            let piece = [libc::iovec { iov_base: base, iov_len: room }];
            // SAFETY: the piece is `bytes`, which outlives the call and is only read.
            let sent = unsafe { send::send(fd, connection, &piece, flags) };
            assert!(sent.is_ok_and(|sent| sent <= room) || sent.is_err(), "no more than given");
            false
        }
        _ => {
            let _ = poll::readiness(connection);
            let _ = connection.segment.consumer().available(1 << 20);
            if value[0] == 0 {
                let _ = connection::shutdown(fd, connection, i32::from(value[1] % 3));
            }
            false
        }
    }
}

pub fn segment_seeds() -> Vec<Vec<u8>> {
    let step = |what: u8, place: u16, size: u16, value: u64| {
        let mut bytes = vec![what, 0];
        bytes.extend(place.to_le_bytes());
        bytes.extend(size.to_le_bytes());
        bytes.extend([0, 0]);
        bytes.extend(value.to_le_bytes());
        bytes
    };
    let switched = step(0, 512 + 16 - 16, 0, 1);
    let message = [switched.clone(), step(4, 0, 100, 0), step(5, 0, 4000, 0), step(7, 0, 0, 1)];
    let sent = [step(6, 0, 500, 0), step(0, 512 + 192 - 16, 0, 8), step(6, 0, 5000, 0)];
    let scribbled = [switched, step(2, 0, 0, u64::MAX), step(5, 0, 9, 1), step(6, 0, 9, 0)];
    // A message, the end behind it, and a receive of no bytes.
    let finished = step(0, 512 + 8 - 16, 0, 1);
    let nothing = [message[0].clone(), message[1].clone(), finished, step(5, 0, 0, 0)];
    vec![message.concat(), sent.concat(), scribbled.concat(), nothing.concat()]
}

/// What one relay says to another: read to an end, and each record with the spelling it came in.
pub fn relay_messages(bytes: &[u8]) -> bool {
    message::fuzz(bytes) > 0
}

pub fn message_seeds() -> Vec<Vec<u8>> {
    let (own, peer) = (([10, 0, 0, 1], 80).into(), ([0xfe80, 0, 0, 0, 0, 0, 0, 1], 4000).into());
    let ground = Ground { key: 7, base: 4096 };
    let records = [
        Record::Offer { name: 7, ring_bytes: 1 << 18, own, peer },
        Record::Accept { name: 8, ground },
        Record::Commit { ground },
        Record::Data { position: 8, bytes: &[1; 24] },
        Record::Placed { position: 0, end: 4096, header: 1 << 32 | 4000 },
        Record::Credit { position: 64 },
        Record::Signs { switched_at: 1, finished: 1, closed: 2, mute: 0 },
        Record::Ring,
        Record::Ended,
    ];
    let mut all = Vec::new();
    let mut seeds = Vec::new();
    for (name, record) in (1..).zip(records) {
        let mut bytes = vec![0; record_bytes(record.body_bytes())];
        record.encode(name, &mut bytes);
        all.extend_from_slice(&bytes);
        seeds.push(bytes);
    }
    seeds.push(all);
    seeds
}

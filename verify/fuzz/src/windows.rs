//! Connections through memory windows: records of programs and monitors, and the memory that a program and the other
//! host write over under a partition's hands.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use beeline_ntb::window::{Bells, Mapped};
use beeline_ntb::{Inbound, Outbound, Window};
use beeline_os::Mapping;
use beeline_sockets::packets::channel::{Channel, Shape};
use beeline_sockets::packets::header::{Header, PacketKind};
use beeline_sockets::packets::protocol::{Answer, Question};
use beeline_sockets_proxy::flow::Schedule;
use beeline_sockets_proxy::geometry::{Geometry, VERSION};
use beeline_sockets_proxy::message::{Message, Refusal};
use beeline_sockets_proxy::partition::{Command, Key, Notice, Partition};
use beeline_sockets_proxy::waits::Position;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

/// A record is refused, or means what its spelling says.
pub fn records(bytes: &[u8]) -> bool {
    let question = Question::decode(bytes);
    if let Ok(question) = question {
        assert_eq!(Question::decode(&question.encode()), Ok(question), "a question comes back");
    }
    let answer = Answer::decode(bytes);
    if let Ok(answer) = &answer {
        assert_eq!(Answer::decode(&answer.encode()).as_ref(), Ok(answer), "an answer comes back");
    }
    let message = Message::decode(bytes);
    if let Ok(Some((message, length))) = message {
        assert!(length <= bytes.len(), "no more than there is");
        assert_eq!(Message::decode(&message.encode()), Ok(Some((message, length))));
    }
    question.is_ok() || answer.is_ok() || matches!(message, Ok(Some(_)))
}

pub fn record_seeds() -> Vec<Vec<u8>> {
    let one = ([10, 77, 0, 1], 61_000).into();
    let other = ([10, 77, 0, 2], 80).into();
    let questions = [
        Question::Hello,
        Question::Connect { to: other, own: Some(one), priority: 1 },
        Question::Listen { at: other, inode: 7 },
        Question::Claim,
        Question::Resume,
        Question::Status,
        Question::Extent { bytes: 4096 },
        Question::Arrivals,
    ];
    let answers =
        [Answer::Page, Answer::Channel, Answer::Kernel { error: 1 }, Answer::Line("a=b".into())];
    let messages = [
        Message::Hello { announced: [VERSION, 1, 128, 4096, 1024, 16, 0, 0] },
        Message::Syn { from: 7, priority: 3, source: one, destination: other },
        Message::SynAck { to: 7, from: 9, partition: 1 },
        Message::Refusal { to: 1, why: Refusal::NoListener },
        Message::Established { to: 9 },
        Message::Gone { to: 9 },
        Message::Resume {
            to: 9,
            from: 7,
            partition: 0,
            position: Position { life: 11, delivered: 5, consumed: 3 },
        },
        Message::Extent { to: 9, from: 7, bytes: 4096 },
        Message::ExtentIs { to: 7, number: 9 },
    ];
    let questions = questions.iter().map(|question| question.encode().to_vec());
    let answers = answers.iter().map(|answer| answer.encode().to_vec());
    let messages = messages.iter().map(Message::encode);
    questions.chain(answers).chain(messages).collect()
}

const SLOT: usize = 128;
const LENGTH: usize = 64 << 10;

#[derive(Debug)]
struct Silent;

impl Bells for Silent {
    fn ring(&self, _: usize) {}

    fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
        None
    }

    fn clear(&self, _: usize) {}
}

/// A partition with two connections, whose other end is the fuzzer.
struct Victim {
    partition: Partition,
    inbound: Inbound,
    programs: Vec<(Arc<Channel>, OwnedFd)>,
}

fn victim() -> Victim {
    let geometry = Geometry::dividing(LENGTH, 1, SLOT, 16).expect("it fits");
    let mapping = Arc::new(Mapping::anonymous(2 * LENGTH).expect("memory"));
    let inbound = Inbound::new(Arc::clone(&mapping), 0, LENGTH);
    let outbound = Outbound::new(Arc::new(Mapped::new(mapping, LENGTH, LENGTH)));
    let (at, length) = geometry.partition(0);
    let window = Window { inbound, outbound, bells: Arc::new(Silent) }.part(at, length);
    let inbound = window.inbound.clone();
    let mut partition = Partition::new(window, geometry, Schedule::new(8, 4), 1);
    partition.obey(Command::Link { up: true });
    let programs = [100, 101].map(|port| {
        let at = ([10, 0, 0, 1], 1).into();
        let shape = Shape { block_bytes: SLOT, blocks: 16 };
        let channel = Arc::new(Channel::create(shape, at, at).expect("memory"));
        let flags = SocketFlags::CLOEXEC;
        let (socket, fd) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
                .expect("a pair");
        let key = Key { own: port, peer: 80 };
        let (id, copy) = (u64::from(port), Arc::clone(&channel));
        let command = Command::Create { key, id, channel: copy, socket, priority: 0, open: true };
        partition.obey(command).expect("a place");
        (channel, fd)
    });
    partition.notices();
    Victim { partition, inbound, programs: programs.into() }
}

/// Words of the first byte's choice: even, the other host's in the window; odd, the first program's in its connection.
/// Each is two bytes of place and eight of word. True when the partition went on.
pub fn memory(bytes: &[u8]) -> bool {
    let Some((&kind, words)) = bytes.split_first() else { return false };
    let mut victim = victim();
    let hostile_program = kind % 2 == 1;
    let mut went = false;
    for record in words.chunks_exact(10).take(64) {
        let (place, word) = record.split_at(2);
        let place = usize::from(u16::from_le_bytes(place.try_into().expect("two bytes")));
        let word = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        if hostile_program {
            let channel = &victim.programs[0].0;
            // From the program's words on: those before are read when the memory is taken.
            let words = channel.shape().length_bytes() / 8 - 16;
            // SAFETY: within the mapping, which a program may write over.
            let target = unsafe { channel.mapping().base().cast::<u64>().add(16 + place % words) };
            let halves = [word as u32, (word >> 32) as u32];
            for (index, half) in halves.into_iter().enumerate() {
                // SAFETY: as above, one half or the other of the word.
                let half_place = unsafe { target.cast::<u32>().add(index) };
                // SAFETY: aligned, mapped while the channel lives, reached through atomics only.
                unsafe { AtomicU32::from_ptr(half_place.as_ptr()) }.store(half, Ordering::Relaxed);
            }
        } else {
            let at = place * 8 % (victim.inbound.length_bytes() - 8);
            victim.inbound.word(at).store(word, Ordering::Relaxed);
        }
        match victim.partition.turn() {
            Ok(done) => went |= done > 0,
            Err(fault) => {
                assert!(!hostile_program, "a program costs the link: {fault}");
                assert!(!fault.to_string().is_empty(), "a reason");
                victim.partition.obey(Command::Link { up: false });
                let cleared = victim.partition.notices().contains(&Notice::Cleared);
                assert!(cleared && victim.partition.is_idle(), "nothing is left of the link");
                return went;
            }
        }
    }
    if hostile_program {
        let gone = victim.partition.notices().contains(&Notice::Gone { id: 101 });
        assert!(!gone, "another program's connection was broken off");
    }
    went
}

/// A record of [`memory`]'s input.
fn record(place: usize, word: u64) -> Vec<u8> {
    let place = u16::try_from(place).unwrap_or(u16::MAX);
    place.to_le_bytes().into_iter().chain(word.to_le_bytes()).collect()
}

pub fn memory_seeds() -> Vec<Vec<u8>> {
    let geometry = Geometry::dividing(LENGTH, 1, SLOT, 16).expect("it fits");
    let packet =
        |kind, length| Header { source: 80, destination: 100, length, sync: true, kind }.encode();
    let (ring, control) = (geometry.ring_at() / 8, geometry.control_at() / 8);
    let peer = [
        vec![0],
        record(ring, packet(PacketKind::Data, 100)),
        record(ring + SLOT / 8, packet(PacketKind::Data, 9)),
        record(control + 1, 0),
        record(control, packet(PacketKind::Credit, 16)),
        record(ring + 2 * SLOT / 8, packet(PacketKind::Migrate, 24)),
        record(ring + 3 * SLOT / 8, packet(PacketKind::Finish, 8)),
    ];
    // Reader armed; finished.
    let program = [vec![1], record(0, 1), record(1, 1), record(8, 1)];
    // A packet in the first block, and beside the tail a copy of it that says another header.
    let words = |at: usize| at / 8 - 16;
    let copy = |kind, length| {
        [
            vec![1],
            record(words(8192), packet(PacketKind::Data, 28)),
            record(words(392), packet(kind, length)),
            // The tail, and the position of the copy above it.
            record(words(384), 1),
        ]
        .concat()
    };
    let copies = [56, 57, 128, 129].map(|length| copy(PacketKind::Data, length));
    let extent = copy(PacketKind::Extent, 24);
    [peer.concat(), program.concat(), extent].into_iter().chain(copies).collect()
}

//! Memory of one connection, shared by the program and the proxy of its host.
//!
//! ```text
//!    0  magic and version 8, block bytes 4, blocks 4 (of each direction), partition 4
//!   64  own address 24, peer's address 24 (family 2, port 2, four bytes free, host 16)
//!  128  program's words: reader armed 4, room wanted 4, finished 4, broken off 4, watched 4
//!  192  program's, sending: holder 4
//!  256  program's, receiving: holder 4, shut 4, offset 8, rings taken 4
//!  320  proxy's words: ended 4, reset 4, credited 4, rings 4
//!  384  eight positions, one a line: to the proxy: filled tail (program's), filled head (proxy's),
//!       free tail (proxy's), free head (program's); to the program the mirror image; beside a filled tail the first
//!       56 bytes of the block that was put last, where they are all of its packet (`beeline_ring::packets::beside`)
//! 4096  four arrays of block numbers in the same order of queues
//!       blocks to the proxy, then blocks to the program, from the next multiple of 4096
//! ```
//!
//! Both processes check what the other one wrote. The object is sealed against resizing, so no
//! access faults.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use beeline_os::Mapping;
use beeline_os::mapping::Protection;
use beeline_ring::packets::beside::{TailLine, WORDS};
use beeline_ring::packets::{Corrupt, IndexQueue, Packets};

use super::header::{HEADER_BYTES, Header, PacketKind};
use super::protocol::{address_of, address_words};

/// Version of the memory, and of the [records](super::protocol) by which it is asked for: a program and a proxy of two
/// versions make no connection.
///
/// - 3: a small packet is copied beside the position of its queue. Records have the memory's version.
/// - 1 and 2: without the copy; records were of version 1 with both.
pub const VERSION: u8 = 3;

/// "BLNTCH" and a zero.
const NAME: u64 = u64::from_le_bytes(*b"BLNTCH\0\0");
/// The name and the version.
const MAGIC: u64 = NAME | (VERSION as u64) << 56;

const BLOCK_BYTES_AT: usize = 8;
const BLOCKS_AT: usize = 12;
const PARTITION_AT: usize = 16;
const ADDRESSES_AT: [usize; 2] = [64, 88];
const PROGRAM_AT: usize = 128;
const SENDING_AT: usize = 192;
const RECEIVING_AT: usize = 256;
const PROXY_AT: usize = 320;
const POSITIONS_AT: usize = 384;
const ENTRIES_AT: usize = 4096;

/// Bounds of a block, a power of two.
pub const BLOCK_BYTES: std::ops::RangeInclusive<usize> = 64..=32 << 10;
/// Bounds of the number of blocks of a direction, a power of two.
pub const BLOCKS: std::ops::RangeInclusive<usize> = 4..=1 << 14;

/// How a channel is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Bytes of a block: a packet with its header.
    pub block_bytes: usize,
    /// Blocks of each direction, and entries of each queue.
    pub blocks: usize,
}

impl Shape {
    /// Both within bounds, and powers of two.
    #[must_use]
    pub fn is_valid(self) -> bool {
        BLOCK_BYTES.contains(&self.block_bytes)
            && self.block_bytes.is_power_of_two()
            && BLOCKS.contains(&self.blocks)
            && self.blocks.is_power_of_two()
    }

    fn blocks_at(self) -> usize {
        (ENTRIES_AT + 4 * 4 * self.blocks).next_multiple_of(4096)
    }

    /// Bytes of the memory.
    #[must_use]
    pub fn length_bytes(self) -> usize {
        (self.blocks_at() + 2 * self.blocks * self.block_bytes).next_multiple_of(4096)
    }
}

/// Which direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the program to the proxy.
    ToProxy,
    /// From the proxy to the program.
    ToProgram,
}

impl Direction {
    /// Which of the channel's queues has the filled blocks; the next one has the free ones.
    #[inline]
    fn filled(self) -> usize {
        match self {
            Self::ToProxy => 0,
            Self::ToProgram => 2,
        }
    }
}

/// Why memory is no channel.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ChannelError {
    /// The system refused.
    #[error("mapping a channel: {0}")]
    Mapping(#[from] beeline_os::MappingError),
    /// It is another thing.
    #[error("{length} bytes that are no channel of this version")]
    NotAChannel {
        /// Its length.
        length: usize,
    },
    /// It is a channel, laid out otherwise.
    #[error("a channel of version {found}, where this is version {VERSION}")]
    OtherVersion {
        /// The one that it says.
        found: u8,
    },
}

/// Of [`ProgramWords::reader_armed`]: no ring is wanted, none is on its way.
pub const UNARMED: u32 = 0;
/// Of [`ProgramWords::reader_armed`]: what comes next rings.
pub const ARMED: u32 = 1;
/// Of [`ProgramWords::reader_armed`]: the proxy decides, or its ring is on its way.
pub const RINGING: u32 = 2;

/// The program's words.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ProgramWords {
    /// [`ARMED`]: the proxy is to ring when there is something to read; [`RINGING`]: it is about to,
    /// or finds that there is nothing.
    pub reader_armed: AtomicU32,
    /// 1: the proxy is to empty the placeholder's queue once there is room, and takes it down.
    pub room_wanted: AtomicU32,
    /// Nothing follows what is in the queue.
    pub finished: AtomicU32,
    /// The connection is to be broken off when its last holder closes it.
    pub abort: AtomicU32,
    /// The placeholder stands in a set, or was asked for by `poll`: it has to say what there is.
    pub watched: AtomicU32,
}

/// The program's words for sending.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct SendingWords {
    /// Thread that works on this half; 0 for none.
    pub holder: AtomicU32,
}

/// The program's words for receiving.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ReceivingWords {
    /// Thread that works on this half; 0 for none.
    pub holder: AtomicU32,
    /// Nothing is received any more: `shutdown(SHUT_RD)`.
    pub shut: AtomicU32,
    /// Bytes of the first packet's payload that were read.
    pub offset: AtomicU64,
    /// Rings of the proxy that were taken off the placeholder, counted round.
    pub bells: AtomicU32,
}

/// The proxy's words.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct ProxyWords {
    /// Nothing follows what is in the queue.
    pub ended: AtomicU32,
    /// 0, or the error with which the connection broke.
    pub reset: AtomicU32,
    /// Packets, counted round, that the peer was told the program has consumed.
    pub credited: AtomicU32,
    /// Rings so far, counted round.
    pub bells: AtomicU32,
}

/// Mapped memory of a connection.
///
/// Invariant: the mapping has [`Shape::length_bytes`] of the shape, which is valid: established when it is made or taken.
#[derive(Debug)]
pub struct Channel {
    mapping: Mapping,
    shape: Shape,
}

impl Channel {
    /// Fresh memory.
    ///
    /// Errors: [`ChannelError::Mapping`]; [`ChannelError::NotAChannel`] for a shape that is none.
    pub fn create(shape: Shape, own: SocketAddr, peer: SocketAddr) -> Result<Self, ChannelError> {
        if !shape.is_valid() {
            return Err(ChannelError::NotAChannel { length: 0 });
        }
        let channel =
            Self { mapping: Mapping::memfd("beeline-packets", shape.length_bytes())?, shape };
        let narrow = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        channel.half_word(BLOCK_BYTES_AT).store(narrow(shape.block_bytes), Ordering::Relaxed);
        channel.half_word(BLOCKS_AT).store(narrow(shape.blocks), Ordering::Relaxed);
        for (at, address) in ADDRESSES_AT.into_iter().zip([own, peer]) {
            for (index, word) in address_words(Some(address)).into_iter().enumerate() {
                channel.word(at + index * 8).store(word, Ordering::Relaxed);
            }
        }
        for direction in [Direction::ToProxy, Direction::ToProgram] {
            let fresh = channel.packets(direction).format();
            fresh.map_err(|Corrupt| ChannelError::NotAChannel { length: shape.length_bytes() })?;
        }
        channel.word(0).store(MAGIC, Ordering::Release);
        Ok(channel)
    }

    /// Memory that another process made.
    ///
    /// Errors: [`ChannelError`].
    pub fn take(memory: OwnedFd) -> Result<Self, ChannelError> {
        let length = rustix::fs::fstat(&memory)
            .map_or(0, |about| usize::try_from(about.st_size).unwrap_or(0));
        let none = ChannelError::NotAChannel { length };
        let sealed = rustix::fs::fcntl_get_seals(&memory)
            .is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK));
        if length < ENTRIES_AT || !sealed {
            return Err(none);
        }
        let mapping = Mapping::shared(memory, length, Protection::ReadWrite)?;
        let mut channel = Self { mapping, shape: Shape { block_bytes: 64, blocks: 4 } };
        let read = |at| channel.half_word(at).load(Ordering::Relaxed) as usize;
        let shape = Shape { block_bytes: read(BLOCK_BYTES_AT), blocks: read(BLOCKS_AT) };
        let magic = channel.word(0).load(Ordering::Acquire);
        let found = (magic >> 56) as u8;
        if magic == NAME | u64::from(found) << 56 && found != VERSION {
            return Err(ChannelError::OtherVersion { found });
        }
        if magic != MAGIC || !shape.is_valid() || shape.length_bytes() != length {
            return Err(none);
        }
        channel.shape = shape;
        Ok(channel)
    }

    /// The memory's descriptor, until it is forgotten.
    #[must_use]
    pub fn mapping(&self) -> &Mapping {
        &self.mapping
    }

    /// How it is divided.
    #[must_use]
    #[inline]
    pub fn shape(&self) -> Shape {
        self.shape
    }

    #[inline]
    fn at(&self, offset: usize, length: usize) -> NonNull<u8> {
        assert!(offset + length <= self.mapping.length_bytes(), "an access stays in the channel");
        // SAFETY: just checked.
        unsafe { self.mapping.base().add(offset) }
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        let word = self.at(offset, 8);
        // SAFETY: mapped while `self` lives; offsets are multiples of 8; atomics only.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }
    }

    fn half_word(&self, offset: usize) -> &AtomicU32 {
        let word = self.at(offset, 4);
        // SAFETY: as in `word`; multiples of 4.
        unsafe { AtomicU32::from_ptr(word.as_ptr().cast()) }
    }

    /// The words at `AT`: structures of atomics, whose every bit pattern is valid.
    #[inline]
    fn words<T, const AT: usize>(&self) -> &T {
        const { assert!(AT + size_of::<T>() <= ENTRIES_AT, "words end before the entries") };
        const { assert!(AT.is_multiple_of(align_of::<T>()), "words are aligned") };
        // SAFETY: every shape goes on behind the entries' beginning (the invariant).
        let place = unsafe { self.mapping.base().add(AT) };
        // SAFETY: within the mapping and aligned, as just asserted; callers name structures of
        // atomics, which may be shared with another process.
        unsafe { place.cast().as_ref() }
    }

    /// The program's words.
    #[must_use]
    #[inline]
    pub fn program(&self) -> &ProgramWords {
        self.words::<_, PROGRAM_AT>()
    }

    /// The program's, for sending.
    #[must_use]
    #[inline]
    pub fn sending(&self) -> &SendingWords {
        self.words::<_, SENDING_AT>()
    }

    /// The program's, for receiving.
    #[must_use]
    #[inline]
    pub fn receiving(&self) -> &ReceivingWords {
        self.words::<_, RECEIVING_AT>()
    }

    /// The proxy's words.
    #[must_use]
    #[inline]
    pub fn proxy(&self) -> &ProxyWords {
        self.words::<_, PROXY_AT>()
    }

    /// Which partition carries it.
    #[must_use]
    pub fn partition(&self) -> &AtomicU32 {
        self.half_word(PARTITION_AT)
    }

    /// The program's own address and its peer's; `None` for nonsense.
    #[must_use]
    pub fn addresses(&self) -> Option<[SocketAddr; 2]> {
        let [own, peer] = ADDRESSES_AT.map(|at| {
            let words = [0, 8, 16].map(|offset| self.word(at + offset).load(Ordering::Relaxed));
            address_of(words)
        });
        Some([own?, peer?])
    }

    /// A word of four bytes in the part that every shape has, or in the entries.
    ///
    /// # Safety
    ///
    /// `offset` is a multiple of 4, and below where the blocks of this shape begin.
    #[inline]
    unsafe fn queue_word(&self, offset: usize) -> NonNull<u8> {
        // SAFETY: the caller's contract, and the invariant: the mapping goes on behind the queues' words.
        unsafe { self.mapping.base().add(offset) }
    }

    /// The line of a queue's tail.
    #[inline]
    fn tail_line(&self, index: usize) -> &TailLine {
        const { assert!(POSITIONS_AT + 4 * 128 <= ENTRIES_AT, "positions end before the entries") };
        const { assert!(POSITIONS_AT.is_multiple_of(align_of::<TailLine>()), "lines are aligned") };
        assert!(index < 4, "a queue of the channel");
        // SAFETY: a multiple of 64 and, as just asserted, before the entries.
        let line = unsafe { self.queue_word(POSITIONS_AT + index * 128) };
        // SAFETY: aligned to 64, mapped while `self` lives; a structure of atomics.
        unsafe { line.cast().as_ref() }
    }

    /// A queue's head.
    #[inline]
    fn head(&self, index: usize) -> &AtomicU32 {
        assert!(index < 4, "a queue of the channel");
        // SAFETY: as in `tail_line`, whose line ends here.
        let head = unsafe { self.queue_word(POSITIONS_AT + index * 128 + 64) };
        // SAFETY: aligned to 64, mapped while `self` lives; atomics only.
        unsafe { AtomicU32::from_ptr(head.as_ptr().cast()) }
    }

    /// Several times for each packet: the invariant stands for the checks that `at` makes.
    #[inline]
    fn queue(&self, index: usize) -> IndexQueue<'_> {
        let line = self.tail_line(index);
        // SAFETY: four arrays of `blocks` words lie before `blocks_at`.
        let entries = unsafe { self.queue_word(ENTRIES_AT + index * 4 * self.shape.blocks) };
        // SAFETY: `blocks` atomics within the mapping, aligned to 4, mapped while `self` lives.
        let entries =
            unsafe { std::slice::from_raw_parts(entries.cast().as_ptr(), self.shape.blocks) };
        IndexQueue::new(line.tail(), self.head(index), entries)
    }

    /// Queues of one direction.
    #[must_use]
    #[inline]
    pub fn packets(&self, direction: Direction) -> Packets<'_> {
        let first = direction.filled();
        let blocks = u32::try_from(self.shape.blocks).unwrap_or(u32::MAX);
        Packets::new(self.queue(first), self.queue(first + 1), blocks).beside(self.tail_line(first))
    }

    /// How many packets were put into the queue of filled blocks, counted round: one load, for callers that look often.
    #[must_use]
    #[inline]
    pub fn put(&self, direction: Direction) -> u32 {
        // Acquire with the Release of `IndexQueue::push`.
        self.tail_line(direction.filled()).tail().load(Ordering::Acquire)
    }

    /// How many packets were taken out of the queue of filled blocks, counted round.
    #[must_use]
    #[inline]
    pub fn taken(&self, direction: Direction) -> u32 {
        self.head(direction.filled()).load(Ordering::Acquire)
    }

    /// Of how many packets the blocks were given back, counted round: see [`Packets::returned`].
    #[must_use]
    #[inline]
    pub fn returned(&self, direction: Direction) -> u32 {
        let blocks = u32::try_from(self.shape.blocks).unwrap_or(u32::MAX);
        // Acquire with the Release of `IndexQueue::push`.
        let put = self.tail_line(direction.filled() + 1).tail().load(Ordering::Acquire);
        put.wrapping_sub(blocks)
    }

    /// Publishes blocks that were filled, a single small packet with a copy beside the tail.
    ///
    /// Errors: [`Corrupt`]: more blocks are about than there are.
    #[inline]
    pub fn publish(&self, direction: Direction, numbers: &[u32]) -> Result<(), Corrupt> {
        let packets = self.packets(direction);
        if let &[number] = numbers {
            let word = self.header(direction, number).load(Ordering::Relaxed);
            if Header::length_in(word) <= WORDS * 8 {
                return packets.publish_beside(number, &self.first_words(direction, number));
            }
        }
        packets.publish(numbers)
    }

    /// What a block begins with.
    #[inline]
    fn first_words(&self, direction: Direction, number: u32) -> [u64; WORDS] {
        const { assert!(WORDS * 8 <= *BLOCK_BYTES.start(), "the least block has as many") };
        let block = self.block(direction, number).cast::<u64>();
        std::array::from_fn(|index| {
            // SAFETY: a block has as many words, as just asserted.
            let word = unsafe { block.add(index) };
            // SAFETY: aligned, since a block is; atomics only.
            unsafe { AtomicU64::from_ptr(word.as_ptr()) }.load(Ordering::Relaxed)
        })
    }

    /// The packet with data at a position of the queue, counted round, as its sender copied it beside the tail: header,
    /// and the words behind it. `None`: it is in its block.
    #[must_use]
    #[inline]
    pub fn copied(&self, direction: Direction, position: u32) -> Option<(Header, [u64; WORDS])> {
        let words = self.packets(direction).copy_at(position)?;
        let header = Header::decode(words[0], WORDS * 8).ok()??;
        (header.kind == PacketKind::Data).then_some((header, words))
    }

    /// The block with this number, which the queues have checked: as many bytes as a block has.
    #[must_use]
    #[inline]
    pub fn block(&self, direction: Direction, number: u32) -> NonNull<u8> {
        let number = number as usize;
        assert!(number < self.shape.blocks, "a block of the direction");
        let first = match direction {
            Direction::ToProxy => 0,
            Direction::ToProgram => self.shape.blocks,
        };
        let offset = self.shape.blocks_at() + (first + number) * self.shape.block_bytes;
        // SAFETY: twice `blocks` blocks end with the mapping (the invariant).
        unsafe { self.mapping.base().add(offset) }
    }

    /// The header of a block.
    #[must_use]
    #[inline]
    pub fn header(&self, direction: Direction, number: u32) -> &AtomicU64 {
        let word = self.block(direction, number);
        // SAFETY: a block is aligned to 64 and longer than a word; atomics only.
        unsafe { AtomicU64::from_ptr(word.as_ptr().cast()) }
    }

    /// Where a block's payload begins.
    #[must_use]
    #[inline]
    pub fn payload(&self, direction: Direction, number: u32) -> NonNull<u8> {
        let block = self.block(direction, number);
        // SAFETY: a block is longer than its header.
        unsafe { block.add(HEADER_BYTES) }
    }

    /// Most bytes of a packet's payload.
    #[must_use]
    pub fn payload_bytes(&self) -> usize {
        self.shape.block_bytes - HEADER_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_channel_of_another_version_is_refused_by_its_version() {
        let at: SocketAddr = "10.1.2.3:80".parse().unwrap();
        let made = Channel::create(Shape { block_bytes: 256, blocks: 8 }, at, at).unwrap();
        for version in [VERSION - 1, VERSION + 1] {
            made.word(0).store(NAME | u64::from(version) << 56, Ordering::Relaxed);
            let memory = made.mapping().descriptor().unwrap().try_clone().unwrap();
            let refused = Channel::take(memory).unwrap_err();
            assert!(
                matches!(refused, ChannelError::OtherVersion { found } if found == version),
                "{refused}"
            );
            let told = refused.to_string();
            assert!(told.contains(&version.to_string()) && told.contains(&VERSION.to_string()));
        }
    }

    #[test]
    fn a_channel_is_taken_as_it_was_made_and_other_memory_is_not() {
        let own: SocketAddr = "10.1.2.3:80".parse().unwrap();
        let peer: SocketAddr = "[fd00::1]:4000".parse().unwrap();
        let shape = Shape { block_bytes: 256, blocks: 8 };
        let made = Channel::create(shape, own, peer).unwrap();
        let memory = made.mapping().descriptor().unwrap().try_clone().unwrap();
        let taken = Channel::take(memory).unwrap();
        assert_eq!((taken.shape(), taken.addresses()), (shape, Some([own, peer])));
        let mut numbers = [0; 9];
        assert_eq!(taken.packets(Direction::ToProxy).take(&mut numbers), Ok(8));
        taken.header(Direction::ToProxy, numbers[3]).store(5, Ordering::Relaxed);
        assert_eq!(made.header(Direction::ToProxy, numbers[3]).load(Ordering::Relaxed), 5);
        assert_eq!(made.header(Direction::ToProgram, numbers[3]).load(Ordering::Relaxed), 0);
        made.half_word(BLOCKS_AT).store(16, Ordering::Relaxed);
        let memory = made.mapping().descriptor().unwrap().try_clone().unwrap();
        assert!(matches!(Channel::take(memory), Err(ChannelError::NotAChannel { .. })));
        let other = beeline_os::mapping::create_memfd("other", 8192).unwrap();
        assert!(matches!(Channel::take(other), Err(ChannelError::NotAChannel { .. })));
    }
}

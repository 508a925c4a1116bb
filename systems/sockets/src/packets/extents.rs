//! Direct mode: a program writes memory of the other host itself, and the other program reads it where it
//! lies (NTSocks 3.13). No proxy copies a byte of it.
//!
//! ```text
//!  writer: a range of the extent, filled ── packet (offset, length) ──► reader: the same range
//!          the range is free again ◄─────── the packet was consumed ─── released
//! ```
//!
//! The packet goes through queues and rings as any other, behind what was sent before. It is posted after
//! the bytes, which the writer fences. Ranges are given and freed in order, round and round.
//!
//! The writer may write its extent at any moment: the reader copies, or looks at bytes that may change.

use std::collections::VecDeque;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};

use beeline_os::Mapping;
use beeline_os::mapping::Protection;
use beeline_os::write_back::store_fence;

use super::blocks::Block;
use super::channel::Direction;
use super::connection::Connection;
use super::dial::ask;
use super::header::{HEADER_BYTES, Header, PacketKind};
use super::protocol::{Answer, Question};
use crate::kernel::Errno;

/// Bytes of an [`PacketKind::Extent`] packet: offset and length.
pub(super) const PACKET_BYTES: usize = 16;
/// Ranges begin at a multiple: a cache line.
const ALIGNMENT: u64 = 64;
/// In [`Block::number`]: the block is a range of the extent.
const RANGE: u32 = 1 << 31;

/// Both extents of a connection, as far as this process has them.
#[derive(Debug, Default)]
pub struct Extents {
    out: OnceLock<Out>,
    arrivals: OnceLock<Mapping>,
}

/// The extent that this program writes.
#[derive(Debug)]
struct Out {
    mapping: Mapping,
    ranges: Mutex<Ranges>,
}

/// Which parts are in use: positions that count up, round and round the extent.
#[derive(Debug)]
struct Ranges {
    length: u64,
    /// Of the first free byte.
    head: u64,
    /// Of the first byte in use.
    tail: u64,
    /// What was sent: the packet's position in the queue, and where its range ends.
    sent: VecDeque<(u32, u64)>,
    /// What was given and not sent yet: begin, end.
    given: Option<(u64, u64)>,
}

impl Ranges {
    fn new(length: u64) -> Self {
        Self { length, head: 0, tail: 0, sent: VecDeque::new(), given: None }
    }

    /// The other program has consumed so many packets, counted round.
    fn consumed(&mut self, packets: u32) {
        while let Some(&(position, end)) = self.sent.front()
            && (1..=1 << 31).contains(&packets.wrapping_sub(position))
        {
            self.tail = end;
            self.sent.pop_front();
        }
    }

    /// A range of so many bytes: where it begins in the extent. `None`: there is none at the moment, or
    /// one was given already.
    fn give(&mut self, length: u64) -> Option<u64> {
        if self.given.is_some() || length == 0 || length > self.length {
            return None;
        }
        let within = self.head % self.length;
        // One that does not fit before the end begins at the beginning.
        let skipped = if within + length > self.length { self.length - within } else { 0 };
        let begin = self.head + skipped;
        let end = (begin + length).next_multiple_of(ALIGNMENT);
        if end - self.tail > self.length {
            return None;
        }
        self.given = Some((begin, end));
        Some(begin % self.length)
    }

    /// The range that was given is sent by the packet at `position`: where it begins.
    fn send(&mut self, position: u32) -> Option<u64> {
        let (begin, end) = self.given.take()?;
        self.head = end;
        self.sent.push_back((position, end));
        Some(begin % self.length)
    }
}

impl Connection {
    /// Asks for `bytes` of the other host's memory, for this program to write. Once a connection.
    ///
    /// Errors: `EEXIST`; `ENOBUFS` where a quota is used up; `EINVAL` for no bytes; `EPIPE`, `ECONNRESET`.
    pub fn ask_extent(&self, fd: RawFd, bytes: usize) -> Result<(), Errno> {
        if self.extents.out.get().is_some() {
            return Err(Errno(libc::EEXIST));
        }
        if bytes == 0 {
            return Err(Errno(libc::EINVAL));
        }
        let bytes = bytes.next_multiple_of(4096);
        let memory = extent(fd, Question::Extent { bytes: bytes as u64 })?;
        if sealed_length(&memory).is_none_or(|length| length < bytes) {
            return Err(Errno(libc::ECONNRESET));
        }
        let mapping = Mapping::shared(memory, bytes, Protection::ReadWrite);
        let mapping = mapping.map_err(|_| Errno(libc::ENOMEM))?;
        mapping.forget_descriptor();
        let ranges = Mutex::new(Ranges::new(bytes as u64));
        let set = self.extents.out.set(Out { mapping, ranges });
        set.map_err(|_| Errno(libc::EEXIST))
    }

    /// `length` bytes of the extent, to be filled and sent; `None`: there are none until the other program
    /// has consumed more.
    ///
    /// Errors: `ENXIO` without an extent; `EMSGSIZE` for more than it has; `EBUSY` while another part is
    /// given; `EPIPE`, `ECONNRESET`.
    pub fn extent_block(&self, length: usize) -> Result<Option<Block>, Errno> {
        if let Some(error) = self.refusal() {
            return Err(error);
        }
        let out = self.extents.out.get().ok_or(Errno(libc::ENXIO))?;
        if length == 0 || length > out.mapping.length_bytes() {
            return Err(Errno(libc::EMSGSIZE));
        }
        let mut ranges = out.ranges.lock().map_err(|_| Errno(libc::EBUSY))?;
        if ranges.given.is_some() {
            return Err(Errno(libc::EBUSY));
        }
        ranges.consumed(self.channel.packets(Direction::ToProxy).filled().taken());
        let Some(at) = ranges.give(length as u64) else { return Ok(None) };
        drop(ranges);
        let at = usize::try_from(at).map_err(|_| Errno(libc::EFAULT))?;
        // SAFETY: a range that was given lies in the mapping.
        let bytes = unsafe { out.mapping.base().add(at) };
        Ok(Some(Block { bytes, length, number: RANGE }))
    }

    /// Sends the first `length` bytes of the part that [`Connection::extent_block`] gave.
    ///
    /// Errors: `EINVAL` where none was given; `EMSGSIZE`; `EAGAIN`: no block for its packet at the moment,
    /// the part stays given; `EPIPE`, `ECONNRESET`.
    pub fn send_extent(&self, fd: RawFd, length: usize) -> Result<(), Errno> {
        let out = self.extents.out.get().ok_or(Errno(libc::ENXIO))?;
        let mut ranges = out.ranges.lock().map_err(|_| Errno(libc::EBUSY))?;
        let (begin, end) = ranges.given.ok_or(Errno(libc::EINVAL))?;
        if length == 0 || length as u64 > end - begin {
            return Err(Errno(libc::EMSGSIZE));
        }
        let number = self.take_block(fd)?.ok_or(Errno(libc::EAGAIN))?;
        // The bytes are on their way before the packet that tells of them.
        store_fence();
        let at = begin % ranges.length;
        let payload = self.channel.payload(Direction::ToProxy, number);
        let words = [at, length as u64];
        // SAFETY: a block's payload has room for two words, and is this program's until it is published.
        unsafe { payload.cast::<[u64; 2]>().as_ptr().write_unaligned(words) };
        let whole =
            u16::try_from(HEADER_BYTES + PACKET_BYTES).map_err(|_| Errno(libc::EMSGSIZE))?;
        let kind = PacketKind::Extent;
        let header = Header { source: 0, destination: 0, length: whole, sync: false, kind };
        self.channel.header(Direction::ToProxy, number).store(header.encode(), Ordering::Relaxed);
        let position = self.publish_block(fd, number)?;
        ranges.send(position);
        Ok(())
    }

    /// Where the bytes of the packet in this block lie, and how many: its payload, or a part of the extent.
    pub(super) fn piece(&self, fd: RawFd, number: u32) -> Result<(NonNull<u8>, usize), Errno> {
        let broken = Errno(libc::ECONNRESET);
        let word = self.channel.header(Direction::ToProgram, number).load(Ordering::Relaxed);
        let header = Header::decode(word, self.channel.shape().block_bytes).map_err(|_| broken)?;
        let header = header.ok_or(broken)?;
        let payload = self.channel.payload(Direction::ToProgram, number);
        match header.kind {
            PacketKind::Data => Ok((payload, header.payload_bytes())),
            PacketKind::Extent => {
                // SAFETY: a block's payload has room for two words; copied, then checked.
                let words = unsafe { payload.cast::<[u64; 2]>().as_ptr().read_unaligned() };
                let [at, length] = words.map(|word| usize::try_from(word).unwrap_or(usize::MAX));
                let arrivals = self.arrivals(fd)?;
                let fits = at.checked_add(length).is_some_and(|end| end <= arrivals.length_bytes());
                if length == 0 || !fits {
                    return Err(broken);
                }
                // SAFETY: just checked against the mapping, which lives as long as the connection.
                Ok((unsafe { arrivals.base().add(at) }, length))
            }
            _ => Err(broken),
        }
    }

    /// The memory that the other end's program writes.
    fn arrivals(&self, fd: RawFd) -> Result<&Mapping, Errno> {
        if let Some(known) = self.extents.arrivals.get() {
            return Ok(known);
        }
        let memory = extent(fd, Question::Arrivals)?;
        let length = sealed_length(&memory).ok_or(Errno(libc::ECONNRESET))?;
        let mapping = Mapping::shared(memory, length, Protection::ReadOnly);
        let mapping = mapping.map_err(|_| Errno(libc::ENOMEM))?;
        mapping.forget_descriptor();
        Ok(self.extents.arrivals.get_or_init(|| mapping))
    }
}

/// Bytes of memory that no process can cut short; `None` for other memory, and for none.
fn sealed_length(memory: &OwnedFd) -> Option<usize> {
    let seals = rustix::fs::fcntl_get_seals(memory).ok()?;
    let length = usize::try_from(rustix::fs::fstat(memory).ok()?.st_size).ok()?;
    (seals.contains(rustix::fs::SealFlags::SHRINK) && length > 0).then_some(length)
}

/// What the monitor gives for `question` about the placeholder `fd`.
fn extent(fd: RawFd, question: Question) -> Result<OwnedFd, Errno> {
    // SAFETY: the program's open descriptor, for the length of the call.
    let about = unsafe { BorrowedFd::borrow_raw(fd) };
    match ask(question, Some(about.as_fd())) {
        Ok((Answer::Extent, mut descriptors)) => descriptors.pop().ok_or(Errno(libc::EPROTO)),
        Ok((Answer::Kernel { error }, _)) if error != 0 => Err(Errno(error)),
        Ok(_) => Err(Errno(libc::EPROTO)),
        Err(_) => Err(Errno(libc::ENETDOWN)),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::fd::AsRawFd as _;
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::super::channel::{Channel, Shape};
    use super::super::page::Page;
    use super::*;

    #[test]
    fn memory_that_another_process_may_cut_short_is_no_extent() {
        let sealed = beeline_os::mapping::create_memfd("extent", 8192).unwrap();
        assert_eq!(sealed_length(&sealed), Some(8192));
        let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
        let open = rustix::fs::memfd_create("extent", flags).unwrap();
        rustix::fs::ftruncate(&open, 8192).unwrap();
        assert_eq!(sealed_length(&open), None);
    }

    /// The writer of a range waits for the range, however few packets were read: a proxy's thread that sleeps is woken
    /// for each, also where the reader takes the bytes by `recv`.
    #[test]
    fn a_range_that_was_read_by_a_copy_wakes_the_proxy_as_one_that_was_read_where_it_lies() {
        let at = "10.0.0.1:1".parse().unwrap();
        let shape = Shape { block_bytes: 128, blocks: 16 };
        let channel = Channel::create(shape, at, at).unwrap();
        let page = Arc::new(Page::create().unwrap());
        let [proxy, fd] = std::os::unix::net::UnixStream::pair().map(|(a, b)| [a, b]).unwrap();
        proxy.set_nonblocking(true).unwrap();
        let connection = Connection::new(channel, Arc::clone(&page));
        let extent = Mapping::memfd("extent", 4096).unwrap();
        connection.extents.arrivals.set(extent).unwrap();
        let (to, fd) = (connection.channel.packets(Direction::ToProgram), fd.as_raw_fd());
        let arrive = |offset: u64| {
            let mut numbers = [0; 1];
            assert_eq!(to.take(&mut numbers), Ok(1));
            let payload = connection.channel.payload(Direction::ToProgram, numbers[0]);
            // SAFETY: a block's payload has room for two words.
            unsafe { payload.cast::<[u64; 2]>().as_ptr().write_unaligned([offset, 64]) };
            let (length, kind) = (24, PacketKind::Extent);
            let header = Header { source: 0, destination: 0, length, sync: false, kind };
            let word = connection.channel.header(Direction::ToProgram, numbers[0]);
            word.store(header.encode(), Ordering::Relaxed);
            to.publish(&numbers).unwrap();
        };
        let mut bytes = [0_u8; 64];
        let mut receive = |length: usize| {
            let piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: length }];
            // SAFETY: our own bytes.
            unsafe { connection.receive(fd, &piece, libc::MSG_DONTWAIT) }
        };
        let poked = || (&proxy).read(&mut [0; 8]).unwrap_or(0);
        page.asleep(0).store(1, Ordering::Relaxed);
        arrive(0);
        assert_eq!(receive(40), Ok(40));
        assert_eq!(poked(), 0, "its writer may not have the range yet");
        assert_eq!(receive(64), Ok(24));
        assert_eq!(poked(), 1);
        page.asleep(0).store(0, Ordering::Relaxed);
        arrive(64);
        assert_eq!(receive(64), Ok(64));
        assert_eq!(poked(), 0, "a thread that is awake looks by itself");
    }

    proptest! {
        #[test]
        fn ranges_in_use_never_overlap_and_all_come_back(
            steps in proptest::collection::vec((any::<bool>(), 1_u64..700), 1..300), start in prop_oneof![Just(0_u32), Just(u32::MAX - 5)],
        ) {
            let mut ranges = Ranges::new(1024);
            let (mut position, mut consumed) = (start, start);
            let mut live: VecDeque<(u64, u64)> = VecDeque::new();
            for (gives, length) in steps {
                if gives {
                    let Some(at) = ranges.give(length) else { continue };
                    prop_assert!(at + length <= 1024);
                    for &(other, size) in &live {
                        prop_assert!(at + length <= other || other + size <= at, "{at} {length} {other} {size}");
                    }
                    prop_assert_eq!(ranges.give(1), None);
                    prop_assert_eq!(ranges.send(position), Some(at));
                    position = position.wrapping_add(1);
                    live.push_back((at, length));
                } else if live.pop_front().is_some() {
                    consumed = consumed.wrapping_add(1);
                    ranges.consumed(consumed);
                }
            }
            ranges.consumed(position);
            prop_assert_eq!(ranges.head, ranges.tail);
            prop_assert!(ranges.give(1024).is_some() || !ranges.head.is_multiple_of(1024));
        }
    }
}

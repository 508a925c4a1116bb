//! One connection at a partition: what is shared with the program, and what is known of its ends. Its
//! [receiving half](Incoming) is the receiving half's of the partition, which may be another thread's.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use beeline_ring::packets::Corrupt;
use beeline_sockets::packets::channel::{ARMED, Channel, Direction, RINGING, UNARMED};
use beeline_sockets::packets::connection::FILLER_BYTES;
use beeline_sockets::packets::header::{Header, PacketKind};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::flow::{Act, Allowance, Ends, Receipts, Violation};
use crate::partition::{BATCH, Counters, Key, RECEIVE_BATCH, add};
use crate::ring::{RingReceiver, RingSender};

/// Calls that empty a placeholder's queue, at most: several times what it holds.
const EMPTYING_CALLS: usize = 64;

/// Pokes that wait in a placeholder beside a filler, at most. Some thirty have room there; one that has none wakes no
/// proxy.
const POKES: u64 = 8;

/// Where no packet's stands yet.
const NO_HEADER: Header =
    Header { source: 0, destination: 0, length: 0, sync: false, kind: PacketKind::Data };

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) key: Key,
    pub(crate) id: u64,
    pub(crate) channel: Arc<Channel>,
    /// The proxy's end of the placeholder.
    pub(crate) socket: Arc<OwnedFd>,
    pub(crate) priority: u8,
    pub(crate) open: bool,
    /// On the way to another partition.
    pub(crate) moving: Moving,
    /// It is to be broken off once it is where it goes.
    pub(crate) is_doomed: bool,
    /// What the other end's program has consumed, said before this end knows where that one stands.
    pub(crate) late_credit: Option<u32>,
    pub(crate) allowance: Allowance,
    pub(crate) ends: Ends,
    /// While it is between two partitions, or about to be at its first.
    pub(crate) incoming: Option<Incoming>,
}

/// What is known of what comes for a connection.
#[derive(Debug)]
pub(crate) struct Incoming {
    pub(crate) key: Key,
    pub(crate) channel: Arc<Channel>,
    pub(crate) socket: Arc<OwnedFd>,
    pub(crate) receipts: Receipts,
    /// Free blocks towards the program, taken and not yet used.
    blocks: Vec<u32>,
    /// Blocks towards the program that were filled in this round.
    filled: Vec<u32>,
    /// Every packet that was consumed is told at once.
    pub(crate) is_eager: bool,
    /// The sender is told how much was consumed: the other end knows the connection, here.
    pub(crate) tells: bool,
    /// And is told now, whether that is due or not.
    pub(crate) retell: bool,
    /// No program reads any more.
    pub(crate) is_closed: bool,
    /// Packets came since.
    pub(crate) unread: bool,
    /// Nothing may follow.
    pub(crate) finish_came: bool,
    /// The kernel had no memory for a ring: it is tried again, and nothing sleeps before.
    pub(crate) owes_ring: bool,
}

/// Whether a connection is on its way to another partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Moving {
    /// It stays.
    #[default]
    Not,
    /// Nothing more is sent here: the last packet says so next.
    Leaving(usize),
    /// The other end was told, and answers with its own last packet.
    Left(usize),
    /// It is here; the other end may not have it yet.
    Awaiting,
    /// It is here, and at the other end, which is told so next.
    Arrived,
}

/// Why a packet was not taken.
pub(crate) enum Refused {
    /// The other host sent more than it may.
    NoCredit,
    /// No block is free: the program says that it gave one back, and did not.
    NoBlock,
    /// The program wrote nonsense.
    Queue,
}

impl Incoming {
    pub(crate) fn new(
        key: Key,
        channel: &Arc<Channel>,
        socket: &Arc<OwnedFd>,
        receipts: Receipts,
    ) -> Self {
        Self {
            key,
            channel: Arc::clone(channel),
            socket: Arc::clone(socket),
            receipts,
            blocks: Vec::with_capacity(BATCH),
            filled: Vec::with_capacity(RECEIVE_BATCH),
            is_eager: false,
            tells: false,
            retell: false,
            is_closed: false,
            unread: false,
            finish_came: false,
            owes_ring: false,
        }
    }

    /// Copies the packet at the head of the window's ring into a block of the program's.
    pub(crate) fn accept(&mut self, ring: &RingReceiver, header: Header) -> Result<(), Refused> {
        if self.is_closed {
            // No program reads it: the other host hears so from `look_at_ends`.
            self.unread = true;
            return Ok(());
        }
        self.receipts.take().map_err(|Violation| Refused::NoCredit)?;
        // A range is wanted back sooner than a block.
        self.is_eager |= header.kind == PacketKind::Extent;
        let packets = self.channel.packets(Direction::ToProgram);
        if self.blocks.is_empty() {
            let mut numbers = [0; BATCH];
            let taken = packets.take(&mut numbers).map_err(|Corrupt| Refused::Queue)?;
            self.blocks.extend(numbers[..taken].iter().rev());
        }
        // The sender goes by what was given back, so that one is there.
        let number = self.blocks.pop().ok_or(Refused::NoBlock)?;
        let target = self.channel.payload(Direction::ToProgram, number);
        // SAFETY: a block holds as much as a slot, and the header was checked against a slot.
        unsafe { ring.copy(target.as_ptr(), header.payload_bytes()) };
        self.channel.header(Direction::ToProgram, number).store(header.encode(), Ordering::Relaxed);
        self.filled.push(number);
        Ok(())
    }

    /// The sender may be to hear of what the program consumed. Otherwise the program's position is left alone: its line
    /// would come to this processor and be wanted back with the next packet.
    #[inline]
    pub(crate) fn looks_for_credit(&self) -> bool {
        self.tells && (self.retell || self.receipts.may_be_due(self.is_eager))
    }

    /// Publishes what was filled, and rings if the reader waits.
    pub(crate) fn publish(&mut self, counters: &Counters) -> Result<(), Corrupt> {
        if self.filled.is_empty() {
            return Ok(());
        }
        let outcome = self.channel.publish(Direction::ToProgram, &self.filled);
        self.filled.clear();
        self.ring(counters);
        outcome
    }

    /// Rings if there is something to read and the reader is armed.
    pub(crate) fn ring(&mut self, counters: &Counters) {
        let (channel, socket) = (&self.channel, &self.socket);
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let by = || rustix::net::send(socket, &[1], flags).map(drop);
        self.owes_ring = attend(channel, counters, by);
    }

    /// How much is in the program's queue, and how much of it the program has consumed: what the
    /// other end needs to know to go on. From here on only what follows is taken.
    pub(crate) fn position(&mut self) -> Result<(u32, u32), Violation> {
        let packets = self.channel.packets(Direction::ToProgram);
        let blocks = u32::try_from(self.channel.shape().blocks).unwrap_or(u32::MAX);
        let (delivered, consumed) = (packets.filled().put(), packets.returned());
        self.receipts = Receipts::resume(blocks, delivered, consumed)?;
        Ok((delivered, consumed))
    }
}

/// Rings, `by` a byte in the placeholder, if there is something to read and the reader is armed. True: that has to be
/// tried again.
///
/// The reader sees for as long as this takes that it may be rung for, so that no ring comes for
/// what it has read already: a placeholder would be readable with nothing behind it. Of two threads that come here at
/// the same time one rings.
fn attend(channel: &Channel, counters: &Counters, by: impl FnOnce() -> Result<(), Errno>) -> bool {
    // Against the fence between the reader's arm and its look at the queue.
    fence(Ordering::SeqCst);
    let armed = &channel.program().reader_armed;
    let step =
        |from, to| armed.compare_exchange(from, to, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    let is_empty = || channel.packets(Direction::ToProgram).filled().is_empty();
    if armed.load(Ordering::SeqCst) != ARMED || is_empty() || !step(ARMED, RINGING) {
        return false;
    }
    // Against the fence between the reader's last packet and its look at the word.
    fence(Ordering::SeqCst);
    if is_empty() {
        step(RINGING, ARMED);
        return false;
    }
    let sent = by();
    if sent.is_ok() {
        channel.proxy().bells.fetch_add(1, Ordering::Release);
        add(&counters.bells, 1);
    }
    step(RINGING, if sent.is_ok() { UNARMED } else { ARMED });
    // A placeholder without room has rings in it, and one whose other end is gone has no reader.
    matches!(sent, Err(Errno::NOBUFS | Errno::NOMEM))
}

impl Connection {
    /// The program consumed what the other end now says: its blocks are the sending program's again.
    pub(crate) fn give_back(&mut self) -> Result<(), Corrupt> {
        let packets = self.channel.packets(Direction::ToProxy);
        let mut left = self.allowance.consumed().wrapping_sub(packets.filled().taken()) as usize;
        if left > self.channel.shape().blocks {
            return Err(Corrupt);
        }
        let some = left > 0;
        while left > 0 {
            let mut numbers = [0; BATCH];
            let found = packets.look(&mut numbers[..left.min(BATCH)])?;
            if found == 0 {
                return Err(Corrupt);
            }
            packets.release(&numbers[..found])?;
            left -= found;
        }
        if some {
            // Against the fence between the program's wish and its look at the blocks.
            fence(Ordering::SeqCst);
            if self.channel.program().room_wanted.load(Ordering::SeqCst) != 0 {
                self.give_room();
            }
        }
        Ok(())
    }

    /// The other end goes on from there.
    pub(crate) fn resume(&mut self, delivered: u32, consumed: u32) -> Result<(), Corrupt> {
        let put = self.channel.packets(Direction::ToProxy).filled().put();
        let resumed = self.allowance.resume(delivered, consumed, put);
        resumed.map_err(|Violation| Corrupt)?;
        if let Some(consumed) = self.late_credit.take() {
            self.allowance.credit(consumed).map_err(|Violation| Corrupt)?;
        }
        self.ends.finish_sent = false;
        self.open = true;
        self.give_back()
    }

    /// The program sees that nothing comes any more, whatever other process has this end.
    pub(crate) fn hang_up(&self) {
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
    }

    /// All that the program sent so far went to the other host.
    fn is_drained(&self) -> bool {
        self.channel.put(Direction::ToProxy) == self.allowance.sent()
    }

    /// Stages a batch for the window: packets and bytes. The blocks stay until the other end's program
    /// has consumed them.
    pub(crate) fn stage(
        &mut self,
        ring: &mut RingSender,
        room: usize,
    ) -> Result<(usize, usize), Corrupt> {
        if self.is_drained() {
            return Ok((0, 0));
        }
        let channel = &self.channel;
        let packets = channel.packets(Direction::ToProxy);
        let most = BATCH.min(room).min(self.allowance.room() as usize);
        let mut numbers = [0; BATCH];
        let found = packets.look_from(self.allowance.sent(), &mut numbers[..most])?;
        if found == 0 {
            return Ok((0, 0));
        }
        let Key { own: source, peer: destination } = self.key;
        if found == 1
            && let Some((header, words)) = channel.copied(Direction::ToProxy, self.allowance.sent())
        {
            let header = Header { source, destination, sync: false, ..header };
            // SAFETY: the header was checked against the words, of which it has the first.
            unsafe { ring.stage(header, words[1..].as_ptr().cast()) };
            self.allowance.spend(1);
            return Ok((1, header.payload_bytes()));
        }
        // All of them before the first is staged: of a batch that is given up nothing is in the ring, whose room the
        // next connection counts on.
        let mut headers = [NO_HEADER; BATCH];
        for (place, &number) in headers.iter_mut().zip(&numbers[..found]) {
            let word = channel.header(Direction::ToProxy, number).load(Ordering::Relaxed);
            match Header::decode(word, channel.shape().block_bytes) {
                Ok(Some(header))
                    if matches!(header.kind, PacketKind::Data | PacketKind::Extent) =>
                {
                    *place = header;
                }
                _ => return Err(Corrupt),
            }
        }
        let mut bytes = 0;
        for (&header, &number) in headers[..found].iter().zip(&numbers) {
            let header = Header { source, destination, sync: false, ..header };
            let payload = channel.payload(Direction::ToProxy, number);
            // SAFETY: the header was checked against the block.
            unsafe { ring.stage(header, payload.as_ptr()) };
            if header.kind == PacketKind::Data {
                bytes += header.payload_bytes();
            }
        }
        self.allowance.spend(u32::try_from(found).unwrap_or(0));
        Ok((found, bytes))
    }

    /// Pokes fill the placeholder beside a filler: the next ones would be lost.
    fn is_filling_up(&self) -> bool {
        let most = FILLER_BYTES as u64 + POKES;
        rustix::io::ioctl_fionread(&*self.socket).is_ok_and(|bytes| bytes > most)
    }

    /// Empties the placeholder's queue, unless the program waits for room that there is not. Before pokes are lost it is
    /// emptied all the same: the program finds no room then, and asks again.
    pub(crate) fn give_room(&self) {
        let wanted = &self.channel.program().room_wanted;
        let free = self.channel.packets(Direction::ToProxy).free().count().unwrap_or(0) as usize;
        let enough = free * 4 >= self.channel.shape().blocks;
        if wanted.load(Ordering::SeqCst) != 0 {
            if !enough && !self.is_filling_up() {
                return;
            }
            wanted.store(0, Ordering::SeqCst);
        }
        let mut bytes = [0_u8; 4096];
        // A program that fills it meanwhile costs a bounded number of calls.
        for _ in 0..EMPTYING_CALLS {
            let taken = rustix::net::recv(self.socket.as_fd(), &mut bytes[..], RecvFlags::DONTWAIT);
            if !taken.is_ok_and(|(_, count)| count == bytes.len()) {
                break;
            }
        }
    }

    /// What is to be done about its ends.
    pub(crate) fn look_at_ends(&mut self) -> Act {
        if self.moving != Moving::Not {
            return Act::Wait;
        }
        // Acquire: what was sent before the program said so is in the queue.
        let program = self.channel.program();
        self.ends.finished = program.finished.load(Ordering::Acquire) != 0;
        if !self.ends.finished && !self.ends.is_closed {
            return Act::Wait;
        }
        self.ends.is_empty = self.open && self.is_drained();
        if self.ends.is_closed {
            let to_program = self.channel.packets(Direction::ToProgram);
            self.ends.unread |=
                !to_program.filled().is_empty() || program.abort.load(Ordering::Relaxed) != 0;
        }
        self.ends.decide()
    }

    /// True when there is something to be sent, or to be said of its end.
    pub(crate) fn has_work(&self, blocked: bool) -> bool {
        let ends = (self.ends.is_closed
            || self.channel.program().finished.load(Ordering::Acquire) != 0)
            && !self.ends.finish_sent;
        let may = if self.is_drained() { ends } else { self.allowance.room() > 0 };
        let moves = matches!(self.moving, Moving::Leaving(_) | Moving::Arrived);
        let stays = self.open && self.moving == Moving::Not;
        !blocked && (stays && may || moves)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::net::UnixStream;

    use beeline_sockets::packets::channel::Shape;
    use beeline_sockets::packets::header::HEADER_BYTES;

    use super::*;

    /// A packet is there and the reader is armed.
    pub(crate) fn told() -> (Incoming, UnixStream) {
        let at = "10.0.0.1:1".parse().unwrap();
        let channel = Channel::create(Shape { block_bytes: 128, blocks: 16 }, at, at).unwrap();
        let (own, program) = UnixStream::pair().unwrap();
        program.set_nonblocking(true).unwrap();
        let packets = channel.packets(Direction::ToProgram);
        let mut numbers = [0; 1];
        assert_eq!(packets.take(&mut numbers), Ok(1));
        let length = u16::try_from(HEADER_BYTES + 1).unwrap();
        let header = Header { length, ..NO_HEADER }.encode();
        channel.header(Direction::ToProgram, numbers[0]).store(header, Ordering::Relaxed);
        packets.publish(&numbers).unwrap();
        channel.program().reader_armed.store(ARMED, Ordering::Relaxed);
        let key = Key { own: 80, peer: 4000 };
        let (channel, own) = (Arc::new(channel), Arc::new(OwnedFd::from(own)));
        (Incoming::new(key, &channel, &own, Receipts::new(16)), program)
    }

    #[test]
    fn a_ring_that_the_kernel_had_no_memory_for_is_owed_and_no_other_is() {
        let counters = Counters::default();
        for (error, owes) in [
            (Errno::NOBUFS, true),
            (Errno::NOMEM, true),
            (Errno::AGAIN, false),
            (Errno::PIPE, false),
        ] {
            let (incoming, _program) = told();
            assert_eq!(attend(&incoming.channel, &counters, || Err(error)), owes, "{error}");
            // Whatever comes next rings.
            let armed = incoming.channel.program().reader_armed.load(Ordering::Relaxed);
            assert_eq!((armed, counters.bells.load(Ordering::Relaxed)), (ARMED, 0));
        }
        let (incoming, _program) = told();
        assert!(!attend(&incoming.channel, &counters, || Ok(())));
        assert_eq!(counters.bells.load(Ordering::Relaxed), 1);
    }
}

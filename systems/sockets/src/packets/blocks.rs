//! The lane's blocks in the program's own hands: no copy between a buffer and a block (shm mode,
//! NTSocks 3.13).
//!
//! A program that fills blocks itself, and reads them where they lie, leaves two of the four copies
//! of a message: block to window at the sender's host, window to block at the receiver's. Bytes sent
//! so and by [`Connection::send`] are one stream; so are those received.
//!
//! A server's step, with the connection that [`crate::lane::find`] has of its descriptor:
//!
//! ```
//! use std::os::fd::RawFd;
//!
//! use beeline_sockets::kernel::Errno;
//! use beeline_sockets::packets::Connection;
//!
//! /// Sends the first packet back in capitals; false when none came, or no block is free to answer it.
//! fn answer(fd: RawFd, connection: &Connection) -> Result<bool, Errno> {
//!     let Some(packet) = connection.arrived(fd)? else { return Ok(false) };
//!     let Some(mut room) = connection.room(fd)? else { return Ok(false) };
//!     let length = room.write(0, &packet.bytes().to_ascii_uppercase());
//!     room.send(fd, length)?;
//!     packet.release(fd)?;
//!     Ok(true)
//! }
//! ```

use std::os::fd::RawFd;

use beeline_ring::packets::Corrupt;

use super::channel::Direction;
use super::connection::Connection;
use super::header::{HEADER_BYTES, Header, PacketKind};
use crate::kernel::Errno;

/// A free block, to be filled and sent.
#[derive(Debug)]
pub struct Room<'a> {
    connection: &'a Connection,
    number: u32,
}

/// A packet that came, where it lies.
#[derive(Debug)]
pub struct Arrived<'a> {
    connection: &'a Connection,
    number: u32,
    /// Of the packet's first byte.
    from: std::ptr::NonNull<u8>,
    offset: usize,
    length: usize,
}

impl Room<'_> {
    /// Most bytes that it takes.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.connection.channel.payload_bytes()
    }

    /// Writes `bytes` at `offset`. As many as fit.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> usize {
        let part = bytes.len().min(self.length_bytes().saturating_sub(offset));
        if part > 0 {
            let payload = self.connection.channel.payload(Direction::ToProxy, self.number);
            // SAFETY: `offset + part` is at most the payload's length.
            let target = unsafe { payload.add(offset) };
            // SAFETY: as above; the block is this program's until it is sent.
            unsafe { target.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), part) };
        }
        part
    }

    /// Sends the first `length` bytes. `fd` is the placeholder.
    ///
    /// Errors: `EMSGSIZE` for none, or more than fit; `ECONNRESET`, `EPIPE`.
    pub fn send(self, fd: RawFd, length: usize) -> Result<(), Errno> {
        self.connection.send_block(fd, self.number, length)
    }
}

impl Arrived<'_> {
    /// Bytes of it that were not read yet.
    #[must_use]
    pub fn length_bytes(&self) -> usize {
        self.length - self.offset
    }

    /// The bytes, where they lie. The proxy of this host, which runs as this user, does not touch a
    /// block before it is given back.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the offset is below the length, which was checked against the block.
        let from = unsafe { self.from.add(self.offset) };
        // SAFETY: within the block, which is this program's until `release`, by `self`'s borrow.
        unsafe { std::slice::from_raw_parts(from.as_ptr(), self.length - self.offset) }
    }

    /// Gives the block back. `fd` is the placeholder.
    ///
    /// Errors: `ECONNRESET` where the proxy wrote nonsense.
    pub fn release(self, fd: RawFd) -> Result<(), Errno> {
        self.connection.release_block(fd, self.number)
    }
}

/// A block as other languages have it: where its bytes lie, how many, and its number.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// Of the payload, or of what was not read of it.
    pub bytes: std::ptr::NonNull<u8>,
    /// Bytes there.
    pub length: usize,
    /// By which it is sent or given back.
    pub number: u32,
}

impl Connection {
    fn knows(&self, number: u32) -> Result<(), Errno> {
        let known = (number as usize) < self.channel.shape().blocks;
        if known { Ok(()) } else { Err(Errno(libc::EINVAL)) }
    }

    /// As [`Connection::room`], for [`Connection::send_block`].
    ///
    /// Errors: as there.
    pub fn room_block(&self, fd: RawFd) -> Result<Option<Block>, Errno> {
        let length = self.channel.payload_bytes();
        Ok(self.take_block(fd)?.map(|number| {
            let bytes = self.channel.payload(Direction::ToProxy, number);
            Block { bytes, length, number }
        }))
    }

    /// Sends the first `length` bytes of a block that [`Connection::room_block`] gave.
    ///
    /// Errors: `EINVAL` for a number that is no block's; as [`Room::send`].
    pub fn send_block(&self, fd: RawFd, number: u32, length: usize) -> Result<(), Errno> {
        self.knows(number)?;
        if length == 0 || length > self.channel.payload_bytes() {
            return Err(Errno(libc::EMSGSIZE));
        }
        let whole = u16::try_from(length + HEADER_BYTES).map_err(|_| Errno(libc::EMSGSIZE))?;
        let kind = PacketKind::Data;
        let header = Header { source: 0, destination: 0, length: whole, sync: false, kind };
        let word = self.channel.header(Direction::ToProxy, number);
        word.store(header.encode(), std::sync::atomic::Ordering::Relaxed);
        self.publish_block(fd, number).map(|_| ())
    }

    /// As [`Connection::arrived`], for [`Connection::give_block_back`].
    ///
    /// Errors: as there.
    pub fn arrived_block(&self, fd: RawFd) -> Result<Option<Block>, Errno> {
        Ok(self.first_block(fd)?.map(|(number, from, offset, length)| {
            // SAFETY: the offset is below the length, which was checked against the block or extent.
            let bytes = unsafe { from.add(offset) };
            Block { bytes, length: length - offset, number }
        }))
    }

    /// Gives the block at the head back.
    ///
    /// Errors: `EINVAL` for a number that is no block's; as [`Arrived::release`].
    pub fn give_block_back(&self, fd: RawFd, number: u32) -> Result<(), Errno> {
        self.knows(number)?;
        self.release_block(fd, number)
    }

    /// A free block; `None`: there is none at the moment, the kernel's view of the placeholder says
    /// when there is.
    ///
    /// Errors: `EPIPE`, `ECONNRESET`.
    pub fn room(&self, fd: RawFd) -> Result<Option<Room<'_>>, Errno> {
        let number = self.take_block(fd)?;
        Ok(number.map(|number| Room { connection: self, number }))
    }

    /// The packet at the head, where it lies; `None`: nothing is there at the moment.
    ///
    /// Errors: `ECONNRESET`; at the end of the stream `ENODATA`; `EOPNOTSUPP` for a range of an extent, which
    /// the other host's program may write at any moment: [`Connection::arrived_block`] has it.
    pub fn arrived(&self, fd: RawFd) -> Result<Option<Arrived<'_>>, Errno> {
        let found = self.first_block(fd)?;
        let own = |number| self.channel.payload(Direction::ToProgram, number);
        if found.is_some_and(|(number, from, ..)| from != own(number)) {
            return Err(Errno(libc::EOPNOTSUPP));
        }
        Ok(found.map(|(number, from, offset, length)| Arrived {
            connection: self,
            number,
            from,
            offset,
            length,
        }))
    }
}

/// What [`Connection::first_block`] finds: number, first byte, offset, length.
pub(super) type First = (u32, std::ptr::NonNull<u8>, usize, usize);

/// As the rest of the lane has it.
pub(super) fn reset(_: Corrupt) -> Errno {
    Errno(libc::ECONNRESET)
}

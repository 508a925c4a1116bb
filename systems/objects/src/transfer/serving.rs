//! The end that has the object.

use std::time::Duration;

use super::channel::{Arrived, Channel, WINDOW_PIECES};
use super::learn::class;
use super::message::{Header, Kind, PIECES_FIRST};
use super::{Lent, Shelf, TransferError};

/// The transfer under way.
struct Outgoing {
    lent: Lent,
    number: u32,
    id: crate::id::ObjectId,
    /// In pieces; else the peer reads.
    pieces: bool,
    sent: u64,
    acknowledged: u64,
    /// Sizes, to be sent after the first pieces.
    sizes: Option<Header>,
}

/// Serves one peer.
pub(crate) struct Serving {
    channel: Channel,
    outgoing: Option<Outgoing>,
}

impl Serving {
    pub(crate) fn new(channel: Channel) -> Self {
        Self { channel, outgoing: None }
    }

    /// Whether an object is on its way.
    #[cfg(test)]
    pub(crate) fn is_busy(&self) -> bool {
        self.outgoing.is_some()
    }

    /// The transfer under way: its number, and the object's bytes.
    pub(crate) fn under_way(&self) -> Option<(u32, u64)> {
        let outgoing = self.outgoing.as_ref()?;
        Some((outgoing.number, outgoing.lent.size + outgoing.lent.metadata_size))
    }

    /// Does what can be done; waits up to `patience` for something. How many messages came.
    ///
    /// Errors: the connection is over.
    pub(crate) fn progress(
        &mut self,
        shelf: &mut dyn Shelf,
        patience: Duration,
    ) -> Result<usize, TransferError> {
        let found = self.channel.poll(patience)?;
        for arrived in &found.messages {
            self.channel.done_with(arrived)?;
            self.message(shelf, arrived)?;
        }
        self.pump()?;
        Ok(found.messages.len())
    }

    fn message(&mut self, shelf: &mut dyn Shelf, arrived: &Arrived) -> Result<(), TransferError> {
        let header = &arrived.header;
        let idle = self.outgoing.is_none();
        let current = self.outgoing.as_mut().filter(|outgoing| outgoing.number == header.number);
        match (header.kind, current) {
            (Kind::Pull, None) if idle => self.pull(shelf, header),
            (Kind::Ack, Some(outgoing)) => {
                let taken = header.words[0];
                if taken < outgoing.acknowledged || taken > outgoing.sent {
                    return Err(TransferError::Protocol { what: "bytes it was not sent" });
                }
                outgoing.acknowledged = taken;
                Ok(())
            }
            (Kind::Fin, Some(_)) => {
                self.outgoing = None;
                Ok(())
            }
            // Of a transfer that is over.
            (Kind::Ack | Kind::Fin, None) => Ok(()),
            _ => Err(TransferError::Protocol { what: "a message out of place" }),
        }
    }

    fn pull(&mut self, shelf: &mut dyn Shelf, asked: &Header) -> Result<(), TransferError> {
        let (number, id) = (asked.number, asked.id);
        let Some(lent) = shelf.lend(id) else {
            return self.channel.send(&Header::new(Kind::Gone, number, id, [0; 6]), None);
        };
        let total = lent.size + lent.metadata_size;
        let read = asked.words[0] >> class(total) & 1 == 1;
        let pieces = !read || total == 0;
        let checksum = Header::checksum_word(lent.checksum);
        let sizes = if pieces {
            let words = [lent.size, lent.metadata_size, checksum, 0, 0, 0];
            Header::new(Kind::Data, number, id, words)
        } else {
            let remote = lent.region.remote_address(lent.offset);
            let words = [lent.size, lent.metadata_size, checksum, remote.offset, remote.key.0, 0];
            Header::new(Kind::Read, number, id, words)
        };
        let later = pieces && asked.flags & PIECES_FIRST != 0;
        if !later {
            // With the first piece, where there is one.
            self.channel.send_ahead(&sizes)?;
        }
        let sizes = later.then_some(sizes);
        let outgoing = Outgoing { lent, number, id, pieces, sent: 0, acknowledged: 0, sizes };
        self.outgoing = Some(outgoing);
        self.pump()?;
        self.channel.flush()
    }

    /// Sends pieces as far as the window and the buffers go.
    fn pump(&mut self) -> Result<(), TransferError> {
        let Some(outgoing) = &mut self.outgoing else { return Ok(()) };
        let total = outgoing.lent.size + outgoing.lent.metadata_size;
        let longest = self.channel.piece_bytes();
        while outgoing.pieces
            && outgoing.sent < total
            && outgoing.sent - outgoing.acknowledged < WINDOW_PIECES * longest
            && self.channel.can_send()
        {
            let length = longest.min(total - outgoing.sent);
            let words = [outgoing.sent, length, 0, 0, 0, 0];
            let header = Header::new(Kind::Piece, outgoing.number, outgoing.id, words);
            let place = outgoing.lent.offset + outgoing.sent;
            self.channel.send(&header, Some((&outgoing.lent.region, place, length)))?;
            outgoing.sent += length;
        }
        if let Some(sizes) = outgoing.sizes
            && self.channel.can_send()
        {
            outgoing.sizes = None;
            self.channel.send(&sizes, None)?;
        }
        Ok(())
    }
}

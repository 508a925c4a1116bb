//! What a channel's client sent, and what becomes of it.
//!
//! A message waits in its slot until there is room for what it asks for: its slot is given back when it is
//! taken out, so a client that asks faster than it is served waits for slots. Where a client keeps no rule
//! its channel ends; where it keeps the rules and too much else, it loses that.

use std::rc::Rc;

use beeline_fabric::{Opcode, WorkCompletion};
use beeline_os::memory::copy_out;

use super::channel::{Assembly, Broken, Destination, Executing, Flying};
use super::{Answer, ChannelId, ChannelServer, Handler, Incoming};
use crate::message::{
    BODY, DataType, Immediate, LONGEST, Message, MessageType, Part, REGION_KEY, SLOT_BYTES,
    copy_slot, read_granted,
};
use crate::planted::{Planted, planted};
use crate::pool::ReplyBuffer;

/// Least capacity of a destination.
const LEAST_DESTINATION: u64 = 256;
/// MongoDB's code for what there is no memory for.
const NO_MEMORY: u32 = 146;
/// A body's buffer that grew past this is not kept for the next body.
const KEPT_BODY: usize = 1 << 20;

impl ChannelServer {
    pub(super) fn handle(&mut self, completion: &WorkCompletion, handler: &mut dyn Handler) {
        let id = completion.context;
        let Some(channel) = self.channels.get_mut(&id) else { return };
        if !completion.is_success() {
            self.end(id, handler);
            return;
        }
        channel.connected_by_ns = None;
        let outcome = match completion.opcode {
            Opcode::ReceiveWithImmediate => {
                match Immediate::of(completion.immediate.unwrap_or(0)) {
                    Immediate::Message => channel.arrived(completion.length),
                    Immediate::Acknowledge => channel.acknowledge(),
                    // A client writes no data by immediate.
                    Immediate::Data(_) => Err(Broken),
                }
            }
            Opcode::Receive => Err(Broken),
            _ => {
                channel.progress += 1;
                if let Some(Flying::Loose(buffer)) = channel.flying.pop_front() {
                    self.pool.put_back(buffer);
                }
                Ok(())
            }
        };
        if outcome.is_err() {
            self.counters.protocol_errors += 1;
            self.end(id, handler);
            return;
        }
        self.advance(id, handler);
        let parked = self.channels.get(&id).is_some_and(|channel| !channel.parked.is_empty());
        self.counters.parked += u64::from(parked && completion.immediate.is_some());
    }

    /// Takes the messages that wait, as far as there is room, and posts what there is to send.
    pub(super) fn advance(&mut self, id: ChannelId, handler: &mut dyn Handler) {
        loop {
            let Some(channel) = self.channels.get(&id) else { return };
            let before = channel.parked.len();
            for _ in 0..before {
                match self.take_next(id, handler) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(Broken) => {
                        self.counters.protocol_errors += 1;
                        self.end(id, handler);
                        return;
                    }
                }
            }
            let Some(channel) = self.channels.get_mut(&id) else { return };
            if !channel.pump(&self.pool) {
                self.end(id, handler);
                return;
            }
            self.waiting |= !channel.outgoing.is_empty() || !channel.parked.is_empty();
            if before > 0 {
                handler.answered();
            }
            let Some(channel) = self.channels.get(&id) else { return };
            if channel.parked.is_empty() || channel.parked.len() == before {
                return;
            }
        }
    }

    /// Takes the next message out of its slot. False: there is none, or no room for it.
    fn take_next(&mut self, id: ChannelId, handler: &mut dyn Handler) -> Result<bool, Broken> {
        let Some(channel) = self.channels.get_mut(&id) else { return Ok(false) };
        let Some(&length) = channel.parked.front() else { return Ok(false) };
        if channel.executing.len() + channel.outgoing.len() >= self.options.most_open
            || channel.unsent() >= self.options.most_unsent
        {
            return Ok(false);
        }
        let length = length as usize;
        let place = (channel.taken % u64::from(channel.slots)) as usize * SLOT_BYTES;
        let mut slot = std::mem::take(&mut self.slot);
        copy_slot(channel.region.memory().as_ref(), place, &mut slot[..length]);
        let taken = self.take(id, &slot[..length], handler);
        self.slot = slot;
        if matches!(taken, Ok(true))
            && let Some(channel) = self.channels.get_mut(&id)
        {
            channel.parked.pop_front();
            channel.taken += 1;
        }
        taken
    }

    /// Does what a message asks for. False: there is no room for its body, and nothing was done.
    fn take(
        &mut self,
        id: ChannelId,
        bytes: &[u8],
        handler: &mut dyn Handler,
    ) -> Result<bool, Broken> {
        let message = Message::read(bytes).map_err(|_| Broken)?;
        let index = message.index;
        let until_ns = match message.kind {
            MessageType::Continue => self.hold_until(),
            _ => 0,
        };
        let channel = self.channels.get_mut(&id).ok_or(Broken)?;
        if message.kind == MessageType::GrantRequest {
            let (address, bytes) = channel.area();
            let grant = Message {
                address,
                bytes,
                key: REGION_KEY,
                ..Message::new(MessageType::Grant, index)
            };
            return channel.send(&grant).map(|()| true);
        }
        let end = message.address.checked_add(message.bytes).ok_or(Broken)?;
        if message.key != REGION_KEY
            || end > channel.their_bytes && !planted(Planted::BelieveDestination)
            || message.address < u64::from(channel.their_slots) * SLOT_BYTES as u64
            || message.bytes < LEAST_DESTINATION
        {
            return Err(Broken);
        }
        let to = Destination {
            address: message.address,
            capacity: usize::try_from(message.bytes).unwrap_or(usize::MAX) - Part::BYTES,
        };
        if message.kind == MessageType::Continue {
            match channel.let_go(index) {
                Some(held) => channel.part(index, to, held.reply, held.sent, until_ns),
                None => channel.fail(index, 0, "the rest of that reply is not kept any more")?,
            }
            return Ok(true);
        }
        if !(message.kind.is_command() || message.kind.is_log())
            || channel.executing.contains_key(&index)
            || channel.held.contains_key(&index)
        {
            return Err(Broken);
        }
        let whole = match message.data_type {
            DataType::None | DataType::Bson => {
                if channel.assembly.is_some() {
                    return Err(Broken);
                }
                None
            }
            DataType::Granted | DataType::GrantedPart => {
                match self.assemble(id, &message, handler)? {
                    Assembled::NoRoom => return Ok(false),
                    Assembled::InPart => return Ok(true),
                    Assembled::Whole(body) => Some(body),
                }
            }
        };
        self.execute(id, message, whole, to, handler).map(|()| true)
    }

    /// Takes a body, or a part of one, out of the granted area.
    fn assemble(
        &mut self,
        id: ChannelId,
        message: &Message<'_>,
        handler: &mut dyn Handler,
    ) -> Result<Assembled, Broken> {
        let channel = self.channels.get(&id).ok_or(Broken)?;
        let (offset, length) = read_granted(message.body).ok_or(Broken)?;
        let (area, bytes) = channel.area();
        let inside = offset.checked_add(length).is_some_and(|end| end <= bytes);
        let other = channel.assembly.as_ref().is_some_and(|known| known.index != message.index);
        let have = channel.assembled();
        let longest = handler.longest_body(id).min(self.options.longest_body);
        if other || !inside || have as u64 + length > longest as u64 {
            return Err(Broken);
        }
        let length = length as usize;
        if !self.has_room_for_body(id, have, length, handler) {
            return Ok(Assembled::NoRoom);
        }
        let channel = self.channels.get_mut(&id).ok_or(Broken)?;
        let mut body = match channel.assembly.take() {
            Some(assembly) => assembly.bytes,
            None => {
                let mut kept = std::mem::take(&mut self.body);
                kept.clear();
                kept
            }
        };
        body.resize(have + length, 0);
        let from = (area + offset) as usize;
        copy_out(channel.region.memory().as_ref(), from, &mut body[have..]);
        self.counters.body_copies += 1;
        if message.data_type == DataType::GrantedPart {
            self.bodies += length;
            let at_ns = self.clock.monotonic_ns();
            channel.assembly = Some(Assembly { index: message.index, bytes: body, at_ns });
            return Ok(Assembled::InPart);
        }
        self.bodies -= have;
        Ok(Assembled::Whole(body))
    }

    /// Whether `more` bytes of a body fit beside those of all channels. Where they do not, the longest
    /// incomplete body of another channel gives way, unless this one is longer.
    fn has_room_for_body(
        &mut self,
        id: ChannelId,
        have: usize,
        more: usize,
        handler: &mut dyn Handler,
    ) -> bool {
        // A body that has the server for itself always fits.
        while self.bodies > have && self.bodies + more > self.options.most_bodies {
            let longest = self
                .channels
                .iter()
                .filter(|(other, channel)| **other != id && channel.assembled() > have + more)
                .max_by_key(|(_, channel)| channel.assembled())
                .map(|(other, _)| *other);
            let Some(longest) = longest else { return false };
            self.counters.overrun += 1;
            self.end(longest, handler);
        }
        true
    }

    fn execute(
        &mut self,
        id: ChannelId,
        message: Message<'_>,
        whole: Option<Vec<u8>>,
        to: Destination,
        handler: &mut dyn Handler,
    ) -> Result<(), Broken> {
        let channel = self.channels.get_mut(&id).ok_or(Broken)?;
        let index = message.index;
        let body = whole.as_deref().unwrap_or(message.body);
        let bytes = body.len();
        self.counters.body_copies += u64::from(!message.body.is_empty());
        self.counters.requests += 1;
        self.counters.request_bytes += bytes as u64;
        let request = Incoming { channel: id, message, body, capacity: to.capacity };
        let mut reply = ReplyBuffer::new(&self.pool);
        let answer = handler.execute(&request, &mut reply);
        if let Some(kept) = whole
            && kept.capacity() <= KEPT_BODY
        {
            self.body = kept;
        }
        match answer {
            Answer::Reply => self.reply(id, index, to, reply, handler),
            Answer::Later | Answer::Kept => {
                let kept = matches!(answer, Answer::Kept).then(|| {
                    reply.belong_to(&channel.replies);
                    reply
                });
                self.bodies += bytes;
                channel.executing.insert(index, Executing { to, body: bytes, kept });
                Ok(())
            }
            Answer::Optime(to) => {
                channel.send(&Message { to, ..Message::new(MessageType::OptimeResponse, index) })
            }
            Answer::Fail(code, text) => channel.fail(index, code, &text),
        }
    }

    /// When what is kept from now on is let go.
    fn hold_until(&self) -> u64 {
        let hold = u64::try_from(self.options.hold.as_nanos()).unwrap_or(u64::MAX);
        self.clock.monotonic_ns().saturating_add(hold)
    }

    fn reply(
        &mut self,
        id: ChannelId,
        index: u32,
        to: Destination,
        mut reply: ReplyBuffer,
        handler: &mut dyn Handler,
    ) -> Result<(), Broken> {
        let length = reply.len();
        // Only what does not fit is held.
        let until_ns = if length > to.capacity { self.hold_until() } else { 0 };
        let channel = self.channels.get_mut(&id).ok_or(Broken)?;
        self.counters.reply_bytes += length as u64;
        let total = u32::try_from(length).map_err(|_| Broken)?;
        if !reply.is_counted() {
            reply.belong_to(&channel.replies);
        }
        let now = length.min(to.capacity);
        let checksum = channel.checksum.then(|| reply.checksum(0, now));
        reply.head(Part { total, offset: 0, checksum });
        if !self.has_room_for_reply(id, handler) {
            drop(reply);
            let channel = self.channels.get_mut(&id).ok_or(Broken)?;
            let text = "too many long replies wait for their clients; take smaller batches";
            return channel.fail(index, NO_MEMORY, text);
        }
        let channel = self.channels.get_mut(&id).ok_or(Broken)?;
        channel.part(index, to, Rc::new(reply), 0, until_ns);
        Ok(())
    }

    /// Whether the replies there are fit. Where they do not, the channel that keeps most loses what its
    /// client did not ask for, and then ends, unless it is the asking one.
    fn has_room_for_reply(&mut self, asking: ChannelId, handler: &mut dyn Handler) -> bool {
        while self.pool.replies() > self.options.most_held {
            let most = self.channels.iter_mut().max_by_key(|(_, channel)| channel.replies.get());
            let Some((&most, channel)) = most else { return false };
            let longest = channel.held.iter().max_by_key(|(_, held)| held.reply.len());
            if let Some(index) = longest.map(|(index, _)| *index) {
                drop(channel.let_go(index));
                self.counters.dropped_replies += 1;
                continue;
            }
            if most == asking {
                return false;
            }
            self.counters.overrun += 1;
            self.end(most, handler);
        }
        true
    }

    /// What became of a request that was kept.
    fn executed(&mut self, channel: ChannelId, index: u32) -> Option<Executing> {
        let executing = self.channels.get_mut(&channel)?.executing.remove(&index)?;
        self.bodies -= executing.body;
        Some(executing)
    }

    /// Answers a request that was kept; nothing happens where its channel is gone.
    pub fn respond(
        &mut self,
        channel: ChannelId,
        index: u32,
        bytes: &[u8],
        handler: &mut dyn Handler,
    ) {
        let Some(executing) = self.executed(channel, index) else { return };
        let to = executing.to;
        drop(executing);
        let mut reply = ReplyBuffer::new(&self.pool);
        reply.extend_from_slice(bytes);
        self.send_reply(channel, index, to, reply, handler);
    }

    /// Keeps the reply to a request that was kept, until [`ChannelServer::release`] sends it or
    /// [`ChannelServer::respond`] sends another one. It counts among the replies of its channel.
    pub fn keep(
        &mut self,
        channel: ChannelId,
        index: u32,
        bytes: &[u8],
        handler: &mut dyn Handler,
    ) {
        let Some(known) = self.channels.get_mut(&channel) else { return };
        let Some(executing) = known.executing.get_mut(&index) else { return };
        let mut reply = ReplyBuffer::new(&self.pool);
        reply.extend_from_slice(bytes);
        reply.belong_to(&known.replies);
        executing.kept = Some(reply);
        if !self.has_room_for_reply(channel, handler)
            && let Some(executing) = self.executed(channel, index)
        {
            drop(executing);
            let refused = self.channels.get_mut(&channel).map(|known| {
                known.fail(index, NO_MEMORY, "too many long replies wait; take smaller batches")
            });
            debug_assert!(!matches!(refused, Some(Err(_))), "a short message can be written");
            self.advance(channel, handler);
        }
    }

    /// Sends the reply that a request has kept.
    pub fn release(&mut self, channel: ChannelId, index: u32, handler: &mut dyn Handler) {
        let Some(executing) = self.executed(channel, index) else { return };
        let reply = executing.kept.unwrap_or_else(|| ReplyBuffer::new(&self.pool));
        self.send_reply(channel, index, executing.to, reply, handler);
    }

    /// Answers an [`MessageType::OptimeRequest`] that was kept.
    pub fn respond_optime(
        &mut self,
        channel: ChannelId,
        index: u32,
        to: u64,
        handler: &mut dyn Handler,
    ) {
        if self.executed(channel, index).is_none() {
            return;
        }
        let Some(known) = self.channels.get_mut(&channel) else { return };
        match known.send(&Message { to, ..Message::new(MessageType::OptimeResponse, index) }) {
            Ok(()) => self.advance(channel, handler),
            Err(Broken) => self.end(channel, handler),
        }
        self.pump_waiting(handler);
    }

    fn send_reply(
        &mut self,
        id: ChannelId,
        index: u32,
        to: Destination,
        reply: ReplyBuffer,
        handler: &mut dyn Handler,
    ) {
        match self.reply(id, index, to, reply, handler) {
            Ok(()) => self.advance(id, handler),
            Err(Broken) => self.end(id, handler),
        }
        self.pump_waiting(handler);
    }

    /// Bytes of a channel's replies that wait to be written.
    #[must_use]
    pub fn unsent(&self, channel: ChannelId) -> usize {
        self.channels.get(&channel).map_or(0, super::channel::Channel::unsent)
    }
}

/// What came of a part of a body.
enum Assembled {
    /// There is no room; nothing was taken.
    NoRoom,
    /// More follow.
    InPart,
    /// The body.
    Whole(Vec<u8>),
}

impl super::channel::Channel {
    /// A message lies in the next slot.
    fn arrived(&mut self, length: u64) -> Result<(), Broken> {
        self.received += 1;
        let has_slot = self.received - self.released <= u64::from(self.slots);
        if !has_slot || !(BODY as u64..=LONGEST as u64).contains(&length) {
            return Err(Broken);
        }
        self.parked.push_back(length);
        Ok(())
    }
}

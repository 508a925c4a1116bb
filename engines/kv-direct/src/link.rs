//! The client's end over fabric: one connection to one processor.
//!
//! A packet takes a slot until its reply came; [`Link::submit`] writes it there, [`Link::poll`] hands
//! out replies. Replies are copied out of the area before they are read, because the server can write
//! there at any time.
//!
//! Stays on its thread.

use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, FabricError, LocalData, MemoryRegion, Opcode,
    Operation, PostError, QueuePair, QueuePairOptions, ReceiveRequest, RemoteAddress, RemoteKey,
    Role, ScatterGatherEntry, WorkCompletion, WorkRequest,
};
use beeline_os::memory::{copy_in, copy_out};

use crate::packet::{HEADER_BYTES, PACKET_HEADER_BYTES, PacketWriter, ReplyReader};
use crate::server::{SPARE_RECEIVES, receive_depth};
use crate::table::{KEY_LIMIT, PAIR_LIMIT};
use crate::wire::{Hello, WireError};

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkOptions {
    /// Packets outstanding at once. Default 8.
    pub window: u16,
    /// Longest packet, bytes. Default 16 KiB.
    pub packet_bytes: u32,
    /// Longest reply, bytes; bounds how many operations with a result one packet holds. Default
    /// 132 KiB, room for 64 of the longest values.
    pub reply_bytes: u32,
    /// How long an answer may take. Default 5 s.
    pub timeout: Duration,
}

impl Default for LinkOptions {
    fn default() -> Self {
        Self {
            window: 8,
            packet_bytes: 16 << 10,
            reply_bytes: 132 << 10,
            timeout: Duration::from_secs(5),
        }
    }
}

/// Why a link does not work, or not any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LinkError {
    /// The device's.
    #[error(transparent)]
    Fabric(#[from] FabricError),
    /// The server is of another build, or refuses.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The exchange with the server.
    #[error("the server cannot be reached: {0}")]
    Unreachable(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The connection broke; whether what was outstanding took effect is not known.
    #[error(
        "the connection to the server broke; operations that were under way may have taken effect"
    )]
    Broken,
    /// As [`LinkError::Broken`], after the time given.
    #[error("no answer within {limit:?}; operations that were under way may have taken effect")]
    TimedOut {
        /// The time given.
        limit: Duration,
    },
    /// The server does not follow the protocol.
    #[error("the server's reply does not follow the protocol")]
    Protocol,
}

/// Carries connection data and a hello to the server and brings its own back.
pub type Exchange<'a> =
    &'a mut dyn FnMut(
        &ConnectInfo,
        &[u8],
    )
        -> Result<(ConnectInfo, Vec<u8>), Box<dyn std::error::Error + Send + Sync>>;

/// See the module's documentation.
#[derive(Debug)]
pub struct Link {
    qp: Box<dyn QueuePair>,
    queue: Rc<dyn CompletionQueue>,
    packets: MemoryRegion,
    replies: MemoryRegion,
    theirs: RemoteAddress,
    agreed: Hello,
    options: LinkOptions,
    free: Vec<u16>,
    next_id: u32,
    ids: Vec<u32>,
    reply: Vec<u8>,
    inline: u64,
    unsignalled: u32,
    /// Receives that were used and not posted again.
    owed: usize,
    /// Bytes of the last packet: the next is likely to be as long.
    sent: u64,
    completions: Box<[WorkCompletion]>,
    broken: bool,
}

/// Completions taken at once.
const BATCH: usize = 16;
const RECEIVE: ReceiveRequest<'_> = ReceiveRequest { wr_id: 0, buffer: None };

impl Link {
    /// Connects over `device`.
    ///
    /// Errors: [`LinkError`].
    pub fn connect(
        device: &Arc<dyn Device>,
        exchange: Exchange<'_>,
        options: LinkOptions,
    ) -> Result<Self, LinkError> {
        let domain = device.allocate_protection_domain()?;
        let window = options.window.clamp(1, 1024);
        let send_depth = u32::from(window) * 2;
        let queue = device.create_completion_queue(receive_depth(window) + send_depth)?;
        let depths = QueuePairOptions {
            send_depth,
            receive_depth: receive_depth(window),
            transport_timeout: options.timeout,
            ..QueuePairOptions::default()
        };
        let mut qp = domain.create_queue_pair(&queue, &queue, None, depths)?;
        let area = |bytes: u32, access| -> Result<MemoryRegion, FabricError> {
            let length = (u64::from(bytes) * u64::from(window)).next_multiple_of(4096) as usize;
            domain.register(device.allocate_memory(length)?, access)
        };
        let packets = area(options.packet_bytes, Access::empty())?;
        let replies = area(options.reply_bytes, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
        let hello = Hello {
            window,
            packet_bytes: options.packet_bytes,
            reply_bytes: options.reply_bytes,
            area_key: replies.remote_key().0,
        };
        let (info, answer) =
            exchange(&qp.connect_info(), &hello.encode()).map_err(LinkError::Unreachable)?;
        let agreed = Hello::decode(&answer)?;
        let within = (1..=window).contains(&agreed.window)
            && agreed.packet_bytes <= options.packet_bytes
            && agreed.reply_bytes <= options.reply_bytes;
        // An empty packet holds the longest operation, and its reply the longest result.
        let usable = agreed.packet_bytes as usize
            >= PACKET_HEADER_BYTES + 6 + KEY_LIMIT + PAIR_LIMIT
            && agreed.reply_bytes as usize >= HEADER_BYTES + 3 + PAIR_LIMIT;
        if !within || !usable {
            return Err(LinkError::Protocol);
        }
        for _ in 0..receive_depth(agreed.window) {
            qp.post_receive(&[RECEIVE]).map_err(|_| LinkError::Broken)?;
        }
        qp.connect(&info, Role::Active)?;
        qp.wait_connected(options.timeout)?;
        Ok(Self {
            qp,
            queue,
            packets,
            replies,
            theirs: RemoteAddress { key: RemoteKey(agreed.area_key), offset: 0 },
            free: (0..agreed.window).rev().collect(),
            ids: vec![0; usize::from(agreed.window)],
            agreed,
            options,
            next_id: 0,
            reply: Vec::new(),
            inline: u64::from(device.attributes().max_inline_bytes),
            unsignalled: 0,
            owed: 0,
            sent: 0,
            completions: vec![WorkCompletion::EMPTY; BATCH].into(),
            broken: false,
        })
    }

    /// An empty packet of the size agreed on.
    #[must_use]
    pub fn packet(&self) -> PacketWriter {
        PacketWriter::new(self.agreed.packet_bytes as usize, self.agreed.reply_bytes as usize)
    }

    /// Packets that may be submitted now.
    #[must_use]
    pub fn room(&self) -> usize {
        self.free.len()
    }

    /// Packets without a reply.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.ids.len() - self.free.len()
    }

    /// Whether the connection is gone: make another.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// As [`Link::is_broken`], after a look where nothing is under way: a connection that broke while its
    /// client was idle cost no operation.
    pub fn broke(&mut self) -> bool {
        if self.outstanding() == 0 && !self.broken {
            // Its failure is the answer.
            let _ = self.poll(|_, _| ());
        }
        self.broken
    }

    /// Gives the connection up: what is under way on it is not waited for.
    pub fn abandon(&mut self) {
        self.broken = true;
    }

    /// Sends a packet and clears it; returns its slot, under which its reply comes. Call only where
    /// there is room.
    ///
    /// Errors: [`LinkError::Broken`].
    pub fn submit(&mut self, packet: &mut PacketWriter) -> Result<u16, LinkError> {
        let slot = self.free.pop().filter(|_| !self.broken).ok_or(LinkError::Broken)?;
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        self.ids[usize::from(slot)] = id;
        let sent = self.send(slot, packet.finish(id));
        packet.clear();
        if sent.is_err() {
            self.broken = true;
            return Err(LinkError::Broken);
        }
        Ok(slot)
    }

    fn send(&mut self, slot: u16, bytes: &[u8]) -> Result<(), PostError> {
        let length = bytes.len() as u64;
        self.sent = length;
        let offset = u64::from(slot) * u64::from(self.agreed.packet_bytes);
        let place = u64::from(slot) * u64::from(self.options.packet_bytes);
        let entry = [ScatterGatherEntry { region: &self.packets, offset: place, length }];
        let local = if length <= self.inline {
            LocalData::Inline(bytes)
        } else {
            copy_in(self.packets.memory().as_ref(), place as usize, bytes);
            LocalData::Gather(&entry)
        };
        self.unsignalled += 1;
        let signalled = self.unsignalled >= u32::from(self.agreed.window);
        if signalled {
            self.unsignalled = 0;
        }
        let operation = Operation::WriteWithImmediate {
            local,
            remote: self.theirs.advanced(offset),
            immediate: u32::from(slot),
        };
        self.qp.post_send(&[WorkRequest { wr_id: u64::MAX, operation, signalled }])
    }

    /// Hands out the replies that came, with the slots of their packets; how many those were.
    ///
    /// Errors: [`LinkError::Broken`], [`LinkError::Protocol`]; the link is then broken.
    pub fn poll(
        &mut self,
        mut on_reply: impl FnMut(u16, ReplyReader<'_>),
    ) -> Result<usize, LinkError> {
        let mut completions = std::mem::take(&mut self.completions);
        let polled = self.queue.poll(&mut completions);
        let count = *polled.as_ref().unwrap_or(&0);
        let outcome = self.hand_out(&completions[..count], &mut on_reply);
        self.completions = completions;
        self.broken |= outcome.is_err() || polled.is_err();
        polled?;
        outcome
    }

    fn hand_out(
        &mut self,
        completions: &[WorkCompletion],
        on_reply: &mut impl FnMut(u16, ReplyReader<'_>),
    ) -> Result<usize, LinkError> {
        let mut replies = 0;
        for completion in completions {
            let Some(slot) = self.take(completion)? else { continue };
            let Some((_, reader)) = ReplyReader::new(&self.reply) else { continue };
            replies += 1;
            on_reply(slot, reader);
        }
        Ok(replies)
    }

    /// Copies the reply behind a completion into `self.reply`.
    fn take(&mut self, completion: &WorkCompletion) -> Result<Option<u16>, LinkError> {
        if !completion.is_success() {
            return Err(LinkError::Broken);
        }
        if completion.opcode != Opcode::ReceiveWithImmediate {
            return Ok(None);
        }
        let slot = completion.immediate.unwrap_or(u32::MAX);
        let known = u16::try_from(slot)
            .ok()
            .filter(|slot| *slot < self.agreed.window && !self.free.contains(slot));
        let Some(slot) = known else { return Err(LinkError::Protocol) };
        if completion.length > u64::from(self.agreed.reply_bytes) {
            return Err(LinkError::Protocol);
        }
        self.reply.resize(completion.length as usize, 0);
        let place = usize::from(slot) * self.agreed.reply_bytes as usize;
        copy_out(self.replies.memory().as_ref(), place, &mut self.reply);
        let answered = ReplyReader::new(&self.reply).map(|(id, _)| id);
        if answered != Some(self.ids[usize::from(slot)]) {
            return Err(LinkError::Protocol);
        }
        self.owed += 1;
        if self.owed == SPARE_RECEIVES {
            self.owed = 0;
            self.qp.post_receive(&[RECEIVE; SPARE_RECEIVES]).map_err(|_| LinkError::Broken)?;
        }
        self.free.push(slot);
        // The slot that became free last is the next to be written.
        let offset = u64::from(slot) * u64::from(self.agreed.packet_bytes);
        self.qp.expect_write(self.theirs.advanced(offset), self.sent);
        Ok(Some(slot))
    }

    /// Waits until a reply came, and hands out all that did: polls for `spin`, then sleeps.
    ///
    /// Errors: as [`Link::poll`], and [`LinkError::TimedOut`]; the link is then broken.
    pub fn wait(
        &mut self,
        spin: Duration,
        mut on_reply: impl FnMut(u16, ReplyReader<'_>),
    ) -> Result<usize, LinkError> {
        let mut looks = 0_u32;
        let mut started = None;
        loop {
            let count = self.poll(&mut on_reply)?;
            if count > 0 {
                return Ok(count);
            }
            looks += 1;
            if !looks.is_multiple_of(64) {
                std::hint::spin_loop();
                continue;
            }
            let started = *started.get_or_insert_with(Instant::now);
            let waited = started.elapsed();
            if waited >= self.options.timeout {
                self.broken = true;
                return Err(LinkError::TimedOut { limit: self.options.timeout });
            }
            if waited < spin {
                std::thread::yield_now();
                continue;
            }
            self.queue.arm()?;
            let count = self.poll(&mut on_reply)?;
            if count > 0 {
                return Ok(count);
            }
            // Completions that `wait` would take are left to `poll`: an empty buffer takes none.
            let left = self.options.timeout - waited;
            self.sleep(left.min(Duration::from_millis(100)))?;
        }
    }

    fn sleep(&self, limit: Duration) -> Result<(), LinkError> {
        let mut poller = beeline_os::poller::Poller::new(1).map_err(system)?;
        poller
            .add(self.queue.event_descriptor(), 0, beeline_os::poller::Interest::READ)
            .map_err(system)?;
        if poller.wait(Some(limit)).map_err(system)? > 0 {
            self.queue.acknowledge()?;
        }
        Ok(())
    }
}

fn system(source: std::io::Error) -> LinkError {
    LinkError::Fabric(FabricError::System { action: "waiting for a reply", source })
}

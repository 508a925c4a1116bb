//! Clients of a store whose keys are those of a replicated log: their writes are agreed on before
//! they are answered, their reads wait for a barrier.
//!
//! ```text
//! request ──► Pending::Awaited, in the order of the answers
//!    └─► line ──┬─ puts, deletes: Agreement::write ──► …log… ──► ShardServer::wrote ──┐
//!               └─ gets, scans:   Agreement::read ──► …barrier… ──► ShardServer::read ┴─► answer
//! ```
//!
//! A client's slot in the server's memory is where its command lands (the log's paper, p. 3.2
//! step 1); what orders it is the log.
//!
//! Invariants: the writes of one connection are handed over in the order of its requests; a read is
//! handed over when every write before it was answered, and a write when every read before it has
//! run; one barrier serves all reads that stand together, and is asked for after they arrived; what
//! a client can make the server hold is its window of requests ([`Connection::post_receives`]).

use std::collections::VecDeque;

use beeline_kv::wire::{Protocol, REQUEST_HEADER_BYTES, Reply, ReplyStatus, Request, RequestKind};
use beeline_kv::{PutOptions, Shard};

use crate::connection::{Connection, Pending, place_of};
use crate::server::ShardServer;

/// Names a request, or the reads of a connection that wait together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Of its queue pair.
    connection: u64,
    number: u32,
}

/// A put or a deletion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AgreedWrite<'a> {
    /// Database, as the client gave it: to be checked.
    pub database: u8,
    /// The key.
    pub key: &'a [u8],
    /// The value; `None` deletes.
    pub value: Option<&'a [u8]>,
    /// Expiry and encoding of the value.
    pub options: PutOptions,
}

/// Who orders writes and lets reads through: the node's way to its log.
pub trait Agreement {
    /// Takes a write over; [`ShardServer::wrote`] tells what came of it.
    ///
    /// Errors: what the client is told at once; nothing was done.
    fn write(&mut self, ticket: Ticket, write: AgreedWrite<'_>) -> Result<(), ReplyStatus>;

    /// Asks for a barrier; [`ShardServer::read`] tells that it passed.
    ///
    /// Errors: as for [`Agreement::write`].
    fn read(&mut self, ticket: Ticket) -> Result<(), ReplyStatus>;
}

/// What a write came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wrote {
    /// Larger is newer, across all clients of the cluster.
    pub version: u64,
    /// A deletion met its key.
    pub existed: bool,
}

/// The requests of one connection that are not answered yet.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Not handed over.
    queue: VecDeque<(u32, Vec<u8>)>,
    /// Writes handed over and not answered.
    writes: u32,
    /// Reads whose barrier was asked for under the number of the first.
    reads: Vec<(u32, Vec<u8>)>,
    next: u32,
    /// On the server's list of connections to look at.
    listed: bool,
}

impl Line {
    /// Requests that hold a receive of the connection back.
    pub fn awaited(&self) -> usize {
        self.queue.len() + self.writes as usize + self.reads.len()
    }
}

fn is_write(kind: RequestKind) -> bool {
    matches!(kind, RequestKind::Put | RequestKind::Delete)
}

impl Connection {
    fn ticket(&self, number: u32) -> Ticket {
        Ticket { connection: self.context, number }
    }

    /// Where the answer to request `number` stands.
    fn awaited_at(&self, number: u32) -> Option<usize> {
        self.pending.iter().position(
            |pending| matches!(pending, Pending::Awaited { number: found, .. } if *found == number),
        )
    }

    /// Puts the answer to request `number` in its place.
    fn settle(&mut self, number: u32, outcome: impl FnOnce(u16) -> Reply) {
        let Some(at) = self.awaited_at(number) else { return };
        if let Pending::Awaited { tag, .. } = self.pending[at] {
            let reply = outcome(tag);
            self.pending[at] = Pending::Message { reply, after_write: false };
        }
    }
}

impl ShardServer {
    /// Puts a request in line, if it is one that waits for the log; `None`: it is none. `Some` of
    /// whether it makes sense.
    pub(crate) fn put_in_line(
        &mut self,
        shard: &Shard,
        connection: &mut Connection,
        request: &Request,
        hash: u64,
        bytes: &[u8],
    ) -> Option<bool> {
        if connection.protocol != Protocol::Replicated {
            return None;
        }
        let waits = match request.kind {
            RequestKind::Get | RequestKind::VerifiedGet => true,
            RequestKind::Scan => return self.line_up(connection, request, bytes),
            kind => is_write(kind),
        };
        if !waits {
            return None;
        }
        if is_write(request.kind) {
            let value = bytes.len().checked_sub(REQUEST_HEADER_BYTES + request.key_bytes as usize);
            if value.map(|length| length as u64) != Some(request.argument) {
                return Some(false);
            }
        }
        let reserved =
            request.kind == RequestKind::Put && beeline_kv::is_row_kind(request.result_bytes as u8);
        let refused = if reserved {
            Some(ReplyStatus::ReservedKind)
        } else if shard.store().owner_of(hash) != shard.index() {
            Some(ReplyStatus::WrongShard)
        } else {
            None
        };
        if let Some(status) = refused {
            let reply = Reply::new(status, request.tag);
            connection.pending.push_back(Pending::Message { reply, after_write: false });
            return Some(true);
        }
        self.line_up(connection, request, bytes)
    }

    fn line_up(
        &mut self,
        connection: &mut Connection,
        request: &Request,
        bytes: &[u8],
    ) -> Option<bool> {
        let line = &mut connection.line;
        let number = line.next;
        line.next = number.wrapping_add(1);
        line.queue.push_back((number, bytes.to_vec()));
        if !std::mem::replace(&mut line.listed, true) {
            self.in_line.push(connection.index);
        }
        // Its answer comes later than this poll's.
        connection.pending.push_back(Pending::Awaited { number, tag: request.tag });
        Some(true)
    }

    /// Hands over what is next in line: after each [`ShardServer::poll`], and after
    /// [`ShardServer::wrote`] and [`ShardServer::read`].
    pub fn hand_over(&mut self, agreement: &mut dyn Agreement) {
        for index in std::mem::take(&mut self.in_line) {
            let Some(Some(connection)) = self.connections.get_mut(usize::from(index)) else {
                continue;
            };
            connection.line.listed = false;
            if !connection.dead {
                Self::advance(connection, agreement);
                self.list(index);
            }
        }
    }

    fn advance(connection: &mut Connection, agreement: &mut dyn Agreement) {
        while connection.line.reads.is_empty() {
            let Some((number, bytes)) = connection.line.queue.pop_front() else { return };
            let Some(request) = Request::decode(&bytes) else { continue };
            let ticket = connection.ticket(number);
            if is_write(request.kind) {
                let key_end = REQUEST_HEADER_BYTES + request.key_bytes as usize;
                let write = AgreedWrite {
                    database: request.database,
                    key: &bytes[REQUEST_HEADER_BYTES..key_end],
                    value: (request.kind == RequestKind::Put).then(|| &bytes[key_end..]),
                    options: PutOptions {
                        kind: request.result_bytes as u8,
                        expires_at_ms: request.extra,
                    },
                };
                match agreement.write(ticket, write) {
                    Ok(()) => connection.line.writes += 1,
                    Err(status) => connection.settle(number, |tag| Reply::new(status, tag)),
                }
                continue;
            }
            if connection.line.writes > 0 {
                connection.line.queue.push_front((number, bytes));
                return;
            }
            let mut reads = vec![(number, bytes)];
            let reading = |bytes: &[u8]| {
                Request::decode(bytes).is_some_and(|request| !is_write(request.kind))
            };
            while connection.line.queue.front().is_some_and(|(_, bytes)| reading(bytes)) {
                reads.extend(connection.line.queue.pop_front());
            }
            match agreement.read(ticket) {
                Ok(()) => connection.line.reads = reads,
                Err(status) => {
                    for (number, _) in reads {
                        connection.settle(number, |tag| Reply::new(status, tag));
                    }
                }
            }
        }
    }

    /// The connection may have answers to post.
    fn list(&mut self, index: u16) {
        let Some(Some(connection)) = self.connections.get_mut(usize::from(index)) else { return };
        if !std::mem::replace(&mut connection.listed, true) {
            self.listed.push(index);
        }
    }

    /// Something of the connection was settled: it has answers to post, and what stands in line
    /// may be next.
    fn settled(&mut self, index: u16) {
        self.list(index);
        let Some(Some(connection)) = self.connections.get_mut(usize::from(index)) else { return };
        let line = &mut connection.line;
        if !line.queue.is_empty() && !std::mem::replace(&mut line.listed, true) {
            self.in_line.push(index);
        }
    }

    /// What came of a write.
    pub fn wrote(&mut self, ticket: Ticket, outcome: Result<Wrote, ReplyStatus>) {
        let Some(connection) = self.named(ticket) else { return };
        connection.line.writes = connection.line.writes.saturating_sub(1);
        connection.settle(ticket.number, |tag| match outcome {
            Ok(Wrote { version, existed }) => {
                let status = if existed { ReplyStatus::Ok } else { ReplyStatus::NotFound };
                Reply { version, ..Reply::new(status, tag) }
            }
            Err(status) => Reply::new(status, tag),
        });
        self.settled(place_of(ticket.connection));
    }

    /// What came of a barrier: with `Ok`, the reads that wait for it run, against `shard`.
    pub fn read(&mut self, shard: &mut Shard, ticket: Ticket, outcome: Result<(), ReplyStatus>) {
        let Some(connection) = self.named(ticket) else { return };
        if connection.line.reads.first().is_none_or(|(first, _)| *first != ticket.number) {
            return;
        }
        let reads = std::mem::take(&mut connection.line.reads);
        // Taken out while it is worked on, so that the server's parts can be used beside it.
        let index = usize::from(place_of(ticket.connection));
        let Some(mut connection) = self.connections.get_mut(index).and_then(Option::take) else {
            return;
        };
        for (number, bytes) in reads {
            match outcome {
                Ok(()) => self.run_read(shard, &mut connection, number, &bytes),
                Err(status) => connection.settle(number, |tag| Reply::new(status, tag)),
            }
        }
        self.connections[index] = Some(connection);
        self.settled(place_of(ticket.connection));
    }

    /// Runs a get or scan; its answer goes to the place kept for it.
    fn run_read(
        &mut self,
        shard: &mut Shard,
        connection: &mut Connection,
        number: u32,
        bytes: &[u8],
    ) {
        let Some(at) = connection.awaited_at(number) else { return };
        let Some(request) = Request::decode(bytes) else { return };
        let Some(key) = request.key(bytes) else { return };
        let before = connection.pending.len();
        match request.kind {
            RequestKind::Scan => self.scan(shard, connection, &request),
            _ => {
                let hash = shard.store().place_key(request.database, key);
                self.get(shard, connection, &request, (key, hash));
            }
        }
        assert_eq!(connection.pending.len(), before + 1, "a read has one answer");
        if let Some(answer) = connection.pending.pop_back() {
            connection.pending[at] = answer;
        }
    }

    fn named(&mut self, ticket: Ticket) -> Option<&mut Connection> {
        let connection =
            self.connections.get_mut(usize::from(place_of(ticket.connection)))?.as_deref_mut()?;
        (connection.context == ticket.connection && !connection.dead).then_some(connection)
    }
}

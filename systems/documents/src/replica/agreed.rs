//! The register in the cluster's log: a replicated service of its own tag.
//!
//! It lies among the system's entries of the node's store, with the turns of its lanes, and each order is
//! persisted as it is applied. So the position of the log that counts is the keys' own, and a snapshot of the
//! keys brings the register of that position with it.

use std::io::{self, Read};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use beeline_kv::{Keyspace, KvError};
use beeline_node::NodeHandle;
use beeline_replicated_log::{Position, SnapshotWriter};
use beeline_replicated_service::{CannotApply, LaneName, Replicated, Replies, Tag, Turn, Unit};

use crate::engine::lock;
use crate::replica::register::{Order, Register};
use crate::replica::store::Gate;

/// The format of the orders.
pub const FORMAT: u8 = 3;
/// Where the register lies.
const PLACE: &[u8] = b"documents.register";

/// The register as this member knows it.
#[derive(Debug, Default)]
pub struct Agreed {
    register: Mutex<Register>,
    changed: Condvar,
    /// Shut by a newer term at the moment it is applied.
    pub gate: Arc<Gate>,
}

impl Agreed {
    /// With this gate; nothing is agreed on yet.
    #[must_use]
    pub fn new(gate: Arc<Gate>) -> Self {
        Self { register: Mutex::default(), changed: Condvar::new(), gate }
    }

    /// What is agreed on.
    #[must_use]
    pub fn now(&self) -> Register {
        lock(&self.register).clone()
    }

    /// Whether this member leads the term, or follows this member in it.
    #[must_use]
    pub fn is(&self, term: u64, primary: u16) -> bool {
        let register = lock(&self.register);
        register.term == term && register.primary() == Some(primary)
    }

    /// Takes what was agreed on.
    pub fn set(&self, register: Register) {
        // First: what is acknowledged to a primary was checked against the term behind it.
        self.gate.fence(register.term);
        *lock(&self.register) = register;
        self.changed.notify_all();
    }

    /// Waits for a change, or so long.
    pub fn wait(&self, most: Duration) -> Register {
        let guard = lock(&self.register);
        let (guard, _) =
            self.changed.wait_timeout(guard, most).unwrap_or_else(PoisonError::into_inner);
        guard.clone()
    }

    /// Ends a wait.
    pub fn wake(&self) {
        self.changed.notify_all();
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub struct RegisterService {
    node: NodeHandle,
    agreed: Arc<Agreed>,
}

impl RegisterService {
    /// Of a member's node.
    ///
    /// Errors: the store's; [`CannotApply`] of a register that cannot be read.
    pub fn open(node: NodeHandle, agreed: Arc<Agreed>) -> Result<Self, CannotApply> {
        let service = Self { node, agreed };
        service.reload()?;
        Ok(service)
    }

    fn with<R>(
        &self,
        work: impl FnOnce(&mut Keyspace<'_>) -> Result<R, KvError>,
    ) -> Result<R, CannotApply> {
        let all: Vec<usize> = (0..self.node.store().shards()).collect();
        self.node.with_shards(&all, work).map_err(CannotApply::new)
    }

    fn read(&self, key: &[u8]) -> Result<Option<Vec<u8>>, CannotApply> {
        let mut bytes = Vec::new();
        let known = self.with(|keyspace| keyspace.system(key, &mut bytes))?;
        Ok(known.then_some(bytes))
    }

    fn reload(&self) -> Result<(), CannotApply> {
        let register = match self.read(PLACE)? {
            Some(bytes) => Register::decode(&bytes).ok_or_else(|| {
                CannotApply::new("the documents' register of terms cannot be read: a newer build wrote it, or it is damaged")
            })?,
            None => Register::default(),
        };
        self.agreed.set(register);
        Ok(())
    }
}

impl Replicated for RegisterService {
    fn tag(&self) -> Tag {
        Tag::DOCUMENTS
    }

    fn format(&self) -> u8 {
        FORMAT
    }

    /// Each order is persisted where it is applied, so the keys' position holds for it.
    fn applied(&self) -> Position {
        Position(u64::MAX)
    }

    /// No order is skipped by its position: their lanes' turns tell which ones come again.
    fn reached(&self) -> Position {
        Position::NONE
    }

    fn is_durable(&self) -> bool {
        true
    }

    fn last_turn(&mut self, lane: LaneName) -> Result<Turn, CannotApply> {
        let turn = self.read(&lane.key())?.map(|bytes| Turn::decode(&bytes));
        match turn {
            None => Ok(Turn::default()),
            Some(turn) => turn.ok_or_else(|| CannotApply::new("a lane's turn cannot be read")),
        }
    }

    fn apply(
        &mut self,
        _: Position,
        unit: &Unit<'_>,
        replies: &mut Replies<'_>,
    ) -> Result<(), CannotApply> {
        let mut register = self.agreed.now();
        for request in unit.requests() {
            // One that cannot be read changes nothing, at every member alike: formats are checked before.
            let took = Order::decode(request).is_some_and(|order| register.apply(&order));
            replies.put(|reply| reply.push(u8::from(took)));
        }
        let (bytes, turn) = (register.encode(), unit.turn.encode());
        self.with(|keyspace| {
            keyspace.begin_batch();
            keyspace.put_system(PLACE, &bytes)?;
            keyspace.put_system(&unit.lane.key(), &turn)?;
            keyspace.end_batch();
            keyspace.commit()
        })?;
        self.agreed.set(register);
        Ok(())
    }

    fn flush(&mut self, _: Position) -> io::Result<()> {
        Ok(())
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        let bytes = self.agreed.now().encode();
        Ok(Box::new(move |out| out.write_all(&bytes)))
    }

    /// The keys were restored before, and the register with them.
    fn restore(&mut self, _: Position, state: &mut dyn Read) -> io::Result<()> {
        io::copy(state, &mut io::sink())?;
        self.reload().map_err(io::Error::other)
    }
}

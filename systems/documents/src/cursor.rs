//! Cursors: results that a client takes batch by batch.
//!
//! Invariant: a cursor is taken out of the table while a command works on it, so two commands never
//! work on one; one that was killed meanwhile is not put back.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Mutex;

use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::expression::Scope;
use beeline_documents_query::memory::{Lease, Memory, size_of};
use beeline_documents_query::pipeline::{Flow, Outside, Pipeline};
use bson::Document;

use crate::changes::Changes;
use crate::engine::{Engine, EngineOptions, lock};
use crate::operation::Operation;
use crate::query::Query;
use crate::write::encode;

/// Most bytes of the documents in one batch.
pub const BATCH_BYTES: usize = 16 << 20;

/// What makes a cursor's documents.
#[derive(Debug)]
pub enum Source {
    /// A query.
    Query(Box<Query>),
    /// A query whose documents go through a pipeline.
    Pipeline(Box<Piped>),
    /// The log.
    Changes(Box<Changes>),
    /// Documents that were made already.
    Ready,
}

/// A query and a pipeline behind it.
#[derive(Debug)]
pub struct Piped {
    /// Where documents come from.
    pub query: Query,
    /// What becomes of them.
    pub pipeline: Pipeline,
    /// Variables of the command.
    pub variables: Document,
    /// The pipeline was finished.
    pub finished: bool,
}

/// An open cursor.
#[derive(Debug)]
pub struct Cursor {
    /// Database and collection it reads, as `getMore` names them.
    pub namespace: String,
    /// Where its documents come from.
    pub source: Source,
    /// Documents made and not sent yet.
    pub ready: VecDeque<Vec<u8>>,
    /// It stays at its end, for more to come.
    pub tailable: bool,
    /// How long `getMore` waits at its end.
    pub awaits: bool,
    /// The client asked that it does not time out.
    pub keeps: bool,
    /// The session that opened it.
    pub session: Option<Vec<u8>>,
    /// The user that opened it.
    pub user: Option<String>,
    /// The operation that its commands are.
    pub operation: Operation,
    /// What waits in `ready`.
    pub lease: Lease,
}

impl Cursor {
    /// A cursor over documents that were made already.
    #[must_use]
    pub fn of(namespace: String, ready: VecDeque<Vec<u8>>) -> Self {
        Self {
            namespace,
            source: Source::Ready,
            ready,
            tailable: false,
            awaits: false,
            keeps: false,
            session: None,
            user: None,
            operation: Operation::default(),
            lease: Lease::default(),
        }
    }

    /// The same as a part of an operation.
    #[must_use]
    pub fn part_of(self, operation: &Operation) -> Self {
        Self { operation: operation.clone(), ..self }
    }

    /// Counts what waits to be sent.
    ///
    /// Errors: more than the operation may keep.
    pub fn count_ready(&mut self) -> Result<()> {
        let memory = &self.operation.memory;
        self.lease.shrink_to(0);
        self.lease = Lease::of(memory);
        self.lease.grow(self.ready.iter().map(Vec::len).sum(), Memory::alone)
    }

    /// Takes the next batch: at most `most` documents. True: nothing is left.
    ///
    /// Errors: the query's.
    pub fn batch(
        &mut self,
        engine: &Engine,
        outside: &mut dyn Outside,
        most: usize,
    ) -> Result<(Vec<Vec<u8>>, bool)> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        loop {
            while let Some(next) = self.ready.front() {
                if batch.len() >= most || (bytes + next.len() > BATCH_BYTES && !batch.is_empty()) {
                    return Ok((batch, false));
                }
                bytes += next.len();
                batch.extend(self.ready.pop_front());
            }
            let wanted = most.saturating_sub(batch.len());
            let exhausted = match &mut self.source {
                Source::Ready => true,
                Source::Changes(changes) => {
                    if wanted > 0 {
                        changes.fill(engine, outside, &mut self.ready)?;
                    }
                    changes.has_ended()
                }
                Source::Query(query) => {
                    if !query.is_done() && (wanted > 0 || self.tailable) {
                        query.fill(engine, wanted.clamp(1, 1000), &mut self.ready)?;
                    }
                    query.is_done()
                }
                Source::Pipeline(piped) => {
                    if wanted > 0 {
                        piped.fill(engine, outside, &mut self.ready)?;
                    }
                    piped.finished
                }
            };
            if self.ready.is_empty() && (exhausted || wanted == 0 || self.tailable) {
                let ended = matches!(self.source, Source::Changes(_)) && exhausted;
                return Ok((batch, exhausted && !self.tailable || ended));
            }
        }
    }
}

impl Piped {
    /// Goes on until something comes out.
    fn fill(
        &mut self,
        engine: &Engine,
        outside: &mut dyn Outside,
        out: &mut VecDeque<Vec<u8>>,
    ) -> Result<()> {
        let scope = Scope::with_variables(&self.variables);
        let mut input = VecDeque::new();
        while out.is_empty() && !self.finished {
            let mut results = Vec::new();
            let mut made = Lease::of(&outside.memory());
            let mut enough = false;
            if !self.query.is_done() {
                let mut held = self.query.fill_counted(engine, 1000, &mut input)?;
                for bytes in input.drain(..) {
                    let document = self.query.decode(&bytes)?;
                    let before = results.len();
                    let flow = self.pipeline.push(document, &scope, outside, &mut results)?;
                    held.shrink(bytes.len());
                    let new = results.get(before..).unwrap_or_default();
                    made.grow(new.iter().map(size_of).sum(), Memory::alone)?;
                    if flow == Flow::Enough {
                        enough = true;
                        break;
                    }
                }
            }
            if enough || self.query.is_done() {
                self.pipeline.finish(&scope, outside, &mut results)?;
                self.finished = true;
            }
            for document in &results {
                out.push_back(encode(document)?);
            }
        }
        Ok(())
    }
}

#[derive(Debug)]
struct Slot {
    /// `None` while a command works on it.
    cursor: Option<Cursor>,
    namespace: String,
    session: Option<Vec<u8>>,
    user: Option<String>,
    used_ms: u64,
    keeps: bool,
}

/// The open cursors of a node.
#[derive(Debug)]
pub struct Cursors {
    slots: Mutex<HashMap<i64, Slot>>,
    most: usize,
    timeout_ms: u64,
}

/// A cursor that a command works on, and its number.
#[derive(Debug)]
pub struct Taken {
    /// Its number.
    pub id: i64,
    /// The cursor.
    pub cursor: Cursor,
}

impl Cursors {
    /// None open.
    #[must_use]
    pub fn new(options: &EngineOptions) -> Self {
        Self {
            slots: Mutex::default(),
            most: options.most_cursors,
            timeout_ms: options.cursor_timeout_ms,
        }
    }

    /// Keeps a cursor; returns its number.
    ///
    /// Errors: too many are open.
    pub fn open(&self, cursor: Cursor, now_ms: u64) -> Result<i64> {
        let mut slots = lock(&self.slots);
        if slots.len() >= self.most {
            return fail(
                Code::ExceededMemoryLimit,
                format!("{} cursors are open, which is the limit; close some", self.most),
            );
        }
        let id = loop {
            let id = i64::from_le_bytes(rand::random::<[u8; 8]>()) & i64::MAX;
            if id != 0 && !slots.contains_key(&id) {
                break id;
            }
        };
        let slot = Slot {
            namespace: cursor.namespace.clone(),
            session: cursor.session.clone(),
            user: cursor.user.clone(),
            keeps: cursor.keeps,
            used_ms: now_ms,
            cursor: Some(cursor),
        };
        slots.insert(id, slot);
        Ok(id)
    }

    /// Takes a cursor out to work on it.
    ///
    /// Errors: [`Code::CursorNotFound`], [`Code::CursorInUse`], [`Code::Unauthorized`].
    pub fn take(&self, id: i64, namespace: &str, user: Option<&str>) -> Result<Taken> {
        let mut slots = lock(&self.slots);
        let Some(slot) = slots.get_mut(&id) else {
            return fail(Code::CursorNotFound, format!("cursor id {id} not found"));
        };
        if slot.namespace != namespace {
            return fail(
                Code::Unauthorized,
                format!(
                    "Requested getMore on namespace '{namespace}', but cursor belongs to a different namespace {}",
                    slot.namespace
                ),
            );
        }
        if slot.user.as_deref() != user {
            return fail(
                Code::Unauthorized,
                format!("cursor id {id} was not created by the authenticated user"),
            );
        }
        match slot.cursor.take() {
            Some(cursor) => Ok(Taken { id, cursor }),
            None => fail(Code::CursorInUse, format!("cursor id {id} is already in use")),
        }
    }

    /// Puts a cursor back that has more; false when it was killed meanwhile.
    pub fn put_back(&self, taken: Taken, now_ms: u64) -> bool {
        match lock(&self.slots).get_mut(&taken.id) {
            Some(slot) => {
                slot.used_ms = now_ms;
                slot.cursor = Some(taken.cursor);
                true
            }
            None => false,
        }
    }

    /// Forgets a cursor; false when there is none.
    pub fn close(&self, id: i64) -> bool {
        lock(&self.slots).remove(&id).is_some()
    }

    /// Forgets a cursor of a namespace and a user.
    pub fn kill(&self, id: i64, namespace: &str, user: Option<&str>) -> bool {
        let mut slots = lock(&self.slots);
        let own = slots
            .get(&id)
            .is_some_and(|slot| slot.namespace == namespace && slot.user.as_deref() == user);
        own && slots.remove(&id).is_some()
    }

    /// Forgets the cursors of a user's sessions.
    pub fn kill_sessions(&self, sessions: &HashSet<Vec<u8>>, user: Option<&str>) {
        lock(&self.slots).retain(|_, slot| {
            slot.user.as_deref() != user
                || slot.session.as_ref().is_none_or(|session| !sessions.contains(session))
        });
    }

    /// Forgets all cursors, also those in use: the documents are others now.
    pub fn forget_all(&self) {
        lock(&self.slots).clear();
    }

    /// Forgets cursors that were not used for too long; returns how many.
    pub fn expire(&self, now_ms: u64) -> usize {
        let mut slots = lock(&self.slots);
        let before = slots.len();
        slots.retain(|_, slot| {
            slot.keeps
                || slot.cursor.is_none()
                || now_ms.saturating_sub(slot.used_ms) < self.timeout_ms
        });
        before - slots.len()
    }

    /// How many are open.
    #[must_use]
    pub fn count(&self) -> usize {
        lock(&self.slots).len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(count: u8) -> Cursor {
        Cursor::of("d.c".to_owned(), (0..count).map(|byte| vec![byte]).collect())
    }

    #[test]
    fn a_cursor_is_worked_on_by_one_command_and_forgotten_when_killed() {
        let cursors = Cursors::new(&EngineOptions {
            most_cursors: 1,
            cursor_timeout_ms: 10,
            ..EngineOptions::default()
        });
        let id = cursors.open(ready(1), 0).unwrap();
        assert_eq!(cursors.open(ready(1), 0).unwrap_err().code, Code::ExceededMemoryLimit);
        assert_eq!(cursors.take(id, "d.other", None).unwrap_err().code, Code::Unauthorized);
        assert_eq!(cursors.take(id, "d.c", Some("eve")).unwrap_err().code, Code::Unauthorized);
        let taken = cursors.take(id, "d.c", None).unwrap();
        assert_eq!(cursors.take(id, "d.c", None).unwrap_err().code, Code::CursorInUse);
        assert_eq!(cursors.expire(100), 0);
        assert!(cursors.put_back(taken, 100));
        let taken = cursors.take(id, "d.c", None).unwrap();
        assert!(cursors.close(id));
        assert!(!cursors.put_back(taken, 100));
        assert_eq!(cursors.take(id, "d.c", None).unwrap_err().code, Code::CursorNotFound);
    }

    #[test]
    fn cursors_time_out_unless_asked_not_to() {
        let cursors = Cursors::new(&EngineOptions {
            most_cursors: 5,
            cursor_timeout_ms: 10,
            ..EngineOptions::default()
        });
        cursors.open(ready(1), 0).unwrap();
        cursors.open(Cursor { keeps: true, ..ready(1) }, 0).unwrap();
        assert_eq!((cursors.expire(9), cursors.expire(10), cursors.count()), (0, 1, 1));
    }
}

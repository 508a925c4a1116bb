//! A store without threads for tests: its decisions, real segments, a disk of byte vectors, and time
//! that passes when told.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use beeline_os::memory::{copy_in, copy_out};

use super::core::{Core, Effect, Limits};
use super::memory::{STORE, Segments};
use super::spill::{Done, Job};
use crate::id::ObjectId;
use crate::segment::Segment;
use crate::wire::{Location, Operation, RecordKind, Reply, Request, Status};

/// What the store said, in order.
#[derive(Debug)]
pub(super) enum Said {
    Reply { client: u32, tag: u32, reply: Reply },
    Withdrawn(ObjectId),
    Fetch(ObjectId, Option<SocketAddr>),
}

/// What a client or the disk has still to do.
#[derive(Debug)]
pub(super) enum Todo {
    Map { client: u32, segment: u32 },
    Unmap { client: u32, segment: u32 },
    GiveBack { client: u32 },
    Disk(Job),
}

/// See the module's documentation.
pub(super) struct Rig {
    pub core: Core,
    pub now_ns: u64,
    pub said: VecDeque<Said>,
    pub todo: VecDeque<Todo>,
    /// Files, as pieces by offset and length: one without bytes shares its offset with the next.
    pub disk: HashMap<u64, BTreeMap<(u64, u64), Vec<u8>>>,
    /// Clients that were given a segment to write, by segment.
    writers: HashMap<u32, HashSet<u32>>,
    pub complaint: Option<String>,
    next_tag: u32,
}

impl Rig {
    pub(super) fn new(memory: u64, spill: u64) -> Self {
        Self {
            core: Core::new(Limits { memory, spill }, Segments::default()),
            now_ns: 1_000,
            said: VecDeque::new(),
            todo: VecDeque::new(),
            disk: HashMap::new(),
            writers: HashMap::new(),
            complaint: None,
            next_tag: 1,
        }
    }

    fn complain(&mut self, what: impl FnOnce() -> String) {
        if self.complaint.is_none() {
            self.complaint = Some(what());
        }
    }

    /// Takes what the store decided.
    pub(super) fn take(&mut self) {
        for effect in self.core.take_effects() {
            match effect {
                Effect::Reply { client, tag, reply } => {
                    self.said.push_back(Said::Reply { client, tag, reply });
                }
                Effect::Send { client, record, .. } => {
                    let segment = u32::try_from(record.a).unwrap();
                    if record.kind == RecordKind::CallIn {
                        self.todo.push_back(Todo::GiveBack { client });
                    } else if record.kind == RecordKind::Retire {
                        self.todo.push_back(Todo::Unmap { client, segment });
                    } else if record.c == 1 {
                        self.writers.entry(segment).or_default().insert(client);
                        self.todo.push_back(Todo::Map { client, segment });
                    }
                }
                Effect::Spill(job) => self.todo.push_back(Todo::Disk(job)),
                Effect::Fetch(id, from) => self.said.push_back(Said::Fetch(id, from)),
                Effect::Withdraw(id) => self.said.push_back(Said::Withdrawn(id)),
                Effect::Expel { client, reason } => {
                    self.complain(|| format!("client {client} is expelled: {reason}"));
                }
                Effect::News { .. } | Effect::Announce(_) => {}
            }
        }
    }

    /// Sends a request under a number of its own.
    pub(super) fn request(&mut self, client: u32, request: Request) -> u32 {
        let tag = self.next_tag;
        self.next_tag += 1;
        self.request_as(client, tag, request);
        tag
    }

    pub(super) fn request_as(&mut self, client: u32, tag: u32, request: Request) {
        self.core.request(client, tag, request, self.now_ns);
        self.take();
    }

    /// The reply to a request that is answered at once, or after what is to do was done.
    pub(super) fn ask(&mut self, client: u32, request: Request) -> Reply {
        let tag = self.request(client, request);
        self.all();
        self.reply(client, tag).unwrap_or_else(|| panic!("no reply to {request:?}"))
    }

    /// Takes a reply out of what was said.
    pub(super) fn reply(&mut self, client: u32, tag: u32) -> Option<Reply> {
        let of = |said: &Said| matches!(said, Said::Reply { client: c, tag: t, .. } if (*c, *t) == (client, tag));
        let place = self.said.iter().position(of)?;
        match self.said.remove(place) {
            Some(Said::Reply { reply, .. }) => Some(reply),
            _ => None,
        }
    }

    pub(super) fn pass(&mut self, nanoseconds: u64) {
        self.now_ns += nanoseconds;
        self.core.tick(self.now_ns);
        self.take();
    }

    pub(super) fn leave(&mut self, client: u32) {
        // What a client that is gone had still to do is left undone.
        self.todo.retain(|todo| match todo {
            Todo::Map { client: of, .. }
            | Todo::Unmap { client: of, .. }
            | Todo::GiveBack { client: of } => *of != client,
            Todo::Disk(_) => true,
        });
        self.core.leave(client, self.now_ns);
        self.take();
    }

    /// Does the thing to do at `index`; `fails`: if the disk does it, it fails. What was lost by that.
    pub(super) fn one(&mut self, index: usize, fails: bool) {
        match self.todo.remove(index).unwrap() {
            Todo::Map { client, segment } => self.core.mapped(client, segment, self.now_ns),
            Todo::Unmap { client, segment } => self.core.unmapped(client, segment, self.now_ns),
            Todo::GiveBack { client } => {
                let give_back = Request::new(Operation::GiveBack, ObjectId([0; 20]));
                self.core.request(client, 1 << 20, give_back, self.now_ns);
            }
            Todo::Disk(Job::Forget { file }) => drop(self.disk.remove(&file)),
            Todo::Disk(Job::Spill { file, pieces }) => {
                let outcome = if fails {
                    Err(io::ErrorKind::StorageFull.into())
                } else {
                    let held = pieces.iter().map(|piece| {
                        let mut bytes = vec![0; usize::try_from(piece.length).unwrap()];
                        let start = usize::try_from(piece.offset).unwrap();
                        copy_out(&*piece.segment, start, &mut bytes);
                        ((piece.file_offset, piece.length), bytes)
                    });
                    self.disk.insert(file, held.collect());
                    Ok(())
                };
                self.core.spill_done(Done::Spilled { file, outcome }, self.now_ns);
            }
            Todo::Disk(Job::Restore { file, slot, piece }) => {
                self.look_for_writers(&piece.segment);
                let there = self
                    .disk
                    .get(&file)
                    .and_then(|file| file.get(&(piece.file_offset, piece.length)));
                let outcome = match there {
                    Some(bytes) if !fails => {
                        copy_in(&*piece.segment, usize::try_from(piece.offset).unwrap(), bytes);
                        Ok(())
                    }
                    _ => Err(io::ErrorKind::NotFound.into()),
                };
                if outcome.is_err() && !fails {
                    self.complain(|| format!("what is restored from file {file} is not there"));
                }
                self.core.spill_done(Done::Restored { slot, outcome }, self.now_ns);
            }
        }
        self.take();
    }

    /// The store writes only where no client ever could.
    fn look_for_writers(&mut self, target: &Arc<Segment>) {
        let numbers: Vec<u32> = self.writers.keys().copied().collect();
        for number in numbers {
            let held = self.core.memory().get(number);
            if held.is_some_and(|held| Arc::ptr_eq(&held.segment, target)) {
                self.complain(|| format!("segment {number} is restored into, and a client has it"));
            }
        }
        let of_store =
            |number: &u32| self.core.memory().get(*number).is_some_and(|held| held.writer == STORE);
        let shared = self.writers.keys().copied().find(of_store);
        if let Some(number) = shared {
            self.complain(|| format!("segment {number} is the store's, and a client has it"));
        }
    }

    /// Does all there is to do.
    pub(super) fn all(&mut self) {
        while !self.todo.is_empty() {
            self.one(0, false);
        }
    }

    /// The first `length` bytes at a place.
    pub(super) fn bytes(&self, location: &Location, length: usize) -> Option<Vec<u8>> {
        let segment = &self.core.memory().get(location.segment)?.segment;
        let mut bytes = vec![0; length];
        copy_out(&**segment, usize::try_from(location.offset).unwrap(), &mut bytes);
        Some(bytes)
    }

    /// Writes an object's bytes, as its creator does.
    pub(super) fn write(&self, location: &Location, bytes: &[u8]) {
        let segment = &self.core.memory().get(location.segment).unwrap().segment;
        copy_in(&**segment, usize::try_from(location.offset).unwrap(), bytes);
    }

    /// A sealed object without references.
    pub(super) fn put(&mut self, client: u32, id: ObjectId, bytes: &[u8]) {
        let create = Request {
            size: bytes.len() as u64,
            timeout_us: 1_000_000,
            ..Request::new(Operation::Create, id)
        };
        let reply = self.ask(client, create);
        assert_eq!(reply.status, Status::Done, "{id}");
        self.write(&reply.location, bytes);
        let seal = Request {
            flags: crate::wire::FLAG_RELEASE,
            size: reply.location.handle,
            ..Request::new(Operation::Seal, id)
        };
        assert_eq!(self.ask(client, seal).status, Status::Done);
    }
}

//! A client: one session, one operation at a time, retried until it is answered.

use beeline_env::Randomness;

use crate::linear::{Call, Operation};
use crate::machine::{Item, Key, Reply};

/// A request on its way to a server.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub client: usize,
    /// Which operation of the client.
    pub number: u64,
    pub what: What,
}

/// What a client wants.
#[derive(Clone, Copy, Debug)]
pub(crate) enum What {
    Open,
    Append { session: u64, sequence: u64, key: Key, item: Item },
    Read { key: Key },
}

#[derive(Clone, Debug)]
struct Current {
    number: u64,
    what: What,
    from_ns: u64,
}

/// A client and what it saw.
#[derive(Debug)]
pub(crate) struct Client {
    id: usize,
    session: Option<u64>,
    sequence: u64,
    number: u64,
    left: u64,
    current: Option<Current>,
    /// Whom it asks.
    pub(crate) server: usize,
    pub(crate) history: Vec<(Key, Call)>,
    pub(crate) acknowledged: Vec<(Key, Item)>,
}

const KEYS: u64 = 3;

impl Client {
    pub(crate) fn new(id: usize, operations: u64) -> Self {
        Self {
            id,
            session: None,
            sequence: 0,
            number: 0,
            left: operations,
            current: None,
            server: 0,
            history: Vec::new(),
            acknowledged: Vec::new(),
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.left == 0 && self.current.is_none()
    }

    /// The present operation, begun if there was none; `None` when all are done.
    pub(crate) fn request(&mut self, now_ns: u64, random: &mut Randomness) -> Option<Request> {
        if self.current.is_none() {
            if self.left == 0 {
                return None;
            }
            let key = random.below(KEYS) as Key;
            let what = match self.session {
                None => What::Open,
                Some(_) if random.chance(2, 5) => What::Read { key },
                Some(session) => {
                    self.sequence += 1;
                    let item = (self.id as Item) << 16 | self.number as Item;
                    What::Append { session, sequence: self.sequence, key, item }
                }
            };
            self.number += 1;
            self.left -= u64::from(!matches!(what, What::Open));
            self.current = Some(Current { number: self.number, what, from_ns: now_ns });
        }
        let current = self.current.as_ref()?;
        Some(Request { client: self.id, number: current.number, what: current.what })
    }

    /// Whether operation `number` still waits for its answer.
    pub(crate) fn waits_for(&self, number: u64) -> bool {
        self.current.as_ref().is_some_and(|current| current.number == number)
    }

    /// Takes an answer; true if it was the one waited for.
    pub(crate) fn answer(&mut self, number: u64, reply: Reply, now_ns: u64) -> bool {
        let Some(current) = self.current.take_if(|current| current.number == number) else {
            return false;
        };
        let call = |to_ns, operation| Call { from_ns: current.from_ns, to_ns, operation };
        match (current.what, reply) {
            (What::Open, Reply::Opened(name)) => {
                self.session = Some(name);
                self.sequence = 0;
            }
            (What::Append { key, item, .. }, Reply::Appended(length)) => {
                self.acknowledged.push((key, item));
                let operation = Operation::Append(item, Some(length));
                self.history.push((key, call(now_ns, operation)));
            }
            (What::Append { key, item, .. }, _) => {
                // Refused now; an earlier try may have run. A new session goes on.
                self.history.push((key, call(u64::MAX, Operation::Append(item, None))));
                self.session = None;
            }
            (What::Read { key }, Reply::List(list)) => {
                self.history.push((key, call(now_ns, Operation::Read(list))));
            }
            _ => {}
        }
        true
    }

    /// At the end: an append that was never answered may have run.
    pub(crate) fn give_up(&mut self) {
        if let Some(Current { what: What::Append { key, item, .. }, from_ns, .. }) =
            self.current.take()
        {
            let operation = Operation::Append(item, None);
            self.history.push((key, Call { from_ns, to_ns: u64::MAX, operation }));
        }
    }
}

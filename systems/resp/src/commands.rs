//! The commands: what they need, how they are run, and one module per family.

pub(crate) mod connection;
pub(crate) mod expiry;
pub(crate) mod hashes;
pub(crate) mod introspection;
pub(crate) mod keys;
pub(crate) mod keyspace_wide;
pub(crate) mod node;
mod reservation;
pub(crate) mod slow;
pub(crate) mod strings;
pub(crate) mod transactions;

pub(crate) use self::reservation::{FLOAT_BYTES, builds_on_values};

use beeline_kv::{EntryRef, Expected, KEYS_AHEAD, Keyspace, PutOptions};

use crate::args::Args;
use crate::error::CommandError;
use crate::figures::CommandFigures;
use crate::number::parse_i64;
use crate::output::Output;
use crate::server::Server;
use crate::session::Session;
use crate::table::Command;

/// What running a command gives: its reply is in the output buffer, or it is this error.
pub type CommandResult = Result<(), CommandError>;

/// A command that needs no session.
pub type DataHandler = fn(&mut Call<'_, '_>) -> CommandResult;

/// A command that reads or changes the session.
pub type SessionHandler = fn(&mut Session, &mut Call<'_, '_>) -> CommandResult;

/// The encoding of a plain string in an entry's `kind`.
pub const KIND_STRING: u8 = 0;
/// That of a hash's head: see [`beeline_kv::Row`].
pub const KIND_HASH: u8 = 1;

/// Memory that commands reuse instead of allocating.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// An old value on its way to a new one.
    pub value: Vec<u8>,
}

impl Scratch {
    /// Gives memory above 64 KiB back.
    pub fn trim(&mut self) {
        if self.value.capacity() > 64 * 1024 {
            self.value = Vec::new();
        }
    }
}

/// One command on its way: arguments, where it works, and where its reply goes.
pub struct Call<'c, 'k> {
    pub(crate) command: &'static Command,
    pub(crate) args: Args<'c>,
    pub(crate) database: u8,
    pub(crate) store: &'c mut Keyspace<'k>,
    pub(crate) out: &'c mut Output,
    pub(crate) server: &'c dyn Server,
    pub(crate) scratch: &'c mut Scratch,
    pub(crate) counters: &'c mut Counters,
    pub(crate) figures: &'c CommandFigures,
    /// What it looks up counts as used: CLIENT NO-TOUCH is off.
    pub(crate) touch: bool,
    /// The keyspace has an open batch: a transaction's.
    pub(crate) in_batch: bool,
}

/// Figures for INFO, of one executor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Commands executed.
    pub commands: u64,
    /// Error replies.
    pub errors: u64,
    /// Look-ups by reading commands that found a key.
    pub hits: u64,
    /// Those that did not.
    pub misses: u64,
    /// Error replies because the store failed or had no room, which says nothing about the
    /// request.
    pub store_failures: u64,
}

/// What a [`Call::put`] does with the expiry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expiry {
    /// The key lives on.
    Never,
    /// Unix milliseconds.
    At(u64),
}

impl Expiry {
    pub fn of(entry: &EntryRef) -> Self {
        match entry.expires_at_ms {
            0 => Self::Never,
            at => Self::At(at),
        }
    }

    pub fn milliseconds(self) -> u64 {
        match self {
            Self::Never => 0,
            Self::At(at) => at.max(1),
        }
    }
}

impl<'c> Call<'c, '_> {
    /// Argument `index`.
    #[inline]
    pub(crate) fn arg(&self, index: usize) -> &'c [u8] {
        self.args.get(index)
    }

    /// Argument `index` as an integer.
    #[inline]
    pub(crate) fn integer(&self, index: usize) -> Result<i64, CommandError> {
        parse_i64(self.arg(index)).ok_or(CommandError::NotAnInteger)
    }

    /// Argument `index` as a C `int`.
    pub(crate) fn small_integer(&self, index: usize) -> Result<i32, CommandError> {
        i32::try_from(self.integer(index)?).map_err(|_| {
            CommandError::text(format!(
                "ERR value is out of range, value must between {} and {}",
                i32::MIN,
                i32::MAX
            ))
        })
    }

    /// Argument `index` as a database.
    pub(crate) fn database_at(&self, index: usize) -> Result<u8, CommandError> {
        u8::try_from(self.small_integer(index)?)
            .ok()
            .filter(|&database| u16::from(database) < beeline_kv::DATABASES)
            .ok_or(CommandError::DatabaseOutOfRange)
    }

    /// Wall-clock time in Unix milliseconds.
    pub(crate) fn now_ms(&self) -> u64 {
        self.store.now_ms()
    }

    /// To be called before each of the keys that lie at `first` and every `step`th argument from
    /// there: now and then it asks for what the next few of them need.
    #[inline]
    pub(crate) fn look_ahead(&mut self, index: usize, first: usize, step: usize) {
        if (index - first).is_multiple_of(KEYS_AHEAD * step) && self.args.len() > first + step {
            let args = self.args;
            let keys = (index..args.len()).step_by(step).map(|index| args.get(index));
            self.store.expect_keys(self.database, keys);
        }
    }

    /// As [`Self::look_ahead`], of the fields of a hash that lie there.
    #[inline]
    pub(crate) fn look_ahead_in(&mut self, key: &[u8], index: usize, first: usize, step: usize) {
        if (index - first).is_multiple_of(KEYS_AHEAD * step) && self.args.len() > first + step {
            let args = self.args;
            let fields = (index..args.len()).step_by(step);
            let fields = fields.map(|index| Expected { key, field: Some(args.get(index)) });
            self.store.expect(self.database, fields);
        }
    }

    /// The entry of a key, whatever its type.
    #[inline]
    pub(crate) fn lookup(&mut self, key: &[u8]) -> Result<Option<EntryRef>, CommandError> {
        if self.touch {
            return Ok(self.store.lookup(self.database, key)?);
        }
        self.peek(key)
    }

    /// As [`Self::lookup`], without counting as use of the key.
    pub(crate) fn peek(&mut self, key: &[u8]) -> Result<Option<EntryRef>, CommandError> {
        Ok(self.store.peek(self.database, key)?)
    }

    /// As [`Self::peek`], counted as a hit or a miss.
    pub(crate) fn peek_read(&mut self, key: &[u8]) -> Result<Option<EntryRef>, CommandError> {
        let found = self.peek(key)?;
        self.count_read(found.is_some());
        Ok(found)
    }

    #[inline]
    pub(crate) fn count_read(&mut self, found: bool) {
        if found {
            self.counters.hits += 1;
        } else {
            self.counters.misses += 1;
        }
    }

    /// As [`Self::lookup`], counted as a hit or a miss.
    #[inline]
    pub(crate) fn lookup_read(&mut self, key: &[u8]) -> Result<Option<EntryRef>, CommandError> {
        let found = self.lookup(key)?;
        self.count_read(found.is_some());
        Ok(found)
    }

    /// The entry of a string key; [`CommandError::WrongType`] for other types.
    #[inline]
    pub(crate) fn lookup_string(&mut self, key: &[u8]) -> Result<Option<EntryRef>, CommandError> {
        string_or_wrong_type(self.lookup(key)?)
    }

    /// As [`Self::lookup_string`], counted as a hit or a miss.
    #[inline]
    pub(crate) fn lookup_string_read(
        &mut self,
        key: &[u8],
    ) -> Result<Option<EntryRef>, CommandError> {
        string_or_wrong_type(self.lookup_read(key)?)
    }

    /// Replies with the value of an entry.
    #[inline]
    pub(crate) fn reply_value(&mut self, entry: &EntryRef) -> CommandResult {
        let out = &mut *self.out;
        self.store.with_value(entry, |value| out.bulk(value))?;
        Ok(())
    }

    /// Copies the value of an entry to the scratch memory.
    pub(crate) fn read_to_scratch(&mut self, entry: &EntryRef) -> CommandResult {
        let scratch = &mut self.scratch.value;
        self.store.with_value(entry, |value| {
            scratch.clear();
            scratch.extend_from_slice(value);
        })?;
        Ok(())
    }

    /// Stores a string.
    #[inline]
    pub(crate) fn put(&mut self, key: &[u8], value: &[&[u8]], expiry: Expiry) -> CommandResult {
        let options = PutOptions { kind: KIND_STRING, expires_at_ms: expiry.milliseconds() };
        self.store.put(self.database, key, value, options)?;
        Ok(())
    }

    /// Removes a key; whether there was one.
    pub(crate) fn delete(&mut self, key: &[u8]) -> Result<bool, CommandError> {
        Ok(self.store.delete(self.database, key)?)
    }

    /// Runs `body` as one atomic batch: after a crash all of its writes are there, or none.
    ///
    /// Inside a transaction the batch is the transaction's.
    pub(crate) fn atomically(
        &mut self,
        body: impl FnOnce(&mut Self) -> CommandResult,
    ) -> CommandResult {
        if self.in_batch {
            return body(self);
        }
        self.store.begin_batch();
        self.in_batch = true;
        let done = body(self);
        self.in_batch = false;
        self.store.end_batch();
        done
    }
}

fn string_or_wrong_type(entry: Option<EntryRef>) -> Result<Option<EntryRef>, CommandError> {
    match entry {
        Some(entry) if entry.kind != KIND_STRING => Err(CommandError::WrongType),
        other => Ok(other),
    }
}

/// The name TYPE and SCAN use for a kind of value.
#[must_use]
pub fn type_name(kind: u8) -> &'static str {
    match kind {
        KIND_STRING => "string",
        KIND_HASH => "hash",
        _ => "unknown",
    }
}

//! What a transaction may write, found out before it writes anything: where that much room is not
//! to be had, EXEC is refused as a whole.
//!
//! The estimate is an upper bound, with the largest value each command can leave behind in the
//! order the commands run. Two things are beyond it and may still make a single command fail
//! inside EXEC: a value that COPY or MOVE brought to another database of the same transaction, and
//! deletions of keys found expired, which take from what is kept back for deletions.

use std::collections::HashMap;

use beeline_kv::entry::{KEY_LIMIT, slot_bytes_for};
use beeline_kv::{Keyspace, Store};

use crate::args::Args;
use crate::error::CommandError;
use crate::plan::parse_database;
use crate::session::Transaction;
use crate::table::{Command, flag};

/// The longest text of an integer, bytes.
const INTEGER_BYTES: u64 = 20;
/// The longest text of a sum of floating-point numbers, bytes; as Redis' buffer for it.
pub(crate) const FLOAT_BYTES: u64 = 5 * 1024;

/// What a transaction writes at most.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Written {
    /// Bytes of entries.
    pub bytes: u64,
    /// Something other than deletions is among them, and the heads of hashes that lose fields.
    pub stores: bool,
}

/// Bytes of entries that `transaction` writes at most.
///
/// Errors: the store's.
pub(super) fn most_written(
    transaction: &Transaction,
    database: u8,
    store: &mut Keyspace<'_>,
) -> Result<Written, CommandError> {
    let mut estimate = Estimate {
        store,
        database,
        lengths: HashMap::new(),
        tracking: transaction.commands.iter().any(|command| builds_on_values(command)),
        bytes: 0,
        stores: false,
    };
    for (index, command) in transaction.commands.iter().enumerate() {
        estimate.add(command, transaction.requests.get(index))?;
    }
    Ok(Written { bytes: estimate.bytes, stores: estimate.stores })
}

/// True for commands whose result is as long as a value was before them.
pub(crate) fn builds_on_values(command: &Command) -> bool {
    match command.name {
        "set" | "setnx" | "setex" | "psetex" | "getset" | "mset" | "msetnx" | "msetex" => false,
        "incr" | "decr" | "incrby" | "decrby" | "incrbyfloat" => false,
        "del" | "unlink" | "getdel" => false,
        "hset" | "hmset" | "hsetnx" | "hincrby" | "hincrbyfloat" | "hdel" => false,
        _ => command.has(flag::WRITE) && command.has_keys(),
    }
}

/// The database that COPY names.
fn target_of_copy(args: Args<'_>) -> Option<u8> {
    let named = (3..args.len().saturating_sub(1)).find(|&at| args.is(at, "db"))?;
    parse_database(args.get(named + 1))
}

struct Estimate<'e, 'k> {
    store: &'e mut Keyspace<'k>,
    database: u8,
    /// Lengths of values that commands before leave behind.
    lengths: HashMap<(u8, &'e [u8]), u64>,
    /// Some command asks for lengths.
    tracking: bool,
    bytes: u64,
    /// Something other than deletions is written.
    stores: bool,
}

impl<'e> Estimate<'e, '_> {
    fn add(&mut self, command: &Command, args: Args<'e>) -> Result<(), CommandError> {
        if command.name == "select" {
            self.database = parse_database(args.get(1)).unwrap_or(self.database);
            return Ok(());
        }
        if !command.has(flag::WRITE) || !command.has_keys() {
            return Ok(());
        }
        let length = |index: usize| args.get(index).len() as u64;
        let key = args.get(1);
        match command.name {
            "set" if args.len() > 3 => self.store_perhaps(key, length(2))?,
            "set" | "getset" => self.store(key, length(2)),
            "setnx" => self.store_perhaps(key, length(2))?,
            "setex" | "psetex" => self.store(key, length(3)),
            "mset" | "msetnx" | "msetex" => {
                let most = args.len().saturating_sub(1);
                for index in command.key_positions(args).take_while(|index| *index < most) {
                    self.store_perhaps(args.get(index), length(index + 1))?;
                }
            }
            "incr" | "decr" | "incrby" | "decrby" => self.store(key, INTEGER_BYTES),
            "incrbyfloat" => self.store(key, FLOAT_BYTES),
            "append" => {
                let before = self.length(key)?;
                self.store(key, before + length(2));
            }
            "setrange" => {
                let offset = crate::number::parse_i64(args.get(2)).unwrap_or(0);
                let end = u64::try_from(offset).unwrap_or(0).saturating_add(length(3));
                let before = self.length(key)?;
                self.store(key, before.max(end));
            }
            "hset" | "hmset" | "hsetnx" => {
                for index in (2..args.len().saturating_sub(1)).step_by(2) {
                    self.store_field(key, length(index), length(index + 1));
                }
            }
            "hincrby" => self.store_field(key, length(2), INTEGER_BYTES),
            "hincrbyfloat" => self.store_field(key, length(2), FLOAT_BYTES),
            "hdel" => {
                for index in 2..args.len() {
                    self.write_field(key, length(index), 0);
                }
            }
            "rename" | "renamenx" | "copy" => {
                self.copy_row(key, args.get(2))?;
                let moved = self.length(key)?;
                self.delete(key);
                // A copy may go to another database, whose key's shard is the one that is locked.
                let here = self.database;
                self.database = target_of_copy(args).unwrap_or(here);
                let stored = self.store_perhaps(args.get(2), moved);
                self.database = here;
                stored?;
            }
            "del" | "unlink" | "getdel" => {
                command.key_positions(args).for_each(|at| self.delete(args.get(at)));
            }
            _ => {
                // EXPIRE, PERSIST, GETEX, MOVE: the value is written anew as it is.
                for at in command.key_positions(args) {
                    let before = self.length(args.get(at))?;
                    self.delete(args.get(at));
                    self.store(args.get(at), before);
                }
            }
        }
        Ok(())
    }

    /// A field of a hash, and the head that goes with it.
    fn store_field(&mut self, key: &[u8], field_length: u64, value_length: u64) {
        self.write_field(key, field_length, value_length);
        self.stores = true;
    }

    fn write_field(&mut self, key: &[u8], field_length: u64, value_length: u64) {
        self.bytes += Store::field_bytes(key.len(), field_length as usize, value_length as usize);
        self.bytes += Store::head_bytes(key.len());
    }

    /// The fields of a hash, under another key. Those that the transaction itself adds are counted
    /// twice at least: with their own commands, and a hash that grows by much before it is copied may
    /// still make the copy fail.
    fn copy_row(&mut self, key: &[u8], to: &[u8]) -> Result<(), CommandError> {
        let Some(row) = self.store.row(self.database, key)? else { return Ok(()) };
        let mut bytes = 0;
        self.store.visit_row(self.database, key, &row, (0, usize::MAX), |field, value| {
            bytes += Store::field_bytes(to.len(), field.len(), value.len());
        })?;
        self.bytes += bytes;
        Ok(())
    }

    /// Length of a value at this point of the transaction, at most; 0 where there is none.
    fn length(&mut self, key: &'e [u8]) -> Result<u64, CommandError> {
        if let Some(length) = self.lengths.get(&(self.database, key)) {
            return Ok(*length);
        }
        let entry = self.store.peek(self.database, key)?;
        Ok(entry.map_or(0, |entry| u64::from(entry.value_length)))
    }

    fn store(&mut self, key: &'e [u8], length: u64) {
        let limit = self.store.store().value_limit(key.len()) as u64;
        if key.len() > KEY_LIMIT || length > limit {
            // Refused by the command itself, which writes nothing then.
            return;
        }
        self.bytes += slot_bytes_for(key.len(), length as usize);
        self.stores = true;
        if self.tracking {
            self.lengths.insert((self.database, key), length);
        }
    }

    /// As [`Self::store`] for a command that may leave the value as it is.
    fn store_perhaps(&mut self, key: &'e [u8], length: u64) -> Result<(), CommandError> {
        let before = if self.tracking { self.length(key)? } else { 0 };
        self.store(key, length);
        if before > length {
            self.lengths.insert((self.database, key), before);
        }
        Ok(())
    }

    fn delete(&mut self, key: &[u8]) {
        self.bytes += slot_bytes_for(key.len(), 0);
    }
}

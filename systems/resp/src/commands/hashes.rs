//! Hashes, on the store's rows: a command stores an entry for each field it changes, whatever the length
//! of the hash, and the row's head with its first and its last field.
//!
//! Deviations from Redis: key and field together take 65,517 bytes at most; fields come in the order
//! of a hash of their names, also in short hashes; a hash that is renamed or copied fits one segment
//! of the log.

use std::collections::HashSet;

use beeline_kv::{EntryRef, Row, Store};

use super::{Call, CommandResult, KIND_HASH};
use crate::error::CommandError;
use crate::extended::Extended;
use crate::glob::Glob;
use crate::number::{Decimal, parse_i64};
use crate::output::Output;

const NOT_AN_INTEGER: CommandError = CommandError::Line("ERR hash value is not an integer");
/// Most fields chosen with repetition: they are chosen under the shard's lock.
const REPEATED: u64 = 1 << 16;
/// Different fields up to this many are looked for one by one, in a hash that has more than that.
const FEW: u64 = 1024;
const NOT_A_FLOAT: CommandError = CommandError::Line("ERR hash value is not a float");

/// The hash at a key, for a command that changes it.
#[inline]
fn hash(call: &mut Call<'_, '_>, key: &[u8]) -> Result<Option<Row>, CommandError> {
    if call.touch {
        return match call.store.row(call.database, key)? {
            Some(row) if row.kind != KIND_HASH => Err(CommandError::WrongType),
            row => Ok(row),
        };
    }
    let entry = call.peek(key)?;
    of_entry(call, entry)
}

/// The hash at a key, for a command that reads it.
fn hash_read(call: &mut Call<'_, '_>, key: &[u8]) -> Result<Option<Row>, CommandError> {
    let row = hash(call, key);
    match &row {
        Ok(row) => call.count_read(row.is_some()),
        Err(CommandError::WrongType) => call.count_read(true),
        Err(_) => {}
    }
    row
}

fn of_entry(call: &mut Call<'_, '_>, entry: Option<EntryRef>) -> Result<Option<Row>, CommandError> {
    match entry {
        None => Ok(None),
        Some(entry) if entry.kind != KIND_HASH => Err(CommandError::WrongType),
        Some(entry) => Ok(Some(call.store.row_at(call.database, &entry)?)),
    }
}

fn field(
    call: &mut Call<'_, '_>,
    row: Option<&Row>,
    name: &[u8],
) -> Result<Option<EntryRef>, CommandError> {
    match row {
        Some(row) => Ok(call.store.field(call.database, call.arg(1), row, name)?),
        None => Ok(None),
    }
}

/// Whether a field of a hash that is there takes one entry, which is stored or not: no batch, and nothing
/// else to make room for.
#[inline]
fn is_one_entry(call: &Call<'_, '_>) -> bool {
    !call.in_batch && call.store.store().max_memory_bytes() == 0
}

/// Stores one field; whether it was new.
#[inline]
fn store_one(
    call: &mut Call<'_, '_>,
    row: Option<Row>,
    field: &[u8],
    value: &[u8],
) -> Result<bool, CommandError> {
    let key = call.arg(1);
    if let Some(mut row) = row.filter(|_| is_one_entry(call)) {
        let new = call.store.put_field(call.database, key, &mut row, field, &[value])?;
        call.store.put_head(call.database, key, &row)?;
        return Ok(new);
    }
    store(call, row, std::iter::once((field, value))).map(|new| new > 0)
}

/// Stores fields with their values, and the head of a new hash, as one batch; how many were new. What
/// there is no room for is refused as a whole.
fn store<'v>(
    call: &mut Call<'_, '_>,
    row: Option<Row>,
    pairs: impl Iterator<Item = (&'v [u8], &'v [u8])> + Clone,
) -> Result<u64, CommandError> {
    let key = call.arg(1);
    for (field, value) in pairs.clone() {
        call.store.store().check_field(key.len(), field.len(), value.len())?;
    }
    let mut row = row;
    if !call.in_batch {
        let fields = pairs
            .clone()
            .map(|(field, value)| Store::field_bytes(key.len(), field.len(), value.len()));
        call.store.reserve_bytes(fields.sum::<u64>() + Store::head_bytes(key.len()))?;
        // Making room may have evicted this very key.
        row = hash_read(call, key)?;
    }
    let mut row = match row {
        Some(row) => row,
        None => call.store.new_row(KIND_HASH, 0)?,
    };
    let mut new = 0;
    call.atomically(|call| {
        for (at, (field, value)) in pairs.enumerate() {
            call.look_ahead_in(key, 2 + 2 * at, 2, 2);
            let added = call.store.put_field(call.database, key, &mut row, field, &[value])?;
            new += u64::from(added);
        }
        Ok(call.store.put_head(call.database, key, &row)?)
    })?;
    Ok(new)
}

fn set_pairs(call: &mut Call<'_, '_>) -> Result<u64, CommandError> {
    let args = call.args;
    if !args.len().is_multiple_of(2) {
        return Err(CommandError::Arity { command: call.command.name });
    }
    let row = hash(call, call.arg(1))?;
    if args.len() == 4 {
        return store_one(call, row, args.get(2), args.get(3)).map(u64::from);
    }
    let pairs = (2..args.len()).step_by(2).map(|at| (args.get(at), args.get(at + 1)));
    store(call, row, pairs)
}

pub fn hset(call: &mut Call<'_, '_>) -> CommandResult {
    if call.args.len() == 4 {
        let (key, field, value) = (call.arg(1), call.arg(2), call.arg(3));
        let known = if call.touch && is_one_entry(call) {
            call.store.put_known_field((call.database, key), KIND_HASH, field, &[value])?
        } else {
            None
        };
        let new = match known {
            Some(new) => new,
            None => {
                let row = hash(call, key)?;
                store_one(call, row, field, value)?
            }
        };
        call.out.integer(i64::from(new));
        return Ok(());
    }
    let new = set_pairs(call)?;
    call.out.integer(new as i64);
    Ok(())
}

pub fn hmset(call: &mut Call<'_, '_>) -> CommandResult {
    set_pairs(call)?;
    call.out.ok();
    Ok(())
}

pub fn hsetnx(call: &mut Call<'_, '_>) -> CommandResult {
    let row = hash(call, call.arg(1))?;
    let free = field(call, row.as_ref(), call.arg(2))?.is_none();
    if free {
        store_one(call, row, call.arg(2), call.arg(3))?;
    }
    call.out.integer(i64::from(free));
    Ok(())
}

fn reply_field(call: &mut Call<'_, '_>, row: Option<&Row>, name: &[u8]) -> CommandResult {
    match field(call, row, name)? {
        Some(entry) => call.reply_value(&entry),
        None => {
            call.out.null();
            Ok(())
        }
    }
}

pub fn hget(call: &mut Call<'_, '_>) -> CommandResult {
    let row = hash_read(call, call.arg(1))?;
    reply_field(call, row.as_ref(), call.arg(2))
}

pub fn hmget(call: &mut Call<'_, '_>) -> CommandResult {
    let row = hash_read(call, call.arg(1))?;
    call.out.array(call.args.len() - 2);
    for at in 2..call.args.len() {
        if row.is_some() {
            // Where there is no hash nothing is looked up, and its key may be as long as a request.
            call.look_ahead_in(call.arg(1), at, 2, 1);
        }
        reply_field(call, row.as_ref(), call.arg(at))?;
    }
    Ok(())
}

pub fn hdel(call: &mut Call<'_, '_>) -> CommandResult {
    let key = call.arg(1);
    let mut removed = 0;
    if let Some(mut row) = hash(call, key)? {
        if !call.in_batch && call.args.len() == 3 && row.length > 1 {
            // One entry, and the hash stays: no batch.
            let gone = call.store.delete_field(call.database, key, &mut row, call.arg(2))?;
            if gone {
                call.store.put_head(call.database, key, &row)?;
            }
            call.out.integer(i64::from(gone));
            return Ok(());
        }
        if !call.in_batch {
            let fields = (2..call.args.len()).map(|at| call.args.get(at).len());
            let bytes = fields.map(|length| Store::field_bytes(key.len(), length, 0)).sum::<u64>();
            call.store.reserve_removal(bytes + Store::head_bytes(key.len()))?;
        }
        call.atomically(|call| {
            for at in 2..call.args.len() {
                call.look_ahead_in(key, at, 2, 1);
                let name = call.arg(at);
                let gone = call.store.delete_field(call.database, key, &mut row, name)?;
                removed += i64::from(gone);
            }
            if removed > 0 {
                call.store.put_head(call.database, key, &row)?;
            }
            Ok(())
        })?;
    }
    call.out.integer(removed);
    Ok(())
}

pub fn hlen(call: &mut Call<'_, '_>) -> CommandResult {
    let row = hash_read(call, call.arg(1))?;
    call.out.integer(row.map_or(0, |row| row.length as i64));
    Ok(())
}

pub fn hexists(call: &mut Call<'_, '_>) -> CommandResult {
    let row = hash_read(call, call.arg(1))?;
    let found = field(call, row.as_ref(), call.arg(2))?.is_some();
    call.out.integer(i64::from(found));
    Ok(())
}

pub fn hstrlen(call: &mut Call<'_, '_>) -> CommandResult {
    let row = hash_read(call, call.arg(1))?;
    let found = field(call, row.as_ref(), call.arg(2))?;
    call.out.integer(found.map_or(0, |entry| i64::from(entry.value_length)));
    Ok(())
}

/// Replies with names, values, or both.
fn all(call: &mut Call<'_, '_>, names: bool, values: bool) -> CommandResult {
    let key = call.arg(1);
    let row = hash_read(call, key)?;
    let start = call.out.len();
    let mut fields = 0;
    if let Some(row) = row {
        let out = &mut *call.out;
        call.store.visit_row(call.database, key, &row, (0, usize::MAX), |field, value| {
            if names {
                out.bulk(field);
            }
            if values {
                out.bulk(value);
            }
            fields += 1;
        })?;
    }
    if names && values {
        call.out.map_from(start, fields);
    } else {
        call.out.array_from(start, fields);
    }
    Ok(())
}

pub fn hgetall(call: &mut Call<'_, '_>) -> CommandResult {
    all(call, true, true)
}

pub fn hkeys(call: &mut Call<'_, '_>) -> CommandResult {
    all(call, true, false)
}

pub fn hvals(call: &mut Call<'_, '_>) -> CommandResult {
    all(call, false, true)
}

pub fn hincrby(call: &mut Call<'_, '_>) -> CommandResult {
    let increment = call.integer(3)?;
    let row = hash(call, call.arg(1))?;
    let old = match field(call, row.as_ref(), call.arg(2))? {
        Some(entry) => call.store.with_value(&entry, parse_i64)?.ok_or(NOT_AN_INTEGER)?,
        None => 0,
    };
    let new = old.checked_add(increment).ok_or(CommandError::Overflow)?;
    let text = Decimal::signed(new);
    store_one(call, row, call.arg(2), text.as_bytes())?;
    call.out.integer(new);
    Ok(())
}

pub fn hincrbyfloat(call: &mut Call<'_, '_>) -> CommandResult {
    let increment = Extended::parse(call.arg(3)).ok_or(CommandError::NotAFloat)?;
    if Extended::ZERO.checked_add(increment).is_none() {
        return Err(CommandError::Line("ERR value is NaN or Infinity"));
    }
    let row = hash(call, call.arg(1))?;
    let old = match field(call, row.as_ref(), call.arg(2))? {
        Some(entry) => call.store.with_value(&entry, Extended::parse)?.ok_or(NOT_A_FLOAT)?,
        None => Extended::ZERO,
    };
    let new = old.checked_add(increment).ok_or(CommandError::NotFinite)?;
    let mut text = Vec::new();
    new.write_to(&mut text);
    store_one(call, row, call.arg(2), &text)?;
    call.out.bulk(&text);
    Ok(())
}

/// How a field that was chosen at random is written.
#[derive(Clone, Copy)]
struct Chosen {
    values: bool,
    /// A pair is an array of its own.
    apart: bool,
}

impl Chosen {
    fn write(self, out: &mut Output, field: &[u8], value: &[u8]) {
        if self.values && self.apart {
            out.array(2);
        }
        out.bulk(field);
        if self.values {
            out.bulk(value);
        }
    }
}

/// Calls `visit` with a field somewhere in a hash that has one; false when it met none.
fn random_field(
    call: &mut Call<'_, '_>,
    key: &[u8],
    row: &Row,
    mut visit: impl FnMut(&mut Output, &[u8], &[u8]),
) -> Result<bool, CommandError> {
    let start = call.store.random() >> 16;
    for position in [start, 0] {
        let mut met = false;
        let out = &mut *call.out;
        call.store.visit_row(call.database, key, row, (position, 1), |field, value| {
            if !std::mem::replace(&mut met, true) {
                visit(out, field, value);
            }
        })?;
        if met {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Writes `count` fields, the same one perhaps more than once; how many. Ends early where the reply
/// passes its limit: the door answers with an error then.
fn repeated(
    call: &mut Call<'_, '_>,
    (key, row): (&[u8], &Row),
    count: u64,
    chosen: Chosen,
) -> Result<usize, CommandError> {
    if count > REPEATED {
        return Err(CommandError::OutOfRange);
    }
    let mut written = 0;
    while written < count && !call.out.is_over_limit() {
        let met = random_field(call, key, row, |out, field, value| {
            chosen.write(out, field, value);
        })?;
        if !met {
            break;
        }
        written += 1;
    }
    Ok(written as usize)
}

/// Writes `count` different fields, or all there are; how many.
fn distinct(
    call: &mut Call<'_, '_>,
    (key, row): (&[u8], &Row),
    count: u64,
    chosen: Chosen,
) -> Result<usize, CommandError> {
    let mut written = 0;
    if count > FEW || count.saturating_mul(3) >= row.length {
        // In one pass over the hash: each field is taken with the chance that leaves as many as are
        // still wanted of those to come.
        let mut random = SplitMix(call.store.random());
        let (mut wanted, mut left) = (count, row.length);
        let out = &mut *call.out;
        call.store.visit_row(call.database, key, row, (0, usize::MAX), |field, value| {
            if wanted > 0 && random.next() % left.max(1) < wanted {
                wanted -= 1;
                written += 1;
                chosen.write(out, field, value);
            }
            left = left.saturating_sub(1);
        })?;
        return Ok(written);
    }
    let mut known = HashSet::new();
    // A third of the fields at most is wanted, so few tries meet a known one; the bound is for a
    // head that counts more fields than there are.
    for _ in 0..count.saturating_mul(64) {
        if known.len() as u64 == count {
            break;
        }
        let met = random_field(call, key, row, |out, field, value| {
            if known.insert(field.to_vec()) {
                chosen.write(out, field, value);
            }
        })?;
        if !met {
            break;
        }
    }
    Ok(known.len())
}

/// Numbers to choose with, not for secrets.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}

pub fn hrandfield(call: &mut Call<'_, '_>) -> CommandResult {
    let key = call.arg(1);
    if call.args.len() == 2 {
        let row = hash_read(call, key)?;
        let met = match row {
            Some(row) => random_field(call, key, &row, |out, field, _| out.bulk(field))?,
            None => false,
        };
        if !met {
            call.out.null();
        }
        return Ok(());
    }
    let count = call.integer(2)?;
    let values = call.args.len() == 4 && call.args.is(3, "withvalues");
    if call.args.len() > 4 || (call.args.len() == 4 && !values) {
        return Err(CommandError::Syntax);
    }
    if values && !(-(i64::MAX / 2)..=i64::MAX / 2).contains(&count) {
        return Err(CommandError::Line("ERR value is out of range"));
    }
    let apart = call.out.version() == crate::output::Version::Resp3;
    let chosen = Chosen { values, apart };
    let start = call.out.len();
    let wanted = count.unsigned_abs();
    let written = match hash_read(call, key)? {
        Some(row) if count < 0 => repeated(call, (key, &row), wanted, chosen)?,
        Some(row) if count > 0 => distinct(call, (key, &row), wanted, chosen)?,
        _ => 0,
    };
    let flat = values && !apart;
    call.out.array_from(start, written * if flat { 2 } else { 1 });
    Ok(())
}

pub fn hscan(call: &mut Call<'_, '_>) -> CommandResult {
    let cursor =
        super::keyspace_wide::parse_cursor(call.arg(2)).ok_or(CommandError::InvalidCursor)?;
    let key = call.arg(1);
    let mut pattern = Glob::new(b"*");
    let mut count = 10;
    let mut at = 3;
    let row = hash_read(call, key)?;
    while at < call.args.len() {
        if at + 1 == call.args.len() {
            return Err(CommandError::Syntax);
        }
        if call.args.is(at, "count") {
            count = call.integer(at + 1)?;
            if count < 1 {
                return Err(CommandError::Syntax);
            }
        } else if call.args.is(at, "match") {
            pattern = Glob::new(call.arg(at + 1));
        } else {
            return Err(CommandError::Syntax);
        }
        at += 2;
    }
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let start = call.out.len();
    let (mut words, mut next) = (0, None);
    if let Some(row) = row.filter(|_| cursor >> 48 == 0) {
        let out = &mut *call.out;
        let from = (cursor, count);
        next = call.store.visit_row(call.database, key, &row, from, |field, value| {
            if pattern.matches(field) {
                out.bulk(field);
                out.bulk(value);
                words += 2;
            }
        })?;
    }
    call.out.array_from(start, words);
    // The cursor stands in front of the fields and is known after them.
    let cursor = Decimal::unsigned(next.unwrap_or(0));
    let mut head = crate::Output::new(call.out.version());
    head.array(2);
    head.bulk(cursor.as_bytes());
    call.out.insert(start, head.as_bytes());
    Ok(())
}

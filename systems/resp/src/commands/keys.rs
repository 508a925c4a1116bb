//! Keys whatever their value.

use beeline_kv::PutOptions;
use beeline_kv::entry::slot_bytes_for;

use super::{Call, CommandResult, KIND_HASH, type_name};
use crate::error::CommandError;

pub fn del(call: &mut Call<'_, '_>) -> CommandResult {
    let mut removed = 0;
    if call.args.len() == 2 {
        removed += i64::from(call.delete(call.arg(1))?);
    } else {
        call.atomically(|call| {
            for index in 1..call.args.len() {
                call.look_ahead(index, 1, 1);
                removed += i64::from(call.delete(call.arg(index))?);
            }
            Ok(())
        })?;
    }
    call.out.integer(removed);
    Ok(())
}

pub fn exists(call: &mut Call<'_, '_>) -> CommandResult {
    let mut found = 0;
    for index in 1..call.args.len() {
        call.look_ahead(index, 1, 1);
        found += i64::from(call.peek_read(call.arg(index))?.is_some());
    }
    call.out.integer(found);
    Ok(())
}

pub fn touch(call: &mut Call<'_, '_>) -> CommandResult {
    // The one command that CLIENT NO-TOUCH leaves as it is.
    call.touch = true;
    let mut found = 0;
    for index in 1..call.args.len() {
        call.look_ahead(index, 1, 1);
        found += i64::from(call.lookup_read(call.arg(index))?.is_some());
    }
    call.out.integer(found);
    Ok(())
}

pub fn type_of(call: &mut Call<'_, '_>) -> CommandResult {
    let entry = call.peek_read(call.arg(1))?;
    call.out.simple(entry.map_or("none", |entry| type_name(entry.kind)));
    Ok(())
}

/// Copies an existing key's value, kind and expiry to another key or database.
///
/// Looks the source up itself: an entry found earlier need not be good after other look-ups.
fn duplicate(call: &mut Call<'_, '_>, from: &[u8], database: u8, key: &[u8]) -> CommandResult {
    let entry = call.lookup(from)?.ok_or(CommandError::NoSuchKey)?;
    if entry.kind == KIND_HASH {
        let row = call.store.row_at(call.database, &entry)?;
        let source = (call.database, from);
        return call.atomically(|call| Ok(call.store.copy_row(source, &row, (database, key))?));
    }
    call.read_to_scratch(&entry)?;
    let options = PutOptions { kind: entry.kind, expires_at_ms: entry.expires_at_ms };
    call.store.put(database, key, &[&call.scratch.value], options)?;
    Ok(())
}

/// Makes room for moving a key, so that not only half of it finds some. A hash's fields are
/// reserved with their copies.
fn reserve_move(call: &mut Call<'_, '_>, from: &[u8], to: &[u8], length: u32) -> CommandResult {
    if call.in_batch {
        return Ok(());
    }
    let bytes = slot_bytes_for(to.len(), length as usize) + slot_bytes_for(from.len(), 0);
    Ok(call.store.reserve_bytes(bytes)?)
}

/// Renames; whether it was done.
fn rename_generic(call: &mut Call<'_, '_>, only_new: bool) -> Result<bool, CommandError> {
    let (from, to) = (call.arg(1), call.arg(2));
    let entry = call.lookup(from)?.ok_or(CommandError::NoSuchKey)?;
    if from == to {
        return Ok(!only_new);
    }
    if only_new && call.lookup(to)?.is_some() {
        return Ok(false);
    }
    reserve_move(call, from, to, entry.value_length)?;
    call.atomically(|call| {
        duplicate(call, from, call.database, to)?;
        call.delete(from)?;
        Ok(())
    })?;
    Ok(true)
}

pub fn rename(call: &mut Call<'_, '_>) -> CommandResult {
    rename_generic(call, false)?;
    call.out.ok();
    Ok(())
}

pub fn renamenx(call: &mut Call<'_, '_>) -> CommandResult {
    let renamed = rename_generic(call, true)?;
    call.out.integer(i64::from(renamed));
    Ok(())
}

pub fn copy(call: &mut Call<'_, '_>) -> CommandResult {
    let mut database = call.database;
    let mut replace = false;
    let mut at = 3;
    while at < call.args.len() {
        if call.args.is(at, "replace") {
            replace = true;
        } else if call.args.is(at, "db") && at + 1 < call.args.len() {
            at += 1;
            database = call.database_at(at)?;
        } else {
            return Err(CommandError::Syntax);
        }
        at += 1;
    }
    let (from, to) = (call.arg(1), call.arg(2));
    if database == call.database && from == to {
        return Err(CommandError::SameObject);
    }
    if call.lookup_read(from)?.is_none() {
        call.out.integer(0);
        return Ok(());
    }
    let free = replace || call.store.lookup(database, to)?.is_none();
    if free {
        duplicate(call, from, database, to)?;
    }
    call.out.integer(i64::from(free));
    Ok(())
}

pub fn move_key(call: &mut Call<'_, '_>) -> CommandResult {
    let database = call.database_at(2)?;
    let key = call.arg(1);
    if database == call.database {
        return Err(CommandError::SameObject);
    }
    let entry = call.lookup(key)?;
    let movable = entry.filter(|_| matches!(call.store.peek(database, key), Ok(None)));
    let Some(entry) = movable else {
        call.out.integer(0);
        return Ok(());
    };
    reserve_move(call, key, key, entry.value_length)?;
    call.atomically(|call| {
        duplicate(call, key, database, key)?;
        call.delete(key)?;
        Ok(())
    })?;
    call.out.integer(1);
    Ok(())
}

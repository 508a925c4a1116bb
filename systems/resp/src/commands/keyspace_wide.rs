//! Commands over a whole database, or all of them.

use super::{Call, CommandResult, type_name};
use crate::error::CommandError;
use crate::glob::Glob;
use crate::number::Decimal;

pub fn dbsize(call: &mut Call<'_, '_>) -> CommandResult {
    let keys = call.store.len(call.database);
    call.out.integer(i64::try_from(keys).unwrap_or(i64::MAX));
    Ok(())
}

fn flush(call: &mut Call<'_, '_>, database: Option<u8>) -> CommandResult {
    // Removing every key takes constant time either way: SYNC and ASYNC mean the same here.
    let valid = match call.args.len() {
        1 => true,
        2 => call.args.is(1, "sync") || call.args.is(1, "async"),
        _ => false,
    };
    if !valid {
        return Err(CommandError::Syntax);
    }
    call.server.absent_watches().flush(call.store, database)?;
    call.out.ok();
    Ok(())
}

pub fn flushdb(call: &mut Call<'_, '_>) -> CommandResult {
    flush(call, Some(call.database))
}

pub fn flushall(call: &mut Call<'_, '_>) -> CommandResult {
    flush(call, None)
}

pub fn keys(call: &mut Call<'_, '_>) -> CommandResult {
    let pattern = Glob::new(call.arg(1));
    if let Some(key) = pattern.literal() {
        // One key can match: no need to look at the others.
        let found = call.lookup(key)?.is_some();
        call.out.array(usize::from(found));
        if found {
            call.out.bulk(key);
        }
        return Ok(());
    }
    let start = call.out.len();
    let mut found = 0;
    let mut cursor = 0;
    loop {
        let out = &mut *call.out;
        cursor = call.store.scan(call.database, cursor, 1024, |key, _| {
            if pattern.matches(key) {
                out.bulk(key);
                found += 1;
            }
        })?;
        if cursor == 0 {
            break;
        }
    }
    call.out.array_from(start, found);
    Ok(())
}

/// The cursor in a SCAN request.
pub(crate) fn parse_cursor(text: &[u8]) -> Option<u64> {
    crate::number::parse_u64_lax(text)
}

pub fn scan(call: &mut Call<'_, '_>) -> CommandResult {
    let cursor = parse_cursor(call.arg(1)).ok_or(CommandError::InvalidCursor)?;
    let mut pattern = Glob::new(b"*");
    let mut count = 10;
    let mut wanted: Option<&[u8]> = None;
    let mut at = 2;
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
        } else if call.args.is(at, "type") {
            wanted = Some(call.arg(at + 1));
        } else {
            return Err(CommandError::Syntax);
        }
        at += 2;
    }
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    let start = call.out.len();
    let mut found = 0;
    let out = &mut *call.out;
    let next = call.store.scan(call.database, cursor, count, |key, kind| {
        let typed =
            wanted.is_none_or(|wanted| wanted.eq_ignore_ascii_case(type_name(kind).as_bytes()));
        if typed && pattern.matches(key) {
            out.bulk(key);
            found += 1;
        }
    })?;
    call.out.array_from(start, found);
    // The cursor stands in front of the keys and is known after them.
    let mut head = crate::Output::new(call.out.version());
    head.array(2);
    head.bulk(Decimal::unsigned(next).as_bytes());
    call.out.insert(start, head.as_bytes());
    Ok(())
}

pub fn randomkey(call: &mut Call<'_, '_>) -> CommandResult {
    if call.store.random_key(call.database, &mut call.scratch.value)? {
        call.out.bulk(&call.scratch.value);
    } else {
        call.out.null();
    }
    Ok(())
}

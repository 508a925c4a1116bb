//! Strings.

use beeline_kv::{KvError, entry};

use super::{Call, CommandResult, Expiry};
use crate::error::CommandError;
use crate::extended::Extended;
use crate::number::{Decimal, parse_i64};
use crate::table::counted_keys;

/// Units and origin of a time of expiry, as an option names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimeForm {
    Seconds,
    Milliseconds,
    AtSeconds,
    AtMilliseconds,
}

impl TimeForm {
    fn from_option(option: &[u8]) -> Option<Self> {
        match option {
            [b'e' | b'E', b'x' | b'X'] => Some(Self::Seconds),
            [b'p' | b'P', b'x' | b'X'] => Some(Self::Milliseconds),
            _ if option.eq_ignore_ascii_case(b"exat") => Some(Self::AtSeconds),
            _ if option.eq_ignore_ascii_case(b"pxat") => Some(Self::AtMilliseconds),
            _ => None,
        }
    }
}

/// The command that options are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Set,
    GetEx,
    MSetEx,
}

/// Options of SET, GETEX and MSETEX.
#[derive(Clone, Copy, Debug, Default)]
struct Options {
    only_new: bool,
    only_existing: bool,
    get: bool,
    keep_expiry: bool,
    persist: bool,
    /// Form of the time, and the index of its argument.
    time: Option<(TimeForm, usize)>,
}

impl Options {
    fn parse(call: &Call<'_, '_>, first: usize, of: Of) -> Result<Self, CommandError> {
        let stores = of != Of::GetEx;
        let mut options = Self::default();
        let mut at = first;
        while at < call.args.len() {
            let option = call.arg(at);
            if let Some(form) = TimeForm::from_option(option) {
                let conflict = options.keep_expiry
                    || options.persist
                    || options.time.is_some_and(|(other, _)| other != form);
                at += 1;
                if conflict || at == call.args.len() {
                    return Err(CommandError::Syntax);
                }
                options.time = Some((form, at));
            } else if stores && option.eq_ignore_ascii_case(b"nx") && !options.only_existing {
                options.only_new = true;
            } else if stores && option.eq_ignore_ascii_case(b"xx") && !options.only_new {
                options.only_existing = true;
            } else if of == Of::Set && option.eq_ignore_ascii_case(b"get") {
                options.get = true;
            } else if stores && option.eq_ignore_ascii_case(b"keepttl") && options.time.is_none() {
                options.keep_expiry = true;
            } else if !stores && option.eq_ignore_ascii_case(b"persist") && options.time.is_none() {
                options.persist = true;
            } else {
                return Err(CommandError::Syntax);
            }
            at += 1;
        }
        Ok(options)
    }

    fn expires_at(&self, call: &Call<'_, '_>) -> Result<Option<u64>, CommandError> {
        self.time.map(|(form, index)| expires_at(call, form, index)).transpose()
    }
}

/// The time of expiry in Unix milliseconds that argument `index` means.
fn expires_at(call: &Call<'_, '_>, form: TimeForm, index: usize) -> Result<u64, CommandError> {
    let invalid = CommandError::InvalidExpire { command: call.command.name };
    let number = call.integer(index)?;
    let scaled = match form {
        TimeForm::Seconds | TimeForm::AtSeconds => number.checked_mul(1000),
        TimeForm::Milliseconds | TimeForm::AtMilliseconds => Some(number),
    };
    let Some(scaled) = scaled.filter(|&scaled| scaled > 0) else { return Err(invalid) };
    let base = match form {
        TimeForm::Seconds | TimeForm::Milliseconds => call.now_ms() as i64,
        TimeForm::AtSeconds | TimeForm::AtMilliseconds => 0,
    };
    let at = scaled.checked_add(base).ok_or(invalid)?;
    Ok(at.unsigned_abs())
}

pub fn get(call: &mut Call<'_, '_>) -> CommandResult {
    match call.lookup_string_read(call.arg(1))? {
        Some(entry) => call.reply_value(&entry),
        None => {
            call.out.null();
            Ok(())
        }
    }
}

pub fn set(call: &mut Call<'_, '_>) -> CommandResult {
    let (key, value) = (call.arg(1), call.arg(2));
    if call.args.len() == 3 {
        call.put(key, &[value], Expiry::Never)?;
        call.out.ok();
        return Ok(());
    }
    let options = Options::parse(call, 3, Of::Set)?;
    let expires_at = options.expires_at(call)?;
    let needs_old = options.get || options.only_new || options.only_existing || options.keep_expiry;
    let old = if needs_old { call.lookup(key)? } else { None };
    if options.get {
        // Reading counts, and another type is an error, as for GET.
        get(call)?;
    }
    if options.only_new && old.is_some() || options.only_existing && old.is_none() {
        if !options.get {
            call.out.null();
        }
        return Ok(());
    }
    let expiry = match (expires_at, &old) {
        (Some(at), _) => Expiry::At(at),
        (None, Some(old)) if options.keep_expiry => Expiry::of(old),
        _ => Expiry::Never,
    };
    call.put(key, &[value], expiry)?;
    if !options.get {
        call.out.ok();
    }
    Ok(())
}

pub fn setnx(call: &mut Call<'_, '_>) -> CommandResult {
    let free = call.lookup(call.arg(1))?.is_none();
    if free {
        call.put(call.arg(1), &[call.arg(2)], Expiry::Never)?;
    }
    call.out.integer(i64::from(free));
    Ok(())
}

fn set_with_time(call: &mut Call<'_, '_>, form: TimeForm) -> CommandResult {
    let at = expires_at(call, form, 2)?;
    call.put(call.arg(1), &[call.arg(3)], Expiry::At(at))?;
    call.out.ok();
    Ok(())
}

pub fn setex(call: &mut Call<'_, '_>) -> CommandResult {
    set_with_time(call, TimeForm::Seconds)
}

pub fn psetex(call: &mut Call<'_, '_>) -> CommandResult {
    set_with_time(call, TimeForm::Milliseconds)
}

pub fn getset(call: &mut Call<'_, '_>) -> CommandResult {
    get(call)?;
    call.put(call.arg(1), &[call.arg(2)], Expiry::Never)
}

pub fn getdel(call: &mut Call<'_, '_>) -> CommandResult {
    match call.lookup_string_read(call.arg(1))? {
        Some(entry) => {
            call.reply_value(&entry)?;
            call.delete(call.arg(1))?;
        }
        None => call.out.null(),
    }
    Ok(())
}

pub fn getex(call: &mut Call<'_, '_>) -> CommandResult {
    let options = Options::parse(call, 2, Of::GetEx)?;
    let key = call.arg(1);
    let Some(entry) = call.lookup_string_read(key)? else {
        call.out.null();
        return Ok(());
    };
    let expires_at = options.expires_at(call)?;
    call.reply_value(&entry)?;
    match expires_at {
        Some(at) if at <= call.now_ms() => {
            call.delete(key)?;
        }
        Some(at) => super::expiry::change(call, key, &entry, Expiry::At(at))?,
        None if options.persist && entry.expires_at_ms != 0 => {
            super::expiry::change(call, key, &entry, Expiry::Never)?;
        }
        None => {}
    }
    Ok(())
}

pub fn mget(call: &mut Call<'_, '_>) -> CommandResult {
    call.out.array(call.args.len() - 1);
    for index in 1..call.args.len() {
        call.look_ahead(index, 1, 1);
        match call.lookup_read(call.arg(index))? {
            Some(entry) if entry.kind == super::KIND_STRING => call.reply_value(&entry)?,
            _ => call.out.null(),
        }
    }
    Ok(())
}

fn need_pairs(call: &Call<'_, '_>) -> CommandResult {
    if call.args.len().is_multiple_of(2) {
        return Err(CommandError::Arity { command: call.command.name });
    }
    Ok(())
}

/// Keys with the value behind each, by the indexes of their arguments.
type Pairs = std::iter::StepBy<std::ops::Range<usize>>;

/// All arguments behind the command's name.
fn all_pairs(call: &Call<'_, '_>) -> Pairs {
    (1..call.args.len()).step_by(2)
}

/// Checks limits before the first pair is stored, so that a refusal leaves nothing behind.
fn check_pairs(call: &Call<'_, '_>, pairs: Pairs) -> CommandResult {
    let limit = call.store.store().value_limit(0) as u64;
    let mut length = 0;
    for index in pairs {
        let (key, value) = (call.arg(index), call.arg(index + 1));
        if key.len() > entry::KEY_LIMIT {
            let (length, limit) = (key.len(), entry::KEY_LIMIT);
            return Err(KvError::KeyTooLong { length, limit }.into());
        }
        length += entry::slot_bytes_for(key.len(), value.len());
    }
    if length > limit { Err(KvError::BatchTooLarge { length, limit }.into()) } else { Ok(()) }
}

/// Stores all pairs or none. `expiry` is asked for each key before its value is stored.
fn put_pairs(
    call: &mut Call<'_, '_>,
    pairs: Pairs,
    expiry: impl Fn(&mut Call<'_, '_>, &[u8]) -> Result<Expiry, CommandError>,
) -> CommandResult {
    check_pairs(call, pairs.clone())?;
    let first = pairs.clone().next().unwrap_or(1);
    // All or none, also where room is short. A transaction has made room for all it writes.
    if !call.in_batch {
        let args = call.args;
        let lengths = |at: usize| (args.get(at).len(), args.get(at + 1).len());
        call.store.reserve(pairs.clone().map(lengths))?;
    }
    call.atomically(|call| {
        for index in pairs {
            call.look_ahead(index, first, 2);
            let key = call.arg(index);
            let expiry = expiry(call, key)?;
            call.put(key, &[call.arg(index + 1)], expiry)?;
        }
        Ok(())
    })
}

/// Whether every key of `pairs` is there, or every key is absent.
fn all_are(call: &mut Call<'_, '_>, pairs: Pairs, there: bool) -> Result<bool, CommandError> {
    let first = pairs.clone().next().unwrap_or(1);
    for index in pairs {
        call.look_ahead(index, first, 2);
        if call.lookup(call.arg(index))?.is_some() != there {
            return Ok(false);
        }
    }
    Ok(true)
}

pub fn mset(call: &mut Call<'_, '_>) -> CommandResult {
    need_pairs(call)?;
    put_pairs(call, all_pairs(call), |_, _| Ok(Expiry::Never))?;
    call.out.ok();
    Ok(())
}

pub fn msetnx(call: &mut Call<'_, '_>) -> CommandResult {
    need_pairs(call)?;
    let free = all_are(call, all_pairs(call), false)?;
    if free {
        put_pairs(call, all_pairs(call), |_, _| Ok(Expiry::Never))?;
    }
    call.out.integer(i64::from(free));
    Ok(())
}

/// MSETEX keys, key and value so many times, options: Redis has it since 8.4.
pub fn msetex(call: &mut Call<'_, '_>) -> CommandResult {
    if !call.integer(1).is_ok_and(|keys| keys > 0) {
        return Err(CommandError::Line("ERR invalid numkeys value"));
    }
    let Some(keys) = counted_keys(call.args, 1, 2) else {
        return Err(CommandError::Line("ERR wrong number of key-value pairs"));
    };
    let end = 2 + 2 * keys;
    let options = Options::parse(call, end, Of::MSetEx)?;
    let expires_at = options.expires_at(call)?;
    let pairs = (2..end).step_by(2);
    let may = match (options.only_new, options.only_existing) {
        (true, _) => all_are(call, pairs.clone(), false)?,
        (_, true) => all_are(call, pairs.clone(), true)?,
        _ => true,
    };
    if may {
        put_pairs(call, pairs, |call, key| match expires_at {
            Some(at) => Ok(Expiry::At(at)),
            None if options.keep_expiry => {
                Ok(call.lookup(key)?.as_ref().map_or(Expiry::Never, Expiry::of))
            }
            None => Ok(Expiry::Never),
        })?;
    }
    call.out.integer(i64::from(may));
    Ok(())
}

pub fn strlen(call: &mut Call<'_, '_>) -> CommandResult {
    let entry = call.lookup_string_read(call.arg(1))?;
    call.out.integer(entry.map_or(0, |entry| i64::from(entry.value_length)));
    Ok(())
}

/// Checks the length of a string that is to be stored.
fn check_length(call: &Call<'_, '_>, key: &[u8], length: u64) -> CommandResult {
    let limit = call.store.store().value_limit(key.len()) as u64;
    if length > limit { Err(CommandError::StringTooLong) } else { Ok(()) }
}

pub fn append(call: &mut Call<'_, '_>) -> CommandResult {
    let (key, tail) = (call.arg(1), call.arg(2));
    let length = match call.lookup_string(key)? {
        None => {
            call.put(key, &[tail], Expiry::Never)?;
            tail.len() as u64
        }
        Some(entry) => {
            let length = u64::from(entry.value_length) + tail.len() as u64;
            check_length(call, key, length)?;
            // Stored anew even where nothing is added: a transaction that watches the key sees it.
            call.read_to_scratch(&entry)?;
            call.scratch.value.extend_from_slice(tail);
            put_scratch(call, key, Expiry::of(&entry))?;
            length
        }
    };
    call.out.integer(length as i64);
    Ok(())
}

/// Stores the scratch memory as the value of a key.
fn put_scratch(call: &mut Call<'_, '_>, key: &[u8], expiry: Expiry) -> CommandResult {
    let value = std::mem::take(&mut call.scratch.value);
    let stored = call.put(key, &[&value], expiry);
    call.scratch.value = value;
    stored
}

pub fn setrange(call: &mut Call<'_, '_>) -> CommandResult {
    let (key, part) = (call.arg(1), call.arg(3));
    let offset = call.integer(2)?;
    let offset = u64::try_from(offset).map_err(|_| CommandError::OffsetOutOfRange)?;
    let old = call.lookup_string(key)?;
    if part.is_empty() {
        call.out.integer(old.map_or(0, |entry| i64::from(entry.value_length)));
        return Ok(());
    }
    let end = offset.saturating_add(part.len() as u64);
    check_length(call, key, end)?;
    let expiry = match &old {
        Some(entry) => {
            call.read_to_scratch(entry)?;
            Expiry::of(entry)
        }
        None => {
            call.scratch.value.clear();
            Expiry::Never
        }
    };
    let value = &mut call.scratch.value;
    if (value.len() as u64) < end {
        value.resize(end as usize, 0);
    }
    value[offset as usize..end as usize].copy_from_slice(part);
    let length = value.len();
    put_scratch(call, key, expiry)?;
    call.out.count(length);
    Ok(())
}

pub fn getrange(call: &mut Call<'_, '_>) -> CommandResult {
    let (start, end) = (call.integer(2)?, call.integer(3)?);
    let Some(entry) = call.lookup_string_read(call.arg(1))? else {
        call.out.bulk(b"");
        return Ok(());
    };
    let length = i64::from(entry.value_length);
    let from_end = |index: i64| if index < 0 { index.saturating_add(length).max(0) } else { index };
    let (first, last) = (from_end(start), from_end(end).min(length - 1));
    if first > last || length == 0 || (start < 0 && end < 0 && start > end) {
        call.out.bulk(b"");
        return Ok(());
    }
    let out = &mut *call.out;
    call.store.with_value(&entry, |value| out.bulk(&value[first as usize..=last as usize]))?;
    Ok(())
}

/// Adds to the integer a key holds, keeping its expiry.
fn add(call: &mut Call<'_, '_>, increment: i64) -> CommandResult {
    let key = call.arg(1);
    let (old, expiry) = match call.lookup_string(key)? {
        None => (0, Expiry::Never),
        Some(entry) => {
            let number = if entry.value_length <= 20 {
                call.store.with_value(&entry, parse_i64)?
            } else {
                None
            };
            (number.ok_or(CommandError::NotAnInteger)?, Expiry::of(&entry))
        }
    };
    let new = old.checked_add(increment).ok_or(CommandError::Overflow)?;
    call.put(key, &[Decimal::signed(new).as_bytes()], expiry)?;
    call.out.integer(new);
    Ok(())
}

pub fn incr(call: &mut Call<'_, '_>) -> CommandResult {
    add(call, 1)
}

pub fn decr(call: &mut Call<'_, '_>) -> CommandResult {
    add(call, -1)
}

pub fn incrby(call: &mut Call<'_, '_>) -> CommandResult {
    let increment = call.integer(2)?;
    add(call, increment)
}

pub fn decrby(call: &mut Call<'_, '_>) -> CommandResult {
    let decrement = call.integer(2)?;
    add(call, decrement.checked_neg().ok_or(CommandError::DecrementOverflow)?)
}

pub fn incrbyfloat(call: &mut Call<'_, '_>) -> CommandResult {
    let key = call.arg(1);
    let (old, expiry) = match call.lookup_string(key)? {
        None => (Extended::ZERO, Expiry::Never),
        Some(entry) => {
            let number = call.store.with_value(&entry, Extended::parse)?;
            (number.ok_or(CommandError::NotAFloat)?, Expiry::of(&entry))
        }
    };
    let increment = Extended::parse(call.arg(2)).ok_or(CommandError::NotAFloat)?;
    let new = old.checked_add(increment).ok_or(CommandError::NotFinite)?;
    call.scratch.value.clear();
    new.write_to(&mut call.scratch.value);
    put_scratch(call, key, expiry)?;
    call.out.bulk(&call.scratch.value);
    Ok(())
}

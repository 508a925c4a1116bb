//! Times to live.

use beeline_kv::EntryRef;

use super::{Call, CommandResult, Expiry};
use crate::error::CommandError;

/// Conditions under which a time to live is changed.
#[derive(Clone, Copy, Debug, Default)]
struct Conditions {
    without: bool,
    with: bool,
    greater: bool,
    less: bool,
}

impl Conditions {
    fn parse(call: &Call<'_, '_>) -> Result<Self, CommandError> {
        let mut conditions = Self::default();
        for option in call.args.from(3) {
            let field = match option.to_ascii_lowercase().as_slice() {
                b"nx" => &mut conditions.without,
                b"xx" => &mut conditions.with,
                b"gt" => &mut conditions.greater,
                b"lt" => &mut conditions.less,
                _ => {
                    let mut line = b"ERR Unsupported option ".to_vec();
                    line.extend_from_slice(option);
                    return Err(CommandError::Bytes(line));
                }
            };
            *field = true;
        }
        if conditions.without && (conditions.with || conditions.greater || conditions.less) {
            return Err(CommandError::Line(
                "ERR NX and XX, GT or LT options at the same time are not compatible",
            ));
        }
        if conditions.greater && conditions.less {
            return Err(CommandError::Line(
                "ERR GT and LT options at the same time are not compatible",
            ));
        }
        Ok(conditions)
    }

    /// Whether an expiry `now` (0 = none, that is: infinitely late) may become `new`.
    fn allow(self, now: u64, new: i64) -> bool {
        let has = now != 0;
        let now = now as i64;
        !(self.without && has
            || self.with && !has
            || self.greater && (!has || new <= now)
            || self.less && has && new >= now)
    }
}

/// Sets the expiry of an existing key, also where it stays the same: a transaction that watches the key
/// sees it. A large value stays where it is.
pub(super) fn change(
    call: &mut Call<'_, '_>,
    key: &[u8],
    entry: &EntryRef,
    expiry: Expiry,
) -> CommandResult {
    Ok(call.store.change_expiry(call.database, key, entry, expiry.milliseconds())?)
}

fn expire_generic(call: &mut Call<'_, '_>, seconds: bool, relative: bool) -> CommandResult {
    let conditions = Conditions::parse(call)?;
    let number = call.integer(2)?;
    let invalid = CommandError::InvalidExpire { command: call.command.name };
    let now = call.now_ms() as i64;
    let scaled = if seconds { number.checked_mul(1000) } else { Some(number) };
    let base = if relative { now } else { 0 };
    let Some(at) = scaled.and_then(|scaled| scaled.checked_add(base)) else { return Err(invalid) };
    let key = call.arg(1);
    let allowed = call.lookup(key)?.filter(|entry| conditions.allow(entry.expires_at_ms, at));
    let Some(entry) = allowed else {
        call.out.integer(0);
        return Ok(());
    };
    if at <= now {
        call.delete(key)?;
    } else {
        change(call, key, &entry, Expiry::At(at.unsigned_abs()))?;
    }
    call.out.integer(1);
    Ok(())
}

pub fn expire(call: &mut Call<'_, '_>) -> CommandResult {
    expire_generic(call, true, true)
}

pub fn pexpire(call: &mut Call<'_, '_>) -> CommandResult {
    expire_generic(call, false, true)
}

pub fn expireat(call: &mut Call<'_, '_>) -> CommandResult {
    expire_generic(call, true, false)
}

pub fn pexpireat(call: &mut Call<'_, '_>) -> CommandResult {
    expire_generic(call, false, false)
}

fn ttl_generic(call: &mut Call<'_, '_>, seconds: bool, relative: bool) -> CommandResult {
    let reply = match call.peek_read(call.arg(1))? {
        None => -2,
        Some(entry) if entry.expires_at_ms == 0 => -1,
        Some(entry) => {
            let at = entry.expires_at_ms as i64;
            let shown = if relative { (at - call.now_ms() as i64).max(0) } else { at };
            if seconds { shown.saturating_add(500) / 1000 } else { shown }
        }
    };
    call.out.integer(reply);
    Ok(())
}

pub fn ttl(call: &mut Call<'_, '_>) -> CommandResult {
    ttl_generic(call, true, true)
}

pub fn pttl(call: &mut Call<'_, '_>) -> CommandResult {
    ttl_generic(call, false, true)
}

pub fn expiretime(call: &mut Call<'_, '_>) -> CommandResult {
    ttl_generic(call, true, false)
}

pub fn pexpiretime(call: &mut Call<'_, '_>) -> CommandResult {
    ttl_generic(call, false, false)
}

pub fn persist(call: &mut Call<'_, '_>) -> CommandResult {
    let key = call.arg(1);
    let entry = call.lookup(key)?.filter(|entry| entry.expires_at_ms != 0);
    if let Some(entry) = &entry {
        change(call, key, entry, Expiry::Never)?;
    }
    call.out.integer(i64::from(entry.is_some()));
    Ok(())
}

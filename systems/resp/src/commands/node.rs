//! Commands that the node answers: configuration, statistics, snapshots, its end.

use beeline_kv::{DATABASES, EventKind};

use super::{Call, CommandResult};
use crate::error::CommandError;
use crate::glob;
use crate::number::Decimal;
use crate::server::{SaveError, Shutdown};

pub fn time(call: &mut Call<'_, '_>) -> CommandResult {
    let now = call.server.unix_us();
    call.out.array(2);
    call.out.bulk(Decimal::unsigned(now / 1_000_000).as_bytes());
    call.out.bulk(Decimal::unsigned(now % 1_000_000).as_bytes());
    Ok(())
}

pub fn info(call: &mut Call<'_, '_>) -> CommandResult {
    let wanted: Vec<String> =
        call.args.from(1).map(|name| String::from_utf8_lossy(name).to_ascii_lowercase()).collect();
    let named = |names: &[&str]| wanted.iter().any(|name| names.contains(&name.as_str()));
    let whole = named(&["all", "everything"]);
    let usual = whole || wanted.is_empty() || named(&["default"]);
    let mut text = String::new();
    for &section in call.server.info_sections() {
        // As in Redis, long sections are shown to clients that ask for them.
        let long = matches!(section, "commandstats" | "latencystats");
        if !(if long { whole } else { usual } || named(&[section])) {
            continue;
        }
        if !text.is_empty() {
            text.push_str("\r\n");
        }
        text.push_str("# ");
        let mut letters = section.chars();
        text.extend(letters.next().map(|first| first.to_ascii_uppercase()));
        text.push_str(letters.as_str());
        text.push_str("\r\n");
        call.server.info(section, &mut text);
    }
    call.out.verbatim(text.as_bytes());
    Ok(())
}

/// Most changes in one reply.
const CHANGES: i64 = 1000;

/// KV.CHANGES NOW, or a position, and COUNT: the changes behind it, and the position to go on from.
pub fn kv_changes(call: &mut Call<'_, '_>) -> CommandResult {
    let count = match call.args.len() {
        2 => 100,
        4 if call.args.is(2, "count") => call.integer(3)?,
        _ => return Err(CommandError::Syntax),
    };
    if !(1..=CHANGES).contains(&count) {
        return Err(CommandError::OutOfRange);
    }
    let number = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
    let store = std::sync::Arc::clone(call.store.store());
    let changes = if call.args.is(1, "now") {
        store.events_from_now()?
    } else {
        let from = u64::try_from(call.integer(1)?).map_err(|_| CommandError::OutOfRange)?;
        store.events(from, count as usize)?
    };
    // What services keep beside the databases is theirs.
    let told = changes.events.iter().filter(|event| event.namespace < u32::from(DATABASES));
    call.out.array(2);
    call.out.integer(number(changes.next));
    call.out.array(told.clone().count());
    for event in told {
        let (key, field) = event.key_and_field();
        let word = match (event.kind, field) {
            (EventKind::Put { .. }, None) => "set",
            (EventKind::Put { .. }, Some(_)) => "hset",
            (EventKind::Expiry { .. }, _) => "expire",
            (EventKind::Delete, None) => "del",
            (EventKind::Delete, Some(_)) => "hdel",
            _ => "flush",
        };
        call.out.array(if field.is_some() { 6 } else { 5 });
        call.out.integer(number(event.version));
        call.out.integer(i64::from(event.more));
        call.out.integer(i64::from(event.namespace));
        call.out.bulk(word.as_bytes());
        call.out.bulk(key);
        if let Some(field) = field {
            call.out.bulk(field);
        }
    }
    Ok(())
}

pub fn config_get(call: &mut Call<'_, '_>) -> CommandResult {
    let start = call.out.len();
    let mut pairs = 0;
    let (args, out) = (call.args, &mut *call.out);
    call.server.config(&mut |name, value| {
        if args.from(2).any(|pattern| glob::matches(pattern, name.as_bytes(), true)) {
            out.bulk(name.as_bytes());
            out.bulk(value.as_bytes());
            pairs += 1;
        }
    });
    call.out.map_from(start, pairs);
    Ok(())
}

pub fn config_set(call: &mut Call<'_, '_>) -> CommandResult {
    if !call.args.len().is_multiple_of(2) {
        return Err(CommandError::Syntax);
    }
    let text = |index: usize| String::from_utf8_lossy(call.arg(index)).into_owned();
    let mut pairs: Vec<(String, String)> = Vec::new();
    for index in (2..call.args.len()).step_by(2) {
        let name = text(index);
        if pairs.iter().any(|(known, _)| known.eq_ignore_ascii_case(&name)) {
            return Err(CommandError::text(format!(
                "ERR CONFIG SET failed (possibly related to argument '{name}') - duplicate parameter"
            )));
        }
        pairs.push((name, text(index + 1)));
    }
    call.server.config_set(&pairs).map_err(|error| CommandError::text(error.line()))?;
    call.out.ok();
    Ok(())
}

pub fn config_rewrite(call: &mut Call<'_, '_>) -> CommandResult {
    call.server.config_rewrite().map_err(|text| CommandError::text(format!("ERR {text}")))?;
    call.out.ok();
    Ok(())
}

pub fn config_resetstat(call: &mut Call<'_, '_>) -> CommandResult {
    call.server.reset_statistics();
    *call.counters = super::Counters::default();
    call.out.ok();
    Ok(())
}

pub fn config_help(call: &mut Call<'_, '_>) -> CommandResult {
    super::introspection::help(
        call,
        "CONFIG",
        &[
            ("GET <pattern> [<pattern> ...]", "Return parameters whose names match."),
            ("SET <name> <value> [<name> <value> ...]", "Change parameters, all or none."),
            ("RESETSTAT", "Set the statistics shown by INFO to zero."),
            ("REWRITE", "Write the configuration to its file."),
        ],
    )
}

fn save_error(error: &SaveError) -> CommandError {
    CommandError::text(format!("ERR {error}"))
}

pub fn save(call: &mut Call<'_, '_>) -> CommandResult {
    call.server.save().map_err(|error| save_error(&error))?;
    call.out.ok();
    Ok(())
}

pub fn bgsave(call: &mut Call<'_, '_>) -> CommandResult {
    let schedule = match call.args.len() {
        1 => false,
        2 if call.args.is(1, "schedule") => true,
        _ => return Err(CommandError::Syntax),
    };
    let scheduled = call.server.save_in_background(schedule).map_err(|error| save_error(&error))?;
    call.out.simple(if scheduled {
        "Background saving scheduled"
    } else {
        "Background saving started"
    });
    Ok(())
}

pub fn lastsave(call: &mut Call<'_, '_>) -> CommandResult {
    let seconds = call.server.last_save_seconds();
    call.out.integer(i64::try_from(seconds).unwrap_or(i64::MAX));
    Ok(())
}

pub fn shutdown(call: &mut Call<'_, '_>) -> CommandResult {
    let mut request = Shutdown::default();
    let mut abort = false;
    for index in 1..call.args.len() {
        if call.args.is(index, "nosave") && request.save != Some(true) {
            request.save = Some(false);
        } else if call.args.is(index, "save") && request.save != Some(false) {
            request.save = Some(true);
        } else if call.args.is(index, "now") {
            request.now = true;
        } else if call.args.is(index, "force") {
            request.force = true;
        } else if call.args.is(index, "abort") {
            abort = true;
        } else {
            return Err(CommandError::Syntax);
        }
    }
    if abort && request != Shutdown::default() {
        return Err(CommandError::Syntax);
    }
    if abort {
        if !call.server.abort_shutdown() {
            return Err(CommandError::Line("ERR No shutdown in progress."));
        }
        call.out.ok();
        return Ok(());
    }
    // Success has no reply: the connection ends with the node.
    call.server.shutdown(request).map_err(|text| CommandError::text(format!("ERR {text}")))
}

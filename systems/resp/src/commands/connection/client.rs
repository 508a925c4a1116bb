//! CLIENT and its subcommands.

use super::check_printable;
use crate::commands::{Call, CommandResult, introspection};
use crate::error::CommandError;
use crate::number::parse_i64;
use crate::server::{KillFilter, Pause};
use crate::session::{DEFAULT_USER, Replies, Session};

fn quoted(before: &str, word: &[u8]) -> CommandError {
    let mut line = before.as_bytes().to_vec();
    line.push(b'\'');
    line.extend_from_slice(word);
    line.push(b'\'');
    CommandError::Bytes(line)
}

/// Too many arguments for a subcommand that takes a few.
fn wrong_count(call: &Call<'_, '_>) -> CommandError {
    let mut line = b"ERR unknown subcommand or wrong number of arguments for '".to_vec();
    line.extend_from_slice(call.arg(1));
    line.extend_from_slice(b"'. Try CLIENT HELP.");
    CommandError::Bytes(line)
}

fn text(word: &[u8]) -> String {
    String::from_utf8_lossy(word).into_owned()
}

pub fn client_id(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    call.out.integer(session.info.id as i64);
    Ok(())
}

pub fn client_getname(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    if session.info.name.is_empty() {
        call.out.null();
    } else {
        call.out.bulk(&session.info.name);
    }
    Ok(())
}

pub fn client_setname(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    check_printable(call.arg(2), "Client names")?;
    session.info.name = call.arg(2).to_vec();
    call.out.ok();
    Ok(())
}

pub fn client_setinfo(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    let field = if call.args.is(2, "lib-name") {
        &mut session.info.library.0
    } else if call.args.is(2, "lib-ver") {
        &mut session.info.library.1
    } else {
        return Err(quoted("ERR Unrecognized option ", call.arg(2)));
    };
    check_printable(call.arg(3), &text(call.arg(2)))?;
    *field = call.arg(3).to_vec();
    call.out.ok();
    Ok(())
}

pub fn client_info(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    let mut line = Vec::new();
    session.snapshot().write_line(call.server.unix_us(), &mut line);
    line.push(b'\n');
    call.out.verbatim(&line);
    Ok(())
}

/// Types that CLIENT LIST and KILL take; all connections are normal ones.
fn client_kind(word: &[u8]) -> Result<String, CommandError> {
    let kind = text(word).to_ascii_lowercase();
    match kind.as_str() {
        "normal" | "master" | "replica" | "pubsub" => Ok(kind),
        "slave" => Ok("replica".to_owned()),
        _ => Err(quoted("ERR Unknown client type ", word)),
    }
}

pub fn client_list(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    let mut only_ids: Option<Vec<i64>> = None;
    let mut none = false;
    if call.args.len() == 4 && call.args.is(2, "type") {
        none = client_kind(call.arg(3))? != "normal";
    } else if call.args.len() > 3 && call.args.is(2, "id") {
        let ids = call.args.from(3).map(parse_i64).collect::<Option<Vec<_>>>();
        only_ids = Some(ids.ok_or(CommandError::Line("ERR Invalid client ID"))?);
    } else if call.args.len() != 2 {
        return Err(CommandError::Syntax);
    }
    let now = call.server.unix_us();
    let own = session.snapshot();
    let mut lines = Vec::new();
    call.server.clients(&mut |client| {
        let client = if client.id == own.id { &own } else { client };
        let wanted = only_ids.as_ref().is_none_or(|ids| ids.contains(&(client.id as i64)));
        if wanted && !none {
            client.write_line(now, &mut lines);
            lines.push(b'\n');
        }
    });
    call.out.verbatim(&lines);
    Ok(())
}

pub fn client_kill(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    let own = session.info.id;
    let mut filter = KillFilter::default();
    let old_form = call.args.len() == 3;
    if old_form {
        filter.address = Some(text(call.arg(2)));
    } else {
        filter.skip = Some(own);
        parse_kill_filter(call, own, &mut filter)?;
    }
    let killed = call.server.kill_clients(&filter, own);
    if filter.selects(&session.info) {
        session.closing = true;
    }
    if !old_form {
        call.out.count(killed);
    } else if killed == 0 {
        return Err(CommandError::Line("ERR No such client"));
    } else {
        call.out.ok();
    }
    Ok(())
}

fn parse_kill_filter(call: &Call<'_, '_>, own: u64, filter: &mut KillFilter) -> CommandResult {
    for at in (2..call.args.len()).step_by(2) {
        if at + 1 == call.args.len() {
            return Err(CommandError::Syntax);
        }
        let value = call.arg(at + 1);
        if call.args.is(at, "id") {
            let id = parse_i64(value).and_then(|id| u64::try_from(id).ok()).filter(|&id| id > 0);
            let invalid = CommandError::Line("ERR client-id should be greater than 0");
            filter.id = Some(id.ok_or(invalid)?);
        } else if call.args.is(at, "type") {
            filter.kind = Some(client_kind(value)?);
        } else if call.args.is(at, "addr") {
            filter.address = Some(text(value));
        } else if call.args.is(at, "laddr") {
            filter.local_address = Some(text(value));
        } else if call.args.is(at, "user") {
            if value != DEFAULT_USER.as_bytes() {
                return Err(quoted("ERR No such user ", value));
            }
            filter.user = Some(text(value));
        } else if call.args.is(at, "skipme") && call.args.is(at + 1, "yes") {
            filter.skip = Some(own);
        } else if call.args.is(at, "skipme") && call.args.is(at + 1, "no") {
            filter.skip = None;
        } else {
            return Err(CommandError::Syntax);
        }
    }
    Ok(())
}

fn on_or_off(call: &Call<'_, '_>) -> Result<bool, CommandError> {
    if call.args.is(2, "on") {
        Ok(true)
    } else if call.args.is(2, "off") {
        Ok(false)
    } else {
        Err(CommandError::Syntax)
    }
}

pub fn client_no_evict(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    session.info.no_evict = on_or_off(call)?;
    call.out.ok();
    Ok(())
}

pub fn client_no_touch(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    session.info.no_touch = on_or_off(call)?;
    call.out.ok();
    Ok(())
}

pub fn client_reply(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    if call.args.is(2, "on") {
        session.replies = Replies::On;
        call.out.ok();
    } else if call.args.is(2, "off") {
        session.replies = Replies::Off;
    } else if call.args.is(2, "skip") {
        if session.replies != Replies::Off {
            session.replies = Replies::SkipNext;
        }
    } else {
        return Err(CommandError::Syntax);
    }
    Ok(())
}

pub fn client_pause(_: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    let pause = match call.args.len() {
        3 => Pause::All,
        4 if call.args.is(3, "write") => Pause::Writes,
        4 if call.args.is(3, "all") => Pause::All,
        4 => return Err(CommandError::Line("ERR CLIENT PAUSE mode must be WRITE or ALL")),
        _ => return Err(wrong_count(call)),
    };
    let milliseconds = parse_i64(call.arg(2))
        .ok_or(CommandError::Line("ERR timeout is not an integer or out of range"))?;
    let milliseconds =
        u64::try_from(milliseconds).map_err(|_| CommandError::Line("ERR timeout is negative"))?;
    call.server.pause_clients(milliseconds, pause);
    call.out.ok();
    Ok(())
}

pub fn client_unpause(_: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    call.server.unpause_clients();
    call.out.ok();
    Ok(())
}

pub fn client_unblock(_: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    if call.args.len() > 4 {
        return Err(wrong_count(call));
    }
    let reason = call.args.len() == 3 || call.args.is(3, "timeout") || call.args.is(3, "error");
    if !reason {
        return Err(CommandError::Line("ERR CLIENT UNBLOCK reason should be TIMEOUT or ERROR"));
    }
    call.integer(2)?;
    // No command blocks yet, so no client is ever found blocked.
    call.out.integer(0);
    Ok(())
}

pub fn client_help(_: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    introspection::help(
        call,
        "CLIENT",
        &[
            ("GETNAME", "Return the name of the connection."),
            ("ID", "Return the number of the connection."),
            ("INFO", "Describe this connection."),
            ("KILL <ip:port>", "Close the connection from <ip:port>."),
            (
                "KILL <option> <value> [<option> <value> ...]",
                "Close the connections that match ID, TYPE, ADDR, LADDR, USER; SKIPME yes|no.",
            ),
            ("LIST [TYPE <type> | ID <id> [<id> ...]]", "Describe connections."),
            ("NO-EVICT (ON|OFF)", "Exempt the connection from eviction."),
            ("NO-TOUCH (ON|OFF)", "Keep commands from marking keys as used."),
            ("PAUSE <milliseconds> [WRITE|ALL]", "Hold commands back for a while."),
            ("REPLY (ON|OFF|SKIP)", "Switch replies on and off."),
            ("SETINFO (LIB-NAME|LIB-VER) <value>", "Name the client library."),
            ("SETNAME <name>", "Name the connection."),
            ("UNBLOCK <id> [TIMEOUT|ERROR]", "Wake a blocked connection."),
            ("UNPAUSE", "End a pause."),
        ],
    )
}

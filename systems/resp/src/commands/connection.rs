//! Commands about the connection itself.

mod client;

pub use client::*;

use super::{Call, CommandResult};
use crate::error::CommandError;
use crate::output::Version;
use crate::session::{DEFAULT_USER, Replies, Session};

pub fn ping(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    let _ = session;
    match call.args.len() {
        1 => call.out.simple("PONG"),
        2 => call.out.bulk(call.arg(1)),
        _ => return Err(CommandError::Arity { command: "ping" }),
    }
    Ok(())
}

pub fn echo(_: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    call.out.bulk(call.arg(1));
    Ok(())
}

pub fn select(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    session.info.database = call.database_at(1)?;
    call.out.ok();
    Ok(())
}

pub fn readonly(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    allow_stale_reads(session, call, true)
}

pub fn readwrite(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    allow_stale_reads(session, call, false)
}

fn allow_stale_reads(
    session: &mut Session,
    call: &mut Call<'_, '_>,
    allowed: bool,
) -> CommandResult {
    if !call.server.is_replicated() {
        return Err(CommandError::Line("ERR This instance has cluster support disabled"));
    }
    session.stale_reads = allowed;
    call.out.ok();
    Ok(())
}

pub fn quit(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    session.closing = true;
    call.out.ok();
    Ok(())
}

pub fn reset(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    session.stale_reads = false;
    session.transaction.clear();
    session.watched.clear();
    session.replies = Replies::On;
    session.authenticated = !call.server.password_required();
    session.info.database = 0;
    session.info.name.clear();
    session.info.no_evict = false;
    session.info.no_touch = false;
    session.set_version(Version::Resp2, call.out);
    call.out.simple("RESET");
    Ok(())
}

const WRONG_PASSWORD: CommandError =
    CommandError::Line("WRONGPASS invalid username-password pair or user is disabled.");

pub fn auth(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    let (user, password) = match call.args.len() {
        2 if !call.server.password_required() => {
            return Err(CommandError::Line(
                "ERR AUTH <password> called without any password configured for the default \
                 user. Are you sure your configuration is correct?",
            ));
        }
        2 => (DEFAULT_USER.as_bytes(), call.arg(1)),
        3 => (call.arg(1), call.arg(2)),
        _ => return Err(CommandError::Syntax),
    };
    if !call.server.authenticate(user, password) {
        return Err(WRONG_PASSWORD);
    }
    session.authenticated = true;
    call.out.ok();
    Ok(())
}

pub fn hello(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    let version = match call.args.len() {
        1 => None,
        _ => match call.integer(1) {
            Ok(2) => Some(Version::Resp2),
            Ok(3) => Some(Version::Resp3),
            Ok(_) => return Err(CommandError::Line("NOPROTO unsupported protocol version")),
            Err(_) => {
                return Err(CommandError::Line(
                    "ERR Protocol version is not an integer or out of range",
                ));
            }
        },
    };
    let mut credentials = None;
    let mut name = None;
    let mut at = 2;
    while at < call.args.len() {
        let more = call.args.len() - 1 - at;
        if call.args.is(at, "auth") && more >= 2 {
            credentials = Some((call.arg(at + 1), call.arg(at + 2)));
            at += 3;
        } else if call.args.is(at, "setname") && more >= 1 {
            check_printable(call.arg(at + 1), "Client names")?;
            name = Some(call.arg(at + 1));
            at += 2;
        } else {
            let mut line = b"ERR Syntax error in HELLO option '".to_vec();
            line.extend_from_slice(call.arg(at));
            line.push(b'\'');
            return Err(CommandError::Bytes(line));
        }
    }
    if let Some((user, password)) = credentials {
        if !call.server.authenticate(user, password) {
            return Err(WRONG_PASSWORD);
        }
        session.authenticated = true;
    }
    if !session.authenticated {
        return Err(CommandError::Line(
            "NOAUTH HELLO must be called with the client already authenticated, otherwise the \
             HELLO <proto> AUTH <user> <pass> option can be used to authenticate the client and \
             select the RESP protocol version at the same time",
        ));
    }
    if let Some(name) = name {
        session.info.name = name.to_vec();
    }
    if let Some(version) = version {
        session.set_version(version, call.out);
    }
    let out = &mut *call.out;
    out.map(7);
    out.bulk(b"server");
    out.bulk(b"redis");
    out.bulk(b"version");
    out.bulk(call.server.redis_version().as_bytes());
    out.bulk(b"proto");
    out.integer(session.version.number());
    out.bulk(b"id");
    out.integer(session.info.id as i64);
    out.bulk(b"mode");
    out.bulk(b"standalone");
    out.bulk(b"role");
    out.bulk(b"master");
    out.bulk(b"modules");
    out.array(0);
    Ok(())
}

/// Names must print as one word.
fn check_printable(name: &[u8], what: &str) -> CommandResult {
    if name.iter().all(|byte| (b'!'..=b'~').contains(byte)) {
        return Ok(());
    }
    Err(CommandError::text(format!(
        "ERR {what} cannot contain spaces, newlines or special characters."
    )))
}

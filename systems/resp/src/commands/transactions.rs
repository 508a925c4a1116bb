//! MULTI, EXEC and their kin.
//!
//! EXEC runs with every shard locked that its commands and watched keys need, as one atomic batch:
//! after a crash either all of its writes are there or none. As in Redis, a command that fails
//! inside EXEC does not undo the others.

use beeline_kv::KEYS_AHEAD;

use super::{Call, CommandResult};
use crate::error::CommandError;
use crate::session::{Session, Watched};
use crate::table::Handler;

pub fn multi(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    if session.transaction.open {
        return Err(CommandError::Line("ERR MULTI calls can not be nested"));
    }
    session.transaction.open = true;
    call.out.ok();
    Ok(())
}

pub fn discard(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    if !session.transaction.open {
        return Err(CommandError::Line("ERR DISCARD without MULTI"));
    }
    session.transaction.clear();
    session.watched.clear();
    call.out.ok();
    Ok(())
}

pub fn watch(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    if session.transaction.open {
        return Err(CommandError::Line("ERR WATCH inside MULTI is not allowed"));
    }
    for key in call.args.from(1) {
        let database = call.database;
        let known = |watched: &Watched| watched.database == database && watched.key == key;
        if !session.watched.iter().any(known) {
            let version = call.lookup(key)?.map(|entry| entry.version);
            let newest = call.store.store().newest_version();
            session.watched.push(Watched { database, key: key.to_vec(), version, newest });
        }
    }
    call.out.ok();
    Ok(())
}

pub fn unwatch(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    session.watched.clear();
    call.out.ok();
    Ok(())
}

/// Whether every watched key is as it was.
fn unchanged(session: &Session, call: &mut Call<'_, '_>) -> Result<bool, CommandError> {
    for watched in &session.watched {
        let entry = call.store.lookup(watched.database, &watched.key)?;
        if entry.map(|entry| entry.version) != watched.version {
            return Ok(false);
        }
        if entry.is_none() && call.store.deletion(watched.database, &watched.key)? > watched.newest
        {
            // It came and went, or may have: a flush does not tell.
            return Ok(false);
        }
    }
    Ok(true)
}

pub fn exec(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    if !session.transaction.open {
        return Err(CommandError::Line("ERR EXEC without MULTI"));
    }
    let mut transaction = std::mem::take(&mut session.transaction);
    let ready = if transaction.failed {
        Err(CommandError::Line("EXECABORT Transaction discarded because of previous errors."))
    } else {
        unchanged(session, call)
    };
    session.watched.clear();
    let outcome = match ready {
        Err(error) => Err(error),
        Ok(false) => {
            call.out.null_array();
            Ok(())
        }
        Ok(true) => {
            call.out.array(transaction.commands.len());
            let writes =
                transaction.commands.iter().any(|command| command.has(crate::table::flag::WRITE));
            if writes {
                call.store.begin_batch();
            }
            for (index, &command) in transaction.commands.iter().enumerate() {
                if index.is_multiple_of(KEYS_AHEAD) {
                    let queued = index..transaction.commands.len();
                    let keys = queued.map(|index| transaction.requests.get(index).get(1));
                    call.store.expect_keys(session.info.database, keys);
                }
                let mut inner = Call {
                    command,
                    args: transaction.requests.get(index),
                    database: session.info.database,
                    store: call.store,
                    out: call.out,
                    server: call.server,
                    scratch: call.scratch,
                    counters: call.counters,
                    in_batch: writes,
                };
                run(Some(session), &mut inner);
            }
            if writes {
                call.store.end_batch();
            }
            Ok(())
        }
    };
    transaction.clear();
    // Gives the queue's memory back to the session for the next transaction.
    session.transaction = transaction;
    outcome
}

/// Runs one command whose arity and permissions were checked; an error becomes its reply.
pub(crate) fn run(session: Option<&mut Session>, call: &mut Call<'_, '_>) {
    let start = call.out.len();
    call.counters.commands += 1;
    let done = match (call.command.handler, session) {
        (Handler::Data(handler), _) => handler(call),
        (Handler::Session(handler), Some(session)) => handler(session, call),
        (Handler::Session(_) | Handler::None, _) => {
            Err(CommandError::Line("ERR this command needs its connection"))
        }
    };
    if let Err(error) = done {
        call.out.truncate(start);
        call.counters.errors += 1;
        error.write_to(call.out);
    }
}

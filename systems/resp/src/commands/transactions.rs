//! MULTI, EXEC and their kin.
//!
//! EXEC runs with every shard locked that its commands and watched keys need, as one atomic batch:
//! after a crash either all of its writes are there or none. As in Redis, a command that fails
//! inside EXEC does not undo the others; and where there is no room for all that may be written,
//! EXEC is refused before the first command.

use beeline_kv::{KEYS_AHEAD, Version};

use super::{Call, CommandResult, reservation};
use crate::error::CommandError;
use crate::logged::Logged;
use crate::session::{Session, Transaction, Watched};
use crate::table::{self, Command, Found, Handler, flag};

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
            let version = version_of(call, database, key)?;
            let watches = call.server.absent_watches();
            let absent = version.is_none().then(|| watches.watch(call.store, database, key));
            let replicated = call.server.is_replicated();
            let fingerprint = replicated.then(|| fingerprint(call, database, key)).transpose()?;
            let key = key.to_vec();
            session.watched.push(Watched { database, key, version, absent, fingerprint });
        }
    }
    call.out.ok();
    Ok(())
}

/// Version of what a key holds: of its entry, or of a hash's last change. `None`: there is no such key.
fn version_of(
    call: &mut Call<'_, '_>,
    database: u8,
    key: &[u8],
) -> Result<Option<Version>, CommandError> {
    match call.store.lookup(database, key)? {
        Some(entry) if entry.kind == super::KIND_HASH => {
            Ok(Some(call.store.row_at(database, &entry)?.version))
        }
        entry => Ok(entry.map(|entry| entry.changed)),
    }
}

/// What a key holds, in a number that every replica comes to; 0: there is no such key.
pub(crate) fn fingerprint(
    call: &mut Call<'_, '_>,
    database: u8,
    key: &[u8],
) -> Result<u64, CommandError> {
    let Some(entry) = call.store.lookup(database, key)? else { return Ok(0) };
    let seed = entry.expires_at_ms ^ u64::from(entry.kind) << 56;
    if entry.kind == super::KIND_HASH
        && let Some(row) = call.store.row(database, key)?
    {
        // The head's generation is each member's own, and their fields stand in orders of their own.
        let mut sum = seed;
        call.store.visit_row(database, key, &row, (0, usize::MAX), |field, value| {
            let field = xxhash_rust::xxh3::xxh3_64_with_seed(field, seed);
            sum = sum.wrapping_add(xxhash_rust::xxh3::xxh3_64_with_seed(value, field));
        })?;
        return Ok(sum.max(1));
    }
    let hash =
        call.store.with_value(&entry, |value| xxhash_rust::xxh3::xxh3_64_with_seed(value, seed))?;
    Ok(hash.max(1))
}

pub fn unwatch(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    session.watched.clear();
    call.out.ok();
    Ok(())
}

/// Whether every watched key is as it was.
fn unchanged(session: &Session, call: &mut Call<'_, '_>) -> Result<bool, CommandError> {
    for watched in &session.watched {
        let version = version_of(call, watched.database, &watched.key)?;
        if version != watched.version {
            return Ok(false);
        }
        if version.is_none()
            && let Some(absent) = &watched.absent
            && absent.came_and_went(call.store)?
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Makes room for all that a transaction may write.
fn reserve(
    transaction: &Transaction,
    database: u8,
    call: &mut Call<'_, '_>,
) -> Result<(), CommandError> {
    let written = reservation::most_written(transaction, database, call.store)?;
    let reserved = match written {
        reservation::Written { bytes: 0, .. } => Ok(()),
        reservation::Written { bytes, stores: true } => call.store.reserve_bytes(bytes),
        // A full store is emptied by transactions, too.
        reservation::Written { bytes, stores: false } => call.store.reserve_removal(bytes),
    };
    reserved.map_err(|error| aborted(&error.into()))
}

/// Why an EXEC was refused, in Redis' way.
pub(crate) fn aborted(error: &CommandError) -> CommandError {
    let reason = error.to_string();
    let reason = reason.strip_prefix("ERR ").unwrap_or(&reason);
    CommandError::text(format!("EXECABORT Transaction discarded because of: {reason}"))
}

pub fn exec(session: &mut Session, call: &mut Call<'_, '_>) -> CommandResult {
    if !session.transaction.open {
        return Err(CommandError::Line("ERR EXEC without MULTI"));
    }
    let mut transaction = std::mem::take(&mut session.transaction);
    let writes = |command: &&Command| command.has(flag::WRITE);
    let writes = transaction.commands.iter().any(writes);
    let ready = if transaction.failed {
        Err(CommandError::Line("EXECABORT Transaction discarded because of previous errors."))
    } else {
        unchanged(session, call).and_then(|unchanged| {
            if unchanged && writes {
                reserve(&transaction, session.info.database, call)?;
            }
            Ok(unchanged)
        })
    };
    session.watched.clear();
    let outcome = match ready {
        Err(error) => Err(error),
        Ok(false) => {
            call.out.null_array();
            Ok(())
        }
        Ok(true) => {
            if writes {
                call.store.begin_batch();
            }
            run_queued(session, &transaction, call, writes);
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

/// Runs what was queued and writes the array of replies.
pub(crate) fn run_queued(
    session: &mut Session,
    transaction: &Transaction,
    call: &mut Call<'_, '_>,
    in_batch: bool,
) {
    call.out.array(transaction.commands.len());
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
            figures: call.figures,
            touch: call.touch,
            in_batch,
        };
        run(Some(session), &mut inner);
    }
}

/// Runs a transaction of the log: its queue, if every watched key still holds what it held.
pub(crate) fn run_logged(session: &mut Session, request: &Logged, call: &mut Call<'_, '_>) {
    let mut transaction = Transaction::default();
    for index in 0..request.requests.len() {
        let args = request.requests.get(index);
        if let Found::Command(command) = table::resolve(args)
            && command.takes(args.len())
            && transaction.requests.push(args)
        {
            transaction.commands.push(command);
        } else {
            return CommandError::Line("EXECABORT unknown command in the log").write_to(call.out);
        }
    }
    for (database, key, wanted) in &request.watched {
        match fingerprint(call, *database, key) {
            Ok(found) if found == *wanted => {}
            Ok(_) => return call.out.null_array(),
            Err(error) => return error.write_to(call.out),
        }
    }
    run_queued(session, &transaction, call, true);
}

/// Runs one command whose arity and permissions were checked; an error becomes its reply.
pub(crate) fn run(mut session: Option<&mut Session>, call: &mut Call<'_, '_>) {
    let start = call.out.len();
    call.counters.commands += 1;
    let (command, figures) = (call.command, call.figures);
    // Kept in the slow log only where that was on when the command began.
    let is_kept = figures.slow.slower_than_us() >= 0;
    let timed = is_kept || figures.is_sample(command);
    let began = if timed { call.store.store().clock().monotonic_ns() } else { 0 };
    let done = match (command.handler, session.as_deref_mut()) {
        (Handler::Data(handler), _) => handler(call),
        (Handler::Session(handler), Some(session)) => handler(session, call),
        (Handler::Session(_) | Handler::None, _) => {
            Err(CommandError::Line("ERR this command needs its connection"))
        }
    };
    figures.ran(command, done.is_err());
    if let Err(error) = done {
        call.out.truncate(start);
        call.counters.errors += 1;
        call.counters.store_failures += u64::from(error.is_of_store());
        error.write_to(call.out);
        figures.error(call.out.as_bytes().get(start..).unwrap_or_default());
    }
    if timed {
        let clock = call.store.store().clock();
        let took = clock.monotonic_ns().saturating_sub(began);
        figures.took(command, took);
        if !is_kept {
            return;
        }
        figures.slow.note((command, call.args), (clock.unix_ms() / 1000, took), || {
            let known =
                session.map(|session| (session.info.address.clone(), session.info.name.clone()));
            known.unwrap_or_default()
        });
    }
}

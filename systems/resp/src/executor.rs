//! Running requests: one executor per thread.

use std::sync::Arc;

use beeline_kv::Keyspace;

use crate::args::Args;
use crate::commands::{Call, Counters, Scratch, transactions};
use crate::error::CommandError;
use crate::figures::CommandFigures;
use crate::logged::Logged;
use crate::output::{Output, Version};
use crate::parser::ProtocolError;
use crate::plan::{Action, Plan};
use crate::server::Server;
use crate::session::{ClientInfo, Session};
use crate::table::{self, Found, Handler, flag};

/// What is to happen with the connection once its output is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a connection that is to be closed stays open otherwise"]
pub enum After {
    /// It goes on.
    Continue,
    /// It is closed when the output is sent.
    Close,
    /// It is closed at once.
    Hangup,
}

/// What a request that runs at another shard takes along of its session.
#[derive(Clone, Copy, Debug)]
pub struct Remote {
    /// Selected database.
    pub database: u8,
    /// Protocol of the reply.
    pub version: Version,
    /// What it looks up counts as used.
    pub touch: bool,
}

impl Remote {
    /// What requests of `session` take along now.
    #[must_use]
    pub fn of(session: &Session) -> Self {
        let touch = !session.info.no_touch;
        Self { database: session.database(), version: session.version(), touch }
    }
}

/// Runs requests against keyspaces. Holds memory that requests share and the figures they leave.
#[derive(Debug, Default)]
pub struct Executor {
    scratch: Scratch,
    counters: Counters,
    figures: Arc<CommandFigures>,
}

impl Executor {
    /// An executor without memory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// One that counts in `figures`, where other threads read them.
    #[must_use]
    pub fn with_figures(figures: Arc<CommandFigures>) -> Self {
        Self { figures, ..Self::default() }
    }

    /// Figures since the start or the latest CONFIG RESETSTAT that ran here.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Where it counts.
    #[must_use]
    pub fn figures(&self) -> &Arc<CommandFigures> {
        &self.figures
    }

    /// Sets the figures to zero.
    pub fn reset_counters(&mut self) {
        self.counters = Counters::default();
    }

    /// Gives unused memory back; for quiet moments.
    pub fn trim(&mut self) {
        self.scratch.trim();
    }

    /// Runs what `plan` says and appends the reply to `out`.
    ///
    /// `store` holds at least the shards of [`Plan::route`]. The reply must not be sent before the
    /// shards' `commit` returned: what it acknowledges is stored, and persisted only then.
    pub fn execute(
        &mut self,
        session: &mut Session,
        plan: Plan<'_>,
        store: &mut Keyspace<'_>,
        out: &mut Output,
        server: &dyn Server,
    ) -> After {
        let start = out.len();
        out.set_version(session.version());
        match plan.action {
            Action::Run(command) => {
                session.info.command = command.name;
                let mut call = Call {
                    command,
                    args: plan.args,
                    database: session.info.database,
                    store,
                    out,
                    server,
                    scratch: &mut self.scratch,
                    counters: &mut self.counters,
                    figures: &self.figures,
                    touch: !session.info.no_touch,
                    in_batch: false,
                };
                transactions::run(Some(session), &mut call);
            }
            Action::Queue(command) => {
                session.info.command = command.name;
                if command.has(flag::DENYOOM) && is_out_of_memory(store) {
                    session.transaction.failed = true;
                    self.counters.errors += 1;
                    CommandError::OutOfMemory.write_to(out);
                    self.figures.rejected(command);
                    self.figures.error(&out.as_bytes()[start..]);
                } else if session.queue(command, plan.args) {
                    out.simple("QUEUED");
                } else {
                    session.transaction.failed = true;
                    CommandError::Line("ERR the transaction is larger than 4 GiB").write_to(out);
                }
            }
            Action::Reject(rejection) => {
                session.transaction.failed |= session.transaction.open;
                self.counters.errors += 1;
                let error = rejection.error(plan.args);
                if plan.args.is(0, "exec") {
                    abort_transaction(session, &error).write_to(out);
                } else {
                    error.write_to(out);
                }
                if let Found::Command(command) = table::resolve(plan.args) {
                    self.figures.rejected(command);
                }
                self.figures.error(&out.as_bytes()[start..]);
            }
            Action::Hangup => return After::Hangup,
        }
        session.finish_reply(out, start);
        if session.closing { After::Close } else { After::Continue }
    }

    /// Runs a request that another shard's connection sent here, as [`Plan::is_portable`] allows,
    /// and appends its reply to `out`.
    pub fn execute_remote(
        &mut self,
        from: Remote,
        args: Args<'_>,
        store: &mut Keyspace<'_>,
        out: &mut Output,
        server: &dyn Server,
    ) {
        out.set_version(from.version);
        let command = match table::resolve(args) {
            Found::Command(command)
                if command.takes(args.len()) && matches!(command.handler, Handler::Data(_)) =>
            {
                command
            }
            _ => {
                let error = "ERR this command needs its connection";
                return CommandError::Line(error).write_to(out);
            }
        };
        let mut call = Call {
            command,
            args,
            database: from.database,
            store,
            out,
            server,
            scratch: &mut self.scratch,
            counters: &mut self.counters,
            figures: &self.figures,
            touch: from.touch,
            in_batch: false,
        };
        transactions::run(None, &mut call);
    }
}

impl Executor {
    /// Runs a request of the log ([`crate::logged`]) within the open batch of `store`, which holds
    /// every shard, and appends its reply to `out`. Its effects and its reply depend on the
    /// request, the keyspace and the store's clock alone.
    ///
    /// `false`: the store refused what it would not refuse at another replica. What the batch
    /// holds must not be kept.
    #[must_use]
    pub fn execute_logged(
        &mut self,
        request: &Logged,
        store: &mut Keyspace<'_>,
        out: &mut Output,
        server: &dyn Server,
    ) -> bool {
        let failures = self.counters.store_failures;
        out.set_version(request.version);
        let info = ClientInfo { database: request.database, ..ClientInfo::default() };
        let mut session = Session::new(info, server);
        session.version = request.version;
        session.authenticated = true;
        let args = request.requests.get(0);
        let found = match table::resolve(args) {
            _ if request.is_transaction => table::find_full(b"exec"),
            Found::Command(command) => Some(command),
            _ => None,
        };
        let Some(command) = found else {
            CommandError::Line("ERR unknown command in the log").write_to(out);
            return true;
        };
        let mut call = Call {
            command,
            args,
            database: request.database,
            store,
            out,
            server,
            scratch: &mut self.scratch,
            counters: &mut self.counters,
            figures: &self.figures,
            touch: true,
            in_batch: true,
        };
        if request.is_transaction {
            transactions::run_logged(&mut session, request, &mut call);
        } else if command.takes(args.len()) && matches!(command.handler, Handler::Data(_)) {
            transactions::run(None, &mut call);
        } else {
            CommandError::Line("ERR this command needs its connection").write_to(call.out);
        }
        self.counters.store_failures == failures
    }
}

/// Whether data would be refused now, whatever it is, because nothing gives way at the limit.
fn is_out_of_memory(store: &Keyspace<'_>) -> bool {
    let store = store.store();
    let limit = store.max_memory_bytes();
    limit != 0
        && store.eviction() == beeline_kv::Eviction::NoEviction
        && store.memory_bytes() > limit
}

/// A refused EXEC ends its transaction.
fn abort_transaction(session: &mut Session, error: &CommandError) -> CommandError {
    session.transaction.clear();
    session.watched.clear();
    transactions::aborted(error)
}

/// Appends the reply to a broken stream; the connection is closed after it is sent.
pub fn reply_protocol_error(session: &mut Session, error: &ProtocolError, out: &mut Output) {
    if error.has_reply() {
        let start = out.len();
        match *error {
            // The byte goes out as it came in, whatever it is.
            ProtocolError::ExpectedBulk(byte) => {
                let mut line = b"ERR Protocol error: expected '$', got '".to_vec();
                line.extend_from_slice(&[byte, b'\'']);
                out.error(&line);
            }
            _ => out.error(format!("ERR {error}").as_bytes()),
        }
        session.finish_reply(out, start);
    }
}

//! The Redis door as a wire: the parser, session and executor of `beeline_resp` behind the node's
//! traits.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use beeline_kv::{Keyspace, Store};
use beeline_resp::direct::DirectCall;
use beeline_resp::{
    After, Args, ClientInfo, Executor, Output, Plan, Planned, Remote, RequestParser, Session,
    Version, expected, table, table::Found,
};

use crate::replicated::COMMAND;
use crate::shared::{Registered, Shared, lock};
use crate::wire::{
    Answer, Effect, Head, Logging, Opened, Refusal, Scope, Step, Wire, WirePlan, WireSession,
    WireWorker,
};

/// The name of its table and of its service.
pub(crate) const NAME: &str = "resp";
/// Version of what a hop carries of a session.
const HEAD_VERSION: u8 = 1;
/// Commands that write a snapshot while their client waits.
const SAVING: [&str; 2] = ["save", "shutdown"];

/// The reply in place of one that passed the limit on unread replies.
const TOO_LARGE: &[u8] = b"ERR the command ran, but its reply passes the limit \
    client-output-buffer-limit: ask for less at once, or raise it";

/// Replaces a reply that begins at `start` and passed the limit by an error.
pub(crate) fn bound(output: &mut Output, start: usize) {
    if output.is_over_limit() {
        output.truncate(start);
        output.error(TOO_LARGE);
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct RedisWire {
    pub shared: Arc<Shared>,
}

impl Wire for RedisWire {
    fn name(&self) -> &'static str {
        NAME
    }

    fn full(&self) -> Vec<u8> {
        b"-ERR max number of clients reached\r\n".to_vec()
    }

    fn worker(&self, shard: usize) -> Box<dyn WireWorker> {
        let figures = self.shared.figures.of(shard).unwrap_or_default();
        let executor = Rc::new(RefCell::new(Executor::with_figures(figures)));
        Box::new(RedisWorker { shared: Arc::clone(&self.shared), shard, executor })
    }
}

#[derive(Debug)]
struct RedisWorker {
    shared: Arc<Shared>,
    shard: usize,
    executor: Rc<RefCell<Executor>>,
}

fn head_of(remote: Remote) -> Head {
    let version = if remote.version == Version::Resp3 { 3 } else { 2 };
    Head([HEAD_VERSION, remote.database, version, u8::from(remote.touch), 0, 0, 0, 0])
}

fn remote_of(head: Head) -> Remote {
    let [_, database, version, touch, ..] = head.0;
    let version = if version == 3 { Version::Resp3 } else { Version::Resp2 };
    Remote { database, version, touch: touch == 1 }
}

impl WireWorker for RedisWorker {
    fn open(&mut self, opened: Opened) -> Box<dyn WireSession> {
        let info = ClientInfo {
            id: opened.id,
            address: opened.address,
            local_address: opened.local_address,
            descriptor: opened.descriptor,
            connected_us: opened.connected_us,
            active_us: opened.connected_us,
            ..ClientInfo::default()
        };
        let session = Session::new(info, self.shared.as_ref());
        let registered = Registered { shard: self.shard, info: session.snapshot() };
        lock(&self.shared.clients).insert(session.id(), registered);
        let mut parser = RequestParser::new(self.shared.settings.limits());
        parser.set_authenticated(session.is_authenticated());
        let (shared, executor) = (Arc::clone(&self.shared), Rc::clone(&self.executor));
        Box::new(RedisSession { shared, executor, session, parser, planned: None })
    }

    fn expect_carried(
        &mut self,
        ahead: &mut dyn Iterator<Item = (Head, Args<'_>)>,
        keyspace: &mut Keyspace<'_>,
    ) {
        let mut ahead = ahead.peekable();
        let Some(database) = ahead.peek().map(|(head, _)| remote_of(*head).database) else {
            return;
        };
        keyspace.expect(database, ahead.map(|(_, request)| expected(request)));
    }

    fn execute_carried(
        &mut self,
        head: Head,
        request: Args<'_>,
        keyspace: &mut Keyspace<'_>,
        out: &mut Output,
    ) {
        let mut executor = self.executor.borrow_mut();
        executor.execute_remote(remote_of(head), request, keyspace, out, self.shared.as_ref());
    }

    fn errors(&self) -> u64 {
        self.executor.borrow().counters().errors
    }
}

#[derive(Debug)]
struct RedisSession {
    shared: Arc<Shared>,
    executor: Rc<RefCell<Executor>>,
    session: Session,
    parser: RequestParser,
    /// What is to be done with the current request, as of the last look.
    planned: Option<Planned>,
}

impl WireSession for RedisSession {
    fn room(&mut self) -> &mut [u8] {
        self.parser.set_limits(self.shared.settings.limits());
        self.parser.room()
    }

    fn received(&mut self, count: usize) -> Result<(), String> {
        self.parser.received(count).map_err(|error| error.to_string())
    }

    fn pending_bytes(&self) -> usize {
        self.parser.pending_bytes()
    }

    fn advance(&mut self, out: &mut Output) -> Step {
        self.planned = None;
        match self.parser.advance() {
            Ok(true) => Step::Request,
            Ok(false) => Step::Incomplete,
            Err(error) => {
                out.set_version(self.session.version());
                beeline_resp::reply_protocol_error(&mut self.session, &error, out);
                Step::Broken
            }
        }
    }

    fn plan(&mut self, store: &Store) -> WirePlan {
        let plan = Plan::new(&self.session, self.parser.current());
        self.planned = Some(plan.remember());
        let command = plan.command();
        let route = plan.route(&self.session, store);
        if let Some(command) = command
            && command.scope == table::Scope::Keys
        {
            // Most of them.
            let writes = command.has(table::flag::WRITE);
            let effect = if writes { Effect::Write } else { Effect::Read };
            let (scope, portable) = (Scope::Keys, plan.is_portable());
            return WirePlan { route, scope, effect, writes, portable };
        }
        let scope = match command {
            Some(command) if command.scope == table::Scope::Node => {
                if SAVING.contains(&command.name) { Scope::Saving } else { Scope::Node }
            }
            Some(command)
                if command.scope == table::Scope::Elsewhere
                    && self.shared.direct.get().is_some() =>
            {
                Scope::Elsewhere
            }
            _ => Scope::Keys,
        };
        WirePlan {
            route,
            scope,
            effect: plan.effect(&self.session),
            writes: plan.may_write(&self.session),
            portable: plan.is_portable(),
        }
    }

    fn expect(&mut self, keyspace: &mut Keyspace<'_>) -> usize {
        keyspace.expect(self.session.database(), self.parser.expected())
    }

    fn execute(&mut self, keyspace: &mut Keyspace<'_>, out: &mut Output) -> After {
        let args = self.parser.current();
        let plan = match self.planned.take() {
            Some(planned) => planned.with(args),
            None => Plan::new(&self.session, args),
        };
        let shown = plan.command().is_some_and(|command| {
            command.scope == table::Scope::Connection && !matches!(command.name, "ping" | "echo")
        });
        let mut executor = self.executor.borrow_mut();
        let shared = self.shared.as_ref();
        let after = executor.execute(&mut self.session, plan, keyspace, out, shared);
        drop(executor);
        self.parser.set_authenticated(self.session.is_authenticated());
        if shown {
            // A name, a database, a user: others see it at once.
            self.show();
        }
        after
    }

    fn submit(&mut self, answer: Answer) {
        let mut out = Output::new(self.session.version());
        let Some(direct) = self.shared.direct.get() else { return };
        let args = self.parser.current();
        let figures = Arc::clone(self.executor.borrow().figures());
        let found = table::resolve(args);
        let send = move |out: &Output| {
            if let Found::Command(command) = found {
                figures.answered_elsewhere(command, out.as_bytes());
            }
            answer.send(out.as_bytes().to_vec());
        };
        match DirectCall::new(args, direct.processors()) {
            Ok(mut call) => {
                let packet = std::mem::take(&mut call.packet);
                let (processor, limit) = (call.processor, call.reply_limit);
                let done = move |reply: Option<Vec<u8>>| {
                    call.reply(reply.as_deref(), &mut out);
                    send(&out);
                };
                direct.submit(processor, packet, limit, Box::new(done));
            }
            Err(error) => {
                error.write_to(&mut out);
                send(&out);
            }
        }
    }

    fn carry(&self) -> (Head, Args<'_>) {
        (head_of(Remote::of(&self.session)), self.parser.current())
    }

    fn takes_reply(&mut self) -> bool {
        self.session.takes_reply()
    }

    fn abandon_current(&mut self) {
        if Plan::new(&self.session, self.parser.current()).is_exec() {
            self.session.drop_transaction();
        }
    }

    fn refuse(&mut self, refusal: &Refusal<'_>, out: &mut Output) {
        match refusal {
            Refusal::NotDurable => {
                out.error(b"MISCONF Errors writing to durable memory; see the node's log");
            }
            Refusal::ReplyTooLarge => out.error(TOO_LARGE),
            Refusal::TooLargeToCarry => out.error(b"ERR request too large to forward"),
            Refusal::NoRoom => {
                out.error(b"OOM command not allowed when used memory > 'maxmemory'.");
            }
            Refusal::Loading => {
                out.error(b"LOADING this member starts, catches up or installs a snapshot")
            }
            Refusal::NotReady => {
                out.error(b"TRYAGAIN this member has not opened its log yet: nothing was done");
            }
            Refusal::Unlogged(command) => {
                self.session.refuse_queued();
                let line =
                    format!("ERR '{command}' cannot be part of a transaction in a replicated node");
                out.error(line.as_bytes());
            }
            Refusal::Line(line) => out.error(line.as_bytes()),
        }
    }

    fn logging(&mut self) -> Option<Logging> {
        let plan = Plan::new(&self.session, self.parser.current());
        let member = plan.is_unknown() && plan.args().is(0, COMMAND);
        Some(Logging {
            member: member.then(|| self.session.is_authenticated()),
            unlogged: plan.queues_local(),
            needs_room: plan.needs_room(&self.session),
            alone: plan.is_flush(),
        })
    }

    fn reads_stale(&self) -> bool {
        self.session.reads_stale()
    }

    fn log(&mut self, out: &mut Vec<u8>) {
        let args = self.parser.current();
        if Plan::new(&self.session, args).is_exec() {
            self.session.log_transaction(out);
        } else {
            self.session.log_command(args, out);
        }
    }

    fn publish(&mut self, active_us: u64, output_bytes: usize) {
        self.session.info.active_us = active_us;
        self.session.info.output_bytes = output_bytes;
        self.show();
    }

    fn trim(&mut self) {
        self.parser.trim();
    }
}

impl RedisSession {
    /// Puts what CLIENT LIST shows where other threads read it.
    fn show(&mut self) {
        let pending = self.parser.pending_bytes();
        let free = self.parser.capacity_bytes().saturating_sub(pending);
        self.session.info.query_buffer = (pending, free);
        if let Some(registered) = lock(&self.shared.clients).get_mut(&self.session.id()) {
            registered.info = self.session.snapshot();
        }
    }
}

impl Drop for RedisSession {
    fn drop(&mut self) {
        lock(&self.shared.clients).remove(&self.session.id());
    }
}

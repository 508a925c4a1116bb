//! What is to happen with a request: decided before any shard is locked.

use crate::args::Args;
use crate::commands::keyspace_wide::parse_cursor;
use crate::error::CommandError;
use crate::number::parse_i64;
use crate::session::Session;
use crate::table::{self, Command, Found, Handler, Scope, flag};

/// Why a request is not run.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rejection {
    Unknown,
    UnknownSubcommand(&'static Command),
    Arity(&'static Command),
    NotAuthenticated,
    NotInTransaction,
}

impl Rejection {
    pub(crate) fn error(self, args: Args<'_>) -> CommandError {
        match self {
            Self::Unknown => unknown_command(args),
            Self::UnknownSubcommand(container) => {
                let mut line = b"ERR unknown subcommand '".to_vec();
                line.extend_from_slice(c_string(args.get(1), 128));
                line.extend_from_slice(b"'. Try ");
                line.extend_from_slice(container.name.to_ascii_uppercase().as_bytes());
                line.extend_from_slice(b" HELP.");
                CommandError::Bytes(line)
            }
            Self::Arity(command) => CommandError::Arity { command: command.name },
            Self::NotAuthenticated => CommandError::Line("NOAUTH Authentication required."),
            Self::NotInTransaction => {
                CommandError::Line("ERR Command not allowed inside a transaction")
            }
        }
    }
}

/// At most `limit` bytes of `text`, up to a NUL: what C's `%.*s` shows.
fn c_string(text: &[u8], limit: usize) -> &[u8] {
    let text = &text[..text.len().min(limit)];
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    &text[..end]
}

/// The reply to a command that does not exist, which shows the first 128 bytes of its arguments.
fn unknown_command(args: Args<'_>) -> CommandError {
    const SHOWN_BYTES: usize = 128;
    let mut shown: Vec<u8> = Vec::new();
    for argument in args.from(1) {
        if shown.len() >= SHOWN_BYTES {
            break;
        }
        let part = c_string(argument, SHOWN_BYTES - shown.len());
        shown.push(b'\'');
        shown.extend_from_slice(part);
        shown.extend_from_slice(b"' ");
    }
    let mut line = b"ERR unknown command '".to_vec();
    line.extend_from_slice(c_string(args.get(0), SHOWN_BYTES));
    line.extend_from_slice(b"', with args beginning with: ");
    line.extend_from_slice(&shown);
    CommandError::Bytes(line)
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    Run(&'static Command),
    Queue(&'static Command),
    Reject(Rejection),
    /// An HTTP request: somebody lets a browser talk to this port.
    Hangup,
}

/// A request, and what is to happen with it.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    pub(crate) args: Args<'a>,
    pub(crate) action: Action,
}

/// What is to happen with a request, without its arguments: kept from the look at it to its run.
#[derive(Clone, Copy, Debug)]
pub struct Planned(Action);

impl Planned {
    /// The plan again, for the same request; its session has not changed meanwhile.
    #[inline]
    #[must_use]
    pub fn with(self, args: Args<'_>) -> Plan<'_> {
        Plan { args, action: self.0 }
    }
}

/// A set of shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardSet {
    words: [u64; 16],
}

impl ShardSet {
    /// Most shards of a store.
    pub const LIMIT: usize = 1024;

    /// No shard.
    #[must_use]
    pub const fn new() -> Self {
        Self { words: [0; 16] }
    }

    /// Adds a shard, below [`Self::LIMIT`].
    pub fn insert(&mut self, shard: usize) {
        self.words[shard / 64] |= 1 << (shard % 64);
    }

    /// Whether `shard` is in the set.
    #[must_use]
    pub fn contains(&self, shard: usize) -> bool {
        self.words.get(shard / 64).is_some_and(|word| word >> (shard % 64) & 1 == 1)
    }

    /// Number of shards.
    #[must_use]
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.words == [0; 16]
    }

    /// The shards in ascending order: the order to lock them in.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.words.iter().enumerate().flat_map(|(at, &word)| {
            let mut rest = word;
            std::iter::from_fn(move || {
                let bit = rest.trailing_zeros() as usize;
                rest &= rest.checked_sub(1)?;
                Some(at * 64 + bit)
            })
        })
    }
}

impl Default for ShardSet {
    fn default() -> Self {
        Self::new()
    }
}

/// What a request needs locked while it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Nothing: any keyspace will do, such as that of the shard that holds the connection.
    Here,
    /// One shard. Where [`Plan::is_portable`], the request may be sent there instead.
    Shard(usize),
    /// These, two or more, in this order.
    Shards(ShardSet),
    /// Every shard.
    All,
}

/// What a request does to the keyspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Nothing: it concerns the connection or the node, or is refused.
    None,
    /// It looks.
    Read,
    /// It may change something.
    Write,
}

/// Finds the shard of a key.
pub trait Placement {
    /// The shard of `key` in `database`.
    fn shard_of(&self, database: u8, key: &[u8]) -> usize;

    /// The shard a SCAN cursor names.
    fn shard_of_cursor(&self, cursor: u64) -> usize;
}

impl Placement for beeline_kv::Store {
    fn shard_of(&self, database: u8, key: &[u8]) -> usize {
        Self::shard_of(self, database, key)
    }

    fn shard_of_cursor(&self, cursor: u64) -> usize {
        let shard = beeline_kv::Keyspace::shard_of_cursor(cursor);
        if shard < self.shards() { shard } else { 0 }
    }
}

/// Shards collected so far: the route if nothing else were needed.
struct Needs(Route);

impl Needs {
    #[inline]
    fn add(&mut self, shard: usize) {
        match &mut self.0 {
            Route::Here => self.0 = Route::Shard(shard),
            Route::Shard(only) if *only != shard => {
                let mut set = ShardSet::new();
                set.insert(*only);
                set.insert(shard);
                self.0 = Route::Shards(set);
            }
            Route::Shards(set) => set.insert(shard),
            Route::Shard(_) | Route::All => {}
        }
    }

    fn collect(
        &mut self,
        command: &Command,
        args: Args<'_>,
        database: u8,
        placement: &impl Placement,
    ) {
        match command.scope {
            Scope::Connection | Scope::Node | Scope::Transaction | Scope::Elsewhere => {}
            Scope::Keys | Scope::Watch => {
                for position in command.key_positions(args) {
                    self.add(placement.shard_of(database, args.get(position)));
                }
            }
            Scope::Databases => {
                // COPY from to [DB n], MOVE key n. Where the database is invalid the command
                // fails before it looks at keys.
                let (target, other) = if command.keys.1 == 2 {
                    (copy_target(args), args.get(2))
                } else {
                    (parse_database(args.get(2)), args.get(1))
                };
                self.add(placement.shard_of(database, args.get(1)));
                self.add(placement.shard_of(target.unwrap_or(database), other));
            }
            Scope::Scan => {
                if let Some(cursor) = parse_cursor(args.get(1)) {
                    self.add(placement.shard_of_cursor(cursor));
                }
            }
            Scope::Everything => self.0 = Route::All,
        }
    }
}

pub(crate) fn parse_database(text: &[u8]) -> Option<u8> {
    let number = u8::try_from(parse_i64(text)?).ok()?;
    (u16::from(number) < beeline_kv::DATABASES).then_some(number)
}

/// The database of a COPY's DB option; the last one counts.
fn copy_target(args: Args<'_>) -> Option<u8> {
    let mut target = None;
    let mut at = 3;
    while at < args.len() {
        if args.is(at, "db") {
            target = parse_database(args.get(at + 1));
            at += 1;
        }
        at += 1;
    }
    target
}

impl<'a> Plan<'a> {
    /// Decides what is to happen with a request of `session`.
    #[inline]
    #[must_use]
    pub fn new(session: &Session, args: Args<'a>) -> Self {
        Self { args, action: Self::decide(session, args) }
    }

    #[inline]
    fn decide(session: &Session, args: Args<'_>) -> Action {
        let command = match table::resolve(args) {
            Found::Command(command) => command,
            Found::UnknownSubcommand(container) => {
                return Action::Reject(Rejection::UnknownSubcommand(container));
            }
            Found::Unknown if args.is(0, "post") || args.is(0, "host:") => return Action::Hangup,
            Found::Unknown => return Action::Reject(Rejection::Unknown),
        };
        if !command.takes(args.len()) || matches!(command.handler, Handler::None) {
            return Action::Reject(Rejection::Arity(command));
        }
        if !session.authenticated && !command.has(flag::NO_AUTH) {
            return Action::Reject(Rejection::NotAuthenticated);
        }
        if session.transaction.open {
            if command.has(flag::NO_MULTI) {
                return Action::Reject(Rejection::NotInTransaction);
            }
            if !runs_inside_transaction(command) {
                return Action::Queue(command);
            }
        }
        Action::Run(command)
    }

    /// What was decided.
    #[inline]
    #[must_use]
    pub fn remember(&self) -> Planned {
        Planned(self.action)
    }

    /// What has to be locked to run it.
    #[inline]
    #[must_use]
    pub fn route(&self, session: &Session, placement: &impl Placement) -> Route {
        let Action::Run(command) = self.action else { return Route::Here };
        if command.scope == Scope::Keys && command.keys == (1, 1, 1) {
            return Route::Shard(placement.shard_of(session.database(), self.args.get(1)));
        }
        self.route_of(command, session, placement)
    }

    fn route_of(
        &self,
        command: &'static Command,
        session: &Session,
        placement: &impl Placement,
    ) -> Route {
        let mut needs = Needs(Route::Here);
        if command.scope == Scope::Transaction {
            if command.name == "exec" && session.transaction.open && !session.transaction.failed {
                collect_transaction(&mut needs, session, placement);
            }
        } else if command.scope != Scope::Watch || !session.transaction.open {
            needs.collect(command, self.args, session.database(), placement);
        }
        needs.0
    }

    /// The command that will run now; `None` where it is queued or refused.
    #[must_use]
    pub fn command(&self) -> Option<&'static Command> {
        match self.action {
            Action::Run(command) => Some(command),
            _ => None,
        }
    }

    /// Whether it needs nothing of its session but database and dialect, so that it may run at
    /// another shard ([`crate::Executor::execute_remote`]).
    #[inline]
    #[must_use]
    pub fn is_portable(&self) -> bool {
        matches!(self.action, Action::Run(Command { handler: Handler::Data(_), .. }))
    }

    /// Whether it may change data: such requests wait while CLIENT PAUSE WRITE holds.
    #[must_use]
    pub fn may_write(&self, session: &Session) -> bool {
        match self.action {
            Action::Run(command) if command.name == "exec" => {
                session.transaction.commands.iter().any(|command| command.has(flag::WRITE))
            }
            Action::Run(command) => command.has(flag::WRITE),
            _ => false,
        }
    }

    /// What it does to the keyspace.
    #[must_use]
    pub fn effect(&self, session: &Session) -> Effect {
        let Action::Run(command) = self.action else { return Effect::None };
        let transaction = &session.transaction;
        match command.scope {
            Scope::Connection | Scope::Node | Scope::Elsewhere => Effect::None,
            Scope::Transaction if command.name != "exec" || transaction.failed => Effect::None,
            Scope::Transaction if !session.watched.is_empty() || self.may_write(session) => {
                Effect::Write
            }
            Scope::Transaction if transaction.commands.is_empty() => Effect::None,
            Scope::Transaction => Effect::Read,
            _ if command.has(flag::WRITE) => Effect::Write,
            _ => Effect::Read,
        }
    }

    /// Whether it is to be queued in a transaction, and could not run at every replica alike.
    #[must_use]
    pub fn queues_local(&self) -> Option<&'static str> {
        let Action::Queue(command) = self.action else { return None };
        let elsewhere = match command.scope {
            Scope::Connection => !matches!(command.name, "select" | "ping" | "echo"),
            Scope::Node => true,
            // A flush takes effect by itself, whatever becomes of the rest.
            Scope::Everything => command.has(flag::WRITE),
            _ => false,
        };
        elsewhere.then_some(command.name)
    }

    /// Whether no command of this name is known.
    #[must_use]
    pub fn is_unknown(&self) -> bool {
        matches!(self.action, Action::Reject(Rejection::Unknown))
    }

    /// Whether it runs a transaction.
    #[must_use]
    pub fn is_exec(&self) -> bool {
        matches!(self.action, Action::Run(command) if command.name == "exec")
    }

    /// Whether it removes all keys of a database, or of all.
    #[must_use]
    pub fn is_flush(&self) -> bool {
        matches!(self.action, Action::Run(command)
            if command.scope == Scope::Everything && command.has(flag::WRITE))
    }

    /// Whether it may store something, as any write but a deletion does.
    #[must_use]
    pub fn needs_room(&self, session: &Session) -> bool {
        match self.action {
            Action::Run(_) if self.is_exec() => {
                session.transaction.commands.iter().any(|command| stores(command))
            }
            Action::Run(command) => stores(command),
            _ => false,
        }
    }

    /// The arguments.
    #[must_use]
    pub fn args(&self) -> Args<'a> {
        self.args
    }
}

/// Whether a command may store something.
pub(crate) fn stores(command: &Command) -> bool {
    let deletes =
        matches!(command.name, "del" | "unlink" | "getdel" | "hdel" | "flushall" | "flushdb");
    command.has(flag::WRITE) && !deletes
}

/// The shards of a command's keys; `None` where it needs more than the keys among its arguments.
pub(crate) fn route_of_keys(
    command: &Command,
    args: Args<'_>,
    database: u8,
    placement: &impl Placement,
) -> Option<Route> {
    let mut needs = Needs(Route::Here);
    needs.collect(command, args, database, placement);
    (command.scope == Scope::Keys).then_some(needs.0)
}

fn runs_inside_transaction(command: &Command) -> bool {
    command.scope == Scope::Transaction
        || command.scope == Scope::Watch
        || matches!(command.name, "quit" | "reset")
}

fn collect_transaction(needs: &mut Needs, session: &Session, placement: &impl Placement) {
    for watched in &session.watched {
        needs.add(placement.shard_of(watched.database, &watched.key));
    }
    let mut database = session.database();
    for (index, command) in session.transaction.commands.iter().enumerate() {
        let args = session.transaction.requests.get(index);
        if command.name == "select" {
            database = parse_database(args.get(1)).unwrap_or(database);
        }
        needs.collect(command, args, database, placement);
    }
}

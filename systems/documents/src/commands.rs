//! Commands: from a request's document to a reply's.
//!
//! Place: between the door, which frames messages, and the engine. Nothing here knows a socket.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use beeline_documents_query::error::{Code, QueryError, Result, fail};
use beeline_documents_query::expression::Scope;
use beeline_documents_query::memory::{Lease, Memory, size_of};
use beeline_documents_query::pipeline::{Outside, Pipeline};
use bson::spec::BinarySubtype;
use bson::{Bson, Document, doc};

use crate::catalog::{Collection, Database, check_database_name, is_simple_collation};
use crate::engine::{Engine, whole_field};
use crate::operation::Operation;
use crate::replica::concern::{self, Held};
use crate::replica::source::COMMAND as REPLICA;
use crate::reply::Reply;
use crate::retry::Retry;
use crate::scram::Conversation;
use crate::store::Backing;

mod catalog;
mod change;
mod explain;
pub mod fail_points;
mod identity;
pub mod insert_one;
#[cfg(test)]
mod plainly;
pub mod point;
mod read;
mod server;
mod shell;
mod sinks;
mod transactions;
mod write;

use fail_points::Struck;

pub use server::{VERSION, WIRE_VERSION};

/// What a connection knows between its commands.
#[derive(Debug, Default)]
pub struct Session {
    /// Number of the connection.
    pub connection: i32,
    /// Where the client is.
    pub peer: String,
    /// The user it has shown to be.
    pub user: Option<String>,
    /// What it told of itself in its first message.
    pub client: Option<Document>,
    /// The conversation in which it shows who it is.
    pub conversation: Option<Conversation>,
    /// What tells the user from another of the same name.
    pub user_mark: Option<Bson>,
    /// How far changes of users were looked at.
    pub users_seen: u64,
    /// What the command that runs shares with those of its cursor.
    pub operation: Operation,
    /// What the reply to the last command waits for.
    pub held: Option<Held>,
    /// The connection ends without a reply to the last command.
    pub hangs_up: bool,
}

/// A request as the wire brought it.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// The command's document.
    pub body: Document,
    /// Documents that came beside it, by the field they belong to.
    pub sequences: Vec<(String, Vec<Vec<u8>>)>,
    /// It does not run, for this reason.
    pub refused: Option<QueryError>,
}

impl Request {
    /// The command's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.body.keys().next().map_or("", String::as_str)
    }

    /// The documents of a field, wherever they came.
    ///
    /// Errors: neither a sequence nor an array of documents.
    pub fn documents(&mut self, field: &str) -> Result<Vec<Vec<u8>>> {
        if let Some(at) = self.sequences.iter().position(|(name, _)| name == field) {
            return Ok(self.sequences.swap_remove(at).1);
        }
        match self.body.remove(field) {
            Some(Bson::Array(all)) => all
                .into_iter()
                .map(|one| match one {
                    Bson::Document(document) => document.to_vec().map_err(|error| {
                        QueryError::new(Code::NonConformantBson, error.to_string())
                    }),
                    _ => fail(Code::TypeMismatch, format!("the field '{field}' holds documents")),
                })
                .collect(),
            Some(_) => fail(Code::TypeMismatch, format!("the field '{field}' must be an array")),
            None => fail(
                Code::NoSuchField,
                format!("BSON field '{field}' is missing but a required field"),
            ),
        }
    }
}

/// What the node tells clients of itself.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Where clients reach it.
    pub address: String,
    /// Connections it takes.
    pub most_connections: usize,
    /// The replica set it is the only member of.
    pub replica_set: Option<String>,
}

/// What a command works with.
pub struct Context<'c> {
    /// The databases.
    pub engine: &'c Arc<Engine>,
    /// The connection.
    pub session: &'c mut Session,
    /// What the node is.
    pub identity: &'c Identity,
    /// The database the command names.
    pub database: String,
    /// The request.
    pub request: Request,
    /// A `getMore` may answer [`Reply::Later`].
    pub may_wait: bool,
}

impl std::fmt::Debug for Context<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("database", &self.database).finish_non_exhaustive()
    }
}

/// Fields any command may carry, which need nothing of it.
pub const GENERIC: &[&str] = &[
    "$db",
    "lsid",
    "txnNumber",
    "$clusterTime",
    "$readPreference",
    "readConcern",
    "writeConcern",
    "maxTimeMS",
    "comment",
    "apiVersion",
    "apiStrict",
    "apiDeprecationErrors",
    "autocommit",
    "startTransaction",
    "$audit",
    "mayBypassWriteBlocking",
    "stmtId",
    "stmtIds",
    "$queryOptions",
    "$client",
];

impl Context<'_> {
    /// The command's own argument, which names a collection.
    ///
    /// Errors: no string, a name that cannot be one.
    pub fn collection_name(&self) -> Result<String> {
        let name = self.request.name();
        match self.request.body.get(name) {
            Some(Bson::String(collection))
                if !collection.is_empty() && !collection.contains('\0') =>
            {
                Ok(collection.clone())
            }
            Some(Bson::String(collection)) => fail(
                Code::InvalidNamespace,
                format!("Invalid namespace specified '{}.{collection}'", self.database),
            ),
            _ => {
                fail(Code::InvalidNamespace, format!("collection name has invalid type for {name}"))
            }
        }
    }

    /// Locks the row of a database for a part of the operation.
    ///
    /// Errors: those of `work`; failing to persist.
    pub fn within<R>(
        &self,
        database: &Database,
        work: impl FnOnce(&mut dyn Backing) -> Result<R>,
    ) -> Result<R> {
        self.engine.within(database, &self.session.operation, work)
    }

    /// A collection, if it is there; a transaction that saw one of the name before is told.
    ///
    /// Errors: [`Code::SnapshotUnavailable`], a transaction of another database.
    pub fn collection(
        &self,
        database: Option<&Arc<Database>>,
        name: &str,
    ) -> Result<Option<Arc<Collection>>> {
        visible(self.engine, &self.session.operation, (database, &self.database), name)
    }

    /// The database that the command changes; made where it `makes` one, so that a command which finds
    /// nothing leaves none behind.
    ///
    /// Errors: a name that cannot be one, too many databases.
    pub fn database_to_change(&self, makes: bool) -> Result<Option<Arc<Database>>> {
        match self.engine.database(&self.database) {
            None if makes => self.engine.database_or_new(&self.database).map(Some),
            None => {
                check_database_name(&self.database)?;
                self.collection(None, "").map(|_| None)
            }
            known => Ok(known),
        }
    }

    /// A collection, made if it is not there.
    ///
    /// Errors: those of making one; a transaction that saw another of the name.
    pub fn collection_or_new(&self, database: &Arc<Database>, name: &str) -> Result<()> {
        if self.collection(Some(database), name)?.is_some() {
            return Ok(());
        }
        self.create(database, name, &Document::new()).or_else(|error| match error.code {
            Code::NamespaceExists => Ok(()),
            _ => Err(error),
        })
    }

    /// Makes a collection, which is there at once also where a transaction makes it.
    ///
    /// Errors: those of making one.
    pub fn create(&self, database: &Database, name: &str, options: &Document) -> Result<()> {
        let made = self.engine.create(database, name, options)?;
        if let Some(shared) = &self.session.operation.transaction {
            crate::transaction::made(shared, made.id);
        }
        Ok(())
    }

    /// What a pipeline of the command reaches.
    pub fn neighbours(&self, database: Option<Arc<Database>>) -> Neighbours<'_> {
        Neighbours {
            engine: self.engine,
            name: self.database.clone(),
            database,
            operation: self.session.operation.clone(),
        }
    }

    /// `database.collection`.
    #[must_use]
    pub fn namespace(&self, collection: &str) -> String {
        format!("{}.{collection}", self.database)
    }

    /// A document field.
    ///
    /// Errors: another type.
    pub fn document(&self, field: &str) -> Result<Option<&Document>> {
        match self.request.body.get(field) {
            None | Some(Bson::Null) => Ok(None),
            Some(Bson::Document(document)) => Ok(Some(document)),
            Some(other) => fail(
                Code::TypeMismatch,
                format!(
                    "BSON field '{}.{field}' is the wrong type '{}', expected type 'object'",
                    self.request.name(),
                    beeline_documents_query::value::type_name(other)
                ),
            ),
        }
    }

    /// A flag.
    #[must_use]
    pub fn flag(&self, field: &str) -> bool {
        self.request.body.get(field).is_some_and(beeline_documents_query::value::truthy)
    }

    /// A whole number of at least `least`.
    ///
    /// Errors: another type, a smaller one.
    pub fn whole(&self, field: &str, least: i64) -> Result<Option<i64>> {
        match self.request.body.get(field) {
            None | Some(Bson::Null) => Ok(None),
            Some(_) => match whole_field(&self.request.body, field) {
                Some(number) if number >= least => Ok(Some(number)),
                Some(number) => fail(
                    Code::BelowMinimum,
                    format!(
                        "BSON field '{field}' value must be >= {least}, actual value '{number}'"
                    ),
                ),
                None => fail(Code::TypeMismatch, format!("BSON field '{field}' must be a number")),
            },
        }
    }

    /// When the command gives up.
    ///
    /// Errors: a time that is no number.
    pub fn deadline(&self) -> Result<Option<u64>> {
        let time = self.whole("maxTimeMS", 0)?.filter(|time| *time > 0);
        Ok(time.map(|time| self.engine.now_ms().saturating_add(time as u64)))
    }

    /// The variables of the command's `let`, evaluated, and `NOW`.
    ///
    /// Errors: those of expressions.
    pub fn variables(&self) -> Result<Document> {
        let mut variables =
            doc! { "NOW": bson::DateTime::from_millis(self.engine.now_ms() as i64) };
        let given = self.document("let")?.cloned().unwrap_or_default();
        for (name, value) in given {
            let expression = beeline_documents_query::expression::Expression::parse(&value)?;
            let value = expression.evaluate(&Scope::with_variables(&variables.clone()))?;
            variables.insert(name, value);
        }
        Ok(variables)
    }

    /// Refuses a collation other than the one by bytes.
    ///
    /// Errors: [`Code::CommandNotSupported`].
    pub fn check_collation(&self) -> Result<()> {
        check_collation(self.request.body.get("collation"))
    }

    /// Refuses fields that the command does not have, unless they begin with a dollar.
    ///
    /// Errors: [`Code::UnknownField`].
    pub fn check_fields(&self, known: &[&str]) -> Result<()> {
        for (at, name) in self.request.body.keys().enumerate() {
            if at > 0
                && !known.contains(&name.as_str())
                && !GENERIC.contains(&name.as_str())
                && !name.starts_with('$')
            {
                return fail(
                    Code::UnknownField,
                    format!("BSON field '{}.{name}' is an unknown field.", self.request.name()),
                );
            }
        }
        Ok(())
    }

    /// The statement of a retryable write that the command's `index`th is.
    ///
    /// Errors: a number without a session.
    pub fn retry(&self, index: usize) -> Result<Option<Retry>> {
        let Some(number) = whole_field(&self.request.body, "txnNumber") else { return Ok(None) };
        // A statement of a transaction is not retried by itself.
        if self.request.body.contains_key("autocommit") {
            return Ok(None);
        }
        let Some(session) = self.session_key() else {
            return fail(
                Code::InvalidOptions,
                "Transaction number requires a session ID to also be specified",
            );
        };
        let listed = match self.request.body.get("stmtIds") {
            Some(Bson::Array(all)) => {
                all.get(index).and_then(beeline_documents_query::value::integral)
            }
            _ => whole_field(&self.request.body, "stmtId").map(|first| first + index as i64),
        };
        let statement = i32::try_from(listed.unwrap_or(index as i64)).unwrap_or(i32::MAX);
        Ok(Some(Retry { session, number, statement }))
    }

    /// Refuses a session that is not named as drivers name one.
    ///
    /// Errors: [`Code::InvalidUuid`], [`Code::TypeMismatch`].
    fn check_session(&self) -> Result<()> {
        let Some(session) = self.document("lsid")? else { return Ok(()) };
        match session.get("id") {
            Some(Bson::Binary(id)) if id.subtype == BinarySubtype::Uuid && id.bytes.len() == 16 => {
                Ok(())
            }
            Some(Bson::Binary(_)) => fail(Code::InvalidUuid, "lsid.id must be a UUID of 16 bytes"),
            _ => fail(Code::TypeMismatch, "lsid must be an object with a binary field id"),
        }
    }

    /// The session the command belongs to, and its user: one user's sessions are not another's, and
    /// no session's name begins with another's.
    #[must_use]
    pub fn session_key(&self) -> Option<Vec<u8>> {
        self.session_id().map(|session| key_of(session, self.session.user.as_deref()))
    }

    /// The session the command belongs to.
    #[must_use]
    pub fn session_id(&self) -> Option<Vec<u8>> {
        match self.request.body.get_document("lsid").ok()?.get("id") {
            Some(Bson::Binary(id)) => Some(id.bytes.clone()),
            _ => None,
        }
    }
}

/// A session and its user.
fn key_of(mut session: Vec<u8>, user: Option<&str>) -> Vec<u8> {
    let user = user.unwrap_or_default().as_bytes();
    session.extend((user.len() as u32).to_be_bytes());
    session.extend(user);
    session
}

/// Refuses a collation other than the one by bytes.
///
/// Errors: [`Code::CommandNotSupported`].
pub fn check_collation(collation: Option<&Bson>) -> Result<()> {
    if is_simple_collation(collation) {
        return Ok(());
    }
    fail(
        Code::CommandNotSupported,
        "collation is not supported by this server: strings compare by their bytes; leave collation out or use { locale: \"simple\" }",
    )
}

/// Other collections of a database, for pipelines.
#[derive(Debug)]
pub struct Neighbours<'n> {
    /// The engine.
    pub engine: &'n Engine,
    /// The database's name.
    pub name: String,
    /// The database, if it is there.
    pub database: Option<Arc<Database>>,
    /// The operation the pipeline is a part of.
    pub operation: Operation,
}

impl Outside for Neighbours<'_> {
    fn memory(&self) -> Arc<Memory> {
        Arc::clone(&self.operation.memory)
    }

    fn read(
        &mut self,
        collection: &str,
        pipeline: &Pipeline,
        variables: &Document,
    ) -> Result<Vec<Document>> {
        let mut pipeline = pipeline.fresh();
        let scope = Scope::with_variables(variables);
        let mut out = Vec::new();
        let mut lease = Lease::of(&self.operation.memory);
        let place = (self.database.as_ref(), self.name.as_str());
        let found = visible(self.engine, &self.operation, place, collection)?;
        if let Some(database) = self.database.clone()
            && let Some(found) = found
        {
            let asked = crate::query::Asked {
                filter: pipeline.take_filter(),
                variables: variables.clone(),
                operation: self.operation.clone(),
                ..Default::default()
            };
            let mut query = crate::query::Query::new(&database, &found, asked)?;
            let mut input = std::collections::VecDeque::new();
            'all: while !query.is_done() {
                let mut held = query.fill_counted(self.engine, 1000, &mut input)?;
                for bytes in input.drain(..) {
                    let document = crate::scan::decode(&bytes)?;
                    held.shrink(bytes.len());
                    let before = out.len();
                    let flow = pipeline.push(document, &scope, self, &mut out)?;
                    for made in out.get(before..).unwrap_or_default() {
                        lease.grow(size_of(made), Memory::alone)?;
                    }
                    if flow == beeline_documents_query::pipeline::Flow::Enough {
                        break 'all;
                    }
                }
            }
        }
        pipeline.finish(&scope, self, &mut out)?;
        Ok(out)
    }
}

/// A collection of a database, if it is there, as an operation sees it.
///
/// Errors: [`Code::SnapshotUnavailable`] where its transaction saw one that is gone.
fn visible(
    engine: &Engine,
    operation: &Operation,
    (database, database_name): (Option<&Arc<Database>>, &str),
    name: &str,
) -> Result<Option<Arc<Collection>>> {
    let known = database.and_then(|database| database.collection(name));
    match (&operation.transaction, database) {
        (Some(shared), None) => crate::transaction::miss(engine, shared, database_name)?,
        (Some(_), Some(database)) if known.is_none() => {
            engine.within(database, operation, |row| row.miss(name))?;
        }
        _ => {}
    }
    Ok(known)
}

/// Commands that may run before a client has shown who it is.
const OPEN: &[&str] = &[
    "hello",
    "ismaster",
    "isMaster",
    "saslStart",
    "saslContinue",
    "ping",
    "buildInfo",
    "buildinfo",
    "connectionStatus",
    "logout",
    "getnonce",
    "whatsmyuri",
    // It says itself which cluster it belongs to.
    REPLICA,
];

/// Runs a command; its reply, failed or not.
pub fn run(context: &mut Context<'_>) -> Reply {
    if let Some(error) = &context.request.refused {
        return Reply::Document(failure(error));
    }
    let name = context.request.name().to_owned();
    let began = Instant::now();
    let reply = match fail_points::strike(context, &name) {
        Struck::Instead(reply) => reply,
        struck => {
            let reply = run_named(context, &name);
            struck.behind(context, reply)
        }
    };
    // One that waits for news is no slow one.
    if !matches!(reply, Reply::Later(_)) {
        context.engine.times.record(&name, began.elapsed());
    }
    reply
}

fn run_named(context: &mut Context<'_>, name: &str) -> Reply {
    context.session.held = None;
    match dispatch(context, name).and_then(|reply| held(context, name, reply)) {
        Ok(reply) => {
            if transactions::has_failed(&reply) {
                transactions::failed(context);
            }
            reply
        }
        Err(error) => {
            transactions::failed(context);
            context.engine.metrics.documents_failed_commands.add_shared(1);
            tracing::debug!(command = name, code = error.code as i32, %error, "a command failed");
            let mut reply = failure(&error);
            transactions::label(context, &error, &mut reply);
            concern::label(name, &context.request.body, error.code, &mut reply);
            Reply::Document(reply)
        }
    }
}

/// Notes what the reply waits for.
fn held(context: &mut Context<'_>, name: &str, reply: Reply) -> Result<Reply> {
    if let Some(replica) = context.engine.replica.get()
        && !matches!(reply, Reply::Later(_))
    {
        let operation = &context.session.operation;
        context.session.held = replica.hold(name, &context.request.body, operation)?;
    }
    Ok(reply)
}

/// An error as a reply.
#[must_use]
pub fn failure(error: &QueryError) -> Document {
    let mut reply = doc! {
        "ok": 0.0,
        "errmsg": error.message.clone(),
        "code": error.code as i32,
        "codeName": error.code.name(),
    };
    if let Some(info) = &error.info {
        reply.extend((**info).clone());
    }
    reply
}

fn dispatch(context: &mut Context<'_>, name: &str) -> Result<Reply> {
    context.engine.metrics.documents_commands.add_shared(1);
    context.session.operation =
        Operation { memory: Memory::of_operation(&context.engine.memory), ..Operation::default() };
    context.check_session()?;
    identity::look_again(context)?;
    match context.request.body.get_str("$db") {
        Ok(database) => context.database = database.to_owned(),
        Err(_) if OPEN.contains(&name) => context.database = "admin".to_owned(),
        Err(_) => return fail(Code::NoSuchField, "OP_MSG requests require a $db argument"),
    }
    if context.request.body.contains_key("apiStrict")
        || context.request.body.contains_key("apiVersion")
    {
        server::check_api_version(context, name)?;
    }
    if context.engine.authentication
        && context.session.user.is_none()
        && !OPEN.contains(&name)
        && !identity::is_first_user(context, name)?
    {
        return fail(Code::Unauthorized, format!("Command {name} requires authentication"));
    }
    context.session.operation.transaction = transactions::of(context, name)?;
    if context.session.operation.transaction.is_none()
        && context
            .document("readConcern")?
            .is_some_and(|concern| concern.get_str("level").is_ok_and(|level| level == "snapshot"))
    {
        return fail(
            Code::SnapshotUnavailable,
            "read concern 'snapshot' is not supported by this server",
        );
    }
    // There is no journal that a reply could wait for, and MongoDB says so too.
    if let Ok(concern) = context.request.body.get_document("writeConcern")
        && concern.get_bool("j").unwrap_or(false)
        && !context.engine.store().outlives_process()
    {
        return fail(
            Code::BadValue,
            "cannot use 'j' option when a host does not have journaling enabled: this node keeps documents in memory",
        );
    }
    if let Some(replica) = context.engine.replica.get() {
        // First the term: what is written in a later one is not acknowledged as this one's.
        context.session.operation.term = replica.agreed.gate.term();
        context.session.operation.turned = replica.turned();
        replica.admit(name, &context.request.body)?;
        let level = context.document("readConcern")?.and_then(|one| one.get_str("level").ok());
        context.session.operation.majority = matches!(level, Some("majority" | "linearizable"));
    }
    match name {
        REPLICA | "resync" | "beelineSync" => server::replica(context, name),
        "saslStart" => identity::start(context),
        "saslContinue" => identity::go_on(context),
        "createUser" | "updateUser" => identity::put_user(context, name),
        "dropUser" => identity::drop_user(context),
        "usersInfo" => identity::users_info(context),
        "hello" | "ismaster" | "isMaster" => server::hello(context, name),
        "ping" => Ok(Reply::ok()),
        "buildInfo" | "buildinfo" => server::build_info(),
        "whatsmyuri" => {
            Ok(Reply::Document(doc! { "you": context.session.peer.clone(), "ok": 1.0 }))
        }
        "connectionStatus" => server::connection_status(context),
        "getParameter" => server::get_parameter(context),
        "configureFailPoint" => fail_points::configure(context),
        "setParameter" => fail(
            Code::CommandNotSupported,
            "setParameter is not supported: settings are flags of beeline serve",
        ),
        "getCmdLineOpts" => {
            Ok(Reply::Document(doc! { "argv": ["beeline", "serve"], "parsed": {}, "ok": 1.0 }))
        }
        "getLog" => Ok(Reply::Document(doc! { "totalLinesWritten": 0, "log": [], "ok": 1.0 })),
        "getFreeMonitoringStatus" => Ok(Reply::Document(doc! { "state": "disabled", "ok": 1.0 })),
        "hostInfo" => server::host_info(context),
        "serverStatus" => server::server_status(context),
        "listCommands" => server::list_commands(),
        "replSetGetStatus" | "replSetGetConfig" => server::replica_set(context, name),
        "commitTransaction" => transactions::commit(context),
        "abortTransaction" => transactions::abort(context),
        "getnonce" => {
            fail(Code::CommandNotFound, "getnonce belongs to MONGODB-CR, which is not supported")
        }
        "startSession" => server::start_session(context),
        "endSessions" | "refreshSessions" | "killSessions" | "killAllSessions" => {
            server::end_sessions(context, name)
        }
        "logout" => {
            (context.session.user, context.session.conversation) = (None, None);
            Ok(Reply::ok())
        }
        "find" => read::find(context),
        "getMore" => read::get_more(context),
        "killCursors" => read::kill_cursors(context),
        "count" => read::count(context),
        "distinct" => read::distinct(context),
        "aggregate" => read::aggregate(context),
        "explain" => explain::explain(context),
        "insert" => write::insert(context),
        "update" => write::update(context),
        "delete" => write::delete(context),
        "findAndModify" | "findandmodify" => write::find_and_modify(context),
        "create" => catalog::create(context),
        "drop" => catalog::drop_collection(context),
        "dropDatabase" => catalog::drop_database(context),
        "listCollections" => catalog::list_collections(context),
        "listDatabases" => catalog::list_databases(context),
        "createIndexes" => catalog::create_indexes(context),
        "dropIndexes" | "deleteIndexes" => catalog::drop_indexes(context),
        "listIndexes" => catalog::list_indexes(context),
        "renameCollection" => catalog::rename(context),
        "collMod" => catalog::coll_mod(context),
        "collStats" | "collstats" => catalog::coll_stats(context),
        "dbStats" | "dbstats" => catalog::db_stats(context),
        "validate" => catalog::validate(context),
        "currentOp" => catalog::current_op(context),
        "mapReduce" | "mapreduce" | "eval" | "$eval" => fail(
            Code::CommandNotSupported,
            format!("{name} is not supported: this server runs no JavaScript; use aggregate"),
        ),
        other => shell::run(context, other),
    }
}

/// The names of all commands.
pub const NAMES: &[&str] = &[
    "abortTransaction",
    "aggregate",
    "buildInfo",
    "collMod",
    "collStats",
    "commitTransaction",
    "connectionStatus",
    "count",
    "create",
    "createIndexes",
    "currentOp",
    "dbStats",
    "delete",
    "distinct",
    "drop",
    "dropDatabase",
    "dropIndexes",
    "endSessions",
    "explain",
    "find",
    "findAndModify",
    "fsync",
    "getCmdLineOpts",
    "getDefaultRWConcern",
    "getLog",
    "getMore",
    "getParameter",
    "hello",
    "hostInfo",
    "insert",
    "isMaster",
    "killAllSessions",
    "killCursors",
    "killSessions",
    "listCollections",
    "listCommands",
    "listDatabases",
    "listIndexes",
    "logout",
    "ping",
    "profile",
    "refreshSessions",
    "rolesInfo",
    "renameCollection",
    "serverStatus",
    "startSession",
    "update",
    "validate",
    "whatsmyuri",
];

/// The sessions a command names.
fn session_ids(list: Option<&Bson>) -> HashSet<Vec<u8>> {
    let Some(Bson::Array(all)) = list else { return HashSet::new() };
    all.iter()
        .filter_map(|one| match one.as_document()?.get("id") {
            Some(Bson::Binary(id)) => Some(id.bytes.clone()),
            _ => None,
        })
        .collect()
}

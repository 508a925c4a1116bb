//! Commands: what each becomes for the shards, and what their replies become for the client.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_documents::commands::Request;
use beeline_documents::reply::Reply;
use beeline_documents_query::error::Code;
use beeline_documents_query::value::integral;
use bson::{Bson, Document, doc};

use crate::config::DATABASE as CONFIG;
use crate::error::{Refusal, Result, refuse};
use crate::router::{Router, View};
use crate::shard::Shard;
use crate::table::Sharded;

mod admin;
mod catalog;
mod read;
mod server;
mod write;

/// A command, as it came.
#[derive(Debug)]
pub(crate) struct Asked {
    pub(crate) database: String,
    pub(crate) body: Document,
}

/// Fields that are between the client and the router.
const OWN: &[&str] = &["$db", "$clusterTime", "$client"];

impl Asked {
    /// Documents that came beside the body become its arrays.
    fn new(request: Request) -> Result<Self> {
        let Request { mut body, sequences, refused } = request;
        if let Some(error) = refused {
            return Err(error.into());
        }
        let database = body.get_str("$db").unwrap_or("admin").to_owned();
        for (field, documents) in sequences {
            let read = |bytes: Vec<u8>| Document::from_reader(&bytes[..]).map(Bson::Document);
            let all: Result<Vec<Bson>, _> = documents.into_iter().map(read).collect();
            match all {
                Ok(all) => drop(body.insert(field, all)),
                Err(error) => return refuse(Code::NonConformantBson, error.to_string()),
            }
        }
        for own in OWN {
            body.remove(own);
        }
        Ok(Self { database, body })
    }

    pub(crate) fn name(&self) -> &str {
        self.body.keys().next().map_or("", String::as_str)
    }

    /// The collection the command names.
    ///
    /// Errors: none that can be one.
    pub(crate) fn collection(&self) -> Result<String> {
        match self.body.get(self.name()) {
            Some(Bson::String(name)) if !name.is_empty() => Ok(name.clone()),
            _ => refuse(
                Code::InvalidNamespace,
                format!("collection name has invalid type for {}", self.name()),
            ),
        }
    }

    pub(crate) fn namespace(&self) -> Result<String> {
        Ok(format!("{}.{}", self.database, self.collection()?))
    }

    pub(crate) fn document(&self, field: &str) -> Document {
        self.body.get_document(field).cloned().unwrap_or_default()
    }

    pub(crate) fn whole(&self, field: &str) -> Option<i64> {
        self.body.get(field).and_then(integral)
    }

    /// The fields of a command that every part of it carries, without its own.
    pub(crate) fn carried(&self) -> Document {
        let kept = [
            "lsid",
            "txnNumber",
            "readConcern",
            "writeConcern",
            "$readPreference",
            "maxTimeMS",
            "let",
            "ordered",
            "bypassDocumentValidation",
            "comment",
        ];
        let body = &self.body;
        kept.iter().filter_map(|name| Some(((*name).to_owned(), body.get(name)?.clone()))).collect()
    }

    /// Refuses an order of strings other than that of their bytes, which the router cannot follow.
    fn check_collation(&self) -> Result<()> {
        let simple = self.body.get_document("collation").ok().is_none_or(|collation| {
            collation.is_empty() || collation.get_str("locale").is_ok_and(|name| name == "simple")
        });
        match simple {
            true => Ok(()),
            false => refuse(Code::CommandNotSupported, "collation is not supported by this server"),
        }
    }
}

/// Where a collection's documents are.
pub(crate) enum Place<'t> {
    /// There is no such database.
    Nowhere,
    /// All in one shard.
    One(Arc<Shard>),
    /// As the table says.
    Sharded(&'t Sharded),
}

impl Router {
    /// Runs a command of a connection; its reply, refused or not.
    pub async fn run(&self, request: Request, connection: i32, peer: &str) -> Reply {
        self.counts.commands.fetch_add(1, Ordering::Relaxed);
        let reply = match Asked::new(request) {
            Ok(asked) => self.dispatch(asked, connection, peer).await,
            Err(error) => Err(error),
        };
        match reply {
            Ok(reply) => reply,
            Err(error) => {
                self.counts.failed.fetch_add(1, Ordering::Relaxed);
                tracing::debug!(%error, "a command failed");
                Reply::Document(error.reply())
            }
        }
    }

    pub(crate) fn place<'t>(
        &self,
        view: &'t View,
        database: &str,
        namespace: &str,
    ) -> Result<Place<'t>> {
        if matches!(database, CONFIG | "admin" | "local") {
            return Ok(Place::One(Arc::clone(self.config.store())));
        }
        if let Some(sharded) = view.table.collections.get(namespace) {
            return Ok(Place::Sharded(sharded));
        }
        let primary = self.primary(&view.table, database)?;
        Ok(primary.map_or(Place::Nowhere, Place::One))
    }

    async fn dispatch(&self, asked: Asked, connection: i32, peer: &str) -> Result<Reply> {
        let name = asked.name().to_owned();
        if asked.body.contains_key("autocommit") {
            return refuse(
                Code::OperationNotSupportedInTransaction,
                "transactions through the router are not supported: connect to the shard that holds the database",
            );
        }
        match name.as_str() {
            "hello" | "ismaster" | "isMaster" => Ok(self.hello(&asked, &name, connection)),
            "ping" => Ok(Reply::ok()),
            "buildInfo" | "buildinfo" => Ok(server::build_info()),
            "whatsmyuri" => Ok(Reply::Document(doc! { "you": peer, "ok": 1.0 })),
            "connectionStatus" => Ok(Reply::Document(
                doc! { "authInfo": { "authenticatedUsers": [], "authenticatedUserRoles": [] }, "ok": 1.0 },
            )),
            "getParameter"
            | "hostInfo"
            | "getCmdLineOpts"
            | "getLog"
            | "getFreeMonitoringStatus" => {
                self.config.store().ask("admin", asked.body).await.map(Reply::Document)
            }
            "serverStatus" => Ok(self.server_status(connection)),
            "listCommands" => Ok(server::list_commands()),
            "endSessions" | "killSessions" | "refreshSessions" | "killAllSessions"
            | "startSession" => self.sessions(&asked).await,
            "commitTransaction" | "abortTransaction" => {
                refuse(Code::NoSuchTransaction, "no transaction runs through the router")
            }
            "replSetGetStatus" | "replSetGetConfig" => refuse(
                Code::NoReplicationEnabled,
                "replSetGetStatus is not supported through mongos",
            ),
            "addShard" | "listShards" | "removeShard" | "enableSharding" | "shardCollection"
            | "split" | "moveChunk" | "flushRouterConfig" | "balancerStatus" | "getShardMap" => {
                self.administer(&asked, &name).await
            }
            "find" => self.find(asked).await,
            "getMore" => self.get_more(&asked).await,
            "killCursors" => self.kill_cursors(&asked).await,
            "count" => self.count(asked).await,
            "distinct" => self.distinct(asked).await,
            "aggregate" => self.aggregate(asked).await,
            "explain" => self.explain(asked).await,
            "insert" => self.insert(asked).await,
            "update" => self.update(asked).await,
            "delete" => self.delete(asked).await,
            "findAndModify" | "findandmodify" => self.find_and_modify(asked).await,
            "listDatabases" => self.list_databases(asked).await,
            "dropDatabase" => self.drop_database(asked).await,
            "create" | "drop" | "createIndexes" | "dropIndexes" | "deleteIndexes" | "collMod"
            | "listIndexes" | "listCollections" | "renameCollection" | "collStats"
            | "collstats" | "dbStats" | "dbstats" | "validate" => self.catalog(&asked, &name).await,
            "createUser" | "updateUser" | "dropUser" | "saslStart" | "saslContinue" => refuse(
                Code::CommandNotSupported,
                "users are not supported by this router: keep its port, and those of the shards, among friends",
            ),
            "" => refuse(Code::CommandNotFound, "no such command: ''"),
            other => refuse(Code::CommandNotFound, format!("no such command: '{other}'")),
        }
    }
}

/// A whole number of a reply.
pub(crate) fn whole_of(reply: &Document, field: &str) -> i64 {
    reply.get(field).and_then(integral).unwrap_or(0)
}

/// A count in the narrowest type, as MongoDB counts.
pub(crate) fn number(n: i64) -> Bson {
    i32::try_from(n).map_or(Bson::Int64(n), Bson::Int32)
}

/// A refusal that says that a table was too old: the same is tried by a newer one.
pub(crate) fn is_stale(error: &Refusal) -> bool {
    error.code == Code::StaleConfig as i32 && error.message.starts_with("the routing table")
}

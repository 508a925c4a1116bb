//! The routing table's way in and out of the configuration store.
//!
//! Invariant: a change is one transaction that makes the epoch larger from the one it was made for, so it is
//! there as a whole or not at all, and of two routers that change at once one begins anew.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use beeline_documents_query::error::Code;
use bson::oid::ObjectId;
use bson::spec::BinarySubtype;
use bson::{Binary, Document, doc};

use crate::error::{Refusal, Result, refuse};
use crate::shard::{Shard, batch_of};
use crate::table::{FORMAT, Kept, Table};

/// The database.
pub const DATABASE: &str = "config";
/// Times a table is read again that changed while it was read.
const READS: usize = 20;

/// The configuration store.
#[derive(Debug)]
pub struct ConfigStore {
    store: Arc<Shard>,
    session: Vec<u8>,
    transactions: AtomicI64,
}

impl ConfigStore {
    /// Behind a store.
    #[must_use]
    pub fn new(store: Arc<Shard>) -> Self {
        let session = rand::random::<[u8; 16]>().to_vec();
        Self { store, session, transactions: AtomicI64::new(0) }
    }

    /// The store.
    #[must_use]
    pub fn store(&self) -> &Arc<Shard> {
        &self.store
    }

    async fn all(&self, collection: &str) -> Result<Vec<Document>> {
        let lacks = || Refusal::new(Code::InternalError, "the configuration store sent no batch");
        let find = doc! { "find": collection, "batchSize": 10_000 };
        let mut reply = self.store.ask(DATABASE, find).await?;
        let (mut all, mut cursor) = batch_of(&mut reply).ok_or_else(lacks)?;
        while cursor != 0 {
            let more = doc! { "getMore": cursor, "collection": collection };
            let mut reply = self.store.ask(DATABASE, more).await?;
            let (batch, left) = batch_of(&mut reply).ok_or_else(lacks)?;
            all.extend(batch);
            cursor = left;
        }
        Ok(all)
    }

    async fn version(&self) -> Result<Option<Document>> {
        Ok(self.all("version").await?.into_iter().next())
    }

    /// Founds a cluster of shards, unless there is one.
    async fn found(&self) -> Result<()> {
        for collection in ["shards", "databases", "collections", "chunks"] {
            match self.store.ask(DATABASE, doc! { "create": collection }).await {
                Err(error) if error.code != Code::NamespaceExists as i32 => return Err(error),
                _ => {}
            }
        }
        let version =
            doc! { "_id": 1, "format": FORMAT, "cluster": ObjectId::new(), "epoch": 1_i64 };
        // Where another router was first, its document stands.
        let insert = doc! { "insert": "version", "documents": [version], "writeConcern": { "w": "majority" } };
        self.store.ask(DATABASE, insert).await.map(drop)
    }

    /// Reads the table; founds a cluster where there is none.
    ///
    /// Errors: the store's; [`Code::InternalError`] where what is kept is no table.
    pub async fn read(&self) -> Result<Table> {
        if self.version().await?.is_none() {
            self.found().await?;
        }
        for _ in 0..READS {
            let Some(version) = self.version().await? else { continue };
            let kept = Kept {
                version: version.clone(),
                shards: self.all("shards").await?,
                databases: self.all("databases").await?,
                collections: self.all("collections").await?,
                chunks: self.all("chunks").await?,
            };
            if self.version().await?.as_ref() == Some(&version) {
                return Table::of(&kept)
                    .map_err(|error| Refusal::new(Code::InternalError, error.to_string()));
            }
        }
        refuse(
            Code::ConflictingOperationInProgress,
            "the routing table changes all the time; try again",
        )
    }

    /// Changes what is kept, where it is still that of `epoch`.
    ///
    /// Errors: [`Code::WriteConflict`] where it is not, or another change came first; the store's.
    pub async fn change(&self, epoch: i64, commands: Vec<Document>) -> Result<()> {
        let number = self.transactions.fetch_add(1, Ordering::Relaxed) + 1;
        let id = Binary { subtype: BinarySubtype::Uuid, bytes: self.session.clone() };
        let lsid = doc! { "id": id };
        let part = |mut command: Document, first: bool| {
            command.insert("lsid", lsid.clone());
            command.insert("txnNumber", number);
            command.insert("autocommit", false);
            if first {
                command.insert("startTransaction", true);
            }
            command
        };
        let bump = doc! { "q": { "_id": 1, "epoch": epoch }, "u": { "$inc": { "epoch": 1_i64 } } };
        let bump = doc! { "update": "version", "updates": [bump] };
        let bumped = self.store.ask(DATABASE, part(bump, true)).await?;
        let mut outcome = match bumped.get_i32("n") {
            Ok(1) => Ok(()),
            _ => refuse(Code::WriteConflict, "another router changed the routing table"),
        };
        for command in commands {
            if outcome.is_ok() {
                outcome = self.store.ask(DATABASE, part(command, false)).await.and_then(refused);
            }
        }
        let mut end = match &outcome {
            Ok(()) => doc! { "commitTransaction": 1, "writeConcern": { "w": "majority" } },
            Err(_) => doc! { "abortTransaction": 1 },
        };
        end = part(end, false);
        let ended = self.store.ask("admin", end).await;
        outcome.and(ended.map(drop))
    }
}

/// A reply that says that a document was not written.
fn refused(reply: Document) -> Result<()> {
    let first = reply.get_array("writeErrors").ok().and_then(|all| all.first()?.as_document());
    match first {
        None => Ok(()),
        Some(error) => Err(Refusal {
            code: error.get_i32("code").unwrap_or(Code::InternalError as i32),
            name: String::new(),
            message: error.get_str("errmsg").unwrap_or_default().to_owned(),
            labels: Vec::new(),
        }),
    }
}

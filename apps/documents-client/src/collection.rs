//! Insert, update, delete, find.

use std::collections::VecDeque;

use bson::oid::ObjectId;
use bson::{Bson, Document, doc};

use crate::client::Client;
use crate::error::ClientError;

/// What an update did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct UpdateResult {
    /// Documents the filter found.
    pub matched: u64,
    /// Documents that changed.
    pub modified: u64,
    /// The `_id` of a document that was made.
    pub upserted: Option<Bson>,
}

/// A collection of a client.
#[derive(Debug)]
pub struct Collection<'c> {
    client: &'c mut Client,
    database: String,
    name: String,
}

fn whole(document: &Document, field: &str) -> u64 {
    match document.get(field) {
        Some(Bson::Int32(value)) => u64::try_from(*value).unwrap_or(0),
        Some(Bson::Int64(value)) => u64::try_from(*value).unwrap_or(0),
        Some(Bson::Double(value)) => *value as u64,
        _ => 0,
    }
}

impl<'c> Collection<'c> {
    pub(crate) fn new(client: &'c mut Client, database: &str, name: &str) -> Self {
        Self { client, database: database.to_owned(), name: name.to_owned() }
    }

    /// Inserts a document; returns its `_id`, which is made where it has none.
    ///
    /// Errors: [`ClientError`], as code 11000 where the `_id` is taken.
    pub fn insert_one(&mut self, document: Document) -> Result<Bson, ClientError> {
        let ids = self.insert_many(vec![document])?;
        ids.into_iter().next().ok_or_else(|| ClientError::Protocol("no document".to_owned()))
    }

    /// Inserts documents in order, up to the first that cannot be inserted; returns their `_id`s.
    ///
    /// Errors: [`ClientError::Write`] with the number of those that were.
    pub fn insert_many(&mut self, documents: Vec<Document>) -> Result<Vec<Bson>, ClientError> {
        let mut ids = Vec::with_capacity(documents.len());
        let mut all = Vec::with_capacity(documents.len());
        for document in documents {
            // The `_id` comes first, as drivers have it.
            let id = document.get("_id").cloned().unwrap_or_else(|| ObjectId::new().into());
            let mut whole = doc! { "_id": id.clone() };
            whole.extend(document.into_iter().filter(|(name, _)| name != "_id"));
            ids.push(id);
            all.push(Bson::Document(whole));
        }
        let command = doc! { "insert": &self.name, "documents": all };
        self.client.write(&self.database, command, true)?;
        Ok(ids)
    }

    /// Changes the first document that the filter finds.
    ///
    /// Errors: [`ClientError`].
    pub fn update_one(
        &mut self,
        filter: Document,
        update: impl Into<Bson>,
        upsert: bool,
    ) -> Result<UpdateResult, ClientError> {
        self.update(filter, update.into(), upsert, false)
    }

    /// Changes every document that the filter finds. It is not sent again where its outcome is lost.
    ///
    /// Errors: [`ClientError`].
    pub fn update_many(
        &mut self,
        filter: Document,
        update: impl Into<Bson>,
        upsert: bool,
    ) -> Result<UpdateResult, ClientError> {
        self.update(filter, update.into(), upsert, true)
    }

    fn update(
        &mut self,
        filter: Document,
        update: Bson,
        upsert: bool,
        multi: bool,
    ) -> Result<UpdateResult, ClientError> {
        let one = doc! { "q": filter, "u": update, "upsert": upsert, "multi": multi };
        let command = doc! { "update": &self.name, "updates": [one] };
        let reply = self.client.write(&self.database, command, !multi)?;
        let upserted = reply
            .get_array("upserted")
            .ok()
            .and_then(|all| all.first()?.as_document()?.get("_id").cloned());
        let matched = whole(&reply, "n") - u64::from(upserted.is_some());
        Ok(UpdateResult { matched, modified: whole(&reply, "nModified"), upserted })
    }

    /// Deletes the first document that the filter finds; returns how many that were.
    ///
    /// Errors: [`ClientError`].
    pub fn delete_one(&mut self, filter: Document) -> Result<u64, ClientError> {
        self.delete(filter, 1)
    }

    /// Deletes every document that the filter finds; returns how many that were. It is not sent again where
    /// its outcome is lost.
    ///
    /// Errors: [`ClientError`].
    pub fn delete_many(&mut self, filter: Document) -> Result<u64, ClientError> {
        self.delete(filter, 0)
    }

    fn delete(&mut self, filter: Document, limit: i32) -> Result<u64, ClientError> {
        let one = doc! { "q": filter, "limit": limit };
        let command = doc! { "delete": &self.name, "deletes": [one] };
        let reply = self.client.write(&self.database, command, limit == 1)?;
        Ok(whole(&reply, "n"))
    }

    /// The first document that the filter finds.
    ///
    /// Errors: [`ClientError`].
    pub fn find_one(&mut self, filter: Document) -> Result<Option<Document>, ClientError> {
        self.client.first(&self.database, &self.name, filter)
    }

    /// All documents that the filter finds, batch by batch. `options` are fields of the command, as in
    /// `sort`, `limit`, `projection`, `batchSize`.
    ///
    /// Errors: [`ClientError`].
    pub fn find(self, filter: Document, options: Document) -> Result<Find<'c>, ClientError> {
        let mut find = doc! { "find": &self.name, "filter": filter };
        find.extend(options);
        let mut reply = self.client.run(&self.database, find)?;
        let (ready, cursor) = batch_of(&mut reply)?;
        Ok(Find { collection: self, cursor, ready })
    }
}

/// The documents of a batch, and the cursor's number.
pub(crate) fn batch_of(reply: &mut Document) -> Result<(VecDeque<Document>, i64), ClientError> {
    let lacks = |what: &str| ClientError::Protocol(format!("a reply without {what}"));
    let Some(Bson::Document(mut cursor)) = reply.remove("cursor") else {
        return Err(lacks("a cursor"));
    };
    let batch = cursor.remove("firstBatch").or_else(|| cursor.remove("nextBatch"));
    let Some(Bson::Array(batch)) = batch else { return Err(lacks("a batch")) };
    let documents = batch.into_iter().filter_map(|one| match one {
        Bson::Document(document) => Some(document),
        _ => None,
    });
    Ok((documents.collect(), cursor.get_i64("id").unwrap_or(0)))
}

/// The documents of a query. Dropped before its end, it closes its cursor.
#[derive(Debug)]
pub struct Find<'c> {
    collection: Collection<'c>,
    cursor: i64,
    ready: VecDeque<Document>,
}

impl Iterator for Find<'_> {
    type Item = Result<Document, ClientError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.ready.is_empty() && self.cursor != 0 {
            let Collection { client, database, name } = &mut self.collection;
            let more = doc! { "getMore": self.cursor, "collection": name.as_str() };
            match client.run(database, more).and_then(|mut reply| batch_of(&mut reply)) {
                Ok((ready, cursor)) => (self.ready, self.cursor) = (ready, cursor),
                Err(error) => {
                    self.cursor = 0;
                    return Some(Err(error));
                }
            }
        }
        self.ready.pop_front().map(Ok)
    }
}

impl Drop for Find<'_> {
    fn drop(&mut self) {
        if self.cursor != 0 {
            let Collection { client, database, name } = &mut self.collection;
            let kill = doc! { "killCursors": name.as_str(), "cursors": [self.cursor] };
            // It times out by itself otherwise.
            let _ = client.run(database, kill);
        }
    }
}

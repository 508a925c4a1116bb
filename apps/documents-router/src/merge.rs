//! Documents of several shards as one result: in an order, through a pipeline, batch by batch.
//!
//! Invariant: no shard is asked for more while documents of it wait that the order needs first, so what waits is
//! one batch of each shard at most.

use std::collections::VecDeque;
use std::sync::Arc;

use beeline_documents_query::expression::Scope;
use beeline_documents_query::pipeline::{Flow, NoOutside, Pipeline};
use beeline_documents_query::projection::Projection;
use beeline_documents_query::sort::Order;
use bson::{Bson, Document, doc};

use crate::error::{Result, refuse};
use crate::shard::{Shard, batch_of};
use beeline_documents_query::error::Code;

/// Most bytes of a batch.
const BATCH_BYTES: usize = 16 << 20;

/// One shard's part of a result.
#[derive(Debug)]
pub(crate) struct Part {
    pub(crate) shard: Arc<Shard>,
    /// Its cursor there; 0: nothing is left there.
    cursor: i64,
    ready: VecDeque<Document>,
    /// What the first of those is sorted by.
    key: Option<Vec<Bson>>,
}

impl Part {
    /// Of a shard's first batch.
    ///
    /// Errors: the reply has none.
    pub(crate) fn new(shard: Arc<Shard>, mut reply: Document) -> Result<Self> {
        match batch_of(&mut reply) {
            Some((ready, cursor)) => Ok(Self { shard, cursor, ready: ready.into(), key: None }),
            None => refuse(Code::InternalError, "a shard answered a query without a batch"),
        }
    }

    fn is_over(&self) -> bool {
        self.cursor == 0 && self.ready.is_empty()
    }

    async fn fill(&mut self, place: (&str, &str), batch: i64) -> Result<()> {
        while self.ready.is_empty() && self.cursor != 0 {
            let more = doc! { "getMore": self.cursor, "collection": place.1, "batchSize": batch };
            // A reply that is lost leaves nothing to go on with.
            let cursor = std::mem::take(&mut self.cursor);
            let mut reply = self.shard.ask(place.0, more).await?;
            match batch_of(&mut reply) {
                Some((ready, left)) => (self.ready, self.cursor) = (ready.into(), left),
                None => {
                    self.cursor = cursor;
                    return refuse(Code::InternalError, "a shard answered getMore without a batch");
                }
            }
        }
        Ok(())
    }

    fn take(&mut self) -> Option<Document> {
        self.key = None;
        self.ready.pop_front()
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Merged {
    database: String,
    collection: String,
    parts: Vec<Part>,
    order: Option<Order>,
    skip: u64,
    limit: Option<u64>,
    projection: Option<Projection>,
    pipeline: Option<Pipeline>,
    variables: Document,
    /// Made, and not sent.
    ready: VecDeque<Document>,
    finished: bool,
    /// Documents a shard is asked for at once.
    pub(crate) batch: i64,
}

impl Merged {
    pub(crate) fn new(database: &str, collection: &str, parts: Vec<Part>) -> Self {
        Self {
            database: database.to_owned(),
            collection: collection.to_owned(),
            parts,
            order: None,
            skip: 0,
            limit: None,
            projection: None,
            pipeline: None,
            variables: Document::new(),
            ready: VecDeque::new(),
            finished: false,
            batch: 1000,
        }
    }

    pub(crate) fn namespace(&self) -> String {
        format!("{}.{}", self.database, self.collection)
    }

    pub(crate) fn ordered(mut self, order: Option<Order>) -> Self {
        self.order = order.filter(|order| !order.is_empty());
        self
    }

    pub(crate) fn between(mut self, skip: u64, limit: Option<u64>) -> Self {
        (self.skip, self.limit) = (skip, limit);
        self
    }

    pub(crate) fn projected(mut self, projection: Option<Projection>) -> Self {
        self.projection = projection;
        self
    }

    pub(crate) fn through(mut self, pipeline: Pipeline, variables: Document) -> Self {
        (self.pipeline, self.variables) = (Some(pipeline), variables);
        self
    }

    /// The next document of the shards, in the order.
    async fn next(&mut self) -> Result<Option<Document>> {
        let place = (self.database.as_str(), self.collection.as_str());
        let Some(order) = &self.order else {
            for part in &mut self.parts {
                part.fill(place, self.batch).await?;
                if let Some(document) = part.take() {
                    return Ok(Some(document));
                }
            }
            return Ok(None);
        };
        for part in &mut self.parts {
            part.fill(place, self.batch).await?;
            if part.key.is_none() {
                part.key = part.ready.front().map(|document| order.key(document));
            }
        }
        let first = self.parts.iter_mut().filter(|part| !part.is_over()).min_by(|a, b| {
            match (&a.key, &b.key) {
                (Some(a), Some(b)) => order.compare_keys(a, b),
                _ => std::cmp::Ordering::Equal,
            }
        });
        Ok(first.and_then(Part::take))
    }

    /// The next document of the result, before its projection.
    async fn counted(&mut self) -> Result<Option<Document>> {
        loop {
            if self.limit == Some(0) {
                return Ok(None);
            }
            let Some(document) = self.next().await? else { return Ok(None) };
            if self.skip > 0 {
                self.skip -= 1;
                continue;
            }
            if let Some(limit) = &mut self.limit {
                *limit -= 1;
            }
            return Ok(Some(document));
        }
    }

    /// Makes at least one more document, unless there is none.
    async fn make(&mut self) -> Result<()> {
        if self.finished {
            return Ok(());
        }
        let Some(mut pipeline) = self.pipeline.take() else {
            match self.counted().await? {
                Some(document) => {
                    let variables = std::mem::take(&mut self.variables);
                    let scope = Scope::with_variables(&variables);
                    let document = match &self.projection {
                        Some(projection) => projection.apply(&document, None, &scope)?,
                        None => document,
                    };
                    self.ready.push_back(document);
                    self.variables = variables;
                }
                None => self.finished = true,
            }
            return Ok(());
        };
        let mut made = Vec::new();
        let variables = std::mem::take(&mut self.variables);
        while made.is_empty() && !self.finished {
            let next = self.counted().await?;
            let scope = Scope::with_variables(&variables);
            let enough = match next {
                Some(document) => {
                    pipeline.push(document, &scope, &mut NoOutside, &mut made)? == Flow::Enough
                }
                None => true,
            };
            if enough {
                pipeline.finish(&scope, &mut NoOutside, &mut made)?;
                self.finished = true;
            }
        }
        self.variables = variables;
        self.pipeline = Some(pipeline);
        self.ready.extend(made);
        Ok(())
    }

    /// The next batch: at most so many documents. True: nothing is left.
    ///
    /// Errors: a shard's, the pipeline's.
    pub(crate) async fn take(&mut self, most: usize) -> Result<(Vec<Vec<u8>>, bool)> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        loop {
            while let Some(next) = self.ready.pop_front() {
                let encoded = match next.to_vec() {
                    Ok(encoded) => encoded,
                    Err(error) => return refuse(Code::NonConformantBson, error.to_string()),
                };
                if batch.len() >= most || bytes + encoded.len() > BATCH_BYTES && !batch.is_empty() {
                    self.ready.push_front(next);
                    return Ok((batch, false));
                }
                bytes += encoded.len();
                batch.push(encoded);
            }
            if self.finished {
                return Ok((batch, true));
            }
            if batch.len() >= most {
                // Whether something is left shows without another document only where all are over.
                let over = self.pipeline.is_none()
                    && (self.limit == Some(0) || self.parts.iter().all(Part::is_over));
                return Ok((batch, over));
            }
            self.make().await?;
        }
    }

    /// Closes what is open in the shards.
    pub(crate) async fn close(self) {
        for part in self.parts {
            if part.cursor != 0 {
                let kill = doc! { "killCursors": &self.collection, "cursors": [part.cursor] };
                // It times out by itself otherwise.
                let _ = part.shard.ask(&self.database, kill).await;
            }
        }
    }
}

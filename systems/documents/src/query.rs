//! One query: a walk through a collection, sorted, skipped, limited and projected.

use std::collections::VecDeque;
use std::sync::Arc;

use beeline_documents_query::Filter;
use beeline_documents_query::error::{Code, QueryError, Result, fail};
use beeline_documents_query::expression::Scope;
use beeline_documents_query::memory::{Lease, Memory};
use beeline_documents_query::projection::Projection;
use beeline_documents_query::sort::Order;
use bson::{Bson, Document};

use crate::catalog::{Collection, Database};
use crate::cursor::BATCH_BYTES;
use crate::engine::Engine;
use crate::operation::Operation;
use crate::plan::{Plan, choose};
use crate::scan::{Found, SLICE, SLICE_BYTES, Scan, decode, some_fields};
use crate::write::encode;

/// What is asked of a collection.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    /// Which documents.
    pub filter: Option<Filter>,
    /// In which order.
    pub order: Option<Order>,
    /// How many of the first are passed over.
    pub skip: u64,
    /// How many at most.
    pub limit: Option<u64>,
    /// What of them.
    pub projection: Option<Projection>,
    /// Which index.
    pub hint: Option<Bson>,
    /// Variables of the command.
    pub variables: Document,
    /// When the command gives up, milliseconds since 1970.
    pub deadline_ms: Option<u64>,
    /// Stays at the end of a capped collection.
    pub tailing: bool,
    /// The operation it is a part of.
    pub operation: Operation,
}

/// A query that is being answered.
#[derive(Debug)]
pub struct Query {
    database: Option<Arc<Database>>,
    collection: String,
    uuid: [u8; 16],
    scan: Option<Scan>,
    asked: Asked,
    skipped: u64,
    returned: u64,
    /// Top-level fields whoever takes the documents looks at.
    needed: Option<Vec<String>>,
    sorted: bool,
    tailing: bool,
}

impl Query {
    /// A query of a collection.
    ///
    /// Errors: a hint that names no index.
    pub fn new(database: &Arc<Database>, collection: &Collection, asked: Asked) -> Result<Self> {
        let filter = asked.filter.clone().unwrap_or_else(Filter::all);
        let implied = filter.implied(&Scope::with_variables(&asked.variables));
        let planned = implied.as_ref().unwrap_or(&filter);
        let plan = choose(collection, planned, asked.order.as_ref(), asked.hint.as_ref())?;
        let sorted = plan.sorted;
        let mut scan = Scan::new(collection, plan, filter);
        let tailing = asked.tailing;
        if tailing {
            scan.tail();
        }
        Ok(Self {
            database: Some(Arc::clone(database)),
            collection: collection.name.clone(),
            uuid: collection.uuid,
            scan: Some(scan),
            asked,
            skipped: 0,
            returned: 0,
            needed: None,
            sorted,
            tailing,
        })
    }

    /// A query that finds nothing.
    #[must_use]
    pub fn of_nothing() -> Self {
        Self {
            database: None,
            collection: String::new(),
            uuid: [0; 16],
            scan: None,
            asked: Asked::default(),
            skipped: 0,
            returned: 0,
            needed: None,
            sorted: true,
            tailing: false,
        }
    }

    /// Says which fields of its documents are looked at.
    pub fn needs(&mut self, fields: Option<Vec<String>>) {
        self.needed = fields;
    }

    /// A document it delivered, as far as it is looked at.
    ///
    /// Errors: damaged bytes.
    pub fn decode(&self, bytes: &[u8]) -> Result<Document> {
        match &self.needed {
            Some(fields) => some_fields(bytes, fields),
            None => decode(bytes),
        }
    }

    /// The plan, if there is a collection.
    #[must_use]
    pub fn plan(&self) -> Option<&Plan> {
        self.scan.as_ref().map(Scan::plan)
    }

    /// What its documents satisfy, as the choice of an index saw it.
    #[must_use]
    pub fn planned(&self) -> Option<Filter> {
        let filter = self.asked.filter.as_ref()?;
        let implied = filter.implied(&Scope::with_variables(&self.asked.variables));
        Some(implied.unwrap_or_else(|| filter.clone()))
    }

    /// Documents and index entries looked at.
    #[must_use]
    pub fn examined(&self) -> (u64, u64) {
        self.scan.as_ref().map_or((0, 0), |scan| (scan.examined, scan.keys_examined))
    }

    /// True when the order did not come from an index.
    #[must_use]
    pub fn sorts(&self) -> bool {
        !self.sorted
    }

    /// True when nothing is left.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.scan.as_ref().is_none_or(|scan| scan.done)
            || !self.tailing && self.asked.limit.is_some_and(|limit| self.returned >= limit)
    }

    /// Goes on until there are `wanted` documents more, or none are left.
    ///
    /// Errors: those of expressions, the store's, a collection that was dropped, a deadline.
    pub fn fill(
        &mut self,
        engine: &Engine,
        wanted: usize,
        out: &mut VecDeque<Vec<u8>>,
    ) -> Result<()> {
        self.fill_within(engine, wanted, BATCH_BYTES, out)
    }

    fn fill_within(
        &mut self,
        engine: &Engine,
        wanted: usize,
        most_bytes: usize,
        out: &mut VecDeque<Vec<u8>>,
    ) -> Result<()> {
        if !self.sorted {
            return self.fill_sorted(engine, out);
        }
        let (start, mut bytes) = (out.len(), 0);
        while out.len() - start < wanted && bytes < most_bytes && !self.is_done() {
            let missing = (wanted - (out.len() - start)) as u64 + (self.asked.skip - self.skipped);
            let left = self
                .asked
                .limit
                .map_or(u64::MAX, |limit| limit - self.returned + self.asked.skip - self.skipped);
            let most = usize::try_from(missing.min(left)).unwrap_or(usize::MAX).min(SLICE);
            let before = self.examined();
            let found = self.slice(engine, most)?;
            let idle = found.is_empty() && self.examined() == before;
            for one in found {
                if self.skipped < self.asked.skip {
                    self.skipped += 1;
                    continue;
                }
                self.returned += 1;
                let document = self.projected(one.bytes)?;
                bytes += document.len();
                out.push_back(document);
            }
            if self.tailing && idle {
                break;
            }
        }
        Ok(())
    }

    /// The same, of fewer bytes; what is appended counts as the operation's until the lease is given back.
    ///
    /// Errors: as [`Query::fill`]; more than the operation may keep.
    pub fn fill_counted(
        &mut self,
        engine: &Engine,
        wanted: usize,
        out: &mut VecDeque<Vec<u8>>,
    ) -> Result<Lease> {
        let start = out.len();
        self.fill_within(engine, wanted, SLICE_BYTES, out)?;
        let mut lease = Lease::of(&self.asked.operation.memory);
        lease.grow(out.iter().skip(start).map(Vec::len).sum(), Memory::alone)?;
        Ok(lease)
    }

    fn slice(&mut self, engine: &Engine, most: usize) -> Result<Vec<Found>> {
        let (Some(database), Some(scan)) = (&self.database, &mut self.scan) else {
            return Ok(Vec::new());
        };
        if self.asked.deadline_ms.is_some_and(|deadline| engine.now_ms() > deadline) {
            return fail(Code::MaxTimeMsExpired, "operation exceeded time limit");
        }
        let scope = Scope::with_variables(&self.asked.variables);
        let mut found = Vec::new();
        engine.within(database, &self.asked.operation, |row| {
            let known = database.collection(&self.collection);
            scan.check(row, known.filter(|known| known.uuid == self.uuid).as_deref())?;
            scan.slice(row, &scope, most, &mut found)
        })?;
        engine.metrics.documents_examined.add_shared(found.len() as u64);
        Ok(found)
    }

    fn projected(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        match (&self.asked.projection, &self.scan) {
            (Some(projection), Some(scan)) => {
                let document = match projection.keeps_only() {
                    Some(fields) => some_fields(&bytes, &fields)?,
                    None => decode(&bytes)?,
                };
                let scope = Scope::with_variables(&self.asked.variables);
                encode(&projection.apply(&document, Some(scan.filter()), &scope)?)
            }
            _ => Ok(bytes),
        }
    }

    /// Collects everything, sorts, and hands over what is wanted.
    fn fill_sorted(&mut self, engine: &Engine, out: &mut VecDeque<Vec<u8>>) -> Result<()> {
        let Some(order) = self.asked.order.clone() else {
            return Err(QueryError::new(Code::InternalError, "a sort without an order"));
        };
        let keep = self
            .asked
            .limit
            .and_then(|limit| usize::try_from(limit.saturating_add(self.asked.skip)).ok());
        let names: Vec<String> =
            order.fields.iter().filter_map(|(path, _)| path.first().cloned()).collect();
        let mut kept: Vec<(Vec<Bson>, Vec<u8>)> = Vec::new();
        let mut lease = Lease::of(&self.asked.operation.memory);
        let trim = |kept: &mut Vec<(Vec<Bson>, Vec<u8>)>, keep: usize| {
            kept.sort_by(|(a, _), (b, _)| order.compare_keys(a, b));
            kept.truncate(keep);
        };
        while self.scan.as_ref().is_some_and(|scan| !scan.done) {
            for found in self.slice(engine, usize::MAX)? {
                lease.grow(found.bytes.len() + 64, Memory::alone)?;
                kept.push((order.key(&some_fields(&found.bytes, &names)?), found.bytes));
            }
            if let Some(keep) = keep
                && kept.len() > keep.saturating_mul(2).max(1024)
            {
                trim(&mut kept, keep);
                lease.shrink_to(kept.iter().map(|(_, document)| document.len() + 64).sum());
            }
        }
        trim(&mut kept, keep.unwrap_or(usize::MAX));
        for (_, document) in
            kept.into_iter().skip(usize::try_from(self.asked.skip).unwrap_or(usize::MAX))
        {
            out.push_back(self.projected(document)?);
        }
        Ok(())
    }
}

//! TTL indexes: documents whose date is long enough past are deleted.

use beeline_documents_query::Filter;
use beeline_documents_query::error::Result;
use beeline_documents_query::expression::Scope;
use bson::{DateTime, doc};

use crate::engine::Engine;
use crate::log::Recorder;
use crate::plan::choose;
use crate::scan::Scan;
use crate::write;

/// Deletes what is due, a slice at a time; returns how many.
///
/// Errors: the store's.
pub fn expire(engine: &Engine) -> Result<u64> {
    let now = i64::try_from(engine.now_ms()).unwrap_or(i64::MAX);
    let mut expired = 0;
    for database in engine.databases() {
        for collection in database.collections() {
            for index in collection.indexes.iter().filter(|index| index.ready) {
                let (Some(seconds), Some((path, _))) = (index.expires_s, index.fields.first())
                else {
                    continue;
                };
                let until = DateTime::from_millis(now.saturating_sub(seconds.saturating_mul(1000)));
                let mut due = doc! { path.join("."): { "$lte": until } };
                // Documents that a partial index leaves out do not end by it.
                if let Some((partial, _)) = &index.partial {
                    due = doc! { "$and": [due, partial.clone()] };
                }
                let filter = Filter::parse(&due)?;
                let mut scan: Option<Scan> = None;
                loop {
                    let done = engine.with(&database, |row| {
                        let Some(known) = database
                            .collection(&collection.name)
                            .filter(|known| known.id == collection.id)
                            // An index that was dropped or changed meanwhile ends nothing any more.
                            .filter(|known| {
                                known.indexes.iter().any(|now| {
                                    now.id == index.id && now.expires_s == index.expires_s
                                })
                            })
                        else {
                            return Ok(true);
                        };
                        if scan.is_none() {
                            scan = Some(Scan::new(
                                &known,
                                choose(&known, &filter, None, None)?,
                                filter.clone(),
                            ));
                        }
                        let Some(scan) = &mut scan else { return Ok(true) };
                        if scan.check(row, Some(&known)).is_err() {
                            return Ok(true);
                        }
                        let mut found = Vec::new();
                        scan.slice(row, &Scope::default(), 256, &mut found)?;
                        for one in &found {
                            write::delete(row, &known, one, &mut Recorder::plain(engine))?;
                            expired += 1;
                        }
                        Ok(scan.done)
                    })?;
                    if done {
                        break;
                    }
                }
            }
        }
    }
    engine.metrics.documents_expired.add_shared(expired);
    Ok(expired)
}

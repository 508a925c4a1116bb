//! What a primary answers members that copy it.
//!
//! The command is for members alone: it carries the cluster's identity, which only their configurations hold.

use beeline_documents_query::error::{Code, Result, fail};
use beeline_documents_query::value::integral;
use bson::{Bson, Document, doc};

use crate::engine::{lock, whole_field};
use crate::replica::conduct::Report;
use crate::replica::source::{COMMAND, binary, bytes_of, spot_from, spot_to};
use crate::replica::{Replica, State};
use crate::reply::Reply;
use crate::store::Store as _;

/// Bytes of values in one answer.
const ANSWERED_BYTES: usize = 8 << 20;
/// Most bytes that a member may ask for at once.
const MOST_ASKED: usize = 64 << 20;

fn number(body: &Document, field: &str) -> Result<u64> {
    match whole_field(body, field).map(u64::try_from) {
        Some(Ok(value)) => Ok(value),
        Some(Err(_)) => fail(Code::BadValue, format!("{COMMAND} takes no negative {field}")),
        None => fail(Code::NoSuchField, format!("{COMMAND} needs the number {field}")),
    }
}

fn most(body: &Document) -> Result<usize> {
    Ok(usize::try_from(number(body, "most")?).unwrap_or(usize::MAX).min(MOST_ASKED))
}

fn row(body: &Document) -> Result<Vec<u8>> {
    match bytes_of(body.get("row")) {
        Some(row) => Ok(row),
        None => fail(Code::NoSuchField, format!("{COMMAND} needs the bytes row")),
    }
}

fn rows_of<'b>(all: impl IntoIterator<Item = &'b Vec<u8>>) -> Vec<Bson> {
    all.into_iter().map(|bytes| binary(bytes)).collect()
}

impl Replica {
    /// Who asks: the term, the member, and this moment.
    ///
    /// Errors: a stranger, a term in which this member does not lead.
    pub(crate) fn admit_member(&self, body: &Document) -> Result<(u64, u16, u64)> {
        if whole_field(body, "cluster").map(|cluster| cluster as u64) != Some(self.options.cluster)
        {
            return fail(Code::Unauthorized, "this member belongs to another cluster");
        }
        let (term, member) = (number(body, "term")?, number(body, "member")? as u16);
        if !self.options.members.contains_key(&member) && !self.agreed.now().counts(member) {
            return fail(
                Code::Unauthorized,
                format!(
                    "--documents-members of member {} names no member {member}",
                    self.options.me
                ),
            );
        }
        // What fits into a segment here is to fit there.
        if let Some(segment) = whole_field(body, "segment").map(|bytes| bytes.max(0) as usize)
            && segment < self.options.longest_batch
        {
            let own = self.options.longest_batch;
            return fail(
                Code::Unauthorized,
                format!(
                    "segments of member {member} hold {segment} bytes, those of member {} {own}: give all members the same --segment-size",
                    self.options.me
                ),
            );
        }
        if self.state() != State::Primary || !self.agreed.is(term, self.options.me) {
            return fail(
                Code::NotWritablePrimary,
                format!("this member does not lead in term {term}"),
            );
        }
        let now_ms = self.agreed.gate.now_ms();
        if let Ok(named) = body.get_array("members") {
            let named = named.iter().filter_map(integral).filter_map(|one| u16::try_from(one).ok());
            lock(&self.settings).insert(member, (named.collect(), now_ms));
        }
        self.heard_from(term, member, now_ms);
        Ok((term, member, now_ms))
    }

    /// Answers another member.
    ///
    /// Errors: a stranger, a term in which this member does not lead, the store's.
    pub fn answer(&self, body: &Document, may_wait: bool) -> Result<Reply> {
        let (term, member, now_ms) = self.admit_member(body)?;
        let answer = match body.get_str(COMMAND).unwrap_or_default() {
            "report" => {
                // What this member never gave out cannot have been applied.
                let most = self.store.clock().map_or(0, |clock| clock.last());
                let report = Report {
                    applied: number(body, "applied")?.min(most),
                    durable: number(body, "durable")?.min(most),
                    at_ms: now_ms,
                };
                self.take_report(term, member, report, number(body, "state")? as u8);
                doc! { "commit": self.commit() as i64, "latest": self.store.last().place.time as i64 }
            }
            "entries" => {
                let (after, most) = (number(body, "after")?, most(body)?);
                let Some(fetched) = self.store.read(after, most)? else {
                    return Ok(Reply::Document(doc! { "gone": true, "ok": 1.0 }));
                };
                if fetched.entries.is_empty() && fetched.upto <= after && may_wait {
                    return Ok(Reply::Later(number(body, "wait")?.min(5000)));
                }
                doc! { "entries": rows_of(&fetched.entries), "upto": fetched.upto as i64 }
            }
            "find" => {
                let spots = match body.get_array("spots") {
                    Ok(spots) => spots
                        .iter()
                        .filter_map(|spot| spot.as_document().and_then(spot_from))
                        .collect::<Vec<_>>(),
                    Err(_) => return fail(Code::NoSuchField, format!("{COMMAND} needs spots")),
                };
                let index = self.store.find(&spots)?.map_or(-1, |index| index as i64);
                doc! { "index": index }
            }
            "rows" => {
                // First the place, then the rows: one that comes later is in the log behind the place.
                let last = spot_to(&self.store.last());
                doc! { "rows": rows_of(&self.store.rows()), "last": last }
            }
            "page" => {
                let after = bytes_of(body.get("after"));
                let (pairs, whole) = self.store.page(&row(body)?, after, most(body)?)?;
                let (keys, values): (Vec<_>, Vec<_>) = pairs.into_iter().unzip();
                doc! { "keys": rows_of(&keys), "values": rows_of(&values), "whole": whole }
            }
            "values" => {
                let keys: Vec<Vec<u8>> = match body.get_array("keys") {
                    Ok(keys) => keys.iter().filter_map(|key| bytes_of(Some(key))).collect(),
                    Err(_) => return fail(Code::NoSuchField, format!("{COMMAND} needs keys")),
                };
                let values: Vec<Bson> = self
                    .store
                    .values(&row(body)?, &keys, ANSWERED_BYTES)?
                    .into_iter()
                    .map(|value| value.map_or(Bson::Null, |value| binary(&value)))
                    .collect();
                doc! { "values": values }
            }
            other => return fail(Code::CommandNotFound, format!("no such request: {other:?}")),
        };
        let mut answer = answer;
        answer.insert("ok", 1.0);
        Ok(Reply::Document(answer))
    }
}

//! Commands that are begun and taken later, so that one thread has many clients at work.
//!
//! Over a channel a command is on its way once it was begun. Over the wire it is sent when its outcome is taken.

use std::time::Instant;

use beeline_documents_channel::{MessageType, RequestError};
use bson::oid::ObjectId;
use bson::{Bson, Document};

use crate::client::Client;
use crate::collection::batch_of;
use crate::error::{ClientError, check_command, check_writes};
use crate::raw;
use crate::transport::Carrier;

/// Looks at a channel between two looks at the clock.
const LOOKS: u32 = 256;

/// A command that was begun. Its outcome waits in its client until [`Client::finish_find_one`] or
/// [`Client::finish_insert_one`] takes it.
#[derive(Debug)]
#[must_use = "the outcome of a command has to be taken"]
pub struct Begun {
    /// Its number in the channel that was made at this time.
    sent: Option<(u32, Instant)>,
    kind: MessageType,
    name: String,
    body: Vec<u8>,
    /// It may be sent again.
    again: bool,
    id: Bson,
    looks: u32,
}

impl Client {
    /// Begins a find of the first document that a filter finds.
    ///
    /// Errors: [`ClientError`]; nothing was begun.
    pub fn begin_find_one(
        &mut self,
        database: &str,
        collection: &str,
        filter: &Document,
    ) -> Result<Begun, ClientError> {
        let body = raw::find_one(database, collection, &bytes_of(filter)?);
        self.begin(MessageType::Query, database, body, true, Bson::Null)
    }

    /// Begins an insertion of a document, which is sent again where its outcome is lost if this client numbers its
    /// writes ([`crate::Options::retry_writes`]).
    ///
    /// Errors: [`ClientError`]; nothing was begun.
    pub fn begin_insert_one(
        &mut self,
        database: &str,
        collection: &str,
        document: Document,
    ) -> Result<Begun, ClientError> {
        let (id, document) = match document.iter().next() {
            Some((first, id)) if first == "_id" => (id.clone(), document),
            _ => {
                let id = document.get("_id").cloned();
                let id = id.unwrap_or_else(|| ObjectId::new().into());
                let mut whole = bson::doc! { "_id": id.clone() };
                whole.extend(document.into_iter().filter(|(name, _)| name != "_id"));
                (id, whole)
            }
        };
        let numbered = self.number();
        let again = numbered.is_some();
        let body = raw::insert_one(database, collection, &bytes_of(&document)?, numbered);
        self.begin(MessageType::Insert, database, body, again, id)
    }

    fn begin(
        &mut self,
        kind: MessageType,
        name: &str,
        body: Vec<u8>,
        again: bool,
        id: Bson,
    ) -> Result<Begun, ClientError> {
        let timeout = self.options.timeout;
        let sent = match self.road.open(&self.options)? {
            Carrier::Channel { channel, .. } => {
                let cut = name.len().min(beeline_documents_channel::message::LONGEST_NAME);
                channel.submit(kind, &name.as_bytes()[..cut], &body, (0, 0), timeout).ok()
            }
            Carrier::Wire { .. } => None,
        };
        let sent = sent.map(|index| (index, self.road.made()));
        Ok(Begun { sent, kind, name: name.to_owned(), body, again, id, looks: 0 })
    }

    /// Whether the outcome can be taken without waiting for the store's answer; over the wire, always.
    pub fn is_ready(&mut self, begun: &mut Begun) -> bool {
        let Some((index, made)) = begun.sent else { return true };
        let is_its = made == self.road.made();
        let Some(Carrier::Channel { channel, .. }) = self.road.carrier_mut().filter(|_| is_its)
        else {
            return true;
        };
        begun.looks = begun.looks.wrapping_add(1);
        if begun.looks.is_multiple_of(LOOKS) {
            channel.expire();
        }
        channel.is_done(index)
    }

    /// Takes what a find found.
    ///
    /// Errors: [`ClientError`].
    pub fn finish_find_one(&mut self, begun: Begun) -> Result<Option<Document>, ClientError> {
        let bytes = self.take(begun)?;
        if let Some(found) = raw::first_of(&bytes) {
            return Ok(found);
        }
        let (batch, _) = batch_of(&mut check_command(document_of(&bytes)?)?)?;
        Ok(batch.into_iter().next())
    }

    /// Takes the `_id` of what was inserted.
    ///
    /// Errors: [`ClientError`], as code 11000 where the `_id` is taken.
    pub fn finish_insert_one(&mut self, mut begun: Begun) -> Result<Bson, ClientError> {
        let id = std::mem::replace(&mut begun.id, Bson::Null);
        let reply = self.take(begun)?;
        check_command(document_of(&reply)?).and_then(check_writes)?;
        Ok(id)
    }

    /// The bytes of the reply.
    fn take(&mut self, begun: Begun) -> Result<Vec<u8>, ClientError> {
        let Begun { sent, kind, name, body, again, .. } = begun;
        let limit = self.options.timeout;
        let Some((index, made)) = sent else {
            return self.carry(kind, &name, &body, again, limit);
        };
        let (spin, is_its) = (self.options.spin, made == self.road.made());
        let outcome = match self.road.carrier_mut() {
            Some(Carrier::Channel { channel, .. }) if is_its => channel.wait(index, spin),
            _ => Err(RequestError::Broken),
        };
        match outcome {
            Ok(bytes) => Ok(bytes),
            Err(RequestError::Refused { code, text }) => Err(ClientError::refused(code, text)),
            Err(RequestError::TimedOut) => Err(ClientError::TimedOut { limit }),
            Err(error) => {
                if is_its && error != RequestError::Corrupt {
                    self.road.broke();
                }
                if !again && error != RequestError::NotSent {
                    return Err(ClientError::OutcomeUnknown { reason: error.to_string() });
                }
                self.count_resent();
                self.carry(kind, &name, &body, again, limit)
            }
        }
    }
}

fn bytes_of(document: &Document) -> Result<Vec<u8>, ClientError> {
    document.to_vec().map_err(|error| ClientError::Protocol(error.to_string()))
}

fn document_of(bytes: &[u8]) -> Result<Document, ClientError> {
    Document::from_reader(bytes).map_err(|error| ClientError::Protocol(error.to_string()))
}

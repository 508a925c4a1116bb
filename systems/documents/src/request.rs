//! A command's document, read so that the documents a client writes stay bytes.
//!
//! They are decoded where something has to be known of them, and by what has to know it.

use beeline_documents_query::error::{Code, QueryError};
use bson::raw::{RawBsonRef, RawDocument};
use bson::{Bson, Document};

use crate::commands::Request;

/// Commands whose arrays of documents stay bytes.
const WRITES: &[(&str, &str)] =
    &[("insert", "documents"), ("update", "updates"), ("delete", "deletes")];

impl Request {
    /// One that does not run, for this reason.
    pub(crate) fn refused(reason: QueryError) -> Self {
        Self { refused: Some(reason), ..Self::default() }
    }
}

/// Reads a command, which has passed `check::document` where a stranger sent it. One that has its array of documents
/// twice is refused: documents would be left out without a word.
///
/// Errors: bytes that are no document.
pub fn read(bytes: &[u8]) -> bson::error::Result<Request> {
    let raw = RawDocument::from_bytes(bytes)?;
    let mut elements = raw.iter_elements();
    let first = elements.next().transpose()?;
    let name = first.as_ref().map_or("", |first| first.key().as_str());
    let Some((command, field)) = WRITES.iter().find(|(command, _)| *command == name) else {
        return Ok(Request { body: Document::from_reader(bytes)?, ..Request::default() });
    };
    let (mut request, mut has_field) = (Request::default(), false);
    for element in first.into_iter().map(Ok).chain(elements) {
        let element = element?;
        let (name, value) = (element.key().as_str(), element.value()?);
        if name == *field && std::mem::replace(&mut has_field, true) {
            let reason = format!("BSON field '{command}.{field}' is a duplicate field");
            return Ok(Request::refused(QueryError::new(Code::DuplicateField, reason)));
        }
        if name == *field
            && let RawBsonRef::Array(array) = value
            && let Some(documents) = documents_of(array)?
        {
            request.sequences.push((name.to_owned(), documents));
            continue;
        }
        request.body.insert(name, Bson::try_from(value)?);
    }
    Ok(request)
}

/// The bytes of an array's documents; `None`: it holds something else.
fn documents_of(array: &bson::RawArray) -> bson::error::Result<Option<Vec<Vec<u8>>>> {
    let mut documents = Vec::new();
    for one in array {
        match one? {
            RawBsonRef::Document(document) => documents.push(document.as_bytes().to_vec()),
            _ => return Ok(None),
        }
    }
    Ok(Some(documents))
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn what_a_command_writes_stays_bytes_and_every_other_field_is_decoded() {
        let one = doc! { "_id": 1 };
        let body = doc! { "insert": "c", "documents": [one.clone()], "$db": "d", "deletes": [1] };
        let request = read(&body.to_vec().unwrap()).unwrap();
        assert_eq!(request.name(), "insert");
        assert_eq!(request.sequences, [("documents".to_owned(), vec![one.to_vec().unwrap()])]);
        assert_eq!(request.body, doc! { "insert": "c", "$db": "d", "deletes": [1] });
    }

    #[test]
    fn an_array_that_comes_twice_is_refused() {
        for body in [
            doc! { "insert": "c", "documents": [{ "_id": 1 }], "other    ": [{ "_id": 2 }] },
            doc! { "insert": "c", "documents": [{ "_id": 1 }], "other    ": 2 },
            doc! { "insert": "c", "documents": 1, "other    ": [{ "_id": 2 }] },
        ] {
            let mut bytes = body.to_vec().unwrap();
            let at = bytes.windows(9).position(|one| one == b"other    ").unwrap();
            assert!(read(&bytes).unwrap().refused.is_none());
            bytes[at..at + 9].copy_from_slice(b"documents");
            let request = read(&bytes).unwrap();
            assert_eq!(request.refused.map(|error| error.code), Some(Code::DuplicateField));
            assert!(request.body.is_empty() && request.sequences.is_empty());
        }
    }

    #[test]
    fn an_array_of_something_else_and_another_commands_documents_are_decoded() {
        for body in [
            doc! { "insert": "c", "documents": [{ "_id": 1 }, 2], "$db": "d" },
            doc! { "aggregate": "c", "documents": [{ "_id": 1 }], "$db": "d" },
            doc! {},
        ] {
            let request = read(&body.to_vec().unwrap()).unwrap();
            assert_eq!((request.sequences.len(), request.body), (0, body));
        }
    }
}

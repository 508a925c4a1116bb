//! A find of one document as bytes, without documents in between.

use bson::raw::{RawBsonRef, RawDocument};
use bson::{Bson, Document};

fn text(out: &mut Vec<u8>, name: &[u8], text: &str) {
    out.push(0x02);
    out.extend(name);
    out.push(0);
    out.extend((text.len() as u32 + 1).to_le_bytes());
    out.extend(text.as_bytes());
    out.push(0);
}

/// The command; `filter` is a document's bytes.
pub(crate) fn find_one(database: &str, collection: &str, filter: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(filter.len() + collection.len() + database.len() + 80);
    out.extend([0; 4]);
    text(&mut out, b"find", collection);
    out.extend(b"\x03filter\0");
    out.extend(filter);
    out.extend(b"\x10limit\0\x01\0\0\0");
    out.extend(b"\x08singleBatch\0\x01");
    text(&mut out, b"$db", database);
    out.push(0);
    let length = out.len() as u32;
    out[..4].copy_from_slice(&length.to_le_bytes());
    out
}

/// The command that inserts a document, with the session and the number by which it is executed once.
pub(crate) fn insert_one(
    database: &str,
    collection: &str,
    document: &[u8],
    numbered: Option<(&[u8], i64)>,
) -> Vec<u8> {
    let mut out = Vec::with_capacity(document.len() + collection.len() + database.len() + 128);
    let length = |bytes: usize| (bytes as u32).to_le_bytes();
    out.extend([0; 4]);
    text(&mut out, b"insert", collection);
    out.extend(b"\x04documents\0");
    out.extend(length(4 + 3 + document.len() + 1));
    out.extend(b"\x030\0");
    out.extend(document);
    out.push(0);
    text(&mut out, b"$db", database);
    if let Some((session, number)) = numbered {
        out.extend(b"\x03lsid\0");
        out.extend(length(4 + 4 + 4 + 1 + session.len() + 1));
        out.extend(b"\x05id\0");
        out.extend(length(session.len()));
        out.push(bson::spec::BinarySubtype::Uuid.into());
        out.extend(session);
        out.push(0);
        out.extend(b"\x12txnNumber\0");
        out.extend(number.to_le_bytes());
    }
    out.push(0);
    let whole = length(out.len());
    out[..4].copy_from_slice(&whole);
    out
}

/// The first document of a reply's batch, if it has one; `None`: the reply is a refusal, or no such reply.
pub(crate) fn first_of(reply: &[u8]) -> Option<Option<Document>> {
    let reply = RawDocument::from_bytes(reply).ok()?;
    if reply.get_f64("ok").ok()? != 1.0 {
        return None;
    }
    let batch = reply.get_document("cursor").ok()?.get_array("firstBatch").ok()?;
    match batch.into_iter().next() {
        None => Some(None),
        Some(Ok(RawBsonRef::Document(found))) => Some(Some(document_of(found)?)),
        Some(_) => None,
    }
}

/// A document, each value copied once.
fn document_of(bytes: &RawDocument) -> Option<Document> {
    let mut document = Document::new();
    for element in bytes.iter_elements() {
        let element = element.ok()?;
        let value = value_of(element.value().ok()?)?;
        document.insert(element.key().as_str(), value);
    }
    Some(document)
}

fn value_of(value: RawBsonRef<'_>) -> Option<Bson> {
    Some(match value {
        RawBsonRef::Document(inner) => Bson::Document(document_of(inner)?),
        RawBsonRef::Array(all) => {
            let one = |one: bson::error::Result<RawBsonRef<'_>>| value_of(one.ok()?);
            Bson::Array(all.into_iter().map(one).collect::<Option<_>>()?)
        }
        RawBsonRef::String(text) => Bson::String(text.to_owned()),
        other => Bson::try_from(other).ok()?,
    })
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn values_of_every_type_are_read_as_the_library_reads_them() {
        let all = doc! {
            "double": 1.5, "text": "x\u{e4}", "inner": { "a": { "b": [1, "y", { "c": [] }] } }, "array": [1_i64, 2.5, null],
            "binary": bson::Binary { subtype: bson::spec::BinarySubtype::Uuid, bytes: vec![7; 16] },
            "id": bson::oid::ObjectId::new(), "yes": true, "date": bson::DateTime::from_millis(7),
            "number": 7,
            "stamp": bson::Timestamp { time: 1, increment: 2 }, "least": Bson::MinKey, "most": Bson::MaxKey,
            "price": "1.10".parse::<bson::Decimal128>().unwrap(), "undefined": Bson::Undefined,
            "code": Bson::JavaScriptCode("f()".to_owned()), "symbol": Bson::Symbol("s".to_owned()),
        };
        let bytes = all.to_vec().unwrap();
        let raw = RawDocument::from_bytes(&bytes[..]).unwrap();
        assert_eq!(document_of(raw), Some(all));
    }

    #[test]
    fn the_bytes_are_those_of_the_command_and_the_reply_is_read_as_it_is() {
        let filter = doc! { "_id": 7, "x": { "$gt": "y" } };
        let bytes = find_one("shop", "items", &filter.to_vec().unwrap());
        let command = doc! { "find": "items", "filter": filter, "limit": 1, "singleBatch": true, "$db": "shop" };
        assert_eq!(bytes, command.to_vec().unwrap());
        let document = doc! { "_id": 7, "x": "y" };
        for numbered in [None, Some((&[7_u8; 16][..], 5))] {
            let bytes = insert_one("shop", "items", &document.to_vec().unwrap(), numbered);
            let mut command =
                doc! { "insert": "items", "documents": [document.clone()], "$db": "shop" };
            if let Some((session, number)) = numbered {
                let id = bson::Binary {
                    subtype: bson::spec::BinarySubtype::Uuid,
                    bytes: session.to_vec(),
                };
                command.extend(doc! { "lsid": { "id": id }, "txnNumber": number });
            }
            assert_eq!(bytes, command.to_vec().unwrap());
        }
        let reply = |batch: Vec<Document>| {
            doc! { "cursor": { "firstBatch": batch, "id": 0_i64, "ns": "d.c" }, "ok": 1.0 }
        };
        let found = doc! { "_id": 7, "a": [1, { "b": 2 }] };
        let bytes = reply(vec![found.clone()]).to_vec().unwrap();
        assert_eq!(first_of(&bytes), Some(Some(found)));
        assert_eq!(first_of(&reply(Vec::new()).to_vec().unwrap()), Some(None));
        let refused = doc! { "ok": 0.0, "code": 13, "errmsg": "no" };
        assert_eq!(first_of(&refused.to_vec().unwrap()), None);
        (0..bytes.len()).for_each(|cut| assert_eq!(first_of(&bytes[..cut]), None));
    }
}

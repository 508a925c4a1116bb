//! Inserts of bytes that no driver writes: what is stored can be read by every later command, and nothing that a
//! client sent is left out without a word.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use beeline_documents::commands::Session;
use beeline_documents::wire;
use bson::spec::BinarySubtype;
use bson::{Binary, Document, doc};

use common::Client;

/// A document of these elements' bytes.
fn closed(elements: &[u8]) -> Vec<u8> {
    let length = elements.len() as u32 + 5;
    [&length.to_le_bytes(), elements, &[0]].concat()
}

/// One document with the fields of several, names that come twice among them.
fn joined(parts: &[Document]) -> Vec<u8> {
    let bytes: Vec<Vec<u8>> = parts.iter().map(|part| part.to_vec().unwrap()).collect();
    let elements: Vec<&[u8]> = bytes.iter().map(|one| &one[4..one.len() - 1]).collect();
    closed(&elements.concat())
}

/// The elements of an insert into `d.c` whose array is these documents.
fn array(documents: &[Vec<u8>]) -> Vec<u8> {
    let mut elements = Vec::new();
    for (at, document) in documents.iter().enumerate() {
        elements.push(3);
        elements.extend(at.to_string().as_bytes());
        elements.push(0);
        elements.extend(document);
    }
    [b"\x04documents\0", &closed(&elements)[..]].concat()
}

/// A message: an insert with these elements besides, and a section of documents.
fn insert(elements: &[u8], section: &[Vec<u8>]) -> Vec<u8> {
    let head = doc! { "insert": "c", "$db": "d" }.to_vec().unwrap();
    let body = closed(&[&head[4..head.len() - 1], elements].concat());
    // An OP_MSG without flags.
    let mut message = [0_u32, 1, 0, 2013, 0].map(u32::to_le_bytes).concat();
    message.push(0);
    message.extend(body);
    if !section.is_empty() {
        let documents = section.concat();
        message.push(1);
        message.extend((4 + 10 + documents.len() as u32).to_le_bytes());
        message.extend(b"documents\0");
        message.extend(documents);
    }
    let length = message.len() as u32;
    message[..4].copy_from_slice(&length.to_le_bytes());
    message
}

fn send(client: &Client, message: &[u8]) -> Result<Document, wire::WireError> {
    let (_, request) = wire::read(message, wire::LONGEST_MESSAGE)?;
    Ok(client.run_request(&mut Session::default(), request))
}

/// The same documents in the body, and beside it.
fn both_ways(documents: &[Vec<u8>]) -> [Vec<u8>; 2] {
    [insert(&array(documents), &[]), insert(&[], documents)]
}

fn count(client: &Client) -> i32 {
    client.run(doc! { "count": "c" }).get_i32("n").unwrap()
}

fn stored(client: &Client) -> Vec<Document> {
    client.find("c", &doc! {}, &doc! {})
}

#[test]
fn what_cannot_be_decoded_later_is_not_taken_and_change_streams_go_on() {
    let client = Client::new();
    client.run(doc! { "create": "c" });
    let stream = doc! { "aggregate": "c", "pipeline": [{ "$changeStream": {} }], "cursor": {} };
    let stream = client.run(stream);
    let stream = stream.get_document("cursor").unwrap().get_i64("id").unwrap();
    // Binary of subtype 2, without the length that stands inside.
    let broken = [&doc! { "_id": 1 }.to_vec().unwrap()[4..13], b"\x05b\0\0\0\0\0\x02"].concat();
    for message in both_ways(&[closed(&broken)]) {
        assert!(send(&client, &message).is_err(), "the connection is closed");
    }
    assert_eq!(count(&client), 0);
    let old = Binary { subtype: BinarySubtype::BinaryOld, bytes: vec![1, 2] };
    let whole = doc! { "_id": 2, "b": old };
    let reply = send(&client, &insert(&[], &[whole.to_vec().unwrap()])).unwrap();
    assert_eq!(reply.get_i32("n").unwrap(), 1, "{reply}");
    assert_eq!(stored(&client), [whole]);
    let more = client.run(doc! { "getMore": stream, "collection": "c" });
    let told = more.get_document("cursor").unwrap().get_array("nextBatch").unwrap();
    assert_eq!(told.len(), 1, "{more}");
}

#[test]
fn a_document_has_one_id_wherever_the_second_stands() {
    let (one, x, two) = (doc! { "_id": 1 }, doc! { "x": 1 }, doc! { "_id": 2 });
    for parts in [
        [one.clone(), x.clone(), two.clone()],
        [one.clone(), two.clone(), x.clone()],
        [x, one, two],
    ] {
        let client = Client::new();
        for message in both_ways(&[joined(&parts)]) {
            let reply = send(&client, &message).unwrap();
            let errors = reply.get_array("writeErrors").unwrap();
            let code = errors[0].as_document().unwrap().get_i32("code").unwrap();
            assert_eq!((reply.get_i32("n").unwrap(), code), (0, 2), "{reply}");
        }
        assert_eq!(count(&client), 0);
    }
}

#[test]
fn documents_that_come_twice_are_refused_and_none_is_left_out() {
    let client = Client::new();
    let of = |id: i32| vec![doc! { "_id": id }.to_vec().unwrap()];
    let twice = [array(&of(1)), array(&of(2))].concat();
    for (message, code) in [
        (insert(&array(&of(1)), &of(2)), 40433),
        (insert(&joined(&[doc! { "documents": 1 }])[4..19], &of(2)), 40433),
        (insert(&twice, &[]), 40413),
        (insert(&twice, &of(3)), 40413),
    ] {
        let reply = send(&client, &message).unwrap();
        assert_eq!(reply.get_i32("code").unwrap(), code, "{reply}");
        assert_eq!(count(&client), 0);
    }
    let reply = send(&client, &insert(&array(&of(1)), &[])).unwrap();
    assert_eq!((reply.get_i32("n").unwrap(), count(&client)), (1, 1), "{reply}");
}

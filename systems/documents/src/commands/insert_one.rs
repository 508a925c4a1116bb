//! An insertion of one document and nothing else: the request is read as bytes, without the command's document.
//!
//! It does and answers what [`super::run`] would, byte for byte, or declines and leaves the request to it. Where it
//! declines, nothing was changed.

use std::sync::atomic::Ordering;

use beeline_documents_query::check;
use bson::raw::{RawBsonRef, RawDocument};
use bson::spec::BinarySubtype;

use super::{Session, failure, key_of};
use crate::engine::{Engine, existing};
use crate::log::Recorder;
use crate::reply::{Out, Reply, close, name, open};
use crate::retry::Retry;
use crate::spare;
use crate::write;

/// What the request asks.
struct One<'r> {
    collection: &'r str,
    database: &'r str,
    document: &'r [u8],
    /// The session, and its number of the write.
    numbered: Option<(&'r [u8], i64)>,
}

/// Reads a request, whose document may have come beside its body; `None` where it is anything else, or broken.
fn read<'r>(body: &'r [u8], beside: Option<&'r [u8]>) -> Option<One<'r>> {
    let (mut collection, mut database, mut document) = (None, None, beside);
    let (mut session, mut number) = (None, None);
    for (at, element) in RawDocument::from_bytes(body).ok()?.iter_elements().enumerate() {
        let element = element.ok()?;
        match (element.key().as_str(), element.value().ok()?) {
            ("insert", RawBsonRef::String(name)) if at == 0 => collection = Some(name),
            ("documents", RawBsonRef::Array(all)) if document.is_none() => {
                let mut all = all.into_iter();
                let Some(Ok(RawBsonRef::Document(one))) = all.next() else { return None };
                if all.next().is_some() {
                    return None;
                }
                document = Some(one.as_bytes());
            }
            ("ordered", RawBsonRef::Boolean(_)) => {}
            ("lsid", RawBsonRef::Document(named)) => match named.get("id").ok()?? {
                RawBsonRef::Binary(id)
                    if id.subtype == BinarySubtype::Uuid && id.bytes.len() == 16 =>
                {
                    session = Some(id.bytes);
                }
                _ => return None,
            },
            ("txnNumber", RawBsonRef::Int64(given)) => number = Some(given),
            ("$clusterTime" | "$readPreference", RawBsonRef::Document(_)) => {}
            ("$db", RawBsonRef::String(name)) => database = Some(name),
            _ => return None,
        }
    }
    let numbered = match number {
        Some(number) => Some((session?, number)),
        None => None,
    };
    Some(One { collection: collection?, database: database?, document: document?, numbered })
}

/// Does and answers the request, with `extra` fields beside those of the reply, made once the document was written;
/// false where it declines.
pub fn answer(
    engine: &Engine,
    session: &Session,
    (body, beside): (&[u8], Option<&[u8]>),
    extra: impl FnOnce() -> Vec<u8>,
    out: &mut impl Out,
) -> bool {
    if engine.authentication && session.user.is_none()
        || session.users_seen != engine.users_changed.load(Ordering::Acquire)
        || engine.fail_points.are_armed()
        || engine.replica.get().is_some()
    {
        return false;
    }
    let Some(one) = read(body, beside) else { return false };
    let Some(database) = engine.database(one.database) else { return false };
    // What keeps a bound may fail behind the insertion.
    let known = database.collection(one.collection).filter(|known| known.capped.is_none());
    if known.is_none()
        || check::document(body).is_err()
        || beside.is_some_and(|beside| check::document(beside).is_err())
    {
        return false;
    }
    let mut bytes = spare::take(one.document.len());
    bytes.extend_from_slice(one.document);
    let Ok((id, bytes)) = write::prepare(bytes) else { return false };
    let retry = one.numbered.map(|(id, number)| {
        let session = key_of(id.to_vec(), session.user.as_deref());
        // A transaction that the session began before is over.
        engine.transactions.pass(&session, number);
        Retry { session, number, statement: 0 }
    });
    let mut is_written = false;
    let outcome = engine.with(&database, |row| {
        let collection = existing(&database, one.collection)?;
        if collection.capped.is_some() {
            return Ok(());
        }
        if let Some(retry) = &retry
            && retry.outcome(row)?.is_some()
        {
            return Ok(());
        }
        row.enter(&collection)?;
        let mut recorder = Recorder { retry, ..Recorder::plain(engine) };
        write::insert(row, &database, &collection, &id, bytes, &mut recorder)?;
        is_written = true;
        Ok(())
    });
    // Refusals are the other way's to report.
    if !is_written {
        return false;
    }
    engine.metrics.documents_commands.add_shared(1);
    if let Err(error) = outcome {
        // It is there and may not last: what the other way would find now is that it is there.
        engine.metrics.documents_failed_commands.add_shared(1);
        Reply::Document(failure(&error)).write(&extra(), out);
        return true;
    }
    engine.metrics.documents_inserted.add_shared(1);
    let whole = open(out);
    name(out, 0x10, "n");
    out.append(&1_i32.to_le_bytes());
    name(out, 0x01, "ok");
    out.append(&1_f64.to_le_bytes());
    out.append(&extra());
    close(out, whole);
    true
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bson::{Document, doc};

    use super::*;
    use crate::EngineOptions;
    use crate::commands::plainly::{EXTRA, run_plainly};
    use crate::store::Memory;

    fn engine() -> Arc<Engine> {
        let engine = Engine::open(Arc::new(Memory::default()), &EngineOptions::default()).unwrap();
        run_plainly(&engine, doc! { "insert": "c", "documents": [{ "_id": "first" }], "$db": "d" });
        run_plainly(&engine, doc! { "create": "k", "capped": true, "size": 10_000, "$db": "d" });
        let validator = doc! { "a": { "$lt": 5 } };
        run_plainly(&engine, doc! { "create": "v", "validator": validator, "$db": "d" });
        let key = doc! { "key": { "a": 1 }, "name": "a", "unique": true };
        run_plainly(&engine, doc! { "createIndexes": "v", "indexes": [key], "$db": "d" });
        engine
    }

    fn uuid(length: usize) -> Document {
        doc! { "id": bson::Binary { subtype: BinarySubtype::Uuid, bytes: vec![7; length] } }
    }

    /// All documents of the collections, and the log without its times.
    fn contents(engine: &Arc<Engine>) -> Vec<Document> {
        let mut all = Vec::new();
        for collection in ["c", "k", "v"] {
            let sort = doc! { "_id": 1 };
            let find = doc! { "find": collection, "sort": sort, "batchSize": 1000, "$db": "d" };
            let mut reply = Document::from_reader(&run_plainly(engine, find)[..]).unwrap();
            all.push(reply.remove("cursor").unwrap().as_document().unwrap().clone());
        }
        let database = engine.database("d").unwrap();
        let mut entries = Vec::new();
        let read = engine
            .with(&database, |row| crate::log::read(row, 0, u64::MAX, usize::MAX, &mut entries));
        assert!(read.unwrap());
        all.extend(entries.into_iter().map(|(_, mut entry)| {
            for name in ["ts", "wall", "ui"] {
                entry.remove(name);
            }
            entry
        }));
        all
    }

    /// A request with a field more, and whether it is done at once.
    fn requests() -> Vec<(Document, bool)> {
        let one = |collection: &str, document: Document| {
            doc! { "insert": collection, "documents": [document], "$db": "d" }
        };
        let with = |id: i32, name: &str, value: bson::Bson| {
            let mut body = one("c", doc! { "_id": id });
            body.insert(name, value);
            body
        };
        let mut numbered = with(1, "lsid", uuid(16).into());
        numbered.insert("txnNumber", 5_i64);
        let mut ended = numbered.clone();
        ended.extend(doc! { "autocommit": false });
        vec![
            (one("c", doc! { "_id": 0, "a": [1, { "b": 2 }] }), true),
            (numbered.clone(), true),
            // It is sent again: the other way tells of the first time.
            (numbered, false),
            (with(2, "ordered", false.into()), true),
            (with(3, "lsid", uuid(16).into()), true),
            (with(4, "$clusterTime", doc! {}.into()), true),
            (with(5, "$readPreference", doc! { "mode": "primary" }.into()), true),
            (one("v", doc! { "_id": 1, "a": 1 }), true),
            (one("c", doc! { "a": 1, "_id": 6 }), true),
            // The same _id, an index's value that is taken, a document that does not fit.
            (one("c", doc! { "_id": 0 }), false),
            (one("v", doc! { "_id": 2, "a": 1 }), false),
            (one("v", doc! { "_id": 2, "a": 9 }), false),
            (one("c", doc! { "_id": [1] }), false),
            (one("c", doc! { "_id": 7, "b": 1, "c": { "_id": 1 } }), true),
            (one("k", doc! { "_id": 1 }), false),
            (doc! { "insert": "c", "documents": [{ "_id": 8 }, { "_id": 9 }], "$db": "d" }, false),
            (doc! { "insert": "c", "documents": [], "$db": "d" }, false),
            (doc! { "insert": "c", "documents": [1], "$db": "d" }, false),
            (doc! { "insert": "c", "documents": [{ "_id": 10 }] }, false),
            (with(11, "txnNumber", 6_i64.into()), false),
            (with(12, "lsid", uuid(15).into()), false),
            (ended, false),
            (with(13, "writeConcern", doc! { "w": 1 }.into()), false),
            (with(14, "apiVersion", "1".into()), false),
            (with(15, "bypassDocumentValidation", true.into()), false),
            (with(16, "nope", 1.into()), false),
            (with(17, "readConcern", doc! { "level": "snapshot" }.into()), false),
        ]
    }

    #[test]
    fn it_does_and_answers_what_the_command_does_and_declines_everything_else() {
        let (ours, theirs) = (engine(), engine());
        let session = Session::default();
        for (body, answers) in requests() {
            let bytes = body.to_vec().unwrap();
            for cut in 0..bytes.len() {
                let mut out = Vec::new();
                assert!(!answer(&ours, &session, (&bytes[..cut], None), Vec::new, &mut out));
            }
            let before = ours.metrics.documents_inserted.value();
            let mut out = Vec::new();
            let answered = answer(&ours, &session, (&bytes, None), || EXTRA.to_vec(), &mut out);
            assert_eq!(answered, answers, "{body}");
            let counted = ours.metrics.documents_inserted.value() - before;
            assert_eq!(counted, u64::from(answers), "what the other way does is counted there");
            let said = run_plainly(&theirs, body.clone());
            match answers {
                true => assert_eq!(out, said, "{body}"),
                false => {
                    assert!(out.is_empty());
                    assert_eq!(run_plainly(&ours, body.clone()), said, "{body}");
                }
            }
        }
        assert_eq!(contents(&ours), contents(&theirs));
    }

    #[test]
    fn a_numbered_insertion_without_an_id_that_comes_again_is_answered_from_the_record() {
        let engine = engine();
        let mut body = doc! { "insert": "c", "documents": [{ "t": "x" }], "$db": "d" };
        body.extend(doc! { "lsid": uuid(16), "txnNumber": 5_i64 });
        let bytes = body.to_vec().unwrap();
        let (session, find) = (Session::default(), doc! { "count": "c", "$db": "d" });
        assert!(answer(&engine, &session, (&bytes, None), Vec::new, &mut Vec::new()));
        // No _id tells the document of the second time from that of the first.
        for _ in 0..2 {
            let mut out = Vec::new();
            assert!(!answer(&engine, &session, (&bytes, None), Vec::new, &mut out));
            assert!(out.is_empty());
            let said = Document::from_reader(&run_plainly(&engine, body.clone())[..]).unwrap();
            assert_eq!((said.get_i32("n").unwrap(), said.get("writeErrors")), (1, None), "{said}");
            let there = Document::from_reader(&run_plainly(&engine, find.clone())[..]).unwrap();
            assert_eq!(there.get_i32("n").unwrap(), 2, "the first of the collection, and this one");
        }
    }

    #[test]
    fn a_document_beside_the_body_is_the_same() {
        let engine = engine();
        let body = doc! { "insert": "c", "ordered": true, "$db": "d" }.to_vec().unwrap();
        let document = doc! { "_id": 1, "t": "x" }.to_vec().unwrap();
        let session = Session::default();
        let mut out = Vec::new();
        let beside = Some(document.as_slice());
        assert!(answer(&engine, &session, (&body, beside), Vec::new, &mut out));
        assert_eq!(out, doc! { "n": 1, "ok": 1.0 }.to_vec().unwrap());
        let find = doc! { "find": "c", "filter": { "_id": 1 }, "$db": "d" };
        let found = Document::from_reader(&run_plainly(&engine, find)[..]).unwrap();
        assert!(found.to_string().contains("\"t\": \"x\""), "{found}");
        // Both in the body and beside it; damaged bytes in either.
        let both = doc! { "insert": "c", "documents": [{ "_id": 2 }], "$db": "d" };
        let both = both.to_vec().unwrap();
        let mut torn = doc! { "_id": 3, "t": "x" }.to_vec().unwrap();
        let at = torn.len() - 3;
        torn[at] = 0xff;
        for request in [(&both, Some(document.as_slice())), (&body, Some(torn.as_slice()))] {
            let request = (request.0.as_slice(), request.1);
            assert!(!answer(&engine, &session, request, Vec::new, &mut out));
        }
    }

    #[test]
    fn the_next_insertion_uses_the_buffers_of_the_last() {
        let engine = engine();
        for id in 0..3 {
            let document = doc! { "_id": id, "t": "x".repeat(1000) };
            let body = doc! { "insert": "c", "documents": [document], "$db": "d" };
            let body = body.to_vec().unwrap();
            let session = Session::default();
            assert!(answer(&engine, &session, (&body, None), Vec::new, &mut Vec::new()));
            assert_eq!(spare::kept(), 2, "the document's and its log entry's");
        }
    }

    #[test]
    fn one_that_has_not_logged_in_is_not_answered() {
        let options = EngineOptions { authentication: true, ..EngineOptions::default() };
        let engine = Engine::open(Arc::new(Memory::default()), &options).unwrap();
        let database = engine.database_or_new("d").unwrap();
        engine.collection_or_new(&database, "c").unwrap();
        let body = doc! { "insert": "c", "documents": [{ "_id": 1 }], "$db": "d" };
        let body = body.to_vec().unwrap();
        let mut session = Session::default();
        assert!(!answer(&engine, &session, (&body, None), Vec::new, &mut Vec::new()));
        session.user = Some("u".to_owned());
        assert!(answer(&engine, &session, (&body, None), Vec::new, &mut Vec::new()));
    }
}

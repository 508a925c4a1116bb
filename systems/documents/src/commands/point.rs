//! A find by `_id` and nothing else, which needs no plan: one lookup.
//!
//! It answers what [`super::run`] would answer, byte for byte, or declines and leaves the request to it.

use std::sync::atomic::Ordering;

use beeline_documents_query::value::key;
use bson::Bson;
use bson::raw::{RawBsonRef, RawDocument};
use bson::spec::BinarySubtype;

use super::Session;
use crate::engine::Engine;
use crate::layout::{kind, numbered};
use crate::reply::{Out, write_one};

/// What the request asks.
struct Point<'r> {
    collection: &'r str,
    database: &'r str,
    id: Bson,
}

/// Reads a request; `None` where it is anything else, or broken. A node `by_itself` reads for every preference.
fn read(bytes: &[u8], by_itself: bool) -> Option<Point<'_>> {
    let (mut collection, mut database, mut id) = (None, None, None);
    // A cursor may stay open where a batch is bounded and the answer is not.
    let (mut is_batched, mut is_bounded) = (false, false);
    for (at, element) in RawDocument::from_bytes(bytes).ok()?.iter_elements().enumerate() {
        let element = element.ok()?;
        let value = element.value().ok()?;
        match (element.key().as_str(), value) {
            ("find", RawBsonRef::String(name)) if at == 0 => collection = Some(name),
            ("filter", RawBsonRef::Document(filter)) => {
                let mut fields = filter.iter_elements();
                let field = fields.next()?.ok()?;
                if field.key().as_str() != "_id" || fields.next().is_some() {
                    return None;
                }
                id = Some(match field.value().ok()? {
                    RawBsonRef::Int32(id) => Bson::Int32(id),
                    RawBsonRef::Int64(id) => Bson::Int64(id),
                    RawBsonRef::String(id) => Bson::String(id.to_owned()),
                    RawBsonRef::ObjectId(id) => Bson::ObjectId(id),
                    _ => return None,
                });
            }
            ("limit", RawBsonRef::Int32(limit)) if limit >= 0 => is_bounded |= limit == 1,
            ("limit", RawBsonRef::Int64(limit)) if limit >= 0 => is_bounded |= limit == 1,
            ("batchSize", RawBsonRef::Int32(size)) if size > 0 => is_batched = true,
            ("maxTimeMS", RawBsonRef::Int32(time)) if time >= 0 => {}
            ("maxTimeMS", RawBsonRef::Int64(time)) if time >= 0 => {}
            ("readConcern", RawBsonRef::Document(concern)) => {
                for field in concern.iter_elements() {
                    let field = field.ok()?;
                    match (field.key().as_str(), field.value().ok()?) {
                        ("level", RawBsonRef::String("local" | "available")) => {}
                        _ => return None,
                    }
                }
            }
            ("lsid", RawBsonRef::Document(session)) => match session.get("id").ok()?? {
                RawBsonRef::Binary(id)
                    if id.subtype == BinarySubtype::Uuid && id.bytes.len() == 16 => {}
                _ => return None,
            },
            ("$clusterTime", RawBsonRef::Document(_)) => {}
            ("$readPreference", RawBsonRef::Document(_)) if by_itself => {}
            ("singleBatch", RawBsonRef::Boolean(single)) => is_bounded |= single,
            ("$db", RawBsonRef::String(name)) => database = Some(name),
            _ => return None,
        }
    }
    if is_batched && !is_bounded {
        return None;
    }
    let collection = collection.filter(|name| !name.is_empty() && !name.contains('\0'))?;
    Some(Point { collection, database: database?, id: id? })
}

/// Answers the request, with `extra` fields beside those of the reply, made once the document was read; false where
/// it declines, and nothing was written. The document passes through `found`.
pub fn answer(
    engine: &Engine,
    session: &Session,
    bytes: &[u8],
    extra: impl FnOnce() -> Vec<u8>,
    found: &mut Vec<u8>,
    out: &mut impl Out,
) -> bool {
    if engine.authentication && session.user.is_none()
        || session.users_seen != engine.users_changed.load(Ordering::Acquire)
        || engine.fail_points.are_armed()
    {
        return false;
    }
    let replica = engine.replica.get();
    // First: what is read before a member begins to take back or to copy may be gone.
    let turned = replica.map(|replica| replica.turned());
    if replica.is_some_and(|replica| !replica.writes()) {
        return false;
    }
    let Some(point) = read(bytes, replica.is_none()) else { return false };
    let Some(database) = engine.database(point.database) else { return false };
    let looked = engine.with(&database, |row| {
        let Some(collection) =
            database.collection(point.collection).filter(|known| known.capped.is_none())
        else {
            return Ok(None);
        };
        row.get(&numbered(kind::RECORD, collection.id, &key(&point.id)), found).map(Some)
    });
    // Errors are the other way's to report.
    let Ok(Some(is_there)) = looked else { return false };
    // The lookup may have waited for the row while this member ceased to lead.
    if replica.is_some_and(|replica| Some(replica.turned()) != turned || !replica.writes()) {
        return false;
    }
    engine.metrics.documents_commands.add_shared(1);
    engine.metrics.documents_examined.add_shared(u64::from(is_there));
    engine.metrics.documents_returned.add_shared(u64::from(is_there));
    let namespace = (point.database, point.collection);
    write_one(namespace, is_there.then_some(found.as_slice()), &extra(), out);
    true
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use beeline_documents_query::error::Result;
    use bson::doc;
    use bson::oid::ObjectId;

    use super::*;
    use crate::EngineOptions;
    use crate::commands::plainly::{EXTRA, run_plainly};
    use crate::replica::agreed::Agreed;
    use crate::replica::store::ReplicaStore;
    use crate::replica::{Replica, ReplicaOptions, State};
    use crate::store::{Backing, Memory, Store};

    #[test]
    fn a_lookup_answers_what_the_command_answers_and_declines_everything_else() {
        let engine = Engine::open(Arc::new(Memory::default()), &EngineOptions::default()).unwrap();
        let oid = ObjectId::new();
        let documents = vec![
            doc! { "_id": 1, "a": 1 },
            doc! { "_id": "x", "a": [1, 2] },
            doc! { "_id": oid, "b": { "c": 1 } },
            doc! { "_id": 2.5 },
        ];
        run_plainly(&engine, doc! { "insert": "c", "documents": documents, "$db": "d" });
        run_plainly(&engine, doc! { "create": "k", "capped": true, "size": 10_000, "$db": "d" });
        run_plainly(&engine, doc! { "insert": "k", "documents": [{ "_id": 1 }], "$db": "d" });
        let session = Session::default();
        let uuid = |length: usize| {
            doc! { "id": bson::Binary { subtype: BinarySubtype::Uuid, bytes: vec![7; length] } }
        };
        let by_one = |name: &str, value: bson::Bson| {
            let mut body = doc! { "find": "c", "filter": { "_id": 1 } };
            body.extend([(name.to_owned(), value), ("$db".to_owned(), "d".into())]);
            body
        };
        let mut answered = 0;
        for (body, answers) in [
            (doc! { "find": "c", "filter": { "_id": 1 }, "$db": "d" }, true),
            (doc! { "find": "c", "filter": { "_id": 1_i64 }, "limit": 1, "$db": "d" }, true),
            (doc! { "find": "c", "filter": { "_id": "x" }, "singleBatch": true, "$db": "d" }, true),
            (doc! { "find": "c", "filter": { "_id": oid }, "$db": "d" }, true),
            (doc! { "find": "c", "filter": { "_id": 9 }, "$db": "d" }, true),
            (by_one("lsid", uuid(16).into()), true),
            (by_one("limit", 1_i64.into()), true),
            (by_one("maxTimeMS", 5000.into()), true),
            (by_one("$clusterTime", doc! {}.into()), true),
            (by_one("$readPreference", doc! { "mode": "secondary" }.into()), true),
            (by_one("readConcern", doc! {}.into()), true),
            (by_one("readConcern", doc! { "level": "local" }.into()), true),
            (
                doc! { "find": "c", "filter": { "_id": 1 }, "limit": 1, "batchSize": 1, "$db": "d" },
                true,
            ),
            (
                doc! { "find": "c", "filter": { "_id": 1 }, "batchSize": 1, "singleBatch": true, "$db": "d" },
                true,
            ),
            (by_one("batchSize", 1.into()), false),
            (by_one("readConcern", doc! { "level": "local", "afterClusterTime": 1 }.into()), false),
            (by_one("lsid", uuid(15).into()), false),
            (by_one("lsid", doc! { "id": 1 }.into()), false),
            (by_one("lsid", doc! {}.into()), false),
            (by_one("txnNumber", 1_i64.into()), false),
            (by_one("autocommit", false.into()), false),
            (by_one("readConcern", doc! { "level": "majority" }.into()), false),
            (by_one("apiVersion", "1".into()), false),
            (by_one("collation", doc! { "locale": "de" }.into()), false),
            (doc! { "find": "c", "filter": { "_id": 2.5 }, "$db": "d" }, false),
            (doc! { "find": "c", "filter": { "_id": { "$gt": 0 } }, "$db": "d" }, false),
            (doc! { "find": "c", "filter": { "_id": 1, "a": 2 }, "$db": "d" }, false),
            (doc! { "find": "c", "filter": { "_id": 1 }, "skip": 1, "$db": "d" }, false),
            (doc! { "find": "c", "filter": { "_id": 1 }, "limit": -1, "$db": "d" }, false),
            (doc! { "find": "c", "filter": {}, "$db": "d" }, false),
            (doc! { "find": "k", "filter": { "_id": 1 }, "$db": "d" }, false),
            (doc! { "find": "none", "filter": { "_id": 1 }, "$db": "d" }, false),
            (doc! { "find": "c", "filter": { "_id": 1 }, "$db": "none" }, false),
            (doc! { "find": "c", "filter": { "_id": 1 } }, false),
        ] {
            let mut out = Vec::new();
            let bytes = body.to_vec().unwrap();
            assert_eq!(
                answer(&engine, &session, &bytes, || EXTRA.to_vec(), &mut Vec::new(), &mut out),
                answers,
                "{body}"
            );
            if answers {
                assert_eq!(out, run_plainly(&engine, body));
                answered += 1;
            } else {
                assert!(out.is_empty());
            }
            for cut in 0..bytes.len() {
                assert!(!answer(
                    &engine,
                    &session,
                    &bytes[..cut],
                    Vec::new,
                    &mut Vec::new(),
                    &mut out
                ));
            }
        }
        assert_eq!(answered, 14);
    }

    type Hook = Box<dyn FnOnce() + Send>;

    /// A store that does something before it locks a row.
    #[derive(Default)]
    struct Hooked(Memory, Mutex<Option<Hook>>);

    impl std::fmt::Debug for Hooked {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("Hooked")
        }
    }

    impl Store for Hooked {
        fn with(
            &self,
            row: &[u8],
            work: &mut dyn FnMut(&mut dyn Backing) -> Result<()>,
        ) -> Result<()> {
            if let Some(hook) = self.1.lock().unwrap().take() {
                hook();
            }
            self.0.with(row, work)
        }

        fn now_ms(&self) -> u64 {
            self.0.now_ms()
        }

        fn space(&self) -> (u64, u64) {
            self.0.space()
        }
    }

    /// A member that leads a set of one.
    fn leader() -> Arc<Replica> {
        let agreed = Arc::new(Agreed::new(Arc::default()));
        agreed.gate.fence(1);
        agreed.gate.lead(1);
        agreed.gate.extend(u64::MAX);
        let rows = Arc::<Memory>::default();
        let store = Arc::new(ReplicaStore::open(rows, Arc::clone(&agreed.gate)).unwrap());
        let options = ReplicaOptions {
            set: "rs0".to_owned(),
            me: 1,
            members: [(1, ([127, 0, 0, 1], 1).into())].into(),
            fabric: [].into(),
            cluster: 1,
            election_timeout: std::time::Duration::from_secs(1),
            oplog_bytes: 1 << 20,
            longest_batch: 1 << 20,
            batch_bytes: 1 << 20,
            rollback_directory: "rollback".into(),
            held_file: "held".into(),
        };
        let replica = Arc::new(Replica::new(options, store, agreed));
        replica.set_state(State::Primary);
        replica
    }

    #[test]
    fn a_lookup_during_which_the_member_turned_is_not_answered() {
        let store = Arc::<Hooked>::default();
        let engine =
            Engine::open(Arc::clone(&store) as Arc<dyn Store>, &EngineOptions::default()).unwrap();
        run_plainly(&engine, doc! { "insert": "c", "documents": [{ "_id": 1 }], "$db": "d" });
        let replica = leader();
        engine.replica.set(Arc::clone(&replica)).unwrap();
        let body = doc! { "find": "c", "filter": { "_id": 1 }, "$db": "d" }.to_vec().unwrap();
        for (states, answers) in [
            (&[][..], true),
            (&[State::Secondary][..], false),
            (&[State::Secondary, State::Rollback], false),
            (&[State::Secondary, State::Copying, State::Secondary, State::Primary], false),
            (&[State::Secondary, State::Primary], true),
        ] {
            replica.set_state(State::Primary);
            let turning = Arc::clone(&replica);
            let hook: Hook =
                Box::new(move || states.iter().for_each(|state| turning.set_state(*state)));
            *store.1.lock().unwrap() = Some(hook);
            let before = engine.metrics.documents_commands.value();
            let (session, mut out) = (Session::default(), Vec::new());
            let answered = answer(&engine, &session, &body, Vec::new, &mut Vec::new(), &mut out);
            assert_eq!((answered, out.is_empty()), (answers, !answers), "{states:?}");
            assert!(store.1.lock().unwrap().is_none(), "the row was looked at");
            let counted = engine.metrics.documents_commands.value() - before;
            assert_eq!(counted, u64::from(answers), "what another way answers is counted there");
        }
    }

    #[test]
    fn one_that_has_not_logged_in_is_not_answered() {
        let options = EngineOptions { authentication: true, ..EngineOptions::default() };
        let engine = Engine::open(Arc::new(Memory::default()), &options).unwrap();
        let database = engine.database_or_new("d").unwrap();
        engine.collection_or_new(&database, "c").unwrap();
        let body = doc! { "find": "c", "filter": { "_id": 1 }, "$db": "d" }.to_vec().unwrap();
        let mut session = Session::default();
        assert!(!answer(&engine, &session, &body, Vec::new, &mut Vec::new(), &mut Vec::new()));
        session.user = Some("u".to_owned());
        assert!(answer(&engine, &session, &body, Vec::new, &mut Vec::new(), &mut Vec::new()));
    }
}

//! A client of an engine without a socket.

#![allow(dead_code, reason = "each test uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::Arc;

use beeline_documents::commands::{self, Context, Identity, Request, Session};
use beeline_documents::reply::Reply;
use beeline_documents::store::{Memory, Store};
use beeline_documents::{Engine, EngineOptions};
use bson::{Document, doc};

pub struct Client {
    pub engine: Arc<Engine>,
    identity: Identity,
}

impl Client {
    pub fn new() -> Self {
        Self::over(Arc::new(Memory::default()), &EngineOptions::default())
    }

    pub fn over(store: Arc<dyn Store>, options: &EngineOptions) -> Self {
        Self::of(&Engine::open(store, options).unwrap())
    }

    pub fn of(engine: &Arc<Engine>) -> Self {
        let engine = Arc::clone(engine);
        let identity =
            Identity { address: "test".to_owned(), most_connections: 1, replica_set: None };
        Self { engine, identity }
    }

    pub fn run(&self, body: Document) -> Document {
        self.run_in(&mut Session::default(), body)
    }

    /// A command of a connection; of the database `d` unless it names another.
    pub fn run_in(&self, session: &mut Session, mut body: Document) -> Document {
        if !body.contains_key("$db") {
            body.insert("$db", "d");
        }
        self.run_request(session, Request { body, ..Request::default() })
    }

    /// A request as the wire brings it.
    pub fn run_request(&self, session: &mut Session, request: Request) -> Document {
        let mut context = Context {
            engine: &self.engine,
            session,
            identity: &self.identity,
            database: String::new(),
            request,
            may_wait: false,
        };
        let reply = commands::run(&mut context);
        let mut bytes = Vec::new();
        assert!(!matches!(reply, Reply::Later(_)));
        reply.write(&[], &mut bytes);
        Document::from_reader(&bytes[..]).unwrap()
    }

    /// All documents of a find, over as many batches as it takes.
    pub fn find(&self, collection: &str, filter: &Document, sort: &Document) -> Vec<Document> {
        let find = doc! { "find": collection, "filter": filter.clone(), "sort": sort.clone(), "batchSize": 3 };
        let reply = self.run(find);
        assert_eq!(reply.get_f64("ok").unwrap(), 1.0, "{reply}");
        let mut cursor = reply.get_document("cursor").unwrap().clone();
        let mut all = Vec::new();
        let mut name = "firstBatch";
        loop {
            for one in cursor.get_array(name).unwrap() {
                all.push(one.as_document().unwrap().clone());
            }
            let id = cursor.get_i64("id").unwrap();
            if id == 0 {
                return all;
            }
            let more = self.run(doc! { "getMore": id, "collection": collection, "batchSize": 5 });
            assert_eq!(more.get_f64("ok").unwrap(), 1.0, "{more}");
            cursor = more.get_document("cursor").unwrap().clone();
            name = "nextBatch";
        }
    }
}

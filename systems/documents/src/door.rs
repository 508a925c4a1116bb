//! The listener and the connections.
//!
//! One task for each connection on a few threads of their own; a command runs where its bytes
//! arrived. A command that may take long says so first, and another thread takes over the tasks
//! that were waiting behind it. Idle connections sleep in the threads' one `epoll_wait`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bson::spec::BinarySubtype;
use bson::{Binary, Bson, Document, doc};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::commands::{self, Context, Identity, Request, Session};
use crate::engine::Engine;
use crate::listening::{Listening, Served, Stop};
use crate::log::stamp;
use crate::replica::Replica;
use crate::reply::Reply;
use crate::wire;

/// Bytes read at once.
const READ: usize = 64 << 10;
/// A buffer that grew past this is given back once it is empty.
const KEPT: usize = 1 << 20;
/// Longest wait for news, as long as a number of 32 bits of milliseconds.
const LONGEST_WAIT_MS: u64 = i32::MAX as u64;

/// The running listener.
#[derive(Debug)]
pub struct Door {
    listening: Listening,
}

/// What every connection shares.
struct Shared {
    engine: Arc<Engine>,
    identity: Identity,
}

impl Served for Shared {
    async fn serve(
        self: Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        number: i32,
        stop: Stop,
    ) -> std::io::Result<()> {
        serve(stream, (peer, number), &self, stop).await
    }

    async fn keep(self: Arc<Self>, stop: Stop) {
        upkeep(&self.engine, stop).await;
    }

    fn came(&self, is_served: bool) {
        let metrics = &self.engine.metrics;
        match is_served {
            true => metrics.documents_accepted_connections.add_shared(1),
            false => metrics.documents_rejected_connections.add_shared(1),
        }
    }

    fn open(&self, connections: usize) {
        self.engine.metrics.documents_connections.set(connections as u64);
    }
}

impl Door {
    /// Listens. Port 0 picks a free one.
    ///
    /// Errors: an address that cannot be used, threads that cannot be started.
    pub fn open(
        address: SocketAddr,
        engine: Arc<Engine>,
        threads: usize,
        most: usize,
        replica_set: Option<String>,
    ) -> std::io::Result<Self> {
        let identity = |address: SocketAddr| Identity {
            address: address.to_string(),
            most_connections: most,
            replica_set,
        };
        let make = |address| Shared { engine, identity: identity(address) };
        let (listening, _) = Listening::start(address, ("documents", threads), most, make)?;
        Ok(Self { listening })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.listening.address()
    }

    /// Its threads, for what waits beside connections.
    #[must_use]
    pub fn runtime(&self) -> Option<tokio::runtime::Handle> {
        self.listening.threads()
    }

    /// Ends: no new connections, commands under way are answered.
    pub fn close(&mut self) {
        self.listening.close(|| {});
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.close();
    }
}

async fn serve(
    mut stream: TcpStream,
    (peer, number): (SocketAddr, i32),
    shared: &Shared,
    mut stop: Stop,
) -> std::io::Result<()> {
    let mut session = Session { connection: number, peer: peer.to_string(), ..Session::default() };
    // A client goes on to talk to the address that it found the node at.
    let reached =
        stream.local_addr().map_or_else(|_| shared.identity.address.clone(), |at| at.to_string());
    let identity = Identity { address: reached, ..shared.identity.clone() };
    let (mut input, mut output) = (Vec::new(), Vec::new());
    let mut reply_id = 0_i32;
    loop {
        // What arrived together is answered together.
        let mut consumed = 0;
        loop {
            let rest = &input[consumed..];
            let most = longest(shared, &session);
            let length = match wire::length(rest, most) {
                Ok(length) => length,
                Err(error) => return protocol_error(shared, &error),
            };
            let Some(length) = length.filter(|length| rest.len() >= *length) else { break };
            let (manner, request) = match wire::read(&rest[..length], most) {
                Ok(read) => read,
                Err(error) => return protocol_error(shared, &error),
            };
            consumed += length;
            shared.engine.metrics.documents_input_bytes.add_shared(length as u64);
            let long = may_take_long(&request);
            let replica = shared.engine.replica.get();
            let (name, internal) =
                (request.name().to_owned(), Replica::is_internal(request.name()));
            let again = (internal || name == "getMore").then(|| request.clone());
            let mut until: Option<Instant> = None;
            let concern = replica.map(|_| concern_of(&request)).unwrap_or_default();
            if let Some(replica) = replica
                && let Err(error) = replica.catch_up(&concern).await
            {
                reply_id = reply_id.wrapping_add(1);
                let reply = Reply::Document(commands::failure(&error));
                wire::write(manner, reply_id, &reply, &times(shared), false, &mut output);
                continue;
            }
            let mut request = Some(request);
            let reply = loop {
                // Registered before the look, so that no change is missed between the two.
                let changed = match replica.filter(|_| internal) {
                    Some(replica) => replica.store.grown.notified(),
                    None => shared.engine.changed.notified(),
                };
                tokio::pin!(changed);
                changed.as_mut().enable();
                let may_wait = again.is_some()
                    && until.is_none_or(|until| Instant::now() < until)
                    && !*stop.borrow();
                let mut context = Context {
                    engine: &shared.engine,
                    session: &mut session,
                    identity: &identity,
                    database: String::new(),
                    request: request.take().or_else(|| again.clone()).unwrap_or_default(),
                    may_wait,
                };
                let reply = if long {
                    tokio::task::block_in_place(|| commands::run(&mut context))
                } else {
                    commands::run(&mut context)
                };
                if session.hangs_up {
                    return Ok(());
                }
                let Reply::Later(most_ms) = reply else { break reply };
                // Of a clock that nothing sets: a wall clock may stand still or jump.
                let until = *until.get_or_insert_with(|| {
                    Instant::now() + Duration::from_millis(most_ms.min(LONGEST_WAIT_MS))
                });
                tokio::select! {
                    () = changed => {}
                    () = tokio::time::sleep_until(until) => {}
                    _ = stop.changed() => {}
                }
            };
            let reply = match (session.held.take(), replica) {
                (Some(held), Some(replica)) if !manner.silent => {
                    if !output.is_empty() {
                        stream.write_all(&output).await?;
                        output.clear();
                    }
                    replica.release(held, reply, &name, &concern).await
                }
                _ => reply,
            };
            if !manner.silent {
                reply_id = reply_id.wrapping_add(1);
                wire::write(manner, reply_id, &reply, &times(shared), false, &mut output);
            }
            if output.len() >= KEPT {
                shared.engine.metrics.documents_output_bytes.add_shared(output.len() as u64);
                stream.write_all(&output).await?;
                output.clear();
            }
        }
        input.drain(..consumed);
        if !output.is_empty() {
            shared.engine.metrics.documents_output_bytes.add_shared(output.len() as u64);
            stream.write_all(&output).await?;
            output.clear();
        }
        if input.is_empty() && input.capacity() > KEPT {
            input = Vec::new();
        }
        if output.capacity() > KEPT * 2 {
            output = Vec::new();
        }
        if *stop.borrow() {
            return Ok(());
        }
        let wanted = wire::length(&input, longest(shared, &session))
            .ok()
            .flatten()
            .map_or(READ, |length| length.saturating_sub(input.len()).max(READ));
        input.reserve(wanted.min(KEPT));
        let read = tokio::select! {
            read = stream.read_buf(&mut input) => read?,
            _ = stop.changed() => return Ok(()),
        };
        if read == 0 {
            return Ok(());
        }
    }
}

/// What is needed of a command once it ran.
pub(crate) fn concern_of(request: &Request) -> Document {
    let kept = ["readConcern", "txnNumber", "autocommit"];
    let body = &request.body;
    kept.iter().filter_map(|name| Some(((*name).to_owned(), body.get(name)?.clone()))).collect()
}

/// The longest message a client may send now.
fn longest(shared: &Shared, session: &Session) -> usize {
    match shared.engine.authentication && session.user.is_none() {
        true => wire::LONGEST_OF_STRANGER,
        false => wire::LONGEST_MESSAGE,
    }
}

/// What every reply of a replica set's member tells of time.
fn times(shared: &Shared) -> Document {
    if shared.identity.replica_set.is_none() {
        return Document::new();
    }
    let now = stamp(shared.engine.clock.last());
    let signature = doc! { "hash": Binary { subtype: BinarySubtype::Generic, bytes: vec![0; 20] }, "keyId": 0_i64 };
    doc! { "operationTime": now, "$clusterTime": { "clusterTime": now, "signature": signature } }
}

fn protocol_error(shared: &Shared, error: &wire::WireError) -> std::io::Result<()> {
    shared.engine.metrics.documents_protocol_errors.add_shared(1);
    Err(std::io::Error::new(std::io::ErrorKind::InvalidData, error.to_string()))
}

/// Whether a command may look at more than a few documents.
pub(crate) fn may_take_long(request: &Request) -> bool {
    let by_id = |filter: Option<&Bson>| matches!(filter, Some(Bson::Document(filter)) if filter.contains_key("_id"));
    match request.name() {
        "hello" | "ping" | "isMaster" | "ismaster" | "insert" | "endSessions" | "killCursors"
        | "buildInfo" | "whatsmyuri" | "listCollections" | "listIndexes" | "getParameter"
        | "create" | "saslStart" => false,
        "find" => !by_id(request.body.get("filter")),
        "findAndModify" => !by_id(request.body.get("query")),
        "update" | "delete" => {
            let few = |count: usize| count <= 8;
            let sequence = request.sequences.first().map(|(_, all)| {
                few(all.len())
                    && all.iter().all(|one| {
                        bson::raw::RawDocument::from_bytes(one).is_ok_and(|raw| {
                            raw.get_document("q")
                                .is_ok_and(|query| query.get("_id").is_ok_and(|id| id.is_some()))
                        })
                    })
            });
            let field = if request.name() == "update" { "updates" } else { "deletes" };
            let own = match request.body.get(field) {
                Some(Bson::Array(all)) => {
                    few(all.len())
                        && all
                            .iter()
                            .all(|one| one.as_document().is_some_and(|one| by_id(one.get("q"))))
                }
                _ => false,
            };
            !sequence.unwrap_or(own)
        }
        _ => true,
    }
}

/// Closes cursors whose time is up, deletes documents whose time has come.
async fn upkeep(engine: &Engine, mut stop: Stop) {
    let mut turn = 0_u64;
    loop {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(5)) => {}
            _ = stop.changed() => return,
        }
        turn += 1;
        let closed = engine.cursors.expire(engine.now_ms());
        engine.metrics.documents_timed_out_cursors.add_shared(closed as u64);
        let ended = engine.transactions.expire(engine.now_ms());
        if ended > 0 {
            tracing::info!(ended, "transactions that lasted too long were ended");
        }
        // A secondary's documents are changed by its primary alone.
        if turn.is_multiple_of(12) && engine.replica.get().is_none_or(|replica| replica.writes()) {
            tokio::task::block_in_place(|| {
                if let Err(error) = engine.trim_log().and_then(|()| crate::retry::reap(engine)) {
                    tracing::warn!(%error, "the log of documents could not be trimmed");
                }
                engine.end_all_halves();
                if let Err(error) = crate::expiry::expire(engine) {
                    tracing::warn!(%error, "documents whose time has come could not be deleted");
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;
    use crate::engine::EngineOptions;
    use crate::store::{Backing, Memory, Store};

    /// A store whose wall clock stands still.
    #[derive(Debug, Default)]
    struct Still(Memory);

    impl Store for Still {
        fn with(
            &self,
            row: &[u8],
            work: &mut dyn FnMut(&mut dyn Backing) -> beeline_documents_query::error::Result<()>,
        ) -> beeline_documents_query::error::Result<()> {
            self.0.with(row, work)
        }

        fn now_ms(&self) -> u64 {
            1_700_000_000_000
        }

        fn space(&self) -> (u64, u64) {
            self.0.space()
        }
    }

    fn ask(stream: &mut std::net::TcpStream, mut body: Document) -> Document {
        body.insert("$db", "d");
        stream.write_all(&wire::frame(1, &body)).unwrap();
        let mut answer = vec![0; 4];
        stream.read_exact(&mut answer).expect("an answer");
        let length = wire::length(&answer, 1 << 20).unwrap().unwrap();
        answer.resize(length, 0);
        stream.read_exact(&mut answer[4..]).unwrap();
        wire::read(&answer, 1 << 20).unwrap().1.body
    }

    #[test]
    fn a_wait_for_news_ends_also_where_the_wall_clock_stands_still() {
        let engine = Engine::open(Arc::new(Still::default()), &EngineOptions::default()).unwrap();
        let door = Door::open(([127, 0, 0, 1], 0).into(), engine, 1, 10, None).unwrap();
        let mut client = std::net::TcpStream::connect(door.address()).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        ask(&mut client, doc! { "create": "c", "capped": true, "size": 100_000 });
        ask(&mut client, doc! { "insert": "c", "documents": [{ "n": 1 }] });
        let found = ask(&mut client, doc! { "find": "c", "tailable": true, "awaitData": true });
        let id = found.get_document("cursor").unwrap().get_i64("id").unwrap();
        let more = doc! { "getMore": id, "collection": "c", "maxTimeMS": 50 };
        let more = ask(&mut client, more);
        assert!(more.get_document("cursor").unwrap().get_array("nextBatch").unwrap().is_empty());
    }

    #[test]
    fn a_connection_over_the_limit_is_told_so_and_closed_and_counted() {
        let engine = Engine::open(Arc::new(Still::default()), &EngineOptions::default()).unwrap();
        let metrics = engine.metrics.clone();
        let door = Door::open(([127, 0, 0, 1], 0).into(), engine, 1, 1, None).unwrap();
        let connect = || {
            let client = std::net::TcpStream::connect(door.address()).unwrap();
            client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            client
        };
        let mut first = connect();
        assert_eq!(ask(&mut first, doc! { "ping": 1 }).get_f64("ok").unwrap(), 1.0);
        let mut second = connect();
        let told = ask(&mut second, doc! { "hello": 1 });
        assert_eq!((told.get_f64("ok").unwrap(), told.get_i32("code").unwrap()), (0.0, 6));
        assert!(told.get_str("errmsg").unwrap().contains("1 connections are open"), "{told}");
        assert_eq!(second.read(&mut [0; 8]).unwrap(), 0, "it is closed");
        assert_eq!(metrics.documents_rejected_connections.value(), 1);
        // The first one is served on.
        assert_eq!(ask(&mut first, doc! { "ping": 1 }).get_f64("ok").unwrap(), 1.0);
    }
}

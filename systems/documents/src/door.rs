//! The listener and the connections.
//!
//! One task for each connection on a few threads of their own; a command runs where its bytes
//! arrived. A command that may take long says so first, and another thread takes over the tasks
//! that were waiting behind it. Idle connections sleep in the threads' one `epoll_wait`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bson::{Bson, Document};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::Instant;

use crate::commands::{self, Context, Identity, NAMES, Request, Session, insert_one, point};
use crate::engine::Engine;
use crate::listening::{Listening, Served, Stop};
use crate::replica::Replica;
use crate::reply::{Reply, close, name, open};
use crate::wire;

/// Bytes read at once.
const READ: usize = 64 << 10;
/// A buffer that grew past this is given back once it is empty.
const KEPT: usize = 1 << 20;
/// Longest wait for news, as long as a number of 32 bits of milliseconds.
pub(crate) const LONGEST_WAIT_MS: u64 = i32::MAX as u64;

/// The running listener.
#[derive(Debug)]
pub struct Door {
    listening: Listening,
}

/// What every connection shares.
struct Shared {
    engine: Arc<Engine>,
    identity: Identity,
    /// Where `find` and `insert` are among the commands whose times are counted.
    find: usize,
    insert: usize,
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
        let place = |of: &str| NAMES.iter().position(|name| *name == of).unwrap_or(NAMES.len());
        let (find, insert) = (place("find"), place("insert"));
        let make = |address| Shared { engine, identity: identity(address), find, insert };
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
    let (mut reply_id, mut found) = (0_i32, Vec::new());
    let mut ending = stop.clone();
    let ended = async move { drop(ending.wait_for(|stop| *stop).await) };
    tokio::pin!(ended);
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
            let next_id = reply_id.wrapping_add(1);
            if answer_at_once(shared, &session, (&rest[..length], next_id), &mut found, &mut output)
            {
                (reply_id, consumed) = (next_id, consumed + length);
                shared.engine.metrics.documents_input_bytes.add_shared(length as u64);
                send_long(shared, &mut stream, &mut output).await?;
                continue;
            }
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
                let changed = again.as_ref().map(|_| match replica.filter(|_| internal) {
                    Some(replica) => replica.store.grown.notified(),
                    None => shared.engine.changed.notified(),
                });
                tokio::pin!(changed);
                if let Some(changed) = changed.as_mut().as_pin_mut() {
                    changed.enable();
                }
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
                let news = async {
                    match changed.as_mut().as_pin_mut() {
                        Some(changed) => changed.await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    () = news => {}
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
            send_long(shared, &mut stream, &mut output).await?;
        }
        input.drain(..consumed);
        if !output.is_empty() {
            shared.engine.metrics.documents_output_bytes.add_shared(output.len() as u64);
            stream.write_all(&output).await?;
            output.clear();
        }
        give_back(&mut input, &mut output, &mut found);
        if *stop.borrow() {
            return Ok(());
        }
        let wanted = wire::length(&input, longest(shared, &session))
            .ok()
            .flatten()
            .map_or(READ, |length| length.saturating_sub(input.len()).max(READ));
        input.reserve(wanted.min(KEPT));
        let read = tokio::select! {
            biased;
            read = stream.read_buf(&mut input) => read?,
            () = &mut ended => return Ok(()),
        };
        if read == 0 {
            return Ok(());
        }
    }
}

/// Frees the buffers of a connection that grew, before it waits for its client.
fn give_back(input: &mut Vec<u8>, output: &mut Vec<u8>, found: &mut Vec<u8>) {
    // The beginning of a message waits for the rest of it.
    if input.is_empty() && input.capacity() > KEPT {
        *input = Vec::new();
    }
    for (kept, most) in [(output, KEPT * 2), (found, READ)] {
        if kept.capacity() > most {
            *kept = Vec::new();
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

/// Answers a find by `_id`, or the insertion of one document, that nothing else is asked with, reading no more of it
/// than that takes. False: it is another message, and nothing was done.
fn answer_at_once(
    shared: &Shared,
    session: &Session,
    (message, reply_id): (&[u8], i32),
    found: &mut Vec<u8>,
    output: &mut Vec<u8>,
) -> bool {
    const FIND: &[u8] = b"\x02find\0";
    const INSERT: &[u8] = b"\x02insert\0";
    let plain = wire::plain(message).map(|(id, body)| (id, body, None));
    let with_one = || wire::with_one(message, "documents");
    let read = plain.or_else(|| with_one().map(|(id, body, one)| (id, body, Some(one))));
    let Some((request_id, body, beside)) = read else { return false };
    let begins = |with: &[u8]| body.get(4..).is_some_and(|rest| rest.starts_with(with));
    let (is_find, is_insert) = (beside.is_none() && begins(FIND), begins(INSERT));
    if !is_find && !is_insert {
        return false;
    }
    let began = std::time::Instant::now();
    let (engine, extra) = (&shared.engine, || times(shared));
    let answered = wire::write_plain((request_id, reply_id), output, |out| match is_find {
        true => point::answer(engine, session, body, extra, found, out),
        false => insert_one::answer(engine, session, (body, beside), extra, out),
    });
    if answered {
        let command = if is_find { shared.find } else { shared.insert };
        engine.times.record_at(command, began.elapsed());
    }
    answered
}

/// Sends replies that became long, so that no more than that waits.
async fn send_long(
    shared: &Shared,
    stream: &mut TcpStream,
    output: &mut Vec<u8>,
) -> std::io::Result<()> {
    if output.len() >= KEPT {
        shared.engine.metrics.documents_output_bytes.add_shared(output.len() as u64);
        stream.write_all(output).await?;
        output.clear();
    }
    Ok(())
}

/// What every reply of a replica set's member tells of time: fields as they stand in a document.
fn times(shared: &Shared) -> Vec<u8> {
    match shared.identity.replica_set {
        Some(_) => times_of(shared.engine.clock.last()),
        None => Vec::new(),
    }
}

/// `operationTime` and `$clusterTime`, whose signature signs nothing.
fn times_of(now: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    let stamp = |out: &mut Vec<u8>, field: &str| {
        name(out, 0x11, field);
        out.extend(now.to_le_bytes());
    };
    stamp(&mut out, "operationTime");
    name(&mut out, 0x03, "$clusterTime");
    let whole = open(&mut out);
    stamp(&mut out, "clusterTime");
    name(&mut out, 0x03, "signature");
    let signature = open(&mut out);
    name(&mut out, 0x05, "hash");
    out.extend(20_u32.to_le_bytes());
    out.extend([0; 21]);
    name(&mut out, 0x12, "keyId");
    out.extend(0_i64.to_le_bytes());
    close(&mut out, signature);
    close(&mut out, whole);
    out
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

    use bson::spec::BinarySubtype;
    use bson::{Binary, doc};

    use super::*;
    use crate::engine::EngineOptions;
    use crate::log::stamp;
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
    fn a_connection_that_waits_keeps_no_long_document_beside_its_reply() {
        let document = vec![7; 1_900_000];
        let (mut input, mut output, mut found) = (vec![1; KEPT], document.clone(), document);
        output.clear();
        give_back(&mut input, &mut output, &mut found);
        assert_eq!((input.len(), found.capacity()), (KEPT, 0));
        assert!(output.capacity() <= KEPT * 2);
        // What is short stays for the next find, and the beginning of a message is not lost.
        let (mut input, mut found) = (vec![1; KEPT * 2], vec![7; 1000]);
        give_back(&mut input, &mut output, &mut found);
        assert!(input.len() == KEPT * 2 && found.capacity() >= 1000);
    }

    #[test]
    fn times_are_the_fields_that_members_tell() {
        let now = (1_700_000_000 << 32) | 7;
        let hash = Binary { subtype: BinarySubtype::Generic, bytes: vec![0; 20] };
        let signature = doc! { "hash": hash, "keyId": 0_i64 };
        let cluster = doc! { "clusterTime": stamp(now), "signature": signature };
        let told = doc! { "operationTime": stamp(now), "$clusterTime": cluster };
        let bytes = told.to_vec().unwrap();
        assert_eq!(times_of(now), &bytes[4..bytes.len() - 1]);
    }

    #[test]
    fn a_find_by_id_is_answered_as_one_that_is_planned_and_counts_as_one() {
        let engine = Engine::open(Arc::new(Still::default()), &EngineOptions::default()).unwrap();
        let address = ([127, 0, 0, 1], 0).into();
        let set = Some("rs0".to_owned());
        let door = Door::open(address, Arc::clone(&engine), 1, 10, set).unwrap();
        let mut client = std::net::TcpStream::connect(door.address()).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let one = doc! { "_id": 1, "text": "x".repeat(1000) };
        let inserted = ask(&mut client, doc! { "insert": "c", "documents": [one.clone()] });
        assert_eq!(inserted.get_i32("n").unwrap(), 1);
        let plain = ask(&mut client, doc! { "find": "c", "filter": { "_id": 1 } });
        let planned = doc! { "find": "c", "filter": { "_id": 1 }, "batchSize": 10 };
        assert_eq!(plain, ask(&mut client, planned));
        let batch = plain.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
        assert_eq!(batch, &vec![Bson::Document(one)]);
        assert!(plain.contains_key("operationTime"), "{plain}");
        // Several in one piece are answered in order, each with the number of its request.
        let mut sent = Vec::new();
        for (number, id) in [(7, 1), (8, 2), (9, 1)] {
            let body = doc! { "find": "c", "filter": { "_id": id }, "$db": "d" };
            sent.extend(wire::frame(number, &body));
        }
        client.write_all(&sent).unwrap();
        for (number, found) in [(7, 1), (8, 0), (9, 1)] {
            let mut answer = vec![0; 4];
            client.read_exact(&mut answer).unwrap();
            answer.resize(wire::length(&answer, 1 << 20).unwrap().unwrap(), 0);
            client.read_exact(&mut answer[4..]).unwrap();
            assert_eq!(answer[8..12], i32::to_le_bytes(number));
            let body = wire::read(&answer, 1 << 20).unwrap().1.body;
            let batch = body.get_document("cursor").unwrap().get_array("firstBatch").unwrap();
            assert_eq!(batch.len(), found);
        }
        assert_eq!(engine.metrics.documents_commands.value(), 6);
        assert_eq!(engine.metrics.documents_returned.value(), 4);
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

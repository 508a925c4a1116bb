//! What a request of a fabric client becomes: a reply at once, a command for a worker, or a reply that waits
//! for other members of the replica set.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_documents_channel::numbers::ByNumber;
use beeline_documents_channel::{Answer, ChannelId, Handler, Incoming, MessageType, ReplyBuffer};
use beeline_documents_query::check;
use beeline_documents_query::error::{Code, QueryError, fail};
use bson::{Document, doc};
use tokio::runtime::Handle as Runtime;
use tokio::sync::futures::OwnedNotified;
use tokio::sync::watch;

use super::jobs::Jobs;
use super::{ChannelHandle, Delivery, FIRST_CONNECTION, Origin};
use crate::commands::{self, Context, Identity, Request, Session, failure, insert_one, point};
use crate::door::{LONGEST_WAIT_MS, concern_of, may_take_long};
use crate::engine::{Engine, lock, whole_field};
use crate::listening::STACK;
use crate::replica::Replica;
use crate::replica::concern::Held;
use crate::replica::source::COMMAND;
use crate::reply::Reply;
use crate::request;
use crate::wire::LONGEST_OF_STRANGER;

/// A member that asks for news of the log waits so long at most.
const LONGEST_WAIT_OF_MEMBER_MS: i64 = 5000;
/// A longer body is read and executed by a worker, however few documents its command looks at.
const LONG_BODY: usize = 256 << 10;
/// A buffer for documents that grew past this is not kept for the next one.
const LONGEST_FOUND: usize = 1 << 20;
/// A worker that made a longer reply goes on with its channel once the reply is written.
const LONG_REPLY: usize = 64 << 10;

/// A channel: of which server, which.
pub(super) type Key = (u64, ChannelId);

/// A command for a worker.
#[derive(Debug)]
pub(super) struct Job {
    index: u32,
    session: Arc<Mutex<Session>>,
    body: Vec<u8>,
    gone: watch::Receiver<()>,
    /// How long it waits for news, once it began to wait.
    until: Option<Instant>,
}

/// What is known of a channel.
#[derive(Debug)]
pub(super) struct Peer {
    session: Arc<Mutex<Session>>,
    /// Its client had logged in when its session was looked at last.
    is_known: bool,
    /// What waits for other members ends when this is dropped.
    here: watch::Sender<()>,
}

/// What the thread and the workers share.
pub(super) struct Executive {
    pub(super) engine: Arc<Engine>,
    pub(super) identity: Identity,
    pub(super) jobs: Jobs<Key, Job>,
    pub(super) handle: ChannelHandle,
    pub(super) runtime: Runtime,
    pub(super) workers: Mutex<Vec<JoinHandle<()>>>,
    /// Where `find` and `insert` are among the commands whose times are counted.
    pub(super) find: usize,
    pub(super) insert: usize,
}

impl fmt::Debug for Executive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executive").finish_non_exhaustive()
    }
}

/// A command that ran, and what its reply waits for.
struct Ran {
    reply: Reply,
    waits: Option<Waits>,
}

/// What a reply waits for.
struct Waits {
    replica: Arc<Replica>,
    held: Held,
    name: String,
    concern: Document,
}

/// Says when a worker has ended, also where a command ended it.
struct Worker<'e>(&'e Arc<Executive>);

impl Drop for Worker<'_> {
    fn drop(&mut self) {
        self.0.jobs.end();
    }
}

impl Executive {
    /// Starts a worker, unless there are enough.
    ///
    /// Errors: no thread could be made.
    pub(super) fn hire(self: &Arc<Self>) -> std::io::Result<()> {
        if !self.jobs.begin() {
            return Ok(());
        }
        let executive = Arc::clone(self);
        let builder =
            std::thread::Builder::new().name("documents-work".to_owned()).stack_size(STACK);
        let made = builder.spawn(move || {
            let worker = Worker(&executive);
            while let Some((channel, job)) = worker.0.jobs.next() {
                worker.0.work(channel, job);
            }
        });
        match made {
            Ok(thread) => {
                let mut workers = lock(&self.workers);
                workers.retain(|worker| !worker.is_finished());
                workers.push(thread);
                Ok(())
            }
            Err(error) => {
                self.jobs.end();
                Err(error)
            }
        }
    }

    fn push(self: &Arc<Self>, channel: Key, job: Job) {
        if self.jobs.push(channel, job)
            && let Err(error) = self.hire()
        {
            tracing::warn!(%error, "no further worker for fabric clients can be started");
        }
    }

    /// Runs a command. The reply of a command that `may_wait` may be [`Reply::Later`].
    fn run(&self, session: &mut Session, request: Request, may_wait: bool) -> Ran {
        let replica = self.engine.replica.get();
        let (name, concern) = match replica {
            Some(_) => (request.name().to_owned(), concern_of(&request)),
            None => (String::new(), Document::new()),
        };
        let mut context = Context {
            engine: &self.engine,
            session,
            identity: &self.identity,
            database: String::new(),
            request,
            may_wait,
        };
        let reply = commands::run(&mut context);
        let waits = session.held.take().zip(replica).map(|(held, replica)| Waits {
            replica: Arc::clone(replica),
            held,
            name,
            concern,
        });
        Ran { reply, waits }
    }

    /// A worker's part: a command of a channel, which is the only one of it that runs.
    fn work(self: &Arc<Self>, channel: Key, job: Job) {
        let origin = (channel.0, channel.1, job.index);
        let mut changed = None;
        let ran = match read_request(&job.body) {
            Ok(request) => {
                if request.name() == "getMore"
                    && job.until.is_none_or(|until| Instant::now() < until)
                {
                    // Registered before the look, so that no change is missed between the two.
                    let mut news = Box::pin(Arc::clone(&self.engine.changed).notified_owned());
                    news.as_mut().enable();
                    changed = Some(news);
                }
                self.run(&mut lock(&job.session), request, changed.is_some())
            }
            Err(error) => Ran { reply: Reply::Document(failure(&error)), waits: None },
        };
        if let Some(changed) = changed
            && let Reply::Later(most_ms) = ran.reply
        {
            // Other commands of its channel run meanwhile, as the end of its cursor.
            self.jobs.finish(channel);
            return self.wait_for_change(channel, job, changed, most_ms);
        }
        let gone = job.gone;
        drop(job.body);
        match (ran.waits, ran.reply) {
            (None, reply) => {
                let bytes = encoded(&reply);
                let finishes = bytes.len() >= LONG_REPLY;
                if !finishes {
                    self.jobs.finish(channel);
                }
                self.handle.deliver(Delivery::Done { origin, bytes, finishes });
            }
            (Some(waits), reply @ Reply::Document(_)) => {
                self.jobs.finish(channel);
                self.wait(origin, waits, reply, false, gone);
            }
            (Some(waits), reply) => {
                let bytes = encoded(&reply);
                self.handle.deliver(Delivery::Keep { origin, bytes });
                self.wait(origin, waits, Reply::ok(), true, gone);
            }
        }
    }

    /// Has a reply wait for other members; no thread waits. `kept`: the reply itself lies in the channel.
    fn wait(
        &self,
        origin: Origin,
        waits: Waits,
        reply: Reply,
        kept: bool,
        gone: watch::Receiver<()>,
    ) {
        let handle = self.handle.clone();
        let Waits { replica, held, name, concern } = waits;
        let released = async move {
            let reply = replica.release(held, reply, &name, &concern).await;
            handle.deliver(match kept && !reply.is_failure() {
                true => Delivery::Release(origin),
                false => Delivery::Done { origin, bytes: encoded(&reply), finishes: false },
            });
        };
        self.runtime.spawn(while_here(gone, released));
    }

    /// Has a getMore look again once something changed, or its time is up; no thread waits.
    fn wait_for_change(
        self: &Arc<Self>,
        channel: Key,
        job: Job,
        changed: Pin<Box<OwnedNotified>>,
        most_ms: u64,
    ) {
        let wait = Duration::from_millis(most_ms.min(LONGEST_WAIT_MS));
        let until = job.until.unwrap_or_else(|| Instant::now() + wait);
        let (executive, gone) = (Arc::clone(self), job.gone.clone());
        let looks_again = async move {
            tokio::select! {
                () = changed => {}
                () = tokio::time::sleep_until(until.into()) => {}
            }
            executive.push(channel, Job { until: Some(until), ..job });
        };
        self.runtime.spawn(while_here(gone, looks_again));
    }

    /// Answers a member once the log is longer than it has it, or its time is up.
    fn wait_for_news(
        &self,
        origin: Origin,
        replica: Arc<Replica>,
        from: u64,
        wait: Duration,
        gone: watch::Receiver<()>,
    ) {
        let handle = self.handle.clone();
        let news = async move {
            // Registered before the look, so that no entry is missed between the two.
            let grown = replica.store.grown.notified();
            tokio::pin!(grown);
            grown.as_mut().enable();
            let newest = || replica.store.reached();
            if newest() <= from {
                tokio::select! {
                    () = grown => {}
                    () = tokio::time::sleep(wait) => {}
                }
            }
            handle.deliver(Delivery::Optime(origin, newest()));
        };
        self.runtime.spawn(while_here(gone, news));
    }

    /// Lets a command run once this member has what its client saw elsewhere.
    fn catch_up(self: &Arc<Self>, channel: Key, job: Job, replica: &Arc<Replica>, seen: Document) {
        let (executive, replica, gone) = (Arc::clone(self), Arc::clone(replica), job.gone.clone());
        let caught_up = async move {
            match replica.catch_up(&seen).await {
                Ok(()) => executive.push(channel, job),
                Err(error) => {
                    let origin = (channel.0, channel.1, job.index);
                    let bytes = encoded(&Reply::Document(failure(&error)));
                    executive.handle.deliver(Delivery::Done { origin, bytes, finishes: false });
                }
            }
        };
        self.runtime.spawn(while_here(gone, caught_up));
    }
}

/// Does something as long as the channel is there that it is done for.
async fn while_here(mut gone: watch::Receiver<()>, work: impl Future<Output = ()>) {
    tokio::select! {
        () = work => {}
        _ = gone.changed() => {}
    }
}

fn encoded(reply: &Reply) -> Vec<u8> {
    let mut bytes = Vec::new();
    reply.write(&[], &mut bytes);
    bytes
}

/// Reads a request: the command's document, its long arrays as sequences of bytes.
///
/// Errors: no document, or one that is nested too deeply.
pub fn read_request(bytes: &[u8]) -> Result<Request, QueryError> {
    check::document(bytes)?;
    request::read(bytes)
        .map_err(|error| QueryError::new(Code::NonConformantBson, error.to_string()))
}

/// The requests of one server's channels, on the thread.
pub(super) struct Executor<'t> {
    pub(super) token: u64,
    pub(super) executive: &'t Arc<Executive>,
    pub(super) peers: &'t mut ByNumber<Key, Peer>,
    pub(super) connections: &'t mut i32,
    /// A document that is found on its way into a reply.
    pub(super) found: &'t mut Vec<u8>,
    /// When the last lookup began, until its reply is posted.
    pub(super) began: Option<Instant>,
}

impl Executor<'_> {
    fn peer(&mut self, channel: Key) -> &Peer {
        peer_of(self.peers, self.connections, channel)
    }
}

/// A channel's peer, made at its first request.
fn peer_of<'p>(
    peers: &'p mut ByNumber<Key, Peer>,
    connections: &mut i32,
    channel: Key,
) -> &'p Peer {
    peers.entry(channel).or_insert_with(|| {
        *connections = connections.wrapping_add(1).max(FIRST_CONNECTION);
        let peer = format!("fabric:{}", channel.1);
        let session = Session { connection: *connections, peer, ..Session::default() };
        let (session, here) = (Arc::new(Mutex::new(session)), watch::channel(()).0);
        Peer { session, is_known: false, here }
    })
}

impl Executor<'_> {
    /// What a member that copies this one asks of the log.
    fn log_request(&mut self, incoming: &Incoming<'_>) -> beeline_documents_query::Result<Answer> {
        let executive = self.executive;
        let Some(replica) = executive.engine.replica.get() else {
            return fail(Code::NoReplicationEnabled, "this node is no member of a replica set");
        };
        let mut body = read_request(incoming.body)?.body;
        let (channel, message) = ((self.token, incoming.channel), incoming.message);
        // The log from its start, or what lies behind the optime that the member has.
        let from = match message.kind {
            MessageType::OplogInitSynRequest => 0,
            _ => message.from,
        };
        let peer = self.peer(channel);
        if message.kind == MessageType::OptimeRequest {
            replica.admit_member(&body)?;
            let newest = replica.store.reached();
            if newest > from {
                return Ok(Answer::Optime(newest));
            }
            let wait = whole_field(&body, "wait").unwrap_or(0).clamp(0, LONGEST_WAIT_OF_MEMBER_MS);
            let wait = Duration::from_millis(wait.unsigned_abs());
            let origin = (channel.0, channel.1, message.index);
            executive.wait_for_news(origin, Arc::clone(replica), from, wait, peer.here.subscribe());
            return Ok(Answer::Later);
        }
        // As many whole entries as the destination holds: what is longer comes in parts.
        let room = i64::try_from(incoming.capacity).unwrap_or(i64::MAX);
        let most = whole_field(&body, "most").unwrap_or(room).min(room);
        body.extend(doc! { COMMAND: "entries", "after": from as i64, "most": most, "wait": 0 });
        let job = Job {
            index: message.index,
            session: Arc::clone(&peer.session),
            body: body.to_vec().unwrap_or_default(),
            gone: peer.here.subscribe(),
            until: None,
        };
        executive.push(channel, job);
        Ok(Answer::Later)
    }
}

impl Handler for Executor<'_> {
    fn execute(&mut self, incoming: &Incoming<'_>, reply: &mut ReplyBuffer) -> Answer {
        if !incoming.message.kind.is_command() {
            return match self.log_request(incoming) {
                Ok(answer) => answer,
                Err(error) => Answer::Fail(error.code as u32, error.message),
            };
        }
        let executive = self.executive;
        let replica = executive.engine.replica.get();
        let (channel, index) = ((self.token, incoming.channel), incoming.message.index);
        let peer = peer_of(self.peers, self.connections, channel);
        if incoming.message.kind == MessageType::Query
            && let Ok(session) = peer.session.try_lock()
            && let began = Instant::now()
            && point::answer(
                &executive.engine,
                &session,
                incoming.body,
                Vec::new,
                self.found,
                reply,
            )
        {
            if let Some(before) = self.began.replace(began) {
                let took = began.duration_since(before);
                executive.engine.times.record_at(executive.find, took);
            }
            if self.found.capacity() > LONGEST_FOUND {
                *self.found = Vec::new();
            }
            return Answer::Reply;
        }
        // A lookup before this request is answered by now, and another command's time is not its.
        if let Some(before) = self.began.take() {
            executive.engine.times.record_at(executive.find, before.elapsed());
        }
        if incoming.message.kind == MessageType::Insert
            && incoming.body.len() <= LONG_BODY
            && let Ok(session) = peer.session.try_lock()
            && let began = Instant::now()
            && insert_one::answer(
                &executive.engine,
                &session,
                (incoming.body, None),
                Vec::new,
                reply,
            )
        {
            executive.engine.times.record_at(executive.insert, began.elapsed());
            return Answer::Reply;
        }
        let job = |peer: &Peer| Job {
            index,
            session: Arc::clone(&peer.session),
            body: incoming.body.to_vec(),
            gone: peer.here.subscribe(),
            until: None,
        };
        if incoming.body.len() > LONG_BODY {
            executive.push(channel, job(peer));
            return Answer::Later;
        }
        let request = match read_request(incoming.body) {
            Ok(request) => request,
            Err(error) => {
                Reply::Document(failure(&error)).write(&[], reply);
                return Answer::Reply;
            }
        };
        if let Some(replica) = replica
            && request
                .body
                .get_document("readConcern")
                .is_ok_and(|one| one.contains_key("afterClusterTime"))
        {
            let seen = concern_of(&request);
            executive.catch_up(channel, job(peer), replica, seen);
            return Answer::Later;
        }
        // A worker has the session: this command goes behind what the worker does.
        let session = if may_take_long(&request) { None } else { peer.session.try_lock().ok() };
        let Some(mut session) = session else {
            executive.push(channel, job(peer));
            return Answer::Later;
        };
        let ran = executive.run(&mut session, request, false);
        let Some(waits) = ran.waits else {
            ran.reply.write(&[], reply);
            return Answer::Reply;
        };
        let (origin, gone) = ((channel.0, channel.1, index), peer.here.subscribe());
        if let Reply::Document(_) = ran.reply {
            executive.wait(origin, waits, ran.reply, false, gone);
            return Answer::Later;
        }
        ran.reply.write(&[], reply);
        executive.wait(origin, waits, Reply::ok(), true, gone);
        Answer::Kept
    }

    fn answered(&mut self) {
        if let Some(began) = self.began.take() {
            self.executive.engine.times.record_at(self.executive.find, began.elapsed());
        }
    }

    fn longest_body(&mut self, channel: ChannelId) -> usize {
        if !self.executive.engine.authentication {
            return usize::MAX;
        }
        let Some(peer) = self.peers.get_mut(&(self.token, channel)) else {
            return LONGEST_OF_STRANGER;
        };
        // Where a command has the session, the client logged in before it or did not.
        if let Ok(session) = peer.session.try_lock() {
            peer.is_known = session.user.is_some();
        }
        if peer.is_known { usize::MAX } else { LONGEST_OF_STRANGER }
    }

    fn ended(&mut self, channel: ChannelId) {
        self.answered();
        let channel = (self.token, channel);
        self.peers.remove(&channel);
        self.executive.jobs.forget(channel);
    }
}

#[cfg(test)]
mod tests {
    use bson::doc;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(at: prop::sample::Index, by: u8, cut: prop::sample::Index) {
            let body = doc! { "update": "c", "updates": [{ "q": { "a": 1 }, "u": [] }], "$db": "d" };
            let mut bytes = body.to_vec().unwrap();
            let place = at.index(bytes.len());
            bytes[place] ^= by;
            let _ = read_request(&bytes);
            bytes.truncate(cut.index(bytes.len()));
            let _ = read_request(&bytes);
        }
    }
}

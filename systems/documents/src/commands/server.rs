//! What the node says of itself.

use beeline_documents_query::error::{Code, Result, fail};
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, DateTime, Document, doc};

use super::{Context, NAMES, session_ids};
use crate::log::stamp;
use crate::replica::{Replica, State, register};
use crate::reply::Reply;
use crate::wire::LONGEST_MESSAGE;
use crate::write::LARGEST;

/// The MongoDB whose behaviour this server shows.
pub const VERSION: &str = "7.0.0";
/// The wire version of that.
pub const WIRE_VERSION: i32 = 21;
/// Minutes a session lives unused.
pub const SESSION_MINUTES: i32 = 30;

pub(super) fn hello(context: &mut Context<'_>, name: &str) -> Result<Reply> {
    if let Some(client) = context.document("client")?.cloned() {
        context.session.client.get_or_insert(client);
    }
    let primary = if name == "hello" { "isWritablePrimary" } else { "ismaster" };
    let mut reply = doc! {
        "helloOk": true,
        primary: true,
        "maxBsonObjectSize": LARGEST as i32,
        "maxMessageSizeBytes": LONGEST_MESSAGE as i32,
        "maxWriteBatchSize": 100_000,
        "localTime": DateTime::from_millis(context.engine.now_ms() as i64),
        "logicalSessionTimeoutMinutes": SESSION_MINUTES,
        "connectionId": context.session.connection,
        "minWireVersion": 0,
        "maxWireVersion": WIRE_VERSION,
        "readOnly": false,
    };
    reply.extend(set(context, primary));
    if context.request.body.contains_key("saslSupportedMechs") {
        reply.insert("saslSupportedMechs", vec!["SCRAM-SHA-256"]);
    }
    if let Some(start) = context.document("speculativeAuthenticate")?.cloned() {
        // A failed guess is no failure: the client then begins anew.
        if let Ok(answer) = super::identity::speculate(context, &start) {
            reply.insert("speculativeAuthenticate", answer);
        }
    }
    if let Some(Bson::Array(offered)) = context.request.body.get("compression") {
        let shared: Vec<Bson> = offered
            .iter()
            .filter(|name| {
                name.as_str().is_some_and(|name| crate::wire::COMPRESSORS.contains(&name))
            })
            .cloned()
            .collect();
        if !shared.is_empty() {
            reply.insert("compression", shared);
        }
    }
    reply.insert("ok", 1.0);
    Ok(Reply::Document(reply))
}

/// What the node says of its replica set, if it says that it is in one.
fn set(context: &Context<'_>, word: &str) -> Document {
    if let Some(replica) = context.engine.replica.get() {
        return membership(replica, word);
    }
    let Some(set) = &context.identity.replica_set else { return Document::new() };
    let me = context.identity.address.clone();
    let last = context.engine.clock.last();
    let optime = doc! { "ts": stamp(last), "t": 1_i64 };
    let date = DateTime::from_millis(((last >> 32) as i64).saturating_mul(1000));
    doc! {
        word: true, "setName": set.clone(), "setVersion": 1, "secondary": false, "hosts": [me.clone()], "primary": me.clone(), "me": me,
        "electionId": bson::oid::ObjectId::from_bytes([0x7f, 0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 1]),
        "lastWrite": { "opTime": optime.clone(), "lastWriteDate": date, "majorityOpTime": optime, "majorityWriteDate": date },
    }
}

/// The address of a member, unless this one's setting does not name it: the members are about to change then.
fn named(replica: &Replica, member: u16) -> Option<String> {
    replica.options.members.get(&member).map(ToString::to_string)
}

/// What a member of a replica set says of the set, of itself, and how far it is.
fn membership(replica: &Replica, word: &str) -> Document {
    let (term, primary) = replica.primary();
    let (writes, state) = (replica.writes(), replica.state());
    let hosts: Vec<String> =
        replica.options.members.keys().map(|member| replica.address(*member)).collect();
    let date = |time: u64| DateTime::from_millis(((time >> 32) as i64).saturating_mul(1000));
    let optime = |time: u64| doc! { "ts": stamp(time), "t": term as i64 };
    let last = replica.store.last().place;
    let majority = replica.commit().min(last.time);
    let mut said = doc! {
        word: writes, "secondary": !writes && matches!(state, State::Primary | State::Secondary),
        "setName": replica.options.set.clone(), "setVersion": 1, "hosts": hosts,
        "me": replica.address(replica.options.me),
        "lastWrite": {
            "opTime": { "ts": stamp(last.time), "t": last.term as i64 }, "lastWriteDate": date(last.time),
            "majorityOpTime": optime(majority), "majorityWriteDate": date(majority),
        },
    };
    if let Some(address) = primary.and_then(|primary| named(replica, primary)) {
        said.insert("primary", address);
    }
    // Fabric clients go on to the primary's fabric door.
    let fabric = &replica.options.fabric;
    let doors: Document = replica
        .options
        .members
        .iter()
        .filter_map(|(member, host)| Some((host.to_string(), fabric.get(member)?.to_string())))
        .map(|(host, door)| (host, Bson::String(door)))
        .collect();
    if !doors.is_empty() {
        said.insert("beelineFabric", doors);
    }
    if writes {
        said.insert("electionId", Replica::election(term));
    }
    said
}

/// Members among themselves, and orders for this one.
pub(super) fn replica(context: &Context<'_>, name: &str) -> Result<Reply> {
    let Some(replica) = context.engine.replica.get() else {
        return fail(
            Code::NoReplicationEnabled,
            "this node is no member of a replica set: see --documents-members",
        );
    };
    match Replica::is_internal(name) {
        true => replica.answer(&context.request.body, context.may_wait),
        false => replica.order(name, &context.request.body),
    }
}

fn set_status(context: &Context<'_>, replica: &Replica, name: &str) -> Document {
    let (term, primary) = replica.primary();
    let set = replica.options.set.clone();
    if name == "replSetGetConfig" {
        let members: Vec<Document> = replica
            .options
            .members
            .iter()
            .map(|(member, address)| doc! { "_id": i32::from(*member), "host": address.to_string(), "priority": 1.0, "votes": 1 })
            .collect();
        return doc! { "config": { "_id": set, "version": 1, "term": term as i64, "members": members }, "ok": 1.0 };
    }
    let latest = replica.latest();
    let members: Vec<Document> = replica
        .members()
        .into_iter()
        .map(|(member, state, applied, durable)| {
            let optime = |time: u64| doc! { "ts": stamp(time), "t": term as i64 };
            let lag = (latest >> 32).saturating_sub(applied >> 32);
            let mut one = doc! {
                "_id": i32::from(member), "name": replica.address(member),
                "health": if state.is_some() { 1.0 } else { 0.0 },
                "state": state.map_or(8, |state| state as i32),
                "stateStr": state.map_or("(not reachable/healthy)", State::word),
                "optime": optime(applied), "optimeDurable": optime(durable),
            };
            // Of a member that was not heard since this one learned of the term nothing is known.
            if applied > 0 || latest == 0 {
                one.insert("lagSeconds", lag as i64);
            }
            if member == replica.options.me {
                one.insert("self", true);
            }
            one
        })
        .collect();
    let (counts, register) = (&replica.counts, replica.agreed.now());
    let numbers = |set: &std::collections::BTreeSet<u16>| -> Vec<i32> {
        set.iter().map(|member| i32::from(*member)).collect()
    };
    let count =
        |one: &std::sync::atomic::AtomicU64| one.load(std::sync::atomic::Ordering::Relaxed) as i64;
    let mut status = doc! {
        "set": set, "date": DateTime::from_millis(context.engine.now_ms() as i64),
        "myState": replica.state() as i32, "term": term as i64,
        "majorityVoteCount": register::majority(register.voters.len()) as i32,
        "voters": numbers(&register.voters), "votersBefore": numbers(&register.before),
        "optimes": { "lastCommittedOpTime": { "ts": stamp(replica.commit()), "t": term as i64 } },
        "members": members, "paused": replica.is_paused(), "syncCarrier": replica.carrier(),
        "counts": { "led": count(&counts.led), "applied": count(&counts.applied), "takenBack": count(&counts.taken_back), "copies": count(&counts.copies) },
        "ok": 1.0,
    };
    if let Some(primary) = primary {
        status.insert("primaryId", i32::from(primary));
        if let Some(address) = named(replica, primary) {
            status.insert("primary", address);
        }
    }
    if let Some(why) = replica.broken() {
        status.insert("broken", why);
    }
    if let Some(reason) = replica.reason() {
        status.insert("reason", reason.text);
    }
    status
}

pub(super) fn build_info() -> Result<Reply> {
    Ok(Reply::Document(doc! {
        "version": VERSION, "gitVersion": "beeline", "modules": [], "allocator": "system",
        "javascriptEngine": "none", "sysInfo": "deprecated", "versionArray": [7, 0, 0, 0], "bits": 64, "debug": false,
        "maxBsonObjectSize": LARGEST as i32, "storageEngines": ["beeline"], "openssl": {}, "ok": 1.0,
    }))
}

pub(super) fn connection_status(context: &mut Context<'_>) -> Result<Reply> {
    let users: Vec<Bson> = context
        .session
        .user
        .iter()
        .map(|user| Bson::Document(doc! { "user": user.clone(), "db": "admin" }))
        .collect();
    Ok(Reply::Document(
        doc! { "authInfo": { "authenticatedUsers": users, "authenticatedUserRoles": [] }, "ok": 1.0 },
    ))
}

pub(super) fn get_parameter(context: &mut Context<'_>) -> Result<Reply> {
    let lifetime = (context.engine.transactions.lifetime_ms() / 1000) as i32;
    let known = doc! { "transactionLifetimeLimitSeconds": lifetime, "featureCompatibilityVersion": { "version": "7.0" }, "authenticationMechanisms": ["SCRAM-SHA-256"], "enableTestCommands": context.engine.fail_points.is_on() };
    let mut reply = Document::new();
    let all =
        matches!(context.request.body.get("getParameter"), Some(Bson::String(all)) if all == "*");
    for (name, value) in known {
        if all || context.request.body.contains_key(&name) {
            reply.insert(name, value);
        }
    }
    if reply.is_empty() {
        return fail(Code::InvalidOptions, "no option found to get");
    }
    reply.insert("ok", 1.0);
    Ok(Reply::Document(reply))
}

pub(super) fn host_info(context: &mut Context<'_>) -> Result<Reply> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Reply::Document(doc! {
        "system": { "currentTime": DateTime::from_millis(context.engine.now_ms() as i64), "hostname": context.identity.address.clone(), "cpuAddrSize": 64, "numCores": cores as i32 },
        "os": { "type": "Linux", "name": "Linux", "version": "" }, "extra": {}, "ok": 1.0,
    }))
}

pub(super) fn server_status(context: &mut Context<'_>) -> Result<Reply> {
    let metrics = &context.engine.metrics;
    let connections = metrics.documents_connections.value();
    let uptime = context.engine.now_ms().saturating_sub(context.engine.started_ms());
    let times = beeline_observe::MetricSet::labelled(&*context.engine.times);
    let ran = |command: &str| {
        let one =
            times.iter().find(|one| one.labels.iter().any(|(_, value)| value.as_str() == command));
        one.map_or(0, |one| one.calls as i64)
    };
    let mut status = doc! {
        "host": context.identity.address.clone(), "version": VERSION, "process": "beeline", "pid": i64::from(std::process::id()),
        "uptime": (uptime / 1000) as f64, "uptimeMillis": uptime as i64, "localTime": DateTime::from_millis(context.engine.now_ms() as i64),
        "connections": { "current": connections as i64, "available": (context.identity.most_connections as u64).saturating_sub(connections) as i64,
            "totalCreated": metrics.documents_accepted_connections.value() as i64 },
        "network": { "bytesIn": metrics.documents_input_bytes.value() as i64, "bytesOut": metrics.documents_output_bytes.value() as i64,
            "numRequests": metrics.documents_commands.value() as i64 },
        "opcounters": { "insert": metrics.documents_inserted.value() as i64, "query": ran("find"), "update": metrics.documents_updated.value() as i64,
            "delete": metrics.documents_deleted.value() as i64, "getmore": ran("getMore"), "command": metrics.documents_commands.value() as i64 },
        "asserts": { "regular": 0, "warning": 0, "msg": 0, "user": metrics.documents_failed_commands.value() as i64, "rollovers": 0 },
        "transactions": { "totalCommitted": ran("commitTransaction"), "totalAborted": ran("abortTransaction") },
        "metrics": { "cursor": { "open": { "total": context.engine.cursors.count() as i64 }, "timedOut": metrics.documents_timed_out_cursors.value() as i64 },
            "document": { "returned": metrics.documents_returned.value() as i64, "inserted": metrics.documents_inserted.value() as i64,
                "updated": metrics.documents_updated.value() as i64, "deleted": metrics.documents_deleted.value() as i64 },
            "queryExecutor": { "scannedObjects": metrics.documents_examined.value() as i64 },
            "ttl": { "deletedDocuments": metrics.documents_expired.value() as i64 } },
        "storageEngine": { "name": "beeline", "persistent": context.engine.store().outlives_process() },
    };
    let set = set(context, "isWritablePrimary");
    if !set.is_empty() {
        status.insert("repl", set);
    }
    status.insert("ok", 1.0);
    Ok(Reply::Document(status))
}

pub(super) fn list_commands() -> Result<Reply> {
    let commands: Document = NAMES
        .iter()
        .map(|name| ((*name).to_owned(), Bson::Document(doc! { "help": "" })))
        .collect();
    Ok(Reply::Document(doc! { "commands": commands, "ok": 1.0 }))
}

pub(super) fn start_session(_: &mut Context<'_>) -> Result<Reply> {
    let mut id: [u8; 16] = rand::random();
    id[6] = (id[6] & 0x0f) | 0x40;
    id[8] = (id[8] & 0x3f) | 0x80;
    let id = Bson::Binary(Binary { subtype: BinarySubtype::Uuid, bytes: id.to_vec() });
    Ok(Reply::Document(doc! { "id": { "id": id }, "timeoutMinutes": SESSION_MINUTES, "ok": 1.0 }))
}

pub(super) fn end_sessions(context: &mut Context<'_>, name: &str) -> Result<Reply> {
    if name != "refreshSessions" {
        let sessions = session_ids(context.request.body.get(name));
        let user = context.session.user.as_deref();
        context.engine.cursors.kill_sessions(&sessions, user);
        for session in sessions {
            context.engine.transactions.end(&super::key_of(session, user));
        }
    }
    Ok(Reply::ok())
}

pub(super) fn check_api_version(context: &Context<'_>, name: &str) -> Result<()> {
    match context.request.body.get_str("apiVersion") {
        Ok("1") => {}
        Ok(other) => {
            return fail(
                Code::ApiVersionError,
                format!("API version must be \"1\", not \"{other}\""),
            );
        }
        Err(_) => return fail(Code::ApiVersionError, "apiStrict needs apiVersion"),
    }
    const STABLE: &[&str] = &[
        "abortTransaction",
        "aggregate",
        "bulkWrite",
        "collMod",
        "commitTransaction",
        "count",
        "create",
        "createIndexes",
        "delete",
        "distinct",
        "drop",
        "dropDatabase",
        "dropIndexes",
        "endSessions",
        "explain",
        "find",
        "findAndModify",
        "getMore",
        "hello",
        "insert",
        "killCursors",
        "listCollections",
        "listDatabases",
        "listIndexes",
        "ping",
        "refreshSessions",
        "update",
    ];
    if context.flag("apiStrict") && !STABLE.contains(&name) {
        return fail(
            Code::ApiStrictError,
            format!("Provided apiStrict:true, but the command {name} is not in API Version 1"),
        );
    }
    Ok(())
}

pub(super) fn replica_set(context: &Context<'_>, name: &str) -> Result<Reply> {
    if let Some(replica) = context.engine.replica.get() {
        return Ok(Reply::Document(set_status(context, replica, name)));
    }
    let Some(set) = &context.identity.replica_set else {
        return fail(Code::NoReplicationEnabled, "not running with --replSet");
    };
    let me = context.identity.address.clone();
    Ok(Reply::Document(if name == "replSetGetConfig" {
        doc! { "config": { "_id": set.clone(), "version": 1, "term": 1, "members": [ { "_id": 0, "host": me } ] }, "ok": 1.0 }
    } else {
        let optime = doc! { "ts": stamp(context.engine.clock.last()), "t": 1_i64 };
        let uptime = context.engine.now_ms().saturating_sub(context.engine.started_ms()) / 1000;
        doc! {
            "set": set.clone(), "date": DateTime::from_millis(context.engine.now_ms() as i64), "myState": 1, "term": 1_i64,
            "members": [ { "_id": 0, "name": me, "health": 1.0, "state": 1, "stateStr": "PRIMARY", "uptime": uptime as i64, "optime": optime, "self": true } ],
            "ok": 1.0,
        }
    }))
}

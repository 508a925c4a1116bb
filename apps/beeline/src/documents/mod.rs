//! `beeline documents`: what the document store of a running node holds and does.

mod fabric;
mod json;
mod route;

use std::net::SocketAddr;
use std::time::Duration;

use beeline_documents_client::{Client, Login, Options};
use bson::{Bson, Document, doc};
use clap::{Args, Subcommand};
use serde_json::json;

use crate::cli::span;
use crate::config::values::{Span, human_bytes};
use crate::exit::{Exit, Failure};
use crate::looks;
use crate::output::{Output, table};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// `beeline documents`.
#[derive(Debug, Subcommand)]
pub enum DocumentsCommand {
    /// Say what the store is and which databases and collections it holds.
    #[command(
        after_help = "Examples:\n  beeline documents status\n  beeline documents status --json"
    )]
    Status(DoorArguments),
    /// Watch what it does.
    #[command(after_help = "Examples:\n  beeline documents top\n  \
                            beeline documents top --interval 5s --count 12 --json")]
    Top(TopArguments),
    /// Show the document with an _id, over fabric.
    #[command(after_help = "Examples:\n  beeline documents get shop.items 1\n  \
                            beeline documents get shop.items tea --fabric shm://127.0.0.1:4790")]
    Get(fabric::GetArguments),
    /// Insert a document, or replace that of its _id, over fabric.
    #[command(
        after_help = "Examples:\n  beeline documents put shop.items '{\"_id\": 1, \"name\": \"tea\"}'"
    )]
    Put(fabric::PutArguments),
    /// Show the documents that a filter finds, over fabric.
    #[command(
        after_help = "Examples:\n  beeline documents find shop.items '{\"price\": {\"$gt\": 2}}' --sort '{\"price\": 1}'\n  \
                      beeline documents find shop.items --limit 3 --fabric mongodb://127.0.0.1:27017"
    )]
    Find(fabric::FindArguments),
    /// Serve MongoDB clients from several stores as from one: a router, as MongoDB's mongos.
    #[command(
        after_help = "Examples:\n  beeline documents route --config mongodb://127.0.0.1:27017 \\\n    --shard s0=mongodb://127.0.0.1:27017 --shard s1=mongodb://127.0.0.1:27018\n  \
                      beeline documents route --config auto://10.0.0.1:4790 --address 10.0.0.9:27017"
    )]
    Route(route::RouteArguments),
    /// Have a secondary of a replica set copy all documents anew.
    #[command(after_help = "Examples:\n  beeline documents resync --address 127.0.0.1:27018")]
    Resync(DoorArguments),
    /// Have a secondary fetch nothing until it is told to go on; its documents can be read meanwhile.
    #[command(after_help = "Examples:\n  beeline documents pause --address 127.0.0.1:27018")]
    Pause(DoorArguments),
    /// Have a paused secondary go on.
    #[command(after_help = "Examples:\n  beeline documents resume --address 127.0.0.1:27018")]
    Resume(DoorArguments),
}

/// Which store.
#[derive(Clone, Debug, Args)]
pub struct DoorArguments {
    /// Where MongoDB clients connect, as `serve` prints it.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:27017")]
    pub address: SocketAddr,
    #[command(flatten)]
    pub user: UserArguments,
}

/// The user that asks, where the store has users.
#[derive(Clone, Debug, Args)]
pub struct UserArguments {
    /// User to log in as, where the store has --documents-authentication on.
    #[arg(long, env = "BEELINE_DOCUMENTS_USER", value_name = "NAME")]
    pub user: Option<String>,
    /// The user's password; better from BEELINE_DOCUMENTS_PASSWORD than from a flag.
    #[arg(long, env = "BEELINE_DOCUMENTS_PASSWORD", default_value = "", hide_env_values = true)]
    pub password: String,
}

impl UserArguments {
    fn login(&self) -> Option<Login> {
        let user = self.user.clone()?;
        Some(Login { user, password: self.password.clone() })
    }
}

/// `beeline documents top`.
#[derive(Clone, Debug, Args)]
pub struct TopArguments {
    #[command(flatten)]
    pub door: DoorArguments,
    /// Time between two looks, as in 500ms or 2s.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = span)]
    pub interval: Span,
    /// Looks before it ends; without it, until interrupted.
    #[arg(long, value_name = "COUNT")]
    pub count: Option<u32>,
}

/// The command.
pub fn run(command: &DocumentsCommand, output: Output) -> Result<Exit, Failure> {
    match command {
        DocumentsCommand::Status(door) => status(door, output),
        DocumentsCommand::Top(arguments) => top(arguments, output),
        DocumentsCommand::Get(arguments) => fabric::get(arguments, output),
        DocumentsCommand::Put(arguments) => fabric::put(arguments, output),
        DocumentsCommand::Find(arguments) => fabric::find(arguments, output),
        DocumentsCommand::Route(arguments) => route::run(arguments, output),
        DocumentsCommand::Resync(door) => {
            order(door, doc! { "resync": 1 }, "all documents are copied anew", output)
        }
        DocumentsCommand::Pause(door) => {
            order(door, doc! { "beelineSync": "pause" }, "nothing is fetched", output)
        }
        DocumentsCommand::Resume(door) => {
            order(door, doc! { "beelineSync": "resume" }, "fetching goes on", output)
        }
    }
}

/// A connection to one store, whether that one leads or not.
struct Asker<'d> {
    client: Client,
    door: &'d DoorArguments,
}

impl<'d> Asker<'d> {
    fn open(address: SocketAddr, door: &'d DoorArguments) -> Result<Self, Failure> {
        let (timeout, login) = (PATIENCE, door.user.login());
        let options = Options { timeout, direct: true, login, ..Options::default() };
        let client = Client::connect(&format!("mongodb://{address}"), options);
        Ok(Self { client: client.map_err(fabric::failure)?, door })
    }

    fn ask(&mut self, database: &str, mut command: Document) -> Result<Document, Failure> {
        command.insert("$readPreference", doc! { "mode": "primaryPreferred" });
        self.client.ask(database, command).map_err(fabric::failure)
    }
}

fn order(
    door: &DoorArguments,
    command: Document,
    done: &str,
    output: Output,
) -> Result<Exit, Failure> {
    Asker::open(door.address, door)?.ask("admin", command)?;
    if output.json {
        output.object(&json!({ "done": done }))?;
    } else {
        output.line(done)?;
    }
    Ok(Exit::Done)
}

/// A member of a replica set, as the member asked knows it.
#[derive(Debug, serde::Serialize)]
struct MemberLine {
    id: i64,
    address: String,
    state: String,
    /// Seconds and counter of the newest time applied there, and of the newest that is durable.
    applied: String,
    durable: String,
    /// Unknown of a member that told nothing since the asked one learned of the term.
    lag_seconds: Option<i64>,
}

fn line_of(one: &Document) -> MemberLine {
    let optime = |field: &str| one.get_document(field).ok().and_then(|optime| optime.get("ts"));
    let time = |field: &str| match optime(field) {
        Some(Bson::Timestamp(stamp)) if stamp.time > 0 => {
            format!("{}.{}", stamp.time, stamp.increment)
        }
        _ => "-".to_owned(),
    };
    MemberLine {
        id: whole(one, &["_id"]),
        address: one.get_str("name").unwrap_or_default().to_owned(),
        state: one.get_str("stateStr").unwrap_or_default().to_owned(),
        applied: time("optime"),
        durable: time("optimeDurable"),
        lag_seconds: one.contains_key("lagSeconds").then(|| whole(one, &["lagSeconds"])),
    }
}

fn members_of(status: &Document) -> Vec<MemberLine> {
    let members = status.get_array("members").into_iter().flatten();
    members.filter_map(Bson::as_document).map(line_of).collect()
}

/// The replica set: its status as the member asked knows it, and the members; the primary knows the others. A
/// node by itself has none.
fn set_of(asker: &mut Asker<'_>) -> Option<(Document, Vec<MemberLine>)> {
    let status = asker.ask("admin", doc! { "replSetGetStatus": 1 }).ok()?;
    let mut members = members_of(&status);
    let own = status.get_array("members").ok()?.iter().filter_map(Bson::as_document);
    let own = own.filter(|one| one.contains_key("self")).map(line_of).next();
    let primary = status.get_str("primary").ok().and_then(|address| address.parse().ok());
    if let (Some(own), Some(primary)) = (own, primary)
        && own.address.parse() != Ok(primary)
        && let Ok(told) = Asker::open(primary, asker.door)
            .and_then(|mut primary| primary.ask("admin", doc! { "replSetGetStatus": 1 }))
    {
        members = members_of(&told);
        if let Some(line) = members.iter_mut().find(|line| line.id == own.id) {
            line.state = own.state;
        }
    }
    Some((status, members))
}

fn whole(document: &Document, path: &[&str]) -> i64 {
    let mut here = document;
    let Some((last, before)) = path.split_last() else { return 0 };
    for name in before {
        match here.get_document(name) {
            Ok(inner) => here = inner,
            Err(_) => return 0,
        }
    }
    match here.get(last) {
        Some(Bson::Int32(value)) => i64::from(*value),
        Some(Bson::Int64(value)) => *value,
        Some(Bson::Double(value)) => *value as i64,
        _ => 0,
    }
}

/// The primary: its address, or its number where the setting of the member that was asked does not name it.
fn primary_of(status: &Document) -> String {
    match (status.get_str("primary"), status.get_i32("primaryId")) {
        (Ok(address), _) => address.to_owned(),
        (_, Ok(number)) => format!("member {number}"),
        _ => "none".to_owned(),
    }
}

/// The members whose votes count, by the member that was asked.
fn voters_of(status: &Document) -> Vec<i32> {
    let voters = status.get_array("voters").into_iter().flatten();
    voters.filter_map(Bson::as_i32).collect()
}

fn status(door: &DoorArguments, output: Output) -> Result<Exit, Failure> {
    let mut asker = Asker::open(door.address, door)?;
    let hello = asker.ask("admin", doc! { "hello": 1 })?;
    let state = asker.ask("admin", doc! { "serverStatus": 1 })?;
    let replica = set_of(&mut asker).filter(|(status, _)| status.contains_key("counts"));
    // A member that copies shows its state, and nothing that it holds.
    let listed = match asker.ask("admin", doc! { "listDatabases": 1, "nameOnly": true }) {
        Err(_) if replica.is_some() => Document::new(),
        listed => listed?,
    };
    let mut rows = Vec::new();
    for database in
        listed.get_array("databases").into_iter().flatten().filter_map(Bson::as_document)
    {
        let name = database.get_str("name").unwrap_or_default();
        let list = doc! { "listCollections": 1, "nameOnly": true, "cursor": {} };
        let listed = asker.ask(name, list)?;
        let batch = listed.get_document("cursor").and_then(|cursor| cursor.get_array("firstBatch"));
        for collection in batch.into_iter().flatten().filter_map(Bson::as_document) {
            let collection = collection.get_str("name").unwrap_or_default().to_owned();
            let stats = asker.ask(name, doc! { "collStats": collection.clone() })?;
            rows.push((
                format!("{name}.{collection}"),
                whole(&stats, &["count"]),
                whole(&stats, &["size"]),
                whole(&stats, &["nindexes"]),
            ));
        }
    }
    let version = state.get_str("version").unwrap_or_default();
    let set = hello.get_str("setName").unwrap_or("none");
    if output.json {
        let collections: Vec<_> = rows
            .iter()
            .map(|(name, documents, bytes, indexes)| json!({ "collection": name, "documents": documents, "bytes": bytes, "indexes": indexes }))
            .collect();
        output.object(&json!({
            "address": door.address.to_string(), "version": version, "replica_set": set,
            "connections": whole(&state, &["connections", "current"]),
            "cursors": whole(&state, &["metrics", "cursor", "open", "total"]), "collections": collections,
            "term": replica.as_ref().map(|(status, _)| whole(status, &["term"])),
            "primary": replica.as_ref().and_then(|(status, _)| status.get_str("primary").ok()),
            "taken_back": replica.as_ref().map(|(status, _)| whole(status, &["counts", "takenBack"])),
            "copies": replica.as_ref().map(|(status, _)| whole(status, &["counts", "copies"])),
            "voters": replica.as_ref().map(|(status, _)| voters_of(status)),
            "reason": replica.as_ref().and_then(|(status, _)| status.get_str("reason").ok()),
            "sync_carrier": replica.as_ref().and_then(|(status, _)| status.get_str("syncCarrier").ok()),
            "members": replica.as_ref().map(|(_, members)| members),
        }))?;
        return Ok(Exit::Done);
    }
    output.line(format_args!("{}  as MongoDB {version}, replica set {set}", door.address))?;
    output.line(format_args!(
        "{} connections, {} cursors open",
        whole(&state, &["connections", "current"]),
        whole(&state, &["metrics", "cursor", "open", "total"])
    ))?;
    if let Some((status, members)) = &replica {
        output.line(format_args!(
            "term {}, primary {}, voters {}, {} changes taken back here{}",
            whole(status, &["term"]),
            primary_of(status),
            voters_of(status).iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
            whole(status, &["counts", "takenBack"]),
            if status.get_bool("paused").unwrap_or(false) { ", paused" } else { "" }
        ))?;
        match (status.get_str("broken"), status.get_str("reason")) {
            (Ok(why), _) => output.line(format_args!("STOPPED: {why}"))?,
            (_, Ok(why)) => output.line(format_args!("reason: {why}"))?,
            _ => {}
        }
        let cells: Vec<Vec<String>> = members
            .iter()
            .map(|one| {
                vec![
                    one.id.to_string(),
                    one.address.clone(),
                    one.state.clone(),
                    one.applied.clone(),
                    one.durable.clone(),
                    one.lag_seconds.map_or_else(|| "-".to_owned(), |lag| format!("{lag} s")),
                ]
            })
            .collect();
        let heads = ["MEMBER", "ADDRESS", "STATE", "APPLIED", "DURABLE", "LAG"];
        output.line(table(&heads, &cells).trim_end())?;
    }
    let lines: Vec<Vec<String>> = rows
        .into_iter()
        .map(|(name, documents, bytes, indexes)| {
            vec![name, documents.to_string(), human_bytes(bytes.max(0) as u64), indexes.to_string()]
        })
        .collect();
    output.line(table(&["COLLECTION", "DOCUMENTS", "SIZE", "INDEXES"], &lines).trim_end())?;
    Ok(Exit::Done)
}

/// Figures of one look.
const WATCHED: &[(&str, &[&str])] = &[
    ("commands", &["opcounters", "command"]),
    ("inserted", &["opcounters", "insert"]),
    ("updated", &["opcounters", "update"]),
    ("deleted", &["opcounters", "delete"]),
    ("returned", &["metrics", "document", "returned"]),
    ("bytes_in", &["network", "bytesIn"]),
    ("bytes_out", &["network", "bytesOut"]),
];

fn top(arguments: &TopArguments, output: Output) -> Result<Exit, Failure> {
    let mut asker = Asker::open(arguments.door.address, &arguments.door)?;
    let mut shown = 0;
    let look = || asker.ask("admin", doc! { "serverStatus": 1 });
    looks::repeat(arguments.interval.0, arguments.count, look, |before, now, _| {
        let seconds = (whole(now, &["uptimeMillis"]) - whole(before, &["uptimeMillis"])).max(1)
            as f64
            / 1000.0;
        let rate = |path: &[&str]| (whole(now, path) - whole(before, path)).max(0) as f64 / seconds;
        let connections = whole(now, &["connections", "current"]);
        if output.json {
            let mut object = serde_json::Map::new();
            object.insert("connections".to_owned(), connections.into());
            object.extend(
                WATCHED
                    .iter()
                    .map(|(name, path)| (format!("{name}_per_second"), rate(path).into())),
            );
            return Ok(output.object(&object)?);
        }
        if shown % 20 == 0 {
            let heads: String =
                WATCHED.iter().map(|(name, _)| format!("{:>12}", format!("{name}/s"))).collect();
            output.line(format_args!("{:>6}{heads}", "conns"))?;
        }
        shown += 1;
        let cells: String =
            WATCHED.iter().map(|(_, path)| format!("{:>12.0}", rate(path))).collect();
        Ok(output.line(format_args!("{connections:>6}{cells}"))?)
    })
}

//! `beeline objects`: the objects of this host's node, one at a time.

mod top;

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use beeline_objects::{Client, Entry, ObjectId, ObjectsError};
use clap::{Args, Subcommand};
use serde::Serialize;

use crate::config::Knob as _;
use crate::config::values::{Span, human_bytes};
use crate::exit::{Exit, Failure};
use crate::output::{Output, count, table};

/// `beeline objects`.
#[derive(Debug, Subcommand)]
pub enum ObjectsCommand {
    /// List the objects of the store.
    #[command(after_help = "Examples:\n  beeline objects list\n  beeline objects list --json")]
    List(StoreArguments),
    /// Say how full the store is, or all about one object; exit code 1 when it is not there.
    #[command(after_help = "Examples:\n  beeline objects stat\n  \
                            beeline objects stat 0123456789abcdef0123456789abcdef01234567")]
    Stat(StatArguments),
    /// Store a file, or standard input, as an object, and print its id.
    #[command(after_help = "Examples:\n  beeline objects put picture.png\n  \
                            date | beeline objects put")]
    Put(PutArguments),
    /// Print the data of an object; exit code 1 when it is not there in time.
    #[command(after_help = "Examples:\n  \
        beeline objects get 0123456789abcdef0123456789abcdef01234567 > picture.png\n  \
        beeline objects get 0123456789abcdef0123456789abcdef01234567 --timeout 10s")]
    Get(GetArguments),
    /// Bring objects into this node's store from a node that has them.
    #[command(after_help = "Examples:\n  \
        beeline objects fetch 0123456789abcdef0123456789abcdef01234567\n  \
        beeline objects fetch 0123456789abcdef0123456789abcdef01234567 --from 10.0.0.2:4790")]
    Fetch(FetchArguments),
    /// Remove objects; exit code 1 when one was not there.
    #[command(after_help = "Example:\n  \
        beeline objects delete 0123456789abcdef0123456789abcdef01234567")]
    Delete(DeleteArguments),
    /// Watch the store.
    #[command(after_help = "Examples:\n  beeline objects top\n  \
                            beeline objects top --interval 5s --count 12 --json")]
    Top(top::TopArguments),
}

/// Which store.
#[derive(Clone, Debug, Args)]
pub struct StoreArguments {
    /// The store's socket, as `serve` prints it.
    #[arg(
        long,
        value_name = "PATH",
        default_value = "./beeline-data/objects.sock",
        env = "BEELINE_OBJECTS_SOCKET"
    )]
    pub socket: PathBuf,
}

/// `beeline objects stat`.
#[derive(Clone, Debug, Args)]
pub struct StatArguments {
    /// The object; without it, the store.
    pub id: Option<ObjectId>,
    #[command(flatten)]
    pub store: StoreArguments,
}

/// `beeline objects put`.
#[derive(Clone, Debug, Args)]
pub struct PutArguments {
    /// The file; without it, standard input.
    pub file: Option<PathBuf>,
    /// Its id: 40 hexadecimal digits; a random one by default.
    #[arg(long)]
    pub id: Option<ObjectId>,
    /// Text that readers find beside the data.
    #[arg(long, default_value = "")]
    pub metadata: String,
    /// How long to wait for memory.
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = span)]
    pub timeout: Duration,
    #[command(flatten)]
    pub store: StoreArguments,
}

/// `beeline objects get`.
#[derive(Clone, Debug, Args)]
pub struct GetArguments {
    /// The object.
    pub id: ObjectId,
    /// How long to wait until it is there; other nodes are asked meanwhile, and once with 0.
    #[arg(long, value_name = "TIME", default_value = "0", value_parser = span)]
    pub timeout: Duration,
    #[command(flatten)]
    pub store: StoreArguments,
}

/// `beeline objects fetch`.
#[derive(Clone, Debug, Args)]
pub struct FetchArguments {
    /// The objects.
    #[arg(required = true)]
    pub ids: Vec<ObjectId>,
    /// From the node with this fabric address, and no other; this node need not know it.
    #[arg(long, value_name = "HOST:PORT")]
    pub from: Option<String>,
    /// Patience with the other nodes.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = span)]
    pub timeout: Duration,
    #[command(flatten)]
    pub store: StoreArguments,
}

/// `beeline objects delete`.
#[derive(Clone, Debug, Args)]
pub struct DeleteArguments {
    /// The objects.
    #[arg(required = true)]
    pub ids: Vec<ObjectId>,
    #[command(flatten)]
    pub store: StoreArguments,
}

fn span(text: &str) -> Result<Duration, String> {
    Span::parse(text).map(|Span(span)| span)
}

/// The command.
pub fn run(command: &ObjectsCommand, output: Output) -> Result<Exit, Failure> {
    match command {
        ObjectsCommand::List(arguments) => list(arguments, output),
        ObjectsCommand::Stat(arguments) => stat(arguments, output),
        ObjectsCommand::Put(arguments) => put(arguments, output),
        ObjectsCommand::Get(arguments) => get(arguments, output),
        ObjectsCommand::Fetch(arguments) => fetch(arguments, output),
        ObjectsCommand::Delete(arguments) => delete(arguments, output),
        ObjectsCommand::Top(arguments) => top::run(arguments, output),
    }
}

fn connect(store: &StoreArguments) -> Result<Client, Failure> {
    Client::connect(&store.socket).map_err(failure)
}

/// Gives a client's error its exit code.
fn failure(error: ObjectsError) -> Failure {
    let exit = match &error {
        ObjectsError::Connect { .. }
        | ObjectsError::StoreGone
        | ObjectsError::TimedOut { .. }
        | ObjectsError::Unreachable { .. } => Exit::Unreachable,
        ObjectsError::Damaged { .. } => Exit::Corruption,
        _ => Exit::Failed,
    };
    Failure::new(exit, error)
}

/// An object as JSON.
#[derive(Debug, Serialize)]
struct Line {
    id: String,
    state: &'static str,
    data_bytes: u64,
    metadata_bytes: u64,
    references: u32,
    pinned: bool,
    age_ms: u64,
}

impl From<&Entry> for Line {
    fn from(entry: &Entry) -> Self {
        Self {
            id: entry.id.to_string(),
            state: state(entry),
            data_bytes: entry.size,
            metadata_bytes: entry.metadata_size,
            references: entry.references,
            pinned: entry.pinned,
            age_ms: entry.age_ms,
        }
    }
}

fn state(entry: &Entry) -> &'static str {
    match (entry.sealed, entry.spilled) {
        (false, _) => "unsealed",
        (true, true) => "on disk",
        (true, false) => "sealed",
    }
}

fn list(arguments: &StoreArguments, output: Output) -> Result<Exit, Failure> {
    let mut entries = connect(arguments)?.list().map_err(failure)?;
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.age_ms));
    if output.json {
        entries.iter().try_for_each(|entry| output.object(&Line::from(entry)))?;
        return Ok(Exit::Done);
    }
    output.bytes(screen(&entries).as_bytes())?;
    Ok(Exit::Done)
}

/// Objects for people.
fn screen(entries: &[Entry]) -> String {
    let row = |entry: &Entry| {
        vec![
            entry.id.to_string(),
            human_bytes(entry.size),
            state(entry).to_owned(),
            entry.references.to_string(),
            if entry.pinned { "yes" } else { "" }.to_owned(),
            format!("{:.1} s", Duration::from_millis(entry.age_ms).as_secs_f64()),
        ]
    };
    let rows: Vec<Vec<String>> = entries.iter().map(row).collect();
    table(&["id", "data", "state", "references", "pinned", "age"], &rows)
}

/// How full a store is.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Summary {
    objects: u64,
    data_bytes: u64,
    unsealed: u64,
    on_disk: u64,
    on_disk_bytes: u64,
    referenced: u64,
    pinned: u64,
}

impl Summary {
    fn of(entries: &[Entry]) -> Self {
        let mut summary = Self::default();
        for entry in entries {
            summary.objects += 1;
            summary.data_bytes += entry.size;
            summary.unsealed += u64::from(!entry.sealed);
            summary.on_disk += u64::from(entry.spilled);
            summary.on_disk_bytes += if entry.spilled { entry.size } else { 0 };
            summary.referenced += u64::from(entry.references > 0);
            summary.pinned += u64::from(entry.pinned);
        }
        summary
    }

    fn text(&self) -> String {
        format!(
            "{}, {} of data; {} referenced, {} pinned, {} unsealed, {} on disk ({})",
            count(self.objects, "object", "objects"),
            human_bytes(self.data_bytes),
            self.referenced,
            self.pinned,
            self.unsealed,
            self.on_disk,
            human_bytes(self.on_disk_bytes)
        )
    }
}

fn stat(arguments: &StatArguments, output: Output) -> Result<Exit, Failure> {
    let entries = connect(&arguments.store)?.list().map_err(failure)?;
    let Some(id) = arguments.id else {
        let summary = Summary::of(&entries);
        if output.json {
            output.object(&summary)?;
        } else {
            output.line(summary.text())?;
        }
        return Ok(Exit::Done);
    };
    let Some(entry) = entries.iter().find(|entry| entry.id == id) else {
        output.note(format_args!("beeline: there is no object {id}"));
        return Ok(Exit::Failed);
    };
    if output.json {
        output.object(&Line::from(entry))?;
    } else {
        output.bytes(screen(std::slice::from_ref(entry)).as_bytes())?;
    }
    Ok(Exit::Done)
}

fn put(arguments: &PutArguments, output: Output) -> Result<Exit, Failure> {
    let client = connect(&arguments.store)?;
    let id = match arguments.id {
        Some(id) => id,
        None => ObjectId::random().context("choosing an id")?,
    };
    let metadata = arguments.metadata.as_bytes();
    match &arguments.file {
        Some(path) => {
            let reading = || format!("reading {}", path.display());
            let mut file = std::fs::File::open(path).with_context(reading)?;
            let about = file.metadata().with_context(reading)?;
            // Files of `/proc` and the like say that they are empty.
            if about.is_file() && about.len() > 0 {
                // Straight into the store's memory.
                let created = client.create(id, about.len(), metadata, arguments.timeout);
                let mut buffer = created.map_err(failure)?;
                file.read_exact(buffer.bytes_mut()).with_context(reading)?;
                client.seal(buffer).map_err(failure)?;
            } else {
                let mut data = Vec::new();
                file.read_to_end(&mut data).with_context(reading)?;
                client.put(id, &data, metadata, arguments.timeout).map_err(failure)?;
            }
        }
        None => {
            let mut data = Vec::new();
            std::io::stdin().lock().read_to_end(&mut data).context("reading standard input")?;
            client.put(id, &data, metadata, arguments.timeout).map_err(failure)?;
        }
    }
    if output.json {
        output.object(&serde_json::json!({ "id": id.to_string() }))?;
    } else {
        output.line(id)?;
    }
    Ok(Exit::Done)
}

fn get(arguments: &GetArguments, output: Output) -> Result<Exit, Failure> {
    let client = connect(&arguments.store)?;
    let object = match client.get_anywhere(arguments.id, arguments.timeout) {
        Ok(object) => object,
        Err(ObjectsError::NotFound { id } | ObjectsError::TimedOut { id }) => {
            output.note(format_args!("beeline: there is no object {id}"));
            return Ok(Exit::Failed);
        }
        Err(error) => return Err(failure(error)),
    };
    let mut out = std::io::stdout().lock();
    let mut piece = vec![0; object.len().clamp(1, 1 << 20)];
    let mut at = 0;
    while at < object.len() {
        let length = piece.len().min(object.len() - at);
        object.read_at(at as u64, &mut piece[..length]).map_err(failure)?;
        out.write_all(&piece[..length]).context("writing")?;
        at += length;
    }
    if std::io::stdout().is_terminal() {
        out.write_all(b"\n").context("writing")?;
    }
    out.flush().context("writing")?;
    Ok(Exit::Done)
}

/// The fabric address of a node.
fn address(node: &str) -> Result<SocketAddr, Failure> {
    let found = node.to_socket_addrs().map(|mut found| found.next());
    let reason = match found {
        Ok(Some(address)) if address.port() > 0 => return Ok(address),
        Ok(_) => "it has no address".to_owned(),
        Err(error) => error.to_string(),
    };
    let what =
        anyhow::anyhow!("--from {node}: {reason}; write HOST:PORT, the node's fabric-address");
    Err(Failure::new(Exit::Usage, what))
}

fn fetch(arguments: &FetchArguments, output: Output) -> Result<Exit, Failure> {
    let client = connect(&arguments.store)?;
    let outcomes = match &arguments.from {
        Some(node) => client.fetch_from(&arguments.ids, address(node)?, arguments.timeout),
        None => client.fetch(&arguments.ids, arguments.timeout),
    };
    let outcomes = outcomes.map_err(failure)?;
    let mut exit = Exit::Done;
    for (id, outcome) in arguments.ids.iter().zip(outcomes) {
        let text = match &outcome {
            Ok(()) => "here".to_owned(),
            Err(error) => error.to_string(),
        };
        if outcome.is_err() {
            exit = Exit::Unreachable;
        }
        if output.json {
            output.object(&serde_json::json!({
                "id": id.to_string(), "here": outcome.is_ok(), "outcome": text
            }))?;
        } else {
            output.line(format_args!("{id}  {text}"))?;
        }
    }
    Ok(exit)
}

fn delete(arguments: &DeleteArguments, output: Output) -> Result<Exit, Failure> {
    let client = connect(&arguments.store)?;
    let mut exit = Exit::Done;
    for id in &arguments.ids {
        match client.delete(*id) {
            Ok(()) => {}
            Err(ObjectsError::NotFound { .. }) => {
                output.note(format_args!("beeline: there is no object {id}"));
                exit = Exit::Failed;
            }
            Err(error) => return Err(failure(error)),
        }
    }
    Ok(exit)
}

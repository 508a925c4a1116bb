//! The commands that talk to a running node.

use std::io::{IsTerminal as _, Read as _};
use std::time::Duration;

use anyhow::Context as _;
use beeline_kv_client::{Client, ClientError, ClientOptions, PutOptions};
use beeline_resp::glob::Glob;
use serde::Serialize;

use super::{Connection, DeleteArguments, GetArguments, PutArguments, ScanArguments};
use crate::connector;
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::{Output, table};

/// Keys of one page of a scan.
const PAGE: u32 = 512;

fn connect(connection: &Connection) -> Result<Client, Failure> {
    let options = ClientOptions {
        timeout: connection.timeout,
        // One request at a time; a person waits, not a program that polls.
        window: 2,
        longest_key_bytes: u32::from(u16::MAX),
        spin: Duration::ZERO,
        mixed_update: false,
        tracked_keys: 0,
        ..ClientOptions::default()
    };
    connector::connect(&connection.connect, &options, connection.verbose)
        .map_err(|error| failure(error, connection))
}

/// Gives a client's error its exit code, and the advice to start a node where none answered.
fn failure(error: ClientError, connection: &Connection) -> Failure {
    let exit = match &error {
        ClientError::Connect(_)
        | ClientError::Refused { .. }
        | ClientError::ConnectionLost { .. }
        | ClientError::TimedOut { .. }
        | ClientError::NotConnected { .. } => Exit::Unreachable,
        ClientError::Damaged => Exit::Corruption,
        ClientError::KeyTooLong { .. } | ClientError::TooLarge { .. } => Exit::Usage,
        _ => Exit::Failed,
    };
    let error = match exit {
        Exit::Unreachable => {
            // Told in full here, so that the advice comes last.
            let said = Failure::new(exit, error);
            let url = &connection.connect;
            anyhow::anyhow!("{said}; is a node running with its fabric address at {url}?")
        }
        _ => anyhow::Error::new(error),
    };
    Failure::new(exit, error)
}

/// Bytes as text where they are text, else in hexadecimal: JSON has no bytes.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Bytes {
    Text(String),
    Hex(String),
}

impl Bytes {
    fn of(bytes: &[u8]) -> Self {
        match std::str::from_utf8(bytes) {
            Ok(text) => Self::Text(text.to_owned()),
            Err(_) => Self::Hex(bytes.iter().map(|byte| format!("{byte:02x}")).collect()),
        }
    }
}

/// `beeline kv get`.
pub fn get(arguments: &GetArguments, output: Output) -> Result<Exit, Failure> {
    #[derive(Serialize)]
    struct Found<'a> {
        key: &'a str,
        value: Bytes,
        version: u64,
        kind: u8,
        expires_at_ms: Option<u64>,
    }
    let connection = &arguments.connection;
    let mut client = connect(connection)?;
    let mut value = Vec::new();
    let key = &arguments.key;
    let found = client
        .get_into(arguments.database.database, key.as_bytes(), &mut value)
        .map_err(|error| failure(error, connection))?;
    let Some(info) = found else {
        output.note(format_args!("beeline: there is no key {key:?}"));
        return Ok(Exit::Failed);
    };
    if output.json {
        let expires_at_ms = Some(info.expires_at_ms).filter(|at| *at != 0);
        output.object(&Found {
            key,
            value: Bytes::of(&value),
            version: info.version,
            kind: info.kind,
            expires_at_ms,
        })?;
    } else {
        output.bytes(&value)?;
        // For a person; a program gets the value as it is.
        if std::io::stdout().is_terminal() {
            output.bytes(b"\n")?;
        }
    }
    Ok(Exit::Done)
}

/// `beeline kv put`.
pub fn put(arguments: &PutArguments, output: Output) -> Result<Exit, Failure> {
    let value = match (&arguments.value, &arguments.file) {
        (Some(value), _) => value.clone().into_bytes(),
        (None, Some(file)) => std::fs::read(file)
            .with_context(|| format!("reading {}", file.display()))
            .or_exit(Exit::Usage)?,
        (None, None) => {
            let mut value = Vec::new();
            std::io::stdin().lock().read_to_end(&mut value).context("reading standard input")?;
            value
        }
    };
    let connection = &arguments.connection;
    let mut client = connect(connection)?;
    let expires_at_ms = match arguments.ttl {
        None => 0,
        Some(ttl) => {
            let now = client.options().clock.unix_ms();
            now.saturating_add(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX)).max(1)
        }
    };
    let options = PutOptions { expires_at_ms, ..PutOptions::default() };
    let key = &arguments.key;
    let version = client
        .put(arguments.database.database, key.as_bytes(), &value, options)
        .map_err(|error| failure(error, connection))?;
    if output.json {
        output.object(&serde_json::json!({ "key": key, "version": version }))?;
    }
    Ok(Exit::Done)
}

/// `beeline kv delete`.
pub fn delete(arguments: &DeleteArguments, output: Output) -> Result<Exit, Failure> {
    let connection = &arguments.connection;
    let mut client = connect(connection)?;
    let mut deleted = 0_u64;
    for key in &arguments.keys {
        let was_there = client
            .delete(arguments.database.database, key.as_bytes())
            .map_err(|error| failure(error, connection))?;
        deleted += u64::from(was_there);
    }
    if output.json {
        output.object(&serde_json::json!({ "deleted": deleted }))?;
    } else {
        output.note(format_args!("{deleted} deleted"));
    }
    Ok(if deleted > 0 { Exit::Done } else { Exit::Failed })
}

/// `beeline kv scan`.
pub fn scan(arguments: &ScanArguments, output: Output) -> Result<Exit, Failure> {
    let connection = &arguments.connection;
    let mut client = connect(connection)?;
    let pattern = Glob::new(arguments.pattern.as_bytes());
    let mut listed = 0_u64;
    let mut cursor = Some((0, 0));
    let mut text = Vec::new();
    while let Some(from) = cursor {
        let page = client
            .scan(arguments.database.database, from, PAGE)
            .map_err(|error| failure(error, connection))?;
        text.clear();
        for (key, kind) in page.keys.iter().filter(|(key, _)| pattern.matches(key)) {
            if output.json {
                let line = serde_json::json!({ "key": Bytes::of(key), "kind": kind });
                text.extend_from_slice(line.to_string().as_bytes());
            } else {
                text.extend_from_slice(key);
            }
            text.push(b'\n');
            listed += 1;
            if listed == arguments.limit {
                output.bytes(&text)?;
                return Ok(Exit::Done);
            }
        }
        output.bytes(&text)?;
        cursor = page.next;
    }
    Ok(Exit::Done)
}

/// `beeline kv stats`.
pub fn stats(connection: &Connection, output: Output) -> Result<Exit, Failure> {
    let mut client = connect(connection)?;
    for shard in 0..client.shards() {
        let text = client.statistics(shard).map_err(|error| failure(error, connection))?;
        let figures = text.lines().filter_map(|line| line.split_once(' '));
        if output.json {
            let mut object = serde_json::Map::new();
            object.insert("shard".to_owned(), shard.into());
            for (name, value) in figures {
                let number = value.trim().parse::<u64>();
                let value = number.map_or_else(|_| value.trim().into(), Into::into);
                object.insert(name.to_owned(), value);
            }
            output.object(&object)?;
        } else {
            // The header says which shard.
            let rows: Vec<Vec<String>> = figures
                .filter(|(name, _)| *name != "shard")
                .map(|(name, value)| vec![name.to_owned(), value.trim().to_owned()])
                .collect();
            let header = format!("SHARD {shard}");
            output.bytes(table(&[&header, ""], &rows).as_bytes())?;
        }
    }
    Ok(Exit::Done)
}

//! `beeline kv`: keys of a running node, one at a time, through fabric; and the offline work on a
//! node's data.
//!
//! What a program reads goes to standard output as it is: `beeline kv get` adds no newline.

mod asker;
mod offline;
mod remote;
mod watch;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use crate::config::Knob as _;
use crate::config::values::{Size, Span};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// `beeline kv`.
#[derive(Debug, Subcommand)]
pub enum KvCommand {
    /// Print the value of a key; exit code 1 when there is none.
    #[command(after_help = "Examples:\n  beeline kv get greeting\n  \
                            beeline kv get picture --connect tcp://10.0.0.2 > picture.png")]
    Get(GetArguments),
    /// Store a value; it is durable when the command ends.
    #[command(after_help = "Examples:\n  beeline kv put greeting hello\n  \
                            beeline kv put picture --file picture.png --ttl 1h\n  \
                            date | beeline kv put now")]
    Put(PutArguments),
    /// Remove keys; exit code 1 when none of them was there.
    #[command(after_help = "Example:\n  beeline kv delete greeting picture")]
    Delete(DeleteArguments),
    /// List keys, one a line.
    #[command(
        after_help = "Examples:\n  beeline kv scan\n  beeline kv scan --match 'user:*' --json"
    )]
    Scan(ScanArguments),
    /// Statistics of the node's shards.
    #[command(after_help = "Example:\n  beeline kv stats --json")]
    Stats(Connection),
    /// Check the data of a node that is not running, or a snapshot file: every byte that means
    /// something. Exit code 4 when something is damaged.
    #[command(after_help = "Examples:\n  beeline kv check ./beeline-data\n  \
                            beeline kv check backup.bee --json\n  \
                            beeline kv check ./beeline-data --repair")]
    Check(CheckArguments),
    /// Take a snapshot of a running node on this host, without stopping it.
    #[command(after_help = "Examples:\n  beeline kv backup backup.bee\n  \
                            beeline kv backup /mnt/backup/monday.bee --resp-address 127.0.0.1:6380")]
    Backup(BackupArguments),
    /// Follow the changes of keys of a running node, which has to keep some (serve --change-feed).
    #[command(after_help = "Examples:\n  beeline kv watch\n  \
                            beeline kv watch --from 1042 --count 10 --json")]
    Watch(WatchArguments),
    /// Make a data directory from a snapshot; `serve --data` then runs on it. It is there whole or
    /// not at all: after an interruption, run it again.
    #[command(after_help = "Example:\n  beeline kv restore backup.bee ./restored")]
    Restore(RestoreArguments),
}

/// `beeline kv check`.
#[derive(Clone, Debug, Args)]
pub struct CheckArguments {
    /// A data directory, or a snapshot file.
    pub path: PathBuf,
    /// Accept the loss of what is damaged in a data directory: the node starts again, with what is
    /// left. Older values, and keys that were deleted, may be among it.
    #[arg(long)]
    pub repair: bool,
}

/// `beeline kv backup`.
#[derive(Clone, Debug, Args)]
pub struct BackupArguments {
    /// File to write; replaced once the snapshot is complete and checked.
    pub file: PathBuf,
    /// The node's Redis door.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:6379")]
    pub resp_address: std::net::SocketAddr,
    /// Its password.
    #[arg(long, env = "BEELINE_REQUIRE_PASSWORD", default_value = "", hide_env_values = true)]
    pub password: String,
    /// Patience with the node while it writes.
    #[arg(long, value_name = "SPAN", default_value = "10m", value_parser = Span::parse)]
    pub timeout: Span,
}

/// `beeline kv watch`.
#[derive(Clone, Debug, Args)]
pub struct WatchArguments {
    /// Position to go on from: changes behind it are shown. Without it, changes from now on.
    #[arg(long, value_name = "POSITION")]
    pub from: Option<u64>,
    /// End after so many changes; 0 goes on.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub count: u64,
    /// The node's Redis door.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:6379")]
    pub resp_address: std::net::SocketAddr,
    /// Its password.
    #[arg(long, env = "BEELINE_REQUIRE_PASSWORD", default_value = "", hide_env_values = true)]
    pub password: String,
}

/// `beeline kv restore`.
#[derive(Clone, Debug, Args)]
pub struct RestoreArguments {
    /// The snapshot.
    pub file: PathBuf,
    /// Directory to make, or one without a pool.
    pub data: PathBuf,
    /// Bytes of one log segment of the new pool.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = Size::parse)]
    pub segment_size: Size,
}

/// How to reach the node.
#[derive(Clone, Debug, Args)]
pub struct Connection {
    /// The node's fabric address: auto://HOST:PORT takes the best provider; shm://, ntb://, verbs://
    /// and tcp:// insist on one. The port is 4790 unless given; ?window=/FILE names the memory
    /// window towards the node.
    #[arg(
        long,
        value_name = "URL",
        default_value = "auto://127.0.0.1:4790",
        env = "BEELINE_CONNECT",
        value_parser = url
    )]
    pub connect: String,
    /// Bound of each exchange with the node, as in 500ms or 5s.
    #[arg(long, value_name = "SPAN", default_value = "5s", value_parser = span)]
    pub timeout: Duration,
    /// Say on standard error which provider was chosen, and why.
    #[arg(long)]
    pub verbose: bool,
}

/// Which database.
#[derive(Clone, Copy, Debug, Args)]
pub struct Database {
    /// Database, 0 to 15, as in Redis' SELECT.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..16))]
    pub database: u8,
}

/// `beeline kv get`.
#[derive(Clone, Debug, Args)]
pub struct GetArguments {
    /// The key.
    pub key: String,
    #[command(flatten)]
    pub database: Database,
    #[command(flatten)]
    pub connection: Connection,
}

/// `beeline kv put`.
#[derive(Clone, Debug, Args)]
pub struct PutArguments {
    /// The key.
    pub key: String,
    /// The value; without it, what --file names, or standard input.
    #[arg(conflicts_with = "file")]
    pub value: Option<String>,
    /// File with the value.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Time to live, as in 500ms, 90s or 1h.
    #[arg(long, value_name = "SPAN", value_parser = span)]
    pub ttl: Option<Duration>,
    #[command(flatten)]
    pub database: Database,
    #[command(flatten)]
    pub connection: Connection,
}

/// `beeline kv delete`.
#[derive(Clone, Debug, Args)]
pub struct DeleteArguments {
    /// The keys.
    #[arg(required = true)]
    pub keys: Vec<String>,
    #[command(flatten)]
    pub database: Database,
    #[command(flatten)]
    pub connection: Connection,
}

/// `beeline kv scan`.
#[derive(Clone, Debug, Args)]
pub struct ScanArguments {
    /// Only keys like this pattern (*, ?, [a-z], \ as in Redis).
    #[arg(long = "match", value_name = "PATTERN", default_value = "*")]
    pub pattern: String,
    /// End after so many keys; 0 lists all.
    #[arg(long, default_value_t = 0)]
    pub limit: u64,
    #[command(flatten)]
    pub database: Database,
    #[command(flatten)]
    pub connection: Connection,
}

fn url(text: &str) -> Result<String, String> {
    match beeline_fabric_open::ServiceUrl::parse(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(error) => Err(error.to_string()),
    }
}

fn span(text: &str) -> Result<Duration, String> {
    let Span(span) = Span::parse(text)?;
    if span.is_zero() { Err("longer than nothing".to_owned()) } else { Ok(span) }
}

/// The command.
pub fn run(command: &KvCommand, output: Output) -> Result<Exit, Failure> {
    match command {
        KvCommand::Get(arguments) => remote::get(arguments, output),
        KvCommand::Put(arguments) => remote::put(arguments, output),
        KvCommand::Delete(arguments) => remote::delete(arguments, output),
        KvCommand::Scan(arguments) => remote::scan(arguments, output),
        KvCommand::Stats(connection) => remote::stats(connection, output),
        KvCommand::Check(arguments) => offline::check(arguments, output),
        KvCommand::Backup(arguments) => offline::backup(arguments, output),
        KvCommand::Watch(arguments) => watch::watch(arguments, output),
        KvCommand::Restore(arguments) => offline::restore(arguments, output),
    }
}

//! `beeline documents route`: the router of sharded document stores.

use std::net::SocketAddr;

use anyhow::Context as _;
use beeline_documents_router::{Door, Router, RouterOptions, ShardOptions};
use clap::Args;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::cli::span;
use crate::config::values::Span;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// `beeline documents route`.
#[derive(Clone, Debug, Args)]
pub struct RouteArguments {
    /// Where MongoDB clients connect to the router; port 0 picks a free one.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:27016")]
    pub address: SocketAddr,
    /// The store that keeps the routing table, in its database config: one node, or members of a replica set
    /// apart by commas. It may be a shard too. mongodb:// for the MongoDB wire, auto:// and a node's fabric
    /// address for fabric.
    #[arg(long, value_name = "ADDRESSES")]
    pub config: String,
    /// A shard, added where it is not one yet: NAME=ADDRESS, of a node or of members apart by commas. Once for
    /// each; the admin command addShard does the same.
    #[arg(long = "shard", value_name = "NAME=ADDRESSES", value_parser = named)]
    pub shards: Vec<(String, String)>,
    /// How old a routing table may be that is used. A change of where documents belong takes three times as long.
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = span)]
    pub lease: Span,
    /// Connections served at once.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000)]
    pub max_connections: u32,
    /// Cursors open at once.
    #[arg(long, value_name = "COUNT", default_value_t = 10_000)]
    pub max_cursors: u32,
    /// A cursor unused for this long is closed.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = span)]
    pub cursor_timeout: Span,
    /// Commands under way in one shard at once; further ones wait.
    #[arg(long, value_name = "COUNT", default_value_t = 64)]
    pub shard_commands: u32,
    /// How long a command may take in a shard.
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = span)]
    pub shard_timeout: Span,
    /// How long to look for the member of a shard that leads.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = span)]
    pub shard_selection: Span,
}

fn named(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, address)) if !name.is_empty() && address.contains("://") => {
            Ok((name.to_owned(), address.to_owned()))
        }
        _ => Err("write NAME=ADDRESS, as in s0=mongodb://127.0.0.1:27017".to_owned()),
    }
}

fn check(arguments: &RouteArguments) -> Result<(), Failure> {
    let rules = [
        (
            "--config",
            arguments.config.contains("://"),
            "write mongodb://HOST:PORT or auto://HOST:PORT",
        ),
        ("--lease", arguments.lease.0.as_millis() >= 100, "choose 100ms or more"),
        ("--max-connections", arguments.max_connections > 0, "0 would serve no client"),
        ("--max-cursors", arguments.max_cursors > 0, "0 would answer no long query"),
        (
            "--cursor-timeout",
            !arguments.cursor_timeout.0.is_zero(),
            "0 would close cursors at once",
        ),
        ("--shard-commands", (1..=1024).contains(&arguments.shard_commands), "choose 1 to 1024"),
        ("--shard-timeout", !arguments.shard_timeout.0.is_zero(), "choose a second or more"),
    ];
    match rules.iter().find(|(_, holds, _)| !holds) {
        None => Ok(()),
        Some((flag, _, remedy)) => {
            Err(Failure::new(Exit::Usage, anyhow::anyhow!("{flag}: {remedy}")))
        }
    }
}

/// The command.
pub fn run(arguments: &RouteArguments, output: Output) -> Result<Exit, Failure> {
    check(arguments)?;
    // Caught from here on: a stop while shards are added ends in order.
    let signals = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the signal watcher")?;
    let (mut interrupt, mut terminate) = {
        let _inside = signals.enter();
        let caught = |kind| signal(kind).context("catching signals");
        (caught(SignalKind::interrupt())?, caught(SignalKind::terminate())?)
    };
    let router = Router::new(RouterOptions {
        config: arguments.config.clone(),
        lease: arguments.lease.0,
        most_cursors: arguments.max_cursors as usize,
        cursor_timeout: arguments.cursor_timeout.0,
        shard: ShardOptions {
            timeout: arguments.shard_timeout.0,
            selection: arguments.shard_selection.0,
            most: arguments.shard_commands as usize,
            ..ShardOptions::default()
        },
    });
    let threads = std::thread::available_parallelism().map_or(2, usize::from);
    let most = arguments.max_connections as usize;
    let mut door = Door::open(arguments.address, router, threads, most).with_context(|| {
        format!("listening at {}; choose another with --address", arguments.address)
    })?;
    let router = std::sync::Arc::clone(door.router());
    for (name, address) in &arguments.shards {
        let added = door.wait(router.add(name, address));
        if let Some(Err(error)) = added {
            return Err(Failure::new(
                Exit::Unreachable,
                anyhow::anyhow!("shard {name} at {address} cannot be added: {error}"),
            ));
        }
    }
    let address = door.address();
    if output.json {
        output.object(&json!({ "router": address.to_string(), "config": arguments.config }))?;
    } else {
        output.line(format!("router     {address}  for MongoDB clients; keep it among friends"))?;
        output.line(format!("config     {}", arguments.config))?;
    }
    signals.block_on(async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    });
    output.note("stopping");
    door.close();
    Ok(Exit::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shard_has_a_name_and_an_address() {
        let shard = named("s0=mongodb://127.0.0.1:1,mongodb://127.0.0.1:2").unwrap();
        assert_eq!(shard.0, "s0");
        assert!(shard.1.ends_with(":2"));
        assert!(named("mongodb://127.0.0.1:1").is_err() && named("s0=127.0.0.1:1").is_err());
    }
}

//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::bench::BenchCommand;
use crate::cluster::ClusterCommand;
use crate::config::values::Span;
use crate::config::{Knob as _, ServeFlags};
use crate::direct::DirectCommand;
use crate::documents::DocumentsCommand;
use crate::exit::Exit;
use crate::kv::KvCommand;
use crate::nf::NfCommand;
use crate::objects::ObjectsCommand;
use crate::output::Output;
use crate::sockets::{RunArguments, SocketsCommand};

/// One command for everything Beeline does.
#[derive(Debug, Parser)]
#[command(
    name = "beeline",
    version,
    about = "A kernel-bypass data node: Redis protocol, one-sided key-value access, durable memory",
    after_help = exit_codes()
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

fn exit_codes() -> String {
    let codes: Vec<String> = Exit::TABLE
        .iter()
        .map(|(exit, meaning)| format!("  {:<4} {meaning}", exit.code()))
        .collect();
    format!("Exit codes:\n{}", codes.join("\n"))
}

/// Heading of the flags every subcommand takes.
const EVERYWHERE: &str = "Every command";

/// Flags every subcommand takes.
#[derive(Debug, Args)]
pub struct Global {
    /// Results as JSON, one object per line.
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub json: bool,
    /// Results only: no progress, no notes.
    #[arg(long, global = true, help_heading = EVERYWHERE)]
    pub quiet: bool,
    /// Log filter, as in info or warn,beeline_kv=debug; BEELINE_LOG wins over it.
    #[arg(long, global = true, help_heading = EVERYWHERE, value_name = "FILTER")]
    pub log: Option<String>,
}

impl Global {
    /// How results are shown.
    pub fn output(&self) -> Output {
        Output { json: self.json, quiet: self.quiet }
    }
}

/// What can be asked for.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a node until it is told to stop (SIGINT, SIGTERM, or SHUTDOWN from a client).
    #[command(after_help = "Examples:\n  beeline serve\n  \
                            beeline serve --data /mnt/pmem0/node --durability power --shards 4\n  \
                            beeline serve --resp-address 127.0.0.1:6380 --http-address off")]
    Serve(NodeArguments),
    /// Watch a running node.
    #[command(
        after_help = "Examples:\n  beeline top\n  beeline top --interval 5s --count 12 --json"
    )]
    Top(TopArguments),
    /// Explain what this host offers and what would make Beeline faster on it.
    #[command(
        after_help = "Examples:\n  beeline doctor\n  beeline doctor --data /mnt/pmem0 --json"
    )]
    Doctor(NodeArguments),
    /// Keys of a running node, through fabric.
    #[command(subcommand)]
    Kv(KvCommand),
    /// Objects in memory that the processes of this host share.
    #[command(subcommand)]
    Objects(ObjectsCommand),
    /// Databases of a node, which MongoDB's drivers use.
    #[command(subcommand)]
    Documents(DocumentsCommand),
    /// Pairs of a node's direct store: in memory, with atomics and vectors.
    #[command(subcommand)]
    Direct(DirectCommand),
    /// Members of a cluster, which keep the same keys by a replicated log.
    #[command(subcommand)]
    Cluster(ClusterCommand),
    /// Run an unmodified program with user-space sockets inside this host.
    #[command(after_help = "Examples:\n  beeline run -- redis-server --port 6390\n  \
                            beeline run --verbose -- redis-cli -p 6390 ping")]
    Run(RunArguments),
    /// User-space sockets: their monitor and what it introduced.
    #[command(subcommand)]
    Sockets(SocketsCommand),
    /// Network functions from elements and channels: check them, run them, see them as hardware.
    #[command(subcommand)]
    Nf(NfCommand),
    /// Measure, each figure beside a named peer in the same run.
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Show configuration.
    #[command(subcommand)]
    Config(ConfigCommand),
}

/// `beeline top`.
#[derive(Debug, Args)]
pub struct TopArguments {
    /// Status address of the node.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:9464")]
    pub address: std::net::SocketAddr,
    /// Time between two looks, as in 500ms or 2s.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = span)]
    pub interval: Span,
    /// Looks before it ends; without it, until interrupted.
    #[arg(long, value_name = "COUNT")]
    pub count: Option<u32>,
}

pub fn span(text: &str) -> Result<Span, String> {
    let span = Span::parse(text)?;
    if span.0.is_zero() { Err("a time above zero, as in 1s".to_owned()) } else { Ok(span) }
}

/// `beeline config`.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Print every setting of a node, its value, and where that came from.
    #[command(after_help = "Examples:\n  beeline config show\n  \
                            BEELINE_SHARDS=2 beeline config show --config node.toml --durability power")]
    Show(NodeArguments),
}

/// The configuration of a node: file, then BEELINE_ variables, then these flags.
#[derive(Debug, Args)]
pub struct NodeArguments {
    /// TOML file with the table `[serve]` for the flags of the node and a table for each service: the
    /// flag --resp-address is the line `address` under `[resp]`. By default ./beeline.toml, if it
    /// exists.
    #[arg(long, value_name = "FILE", env = "BEELINE_CONFIG")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub flags: ServeFlags,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    /// Command lines of `beeline` in the fenced blocks of a page, without a comment behind them. In
    /// a `console` block they follow a prompt, and other lines are output.
    fn commands(page: &str) -> Vec<Vec<String>> {
        let mut found = Vec::new();
        for block in page.split("```").skip(1).step_by(2) {
            let console = block.starts_with("console");
            for line in block.lines() {
                let line = line.trim();
                let Some(line) = line.strip_prefix("$ ").or((!console).then_some(line)) else {
                    continue;
                };
                let rest = line
                    .strip_prefix("beeline ")
                    .or_else(|| line.strip_prefix("cargo run --release -- "));
                if let Some(rest) = rest {
                    let rest = rest.split(" #").next().unwrap_or(rest);
                    let words = std::iter::once("beeline").chain(rest.split_whitespace());
                    found.push(words.map(|word| word.trim_matches('\'').to_owned()).collect());
                }
            }
        }
        found
    }

    #[test]
    fn every_command_in_the_documents_is_understood() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut pages = vec![root.join("README.md"), root.join("ARCHITECTURE.md")];
        for entry in std::fs::read_dir(root.join("docs")).unwrap().flatten() {
            pages.push(entry.path());
        }
        let mut understood = 0;
        for page in pages.iter().filter(|page| page.extension().is_some_and(|e| e == "md")) {
            for words in commands(&std::fs::read_to_string(page).unwrap()) {
                let parsed = Cli::try_parse_from(&words);
                let problem = parsed.err().filter(clap::Error::use_stderr);
                assert!(problem.is_none(), "{}: {words:?}: {problem:?}", page.display());
                understood += 1;
            }
        }
        assert!(understood >= 2, "only {understood} commands were found");
        let planted = commands("```sh\n$ beeline fly --high  # up\n```");
        assert!(Cli::try_parse_from(&planted[0]).is_err());
    }
}

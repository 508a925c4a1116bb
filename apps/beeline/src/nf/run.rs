//! `beeline nf run`.

use std::path::PathBuf;

use beeline_ir::run::Interpreter;
use beeline_native::Program;
use beeline_nf::engine::run_captures;
use serde::Serialize;

use super::check::compiled;
use crate::exit::{Exit, Failure};
use crate::output::{Output, count, table};

/// Arguments of `run`.
#[derive(Debug, clap::Args)]
pub struct RunArguments {
    /// Source file.
    pub file: PathBuf,
    /// What an input or output of the graph is: a capture by its .pcap name.
    #[arg(long = "port", value_name = "NAME=WHAT", value_parser = port)]
    pub ports: Vec<(String, PathBuf)>,
    /// Walk the tree instead of running machine code: slow, and the meaning of the language.
    #[arg(long)]
    pub interpret: bool,
}

fn port(text: &str) -> Result<(String, PathBuf), String> {
    match text.split_once('=') {
        Some((name, what)) if !name.is_empty() && !what.is_empty() => {
            Ok((name.to_owned(), PathBuf::from(what)))
        }
        _ => Err("NAME=WHAT, as in from_tor=in.pcap".to_owned()),
    }
}

#[derive(Serialize)]
struct ChannelCount<'a> {
    channel: &'a str,
    items: u64,
}

/// Runs it.
pub fn run(arguments: &RunArguments, output: Output) -> Result<Exit, Failure> {
    let loaded = compiled(&arguments.file)?;
    let graph = &loaded.compiled.graph;
    let (counts, passed) = if arguments.interpret {
        run_captures(graph, vec![Interpreter; graph.nodes.len()], &arguments.ports)?
    } else {
        let program = Program::compile(graph)?;
        run_captures(graph, program.machines(), &arguments.ports)?
    };
    if output.json {
        for (channel, items) in graph.channels.iter().zip(passed) {
            output.object(&ChannelCount { channel: &channel.name, items })?;
        }
        output.object(&counts)?;
        return Ok(Exit::Done);
    }
    let rows: Vec<Vec<String>> = graph
        .channels
        .iter()
        .zip(passed)
        .map(|(channel, items)| vec![channel.name.clone(), items.to_string()])
        .collect();
    output.bytes(table(&["channel", "flits"], &rows).as_bytes())?;
    output.line(format!(
        "{} in, {} out",
        count(counts.packets_in, "packet", "packets"),
        count(counts.packets_out, "packet", "packets"),
    ))?;
    Ok(Exit::Done)
}

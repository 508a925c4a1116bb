//! `beeline`: the one command. A thin layer: arguments, configuration, exit codes.
//!
//! Place: `apps`, the edge. Here providers are opened, a runtime is chosen for the status page,
//! and errors become messages with a next step. What a node does lives in `systems/node`.

#![forbid(unsafe_code)]

mod bench;
mod cli;
mod cluster;
mod config;
mod connector;
mod direct;
mod doctor;
mod documents;
mod exit;
mod kv;
mod looks;
mod nf;
mod objects;
mod output;
mod serve;
mod sockets;
mod status;
mod top;

use std::process::ExitCode;

use clap::Parser as _;

use cli::{Cli, Command, ConfigCommand, NodeArguments};
use config::{Environment, FileLayer, ServeConfig};
use exit::{Exit, Failure, OrExit as _};
use output::{Output, complain, table};

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are results; everything else is a usage error.
            let exit = if error.use_stderr() { Exit::Usage } else { Exit::Done };
            let _ = error.print();
            return exit.code().into();
        }
    };
    let exit = match run(cli) {
        Ok(exit) => exit,
        Err(failure) if failure.is_broken_pipe() => failure.exit,
        Err(failure) => {
            for line in failure.to_string().lines() {
                complain(format_args!("beeline: {line}"));
            }
            failure.exit
        }
    };
    exit.code().into()
}

fn run(cli: Cli) -> Result<Exit, Failure> {
    let output = cli.global.output();
    let filter =
        cli.global.log.unwrap_or_else(|| if output.quiet { "error" } else { "info" }.to_owned());
    beeline_observe::trace::init(&beeline_observe::TraceOptions { filter }).or_exit(Exit::Usage)?;
    match cli.command {
        Command::Serve(arguments) => serve::run(&resolve(&arguments)?.0, output),
        Command::Top(arguments) => top::run(&arguments, output),
        Command::Doctor(arguments) => doctor::run(&resolve(&arguments)?.0, output),
        Command::Kv(command) => kv::run(&command, output),
        Command::Objects(command) => objects::run(&command, output),
        Command::Documents(command) => documents::run(&command, output),
        Command::Direct(command) => direct::run(&command, output),
        Command::Cluster(command) => cluster::run(&command, output),
        Command::Run(arguments) => sockets::run(&arguments, output),
        Command::Nf(command) => nf::nf(&command, output),
        Command::Sockets(command) => sockets::sockets(&command, output),
        Command::Bench(command) => bench::run(&command, output),
        Command::Config(ConfigCommand::Show(arguments)) => show(&arguments, output),
    }
}

/// File < environment < flags, checked.
fn resolve(arguments: &NodeArguments) -> Result<(ServeConfig, Vec<config::Row>), Failure> {
    let file = FileLayer::read(arguments.config.as_deref()).or_exit(Exit::Usage)?;
    let environment = Environment::of_process();
    ServeConfig::load(&arguments.flags, &file, &environment).or_exit(Exit::Usage)
}

fn show(arguments: &NodeArguments, output: Output) -> Result<Exit, Failure> {
    let (_, rows) = resolve(arguments)?;
    if output.json {
        for row in &rows {
            output.object(row)?;
        }
        return Ok(Exit::Done);
    }
    let mut cells: Vec<Vec<String>> = Vec::new();
    let mut shown = "";
    for row in rows {
        if row.table != shown {
            shown = row.table;
            cells.push(vec![format!("[{shown}]"), String::new(), String::new()]);
        }
        cells.push(vec![row.key, row.value, row.origin.to_string()]);
    }
    output.bytes(table(&["SETTING", "VALUE", "FROM"], &cells).as_bytes())?;
    Ok(Exit::Done)
}

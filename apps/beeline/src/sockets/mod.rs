//! `beeline run` and `beeline sockets`: unmodified programs with user-space sockets.

mod monitor;
mod program;
mod status;

use crate::exit::{Exit, Failure};
use crate::output::Output;

pub use monitor::MonitorArguments;
pub use program::RunArguments;

/// `beeline sockets`.
#[derive(Debug, clap::Subcommand)]
pub enum SocketsCommand {
    /// Counters of this user's monitor.
    Status,
    /// Connections the monitor introduced, the latest hundred or so, newest last.
    Connections,
    /// Run the monitor of this user; `beeline run` starts one by itself.
    #[command(after_help = "Examples:\n  beeline sockets monitor\n  \
                            beeline sockets monitor --background --ring-size 1048576")]
    Monitor(MonitorArguments),
}

/// `beeline run`.
pub fn run(arguments: &RunArguments, output: Output) -> Result<Exit, Failure> {
    program::run(arguments, output)
}

/// `beeline sockets`.
pub fn sockets(command: &SocketsCommand, output: Output) -> Result<Exit, Failure> {
    match command {
        SocketsCommand::Status => status::status(output),
        SocketsCommand::Connections => status::connections(output),
        SocketsCommand::Monitor(arguments) => monitor::run(arguments, output),
    }
}

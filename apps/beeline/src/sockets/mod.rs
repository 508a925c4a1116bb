//! `beeline run` and `beeline sockets`: unmodified programs with user-space sockets.

mod embedded;
mod links;
mod mapped;
mod monitor;
mod program;
mod proxy;
mod recall;
mod relay;
mod status;
mod top;

use crate::exit::{Exit, Failure};
use crate::output::Output;

pub use monitor::MonitorArguments;
pub use program::RunArguments;
pub use proxy::ProxyArguments;
pub use recall::RecallArguments;
pub use relay::RelayArguments;
pub use top::TopArguments;

/// `beeline sockets`.
#[derive(Debug, clap::Subcommand)]
pub enum SocketsCommand {
    /// Counters of this user's monitor, relay and proxy.
    Status,
    /// Connections the monitor introduced, the latest hundred or so, newest last.
    Connections,
    /// Busiest connections, looked at again and again.
    #[command(after_help = "Examples:\n  beeline sockets top\n  \
                            beeline sockets top --interval 5s --count 3")]
    Top(TopArguments),
    /// Counters of this user's monitor as OpenMetrics text, for a collector of text files.
    Metrics,
    /// Run the monitor of this user; `beeline run` starts one by itself.
    #[command(after_help = "Examples:\n  beeline sockets monitor\n  \
                            beeline sockets monitor --background --ring-size 1048576\n  \
                            beeline sockets monitor --policy sockets.toml")]
    Monitor(MonitorArguments),
    /// Run the relay of this user, which carries connections to other hosts; a monitor with hosts
    /// starts one by itself.
    #[command(after_help = "Examples:\n  beeline sockets relay --hosts hosts.toml")]
    Relay(RelayArguments),
    /// Run the proxy of this user, which carries connections to other hosts through memory windows
    /// of PCIe bridges, with its monitor.
    #[command(after_help = "Examples:\n  \
                            beeline sockets proxy --window 'ntb:///run/window?side=0' --peers peers.toml")]
    Proxy(ProxyArguments),
    /// Bring the connections of processes back to the kernel, so that they can be moved to another
    /// host. Their ends are accelerated again afterwards.
    #[command(after_help = "Examples:\n  beeline sockets recall --pid 4711\n  \
                            beeline sockets recall --pid 4711 --hold 5m && criu dump --tree 4711 \
                            --tcp-established ...")]
    Recall(RecallArguments),
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
        SocketsCommand::Top(arguments) => top::run(arguments, output),
        SocketsCommand::Metrics => status::metrics(output),
        SocketsCommand::Monitor(arguments) => monitor::run(arguments, output),
        SocketsCommand::Relay(arguments) => relay::run(arguments, output),
        SocketsCommand::Proxy(arguments) => proxy::run(arguments, output),
        SocketsCommand::Recall(arguments) => recall::run(arguments, output),
    }
}

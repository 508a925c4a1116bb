//! `beeline nf`: network functions from elements and channels.

mod check;
mod run;

use crate::exit::{Exit, Failure};
use crate::output::Output;

pub use check::CheckArguments;
pub use run::RunArguments;

/// `beeline nf`.
#[derive(Debug, clap::Subcommand)]
pub enum NfCommand {
    /// Compile a file and say what is wrong with it.
    #[command(after_help = "Examples:\n  beeline nf check counter.np\n  \
                            beeline nf check counter.np --json")]
    Check(CheckArguments),
    /// Run a graph over ports: captures by their .pcap name.
    #[command(after_help = "Examples:\n  \
                            beeline nf run counter.np --port in=in.pcap --port out=out.pcap")]
    Run(RunArguments),
}

/// Runs it.
pub fn nf(command: &NfCommand, output: Output) -> Result<Exit, Failure> {
    match command {
        NfCommand::Check(arguments) => check::run(arguments, output),
        NfCommand::Run(arguments) => run::run(arguments, output),
    }
}

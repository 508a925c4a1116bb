//! `beeline nf`: network functions from elements and channels.

mod build;
mod check;
mod debug;
mod models;
mod new;
mod run;
mod status;
mod top;

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
    /// Begin a file: a firewall, a balancer, a generator, a capture, a queue, or something smaller.
    New(new::NewArguments),
    /// List the elements that come with the compiler.
    Library,
    /// What each element becomes in hardware: interval, depth, storage, loops, what limits it.
    #[command(after_help = "Examples:\n  beeline nf report firewall.np\n  \
                            beeline nf report firewall.np --without delay --json\n  \
                            beeline nf report counter.np --area\n  \
                            beeline nf report counter.np --timing")]
    Report(models::ReportArguments),
    /// Write the graph as Verilog-2005.
    #[command(after_help = "Examples:\n  beeline nf verilog firewall.np -o out")]
    Verilog(models::VerilogArguments),
    /// Build a graph for a chip: stages, their times, and what was taken from the last build.
    #[command(after_help = "Examples:\n  beeline nf build firewall.np -o out\n  \
                            beeline nf build firewall.np --mode debug --json")]
    Build(build::BuildArguments),
    /// Play packets through the Verilog, or the cycle model.
    #[command(after_help = "Examples:\n  beeline nf simulate firewall.np --pcap in.pcap\n  \
                            beeline nf simulate firewall.np --pcap in.pcap --simulator model -o out\n  \
                            beeline nf simulate counter.np --port in=tap:a --port out=tap:b")]
    Simulate(models::SimulateArguments),
    /// Compare every back end with the interpreter, channel by channel.
    #[command(after_help = "Examples:\n  beeline nf diff firewall.np --pcap in.pcap")]
    Diff(models::DiffArguments),
    /// Run a graph over captures or network interfaces.
    #[command(after_help = "Examples:\n  \
                            beeline nf run counter.np --port in=in.pcap --port out=out.pcap\n  \
                            beeline nf run firewall.np --port from_tor=eth0 --port to_tor=eth1")]
    Run(RunArguments),
    /// Step through a graph: breakpoints, variables, logs of channels, which element waits for which.
    #[command(after_help = "Examples:\n  \
                            beeline nf debug counter.np --port in=in.pcap --port out=out.pcap")]
    Debug(debug::DebugArguments),
    /// Look at a running graph: packets, items of each channel, iterations of each element.
    #[command(after_help = "Examples:\n  beeline nf top firewall.np\n  \
                            beeline nf top firewall.np --count 1 --json")]
    Top(top::TopArguments),
    /// Exchange the graph of a run between interfaces for its changed file; state and packets stay.
    #[command(after_help = "Examples:\n  beeline nf reload firewall.np\n  \
                            beeline nf reload firewall.np --with larger.np --restart exact")]
    Reload(run::ReloadArguments),
    /// Set an element of a running graph back to how it began.
    #[command(after_help = "Examples:\n  beeline nf reset counter.np cnt")]
    Reset(run::ResetArguments),
    /// Send a signal to an element of a running graph and show the answer.
    #[command(after_help = "Examples:\n  beeline nf signal counter.np cnt\n  \
                            beeline nf signal firewall.np rules add 'tcp any -> any :443 drop'\n  \
                            beeline nf signal balancer.np backends add 10.0.1.1")]
    Signal(run::SignalArguments),
}

/// Runs it.
pub fn nf(command: &NfCommand, output: Output) -> Result<Exit, Failure> {
    match command {
        NfCommand::Check(arguments) => check::run(arguments, output),
        NfCommand::New(arguments) => new::run_new(arguments, output),
        NfCommand::Library => new::run_library(output),
        NfCommand::Report(arguments) => models::run_report(arguments, output),
        NfCommand::Build(arguments) => build::run(arguments, output),
        NfCommand::Verilog(arguments) => models::run_verilog(arguments, output),
        NfCommand::Simulate(arguments) => models::run_simulate(arguments, output),
        NfCommand::Diff(arguments) => models::run_diff(arguments, output),
        NfCommand::Top(arguments) => top::run(arguments, output),
        NfCommand::Debug(arguments) => debug::run(arguments, output),
        NfCommand::Reload(arguments) => run::run_reload(arguments, output),
        NfCommand::Reset(arguments) => run::run_reset(arguments, output),
        NfCommand::Signal(arguments) => run::run_signal(arguments, output),
        NfCommand::Run(arguments) => run::run(arguments, output),
    }
}

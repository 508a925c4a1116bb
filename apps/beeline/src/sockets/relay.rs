//! The relay as a process: the monitor starts it, and it outlives the monitor.

use std::path::PathBuf;

use beeline_fabric_open::OpenError;
use beeline_sockets_relay::network::Network;
use beeline_sockets_relay::{Host, Relay, RelayError, Settings, guard};

use super::links::{Links, Places};
use super::monitor;
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::Output;

/// `beeline sockets relay`.
#[derive(Clone, Debug, clap::Args)]
pub struct RelayArguments {
    /// Other hosts, and where their relays and this one are reached: TOML, read once at the start.
    #[arg(long, value_name = "FILE", env = "BEELINE_SOCKETS_HOSTS")]
    pub hosts: PathBuf,
}

/// The command.
pub fn run(arguments: &RelayArguments, output: Output) -> Result<Exit, Failure> {
    let hosts = monitor::hosts(&arguments.hosts)?;
    let (others, listen) = (hosts.others, hosts.listen.clone());
    let (sleepers_hold, over_tcp) = (hosts.sleepers_hold, hosts.over_tcp);
    let places = Places {
        listen: hosts.listen,
        relays: others.iter().map(|host| host.relay.clone()).collect(),
    };
    let hosts = others.into_iter().map(|host| Host { addresses: host.addresses }).collect();
    let settings = Settings { hosts, sleepers_hold, over_tcp, ..Settings::default() };
    // Without one, a program that sleeps would not hear that both relays were killed.
    if let Err(error) = guard::start() {
        output.note(format!("no guardian of this relay's connections: {error}"));
    }
    let begun = Relay::begin(settings, |inbox| -> Result<Box<dyn Network>, OpenError> {
        Ok(Box::new(Links::open(&places, &inbox)?))
    });
    let mut relay = match begun {
        Ok(relay) => relay,
        Err(RelayError::Running) => {
            output.note("a relay runs already");
            return Ok(Exit::Done);
        }
        Err(error @ RelayError::Network(_)) => {
            let place = format!("{}: listen = {listen:?}", arguments.hosts.display());
            return Err(Failure::new(Exit::Failed, anyhow::Error::from(error).context(place)));
        }
        Err(error) => return Err(Failure::new(Exit::Failed, error)),
    };
    relay.run(None).or_exit(Exit::Failed)?;
    Ok(Exit::Done)
}

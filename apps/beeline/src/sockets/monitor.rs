//! The monitor as a process: in the foreground, or left behind in a session of its own.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_sockets::introduce;
use beeline_sockets_monitor::{
    Elsewhere, Hosts, Monitor, MonitorError, Policy, RelayProgram, Settings, is_here,
};

use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::Output;

/// Longest wait for a monitor that was just started.
const PATIENCE: Duration = Duration::from_secs(5);

/// `beeline sockets monitor`.
#[derive(Clone, Debug, clap::Args)]
pub struct MonitorArguments {
    /// Leave it running in a session of its own, and return when it answers.
    #[arg(long)]
    pub background: bool,
    /// Bytes of each direction's ring: a power of two, 4096 to 67108864.
    #[arg(long, value_name = "BYTES", default_value_t = 256 << 10, value_parser = ring_size)]
    pub ring_size: usize,
    /// Rules on which connections may be accelerated: TOML, read once at the start.
    #[arg(long, value_name = "FILE", env = "BEELINE_SOCKETS_POLICY")]
    pub policy: Option<PathBuf>,
    /// Other hosts to be reached over the fabric: TOML, read once at the start.
    #[arg(long, value_name = "FILE", env = "BEELINE_SOCKETS_HOSTS")]
    pub hosts: Option<PathBuf>,
}

/// The hosts of a file.
pub fn hosts(path: &Path) -> Result<Hosts, Failure> {
    let text = std::fs::read_to_string(path).map_err(anyhow::Error::from);
    let parsed = text.and_then(|text| Ok(Hosts::parse(&text)?));
    parsed.with_context(|| path.display().to_string()).or_exit(Exit::Usage)
}

fn elsewhere(arguments: &MonitorArguments) -> Result<Option<Elsewhere>, Failure> {
    let Some(path) = &arguments.hosts else { return Ok(None) };
    let hosts = hosts(path)?;
    let program = std::env::current_exe().context("finding this program")?;
    let path = path.canonicalize().context("finding the hosts' file")?;
    let words = ["--quiet", "sockets", "relay", "--hosts"];
    let arguments = words.iter().map(Into::into).chain([path.into_os_string()]).collect();
    Ok(Some(Elsewhere { hosts, relay: Some(RelayProgram { program, arguments }), is_here }))
}

/// True for a place on the fabric whose address is none of this host's.
fn is_elsewhere(place: &str) -> bool {
    let address = place.split_once("://").and_then(|(_, rest)| rest.parse::<SocketAddr>().ok());
    let bound = address.map(|address| UdpSocket::bind((address.ip(), 0)));
    matches!(bound, Some(Err(error)) if error.kind() == ErrorKind::AddrNotAvailable)
}

fn policy(arguments: &MonitorArguments) -> Result<Policy, Failure> {
    let Some(path) = &arguments.policy else { return Ok(Policy::default()) };
    let text = std::fs::read_to_string(path).map_err(anyhow::Error::from);
    let parsed = text.and_then(|text| Ok(Policy::parse(&text)?));
    parsed.with_context(|| path.display().to_string()).or_exit(Exit::Usage)
}

fn ring_size(text: &str) -> Result<usize, String> {
    let size: usize = text.parse().map_err(|_| "a number of bytes".to_owned())?;
    let fits = size.is_power_of_two() && (4096..=64 << 20).contains(&size);
    if fits { Ok(size) } else { Err("a power of two from 4096 to 67108864".to_owned()) }
}

/// The command.
pub fn run(arguments: &MonitorArguments, output: Output) -> Result<Exit, Failure> {
    let (policy, elsewhere) = (policy(arguments)?, elsewhere(arguments)?);
    if let Some(listen) = elsewhere.as_ref().map(|elsewhere| &elsewhere.hosts.listen)
        && is_elsewhere(listen)
    {
        // It may be one soon: the relay is started again and again.
        output.note(format!(
            "beeline: listen = {listen:?} is no address of this host; connections to other hosts stay \
             with the kernel"
        ));
    }
    if arguments.background {
        if introduce::dial().is_ok() {
            output.note("a monitor runs already");
            return Ok(Exit::Done);
        }
        leave_behind(arguments)?;
        return Ok(Exit::Done);
    }
    let ring_bytes = arguments.ring_size;
    let settings = Settings { ring_bytes, policy, elsewhere, ..Settings::default() };
    let mut monitor = match Monitor::begin(settings) {
        Ok(monitor) => monitor,
        Err(MonitorError::Running) => {
            output.note("a monitor runs already");
            return Ok(Exit::Done);
        }
        Err(error) => return Err(Failure::new(Exit::Failed, error)),
    };
    monitor.run(None).or_exit(Exit::Failed)?;
    Ok(Exit::Done)
}

/// Starts a monitor whose parent is not this process, and waits until it answers. It must not be
/// this process's child: `beeline run` becomes the program, which knows of no such child.
fn leave_behind(arguments: &MonitorArguments) -> anyhow::Result<()> {
    let own = std::env::current_exe().context("finding this program")?;
    // We are a process of our own (`--background`), whose end makes the monitor an orphan.
    let _ = rustix::process::setsid();
    let mut command = Command::new(own);
    command.args(["--quiet", "sockets", "monitor", "--ring-size"]);
    command.arg(arguments.ring_size.to_string());
    if let Some(path) = &arguments.policy {
        command.arg("--policy").arg(path.canonicalize()?);
    }
    if let Some(path) = &arguments.hosts {
        command.arg("--hosts").arg(path.canonicalize()?);
    }
    command
        .current_dir("/")
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context("starting the monitor")?;
    let began = Instant::now();
    while introduce::dial().is_err() {
        anyhow::ensure!(began.elapsed() < PATIENCE, "the monitor does not answer");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Sees to it that there is a monitor.
pub fn ensure() -> anyhow::Result<()> {
    if introduce::dial().is_ok() {
        return Ok(());
    }
    let own = std::env::current_exe().context("finding this program")?;
    let started = Command::new(own)
        .args(["--quiet", "sockets", "monitor", "--background"])
        .env_remove("LD_PRELOAD")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .context("starting the monitor")?;
    anyhow::ensure!(started.success(), "the monitor did not start");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_of_another_host_is_told_from_one_of_this() {
        assert!(is_elsewhere("tcp://192.0.2.7:4791"));
        for here in ["tcp://127.0.0.1:4791", "verbs://[::1]:1", "auto://host:1", "tcp://0.0.0.0:1"]
        {
            assert!(!is_elsewhere(here), "{here}");
        }
    }

    #[test]
    fn a_ring_is_a_power_of_two_within_bounds() {
        assert_eq!(ring_size("4096"), Ok(4096));
        for wrong in ["0", "4095", "5000", "134217728", "x"] {
            assert!(ring_size(wrong).is_err(), "{wrong}");
        }
    }
}

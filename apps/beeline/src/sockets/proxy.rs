//! The proxy as a process: connections to other hosts through memory windows.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context as _;
use beeline_sockets::packets::dial;
use beeline_sockets::packets::protocol::{Answer, Question};
use beeline_sockets_proxy::{Config, Monitor, MonitorError};

use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::Output;

/// `beeline sockets proxy`.
#[derive(Clone, Debug, clap::Args)]
pub struct ProxyArguments {
    /// The window to the one peer that names none in the file: `ntb:///FILE?side=0` or `side=1`.
    #[arg(long, value_name = "URL", env = "BEELINE_SOCKETS_WINDOW")]
    pub window: Option<String>,
    /// This host's addresses, the peers and their monitors: TOML, read once at the start.
    #[arg(long, value_name = "FILE", env = "BEELINE_SOCKETS_PEERS")]
    pub peers: PathBuf,
}

/// The command.
pub fn run(arguments: &ProxyArguments, output: Output) -> Result<Exit, Failure> {
    let path = arguments.peers.display();
    let text = std::fs::read_to_string(&arguments.peers)
        .with_context(|| format!("reading {path}"))
        .or_exit(Exit::Usage)?;
    let config = Config::parse(&text, arguments.window.as_deref())
        .with_context(|| format!("{path}"))
        .or_exit(Exit::Usage)?;
    let mut monitor = match Monitor::open(config) {
        Ok(monitor) => monitor,
        Err(MonitorError::Running) => {
            output.note("a proxy of this user runs already");
            return Ok(Exit::Done);
        }
        Err(error @ (MonitorError::Geometry(_) | MonitorError::Threads { .. })) => {
            return Err(Failure::new(Exit::Usage, error));
        }
        Err(error) => return Err(Failure::new(Exit::Failed, error)),
    };
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    wait_for_signal(move || stopped.store(true, Ordering::Relaxed)).or_exit(Exit::Failed)?;
    output.note(
        "carrying connections through the window; beeline sockets status tells how it stands",
    );
    monitor.run(&stop).or_exit(Exit::Failed)?;
    Ok(Exit::Done)
}

/// Calls `then` once this process is told to end.
fn wait_for_signal(then: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
        runtime.block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let (Ok(mut interrupt), Ok(mut terminate)) =
                (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
            else {
                return;
            };
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
        });
        then();
    })?;
    Ok(())
}

/// What the proxy of this user says of itself, as names and values; `None`: there is none.
pub fn status() -> Option<Vec<(String, String)>> {
    let socket = dial::call(Question::Status, None).ok()?;
    let mut lines = Vec::new();
    while let Ok((Answer::Line(line), _)) = dial::hear(&socket) {
        if let Some((name, value)) = line.rsplit_once('=') {
            lines.push((name.to_owned(), value.to_owned()));
        }
    }
    Some(lines)
}

//! Why and when a node stops: signals, and the SHUTDOWN command.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;

use anyhow::Context as _;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::signal::unix::{SignalKind, signal};

use crate::exit::Exit;

/// Why to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// SIGINT.
    Interrupt,
    /// SIGTERM.
    Terminate,
    /// A client's SHUTDOWN.
    Client,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
            Self::Client => "SHUTDOWN from a client",
        })
    }
}

/// Starts a thread that sends the first reason to stop, and ends the process at once, with code
/// 130, on a second signal. Signals are caught from the moment this returns.
///
/// Errors: the thread or its signal handlers cannot be made.
pub fn watch(shutdown: OwnedFd, reasons: Sender<Reason>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the signal watcher")?;
    let guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt()).context("catching SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("catching SIGTERM")?;
    let shutdown =
        AsyncFd::with_interest(shutdown, Interest::READABLE).context("watching for SHUTDOWN")?;
    drop(guard);
    std::thread::Builder::new()
        .name("beeline-signals".to_owned())
        .spawn(move || {
            runtime.block_on(async move {
                let reason = tokio::select! {
                    _ = interrupt.recv() => Reason::Interrupt,
                    _ = terminate.recv() => Reason::Terminate,
                    _ = shutdown.readable() => Reason::Client,
                };
                let _ = reasons.send(reason);
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                crate::output::complain("beeline: stopped at once by a second signal");
                std::process::exit(Exit::Interrupted.code().into());
            });
        })
        .context("starting the signal watcher's thread")?;
    Ok(())
}

//! Why and when a node stops: signals, and the SHUTDOWN command.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;

use anyhow::Context as _;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
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

/// Starts two threads that send the first reason to stop; the one that catches signals ends the
/// process at once, with code 130, on a second signal. Signals are caught from the moment this
/// returns.
///
/// Errors: a thread or the signal handlers cannot be made.
pub fn watch(shutdown: OwnedFd, reasons: &Sender<Reason>) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("starting the signal watcher")?;
    let guard = runtime.enter();
    let mut interrupt = signal(SignalKind::interrupt()).context("catching SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("catching SIGTERM")?;
    drop(guard);
    let first = reasons.clone();
    std::thread::Builder::new()
        .name("beeline-signals".to_owned())
        .spawn(move || {
            runtime.block_on(async move {
                let reason = tokio::select! {
                    _ = interrupt.recv() => Reason::Interrupt,
                    _ = terminate.recv() => Reason::Terminate,
                };
                let _ = first.send(reason);
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                crate::output::complain("beeline: stopped at once by a second signal");
                std::process::exit(Exit::Interrupted.code().into());
            });
        })
        .context("starting the signal watcher's thread")?;
    let asked = reasons.clone();
    std::thread::Builder::new()
        .name("beeline-shutdown".to_owned())
        .spawn(move || {
            while let Err(Errno::INTR) = poll(&mut [PollFd::new(&shutdown, PollFlags::IN)], None) {}
            let _ = asked.send(Reason::Client);
        })
        .context("starting the thread that waits for SHUTDOWN")?;
    Ok(())
}

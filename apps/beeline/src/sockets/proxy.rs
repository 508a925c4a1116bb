//! The proxy as two processes: the keeper, which a user starts, and the proxy proper, which the keeper
//! starts and starts again when it dies. Connections to other hosts through memory windows.

use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_os::control_socket::ControlSocket;
use beeline_sockets::packets::dial;
use beeline_sockets::packets::protocol::{Answer, Question};
use beeline_sockets_proxy::keeper::{Keeper, Store};
use beeline_sockets_proxy::{Config, Monitor, MonitorError};
use rustix::process::{Pid, Signal};

use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::Output;

/// Proxies that die sooner than this after their start, so many in a row, are not started again.
const SOON: Duration = Duration::from_secs(1);
const MOST_SOON: u32 = 5;

/// `beeline sockets proxy`.
#[derive(Clone, Debug, clap::Args)]
pub struct ProxyArguments {
    /// The window to the one peer that names none in the file: `ntb:///FILE?side=0` or `side=1`.
    #[arg(long, value_name = "URL", env = "BEELINE_SOCKETS_WINDOW")]
    pub window: Option<String>,
    /// This host's addresses, the peers and their monitors: TOML, read at the start and when a proxy takes
    /// the place of one that died.
    #[arg(long, value_name = "FILE", env = "BEELINE_SOCKETS_PEERS")]
    pub peers: PathBuf,
    /// Standard input is the keeper.
    #[arg(long, hide = true)]
    pub kept: bool,
}

/// The command.
pub fn run(arguments: &ProxyArguments, output: Output) -> Result<Exit, Failure> {
    if arguments.kept { work(arguments, output) } else { keep(arguments, output) }
}

fn configuration(arguments: &ProxyArguments) -> Result<Config, Failure> {
    let path = arguments.peers.display();
    let text = std::fs::read_to_string(&arguments.peers)
        .with_context(|| format!("reading {path}"))
        .or_exit(Exit::Usage)?;
    Config::parse(&text, arguments.window.as_deref())
        .with_context(|| format!("{path}"))
        .or_exit(Exit::Usage)
}

// ---- the keeper ----

/// Holds what outlives a proxy, and starts proxies.
fn keep(arguments: &ProxyArguments, output: Output) -> Result<Exit, Failure> {
    // A word about a bad file is this process's, before anything is started.
    configuration(arguments)?;
    raise_limit();
    let worker = Arc::new(AtomicI32::new(0));
    let stopping = Arc::new(AtomicBool::new(false));
    let (told, stopped) = (Arc::clone(&worker), Arc::clone(&stopping));
    wait_for_signal(move || {
        stopped.store(true, Ordering::SeqCst);
        end(told.load(Ordering::SeqCst));
    })
    .or_exit(Exit::Failed)?;
    let mut store = Store::default();
    let mut soon = 0;
    loop {
        let began = Instant::now();
        let (mut child, socket) = spawn(arguments, output).or_exit(Exit::Failed)?;
        let process = i32::try_from(child.id()).unwrap_or(0);
        worker.store(process, Ordering::SeqCst);
        if stopping.load(Ordering::SeqCst) {
            end(process);
        }
        let worked = store.serve(&socket).context("hearing the proxy").or_exit(Exit::Failed)?;
        let status = child.wait().context("waiting for the proxy").or_exit(Exit::Failed)?;
        worker.store(0, Ordering::SeqCst);
        let code = status.code();
        if code == Some(0) || stopping.load(Ordering::SeqCst) {
            return Ok(Exit::Done);
        }
        // One that was killed while it took over is no reason to give up what is kept.
        let killed = status.signal().is_some() && store.count() > 0;
        if !worked && !killed {
            // It said why.
            let exits = Exit::TABLE.map(|(exit, _)| exit);
            let exit = exits.into_iter().find(|exit| code == Some(exit.code().into()));
            let error = anyhow::anyhow!("the proxy did not start: {status}");
            return Err(Failure::new(exit.unwrap_or(Exit::Failed), error));
        }
        soon = if began.elapsed() < SOON { soon + 1 } else { 0 };
        if soon >= MOST_SOON {
            let error =
                anyhow::anyhow!("the proxy died {soon} times soon after its start: {status}");
            return Err(Failure::new(Exit::Failed, error));
        }
        output.note(format!(
            "the proxy died ({status}); another one takes over its connections, {} entries in all",
            store.count()
        ));
    }
}

fn end(process: i32) {
    if let Some(process) = Pid::from_raw(process) {
        let _ = rustix::process::kill_process(process, Signal::TERM);
    }
}

/// A proxy, and what it talks to this process with.
fn spawn(arguments: &ProxyArguments, output: Output) -> anyhow::Result<(Child, ControlSocket)> {
    let (ours, theirs) = ControlSocket::pair().context("a socket to the proxy")?;
    let own = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(own);
    if output.quiet {
        command.arg("--quiet");
    }
    command.args(["sockets", "proxy", "--kept", "--peers"]).arg(&arguments.peers);
    if let Some(window) = &arguments.window {
        command.args(["--window", window]);
    }
    let child = command.stdin(Stdio::from(theirs.into_descriptor())).spawn();
    Ok((child.context("starting the proxy")?, ours))
}

fn raise_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

// ---- the proxy ----

/// Carries connections until told to end.
fn work(arguments: &ProxyArguments, output: Output) -> Result<Exit, Failure> {
    // Without its keeper it must not go on: nothing would be kept, and no user knows of it.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .context("asking to end with the keeper")
        .or_exit(Exit::Failed)?;
    let input = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned();
    let keeper = input.and_then(ControlSocket::from_peer).and_then(Keeper::meet);
    let keeper = keeper.context("meeting the keeper at standard input").or_exit(Exit::Usage)?;
    let config = configuration(arguments)?;
    let mut monitor = match Monitor::open_with(config, Some(keeper)) {
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

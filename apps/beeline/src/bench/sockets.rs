//! `beeline bench sockets`: user-space sockets against the kernel's TCP, Unix sockets and pipes.
//!
//! Two processes, one core each where there are two: one serves, one asks and measures. The subject
//! is the same program over the same TCP calls, under `beeline run`.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::Context as _;

use super::host::cache_line_ping_pong_us;
use super::report::{Better, Report, Row};
use super::turns::{Contender, alternate, online, pin};
use super::{BenchOptions, finish};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct SocketsArguments {
    /// The preload library; by default the one that `beeline run` finds.
    #[arg(long, value_name = "FILE")]
    pub library: Option<PathBuf>,
    #[command(flatten)]
    pub options: BenchOptions,
}

/// What the two processes do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Work {
    /// 8 bytes there and back, one at a time.
    PingPong,
    /// Sends of 8 bytes, as fast as they go.
    Messages,
    /// Sends of 1 MiB, as fast as they go.
    Bulk,
}

/// How they are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Transport {
    /// TCP on loopback.
    Tcp,
    /// A Unix socket.
    Unix,
    /// Two pipes.
    Pipe,
}

/// One of the two processes.
#[derive(Clone, Debug, clap::Args)]
pub struct SocketsPeerArguments {
    /// What to do.
    #[arg(long, value_enum)]
    pub work: Work,
    /// How to be connected.
    #[arg(long, value_enum)]
    pub transport: Transport,
    /// How often.
    #[arg(long)]
    pub rounds: u64,
    /// Serve; otherwise ask, at the address in this argument's absence started by ourselves.
    #[arg(long)]
    pub serve: bool,
}

const BULK: usize = 1 << 20;

fn name(value: impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The command.
pub fn run(arguments: &SocketsArguments, output: Output) -> Result<Exit, Failure> {
    let options = &arguments.options;
    let mut report = Report::new("sockets", "none");
    let cases = [
        (Work::PingPong, "8 B round trip", "us", Better::Lower, options.size(100_000, 200)),
        (Work::Messages, "8 B sends", "op/s", Better::Higher, options.size(2_000_000, 500)),
        (Work::Bulk, "1 MiB sends", "GB/s", Better::Higher, options.size(3_000, 8)),
    ];
    for (work, case, unit, better, rounds) in cases {
        let turn =
            |transport, accelerated| move || asker(arguments, work, transport, rounds, accelerated);
        let mut contenders = vec![
            Contender::new("user-space sockets", turn(Transport::Tcp, true)),
            Contender::new("kernel TCP", turn(Transport::Tcp, false)),
            Contender::new("Unix socket", turn(Transport::Unix, false)),
            Contender::new("pipe", turn(Transport::Pipe, false)),
        ];
        if work == Work::PingPong {
            contenders.push(Contender::new("cache line", move || cache_line_ping_pong_us(rounds)));
        }
        let figures = alternate(options.turns(), &mut contenders, output)?;
        let names: Vec<&str> = contenders.iter().map(|contender| contender.name).collect();
        for (peer, theirs) in names.iter().zip(&figures).skip(1) {
            let row = Row::new(case, names[0], unit, better, &figures[0])
                .against(*peer, &figures[0], theirs)
                .beside("cores", online().min(2));
            report.push(row);
        }
    }
    finish(&report, options, output)
}

/// Runs the asking process and returns the figure it prints.
fn asker(
    arguments: &SocketsArguments,
    work: Work,
    transport: Transport,
    rounds: u64,
    accelerated: bool,
) -> anyhow::Result<f64> {
    let own = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(&own);
    command.arg("--quiet");
    if accelerated {
        command.arg("run");
        if let Some(library) = &arguments.library {
            command.arg("--library").arg(library);
        }
        command.arg("--").arg(&own);
    }
    command.args(["bench", "sockets-peer", "--rounds", &rounds.to_string()]);
    command.args(["--work", &name(work), "--transport", &name(transport)]);
    let output = command.stderr(Stdio::inherit()).output().context("starting a peer")?;
    anyhow::ensure!(output.status.success(), "the asking process failed: {}", output.status);
    let text = String::from_utf8_lossy(&output.stdout);
    text.trim().parse().with_context(|| format!("the asking process said {text:?}"))
}

/// One of the two processes.
pub fn run_peer(arguments: &SocketsPeerArguments) -> Result<Exit, Failure> {
    if arguments.serve {
        serve(arguments)?;
        return Ok(Exit::Done);
    }
    // The server inherits what preloads us; we pin ourselves after it was started.
    let own = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(own);
    command.args(["bench", "sockets-peer", "--serve", "--rounds"]);
    command.arg(arguments.rounds.to_string());
    command.args(["--work", &name(arguments.work)]);
    command.args(["--transport", &name(arguments.transport)]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    let figure = ask(arguments, &mut child);
    if figure.is_err() {
        let _ = child.kill();
    }
    let _ = child.wait();
    Output::default().line(figure?)?;
    Ok(Exit::Done)
}

fn serve(arguments: &SocketsPeerArguments) -> anyhow::Result<()> {
    pin(1)?;
    let mut out = std::io::stdout().lock();
    match arguments.transport {
        Transport::Tcp => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            writeln!(out, "{}", listener.local_addr()?)?;
            out.flush()?;
            let (peer, _) = listener.accept()?;
            peer.set_nodelay(true)?;
            answer(arguments, &peer, &peer)
        }
        Transport::Unix => {
            let folder = std::env::temp_dir();
            let path = folder.join(format!("beeline-bench-{}", std::process::id()));
            let listener = UnixListener::bind(&path)?;
            writeln!(out, "{}", path.display())?;
            out.flush()?;
            let accepted = listener.accept();
            let _ = std::fs::remove_file(&path);
            let (peer, _) = accepted?;
            answer(arguments, &peer, &peer)
        }
        Transport::Pipe => {
            let out = std::fs::File::from(std::os::fd::AsFd::as_fd(&out).try_clone_to_owned()?);
            let stdin = std::io::stdin().lock();
            let from = std::fs::File::from(std::os::fd::AsFd::as_fd(&stdin).try_clone_to_owned()?);
            answer(arguments, &from, &out)
        }
    }
}

/// Serves one conversation.
fn answer(
    arguments: &SocketsPeerArguments,
    mut from: impl Read,
    mut to: impl Write,
) -> anyhow::Result<()> {
    if arguments.work == Work::PingPong {
        let mut bytes = [0; 8];
        for _ in 0..arguments.rounds {
            from.read_exact(&mut bytes)?;
            to.write_all(&bytes)?;
        }
        return Ok(());
    }
    let size = if arguments.work == Work::Bulk { BULK as u64 } else { 8 };
    let mut left = arguments.rounds * size;
    let mut bytes = vec![0; 256 << 10];
    while left > 0 {
        let read = from.read(&mut bytes)? as u64;
        anyhow::ensure!(read > 0, "the asking process ended early");
        left = left.saturating_sub(read);
    }
    to.write_all(&[1; 8])?;
    Ok(())
}

fn ask(arguments: &SocketsPeerArguments, child: &mut Child) -> anyhow::Result<f64> {
    let mut said = BufReader::new(child.stdout.take().context("the server's output")?);
    let told = child.stdin.take().context("the server's input")?;
    if arguments.transport == Transport::Pipe {
        pin(0)?;
        return measure(arguments, said.into_inner(), told);
    }
    let mut address = String::new();
    said.read_line(&mut address)?;
    pin(0)?;
    if arguments.transport == Transport::Unix {
        let peer = UnixStream::connect(address.trim())?;
        measure(arguments, &peer, &peer)
    } else {
        let peer = TcpStream::connect(address.trim())?;
        peer.set_nodelay(true)?;
        measure(arguments, &peer, &peer)
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn measure(
    arguments: &SocketsPeerArguments,
    mut from: impl Read,
    mut to: impl Write,
) -> anyhow::Result<f64> {
    let rounds = arguments.rounds.max(1);
    let mut answer = [0; 8];
    let began = Instant::now();
    match arguments.work {
        Work::PingPong => {
            for _ in 0..rounds {
                to.write_all(&[7; 8])?;
                from.read_exact(&mut answer)?;
            }
            return Ok(began.elapsed().as_secs_f64() * 1e6 / rounds as f64);
        }
        Work::Messages => {
            for _ in 0..rounds {
                to.write_all(&[7; 8])?;
            }
        }
        Work::Bulk => {
            let bytes = vec![7; BULK];
            for _ in 0..rounds {
                to.write_all(&bytes)?;
            }
        }
    }
    from.read_exact(&mut answer)?;
    let seconds = began.elapsed().as_secs_f64();
    Ok(match arguments.work {
        Work::Bulk => (rounds * BULK as u64) as f64 / seconds / 1e9,
        _ => rounds as f64 / seconds,
    })
}

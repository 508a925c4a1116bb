//! The processes that talk to each other.

use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::super::turns::pin;
use super::costs::{Costs, Figure, Rounds};
use super::{BULK, PACKET, SocketsPeerArguments, Transport, Work, many, modes, name};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// One of the two processes.
pub fn run_peer(arguments: &SocketsPeerArguments) -> Result<Exit, Failure> {
    if arguments.serve {
        serve(arguments)?;
        return Ok(Exit::Done);
    }
    if arguments.work == Work::Pipeline {
        Output::default().line(pipeline::through(arguments)?)?;
        return Ok(Exit::Done);
    }
    if arguments.work == Work::Alone {
        Output::default().line(alone(arguments)?)?;
        return Ok(Exit::Done);
    }
    if let Some(to) = &arguments.to
        && arguments.work.is_mode()
    {
        let (figure, costs) = modes::ask(arguments, to)?;
        Output::default().line(format!("{figure} {costs}"))?;
        return Ok(Exit::Done);
    }
    if let Some(to) = &arguments.to {
        let figure = ask_at(arguments, to)?;
        let mut line = figure.to_string();
        if arguments.costs {
            line += &format!(" {}", Costs::of_this_process()?);
        }
        Output::default().line(line)?;
        return Ok(Exit::Done);
    }
    // The server inherits what preloads us; we pin ourselves after it was started.
    let own = std::env::current_exe().context("finding this program")?;
    let mut command = Command::new(own);
    command.args(["bench", "sockets-peer", "--serve", "--rounds"]);
    command.arg(arguments.rounds.to_string());
    command.args(["--work", &name(arguments.work)]);
    command.args(["--transport", &name(arguments.transport)]);
    command.args(["--size", &arguments.size.to_string()]);
    command.args(["--connections", &arguments.connections.to_string()]);
    if let Some(answer) = arguments.answer {
        command.args(["--answer", &answer.to_string()]);
    }
    if arguments.one_core {
        command.arg("--one-core");
    }
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
    if arguments.work == Work::Pipeline {
        return pipeline::stage(arguments);
    }
    pin(usize::from(!arguments.one_core))?;
    if arguments.work.is_mode() {
        return modes::serve(arguments);
    }
    if arguments.work == Work::Many {
        return many::serve(arguments);
    }
    let mut out = std::io::stdout().lock();
    match arguments.transport {
        Transport::Tcp => {
            let listener = TcpListener::bind(&arguments.listen)?;
            writeln!(out, "{}", listener.local_addr()?)?;
            out.flush()?;
            for _ in 1..arguments.conversations() {
                let (peer, _) = listener.accept()?;
                answer(arguments, &peer, &peer)?;
            }
            let (peer, _) = listener.accept()?;
            peer.set_nodelay(true)?;
            answer(arguments, &peer, &peer)?;
            if arguments.costs {
                writeln!(out, "{}", Costs::of_this_process()?)?;
            }
            Ok(())
        }
        Transport::Unix => {
            let folder = std::env::temp_dir();
            let path = folder.join(format!("beeline-bench-{}", std::process::id()));
            let listener = UnixListener::bind(&path)?;
            writeln!(out, "{}", path.display())?;
            out.flush()?;
            for _ in 1..arguments.conversations() {
                let (peer, _) = listener.accept()?;
                answer(arguments, &peer, &peer)?;
            }
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
    if matches!(arguments.work, Work::PingPong | Work::Pauses | Work::Connections) {
        let mut bytes = vec![0; arguments.size];
        let back = vec![7; arguments.answer.unwrap_or(arguments.size)];
        let rounds = if arguments.work == Work::Connections { 1 } else { arguments.rounds };
        for _ in 0..rounds {
            from.read_exact(&mut bytes)?;
            to.write_all(&back)?;
        }
        return Ok(());
    }
    let size = if arguments.work == Work::Bulk { BULK as u64 } else { arguments.size as u64 };
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

/// Asks a server that was started already.
fn ask_at(arguments: &SocketsPeerArguments, to: &str) -> anyhow::Result<Figure> {
    pin(0)?;
    match arguments.work {
        Work::Connections => connections(arguments, to).map(Figure::from),
        Work::Many => many::ask(arguments, to).map(Figure::from),
        _ => {
            let peer = TcpStream::connect(to).with_context(|| format!("connecting to {to}"))?;
            peer.set_nodelay(true)?;
            measure(arguments, &peer, &peer)
        }
    }
}

fn ask(arguments: &SocketsPeerArguments, child: &mut Child) -> anyhow::Result<Figure> {
    let mut said = BufReader::new(child.stdout.take().context("the server's output")?);
    let told = child.stdin.take().context("the server's input")?;
    if arguments.transport == Transport::Pipe {
        pin(0)?;
        return measure(arguments, said.into_inner(), told);
    }
    let mut address = String::new();
    said.read_line(&mut address)?;
    pin(0)?;
    if arguments.work == Work::Connections {
        return connections(arguments, address.trim()).map(Figure::from);
    }
    if arguments.work == Work::Many {
        return many::ask(arguments, address.trim()).map(Figure::from);
    }
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
) -> anyhow::Result<Figure> {
    let rounds = arguments.rounds.max(1);
    let message = vec![7; arguments.size];
    let mut answer = [0; 8];
    let began = Instant::now();
    match arguments.work {
        Work::PingPong | Work::Pauses => {
            let mut answer = vec![0; arguments.answer.unwrap_or(arguments.size)];
            let (mut silent, mut all) = (Duration::ZERO, Rounds::begin(arguments.costs));
            for _ in 0..rounds {
                if arguments.work == Work::Pauses {
                    let asleep = Instant::now();
                    std::thread::sleep(Duration::from_millis(1));
                    silent += asleep.elapsed();
                    all.resume();
                }
                to.write_all(&message)?;
                from.read_exact(&mut answer)?;
                all.over();
            }
            let value = (began.elapsed() - silent).as_secs_f64() * 1e6 / rounds as f64;
            return Ok(Figure { value, p99_us: all.p99_us() });
        }
        Work::Connections
        | Work::Pipeline
        | Work::Many
        | Work::Alone
        | Work::Origin
        | Work::Shm
        | Work::Direct => anyhow::bail!("has a measure of its own"),
        Work::Messages => {
            for _ in 0..rounds {
                to.write_all(&message)?;
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
    Ok(Figure::from(match arguments.work {
        Work::Bulk => (rounds * BULK as u64) as f64 / seconds / 1e9,
        _ => rounds as f64 / seconds,
    }))
}

/// Microseconds for 8 bytes there and back, both ends in this thread.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn alone(arguments: &SocketsPeerArguments) -> anyhow::Result<f64> {
    pin(0)?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut one = TcpStream::connect(listener.local_addr()?)?;
    let mut other = listener.accept()?.0;
    one.set_nodelay(true)?;
    other.set_nodelay(true)?;
    let rounds = arguments.rounds.max(1);
    let mut bytes = [7; 8];
    let mut once = || {
        one.write_all(&bytes)?;
        other.read_exact(&mut bytes)?;
        other.write_all(&bytes)?;
        one.read_exact(&mut bytes)
    };
    for _ in 0..20 {
        once()?;
    }
    let began = Instant::now();
    for _ in 0..rounds {
        once()?;
    }
    Ok(began.elapsed().as_secs_f64() * 1e6 / rounds as f64)
}

/// Connections per second, each with 8 bytes there and back.
fn connections(arguments: &SocketsPeerArguments, address: &str) -> anyhow::Result<f64> {
    fn once(mut from: impl Read, mut to: impl Write) -> std::io::Result<()> {
        to.write_all(&[7; 8])?;
        from.read_exact(&mut [0; 8])
    }
    let rounds = arguments.rounds.max(1);
    let began = Instant::now();
    for _ in 0..rounds {
        if arguments.transport == Transport::Unix {
            let peer = UnixStream::connect(address)?;
            once(&peer, &peer)?;
        } else {
            let peer = TcpStream::connect(address)?;
            once(&peer, &peer)?;
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    let figure = rounds as f64 / began.elapsed().as_secs_f64();
    Ok(figure)
}

/// A row of processes, each reading packets and writing them on: network functions, as in p. 6.
mod pipeline {
    use super::*;

    fn next_stage(arguments: &SocketsPeerArguments, next: &str) -> anyhow::Result<Command> {
        let own = std::env::current_exe().context("finding this program")?;
        let mut command = Command::new(own);
        command.args(["bench", "sockets-peer", "--serve", "--work", "pipeline", "--rounds"]);
        command.args([&arguments.rounds.to_string(), "--transport", &name(arguments.transport)]);
        command.args(["--next", next]);
        Ok(command)
    }

    /// One of them: from its standard input, or from who connects, to its standard output, or to
    /// the next.
    pub fn stage(arguments: &SocketsPeerArguments) -> anyhow::Result<()> {
        let mut packet = [0; PACKET];
        if arguments.transport == Transport::Pipe {
            let from = std::fs::File::from(
                std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned()?,
            );
            let to = std::fs::File::from(
                std::os::fd::AsFd::as_fd(&std::io::stdout()).try_clone_to_owned()?,
            );
            return forward(&from, &to, &mut packet);
        }
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", listener.local_addr()?)?;
        out.flush()?;
        let next = arguments.next.as_deref().context("where the packets go")?;
        let to = TcpStream::connect(next)?;
        to.set_nodelay(true)?;
        let (from, _) = listener.accept()?;
        forward(&from, &to, &mut packet)
    }

    fn forward(
        mut from: impl Read,
        mut to: impl Write,
        packet: &mut [u8; PACKET],
    ) -> anyhow::Result<()> {
        while from.read_exact(packet).is_ok() {
            // What a network function does to a packet, at the least.
            packet[8] = packet[8].wrapping_sub(1);
            to.write_all(packet)?;
        }
        Ok(())
    }

    /// Sends packets through all stages; packets per second.
    pub fn through(arguments: &SocketsPeerArguments) -> anyhow::Result<f64> {
        let mut children = Vec::new();
        let figure = row(arguments, &mut children);
        for mut child in children {
            if figure.is_err() {
                let _ = child.kill();
            }
            let _ = child.wait();
        }
        figure
    }

    fn row(arguments: &SocketsPeerArguments, children: &mut Vec<Child>) -> anyhow::Result<f64> {
        const STAGES: usize = 3;
        if arguments.transport == Transport::Pipe {
            let mut command = next_stage(arguments, "-")?;
            children.push(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?);
            let first = children[0].stdin.take().context("a pipe")?;
            for _ in 1..STAGES {
                let last = children.last_mut().and_then(|child| child.stdout.take());
                let from = Stdio::from(last.context("a pipe")?);
                children
                    .push(next_stage(arguments, "-")?.stdin(from).stdout(Stdio::piped()).spawn()?);
            }
            let last = children.last_mut().and_then(|child| child.stdout.take());
            return flow(arguments, first, last.context("a pipe")?);
        }
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut next = listener.local_addr()?.to_string();
        for _ in 0..STAGES {
            let mut child = next_stage(arguments, &next)?.stdout(Stdio::piped()).spawn()?;
            let mut said = BufReader::new(child.stdout.take().context("a stage's output")?);
            children.push(child);
            next.clear();
            said.read_line(&mut next)?;
            next.truncate(next.trim_end().len());
        }
        // Not before: a connection that has not asked yet when a program is started with redirections
        // stays the kernel's.
        let last = listener.accept()?.0;
        let first = TcpStream::connect(&next)?;
        first.set_nodelay(true)?;
        flow(arguments, first, last)
    }

    fn flow(
        arguments: &SocketsPeerArguments,
        mut first: impl Write + Send,
        mut last: impl Read,
    ) -> anyhow::Result<f64> {
        let rounds = arguments.rounds.max(1);
        std::thread::scope(|scope| {
            let began = Instant::now();
            scope.spawn(move || {
                for _ in 0..rounds {
                    if first.write_all(&[7; PACKET]).is_err() {
                        return;
                    }
                }
            });
            let mut packet = [0; PACKET];
            for _ in 0..rounds {
                last.read_exact(&mut packet)?;
            }
            #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
            let figure = rounds as f64 / began.elapsed().as_secs_f64();
            Ok(figure)
        })
    }
}

//! The other end: a process of its own, told over its standard input what to answer.

use std::cell::RefCell;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use beeline_fabric::Role;
use serde::{Deserialize, Serialize};

use super::end::{Card, End};
use crate::bench::turns::{core, online, pin_to};
use crate::exit::{Exit, Failure};

/// What goes to and fro.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Echo {
    /// A write, seen by whoever polls the memory.
    Write,
    /// A write with immediate, seen by polling the completion queue.
    Immediate,
    /// The same, both ends asleep until it comes.
    ImmediateAsleep,
    /// A send.
    Message,
}

/// What this process takes.
#[derive(Clone, Debug, clap::Args)]
pub struct PeerArguments {
    /// Device URL.
    pub url: String,
    /// Processor to stay on.
    pub core: usize,
    /// The other end is on the same processor.
    #[arg(long)]
    pub alone: bool,
}

/// What the peer is told, one JSON object a line.
#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Connect(Card),
    Answer { echo: Echo, rounds: u64 },
}

/// The peer's process.
pub fn run(arguments: &PeerArguments) -> Result<Exit, Failure> {
    serve(arguments)?;
    Ok(Exit::Done)
}

fn serve(arguments: &PeerArguments) -> anyhow::Result<()> {
    pin_to(arguments.core)?;
    let (mut end, card) = End::open(&arguments.url, arguments.alone)?;
    say(&serde_json::to_string(&card)?)?;
    for line in std::io::stdin().lock().lines() {
        match serde_json::from_str(&line?).context("an order")? {
            Order::Connect(card) => {
                end.connect(card, Role::Passive)?;
                end.warm()?;
                end.forget();
                say("ready")?;
            }
            Order::Answer { echo, rounds } => {
                end.ready(echo)?;
                say("ready")?;
                end.answer(echo, rounds)?;
                say("done")?;
            }
        }
    }
    Ok(())
}

fn say(line: &str) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

/// The peer as this process sees it; it ends when this is dropped.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    orders: RefCell<ChildStdin>,
    answers: RefCell<BufReader<ChildStdout>>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Peer {
    /// Starts the peer and connects to it.
    pub fn start(url: &str) -> anyhow::Result<(End, Self)> {
        let program = std::env::current_exe().context("the path of this program")?;
        let mut command = Command::new(program);
        command.args(["bench", "fabric-peer", url, &core(1).to_string(), "--quiet"]);
        let alone = online() < 2;
        if alone {
            command.arg("--alone");
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().context("starting the peer")?;
        let orders = RefCell::new(child.stdin.take().context("its standard input")?);
        let answers =
            RefCell::new(BufReader::new(child.stdout.take().context("its standard output")?));
        let peer = Self { child, orders, answers };
        let theirs = serde_json::from_str(&peer.line()?).context("the peer's card")?;
        let (mut end, mine) = End::open(url, alone)?;
        peer.order(&Order::Connect(mine))?;
        end.connect(theirs, Role::Active)?;
        peer.expect("ready")?;
        end.warm()?;
        end.forget();
        Ok((end, peer))
    }

    fn order(&self, order: &Order) -> anyhow::Result<()> {
        let mut orders = self.orders.borrow_mut();
        writeln!(orders, "{}", serde_json::to_string(order)?)?;
        Ok(orders.flush()?)
    }

    fn line(&self) -> anyhow::Result<String> {
        let mut line = String::new();
        let count = self.answers.borrow_mut().read_line(&mut line)?;
        ensure!(count > 0, "the peer ended; its message stands above");
        Ok(line.trim().to_owned())
    }

    fn expect(&self, wanted: &str) -> anyhow::Result<()> {
        let line = self.line()?;
        if line != wanted {
            bail!("the peer said {line:?}");
        }
        Ok(())
    }

    /// Has the peer answer `rounds` times; returns when it is ready to.
    pub fn answer(&self, echo: Echo, rounds: u64) -> anyhow::Result<()> {
        self.order(&Order::Answer { echo, rounds })?;
        self.expect("ready")
    }

    /// Returns when the peer has answered everything.
    pub fn done(&self) -> anyhow::Result<()> {
        self.expect("done")
    }
}

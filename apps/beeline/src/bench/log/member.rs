//! A member as a process: what fail-over ends.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use beeline_fabric::ConnectInfo;
use beeline_fabric_open::{
    Bootstrap, BootstrapConfig, Dialler, Incoming, OpenError, Service, open,
};
use beeline_replicated_log::{
    ClusterId, Config, Contact, Durability, Founding, Handle, Home, Layout, NO_SESSION, NodeId,
    Server, Transport, TransportError,
};

use rustix::process::{Signal, set_parent_process_death_signal};

use super::machine::Counter;
use crate::exit::{Exit, Failure, OrExit as _};

/// What the process is told.
#[derive(Clone, Debug, clap::Args)]
pub struct MemberArguments {
    /// Its folder.
    pub folder: PathBuf,
    /// Its id.
    pub id: u16,
    /// Bytes per slot.
    pub slot_bytes: u64,
    /// Where the members' logs answer.
    #[arg(long, value_delimiter = ',', required = true)]
    pub logs: Vec<SocketAddr>,
    /// Where this one's clients do.
    pub clients: SocketAddr,
    /// Provider of the members' fabric.
    #[arg(long, default_value = "shm")]
    pub provider: String,
}

const SERVICE: &str = "bench-log";

/// Dials over one provider.
#[derive(Debug)]
struct Dial(String);

impl Transport for Dial {
    fn exchange(
        &self,
        address: &str,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), TransportError> {
        let url = format!("{}://{address}", self.0);
        let dialler = Dialler::new(SERVICE, &url, Duration::from_secs(2));
        let dialled = dialler.and_then(|mut dialler| dialler.dial());
        dialled.and_then(|dialled| dialled.exchange(0, info, hello)).map_err(|error| {
            let address = address.to_owned();
            match error {
                OpenError::Refused { reason, .. } => TransportError::Refused { address, reason },
                error => TransportError::Unreachable { address, reason: error.to_string() },
            }
        })
    }
}

fn serve(handle: &Handle, stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut out = stream.try_clone()?;
    let limit = Duration::from_secs(2);
    for line in BufReader::new(stream).lines() {
        let line = line?;
        let answer = match line.split_once(' ') {
            Some(("put", bytes)) => {
                let command = vec![7; bytes.parse().unwrap_or(8)];
                match handle.call(NO_SESSION, 0, command, limit) {
                    Ok(_) => "ok".to_owned(),
                    Err(refusal) => format!("no {refusal}"),
                }
            }
            _ => {
                let status = handle.status();
                format!("{:?} {}", status.role, status.applied)
            }
        };
        out.write_all(format!("{answer}\n").as_bytes())?;
    }
    Ok(())
}

fn member(arguments: &MemberArguments) -> anyhow::Result<()> {
    // A benchmark that is killed leaves no members behind.
    set_parent_process_death_signal(Some(Signal::KILL)).context("following the benchmark")?;
    let contact = |at: &SocketAddr| Contact { address: at.to_string(), details: Vec::new() };
    if !Home::exists(&arguments.folder) {
        let members = arguments.logs.iter().enumerate();
        let founding = Founding {
            cluster: ClusterId(2),
            id: NodeId(arguments.id),
            layout: Layout::new(4096, arguments.slot_bytes)?,
            sessions: 64,
            members: members.map(|(id, at)| (NodeId(id as u16), contact(at))).collect(),
        };
        Home::create(&arguments.folder, &founding, Durability::Process)?;
    }
    let home = Home::open(&arguments.folder, Durability::Process)?;
    let own = arguments.logs.get(usize::from(arguments.id)).context("no such member")?;
    let device = open(&format!("{}://", arguments.provider))?;
    let dial = Arc::new(Dial(arguments.provider.clone()));
    let config = Config::new(Arc::clone(&device), dial, contact(own));
    let (_server, handle) = Server::start(home, config, Counter::default())?;
    let log = handle.clone();
    let incoming = move |incoming: Incoming| {
        let Incoming { peer, payload, reply, .. } = incoming;
        log.accept(peer, payload, move |answer| match answer {
            Ok((info, hello)) => reply.accept(&info, hello),
            Err(reason) => reply.refuse(reason),
        });
    };
    let service = Service {
        name: SERVICE.to_owned(),
        shards: 1,
        payload: Vec::new(),
        incoming: Box::new(incoming),
    };
    let bootstrap = BootstrapConfig { tcp: Some(*own), ..BootstrapConfig::default() };
    let _bootstrap = Bootstrap::listen(bootstrap, vec![device], vec![service])?;
    for stream in TcpListener::bind(arguments.clients)?.incoming() {
        let (handle, stream) = (handle.clone(), stream?);
        std::thread::spawn(move || serve(&handle, stream));
    }
    Ok(())
}

/// The hidden command.
pub fn run_member(arguments: &MemberArguments) -> Result<Exit, Failure> {
    member(arguments).or_exit(Exit::Failed)?;
    Ok(Exit::Done)
}

//! A member of a cluster: its log, and how it finds the others.

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use beeline_documents::replica::agreed::{Agreed, RegisterService};
use beeline_fabric::{ConnectInfo, Device};
use beeline_fabric_open::{Dialler, Incoming, OpenError, open};
use beeline_node::Node;
use beeline_node::replicated::LogHandle;
use beeline_replicated_log::{
    ClusterId, Config, Contact, Durability, Founding, Handle, Home, Layout, NodeId, Server,
    Transport, TransportError, boot,
};

use crate::config::ServeConfig;
use crate::config::values::{DurabilityWord, LogProviderWord, MemberWord};
use crate::exit::{Exit, Failure};

/// Name of the log in the bootstrap exchange.
pub const SERVICE: &str = "log";
/// One attempt to reach a member.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Sessions of the log's own, of which this service needs none.
const SESSIONS: usize = 16;

/// Where members that call are led to.
#[derive(Clone, Debug)]
pub struct LogDoor {
    handle: Handle,
}

/// Leads a member that calls to the log.
pub fn greet(door: &OnceLock<LogDoor>, incoming: Incoming) {
    let Some(LogDoor { handle }) = door.get() else {
        incoming.reply.refuse("this member is still opening its log; try again");
        return;
    };
    let Incoming { peer, payload, reply, .. } = incoming;
    handle.accept(peer, payload, move |answer| match answer {
        Ok((info, hello)) => reply.accept(&info, hello),
        Err(reason) => reply.refuse(reason),
    });
}

/// Finds members through their fabric doors.
#[derive(Debug)]
struct Doors {
    provider: &'static str,
    diallers: Mutex<HashMap<String, Dialler>>,
}

impl Transport for Doors {
    fn exchange(
        &self,
        address: &str,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), TransportError> {
        let failed = |error: OpenError| {
            let (address, reason) = (address.to_owned(), error.to_string());
            if error.is_retryable() {
                TransportError::Unreachable { address, reason }
            } else {
                TransportError::Refused { address, reason }
            }
        };
        let diallers = || self.diallers.lock().unwrap_or_else(PoisonError::into_inner);
        let known = diallers().remove(address);
        let mut dialler = match known {
            Some(dialler) => dialler,
            None => Dialler::new(SERVICE, &format!("{}://{address}", self.provider), TIMEOUT)
                .map_err(failed)?,
        };
        let exchanged =
            dialler.dial().and_then(|dialled| dialled.exchange(0, info, hello)).map_err(failed);
        diallers().insert(address.to_owned(), dialler);
        exchanged
    }
}

fn contact(member: &MemberWord) -> Contact {
    Contact { address: member.log.to_string(), details: member.resp.to_string().into_bytes() }
}

fn device(
    config: &ServeConfig,
    member: &MemberWord,
) -> Result<(&'static str, Arc<dyn Device>), Failure> {
    let all_here = config.peers.0.iter().all(|peer| peer.log.ip().is_loopback());
    let provider = match config.log_provider {
        LogProviderWord::Shm => "shm",
        LogProviderWord::Auto if all_here => "shm",
        LogProviderWord::Auto | LogProviderWord::Tcp => "tcp",
    };
    let url = match (provider, member.log.ip()) {
        ("tcp", std::net::IpAddr::V4(ip)) => format!("tcp://{ip}"),
        ("tcp", std::net::IpAddr::V6(ip)) => format!("tcp://[{ip}]"),
        _ => format!("{provider}://"),
    };
    let device = open(&url)
        .map_err(anyhow::Error::new)
        .with_context(|| format!("opening {url} for the log; another with --log-provider"))?;
    Ok((provider, device))
}

/// Opens this member's log, or founds it, and gives the node to it.
pub fn start(
    config: &ServeConfig,
    node: &Node,
    door: &OnceLock<LogDoor>,
    documents: &Arc<Agreed>,
) -> Result<Server, Failure> {
    let Some(member) = config.member() else {
        return Err(anyhow::anyhow!("the peers lack this node").into());
    };
    let durability = match config.durability {
        DurabilityWord::Power => Durability::Power,
        DurabilityWord::None | DurabilityWord::Process => Durability::Process,
    };
    let directory = config.data.join("log");
    if !Home::exists(&directory) {
        found(config, member, &directory, durability)?;
    }
    let home = Home::open(&directory, durability)
        .map_err(anyhow::Error::new)
        .with_context(|| format!("opening the log in {}", directory.display()))?;
    let (cluster, id) = (home.cluster().0, home.id().0);
    if cluster != config.cluster.0 || id != member.id {
        let message = anyhow::anyhow!(
            "{} belongs to member {id} of cluster {cluster:016x}, not to member {} of {:016x}: \
             name the right --data, --node-id and --cluster",
            directory.display(),
            member.id,
            config.cluster.0
        );
        return Err(Failure::new(Exit::Usage, message));
    }
    let payload_bytes = home.layout().max_payload_bytes();
    let (provider, device) = device(config, member)?;
    let transport = Arc::new(Doors { provider, diallers: Mutex::default() });
    // At every member, whether it has documents or not: all apply the same log.
    let register = RegisterService::open(node.handle(), Arc::clone(documents))
        .map_err(anyhow::Error::new)
        .context("reading what the cluster agreed on about its documents")?;
    let machine = node.machine(vec![Box::new(register)]).map_err(anyhow::Error::new)?;
    let (server, handle) =
        Server::start(home, Config::new(device, transport, contact(member)), machine)
            .map_err(anyhow::Error::new)
            .context("starting this member of the cluster")?;
    node.attach(Arc::new(LogHandle::new(handle.clone(), payload_bytes)));
    let opened = door.set(LogDoor { handle });
    assert!(opened.is_ok(), "a door leads to one log");
    Ok(server)
}

/// Has what an ended member wrote reach the disk, so that this machine may be started anew although
/// the level is `process`. Where that fails the member is not opened after such a start.
pub fn note_stop(config: &ServeConfig) {
    if config.durability == DurabilityWord::Power {
        return;
    }
    if let Err(error) = boot::note_stop(&config.data.join("log"), &[&config.data]) {
        tracing::warn!(%error, "not everything could be synchronised: a new start of this machine \
                                will count as a loss of this member's memory");
    }
}

fn found(
    config: &ServeConfig,
    member: &MemberWord,
    directory: &Path,
    durability: Durability,
) -> Result<(), Failure> {
    let layout = Layout::new(u64::from(config.log_slots.0), config.log_slot_size.0)
        .map_err(anyhow::Error::new)
        .context("log-slots and log-slot-size")?;
    let members = if config.join.0 {
        Vec::new()
    } else {
        config.peers.0.iter().map(|peer| (NodeId(peer.id), contact(peer))).collect()
    };
    let founding = Founding {
        cluster: ClusterId(config.cluster.0),
        id: NodeId(member.id),
        layout,
        sessions: SESSIONS,
        members,
    };
    Home::create(directory, &founding, durability)
        .map_err(anyhow::Error::new)
        .with_context(|| format!("founding the log in {}", directory.display()))?;
    Ok(())
}

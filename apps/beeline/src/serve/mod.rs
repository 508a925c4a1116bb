//! `beeline serve`: one node, until told to stop.
//!
//! Order matters: settings are checked, a killed predecessor is let end, then the doors are opened
//! (a taken port costs no recovery), then the pool is recovered, then the banner says what runs.
//! Stopping goes the other way; replies that are owed are sent, and what was acknowledged is
//! persisted before the process ends.

mod banner;
pub mod direct;
mod documents;
pub mod fabric;
mod metrics;
mod numa;
mod objects;
mod plan;
mod predecessor;
pub mod replicated;
mod services;
mod stop;
mod view;

use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_fabric_open::OpenError;
use beeline_kv::KvError;
use beeline_node::{Node, NodeError};
use beeline_pmem::PmemError;
use beeline_service::Services;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use banner::{Banner, Doors};
use fabric::FabricDoor;
use view::View;
pub use view::human_us;

use crate::config::ServeConfig;
use crate::exit::{Exit, Failure};
use crate::output::Output;
use crate::status::{Source, StatusServer};

/// How long a member that is told to stop tries to give the leadership away.
const HAND_OVER: Duration = Duration::from_secs(1);

/// The command.
pub fn run(config: &ServeConfig, output: Output) -> Result<Exit, Failure> {
    let started = Instant::now();
    raise_open_files(config);
    predecessor::wait_for_end(&config.data);
    let http =
        config.http_address.0.map(|address| listen(address, "--http-address")).transpose()?;
    let plan = plan::plan(config);
    let log_door = config.member().map(|_| Arc::new(OnceLock::new()));
    let objects = objects::Link::prepare(config)?;
    let direct = direct::Target::default();
    let documents = documents::Target::default();
    let fabric = config
        .fabric_address
        .0
        .map(|address| {
            let mut more: Vec<_> = objects.iter().map(objects::Link::service).collect();
            if !config.without.has(direct::SERVICE) {
                more.push(direct::door(&config.direct, &direct));
            }
            let served = config.documents.address.0.is_some()
                && (config.member().is_none() || config.is_documents_member());
            if served && !config.without.has(documents::SERVICE) {
                more.push(documents::door(&documents));
            }
            let (window, log) = (&config.fabric_window, log_door.clone());
            FabricDoor::open(address, plan.shards, window, log, more).map_err(fabric_failure)
        })
        .transpose()?;
    let node = Node::start(&plan).map_err(failure)?;
    let handle = node.handle();
    if let Some(door) = &fabric {
        door.serve(handle.clone());
    }
    let mut set = documents::Link::default();
    let log =
        log_door.map(|door| replicated::start(config, &node, &door, &set.agreed)).transpose()?;
    set.open(config, &node).map_err(failure)?;
    let doors = Doors {
        http: http.as_ref().and_then(|listener| listener.local_addr().ok()),
        fabric: fabric.as_ref().and_then(FabricDoor::address),
        providers: fabric.as_ref().map(FabricDoor::providers).unwrap_or_default(),
        rdma_flush: fabric.as_ref().and_then(FabricDoor::rdma_flush),
    };
    let address = fabric.as_ref().and_then(FabricDoor::address);
    let links = services::Links { fabric: address, objects, direct, documents, set };
    let services = Services::open(services::openings(config, &handle, links))
        .map_err(|failure| Failure::new(Exit::Failed, failure))?;
    let services = Arc::new(Mutex::new(services));
    let banner = Arc::new(Banner::new(&node, config, doors, &lock(&services)));
    let status = match http {
        Some(listener) => {
            let view =
                View::new(handle.clone(), Arc::clone(&banner), Arc::clone(&services), started);
            let view: Arc<dyn Source> = Arc::new(view);
            Some(StatusServer::start(listener, view)?)
        }
        None => None,
    };
    let (reasons, reason) = mpsc::channel();
    let shutdown: OwnedFd =
        handle.shutdown_requested().try_clone_to_owned().context("watching for SHUTDOWN")?;
    stop::watch(shutdown, &reasons)?;
    if output.json {
        output.object(&*banner)?;
    } else {
        output.line(banner.text())?;
    }
    let reason = reason.recv().context("the signal watcher ended")?;
    match handle.failure() {
        Some(failure) => tracing::error!(failure, "stopping"),
        None => tracing::info!(%reason, "stopping"),
    }
    if let Some(log) = &log
        && !log.hand_over(HAND_OVER)
        && config.peers.0.len() > 1
    {
        tracing::warn!("no other member of the cluster is known to lead");
    }
    drop(status);
    lock(&services).stop();
    drop(fabric);
    // Requests under way still reach the log, or whoever leads it now.
    node.stop();
    let is_member = log.is_some();
    let ended = log.map(beeline_replicated_log::Server::stop);
    if let Some(Err(error)) = ended {
        return Err(anyhow::Error::new(error).context("this member of the cluster stopped").into());
    }
    if is_member {
        replicated::note_stop(config);
    }
    outcome(handle.failure())
}

/// How `serve` ends after everything was stopped: a supervisor that starts nodes anew does so for one
/// that failed, not for one that was told to stop.
fn outcome(failure: Option<&str>) -> Result<Exit, Failure> {
    if let Some(failure) = failure {
        return Err(Failure::new(Exit::Failed, anyhow::anyhow!("the node stopped: {failure}")));
    }
    tracing::info!("stopped; everything acknowledged is persisted");
    Ok(Exit::Done)
}

/// The services, also where a thread that held them panicked.
fn lock(services: &Mutex<Services>) -> MutexGuard<'_, Services> {
    services.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Opens one door.
fn listen(address: SocketAddr, flag: &str) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).map_err(|error| {
        let advice = advice(error.kind(), flag);
        Failure::from(anyhow::anyhow!("cannot listen on {address}: {error}; {advice}"))
    })
}

/// Gives a fabric door that does not open its advice.
fn fabric_failure(error: OpenError) -> Failure {
    match error {
        OpenError::Listen { ref source, .. } => {
            let advice = advice(source.kind(), "--fabric-address");
            Failure::from(anyhow::anyhow!("{error}; {advice}"))
        }
        error => Failure::from(error),
    }
}

fn advice(kind: std::io::ErrorKind, flag: &str) -> String {
    match kind {
        std::io::ErrorKind::AddrInUse => {
            format!("another program listens there: stop it, or choose another with {flag}")
        }
        std::io::ErrorKind::PermissionDenied => {
            format!("ports below 1024 need rights; choose another with {flag}")
        }
        _ => format!("choose an address of this machine with {flag}"),
    }
}

/// Gives a failure to start its exit code and its advice.
fn failure(error: NodeError) -> Failure {
    let exit = match &error {
        NodeError::Pool { source, .. } | NodeError::Store { source: KvError::Pmem(source), .. } => {
            pool_exit(source)
        }
        NodeError::Store {
            source:
                KvError::Damaged { .. }
                | KvError::DamagedData { .. }
                | KvError::DamagedPool { .. }
                | KvError::Unfinished { .. },
            ..
        } => Exit::Corruption,
        _ => Exit::Failed,
    };
    let error = match &error {
        NodeError::Listen { source, .. } => {
            let advice = advice(source.kind(), "--resp-address");
            anyhow::anyhow!("{error}; {advice}")
        }
        // It says itself: or give another directory.
        NodeError::Pool { source: PmemError::Busy { .. }, .. } => {
            anyhow::anyhow!("{error} with --data")
        }
        _ => anyhow::Error::new(error),
    };
    Failure::new(exit, error)
}

fn pool_exit(error: &PmemError) -> Exit {
    match error {
        PmemError::Truncated { .. }
        | PmemError::Damaged { .. }
        | PmemError::Missing { .. }
        | PmemError::Foreign { .. } => Exit::Corruption,
        PmemError::Options { .. } | PmemError::CannotPromise { .. } => Exit::Usage,
        _ => Exit::Failed,
    }
}

/// Takes as many descriptors as the hard limit gives, and says so where that is not enough.
fn raise_open_files(config: &ServeConfig) {
    let limit = getrlimit(Resource::Nofile);
    if limit.current != limit.maximum {
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        if let Err(error) = setrlimit(Resource::Nofile, raised) {
            tracing::warn!(%error, "the limit on open files could not be raised");
        }
    }
    let clients = u64::from(config.resp.max_clients.0);
    if limit.maximum.is_some_and(|most| most < clients + 256) {
        tracing::warn!(
            limit = limit.maximum,
            clients,
            "fewer open files are allowed than --resp-max-clients may need; raise `ulimit -Hn`"
        );
    }
}

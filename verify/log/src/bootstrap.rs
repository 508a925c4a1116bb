//! How real members find each other: the bootstrap exchange, service `log`.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use beeline_fabric::ConnectInfo;
use beeline_fabric_open::{Dialler, Incoming, OpenError, Reply, Service};
use beeline_replicated_log::{Entrance, Handle, Transport, TransportError};

/// The service's name.
pub const SERVICE: &str = "log";
const PATIENCE: Duration = Duration::from_secs(2);

/// Dials members over one provider.
#[derive(Debug)]
pub struct ToMembers {
    provider: String,
    diallers: Mutex<HashMap<String, Arc<Mutex<Dialler>>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ToMembers {
    /// Over `provider` alone.
    #[must_use]
    pub fn new(provider: &str) -> Self {
        Self { provider: provider.to_owned(), diallers: Mutex::default() }
    }

    fn dialler(&self, address: &str) -> Result<Arc<Mutex<Dialler>>, OpenError> {
        let mut diallers = lock(&self.diallers);
        if let Some(dialler) = diallers.get(address) {
            return Ok(Arc::clone(dialler));
        }
        let url = format!("{}://{address}", self.provider);
        let dialler = Arc::new(Mutex::new(Dialler::new(SERVICE, &url, PATIENCE)?));
        diallers.insert(address.to_owned(), Arc::clone(&dialler));
        Ok(dialler)
    }
}

impl Transport for ToMembers {
    fn exchange(
        &self,
        address: &str,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), TransportError> {
        let dialled = self.dialler(address).and_then(|dialler| lock(&dialler).dial());
        dialled.and_then(|dialled| dialled.exchange(0, info, hello)).map_err(|error| {
            let address = address.to_owned();
            match error {
                OpenError::Refused { reason, .. } => TransportError::Refused { address, reason },
                error => TransportError::Unreachable { address, reason: error.to_string() },
            }
        })
    }
}

/// What the bootstrap service offers for a member: it gives what arrives to the log.
#[must_use]
pub fn service(handle: Handle) -> Service {
    offering(move |incoming| {
        let Incoming { peer, payload, reply, .. } = incoming;
        handle.accept(peer, payload, move |answer| tell(answer, reply));
    })
}

/// What it offers for all members of a host.
#[must_use]
pub fn host_service(entrance: Entrance) -> Service {
    offering(move |incoming| {
        let Incoming { peer, payload, reply, .. } = incoming;
        entrance.accept(peer, payload, move |answer| tell(answer, reply));
    })
}

fn tell(answer: Result<(ConnectInfo, Vec<u8>), String>, reply: Reply) {
    match answer {
        Ok((info, hello)) => reply.accept(&info, hello),
        Err(reason) => reply.refuse(reason),
    }
}

fn offering(incoming: impl Fn(Incoming) + Send + 'static) -> Service {
    let (name, shards, payload) = (SERVICE.to_owned(), 1, Vec::new());
    Service { name, shards, payload, incoming: Box::new(incoming) }
}

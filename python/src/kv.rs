//! The client of a node's durable keys: a connection for each thread, behind one object.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{ConnectInfo, Device, FabricError, QueuePairState};
use beeline_fabric_open::{Dialled, Dialler, OpenError};
use beeline_kv_client::{Client, ClientError, ClientOptions, ConnectError, Connector, PutOptions};
use pyo3::create_exception;
use pyo3::exceptions::{
    PyConnectionError, PyException, PyMemoryError, PyTimeoutError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::connections::{Connections, Named};

create_exception!(beeline, KvException, PyException, "A call on the durable keys failed.");
create_exception!(
    beeline,
    OutcomeUnknown,
    KvException,
    "No answer came: the change may have taken effect, or not."
);
create_exception!(beeline, ValueDamaged, KvException, "The stored bytes are not those put.");

/// The service's name in the bootstrap exchange.
const SERVICE: &str = "kv";
/// Longest key of a get.
const LONGEST_KEY: u32 = 4096;

thread_local! {
    static CLIENTS: RefCell<Connections<Client>> = RefCell::new(Connections::new());
}

fn bootstrap(url: &str, source: OpenError) -> ConnectError {
    ConnectError::Bootstrap { target: url.to_owned(), source: Box::new(source) }
}

/// Reaches a node. A provider whose agreement did not last is avoided at the next attempt.
#[derive(Debug)]
struct ToNode {
    url: String,
    dialler: Dialler,
    dialled: Option<(Dialled, Instant)>,
    /// An agreement over in less than this was none.
    trial: Duration,
}

impl ToNode {
    fn new(url: &str, timeout: Duration, avoid: Option<&str>) -> Result<Self, ConnectError> {
        let mut dialler =
            Dialler::new(SERVICE, url, timeout).map_err(|error| bootstrap(url, error))?;
        if let Some(why) = avoid {
            for provider in ["shm", "ntb", "verbs"] {
                dialler.avoid(provider, why);
            }
        }
        Ok(Self { url: url.to_owned(), dialler, dialled: None, trial: timeout })
    }
}

impl Connector for ToNode {
    fn device(&mut self) -> Result<Arc<dyn Device>, ConnectError> {
        match self.dialled.take() {
            Some((last, since)) if since.elapsed() < self.trial => {
                self.dialler.avoid(&last.provider, "the last connection over it did not last");
            }
            Some(_) => self.dialler.forgive(),
            None => {}
        }
        let dialled = self.dialler.dial().map_err(|error| bootstrap(&self.url, error))?;
        let device = Arc::clone(&dialled.device);
        self.dialled = Some((dialled, Instant::now()));
        Ok(device)
    }

    fn exchange(
        &mut self,
        shard: u16,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), ConnectError> {
        let Some((dialled, _)) = &self.dialled else {
            let state = QueuePairState::Init;
            let needed = "a device is agreed on before connection data is exchanged";
            return Err(FabricError::WrongState { state, needed }.into());
        };
        dialled.exchange(u32::from(shard), info, hello).map_err(|error| bootstrap(&self.url, error))
    }
}

fn exception(error: &ClientError) -> PyErr {
    let text = error.to_string();
    match error {
        ClientError::TimedOut { .. } => PyTimeoutError::new_err(text),
        error if error.is_outcome_unknown() => OutcomeUnknown::new_err(text),
        ClientError::Connect(_)
        | ClientError::Refused { .. }
        | ClientError::NotConnected { .. }
        | ClientError::Fabric(_) => PyConnectionError::new_err(text),
        ClientError::PoolFull => PyMemoryError::new_err(text),
        ClientError::Damaged => ValueDamaged::new_err(text),
        ClientError::KeyTooLong { .. }
        | ClientError::TooLarge { .. }
        | ClientError::LongerThanLogEntry { .. }
        | ClientError::NoSuchDatabase { .. } => PyValueError::new_err(text),
        _ => KvException::new_err(text),
    }
}

/// Value, version, and when it expires in milliseconds since the epoch, 0 for never.
type Found<'py> = Option<(Bound<'py, PyBytes>, u64, u64)>;

/// Where the next page of a scan begins, and the keys of this one.
type Page<'py> = (Option<(u16, u64)>, Vec<Bound<'py, PyBytes>>);

/// The durable keys of a node. Threads may share it: each connects by itself.
#[pyclass(frozen, module = "beeline._native")]
pub(crate) struct NativeKv {
    name: Named,
    server: String,
    options: ClientOptions,
}

impl NativeKv {
    fn connect(&self) -> Result<Client, ClientError> {
        let timeout = self.options.timeout;
        let connect = |avoid: Option<&str>| {
            let connector = ToNode::new(&self.server, timeout, avoid)?;
            Client::connect(Box::new(connector), self.options.clone())
        };
        match connect(None) {
            // What was agreed on does not work: over TCP it may.
            Err(ClientError::Fabric(_) | ClientError::Post(_)) => {
                connect(Some("the better provider failed"))
            }
            outcome => outcome,
        }
    }

    /// Works with this thread's connection, without the interpreter's lock.
    fn with<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Client) -> Result<R, ClientError> + Send,
    ) -> PyResult<R> {
        let ran = py.detach(|| {
            CLIENTS.with_borrow_mut(|clients| work(clients.of(&self.name, || self.connect())?))
        });
        ran.map_err(|error| exception(&error))
    }
}

#[pymethods]
impl NativeKv {
    #[new]
    fn new(py: Python<'_>, server: String, seconds: f64) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(seconds)
            .map_err(|_| PyValueError::new_err("a time-out is 0 or more seconds"))?;
        let longest_key_bytes = LONGEST_KEY;
        let options = ClientOptions { timeout, longest_key_bytes, ..ClientOptions::default() };
        let kv = Self { name: Named::new(), server, options };
        kv.with(py, |_| Ok(()))?;
        Ok(kv)
    }

    fn put(
        &self,
        py: Python<'_>,
        database: u8,
        key: PyBackedBytes,
        value: PyBackedBytes,
        expires_at_ms: u64,
    ) -> PyResult<u64> {
        let options = PutOptions { expires_at_ms, kind: 0 };
        self.with(py, |client| client.put(database, &key, &value, options))
    }

    fn get<'py>(&self, py: Python<'py>, database: u8, key: PyBackedBytes) -> PyResult<Found<'py>> {
        let found = self.with(py, |client| {
            let mut value = Vec::new();
            let info = client.get_into(database, &key, &mut value)?;
            Ok(info.map(|info| (value, info)))
        })?;
        Ok(found.map(|(value, info)| (PyBytes::new(py, &value), info.version, info.expires_at_ms)))
    }

    fn delete(&self, py: Python<'_>, database: u8, key: PyBackedBytes) -> PyResult<bool> {
        self.with(py, |client| client.delete(database, &key))
    }

    fn scan<'py>(
        &self,
        py: Python<'py>,
        database: u8,
        from: (u16, u64),
        count: u32,
    ) -> PyResult<Page<'py>> {
        let page = self.with(py, |client| client.scan(database, from, count))?;
        let keys = page.keys.iter().map(|(key, _)| PyBytes::new(py, key)).collect();
        Ok((page.next, keys))
    }

    /// What carries the bytes: "shm", "tcp", "verbs", "ntb".
    fn provider(&self, py: Python<'_>) -> PyResult<&'static str> {
        self.with(py, |client| Ok(client.provider()))
    }

    /// Ends this thread's connection; those of others end with their threads.
    fn close(&self) {
        CLIENTS.with_borrow_mut(|clients| clients.end(&self.name));
    }
}

impl Drop for NativeKv {
    fn drop(&mut self) {
        // A thread that ends has ended its connections.
        let _ = CLIENTS.try_with(|clients| clients.borrow_mut().end(&self.name));
    }
}

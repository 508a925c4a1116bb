//! The direct store's client: a connection for each thread, behind one object.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use beeline_kv_direct::{DirectClient, DirectClientError, Kind, LinkError, Request, Width};
use pyo3::create_exception;
use pyo3::exceptions::{PyConnectionError, PyException, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

create_exception!(beeline, DirectException, PyException, "A call on the direct store failed.");

thread_local! {
    /// This thread's connections, by the number of their object and the process they were made in.
    static CLIENTS: RefCell<HashMap<(u64, u32), DirectClient>> = RefCell::new(HashMap::new());
}

static NEXT: AtomicU64 = AtomicU64::new(0);

/// The map that some nodes hold together. Threads may share it: each connects by itself.
#[pyclass(frozen, module = "beeline._native")]
pub(crate) struct NativeDirect {
    number: u64,
    servers: Vec<String>,
    timeout: Duration,
}

/// Kind, key, function, bytes of an element, value or parameter, and whether its result is wanted.
type Operation = (u8, PyBackedBytes, u8, usize, PyBackedBytes, bool);

/// Status and bytes of each operation.
type Results = Vec<(u8, Option<Vec<u8>>)>;

fn exception(error: &DirectClientError) -> PyErr {
    let text = error.to_string();
    match error {
        DirectClientError::Link { source: LinkError::TimedOut { .. }, .. } => {
            PyTimeoutError::new_err(text)
        }
        DirectClientError::Link { .. } => PyConnectionError::new_err(text),
        DirectClientError::TooLong { .. } => PyValueError::new_err(text),
        _ => DirectException::new_err(text),
    }
}

fn request(operation: &Operation) -> PyResult<Request<'_>> {
    let (kind, key, function, width, value, wanted) = operation;
    let kind = Kind::of_code(*kind).filter(|kind| !kind.is_control());
    let kind = kind.ok_or_else(|| PyValueError::new_err("no such operation"))?;
    let width = Width::of_bytes(*width)
        .ok_or_else(|| PyValueError::new_err("an element has 1, 2, 4 or 8 bytes"))?;
    let request = match kind {
        Kind::Get => Request::get(key),
        Kind::Put => Request::put(key, value),
        Kind::Delete => Request::delete(key),
        _ => Request::with_function(kind, key, *function, width, value),
    };
    Ok(if *wanted { request } else { request.without_return() })
}

impl NativeDirect {
    /// Works with this thread's connection.
    fn with<R>(
        &self,
        work: impl FnOnce(&mut DirectClient) -> Result<R, DirectClientError>,
    ) -> Result<R, DirectClientError> {
        CLIENTS.with_borrow_mut(|clients| {
            // A child of a fork must not use its parent's connections.
            let name = (self.number, std::process::id());
            let client = match clients.entry(name) {
                std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
                std::collections::hash_map::Entry::Vacant(entry) => entry.insert(
                    beeline_direct_client::connect(self.servers.iter().cloned(), self.timeout)?,
                ),
            };
            work(client)
        })
    }
}

#[pymethods]
impl NativeDirect {
    #[new]
    fn new(py: Python<'_>, servers: Vec<String>, seconds: f64) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(seconds)
            .map_err(|_| PyValueError::new_err("a time-out is 0 or more seconds"))?;
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let direct = Self { number, servers, timeout };
        py.detach(|| direct.with(|_| Ok(()))).map_err(|error| exception(&error))?;
        Ok(direct)
    }

    fn execute<'py>(
        &self,
        py: Python<'py>,
        operations: Vec<Operation>,
    ) -> PyResult<Vec<(u8, Option<Bound<'py, PyBytes>>)>> {
        let requests = operations.iter().map(request).collect::<PyResult<Vec<_>>>()?;
        let mut results: Results = vec![(0, None); requests.len()];
        let ran = py.detach(|| {
            self.with(|client| {
                client.execute(&requests, &mut |index, status, bytes| {
                    results[index] = (status.code(), bytes.map(<[u8]>::to_vec));
                })
            })
        });
        ran.map_err(|error| exception(&error))?;
        let bytes = |bytes: Vec<u8>| PyBytes::new(py, &bytes);
        Ok(results.into_iter().map(|(status, found)| (status, found.map(bytes))).collect())
    }

    /// Ends this thread's connection; those of others end with their threads.
    fn close(&self) {
        CLIENTS.with_borrow_mut(|clients| clients.remove(&(self.number, std::process::id())));
    }
}

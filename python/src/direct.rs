//! The direct store's client: a connection for each thread, behind one object.

use std::cell::RefCell;
use std::time::Duration;

use beeline_kv_direct::{DirectClient, DirectClientError, Kind, LinkError, Request, Width};
use pyo3::create_exception;
use pyo3::exceptions::{PyConnectionError, PyException, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::connections::{Connections, Named};

create_exception!(beeline, DirectException, PyException, "A call on the direct store failed.");

thread_local! {
    static CLIENTS: RefCell<Connections<DirectClient>> = RefCell::new(Connections::new());
}

/// The map that some nodes hold together. Threads may share it: each connects by itself.
#[pyclass(frozen, module = "beeline._native")]
pub(crate) struct NativeDirect {
    name: Named,
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
            work(clients.of(&self.name, || {
                beeline_direct_client::connect(self.servers.iter().cloned(), self.timeout)
            })?)
        })
    }
}

#[pymethods]
impl NativeDirect {
    #[new]
    fn new(py: Python<'_>, servers: Vec<String>, seconds: f64) -> PyResult<Self> {
        let timeout = Duration::try_from_secs_f64(seconds)
            .map_err(|_| PyValueError::new_err("a time-out is 0 or more seconds"))?;
        let direct = Self { name: Named::new(), servers, timeout };
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
        CLIENTS.with_borrow_mut(|clients| clients.end(&self.name));
    }
}

impl Drop for NativeDirect {
    fn drop(&mut self) {
        // A thread that ends has ended its connections.
        let _ = CLIENTS.try_with(|clients| clients.borrow_mut().end(&self.name));
    }
}

//! The connection.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::Duration;

use beeline_objects::{Client, ClientOptions, ObjectId};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::buffers::{ReadBuffer, WriteBuffer};
use crate::errors::{bad_id, exception};

/// Identifiers as Python gives them: 20 bytes.
fn id(bytes: &[u8]) -> PyResult<ObjectId> {
    let bytes = bytes.try_into().map_err(|_| {
        PyValueError::new_err(format!("an object id has 20 bytes, not {}", bytes.len()))
    })?;
    Ok(ObjectId(bytes))
}

/// Seconds as Python gives them; nothing waits for ever.
fn timeout(seconds: Option<f64>) -> PyResult<Duration> {
    match seconds {
        None => Ok(Duration::MAX),
        Some(seconds) => Duration::try_from_secs_f64(seconds).map_err(|_| {
            PyValueError::new_err(format!("a time-out is 0 or more seconds, not {seconds}"))
        }),
    }
}

/// The fabric address of a node, `HOST:PORT`.
fn node(text: &str) -> PyResult<SocketAddr> {
    let found = text.to_socket_addrs()?.next().filter(|address| address.port() > 0);
    found.ok_or_else(|| PyValueError::new_err(format!("{text:?} is no address: write HOST:PORT")))
}

/// A connection to the store of this host's node.
#[pyclass(frozen, module = "beeline._native")]
pub(crate) struct NativeStore {
    client: Client,
}

#[pymethods]
impl NativeStore {
    #[new]
    #[pyo3(signature = (path, checksums=false))]
    fn new(py: Python<'_>, path: PathBuf, checksums: bool) -> PyResult<Self> {
        let options = ClientOptions { checksums, ..ClientOptions::default() };
        let client = py.detach(|| Client::connect_with(&path, options)).map_err(exception)?;
        Ok(Self { client })
    }

    /// A random identifier.
    #[staticmethod]
    fn random_id(py: Python<'_>) -> PyResult<Bound<'_, PyBytes>> {
        Ok(PyBytes::new(py, &ObjectId::random()?.0))
    }

    /// The identifier of 40 hexadecimal digits.
    #[staticmethod]
    fn parse_id<'py>(py: Python<'py>, text: &str) -> PyResult<Bound<'py, PyBytes>> {
        let id: ObjectId = text.parse().map_err(|error| bad_id(&error))?;
        Ok(PyBytes::new(py, &id.0))
    }

    fn create(
        &self,
        py: Python<'_>,
        object: &[u8],
        size: u64,
        metadata: &[u8],
        seconds: Option<f64>,
    ) -> PyResult<WriteBuffer> {
        let (object, patience) = (id(object)?, timeout(seconds)?);
        let buffer = py
            .detach(|| self.client.create(object, size, metadata, patience))
            .map_err(exception)?;
        Ok(WriteBuffer::new(buffer))
    }

    /// Stores `data`, one contiguous buffer.
    fn put(
        &self,
        py: Python<'_>,
        object: &[u8],
        data: &Bound<'_, PyAny>,
        metadata: &[u8],
        seconds: Option<f64>,
    ) -> PyResult<()> {
        let (object, patience) = (id(object)?, timeout(seconds)?);
        let put = |bytes: &[u8]| {
            py.detach(|| self.client.put(object, bytes, metadata, patience)).map_err(exception)
        };
        match data.cast::<PyBytes>() {
            // Nobody can change these.
            Ok(bytes) => put(bytes.as_bytes()),
            Err(_) => put(&pyo3::buffer::PyBuffer::<u8>::get(data)?.to_vec(py)?),
        }
    }

    fn get(
        &self,
        py: Python<'_>,
        object: &[u8],
        seconds: Option<f64>,
        fetch: bool,
    ) -> PyResult<ReadBuffer> {
        let (object, patience) = (id(object)?, timeout(seconds)?);
        let found = py
            .detach(|| {
                if fetch {
                    self.client.get_anywhere(object, patience)
                } else {
                    self.client.get(object, patience)
                }
            })
            .map_err(exception)?;
        Ok(ReadBuffer::new(py, found))
    }

    fn contains(&self, py: Python<'_>, object: &[u8]) -> PyResult<bool> {
        let object = id(object)?;
        py.detach(|| self.client.contains(object)).map_err(exception)
    }

    fn delete(&self, py: Python<'_>, object: &[u8]) -> PyResult<()> {
        let object = id(object)?;
        py.detach(|| self.client.delete(object)).map_err(exception)
    }

    fn subscribe(&self, py: Python<'_>, object: &[u8]) -> PyResult<()> {
        let object = id(object)?;
        py.detach(|| self.client.subscribe(object)).map_err(exception)
    }

    fn next_sealed<'py>(
        &self,
        py: Python<'py>,
        seconds: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let patience = timeout(seconds)?;
        let sealed = py.detach(|| self.client.next_sealed(patience)).map_err(exception)?;
        Ok(sealed.map(|id| PyBytes::new(py, &id.0)))
    }

    /// Brings objects here, from any node or from one; the text of the error in the place of each that did not come.
    fn fetch(
        &self,
        py: Python<'_>,
        objects: Vec<Vec<u8>>,
        seconds: Option<f64>,
        source: Option<&str>,
    ) -> PyResult<Vec<Option<String>>> {
        let ids = objects.iter().map(|object| id(object)).collect::<PyResult<Vec<_>>>()?;
        let patience = timeout(seconds)?;
        let node = source.map(node).transpose()?;
        let outcomes = py.detach(|| match node {
            Some(node) => self.client.fetch_from(&ids, node, patience),
            None => self.client.fetch(&ids, patience),
        });
        let outcomes = outcomes.map_err(exception)?;
        Ok(outcomes.into_iter().map(|outcome| outcome.err().map(|e| e.to_string())).collect())
    }

    fn pin(&self, py: Python<'_>, object: &[u8]) -> PyResult<()> {
        let object = id(object)?;
        py.detach(|| self.client.pin(object)).map_err(exception)
    }

    fn unpin(&self, py: Python<'_>, object: &[u8]) -> PyResult<()> {
        let object = id(object)?;
        py.detach(|| self.client.unpin(object)).map_err(exception)
    }

    fn list<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let entries = py.detach(|| self.client.list()).map_err(exception)?;
        entries
            .iter()
            .map(|entry| {
                let row = PyDict::new(py);
                row.set_item("id", PyBytes::new(py, &entry.id.0))?;
                row.set_item("sealed", entry.sealed)?;
                row.set_item("spilled", entry.spilled)?;
                row.set_item("pinned", entry.pinned)?;
                row.set_item("references", entry.references)?;
                row.set_item("size", entry.size)?;
                row.set_item("metadata_size", entry.metadata_size)?;
                row.set_item("age_seconds", entry.age_ms as f64 / 1000.0)?;
                Ok(row)
            })
            .collect()
    }

    #[getter]
    fn generation(&self) -> u64 {
        self.client.generation()
    }

    #[getter]
    fn is_connected(&self) -> bool {
        self.client.is_connected()
    }
}

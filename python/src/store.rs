//! The connection.

use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use beeline_objects::{Client, ClientOptions, Object, ObjectId, ObjectsError};
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

/// Longest time of one request, after which Python may take a signal: Ctrl-C ends a wait.
const TURN: Duration = Duration::from_millis(250);
/// Patience with a transfer that the caller gave no time for.
const TRANSFER: Duration = Duration::from_secs(60);

/// Seconds as Python gives them; nothing, and the infinite, waits for ever.
fn timeout(seconds: Option<f64>) -> PyResult<Duration> {
    match seconds {
        None | Some(f64::INFINITY) => Ok(Duration::MAX),
        Some(seconds) => Duration::try_from_secs_f64(seconds).map_err(|_| {
            PyValueError::new_err(format!("a time-out is 0 or more seconds, not {seconds}"))
        }),
    }
}

/// Makes a request that waits, turn by turn, without the interpreter's lock; a turn that its time
/// ended did nothing.
fn in_turns<T: Send>(
    py: Python<'_>,
    patience: Duration,
    request: impl Fn(Duration) -> Result<T, ObjectsError> + Sync,
) -> PyResult<T> {
    let mut left = patience;
    loop {
        let turn = left.min(TURN);
        left -= turn;
        match py.detach(|| request(turn)) {
            Err(ObjectsError::TimedOut { .. } | ObjectsError::Full { .. }) if !left.is_zero() => {
                py.check_signals()?;
            }
            outcome => return outcome.map_err(exception),
        }
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

impl NativeStore {
    /// The object if it is here, or came from another node: those are asked once.
    fn get_once(&self, py: Python<'_>, object: ObjectId) -> PyResult<Object> {
        match py.detach(|| self.client.get(object, Duration::ZERO)) {
            Err(ObjectsError::NotFound { .. }) => {}
            outcome => return outcome.map_err(exception),
        }
        let absent = || exception(ObjectsError::NotFound { id: object });
        let begun = Instant::now();
        loop {
            let turn = Instant::now();
            let outcomes = py.detach(|| self.client.fetch(&[object], TURN)).map_err(exception)?;
            match outcomes.into_iter().next() {
                Some(Err(ObjectsError::Unreachable { .. })) => {
                    // What failed before its time was over failed for good.
                    if turn.elapsed() < TURN || begun.elapsed() >= TRANSFER {
                        return Err(absent());
                    }
                    py.check_signals()?;
                }
                Some(Err(error)) => return Err(exception(error)),
                _ => break,
            }
        }
        // Where it had to give way already it comes once more.
        match py.detach(|| self.client.get_anywhere(object, TURN)) {
            Err(ObjectsError::TimedOut { .. }) => Err(absent()),
            outcome => outcome.map_err(exception),
        }
    }
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
        let buffer =
            in_turns(py, patience, |turn| self.client.create(object, size, metadata, turn))?;
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
            in_turns(py, patience, |turn| self.client.put(object, bytes, metadata, turn))
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
        let found = if fetch && patience.is_zero() {
            self.get_once(py, object)?
        } else if fetch {
            in_turns(py, patience, |turn| self.client.get_anywhere(object, turn))?
        } else {
            in_turns(py, patience, |turn| self.client.get(object, turn))?
        };
        Ok(ReadBuffer::new(py, found))
    }

    /// The object if it is in memory: nothing is waited for, also not the disk.
    fn get_in_memory(&self, py: Python<'_>, object: &[u8]) -> PyResult<ReadBuffer> {
        let object = id(object)?;
        let found = py.detach(|| self.client.get_in_memory(object)).map_err(exception)?;
        Ok(ReadBuffer::new(py, found))
    }

    /// The objects that are here now, at the price of one round trip for many; nothing in the place of
    /// each other.
    fn get_here(
        &self,
        py: Python<'_>,
        objects: Vec<[u8; 20]>,
    ) -> PyResult<Vec<Option<ReadBuffer>>> {
        let ids: Vec<ObjectId> = objects.into_iter().map(ObjectId).collect();
        let found = py.detach(|| self.client.get_all(&ids, Duration::ZERO)).map_err(exception)?;
        Ok(found.into_iter().map(|found| found.ok().map(|it| ReadBuffer::new(py, it))).collect())
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
        let mut left = timeout(seconds)?;
        loop {
            let turn = left.min(TURN);
            left -= turn;
            let sealed = py.detach(|| self.client.next_sealed(turn)).map_err(exception)?;
            match sealed {
                None if !left.is_zero() => py.check_signals()?,
                sealed => return Ok(sealed.map(|id| PyBytes::new(py, &id.0))),
            }
        }
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
        let mut left = timeout(seconds)?;
        let node = source.map(node).transpose()?;
        let mut texts: Vec<Option<String>> = vec![None; ids.len()];
        let mut missing: Vec<usize> = (0..ids.len()).collect();
        loop {
            let turn = left.min(TURN);
            left -= turn;
            let some: Vec<ObjectId> = missing.iter().map(|place| ids[*place]).collect();
            let begun = Instant::now();
            let outcomes = py.detach(|| match node {
                Some(node) => self.client.fetch_from(&some, node, turn),
                None => self.client.fetch(&some, turn),
            });
            let mut later = Vec::new();
            for (place, outcome) in missing.into_iter().zip(outcomes.map_err(exception)?) {
                texts[place] = outcome.err().map(|error| error.to_string());
                if texts[place].is_some() {
                    later.push(place);
                }
            }
            // What failed before its time was over failed for good.
            if later.is_empty() || left.is_zero() || begun.elapsed() < turn {
                return Ok(texts);
            }
            missing = later;
            py.check_signals()?;
        }
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

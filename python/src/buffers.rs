//! The memory of objects under Python's buffer protocol: `memoryview`, NumPy and Arrow look at it
//! in place.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use beeline_objects::{Buffer, Object, ObjectsError};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::exception;

/// Fills `view` with the memory at `start`.
fn fill(
    view: *mut ffi::Py_buffer,
    owner: *mut ffi::PyObject,
    (start, length): (*mut c_void, usize),
    read_only: bool,
    flags: c_int,
    py: Python<'_>,
) -> PyResult<()> {
    let length = ffi::Py_ssize_t::try_from(length)
        .map_err(|_| PyBufferError::new_err("the object is larger than Python's sizes"))?;
    // SAFETY: `view` is the structure Python asks to be filled, `owner` a live object, to which a
    // reference is taken; the memory stays mapped while the owner lives. A request for writing is
    // refused by the call itself where the memory is read-only.
    let outcome = unsafe {
        ffi::PyBuffer_FillInfo(view, owner, start, length, c_int::from(read_only), flags)
    };
    if outcome == 0 { Ok(()) } else { Err(PyErr::fetch(py)) }
}

/// A sealed object's data, read-only, in the store's own memory. Holds a reference in the store.
#[pyclass(frozen, module = "beeline._native")]
pub(crate) struct ReadBuffer {
    object: Object,
    metadata: Py<PyBytes>,
}

impl ReadBuffer {
    pub(crate) fn new(py: Python<'_>, object: Object) -> Self {
        let metadata = PyBytes::new(py, &object.metadata()).unbind();
        Self { object, metadata }
    }
}

#[pymethods]
impl ReadBuffer {
    /// The identifier, 20 bytes.
    #[getter]
    fn id<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.object.id().0)
    }

    /// What the creator said of the data.
    #[getter]
    fn metadata(&self, py: Python<'_>) -> Py<PyBytes> {
        self.metadata.clone_ref(py)
    }

    /// Where the data lies in this process.
    #[getter]
    fn address(&self) -> usize {
        self.object.as_ptr().addr()
    }

    fn __len__(&self) -> usize {
        self.object.len()
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let memory = {
            let object = &slf.get().object;
            (object.as_ptr().cast_mut().cast(), object.len())
        };
        fill(view, slf.as_ptr(), memory, true, flags, slf.py())
    }
}

/// An object that is being written. Without [`WriteBuffer::seal`] it is given up.
///
/// Frozen: a view may be released while another thread writes, and must always find its count.
#[pyclass(frozen, module = "beeline._native")]
pub(crate) struct WriteBuffer {
    buffer: Mutex<Option<Buffer>>,
    exports: AtomicUsize,
}

impl WriteBuffer {
    pub(crate) fn new(buffer: Buffer) -> Self {
        Self { buffer: Mutex::new(Some(buffer)), exports: AtomicUsize::new(0) }
    }

    /// The buffer, for this call alone. Nothing waits here: the holder may need the interpreter's lock.
    fn lock(&self) -> PyResult<MutexGuard<'_, Option<Buffer>>> {
        match self.buffer.try_lock() {
            Ok(buffer) => Ok(buffer),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => {
                Err(PyBufferError::new_err("another thread writes the buffer at this moment"))
            }
        }
    }

    /// The buffer, taken out to be sealed or given up.
    fn take(&self) -> PyResult<Option<Buffer>> {
        let exports = self.exports.load(Ordering::Acquire);
        if exports > 0 {
            return Err(PyBufferError::new_err(format!(
                "{exports} views of the buffer are in use: release them first"
            )));
        }
        Ok(self.lock()?.take())
    }
}

fn sealed() -> PyErr {
    PyValueError::new_err("the object is sealed: it cannot be written any more")
}

#[pymethods]
impl WriteBuffer {
    /// Makes the object immutable and visible. Every view of the buffer has to be released before.
    fn seal(&self, py: Python<'_>) -> PyResult<()> {
        let buffer = self.take()?.ok_or_else(sealed)?;
        py.detach(|| buffer.seal()).map_err(exception)
    }

    /// Gives the object up.
    fn abort(&self, py: Python<'_>) -> PyResult<()> {
        let buffer = self.take()?;
        py.detach(|| drop(buffer));
        Ok(())
    }

    /// Copies `data` to `offset`.
    fn write_at(&self, py: Python<'_>, offset: u64, data: &Bound<'_, PyAny>) -> PyResult<()> {
        let source = pyo3::buffer::PyBuffer::<u8>::get(data)?;
        let mut locked = self.lock()?;
        let buffer = locked.as_mut().ok_or_else(sealed)?;
        if !buffer.is_writable() {
            return Err(exception(ObjectsError::Forked));
        }
        let (length, size) = (source.len_bytes() as u64, buffer.len() as u64);
        if !source.is_c_contiguous() || offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(PyValueError::new_err(format!(
                "{length} bytes at {offset} do not fit an object of {size} bytes, or are not \
                 contiguous"
            )));
        }
        let (start, length) = (source.buf_ptr().expose_provenance(), source.len_bytes());
        // The copy may be long: other threads run meanwhile. `source` keeps its memory exported.
        py.detach(|| {
            let from: *const u8 = std::ptr::with_exposed_provenance(start);
            // SAFETY: the source is exported, and so readable, through the call.
            unsafe { buffer.write_from(offset, from, length) }
        })
        .map_err(exception)?;
        Ok(())
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.lock()?.as_ref().map_or(0, Buffer::len))
    }

    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let memory = {
            let mut locked = slf.get().lock()?;
            let buffer = locked
                .as_mut()
                .ok_or_else(|| PyBufferError::new_err("the object is sealed: get it to read it"))?;
            if !buffer.is_writable() {
                return Err(PyBufferError::new_err("the buffer belongs to the parent process"));
            }
            (buffer.as_mut_ptr().cast(), buffer.len())
        };
        fill(view, slf.as_ptr(), memory, false, flags, slf.py())?;
        slf.get().exports.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.fetch_sub(1, Ordering::AcqRel);
    }
}

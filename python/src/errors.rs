//! Exceptions: one class for each thing a caller may want to tell apart.

use beeline_objects::{BadId, ObjectsError};
use pyo3::exceptions::{
    PyConnectionError, PyException, PyMemoryError, PyOSError, PyTimeoutError, PyValueError,
};
use pyo3::prelude::*;
use pyo3::{PyTypeInfo, create_exception};

create_exception!(beeline, ObjectsException, PyException, "A call on the object store failed.");
create_exception!(beeline, ObjectNotFound, ObjectsException, "The object is not in the store.");
create_exception!(beeline, ObjectExists, ObjectsException, "There is an object of this id.");
create_exception!(beeline, ObjectDamaged, ObjectsException, "The bytes are not those sealed.");
create_exception!(beeline, StoreGone, ObjectsException, "The store ended; connect again.");
create_exception!(
    beeline,
    Forked,
    ObjectsException,
    "The connection belongs to the parent process; connect again."
);

/// Adds the exceptions to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("ObjectsError", ObjectsException::type_object(py))?;
    module.add("ObjectNotFound", ObjectNotFound::type_object(py))?;
    module.add("ObjectExists", ObjectExists::type_object(py))?;
    module.add("ObjectDamaged", ObjectDamaged::type_object(py))?;
    module.add("StoreGone", StoreGone::type_object(py))?;
    module.add("Forked", Forked::type_object(py))
}

/// The exception for an error of the store.
pub(crate) fn exception(error: ObjectsError) -> PyErr {
    let text = error.to_string();
    match error {
        ObjectsError::NotFound { .. } => ObjectNotFound::new_err(text),
        ObjectsError::Exists { .. } => ObjectExists::new_err(text),
        ObjectsError::Damaged { .. } => ObjectDamaged::new_err(text),
        ObjectsError::StoreGone => StoreGone::new_err(text),
        ObjectsError::Forked => Forked::new_err(text),
        ObjectsError::TimedOut { .. } => PyTimeoutError::new_err(text),
        ObjectsError::Full { .. } | ObjectsError::TooLarge { .. } => PyMemoryError::new_err(text),
        ObjectsError::Connect { .. } | ObjectsError::Unreachable { .. } => {
            PyConnectionError::new_err(text)
        }
        ObjectsError::System { .. } => PyOSError::new_err(text),
        ObjectsError::Outside { .. } => PyValueError::new_err(text),
        _ => ObjectsException::new_err(text),
    }
}

/// The exception for a text that is no identifier.
pub(crate) fn bad_id(error: &BadId) -> PyErr {
    PyValueError::new_err(error.to_string())
}

//! The native half of the Python package `beeline`.
//!
//! Place: `python`, an edge of the program like `apps`. What a value looks like in a store's memory
//! is decided in Python (`package/beeline/objects.py`); here are the calls, the buffers and the
//! exceptions.
//!
//! Invariants: the interpreter's lock is let go before a call waits for the store; memory that a
//! buffer exports stays mapped, and its object referenced, until the last export is released.

mod buffers;
mod connections;
mod direct;
mod errors;
mod kv;
mod store;

use pyo3::PyTypeInfo;
use pyo3::prelude::*;

/// The module `beeline._native`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<store::NativeStore>()?;
    module.add_class::<buffers::ReadBuffer>()?;
    module.add_class::<buffers::WriteBuffer>()?;
    module.add_class::<direct::NativeDirect>()?;
    module.add("DirectError", direct::DirectException::type_object(module.py()))?;
    module.add_class::<kv::NativeKv>()?;
    module.add("KvError", kv::KvException::type_object(module.py()))?;
    module.add("OutcomeUnknown", kv::OutcomeUnknown::type_object(module.py()))?;
    module.add("ValueDamaged", kv::ValueDamaged::type_object(module.py()))?;
    errors::add(module)
}

//! The executable specification of fabric.

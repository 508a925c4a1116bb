//! Reads a source file with its imports and compiles it.

use std::path::Path;

use beeline_ir::lower::Compiled;
use beeline_syntax::{Diagnostics, Sources};

/// A compiled file and what there is to say about it.
#[derive(Debug)]
pub struct Loaded {
    /// The files, for places in messages.
    pub sources: Sources,
    /// What is wrong.
    pub diagnostics: Diagnostics,
    /// The graph and the file's elements; not for running where the diagnostics failed.
    pub compiled: Compiled,
}

/// Reads and compiles `path`.
///
/// Errors: the file cannot be read, or is no UTF-8.
pub fn load(path: &Path) -> std::io::Result<Loaded> {
    let text = std::fs::read_to_string(path)?;
    Ok(compile(&path.display().to_string(), text, path.parent()))
}

/// Compiles a text; imports are looked for in the library and in `folder`.
#[must_use]
pub fn compile(name: &str, text: String, folder: Option<&Path>) -> Loaded {
    let mut sources = Sources::default();
    let mut diagnostics = Diagnostics::default();
    let file = sources.add(name, text);
    let mut loader = |wanted: &str| {
        // An import names a file beside its own, not one elsewhere on the host.
        if wanted.starts_with('/') || wanted.split('/').any(|part| part == "..") {
            return None;
        }
        std::fs::read_to_string(folder?.join(wanted)).ok()
    };
    let compiled = beeline_ir::compile(&mut sources, file, &mut loader, &mut diagnostics);
    Loaded { sources, diagnostics, compiled }
}

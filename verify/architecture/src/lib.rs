//! Tests of the structure itself: layers, tidiness, documents.
//!
//! Each check is a function from plain data to a list of problems, so that a test can plant a
//! violation and see it caught. The suites that run them over this workspace are in `tests/`.

#![forbid(unsafe_code)]

pub mod documents;
pub mod layers;
pub mod pages;
pub mod tidy;

use std::path::{Path, PathBuf};

/// The root of the workspace.
#[must_use]
pub fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).map_or_else(|| own.to_owned(), Path::to_owned)
}

/// A file of the workspace.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Relative to the root, with forward slashes.
    pub path: String,
    /// Its text.
    pub text: String,
}

impl SourceFile {
    /// A file for a planted violation.
    #[must_use]
    pub fn planted(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }
}

/// Every text file of the workspace whose name ends in one of `extensions`, build outputs and
/// data directories left out.
#[must_use]
pub fn files(extensions: &[&str]) -> Vec<SourceFile> {
    let root = root();
    let mut found = Vec::new();
    let mut directories = vec![root.clone()];
    while let Some(directory) = directories.pop() {
        let Ok(entries) = std::fs::read_dir(&directory) else { continue };
        for entry in entries.flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            let hidden = name.starts_with('.') && name != ".ci" && name != ".cargo";
            if hidden || name == "target" || name == "beeline-data" {
                continue;
            }
            if path.is_dir() {
                directories.push(path);
            } else if extensions.iter().any(|e| name.ends_with(e)) {
                let relative = path.strip_prefix(&root).unwrap_or(&path);
                let relative = relative.to_string_lossy().replace('\\', "/");
                if let Ok(text) = std::fs::read_to_string(&path) {
                    found.push(SourceFile { path: relative, text });
                }
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

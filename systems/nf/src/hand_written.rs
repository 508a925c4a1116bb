//! Hand-written Verilog in the place of an element (the specification's 3.11).
//!
//! An instance marked `verilog` has an element like any other, which stands for it in every other
//! back end; in Verilog the module of the element's name in `ELEMENT.v`, beside the source, takes its
//! place. Its ports are those that `beeline nf verilog` writes for the element.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use beeline_ir::graph::Graph;
use beeline_verilog::module::module_name;

/// A module that is not there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandWrittenError {
    /// No file.
    #[error("{element} is marked verilog, and {} cannot be read", path.display())]
    Missing {
        /// The element.
        element: String,
        /// Where its module should be.
        path: PathBuf,
    },
    /// No module.
    #[error("{} has no module named {element}", path.display())]
    NoModule {
        /// The element.
        element: String,
        /// The file.
        path: PathBuf,
    },
}

/// Texts by instance.
#[derive(Clone, Debug, Default)]
pub struct HandWritten(BTreeMap<String, String>);

impl HandWritten {
    /// Reads what a graph needs from a folder.
    ///
    /// Errors: a file or its module is missing.
    pub fn of(graph: &Graph, folder: &Path) -> Result<Self, HandWrittenError> {
        let mut all = BTreeMap::new();
        for node in graph.nodes.iter().filter(|node| node.verilog) {
            let element = node.element.name.clone();
            let path = folder.join(format!("{element}.v"));
            let Ok(text) = std::fs::read_to_string(&path) else {
                return Err(HandWrittenError::Missing { element, path });
            };
            let Some(text) = renamed(&text, &element, &module_name(&node.name)) else {
                return Err(HandWrittenError::NoModule { element, path });
            };
            all.insert(node.name.clone(), text);
        }
        Ok(Self(all))
    }

    /// The text of an instance, if it has one.
    #[must_use]
    pub fn text(&self, instance: &str) -> Option<String> {
        self.0.get(instance).cloned()
    }
}

/// The text with `module FROM` as `module TO`; none without it.
fn renamed(text: &str, from: &str, to: &str) -> Option<String> {
    let mut before = 0;
    while let Some(at) = text[before..].find("module").map(|at| before + at + "module".len()) {
        before = at;
        let rest = &text[at..];
        let name = rest.trim_start();
        let follows = |c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$');
        if rest.len() > name.len()
            && name.strip_prefix(from).is_some_and(|after| after.starts_with(follows))
            && !text[..at].ends_with("endmodule")
        {
            let start = text.len() - name.len();
            return Some(format!("{}{to}{}\n", &text[..start], &name[from.len()..]));
        }
    }
    None
}

//! `beeline nf check`.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use beeline_nf::load::{Loaded, load};

use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::{Output, complain, count};

/// Arguments of `check`.
#[derive(Debug, clap::Args)]
pub struct CheckArguments {
    /// Source file.
    pub file: PathBuf,
}

/// Runs it.
pub fn run(arguments: &CheckArguments, output: Output) -> Result<Exit, Failure> {
    let loaded = read(&arguments.file)?;
    if output.json {
        for record in loaded.diagnostics.records(&loaded.sources) {
            output.object(&record)?;
        }
    } else {
        complain_all(&loaded);
    }
    if loaded.diagnostics.failed() {
        return Ok(Exit::Failed);
    }
    if !output.json {
        let graph = &loaded.compiled.graph;
        let elements = loaded.compiled.elements.len() as u64;
        output.line(format!(
            "{}: {}, {}, {}",
            arguments.file.display(),
            count(elements, "element", "elements"),
            count(graph.nodes.len() as u64, "instance", "instances"),
            count(graph.channels.len() as u64, "channel", "channels"),
        ))?;
    }
    Ok(Exit::Done)
}

/// Reads and compiles a file.
pub fn read(file: &Path) -> Result<Loaded, Failure> {
    load(file).with_context(|| format!("cannot read {}", file.display())).or_exit(Exit::Usage)
}

/// Shows what is wrong on standard error.
pub fn complain_all(loaded: &Loaded) {
    let text = loaded.diagnostics.render(&loaded.sources);
    if !text.is_empty() {
        complain(text.trim_end());
    }
}

/// A file that compiles; what is wrong with it is shown.
pub fn compiled(file: &Path) -> Result<Loaded, Failure> {
    let loaded = read(file)?;
    complain_all(&loaded);
    if loaded.diagnostics.failed() {
        let error = anyhow::anyhow!("{} does not compile", file.display());
        return Err(Failure::new(Exit::Failed, error));
    }
    Ok(loaded)
}

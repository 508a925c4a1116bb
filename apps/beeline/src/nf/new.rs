//! `beeline nf new` and `beeline nf library`.

use std::path::PathBuf;

use anyhow::Context as _;
use beeline_ir::library;
use beeline_nf::functions::templates;
use serde::Serialize;

use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::{Output, table};

/// Arguments of `new`.
#[derive(Debug, clap::Args)]
pub struct NewArguments {
    /// Name; NAME.np is written here. A template's name gives that template.
    pub name: String,
    /// Template: counter, port, knock, firewall, balancer, generator, capture or pfabric. By default
    /// the one of that name, else port.
    #[arg(long, value_name = "TEMPLATE")]
    pub like: Option<String>,
}

/// `beeline nf new`.
pub fn run_new(arguments: &NewArguments, output: Output) -> Result<Exit, Failure> {
    let fits = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    if arguments.name.is_empty() || !arguments.name.chars().all(fits) {
        let error = anyhow::anyhow!("a name has letters, digits, - and _");
        return Err(Failure::new(Exit::Usage, error));
    }
    let template = match &arguments.like {
        None => templates::text(&arguments.name).or_else(|| templates::text("port")),
        Some(like) => templates::text(like),
    };
    let Some(template) = template else {
        let known: Vec<&str> = templates::names().map(|(name, _)| name).collect();
        let error = anyhow::anyhow!("the templates are {}", known.join(", "));
        return Err(Failure::new(Exit::Usage, error));
    };
    let path = PathBuf::from(format!("{}.np", arguments.name));
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&path)
        .with_context(|| format!("cannot make {}", path.display()))
        .or_exit(Exit::Failed)?;
    std::io::Write::write_all(&mut file, template.as_bytes())?;
    output.line(format!("{}: try `beeline nf check {}`", path.display(), path.display()))?;
    Ok(Exit::Done)
}

#[derive(Serialize)]
struct Listed {
    element: &'static str,
    file: &'static str,
}

/// `beeline nf library`.
pub fn run_library(output: Output) -> Result<Exit, Failure> {
    if output.json {
        for (element, file) in library::elements() {
            output.object(&Listed { element, file })?;
        }
        return Ok(Exit::Done);
    }
    let rows: Vec<Vec<String>> =
        library::elements().map(|(element, file)| vec![element.into(), file.into()]).collect();
    output.bytes(table(&["element", "file"], &rows).as_bytes())?;
    Ok(Exit::Done)
}

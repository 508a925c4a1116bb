//! A graph built for a chip in stages, each timed; what did not change is not made again (3.16).
//!
//! A debug build is for 50 MHz, a release build for 180, both fixed: no second placement looks for a
//! better clock. Each element's Verilog is synthesised by itself, and its counts are kept under the
//! digest of that text, so that the shell and unchanged elements are taken from the last build.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::time::Instant;

use beeline_passes::Options;
use beeline_verilog::COMMON;
use beeline_verilog::graph::design;
use beeline_verilog::module::{module, module_name};
use serde::{Deserialize, Serialize};

use crate::area::{Area, AreaError, area};
use crate::diff::{DiffError, all_hardware};
use crate::hand_written::{HandWritten, HandWrittenError};
use crate::load::Loaded;
use crate::sides::Plan;
use crate::sides::split::TooManyCrossings;

/// What a build is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// A slow clock: shallow pipelines, soon built.
    Debug,
    /// The clock of the chip's other parts.
    Release,
}

impl Mode {
    /// The fixed clock in megahertz.
    #[must_use]
    pub fn mhz(self) -> u32 {
        match self {
            Self::Debug => 50,
            Self::Release => 180,
        }
    }
}

/// A build failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The passes.
    #[error(transparent)]
    Hardware(#[from] DiffError),
    /// Channels to host elements.
    #[error(transparent)]
    Crossings(#[from] TooManyCrossings),
    /// Yosys.
    #[error(transparent)]
    Area(#[from] AreaError),
    /// Hand-written modules.
    #[error(transparent)]
    HandWritten(#[from] HandWrittenError),
    /// The folder.
    #[error("{}: {source}", path.display())]
    Folder {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
}

/// A stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Stage {
    /// Which.
    pub stage: &'static str,
    /// How long it took.
    pub milliseconds: f64,
    /// Parts made.
    pub made: usize,
    /// Parts taken from an earlier build.
    pub reused: usize,
}

/// What was built.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Built {
    /// For what.
    pub mode: Mode,
    /// The fixed clock.
    pub mhz: u32,
    /// In order.
    pub stages: Vec<Stage>,
    /// Each instance's area; none for hand-written ones.
    pub areas: Vec<Area>,
}

/// First line of a kept result; another version is made anew.
const FORMAT: &str = "beeline-nf-area 1";

/// Kept counts, with the text they belong to by its length: a digest alone may err.
#[derive(Serialize, Deserialize)]
struct Kept {
    length: usize,
    luts: u64,
    flip_flops: u64,
    memory_bits: u64,
}

fn digest(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    (FORMAT, COMMON, text).hash(&mut hasher);
    hasher.finish()
}

/// What an earlier build kept for a text; a file that is damaged counts as none.
fn kept(path: &Path, length: usize) -> Option<Kept> {
    let text = std::fs::read_to_string(path).ok()?;
    let json = text.strip_prefix(FORMAT)?;
    let kept: Kept = serde_json::from_str(json).ok()?;
    (kept.length == length).then_some(kept)
}

/// Builds a compiled graph into a folder: `design.v`, and `cache/` with what the next build needs.
/// `began` is when its compilation did.
///
/// Errors: see [`BuildError`].
pub fn build(
    loaded: &Loaded,
    began: Instant,
    (source, out): (&Path, &Path),
    mode: Mode,
) -> Result<Built, BuildError> {
    // Host elements stay on the host.
    let plan = Plan::of(&loaded.compiled.graph)?;
    let graph = plan.card();
    let mut stages = Vec::new();
    let mut from = began;
    let mut done = |stage: &'static str, made: usize, reused: usize| {
        let milliseconds = from.elapsed().as_secs_f64() * 1e3;
        from = Instant::now();
        stages.push(Stage { stage, milliseconds, made, reused });
    };
    let folder = |path: &Path, source| BuildError::Folder { path: path.to_owned(), source };
    done("compile", graph.nodes.len(), 0);
    let options = Options { period_ps: 1_000_000 / mode.mhz(), ..Options::default() };
    let hardware = all_hardware(graph, &options)?;
    done("schedule", hardware.len(), 0);
    let own = HandWritten::of(graph, source.parent().unwrap_or(Path::new(".")))?;
    let cache = out.join("cache");
    std::fs::create_dir_all(&cache).map_err(|error| folder(&cache, error))?;
    let file = out.join("design.v");
    std::fs::write(&file, design(graph, &hardware, &|name| own.text(name)))
        .map_err(|error| folder(&file, error))?;
    done("generate", 1, 0);
    let (mut areas, mut made, mut reused) = (Vec::new(), 0, 0);
    for (node, hardware) in hardware.iter().enumerate() {
        let instance = &graph.nodes[node].name;
        if own.text(instance).is_some() {
            continue;
        }
        // Instances of one element with equal parameters share what was made.
        let text = module(hardware, &module_name("element"));
        let path = cache.join(format!("{:016x}", digest(&text)));
        if let Some(kept) = kept(&path, text.len()) {
            let Kept { luts, flip_flops, memory_bits, .. } = kept;
            areas.push(Area { instance: instance.clone(), luts, flip_flops, memory_bits });
            reused += 1;
            continue;
        }
        let counted = area(graph, node, hardware)?;
        let Area { luts, flip_flops, memory_bits, .. } = counted;
        let kept = Kept { length: text.len(), luts, flip_flops, memory_bits };
        let json = serde_json::to_string(&kept).unwrap_or_default();
        // Whole or not at all: a build that is cut short leaves no half of a result.
        let fresh = path.with_extension("new");
        std::fs::write(&fresh, format!("{FORMAT}{json}"))
            .and_then(|()| std::fs::rename(&fresh, &path))
            .map_err(|error| folder(&path, error))?;
        areas.push(counted);
        made += 1;
    }
    done("synthesise", made, reused);
    Ok(Built { mode, mhz: mode.mhz(), stages, areas })
}

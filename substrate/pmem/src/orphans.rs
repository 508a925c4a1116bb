//! Files in `segments/` that no descriptor in use names, and what may be done with them.
//!
//! Most are what a crash leaves of an allocation or a free. But a table that lost a page names none
//! of the segments in it either, and their files are then all that is left of somebody's data. So a
//! file goes only where it is proved that it holds nothing: its descriptor says in both copies,
//! under its check, that it was used and freed; or every byte of it is zero, as no owner's segment
//! is. Anything else is set aside: left as it is, reported at every opening, its descriptor not
//! used again.

use std::fs::File;
use std::path::{Path, PathBuf};

use crate::backing;
use crate::core::Core;
use crate::error::PmemError;
use crate::layout::{self, State};
use crate::open::Opened;

/// One file, and its descriptor's number where its name has one.
#[derive(Debug)]
pub(crate) struct Orphan {
    pub(crate) path: PathBuf,
    pub(crate) id: Option<u32>,
    /// It holds nothing: it may be removed.
    pub(crate) empty: bool,
}

/// The orphans of a pool of `slots` descriptors, in order of name. Changes nothing.
///
/// Errors: the file system's.
pub(crate) fn find(opened: &Opened, segments: &Path, slots: u32) -> Result<Vec<Orphan>, PmemError> {
    let failed = |source| PmemError::from_call("readdir", segments, source);
    let mut orphans = Vec::new();
    for entry in std::fs::read_dir(segments).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let path = entry.path();
        match name.strip_suffix(".seg").and_then(|id| id.parse::<u32>().ok()) {
            Some(id) if opened.uses(id) => {}
            Some(id) => {
                let freed = id < slots && was_freed(&opened.core, id);
                let empty = freed || is_zero(&path)?;
                orphans.push(Orphan { path, id: Some(id), empty });
            }
            // Without a rename it never existed.
            None if name.ends_with(".new") => orphans.push(Orphan { path, id: None, empty: true }),
            None => {}
        }
    }
    orphans.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(orphans)
}

/// Both copies of the descriptor say that a segment was here and was freed.
fn was_freed(core: &Core, id: u32) -> bool {
    let offset = layout::descriptor_offset(id);
    let (first, second) = (core.table_load(offset), core.table_load(offset + 8));
    let freed = State::decode(first, id).is_some_and(|state| !state.in_use && state.generation > 0);
    first == second && freed
}

fn is_zero(path: &Path) -> Result<bool, PmemError> {
    let file = File::open(path).map_err(|source| PmemError::from_call("open", path, source))?;
    backing::is_zero(&file, path)
}

/// Notes what was found: what may go is removed where `remove` says so, the rest set aside.
///
/// Errors: the file system's.
pub(crate) fn settle(
    opened: &mut Opened,
    orphans: Vec<Orphan>,
    remove: bool,
) -> Result<(), PmemError> {
    for Orphan { path, id, empty } in orphans {
        if empty {
            if remove {
                std::fs::remove_file(&path)
                    .map_err(|source| PmemError::from_call("unlink", &path, source))?;
                opened.report.findings.orphans_removed += 1;
            }
            continue;
        }
        tracing::error!(
            file = %path.display(),
            "a segment file that no descriptor names holds data; it is left alone"
        );
        opened.report.findings.orphans_set_aside += 1;
        opened.report.set_aside.push(path);
        if let Some(id) = id
            && let Err(place) = opened.set_aside.binary_search(&id)
        {
            opened.set_aside.insert(place, id);
        }
    }
    Ok(())
}

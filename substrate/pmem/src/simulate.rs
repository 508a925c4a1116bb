//! Opening a simulated pool: fresh, or from what a crash left.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;

use crate::core::TABLE_OBJECT;
use crate::crash::{CrashImage, Objects, SimDevice};
use crate::error::PmemError;
use crate::layout::{self, Header};
use crate::memory::{Heap, Memory};
use crate::open::{Opened, POOL_FILE, Parts, build, fresh_table, mark_in_use, parse_head, recover};
use crate::options::{Findings, PoolKind, PoolOptions};
use crate::record::Recorder;

/// Bytes of a simulated pool are the same in every run, its identity included.
pub(crate) fn simulated(options: &PoolOptions) -> Result<(Opened, SimDevice), PmemError> {
    options.check(PoolKind::Sim)?;
    let slots = options.slots(options.segment_bytes)?;
    let header = Header {
        uuid: *b"simulated-pool-1",
        secret: *b"simulated secret",
        segment_bytes: options.segment_bytes,
        marks: true,
    };
    let mut table = vec![0; layout::file_bytes(slots)];
    for (offset, bytes) in fresh_table(&header, slots) {
        table[offset..offset + bytes.len()].copy_from_slice(&bytes);
    }
    let objects = Objects::from([(TABLE_OBJECT, Arc::new(table))]);
    let (mut opened, device) = open_objects(objects, options)?;
    opened.report.findings.created = true;
    opened.report.findings.clean = true;
    Ok((opened, device))
}

/// Opens a crash image: a new device whose record starts with it.
pub(crate) fn image(
    image: &CrashImage,
    options: &PoolOptions,
) -> Result<(Opened, SimDevice), PmemError> {
    let mut objects = (*image.objects).clone();
    for object in image.patches.iter().map(|patch| patch.0).collect::<BTreeSet<_>>() {
        if let Some(bytes) = image.object(object) {
            objects.insert(object, Arc::new(bytes));
        }
    }
    open_objects(objects, options)
}

fn open_objects(
    mut objects: Objects,
    options: &PoolOptions,
) -> Result<(Opened, SimDevice), PmemError> {
    let path = || PathBuf::from("sim").join(POOL_FILE);
    let table = objects.get(&TABLE_OBJECT).ok_or_else(|| PmemError::Missing { file: path() })?;
    let truncated = |expected_bytes: usize| PmemError::Truncated {
        file: path(),
        expected_bytes: expected_bytes as u64,
        found_bytes: table.len() as u64,
    };
    let head = table.first_chunk().ok_or_else(|| truncated(layout::file_bytes(1)))?;
    if head[..8] != layout::MAGIC {
        return Err(PmemError::Foreign { file: path() });
    }
    let (header, slots) = parse_head(&path(), head)?;
    if table.len() < layout::file_bytes(slots) {
        return Err(truncated(layout::file_bytes(slots)));
    }
    let options = &PoolOptions { segment_bytes: header.segment_bytes, ..options.clone() };
    options.check(PoolKind::Sim)?;
    let capacity_slots = options.slots(header.segment_bytes)?.min(slots);
    let recorder = Arc::new(Recorder::default());
    let parts = Parts {
        kind: PoolKind::Sim,
        reason: "a simulated pool was asked for".to_owned(),
        header,
        table: Memory::Heap(Heap::copy_of(table)),
        table_file: path(),
        directory: None,
        recorder: Some(Arc::clone(&recorder)),
        lock: None,
        findings: Findings::default(),
        capacity_slots,
    };
    let mut opened = build(parts, options);
    recover(&mut opened, slots, |core, id| {
        let file = core.segment_file(id);
        let expected_bytes = u64::from(core.segment_bytes);
        let bytes = objects.get(&(id + 1)).ok_or(PmemError::Missing { file: file.clone() })?;
        let found_bytes = bytes.len() as u64;
        if found_bytes < expected_bytes {
            return Err(PmemError::Truncated { file, expected_bytes, found_bytes });
        }
        Ok(Memory::Heap(Heap::copy_of(bytes)))
    })?;
    mark_in_use(&opened.core)?;
    let orphan = |object: &u32| {
        let id = object.wrapping_sub(1);
        *object != TABLE_OBJECT && !opened.uses(id)
    };
    let orphans: Vec<u32> = objects.keys().copied().filter(orphan).collect();
    opened.report.findings.orphans_removed = orphans.len() as u32;
    for object in orphans {
        objects.remove(&object);
    }
    Ok((opened, SimDevice::new(recorder, objects)))
}

//! How much a synchronisation writes. Alone in its binary: what is counted is the process's.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::Write as _;
use std::time::{Duration, Instant};

use beeline_pmem::{Durability, PmemError, Pool, PoolKind, PoolOptions};

const SEGMENT: u32 = 64 << 20;
const STORES: usize = 32;
const PAGE_BYTES: u64 = 4096;

/// Bytes of pages this process made dirty in files on disks.
fn written_bytes() -> u64 {
    let text = std::fs::read_to_string("/proc/self/io").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("write_bytes: ")).unwrap();
    line.parse().unwrap()
}

#[test]
fn a_small_store_to_a_prepared_segment_writes_its_page_and_not_its_neighbours() {
    let directory = tempfile::tempdir().unwrap();
    let before = written_bytes();
    let mut probe = tempfile::tempfile_in(directory.path()).unwrap();
    probe.write_all(&[1; PAGE_BYTES as usize]).unwrap();
    probe.sync_all().unwrap();
    if written_bytes() == before {
        let _ = writeln!(std::io::stderr(), "skipped: this file system has no cache to write back");
        return;
    }
    let options = PoolOptions {
        kind: Some(PoolKind::File),
        durability: Durability::Power,
        segment_bytes: SEGMENT,
        capacity_bytes: 4 * u64::from(SEGMENT),
        prepared_segments: 1,
        ..PoolOptions::default()
    };
    let pool = match Pool::create(directory.path(), &options) {
        // Nothing is written there: the folder for temporary files is in memory.
        Err(PmemError::VolatileFileSystem { .. }) => return,
        made => made.unwrap(),
    };
    let deadline = Instant::now() + Duration::from_secs(20);
    while pool.prepared_segments() == 0 {
        assert!(Instant::now() < deadline, "a segment is prepared");
        std::thread::sleep(Duration::from_millis(2));
    }
    let segment = pool.allocate().unwrap();
    while pool.prepared_segments() == 0 {
        assert!(Instant::now() < deadline, "the one taken is made up for");
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut persister = pool.persister();
    let before = written_bytes();
    for store in 0..STORES {
        let offset = store * (SEGMENT as usize / STORES) + 100;
        segment.store(offset, b"small");
        persister.flush(&segment, offset, 5);
        persister.fence().unwrap();
    }
    let written = written_bytes() - before;
    // Room for the file system's own pages, and for others' of this process.
    let most = 4 * STORES as u64 * PAGE_BYTES;
    assert!(written >= STORES as u64 * PAGE_BYTES, "{written} bytes: the disk was not written");
    assert!(written <= most, "{STORES} small stores wrote {written} bytes, not {most} at most");
}

//! What a pool makes of a table that lost a page, of copies with holes, of a disk that fails, and of
//! a replacement that is cut off.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;
#[path = "common/disks.rs"]
mod disks;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;

use beeline_env::{FaultAction, fault};
use beeline_os::MemoryObject;
use beeline_pmem::{Durability, PmemError, Pool, PoolKind, PoolOptions, Segment};
use common::file_kind;
use disks::{FailingDisk, Tmpfs};

const SEGMENT: u32 = 64 << 10;

fn options() -> PoolOptions {
    PoolOptions {
        kind: Some(file_kind()),
        segment_bytes: SEGMENT,
        capacity_bytes: 64 * u64::from(SEGMENT),
        ..PoolOptions::default()
    }
}

/// A closed pool of three segments with something in each.
fn closed_pool(directory: &Path, options: &PoolOptions) {
    let pool = Pool::create(directory, options).unwrap();
    for value in 1..=3 {
        pool.allocate().unwrap().store_u64(64, value);
    }
    pool.store_root_word(3, 77);
}

fn overwrite(path: &Path, offset: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset).unwrap();
}

/// Makes a pool look as builds left it that wrote no marks.
fn without_marks(pool_file: &Path) {
    let mut header = std::fs::read(pool_file).unwrap()[..128].to_vec();
    header[56..60].fill(0);
    let check = beeline_wire::crc32c(&header[..124]);
    header[124..].copy_from_slice(&check.to_le_bytes());
    overwrite(pool_file, 0, &header);
    for page in 1..6 {
        overwrite(pool_file, page * 4096 + 4032, &[0; 16]);
    }
}

fn files(directory: &Path) -> Vec<Vec<u8>> {
    (0..3).map(|id| std::fs::read(directory.join(format!("segments/{id}.seg"))).unwrap()).collect()
}

#[test]
fn a_page_of_zeros_in_the_table_costs_no_segment_file() {
    for marks in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let directory = directory.path();
        closed_pool(directory, &options());
        let table = directory.join("pool.bee");
        if !marks {
            without_marks(&table);
        }
        assert_eq!(Pool::open(directory, &options()).unwrap().segments().len(), 3);
        let before = files(directory);
        overwrite(&table, 8192, &[0; 4096]);
        let looked_at = Pool::inspect(directory).unwrap().report();
        // Whatever is done with the pool, and however often it is opened, the bytes stay.
        for _ in 0..2 {
            let pool = Pool::open(directory, &options()).unwrap();
            let report = pool.report();
            assert_eq!(report.findings.damaged_pages, u32::from(marks));
            assert_eq!(report.findings.damaged_pages, looked_at.findings.damaged_pages);
            if marks {
                assert_eq!(report.findings.damaged_descriptors, 16);
            } else {
                assert_eq!(report.findings.orphans_set_aside, 3);
                assert_eq!(report.set_aside, looked_at.set_aside);
                assert!(report.set_aside[2].ends_with("segments/2.seg"));
            }
            assert!(report.findings.damage() && looked_at.findings.damage());
            assert_eq!(report.findings.orphans_removed, 0);
            while let Ok(segment) = pool.allocate() {
                assert!(segment.id() > 2, "the descriptor of a file set aside is used again");
                segment.store_u64(64, u64::MAX);
            }
            pool.segments().into_iter().for_each(|segment| pool.free(segment).unwrap());
            drop(pool);
            assert_eq!(files(directory), before);
        }
    }
}

#[test]
fn a_root_page_of_zeros_is_damage() {
    let directory = tempfile::tempdir().unwrap();
    closed_pool(directory.path(), &options());
    overwrite(&directory.path().join("pool.bee"), 4096, &[0; 4096]);
    let report = Pool::open(directory.path(), &options()).unwrap().report();
    assert_eq!(report.findings.damaged_pages, 1);
    assert!(report.findings.damage());
}

#[test]
fn one_damaged_copy_of_a_pages_mark_is_mended_and_counted() {
    let directory = tempfile::tempdir().unwrap();
    closed_pool(directory.path(), &options());
    overwrite(&directory.path().join("pool.bee"), 8192 + 4032, &[1; 8]);
    let report = Pool::open(directory.path(), &options()).unwrap().report();
    assert_eq!((report.findings.healed_descriptors, report.findings.damaged_pages), (1, 0));
    let report = Pool::open(directory.path(), &options()).unwrap().report();
    assert!(!report.findings.damage());
}

#[test]
fn a_pool_that_grew_has_marks_on_its_new_pages() {
    let directory = tempfile::tempdir().unwrap();
    closed_pool(directory.path(), &options());
    let more = PoolOptions { capacity_bytes: 200 * u64::from(SEGMENT), ..options() };
    assert!(!Pool::open(directory.path(), &more).unwrap().report().findings.damage());
    assert!(!Pool::open(directory.path(), &options()).unwrap().report().findings.damage());
    overwrite(&directory.path().join("pool.bee"), 8192 + 6 * 4096, &[0; 4096]);
    let findings = Pool::open(directory.path(), &options()).unwrap().report().findings;
    assert_eq!((findings.damaged_pages, findings.damaged_descriptors), (1, 16));
}

#[test]
fn a_pool_that_could_not_be_opened_is_not_marked_as_closed_in_good_order() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    closed_pool(directory, &options());
    // As a crash leaves it.
    overwrite(&directory.join("pool.bee"), 5120, &[0; 16]);
    let segment = directory.join("segments/1.seg");
    let away = directory.join("away");
    std::fs::rename(&segment, &away).unwrap();
    assert!(matches!(Pool::open(directory, &options()), Err(PmemError::Missing { .. })));
    std::fs::rename(&away, &segment).unwrap();
    assert!(!Pool::open(directory, &options()).unwrap().report().findings.clean);
    // Nor does a failure take the mark away, or mend what the next to open is to be told of.
    let word = 8192 + 256 + 64;
    overwrite(&directory.join("pool.bee"), word, &[9; 8]);
    std::fs::rename(directory.join("segments/2.seg"), &away).unwrap();
    assert!(Pool::open(directory, &options()).is_err());
    std::fs::rename(&away, directory.join("segments/2.seg")).unwrap();
    let findings = Pool::open(directory, &options()).unwrap().report().findings;
    assert!(findings.clean && findings.unequal_words == 1, "{findings:?}");
}

#[test]
fn a_copy_with_holes_is_refused_on_a_full_disk_and_whole_when_there_is_room() {
    let Some(disk) = Tmpfs::mount("size=2m") else { return };
    let directory = disk.0.path().join("data");
    let on_tmpfs = PoolOptions { kind: Some(PoolKind::File), ..options() };
    closed_pool(&directory, &on_tmpfs);
    // As `cp --sparse=always` makes it.
    let segment = directory.join("segments/1.seg");
    let bytes = std::fs::read(&segment).unwrap();
    std::fs::remove_file(&segment).unwrap();
    let copy = std::fs::File::create(&segment).unwrap();
    copy.set_len(SEGMENT.into()).unwrap();
    copy.write_all_at(&bytes[..4096], 0).unwrap();
    drop(copy);
    let filler = disk.0.path().join("filler");
    let mut full = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut full, &[1; 4096]).is_ok() {}
    let error = Pool::open(&directory, &on_tmpfs).unwrap_err();
    assert!(matches!(&error, PmemError::NoSpace { file } if *file == segment), "{error}");
    drop(full);
    std::fs::remove_file(&filler).unwrap();
    let pool = Pool::open(&directory, &on_tmpfs).unwrap();
    let filled = rustix::fs::stat(&segment).unwrap().st_blocks;
    assert!(filled as u64 * 512 >= u64::from(SEGMENT));
    assert_eq!(pool.segment(1).unwrap().load_u64(64), 2);
}

fn power() -> PoolOptions {
    PoolOptions { kind: Some(PoolKind::File), durability: Durability::Power, ..options() }
}

/// Stores into pages that lie apart, so that each is written by itself: a loop device calls a write
/// that was cut short a good one, and the device may have room for a page still.
fn dirty(segment: &Segment) {
    for page in (1..15).step_by(3) {
        segment.store(page * 4096, &[7; 4096]);
    }
}

#[test]
fn a_peer_that_asks_first_does_not_take_the_owners_error_away() {
    let Some(disk) = FailingDisk::mount() else { return };
    let pool = Pool::create(&disk.path().join("data"), &power()).unwrap();
    let segment = pool.allocate().unwrap();
    let mut persister = pool.persister();
    let of_peer = segment.descriptor().unwrap();
    disk.fail();
    dirty(&segment);
    persister.flush(&segment, 0, SEGMENT as usize);
    assert!(rustix::fs::fdatasync(&*of_peer).is_err(), "the peer hears of it");
    assert!(
        matches!(persister.fence(), Err(PmemError::SyncFailed { .. })),
        "and so does the owner"
    );
    // For good, for everybody, though the kernel has said all it will say.
    assert!(persister.fence().is_err());
    assert!(pool.allocate().is_err());
    assert!(segment.persist(0, 8).is_err());
}

#[test]
fn no_shard_is_told_that_bytes_are_persisted_when_another_heard_that_they_are_not() {
    let Some(disk) = FailingDisk::mount() else { return };
    let pool = Pool::create(&disk.path().join("data"), &power()).unwrap();
    let segment = pool.allocate().unwrap();
    disk.fail();
    dirty(&segment);
    let start = std::sync::Barrier::new(2);
    let outcomes: Vec<bool> = std::thread::scope(|scope| {
        let shard = || {
            let mut persister = pool.persister();
            persister.flush(&segment, 0, SEGMENT as usize);
            start.wait();
            persister.fence().is_ok()
        };
        let shards = [scope.spawn(shard), scope.spawn(shard)];
        shards.map(|shard| shard.join().unwrap()).to_vec()
    });
    assert_eq!(outcomes, [false, false]);
}

#[test]
fn opening_at_power_persists_what_was_stored_at_process() {
    let Some(disk) = FailingDisk::mount() else { return };
    let directory = disk.path().join("data");
    let process = PoolOptions { durability: Durability::Process, ..power() };
    let pool = Pool::create(&directory, &process).unwrap();
    let segment = pool.allocate().unwrap();
    rustix::fs::fsync(&*segment.descriptor().unwrap()).unwrap();
    disk.fail();
    dirty(&segment);
    drop((segment, pool));
    let error = Pool::open(&directory, &power()).unwrap_err();
    assert!(
        matches!(&error, PmemError::SyncFailed { file, .. } if file.ends_with("segments/0.seg")),
        "{error}"
    );
}

/// One test, because fault points are the process's.
#[test]
fn a_replacement_cut_off_at_any_step_leaves_memory_and_name_with_one_file() {
    for durability in [Durability::Process, Durability::Power] {
        for skip in 0..4 {
            let directory = tempfile::tempdir().unwrap();
            let options = PoolOptions { durability, ..options() };
            let pool = Pool::create(directory.path(), &options).unwrap();
            let segment = pool.allocate().unwrap();
            segment.store_u64(0, 1);
            let armed = fault::arm("pmem.replace.step", FaultAction::Fail, skip);
            assert!(segment.replace_backing().is_err());
            drop(armed);
            segment.store_u64(8, 2);
            drop((segment, pool));
            let pool = Pool::open(directory.path(), &options).unwrap();
            let segment = pool.segment(0).unwrap();
            assert_eq!((segment.load_u64(0), segment.load_u64(8)), (1, 2), "{durability} {skip}");
            let names = std::fs::read_dir(directory.path().join("segments")).unwrap().count();
            assert_eq!(names, 1, "{durability} {skip}");
        }
    }
}

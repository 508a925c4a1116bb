//! What can be wrong with a pool's directory, and what the pool says then.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stderr)]

mod common;
#[path = "common/disks.rs"]
mod disks;

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use beeline_pmem::{Durability, PmemError, Pool, PoolKind, PoolOptions};
use common::file_kind;
use disks::Tmpfs;

const SEGMENT: u32 = 64 << 10;

fn options() -> PoolOptions {
    PoolOptions {
        kind: Some(file_kind()),
        segment_bytes: SEGMENT,
        capacity_bytes: 64 * u64::from(SEGMENT),
        ..PoolOptions::default()
    }
}

/// For folders on a tmpfs, which is never DAX.
fn on_tmpfs() -> PoolOptions {
    PoolOptions { kind: Some(PoolKind::File), ..options() }
}

/// A closed pool of three segments.
fn closed_pool() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let pool = Pool::create(directory.path(), &options()).unwrap();
    for _ in 0..3 {
        pool.allocate().unwrap();
    }
    directory
}

fn open_error(directory: &Path) -> PmemError {
    Pool::open(directory, &options()).expect_err("the pool cannot be opened")
}

fn overwrite(path: &Path, offset: u64, bytes: &[u8]) {
    let file = OpenOptions::new().write(true).open(path).unwrap();
    file.write_all_at(bytes, offset).unwrap();
}

fn flip(path: &Path, offset: u64, bit: u32) {
    let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1 << bit], offset).unwrap();
}

#[test]
fn a_directory_without_a_pool_is_named() {
    let directory = tempfile::tempdir().unwrap();
    assert!(
        matches!(open_error(directory.path()), PmemError::Missing { file } if file.ends_with("pool.bee"))
    );
}

#[test]
fn a_second_creation_is_refused() {
    let directory = closed_pool();
    assert!(matches!(Pool::create(directory.path(), &options()), Err(PmemError::Exists { .. })));
    assert_eq!(Pool::open_or_create(directory.path(), &options()).unwrap().segments().len(), 3);
}

#[test]
fn segments_whose_table_was_lost_are_not_taken_for_orphans() {
    let directory = closed_pool();
    std::fs::remove_file(directory.path().join("pool.bee")).unwrap();
    assert!(matches!(
        Pool::open_or_create(directory.path(), &options()),
        Err(PmemError::Exists { .. })
    ));
    assert!(directory.path().join("segments/2.seg").exists());
}

#[test]
fn a_foreign_file_is_left_alone() {
    for bytes in [&b"#!/bin/sh\necho hello, this is something else altogether\n"[..], b"", b"BEE"] {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool.bee");
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(open_error(directory.path()), PmemError::Foreign { .. }));
        assert_eq!(std::fs::read(&path).unwrap(), bytes);
    }
}

#[test]
fn another_version_is_named_with_the_one_supported() {
    let directory = closed_pool();
    overwrite(&directory.path().join("pool.bee"), 8, &7_u32.to_le_bytes());
    let error = open_error(directory.path());
    assert!(matches!(error, PmemError::Version { found: 7, supported: 1, .. }), "{error}");
}

#[test]
fn a_truncated_pool_file_names_both_lengths() {
    for length in [8, 100, 4096, 10_000] {
        let directory = closed_pool();
        let path = directory.path().join("pool.bee");
        OpenOptions::new().write(true).open(&path).unwrap().set_len(length).unwrap();
        let error = open_error(directory.path());
        assert!(
            matches!(error, PmemError::Truncated { found_bytes, .. } if found_bytes == length),
            "{error}"
        );
        assert_eq!(std::fs::metadata(&path).unwrap().len(), length, "left as found");
    }
}

#[test]
fn a_truncated_or_missing_segment_is_named() {
    let directory = closed_pool();
    let path = directory.path().join("segments/1.seg");
    OpenOptions::new().write(true).open(&path).unwrap().set_len(4096).unwrap();
    let error = open_error(directory.path());
    assert!(matches!(
        &error,
        PmemError::Truncated { file, expected_bytes: 65536, found_bytes: 4096 } if *file == path
    ));
    std::fs::remove_file(&path).unwrap();
    assert!(matches!(open_error(directory.path()), PmemError::Missing { file } if file == path));
}

#[test]
fn any_flipped_bit_of_the_header_is_noticed() {
    let directory = closed_pool();
    let path = directory.path().join("pool.bee");
    for bit in (0..136 * 8).step_by(3) {
        flip(&path, bit / 8, bit as u32 % 8);
        let error = open_error(directory.path());
        assert!(
            matches!(
                error,
                PmemError::Foreign { .. } | PmemError::Version { .. } | PmemError::Damaged { .. }
            ),
            "bit {bit}: {error}"
        );
        flip(&path, bit / 8, bit as u32 % 8);
    }
    Pool::open(directory.path(), &options()).unwrap();
}

/// Bits of the state words, of the user words and of the root words.
#[test]
fn any_flipped_bit_of_the_table_is_counted() {
    let directory = closed_pool();
    let path = directory.path().join("pool.bee");
    let second_descriptor = 8192 + 256;
    let ranges = [(second_descriptor, 16), (second_descriptor + 64, 128), (4096, 1024)];
    for (start, length) in ranges {
        for bit in (0..length * 8).step_by(29) {
            flip(&path, start + bit / 8, bit as u32 % 8);
            let pool = Pool::open(directory.path(), &options()).unwrap();
            let findings = pool.report().findings;
            assert_eq!(pool.segments().len(), 3, "one copy is good");
            drop(pool);
            let second_copy = start == second_descriptor && bit >= 64;
            if second_copy {
                // Only the copy nobody needs: mended without a word.
                continue;
            }
            assert!(findings.damage(), "bit {bit} from {start}: {findings:?}");
            // A flipped value is taken as it stands; put it back for the next round.
            flip(&path, start + bit / 8, bit as u32 % 8);
            drop(Pool::open(directory.path(), &options()).unwrap());
        }
    }
}

#[test]
fn a_descriptor_damaged_beyond_repair_is_set_aside_with_its_file() {
    let directory = closed_pool();
    let path = directory.path().join("pool.bee");
    overwrite(&path, 8192 + 256, &[0x5a; 16]);
    let pool = Pool::open(directory.path(), &options()).unwrap();
    assert_eq!(pool.report().findings.damaged_descriptors, 1);
    assert_eq!(pool.segments().len(), 2);
    let ids: Vec<u32> = std::iter::from_fn(|| pool.allocate().ok().map(|s| s.id())).collect();
    assert_eq!(ids.len(), 61);
    assert!(!ids.contains(&1));
    assert!(directory.path().join("segments/1.seg").exists());
}

#[test]
fn empty_orphans_are_removed_and_counted_and_other_files_are_not() {
    let directory = closed_pool();
    let segments = directory.path().join("segments");
    for (name, bytes) in [("17.seg", b"\0"), ("3.new", b"x"), ("notes.txt", b"x")] {
        std::fs::write(segments.join(name), bytes).unwrap();
    }
    let pool = Pool::open(directory.path(), &options()).unwrap();
    assert_eq!(pool.report().findings.orphans_removed, 2);
    assert!(segments.join("notes.txt").exists());
    assert!(!segments.join("17.seg").exists());
}

#[test]
fn a_pool_has_one_user_even_within_a_process() {
    let directory = tempfile::tempdir().unwrap();
    let pool = Pool::create(directory.path(), &options()).unwrap();
    let held = pool.allocate().unwrap();
    drop(pool);
    // A segment still held keeps the lock.
    let error = open_error(directory.path());
    let myself = std::process::id();
    assert!(matches!(error, PmemError::Busy { pid: Some(pid), .. } if pid == myself), "{error}");
    assert!(error.is_retryable());
    drop(held);
    Pool::open(directory.path(), &options()).unwrap();
}

const CHILD: &str = "BEELINE_PMEM_TEST_CHILD";

/// Runs the test `name` of this file again in a child, with `directory` to work on.
fn child(name: &str, directory: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture"]).env(CHILD, directory);
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command
}

fn as_child() -> Option<PathBuf> {
    std::env::var_os(CHILD).map(PathBuf::from)
}

#[test]
fn a_pool_held_by_another_process_names_it() {
    if let Some(directory) = as_child() {
        let _pool = Pool::open(&directory, &options()).unwrap();
        std::fs::write(directory.join("opened"), b"").unwrap();
        // Ended by the parent; bounded in case the parent is not there to do it.
        std::thread::sleep(std::time::Duration::from_secs(60));
        return;
    }
    let directory = closed_pool();
    let mut holder =
        child("a_pool_held_by_another_process_names_it", directory.path()).spawn().unwrap();
    let opened = directory.path().join("opened");
    for _ in 0..3000 {
        if opened.exists() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    let error = open_error(directory.path());
    holder.kill().unwrap();
    holder.wait().unwrap();
    assert!(
        matches!(error, PmemError::Busy { pid: Some(pid), .. } if pid == holder.id()),
        "{error}"
    );
    assert!(error.to_string().contains(&holder.id().to_string()));
    // The end of the holder, however sudden, frees the lock.
    let pool = Pool::open(directory.path(), &options()).unwrap();
    assert!(!pool.report().findings.clean);
}

/// A child is killed at each step of allocating, freeing and replacing; the pool opens again, and
/// what it says is in use is there.
#[test]
fn a_process_killed_between_any_two_steps_leaves_a_pool_that_opens() {
    const NAME: &str = "a_process_killed_between_any_two_steps_leaves_a_pool_that_opens";
    if let Some(directory) = as_child() {
        use beeline_os::MemoryObject;
        beeline_env::fault::arm_from_environment().unwrap();
        let pool = Pool::open_or_create(&directory, &options()).unwrap();
        for round in 0..10_u64 {
            let segment = pool.allocate().unwrap();
            segment.store_u64(0, round + 1);
            segment.store_word(0, round + 1);
            segment.replace_backing().unwrap();
            if round % 2 == 1 {
                pool.free(segment).unwrap();
            }
        }
        panic!("the fault was not met");
    }
    let mut orphans = 0;
    let points = [
        "pmem.allocate.before_descriptor",
        "pmem.allocate.after_descriptor",
        "pmem.free.before_unlink",
        "pmem.replace.step",
    ];
    for point in points {
        for skip in 0..4 {
            let directory = tempfile::tempdir().unwrap();
            let status = child(NAME, directory.path())
                .env("BEELINE_FAULTS", format!("{point}=crash@{skip}"))
                .status()
                .unwrap();
            assert_eq!(status.signal(), Some(9), "{point} {skip}");
            let pool = Pool::open(directory.path(), &options()).unwrap();
            let findings = pool.report().findings;
            assert!(!findings.clean && !findings.damage(), "{point} {skip}: {findings:?}");
            orphans += findings.orphans_removed;
            for segment in pool.segments() {
                // Stored before the replacement began, so there; a segment caught right after its
                // descriptor has nothing yet.
                assert_eq!(segment.load_u64(0), segment.word(0), "{point} {skip}");
            }
            let live = pool.segments().len();
            let files = std::fs::read_dir(directory.path().join("segments")).unwrap().count();
            assert_eq!(files, live, "{point} {skip}");
        }
    }
    assert!(orphans >= 8, "cut allocations and frees leave orphans: {orphans}");
}

#[test]
fn a_full_disk_fails_the_allocation_and_nothing_else() {
    for durability in [Durability::Process, Durability::Power] {
        // A disk for each: a child that another test is just starting holds copies of all files
        // open here, and what was removed keeps its room until they are closed.
        let Some(disk) = Tmpfs::mount("size=1m") else { return };
        let directory = disk.0.path().join(durability.to_string());
        let options = PoolOptions { durability, emulate_durability: true, ..on_tmpfs() };
        let pool = Pool::create(&directory, &options).unwrap();
        let mut held = Vec::new();
        let error = loop {
            match pool.allocate() {
                Ok(segment) => held.push(segment),
                Err(error) => break error,
            }
        };
        assert!(matches!(&error, PmemError::NoSpace { file } if file.starts_with(&directory)));
        assert!(error.is_retryable());
        assert!(held.len() > 4);
        // Every byte of what was given can be stored: no SIGBUS on a full disk.
        let mut persister = pool.persister();
        for segment in &held {
            segment.store(0, &vec![7; SEGMENT as usize]);
            persister.flush(segment, 0, SEGMENT as usize);
        }
        persister.fence().unwrap();
        let count = held.len();
        drop((persister, held, pool));
        // A full disk does not keep the pool closed, and freeing makes room.
        let pool = Pool::open(&directory, &options).unwrap();
        assert_eq!(pool.segments().len(), count);
        assert!(matches!(pool.allocate(), Err(PmemError::NoSpace { .. })));
        for segment in pool.segments() {
            pool.free(segment).unwrap();
        }
        let again = (0..500).find_map(|_| {
            let allocated = pool.allocate().ok();
            if allocated.is_none() {
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            allocated
        });
        assert!(again.is_some(), "freeing made no room");
    }
}

#[test]
fn what_is_kept_aside_is_there_when_the_disk_is_full() {
    let Some(disk) = Tmpfs::mount("size=1m") else { return };
    let directory = disk.0.path().join("data");
    let options = PoolOptions { capacity_bytes: u64::from(SEGMENT) << 6, ..on_tmpfs() };
    let pool = Pool::create(&directory, &options).unwrap();
    assert_eq!(pool.keep_reserve(2), 2);
    let mut held = Vec::new();
    while let Ok(segment) = pool.allocate() {
        held.push(segment);
    }
    assert_eq!(pool.used_bytes(), held.len() as u64 * u64::from(SEGMENT));
    for _ in 0..2 {
        let segment = pool.allocate_from_reserve().unwrap();
        segment.store(0, &vec![7; SEGMENT as usize]);
        held.push(segment);
    }
    assert!(matches!(pool.allocate_from_reserve(), Err(PmemError::PoolFull { .. })));
    // Freed room is kept aside first.
    for _ in 0..2 {
        pool.free(held.remove(0)).unwrap();
    }
    assert!(matches!(pool.allocate(), Err(PmemError::NoSpace { .. })));
    let segment = pool.allocate_from_reserve().unwrap();
    let mut bytes = vec![1; SEGMENT as usize];
    segment.read(0, &mut bytes);
    assert!(bytes.iter().all(|byte| *byte == 0), "it is zeroed like any other");
    let live = held.len() + 1;
    drop((segment, held, pool));
    let pool = Pool::open(&directory, &options).unwrap();
    assert_eq!(pool.segments().len(), live);
    assert_eq!(pool.report().findings.orphans_removed, 0, "a good end leaves none");
}

#[test]
fn no_room_for_the_table_leaves_no_half_made_pool() {
    let Some(disk) = Tmpfs::mount("size=64k") else { return };
    let directory = disk.0.path().join("data");
    let large = PoolOptions { capacity_bytes: u64::from(SEGMENT) << 14, ..on_tmpfs() };
    let error = Pool::create(&directory, &large).unwrap_err();
    assert!(matches!(error, PmemError::NoSpace { .. }), "{error}");
    let small = PoolOptions { capacity_bytes: SEGMENT.into(), ..on_tmpfs() };
    assert!(Pool::open_or_create(&directory, &small).unwrap().report().findings.created);
}

#[test]
fn a_read_only_directory_is_named() {
    let Some(disk) = Tmpfs::mount("size=1m") else { return };
    let directory = disk.0.path().join("data");
    Pool::create(&directory, &on_tmpfs()).unwrap().allocate().unwrap();
    if !disk.remount("ro") {
        let _ = std::io::Write::write_fmt(
            &mut std::io::stderr(),
            format_args!("skipped: the tmpfs cannot be made read-only\n"),
        );
        return;
    }
    for outcome in [
        Pool::open(&directory, &on_tmpfs()),
        Pool::create(&disk.0.path().join("other"), &on_tmpfs()),
    ] {
        let error = outcome.unwrap_err();
        assert!(matches!(error, PmemError::ReadOnly { .. }), "{error}");
        assert!(error.to_string().contains("make it writable"));
    }
    disk.remount("rw");
    assert_eq!(Pool::open(&directory, &on_tmpfs()).unwrap().segments().len(), 1);
}

#[test]
fn options_out_of_range_are_refused_by_name() {
    let directory = tempfile::tempdir().unwrap();
    let base = options();
    let cases = [
        (PoolOptions { segment_bytes: 4096, ..base.clone() }, "segment_bytes"),
        (PoolOptions { segment_bytes: (64 << 10) + 1, ..base.clone() }, "segment_bytes"),
        (PoolOptions { segment_bytes: 2 << 30, ..base.clone() }, "segment_bytes"),
        (PoolOptions { capacity_bytes: 1, ..base.clone() }, "capacity_bytes"),
        (PoolOptions { capacity_bytes: u64::MAX, ..base.clone() }, "capacity_bytes"),
        (PoolOptions { write_delay_ns: 150, ..base.clone() }, "write_delay_ns"),
        (PoolOptions { kind: Some(PoolKind::Sim), ..base.clone() }, "kind"),
    ];
    for (options, name) in cases {
        let error = Pool::create(directory.path(), &options).unwrap_err();
        assert!(matches!(error, PmemError::Options { option, .. } if option == name), "{error}");
    }
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "nothing was made");
}

#[test]
fn dax_where_there_is_none_says_how_to_get_it() {
    let directory = tempfile::tempdir().unwrap();
    let dax = PoolOptions { kind: Some(PoolKind::Dax), ..options() };
    match Pool::create(directory.path(), &dax) {
        Ok(pool) => {
            eprintln!("the temporary directory is on DAX");
            assert_eq!(pool.report().kind, PoolKind::Dax);
        }
        Err(error) => {
            assert!(matches!(error, PmemError::NotDax { .. }), "{error}");
            assert!(error.to_string().contains("-o dax"));
        }
    }
}

#[test]
fn a_file_system_in_memory_promises_no_power_durability() {
    let Some(disk) = Tmpfs::mount("size=1m") else { return };
    let directory = disk.0.path().join("data");
    let power = PoolOptions { durability: Durability::Power, ..on_tmpfs() };
    let error = Pool::create(&directory, &power).unwrap_err();
    assert!(matches!(error, PmemError::VolatileFileSystem { .. }), "{error}");
    assert!(!Pool::open(&directory, &on_tmpfs()).unwrap().report().emulated);
    let pretend = PoolOptions { emulate_durability: true, ..power };
    let report = Pool::open(&directory, &pretend).unwrap().report();
    assert!(report.emulated);
    assert!(report.to_string().contains("emulated"), "{report}");
}

/// In a child, because the limit is the process's.
#[test]
fn running_out_of_descriptors_names_the_limit_and_harms_nothing() {
    const NAME: &str = "running_out_of_descriptors_names_the_limit_and_harms_nothing";
    if as_child().is_none() {
        let directory = tempfile::tempdir().unwrap();
        assert!(child(NAME, directory.path()).status().unwrap().success());
        let pool = Pool::open(directory.path(), &options()).unwrap();
        assert!(pool.report().findings.clean);
        assert!(!pool.segments().is_empty());
        return;
    }
    use rustix::process::{Resource, Rlimit, setrlimit};
    setrlimit(Resource::Nofile, Rlimit { current: Some(40), maximum: Some(40) }).unwrap();
    let volatile = PoolOptions::volatile(SEGMENT, options().capacity_bytes);
    for pool in
        [Pool::create(&as_child().unwrap(), &options()), Pool::dram(&volatile)].map(Result::unwrap)
    {
        let error = loop {
            if let Err(error) = pool.allocate() {
                break error;
            }
        };
        assert!(matches!(error, PmemError::Limit { .. }), "{error}");
        assert!(error.to_string().contains("ulimit -n"));
        let freed = pool.segments().pop().unwrap();
        pool.free(freed).unwrap();
        pool.allocate().unwrap();
        for segment in pool.segments().split_off(3) {
            pool.free(segment).unwrap();
        }
    }
}

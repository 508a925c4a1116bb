//! What lies in files: snapshots and pools.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{MutexGuard, OnceLock};

use beeline_kv::{Keyspace, Opened, PutOptions, Shard, Store, StoreOptions};
use beeline_pmem::{Pool, PoolOptions};

/// The least a segment may have is fine: files are written anew for every input.
const SEGMENT: u32 = 64 << 10;
const HEAD_BYTES: usize = 40;

fn options() -> PoolOptions {
    PoolOptions {
        segment_bytes: SEGMENT,
        capacity_bytes: 16 * u64::from(SEGMENT),
        ..PoolOptions::default()
    }
}

fn with_keys<R>(opened: &Opened, body: impl FnOnce(&mut Keyspace<'_>) -> R) -> R {
    let mut guards: Vec<MutexGuard<'_, Shard>> = opened
        .1
        .iter()
        .map(|shard| shard.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
        .collect();
    body(&mut Keyspace::many(guards.iter_mut().map(|guard| &mut **guard).collect(), 0))
}

/// Some keys, some of them overwritten, some deleted, some in batches.
fn fill(opened: &Opened) {
    for n in 0..60_u32 {
        with_keys(opened, |keys| {
            let key = format!("key:{}", n % 40);
            let value = vec![n as u8; 20 + n as usize * 7 % 300];
            keys.put(0, key.as_bytes(), &[&value], PutOptions::default()).expect("room");
            if n % 7 == 0 {
                keys.delete(0, format!("key:{}", n / 2).as_bytes()).expect("room");
            }
            if n % 3 == 0 {
                keys.commit().expect("a commit");
            }
        });
    }
    with_keys(opened, |keys| keys.commit().expect("a commit"));
}

type Contents = BTreeMap<Vec<u8>, Vec<u8>>;

/// What can be read.
fn contents(opened: &Opened) -> Contents {
    with_keys(opened, |keys| {
        let (mut names, mut cursor) = (Vec::new(), 0);
        loop {
            let found = keys.scan(0, cursor, 50, |key, _| names.push(key.to_vec()));
            cursor = found.expect("a scan needs no media");
            if cursor == 0 {
                break;
            }
        }
        let mut all = Contents::new();
        for name in names {
            let mut value = Vec::new();
            if let Ok(Some(entry)) = keys.lookup(0, &name)
                && keys.read_value(&entry, &mut value).is_ok()
            {
                all.insert(name, value);
            }
        }
        all
    })
}

thread_local! {
    static PLACE: RefCell<Option<tempfile::TempDir>> = const { RefCell::new(None) };
}

/// A directory of this thread, in memory where there is such a place.
fn with_place<R>(body: impl FnOnce(&Path) -> R) -> R {
    PLACE.with_borrow_mut(|place| {
        let made = place.get_or_insert_with(|| {
            tempfile::tempdir_in("/dev/shm")
                .or_else(|_| tempfile::tempdir())
                .expect("a temporary directory")
        });
        body(made.path())
    })
}

fn good_snapshot() -> Vec<u8> {
    let pool = Pool::dram(&PoolOptions::volatile(SEGMENT, 16 * u64::from(SEGMENT)));
    let opened = Store::open(pool.expect("a pool in memory"), StoreOptions::default());
    let opened = opened.expect("an empty store");
    fill(&opened);
    with_place(|place| {
        let path = place.join("seed");
        with_keys(&opened, |keys| keys.begin_snapshot().expect("a barrier"))
            .write(&path)
            .expect("a file");
        std::fs::read(&path).expect("the file just written")
    })
}

/// Gives the header and every block that is there the checksum it should have.
fn mend(bytes: &mut [u8]) {
    if bytes.len() < HEAD_BYTES {
        return;
    }
    let checksum = crc32c::crc32c(&bytes[..32]);
    bytes[32..36].copy_from_slice(&checksum.to_le_bytes());
    let mut at = HEAD_BYTES;
    while let Some(head) = bytes.get(at..at + 12) {
        let length = u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize;
        let Some(end) = (at + 12).checked_add(length).filter(|end| *end <= bytes.len()) else {
            return;
        };
        let payload = crc32c::crc32c(&bytes[at..at + 8]);
        let checksum = crc32c::crc32c_append(payload, &bytes[at + 12..end]);
        bytes[at + 8..at + 12].copy_from_slice(&checksum.to_le_bytes());
        at = end;
    }
}

/// A snapshot file: refused, or restored into a store that then agrees with itself.
pub fn snapshot(bytes: &[u8]) -> bool {
    let Some((first, rest)) = bytes.split_first() else { return false };
    let mut file = rest.to_vec();
    if first.is_multiple_of(2) {
        mend(&mut file);
    }
    with_place(|place| {
        let path = place.join("snapshot");
        std::fs::write(&path, &file).expect("room for a file");
        let checked = beeline_kv::check_snapshot(&path);
        let Ok(report) = checked else { return false };
        let pool = Pool::dram(&PoolOptions::volatile(SEGMENT, 16 * u64::from(SEGMENT)));
        let pool = pool.expect("a pool in memory");
        // It may hold what does not fit; a file that checks out is no reason to end.
        let Ok((opened, again)) = beeline_kv::restore(&path, pool, StoreOptions::default()) else {
            return true;
        };
        assert_eq!(again, report, "checking and restoring see the same file");
        let findings = beeline_kv::audit(&opened.0, &opened.1);
        assert!(findings.is_empty(), "{findings:?}");
        let _ = contents(&opened);
        true
    })
}

pub fn snapshot_seeds() -> Vec<Vec<u8>> {
    let good = good_snapshot();
    vec![[&[0], &good[..]].concat(), [&[1], &good[..]].concat()]
}

/// A pool directory in order, as bytes.
struct Template {
    files: Vec<(String, Vec<u8>)>,
    written: BTreeMap<Vec<u8>, Vec<Vec<u8>>>,
}

fn template() -> &'static Template {
    static TEMPLATE: OnceLock<Template> = OnceLock::new();
    TEMPLATE.get_or_init(|| {
        let place = tempfile::tempdir().expect("a temporary directory");
        {
            let pool = Pool::create(place.path(), &options()).expect("a pool");
            let opened = Store::open(pool, StoreOptions::default()).expect("an empty store");
            fill(&opened);
        }
        let mut files = vec![("pool.bee".to_owned(), Vec::new())];
        let segments = std::fs::read_dir(place.path().join("segments")).expect("segments");
        for entry in segments.flatten() {
            files.push((format!("segments/{}", entry.file_name().display()), Vec::new()));
        }
        files.sort();
        for (name, bytes) in &mut files {
            *bytes = std::fs::read(place.path().join(name)).expect("a file of the pool");
        }
        // Every value ever stored under a key.
        let mut written: BTreeMap<Vec<u8>, Vec<Vec<u8>>> = BTreeMap::new();
        for n in 0..60_u32 {
            let value = vec![n as u8; 20 + n as usize * 7 % 300];
            written.entry(format!("key:{}", n % 40).into_bytes()).or_default().push(value);
        }
        Template { files, written }
    })
}

/// Edits of a good pool, eight bytes each: file, operation, place (u32), two bytes. Whatever was
/// damaged, checking and opening end, and nothing is read that was never stored.
pub fn pool(bytes: &[u8]) -> bool {
    let template = template();
    let mut files = template.files.clone();
    for edit in bytes.chunks_exact(8).take(32) {
        let count = files.len();
        let file = &mut files[usize::from(edit[0]) % count].1;
        if file.is_empty() {
            continue;
        }
        let place = u32::from_le_bytes([edit[2], edit[3], edit[4], edit[5]]) as usize;
        let at = place % file.len();
        match edit[1] % 8 {
            0..=2 => file[at] ^= edit[6] | 1,
            3 => file[at] = edit[6],
            4 => {
                let end = (at + usize::from(edit[6])).min(file.len());
                file[at..end].fill(edit[7]);
            }
            5 => {
                // A piece from elsewhere in the same file, as a lost write leaves it.
                let length = (usize::from(edit[6]) * 8).min(file.len() - at);
                let from = usize::from(edit[7]) * 251 % (file.len() - length + 1);
                file.copy_within(from..from + length, at);
            }
            6 => file.truncate(at),
            _ => {
                let width = 8.min(file.len() - at);
                let number = u64::from(edit[6]) << (edit[7] % 64);
                file[at..at + width].copy_from_slice(&number.to_le_bytes()[..width]);
            }
        }
    }
    with_place(|place| {
        let directory = place.join("pool");
        let _ = std::fs::remove_dir_all(&directory);
        std::fs::create_dir_all(directory.join("segments")).expect("a directory");
        for (name, bytes) in &files {
            std::fs::write(directory.join(name), bytes).expect("room for a file");
        }
        let checked = beeline_kv::check(&directory);
        let Ok(opened) = Pool::open(&directory, &options()) else {
            assert!(
                !checked.is_ok_and(|report| !report.is_damaged()),
                "a pool that checks out opens"
            );
            return false;
        };
        let Ok(opened) = Store::open(opened, StoreOptions::default()) else { return false };
        for (key, value) in contents(&opened) {
            let known = template.written.get(&key).is_some_and(|values| values.contains(&value));
            assert!(known, "{:?} was never stored like this", String::from_utf8_lossy(&key));
        }
        // It takes writes again, or says why not.
        with_keys(&opened, |keys| {
            if keys.put(0, b"new", &[b"value"], PutOptions::default()).is_ok() {
                let _ = keys.commit();
            }
        });
        true
    })
}

pub fn pool_seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![vec![0; 8]];
    for file in 0..3_u8 {
        for operation in 0..8_u8 {
            let place = u32::from(operation) * 977 + u32::from(file) * 131;
            let [a, b, c, d] = place.to_le_bytes();
            seeds.push(vec![file, operation, a, b, c, d, 0x41, operation]);
        }
    }
    seeds
}

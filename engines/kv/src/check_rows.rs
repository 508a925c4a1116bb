//! What the offline check sees of rows: which services' rows ended or will end, and whether what the store keeps
//! for itself beside keys (marks, times, fields, heads, expiries, the catalog) is as the store writes it.

use std::collections::BTreeMap;

use crate::check_streams::{Newest, newest, parts};
use crate::entry::Sealer;
use crate::field::field_at_its_place;
use crate::row_ends::{ROW_ENDS, namespace_of};
use crate::rows::{HEAD_BYTES, is_fields};
use crate::segments::SegmentState;
use crate::service_rows::{ROW_TIMES, TIME_BYTES};
use crate::space::{IN_ROWS, row_of};
use crate::walk::{self, Found};
use crate::{DATABASES, KvError, SYSTEM_NAMESPACE, Version, catalog, expiries, is_row_kind};

/// A row of a service that ended by a mark, whose keys are not all collected yet.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowEndSeen {
    /// Number of its namespace.
    pub namespace: u32,
    /// Its name.
    pub row: Vec<u8>,
    /// Entries of keys that ended with it and are still on media.
    pub entries: u64,
}

/// A row of a service that has a time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RowTimeSeen {
    /// Number of its namespace.
    pub namespace: u32,
    /// Its name.
    pub row: Vec<u8>,
    /// When it ends, wall-clock time in milliseconds.
    pub expires_at_ms: u64,
}

/// Newest marks and times, by key.
#[derive(Default)]
pub(crate) struct Rows {
    marks: BTreeMap<Vec<u8>, Newest<()>>,
    times: BTreeMap<Vec<u8>, Newest<u64>>,
}

/// What is wrong with an entry that the store wrote for itself; `None` for all others, and where nothing is.
pub(crate) fn malformed(found: &Found, bytes: &[u8]) -> Option<String> {
    let header = &found.header;
    if header.is_tombstone() || header.is_appended() {
        return None;
    }
    let namespace = header.namespace;
    let (key, value) = parts(found, bytes);
    let wrong = match namespace {
        ROW_ENDS if namespace_of(key).is_none() => "names no row of a service".to_owned(),
        ROW_ENDS if !value.is_empty() => format!("has a value of {} bytes", value.len()),
        ROW_TIMES if namespace_of(key).is_none() => "names no row of a service".to_owned(),
        ROW_TIMES if value.len() != TIME_BYTES => format!("holds {} bytes", value.len()),
        SYSTEM_NAMESPACE => match catalog::decode(key, value) {
            Err(KvError::Format { what, found, supported }) => {
                format!("is {what} of format or length {found}, not {supported}")
            }
            _ => return None,
        },
        _ if is_fields(namespace) && !field_at_its_place(key) => {
            "does not stand where its name belongs".to_owned()
        }
        _ if expiries::is_expiries(namespace) && expiries::parse(value).is_none() => {
            format!("holds {} bytes", value.len())
        }
        _ if namespace < u32::from(DATABASES)
            && is_row_kind(header.kind)
            && value.len() != HEAD_BYTES =>
        {
            format!("is the head of a row and holds {} bytes", value.len())
        }
        _ => return None,
    };
    Some(format!("{} at {} {wrong}", named(namespace, key, false), found.offset))
}

/// What an entry of this key is, for people.
pub(crate) fn named(namespace: u32, key: &[u8], deletion: bool) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(64)]).into_owned();
    let row = text(row_of(key));
    let what = if deletion { "the deletion of " } else { "" };
    let number = namespace & !IN_ROWS;
    let behind = key.get(2 + row_of(key).len()..).unwrap_or_default();
    match namespace {
        ROW_ENDS | ROW_TIMES => {
            let thing = if namespace == ROW_ENDS { "end" } else { "time" };
            let of = namespace_of(key).map_or_else(
                || format!("{:?}", text(key)),
                |number| format!("row {row:?} of namespace {}", number & !IN_ROWS),
            );
            format!("{what}the {thing} of {of}")
        }
        SYSTEM_NAMESPACE => format!("{what}the store's own key {:?}", text(key)),
        _ if is_fields(namespace) => {
            let field = text(behind.get(16..).unwrap_or_default());
            format!("{what}field {field:?} of {row:?} in database {}", namespace & 15)
        }
        _ if expiries::is_expiries(namespace) => {
            format!("{what}the expiry of {row:?} in database {}", namespace & 15)
        }
        _ if number < u32::from(DATABASES) => {
            format!("{what}the key {:?} in database {number}", text(key))
        }
        _ if namespace & IN_ROWS != 0 => {
            format!("{what}the key {:?} of row {row:?} in namespace {number}", text(behind))
        }
        _ => format!("{what}the key {:?} in namespace {number}", text(key)),
    }
}

impl Rows {
    /// Takes in a mark or a time.
    pub fn take(&mut self, found: &Found, bytes: &[u8]) {
        let header = &found.header;
        let (key, value) = parts(found, bytes);
        if namespace_of(key).is_none() || header.is_appended() {
            return;
        }
        let live = !header.is_tombstone();
        if header.namespace == ROW_ENDS {
            newest(&mut self.marks, key.to_vec(), header.version, live.then_some(()));
        } else if header.namespace == ROW_TIMES {
            let time = value.try_into().ok().map(u64::from_le_bytes).filter(|_| live);
            newest(&mut self.times, key.to_vec(), header.version, time);
        }
    }

    /// Version of a row's mark; 0: there is none.
    fn end_of(&self, key: &[u8]) -> Version {
        match self.marks.get(key) {
            Some((version, Some(()))) => *version,
            _ => 0,
        }
    }

    /// The marks there are, in order of namespace and row. Walks once more where there are any.
    pub fn ends(&self, sealer: &Sealer, states: &[SegmentState]) -> Vec<RowEndSeen> {
        let mut ends: BTreeMap<u32, BTreeMap<Vec<u8>, (Version, u64)>> = BTreeMap::new();
        for (key, (version, mark)) in &self.marks {
            if let (Some(namespace), Some(())) = (namespace_of(key), mark) {
                ends.entry(namespace).or_default().insert(row_of(key).to_vec(), (*version, 0));
            }
        }
        if ends.is_empty() {
            return Vec::new();
        }
        let mut copy = Vec::new();
        for state in states {
            let bytes = walk::bytes_of(state, &mut copy);
            walk::walk(sealer, state, bytes, |found| {
                let header = &found.header;
                if found.spoilt || header.is_tombstone() {
                    return;
                }
                let Some(rows) = ends.get_mut(&header.namespace) else { return };
                let (key, _) = parts(&found, bytes);
                if let Some((end, entries)) = rows.get_mut(row_of(key)) {
                    *entries += u64::from(header.version < *end);
                }
            });
        }
        let rows = |(namespace, rows): (u32, BTreeMap<Vec<u8>, (Version, u64)>)| {
            let namespace = namespace & !IN_ROWS;
            rows.into_iter().map(move |(row, (_, entries))| RowEndSeen { namespace, row, entries })
        };
        ends.into_iter().flat_map(rows).collect()
    }

    /// The times that mean something, of namespaces that began at a version which `since` tells.
    pub fn times(&self, since: impl Fn(u32) -> Option<Version>) -> Vec<RowTimeSeen> {
        let mut seen: Vec<_> = self
            .times
            .iter()
            .filter_map(|(key, (version, time))| {
                let (namespace, expires_at_ms) = (namespace_of(key)?, (*time)?);
                let counts = *version >= since(namespace)? && *version >= self.end_of(key);
                let (namespace, row) = (namespace & !IN_ROWS, row_of(key).to_vec());
                counts.then_some(RowTimeSeen { namespace, row, expires_at_ms })
            })
            .collect();
        seen.sort_by(|one, other| (one.namespace, &one.row).cmp(&(other.namespace, &other.row)));
        seen
    }
}

#[cfg(test)]
mod tests {
    use beeline_pmem::{Pool, PoolOptions};

    use super::*;
    use crate::{Embedded, NamespaceOptions, PutOptions, Store, StoreOptions, check_pool};

    fn options() -> NamespaceOptions {
        NamespaceOptions { by_row: true, row_records: true, ..NamespaceOptions::default() }
    }

    fn checked(pool: &Pool, change: impl FnOnce(&mut crate::Keyspace<'_>)) -> crate::CheckReport {
        let store = Embedded::from(Store::open(pool.clone(), StoreOptions::default()).unwrap());
        store.with_all(|keys| {
            change(keys);
            keys.commit().unwrap();
        });
        drop(store);
        check_pool(pool)
    }

    /// Namespace, key, value and kind of an entry, and what is told of it.
    type Case = (u32, Vec<u8>, &'static [u8], u8, &'static str);

    fn pool() -> Pool {
        Pool::dram(&PoolOptions::volatile(64 << 10, 4 << 20)).unwrap()
    }

    #[test]
    fn ends_and_times_of_rows_are_listed_while_they_mean_something() {
        let pool = pool();
        let report = checked(&pool, |keys| {
            keys.create_namespace(256, options()).unwrap();
            keys.create_namespace(257, options()).unwrap();
            for number in [256, 257] {
                for row in [b"one", b"two"] {
                    for name in 0..30_u8 {
                        let key = (row.as_slice(), [name].as_slice().to_vec());
                        let key = (key.0, key.1.as_slice());
                        keys.put_in(number, key, &[b"v"], PutOptions::default()).unwrap();
                    }
                    assert!(keys.expire_row(number, row, u64::MAX - 1).unwrap());
                }
            }
            keys.delete_row(256, b"one").unwrap();
            keys.clear_namespace(257).unwrap();
        });
        assert!(!report.is_damaged(), "{:#?}", report.damages);
        let (namespace, row) = (256, b"one".to_vec());
        assert_eq!(report.row_ends, [RowEndSeen { namespace, row, entries: 30 }]);
        let row = b"two".to_vec();
        assert_eq!(report.row_times, [RowTimeSeen { namespace, row, expires_at_ms: u64::MAX - 1 }]);
        // Once they are collected nothing is left to tell.
        let report = checked(&pool, |keys| {
            keys.drop_namespace(257).unwrap();
            for shard in keys.shards_mut() {
                while shard.maintain(1 << 20).unwrap().did_work {}
            }
        });
        assert!(!report.is_damaged() && report.row_ends.is_empty(), "{report:#?}");
        assert_eq!(report.row_times.len(), 1);
    }

    #[test]
    fn what_the_store_never_writes_is_told_as_damage() {
        let row = |sub: &[u8]| [b"\x00\x03row", sub].concat();
        let mark = row(&256_u32.to_be_bytes());
        let cases: [Case; 9] = [
            (ROW_ENDS, mark.clone(), b"v", 0, "the end of row \"row\" of namespace 256"),
            (ROW_ENDS, row(b"x"), b"", 0, "names no row of a service"),
            (ROW_ENDS, row(&7_u32.to_be_bytes()), b"", 0, "names no row of a service"),
            (ROW_TIMES, mark, b"short", 0, "the time of row \"row\" of namespace 256"),
            (ROW_TIMES, b"".to_vec(), &[0; 8], 0, "names no row of a service"),
            (IN_ROWS | 32, row(&[0; 21]), b"v", 0, "field"),
            (IN_ROWS | 48 | 3, row(b""), b"v", 0, "the expiry of \"row\" in database 3"),
            (0, b"hash".to_vec(), b"v", 1, "the head of a row"),
            (SYSTEM_NAMESPACE, b"namespace:\x00\x00\x01\x00".to_vec(), &[9; 24], 0, "record"),
        ];
        for (namespace, key, value, kind, told) in cases {
            let pool = pool();
            let report = checked(&pool, |keys| {
                let hash = keys.store().place(namespace, &key);
                let options = PutOptions { kind, ..PutOptions::default() };
                let shard = keys.home_mut();
                let appended = shard.append_put(namespace, hash, &key, &[value], options).unwrap();
                shard.install(namespace, hash, &key, &appended);
            });
            let damages: Vec<_> = report.damages.iter().map(|damage| &damage.what).collect();
            assert!(damages.len() == 1 && damages[0].contains(told), "{told}: {damages:?}");
        }
    }
}

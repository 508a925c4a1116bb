//! A service's rows in a node: a row ends at its time though no request touches it.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::time::Instant;

use beeline_kv::{NamespaceOptions, PutOptions};
use common::{PATIENCE, start};

const ROWS: u32 = 300;

#[test]
fn rows_of_a_service_end_by_the_shard_threads_own_upkeep() {
    let node = start(2);
    let handle = node.handle();
    let options = NamespaceOptions {
        by_row: true,
        row_records: true,
        row_time_to_live_ms: 200,
        ..NamespaceOptions::default()
    };
    handle.with_shards(&[0, 1], |keys| {
        keys.create_namespace(ROWS, options).unwrap();
        for row in 0..20_u8 {
            for name in 0..50_u8 {
                let key = ([row].to_vec(), [name].to_vec());
                let key = (key.0.as_slice(), key.1.as_slice());
                keys.put_in(ROWS, key, &[b"value"], PutOptions::default()).unwrap();
            }
            let known = keys.row_state(ROWS, &[row]).unwrap();
            assert!(known.length == 50 && known.expires_at_ms > 0, "{known:?}");
        }
        assert!(keys.expire_row(ROWS, &[7], 0).unwrap(), "one stays");
        keys.commit().unwrap();
    });
    let begun = Instant::now();
    let left = || handle.with_shards_changed(&[0, 1], |keys| (keys.len_in(ROWS).unwrap(), false));
    while left() > 50 {
        assert!(begun.elapsed() < PATIENCE, "{} keys are left", left());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    handle.with_shards(&[0, 1], |keys| {
        assert_eq!(keys.row_state(ROWS, &[7]).unwrap().length, 50);
        assert_eq!(keys.row_state(ROWS, &[6]).unwrap().length, 0);
    });
    node.stop();
}

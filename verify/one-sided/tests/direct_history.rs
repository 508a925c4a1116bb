//! Strict serialisability of the direct store: histories of many clients, local and remote mixed, are
//! explained by one order for each key.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "common/direct.rs"]
mod common;
#[path = "common/history.rs"]
mod history;

use std::time::Instant;

use common::{DEVICES, World};

#[test]
fn histories_of_local_and_remote_clients_have_one_order_for_each_key() {
    const KEYS: u64 = 12;
    const BATCHES: usize = 400;
    for open in DEVICES {
        let world = World::new(open, 1, 1);
        let clock = Instant::now();
        let all = std::thread::scope(|scope| {
            let mut threads = Vec::new();
            for number in 0..4 {
                let world = &world;
                threads.push(scope.spawn(move || {
                    let mut client = world.client();
                    history::run(&mut client, number, KEYS, clock, |batches| batches == BATCHES)
                }));
            }
            let handle = world.handle(0);
            threads.push(scope.spawn(move || history::run_local(&handle, 9, KEYS, clock, BATCHES)));
            history::joined(threads.into_iter().map(|thread| thread.join().unwrap()))
        });
        assert!(history::calls(&all) > 4 * BATCHES * 4, "{}", history::calls(&all));
        assert_eq!(history::unexplained(&all), Vec::<u64>::new());
    }
}

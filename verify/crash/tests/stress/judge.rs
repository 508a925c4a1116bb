//! Rounds that ended with the power: a virtual machine ran the child, its output left the machine
//! as it was written, and then there was no machine. What the child said was committed has to be
//! in the pool the next machine opens.

use crate::actor;
use crate::child::{self, Orders, THREADS};
use crate::kill::{Totals, shown, take_in};
use crate::ledger::{Ledger, Time};

/// Files with what the children said, one for each round, colons between them.
const SAID: &str = "BEELINE_STRESS_SAID";

/// Later than any clock of these rounds.
const LATEST_MS: u64 = 1 << 50;

/// The judge's entry point: does nothing in an ordinary run of the tests.
#[test]
fn judge() {
    let (Ok(files), Some(orders)) = (std::env::var(SAID), Orders::from_environment()) else {
        return;
    };
    let mut ledger = Ledger::default();
    let mut totals = Totals::default();
    let mut wrong = Vec::new();
    // Expiries told no round from another: the clock was moved far between them.
    let time = Time { now_ms: LATEST_MS, latest_ms: LATEST_MS };
    let keys = || actor::all_keys(THREADS);
    for file in files.split(':').filter(|file| !file.is_empty()) {
        let said = std::fs::read_to_string(file).unwrap();
        // A child that was cut off before it had opened the pool did nothing.
        let Some(start) = said.lines().find_map(|line| line.split_once("@O")) else { continue };
        let observed = shown(start.1);
        wrong.extend(ledger.violations(0, &observed, keys(), time));
        ledger.restart(&observed, keys());
        wrong.extend(take_in(&said, &mut ledger, &mut 0, None, &mut totals));
    }
    let (observed, entries) = child::look(&orders, orders.shards).unwrap();
    wrong.extend(ledger.violations(0, &observed, keys(), time));
    let pool = beeline_pmem::Pool::open(&orders.directory, &orders.pool_options()).unwrap();
    println!("pool: {}", pool.report());
    println!("judged: {} acknowledged, {entries} entries", totals.acknowledged);
    assert!(wrong.is_empty(), "{}", wrong[..wrong.len().min(4)].join("\n"));
}

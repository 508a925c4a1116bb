//! Stress of the key-value store: everything at once in a pool that is too small, ended at random
//! moments, opened again with another number of shards.
//!
//! - `kill`: a child process with several threads on a file pool, ended with SIGKILL; what it
//!   acknowledged on a pipe is compared with what its files show.
//! - `judge`: compares what children said on another machine, before its power was cut, with what
//!   a pool shows; the lab runs it.
//! - `power`: random histories on a simulated pool; what each legal crash image shows is compared
//!   with what was acknowledged at that point.
//!
//! `BEELINE_DEEP=1` widens both to minutes; `BEELINE_SEED=n` replays one history.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

mod actor;
mod child;
mod judge;
mod kill;

mod ledger;
mod power;

fn deep() -> bool {
    std::env::var("BEELINE_DEEP").is_ok()
}

fn first_seed() -> Option<u64> {
    std::env::var("BEELINE_SEED").ok()?.parse().ok()
}

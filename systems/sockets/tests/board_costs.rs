//! What boards cost a sender: few searches of its connections, whatever the boards are called.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::panic)]

mod common;

use std::net::TcpStream;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use beeline_sockets::{board, connection, kernel, table, wake};
use common::races::{Chance, close, give, pair, take};

/// Searches are counted for the process.
static ONE_BY_ONE: Mutex<()> = Mutex::new(());

/// A connection that lends a board of this name, and has a place on it.
fn lender(name: u64) -> [TcpStream; 2] {
    let pair = pair();
    assert_eq!(give(pair[0].as_raw_fd(), b"x", 0), Ok(1));
    assert_eq!(take(pair[1].as_raw_fd(), &mut [0; 9], 0), Ok(1));
    connection::find(pair[1].as_raw_fd())
        .unwrap()
        .segment
        .own_board()
        .name
        .store(name, Ordering::SeqCst);
    pair
}

/// A message to the end that is armed with a place on the board of this name: true when it was rung for.
fn rung([asks, hears]: &[TcpStream; 2], name: u64) -> bool {
    let signs = &connection::find(hears.as_raw_fd()).unwrap().segment.own().signs;
    signs.receive_armed.store(wake::place(name, 3), Ordering::SeqCst);
    assert_eq!(give(asks.as_raw_fd(), b"x", 0), Ok(1));
    let rung = kernel::unread(hears.as_raw_fd()) > 0;
    assert_eq!(take(hears.as_raw_fd(), &mut [0; 9], 0), Ok(1));
    // The doorbell goes, so that the next message is judged by its own.
    connection::find(hears.as_raw_fd()).unwrap().listen(hears.as_raw_fd(), 0);
    rung
}

#[test]
fn boards_with_the_same_lower_bits_are_searched_for_once() {
    let _alone = ONE_BY_ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let mut chance = Chance(1);
    let names: Vec<u64> = (0..40).map(|_| chance.next() >> 32 << 6 | 7).collect();
    let lenders: Vec<_> = names.iter().map(|&name| (lender(name), name)).collect();
    let begun = Instant::now();
    for (pair, name) in &lenders {
        // What was searched for before has to be paid for.
        while rung(pair, *name) {
            assert!(begun.elapsed() < Duration::from_secs(20), "{name:x} is not found");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    let before = board::searches();
    for _ in 0..3 {
        for (pair, name) in &lenders {
            assert!(!rung(pair, *name), "{name:x} is known, and its set is awake");
        }
    }
    assert_eq!(board::searches() - before, 0, "searches for 120 sends");
    // Nobody comes to a connection that is gone.
    for (pair, name) in lenders {
        close(pair);
        assert!(board::find(name).is_none());
    }
}

#[test]
fn what_no_board_is_called_finds_none() {
    let _alone = ONE_BY_ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let [asks, third] = [pair(), pair()];
    for _ in 0..3 {
        assert!(rung(&asks, 0), "on whose board was it noted?");
        std::thread::sleep(Duration::from_millis(300));
    }
    [asks, third].into_iter().for_each(close);
}

#[test]
fn names_that_no_board_has_are_seldom_searched_for() {
    const NAMES: u64 = 50_000;
    let _alone = ONE_BY_ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let pairs: Vec<_> = (0..20).map(|_| pair()).collect();
    // As in a program with so many descriptors: a search looks at them all.
    table::set_connecting(20_000);
    table::forget(20_000);
    let before = board::searches();
    for name in 1..=NAMES {
        assert!(board::find(name << 8).is_none());
    }
    let searches = board::searches() - before;
    assert!(searches < NAMES / 4, "{searches} searches");
    pairs.into_iter().for_each(close);
}

//! Copies of a socket that was not connected yet: one connection.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;

use beeline_sockets::{connection, table, young};
use beeline_sockets_monitor::{Monitor, Settings};

#[test]
fn a_copy_made_before_the_connection_is_the_same_connection() {
    let name = format!("beeline-test-copies-{}", std::process::id());
    // The only test of this file: nobody reads the environment meanwhile.
    unsafe { std::env::set_var("BEELINE_SOCKETS_MONITOR", name) };
    // The monitor here waits for a processor beside other tests: it is not given up for that.
    unsafe { std::env::set_var("BEELINE_SOCKETS_PATIENCE_MS", "20000") };
    unsafe { std::env::set_var("BEELINE_SOCKETS_ASK_AFTER", "0") };
    young::begin();
    table::begin();
    let mut monitor = Monitor::begin(Settings::default()).unwrap();
    std::thread::spawn(move || monitor.run(None));
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let copy = one.try_clone().unwrap();
    // As the library has it of a `connect` that did not wait, and a `dup` before it was done.
    table::set_connecting(one.as_raw_fd());
    table::duplicate(one.as_raw_fd(), copy.as_raw_fd());
    let other = listener.accept().unwrap().0;
    connection::accepted(other.as_raw_fd());
    let first = connection::find(one.as_raw_fd()).unwrap();
    let second = connection::find(copy.as_raw_fd()).unwrap();
    assert!(std::ptr::eq(first, second), "two connections of one socket");
    // The first to be closed says nothing to the other end.
    connection::closing(one.as_raw_fd());
    assert!(connection::find(copy.as_raw_fd()).is_some());
    let theirs = connection::find(other.as_raw_fd()).unwrap();
    let closed = &theirs.segment.other().signs.closed;
    assert_eq!(closed.load(std::sync::atomic::Ordering::SeqCst), 0);
    connection::closing(copy.as_raw_fd());
    assert_ne!(closed.load(std::sync::atomic::Ordering::SeqCst), 0);
    connection::closing(other.as_raw_fd());
    // And is no matter of the connections that come later: they are young, and the monitor is not asked.
    unsafe { std::env::set_var("BEELINE_SOCKETS_ASK_AFTER", "10") };
    young::begin();
    let later = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    table::set_connecting(later.as_raw_fd());
    assert!(connection::look(later.as_raw_fd()).is_none());
    assert!(matches!(table::kind(later.as_raw_fd()), table::Kind::Young));
}

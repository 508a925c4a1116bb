//! Pairs of connections: the kernel's, and accelerated ones without a monitor.

#![allow(dead_code, reason = "each test file uses its part")]

pub mod races;
pub mod returns;
pub mod steps;

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;

use beeline_os::Mapping;
use beeline_os::mapping::Protection;
use beeline_sockets::connection::Connection;
use beeline_sockets::segment::{Segment, length_bytes};
use beeline_sockets::table;

/// How often this thread has slept so far.
pub fn sleeps() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.unwrap().trim().parse().unwrap()
}

/// Two ends of the kernel's.
pub fn pair() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let other = listener.accept().unwrap().0;
    one.set_nodelay(true).unwrap();
    other.set_nodelay(true).unwrap();
    [one, other]
}

/// A fresh segment, as each of its ends maps it.
pub fn mapped_twice(ring_bytes: usize) -> [Mapping; 2] {
    let length = length_bytes(ring_bytes);
    let one = Mapping::memfd("test", length).unwrap();
    Segment::format(&one).unwrap();
    let fd = one.descriptor().unwrap().try_clone().unwrap();
    let other = Mapping::shared(fd, length, Protection::ReadWrite).unwrap();
    [one, other]
}

/// An accelerated pair, known to the table.
pub fn accelerated() -> [TcpStream; 2] {
    accelerated_by(256 << 10)
}

/// [`accelerated`] with rings of so many bytes.
pub fn accelerated_by(ring_bytes: usize) -> [TcpStream; 2] {
    let streams = pair();
    for (side, mapping) in mapped_twice(ring_bytes).into_iter().enumerate() {
        let fd = streams[side].as_raw_fd();
        let connection = Connection::new(Segment::take(mapping, side).unwrap(), fd);
        assert!(connection.join());
        table::set_ours(fd, Box::new(connection));
    }
    streams
}

/// A program's buffer.
pub fn piece(bytes: *mut u8, length: usize) -> [libc::iovec; 1] {
    [libc::iovec { iov_base: bytes.cast(), iov_len: length }]
}

/// The table, made once.
pub fn begin() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(table::begin);
}

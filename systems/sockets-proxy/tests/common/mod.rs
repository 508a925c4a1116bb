//! What the models of this folder share: a window whose writer may die at any post, and programs' ends of connections.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub, reason = "a part of several tests")]

use std::io::Write as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use beeline_ntb::bells::Silent;
use beeline_ntb::window::{Mapped, Wire};
use beeline_sockets::kernel::Errno;
use beeline_sockets::packets::Connection;
use beeline_sockets_proxy::partition::Key;

pub const SLOT: usize = 128;
pub const BLOCKS: usize = 16;
pub const LENGTH: usize = 64 << 10;

/// What a thread that was killed leaves by.
pub struct Killed;

/// A wire whose writer dies before one of its posts.
#[derive(Debug)]
pub struct Mortal {
    pub wire: Mapped,
    /// Posts that are left; never 0 before the last.
    pub left: Arc<AtomicU64>,
}

impl Mortal {
    fn one(&self) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            resume_unwind(Box::new(Killed));
        }
    }
}

impl Wire for Mortal {
    fn length_bytes(&self) -> usize {
        self.wire.length_bytes()
    }

    unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        self.one();
        // SAFETY: the caller's contract.
        unsafe { self.wire.post(offset, source, length) };
    }

    fn post_word(&self, offset: usize, value: u64) {
        self.one();
        self.wire.post_word(offset, value);
    }

    fn fence(&self) {
        self.wire.fence();
    }
}

/// A program's end of a connection, and what a keeper has of it.
pub struct Program {
    pub connection: Connection,
    pub fd: OwnedFd,
    pub memory: OwnedFd,
    pub socket: OwnedFd,
    pub key: Key,
    pub partition: usize,
}

impl Program {
    pub fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let piece =
            [libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() }];
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: our own bytes, which are only read.
        unsafe { self.connection.send(self.fd.as_raw_fd(), &piece, flags) }
    }

    pub fn receive(&self, most: usize) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; most];
        let piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: most }];
        // SAFETY: our own bytes.
        let count =
            unsafe { self.connection.receive(self.fd.as_raw_fd(), &piece, libc::MSG_DONTWAIT)? };
        bytes.truncate(count);
        Ok(bytes)
    }
}

/// What stands at a place of every stream.
pub fn byte(at: usize) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 7) as u8
}

/// A step of a generator of equal steps for equal seeds.
pub fn next(state: &mut u64) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed >> 33) as usize
}

/// A line that is seen past the harness's capture.
pub fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

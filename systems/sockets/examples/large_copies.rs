//! How large messages move best from one process to another without a kernel module: copied twice
//! through a ring, copied or not into pages that the reader then maps, or taken by the reader from
//! the sender's memory. `docs/sockets.md`, "Large sends", has what it found.
//!
//! Run with two idle processors: `cargo run --release -p beeline-sockets --example large_copies`.

#![expect(clippy::print_stdout, reason = "the table is what it is for")]

use std::os::fd::AsRawFd as _;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use beeline_os::Mapping;

const SIZES: [usize; 5] = [16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20];
const RING: usize = 256 << 10;
const PART: usize = 16 << 10;
/// Messages that can lie in the pages at once.
const PLACES: usize = 4;
const TOTAL: usize = 2 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// Two copies, through a ring.
    Ring,
    /// One copy into shared pages, which the reader maps.
    CopyAndMap,
    /// The bytes lie in shared pages already; the reader maps them.
    Map,
    /// One copy, by the reader, from the sender's memory.
    Take,
}

/// What the two share.
struct Shared {
    /// How far the sender and the reader came, a line each.
    words: Mapping,
    ring: Mapping,
    pages: Mapping,
}

const SENT: usize = 0;
const READ: usize = 1;

impl Shared {
    fn word(&self, index: usize) -> &AtomicU64 {
        // SAFETY: two words, 64 bytes apart, in a mapping of a page.
        let place = unsafe { self.words.base().add(index * 64) };
        // SAFETY: aligned and mapped as long as `self`; an atomic claims nothing about writers.
        unsafe { place.cast().as_ref() }
    }

    fn wait(&self, index: usize, least: u64) {
        while self.word(index).load(Ordering::Acquire) < least {
            std::hint::spin_loop();
        }
    }
}

fn run_on(processor: usize) {
    let mut set = rustix::thread::CpuSet::new();
    set.set(processor);
    // With one processor only, both stay where they are.
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Copies a message between ring and buffer, a part at a time, as the other side lets it.
fn through_ring(shared: &Shared, done: &mut u64, buffer: NonNull<u8>, size: usize, sends: bool) {
    for copied in (0..size).step_by(PART) {
        let next = *done + PART as u64;
        let place = *done as usize % RING;
        if sends {
            shared.wait(READ, next.saturating_sub(RING as u64));
        } else {
            shared.wait(SENT, next);
        }
        // SAFETY: the ring is a multiple of a part, so one ends within it.
        let inside = unsafe { shared.ring.base().add(place) };
        // SAFETY: the size is a multiple of a part, and the buffer has that many bytes.
        let outside = unsafe { buffer.add(copied) };
        let (from, to) = if sends { (outside, inside) } else { (inside, outside) };
        // SAFETY: both are valid for a part, and apart.
        unsafe { from.copy_to_nonoverlapping(to, PART) };
        *done = next;
        shared.word(if sends { SENT } else { READ }).store(next, Ordering::Release);
    }
}

fn send(shared: &Shared, way: Way, size: usize, buffer: &Mapping, count: u64) {
    let mut done = 0;
    for message in 0..count {
        match way {
            Way::Ring => through_ring(shared, &mut done, buffer.base(), size, true),
            Way::CopyAndMap | Way::Map => {
                shared.wait(READ, (message + 2).saturating_sub(PLACES as u64));
                if way == Way::CopyAndMap {
                    let place = message as usize % PLACES * size;
                    // SAFETY: the pages have that many places of that size.
                    let to = unsafe { shared.pages.base().add(place) };
                    // SAFETY: both are valid for a message, and apart.
                    unsafe { buffer.base().copy_to_nonoverlapping(to, size) };
                }
                shared.word(SENT).store(message + 1, Ordering::Release);
            }
            Way::Take => {
                shared.word(SENT).store(message + 1, Ordering::Release);
                shared.wait(READ, message + 1);
            }
        }
    }
}

/// Reads every line, as a program would that asked for the bytes.
fn look_at(buffer: NonNull<u8>, size: usize) -> u64 {
    (0..size).step_by(64).fold(0, |sum, place| {
        // SAFETY: within the buffer, a multiple of eight.
        let at = unsafe { buffer.add(place) };
        // SAFETY: as above; mapped memory is initialised.
        u64::wrapping_add(sum, unsafe { at.cast::<u64>().read_volatile() })
    })
}

/// The sender's process and its buffer's address.
type Sender = (i32, usize);

fn receive(shared: &Shared, way: Way, size: usize, buffer: &Mapping, count: u64, from: Sender) {
    let (mut done, mut sum) = (0, 0_u64);
    let target = buffer.base().as_ptr().cast::<libc::c_void>();
    for message in 0..count {
        match way {
            Way::Ring => through_ring(shared, &mut done, buffer.base(), size, false),
            Way::CopyAndMap | Way::Map => {
                shared.wait(SENT, message + 1);
                let pages = shared.pages.descriptor().map_or(-1, |pages| pages.as_raw_fd());
                let offset = (message as usize % PLACES * size) as i64;
                let rights = libc::PROT_READ | libc::PROT_WRITE;
                let kind = libc::MAP_PRIVATE | libc::MAP_FIXED;
                // SAFETY: replaces the buffer's own mapping, which nothing borrows, by as many bytes.
                let mapped = unsafe { libc::mmap(target, size, rights, kind, pages, offset) };
                assert_eq!(mapped, target, "the pages lie where the buffer did");
                // SAFETY: the range was just mapped.
                unsafe { libc::madvise(target, size, libc::MADV_POPULATE_READ) };
                // The pages of the message before this one are mapped no more.
                shared.word(READ).store(message, Ordering::Release);
            }
            Way::Take => {
                shared.wait(SENT, message + 1);
                let here = libc::iovec { iov_base: target, iov_len: size };
                let there = std::ptr::without_provenance_mut(from.1);
                let there = libc::iovec { iov_base: there, iov_len: size };
                // SAFETY: the buffer is ours; the sender's is the kernel's to look up.
                let taken = unsafe { libc::process_vm_readv(from.0, &here, 1, &there, 1, 0) };
                assert_eq!(usize::try_from(taken), Ok(size), "a child may read its parent");
                shared.word(READ).store(message + 1, Ordering::Release);
            }
        }
        sum = sum.wrapping_add(look_at(buffer.base(), size));
    }
    std::hint::black_box(sum);
}

/// Bytes a nanosecond.
fn measure(way: Way, size: usize) -> Result<f64, Box<dyn std::error::Error>> {
    let shared = Shared {
        words: Mapping::memfd("words", 4096)?,
        ring: Mapping::memfd("ring", RING)?,
        pages: Mapping::memfd("pages", PLACES * size)?,
    };
    let [near, far] = [Mapping::memfd("from", size)?, Mapping::memfd("to", size)?];
    for memory in [&near, &far, &shared.ring, &shared.pages] {
        // SAFETY: all of a mapping of ours.
        unsafe { memory.base().write_bytes(7, memory.length_bytes()) };
    }
    let count = (TOTAL / size).min(100_000) as u64;
    let sender = (i32::try_from(std::process::id())?, near.base().addr().get());
    let began = Instant::now();
    // SAFETY: this process has one thread; the child computes, makes system calls, and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        run_on(1);
        receive(&shared, way, size, &far, count, sender);
        // SAFETY: ends the child without what the parent registered for its own end.
        unsafe { libc::_exit(0) };
    }
    assert!(child > 0, "the kernel has room for another process");
    run_on(0);
    send(&shared, way, size, &near, count);
    let mut status = 0;
    // SAFETY: our child, and a place for its status.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the reader ended well");
    Ok(count as f64 * size as f64 / began.elapsed().as_nanos() as f64)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("GB/s, median of 5         ring  copy and map  map only      take");
    for size in SIZES {
        print!("{size:>12} bytes ");
        for way in [Way::Ring, Way::CopyAndMap, Way::Map, Way::Take] {
            let mut turns = [0.0; 5];
            for turn in &mut turns {
                *turn = measure(way, size)?;
            }
            turns.sort_by(f64::total_cmp);
            print!("{:>11.1}", turns[2]);
        }
        println!();
    }
    Ok(())
}

//! The packet lane: connections to other hosts through the proxy of this one.
//!
//! A program's library shares queues and blocks with the proxy (NTP), which carries packets through
//! memory windows; the proxy's monitor (NTM) makes connections. There is no kernel connection
//! beneath: addresses, ports, handshake and flow control are the proxies' (`docs/ntsocks.md`).
//!
//! - [`header`]: the eight bytes before each payload.
//! - [`channel`]: memory of one connection; [`page`]: what every program sees of its proxy.
//! - [`protocol`]: questions to the monitor; [`dial`]: connecting, listening, accepting.
//! - [`extents`]: memory of the other host in a program's hands.
//! - [`blocks`]: sending and receiving without a copy; [`connection`]: receiving and sending; `rings`: how a placeholder
//!   comes to say that there is something to read; [`options`]: socket options.

pub mod blocks;
pub mod channel;
pub mod connection;
pub mod dial;
pub mod extents;
pub mod header;
pub mod options;
pub mod page;
pub mod patience;
pub mod protocol;
mod rings;

pub use connection::Connection;

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::settled::Settled;

/// How long a connection that no number leads to keeps its memory, at least: what a signal handler has that
/// interrupted a call and sleeps.
const GRACE: Duration = Duration::from_secs(10);

static RETIRED: Mutex<Queue> = Mutex::new(Queue::new());

/// Connections that no number leads to any more.
#[derive(Debug)]
struct Queue {
    /// Oldest first, each with its time and the stamp of its sleepers.
    retired: VecDeque<(Duration, u64, &'static Connection)>,
    begun: Option<Instant>,
    settled: Settled,
}

impl Queue {
    const fn new() -> Self {
        Self { retired: VecDeque::new(), begun: None, settled: Settled::new() }
    }

    /// Time since the first connection went.
    fn clock(&mut self) -> Duration {
        self.begun.get_or_insert_with(Instant::now).elapsed()
    }

    fn add(&mut self, connection: &'static Connection) {
        let clock = self.clock();
        self.retired.push_back((clock, connection.sleep_stamp(), connection));
    }
}

/// The last number of `connection` is gone; a thread may still be inside a call on it. Where another
/// thread holds the list (or held it when this process was forked), the memory stays.
pub(crate) fn retire(connection: &'static Connection) {
    if let Ok(mut queue) = RETIRED.try_lock() {
        queue.add(connection);
    }
}

/// Gives back the oldest of the retired.
pub(crate) fn take_back() {
    let Ok(mut queue) = RETIRED.try_lock() else { return };
    for _ in 0..8 {
        let clock = queue.clock();
        let Some(&(since, stamp, connection)) = queue.retired.front() else { return };
        if clock.saturating_sub(since) < GRACE || since >= queue.settled.until(clock) {
            return;
        }
        queue.retired.pop_front();
        if connection.is_slept_on() || connection.sleep_stamp() != stamp {
            queue.add(connection);
            continue;
        }
        let place = std::ptr::from_ref(connection).cast_mut();
        // SAFETY: a leaked box that no number leads to; each thread that was inside a call when the last number
        // went has left it: no thread slept or woke since, and every other one was seen asleep elsewhere or has
        // run for longer than other calls (`settled`).
        drop(unsafe { Box::from_raw(place) });
    }
}

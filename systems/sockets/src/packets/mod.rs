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
//! - [`blocks`]: sending and receiving without a copy; [`connection`]: receiving and sending; [`options`]: socket options.

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

pub use connection::Connection;

use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// How long a connection that no number leads to keeps its memory: longer than any call that does
/// not sleep.
const GRACE: Duration = Duration::from_secs(10);

/// Oldest first, each with the stamp of its sleepers.
static RETIRED: Mutex<VecDeque<(Instant, u64, &'static Connection)>> = Mutex::new(VecDeque::new());

/// The last number of `connection` is gone; a thread may still be inside a call on it. Where another
/// thread holds the list (or held it when this process was forked), the memory stays.
pub(crate) fn retire(connection: &'static Connection) {
    if let Ok(mut retired) = RETIRED.try_lock() {
        retired.push_back((Instant::now(), connection.sleep_stamp(), connection));
    }
}

/// Gives back the oldest of the retired.
pub(crate) fn take_back() {
    let Ok(mut retired) = RETIRED.try_lock() else { return };
    for _ in 0..8 {
        let Some((since, stamp, connection)) =
            retired.pop_front_if(|(since, ..)| since.elapsed() >= GRACE)
        else {
            return;
        };
        if connection.is_slept_on() || connection.sleep_stamp() != stamp {
            retired.push_back((Instant::now(), connection.sleep_stamp(), connection));
            continue;
        }
        let _ = since;
        let place = std::ptr::from_ref(connection).cast_mut();
        // SAFETY: a leaked box that no number leads to; who was inside a call when the last number
        // went has left it: no thread slept or woke since, and the grace is longer than other calls.
        drop(unsafe { Box::from_raw(place) });
    }
}

//! How a device is opened, and how times become the device's codes.

use std::net::IpAddr;
use std::time::Duration;

/// How to open a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsConfig {
    /// The device's name (`mlx5_0`, `rxe0`). Default: the first with an active port.
    pub device: Option<String>,
    /// Its port, from 1. Default: the first active one.
    pub port: Option<u8>,
    /// Index into the port's table of addresses (GIDs). Default: on Ethernet the RoCE v2 entry of
    /// an IPv4 address (of `address`, if given), else any RoCE v2 entry; on InfiniBand the first.
    pub gid_index: Option<u8>,
    /// The IP address to prefer among the GIDs, and the one where peers reach this end's link
    /// socket. Default: the GID's own address; on InfiniBand, which has none, the address the
    /// bootstrap exchange was reached at.
    pub address: Option<IpAddr>,
    /// Largest packet on the path, bytes: 256, 512, 1024, 2048 or 4096. Default: the port's active
    /// size; the smaller of both ends is used.
    pub path_mtu_bytes: Option<u32>,
    /// Transport retries before a request fails, 0 to 7. Default 7. The retry time-out follows
    /// from the queue pair's `transport_timeout`.
    pub retry_count: u8,
    /// Reads and atomics outstanding on a queue pair, at most what both devices can. Default 16.
    pub max_outstanding_reads: u8,
    /// Inline data asked for, bytes; the device may give less. Default 220.
    pub inline_bytes: u32,
    /// Moderation of completion events, where the device has it: an event comes after so many
    /// completions, or so many microseconds. Default none: every completion may wake.
    pub moderation: Option<(u16, u16)>,
    /// Traffic class of packets (DSCP on RoCE). Default 0.
    pub traffic_class: u8,
    /// Idle queue pairs kept for reuse per completion queue. Default 16; 0 turns reuse off.
    pub reused_queue_pairs: usize,
    /// Links to peers' devices at a time, at most a quarter of the descriptors that the process may
    /// open. Default 4096; beyond, the caller that has been silent longest makes room.
    pub max_links: usize,
    /// The user vouches that what a read pushes out of the network card lies in the persistence
    /// domain of this machine: direct cache access is off for the card, or the caches are flushed
    /// when power fails. The device cannot know. Default false: peers' persistent flushes of this
    /// end's memory end with `PersistenceError`.
    pub reads_reach_persistence: bool,
}

impl Default for VerbsConfig {
    fn default() -> Self {
        Self {
            device: None,
            port: None,
            gid_index: None,
            address: None,
            path_mtu_bytes: None,
            retry_count: 7,
            max_outstanding_reads: 16,
            inline_bytes: 220,
            moderation: None,
            traffic_class: 0,
            reused_queue_pairs: 16,
            max_links: 4096,
            reads_reach_persistence: false,
        }
    }
}

/// Bytes of a path MTU code; 0 for an unknown one.
pub(crate) fn mtu_bytes(code: i32) -> u32 {
    match code {
        1..=5 => 128 << code,
        _ => 0,
    }
}

/// The code of the largest MTU that is at most `bytes`.
pub(crate) fn mtu_code(bytes: u32) -> Option<u8> {
    (1..=5_u8).rev().find(|code| mtu_bytes(i32::from(*code)) <= bytes)
}

/// What a receiver-not-ready timer code stands for, in units of 10 us.
const RNR_TIMERS: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024,
    1_536, 2_048, 3_072, 4_096, 6_144, 8_192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// How a bound on waiting for a receive is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotReady {
    /// The device counts the retries.
    Device {
        /// Timer code the receiver's queue pair sends in its refusals.
        timer: u8,
        /// Retries the sender's queue pair makes, 0 to 6.
        retries: u8,
    },
    /// The device retries for ever; the library's thread watches the time.
    Watched {
        /// As above.
        timer: u8,
    },
}

/// Retries without end.
pub(crate) const RETRY_FOR_EVER: u8 = 7;

impl NotReady {
    /// The smallest timer that reaches `bound` in six retries; beyond what six can reach (3.9 s)
    /// the library's thread watches.
    pub(crate) fn for_bound(bound: Duration) -> Self {
        let bound = u64::try_from(bound.as_micros() / 10).unwrap_or(u64::MAX).max(1);
        // Code 0 is the longest.
        let in_order = (1..32_u8).chain([0]);
        for timer in in_order {
            let each = u64::from(RNR_TIMERS[usize::from(timer)]);
            if each * 6 >= bound {
                // At most 6, just compared.
                let retries = bound.div_ceil(each) as u8;
                return Self::Device { timer, retries };
            }
        }
        Self::Watched { timer: 13 }
    }

    pub(crate) fn timer(self) -> u8 {
        match self {
            Self::Device { timer, .. } | Self::Watched { timer } => timer,
        }
    }

    pub(crate) fn retries(self) -> u8 {
        match self {
            Self::Device { retries, .. } => retries,
            Self::Watched { .. } => RETRY_FOR_EVER,
        }
    }
}

/// The acknowledgement time-out code (4.096 us times 2 to its power) with which `retries` retries
/// stay inside `bound`.
pub(crate) fn timeout_code(bound: Duration, retries: u8) -> u8 {
    let each = bound.as_nanos() / (u128::from(retries) + 1);
    // 4.096 us, in ns, doubled `code` times; 1 at least because 0 means for ever.
    (1..=31_u8).rev().find(|code| 4_096_u128 << code <= each).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mtu_codes_are_the_verbs_ones() {
        assert_eq!((1..=5).map(mtu_bytes).collect::<Vec<_>>(), [256, 512, 1024, 2048, 4096]);
        assert_eq!(mtu_code(1500), Some(3));
        assert_eq!(mtu_code(4096), Some(5));
        assert_eq!(mtu_code(100), None);
        assert_eq!(mtu_bytes(0), 0);
    }

    #[test]
    fn the_wait_for_a_receive_reaches_its_bound_and_not_much_more() {
        for ms in [1_u64, 5, 50, 80, 100, 333, 1_000, 2_500, 3_900] {
            let bound = Duration::from_millis(ms);
            let NotReady::Device { timer, retries } = NotReady::for_bound(bound) else {
                panic!("{ms} ms is within the device's reach");
            };
            assert!(retries <= 6);
            let each = Duration::from_micros(u64::from(RNR_TIMERS[usize::from(timer)]) * 10);
            let total = each * u32::from(retries);
            assert!(total >= bound, "{ms} ms: {total:?}");
            assert!(total <= bound.mul_f64(1.5), "{ms} ms: {total:?}");
        }
        for long in [4, 20, 60] {
            let kept = NotReady::for_bound(Duration::from_secs(long));
            assert_eq!(kept.retries(), RETRY_FOR_EVER);
        }
    }

    #[test]
    fn transport_time_outs_stay_inside_their_bound() {
        for (ms, retries) in [(10_000_u64, 7_u8), (5_000, 7), (1_000, 3), (100, 0), (1, 7)] {
            let bound = Duration::from_millis(ms);
            let code = timeout_code(bound, retries);
            let total = Duration::from_nanos(4_096 << code) * (u32::from(retries) + 1);
            assert!(total <= bound && total * 2 > bound, "{ms} ms: {total:?}");
        }
    }
}

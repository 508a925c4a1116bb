//! Bytes on the network: what batching and vector operations save, with the packets that clients send.
//!
//! Source: spec/kv-direct.md 5.5, 8 (table 5.3, figure 5.18).

use beeline_kv_direct::function::number;
use beeline_kv_direct::{Kind, PacketWriter, Request, Width};

use crate::platform::{CLOCK_HZ, NETWORK_BYTES, PACKET_OVERHEAD};

/// Bytes of a packet with `count` of an operation, overhead included.
fn packet_bytes(count: u16, mut request: impl FnMut(&mut PacketWriter, u16) -> bool) -> f64 {
    let mut packet = PacketWriter::new(1 << 20, 1 << 24);
    for index in 0..count {
        if !request(&mut packet, index) {
            break;
        }
    }
    packet.finish(0).len() as f64 + PACKET_OVERHEAD
}

/// PUTs a second of pairs of `pair_bytes` that the network carries, `batch` to a packet; one a cycle at most
/// is decoded.
#[must_use]
pub fn puts_a_second(pair_bytes: usize, batch: u16) -> f64 {
    let value_bytes = pair_bytes.saturating_sub(4).max(1);
    let bytes = packet_bytes(batch, |packet, index| {
        let value: Vec<u8> = (0..value_bytes).map(|at| (at as u16 ^ index) as u8).collect();
        packet.push(&Request::put(&u32::from(index).to_le_bytes(), &value))
    });
    CLOCK_HZ.min(NETWORK_BYTES / bytes * f64::from(batch))
}

/// Ways to add to every element of a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// One operation; nothing comes back.
    WithoutReturn,
    /// One operation; the vector comes back.
    WithReturn,
    /// A key for each element.
    KeyPerElement,
    /// The vector is read, changed by the client, and written back.
    FetchAndStore,
}

/// Bytes of vectors a second, for vectors of `bytes` of 8-byte elements, batches of 32.
#[must_use]
pub fn vector_rate(bytes: usize, way: Way) -> f64 {
    const BATCH: u16 = 32;
    let one = 1_u64.to_le_bytes();
    let updates = |wanted: bool| {
        packet_bytes(BATCH, |packet, index| {
            let key = u64::from(index).to_le_bytes();
            let kind = Kind::UpdateVectorByScalar;
            let request = Request::with_function(kind, &key, number::ADD, Width::Eight, &one);
            packet.push(&if wanted { request } else { request.without_return() })
        })
    };
    // The engine adds to 64 bytes a cycle.
    let engine = CLOCK_HZ * 64.0;
    let batch = f64::from(BATCH);
    match way {
        Way::WithoutReturn => engine.min(NETWORK_BYTES / updates(false) * batch * bytes as f64),
        Way::WithReturn => {
            let reply = PACKET_OVERHEAD + 6.0 + batch * (3.0 + bytes as f64);
            engine.min(NETWORK_BYTES / reply * batch * bytes as f64)
        }
        Way::KeyPerElement => {
            let reply = PACKET_OVERHEAD + 6.0 + batch * (3.0 + 8.0);
            // One key is decoded a cycle.
            CLOCK_HZ.min(NETWORK_BYTES / updates(true).max(reply) * batch) * 8.0
        }
        // One client at a time may hold the vector: two round trips, and the vector over the wire twice.
        Way::FetchAndStore => bytes as f64 / (2.0e-6 + 2.0 * bytes as f64 / NETWORK_BYTES),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batching_gains_about_four_times_for_small_pairs() {
        let gain = puts_a_second(10, 64) / puts_a_second(10, 1);
        assert!((3.5..4.5).contains(&gain), "{gain}");
        assert!(puts_a_second(62, 64) / puts_a_second(62, 1) < gain, "less for larger pairs");
    }

    #[test]
    fn vectors_come_in_the_papers_order() {
        for bytes in [64, 256, 1024] {
            let rate = |way| vector_rate(bytes, way);
            let (without, with) = (rate(Way::WithoutReturn), rate(Way::WithReturn));
            assert!(without > with, "{bytes}");
            assert!(with > rate(Way::KeyPerElement), "{bytes}");
            assert!(rate(Way::KeyPerElement) > rate(Way::FetchAndStore), "{bytes}");
        }
    }
}

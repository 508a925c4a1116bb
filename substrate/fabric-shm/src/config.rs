//! Settings of a device.

use std::time::Duration;

/// How an shm device behaves. Every field has a default that suits most uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmConfig {
    /// Message slots per inbound direction of a queue pair that uses a shared receive queue, and
    /// the least for any other. A power of two, 16 to 65536; default 256 (16 KiB, touched lazily).
    pub ring_slots: u32,
    /// Bytes for sends longer than [`crate::INLINE_MESSAGE_BYTES`], per inbound direction. A power
    /// of two, 256 KiB to 16 MiB; default 512 KiB (touched lazily).
    pub payload_bytes: u32,
    /// How long [`beeline_fabric::CompletionQueue::wait`] polls before it sleeps. Default 20 us:
    /// about two sleeps' worth.
    pub spin: Duration,
    /// Queue pairs that a completion queue polls every time however quiet they are; beyond them,
    /// a quiet one goes cold and is heard through its doorbell. Default 16.
    pub always_hot: u32,
}

impl Default for ShmConfig {
    fn default() -> Self {
        Self {
            ring_slots: 256,
            payload_bytes: 512 << 10,
            spin: Duration::from_micros(20),
            always_hot: 16,
        }
    }
}

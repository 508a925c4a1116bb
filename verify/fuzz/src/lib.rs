//! Every decoder of bytes that somebody else wrote, as a function that has to survive any bytes.
//!
//! - [`TARGETS`]: decoder, what must hold for every input, and inputs to begin from.
//! - [`mutate`]: inputs made from those, from one seed.
//!
//! Two drivers share the targets: `tests/mutations.rs` runs seeded mutations in this process, for
//! a moment in `cargo xtask check` and for minutes in `cargo xtask deep`; `fuzz/` hands them to
//! libFuzzer, which is guided by coverage, where `cargo fuzz` is installed.
//!
//! A target panics when something that must hold does not. It returns true when the decoder took
//! the input, so that a run shows how deep it got.

#![allow(clippy::expect_used, clippy::panic, reason = "a target ends at what must not be")]

mod direct;
pub mod mutate;
mod network;
mod network_functions;
mod replicated;
mod sockets;
mod storage;
mod windows;

/// A decoder with what to begin from.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name, as in `fuzz/fuzz_targets`.
    pub name: &'static str,
    /// Decodes and checks; true when the input was taken.
    pub run: fn(&[u8]) -> bool,
    /// Good inputs.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// All of them.
pub const TARGETS: [Target; 16] = [
    Target { name: "direct_packets", run: direct::packets, seeds: direct::packet_seeds },
    Target { name: "tcp_frames", run: network::tcp_frames, seeds: network::tcp_frame_seeds },
    Target { name: "tcp_greeting", run: network::tcp_greeting, seeds: network::greeting_seeds },
    Target { name: "bootstrap", run: network::bootstrap, seeds: network::bootstrap_seeds },
    Target { name: "kv_wire", run: network::kv_wire, seeds: network::kv_wire_seeds },
    Target { name: "resp", run: network::resp, seeds: network::resp_seeds },
    Target { name: "glob", run: network::glob, seeds: network::glob_seeds },
    Target { name: "snapshot", run: storage::snapshot, seeds: storage::snapshot_seeds },
    Target { name: "pool", run: storage::pool, seeds: storage::pool_seeds },
    Target { name: "socket_records", run: sockets::records, seeds: sockets::record_seeds },
    Target { name: "relay_messages", run: sockets::relay_messages, seeds: sockets::message_seeds },
    Target { name: "unit", run: replicated::unit, seeds: replicated::unit_seeds },
    Target { name: "socket_segment", run: sockets::segment, seeds: sockets::segment_seeds },
    Target { name: "nf_source", run: network_functions::source, seeds: network_functions::seeds },
    Target { name: "window_records", run: windows::records, seeds: windows::record_seeds },
    Target { name: "window_memory", run: windows::memory, seeds: windows::memory_seeds },
];

/// The target of this name.
///
/// # Panics
///
/// When there is none.
#[must_use]
pub fn target(name: &str) -> Target {
    let found = TARGETS.into_iter().find(|target| target.name == name);
    found.unwrap_or_else(|| panic!("there is no target {name}"))
}

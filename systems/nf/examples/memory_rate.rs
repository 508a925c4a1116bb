//! Packets a second from capture to capture in memory, on one core: parser, checksum, counter.
//!
//! `cargo run --release -p beeline-nf --example memory_rate` shows eight figures, the first with new
//! memory. `beeline bench nf --parts memory` shows the same beside others; this one builds in less
//! time and is easy to profile. A graph of one's own may follow, and a number of threads.

#![allow(clippy::print_stdout, reason = "an example shows its figures")]

use std::time::Instant;

use beeline_nf::engine::run_memory;
use beeline_nf::load::compile;
use beeline_nf::pcap::Writer;
use beeline_nf::sides::{Ahead, LinkOptions, Plan};

const GRAPH: &str = "L4_Parser :: parser\nIPChecksum :: sum\nCount :: cnt\n\
                     from_tor -> {256} parser -> sum -> cnt -> {256} to_tor\n";
const PACKETS: u32 = 1_000_000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut words = std::env::args().skip(1);
    let graph = words.next().unwrap_or_else(|| GRAPH.to_owned());
    let threads = words.next().map_or(Ok(1), |word| word.parse())?;
    let link = LinkOptions { threads, ..LinkOptions::default() };
    let loaded = compile("rate.np", graph, None);
    let graph = &loaded.compiled.graph;
    let mut capture = Writer::new(Vec::new())?;
    for at in 0..PACKETS {
        let mut packet = [0; 64];
        packet[12..15].copy_from_slice(&[8, 0, 0x45]);
        packet[16..18].copy_from_slice(&50_u16.to_be_bytes());
        packet[22..24].copy_from_slice(&[64, 6]);
        packet[26..30].copy_from_slice(&at.to_be_bytes());
        capture.write(u64::from(at), &packet)?;
    }
    let capture = capture.finish()?;
    let plan = Plan::threaded(graph, threads)?;
    let ahead = Ahead::of(&plan)?;
    println!("threads: {}", plan.threads());
    let mut old = Vec::new();
    for _ in 0..8 {
        let start = Instant::now();
        let (counts, files) =
            run_memory(graph, (&|graph| ahead.machines(graph), link), &[&capture], &[], old)?;
        let rate = f64::from(PACKETS) / start.elapsed().as_secs_f64() / 1e6;
        println!("{rate:.2} Mpps, {} packets out, {} bytes", counts.packets_out, files[0].len());
        old = files;
    }
    Ok(())
}

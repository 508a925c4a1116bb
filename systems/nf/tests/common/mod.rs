//! A graph fed by hand: packets in, packets out, without files.

#![allow(clippy::unwrap_used, clippy::panic, dead_code)]

use beeline_ir::flits::{Joiner, WORDS, split};
use beeline_ir::graph::Graph;
use beeline_ir::run::{Machine, Run};
use beeline_native::{NativeMachine, Program};
use beeline_nf::load::{Loaded, compile};

/// Compiles; panics with the messages.
pub fn compiled(text: &str) -> Loaded {
    let loaded = compile("test.np", text.to_owned(), None);
    assert!(!loaded.diagnostics.failed(), "{}", loaded.diagnostics.render(&loaded.sources));
    loaded
}

/// A run as machine code.
pub fn native(graph: &Graph) -> Run<'_, NativeMachine> {
    Run::new(graph, Program::compile(graph).unwrap().machines()).unwrap()
}

/// Sends packets through the graph's first input; what each output gave.
pub fn play<M: Machine>(
    graph: &Graph,
    run: &mut Run<'_, M>,
    packets: &[(u64, Vec<u8>)],
) -> Vec<Vec<Vec<u8>>> {
    let mut items: Vec<u64> = Vec::new();
    for (time, packet) in packets {
        split(packet, *time, |flit| items.extend(flit));
    }
    let mut joiners: Vec<Joiner> = graph.outputs.iter().map(|_| Joiner::default()).collect();
    let mut out = vec![Vec::new(); graph.outputs.len()];
    let mut sent = 0;
    let input = graph.inputs.first().map(|input| input.channel);
    run.settle(64, u64::MAX, |run| {
        let mut moved = false;
        if let Some(input) = input {
            while sent < items.len() && run.channel_mut(input).push(&items[sent..sent + WORDS]) {
                sent += WORDS;
                moved = true;
            }
        }
        let mut flit = [0; WORDS];
        for (at, output) in graph.outputs.iter().enumerate() {
            while run.channel_mut(output.channel).pop(&mut flit) {
                moved = true;
                if let Ok(Some((bytes, _))) = joiners[at].push(&flit) {
                    out[at].push(bytes.to_vec());
                }
            }
        }
        moved
    })
    .unwrap();
    assert_eq!(sent, items.len(), "the graph did not take every flit");
    out
}

/// An IPv4 packet of 64 bytes, with a number in its payload.
pub fn packet(key: beeline_nf::functions::rules::Key, flags: u8, number: u32) -> Vec<u8> {
    let mut bytes = vec![0_u8; 64];
    bytes[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
    bytes[12..15].copy_from_slice(&[8, 0, 0x45]);
    bytes[16..18].copy_from_slice(&50_u16.to_be_bytes());
    bytes[22] = 64;
    bytes[23] = key.protocol;
    bytes[26..30].copy_from_slice(&key.source.to_be_bytes());
    bytes[30..34].copy_from_slice(&key.destination.to_be_bytes());
    bytes[34..38].copy_from_slice(&key.ports.to_be_bytes());
    bytes[47] = flags;
    bytes[58..62].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// The number in a packet's payload.
pub fn number(packet: &[u8]) -> u32 {
    u32::from_be_bytes(packet[58..62].try_into().unwrap())
}

/// Pseudo-random numbers.
pub struct Dice(pub u64);

impl Dice {
    /// Below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % limit
    }

    /// One of a list.
    pub fn of<T: Copy>(&mut self, list: &[T]) -> T {
        list[usize::try_from(self.below(list.len() as u64)).unwrap()]
    }
}

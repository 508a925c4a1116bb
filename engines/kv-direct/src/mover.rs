//! Brings pairs to the servers they belong to from now on, and asks and tells servers about the map.
//!
//! A batch is cut into packets for each processor of its destination. A packet that was sent and not
//! answered is sent again, the same under the same sequence, over a new connection, until there is an
//! answer: only then it is known where its pairs are.
//!
//! Blocks; a thread for each processor that gives pairs away calls it.

use std::collections::HashMap;
use std::time::Duration;

use crate::client::Connect;
use crate::link::{Link, LinkError};
use crate::map::AdoptWriter;
use crate::packet::{Kind, Request, Status};
use crate::processor::moves::{MoveBatch, Pair};
use crate::ring::processor_of;

/// Bytes of pairs in one packet.
const PACKET_PAIRS: usize = 12 << 10;
/// Between two tries to reach a server.
const PAUSE: Duration = Duration::from_millis(50);
/// How long a call polls before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

/// Executes one operation about the map on a link.
///
/// Errors: [`LinkError`]; the link is broken then.
pub fn control(
    link: &mut Link,
    request: &Request<'_>,
) -> Result<(Status, Option<Vec<u8>>), LinkError> {
    let mut packet = link.packet();
    if !packet.push(request) {
        return Err(LinkError::Protocol);
    }
    link.submit(&mut packet)?;
    let mut answer = None;
    while answer.is_none() {
        link.wait(SPIN, |_, mut results| {
            let result = results.next().unwrap_or((Status::Malformed, None));
            answer = Some((result.0, result.1.map(<[u8]>::to_vec)));
        })?;
    }
    answer.ok_or(LinkError::Protocol)
}

/// How a batch ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Carried {
    /// For each pair of each part, whether it is at its server.
    pub adopted: Vec<Vec<bool>>,
    /// Why some are not, for people; empty where all are.
    pub note: String,
}

/// What a [`Mover`] asks its caller while it works.
pub trait Watch {
    /// Whether to go on trying.
    fn goes_on(&mut self) -> bool;
    /// What holds the batch up.
    fn held_up(&mut self, note: &str);
}

/// See the module's documentation. Stays on its thread.
pub struct Mover {
    connect: Box<dyn Connect>,
    sender: u64,
    sequence: u64,
    /// By server: a link to each processor.
    links: HashMap<String, Vec<Link>>,
}

impl std::fmt::Debug for Mover {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mover").field("sender", &self.sender).finish_non_exhaustive()
    }
}

/// One ADOPT: the pairs of `part` that it holds, and its value.
struct Packet {
    processor: usize,
    pairs: Vec<usize>,
    value: Vec<u8>,
}

impl Mover {
    /// A mover; no other may have the number `sender` while servers remember it: draw it at random.
    #[must_use]
    pub fn new(connect: Box<dyn Connect>, sender: u64) -> Self {
        Self { connect, sender, sequence: 0, links: HashMap::new() }
    }

    /// Brings a batch to its servers. `None` where the watch said to stop before it was known where all
    /// pairs are.
    pub fn carry(&mut self, batch: &MoveBatch, watch: &mut dyn Watch) -> Option<Carried> {
        let mut carried = Carried::default();
        for (server, pairs) in &batch.parts {
            let mut adopted = vec![false; pairs.len()];
            match self.connected(server) {
                // Nothing of it was sent: the pairs are where they were.
                Err(error) => carried.note = format!("{server}: {error}"),
                Ok(processors) => {
                    for packet in self.packets(batch.state, pairs, processors) {
                        let (count, note) = self.deliver(server, &packet, watch)?;
                        packet.pairs[..count].iter().for_each(|&pair| adopted[pair] = true);
                        if let Some(note) = note {
                            carried.note = note;
                        }
                    }
                }
            }
            carried.adopted.push(adopted);
        }
        Some(carried)
    }

    /// Links to all processors of a server; how many those are.
    fn connected(&mut self, server: &str) -> Result<usize, LinkError> {
        let links = self.links.entry(server.to_owned()).or_default();
        if links.is_empty() || links.iter().any(Link::is_broken) {
            links.clear();
            let (first, processors) = self.connect.connect(server, 0)?;
            links.push(first);
            for processor in 1..processors {
                links.push(self.connect.connect(server, processor)?.0);
            }
        }
        Ok(links.len())
    }

    fn packets(&mut self, state: u32, pairs: &[Pair], processors: usize) -> Vec<Packet> {
        let mut packets = Vec::new();
        for processor in 0..processors {
            let mine = |(_, (key, _)): &(usize, &Pair)| {
                processor_of(key, processors as u32) as usize == processor
            };
            let mut pairs = pairs.iter().enumerate().filter(mine).peekable();
            while pairs.peek().is_some() {
                self.sequence += 1;
                let mut writer = AdoptWriter::new(self.sequence, state);
                let mut held = Vec::new();
                while let Some(&(index, (key, value))) = pairs.peek()
                    && writer.push(key, value, PACKET_PAIRS)
                {
                    held.push(index);
                    pairs.next();
                }
                packets.push(Packet { processor, pairs: held, value: writer.bytes().to_vec() });
            }
        }
        packets
    }

    /// How many of a packet's pairs, from the first on, its server has now, and why not all.
    fn deliver(
        &mut self,
        server: &str,
        packet: &Packet,
        watch: &mut dyn Watch,
    ) -> Option<(usize, Option<String>)> {
        let sender = self.sender.to_le_bytes();
        let request = Request::control(Kind::Adopt, &sender, &packet.value);
        loop {
            let answer = self.connected(server).and_then(|_| {
                let link = self.links.get_mut(server).and_then(|all| all.get_mut(packet.processor));
                control(link.ok_or(LinkError::Protocol)?, &request)
            });
            match answer {
                Ok((Status::Ok, count)) => {
                    let count = count.and_then(|bytes| bytes.try_into().ok());
                    let count = count.map_or(0, u32::from_le_bytes) as usize;
                    let count = count.min(packet.pairs.len());
                    let full = (count < packet.pairs.len())
                        .then(|| format!("{server} has no memory left for more pairs"));
                    return Some((count, full));
                }
                Ok((status, _)) => {
                    let note = format!("{server} takes no part in this change ({status:?})");
                    return Some((0, Some(note)));
                }
                Err(error) => {
                    watch.held_up(&format!("{server}: {error}"));
                    self.links.remove(server);
                }
            }
            if !watch.goes_on() {
                return None;
            }
            std::thread::sleep(PAUSE);
        }
    }
}

//! Keys move between processors in every order that a seed draws: operations of clients with old and new
//! maps, packets of pairs that come late and twice, servers that are told at different times. Each result is
//! that of a plain map.
#![cfg(not(loom))]
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)]

use std::collections::HashMap;
use std::sync::Arc;

use beeline_env::Randomness;
use beeline_kv_direct::function::number;
use beeline_kv_direct::map::AdoptWriter;
use beeline_kv_direct::memory::HostMemory;
use beeline_kv_direct::processor::moves::{MoveBatch, MoveStep, PLAIN};
use beeline_kv_direct::{
    Functions, HashRing, Kind, MapReport, PacketWriter, Processor, ProcessorOptions, ReplyReader,
    Request, ServerMap, Status, Width,
};

const SERVERS: usize = 3;
const KEYS: u64 = 40;

fn ring(servers: &[usize]) -> HashRing {
    HashRing::new(servers.iter().map(ToString::to_string))
}

/// The packet of one part of a batch.
#[derive(Clone)]
struct Adopt {
    to: usize,
    value: Vec<u8>,
    pairs: usize,
}

/// A batch under way from one server: its packets, and how many pairs of each were adopted.
struct Under {
    batch: MoveBatch,
    packets: Vec<(Adopt, Option<usize>)>,
}

struct World {
    random: Randomness,
    processors: Vec<Processor<HostMemory>>,
    /// The map that servers are being told, in which order, and how many were told.
    map: ServerMap,
    order: Vec<usize>,
    told: usize,
    under: Vec<Option<Under>>,
    sequences: [u64; SERVERS],
    /// Packets that the network delivers once more, some time.
    late: Vec<(usize, Adopt)>,
    /// The planted bug: a packet that is sent again is numbered anew.
    renumbers: bool,
    /// What clients know.
    clients: Vec<ServerMap>,
    plain: HashMap<u64, u64>,
    wrong: u32,
}

type Answer = (Status, Option<Vec<u8>>);

impl World {
    fn new(seed: u64, renumbers: bool) -> Self {
        let options = ProcessorOptions { memory_bytes: 8 << 20, ..ProcessorOptions::default() };
        let functions = Arc::new(Functions::default());
        let processor = || Processor::new(&options, Arc::clone(&functions), false).unwrap().0;
        let first = ServerMap { ring: ring(&[0, 1]), ..ServerMap::default() };
        Self {
            random: Randomness::new(seed),
            processors: (0..SERVERS).map(|_| processor()).collect(),
            map: first.clone(),
            order: Vec::new(),
            told: 0,
            under: (0..SERVERS).map(|_| None).collect(),
            sequences: [0; SERVERS],
            late: Vec::new(),
            renumbers,
            clients: vec![first; 3],
            plain: HashMap::new(),
            wrong: 0,
        }
    }

    fn send(&mut self, to: usize, state: u32, request: &Request<'_>) -> Answer {
        let (mut packet, mut reply) = (PacketWriter::new(1 << 16, 1 << 18), Vec::new());
        packet.set_state(state);
        assert!(packet.push(request));
        assert!(self.processors[to].process(packet.finish(0), &mut reply, 1 << 18));
        let (status, bytes) = ReplyReader::new(&reply).unwrap().1.next().unwrap();
        (status, bytes.map(<[u8]>::to_vec))
    }

    fn report(&mut self, of: usize) -> MapReport {
        let (_, bytes) = self.send(of, 0, &Request::control(Kind::Map, PLAIN, &[]));
        MapReport::decode(&bytes.unwrap()).unwrap()
    }

    /// Begins to tell a map; the first of its order decides.
    fn tell(&mut self, map: ServerMap) {
        let ring = if map.is_moving() { &map.old } else { &map.ring };
        self.order = ring.servers().iter().map(|name| name.parse().unwrap()).collect();
        self.order
            .extend((0..SERVERS).filter(|server| map.ring.position(&server.to_string()).is_some()));
        (self.map, self.told) = (map, 0);
    }

    fn told_all(&self) -> bool {
        self.told == self.order.len()
    }

    fn finished(&mut self) -> bool {
        self.told_all() && (0..SERVERS).all(|server| self.report(server).finished)
    }

    /// Something happens that is no client's doing.
    fn step(&mut self) {
        let server = self.random.below(SERVERS as u64) as usize;
        match self.random.below(7) {
            0 if !self.told_all() => {
                let to = self.order[self.told];
                let map = self.map.for_server(&to.to_string()).encode();
                let request = Request::control(Kind::SetMap, PLAIN, &map);
                let (status, _) = self.send(to, 0, &request);
                assert_eq!(status, Status::Ok, "server {to} takes state {}", self.map.state);
                self.told += 1;
            }
            1 | 2 if self.under[server].is_none() => {
                let bytes = self.random.below(200) as usize;
                if let MoveStep::Batch(batch) = self.processors[server].next_batch(4000, bytes) {
                    let packets = batch.parts.iter().map(|(to, pairs)| {
                        self.sequences[server] += 1;
                        let mut writer = AdoptWriter::new(self.sequences[server], batch.state);
                        pairs.iter().for_each(|(k, v)| assert!(writer.push(k, v, 1 << 15)));
                        let (to, pairs) = (to.parse().unwrap(), pairs.len());
                        (Adopt { to, value: writer.bytes().to_vec(), pairs }, None)
                    });
                    let packets = packets.collect();
                    self.under[server] = Some(Under { batch, packets });
                }
            }
            3 | 4 => {
                let Some(mut under) = self.under[server].take() else { return };
                let lost = self.random.chance(1, 4);
                if let Some((packet, count)) =
                    under.packets.iter_mut().find(|(_, count)| count.is_none())
                {
                    self.late.push((server, packet.clone()));
                    let answer = self.adopt(server, packet);
                    // Where the answer is lost, the packet is sent again.
                    if !lost {
                        *count = Some(answer);
                    } else if self.renumbers {
                        self.sequences[server] += 1;
                        packet.value[..8].copy_from_slice(&self.sequences[server].to_le_bytes());
                    }
                }
                self.under[server] = Some(under);
            }
            5 => {
                let done = |under: &Under| under.packets.iter().all(|(_, count)| count.is_some());
                let Some(under) = self.under[server].take_if(|under| done(under)) else { return };
                let adopted: Vec<Vec<bool>> = under
                    .packets
                    .iter()
                    .map(|(packet, count)| {
                        (0..packet.pairs).map(|at| at < count.unwrap()).collect()
                    })
                    .collect();
                self.processors[server].batch_done(under.batch.state, &adopted, "");
            }
            6 if !self.late.is_empty() => {
                let at = self.random.below(self.late.len() as u64) as usize;
                let (from, mut packet) = self.late.swap_remove(at);
                if self.renumbers {
                    self.sequences[from] += 1;
                    packet.value[..8].copy_from_slice(&self.sequences[from].to_le_bytes());
                }
                self.adopt(from, &packet);
            }
            _ => {}
        }
    }

    fn adopt(&mut self, from: usize, packet: &Adopt) -> usize {
        let sender = (from as u64).to_le_bytes();
        let request = Request::control(Kind::Adopt, &sender, &packet.value);
        match self.send(packet.to, 0, &request) {
            (Status::Ok, Some(count)) => u32::from_le_bytes(count.try_into().unwrap()) as usize,
            _ => 0,
        }
    }

    /// An operation as the client library does it, with other things between its attempts.
    fn operation(&mut self) {
        let key = self.random.below(KEYS);
        let name = key.to_le_bytes();
        let new = self.random.below(1000);
        let new_bytes = new.to_le_bytes();
        let (what, before) = (self.random.below(6), self.plain.get(&key).copied());
        let (request, after) = match what {
            0 | 1 => (Request::put(&name, &new_bytes), Some(new)),
            2 => (Request::delete(&name), None),
            3 => {
                let (kind, add) = (Kind::UpdateScalar, number::ADD);
                let request = Request::with_function(kind, &name, add, Width::Eight, &new_bytes);
                (request, before.map(|before| before + new))
            }
            _ => (Request::get(&name), before),
        };
        let client = self.random.below(self.clients.len() as u64) as usize;
        let mut gone = false;
        for _ in 0..100_000 {
            let map = self.clients[client].clone();
            let ring = if map.is_moving() && !gone { &map.old } else { &map.ring };
            let to: usize = ring.servers()[ring.server_of(&name).unwrap()].parse().unwrap();
            let (status, bytes) = self.send(to, map.state, &request);
            if !status.is_elsewhere() {
                let there =
                    if before.is_some() || what < 2 { Status::Ok } else { Status::NotFound };
                let value = before.filter(|_| what > 2).map(|before| before.to_le_bytes().to_vec());
                self.wrong += u32::from((status, bytes) != (there, value));
                match after {
                    Some(after) => self.plain.insert(key, after),
                    None => self.plain.remove(&key),
                };
                return;
            }
            let theirs = self.report(to).map;
            if theirs.state > map.state {
                (self.clients[client], gone) = (theirs, false);
            } else if status == Status::Moved && theirs.state == map.state && map.is_moving() {
                gone = true;
            }
            self.step();
        }
        panic!("the operation comes to its end");
    }

    fn run(&mut self) {
        for _ in 0..120 {
            self.operation();
        }
        let changes =
            [(vec![0, 1], vec![0, 1, 2]), (vec![0, 1, 2], vec![1, 2]), (vec![1, 2], vec![2])];
        for (old, new) in changes {
            let state = self.map.state + 1;
            let me = String::new();
            self.tell(ServerMap { state, me: me.clone(), old: ring(&old), ring: ring(&new) });
            while !self.finished() {
                self.step();
                if self.random.chance(1, 3) {
                    self.operation();
                }
            }
            self.tell(ServerMap {
                state: state + 1,
                me,
                old: HashRing::default(),
                ring: ring(&new),
            });
            while !self.told_all() || self.random.chance(19, 20) {
                self.step();
                if self.random.chance(1, 3) {
                    self.operation();
                }
            }
        }
        for _ in 0..120 {
            self.operation();
        }
        let held: u64 = [1, 2].map(|server| self.report(server).pairs).iter().sum();
        self.wrong += u32::from(held != self.plain.len() as u64);
    }
}

#[test]
fn results_are_those_of_one_map_whatever_the_order_of_the_moves() {
    let seeds = if std::env::var_os("BEELINE_DEEP").is_some() { 20_000 } else { 60 };
    for seed in 1..=seeds {
        let mut world = World::new(seed, false);
        world.run();
        assert_eq!(world.wrong, 0, "seed {seed}");
        let moved: u64 = world.processors.iter().map(|processor| processor.moves().0).sum();
        assert!(moved > 0, "seed {seed} moves keys");
    }
}

/// The planted bug: without its old sequence, a packet that comes late overwrites what came after it.
#[test]
fn a_sender_that_numbers_packets_anew_is_found() {
    let found = (1..=300).any(|seed| {
        let mut world = World::new(seed, true);
        world.run();
        world.wrong > 0
    });
    assert!(found, "no seed shows the packet that came late");
}

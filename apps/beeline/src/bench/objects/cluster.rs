//! What connections cost, and several nodes that fetch from each other.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_fabric::Access;
use beeline_fabric_open::open;
use beeline_objects::cluster::Move;

use super::nodes::{Node, Rack, WAIT, url};
use super::{Bench, size_name};
use crate::bench::report::{Better, Report, Row, number};
use crate::bench::turns::{Contender, alternate};

const SMALL: u64 = 1 << 10;

/// Buffers of one connection.
const BUFFERS: usize = 28 * (64 << 10);

/// Microseconds of making and registering the buffers of a connection: the most that keeping them saves.
fn buffers(provider: &str, rounds: u64) -> anyhow::Result<f64> {
    let device = open(&url(provider))?;
    let domain = device.allocate_protection_domain()?;
    let mut took = Duration::ZERO;
    for _ in 0..rounds {
        let start = Instant::now();
        let memory = device.allocate_memory(BUFFERS)?;
        drop(domain.register(memory, Access::LOCAL_WRITE)?);
        took += start.elapsed();
    }
    Ok(took.as_secs_f64() * 1e6 / f64::from(u32::try_from(rounds)?))
}

/// How a fetch finds its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Connection {
    /// There from the fetch before.
    Kept,
    /// Made anew, with the buffers of the one before.
    Buffers,
    /// Made anew, with new buffers at both ends.
    Nothing,
}

/// Ends the connection, at both ends.
fn disconnect(near: &Node, far: &Node) -> anyhow::Result<()> {
    near.manager.disconnect();
    let start = Instant::now();
    loop {
        far.manager.publish();
        if far.manager.metrics().objects_serving_peers.value() == 0 {
            return Ok(());
        }
        anyhow::ensure!(start.elapsed() < WAIT, "the connection does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Microseconds of a small fetch by what was kept of its connection.
pub fn connections(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    for provider in &bench.arguments.providers {
        let folder = tempfile::tempdir()?;
        let rack = Rack::default();
        let memory = 64 << 20;
        let start = |name: &str| {
            Node::start(&rack, provider, &folder.path().join(name), memory, Move::Sent)
        };
        let (far, near) = (start("far")?, start("near")?);
        let id = far.put(SMALL)?;
        near.fetch(id, far.address)?;
        let turn = |connection: Connection| {
            let (near, far) = (&near, &far);
            move || -> anyhow::Result<f64> {
                let mut took = Duration::ZERO;
                let rounds = bench.options.size(5, 1);
                for _ in 0..rounds {
                    if connection != Connection::Kept {
                        disconnect(near, far)?;
                    }
                    if connection == Connection::Nothing {
                        near.manager.forget_buffers();
                        far.manager.forget_buffers();
                    }
                    took += near.fetch(id, far.address)?;
                }
                Ok(took.as_secs_f64() * 1e6 / f64::from(u32::try_from(rounds)?))
            }
        };
        let kinds = [
            ("connection kept", Connection::Kept),
            ("new, buffers kept", Connection::Buffers),
            ("new, new buffers", Connection::Nothing),
        ];
        let mut contenders: Vec<_> =
            kinds.iter().map(|(name, kind)| Contender::new(name, turn(*kind))).collect();
        let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
        drop(contenders);
        let case = format!("fetch {} over {provider}", size_name(SMALL));
        for (index, (name, _)) in kinds.iter().enumerate() {
            let row = Row::new(&case, *name, "us", Better::Lower, &figures[index]);
            let row = match index {
                2 => row,
                _ => row.against(kinds[2].0, &figures[index], &figures[2]),
            };
            report.tell(row, bench.output)?;
        }
        let rounds = bench.options.size(20, 1);
        let turns = 0..bench.options.turns();
        let alone = turns.map(|_| buffers(provider, rounds)).collect::<anyhow::Result<Vec<_>>>()?;
        let case = format!("buffers of a connection over {provider}");
        report.tell(Row::new(case, "made anew", "us", Better::Lower, &alone), bench.output)?;
        drop(near);
    }
    Ok(())
}

/// Nodes of a round, and objects each has.
const NODES: [usize; 3] = [4, 8, 16];
const OBJECTS: usize = 4;

/// Every node fetches everything of every other, all at once.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn all_to_all(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    let size = if bench.options.quick { 64 << 10 } else { 1 << 20 };
    let counts = if bench.options.quick { &NODES[..1] } else { &NODES[..] };
    for provider in &bench.arguments.providers {
        for count in counts {
            let folder = tempfile::tempdir()?;
            let rack = Rack::default();
            let memory = (*count * OBJECTS) as u64 * size * 3 + (64 << 20);
            let mut nodes = Vec::new();
            for number in 0..*count {
                let place = folder.path().join(number.to_string());
                nodes.push(Node::start(&rack, provider, &place, memory, Move::Auto)?);
            }
            let ids = nodes
                .iter()
                .map(|node| (0..OBJECTS).map(|_| node.put(size)).collect())
                .collect::<anyhow::Result<Vec<Vec<_>>>>()?;
            let round = || -> anyhow::Result<f64> {
                let start = Instant::now();
                let fetch = |near: usize| -> anyhow::Result<()> {
                    for step in 1..*count {
                        let far = (near + step) % *count;
                        let came =
                            nodes[near].client.fetch_from(&ids[far], nodes[far].address, WAIT)?;
                        came.into_iter().collect::<Result<Vec<_>, _>>()?;
                    }
                    Ok(())
                };
                std::thread::scope(|scope| {
                    let threads: Vec<_> =
                        (0..*count).map(|near| scope.spawn(move || fetch(near))).collect();
                    threads.into_iter().try_for_each(|thread| {
                        thread.join().map_err(|_| anyhow::anyhow!("a thread panicked"))?
                    })
                })?;
                let took = start.elapsed();
                for (near, node) in nodes.iter().enumerate() {
                    let others = ids.iter().enumerate().filter(|(far, _)| *far != near);
                    for id in others.flat_map(|(_, ids)| ids) {
                        node.client.delete(*id)?;
                    }
                }
                Ok((*count * (*count - 1) * OBJECTS) as f64 / took.as_secs_f64())
            };
            // Connections, registrations, first pages.
            round().with_context(|| format!("{count} nodes over {provider}"))?;
            let mut contenders = [Contender::new("mixed", round)];
            let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
            drop(contenders);
            let case = format!("{count} nodes, all to all, {} over {provider}", size_name(size));
            let row = Row::new(case, "mixed", "op/s", Better::Higher, &figures[0]);
            let bytes = row.figure.median * size as f64 / 1e9;
            report.tell(row.beside("GB/s", number(bytes)), bench.output)?;
        }
    }
    Ok(())
}

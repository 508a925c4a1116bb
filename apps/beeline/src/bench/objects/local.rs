//! put, get and delete on one node.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_objects::{Alone, Client, ObjectId, Store, StoreOptions};

use super::peers::{Peer, Plasma, Redis};
use super::{Bench, in_batch, rate, size_name};
use crate::bench::report::{Better, Report, Row, number};
use crate::bench::turns::{Contender, alternate};

const WAIT: Duration = Duration::from_secs(30);

/// What a contender does in a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Put,
    Get,
    Delete,
}

impl Call {
    pub fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
            Self::Delete => "delete",
        }
    }
}

/// A store of this process with room for `memory` bytes.
pub fn options(folder: &Path, memory: u64) -> StoreOptions {
    StoreOptions {
        socket: folder.join("objects.sock"),
        socket_mode: 0o600,
        memory_bytes: memory,
        spill_directory: folder.join("spilled"),
        spill_bytes: 0,
        spin: Duration::from_micros(20),
        max_clients: 100,
    }
}

/// Memory for batches of the largest size, and what their segments leave unused.
pub fn memory_for(sizes: &[u64]) -> u64 {
    let largest = sizes.iter().map(|size| size * in_batch(*size)).max().unwrap_or(0);
    (largest * 3).max(256 << 20)
}

/// One turn of ours: calls per second.
fn turn(client: &Client, call: Call, data: &[u8], time: Duration) -> anyhow::Result<f64> {
    let size = data.len() as u64;
    let new = || ObjectId::random().context("drawing an identifier");
    if call == Call::Get {
        let id = new()?;
        client.put(id, data, b"", WAIT)?;
        let figure = rate(time, || {
            let start = Instant::now();
            for _ in 0..64 {
                drop(client.get(id, WAIT)?);
            }
            Ok((64, start.elapsed()))
        });
        client.delete(id)?;
        return figure;
    }
    rate(time, || {
        let ids = (0..in_batch(size)).map(|_| new()).collect::<anyhow::Result<Vec<_>>>()?;
        let start = Instant::now();
        ids.iter().try_for_each(|id| client.put(*id, data, b"", WAIT))?;
        let put = start.elapsed();
        let start = Instant::now();
        ids.iter().try_for_each(|id| client.delete(*id))?;
        let deleted = start.elapsed();
        Ok((ids.len() as u64, if call == Call::Put { put } else { deleted }))
    })
}

/// Copies per second of `data` into memory that was written before.
fn copies(data: &[u8], target: &mut [u8], time: Duration) -> anyhow::Result<f64> {
    let batch = in_batch(data.len() as u64);
    rate(time, || {
        let start = Instant::now();
        for _ in 0..batch {
            std::hint::black_box(&mut *target).copy_from_slice(std::hint::black_box(data));
        }
        Ok((batch, start.elapsed()))
    })
}

/// Measures, and tells each row.
#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
pub fn measure(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let memory = memory_for(&bench.sizes);
    let store = Store::start(options(folder.path(), memory), |handle| Box::new(Alone(handle)))?;
    let client = Client::connect(&folder.path().join("objects.sock"))?;
    let arguments = bench.arguments;
    let mut peers: Vec<Box<dyn Peer>> = Vec::new();
    match Redis::start(&arguments.redis_server, folder.path()) {
        Ok(redis) => peers.push(Box::new(redis)),
        Err(reason) => bench.output.note(format!("without Redis: {reason:#}")),
    }
    match Plasma::start(&arguments.python, folder.path(), memory) {
        Ok(plasma) => peers.push(Box::new(plasma)),
        Err(reason) => bench.output.note(format!("without Plasma: {reason:#}")),
    }
    for size in &bench.sizes {
        let data = vec![7; usize::try_from(*size)?];
        let mut target = vec![1; data.len()];
        for call in [Call::Put, Call::Get, Call::Delete] {
            let time = bench.turn;
            let mut names = vec!["beeline"];
            let mut contenders =
                vec![Contender::new("beeline", || turn(&client, call, &data, time))];
            if call == Call::Put {
                names.push("memcpy");
                contenders.push(Contender::new("memcpy", || copies(&data, &mut target, time)));
            }
            for peer in &mut peers {
                if *size > peer.largest() {
                    continue;
                }
                names.push(peer.name());
                let name = peer.name();
                let data = &data;
                contenders.push(Contender::new(name, move || peer.turn(call, data, time)));
            }
            let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
            drop(contenders);
            let case = format!("{} {}", call.name(), size_name(*size));
            let row = |with: usize| {
                let row = Row::new(&case, "beeline", "op/s", Better::Higher, &figures[0]);
                let row = match with {
                    0 => row,
                    with => row.against(names[with], &figures[0], &figures[with]),
                };
                let bytes = row.figure.median * *size as f64 / 1e9;
                if call == Call::Put { row.beside("GB/s", number(bytes)) } else { row }
            };
            if names.len() == 1 {
                report.tell(row(0), bench.output)?;
            }
            for with in 1..names.len() {
                report.tell(row(with), bench.output)?;
            }
        }
    }
    drop((client, store));
    Ok(())
}

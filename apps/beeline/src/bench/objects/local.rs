//! put, get and delete on one node.
//!
//! A put is compared with a copy into memory of the same kind: into memory that was used before, as
//! memory of deleted objects is, and into memory that was never touched.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_objects::{Alone, Client, ObjectId, Store, StoreOptions};

use super::pages::{Copies, Pages};
use super::peers::{Peer, Redis, Scripted, packed_valkey};
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
        max_clients: 20_000,
        processors: Vec::new(),
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

/// One turn of puts into memory that was never touched: each batch by a new client, whose segments
/// are new, and go with it.
fn fresh_turn(socket: &Path, data: &[u8], time: Duration) -> anyhow::Result<f64> {
    let size = data.len() as u64;
    rate(time, || {
        let client = Client::connect(socket)?;
        let new = || ObjectId::random().context("drawing an identifier");
        let ids = (0..in_batch(size)).map(|_| new()).collect::<anyhow::Result<Vec<_>>>()?;
        let start = Instant::now();
        ids.iter().try_for_each(|id| client.put(*id, data, b"", WAIT))?;
        let put = start.elapsed();
        ids.iter().try_for_each(|id| client.delete(*id))?;
        Ok((ids.len() as u64, put))
    })
}

/// The peers that were asked for and are here.
fn peers(bench: &Bench<'_>, folder: &Path, memory: u64) -> Vec<Box<dyn Peer>> {
    let arguments = bench.arguments;
    let mut peers: Vec<Box<dyn Peer>> = Vec::new();
    let packed = packed_valkey(&arguments.python);
    let valkey = arguments.valkey_server.clone().or(packed).unwrap_or("valkey-server".into());
    for (name, program) in [("redis", &arguments.redis_server), ("valkey", &valkey)] {
        if !bench.wants(name) {
            continue;
        }
        match Redis::start(name, program, folder) {
            Ok(server) => peers.push(Box::new(server)),
            Err(reason) => bench.output.note(format!("without {name}: {reason:#}")),
        }
    }
    let scripted = ["plasma", "ray"].map(|name| bench.scripted(name, folder, memory));
    let boxed = |peer: Scripted| -> Box<dyn Peer> { Box::new(peer) };
    peers.extend(scripted.into_iter().flatten().map(boxed));
    peers
}

/// Measures, and tells each row.
#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
pub fn measure(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let memory = memory_for(&bench.sizes);
    let store = Store::start(options(folder.path(), memory), |handle| Box::new(Alone(handle)))?;
    let socket = folder.path().join("objects.sock");
    let client = Client::connect(&socket)?;
    let mut peers = peers(bench, folder.path(), memory);
    for size in &bench.sizes {
        let data = vec![7; usize::try_from(*size)?];
        for call in [Call::Put, Call::Get, Call::Delete] {
            let time = bench.turn;
            let mut warm = Copies::new(Pages::Warm, *size)?;
            let mut fresh = Copies::new(Pages::Fresh, *size)?;
            let mut names = vec!["beeline"];
            let mut contenders =
                vec![Contender::new("beeline", || turn(&client, call, &data, time))];
            if call == Call::Put {
                names.extend(["memcpy, used pages", "beeline, fresh", "memcpy, fresh pages"]);
                contenders.push(Contender::new(names[1], || warm.turn(&data, time)));
                contenders.push(Contender::new(names[2], || fresh_turn(&socket, &data, time)));
                contenders.push(Contender::new(names[3], || fresh.turn(&data, time)));
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
            let row = |of: usize, with: Option<usize>| {
                let case = if of == 0 { case.clone() } else { format!("{case}, fresh memory") };
                let row = Row::new(case, "beeline", "op/s", Better::Higher, &figures[of]);
                let row = match with {
                    None => row,
                    Some(with) => row.against(names[with], &figures[of], &figures[with]),
                };
                let bytes = row.figure.median * *size as f64 / 1e9;
                if call == Call::Put { row.beside("GB/s", number(bytes)) } else { row }
            };
            if names.len() == 1 {
                report.tell(row(0, None), bench.output)?;
            }
            for with in 1..names.len() {
                match (call, with) {
                    (Call::Put, 2) => {}
                    (Call::Put, 3) => report.tell(row(2, Some(3)), bench.output)?,
                    _ => report.tell(row(0, Some(with)), bench.output)?,
                }
            }
        }
    }
    drop((client, store));
    Ok(())
}

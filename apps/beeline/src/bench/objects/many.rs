//! Many objects, and many clients that hold references.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_objects::{Alone, Client, ObjectId, Store};

use super::local::options;
use super::nodes::WAIT;
use super::{Bench, rate};
use crate::bench::report::{Better, Report, Row, number};
use crate::bench::turns::{Contender, alternate};

const OBJECTS: usize = 100_000;
const CLIENTS: u64 = 10_000;
/// Descriptors the rest of the program needs.
const SPARE: u64 = 500;

fn store(folder: &std::path::Path) -> anyhow::Result<Store> {
    Ok(Store::start(options(folder, 1 << 30), |handle| Box::new(Alone(handle)))?)
}

/// Calls per second with few and with many objects in the store.
pub fn objects(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    let count = usize::try_from(bench.options.size(OBJECTS as u64, 500))?;
    let folders = [tempfile::tempdir()?, tempfile::tempdir()?];
    let mut stores = Vec::new();
    for (folder, count) in folders.iter().zip([64, count]) {
        let store = store(folder.path())?;
        let client = Client::connect(&folder.path().join("objects.sock"))?;
        let mut ids = Vec::with_capacity(count);
        let start = Instant::now();
        for _ in 0..count {
            let id = ObjectId::random().context("drawing an identifier")?;
            client.put(id, &[7; 1024], b"", WAIT)?;
            ids.push(id);
        }
        stores.push((client, ids, start.elapsed(), store));
    }
    let time = bench.turn;
    let get = |client: &Client, ids: &[ObjectId]| {
        let mut next = 0;
        rate(time, || {
            let start = Instant::now();
            for _ in 0..64 {
                // Far apart, so that no cache helps.
                next = (next + 7919) % ids.len();
                drop(client.get(ids[next], WAIT)?);
            }
            Ok((64, start.elapsed()))
        })
    };
    let put = |client: &Client| {
        let id = ObjectId::random().context("drawing an identifier")?;
        rate(time, || {
            let start = Instant::now();
            client.put(id, &[7; 1024], b"", WAIT)?;
            let took = start.elapsed();
            client.delete(id)?;
            Ok((1, took))
        })
    };
    let list = |client: &Client| {
        rate(time, || {
            let start = Instant::now();
            let found = client.list()?;
            anyhow::ensure!(!found.is_empty(), "a listing without objects");
            Ok((1, start.elapsed()))
        })
    };
    let names = ["64 objects".to_owned(), format!("{count} objects")];
    for call in ["get", "put", "list"] {
        let mut contenders: Vec<_> = stores
            .iter()
            .zip(&names)
            .map(|((client, ids, ..), name)| {
                Contender::new(name, move || match call {
                    "get" => get(client, ids),
                    "put" => put(client),
                    _ => list(client),
                })
            })
            .collect();
        let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
        drop(contenders);
        let case = format!("{call} among many, 1 KiB");
        let row = Row::new(&case, names[1].clone(), "op/s", Better::Higher, &figures[1]);
        let took = number(stores[1].2.as_secs_f64());
        let row = row.against(names[0].clone(), &figures[1], &figures[0]);
        report.tell(row.beside("all put in s", took), bench.output)?;
    }
    Ok(())
}

fn descriptors() -> u64 {
    std::fs::read_dir("/proc/self/fd").map_or(0, |found| found.count() as u64)
}

/// Clients that hold a reference each, as many of ten thousand as descriptors allow for: what each
/// costs, what one client's gets cost beside them, and how soon all references are gone.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn clients(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let store = store(folder.path())?;
    let socket = folder.path().join("objects.sock");
    let client = Client::connect(&socket)?;
    let id = ObjectId::random().context("drawing an identifier")?;
    client.put(id, &[7; 1024], b"", WAIT)?;
    let before = descriptors();
    let probe = Client::connect(&socket)?;
    drop(probe.get(id, WAIT)?);
    let each = descriptors().saturating_sub(before).max(1);
    drop(probe);
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let fits = limit.unwrap_or(u64::MAX).saturating_sub(before + SPARE) / each;
    let wanted = bench.options.size(CLIENTS, 20);
    let count = wanted.min(fits);
    if count < wanted {
        let note = format!("{count} of {wanted} clients: {each} descriptors each, limit {limit:?}");
        bench.output.note(note);
    }
    let gets = || {
        rate(bench.turn, || {
            let start = Instant::now();
            for _ in 0..64 {
                drop(client.get(id, WAIT)?);
            }
            Ok((64, start.elapsed()))
        })
    };
    let turns = bench.options.turns();
    let alone = (0..turns).map(|_| gets()).collect::<anyhow::Result<Vec<_>>>()?;
    let start = Instant::now();
    let mut held = Vec::new();
    for _ in 0..count {
        let other = Client::connect(&socket)?;
        let object = other.get(id, WAIT)?;
        held.push((object, other));
    }
    let came = count as f64 / start.elapsed().as_secs_f64();
    let referenced = client.list()?.first().map_or(0, |entry| entry.references);
    anyhow::ensure!(u64::from(referenced) == count, "{referenced} references of {count} clients");
    let beside = (0..turns).map(|_| gets()).collect::<anyhow::Result<Vec<_>>>()?;
    let start = Instant::now();
    drop(held);
    while client.list()?.first().is_none_or(|entry| entry.references > 0) {
        anyhow::ensure!(start.elapsed() < WAIT, "references stay behind their clients");
        std::thread::sleep(Duration::from_millis(1));
    }
    let gone = count as f64 / start.elapsed().as_secs_f64();
    let row = |case: &str, name: String, figures: &[f64]| {
        Row::new(case, name, "op/s", Better::Higher, figures)
    };
    let among = row("get 1 KiB", format!("beside {count} clients"), &beside);
    report.tell(among.against("alone", &beside, &alone), bench.output)?;
    report.tell(row("connect and get", format!("{count} clients"), &[came]), bench.output)?;
    report.tell(row("release and end", format!("{count} clients"), &[gone]), bench.output)?;
    drop(store);
    Ok(())
}

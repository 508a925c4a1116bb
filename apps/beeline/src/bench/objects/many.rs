//! Many objects, and many clients that hold references.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_objects::{Alone, Client, ObjectId, Store};
use rustix::process::{Resource, Signal, getrlimit, set_parent_process_death_signal, setrlimit};

use super::local::options;
use super::nodes::WAIT;
use super::{Bench, rate};
use crate::bench::report::{Better, Report, Row, number};
use crate::bench::turns::{Contender, alternate};

const OBJECTS: usize = 100_000;
const CLIENTS: u64 = 10_000;
/// Clients of one process, and those that show what one costs.
const EACH: u64 = 1000;
const PROBE: u64 = 20;
/// Descriptors the rest of the program needs.
const SPARE: u64 = 500;

fn store(folder: &Path) -> anyhow::Result<Store> {
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

/// What a process with clients is told.
#[derive(Clone, Debug, clap::Args)]
pub struct ClientsArguments {
    /// The store's socket.
    socket: PathBuf,
    /// The object each client holds.
    id: ObjectId,
    /// How many clients.
    count: u64,
}

/// As many descriptors as this process may have.
fn most_descriptors() -> u64 {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // Where this is refused, what it has counts.
    let _ = setrlimit(Resource::Nofile, limit);
    getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// Clients of a process of their own: each takes its reference; then they wait for the end of their
/// input, or to be killed.
pub fn run_clients(arguments: &ClientsArguments) -> anyhow::Result<()> {
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    most_descriptors();
    let mut held = Vec::new();
    for _ in 0..arguments.count {
        let client = Client::connect(&arguments.socket)?;
        let object = client.get(arguments.id, WAIT)?;
        held.push((object, client));
    }
    writeln!(std::io::stdout().lock(), "ready")?;
    let _ = std::io::stdin().read(&mut [0])?;
    Ok(())
}

/// Processes with clients, killed with the value.
struct Processes(Vec<Child>);

impl Processes {
    fn start(socket: &Path, id: ObjectId, count: u64) -> anyhow::Result<Self> {
        let mut processes = Self(Vec::new());
        let mut left = count;
        while left > 0 {
            let some = left.min(EACH);
            let child = Command::new(std::env::current_exe()?)
                .args(["bench", "objects-clients"])
                .arg(socket)
                .args([id.to_string(), some.to_string()])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .context("starting a process of clients")?;
            processes.0.push(child);
            left -= some;
        }
        for child in &mut processes.0 {
            let mut line = String::new();
            let out = child.stdout.take().context("its output")?;
            BufReader::new(out).read_line(&mut line)?;
            anyhow::ensure!(line.trim() == "ready", "a process of clients ended");
        }
        Ok(processes)
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn descriptors() -> u64 {
    std::fs::read_dir("/proc/self/fd").map_or(0, |found| found.count() as u64)
}

/// Ten thousand clients in processes of their own that hold a reference each: what one costs the
/// store, what another client's gets cost beside them, and how soon all references are gone once
/// their processes are killed.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn clients(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let store = store(folder.path())?;
    let socket = folder.path().join("objects.sock");
    let client = Client::connect(&socket)?;
    let id = ObjectId::random().context("drawing an identifier")?;
    client.put(id, &[7; 1024], b"", WAIT)?;
    let limit = most_descriptors();
    let before = descriptors();
    let few = Processes::start(&socket, id, PROBE)?;
    let each = (descriptors().saturating_sub(before) as f64 / PROBE as f64).max(0.1);
    drop(few);
    let fits = (limit.saturating_sub(before + SPARE) as f64 / each) as u64;
    let wanted = bench.options.size(CLIENTS, 20);
    let count = wanted.min(fits);
    if count < wanted {
        let note = format!("{count} of {wanted} clients: {each} descriptors each, limit {limit}");
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
    let gone = |count: u32| -> anyhow::Result<Duration> {
        let start = Instant::now();
        while client.list()?.first().is_none_or(|entry| entry.references > count) {
            anyhow::ensure!(start.elapsed() < WAIT, "references stay behind their clients");
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(start.elapsed())
    };
    gone(0)?;
    let turns = bench.options.turns();
    let alone = (0..turns).map(|_| gets()).collect::<anyhow::Result<Vec<_>>>()?;
    let start = Instant::now();
    let held = Processes::start(&socket, id, count)?;
    let came = count as f64 / start.elapsed().as_secs_f64();
    let referenced = client.list()?.first().map_or(0, |entry| entry.references);
    anyhow::ensure!(u64::from(referenced) == count, "{referenced} references of {count} clients");
    let beside = (0..turns).map(|_| gets()).collect::<anyhow::Result<Vec<_>>>()?;
    drop(held);
    let gone = count as f64 / gone(0)?.as_secs_f64().max(1e-3);
    let row = |case: &str, name: String, figures: &[f64]| {
        Row::new(case, name, "op/s", Better::Higher, figures)
    };
    let among = row("get 1 KiB", format!("beside {count} clients"), &beside);
    let among = among.beside("descriptors each", number(each));
    report.tell(among.against("alone", &beside, &alone), bench.output)?;
    report.tell(row("connect and get", format!("{count} clients"), &[came]), bench.output)?;
    report.tell(row("killed", format!("{count} clients"), &[gone]), bench.output)?;
    drop(store);
    Ok(())
}

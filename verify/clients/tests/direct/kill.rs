//! Clients killed in the middle of batches.
//!
//! ```text
//!  victim: sends batch 7 ─ "s 7" ─ acknowledged ─ "a 7" ─ sends batch 8 ─ "s 8" ─ KILL
//!  check:  every pair holds batch 7 or 8, the counter the sums of 7 or of 8 batches
//! ```
//!
//! A victim is a process of its own. It says on its standard output which batch it sends and which was
//! acknowledged; it is killed at some moment after its first. A batch puts pairs, inline ones and such in
//! blocks, each with the batch's number all over its value, and adds to one counter many times, between the
//! puts. What took effect of the last batch are its first operations, each once: none or all of a batch of one
//! packet, any number of a larger one.
//!
//! Beside the victims others go on, and must make progress in each round. In the end the node has as many
//! connections, descriptors, mappings, pairs and bytes of blocks as before.
//!
//! `BEELINE_DEEP=1` runs 300 rounds, `BEELINE_ROUNDS=n` n of them; `BEELINE_SEED=n` takes another course.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use beeline_kv_direct::function::number;
use beeline_kv_direct::{DirectClient, Kind, Request, Status, Width};
use beeline_verify_clients::{Chance, Server, deep, eventually, note};

use super::PATIENCE;

/// Tells a process that it is a victim: address, name, size.
const VICTIM: &str = "BEELINE_DIRECT_VICTIM";
/// Clients that go on beside the victims.
const OTHERS: u64 = 2;

/// What a batch consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Size {
    puts: u64,
    adds: u64,
    /// Most words of a value.
    words: u64,
}

impl Size {
    /// Operations from one addition of a batch to the next.
    const STRIDE: u64 = 5;

    fn operations(self) -> u64 {
        self.puts + self.adds
    }

    /// Puts and additions among the first operations of a batch.
    fn among(self, first: u64) -> (u64, u64) {
        let adds = first.div_ceil(Self::STRIDE).min(self.adds);
        (first - adds, adds)
    }
}

/// One packet of at most 16 KiB, whose reply has at most 132 KiB.
const ONE_PACKET: Size = Size { puts: 200, adds: 40, words: 6 };
/// Several packets, all under way together.
const PACKETS: Size = Size { puts: 1500, adds: 300, words: 40 };

fn connect(url: &str) -> DirectClient {
    beeline_direct_client::connect([url.to_owned()], PATIENCE).unwrap()
}

fn pair_name(victim: &str, pair: u64) -> String {
    format!("{victim}:{pair}")
}

fn counter_name(victim: &str) -> String {
    format!("{victim}:n")
}

/// The value of a pair in a batch: its number, over and over.
fn value(batch: u64, pair: u64, size: Size) -> Vec<u8> {
    batch.to_le_bytes().repeat(((batch + pair) % size.words) as usize + 1)
}

/// The batch that stored a value, if all of it is of one.
fn batch_of(bytes: &[u8], pair: u64, size: Size) -> Option<u64> {
    let batch = u64::from_le_bytes(*bytes.first_chunk()?);
    (bytes == value(batch, pair, size)).then_some(batch)
}

/// Stores a batch and returns the numbers that the counter had.
fn store(client: &mut DirectClient, victim: &str, batch: u64, size: Size) -> Vec<u64> {
    let pairs: Vec<(String, Vec<u8>)> =
        (0..size.puts).map(|pair| (pair_name(victim, pair), value(batch, pair, size))).collect();
    let (counter, one) = (counter_name(victim), 1_u64.to_le_bytes());
    let kind = Kind::UpdateScalar;
    let add = Request::with_function(kind, counter.as_bytes(), number::ADD, Width::Eight, &one);
    let puts = pairs.iter().map(|(key, value)| Request::put(key.as_bytes(), value));
    let mut requests: Vec<Request<'_>> = puts.collect();
    for at in 0..size.adds {
        requests.insert((at * Size::STRIDE) as usize, add);
    }
    let mut before = Vec::new();
    let outcome = client.execute(&requests, &mut |_, status, bytes| {
        assert_eq!(status, Status::Ok);
        before.extend(bytes.map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap())));
    });
    outcome.unwrap();
    before
}

/// The process that is killed; nothing where it was not started as one.
#[test]
fn victim() {
    let Ok(orders) = std::env::var(VICTIM) else { return };
    let [url, name, size] = *orders.split(' ').collect::<Vec<_>>() else { panic!("{orders}") };
    let size = if size == "one" { ONE_PACKET } else { PACKETS };
    let mut client = connect(url);
    let mut out = std::io::stdout().lock();
    let mut say = |line: String| out.write_all(line.as_bytes()).and_then(|()| out.flush()).unwrap();
    for batch in 1.. {
        say(format!("\ns {batch}\n"));
        let before = store(&mut client, name, batch, size);
        let expected = (batch - 1) * size.adds..batch * size.adds;
        assert!(before.iter().copied().eq(expected), "an add was lost or done twice: {before:?}");
        say(format!("\na {batch}\n"));
    }
}

/// A victim's process, and what it said.
struct Victim {
    process: Child,
    name: String,
    size: Size,
    lines: mpsc::Receiver<String>,
    sent: u64,
    acknowledged: u64,
}

impl Victim {
    fn start(url: &str, name: String, size: Size) -> Self {
        let how = if size == ONE_PACKET { "one" } else { "several" };
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "kill::victim", "--nocapture", "--test-threads=1"])
            .env(VICTIM, format!("{url} {name} {how}"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let out = BufReader::new(process.stdout.take().unwrap());
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Self { process, name, size, lines, sent: 0, acknowledged: 0 }
    }

    fn take(&mut self, line: &str) {
        match line.split_once(' ') {
            Some(("s", batch)) => self.sent = batch.parse().unwrap(),
            Some(("a", batch)) => self.acknowledged = batch.parse().unwrap(),
            _ => {}
        }
    }

    /// Until its first batch was acknowledged.
    fn wait_for_its_first(&mut self) {
        while self.acknowledged == 0 {
            let line = self.lines.recv_timeout(PATIENCE).expect("a victim stores its first batch");
            self.take(&line);
        }
    }

    /// Kills it and hears what it had to say.
    fn kill(&mut self) {
        self.process.kill().unwrap();
        let status = self.process.wait().unwrap();
        assert!(status.code().is_none(), "a victim ended by itself: {status}");
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            self.take(&line);
        }
        assert!(self.sent - self.acknowledged <= 1, "a victim sends one batch at a time");
    }

    /// Compares what is stored with what it said, and deletes it. How many operations of its last batch took
    /// effect, if that was not acknowledged.
    ///
    /// Errors: what is stored is not what the first of its operations leave, each executed once.
    fn check(&self, client: &mut DirectClient) -> Result<Option<u64>, String> {
        let Self { name, size, sent, acknowledged, .. } = self;
        let mut batches = Vec::new();
        for pair in 0..size.puts {
            let key = pair_name(name, pair);
            let held = client.get(key.as_bytes()).unwrap().ok_or(format!("{key} is gone"))?;
            let batch = batch_of(&held, pair, *size);
            batches.push(batch.ok_or(format!("{key} is of no batch: {held:?}"))?);
            assert!(client.delete(key.as_bytes()).unwrap());
        }
        let counter = counter_name(name);
        let held = client.get(counter.as_bytes()).unwrap().unwrap();
        let sum = u64::from_le_bytes(held.try_into().unwrap());
        assert!(client.delete(counter.as_bytes()).unwrap());
        let open = sent != acknowledged;
        let stored = |first: u64| {
            let (puts, adds) = size.among(first);
            let of_last = batches.iter().take_while(|batch| *batch == sent).count() as u64;
            let of_one_before = batches.iter().rev().take_while(|batch| *batch + 1 == *sent);
            let whole = of_last + of_one_before.count() as u64 == size.puts;
            whole && of_last == puts && sum == (sent - 1) * size.adds + adds
        };
        let all = size.operations();
        let mut counts = if open { 0..=all } else { all..=all };
        let found = counts.find(|&first| stored(first)).filter(|&first| {
            // A packet is executed whole or not at all.
            *size != ONE_PACKET || first == 0 || first == all
        });
        let found = found.ok_or(format!(
            "{name} sent {sent} batches, {acknowledged} were acknowledged; sum {sum}, pairs of {batches:?}"
        ))?;
        Ok(open.then_some(found))
    }
}

/// What a node holds that clients can make it hold.
#[derive(Debug)]
struct Held {
    clients: u64,
    pairs: u64,
    block_bytes: u64,
    descriptors: usize,
    mappings: usize,
    resident_bytes: u64,
}

fn held(server: &Server) -> Held {
    let mut stream = TcpStream::connect(server.http()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let figure = |name: &str| {
        let start = format!("beeline_direct_{name} ");
        let line = text.lines().find_map(|line| line.strip_prefix(&start));
        line.unwrap_or_else(|| panic!("{name} is missing: {text}")).parse::<f64>().unwrap() as u64
    };
    let process = |what: &str| format!("/proc/{}/{what}", server.process());
    Held {
        clients: figure("clients"),
        pairs: figure("pairs"),
        block_bytes: figure("allocated_bytes"),
        descriptors: std::fs::read_dir(process("fd")).unwrap().count(),
        mappings: std::fs::read_to_string(process("maps")).unwrap().lines().count(),
        resident_bytes: server.resident_bytes(),
    }
}

/// A client that goes on until it is told to stop: no call of it fails, and it reads what it wrote.
fn go_on(url: &str, name: &str, done: &AtomicU64, stop: &AtomicBool) {
    let mut client = connect(url);
    let (key, counter) = (format!("{name} value"), format!("{name} counter"));
    client.put(counter.as_bytes(), &0_u64.to_le_bytes()).unwrap();
    for turn in 0.. {
        assert_eq!(client.fetch_and_add(counter.as_bytes(), 1).unwrap(), Some(turn));
        let value = vec![turn as u8; (turn % 90) as usize + 1];
        client.put(key.as_bytes(), &value).unwrap();
        assert_eq!(client.get(key.as_bytes()).unwrap().unwrap(), value);
        done.store(turn, Ordering::Relaxed);
        if stop.load(Ordering::Relaxed) {
            break;
        }
    }
}

/// Stops the others even where the test fails.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn clients_killed_in_the_middle_of_batches_cost_the_others_nothing() {
    let number = |variable| beeline_verify_clients::number(variable);
    let rounds = number("BEELINE_ROUNDS").unwrap_or(if deep() { 300 } else { 24 });
    let mut random = Chance(number("BEELINE_SEED").unwrap_or(0xD1EC7) | 1);
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--direct-memory", "64MiB"]);
    let url = |scheme: &str| format!("{scheme}://{}", server.fabric());
    let (stop, auto) = (AtomicBool::new(false), url("auto"));
    let done: Vec<AtomicU64> = (0..OTHERS).map(|_| AtomicU64::new(0)).collect();
    let mut client = connect(&auto);
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for (number, done) in done.iter().enumerate() {
            let (auto, stop) = (&auto, &stop);
            scope.spawn(move || go_on(auto, &format!("other {number}"), done, stop));
        }
        let progress = || done.iter().map(|done| done.load(Ordering::Relaxed)).min().unwrap();
        eventually("the others work", PATIENCE, || (progress() > 10).then_some(()));
        let before = held(&server);
        assert_eq!(before.clients, OTHERS + 1);
        let mut first = None;
        let (mut kills, mut open, mut effective, mut batches) = (0_u64, 0_u64, 0_u64, 0_u64);
        for round in 0..rounds {
            let had = progress();
            let sizes = [ONE_PACKET, PACKETS];
            let schemes = ["auto", if round % 3 == 0 { "tcp" } else { "auto" }];
            let mut victims: Vec<Victim> = sizes
                .into_iter()
                .zip(schemes)
                .enumerate()
                .map(|(number, (size, scheme))| {
                    let name = format!("v{number}");
                    client.put(counter_name(&name).as_bytes(), &0_u64.to_le_bytes()).unwrap();
                    Victim::start(&url(scheme), name, size)
                })
                .collect();
            victims.iter_mut().for_each(Victim::wait_for_its_first);
            for victim in &mut victims {
                std::thread::sleep(Duration::from_micros(random.below(20_000)));
                victim.kill();
            }
            eventually("the connections are given back", PATIENCE, || {
                (held(&server).clients == before.clients).then_some(())
            });
            for victim in &victims {
                kills += 1;
                batches += victim.acknowledged;
                if let Some(executed) = victim.check(&mut client).unwrap() {
                    open += 1;
                    effective += u64::from(executed > 0);
                }
            }
            eventually("the others go on", PATIENCE, || (progress() > had).then_some(()));
            if round == 3 {
                first = Some(held(&server));
            }
        }
        let now = held(&server);
        assert_eq!((now.clients, now.pairs), (before.clients, before.pairs), "{now:?}");
        // A value of another is in a block or is not.
        let own = OTHERS * 128;
        assert!(now.block_bytes <= before.block_bytes + own, "{before:?}, then {now:?}");
        if let Some(first) = first {
            // What a client's connection takes is more than a mebibyte, four mappings and descriptors.
            assert!(now.descriptors <= first.descriptors + 4, "{first:?}, then {now:?}");
            assert!(now.mappings <= first.mappings + 8, "{first:?}, then {now:?}");
            assert!(
                now.resident_bytes <= first.resident_bytes + (16 << 20),
                "{first:?}, then {now:?}"
            );
        }
        note(&format!(
            "direct: {kills} clients killed, {batches} batches acknowledged and found, {open} under way, of \
             which {effective} took effect"
        ));
        assert!(open > 0 && batches > kills, "no client was killed in the middle of a batch");
    });
}

/// Does to a victim's pairs what a faulty server would.
type Plant = fn(&mut DirectClient, &Victim);

/// What a server would do that executes a packet of a client that is gone once more, or without its rest.
#[test]
fn a_batch_of_a_dead_client_that_is_executed_twice_or_in_part_is_found() {
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--direct-memory", "64MiB"]);
    let url = format!("auto://{}", server.fabric());
    let mut client = connect(&url);
    let twice = |client: &mut DirectClient, victim: &Victim| {
        store(client, &victim.name, victim.acknowledged, victim.size);
    };
    // One alone may be what the batch would have done next; two never follow each other in it.
    let two_additions = |client: &mut DirectClient, victim: &Victim| {
        let counter = counter_name(&victim.name);
        client.fetch_and_add(counter.as_bytes(), 2).unwrap();
    };
    let one_pair = |client: &mut DirectClient, victim: &Victim| {
        let (last, next) = (victim.size.puts - 1, victim.sent + 1);
        let key = pair_name(&victim.name, last);
        client.put(key.as_bytes(), &value(next, last, victim.size)).unwrap();
    };
    let nothing = |_: &mut DirectClient, _: &Victim| {};
    let plants: [(Plant, bool); 4] =
        [(nothing, false), (twice, true), (two_additions, true), (one_pair, true)];
    for size in [ONE_PACKET, PACKETS] {
        for (number, (plant, is_fault)) in plants.into_iter().enumerate() {
            client.put(counter_name("v").as_bytes(), &0_u64.to_le_bytes()).unwrap();
            let mut victim = Victim::start(&url, "v".to_owned(), size);
            victim.wait_for_its_first();
            victim.kill();
            eventually("the connection is given back", PATIENCE, || {
                (held(&server).clients == 1).then_some(())
            });
            plant(&mut client, &victim);
            let checked = victim.check(&mut client);
            assert_eq!(checked.is_err(), is_fault, "plant {number}, {size:?}: {checked:?}");
        }
    }
}

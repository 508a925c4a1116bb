//! Three members of a replica set: how far behind the others are, and how long a copy of everything takes.
//!
//! Two sets take turns: one whose members pull from each other over fabric, one over the MongoDB wire. Lag is told by the
//! primary: a write is answered when one member has it, a majority, or all of them have applied it. Seven processes
//! share the processors of the machine, so figures say how the two ways compare rather than what a member each on a host
//! of its own would do.

use std::cell::RefCell;
use std::io::BufRead as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_documents_client::{Client, Options};
use bson::{Bson, Document, doc};

use super::{Bench, Better, Contender, DocumentsArguments, Row, cpu_seconds_of, free_port};
use crate::bench::turns::unpin;

const MEMBERS: usize = 3;
const PATIENCE: Duration = Duration::from_secs(60);
/// Documents of one insert while loading.
const BATCH: u32 = 500;

/// A set; its processes and files end with it.
struct Set {
    children: Vec<Child>,
    folder: PathBuf,
    doors: Vec<u16>,
}

impl Drop for Set {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn words(ports: &[u16], word: impl Fn(usize, u16) -> String) -> String {
    let words: Vec<String> = ports.iter().enumerate().map(|(at, port)| word(at, *port)).collect();
    words.join(",")
}

impl Set {
    fn start(arguments: &DocumentsArguments, fabric: bool) -> anyhow::Result<Self> {
        let way = if fabric { "fabric" } else { "wire" };
        let folder =
            arguments.data.join(format!(".beeline-bench-documents-{way}-{}", std::process::id()));
        let ports = || (0..MEMBERS).map(|_| free_port()).collect::<anyhow::Result<Vec<u16>>>();
        let (logs, keys, doors) = (ports()?, ports()?, ports()?);
        let peers =
            words(&logs, |at, log| format!("{}=127.0.0.1:{log}@127.0.0.1:{}", at + 1, keys[at]));
        let members = words(&doors, |at, door| format!("{}=127.0.0.1:{door}", at + 1));
        let mut set = Self { children: Vec::new(), folder, doors };
        let program = std::env::current_exe().context("the path of this program")?;
        let mut told = Vec::new();
        for at in 0..MEMBERS {
            let mut command = Command::new(&program);
            command
                .args(["serve", "--json", "--quiet", "--shards", "1", "--http-address", "off"])
                .args(["--without", "objects,direct", "--cluster", "b5ecb5ecb5ecb5ec"])
                .args(["--node-id", &(at + 1).to_string(), "--peers", &peers])
                .args(["--log-slots", "1024", "--documents-members", &members])
                .args(["--fabric-address", &format!("127.0.0.1:{}", logs[at])])
                .args(["--resp-address", &format!("127.0.0.1:{}", keys[at])])
                .args(["--documents-address", &format!("127.0.0.1:{}", set.doors[at])])
                .args(["--documents-is-rdma", if fabric { "on" } else { "off" }])
                .args(["--durability", &arguments.durability, "--data"])
                .arg(set.folder.join((at + 1).to_string()))
                .stdin(Stdio::null())
                .stdout(Stdio::piped());
            let mut child = command.spawn().context("starting beeline serve")?;
            told.push(child.stdout.take().context("its standard output")?);
            set.children.push(child);
        }
        for out in told {
            let mut line = String::new();
            std::io::BufReader::new(out).read_line(&mut line)?;
            anyhow::ensure!(!line.is_empty(), "a member did not start; its message stands above");
        }
        Ok(set)
    }

    fn client(&self, at: usize) -> anyhow::Result<Client> {
        let address = format!("mongodb://127.0.0.1:{}", self.doors[at]);
        let timeout = Duration::from_secs(20);
        Ok(Client::connect(
            &address,
            Options { retry_writes: false, timeout, ..Options::default() },
        )?)
    }

    /// The member that leads and one that follows.
    fn roles(&self) -> anyhow::Result<(usize, usize)> {
        let start = Instant::now();
        loop {
            for at in 0..MEMBERS {
                let hello = self
                    .client(at)
                    .and_then(|mut client| Ok(client.run("admin", doc! { "hello": 1 })?));
                if hello.is_ok_and(|hello| hello.get_bool("isWritablePrimary").unwrap_or(false)) {
                    return Ok((at, (at + 1) % MEMBERS));
                }
            }
            anyhow::ensure!(start.elapsed() < PATIENCE, "no member leads");
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn cpu_seconds(&self) -> f64 {
        let of = |child: &Child| std::fs::read_to_string(format!("/proc/{}/stat", child.id()));
        self.children.iter().map(|one| of(one).map_or(0.0, |text| cpu_seconds_of(&text))).sum()
    }
}

fn insert(client: &mut Client, documents: Vec<Document>, concern: Bson) -> anyhow::Result<()> {
    let count = documents.len();
    let reply = client.run(
        "bench",
        doc! { "insert": "records", "documents": documents, "writeConcern": { "w": concern, "wtimeout": 20_000 } },
    )?;
    anyhow::ensure!(
        reply.get_i32("n")? as usize == count && !reply.contains_key("writeConcernError"),
        "{reply}"
    );
    Ok(())
}

impl Bench<'_> {
    /// Lag and the first copy, by both ways.
    pub(super) fn members(&self) -> anyhow::Result<()> {
        unpin()?;
        let sets = [Set::start(self.arguments, true)?, Set::start(self.arguments, false)?];
        let roles = [sets[0].roles()?, sets[1].roles()?];
        let text = self.text();
        let next = std::cell::Cell::new(0_i64);
        let document = || {
            next.set(next.get() + 1);
            doc! { "_id": next.get(), "n": 0, "text": &text }
        };
        let clients =
            [RefCell::new(sets[0].client(roles[0].0)?), RefCell::new(sets[1].client(roles[1].0)?)];
        let count = self.arguments.options.size(1000, 20);
        for (word, concern) in [
            ("w: 1", Bson::Int32(1)),
            ("w: majority", Bson::String("majority".to_owned())),
            ("w: 3, applied by every member", Bson::Int32(3)),
        ] {
            let cpu = RefCell::new([0.0; 2]);
            let turn = |which: usize| {
                let mut client = clients[which].borrow_mut();
                // What was written before is everywhere.
                insert(&mut client, vec![document()], Bson::Int32(3))?;
                let before = sets[which].cpu_seconds();
                let mut times = Vec::with_capacity(count as usize);
                for _ in 0..count {
                    let start = Instant::now();
                    insert(&mut client, vec![document()], concern.clone())?;
                    times.push(start.elapsed().as_secs_f64() * 1e6);
                }
                cpu.borrow_mut()[which] += sets[which].cpu_seconds() - before;
                times.sort_by(f64::total_cmp);
                Ok(times[times.len() / 2])
            };
            let figures = self.turns(&mut [
                Contender::new("fabric", || turn(0)),
                Contender::new("wire", || turn(1)),
            ])?;
            let all = f64::from(count) * f64::from(self.arguments.options.turns());
            let [here, there] = cpu.borrow().map(|seconds| seconds / all * 1e6);
            self.push(
                Row::new(
                    format!("insert of {} B, {word}, p50", self.arguments.size),
                    "fabric",
                    "us",
                    Better::Lower,
                    &figures[0],
                )
                .against("MongoDB wire", &figures[0], &figures[1])
                .beside(
                    "processor time/op, all members",
                    format!("{here:.0} us (wire {there:.0})"),
                ),
            )?;
        }
        self.copies(&sets, &roles, &clients, &document)
    }

    fn copies(
        &self,
        sets: &[Set; 2],
        roles: &[(usize, usize); 2],
        clients: &[RefCell<Client>; 2],
        document: &dyn Fn() -> Document,
    ) -> anyhow::Result<()> {
        let count = self.arguments.options.size(self.arguments.documents.min(200_000), 1000);
        for client in clients {
            let mut client = client.borrow_mut();
            for first in (0..count).step_by(BATCH as usize) {
                let some = (first..count.min(first + BATCH)).map(|_| document()).collect();
                insert(&mut client, some, Bson::Int32(1))?;
            }
            insert(&mut client, vec![document()], Bson::Int32(3))?;
        }
        let turn = |which: usize| {
            let mut client = sets[which].client(roles[which].1)?;
            let copies = |client: &mut Client| -> anyhow::Result<(i64, i32)> {
                let status = client.run("admin", doc! { "replSetGetStatus": 1 })?;
                let copies = status.get_document("counts")?.get_i64("copies")?;
                Ok((copies, status.get_i32("myState")?))
            };
            let (before, _) = copies(&mut client)?;
            let start = Instant::now();
            client.run("admin", doc! { "resync": 1 })?;
            // 2: a secondary, as MongoDB numbers states.
            while !matches!(copies(&mut client)?, (after, 2) if after > before) {
                anyhow::ensure!(start.elapsed() < PATIENCE, "the copy did not end");
                std::thread::sleep(Duration::from_millis(2));
            }
            Ok(f64::from(count) / start.elapsed().as_secs_f64())
        };
        let figures = self.turns(&mut [
            Contender::new("fabric", || turn(0)),
            Contender::new("wire", || turn(1)),
        ])?;
        let median = crate::bench::report::Spread::of(&figures[0]).median;
        let megabytes = median * self.arguments.size as f64 / 1e6;
        self.push(
            Row::new(
                format!("initial sync, {count} documents of {} B", self.arguments.size),
                "fabric",
                "documents/s",
                Better::Higher,
                &figures[0],
            )
            .against("MongoDB wire", &figures[0], &figures[1])
            .beside(
                "a copy took",
                format!("{:.2} s, {megabytes:.0} MB/s", f64::from(count) / median),
            ),
        )
    }
}

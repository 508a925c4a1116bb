//! `beeline bench direct`: the direct store over shared memory, beside Redis, memcached and BOOM.
//!
//! One server core and one client core: the service of this process, the peers and the shard of BOOM run
//! on the first, the client on the second. Pairs are 8 bytes and 8 bytes where nothing else is said. Rows
//! are shown as soon as they are measured.

mod peers;
mod rig;
mod sized;

use std::cell::RefCell;

use anyhow::Context as _;
use beeline_kv_direct::function::number as function;
use beeline_kv_direct::{Kind, Link, Request, TableOptions, Width};
use beeline_kv_direct_model::exhibits::{self, Effort, Exhibit};

use self::peers::{Boom, Peer, Raw};
use self::rig::{Rig, Stream, latency, rate, rate_of};
use super::report::{Better, Report, Row, number};
use super::turns::{Contender, alternate, pin};
use super::{BenchOptions, finish};
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct DirectArguments {
    /// Parts to run.
    #[arg(
        long,
        value_name = "PARTS",
        value_delimiter = ',',
        default_value = "rate,latency,loads,atomics,vector,sizes,merge,peers"
    )]
    pub parts: Vec<Part>,
    /// Pairs stored: a million unless said otherwise.
    #[arg(long, default_value_t = 1_000_000)]
    pub pairs: u64,
    /// Operations to a packet, in the part of rates.
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', default_value = "1,4,16,32,64")]
    pub batches: Vec<u16>,
    #[command(flatten)]
    pub options: BenchOptions,
}

/// Parts of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Operations a second, by mixture, distribution and batch.
    Rate,
    /// A single GET.
    Latency,
    /// Fetch-and-add on one key and on distinct keys.
    Atomics,
    /// Vector additions of 1 KiB against memory copies.
    Vector,
    /// Latencies at several offered loads, from a tenth to nine tenths of the highest rate.
    Loads,
    /// Operations a second by the size of pairs, 5 to 254 bytes, memory half full and tuned for them.
    Sizes,
    /// The time of a merge of free blocks by the number of threads.
    Merge,
    /// Redis, Dragonfly, memcached and BOOM.
    Peers,
    /// The paper's exhibits by the model of its card, with the paper's values beside; not run unless
    /// named. Takes nothing of this machine's speed.
    Model,
}

/// Packets outstanding.
const WINDOW: usize = 8;
const HEADLINE_BATCH: u16 = 32;
/// The longest p50 of a single GET and the least rate at the headline's batch that are aimed at.
const AIM: (&str, &str) = ("1.2 us", "8.0M op/s");

/// Share of GETs in percent, and whether keys are Zipf's.
const MIXES: [(u64, bool); 4] = [(95, false), (95, true), (50, false), (50, true)];

fn mix_name((gets, zipf): (u64, bool)) -> String {
    format!("{gets}/{} {}", 100 - gets, if zipf { "zipf 0.99" } else { "uniform" })
}

struct Bench<'a> {
    arguments: &'a DirectArguments,
    pairs: u64,
    output: Output,
    report: RefCell<Report>,
}

/// The command.
pub fn run(arguments: &DirectArguments, output: Output) -> Result<Exit, Failure> {
    let options = &arguments.options;
    let report = Report::new("direct", "shm");
    let pairs = options.size(arguments.pairs, arguments.pairs.min(1_000)).max(1);
    let bench = Bench { arguments, pairs, output, report: RefCell::new(report) };
    let measured = arguments.parts.iter().any(|part| *part != Part::Model);
    let rig = if measured {
        let rig = Rig::start(pairs)?;
        rig.fill(pairs)?;
        Some(rig)
    } else {
        None
    };
    for &part in &arguments.parts {
        let Some(rig) = rig.as_ref().filter(|_| part != Part::Model) else {
            bench.model()?;
            continue;
        };
        pin(1)?;
        bench.part(part, rig).with_context(|| format!("part {part:?}"))?;
    }
    super::turns::unpin()?;
    let report = bench.report.into_inner();
    if output.json {
        // The rows have been shown.
        if let Some(path) = &options.plot {
            super::plot::draw(&report, path)?;
        }
        return Ok(Exit::Done);
    }
    finish(&report, options, output)
}

impl Bench<'_> {
    fn part(&self, part: Part, rig: &Rig) -> anyhow::Result<()> {
        match part {
            Part::Rate => self.rates(rig),
            Part::Latency => self.single(rig),
            Part::Atomics => self.atomics(rig),
            Part::Vector => self.vectors(),
            Part::Loads => sized::loads(self, rig),
            Part::Sizes => sized::sizes(self),
            Part::Merge => sized::merge(self),
            Part::Peers => self.peers(rig),
            Part::Model => self.model(),
        }
    }

    /// The paper's exhibits, from the model.
    fn model(&self) -> anyhow::Result<()> {
        let effort = self.arguments.options.size(Effort::USUAL, Effort::QUICK);
        let mut shown = Ok(());
        exhibits::all(effort, &mut |exhibit: Exhibit| {
            let case = format!("{}: {}", exhibit.name, exhibit.case);
            let better = if exhibit.more_is_better { Better::Higher } else { Better::Lower };
            let mut row = Row::new(case, "model", exhibit.unit, better, &[exhibit.model]);
            row.simulated = true;
            if let Some(paper) = exhibit.paper {
                row = row.against("paper", &[exhibit.model], &[paper]);
                row = row.beside("judged", exhibit.judgement().unwrap_or_default());
            }
            if shown.is_ok() {
                shown = self.show(row);
            }
        })?;
        shown
    }

    fn operations(&self, full: u64) -> u64 {
        self.arguments.options.size(full, 2_000)
    }

    fn turns(&self, contenders: &mut [Contender<'_>]) -> anyhow::Result<Vec<Vec<f64>>> {
        alternate(self.arguments.options.turns(), contenders, self.output)
    }

    fn show(&self, row: Row) -> anyhow::Result<()> {
        let mut report = self.report.borrow_mut();
        if self.output.json {
            report.show_row(&row, self.output)?;
        } else {
            let ratio = row.ratio.map(|ratio| format!(", {}x", number(ratio.median)));
            let peer = row.peer.clone().unwrap_or_default();
            let figure = number(row.figure.median);
            self.output.note(format!(
                "{}: {figure} {}{} {peer}",
                row.case,
                row.unit,
                ratio.unwrap_or_default()
            ));
        }
        report.push(row);
        Ok(())
    }

    fn stream(&self, mix: (u64, bool)) -> Stream {
        Stream::new(self.pairs, mix.0, mix.1)
    }

    fn rates(&self, rig: &Rig) -> anyhow::Result<()> {
        let link = RefCell::new(rig.link()?);
        for mix in MIXES {
            let stream = RefCell::new(self.stream(mix));
            for &batch in &self.arguments.batches {
                let operations = self.operations(200_000 * u64::from(batch).clamp(2, 20));
                let turn = || {
                    let (mut link, mut stream) = (link.borrow_mut(), stream.borrow_mut());
                    rate(&mut link, &mut stream, operations, batch, WINDOW)
                };
                let figures = self.turns(&mut [Contender::new("direct", turn)])?;
                let case = format!("{} B{batch}", mix_name(mix));
                let mut row = Row::new(case, "direct", "op/s", Better::Higher, &figures[0]);
                if batch == HEADLINE_BATCH {
                    row = row.beside("aim", AIM.1);
                }
                self.show(row)?;
            }
        }
        Ok(())
    }

    fn single(&self, rig: &Rig) -> anyhow::Result<()> {
        let link = RefCell::new(rig.link()?);
        let stream = RefCell::new(self.stream((100, false)));
        let operations = self.operations(200_000);
        let tails = RefCell::new(Vec::new());
        let turn = || {
            let (mut link, mut stream) = (link.borrow_mut(), stream.borrow_mut());
            let (p50, p99) = latency(&mut link, &mut stream, operations)?;
            tails.borrow_mut().push(p99);
            Ok(p50)
        };
        let figures = self.turns(&mut [Contender::new("direct", turn)])?;
        let row = Row::new("single GET p50", "direct", "us", Better::Lower, &figures[0]);
        let p99 = super::report::Spread::of(&tails.borrow()).median;
        self.show(row.beside("p99", format!("{} us", number(p99))).beside("aim", AIM.0))
    }

    /// Fetch-and-add: one key against distinct keys, as many as there are pairs.
    fn atomics(&self, rig: &Rig) -> anyhow::Result<()> {
        let link = RefCell::new(rig.link()?);
        let operations = self.operations(3_000_000);
        let one = 1_u64.to_le_bytes();
        let add = |key: u64| -> anyhow::Result<f64> {
            let spread = key == 0;
            let mut link = link.borrow_mut();
            let mut stream = self.stream((0, false));
            rate_of(&mut link, operations, HEADLINE_BATCH, WINDOW, |push| {
                let key = if spread { stream.next().0 } else { rig::key(1) };
                let (kind, number) = (Kind::UpdateScalar, function::ADD);
                push(&Request::with_function(kind, &key, number, Width::Eight, &one))
            })
        };
        let figures = self.turns(&mut [
            Contender::new("one key", || add(1)),
            Contender::new("distinct keys", || add(0)),
        ])?;
        let row = Row::new("fetch-and-add B32", "one key", "op/s", Better::Higher, &figures[0]);
        self.show(row.against("distinct keys", &figures[0], &figures[1]))
    }

    /// Additions of 1 KiB to vectors of 1 KiB, against copies of as many bytes.
    fn vectors(&self) -> anyhow::Result<()> {
        const BYTES: usize = 1024;
        const VECTORS: u64 = 1024;
        let rig = Rig::with(32 << 20, TableOptions::default())?;
        pin(1)?;
        let link = RefCell::new(rig.link()?);
        let operations = self.operations(300_000);
        let name = |index: u64| [b"v".as_slice(), &(index % VECTORS).to_le_bytes()].concat();
        let parameter = vec![3; BYTES];
        rate_of(&mut link.borrow_mut(), VECTORS, 8, WINDOW, {
            let mut next = 0;
            let parameter = &parameter;
            move |push| {
                next += 1;
                push(&Request::put(&name(next), parameter))
            }
        })?;
        let update = || {
            let mut next = 0_u64;
            let rate = rate_of(&mut link.borrow_mut(), operations, 15, WINDOW, |push| {
                next = next.wrapping_add(7919);
                let (kind, number) = (Kind::UpdateVector, function::ADD);
                let key = name(next);
                let request = Request::with_function(kind, &key, number, Width::Four, &parameter);
                push(&request.without_return())
            })?;
            Ok(rate * BYTES as f64 / 1e9)
        };
        let copy = || {
            let from = vec![1_u8; BYTES * VECTORS as usize];
            let mut to = vec![0_u8; BYTES * VECTORS as usize];
            let began = std::time::Instant::now();
            for turn in 0..operations {
                let at = (turn.wrapping_mul(7919) % VECTORS) as usize * BYTES;
                to[at..at + BYTES].copy_from_slice(std::hint::black_box(&from[at..at + BYTES]));
                std::hint::black_box(&mut to);
            }
            Ok(operations as f64 * BYTES as f64 / began.elapsed().as_secs_f64() / 1e9)
        };
        let figures = self
            .turns(&mut [Contender::new("vector add", update), Contender::new("memcpy", copy)])?;
        let row = Row::new("1 KiB vectors", "vector add", "GB/s", Better::Higher, &figures[0]);
        self.show(row.against("memcpy", &figures[0], &figures[1]).beside("aim", "0.3 of memcpy"))
    }

    fn peers(&self, rig: &Rig) -> anyhow::Result<()> {
        let mut peers: Vec<Box<dyn Peer>> = Vec::new();
        let known: [fn(u64) -> anyhow::Result<Raw>; 4] =
            [Raw::redis, Raw::dragonfly, Raw::memcached, Raw::memcached_binary];
        for raw in known {
            match raw(self.pairs) {
                Ok(peer) => peers.push(Box::new(peer)),
                Err(error) => self.output.note(format!("left out: {error:#}")),
            }
        }
        peers.push(Box::new(Boom::start(self.pairs)?));
        let link: RefCell<Link> = RefCell::new(rig.link()?);
        for mix in MIXES {
            let mut names = vec!["direct".to_owned()];
            names.extend(peers.iter().map(|peer| peer.name().to_owned()));
            let stream = RefCell::new(self.stream(mix));
            let mut turns: Vec<Box<dyn FnMut() -> anyhow::Result<f64> + '_>> = Vec::new();
            turns.push(Box::new(|| {
                let operations = self.operations(4_000_000);
                let (mut link, mut stream) = (link.borrow_mut(), stream.borrow_mut());
                rate(&mut link, &mut stream, operations, HEADLINE_BATCH, WINDOW)
            }));
            for peer in &mut peers {
                let (stream, operations) = (&stream, self.operations(500_000));
                turns.push(Box::new(move || {
                    let outstanding = usize::from(HEADLINE_BATCH) * WINDOW;
                    peer.rate(&mut stream.borrow_mut(), mix, operations, outstanding)
                }));
            }
            let mut contenders: Vec<Contender<'_>> =
                names.iter().zip(turns).map(|(name, turn)| Contender::new(name, turn)).collect();
            let figures = self.turns(&mut contenders)?;
            drop(contenders);
            for (name, theirs) in names.iter().zip(&figures).skip(1) {
                let case = format!("{} B32 W8", mix_name(mix));
                let row = Row::new(case, "direct", "op/s", Better::Higher, &figures[0]);
                self.show(row.against(name, &figures[0], theirs).beside("aim", "5x the best"))?;
            }
        }
        Ok(())
    }
}

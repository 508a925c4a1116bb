//! Copies into memory of the same kind as the store's, and objects that have a descriptor each.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_objects::{Alone, Client, ObjectId, Store};
use beeline_os::memory::copy_in;
use beeline_os::{MemoryObject as _, SharedMemory, one_writer};

use super::local::{memory_for, options};
use super::nodes::WAIT;
use super::{Bench, in_batch, rate, size_name};
use crate::bench::report::{Better, Report, Row, number};
use crate::bench::turns::{Contender, alternate};

/// What was done with the memory before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// It was written.
    Warm,
    /// Nothing: the kernel makes each page when it is first touched.
    Fresh,
}

/// Copies as a batch of puts makes them: each to a place of its own.
pub struct Copies {
    pages: Pages,
    batch: u64,
    length: usize,
    memory: Option<SharedMemory>,
}

impl Copies {
    pub fn new(pages: Pages, size: u64) -> anyhow::Result<Self> {
        let batch = in_batch(size);
        Ok(Self { pages, batch, length: usize::try_from(size * batch)?, memory: None })
    }

    /// Copies per second of `data`.
    pub fn turn(&mut self, data: &[u8], time: Duration) -> anyhow::Result<f64> {
        rate(time, || {
            let memory = match self.memory.take() {
                Some(memory) => memory,
                None => {
                    let memory = SharedMemory::allocate("beeline-bench", self.length)?;
                    if self.pages == Pages::Warm {
                        (0..self.batch).for_each(|place| copy_in(&memory, at(place, data), data));
                    }
                    memory
                }
            };
            let start = Instant::now();
            (0..self.batch).for_each(|place| copy_in(&memory, at(place, data), data));
            let took = start.elapsed();
            if self.pages == Pages::Warm {
                self.memory = Some(memory);
            }
            Ok((self.batch, took))
        })
    }
}

fn at(place: u64, data: &[u8]) -> usize {
    usize::try_from(place).unwrap_or(0) * data.len()
}

/// What an object is, from put to delete.
fn in_segment(client: &Client, data: &[u8], sink: &mut [u8]) -> anyhow::Result<()> {
    let id = ObjectId::random().context("drawing an identifier")?;
    client.put(id, data, b"", WAIT)?;
    let object = client.get(id, WAIT)?;
    object.read_at(0, sink)?;
    drop(object);
    Ok(client.delete(id)?)
}

/// The same with a sealed memfd for each object, whose writable mapping goes before readers come; no
/// messages, which the store would need on top.
fn in_descriptor(data: &[u8], sink: &mut [u8]) -> anyhow::Result<()> {
    let writer = SharedMemory::allocate("beeline-bench", data.len())?;
    copy_in(&writer, 0, data);
    let descriptor = writer.descriptor().context("a memfd has a descriptor")?.try_clone()?;
    drop(writer);
    one_writer::refuse_writers(&descriptor)?;
    let reader = one_writer::map_read_only(descriptor, data.len())?;
    one_writer::copy_from(&reader, 0, sink);
    Ok(())
}

/// An object's whole life in a segment of the store, and in a memfd of its own.
#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
pub fn measure(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let memory = memory_for(&bench.sizes);
    let store = Store::start(options(folder.path(), memory), |handle| Box::new(Alone(handle)))?;
    let socket: &Path = &folder.path().join("objects.sock");
    let client = Client::connect(socket)?;
    for size in &bench.sizes {
        let data = vec![7; usize::try_from(*size)?];
        let (mut first, mut second) = (vec![0; 4096.min(data.len())], vec![0; data.len()]);
        // A reader that looks at a page, and one that reads all.
        for (name, sink) in [("a page read", &mut first), ("all read", &mut second)] {
            let sink = std::cell::RefCell::new(sink);
            let turn = |one: &dyn Fn(&mut [u8]) -> anyhow::Result<()>| {
                rate(bench.turn, || {
                    let start = Instant::now();
                    one(&mut sink.borrow_mut())?;
                    Ok((1, start.elapsed()))
                })
            };
            let segment = || turn(&|sink| in_segment(&client, &data, sink));
            let descriptor = || turn(&|sink| in_descriptor(&data, sink));
            let mut contenders =
                [Contender::new("in a segment", segment), Contender::new("memfd each", descriptor)];
            let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
            drop(contenders);
            let case = format!("life of {}, {name}", size_name(*size));
            let row = Row::new(case, "in a segment", "op/s", Better::Higher, &figures[0]);
            let bytes = row.figure.median * *size as f64 / 1e9;
            let row = row.against("memfd each", &figures[0], &figures[1]);
            report.tell(row.beside("GB/s", number(bytes)), bench.output)?;
        }
    }
    drop((client, store));
    Ok(())
}

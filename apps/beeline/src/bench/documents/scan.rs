//! Many documents at once: loading, scanning, grouping, sorting, building an index.
//!
//! The work is the store's; what carries the command hardly counts, so most rows have one contender. Server CPU
//! and memory stand beside.

use std::cell::RefCell;
use std::time::Instant;

use bson::{Document, doc};

use super::{Bench, Better, Contender, Row};
use beeline_documents_client::Client;

/// Documents of one insert.
const BATCH: u32 = 1000;
/// Values of the field that documents are grouped by.
const GROUPS: u32 = 100;

/// One turn over all documents.
type Walk<'w> = (&'static str, Box<dyn Fn(&mut Client) -> anyhow::Result<u64> + 'w>);

fn one(client: &mut Client, pipeline: Vec<Document>) -> anyhow::Result<Document> {
    let command = doc! { "aggregate": "scanned", "pipeline": pipeline, "cursor": {} };
    let reply = client.run("bench", command)?;
    let first = reply.get_document("cursor")?.get_array("firstBatch")?.first();
    let first = first.and_then(|first| first.as_document().cloned());
    first.ok_or_else(|| anyhow::anyhow!("the pipeline made no document"))
}

impl Bench<'_> {
    /// Loads documents; those each second.
    fn load(&self, client: &mut Client, collection: &str, count: u32) -> anyhow::Result<f64> {
        client.run("bench", doc! { "drop": collection })?;
        let text = "x".repeat(self.arguments.size.min(100));
        let start = Instant::now();
        for first in (0..count).step_by(BATCH as usize) {
            let last = first.saturating_add(BATCH).min(count);
            let one = |id: u32| {
                let place = id.wrapping_mul(2_654_435_761) % count;
                doc! { "_id": i64::from(id), "n": i64::from(place), "g": i64::from(id % GROUPS), "text": &text }
            };
            client.collection("bench", collection).insert_many((first..last).map(one).collect())?;
        }
        Ok(f64::from(count) / start.elapsed().as_secs_f64())
    }

    pub(super) fn scan(&self) -> anyhow::Result<()> {
        let count = self.arguments.options.size(self.arguments.documents, 2000).max(GROUPS);
        let clients =
            [RefCell::new(self.node.client(true)?), RefCell::new(self.node.client(false)?)];
        let named = |word: &str| format!("{word}, {count} documents");
        let load = |which: usize| self.load(&mut clients[which].borrow_mut(), "loaded", count);
        let figures = self.turns(&mut [
            Contender::new("fabric", || load(0)),
            Contender::new("wire", || load(1)),
        ])?;
        self.push(
            Row::new(named("load"), "fabric", "documents/s", Better::Higher, &figures[0])
                .against("MongoDB wire", &figures[0], &figures[1])
                .beside("inserted together", BATCH.to_string()),
        )?;
        clients[0].borrow_mut().run("bench", doc! { "drop": "loaded" })?;
        self.load(&mut clients[0].borrow_mut(), "scanned", count)?;
        let rss = self.node.resident_bytes() as f64 / f64::from(count);
        let half = i64::from(count / 2);
        let walks: [Walk<'_>; 5] = [
            (
                "count by a filter",
                Box::new(move |client| {
                    let query = doc! { "n": { "$lt": half } };
                    let reply = client.run("bench", doc! { "count": "scanned", "query": query })?;
                    Ok(u64::try_from(reply.get_i32("n")?).unwrap_or(0))
                }),
            ),
            (
                "$group of 100 groups",
                Box::new(|client| {
                    let group = doc! { "$group": { "_id": "$g", "sum": { "$sum": "$n" } } };
                    let found = one(client, vec![group, doc! { "$count": "groups" }])?;
                    Ok(u64::try_from(found.get_i32("groups")?).unwrap_or(0))
                }),
            ),
            (
                "$sort without an index, the first 10",
                Box::new(|client| {
                    let sort = doc! { "$sort": { "n": 1 } };
                    let found = one(client, vec![sort, doc! { "$limit": 10 }])?;
                    Ok(u64::from(found.get_i64("n")? == 0))
                }),
            ),
            (
                "find of all",
                Box::new(|client| {
                    let options = doc! { "batchSize": 10_000 };
                    let all = client.collection("bench", "scanned").find(doc! {}, options)?;
                    Ok(all.map(|one| one.map(|_| 1)).sum::<Result<u64, _>>()?)
                }),
            ),
            (
                "index build",
                Box::new(|client| {
                    let drop = doc! { "dropIndexes": "scanned", "index": "n_1" };
                    // There is none the first time.
                    let _ = client.run("bench", drop);
                    let index = doc! { "key": { "n": 1 }, "name": "n_1" };
                    client.run("bench", doc! { "createIndexes": "scanned", "indexes": [index] })?;
                    Ok(1)
                }),
            ),
        ];
        for (word, walk) in &walks {
            let cpu = RefCell::new((0.0, 0.0));
            let turn = |which: usize| {
                let before = self.node.cpu_seconds();
                let start = Instant::now();
                let found = walk(&mut clients[which].borrow_mut())?;
                anyhow::ensure!(found > 0, "{word} found nothing");
                let took = start.elapsed().as_secs_f64();
                let mut cpu = cpu.borrow_mut();
                *cpu = (cpu.0 + self.node.cpu_seconds() - before, cpu.1 + took);
                Ok(f64::from(count) / took)
            };
            let figures = self.turns(&mut [
                Contender::new("fabric", || turn(0)),
                Contender::new("wire", || turn(1)),
            ])?;
            let (used, took) = *cpu.borrow();
            self.push(
                Row::new(named(word), "fabric", "documents/s", Better::Higher, &figures[0])
                    .against("MongoDB wire", &figures[0], &figures[1])
                    .beside("server cores busy", format!("{:.2}", used / took.max(1e-9)))
                    .beside("server memory/document", format!("{rss:.0} B")),
            )?;
        }
        Ok(())
    }
}

//! Finds by `_id`, one after the other, through a running `beeline serve`: their p50, and time to
//! look at both ends with a profiler.
//! `cargo run --release --package beeline-documents-client --example finds -- ADDRESS COUNT`
#![allow(clippy::print_stdout, reason = "an example talks to a person")]

use std::time::Instant;

use beeline_documents_client::{Client, ClientError, Options};
use bson::doc;

const DOCUMENTS: i32 = 1000;

fn main() -> Result<(), ClientError> {
    let mut arguments = std::env::args().skip(1);
    let address = arguments.next().unwrap_or_else(|| "auto://127.0.0.1:4790".to_owned());
    let count = arguments.next().and_then(|count| count.parse().ok()).unwrap_or(100_000);
    let mut client = Client::connect(&address, Options::default())?;
    println!("commands go over {} ({})", client.transport(), client.reason());
    let mut items = client.collection("finds", "items");
    items.delete_many(doc! {})?;
    for id in 0..DOCUMENTS {
        items.insert_one(doc! { "_id": id, "text": "x".repeat(970) })?;
    }
    let mut times = Vec::with_capacity(count);
    for at in 0..count {
        let id = i32::try_from(at % 1000).unwrap_or(0) * 7 % DOCUMENTS;
        let start = Instant::now();
        let found = items.find_one(doc! { "_id": id })?;
        times.push(start.elapsed().as_nanos());
        assert!(found.is_some(), "a document that was inserted is found");
    }
    times.sort_unstable();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    println!("find by _id: p50 {} ns, p99 {} ns, least {} ns", at(50), at(99), at(0));
    Ok(())
}

//! Insert, find, update, delete through a running `beeline serve`:
//! `cargo run --package beeline-documents-client --example shop -- auto://127.0.0.1:4790`
#![allow(clippy::print_stdout, reason = "an example talks to a person")]

use beeline_documents_client::{Client, ClientError, Options};
use bson::doc;

fn main() -> Result<(), ClientError> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "auto://127.0.0.1:4790".to_owned());
    let mut client = Client::connect(&address, Options::default())?;
    println!("commands go over {} ({})", client.transport(), client.reason());
    let mut items = client.collection("shop", "items");
    items.delete_many(doc! {})?;
    for (id, name) in [(1, "tea"), (2, "coffee"), (3, "cocoa")] {
        items.insert_one(doc! { "_id": id, "name": name, "price": id * 2 })?;
    }
    println!("found by its _id: {:?}", items.find_one(doc! { "_id": 2 })?);
    let changed = items.update_one(doc! { "_id": 2 }, doc! { "$inc": { "price": 1 } }, false)?;
    println!("updated: {}", changed.modified);
    println!("deleted: {}", items.delete_one(doc! { "name": "cocoa" })?);
    let taken = items.insert_one(doc! { "_id": 1 });
    println!(
        "an _id that is taken: {}",
        taken.err().map_or_else(String::new, |error| error.to_string())
    );
    for item in items.find(doc! { "price": { "$gte": 1 } }, doc! { "sort": { "_id": 1 } })? {
        println!("{}", item?);
    }
    Ok(())
}

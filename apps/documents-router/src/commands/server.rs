//! What the router says of itself.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_documents::commands::{NAMES, VERSION, WIRE_VERSION};
use beeline_documents::reply::Reply;
use beeline_documents::wire::{COMPRESSORS, LONGEST_MESSAGE};
use beeline_documents::write::LARGEST;
use bson::spec::BinarySubtype;
use bson::{Binary, Bson, DateTime, Document, doc};

use super::Asked;
use crate::error::Result;
use crate::router::Router;

pub(super) fn build_info() -> Reply {
    Reply::Document(doc! {
        "version": VERSION, "gitVersion": "beeline", "modules": [], "allocator": "system",
        "javascriptEngine": "none", "sysInfo": "deprecated", "versionArray": [7, 0, 0, 0], "bits": 64,
        "debug": false, "maxBsonObjectSize": LARGEST as i32, "openssl": {}, "ok": 1.0,
    })
}

pub(super) fn list_commands() -> Reply {
    let more =
        ["addShard", "listShards", "enableSharding", "shardCollection", "split", "moveChunk"];
    let names = NAMES.iter().chain(&more);
    let commands: Document =
        names.map(|name| ((*name).to_owned(), Bson::Document(doc! { "help": "" }))).collect();
    Reply::Document(doc! { "commands": commands, "ok": 1.0 })
}

impl Router {
    /// As a mongos says it.
    pub(super) fn hello(&self, asked: &Asked, name: &str, connection: i32) -> Reply {
        let primary = if name == "hello" { "isWritablePrimary" } else { "ismaster" };
        let mut reply = doc! {
            "helloOk": true, primary: true, "msg": "isdbgrid",
            "maxBsonObjectSize": LARGEST as i32, "maxMessageSizeBytes": LONGEST_MESSAGE as i32,
            "maxWriteBatchSize": 100_000, "localTime": DateTime::now(),
            "logicalSessionTimeoutMinutes": 30, "connectionId": connection,
            "minWireVersion": 0, "maxWireVersion": WIRE_VERSION, "readOnly": false,
        };
        if let Ok(offered) = asked.body.get_array("compression") {
            let known =
                |name: &&Bson| name.as_str().is_some_and(|name| COMPRESSORS.contains(&name));
            let shared: Vec<Bson> = offered.iter().filter(known).cloned().collect();
            if !shared.is_empty() {
                reply.insert("compression", shared);
            }
        }
        reply.insert("ok", 1.0);
        Reply::Document(reply)
    }

    pub(super) fn server_status(&self, connection: i32) -> Reply {
        let count = |one: &std::sync::atomic::AtomicU64| one.load(Ordering::Relaxed) as i64;
        let counts = &self.counts;
        Reply::Document(doc! {
            "process": "mongos", "version": VERSION, "pid": i64::from(std::process::id()),
            "uptime": self.started.elapsed().as_secs_f64(), "localTime": DateTime::now(),
            "connections": { "totalCreated": connection },
            "metrics": { "cursor": { "open": { "total": self.cursors() as i64 } } },
            "router": {
                "commands": count(&counts.commands), "failed": count(&counts.failed),
                "targeted": count(&counts.targeted), "scattered": count(&counts.scattered),
                "tableReads": count(&counts.reads),
            },
            "ok": 1.0,
        })
    }

    /// Sessions are the shards': they end there.
    pub(super) async fn sessions(&self, asked: &Asked) -> Result<Reply> {
        if asked.name() == "startSession" {
            let mut id: [u8; 16] = rand::random();
            id[6] = id[6] & 0x0f | 0x40;
            id[8] = id[8] & 0x3f | 0x80;
            let id = Binary { subtype: BinarySubtype::Uuid, bytes: id.to_vec() };
            return Ok(Reply::Document(
                doc! { "id": { "id": id }, "timeoutMinutes": 30, "ok": 1.0 },
            ));
        }
        let view = self.view().await?;
        for name in view.table.shards.keys() {
            let shard = self.shard(&view.table, name)?;
            // What cannot be told ends by itself.
            let told = Arc::clone(&shard);
            let body = asked.body.clone();
            tokio::spawn(async move { told.ask("admin", body).await.map(drop) });
        }
        Ok(Reply::ok())
    }
}

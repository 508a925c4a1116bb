//! A server that does nothing: what the MongoDB wire and a driver cost without a store.
//!
//! Each thread waits for its connections (`epoll`), reads what came, writes a canned reply of a store's size, and has
//! no other work: no checks, no documents, no lock. So its rate is what a driver reaches against any server on the
//! same cores, and its processor time is the kernel's part of an operation.

use std::collections::HashMap;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use beeline_documents::reply::Reply;
use beeline_documents::wire;
use beeline_os::poller::{Interest, Poller, Waker};
use bson::spec::BinarySubtype;
use bson::{Binary, Timestamp, doc};

use super::Scripted;
use crate::bench::documents::free_port;

/// Bytes read at once.
const READ: usize = 64 << 10;
/// Connections whose news a thread takes at once.
const NEWS: usize = 256;
/// The token of a thread's waker; no connection has it.
const NEW: u64 = u64::MAX;
/// Where the first element of a message's document begins: behind the header, the flags, the section's kind and the
/// document's length.
const ELEMENT: usize = wire::HEADER + 4 + 1 + 4;

/// A process of this program that runs [`serve`].
pub(super) struct Nothing {
    pub(super) program: Scripted,
    pub(super) address: String,
}

impl Nothing {
    pub(super) fn start(threads: usize, size: usize) -> anyhow::Result<Self> {
        let port = free_port()?;
        let program = std::env::current_exe().context("the path of this program")?;
        let mut command = Command::new(program);
        command
            .args(["bench", "documents", "--answer-at", &port.to_string()])
            .args(["--server-cores", &threads.to_string(), "--size", &size.to_string()])
            .stderr(Stdio::null());
        let program = Scripted::start(&mut command)?;
        Ok(Self { program, address: format!("mongodb://127.0.0.1:{port}") })
    }
}

/// Answers until the input ends: documents of `size` bytes, about.
///
/// Errors: the port is taken; no thread could be made.
pub(in crate::bench::documents) fn serve(
    port: u16,
    threads: usize,
    size: usize,
) -> anyhow::Result<()> {
    let listener = TcpListener::bind(("127.0.0.1", port)).context("the port of canned replies")?;
    let replies = Arc::new(Replies::new(size));
    let mut inboxes = Vec::new();
    for _ in 0..threads {
        let inbox = Arc::new(Inbox { waker: Waker::new()?, streams: Mutex::default() });
        let (mine, replies) = (Arc::clone(&inbox), Arc::clone(&replies));
        std::thread::Builder::new()
            .name("answers".to_owned())
            .spawn(move || run(&mine, &replies))?;
        inboxes.push(inbox);
    }
    std::thread::Builder::new().name("accept".to_owned()).spawn(move || {
        for (stream, inbox) in listener.incoming().zip(inboxes.iter().cycle()) {
            let Ok(stream) = stream else { continue };
            inbox.streams.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
            inbox.waker.wake();
        }
    })?;
    writeln!(std::io::stdout(), "ready")?;
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

/// Connections for a thread.
struct Inbox {
    waker: Waker,
    streams: Mutex<Vec<TcpStream>>,
}

/// Whole messages, whose request's number is put in.
struct Replies {
    insert: Vec<u8>,
    find: Vec<u8>,
}

impl Replies {
    fn new(size: usize) -> Self {
        let record = doc! { "_id": 0_i64, "n": 0, "text": "x".repeat(size) };
        let batch = doc! { "firstBatch": [record], "id": 0_i64, "ns": "bench.records" };
        let [insert, find] = [doc! { "n": 1 }, doc! { "cursor": batch }].map(|mut reply| {
            reply.insert("ok", 1.0);
            // As a store's, with its times.
            let time = Timestamp { time: 1, increment: 1 };
            let hash = Binary { subtype: BinarySubtype::Generic, bytes: vec![0; 20] };
            let signature = doc! { "hash": hash, "keyId": 0_i64 };
            reply.insert("$clusterTime", doc! { "clusterTime": time, "signature": signature });
            reply.insert("operationTime", time);
            wire::frame(0, &reply)
        });
        Self { insert, find }
    }

    /// Appends the reply to a message; false where it is none that this server knows.
    fn answer(&self, message: &[u8], out: &mut Vec<u8>) -> bool {
        let begins =
            |with: &[u8]| message.get(ELEMENT..).is_some_and(|rest| rest.starts_with(with));
        let canned = if begins(b"\x02insert\0") {
            &self.insert
        } else if begins(b"\x02find\0") {
            &self.find
        } else {
            return other(message, out);
        };
        let start = out.len();
        out.extend_from_slice(canned);
        out[start + 8..start + 12].copy_from_slice(&message[4..8]);
        true
    }
}

/// Answers what a driver says beside finds and insertions.
fn other(message: &[u8], out: &mut Vec<u8>) -> bool {
    let Ok((manner, request)) = wire::read(message, wire::LONGEST_MESSAGE) else { return false };
    let reply = match request.name().to_lowercase().as_str() {
        "hello" | "ismaster" => doc! {
            "helloOk": true, "ismaster": true, "isWritablePrimary": true, "readOnly": false,
            "maxBsonObjectSize": 16_777_216, "maxMessageSizeBytes": 48_000_000,
            "maxWriteBatchSize": 100_000, "localTime": bson::DateTime::now(),
            // So that a driver sends what it sends to a store.
            "logicalSessionTimeoutMinutes": 30,
            "minWireVersion": 0, "maxWireVersion": 21, "connectionId": 1, "ok": 1.0,
        },
        _ => doc! { "n": 0, "ok": 1.0 },
    };
    wire::write(manner, 1, &Reply::Document(reply), &[], false, out);
    true
}

fn run(inbox: &Inbox, replies: &Replies) -> anyhow::Result<()> {
    let mut poller = Poller::new(NEWS)?;
    poller.add(&inbox.waker, NEW, Interest::READ)?;
    let mut connections: HashMap<u64, (TcpStream, Vec<u8>)> = HashMap::new();
    let (mut numbers, mut piece, mut out) = (0.., vec![0; READ], Vec::new());
    loop {
        for at in 0..poller.wait(None)? {
            let token = poller.readiness(at).token;
            if token == NEW {
                inbox.waker.clear();
                let mut streams = inbox.streams.lock().unwrap_or_else(PoisonError::into_inner);
                for (stream, number) in streams.drain(..).zip(&mut numbers) {
                    stream.set_nodelay(true)?;
                    poller.add(&stream, number, Interest::READ)?;
                    connections.insert(number, (stream, Vec::new()));
                }
                continue;
            }
            let Some((stream, input)) = connections.get_mut(&token) else { continue };
            let goes_on = match stream.read(&mut piece) {
                Ok(count) if count > 0 => {
                    out.clear();
                    take(&piece[..count], input, replies, &mut out)
                        && stream.write_all(&out).is_ok()
                }
                _ => false,
            };
            if !goes_on {
                connections.remove(&token);
            }
        }
    }
}

/// Answers every message that is whole, and keeps the rest; false: the client broke the protocol.
fn take(came: &[u8], input: &mut Vec<u8>, replies: &Replies, out: &mut Vec<u8>) -> bool {
    input.extend_from_slice(came);
    let mut consumed = 0;
    loop {
        let rest = &input[consumed..];
        match wire::length(rest, wire::LONGEST_MESSAGE) {
            Ok(Some(length)) if rest.len() >= length => {
                if !replies.answer(&rest[..length], out) {
                    return false;
                }
                consumed += length;
            }
            Ok(_) => break,
            Err(_) => return false,
        }
    }
    input.drain(..consumed);
    true
}

#[cfg(test)]
mod tests {
    use bson::Document;

    use super::*;

    fn replies_to(requests: &[Document]) -> Vec<Document> {
        let replies = Replies::new(100);
        let (mut input, mut out) = (Vec::new(), Vec::new());
        let framed: Vec<u8> =
            (7..).zip(requests).flat_map(|(id, request)| wire::frame(id, request)).collect();
        // In pieces, as a connection may give them.
        for piece in framed.chunks(50) {
            assert!(take(piece, &mut input, &replies, &mut out));
        }
        assert!(input.is_empty());
        let (mut rest, mut told) = (&out[..], Vec::new());
        while let Some(length) = wire::length(rest, wire::LONGEST_MESSAGE).unwrap() {
            let (message, behind) = rest.split_at(length);
            let number = 7 + told.len() as i32;
            assert_eq!(message[8..12], number.to_le_bytes(), "the reply names its request");
            told.push(wire::read(message, wire::LONGEST_MESSAGE).unwrap().1.body);
            rest = behind;
        }
        told
    }

    #[test]
    fn every_request_gets_a_reply_that_a_driver_takes() {
        let told = replies_to(&[
            doc! { "hello": 1, "$db": "admin" },
            doc! { "insert": "records", "documents": [{ "_id": 1 }], "$db": "bench" },
            doc! { "find": "records", "filter": { "_id": 1 }, "$db": "bench" },
            doc! { "drop": "records", "$db": "bench" },
        ]);
        assert_eq!(told.len(), 4);
        assert!(
            told.iter().all(|reply| reply.get_f64("ok").is_ok_and(|ok| ok.total_cmp(&1.0).is_eq())),
            "{told:?}"
        );
        assert_eq!(told[1].get_i32("n").unwrap(), 1);
        let cursor = told[2].get_document("cursor").unwrap();
        let batch = cursor.get_array("firstBatch").unwrap();
        assert_eq!((batch.len(), cursor.get_i64("id").unwrap()), (1, 0));
    }

    #[test]
    fn what_is_no_message_ends_the_connection() {
        let replies = Replies::new(1);
        assert!(!take(&[1, 0, 0, 0], &mut Vec::new(), &replies, &mut Vec::new()));
        let mut odd = wire::frame(1, &doc! { "ping": 1 });
        odd[12] = 1;
        assert!(!take(&odd, &mut Vec::new(), &replies, &mut Vec::new()));
    }
}

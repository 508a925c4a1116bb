//! Replies, written as BSON without decoding the documents in them.

use bson::{Bson, Document, doc};

/// A reply.
#[derive(Clone, Debug)]
pub enum Reply {
    /// A document.
    Document(Document),
    /// A batch of a cursor.
    Batch {
        /// The cursor's number; 0 when nothing is left.
        id: i64,
        /// What the cursor reads.
        namespace: String,
        /// The documents, as they are stored.
        documents: Vec<Vec<u8>>,
        /// The first batch of it.
        first: bool,
        /// Fields of the cursor beside those.
        cursor: Document,
    },
    /// Nothing yet: the command is to be run again when something changed, or so many milliseconds after it came.
    Later(u64),
}

impl Reply {
    /// `{ ok: 1 }`.
    #[must_use]
    pub fn ok() -> Self {
        Self::Document(doc! { "ok": 1.0 })
    }

    /// True when it says that the command failed.
    #[must_use]
    pub fn is_failure(&self) -> bool {
        matches!(self, Self::Document(document) if matches!(document.get("ok"), Some(Bson::Double(0.0))))
    }

    /// Appends its bytes. `extra` are fields beside those of the reply, without what is around a document's.
    pub fn write<O: Out>(&self, extra: &[u8], out: &mut O) {
        match self {
            Self::Document(document) => {
                let start = open(out);
                append_fields(out, document);
                out.append(extra);
                close(out, start);
            }
            Self::Batch { id, namespace, documents, first, cursor } => {
                let whole = open(out);
                name(out, 0x03, "cursor");
                let inner = open(out);
                name(out, 0x04, if *first { "firstBatch" } else { "nextBatch" });
                let array = open(out);
                let mut digits = Digits::default();
                for document in documents {
                    out.append(&[0x03]);
                    out.append(digits.next());
                    out.append(&[0]);
                    out.append(document);
                }
                close(out, array);
                name(out, 0x12, "id");
                out.append(&id.to_le_bytes());
                text(out, "ns", namespace);
                append_fields(out, cursor);
                close(out, inner);
                name(out, 0x01, "ok");
                out.append(&1_f64.to_le_bytes());
                out.append(extra);
                close(out, whole);
            }
            Self::Later(_) => {}
        }
    }
}

/// Where a reply is written: bytes for a socket, or registered memory.
pub trait Out {
    /// Bytes so far.
    fn bytes(&self) -> usize;
    /// Appends.
    fn append(&mut self, bytes: &[u8]);
    /// Overwrites four bytes that were appended.
    fn patch(&mut self, at: usize, bytes: [u8; 4]);
}

impl Out for Vec<u8> {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn append(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }

    fn patch(&mut self, at: usize, bytes: [u8; 4]) {
        self[at..at + 4].copy_from_slice(&bytes);
    }
}

impl Out for beeline_documents_channel::ReplyBuffer {
    fn bytes(&self) -> usize {
        self.len()
    }

    fn append(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }

    fn patch(&mut self, at: usize, bytes: [u8; 4]) {
        Self::patch(self, at, &bytes);
    }
}

/// Appends what [`Reply::Batch`] is for one document or none of `database.collection`, with nothing left behind it
/// and `extra` beside it.
///
/// All lengths are known before, so the document goes out in one piece between two short ones.
pub fn write_one(
    (database, collection): (&str, &str),
    document: Option<&[u8]>,
    extra: &[u8],
    out: &mut impl Out,
) {
    const FIRST: &[u8] = b"\x030\0";
    let element = document.map_or(0, |document| FIRST.len() + document.len());
    let array = 4 + element + 1;
    let namespace = database.len() + 1 + collection.len() + 1;
    let cursor = 4 + b"\x04firstBatch\0".len() + array + 4 + 8 + 4 + 4 + namespace + 1;
    let whole = 4 + b"\x03cursor\0".len() + cursor + 4 + 8 + extra.len() + 1;
    let length = |bytes: usize| (bytes as u32).to_le_bytes();
    let mut short = Vec::with_capacity(64 + namespace + extra.len());
    short.extend(length(whole));
    short.extend(b"\x03cursor\0");
    short.extend(length(cursor));
    short.extend(b"\x04firstBatch\0");
    short.extend(length(array));
    if let Some(document) = document {
        short.extend(FIRST);
        out.append(&short);
        out.append(document);
        short.clear();
    }
    short.push(0);
    short.extend(b"\x12id\0");
    short.extend(0_i64.to_le_bytes());
    short.extend(b"\x02ns\0");
    short.extend(length(namespace));
    short.extend(database.as_bytes());
    short.push(b'.');
    short.extend(collection.as_bytes());
    short.extend(b"\0\0");
    short.extend(b"\x01ok\0");
    short.extend(1_f64.to_le_bytes());
    short.extend(extra);
    short.push(0);
    out.append(&short);
}

/// Decimal numbers from 0 on, as array fields are named.
#[derive(Debug, Default)]
struct Digits {
    text: Vec<u8>,
}

impl Digits {
    fn next(&mut self) -> &[u8] {
        if self.text.is_empty() {
            self.text.push(b'0');
            return &self.text;
        }
        for at in (0..self.text.len()).rev() {
            if self.text[at] < b'9' {
                self.text[at] += 1;
                return &self.text;
            }
            self.text[at] = b'0';
        }
        self.text.insert(0, b'1');
        &self.text
    }
}

/// Opens a document, or one in a field whose name was written.
pub(crate) fn open(out: &mut impl Out) -> usize {
    let start = out.bytes();
    out.append(&[0; 4]);
    start
}

/// Closes what [`open`] opened.
pub(crate) fn close(out: &mut impl Out, start: usize) {
    out.append(&[0]);
    let length = (out.bytes() - start) as u32;
    out.patch(start, length.to_le_bytes());
}

/// Writes the type and the name of a field.
pub(crate) fn name(out: &mut impl Out, kind: u8, text: &str) {
    out.append(&[kind]);
    out.append(text.as_bytes());
    out.append(&[0]);
}

/// Writes a field of text.
pub(crate) fn text(out: &mut impl Out, field: &str, text: &str) {
    name(out, 0x02, field);
    out.append(&(text.len() as u32 + 1).to_le_bytes());
    out.append(text.as_bytes());
    out.append(&[0]);
}

/// The fields of a document without what is around them.
fn append_fields(out: &mut impl Out, document: &Document) {
    if !document.is_empty()
        && let Ok(bytes) = document.to_vec()
        && bytes.len() > 5
    {
        out.append(&bytes[4..bytes.len() - 1]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_is_the_document_it_stands_for() {
        let documents = (0..120).map(|n| doc! { "_id": n }.to_vec().unwrap()).collect();
        let reply = Reply::Batch {
            id: 7,
            namespace: "d.c".to_owned(),
            documents,
            first: true,
            cursor: doc! {},
        };
        let mut bytes = Vec::new();
        reply.write(b"\x10x\0\x01\0\0\0", &mut bytes);
        let read = Document::from_reader(&bytes[..]).unwrap();
        let cursor = read.get_document("cursor").unwrap();
        assert_eq!(cursor.get_i64("id").unwrap(), 7);
        assert_eq!(
            cursor.get_array("firstBatch").unwrap()[119],
            Bson::Document(doc! { "_id": 119 })
        );
        assert_eq!((read.get_f64("ok").unwrap(), read.get_i32("x").unwrap()), (1.0, 1));
    }
}

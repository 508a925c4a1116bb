//! Messages of the MongoDB wire protocol: OP_MSG, OP_QUERY for the first hello, OP_COMPRESSED.
//!
//! Invariant: nothing a client sends makes this module allocate more than the longest message, and
//! every document in a request has passed [`check::document`].

use std::io::{Read as _, Write as _};

use beeline_documents_query::check;
use beeline_documents_query::error::{Code, QueryError};
use bson::Document;

use crate::commands::Request;
use crate::reply::Reply;
use crate::request;

/// Longest message, bytes, as MongoDB.
pub const LONGEST_MESSAGE: usize = 48_000_000;
/// Longest message of a client that has not logged in, where clients must.
pub const LONGEST_OF_STRANGER: usize = 64 << 10;
/// Bytes of a header.
pub const HEADER: usize = 16;
/// Compressors, by the names drivers offer them under.
pub const COMPRESSORS: &[&str] = &["snappy", "zstd", "zlib"];

/// Replies shorter than this are not worth compressing.
const LEAST_COMPRESSED: usize = 256;

mod op {
    pub const REPLY: i32 = 1;
    pub const QUERY: i32 = 2004;
    pub const COMPRESSED: i32 = 2012;
    pub const MSG: i32 = 2013;
}

mod flag {
    pub const CHECKSUM: u32 = 1;
    pub const MORE_TO_COME: u32 = 2;
    pub const EXHAUST_ALLOWED: u32 = 1 << 16;
}

/// Why a connection is closed.
#[derive(Debug, thiserror::Error)]
#[error("the client broke the wire protocol: {0}")]
pub struct WireError(pub String);

fn broken<T>(what: impl Into<String>) -> Result<T, WireError> {
    Err(WireError(what.into()))
}

/// How a request came, so that its reply goes the same way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Manner {
    /// The client's number of the request.
    pub request_id: i32,
    /// By OP_QUERY.
    pub legacy: bool,
    /// Compressed by this.
    pub compressor: Option<u8>,
    /// The client awaits no reply.
    pub silent: bool,
    /// The client would take further replies unasked.
    pub exhaust: bool,
}

/// Length of the message that begins with these bytes, which is `most` at most; `None`: too few of
/// them.
///
/// Errors: a length that no message has.
pub fn length(bytes: &[u8], most: usize) -> Result<Option<usize>, WireError> {
    let Some(four) = bytes.first_chunk::<4>() else { return Ok(None) };
    match usize::try_from(i32::from_le_bytes(*four)) {
        Ok(length) if (HEADER..=most).contains(&length) => Ok(Some(length)),
        _ => broken("a message's length is out of range"),
    }
}

fn word(bytes: &[u8], at: usize) -> Result<i32, WireError> {
    match bytes.get(at..).and_then(|rest| rest.first_chunk::<4>()) {
        Some(four) => Ok(i32::from_le_bytes(*four)),
        None => broken("a message is cut short"),
    }
}

/// The document of a plain message: OP_MSG without flags, whose only section it is; and the client's number of the
/// request. It is not checked yet. `None`: any other message.
#[must_use]
pub fn plain(message: &[u8]) -> Option<(i32, &[u8])> {
    let (head, body) = message.split_at_checked(HEADER + 5)?;
    let is_plain = word(head, 12).ok()? == op::MSG && head[HEADER..] == [0; 5];
    let is_whole =
        word(body, 0).ok().and_then(|length| usize::try_from(length).ok())? == body.len();
    (is_plain && is_whole).then_some((word(head, 4).ok()?, body))
}

/// The document of a message that is [`plain`] but for one section behind it, whose only document stands beside it; the
/// name of that section has to be `name`. `None`: any other message.
#[must_use]
pub fn with_one<'m>(message: &'m [u8], name: &str) -> Option<(i32, &'m [u8], &'m [u8])> {
    let (head, rest) = message.split_at_checked(HEADER + 5)?;
    if word(head, 12).ok()? != op::MSG || head[HEADER..] != [0; 5] {
        return None;
    }
    let (body, section) = rest.split_at_checked(first_document(rest).ok()?.len())?;
    let (&kind, section) = section.split_first()?;
    let size = usize::try_from(word(section, 0).ok()?).ok()?;
    let named = section.get(4..)?.strip_prefix(name.as_bytes())?;
    let document = named.strip_prefix(&[0])?;
    let is_whole = kind == 1
        && size == section.len()
        && first_document(document).ok()?.len() == document.len();
    is_whole.then_some((word(head, 4).ok()?, body, document))
}

/// Appends the reply to a [`plain`] message, whose document `body` appends. Where that declines, nothing was written.
pub fn write_plain(
    (request_id, reply_id): (i32, i32),
    out: &mut Vec<u8>,
    body: impl FnOnce(&mut Vec<u8>) -> bool,
) -> bool {
    let start = out.len();
    for word in [0, reply_id, request_id, op::MSG, 0] {
        out.extend_from_slice(&i32::to_le_bytes(word));
    }
    out.push(0);
    if !body(out) {
        out.truncate(start);
        return false;
    }
    let length = (out.len() - start) as i32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
    true
}

/// Reads one whole message, which is `most` bytes at most when it is unpacked.
///
/// Errors: what is no message of this protocol, or one this server does not take.
pub fn read(message: &[u8], most: usize) -> Result<(Manner, Request), WireError> {
    let request_id = word(message, 4)?;
    let code = word(message, 12)?;
    let mut manner =
        Manner { request_id, legacy: false, compressor: None, silent: false, exhaust: false };
    let rest = &message[HEADER..];
    if code != op::COMPRESSED {
        let request = read_body(code, rest, message, &mut manner)?;
        return Ok((manner, request));
    }
    let (code, size) = (word(rest, 0)?, word(rest, 4)?);
    let Some((&compressor, packed)) = rest.get(8..).and_then(<[u8]>::split_first) else {
        return broken("a compressed message is cut short");
    };
    let Some(size) = usize::try_from(size).ok().filter(|size| *size <= most) else {
        return broken("a compressed message says it is too long");
    };
    let plain = unpack(compressor, packed, size)?;
    if plain.len() != size {
        return broken("a compressed message has another length than it says");
    }
    manner.compressor = Some(compressor);
    let request = read_body(code, &plain, &[], &mut manner)?;
    Ok((manner, request))
}

fn read_body(
    code: i32,
    body: &[u8],
    whole: &[u8],
    manner: &mut Manner,
) -> Result<Request, WireError> {
    match code {
        op::MSG => read_msg(body, whole, manner),
        op::QUERY => read_query(body, manner),
        other => broken(format!("operation {other} is not taken; current drivers send OP_MSG")),
    }
}

fn document(bytes: &[u8]) -> Result<Document, WireError> {
    check::document(bytes).map_err(|error| WireError(error.to_string()))?;
    Document::from_reader(bytes).map_err(|error| WireError(error.to_string()))
}

/// Checks a document of a message. One that is nested too deeply breaks no message: why it is refused.
fn check(bytes: &[u8]) -> Result<Option<QueryError>, WireError> {
    match check::document(bytes) {
        Ok(()) => Ok(None),
        Err(error) if error.code == Code::Overflow => Ok(Some(error)),
        Err(error) => broken(error.to_string()),
    }
}

/// The document at the start of some bytes.
fn first_document(bytes: &[u8]) -> Result<&[u8], WireError> {
    let length = usize::try_from(word(bytes, 0)?).unwrap_or(0);
    match bytes.get(..length) {
        Some(document) if length >= 5 => Ok(document),
        _ => broken("a document passes the end of its message"),
    }
}

fn read_msg(body: &[u8], whole: &[u8], manner: &mut Manner) -> Result<Request, WireError> {
    let flags = word(body, 0)? as u32;
    if flags & 0xffff & !(flag::CHECKSUM | flag::MORE_TO_COME) != 0 {
        return broken(format!("flags {flags:#x} of OP_MSG are not known"));
    }
    manner.silent = flags & flag::MORE_TO_COME != 0;
    manner.exhaust = flags & flag::EXHAUST_ALLOWED != 0;
    let mut rest = &body[4..];
    if flags & flag::CHECKSUM != 0 {
        let Some((content, sum)) = rest.split_last_chunk::<4>() else {
            return broken("a checksum is cut short");
        };
        let covered = whole.get(..whole.len().saturating_sub(4)).unwrap_or_default();
        if !covered.is_empty() && crc32c::crc32c(covered) != u32::from_le_bytes(*sum) {
            return broken("a message's checksum is wrong");
        }
        rest = content;
    }
    let (mut main, mut sequences, mut refused) = (None, Vec::new(), None);
    while let Some((&kind, after)) = rest.split_first() {
        match kind {
            0 => {
                let bytes = first_document(after)?;
                refused = check(bytes)?.or(refused);
                if main.replace(bytes).is_some() {
                    return broken("a message has two bodies");
                }
                rest = &after[bytes.len()..];
            }
            1 => {
                let size = usize::try_from(word(after, 0)?).unwrap_or(0);
                let Some(section) = after.get(4..size).filter(|_| size >= 5) else {
                    return broken("a section is cut short");
                };
                let Some(zero) = section.iter().position(|byte| *byte == 0) else {
                    return broken("a section has no name");
                };
                let Ok(name) = std::str::from_utf8(&section[..zero]) else {
                    return broken("a section's name is not UTF-8");
                };
                let (mut left, mut documents) = (&section[zero + 1..], Vec::new());
                while !left.is_empty() {
                    let bytes = first_document(left)?;
                    refused = check(bytes)?.or(refused);
                    documents.push(bytes.to_vec());
                    left = &left[bytes.len()..];
                }
                if sequences.iter().any(|(known, _)| known == name) {
                    return broken("a message has two sections of one name");
                }
                sequences.push((name.to_owned(), documents));
                rest = &after[size..];
            }
            other => return broken(format!("section kind {other} is not known")),
        }
    }
    // What was refused is not looked at any more, and nothing of it runs.
    match (main, refused) {
        (Some(_), Some(reason)) => Ok(Request::refused(reason)),
        (Some(bytes), None) => {
            let mut request = request::read(bytes).map_err(|error| WireError(error.to_string()))?;
            let is_known = |(name, _): &&(String, _)| {
                request.body.contains_key(name)
                    || request.sequences.iter().any(|(known, _)| known == name)
            };
            if let Some((name, _)) = sequences.iter().find(is_known) {
                let reason = format!("Duplicate field between body and document sequence {name}");
                return Ok(Request::refused(QueryError::new(Code::DuplicateSection, reason)));
            }
            request.sequences.append(&mut sequences);
            Ok(request)
        }
        (None, _) => broken("a message has no body"),
    }
}

fn read_query(body: &[u8], manner: &mut Manner) -> Result<Request, WireError> {
    manner.legacy = true;
    let Some(zero) = body.get(4..).and_then(|rest| rest.iter().position(|byte| *byte == 0)) else {
        return broken("OP_QUERY is cut short");
    };
    let Ok(namespace) = std::str::from_utf8(&body[4..4 + zero]) else {
        return broken("OP_QUERY's name is not UTF-8");
    };
    let Some(database) = namespace.strip_suffix(".$cmd") else {
        return broken("OP_QUERY is taken for commands only; current drivers send OP_MSG");
    };
    let Some(rest) = body.get(4 + zero + 1 + 8..) else { return broken("OP_QUERY is cut short") };
    let mut command = document(first_document(rest)?)?;
    // Some drivers wrap the command.
    if let Ok(inner) = command.get_document("$query") {
        command = inner.clone();
    }
    command.insert("$db", database);
    Ok(Request { body: command, ..Request::default() })
}

fn unpack(compressor: u8, packed: &[u8], size: usize) -> Result<Vec<u8>, WireError> {
    let cut = |error: &dyn std::fmt::Display| {
        WireError(format!("a compressed message cannot be read: {error}"))
    };
    match compressor {
        0 => Ok(packed.to_vec()),
        1 => {
            let said = snap::raw::decompress_len(packed).map_err(|error| cut(&error))?;
            if said != size {
                return broken("a compressed message has another length than it says");
            }
            snap::raw::Decoder::new().decompress_vec(packed).map_err(|error| cut(&error))
        }
        2 => {
            let mut plain = Vec::new();
            flate2::read::ZlibDecoder::new(packed)
                .take(size as u64 + 1)
                .read_to_end(&mut plain)
                .map_err(|error| cut(&error))?;
            Ok(plain)
        }
        3 => {
            let mut plain = Vec::new();
            let reader = zstd::stream::read::Decoder::new(packed).map_err(|error| cut(&error))?;
            reader.take(size as u64 + 1).read_to_end(&mut plain).map_err(|error| cut(&error))?;
            Ok(plain)
        }
        other => broken(format!("compressor {other} is not known")),
    }
}

fn pack(compressor: u8, plain: &[u8]) -> Option<Vec<u8>> {
    match compressor {
        1 => snap::raw::Encoder::new().compress_vec(plain).ok(),
        2 => {
            let mut encoder =
                flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
            encoder.write_all(plain).ok()?;
            encoder.finish().ok()
        }
        3 => zstd::bulk::compress(plain, 1).ok(),
        _ => None,
    }
}

/// Appends a reply. `more`: another one follows unasked.
pub fn write(
    manner: Manner,
    reply_id: i32,
    reply: &Reply,
    extra: &[u8],
    more: bool,
    out: &mut Vec<u8>,
) {
    if matches!(reply, Reply::Later(_)) {
        return;
    }
    let start = out.len();
    let header = |code: i32| {
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(&0_i32.to_le_bytes());
        header.extend_from_slice(&reply_id.to_le_bytes());
        header.extend_from_slice(&manner.request_id.to_le_bytes());
        header.extend_from_slice(&code.to_le_bytes());
        header
    };
    let code = if manner.legacy { op::REPLY } else { op::MSG };
    out.extend_from_slice(&header(code));
    if manner.legacy {
        out.extend_from_slice(&8_i32.to_le_bytes());
        out.extend_from_slice(&0_i64.to_le_bytes());
        out.extend_from_slice(&0_i32.to_le_bytes());
        out.extend_from_slice(&1_i32.to_le_bytes());
    } else {
        let flags = if more { flag::MORE_TO_COME } else { 0 };
        out.extend_from_slice(&flags.to_le_bytes());
        out.push(0);
    }
    reply.write(extra, out);
    if let Some(compressor) = manner.compressor
        && out.len() - start >= LEAST_COMPRESSED
        && let Some(packed) = pack(compressor, &out[start + HEADER..])
    {
        let size = (out.len() - start - HEADER) as i32;
        out.truncate(start);
        out.extend_from_slice(&header(op::COMPRESSED));
        out.extend_from_slice(&code.to_le_bytes());
        out.extend_from_slice(&size.to_le_bytes());
        out.push(compressor);
        out.extend_from_slice(&packed);
    }
    let length = (out.len() - start) as i32;
    out[start..start + 4].copy_from_slice(&length.to_le_bytes());
}

/// A request as a client frames it, for tests and benchmarks.
#[must_use]
pub fn frame(request_id: i32, body: &Document) -> Vec<u8> {
    let mut out = Vec::new();
    for word in [0, request_id, 0, op::MSG, 0] {
        out.extend_from_slice(&i32::to_le_bytes(word));
    }
    out.push(0);
    out.extend(body.to_vec().unwrap_or_default());
    let length = out.len() as i32;
    out[..4].copy_from_slice(&length.to_le_bytes());
    out
}

#[cfg(test)]
mod tests {
    use bson::doc;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_is_read_as_it_was_framed() {
        let framed = frame(7, &doc! { "ping": 1, "$db": "d" });
        assert_eq!(length(&framed, LONGEST_MESSAGE).unwrap(), Some(framed.len()));
        let (manner, request) = read(&framed, LONGEST_MESSAGE).unwrap();
        assert_eq!((manner.request_id, request.name()), (7, "ping"));
        assert!(
            length(&[0, 0, 0, 0], LONGEST_MESSAGE).is_err()
                && length(&[0xff; 4], LONGEST_MESSAGE).is_err()
        );
    }

    #[test]
    fn a_request_that_is_nested_too_deeply_is_refused_and_breaks_no_connection() {
        let deep = |levels: usize| (1..levels).fold(doc! {}, |inner, _| doc! { "a": inner });
        let asked = |document| frame(1, &doc! { "insert": "c", "$db": "d", "documents": document });
        let (_, taken) = read(&asked(deep(check::DEEPEST - 1)), LONGEST_MESSAGE).unwrap();
        assert!(taken.name() == "insert" && taken.refused.is_none());
        let (_, request) = read(&asked(deep(check::DEEPEST)), LONGEST_MESSAGE).unwrap();
        assert_eq!(request.refused.map(|error| error.code), Some(Code::Overflow));
        assert!(request.body.is_empty() && request.sequences.is_empty());
        // The same beside the body.
        let mut framed = frame(1, &doc! { "insert": "c", "$db": "d" });
        let section = deep(check::DEEPEST + 1).to_vec().unwrap();
        framed.push(1);
        framed.extend((4 + 10 + section.len() as u32).to_le_bytes());
        framed.extend(b"documents\0");
        framed.extend(section);
        let length = framed.len() as u32;
        framed[..4].copy_from_slice(&length.to_le_bytes());
        let (_, request) = read(&framed, LONGEST_MESSAGE).unwrap();
        assert_eq!(request.refused.map(|error| error.code), Some(Code::Overflow));
    }

    #[test]
    fn one_document_beside_the_body_is_found_and_nothing_else() {
        let body = doc! { "insert": "c", "$db": "d" };
        let section = |name: &[u8], documents: &[Document]| {
            let all: Vec<u8> = documents.iter().flat_map(|one| one.to_vec().unwrap()).collect();
            let mut section = vec![1];
            section.extend((4 + name.len() as u32 + 1 + all.len() as u32).to_le_bytes());
            section.extend(name);
            section.push(0);
            section.extend(all);
            section
        };
        let message = |sections: &[Vec<u8>]| {
            let mut framed = frame(7, &body);
            sections.iter().for_each(|section| framed.extend(section));
            let length = framed.len() as u32;
            framed[..4].copy_from_slice(&length.to_le_bytes());
            framed
        };
        let one = doc! { "_id": 1, "t": "x" };
        let whole = message(&[section(b"documents", std::slice::from_ref(&one))]);
        let (id, head, beside) = with_one(&whole, "documents").unwrap();
        assert_eq!((id, head), (7, body.to_vec().unwrap().as_slice()));
        assert_eq!(beside, one.to_vec().unwrap());
        assert_eq!(plain(&whole), None);
        for cut in 0..whole.len() {
            assert_eq!(with_one(&whole[..cut], "documents"), None);
        }
        for sections in [
            vec![],
            vec![section(b"documents", &[])],
            vec![section(b"documents", &[one.clone(), one.clone()])],
            vec![section(b"document", std::slice::from_ref(&one))],
            vec![section(b"documentss", std::slice::from_ref(&one))],
            vec![section(b"documents", std::slice::from_ref(&one)), section(b"more", &[])],
        ] {
            assert_eq!(with_one(&message(&sections), "documents"), None);
        }
        for lie in [-1_i32, 1, i32::MAX - 100] {
            let mut lying = section(b"documents", std::slice::from_ref(&one));
            let said = i32::from_le_bytes(lying[1..5].try_into().unwrap()) + lie;
            lying[1..5].copy_from_slice(&said.to_le_bytes());
            let lying = message(&[lying]);
            assert_eq!(with_one(&lying, "documents"), None, "a section of {said} bytes");
            assert!(read(&lying, LONGEST_MESSAGE).is_err());
        }
        let mut flagged = whole;
        flagged[HEADER] = 2;
        assert_eq!(with_one(&flagged, "documents"), None);
    }

    #[test]
    fn every_compressor_reads_what_it_wrote() {
        for compressor in 1..=3 {
            let manner = Manner {
                request_id: 1,
                legacy: false,
                compressor: Some(compressor),
                silent: false,
                exhaust: false,
            };
            let reply = Reply::Document(doc! { "text": "again and again ".repeat(100) });
            let mut out = Vec::new();
            write(manner, 2, &reply, &[], false, &mut out);
            assert!(out.len() < 800, "{compressor}: {}", out.len());
            let (back, request) = read(&out, LONGEST_MESSAGE).unwrap();
            assert_eq!(back.compressor, Some(compressor));
            assert_eq!(request.body.get_str("text").unwrap().len(), 1600);
        }
    }

    #[test]
    fn a_stranger_cannot_send_a_large_message_packed_or_not() {
        let long = doc! { "hello": 1, "$db": "d", "x": "x".repeat(LONGEST_OF_STRANGER) };
        let framed = frame(1, &long);
        assert!(length(&framed, LONGEST_OF_STRANGER).is_err());
        let body = &framed[HEADER..];
        let mut packed = framed[..12].to_vec();
        packed.extend(op::COMPRESSED.to_le_bytes());
        packed.extend(op::MSG.to_le_bytes());
        packed.extend((body.len() as i32).to_le_bytes());
        packed.push(2);
        packed.extend(pack(2, body).unwrap());
        let length = packed.len() as i32;
        packed[..4].copy_from_slice(&length.to_le_bytes());
        assert!(packed.len() < LONGEST_OF_STRANGER);
        assert!(read(&packed, LONGEST_MESSAGE).is_ok());
        assert!(read(&packed, LONGEST_OF_STRANGER).is_err());
    }

    #[test]
    fn a_compressed_message_cannot_grow_past_what_it_says() {
        let packed = pack(2, &vec![0; 1 << 20]).unwrap();
        assert_eq!(unpack(2, &packed, 100).unwrap().len(), 101);
        assert!(unpack(1, &pack(1, &[0; 1000]).unwrap(), 10).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn no_bytes_make_the_reader_panic(mut bytes in prop::collection::vec(any::<u8>(), 0..200), code in prop::sample::select(vec![1, 2004, 2012, 2013, 5]), at: usize, by: u8) {
            let mut framed = frame(1, &doc! { "insert": "c", "documents": [ { "_id": 1 } ], "$db": "d" });
            let place = at % framed.len();
            framed[place] ^= by;
            let _ = read(&framed, LONGEST_MESSAGE);
            let _ = with_one(&framed, "documents");
            if bytes.len() >= HEADER {
                bytes[12..16].copy_from_slice(&i32::to_le_bytes(code));
                let _ = read(&bytes, LONGEST_MESSAGE);
                let _ = with_one(&bytes, "documents");
            }
        }
    }
}

//! Bytes of a stranger: whether they are a BSON document, and not too deep.
//!
//! Invariant: what [`document`] accepted can be decoded, by recursion without running out of stack. Documents are
//! stored as the bytes that came, so what could not be decoded would fail every later reader of them.

use crate::error::{Code, Result, fail};

/// Deepest nesting, as MongoDB has it on the wire.
pub const DEEPEST: usize = 180;

/// The subtype of binary values that has a length of its own.
const OLD_BINARY: u8 = 2;

/// Checks that `bytes` are exactly one document: lengths, types, strings, nesting.
///
/// Errors: [`Code::NonConformantBson`], [`Code::Overflow`] when nested too deeply.
pub fn document(bytes: &[u8]) -> Result<()> {
    let mut ends = [0_usize; DEEPEST];
    let mut depth = 0;
    let mut at = open(bytes, 0, bytes.len())?;
    ends[0] = length(bytes, 0)?;
    if ends[0] != bytes.len() {
        return broken("the document's length is not that of its bytes");
    }
    loop {
        let end = ends[depth];
        let Some(&kind) = bytes.get(at) else { return broken("a document ends early") };
        at += 1;
        if kind == 0 {
            if at != end {
                return broken("a document's length is wrong");
            }
            if depth == 0 {
                return Ok(());
            }
            depth -= 1;
            continue;
        }
        at = text_end(bytes, at, end)?;
        let need = match kind {
            0x01 | 0x09 | 0x11 | 0x12 => 8,
            0x02 | 0x0d | 0x0e => string(bytes, at, end)?,
            0x05 => {
                let size = length(bytes, at)?;
                // The old subtype has its length a second time, and what decodes it later looks at that.
                if bytes.get(at + 4) == Some(&OLD_BINARY)
                    && (size < 4 || length(bytes, at + 5)? != size - 4)
                {
                    return broken("a binary value of subtype 2 has a wrong length inside");
                }
                size.saturating_add(5)
            }
            0x06 | 0x0a | 0x7f | 0xff => 0,
            0x07 => 12,
            0x08 => match bytes.get(at) {
                Some(0 | 1) => 1,
                _ => return broken("a boolean is neither true nor false"),
            },
            0x0b => {
                let middle = text_end(bytes, at, end)?;
                text_end(bytes, middle, end)? - at
            }
            0x0c => string(bytes, at, end)?.saturating_add(12),
            0x10 => 4,
            0x13 => 16,
            0x03 | 0x04 => {
                let inner = at.saturating_add(length(bytes, at)?);
                let next = open(bytes, at, end)?;
                depth += 1;
                if depth >= DEEPEST {
                    return fail(
                        Code::Overflow,
                        format!("a document is nested deeper than {DEEPEST}"),
                    );
                }
                ends[depth] = inner;
                at = next;
                continue;
            }
            // Code with a scope: its length, a string, a document that is opened here.
            0x0f => {
                let whole = at.saturating_add(length(bytes, at)?);
                let scope = at + 4 + string(bytes, at + 4, end)?;
                let inner = scope.saturating_add(length(bytes, scope)?);
                if inner != whole {
                    return broken("code with a scope has a wrong length");
                }
                let next = open(bytes, scope, end)?;
                depth += 1;
                if depth >= DEEPEST {
                    return fail(
                        Code::Overflow,
                        format!("a document is nested deeper than {DEEPEST}"),
                    );
                }
                ends[depth] = inner;
                at = next;
                continue;
            }
            _ => return broken("a value has an unknown type"),
        };
        at = at.saturating_add(need);
        if at >= end {
            return broken("a value passes the end of its document");
        }
    }
}

fn broken<T>(what: &str) -> Result<T> {
    fail(Code::NonConformantBson, format!("invalid BSON: {what}"))
}

/// The length that stands at a place.
fn length(bytes: &[u8], at: usize) -> Result<usize> {
    match bytes.get(at..).and_then(|rest| rest.first_chunk::<4>()) {
        Some(four) => match usize::try_from(i32::from_le_bytes(*four)) {
            Ok(length) => Ok(length),
            Err(_) => broken("a length is negative"),
        },
        None => broken("a length is cut short"),
    }
}

fn open(bytes: &[u8], at: usize, end: usize) -> Result<usize> {
    let size = length(bytes, at)?;
    if size < 5 || at.saturating_add(size) > end {
        return broken("a document passes the end of what holds it");
    }
    Ok(at + 4)
}

/// Behind the zero that ends a name.
fn text_end(bytes: &[u8], at: usize, end: usize) -> Result<usize> {
    let Some(rest) = bytes.get(at..end) else { return broken("a name is cut short") };
    match rest.iter().position(|byte| *byte == 0) {
        Some(zero) if std::str::from_utf8(&rest[..zero]).is_ok() => Ok(at + zero + 1),
        Some(_) => broken("a name is not UTF-8"),
        None => broken("a name has no end"),
    }
}

/// Bytes a string takes.
fn string(bytes: &[u8], at: usize, end: usize) -> Result<usize> {
    let size = length(bytes, at)?;
    let Some(content) = bytes.get(at + 4..(at + 4).saturating_add(size).min(end)) else {
        return broken("a string is cut short");
    };
    match content.split_last() {
        Some((0, text)) if content.len() == size && std::str::from_utf8(text).is_ok() => {
            Ok(size + 4)
        }
        _ => broken("a string is not UTF-8, or has no end"),
    }
}

#[cfg(test)]
mod tests {
    use bson::spec::BinarySubtype;
    use bson::{Bson, Document, doc};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]
        #[test]
        fn what_is_accepted_can_be_decoded(value in crate::value::tests::values(), at: usize, by: u8) {
            let mut bytes = doc! { "v": value, "w": 1 }.to_vec().unwrap();
            prop_assert!(document(&bytes).is_ok());
            let place = at % bytes.len();
            bytes[place] = bytes[place].wrapping_add(by);
            if document(&bytes).is_ok() {
                prop_assert!(Document::from_reader(&bytes[..]).is_ok());
            }
            prop_assert!(document(&bytes[..place]).is_err());
        }
    }

    /// A document with a value of every type.
    fn of_every_type() -> Vec<u8> {
        let binary = |subtype, bytes| bson::Binary { subtype, bytes };
        let mut bytes = doc! {
            "a": 1.5, "b": "text", "c": { "d": [1, { "e": null }] }, "f": Bson::Undefined,
            "g": binary(BinarySubtype::Generic, vec![1, 2]),
            "h": binary(BinarySubtype::BinaryOld, vec![1, 2]),
            "i": binary(BinarySubtype::Uuid, vec![7; 16]), "j": bson::oid::ObjectId::from_bytes([7; 12]),
            "k": true, "l": bson::DateTime::from_millis(1),
            "m": Bson::JavaScriptCode("code".to_owned()), "n": Bson::Symbol("symbol".to_owned()),
            "o": bson::JavaScriptCodeWithScope { code: "code".to_owned(), scope: doc! { "x": 1 } },
            "p": 1_i32, "q": bson::Timestamp { time: 1, increment: 2 }, "r": 1_i64,
            "s": "1.5".parse::<bson::Decimal128>().unwrap(), "t": Bson::MinKey, "u": Bson::MaxKey,
        }
        .to_vec()
        .unwrap();
        bytes.pop();
        bytes.extend(b"\x0bv\0pattern\0ix\0");
        bytes.extend(b"\x0cw\0\x02\0\0\0n\0twelve bytes\0");
        let length = bytes.len() as u32;
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        bytes
    }

    #[test]
    fn whatever_one_byte_becomes_what_is_accepted_can_be_decoded() {
        let whole = of_every_type();
        assert_eq!(
            (document(&whole), Document::from_reader(&whole[..]).unwrap().len()),
            (Ok(()), 21)
        );
        let mut accepted = 0;
        for place in 0..whole.len() {
            for by in 1..=u8::MAX {
                let mut bytes = whole.clone();
                bytes[place] = bytes[place].wrapping_add(by);
                if document(&bytes).is_ok() {
                    accepted += 1;
                    let decoded = Document::from_reader(&bytes[..]);
                    assert!(decoded.is_ok(), "byte {place} more by {by}: {decoded:?}");
                }
            }
        }
        assert!(accepted > 10_000, "{accepted}");
    }

    #[test]
    fn a_binary_value_of_subtype_2_has_its_length_inside() {
        let of = |content: &[u8]| {
            let mut bytes = vec![0; 4];
            bytes.extend(b"\x05b\0");
            bytes.extend((content.len() as u32).to_le_bytes());
            bytes.push(OLD_BINARY);
            bytes.extend(content);
            bytes.push(0);
            let length = bytes.len() as u32;
            bytes[..4].copy_from_slice(&length.to_le_bytes());
            bytes
        };
        for (content, is_right) in [
            (&b"\x02\0\0\0xy"[..], true),
            (b"\0\0\0\0", true),
            (b"", false),
            (b"\0\0\0", false),
            (b"\x01\0\0\0xy", false),
            (b"\x03\0\0\0xy", false),
            (b"\xff\xff\xff\xffxy", false),
        ] {
            let bytes = of(content);
            assert_eq!(document(&bytes).is_ok(), is_right, "{content:?}");
            assert_eq!(Document::from_reader(&bytes[..]).is_ok(), is_right, "{content:?}");
            if !is_right {
                assert_eq!(document(&bytes).unwrap_err().code, Code::NonConformantBson);
            }
        }
    }

    #[test]
    fn nesting_is_bounded() {
        let mut value = Bson::Null;
        for _ in 0..DEEPEST + 1 {
            value = Bson::Document(doc! { "a": value });
        }
        let Bson::Document(deep) = value else { unreachable!() };
        assert_eq!(document(&deep.to_vec().unwrap()).unwrap_err().code, Code::Overflow);
    }
}

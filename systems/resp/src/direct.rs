//! `DIRECT.*`: the direct store's operations, so that any Redis client can try them.
//!
//! They touch no key of this door's keyspace. [`DirectCall::new`] makes a packet of a request, the node
//! hands it to the store without waiting, and [`DirectCall::reply`] writes the reply when it comes.
//!
//! Numbers are little-endian elements of `WIDTH` bytes (1, 2, 4 or 8; 8 where nothing is said). Replies
//! show them signed; MAX and MIN compare them unsigned.

use beeline_kv_direct::function::number;
use beeline_kv_direct::map::ANY_STATE;
use beeline_kv_direct::table::{KEY_LIMIT, PAIR_LIMIT};
use beeline_kv_direct::{Kind, PacketWriter, ReplyReader, Request, Status, Width, processor_of};

use crate::args::Args;
use crate::commands::{Call, CommandResult};
use crate::error::CommandError;
use crate::number::parse_i64;
use crate::output::Output;

/// Most bytes of a packet with one operation, and of its reply.
const PACKET_BYTES: usize = 16 + KEY_LIMIT + PAIR_LIMIT;

/// What the reply looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// OK.
    Done,
    /// 1, or 0 where the key is absent.
    Existed,
    /// Bytes, or nil.
    Bytes,
    /// One number, or nil.
    Number(Width),
    /// Numbers, or nil.
    Numbers(Width),
}

/// One request as the direct store takes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectCall {
    /// The packet.
    pub packet: Vec<u8>,
    /// The processor of its key.
    pub processor: u32,
    /// What [`DirectCall::reply`] gets at most, bytes.
    pub reply_limit: usize,
    shape: Shape,
}

/// Takes `WIDTH n` off the end.
fn width_of(args: Args<'_>) -> Result<(Width, usize), CommandError> {
    let count = args.len();
    if count < 4 || !args.is(count - 2, "width") {
        return Ok((Width::Eight, count));
    }
    let width = match args.get(count - 1) {
        b"1" => Width::One,
        b"2" => Width::Two,
        b"4" => Width::Four,
        b"8" => Width::Eight,
        _ => return Err(CommandError::Line("ERR WIDTH is 1, 2, 4 or 8")),
    };
    Ok((width, count - 2))
}

/// Numbers as elements.
fn elements<'a>(
    numbers: impl Iterator<Item = &'a [u8]>,
    width: Width,
) -> Result<Vec<u8>, CommandError> {
    let bits = 8 * width.bytes() as u32;
    let range = -(1_i128 << (bits - 1))..1_i128 << bits;
    let mut bytes = Vec::new();
    for text in numbers {
        let number = parse_i64(text).ok_or(CommandError::NotAnInteger)?;
        if !range.contains(&i128::from(number)) {
            return Err(CommandError::OutOfRange);
        }
        bytes.extend(&number.to_le_bytes()[..width.bytes()]);
    }
    Ok(bytes)
}

/// Number of a function that folds, and the first sum that leaves the others as they are.
fn fold_named(word: &[u8]) -> Result<(u8, i64), CommandError> {
    let known: [(&str, u8, i64); 6] = [
        ("add", number::ADD, 0),
        ("max", number::MAX, 0),
        ("min", number::MIN, -1),
        ("and", number::AND, -1),
        ("or", number::OR, 0),
        ("xor", number::XOR, 0),
    ];
    known
        .iter()
        .find(|(name, ..)| word.eq_ignore_ascii_case(name.as_bytes()))
        .map(|&(_, number, first)| (number, first))
        .ok_or(CommandError::Line("ERR the function is ADD, MAX, MIN, AND, OR or XOR"))
}

impl DirectCall {
    /// The request behind `args`, for a store of `processors` processors.
    ///
    /// Errors: the reply to a request that does not follow its command's form.
    pub fn new(args: Args<'_>, processors: u32) -> Result<Self, CommandError> {
        let key = args.get(1);
        if key.is_empty() || key.len() > KEY_LIMIT {
            return Err(CommandError::Line("ERR a key of the direct store has 1 to 255 bytes"));
        }
        let name = args.get(0).to_ascii_lowercase();
        let (width, end) = match name.as_slice() {
            b"direct.get" | b"direct.del" => (Width::Eight, args.len()),
            b"direct.put" if args.len() == 3 => (Width::Eight, 3),
            _ => width_of(args)?,
        };
        let numbers = |from: usize| elements(args.from(from).take(end.saturating_sub(from)), width);
        let value: Vec<u8>;
        let (request, shape) = match name.as_slice() {
            b"direct.get" => (Request::get(key), Shape::Bytes),
            b"direct.del" => (Request::delete(key), Shape::Existed),
            b"direct.put" => {
                value = match end {
                    3 => args.get(2).to_vec(),
                    4.. if args.is(2, "numbers") => numbers(3)?,
                    _ => return Err(CommandError::Syntax),
                };
                (Request::put(key, &value), Shape::Done)
            }
            b"direct.add" if end == 3 => {
                value = numbers(2)?;
                let kind = Kind::UpdateScalar;
                let request = Request::with_function(kind, key, number::ADD, width, &value);
                (request, Shape::Number(width))
            }
            b"direct.cas" if end == 4 => {
                value = numbers(2)?;
                let number = number::COMPARE_AND_SWAP;
                let kind = Kind::UpdateScalar;
                let request = Request::with_function(kind, key, number, width, &value);
                (request, Shape::Number(width))
            }
            b"direct.vadd" if end >= 3 => {
                value = numbers(2)?;
                let kind = if end == 3 { Kind::UpdateVectorByScalar } else { Kind::UpdateVector };
                let request = Request::with_function(kind, key, number::ADD, width, &value);
                (request, Shape::Numbers(width))
            }
            b"direct.reduce" if (3..=4).contains(&end) => {
                let (function, first) = fold_named(args.get(2))?;
                value = match end {
                    4 => numbers(3)?,
                    _ => first.to_le_bytes()[..width.bytes()].to_vec(),
                };
                let request = Request::with_function(Kind::Reduce, key, function, width, &value);
                (request, Shape::Number(width))
            }
            b"direct.filter" if end == 2 => {
                let kind = Kind::Filter;
                let request = Request::with_function(kind, key, number::ADD, width, &[]);
                (request, Shape::Numbers(width))
            }
            _ => return Err(CommandError::Syntax),
        };
        if key.len() + request.value.len() > PAIR_LIMIT {
            return Err(CommandError::Line(TOO_LONG));
        }
        let mut writer = PacketWriter::new(PACKET_BYTES, PACKET_BYTES);
        if !writer.push(&request) {
            return Err(CommandError::Line(TOO_LONG));
        }
        // A Redis client goes by no map: it asks this node for any key.
        writer.set_state(ANY_STATE);
        let packet = writer.finish(0).to_vec();
        let processor = processor_of(key, processors);
        Ok(Self { packet, processor, reply_limit: PACKET_BYTES, shape })
    }

    /// Writes the reply; `None`: the store did not answer.
    pub fn reply(&self, reply: Option<&[u8]>, out: &mut Output) {
        let result = reply.and_then(ReplyReader::new).and_then(|(_, mut results)| results.next());
        let Some((status, bytes)) = result else {
            return out.error(b"ERR the direct store did not answer");
        };
        let bytes = bytes.unwrap_or_default();
        match (status, self.shape) {
            (Status::Ok, Shape::Done) => out.ok(),
            (Status::Ok, Shape::Existed) => out.integer(1),
            (Status::Ok, Shape::Bytes) => out.bulk(bytes),
            (Status::Ok, Shape::Number(_)) => out.integer(signed(bytes)),
            (Status::Ok, Shape::Numbers(width)) => {
                out.array(bytes.len() / width.bytes());
                bytes.chunks(width.bytes()).for_each(|element| out.integer(signed(element)));
            }
            (Status::NotFound, Shape::Existed) => out.integer(0),
            (Status::NotFound, Shape::Numbers(_)) => out.null_array(),
            (Status::NotFound, _) => out.null(),
            (Status::OutOfMemory, _) => {
                out.error(b"OOM the direct store is full: delete pairs, or raise direct-memory");
            }
            (Status::TooLong, _) => out.error(TOO_LONG.as_bytes()),
            (Status::LengthMismatch, _) => {
                out.error(b"ERR the value's length is not what this operation and WIDTH need");
            }
            (Status::Moved, _) => out.error(
                b"ERR the key is held by another node of the map; `beeline direct servers` names them",
            ),
            (Status::Busy, _) => out.error(b"TRYAGAIN the key is being moved to another node"),
            (status, _) => {
                out.error(format!("ERR the direct store refused: {status:?}").as_bytes())
            }
        }
    }
}

const TOO_LONG: &str = "ERR key and value of a pair of the direct store have at most 2044 bytes";

/// A little-endian element of 1 to 8 bytes.
fn signed(element: &[u8]) -> i64 {
    let bits = 8 * element.len().clamp(1, 8) as u32;
    let number = element.iter().rev().fold(0_i64, |number, &byte| number << 8 | i64::from(byte));
    number << (64 - bits) >> (64 - bits)
}

/// Runs where a node has no direct store.
pub(crate) fn unavailable(_: &mut Call<'_, '_>) -> CommandResult {
    Err(CommandError::Line("ERR this node has no direct store (it runs --without direct)"))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use beeline_kv_direct::{Functions, Processor, ProcessorOptions};

    use super::*;
    use crate::args::ArgsBuffer;

    struct Door {
        processor: Processor<beeline_kv_direct::memory::HostMemory>,
    }

    impl Door {
        fn new() -> Self {
            let options = ProcessorOptions { memory_bytes: 16 << 20, ..Default::default() };
            let functions = Arc::new(Functions::default());
            Self { processor: Processor::new(&options, functions, false).unwrap().0 }
        }

        fn words(&mut self, words: &[&[u8]]) -> String {
            let mut buffer = ArgsBuffer::new();
            assert!(buffer.push_words(words));
            let mut out = Output::default();
            match DirectCall::new(buffer.get(0), 1) {
                Err(error) => error.write_to(&mut out),
                Ok(call) => {
                    let mut reply = Vec::new();
                    assert!(self.processor.process(&call.packet, &mut reply, call.reply_limit));
                    call.reply(Some(&reply), &mut out);
                }
            }
            String::from_utf8_lossy(out.as_bytes()).into_owned()
        }

        fn say(&mut self, line: &str) -> String {
            let words: Vec<&[u8]> = line.split(' ').map(str::as_bytes).collect();
            self.words(&words)
        }
    }

    #[test]
    fn every_command_does_what_its_words_say() {
        let mut door = Door::new();
        for (line, reply) in [
            ("DIRECT.GET k", "$-1\r\n"),
            ("DIRECT.PUT k hello", "+OK\r\n"),
            ("direct.get k", "$5\r\nhello\r\n"),
            ("DIRECT.DEL k", ":1\r\n"),
            ("DIRECT.DEL k", ":0\r\n"),
            ("DIRECT.ADD n 1", "$-1\r\n"),
            ("DIRECT.PUT n NUMBERS -2", "+OK\r\n"),
            ("DIRECT.ADD n 5", ":-2\r\n"),
            ("DIRECT.CAS n 3 9", ":3\r\n"),
            ("DIRECT.CAS n 3 10", ":9\r\n"),
            ("DIRECT.ADD n 0", ":9\r\n"),
            ("DIRECT.PUT v NUMBERS 1 0 -3 WIDTH 2", "+OK\r\n"),
            ("DIRECT.VADD v 10 WIDTH 2", "*3\r\n:1\r\n:0\r\n:-3\r\n"),
            ("DIRECT.VADD v -11 -10 0 width 2", "*3\r\n:11\r\n:10\r\n:7\r\n"),
            ("DIRECT.REDUCE v ADD WIDTH 2", ":7\r\n"),
            ("DIRECT.REDUCE v max 100 WIDTH 2", ":100\r\n"),
            ("DIRECT.REDUCE v MIN WIDTH 2", ":0\r\n"),
            ("DIRECT.FILTER v WIDTH 2", "*1\r\n:7\r\n"),
            ("DIRECT.FILTER absent", "*-1\r\n"),
            ("DIRECT.PUT w width", "+OK\r\n"),
            ("DIRECT.GET w", "$5\r\nwidth\r\n"),
        ] {
            assert_eq!(door.say(line), reply, "{line}");
        }
    }

    #[test]
    fn what_does_not_follow_the_form_is_an_error_and_changes_nothing() {
        let mut door = Door::new();
        door.say("DIRECT.PUT n NUMBERS 7");
        for (line, part) in [
            ("DIRECT.ADD n x", "not an integer"),
            ("DIRECT.ADD n 300 WIDTH 1", "out of range"),
            ("DIRECT.ADD n 1 WIDTH 3", "WIDTH is 1, 2, 4 or 8"),
            ("DIRECT.ADD n 1 2", "syntax"),
            ("DIRECT.ADD n 1 WIDTH 4", "length"),
            ("DIRECT.CAS n 1", "syntax"),
            ("DIRECT.VADD n 1 2", "length"),
            ("DIRECT.REDUCE n average", "the function is"),
            ("DIRECT.PUT n BYTES 7", "syntax"),
        ] {
            let reply = door.say(line);
            assert!(reply.starts_with('-') && reply.contains(part), "{line}: {reply}");
        }
        assert!(door.words(&[b"DIRECT.GET", b""]).contains("1 to 255 bytes"));
        assert!(door.words(&[b"DIRECT.GET", &[1; 256]]).contains("1 to 255 bytes"));
        assert!(door.words(&[b"DIRECT.PUT", b"n", &[1; 2044]]).contains("2044"));
        assert_eq!(door.words(&[b"DIRECT.PUT", b"n", &[1; 2043]]), "+OK\r\n");
    }

    #[test]
    fn a_store_that_does_not_answer_and_a_reply_that_is_none_are_errors() {
        let mut buffer = ArgsBuffer::new();
        assert!(buffer.push_words(&[b"direct.get", b"k"]));
        let call = DirectCall::new(buffer.get(0), 4).unwrap();
        assert!(call.processor < 4);
        for reply in [None, Some(&b""[..]), Some(&[0; 6][..])] {
            let mut out = Output::default();
            call.reply(reply, &mut out);
            assert!(out.as_bytes().starts_with(b"-ERR"), "{reply:?}");
        }
    }
}

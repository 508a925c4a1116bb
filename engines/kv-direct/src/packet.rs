//! Packets: many operations in one message, and their results in one reply.
//!
//! ```text
//! request:  id u32 | count u16 | state of the map u32 | operation ...
//! operation: head u8 | key length u8, value length u16, unless SAME_SIZE
//!            | function u8, width code u8, for updates, reductions and filters
//!            | key | value, unless SAME_VALUE or the operation carries none
//! head:     opcode in the low four bits, SAME_SIZE 0x10, SAME_VALUE 0x20, NO_RETURN 0x40
//! reply:    id u32 | count u16 | result ...
//! result:   status u8, with 0x80 where bytes follow | length u16 | bytes
//! ```
//!
//! All numbers are little-endian. The state is that of the map ([`crate::map`]) by which the client chose
//! this server, 0 where it knows none. SAME_SIZE: the key, and the value where the operation carries one, have
//! the lengths that were given last; an operation without a value gives 0, unless it has the flag itself.
//! SAME_VALUE: the value is the last one before it. Results come in the order of the operations.
//!
//! What is malformed is refused for that operation and for all behind it in the packet, because their
//! beginning is not known; what merely names an unknown function is refused alone. Nothing refused
//! touches memory.
//!
//! Source: spec/kv-direct.md 5.5.

use crate::bucket::same;
use crate::function::Width;
use crate::table::{KEY_LIMIT, PAIR_LIMIT};

/// Bytes of a reply before its first result.
pub const HEADER_BYTES: usize = 6;
/// Bytes of a packet before its first operation.
pub const PACKET_HEADER_BYTES: usize = 10;

const SAME_SIZE: u8 = 0x10;
const SAME_VALUE: u8 = 0x20;
const NO_RETURN: u8 = 0x40;
const RESERVED: u8 = 0x80;
const HAS_BYTES: u8 = 0x80;

/// What the first byte of an operation says, so that reading it is one look and no decisions.
#[derive(Clone, Copy, Debug)]
struct Head {
    kind: Kind,
    has_function: bool,
    has_value: bool,
    /// Most bytes of its result.
    bound: u16,
}

/// By the first byte; `None` where no operation begins with it.
static HEADS: [Option<Head>; 256] = {
    let mut heads = [None; 256];
    let mut byte = 0;
    while byte < heads.len() {
        let head = byte as u8;
        if head & RESERVED == 0
            && let Some(kind) = Kind::of_code(head & 0x0f)
            && (kind.has_value() || head & SAME_VALUE == 0)
        {
            let bound = kind.longest_result(head & NO_RETURN != 0) as u16;
            let (has_function, has_value) = (kind.has_function(), kind.has_value());
            heads[byte] = Some(Head { kind, has_function, has_value, bound });
        }
        byte += 1;
    }
    heads
};

const _: () = assert!(3 + crate::map::REPORT_LIMIT <= u16::MAX as usize, "a bound has 16 bits");

/// What an operation does; its number is its code in a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// The value of a key.
    Get = 1,
    /// Stores a pair.
    Put = 2,
    /// Deletes a key.
    Delete = 3,
    /// Changes a value that is one element; returns the original.
    UpdateScalar = 4,
    /// Changes every element by one parameter; returns the original vector.
    UpdateVectorByScalar = 5,
    /// Changes each element by the parameter at its place; returns the original vector.
    UpdateVector = 6,
    /// Folds the elements into one, from the initial one given.
    Reduce = 7,
    /// The elements that satisfy the function.
    Filter = 8,
    /// What the processor knows of the map of servers; alone in its packet, as the two below.
    Map = 9,
    /// Changes what it knows.
    SetMap = 10,
    /// Takes pairs over from the server that held them.
    Adopt = 11,
}

impl Kind {
    /// From a packet's code.
    #[must_use]
    #[inline]
    pub const fn of_code(code: u8) -> Option<Self> {
        Some(match code {
            1 => Self::Get,
            2 => Self::Put,
            3 => Self::Delete,
            4 => Self::UpdateScalar,
            5 => Self::UpdateVectorByScalar,
            6 => Self::UpdateVector,
            7 => Self::Reduce,
            8 => Self::Filter,
            9 => Self::Map,
            10 => Self::SetMap,
            11 => Self::Adopt,
            _ => return None,
        })
    }

    #[inline]
    const fn code(self) -> u8 {
        self as u8
    }

    /// Whether it is about the map of servers and not about a pair.
    #[must_use]
    #[inline]
    pub fn is_control(self) -> bool {
        self.code() >= Self::Map.code()
    }

    /// Whether it names a function.
    #[must_use]
    #[inline]
    pub const fn has_function(self) -> bool {
        self.code() >= Self::UpdateScalar.code() && self.code() <= Self::Filter.code()
    }

    /// Whether it carries a value, a parameter or an initial sum.
    #[must_use]
    #[inline]
    pub const fn has_value(self) -> bool {
        !matches!(self, Self::Get | Self::Delete | Self::Filter | Self::Map)
    }

    /// Whether it changes its key.
    #[must_use]
    pub fn writes(self) -> bool {
        !matches!(self, Self::Get | Self::Reduce | Self::Filter)
    }

    /// Most bytes of its result in a reply.
    #[must_use]
    #[inline]
    pub const fn longest_result(self, no_return: bool) -> usize {
        match self {
            Self::Put | Self::Delete => 1,
            Self::Reduce => 3 + 8,
            Self::Map => 3 + crate::map::REPORT_LIMIT,
            Self::SetMap => 1,
            Self::Adopt => 3 + 4,
            _ if no_return => 1,
            _ => 3 + PAIR_LIMIT,
        }
    }
}

/// One operation. Borrows from its packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// What to do.
    pub kind: Kind,
    /// Only the status is wanted.
    pub no_return: bool,
    /// Number of the function; 0 without one.
    pub function: u8,
    /// Width of the elements.
    pub width: Width,
    /// The key, 1 to 255 bytes.
    pub key: &'a [u8],
    /// Value, parameter or initial sum; empty without one.
    pub value: &'a [u8],
}

impl<'a> Request<'a> {
    /// GET.
    #[must_use]
    #[inline]
    pub fn get(key: &'a [u8]) -> Self {
        Self::plain(Kind::Get, key, &[])
    }

    /// PUT.
    #[must_use]
    #[inline]
    pub fn put(key: &'a [u8], value: &'a [u8]) -> Self {
        Self::plain(Kind::Put, key, value)
    }

    /// DELETE.
    #[must_use]
    pub fn delete(key: &'a [u8]) -> Self {
        Self::plain(Kind::Delete, key, &[])
    }

    fn plain(kind: Kind, key: &'a [u8], value: &'a [u8]) -> Self {
        Self { kind, no_return: false, function: 0, width: Width::One, key, value }
    }

    /// An operation with a function.
    #[must_use]
    pub fn with_function(
        kind: Kind,
        key: &'a [u8],
        function: u8,
        width: Width,
        value: &'a [u8],
    ) -> Self {
        Self { kind, no_return: false, function, width, key, value }
    }

    /// An operation about the map, which is alone in its packet.
    #[must_use]
    pub fn control(kind: Kind, key: &'a [u8], value: &'a [u8]) -> Self {
        Self::plain(kind, key, value)
    }

    /// The same without a value in its result.
    #[must_use]
    pub fn without_return(self) -> Self {
        Self { no_return: true, ..self }
    }
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// Done.
    Ok,
    /// The key is not there.
    NotFound,
    /// The store is full; nothing was changed.
    OutOfMemory,
    /// Key or value is too long, or the key empty; nothing was changed.
    TooLong,
    /// The packet does not follow its format from here on; nothing was changed.
    Malformed,
    /// No such function for this kind of operation and width; nothing was changed.
    UnknownFunction,
    /// Value and parameter do not have lengths that fit each other; nothing was changed.
    LengthMismatch,
    /// The key does not belong to this server by the map it knows; nothing was changed.
    Moved,
    /// The pair is on its way to another server; ask again. Nothing was changed.
    Busy,
    /// The map cannot become what was asked, being another than was thought; nothing was changed.
    Conflict,
}

impl Status {
    /// As in a reply.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::NotFound => 1,
            Self::OutOfMemory => 2,
            Self::TooLong => 3,
            Self::Malformed => 4,
            Self::UnknownFunction => 5,
            Self::LengthMismatch => 6,
            Self::Moved => 7,
            Self::Busy => 8,
            Self::Conflict => 9,
        }
    }

    #[inline]
    fn of_code(code: u8) -> Option<Self> {
        Some(match code {
            0 => Self::Ok,
            1 => Self::NotFound,
            2 => Self::OutOfMemory,
            3 => Self::TooLong,
            4 => Self::Malformed,
            5 => Self::UnknownFunction,
            6 => Self::LengthMismatch,
            7 => Self::Moved,
            8 => Self::Busy,
            9 => Self::Conflict,
            _ => return None,
        })
    }

    /// Whether another server, or the same a little later, may do what this one did not.
    #[must_use]
    #[inline]
    pub fn is_elsewhere(self) -> bool {
        matches!(self, Self::Moved | Self::Busy)
    }
}

/// Writes a packet operation by operation.
#[derive(Clone, Debug)]
pub struct PacketWriter {
    bytes: Vec<u8>,
    count: u16,
    state: u32,
    /// The lengths of key and value that were given last.
    sizes: Option<(usize, usize)>,
    /// Where the last value that was written lies.
    value: Option<(usize, usize)>,
    reply_bound: usize,
    packet_limit: usize,
    reply_limit: usize,
}

impl PacketWriter {
    /// An empty packet of at most `packet_limit` bytes, whose reply takes at most `reply_limit`.
    #[must_use]
    pub fn new(packet_limit: usize, reply_limit: usize) -> Self {
        let mut writer = Self {
            bytes: Vec::with_capacity(packet_limit.min(1 << 16)),
            count: 0,
            state: 0,
            sizes: None,
            value: None,
            reply_bound: HEADER_BYTES,
            packet_limit,
            reply_limit,
        };
        writer.clear();
        writer
    }

    /// Starts anew.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.bytes.extend([0; PACKET_HEADER_BYTES]);
        self.count = 0;
        self.sizes = None;
        self.value = None;
        self.reply_bound = HEADER_BYTES;
    }

    /// Operations in it.
    #[must_use]
    pub fn count(&self) -> u16 {
        self.count
    }

    /// Adds an operation; false where the packet, or the longest reply to it, would pass the limit:
    /// send this packet and start another.
    ///
    /// Invariant: the key has 1 to 255 bytes, the value at most 65535; that is asserted.
    #[inline]
    pub fn push(&mut self, request: &Request<'_>) -> bool {
        let (key, value) = (request.key, request.value);
        assert!((1..=KEY_LIMIT).contains(&key.len()), "a key has 1 to 255 bytes");
        assert!(u16::try_from(value.len()).is_ok(), "a value has at most 65535 bytes");
        let bound = self.reply_bound + request.kind.longest_result(request.no_return);
        let longest = 6 + key.len() + value.len();
        let full = self.count == u16::MAX
            || bound > self.reply_limit
            || self.bytes.len() + longest > self.packet_limit;
        if full {
            return false;
        }
        self.reply_bound = bound;
        let has_value = request.kind.has_value();
        let given = self.sizes.filter(|sizes| {
            *sizes == (key.len(), value.len()) || !has_value && sizes.0 == key.len()
        });
        let mut head = request.kind.code();
        if given.is_some() {
            head |= SAME_SIZE;
        }
        let as_before = |(at, length): (usize, usize)| same(&self.bytes[at..at + length], value);
        let same_value = has_value && self.value.is_some_and(as_before);
        if same_value {
            head |= SAME_VALUE;
        }
        if request.no_return {
            head |= NO_RETURN;
        }
        self.bytes.push(head);
        if given.is_none() {
            let [low, high] = (value.len() as u16).to_le_bytes();
            self.bytes.extend_from_slice(&[key.len() as u8, low, high]);
            self.sizes = Some((key.len(), value.len()));
        }
        if request.kind.has_function() {
            self.bytes.extend([request.function, request.width.code()]);
        }
        append(&mut self.bytes, key);
        if has_value && !same_value {
            self.value = Some((self.bytes.len(), value.len()));
            append(&mut self.bytes, value);
        }
        self.count += 1;
        true
    }

    /// The state of the map by which the operations go to this server, for this packet and those after
    /// it; 0 where nothing is said.
    pub fn set_state(&mut self, state: u32) {
        self.state = state;
    }

    /// The packet, under this id.
    pub fn finish(&mut self, id: u32) -> &[u8] {
        self.bytes[..4].copy_from_slice(&id.to_le_bytes());
        self.bytes[4..6].copy_from_slice(&self.count.to_le_bytes());
        self.bytes[6..PACKET_HEADER_BYTES].copy_from_slice(&self.state.to_le_bytes());
        &self.bytes
    }
}

/// Appends, for the length that most keys and values have without a call.
#[inline(always)]
fn append(out: &mut Vec<u8>, bytes: &[u8]) {
    match <&[u8; 8]>::try_from(bytes) {
        Ok(eight) => out.extend_from_slice(eight),
        Err(_) => out.extend_from_slice(bytes),
    }
}

/// Id and number of operations of a packet or reply; `None` where it is too short to have them.
#[must_use]
pub fn header(bytes: &[u8]) -> Option<(u32, u16)> {
    let (id, rest) = bytes.split_first_chunk::<4>()?;
    let (count, _) = rest.split_first_chunk::<2>()?;
    Some((u32::from_le_bytes(*id), u16::from_le_bytes(*count)))
}

/// Reads the operations of a packet, whatever its bytes are.
#[derive(Clone, Debug)]
pub struct PacketReader<'a> {
    bytes: &'a [u8],
    left: u16,
    state: u32,
    /// Only then it may be about the map.
    alone: bool,
    /// The lengths of key and value that were given last.
    sizes: (usize, usize),
    value: Option<&'a [u8]>,
}

impl<'a> PacketReader<'a> {
    /// A reader behind the header; `None` without one.
    #[must_use]
    pub fn new(packet: &'a [u8]) -> Option<(u32, Self)> {
        let (id, left) = header(packet)?;
        let (state, bytes) = packet[HEADER_BYTES..].split_first_chunk::<4>()?;
        let state = u32::from_le_bytes(*state);
        Some((id, Self { bytes, left, state, alone: left == 1, sizes: (0, 0), value: None }))
    }

    /// The state of the map that its client knows.
    #[must_use]
    pub fn state(&self) -> u32 {
        self.state
    }

    /// Whether the next operation is about the map.
    #[must_use]
    #[inline]
    pub fn is_control(&self) -> bool {
        self.bytes.first().is_some_and(|head| head & 0x0f > 8)
    }

    /// Operations not read yet.
    #[must_use]
    pub fn left(&self) -> u16 {
        self.left
    }

    #[inline(always)]
    fn take(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.bytes.split_at_checked(length)?;
        self.bytes = rest;
        Some(taken)
    }

    /// An operation, and the most bytes of its result.
    #[inline(always)]
    fn one(&mut self) -> Option<(Request<'a>, usize)> {
        let byte = *self.take(1)?.first()?;
        let head = HEADS[usize::from(byte)]?;
        let kind = head.kind;
        if kind.is_control() && !self.alone {
            return None;
        }
        let same_size = byte & SAME_SIZE != 0;
        if !same_size {
            let lengths = self.take(3)?;
            let value = usize::from(u16::from_le_bytes([lengths[1], lengths[2]]));
            if !head.has_value && value != 0 {
                return None;
            }
            self.sizes = (usize::from(lengths[0]), value);
        }
        let (key, value) = self.sizes;
        let (mut function, mut width) = (0, Width::One);
        if head.has_function {
            let named = self.take(2)?;
            function = named[0];
            width = Width::of_code(named[1])?;
        }
        let key = self.take(key)?;
        // Before lengths were given they are 0, and a key is not empty.
        if key.is_empty() {
            return None;
        }
        let value = if byte & SAME_VALUE != 0 {
            self.value.filter(|same| same.len() == value)?
        } else {
            self.take(if head.has_value { value } else { 0 })?
        };
        if head.has_value {
            self.value = Some(value);
        }
        let no_return = byte & NO_RETURN != 0;
        let request = Request { kind, no_return, function, width, key, value };
        Some((request, usize::from(head.bound)))
    }

    /// The next operation and the most bytes of its result, as [`PacketReader::next`]; `None` inside has a
    /// result of one byte.
    #[inline(always)]
    pub(crate) fn next_bound(&mut self) -> Option<Option<(Request<'a>, usize)>> {
        self.left = self.left.checked_sub(1)?;
        let one = self.one();
        if one.is_none() {
            self.bytes = &[];
        }
        Some(one)
    }
}

impl<'a> Iterator for PacketReader<'a> {
    /// `None` inside: malformed from here on; so is every item after it.
    type Item = Option<Request<'a>>;

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        Some(self.next_bound()?.map(|(request, _)| request))
    }
}

/// Starts a reply in `out`, which is cleared.
pub fn begin_reply(out: &mut Vec<u8>, id: u32, count: u16) {
    out.clear();
    out.extend(id.to_le_bytes());
    out.extend(count.to_le_bytes());
}

/// Adds a result without bytes.
#[inline]
pub fn push_status(out: &mut Vec<u8>, status: Status) {
    out.push(status.code());
}

/// Adds a result with bytes, at most 65535.
#[inline]
pub fn push_bytes(out: &mut Vec<u8>, status: Status, bytes: &[u8]) {
    let head = status.code() | HAS_BYTES;
    if let Ok(eight) = <&[u8; 8]>::try_from(bytes) {
        // What most results are, at once.
        let mut whole = [0; 11];
        (whole[0], whole[1]) = (head, 8);
        whole[3..].copy_from_slice(eight);
        out.extend_from_slice(&whole);
        return;
    }
    let [low, high] = (bytes.len() as u16).to_le_bytes();
    out.extend_from_slice(&[head, low, high]);
    out.extend_from_slice(bytes);
}

/// Reads the results of a reply.
#[derive(Clone, Debug)]
pub struct ReplyReader<'a> {
    bytes: &'a [u8],
    left: u16,
}

impl<'a> ReplyReader<'a> {
    /// A reader behind the header; `None` without one.
    #[must_use]
    pub fn new(reply: &'a [u8]) -> Option<(u32, Self)> {
        let (id, left) = header(reply)?;
        Some((id, Self { bytes: &reply[HEADER_BYTES..], left }))
    }

    #[inline]
    fn one(&mut self) -> Option<(Status, Option<&'a [u8]>)> {
        let (&head, rest) = self.bytes.split_first()?;
        let status = Status::of_code(head & !HAS_BYTES)?;
        self.bytes = rest;
        if head & HAS_BYTES == 0 {
            return Some((status, None));
        }
        let (length, rest) = self.bytes.split_first_chunk::<2>()?;
        let (bytes, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length)))?;
        self.bytes = rest;
        Some((status, Some(bytes)))
    }
}

impl<'a> Iterator for ReplyReader<'a> {
    /// Status and bytes; [`Status::Malformed`] where the reply is cut short.
    type Item = (Status, Option<&'a [u8]>);

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        self.left = self.left.checked_sub(1)?;
        Some(self.one().unwrap_or_else(|| {
            self.bytes = &[];
            (Status::Malformed, None)
        }))
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kinds() -> impl Strategy<Value = Kind> {
        (1_u8..=8).prop_map(|code| Kind::of_code(code).unwrap())
    }

    proptest! {
        #[test]
        fn a_packet_is_read_as_it_was_written(
            operations in proptest::collection::vec(
                (kinds(), 1_usize..5, 0_usize..4, any::<bool>(), any::<u8>(), 0_u8..4), 0..40),
            id in any::<u32>(),
        ) {
            let made: Vec<_> = operations.into_iter()
                .map(|(kind, key, value, quiet, function, width)| {
                    let value = if kind.has_value() { vec![function & 1; value] } else { vec![] };
                    (kind, vec![7; key], value, quiet, function, width)
                }).collect();
            let mut writer = PacketWriter::new(1 << 16, 1 << 20);
            let mut expected = Vec::new();
            for (kind, key, value, quiet, function, width) in &made {
                let mut request = Request::plain(*kind, key, value);
                request.no_return = *quiet;
                if kind.has_function() {
                    request.function = *function;
                    request.width = Width::of_code(*width).unwrap();
                }
                prop_assert!(writer.push(&request));
                expected.push(Some(request));
            }
            let packet = writer.finish(id).to_vec();
            let (read_id, reader) = PacketReader::new(&packet).unwrap();
            prop_assert_eq!(read_id, id);
            prop_assert_eq!(&reader.collect::<Vec<_>>(), &expected);
            // Cut anywhere, no operation is invented.
            for cut in PACKET_HEADER_BYTES..packet.len() {
                let (_, reader) = PacketReader::new(&packet[..cut]).unwrap();
                let read: Vec<_> = reader.collect();
                prop_assert_eq!(read.len(), expected.len());
                let whole = read.iter().take_while(|one| one.is_some()).count();
                prop_assert_eq!(&read[..whole], &expected[..whole]);
                prop_assert!(read[whole..].iter().all(Option::is_none));
                prop_assert!(whole < expected.len());
            }
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some((_, reader)) = PacketReader::new(&bytes) {
                prop_assert!(reader.take(300).count() <= 300);
            }
            if let Some((_, reader)) = ReplyReader::new(&bytes) {
                prop_assert!(reader.take(300).count() <= 300);
            }
        }
    }

    #[test]
    fn equal_sizes_and_values_are_sent_once() {
        let mut writer = PacketWriter::new(1 << 16, 1 << 20);
        for key in 0..100_u8 {
            assert!(writer.push(&Request::put(&[key; 8], &[1; 8])));
        }
        // One head and one key each; lengths and value once.
        assert_eq!(writer.finish(1).len(), PACKET_HEADER_BYTES + 100 * (1 + 8) + 3 + 8);
    }

    #[test]
    fn lengths_are_given_once_in_a_mixture_of_gets_and_puts() {
        let mut writer = PacketWriter::new(1 << 16, 1 << 20);
        let mut expected = Vec::new();
        for key in 0..100_u8 {
            let (key, value) = ([key; 8], [key; 8]);
            let put = key[0] % 2 > 0;
            let request = if put { Request::put(&key, &value) } else { Request::get(&key) };
            assert!(writer.push(&request));
            expected.push((put, key));
        }
        let packet = writer.finish(1);
        // The first GET and the first PUT give lengths.
        assert_eq!(packet.len(), PACKET_HEADER_BYTES + 100 * (1 + 8) + 50 * 8 + 2 * 3);
        let (_, reader) = PacketReader::new(packet).unwrap();
        for (request, (put, key)) in reader.zip(expected) {
            let value = key;
            let written = if put { Request::put(&key, &value) } else { Request::get(&key) };
            assert_eq!(request, Some(written));
        }
    }

    #[test]
    fn a_get_may_leave_the_length_of_values_as_it_was_and_not_give_one() {
        let head = |state: [u8; 4], operations: &[u8]| {
            [&[0, 0, 0, 0, 3, 0], &state[..], operations].concat()
        };
        let put = [2, 1, 2, 0, b'k', 7, 7];
        let get = [SAME_SIZE | 1, b'k'];
        let again = [SAME_SIZE | 2, b'l', 8, 8];
        let good = head([0; 4], &[&put[..], &get, &again].concat());
        let read: Vec<_> = PacketReader::new(&good).unwrap().1.collect();
        let all = [Request::put(b"k", &[7, 7]), Request::get(b"k"), Request::put(b"l", &[8, 8])];
        assert_eq!(read, all.map(Some));
        let given = head([0; 4], &[1, 1, 2, 0, b'k', 7, 7]);
        assert_eq!(PacketReader::new(&given).unwrap().1.next(), Some(None));
    }

    #[test]
    fn a_flag_on_the_first_operation_is_malformed() {
        for head in [SAME_SIZE | 1, SAME_VALUE | 2, RESERVED | 1] {
            let packet = [0, 0, 0, 0, 1, 0, 0, 0, 0, 0, head, 1, 0, 0, b'k', 0, 0, 0];
            let (_, mut reader) = PacketReader::new(&packet).unwrap();
            assert_eq!(reader.next(), Some(None), "{head:#x}");
        }
    }

    #[test]
    fn an_operation_about_the_map_is_malformed_beside_others() {
        let mut writer = PacketWriter::new(1 << 12, 1 << 20);
        let map = Request::control(Kind::Map, b"plain", &[]);
        assert!(writer.push(&map));
        let alone: Vec<_> = PacketReader::new(writer.finish(1)).unwrap().1.collect();
        assert_eq!(alone, [Some(map)]);
        assert!(writer.push(&Request::get(b"key")));
        let both: Vec<_> = PacketReader::new(writer.finish(1)).unwrap().1.collect();
        assert_eq!(both, [None, None]);
    }

    #[test]
    fn a_packet_is_full_when_its_reply_could_be() {
        let mut writer = PacketWriter::new(1 << 16, HEADER_BYTES + 2 * (3 + PAIR_LIMIT));
        assert!(writer.push(&Request::get(b"a")) && writer.push(&Request::get(b"b")));
        assert!(!writer.push(&Request::get(b"c")));
        assert_eq!(writer.count(), 2);
    }

    #[test]
    fn a_reply_is_read_as_it_was_written() {
        let mut reply = Vec::new();
        begin_reply(&mut reply, 9, 3);
        push_status(&mut reply, Status::NotFound);
        push_bytes(&mut reply, Status::Ok, b"value");
        let (id, reader) = ReplyReader::new(&reply).unwrap();
        let results: Vec<_> = reader.collect();
        assert_eq!(id, 9);
        assert_eq!(results[0], (Status::NotFound, None));
        assert_eq!(results[1], (Status::Ok, Some(&b"value"[..])));
        assert_eq!(results[2], (Status::Malformed, None));
    }
}

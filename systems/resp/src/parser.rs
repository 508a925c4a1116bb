//! The request parser: RESP arrays of bulk strings, and inline commands, from a growing buffer.
//!
//! ```text
//!            head          cursor            tail            buffer.len()
//!   ┌─────────┬──────────────┬────────────────┬────────────────┐
//!   │ done    │ parsed part  │ received       │ room to read   │
//!   └─────────┴──────────────┴────────────────┴────────────────┘
//!             └ spans count from here: moving the request keeps them valid
//! ```
//!
//! Invariants: `head <= cursor <= tail <= buffer.len()`; every span lies within
//! `head..cursor`. Memory grows only when bytes have arrived to fill it: a length announced by the
//! peer is checked against its limit and then waited for, never allocated for.
//!
//! Texts and limits are those of Redis' `networking.c`; where several rules are broken at once, the
//! order of the checks is Redis' too.

mod upcoming;

use std::ops::Range;

use beeline_kv::{Expected, KEYS_AHEAD};

use crate::args::{Args, Span};
use crate::number::parse_i64;

use upcoming::Upcoming;
pub use upcoming::expected;

/// Bounds on what a peer may send. The defaults are Redis'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Largest argument in bytes (`proto-max-bulk-len`). Default 512 MiB.
    pub bulk_bytes: u32,
    /// Most arguments of one request, the name included. Default 1,048,576.
    pub arguments: u32,
    /// Longest inline command, and longest length line, in bytes. Default 64 KiB.
    pub inline_bytes: u32,
    /// Most bytes of one incomplete request (`client-query-buffer-limit`). Default 1 GiB;
    /// at most 4 GiB - 1.
    pub query_buffer_bytes: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bulk_bytes: 512 << 20,
            arguments: 1 << 20,
            inline_bytes: 64 << 10,
            query_buffer_bytes: 1 << 30,
        }
    }
}

/// What a peer did wrong. The connection ends after the reply: the stream cannot be followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// An inline command without an end within [`Limits::inline_bytes`].
    #[error("Protocol error: too big inline request")]
    InlineTooBig,
    /// A quote of an inline command that is never closed, or closed in front of a word.
    #[error("Protocol error: unbalanced quotes in request")]
    UnbalancedQuotes,
    /// An argument count without an end of line.
    #[error("Protocol error: too big mbulk count string")]
    CountTooLong,
    /// An argument count that is no number or above [`Limits::arguments`].
    #[error("Protocol error: invalid multibulk length")]
    InvalidCount,
    /// More than ten arguments before authentication.
    #[error("Protocol error: unauthenticated multibulk length")]
    UnauthenticatedCount,
    /// A bulk length without an end of line.
    #[error("Protocol error: too big bulk count string")]
    LengthTooLong,
    /// A byte other than `$` where a bulk string must begin.
    #[error("Protocol error: expected '$', got '{}'", char::from(if matches!(*.0, b'\r' | b'\n') { b' ' } else { *.0 }))]
    ExpectedBulk(u8),
    /// A bulk length that is no number, negative or above [`Limits::bulk_bytes`].
    #[error("Protocol error: invalid bulk length")]
    InvalidLength,
    /// An argument of more than 16 KiB before authentication.
    #[error("Protocol error: unauthenticated bulk length")]
    UnauthenticatedLength,
    /// An incomplete request passed [`Limits::query_buffer_bytes`]. Redis closes without a reply.
    #[error("client query buffer limit of {limit_bytes} bytes reached")]
    QueryBufferFull {
        /// The limit.
        limit_bytes: u32,
    },
}

impl ProtocolError {
    /// Whether the peer is told before the connection ends.
    #[must_use]
    pub fn has_reply(&self) -> bool {
        !matches!(self, Self::QueryBufferFull { .. })
    }

    /// Sending the same bytes again cannot help.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }
}

/// Most arguments before authentication.
const UNAUTHENTICATED_ARGUMENTS: i64 = 10;
/// Largest argument before authentication, in bytes.
const UNAUTHENTICATED_BULK_BYTES: i64 = 16_384;
/// Requests read ahead at most.
const AHEAD: usize = KEYS_AHEAD - 1;
/// What [`short`] takes at most: bytes of an argument, and arguments.
const SHORT_BYTES: u32 = 9_999;
const SHORT_ARGUMENTS: u32 = 9;
/// Room made for one read when nothing is known about what comes.
const READ_BYTES: usize = 16 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The next byte begins a request.
    Start,
    /// So many arguments to come; the length line of the next one was not read yet.
    Length { arguments: usize },
    /// The next argument has this many bytes, the line end not counted.
    Body { arguments: usize, bytes: usize },
    /// A request was handed out; its bytes are free at the next call.
    Done,
}

/// Turns received bytes into requests.
#[derive(Debug)]
pub struct RequestParser {
    buffer: Vec<u8>,
    head: usize,
    cursor: usize,
    tail: usize,
    /// Bytes behind `cursor` known to hold no line end.
    searched: usize,
    stage: Stage,
    /// Of the current request, and of those read ahead behind it.
    spans: Vec<Span>,
    /// The current request's among them, once it is complete.
    current: Range<usize>,
    /// Requests read ahead, from the end of the current one on.
    ready: Vec<Short>,
    /// How many of these were handed out.
    taken: usize,
    limits: Limits,
    trusted: bool,
}

impl RequestParser {
    /// A parser without memory; the first [`Self::room`] allocates.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self {
            buffer: Vec::new(),
            head: 0,
            cursor: 0,
            tail: 0,
            searched: 0,
            stage: Stage::Start,
            spans: Vec::new(),
            current: 0..0,
            ready: Vec::new(),
            taken: 0,
            limits,
            trusted: true,
        }
    }

    /// Until the peer has authenticated, only small requests are taken.
    pub fn set_authenticated(&mut self, authenticated: bool) {
        self.trusted = authenticated;
    }

    /// Changes the limits; applies from the next length read.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// Bytes received and not yet part of a handed-out request.
    #[must_use]
    pub fn pending_bytes(&self) -> usize {
        self.tail - if self.stage == Stage::Done { self.cursor } else { self.head }
    }

    /// Bytes of memory held.
    #[must_use]
    pub fn capacity_bytes(&self) -> usize {
        self.buffer.capacity()
            + self.spans.capacity() * size_of::<Span>()
            + self.ready.capacity() * size_of::<Short>()
    }

    /// A place to read into, never empty. Tell [`Self::received`] how much of it was filled.
    pub fn room(&mut self) -> &mut [u8] {
        self.drop_finished();
        let wanted = match self.stage {
            // The rest of this argument and, likely, a bit of what follows.
            Stage::Body { bytes, .. } => (bytes + 2).saturating_sub(self.tail - self.cursor),
            _ => 0,
        };
        if self.buffer.len() - self.tail < wanted.clamp(READ_BYTES / 4, READ_BYTES) {
            self.make_room(wanted);
        }
        &mut self.buffer[self.tail..]
    }

    fn make_room(&mut self, wanted: usize) {
        if self.head > 0 {
            self.buffer.copy_within(self.head..self.tail, 0);
            self.cursor -= self.head;
            self.tail -= self.head;
            self.head = 0;
            if self.buffer.len() - self.tail >= READ_BYTES {
                return;
            }
        }
        // Grows with what has arrived: at most to twice the received bytes, never to what was
        // merely announced.
        let growth = wanted.clamp(READ_BYTES, self.tail.max(READ_BYTES));
        let length = self.tail + growth;
        if length > self.buffer.len() {
            self.buffer.reserve_exact(length - self.buffer.len());
            self.buffer.resize(length, 0);
        }
    }

    /// The first `count` bytes of the latest [`Self::room`] now hold input.
    ///
    /// Errors: [`ProtocolError::QueryBufferFull`].
    pub fn received(&mut self, count: usize) -> Result<(), ProtocolError> {
        assert!(count <= self.buffer.len() - self.tail, "more bytes received than there was room");
        self.tail += count;
        if self.tail - self.head > self.limits.query_buffer_bytes as usize {
            let limit_bytes = self.limits.query_buffer_bytes;
            return Err(ProtocolError::QueryBufferFull { limit_bytes });
        }
        Ok(())
    }

    /// Appends `bytes` as if read from the peer.
    ///
    /// Errors: [`ProtocolError::QueryBufferFull`].
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), ProtocolError> {
        while !bytes.is_empty() {
            let room = self.room();
            let count = room.len().min(bytes.len());
            room[..count].copy_from_slice(&bytes[..count]);
            self.received(count)?;
            bytes = &bytes[count..];
        }
        Ok(())
    }

    /// Gives memory back where nothing is pending: for connections that have been quiet.
    pub fn trim(&mut self) {
        self.drop_finished();
        if self.head == self.tail {
            self.buffer = Vec::new();
            (self.spans, self.ready) = (Vec::new(), Vec::new());
            (self.head, self.cursor, self.tail, self.searched) = (0, 0, 0, 0);
        }
    }

    fn drop_finished(&mut self) {
        if self.stage == Stage::Done {
            self.stage = Stage::Start;
            self.head = self.cursor;
            self.searched = 0;
            if self.taken == self.ready.len() {
                self.ready.clear();
                self.taken = 0;
                self.current = 0..0;
                self.spans.clear();
                if self.spans.capacity() > 4096 {
                    self.spans = Vec::new();
                }
            }
            if self.head == self.tail {
                (self.head, self.cursor, self.tail) = (0, 0, 0);
            }
        }
    }

    /// The next complete request; `None` where more bytes are needed.
    ///
    /// The slices stay valid until the next call on this parser.
    ///
    /// Errors: any [`ProtocolError`]; the stream cannot be followed further.
    pub fn next_request(&mut self) -> Result<Option<Args<'_>>, ProtocolError> {
        if !self.advance()? {
            return Ok(None);
        }
        Ok(Some(self.current()))
    }

    /// The request handed out last, until the next one is asked for or bytes are received.
    #[must_use]
    pub fn current(&self) -> Args<'_> {
        debug_assert_eq!(self.stage, Stage::Done, "a request is current once it is complete");
        Args::new(&self.buffer[self.head..self.cursor], &self.spans[self.current.clone()])
    }

    /// What each request behind the current one is about to use, as far as that can be told at a glance.
    /// A hint: what is wrong with a request is found when it is its turn. Those that are complete and
    /// short are read here once and for all.
    #[inline]
    pub fn upcoming(&mut self) -> impl Iterator<Item = Expected<'_>> {
        self.read_ahead();
        self.behind()
    }

    /// As [`Self::upcoming`], the current request first.
    #[inline]
    pub fn expected(&mut self) -> impl Iterator<Item = Expected<'_>> {
        self.read_ahead();
        std::iter::once(expected(self.current())).chain(self.behind())
    }

    fn behind(&self) -> impl Iterator<Item = Expected<'_>> {
        let ready = &self.ready[self.taken..];
        let rest = match self.stage {
            Stage::Done | Stage::Start => {
                let read = ready.iter().map(|short| short.bytes as usize).sum::<usize>();
                &self.buffer[self.cursor + read..self.tail]
            }
            Stage::Length { .. } | Stage::Body { .. } => &[],
        };
        let (mut at, mut spans) = (self.cursor, self.current.end);
        let ready = ready.iter().map(move |short| {
            let data = &self.buffer[at..at + short.bytes as usize];
            let request = Args::new(data, &self.spans[spans..short.spans as usize]);
            (at, spans) = (at + short.bytes as usize, short.spans as usize);
            expected(request)
        });
        ready.chain(Upcoming::new(rest))
    }

    /// Reads requests behind the current one, as long as they are complete and of the usual kind.
    fn read_ahead(&mut self) {
        if self.stage != Stage::Done || self.taken < self.ready.len() || !self.takes_short() {
            return;
        }
        self.ready.clear();
        self.taken = 0;
        // Those before the current one were handed out.
        self.spans.drain(..self.current.start);
        self.current = 0..self.current.len();
        let mut at = self.cursor;
        while self.ready.len() < AHEAD
            && let Some(bytes) = short(&self.buffer[at..self.tail], &mut self.spans)
        {
            at += bytes;
            self.ready.push(Short { bytes: bytes as u32, spans: self.spans.len() as u32 });
        }
    }

    /// Whether the limits allow every request that [`short`] takes.
    #[inline]
    fn takes_short(&self) -> bool {
        self.limits.bulk_bytes >= SHORT_BYTES && self.limits.arguments >= SHORT_ARGUMENTS
    }

    /// Parses on; `true` once a whole request is [`Self::current`].
    ///
    /// Errors: as [`Self::next_request`].
    pub fn advance(&mut self) -> Result<bool, ProtocolError> {
        self.drop_finished();
        if let Some(short) = self.ready.get(self.taken) {
            self.taken += 1;
            self.cursor += short.bytes as usize;
            self.current = self.current.end..short.spans as usize;
            self.stage = Stage::Done;
            return Ok(true);
        }
        loop {
            match self.stage {
                Stage::Start => {
                    if self.cursor == self.tail {
                        return Ok(false);
                    }
                    if self.takes_short()
                        && self.searched == 0
                        && let Some(bytes) =
                            short(&self.buffer[self.cursor..self.tail], &mut self.spans)
                    {
                        self.cursor += bytes;
                        self.stage = Stage::Done;
                        continue;
                    }
                    let progressed = if self.buffer[self.cursor] == b'*' {
                        self.read_count()?
                    } else {
                        self.read_inline()?
                    };
                    if !progressed {
                        return Ok(false);
                    }
                }
                Stage::Length { arguments } => {
                    if !self.read_length(arguments)? {
                        return Ok(false);
                    }
                }
                Stage::Body { arguments, bytes } => {
                    if self.tail - self.cursor < bytes + 2 {
                        return Ok(false);
                    }
                    self.spans.push(Span {
                        start: (self.cursor - self.head) as u32,
                        length: bytes as u32,
                    });
                    // Redis does not look at the two bytes of the line end either.
                    self.cursor += bytes + 2;
                    self.stage = match arguments - 1 {
                        0 => Stage::Done,
                        arguments => Stage::Length { arguments },
                    };
                }
                Stage::Done => {
                    self.current = 0..self.spans.len();
                    return Ok(true);
                }
            }
        }
    }

    /// The number on the line at `cursor`, its type byte skipped, and the length of the line with
    /// its end. `Ok(None)`: the line is not complete.
    #[inline]
    fn read_number_line(&mut self, too_long: ProtocolError) -> Result<Option<Line>, ProtocolError> {
        let line = &self.buffer[self.cursor..self.tail];
        // Nearly every line has one to four digits.
        if let [_, digit @ b'1'..=b'9', b'\r', _, ..] = *line {
            return Ok(Some(Line { number: Some(i64::from(digit - b'0')), bytes: 4 }));
        }
        if let [_, tens @ b'1'..=b'9', ones @ b'0'..=b'9', b'\r', _, ..] = *line {
            let number = i64::from(tens - b'0') * 10 + i64::from(ones - b'0');
            return Ok(Some(Line { number: Some(number), bytes: 5 }));
        }
        let found = line[self.searched..].iter().position(|&byte| byte == b'\r');
        let Some(end) = found.map(|at| at + self.searched) else {
            if line.len() > self.limits.inline_bytes as usize {
                return Err(too_long);
            }
            self.searched = line.len();
            return Ok(None);
        };
        if end + 1 >= line.len() {
            return Ok(None);
        }
        let number = line.get(1..end).and_then(parse_i64);
        Ok(Some(Line { number, bytes: end + 2 }))
    }

    fn read_count(&mut self) -> Result<bool, ProtocolError> {
        let Some(line) = self.read_number_line(ProtocolError::CountTooLong)? else {
            return Ok(false);
        };
        let count = line
            .number
            .filter(|&count| count <= i64::from(self.limits.arguments))
            .ok_or(ProtocolError::InvalidCount)?;
        if count > UNAUTHENTICATED_ARGUMENTS && !self.trusted {
            return Err(ProtocolError::UnauthenticatedCount);
        }
        self.cursor += line.bytes;
        self.searched = 0;
        match usize::try_from(count) {
            Ok(arguments) if arguments > 0 => self.stage = Stage::Length { arguments },
            // An empty request is skipped without a reply.
            _ => self.head = self.cursor,
        }
        Ok(true)
    }

    #[inline]
    fn read_length(&mut self, arguments: usize) -> Result<bool, ProtocolError> {
        let Some(line) = self.read_number_line(ProtocolError::LengthTooLong)? else {
            return Ok(false);
        };
        let kind = self.buffer[self.cursor];
        if kind != b'$' {
            return Err(ProtocolError::ExpectedBulk(kind));
        }
        let length = line
            .number
            .filter(|length| (0..=i64::from(self.limits.bulk_bytes)).contains(length))
            .ok_or(ProtocolError::InvalidLength)?;
        if length > UNAUTHENTICATED_BULK_BYTES && !self.trusted {
            return Err(ProtocolError::UnauthenticatedLength);
        }
        let bytes = usize::try_from(length).map_err(|_| ProtocolError::InvalidLength)?;
        self.cursor += line.bytes;
        self.searched = 0;
        self.stage = Stage::Body { arguments, bytes };
        Ok(true)
    }

    fn read_inline(&mut self) -> Result<bool, ProtocolError> {
        let line = &mut self.buffer[self.cursor..self.tail];
        let found = line[self.searched..].iter().position(|&byte| byte == b'\n');
        let Some(end) = found.map(|at| at + self.searched) else {
            if line.len() > self.limits.inline_bytes as usize {
                return Err(ProtocolError::InlineTooBig);
            }
            self.searched = line.len();
            return Ok(false);
        };
        self.searched = 0;
        let text_end = if end > 0 && line[end - 1] == b'\r' { end - 1 } else { end };
        if !split_words(&mut line[..text_end], &mut self.spans) {
            return Err(ProtocolError::UnbalancedQuotes);
        }
        self.cursor += end + 1;
        if self.spans.is_empty() {
            self.head = self.cursor;
        } else {
            self.stage = Stage::Done;
        }
        Ok(true)
    }
}

/// A complete request that was read ahead.
#[derive(Clone, Copy, Debug)]
struct Short {
    bytes: u32,
    /// Where its spans end.
    spans: u32,
}

/// The bytes of a request of the usual kind at the beginning of `input`, complete, with up to nine
/// arguments of up to 9,999 bytes; `None` for any other. Appends where its arguments lie.
#[inline]
fn short(input: &[u8], spans: &mut Vec<Span>) -> Option<usize> {
    let [b'*', count @ b'1'..=b'9', b'\r', _, ..] = *input else { return None };
    let known = spans.len();
    let mut at = 4;
    for _ in 0..count - b'0' {
        let start_and_end = short_length(&input[at..]).map(|(length, line)| {
            let start = at + line;
            (start, length, start + length + 2)
        });
        match start_and_end {
            Some((start, length, end)) if end <= input.len() => {
                spans.push(Span { start: start as u32, length: length as u32 });
                at = end;
            }
            _ => {
                spans.truncate(known);
                return None;
            }
        }
    }
    Some(at)
}

/// The number of one to four digits on a length line, and the bytes of the line.
#[inline]
fn short_length(line: &[u8]) -> Option<(usize, usize)> {
    let [b'$', first @ b'1'..=b'9', rest @ ..] = line else { return None };
    let mut number = usize::from(first - b'0');
    for (at, byte) in rest.iter().take(4).enumerate() {
        match byte {
            b'\r' => return Some((number, at + 4)),
            b'0'..=b'9' => number = number * 10 + usize::from(byte - b'0'),
            _ => return None,
        }
    }
    None
}

struct Line {
    number: Option<i64>,
    bytes: usize,
}

/// Splits an inline command into words, as `sdssplitargs` does; quoted words are unescaped in
/// place, which never makes them longer. `false`: a quote is not closed properly.
fn split_words(line: &mut [u8], spans: &mut Vec<Span>) -> bool {
    let blank = |byte: u8| byte.is_ascii_whitespace() || byte == 0x0b;
    // A NUL ends the line, as it ends a C string.
    let end = line.iter().position(|&byte| byte == 0).unwrap_or(line.len());
    let mut at = 0;
    loop {
        while at < end && blank(line[at]) {
            at += 1;
        }
        if at == end {
            return true;
        }
        let start = at;
        let mut written = at;
        let mut quote = None;
        loop {
            if at == end {
                if quote.is_some() {
                    return false;
                }
                break;
            }
            let byte = line[at];
            let mut value = byte;
            match quote {
                None => match byte {
                    b' ' | b'\n' | b'\r' | b'\t' => break,
                    b'"' | b'\'' => {
                        quote = Some(byte);
                        at += 1;
                        continue;
                    }
                    _ => at += 1,
                },
                Some(closing) if byte == closing => {
                    at += 1;
                    if at < end && !blank(line[at]) {
                        return false;
                    }
                    break;
                }
                Some(b'"') if byte == b'\\' && at + 1 < end => {
                    let (escaped, used) = unescape(&line[at + 1..end]);
                    value = escaped;
                    at += 1 + used;
                }
                Some(b'\'') if byte == b'\\' && at + 1 < end && line[at + 1] == b'\'' => {
                    value = b'\'';
                    at += 2;
                }
                Some(_) => at += 1,
            }
            line[written] = value;
            written += 1;
        }
        spans.push(Span { start: start as u32, length: (written - start) as u32 });
    }
}

/// The byte an escape stands for, and the bytes it takes behind the backslash. `rest` is not empty.
fn unescape(rest: &[u8]) -> (u8, usize) {
    if let [b'x', high, low, ..] = *rest
        && let (Some(high), Some(low)) =
            (char::from(high).to_digit(16), char::from(low).to_digit(16))
    {
        return ((high * 16 + low) as u8, 3);
    }
    let value = match rest[0] {
        b'n' => b'\n',
        b'r' => b'\r',
        b't' => b'\t',
        b'b' => 8,
        b'a' => 7,
        other => other,
    };
    (value, 1)
}

/// Feeds `bytes` to a parser in chunks whose sizes come from the bytes themselves and checks what
/// must hold for every input: it ends, never panics, and holds memory in proportion to what it was
/// given. The entry for fuzzers.
pub fn fuzz(bytes: &[u8]) {
    let limits = Limits { query_buffer_bytes: 1 << 20, ..Limits::default() };
    let mut parser = RequestParser::new(limits);
    let (mut at, mut fed) = (0, 0);
    while at < bytes.len() {
        let chunk = 1 + usize::from(bytes[at]) * usize::from(bytes[at / 2]) % 257;
        let chunk = &bytes[at..(at + chunk).min(bytes.len())];
        at += chunk.len();
        fed += chunk.len();
        if parser.feed(chunk).is_err() {
            return;
        }
        loop {
            match parser.advance() {
                Ok(true) => {
                    if fed % 3 == 0 {
                        assert!(parser.upcoming().count() <= fed);
                    }
                    let args = parser.current();
                    let total: usize = args.from(0).map(<[u8]>::len).sum();
                    assert!(!args.is_empty(), "a request has a name");
                    assert!(total <= fed, "arguments come from the input");
                }
                Ok(false) => break,
                Err(_) => return,
            }
        }
        let bound = 4 * READ_BYTES + 16 * fed;
        assert!(parser.capacity_bytes() <= bound, "memory grows with received bytes only");
    }
}

#[cfg(test)]
mod tests;

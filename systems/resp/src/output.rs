//! The reply encoder: RESP2 and RESP3, straight into a buffer that is reused.
//!
//! Nothing here fails or waits; bounding the buffer is the connection's business
//! ([`Output::len`]). A reply that turns out to be an error after it was begun is taken back with
//! [`Output::truncate`].

use crate::number::{Decimal, format_double};

/// The dialect a connection speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Version {
    /// What every client understands.
    #[default]
    Resp2,
    /// Maps, sets, nulls, doubles, pushes; chosen with HELLO 3.
    Resp3,
}

impl Version {
    /// The number HELLO takes and shows.
    #[must_use]
    pub fn number(self) -> i64 {
        match self {
            Self::Resp2 => 2,
            Self::Resp3 => 3,
        }
    }
}

/// An output buffer and the dialect it is written in.
#[derive(Clone, Debug, Default)]
pub struct Output {
    bytes: Vec<u8>,
    /// Bytes at the front that were sent. Lengths and positions of callers count from here.
    sent: usize,
    version: Version,
    /// Strings are left out beyond so many bytes; 0: never.
    limit: usize,
    over_limit: bool,
}

impl Output {
    /// An empty buffer that speaks `version`.
    #[must_use]
    pub const fn new(version: Version) -> Self {
        Self { bytes: Vec::new(), sent: 0, version, limit: 0, over_limit: false }
    }

    /// The dialect of what is written from now on.
    #[must_use]
    pub fn version(&self) -> Version {
        self.version
    }

    /// Changes the dialect.
    pub fn set_version(&mut self, version: Version) {
        self.version = version;
    }

    /// What was written and not cleared or drained.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[self.sent..]
    }

    /// Bytes waiting.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Whether nothing waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory held.
    #[must_use]
    pub fn capacity_bytes(&self) -> usize {
        self.bytes.capacity()
    }

    /// Bounds what one huge reply may take: a string that begins beyond `bytes` is left out, and
    /// [`Output::is_over_limit`] says so. 0: no bound.
    pub fn set_limit(&mut self, bytes: usize) {
        self.limit = bytes;
    }

    /// Whether a string was left out. What is here is no reply then: take it back.
    #[inline]
    #[must_use]
    pub fn is_over_limit(&self) -> bool {
        self.over_limit
    }

    /// Takes back everything beyond `length` bytes.
    pub fn truncate(&mut self, length: usize) {
        self.bytes.truncate(self.sent + length);
        self.over_limit = false;
    }

    /// Forgets everything; memory above 64 KiB is given back.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.sent = 0;
        if self.bytes.capacity() > 64 * 1024 {
            self.bytes = Vec::new();
        }
    }

    /// Removes the first `count` bytes, which were sent.
    pub fn consume(&mut self, count: usize) {
        self.sent += count;
        if self.sent >= self.bytes.len() {
            self.clear();
        } else if self.sent > self.bytes.len() / 2 {
            // Moves fewer bytes than were sent since the last time: linear in all.
            self.bytes.drain(..self.sent);
            self.sent = 0;
        }
    }

    /// Appends bytes that are replies already: those of another shard.
    pub fn raw(&mut self, reply: &[u8]) {
        self.bytes.extend_from_slice(reply);
    }

    /// Appends part of a reply of any protocol. What begins beyond the limit is left out, as
    /// strings are.
    pub fn part(&mut self, part: &[u8]) {
        if self.limit != 0 && self.len() > self.limit {
            self.over_limit = true;
            return;
        }
        self.bytes.extend_from_slice(part);
    }

    #[inline]
    fn header(&mut self, kind: u8, number: i64) {
        if let 0..=9 = number {
            self.bytes.extend_from_slice(&[kind, b'0' + number as u8, b'\r', b'\n']);
            return;
        }
        // One append of a small array is cheaper than three of its parts.
        let text = Decimal::signed(number);
        let digits = text.as_bytes();
        let mut line = [0; 24];
        line[0] = kind;
        line[1..=digits.len()].copy_from_slice(digits);
        line[digits.len() + 1] = b'\r';
        line[digits.len() + 2] = b'\n';
        self.bytes.extend_from_slice(&line[..digits.len() + 3]);
    }

    /// `+OK`.
    #[inline]
    pub fn ok(&mut self) {
        self.bytes.extend_from_slice(b"+OK\r\n");
    }

    /// A status; `text` has no line end.
    pub fn simple(&mut self, text: &str) {
        self.bytes.push(b'+');
        self.bytes.extend_from_slice(text.as_bytes());
        self.bytes.extend_from_slice(b"\r\n");
    }

    /// An error: `line` is its code and text, such as `ERR syntax error`. Line ends become blanks.
    pub fn error(&mut self, line: &[u8]) {
        self.bytes.push(b'-');
        let end =
            line.iter().rposition(|byte| !matches!(byte, b'\r' | b'\n')).map_or(0, |at| at + 1);
        let blanked = line[..end].iter().map(|&byte| match byte {
            b'\r' | b'\n' => b' ',
            other => other,
        });
        self.bytes.extend(blanked);
        self.bytes.extend_from_slice(b"\r\n");
    }

    /// An integer.
    #[inline]
    pub fn integer(&mut self, value: i64) {
        self.header(b':', value);
    }

    /// A length or count as an integer; saturates far beyond any real one.
    #[inline]
    pub fn count(&mut self, value: usize) {
        self.integer(i64::try_from(value).unwrap_or(i64::MAX));
    }

    /// A string of any bytes.
    #[inline]
    pub fn bulk(&mut self, value: &[u8]) {
        if self.limit != 0 && self.len() > self.limit {
            self.over_limit = true;
            return;
        }
        self.bytes.reserve(value.len() + 32);
        self.header(b'$', value.len() as i64);
        self.bytes.extend_from_slice(value);
        self.bytes.extend_from_slice(b"\r\n");
    }

    /// An integer as a string.
    pub fn bulk_integer(&mut self, value: i64) {
        self.bulk(Decimal::signed(value).as_bytes());
    }

    /// "No such value".
    #[inline]
    pub fn null(&mut self) {
        self.bytes.extend_from_slice(match self.version {
            Version::Resp2 => b"$-1\r\n",
            Version::Resp3 => b"_\r\n",
        });
    }

    /// "No such list".
    pub fn null_array(&mut self) {
        self.bytes.extend_from_slice(match self.version {
            Version::Resp2 => b"*-1\r\n",
            Version::Resp3 => b"_\r\n",
        });
    }

    /// The head of an array of `count` replies.
    #[inline]
    pub fn array(&mut self, count: usize) {
        self.header(b'*', count as i64);
    }

    /// The head of a map of `count` pairs; RESP2 shows the pairs as one flat array.
    pub fn map(&mut self, count: usize) {
        match self.version {
            Version::Resp2 => self.array(2 * count),
            Version::Resp3 => self.header(b'%', count as i64),
        }
    }

    /// The head of a set of `count` replies; an array in RESP2.
    pub fn set(&mut self, count: usize) {
        match self.version {
            Version::Resp2 => self.array(count),
            Version::Resp3 => self.header(b'~', count as i64),
        }
    }

    /// The head of a push of `count` replies; an array in RESP2.
    pub fn push(&mut self, count: usize) {
        match self.version {
            Version::Resp2 => self.array(count),
            Version::Resp3 => self.header(b'>', count as i64),
        }
    }

    /// A double; a string in RESP2.
    pub fn double(&mut self, value: f64) {
        let text = format_double(value);
        match self.version {
            Version::Resp2 => self.bulk(text.as_bytes()),
            Version::Resp3 => {
                self.bytes.push(b',');
                self.bytes.extend_from_slice(text.as_bytes());
                self.bytes.extend_from_slice(b"\r\n");
            }
        }
    }

    /// A truth value; 1 or 0 in RESP2.
    pub fn boolean(&mut self, value: bool) {
        match self.version {
            Version::Resp2 => self.integer(i64::from(value)),
            Version::Resp3 => {
                self.bytes.extend_from_slice(if value { b"#t\r\n" } else { b"#f\r\n" })
            }
        }
    }

    /// Text meant for people; a string in RESP2.
    pub fn verbatim(&mut self, text: &[u8]) {
        match self.version {
            Version::Resp2 => self.bulk(text),
            Version::Resp3 => {
                self.header(b'=', text.len() as i64 + 4);
                self.bytes.extend_from_slice(b"txt:");
                self.bytes.extend_from_slice(text);
                self.bytes.extend_from_slice(b"\r\n");
            }
        }
    }

    /// Inserts the head of an array of `count` replies in front of those written since the buffer
    /// had `start` bytes: for replies that are counted while they are written.
    pub fn array_from(&mut self, start: usize, count: usize) {
        self.aggregate_from(start, b'*', count);
    }

    /// As [`Self::array_from`], for a map of `pairs` pairs.
    pub fn map_from(&mut self, start: usize, pairs: usize) {
        match self.version {
            Version::Resp2 => self.aggregate_from(start, b'*', 2 * pairs),
            Version::Resp3 => self.aggregate_from(start, b'%', pairs),
        }
    }

    /// Inserts replies in front of those written since the buffer had `start` bytes.
    pub fn insert(&mut self, start: usize, reply: &[u8]) {
        self.bytes.extend_from_slice(reply);
        self.bytes[self.sent + start..].rotate_right(reply.len());
    }

    fn aggregate_from(&mut self, start: usize, kind: u8, count: usize) {
        let end = self.bytes.len();
        self.header(kind, count as i64);
        let added = self.bytes.len() - end;
        self.bytes[self.sent + start..].rotate_right(added);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(version: Version, write: impl Fn(&mut Output)) -> String {
        let mut output = Output::new(version);
        write(&mut output);
        String::from_utf8(output.as_bytes().to_vec()).unwrap()
    }

    #[test]
    fn each_reply_type_has_its_form_in_both_dialects() {
        type Write = fn(&mut Output);
        let cases: [(Write, &str, &str); 15] = [
            (|o| o.simple("PONG"), "+PONG\r\n", "+PONG\r\n"),
            (|o| o.error(b"ERR a\r\nb\r\n"), "-ERR a  b\r\n", "-ERR a  b\r\n"),
            (|o| o.integer(-42), ":-42\r\n", ":-42\r\n"),
            (|o| o.integer(i64::MIN), ":-9223372036854775808\r\n", ":-9223372036854775808\r\n"),
            (|o| o.bulk(b"0123456789"), "$10\r\n0123456789\r\n", "$10\r\n0123456789\r\n"),
            (|o| o.bulk(b""), "$0\r\n\r\n", "$0\r\n\r\n"),
            (Output::null, "$-1\r\n", "_\r\n"),
            (Output::null_array, "*-1\r\n", "_\r\n"),
            (|o| o.map(2), "*4\r\n", "%2\r\n"),
            (|o| o.set(2), "*2\r\n", "~2\r\n"),
            (|o| o.push(2), "*2\r\n", ">2\r\n"),
            (|o| o.double(1.5), "$3\r\n1.5\r\n", ",1.5\r\n"),
            (|o| o.boolean(true), ":1\r\n", "#t\r\n"),
            (|o| o.verbatim(b"hi"), "$2\r\nhi\r\n", "=6\r\ntxt:hi\r\n"),
            (|o| o.array(100), "*100\r\n", "*100\r\n"),
        ];
        for (write, resp2, resp3) in cases {
            assert_eq!(written(Version::Resp2, write), resp2);
            assert_eq!(written(Version::Resp3, write), resp3);
        }
    }

    #[test]
    fn a_count_known_late_goes_in_front() {
        let mut output = Output::default();
        output.ok();
        let start = output.len();
        for _ in 0..12 {
            output.bulk(b"x");
        }
        output.array_from(start, 12);
        let expected = format!("+OK\r\n*12\r\n{}", "$1\r\nx\r\n".repeat(12));
        assert_eq!(output.as_bytes(), expected.as_bytes());
        output.consume(5);
        assert!(output.as_bytes().starts_with(b"*12"));
        let start = output.len();
        output.integer(1);
        output.array_from(start, 1);
        assert!(output.as_bytes().ends_with(b"*1\r\n:1\r\n"));
        output.consume(80);
        assert!(output.as_bytes().ends_with(b"x\r\n*1\r\n:1\r\n"));
        assert_eq!(output.len(), start + 8 - 80);
        output.truncate(3);
        assert_eq!(output.len(), 3);
        output.consume(1000);
        assert!(output.is_empty());
    }
}

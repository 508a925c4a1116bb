//! The arguments of one request: slices of the input buffer, and an owned copy for travel.

/// Where one argument lies, in bytes from the start of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub start: u32,
    /// Number of bytes.
    pub length: u32,
}

/// The arguments of one request, the command's name first. Copies are cheap; nothing is owned.
#[derive(Clone, Copy)]
pub struct Args<'a> {
    data: &'a [u8],
    spans: &'a [Span],
}

impl<'a> Args<'a> {
    /// Arguments that lie at `spans` within `data`.
    ///
    /// Invariant: each span lies within `data`; a span that does not panics on access.
    #[inline]
    #[must_use]
    pub fn new(data: &'a [u8], spans: &'a [Span]) -> Self {
        Self { data, spans }
    }

    /// Number of arguments, the command's name included.
    #[inline]
    #[must_use]
    pub fn len(&self) -> usize {
        self.spans.len()
    }

    /// Whether there is not even a name. A parser never yields this.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    /// Argument `index`; the empty string past the end.
    #[inline]
    #[must_use]
    pub fn get(&self, index: usize) -> &'a [u8] {
        match self.spans.get(index) {
            Some(span) => {
                let start = span.start as usize;
                &self.data[start..start + span.length as usize]
            }
            None => &[],
        }
    }

    /// The arguments in order, from `first` on.
    pub fn from(self, first: usize) -> impl DoubleEndedIterator<Item = &'a [u8]> + Clone {
        (first..self.len()).map(move |index| self.get(index))
    }

    /// The arguments without the first `count`.
    #[must_use]
    pub fn skip(self, count: usize) -> Self {
        Self { data: self.data, spans: self.spans.get(count..).unwrap_or(&[]) }
    }

    /// Whether argument `index` is `word`, in any case. `word` is given in lower case.
    #[inline]
    #[must_use]
    pub fn is(&self, index: usize, word: &str) -> bool {
        self.get(index).eq_ignore_ascii_case(word.as_bytes())
    }
}

impl std::fmt::Debug for Args<'_> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_list().entries(self.from(0).map(String::from_utf8_lossy)).finish()
    }
}

/// Requests copied out of an input buffer: the queue of a transaction, or one request on its way
/// to another shard. Clearing keeps the memory for the next one.
#[derive(Clone, Debug, Default)]
pub struct ArgsBuffer {
    data: Vec<u8>,
    spans: Vec<Span>,
    /// First span of each request.
    starts: Vec<u32>,
}

impl ArgsBuffer {
    /// An empty buffer; allocates nothing.
    #[must_use]
    pub const fn new() -> Self {
        Self { data: Vec::new(), spans: Vec::new(), starts: Vec::new() }
    }

    /// Appends a copy of a request. `false`, and nothing appended, where the requests together
    /// would pass 4 GiB.
    #[must_use]
    pub fn push(&mut self, args: Args<'_>) -> bool {
        let bytes: usize = args.from(0).map(<[u8]>::len).sum();
        if u32::try_from(self.data.len() + bytes).is_err() {
            return false;
        }
        self.starts.push(self.spans.len() as u32);
        for argument in args.from(0) {
            let span = Span { start: self.data.len() as u32, length: argument.len() as u32 };
            self.spans.push(span);
            self.data.extend_from_slice(argument);
        }
        true
    }

    /// Appends a request given as separate words. `false`, and nothing appended, where the requests together
    /// would pass 4 GiB.
    #[must_use]
    pub fn push_words(&mut self, words: &[&[u8]]) -> bool {
        self.begin();
        let all = words.iter().all(|word| self.push_word(word));
        if !all {
            self.take_last();
        }
        all
    }

    /// Begins a request, whose words follow one by one.
    pub(crate) fn begin(&mut self) {
        self.starts.push(self.spans.len() as u32);
    }

    /// Appends a word to the request that was begun last. `false`, and nothing appended, where the requests
    /// together would pass 4 GiB.
    #[must_use]
    pub(crate) fn push_word(&mut self, word: &[u8]) -> bool {
        if u32::try_from(self.data.len() + word.len()).is_err() {
            return false;
        }
        self.spans.push(Span { start: self.data.len() as u32, length: word.len() as u32 });
        self.data.extend_from_slice(word);
        true
    }

    fn take_last(&mut self) {
        let Some(start) = self.starts.pop() else { return };
        if let Some(first) = self.spans.get(start as usize) {
            self.data.truncate(first.start as usize);
        }
        self.spans.truncate(start as usize);
    }

    /// Number of requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether there is no request.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// Bytes of all arguments.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Request `index`; no arguments past the end.
    #[must_use]
    pub fn get(&self, index: usize) -> Args<'_> {
        let Some(&start) = self.starts.get(index) else { return Args::new(&[], &[]) };
        let end = self.starts.get(index + 1).map_or(self.spans.len(), |&next| next as usize);
        Args::new(&self.data, &self.spans[start as usize..end])
    }

    /// Forgets the requests; memory above 64 KiB is given back.
    pub fn clear(&mut self) {
        self.data.clear();
        self.spans.clear();
        self.starts.clear();
        if self.data.capacity() > 64 * 1024 {
            *self = Self::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copied_requests_keep_their_arguments_apart() {
        let mut buffer = ArgsBuffer::new();
        assert!(buffer.push_words(&[b"SET", b"key", b""]));
        assert!(buffer.push_words(&[b"GET", b"key"]));
        assert_eq!(buffer.len(), 2);
        assert_eq!(buffer.get(0).from(0).collect::<Vec<_>>(), [&b"SET"[..], b"key", b""]);
        assert_eq!(buffer.get(1).len(), 2);
        assert!(buffer.get(1).is(0, "get"));
        assert!(buffer.get(2).is_empty());
        assert_eq!(buffer.get(0).get(7), b"");
        buffer.clear();
        assert!(buffer.is_empty());
    }
}

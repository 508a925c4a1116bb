//! A glance at the requests behind the current one.
//!
//! It reads what the parser will read again, takes nothing, and stops at whatever is not the usual
//! short request: an inline command, a long number, a request that is long or not complete.

use beeline_kv::Expected;

use crate::args::Args;

/// Whether the second argument behind a command's name may be a field: the names of all commands of
/// hashes begin alike.
#[inline]
fn names_field(name: &[u8]) -> bool {
    matches!(name.first(), Some(b'h' | b'H'))
}

/// What a request is about to use, as far as can be told at a glance.
#[inline]
#[must_use]
pub fn expected(request: Args<'_>) -> Expected<'_> {
    let mut expected = Expected::from(request.get(1));
    if request.len() > 2 && names_field(request.get(0)) {
        expected.field = Some(request.get(2));
    }
    expected
}

/// Told of one after the other; see [`super::RequestParser::upcoming`].
#[derive(Clone, Debug)]
pub(super) struct Upcoming<'a> {
    rest: &'a [u8],
}

impl<'a> Upcoming<'a> {
    pub(super) fn new(rest: &'a [u8]) -> Self {
        Self { rest }
    }

    /// Arguments of a request beyond which the next one is not looked for.
    const SHORT: usize = 4;

    /// The number on a line of `kind` with one to three digits.
    #[inline]
    fn number(&mut self, kind: u8) -> Option<usize> {
        let digit = |byte: u8| byte.is_ascii_digit().then(|| usize::from(byte - b'0'));
        let (number, bytes) = match *self.rest {
            [first, a, b'\r', _, ..] if first == kind => (digit(a)?, 4),
            [first, a, b, b'\r', _, ..] if first == kind => (digit(a)? * 10 + digit(b)?, 5),
            [first, a, b, c, b'\r', _, ..] if first == kind => {
                (digit(a)? * 100 + digit(b)? * 10 + digit(c)?, 6)
            }
            _ => return None,
        };
        self.rest = &self.rest[bytes..];
        Some(number)
    }

    #[inline]
    fn argument(&mut self) -> Option<&'a [u8]> {
        let length = self.number(b'$')?;
        let argument = self.rest.get(..length)?;
        self.rest = self.rest.get(length + 2..)?;
        Some(argument)
    }
}

impl<'a> Iterator for Upcoming<'a> {
    type Item = Expected<'a>;

    #[inline]
    fn next(&mut self) -> Option<Expected<'a>> {
        let arguments = self.number(b'*')?;
        let name = self.argument()?;
        if arguments < 2 {
            return Some(Expected::from(&[][..]));
        }
        let mut expected = Expected::from(self.argument()?);
        let takes_field = arguments > 2 && names_field(name);
        if takes_field {
            expected.field = self.argument();
        }
        let left = arguments - 2 - usize::from(takes_field);
        // A long or incomplete request is the last one told of.
        if arguments > Self::SHORT
            || (takes_field && expected.field.is_none())
            || (0..left).any(|_| self.argument().is_none())
        {
            self.rest = &[];
        }
        Some(expected)
    }
}

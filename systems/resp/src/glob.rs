//! Glob patterns, with the semantics of Redis' `stringmatchlen` down to its oddities.
//!
//! `*` any run, `?` one byte, `[a-z]` one of a class, `[^…]` none of it, `\x` the byte itself. An
//! unclosed class ends with the pattern. A lone `*` does not match the empty string (Redis' callers
//! treat the pattern `*` apart; so does [`Glob`]). Bytes are compared as C's signed `char`, which
//! shows only in class ranges that mix ASCII with bytes above 127.
//!
//! Every element but `*` consumes exactly one byte, so on a mismatch only the latest `*` needs
//! another try: the work is at most pattern length times text length, whatever the pattern.

/// A pattern prepared for many texts.
#[derive(Clone, Copy, Debug)]
pub struct Glob<'a> {
    pattern: &'a [u8],
    everything: bool,
    literal: bool,
}

impl<'a> Glob<'a> {
    /// Prepares `pattern`.
    #[must_use]
    pub fn new(pattern: &'a [u8]) -> Self {
        let literal = !pattern.iter().any(|byte| matches!(byte, b'*' | b'?' | b'[' | b'\\'));
        Self { pattern, everything: pattern == b"*", literal: literal && !pattern.is_empty() }
    }

    /// The pattern `*`, which matches every text.
    #[must_use]
    pub fn everything(&self) -> bool {
        self.everything
    }

    /// The only text that can match, where the pattern has no wildcard.
    #[must_use]
    pub fn literal(&self) -> Option<&'a [u8]> {
        self.literal.then_some(self.pattern)
    }

    /// Whether `text` matches, case-sensitively.
    #[must_use]
    pub fn matches(&self, text: &[u8]) -> bool {
        if self.everything {
            return true;
        }
        if self.literal { self.pattern == text } else { matches(self.pattern, text, false) }
    }
}

fn fold(byte: u8, ignore_case: bool) -> u8 {
    if ignore_case { byte.to_ascii_lowercase() } else { byte }
}

/// Matches one class at `pattern[at..]`, `at` just behind the `[`. Returns whether `byte` belongs,
/// and the position behind the class.
fn class(pattern: &[u8], mut at: usize, byte: u8, ignore_case: bool) -> (bool, usize) {
    let inverted = pattern.get(at) == Some(&b'^');
    at += usize::from(inverted);
    let mut found = false;
    loop {
        let rest = pattern.get(at..).unwrap_or(&[]);
        match rest {
            [b'\\', escaped, ..] => {
                found |= *escaped == byte;
                at += 2;
            }
            [b']', ..] => {
                at += 1;
                break;
            }
            [] => break,
            [low, b'-', high, ..] => {
                let (mut low, mut high) = (*low as i8, *high as i8);
                if low > high {
                    std::mem::swap(&mut low, &mut high);
                }
                let low = fold(low as u8, ignore_case) as i8;
                let high = fold(high as u8, ignore_case) as i8;
                let byte = fold(byte, ignore_case) as i8;
                found |= low <= byte && byte <= high;
                at += 3;
            }
            [one, ..] => {
                found |= fold(*one, ignore_case) == fold(byte, ignore_case);
                at += 1;
            }
        }
    }
    (found != inverted, at)
}

/// Whether `text` matches `pattern`.
#[must_use]
pub fn matches(pattern: &[u8], text: &[u8], ignore_case: bool) -> bool {
    let mut p = 0;
    let mut t = 0;
    // Position behind the latest `*`, and where its rest was last tried.
    let mut retry: Option<(usize, usize)> = None;
    while p < pattern.len() && t < text.len() {
        let element = pattern[p];
        let matched = match element {
            b'*' => {
                while pattern.get(p) == Some(&b'*') {
                    p += 1;
                }
                if p == pattern.len() {
                    return true;
                }
                retry = Some((p, t));
                continue;
            }
            b'?' => {
                p += 1;
                true
            }
            b'[' => {
                let (found, behind) = class(pattern, p + 1, text[t], ignore_case);
                p = behind;
                found
            }
            _ => {
                if element == b'\\' && p + 1 < pattern.len() {
                    p += 1;
                }
                p += 1;
                fold(pattern[p - 1], ignore_case) == fold(text[t], ignore_case)
            }
        };
        if matched {
            t += 1;
            if t == text.len() {
                while pattern.get(p) == Some(&b'*') {
                    p += 1;
                }
            }
            if p < pattern.len() || t == text.len() {
                continue;
            }
        }
        // Mismatch, or the pattern ended before the text.
        match &mut retry {
            Some((behind_star, tried)) => {
                *tried += 1;
                p = *behind_star;
                t = *tried;
            }
            None => return false,
        }
    }
    p == pattern.len() && t == text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_redis_documents_them() {
        for (pattern, text, expected) in [
            ("h?llo", "hello", true),
            ("h?llo", "hllo", false),
            ("h*llo", "heeeello", true),
            ("h*llo", "hllo", true),
            ("h[ae]llo", "hallo", true),
            ("h[ae]llo", "hillo", false),
            ("h[^e]llo", "hallo", true),
            ("h[^e]llo", "hello", false),
            ("h[a-b]llo", "hbllo", true),
            ("h[b-a]llo", "hbllo", true),
            ("\\*a", "*a", true),
            ("\\*a", "xa", false),
            ("a\\", "a\\", true),
            ("[abc", "b", true),
            ("[abc", "d", false),
            ("a*", "a", true),
            ("a***", "a", true),
            ("*b*c", "abbbc", true),
            ("*b*c", "abbbcd", false),
            ("*ab", "aab", true),
            ("*a?b", "aaab", true),
            ("", "", true),
            ("", "a", false),
            ("*", "", false),
            ("a", "", false),
            ("[]a", "a", false),
            ("[", "a", false),
            ("[^", "a", true),
            ("x*y*z", "xz", false),
        ] {
            assert_eq!(
                matches(pattern.as_bytes(), text.as_bytes(), false),
                expected,
                "{pattern:?} {text:?}"
            );
        }
        assert!(matches(b"MAX*", b"maxmemory", true));
        assert!(!matches(b"MAX*", b"maxmemory", false));
        assert!(Glob::new(b"*").matches(b""));
    }

    #[test]
    fn a_hostile_pattern_costs_at_most_its_length_times_the_text() {
        let text = vec![b'a'; 20_000];
        let mut pattern = b"*a".repeat(300);
        pattern.push(b'b');
        assert!(!matches(&pattern, &text, false));
    }

    /// The definition, by recursion over every split: slow and plain.
    fn plain(pattern: &[u8], text: &[u8]) -> bool {
        match pattern {
            [] => text.is_empty(),
            [b'*', rest @ ..] => (0..=text.len()).any(|at| plain(rest, &text[at..])),
            [b'?', rest @ ..] => !text.is_empty() && plain(rest, &text[1..]),
            [b'\\', byte, rest @ ..] | [byte, rest @ ..] => {
                text.first() == Some(byte) && plain(rest, &text[1..])
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn matching_agrees_with_the_recursive_definition(
            pattern in "[ab*?]{0,8}", text in "[ab]{1,10}"
        ) {
            let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
            proptest::prop_assert_eq!(matches(pattern, text, false), plain(pattern, text));
        }
    }
}

//! Regular expressions as MongoDB writes them, over a library's engine with look-around.
//!
//! Differences from PCRE that remain are listed in `docs/documents.md`.

use fancy_regex::{Regex, RegexBuilder};

use crate::error::{Code, Result, fail};

/// Steps after which a pattern that goes back and forth is given up.
const STEPS: usize = 1_000_000;
/// Longest pattern, bytes, as MongoDB has it.
const LONGEST: usize = 16_384;

/// A compiled pattern and what it was made from.
#[derive(Clone, Debug)]
pub struct Pattern {
    compiled: Regex,
    /// The pattern.
    pub pattern: String,
    /// Its options.
    pub options: String,
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.pattern == other.pattern && self.options == other.options
    }
}

impl Pattern {
    /// Compiles a pattern; `options` of `i`, `m`, `s`, `x`, `u`.
    ///
    /// Errors: an option MongoDB does not have, a pattern that does not compile.
    pub fn new(pattern: &str, options: &str) -> Result<Self> {
        if pattern.len() > LONGEST {
            return fail(Code::BadValue, "Regular expression is too long");
        }
        let mut flags = String::new();
        for option in options.chars() {
            match option {
                'i' | 'm' | 's' | 'x' => flags.push(option),
                'u' | 'l' => {}
                other => {
                    return fail(Code::BadValue, format!("invalid flag in regex options: {other}"));
                }
            }
        }
        let text =
            if flags.is_empty() { pattern.to_owned() } else { format!("(?{flags}){pattern}") };
        match RegexBuilder::new(&text).backtrack_limit(STEPS).build() {
            Ok(compiled) => {
                Ok(Self { compiled, pattern: pattern.to_owned(), options: options.to_owned() })
            }
            Err(error) => fail(Code::BadValue, format!("Regular expression is invalid: {error}")),
        }
    }

    /// Whether it is found in `text`; a pattern that takes too many steps is not.
    #[must_use]
    pub fn is_match(&self, text: &str) -> bool {
        self.compiled.is_match(text).unwrap_or(false)
    }

    /// Where it is found first from byte `from` on: the whole and its groups.
    #[must_use]
    pub fn find<'t>(&self, text: &'t str, from: usize) -> Option<fancy_regex::Captures<'t>> {
        self.compiled.captures_from_pos(text, from).ok().flatten()
    }

    /// The literal that every match starts with, if the pattern is anchored and has one.
    #[must_use]
    pub fn prefix(&self) -> Option<String> {
        if self.options.contains(['i', 'x', 'm']) {
            return None;
        }
        let rest = self.pattern.strip_prefix('^').or_else(|| self.pattern.strip_prefix("\\A"))?;
        if rest.contains('|') {
            return None;
        }
        let mut prefix = String::new();
        let mut letters = rest.chars().peekable();
        while let Some(letter) = letters.next() {
            let special = "\\^$.[]()*+?{}".contains(letter);
            if special {
                break;
            }
            // A letter that may repeat or be absent is no part of every match.
            if letters.peek().is_some_and(|next| "*?{".contains(*next)) {
                break;
            }
            prefix.push(letter);
        }
        (!prefix.is_empty()).then_some(prefix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_and_prefixes_are_understood() {
        assert!(Pattern::new("^AB", "i").unwrap().is_match("abc"));
        assert!(Pattern::new("(?=b)b", "").unwrap().is_match("abc"));
        assert_eq!(Pattern::new("^abc*d", "").unwrap().prefix().as_deref(), Some("ab"));
        assert_eq!(Pattern::new("^a|b", "").unwrap().prefix(), None);
        assert!(Pattern::new("a", "g").is_err());
        assert!(Pattern::new("(", "").is_err());
    }

    #[test]
    fn a_pattern_that_never_ends_is_given_up() {
        let pattern = Pattern::new("(a+)+(?=b)$", "").unwrap();
        assert!(!pattern.is_match(&"a".repeat(200)));
    }
}

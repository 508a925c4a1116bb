//! Text to tokens.

use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::source::{FileId, Sources, Span};

/// What a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A name or keyword.
    Name(String),
    /// A number.
    Number(u64),
    /// Text between quotes, with escapes resolved.
    Text(String),
    /// `.element`, `.state`, ...: the word after the dot, at the start of a line or after a brace.
    Directive(String),
    /// `#pragma` with the rest of its line.
    Pragma(String),
    /// An operator or bracket.
    Symbol(&'static str),
    /// The end of the file.
    End,
}

/// A token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// What.
    pub kind: Kind,
    /// Where.
    pub span: Span,
    /// The first token of its line.
    pub first_of_line: bool,
}

/// Longest first, so that the first match is the right one.
const SYMBOLS: [&str; 46] = [
    "<<=", ">>=", "::", "->", "<<", ">>", "<=", ">=", "==", "!=", "&&", "||", "+=", "-=", "*=",
    "/=", "%=", "&=", "|=", "^=", "++", "--", "##", "{", "}", "(", ")", "[", "]", ";", ",", ".",
    ":", "?", "=", "<", ">", "+", "-", "*", "/", "%", "&", "|", "^", "!",
];

/// All tokens of a file; the last is [`Kind::End`].
pub fn tokens(sources: &Sources, file: FileId, found: &mut Diagnostics) -> Vec<Token> {
    let text = sources.text(file);
    let bytes = text.as_bytes();
    let mut list: Vec<Token> = Vec::new();
    let mut at = 0;
    let mut first = true;
    while at < bytes.len() {
        let start = at;
        let span = |end: usize| Span { file, start: narrow(start), end: narrow(end) };
        let byte = bytes[at];
        if byte == b'\n' {
            first = true;
            at += 1;
            continue;
        }
        if byte.is_ascii_whitespace() {
            at += 1;
            continue;
        }
        if text[at..].starts_with("//") {
            at += text[at..].find('\n').unwrap_or(text.len() - at);
            continue;
        }
        if text[at..].starts_with("/*") {
            if let Some(length) = text[at + 2..].find("*/") {
                first |= text[at..at + 2 + length].contains('\n');
                at += length + 4;
            } else {
                found.push(Diagnostic::error("open-comment", span(at + 2), "a comment has no end"));
                at = text.len();
            }
            continue;
        }
        let kind = if byte.is_ascii_alphabetic() || byte == b'_' {
            at = word(bytes, at);
            Kind::Name(text[start..at].to_owned())
        } else if byte.is_ascii_digit() {
            at = word(bytes, at);
            number(&text[start..at], span(at), found)
        } else if byte == b'"' {
            let (kind, end) = quoted(text, at, file, found);
            at = end;
            kind
        } else if byte == b'\'' {
            let (kind, end) = character(text, at, file, found);
            at = end;
            kind
        } else if byte == b'#' && text[at..].starts_with("#pragma") {
            at += text[at..].find('\n').unwrap_or(text.len() - at);
            let line = text[start + 7..at].split("//").next().unwrap_or("");
            Kind::Pragma(line.trim().to_owned())
        } else if byte == b'.' && directive_here(&list, first, bytes, at) {
            at = word(bytes, at + 1);
            Kind::Directive(text[start + 1..at].to_owned())
        } else if byte == b'~' {
            at += 1;
            Kind::Symbol("~")
        } else if byte == b'@' {
            at += 1;
            Kind::Symbol("@")
        } else if let Some(symbol) = SYMBOLS.iter().find(|symbol| text[at..].starts_with(**symbol))
        {
            at += symbol.len();
            Kind::Symbol(symbol)
        } else {
            let length = text[at..].chars().next().map_or(1, char::len_utf8);
            at += length;
            found.push(
                Diagnostic::error(
                    "stray-character",
                    span(at),
                    "this character has no meaning here",
                )
                .label("remove it"),
            );
            continue;
        };
        list.push(Token { kind, span: span(at), first_of_line: first });
        first = false;
    }
    let end = narrow(text.len());
    list.push(Token { kind: Kind::End, span: Span { file, start: end, end }, first_of_line: true });
    list
}

fn narrow(offset: usize) -> u32 {
    u32::try_from(offset).unwrap_or(u32::MAX)
}

fn word(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() && (bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_') {
        at += 1;
    }
    at
}

/// A dot begins a directive where no expression can end before it.
fn directive_here(list: &[Token], first: bool, bytes: &[u8], at: usize) -> bool {
    if !bytes.get(at + 1).is_some_and(u8::is_ascii_alphabetic) {
        return false;
    }
    let after_expression = list.last().is_some_and(|token| {
        matches!(token.kind, Kind::Name(_) | Kind::Symbol(")" | "]")) && !first
    });
    !after_expression
}

fn number(text: &str, span: Span, found: &mut Diagnostics) -> Kind {
    let plain: String = text.chars().filter(|c| *c != '_').collect();
    let lower = plain.to_ascii_lowercase();
    let body = lower.trim_end_matches(['u', 'l']);
    let value = if let Some(digits) = body.strip_prefix("0x") {
        u64::from_str_radix(digits, 16)
    } else if let Some(digits) = body.strip_prefix("0b") {
        u64::from_str_radix(digits, 2)
    } else {
        body.parse()
    };
    value.map_or_else(
        |_| {
            found.push(
                Diagnostic::error("bad-number", span, "not a number of at most 64 bits")
                    .help("write 42, 0x2a or 0b101010; there are no fractions"),
            );
            Kind::Number(0)
        },
        Kind::Number,
    )
}

fn quoted(text: &str, at: usize, file: FileId, found: &mut Diagnostics) -> (Kind, usize) {
    let mut out = String::new();
    let mut chars = text[at + 1..].char_indices();
    while let Some((offset, c)) = chars.next() {
        match c {
            '"' => return (Kind::Text(out), at + 1 + offset + 1),
            '\n' => break,
            '\\' => match chars.next() {
                Some((_, 'n')) => out.push('\n'),
                Some((_, 't')) => out.push('\t'),
                Some((_, other)) => out.push(other),
                None => break,
            },
            other => out.push(other),
        }
    }
    let end = at + text[at..].find('\n').unwrap_or(text.len() - at);
    let span = Span { file, start: narrow(at), end: narrow(end) };
    found.push(Diagnostic::error("open-text", span, "a text has no closing quote on its line"));
    (Kind::Text(out), end.max(at + 1))
}

fn character(text: &str, at: usize, file: FileId, found: &mut Diagnostics) -> (Kind, usize) {
    let mut chars = text[at + 1..].chars();
    if let (Some(c), Some('\'')) = (chars.next(), chars.next())
        && c.is_ascii()
    {
        return (Kind::Number(u64::from(u32::from(c))), at + 3);
    }
    let span = Span { file, start: narrow(at), end: narrow(at + 1) };
    found.push(Diagnostic::error("bad-character", span, "write one ASCII character, as in 'a'"));
    (Kind::Number(0), at + 1)
}

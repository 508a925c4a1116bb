//! Results go to standard output, everything else to standard error.

use std::fmt::Display;
use std::io::{IsTerminal as _, Write as _};

use serde::Serialize;

/// How results are shown.
#[derive(Clone, Copy, Debug, Default)]
pub struct Output {
    /// One JSON object per line instead of text.
    pub json: bool,
    /// No progress, no notes.
    pub quiet: bool,
}

impl Output {
    /// One line of result.
    pub fn line(self, text: impl Display) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{text}")?;
        out.flush()
    }

    /// Bytes of result, as they are.
    pub fn bytes(self, bytes: &[u8]) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        out.write_all(bytes)?;
        out.flush()
    }

    /// One JSON object of result.
    pub fn object(self, value: &impl Serialize) -> anyhow::Result<()> {
        Ok(self.line(serde_json::to_string(value)?)?)
    }

    /// A note for people, on standard error; silent with `--quiet`.
    pub fn note(self, text: impl Display) {
        if !self.quiet {
            complain(text);
        }
    }

    /// A progress bar of `length` steps: on a terminal only, and not with `--quiet`.
    pub fn progress(self, length: u64, what: &str) -> indicatif::ProgressBar {
        if self.quiet || self.json || !std::io::stderr().is_terminal() {
            return indicatif::ProgressBar::hidden();
        }
        let bar = indicatif::ProgressBar::new(length);
        bar.set_message(what.to_owned());
        if let Ok(style) =
            indicatif::ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}")
        {
            bar.set_style(style);
        }
        bar
    }
}

/// A number with its noun.
pub fn count(number: u64, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// A line on standard error. A closed standard error is nobody's concern.
pub fn complain(text: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "{text}");
}

/// Columns, padded to their widest cell; the last column is not padded.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let columns = header.len();
    let mut width: Vec<usize> = header.iter().map(|cell| cell.chars().count()).collect();
    for row in rows {
        for (i, cell) in row.iter().enumerate().take(columns) {
            width[i] = width[i].max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let mut push = |cells: &mut dyn Iterator<Item = &str>| {
        let mut line = String::new();
        for (i, cell) in cells.enumerate().take(columns) {
            line.push_str(cell);
            if i + 1 < columns {
                line.extend(std::iter::repeat_n(' ', width[i] + 2 - cell.chars().count()));
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    };
    push(&mut header.iter().copied());
    for row in rows {
        push(&mut row.iter().map(String::as_str));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_not_many() {
        let texts = [0, 1, 2].map(|number| count(number, "entry", "entries"));
        assert_eq!(texts, ["0 entries", "1 entry", "2 entries"]);
    }

    #[test]
    fn a_table_aligns_its_columns() {
        let text = table(
            &["name", "n"],
            &[vec!["a".into(), "1".into()], vec!["longer".into(), "22".into()]],
        );
        assert_eq!(text, "name    n\na       1\nlonger  22\n");
    }
}

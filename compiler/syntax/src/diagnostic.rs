//! What is wrong with a source, shown with its line, or as one JSON object.

use codespan_reporting::diagnostic as shown;
use codespan_reporting::files::SimpleFiles;
use codespan_reporting::term;
use serde::Serialize;

use crate::source::{Sources, Span};

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Diagnostic {
    /// A stable word, as in `unknown-element`; documented in `docs/nf-language.md`.
    pub code: &'static str,
    /// False for a warning.
    pub error: bool,
    /// One sentence.
    pub message: String,
    /// Where.
    pub span: Span,
    /// What stands under the source line.
    pub label: String,
    /// Other places that matter, as in the first definition of a name.
    pub others: Vec<(Span, String)>,
    /// What to do.
    pub help: Option<String>,
}

impl Diagnostic {
    /// An error.
    #[must_use]
    pub fn error(code: &'static str, span: Span, message: impl Into<String>) -> Self {
        Self {
            code,
            error: true,
            message: message.into(),
            span,
            label: String::new(),
            others: Vec::new(),
            help: None,
        }
    }

    /// A warning.
    #[must_use]
    pub fn warning(code: &'static str, span: Span, message: impl Into<String>) -> Self {
        Self { error: false, ..Self::error(code, span, message) }
    }

    /// Text under the source line.
    #[must_use]
    pub fn label(mut self, label: impl Into<String>) -> Self {
        self.label = label.into();
        self
    }

    /// Another place.
    #[must_use]
    pub fn other(mut self, span: Span, label: impl Into<String>) -> Self {
        self.others.push((span, label.into()));
        self
    }

    /// What to do.
    #[must_use]
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }
}

/// What a front-end stage has found so far.
#[derive(Clone, Debug, Default)]
pub struct Diagnostics {
    list: Vec<Diagnostic>,
}

/// Past this many, further ones are dropped: they follow from the first.
const MOST: usize = 50;

impl Diagnostics {
    /// Adds one; one that is known is found again where an element is instantiated again.
    pub fn push(&mut self, diagnostic: Diagnostic) {
        let same = |known: &Diagnostic| {
            (known.span, known.code) == (diagnostic.span, diagnostic.code)
                && known.message == diagnostic.message
        };
        if self.list.len() < MOST && !self.list.iter().any(same) {
            self.list.push(diagnostic);
        }
    }

    /// True with at least one error.
    #[must_use]
    pub fn failed(&self) -> bool {
        self.list.iter().any(|diagnostic| diagnostic.error)
    }

    /// All of them, in the order they were found.
    #[must_use]
    pub fn all(&self) -> &[Diagnostic] {
        &self.list
    }

    /// The text for a terminal, without colours.
    #[must_use]
    pub fn render(&self, sources: &Sources) -> String {
        let mut files = SimpleFiles::new();
        let ids: Vec<usize> = (0..sources.len())
            .map(|index| {
                let id = crate::source::FileId(u16::try_from(index).unwrap_or(u16::MAX));
                files.add(sources.name(id).to_owned(), sources.text(id).to_owned())
            })
            .collect();
        let mut text = String::new();
        for diagnostic in &self.list {
            let severity =
                if diagnostic.error { shown::Severity::Error } else { shown::Severity::Warning };
            let place = |span: Span| {
                let file = ids.get(usize::from(span.file.0)).copied().unwrap_or(0);
                (file, span.start as usize..span.end as usize)
            };
            let (file, range) = place(diagnostic.span);
            let mut labels =
                vec![shown::Label::primary(file, range).with_message(diagnostic.label.clone())];
            for (span, label) in &diagnostic.others {
                let (file, range) = place(*span);
                labels.push(shown::Label::secondary(file, range).with_message(label.clone()));
            }
            let mut one = shown::Diagnostic::new(severity)
                .with_code(diagnostic.code)
                .with_message(diagnostic.message.clone())
                .with_labels(labels);
            if let Some(help) = &diagnostic.help {
                one = one.with_notes(vec![format!("help: {help}")]);
            }
            if term::emit_to_string(&mut text, &term::Config::default(), &files, &one).is_err() {
                text.push_str(&format!("{}: {}\n", diagnostic.code, diagnostic.message));
            }
        }
        text
    }

    /// One JSON-ready record for each, with line and column.
    #[must_use]
    pub fn records(&self, sources: &Sources) -> Vec<Record> {
        self.list
            .iter()
            .map(|diagnostic| {
                let (line, column) = sources.position(diagnostic.span);
                let end = Span { start: diagnostic.span.end, ..diagnostic.span };
                let (end_line, end_column) = sources.position(end);
                Record {
                    file: sources.name(diagnostic.span.file).to_owned(),
                    line,
                    column,
                    end_line,
                    end_column,
                    severity: if diagnostic.error { "error" } else { "warning" },
                    code: diagnostic.code,
                    message: diagnostic.message.clone(),
                    label: diagnostic.label.clone(),
                    help: diagnostic.help.clone(),
                }
            })
            .collect()
    }
}

/// A diagnostic as a language server wants it.
#[derive(Clone, Debug, Serialize)]
pub struct Record {
    /// File name.
    pub file: String,
    /// From 1.
    pub line: u32,
    /// From 1, in characters.
    pub column: u32,
    /// Line of the end.
    pub end_line: u32,
    /// Column after the end.
    pub end_column: u32,
    /// `error` or `warning`.
    pub severity: &'static str,
    /// Stable word.
    pub code: &'static str,
    /// One sentence.
    pub message: String,
    /// Text under the line.
    pub label: String,
    /// What to do.
    pub help: Option<String>,
}

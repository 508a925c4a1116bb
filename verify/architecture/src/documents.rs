//! Paths in documents exist, and so do the tests they name; what is shown as a command starts with one we know.

use std::collections::HashSet;
use std::path::Path;

use crate::SourceFile;

/// Folders and files at the root that a path in a document may begin with.
const ROOTS: [&str; 17] = [
    "foundation/",
    "substrate/",
    "engines/",
    "systems/",
    "compiler/",
    "apps/",
    "verify/",
    "bench/",
    "fuzz/",
    "examples/",
    "python/",
    "docs/",
    "xtask/",
    ".ci/",
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
];

/// Words between backticks or in bold, or targets of links, that name a file or folder of this workspace.
#[must_use]
pub fn paths(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
            continue;
        }
        if fenced {
            continue;
        }
        let between = |mark: &str| -> Vec<String> {
            line.split(mark).skip(1).step_by(2).map(str::to_owned).collect()
        };
        let quoted = between("`").into_iter().chain(between("**"));
        let linked = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for candidate in quoted.chain(linked.map(str::to_owned)) {
            let plain = candidate.split('#').next().unwrap_or_default().trim_start_matches("./");
            let whole = !plain.contains([' ', '*', '{', '<', '…', ',']);
            if whole && ROOTS.iter().any(|root| plain.starts_with(root)) {
                found.push(plain.trim_end_matches('/').to_owned());
            }
        }
    }
    found
}

/// Parts of a name that only a test or a function has: shorter ones are settings, fields and calls of others.
const PARTS_OF_A_TEST: usize = 5;
/// Of metrics, which sources put together, and of tests that others wrote.
const NOT_OURS: [&str; 2] = ["beeline_", "test_"];

/// Words between backticks that read as the name of a test.
#[must_use]
pub fn tests(text: &str) -> Vec<String> {
    let is_name = |word: &&str| {
        let letters = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        word.split('_').filter(|part| !part.is_empty()).count() >= PARTS_OF_A_TEST
            && word.chars().all(letters)
            && !NOT_OURS.iter().any(|prefix| word.starts_with(prefix))
    };
    let lines = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2));
    lines.filter(is_name).map(str::to_owned).collect()
}

/// Tests that `documents` name and no source has: a proof that went with the code it was about.
#[must_use]
pub fn missing_tests(documents: &[SourceFile], sources: &[SourceFile]) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = |source: &'_ SourceFile| -> Vec<String> {
        source
            .text
            .split(|c| !is_part(c))
            .filter(|word| word.contains('_'))
            .map(str::to_owned)
            .collect()
    };
    let known: HashSet<String> = sources.iter().flat_map(words).collect();
    let named = documents.iter().flat_map(|page| {
        let names = tests(&page.text).into_iter().filter(|name| !known.contains(name));
        names.map(|name| format!("{}: no source has the test {name}", page.path))
    });
    named.collect()
}

/// Paths in `documents` that do not exist under `root`. A link may also be relative to its page.
#[must_use]
pub fn missing_paths(root: &Path, documents: &[SourceFile]) -> Vec<String> {
    let mut problems = Vec::new();
    for document in documents {
        let folder = Path::new(&document.path).parent().unwrap_or(Path::new(""));
        for path in paths(&document.text) {
            let places = [root.join(&path), root.join(folder).join(&path)];
            if !places.iter().any(|place| place.exists()) {
                problems.push(format!("{}: {path} does not exist", document.path));
            }
        }
    }
    problems
}

/// Command lines in fenced `sh` or `console` blocks: those that run cargo or beeline, without
/// their prompt, and cut at a comment.
#[must_use]
pub fn commands(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let (mut inside, mut console) = (false, false);
    for line in text.lines() {
        if let Some(kind) = line.trim_start().strip_prefix("```") {
            console = kind.starts_with("console");
            inside = !inside && (kind.starts_with("sh") || console);
            continue;
        }
        // In a console block, lines without a prompt are output.
        let line = line.trim();
        let Some(line) = line.strip_prefix("$ ").or((!console).then_some(line)) else { continue };
        if inside && (line.starts_with("cargo ") || line.starts_with("beeline ")) {
            let command = line.split(" #").next().unwrap_or(line);
            found.push(command.trim_end().to_owned());
        }
    }
    found
}

/// Commands in `documents` that start no cargo alias, cargo command or subcommand we know.
#[must_use]
pub fn unknown_commands(documents: &[SourceFile], xtasks: &[String]) -> Vec<String> {
    let mut problems = Vec::new();
    for document in documents {
        for command in commands(&document.text) {
            let words: Vec<&str> = command.split_whitespace().collect();
            let known = match words.as_slice() {
                ["cargo", "xtask", task, ..] => xtasks.iter().any(|known| known == task),
                ["cargo", "run" | "build" | "test" | "install" | "doc", ..] => true,
                ["cargo", ..] => false,
                _ => true,
            };
            if !known {
                problems.push(format!("{}: no such command: {command}", document.path));
            }
        }
    }
    problems
}

/// The subcommands of xtask, read from the enum in its source.
#[must_use]
pub fn xtasks(source: &str) -> Vec<String> {
    let Some(start) = source.find("enum Task {") else { return Vec::new() };
    let body = source[start..].split("\n}").next().unwrap_or_default();
    body.lines()
        .map(str::trim)
        .filter(|line| line.starts_with(|c: char| c.is_ascii_uppercase()))
        .map(|line| {
            line.trim_end_matches(',')
                .split(['(', ' ', '{'])
                .next()
                .unwrap_or_default()
                .to_lowercase()
        })
        .collect()
}

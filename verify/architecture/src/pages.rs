//! The shape of the documents: how long a page may be, that its links lead somewhere, that a reader
//! finds every page from the front page, that the map names every crate, and that sentences name
//! their actors.
//!
//! Place: beside [`crate::documents`], which looks at the paths and commands inside a page.

use std::collections::{BTreeMap, BTreeSet};

use crate::SourceFile;

/// A longer page under `docs/` is two pages: a guide for users and a page of internals.
pub const LONGEST_PAGE_LINES: usize = 400;

/// The front page has to fit one screen.
pub const LONGEST_FRONT_PAGE_LINES: usize = 80;

/// Pages under `docs/`, and the front page, that are too long.
#[must_use]
pub fn long_pages(documents: &[SourceFile]) -> Vec<String> {
    let mut problems = Vec::new();
    for document in documents {
        let lines = document.text.lines().count();
        if document.path == "README.md" && lines > LONGEST_FRONT_PAGE_LINES {
            problems.push(format!(
                "README.md: {lines} lines, {LONGEST_FRONT_PAGE_LINES} fit a screen; move details to docs/guide.md"
            ));
        }
        if document.path.starts_with("docs/") && lines > LONGEST_PAGE_LINES {
            problems.push(format!(
                "{}: {lines} lines, {LONGEST_PAGE_LINES} are the most; move internals, proof or measurements to a page of their own",
                document.path
            ));
        }
    }
    problems
}

/// Lines outside fenced blocks.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut fenced = false;
    text.lines().filter(move |line| {
        let fence = line.trim_start().starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    })
}

/// The anchors that headings make, as GitHub spells them: a repeated one gets a number.
#[must_use]
pub fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut found = BTreeSet::new();
    for line in prose(text) {
        let heading = line.trim_start_matches('#');
        if heading.len() == line.len() || !heading.starts_with(' ') {
            continue;
        }
        let anchor: String = heading
            .trim()
            .to_lowercase()
            .chars()
            .filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'))
            .map(|c| if c == ' ' { '-' } else { c })
            .collect();
        let count = seen.entry(anchor.clone()).or_insert(0);
        found.insert(if *count == 0 { anchor } else { format!("{anchor}-{count}") });
        *count += 1;
    }
    found
}

/// Targets of links to this workspace, with their anchors: `(path from the root, anchor)`.
fn links(document: &SourceFile) -> Vec<(String, String)> {
    let folder = document.path.rsplit_once('/').map_or("", |(folder, _)| folder);
    prose(&document.text)
        .flat_map(|line| line.split("](").skip(1))
        .filter_map(|rest| rest.split(')').next())
        .filter(|target| !target.contains("://") && !target.contains(' '))
        .map(|target| {
            let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
            let path = if path.is_empty() { document.path.clone() } else { resolve(folder, path) };
            (path, anchor.to_owned())
        })
        .collect()
}

/// `path` as seen from `folder`, without `.` and `..`.
fn resolve(folder: &str, path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(path.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Links to sections that their page does not have.
#[must_use]
pub fn missing_anchors(documents: &[SourceFile]) -> Vec<String> {
    let known: BTreeMap<&str, BTreeSet<String>> =
        documents.iter().map(|page| (page.path.as_str(), anchors(&page.text))).collect();
    let mut problems = Vec::new();
    for document in documents {
        for (path, anchor) in links(document) {
            let Some(anchors) = known.get(path.as_str()) else { continue };
            if !anchor.is_empty() && !anchors.contains(&anchor) {
                problems.push(format!("{}: {path} has no section #{anchor}", document.path));
            }
        }
    }
    problems
}

/// Pages under `docs/` that no chain of links from `README.md` reaches.
#[must_use]
pub fn unreachable_pages(documents: &[SourceFile]) -> Vec<String> {
    let pages: BTreeMap<&str, &SourceFile> =
        documents.iter().map(|page| (page.path.as_str(), page)).collect();
    let mut reached: BTreeSet<String> = BTreeSet::from(["README.md".to_owned()]);
    let mut next = vec!["README.md".to_owned()];
    while let Some(path) = next.pop() {
        let Some(page) = pages.get(path.as_str()) else { continue };
        for (target, _) in links(page) {
            if reached.insert(target.clone()) {
                next.push(target);
            }
        }
    }
    documents
        .iter()
        .filter(|page| page.path.starts_with("docs/") && !reached.contains(&page.path))
        .map(|page| format!("{}: no link from README.md leads here", page.path))
        .collect()
}

/// Folders of the crates in `manifests` that `map` does not name in bold or between backticks.
#[must_use]
pub fn unnamed_crates(map: &str, manifests: &[SourceFile]) -> Vec<String> {
    let named: BTreeSet<&str> = ["`", "**"]
        .into_iter()
        .flat_map(|mark| map.split(mark))
        .map(|word| word.trim_end_matches('/'))
        .collect();
    manifests
        .iter()
        .filter(|manifest| manifest.text.contains("[package]"))
        .filter_map(|manifest| manifest.path.strip_suffix("/Cargo.toml"))
        .filter(|folder| !named.contains(folder))
        .map(|folder| format!("{folder}: ARCHITECTURE.md does not name this crate"))
        .collect()
}

/// Words that stand where a sentence should name its actor.
const VAGUE_ACTORS: [&str; 9] = [
    "nobody",
    "somebody",
    "anybody",
    "everybody",
    "someone",
    "anyone",
    "everyone",
    "whoever",
    "whomever",
];

/// Lines of the documents that name no actor. Words between backticks are code.
#[must_use]
pub fn vague_actors(documents: &[SourceFile]) -> Vec<String> {
    let mut problems = Vec::new();
    for document in documents.iter().filter(|page| !page.path.starts_with("CHANGELOG")) {
        for line in prose(&document.text) {
            let words: String = line.split('`').step_by(2).collect::<Vec<_>>().join(" ");
            let words = words.to_lowercase();
            let mut words = words.split(|c: char| !c.is_alphanumeric() && c != '_');
            if let Some(word) = words.find(|word| VAGUE_ACTORS.contains(word)) {
                problems.push(format!(
                    "{}: {word:?} acts in {line:?}; name the thread, process, client or operator",
                    document.path
                ));
            }
        }
    }
    problems
}

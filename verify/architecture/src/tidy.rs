//! Small rules over every Rust file.

use crate::SourceFile;

/// A longer file hides a second concept.
pub const LONGEST_FILE_LINES: usize = 800;

/// Files past [`LONGEST_FILE_LINES`]; `excused` lists `(path, reason)`.
#[must_use]
pub fn long_files(files: &[SourceFile], excused: &[(&str, &str)]) -> Vec<String> {
    let mut problems = Vec::new();
    for file in files {
        let lines = file.text.lines().count();
        let excuse = excused.iter().any(|(path, _)| *path == file.path);
        if lines > LONGEST_FILE_LINES && !excuse {
            problems.push(format!("{}: {lines} lines; split it at its second concept", file.path));
        }
    }
    for (path, reason) in excused {
        let still =
            files.iter().any(|f| f.path == *path && f.text.lines().count() > LONGEST_FILE_LINES);
        if !still {
            problems
                .push(format!("{path} is excused ({reason}) but short or gone: remove the line"));
        }
    }
    problems
}

/// Files that do not say at their head what they are for.
#[must_use]
pub fn undocumented_modules(files: &[SourceFile]) -> Vec<String> {
    files
        .iter()
        .filter(|file| {
            let first = file.text.lines().find(|line| !line.trim().is_empty());
            !first.is_some_and(|line| line.starts_with("//!"))
        })
        .map(|file| format!("{}: begins without a //! line that says its purpose", file.path))
        .collect()
}

/// Crates without unsafe code whose root does not forbid it.
#[must_use]
pub fn unforbidden_unsafe(files: &[SourceFile]) -> Vec<String> {
    let unsafe_code = ["{", "fn ", "impl ", "extern "].map(|what| format!("unsafe {what}"));
    let source = |file: &SourceFile| {
        file.path.split_once("/src/").map(|(package, _)| format!("{package}/src/"))
    };
    files
        .iter()
        .filter(|file| ["/src/lib.rs", "/src/main.rs"].iter().any(|end| file.path.ends_with(end)))
        .filter(|file| !file.text.contains("#![forbid(unsafe_code)]"))
        .filter(|root| {
            let own = source(root);
            !files
                .iter()
                .filter(|file| source(file) == own)
                .any(|file| unsafe_code.iter().any(|what| file.text.contains(what.as_str())))
        })
        .map(|root| format!("{}: nothing here is unsafe, so forbid it", root.path))
        .collect()
}

/// What must not be in the tree, with the reason. Spelt in two halves so that this file does not
/// contain it.
fn banned() -> Vec<(String, &'static str)> {
    let join = |a: &str, b: &str| format!("{a}{b}");
    vec![
        (join("todo", "!("), "unfinished code does not land"),
        (join("unimplemented", "!("), "unfinished code does not land"),
        (join("dbg", "!("), "left over from a search for a bug"),
        (join("FIX", "ME"), "mend it, or explain it"),
        (join("XX", "X:"), "mend it, or explain it"),
        (join("/ho", "me/"), "a path of one machine"),
        (join("/ro", "ot/"), "a path of one machine"),
        (join("/wo", "rk/"), "a path of one machine"),
        (join("/Use", "rs/"), "a path of one machine"),
        (join("clippy::", "all"), "lints are silenced one by one, each with a reason"),
        (join("<<<<", "<<< "), "an unresolved conflict"),
        (join(">>>>", ">>> "), "an unresolved conflict"),
    ]
}

/// Lines with words that must not be in the tree.
#[must_use]
pub fn banned_words(files: &[SourceFile]) -> Vec<String> {
    let banned = banned();
    let mut problems = Vec::new();
    for file in files {
        for (number, line) in (1..).zip(file.text.lines()) {
            for (word, reason) in &banned {
                if line.contains(word.as_str()) {
                    problems.push(format!("{}:{number}: {word:?}: {reason}", file.path));
                }
            }
        }
    }
    problems
}

/// Lints silenced without a reason beside them; files under `tests/` and `examples/` need none.
#[must_use]
pub fn unreasoned_allowances(files: &[SourceFile]) -> Vec<String> {
    let mut problems = Vec::new();
    for file in files {
        let lines: Vec<&str> = file.text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let line = line.trim_start();
            let silences = ["#[allow(", "#![allow(", "#[expect(", "#![expect("];
            if !silences.iter().any(|start| line.starts_with(start)) {
                continue;
            }
            // The attribute may span lines.
            let end = lines[index..].iter().position(|l| l.contains(")]")).unwrap_or(0);
            let whole = lines[index..=index + end].join(" ");
            // Tests and examples may do what a program may not; that needs no saying each time.
            let shown = file.path.contains("/tests/") || file.path.contains("/examples/");
            if !whole.contains("reason") && !shown {
                problems.push(format!(
                    "{}:{}: a lint is silenced; add reason = \"...\"",
                    file.path,
                    index + 1
                ));
            }
        }
    }
    problems
}

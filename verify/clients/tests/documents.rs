//! Commands the documents show that finish by themselves, run as shown.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use beeline_verify_clients::{beeline, bounded, root, said};

/// Subcommands that end by themselves and need no node.
const HARMLESS: [&str; 2] = ["doctor", "config"];

#[test]
fn the_harmless_commands_of_the_documents_run() {
    let mut pages = vec![root().join("README.md"), root().join("ARCHITECTURE.md")];
    for entry in std::fs::read_dir(root().join("docs")).unwrap().flatten() {
        pages.push(entry.path());
    }
    let mut run = 0;
    for page in pages.iter().filter(|page| page.extension().is_some_and(|e| e == "md")) {
        let text = std::fs::read_to_string(page).unwrap();
        let lines = text.split("```").skip(1).step_by(2).flat_map(|block| {
            let console = block.starts_with("console");
            block.lines().filter_map(move |line| {
                line.trim().strip_prefix("$ ").or((!console).then_some(line.trim()))
            })
        });
        for line in lines {
            let line = line.split(" #").next().unwrap_or_default();
            let rest = line
                .strip_prefix("beeline ")
                .or_else(|| line.strip_prefix("cargo run --release -- "));
            let Some(rest) = rest else { continue };
            let words: Vec<&str> = rest.split_whitespace().collect();
            if !words.first().is_some_and(|first| HARMLESS.contains(first)) {
                continue;
            }
            let output = bounded(&mut beeline(&words), Duration::from_secs(60));
            // `doctor` says 1 where something is in the way, a taken port for instance.
            let fine = matches!(output.status.code(), Some(0 | 1));
            assert!(fine && !output.stdout.is_empty(), "{line}: {}", said(&output));
            run += 1;
        }
    }
    assert!(run >= 2, "only {run} commands were found");
}

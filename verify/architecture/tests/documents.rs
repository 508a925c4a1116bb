//! Paths and commands in this workspace's documents, and planted violations.

use beeline_verify_architecture::documents::{
    commands, missing_paths, missing_tests, paths, tests, unknown_commands, xtasks,
};
use beeline_verify_architecture::{SourceFile, files, root};

fn xtask_names() -> Vec<String> {
    let source = std::fs::read_to_string(root().join("xtask/src/main.rs"));
    xtasks(&source.unwrap_or_default())
}

#[test]
fn every_path_in_a_document_exists() {
    let documents = files(&[".md"]);
    let problems = missing_paths(&root(), &documents);
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
    let checked: usize = documents.iter().map(|d| paths(&d.text).len()).sum();
    assert!(checked > 5, "only {checked} paths were found to check");
}

#[test]
fn every_test_that_a_document_names_is_there() {
    let documents = files(&[".md"]);
    let problems = missing_tests(&documents, &files(&[".rs", ".py"]));
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
    let checked: usize = documents.iter().map(|page| tests(&page.text).len()).sum();
    assert!(checked > 200, "only {checked} names were found to check");
}

#[test]
fn every_cargo_command_in_a_document_exists() {
    assert!(xtask_names().contains(&"check".to_owned()), "{:?}", xtask_names());
    let problems = unknown_commands(&files(&[".md"]), &xtask_names());
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

#[test]
fn planted_violations_are_caught() {
    let page = SourceFile::planted(
        "docs/x.md",
        "See `foundation/nowhere/src/lib.rs`, [this](../docs/gone.md) and `docs/errors.md`.\n\
         ```sh\n$ cargo xtask fly   # up\ncargo frobnicate\ncargo run --release -- serve\n```\n",
    );
    let pages = std::slice::from_ref(&page);
    assert_eq!(commands(&page.text)[0], "cargo xtask fly");
    let missing = missing_paths(&root(), pages);
    assert_eq!(missing, ["docs/x.md: foundation/nowhere/src/lib.rs does not exist"]);
    let unknown = unknown_commands(pages, &xtask_names());
    assert_eq!(unknown.len(), 2, "{unknown:?}");

    let page = SourceFile::planted(
        "docs/x.md",
        "| 1 | done | `a_name_that_is_there`, `a_name_that_is_gone` |\n\
         `time_to_live_ms`, `beeline_kv_stored_bytes_now_total`, `Of_a_kind_of_its_own`\n",
    );
    let source = SourceFile::planted("x.rs", "#[test]\nfn a_name_that_is_there() {}\n");
    let missing = missing_tests(&[page], &[source]);
    assert_eq!(missing, ["docs/x.md: no source has the test a_name_that_is_gone"]);
}

#[test]
fn xtask_names_come_from_its_source() {
    let source =
        "/// x\nenum Task {\n    /// Doc.\n    Check,\n    /// Doc.\n    Deep(DeepArguments),\n}\n";
    assert_eq!(xtasks(source), ["check", "deep"]);
}

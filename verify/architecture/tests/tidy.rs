//! Small rules over every Rust file of this workspace, and over planted violations.

use beeline_verify_architecture::tidy::{
    LONGEST_FILE_LINES, banned_words, long_files, undocumented_modules, unforbidden_unsafe,
    unreasoned_allowances,
};
use beeline_verify_architecture::{SourceFile, files};

/// Files that may be long: path, reason.
const LONG: &[(&str, &str)] = &[];

fn none(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

#[test]
fn no_file_hides_a_second_concept() {
    let rust = files(&[".rs"]);
    assert!(rust.len() > 40, "only {} files were found", rust.len());
    none(&long_files(&rust, LONG));
}

#[test]
fn every_file_says_what_it_is_for() {
    none(&undocumented_modules(&files(&[".rs"])));
}

#[test]
fn no_unfinished_code_and_no_path_of_one_machine() {
    none(&banned_words(&files(&[".rs", ".md", ".toml", ".py", ".sh", "run"])));
}

#[test]
fn every_silenced_lint_has_a_reason() {
    none(&unreasoned_allowances(&files(&[".rs"])));
}

#[test]
fn a_crate_without_unsafe_code_forbids_it() {
    none(&unforbidden_unsafe(&files(&[".rs"])));
}

#[test]
fn planted_violations_are_caught() {
    let long = SourceFile::planted("a/src/long.rs", &"//! x\n".repeat(LONGEST_FILE_LINES + 1));
    let found = long_files(std::slice::from_ref(&long), &[]);
    assert!(found.len() == 1 && found[0].contains("801 lines"), "{found:?}");
    none(&long_files(&[long], &[("a/src/long.rs", "one table")]));
    assert_eq!(long_files(&[], &[("a/src/long.rs", "one table")]).len(), 1);

    let bare = SourceFile::planted("a/src/bare.rs", "\nfn main() {}\n");
    assert_eq!(undocumented_modules(&[bare]).len(), 1);

    let call = concat!("//! x\nfn f() { to", "do!() }\nconst P: &str = \"/ho", "me/x\";");
    let found = banned_words(&[SourceFile::planted("a/src/b.rs", call)]);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].starts_with("a/src/b.rs:2"), "{found:?}");

    let safe = SourceFile::planted("a/src/lib.rs", "//! x\nmod b;\n");
    let raw = SourceFile::planted("a/src/b.rs", "//! x\nfn f() { unsafe { g() } }\n");
    assert_eq!(unforbidden_unsafe(std::slice::from_ref(&safe)).len(), 1);
    none(&unforbidden_unsafe(&[safe, raw]));

    let quiet = concat!("//! x\n#[al", "low(dead_code)]\nfn f() {}\n");
    assert_eq!(unreasoned_allowances(&[SourceFile::planted("a/src/q.rs", quiet)]).len(), 1);
    let helper = concat!("//! x\n#![al", "low(clippy::unwrap_used, clippy::panic)]\nfn f() {}\n");
    none(&unreasoned_allowances(&[SourceFile::planted("a/tests/q.rs", helper)]));
    assert_eq!(unreasoned_allowances(&[SourceFile::planted("a/src/q.rs", helper)]).len(), 1);
    let argued =
        concat!("//! x\n#[al", "low(\n    dead_code,\n    reason = \"y\"\n)]\nfn f() {}\n");
    none(&unreasoned_allowances(&[SourceFile::planted("a/src/q.rs", argued)]));
}

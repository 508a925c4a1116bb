//! The shape of this workspace's documents, and planted violations.

use beeline_verify_architecture::pages::{
    LONGEST_FRONT_PAGE_LINES, LONGEST_PAGE_LINES, anchors, long_pages, missing_anchors,
    unnamed_crates, unreachable_pages, vague_actors,
};
use beeline_verify_architecture::{SourceFile, files, root};

fn none(problems: &[String]) {
    assert!(problems.is_empty(), "\n{}\n", problems.join("\n"));
}

#[test]
fn no_page_is_longer_than_a_reader_reads() {
    let documents = files(&[".md"]);
    assert!(documents.iter().filter(|page| page.path.starts_with("docs/")).count() > 20);
    assert!(documents.iter().any(|page| page.path == "README.md"));
    none(&long_pages(&documents));
}

#[test]
fn every_link_to_a_section_finds_it() {
    none(&missing_anchors(&files(&[".md"])));
}

#[test]
fn a_reader_who_begins_at_the_front_page_finds_every_page() {
    none(&unreachable_pages(&files(&[".md"])));
}

#[test]
fn the_map_names_every_crate() {
    let map = std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap_or_default();
    let manifests = files(&["Cargo.toml"]);
    assert!(manifests.len() > 40, "only {} manifests were found", manifests.len());
    none(&unnamed_crates(&map, &manifests));
}

#[test]
fn sentences_name_their_actors() {
    none(&vague_actors(&files(&[".md"])));
}

#[test]
fn planted_violations_are_caught() {
    let page = |lines| SourceFile::planted("docs/x.md", &"word\n".repeat(lines));
    let front = |lines| SourceFile::planted("README.md", &"word\n".repeat(lines));
    none(&long_pages(&[page(LONGEST_PAGE_LINES), front(LONGEST_FRONT_PAGE_LINES)]));
    let long = long_pages(&[page(LONGEST_PAGE_LINES + 1), front(LONGEST_FRONT_PAGE_LINES + 1)]);
    assert_eq!(long.len(), 2, "{long:?}");
    assert!(long[0].contains("401 lines") && long[1].contains("81 lines"), "{long:?}");

    let front =
        SourceFile::planted("README.md", "# A\n[b](docs/b.md#one-two) [c](docs/b.md#gone)\n");
    let linked =
        SourceFile::planted("docs/b.md", "## One, `two`\n[up](../README.md#a) [here](#x)\n");
    let alone = SourceFile::planted("docs/c.md", "[b](b.md)\n");
    let pages = [front, linked, alone];
    assert_eq!(
        missing_anchors(&pages),
        ["README.md: docs/b.md has no section #gone", "docs/b.md: docs/b.md has no section #x"]
    );
    assert_eq!(unreachable_pages(&pages), ["docs/c.md: no link from README.md leads here"]);

    let vague = "Nobody waits.\n`nobody_waits` is a test.\n```\nwhoever\n```\nThe client waits.\n";
    let found = vague_actors(&[SourceFile::planted("docs/x.md", vague)]);
    assert!(found.len() == 1 && found[0].contains("nobody"), "{found:?}");

    let manifest = |path| SourceFile::planted(path, "[package]\n");
    let map = "`engines/kv-server` serves **engines/kv**";
    none(&unnamed_crates(map, &[manifest("engines/kv/Cargo.toml")]));
    assert_eq!(unnamed_crates(map, &[manifest("engines/kv-client/Cargo.toml")]).len(), 1);
    none(&unnamed_crates(map, &[SourceFile::planted("Cargo.toml", "[workspace]\n")]));
}

#[test]
fn anchors_are_spelt_as_in_links_and_not_read_from_code() {
    let text = "# The node\n```sh\n# no heading\n```\n## 4. A door: `x`\n## Tests\n### Tests\n";
    let found: Vec<String> = anchors(text).into_iter().collect();
    assert_eq!(found, ["4-a-door-x", "tests", "tests-1", "the-node"]);
}

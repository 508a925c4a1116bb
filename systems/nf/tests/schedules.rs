//! Golden schedules: the interval and depth of every library element and of every instance of the
//! graphs to begin with, with every pass on, with none, and without each pass where that differs.
//!
//! A change of the scheduler or of a pass shows here as a difference. `BEELINE_BLESS=1 cargo test -p
//! beeline-nf --test schedules` writes the file anew; the difference belongs into the commit.

#![allow(clippy::unwrap_used, clippy::panic)]

use std::fmt::Write as _;

use beeline_ir::library;
use beeline_ir::tree::Element;
use beeline_nf::functions::templates;
use beeline_nf::load::compile;
use beeline_passes::{Options, hardware};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/schedules.golden");

fn line(text: &mut String, name: &str, element: &Element) {
    let of = |options: &Options| {
        let report = match hardware(element, options) {
            Ok(made) => made.report,
            Err(error) => return format!("refused: {}", error.reason),
        };
        let limit = report.limit.map_or_else(String::new, |limit| {
            format!(", {} {} keeps {} out", limit.kind, limit.name, report.interval - 1)
        });
        format!("II {} depth {}{limit}", report.interval, report.depth)
    };
    let (best, naive) = (of(&Options::default()), of(&Options::naive()));
    write!(text, "{name}: {best}; naive {naive}").unwrap();
    let on = Options::default;
    for (pass, without) in [
        ("placement", Options { placement: false, ..on() }),
        ("scatter", Options { scatter: false, ..on() }),
        ("unroll", Options { unroll: false, ..on() }),
        ("clean", Options { clean: false, ..on() }),
        ("merge", Options { merge: false, ..on() }),
        ("delay", Options { delay: false, ..on() }),
    ] {
        let found = of(&without);
        if found != best {
            write!(text, "; without {pass} {found}").unwrap();
        }
    }
    text.push('\n');
}

#[test]
fn every_schedule_is_the_one_in_the_golden_file() {
    let mut text = String::new();
    for (name, source) in library::files() {
        for element in compile(name, source.to_owned(), None).compiled.elements {
            line(&mut text, &element.name, &element);
        }
    }
    for (name, _) in templates::names() {
        let source = templates::text(name).unwrap().to_owned();
        for node in &compile(name, source, None).compiled.graph.nodes {
            line(
                &mut text,
                &format!("{name} {} ({})", node.name, node.element.name),
                &node.element,
            );
        }
    }
    if std::env::var_os("BEELINE_BLESS").is_some() {
        std::fs::write(FILE, &text).unwrap();
        return;
    }
    let golden = std::fs::read_to_string(FILE).unwrap();
    let differing: Vec<(&str, &str)> =
        golden.lines().zip(text.lines()).filter(|(old, new)| old != new).collect();
    assert!(differing.is_empty(), "golden, and now: {differing:#?}");
    assert_eq!(golden.lines().count(), text.lines().count());
}

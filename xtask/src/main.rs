//! check, deep, bench, docs.
fn main() {}

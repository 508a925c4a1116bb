//! `[documents]`: the door for MongoDB clients.

use super::values::{Door, Number, Span};
use super::{Rules, knobs};

knobs! {
    /// The document store.
    pub struct DocumentsConfig, table "documents" {
        address: Door = "127.0.0.1:27017", "Where MongoDB clients connect; off closes the door, port 0 picks a free one.";
        max_connections: Number = "10000", "MongoDB connections served at once.";
        max_cursors: Number = "100000", "Cursors open at once.";
        cursor_timeout: Span = "10m", "A cursor unused for this long is closed, unless its client asked that it is not.";
    }
}

impl DocumentsConfig {
    /// The rules over several values.
    pub fn check(&self, rules: &mut Rules<'_>) {
        rules.rule(
            "documents-max-connections",
            self.max_connections.0 > 0,
            "0 would serve no client; use --documents-address off to close the door",
        );
        rules.rule(
            "documents-max-cursors",
            self.max_cursors.0 > 0,
            "0 would answer no query; choose 1 or more",
        );
        rules.rule(
            "documents-cursor-timeout",
            !self.cursor_timeout.0.is_zero(),
            "0 would close cursors at once; choose a second or more",
        );
    }
}

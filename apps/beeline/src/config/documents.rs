//! `[documents]`: the door for MongoDB clients.

use super::values::{Door, Number, Size, Span, Switch};
use super::{Knob, Rules, knobs};

knobs! {
    /// The document store.
    pub struct DocumentsConfig, table "documents" {
        address: Door = "127.0.0.1:27017", "Where MongoDB clients connect; off closes the door, port 0 picks a free one.";
        max_connections: Number = "10000", "MongoDB connections served at once.";
        max_cursors: Number = "100000", "Cursors open at once.";
        replica_set: Name = "rs0", "Name of the replica set of which the node says it is the only member, so that drivers offer retryable writes and change streams; off: it stands alone.";
        oplog_size: Size = "64MiB", "Bytes of log each database keeps for change streams; 0 keeps no log.";
        authentication: Switch = "off", "Clients must show who they are (SCRAM-SHA-256); while there is no user, createUser works from this host without.";
        cursor_timeout: Span = "10m", "A cursor unused for this long is closed, unless its client asked that it is not.";
        transaction_lifetime: Span = "1m", "A transaction that is not committed for this long is ended without a trace.";
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
        rules.rule(
            "documents-transaction-lifetime",
            !self.transaction_lifetime.0.is_zero(),
            "0 would end transactions at once; choose a second or more",
        );
    }
}

/// A name, or off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name(pub Option<String>);

impl Knob for Name {
    const PLACEHOLDER: &'static str = "NAME";

    fn parse(text: &str) -> Result<Self, String> {
        let plain = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
        match text {
            "off" => Ok(Self(None)),
            name if !name.is_empty() && name.len() <= 64 && name.chars().all(plain) => {
                Ok(Self(Some(name.to_owned())))
            }
            _ => Err(format!("{text:?} is no name; write letters, digits, - and _, or off")),
        }
    }

    fn show(&self) -> String {
        self.0.clone().unwrap_or_else(|| "off".to_owned())
    }
}

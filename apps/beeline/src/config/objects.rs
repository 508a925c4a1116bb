//! `[objects]`: the object store of the node.

use std::path::PathBuf;

use super::values::{Auto, Number, Size};
use super::{Knob, Rules, knobs};

knobs! {
    /// The object store.
    pub struct ObjectsConfig, table "objects" {
        socket: Auto<PathBuf> = "auto", "Unix socket that clients connect to, at most 107 bytes; auto is objects.sock in the data directory.";
        socket_mode: Mode = "600", "Rights on the socket, octal as in chmod: 600 for this user alone, 660 for its group too.";
        memory: Auto<Size> = "auto", "Most bytes of memory objects may take; auto is a quarter of this machine's.";
        disk: Auto<Size> = "auto", "Most bytes on disk for objects that memory has no room for; 0 drops the least recently used instead, auto is half of what is free in the data directory, at most four times the memory.";
        spin_us: Number = "20", "Microseconds the store polls on after a request before it sleeps, 0 to 10000; more costs idle CPU.";
        max_clients: Number = "10000", "Processes connected at once.";
    }
}

impl ObjectsConfig {
    /// The rules over several values.
    pub fn check(&self, rules: &mut Rules<'_>) {
        let memory = match self.memory {
            Auto::Set(Size(bytes)) => bytes,
            Auto::Detect => u64::MAX,
        };
        rules.rule("objects-memory", memory >= 1 << 20, "less than 1MiB holds no object; raise it");
        rules.rule("objects-spin-us", self.spin_us.0 <= 10_000, "choose 10000 or less");
        rules.rule(
            "objects-max-clients",
            self.max_clients.0 > 0,
            "0 would serve no client; use --without objects",
        );
        rules.rule(
            "objects-socket-mode",
            self.socket_mode.0 & 0o600 == 0o600,
            "the node's own user needs reading and writing; choose 600, 660 or 666",
        );
    }
}

/// Rights on a file, octal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode(pub u32);

impl Knob for Mode {
    const PLACEHOLDER: &'static str = "MODE";

    fn parse(text: &str) -> Result<Self, String> {
        match u32::from_str_radix(text.trim_start_matches('0'), 8) {
            Ok(mode) if mode <= 0o777 => Ok(Self(mode)),
            _ => Err(format!("{text:?} is no mode; write octal digits, as in 600 or 660")),
        }
    }

    fn show(&self) -> String {
        format!("{:o}", self.0)
    }
}

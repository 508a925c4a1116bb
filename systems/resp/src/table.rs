//! The command table: what is known about each command before it runs.
//!
//! Names, arities, flags, key positions and categories are those Redis reports in COMMAND, so that
//! clients that read them (cluster-aware clients, redis-cli's hints) behave as with Redis.
//! A name is found by one multiplication and, nearly always, one comparison.

mod direct;
mod entries;

use crate::args::Args;
use crate::commands::{DataHandler, SessionHandler};

pub use entries::COMMANDS;

/// What COMMAND reports about a command, as bits in [`Command::flags`].
pub mod flag {
    /// Changes data.
    pub const WRITE: u32 = 1;
    /// Reads data and changes none.
    pub const READONLY: u32 = 1 << 1;
    /// Refused where memory is exhausted.
    pub const DENYOOM: u32 = 1 << 2;
    /// Administration.
    pub const ADMIN: u32 = 1 << 3;
    /// Not for scripts.
    pub const NOSCRIPT: u32 = 1 << 4;
    /// Allowed while data is loaded.
    pub const LOADING: u32 = 1 << 5;
    /// Allowed on stale replicas.
    pub const STALE: u32 = 1 << 6;
    /// Kept out of the slow log.
    pub const SKIP_SLOWLOG: u32 = 1 << 7;
    /// Takes constant or logarithmic time.
    pub const FAST: u32 = 1 << 8;
    /// Allowed before authentication.
    pub const NO_AUTH: u32 = 1 << 9;
    /// Refused while data is loaded in the background.
    pub const NO_ASYNC_LOADING: u32 = 1 << 10;
    /// Refused inside a transaction.
    pub const NO_MULTI: u32 = 1 << 11;
    /// Allowed while a script holds the node.
    pub const ALLOW_BUSY: u32 = 1 << 12;
    /// Nothing.
    pub const NO_FLAGS: u32 = 0;

    /// Names in the order COMMAND lists them.
    pub const NAMES: [&str; 13] = [
        "write",
        "readonly",
        "denyoom",
        "admin",
        "noscript",
        "loading",
        "stale",
        "skip_slowlog",
        "fast",
        "no_auth",
        "no_async_loading",
        "no_multi",
        "allow_busy",
    ];
}

/// What a command needs of the keyspace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The session alone.
    Connection,
    /// The node's services: configuration, statistics, snapshots.
    Node,
    /// The keys among its arguments.
    Keys,
    /// Keys among its arguments, in two databases: COPY and MOVE.
    Databases,
    /// The keys among its arguments, and the session.
    Watch,
    /// One stretch of the keyspace, which the cursor names.
    Scan,
    /// All keys.
    Everything,
    /// MULTI, EXEC, DISCARD: what the queue needs.
    Transaction,
    /// Another service of the node, which answers later; the keyspace is left alone.
    Elsewhere,
}

/// Who runs a command.
#[derive(Clone, Copy, Debug)]
pub enum Handler {
    /// Needs no session: can run at another shard.
    Data(DataHandler),
    /// Reads or changes the session.
    Session(SessionHandler),
    /// A container: only its subcommands run.
    None,
}

/// How a command finds its keys, as COMMAND shows it.
#[derive(Clone, Copy, Debug)]
pub struct KeySpec {
    /// A remark.
    pub notes: &'static str,
    /// How the keys are used.
    pub flags: &'static [&'static str],
    /// Index of the first key among the arguments.
    pub first: i64,
    /// Index of the last key, relative to the first; negative counts from the end.
    pub last: i64,
    /// Arguments from one key to the next.
    pub step: i64,
    /// For a negative `last`: search only so large a part of the arguments (0 = all).
    pub limit: i64,
}

/// One command or subcommand.
#[derive(Debug)]
pub struct Command {
    /// Name in lower case; a subcommand's is `container|name`.
    pub name: &'static str,
    /// Number of arguments, the name included; negative: at least so many.
    pub arity: i64,
    /// Bits of [`flag`].
    pub flags: u32,
    /// First key, last key (negative counts from the end) and step; all 0 without keys.
    pub keys: (i64, i64, i64),
    /// Categories of access control.
    pub categories: &'static [&'static str],
    /// Hints for clients.
    pub tips: &'static [&'static str],
    /// Where the keys are.
    pub key_specs: &'static [KeySpec],
    /// What it needs.
    pub scope: Scope,
    /// Who runs it.
    pub handler: Handler,
    /// Subcommands of a container.
    pub subcommands: &'static [Command],
    /// Group of commands in the documentation.
    pub group: &'static str,
    /// The Redis version that brought it.
    pub since: &'static str,
    /// One line.
    pub summary: &'static str,
}

/// A command with nothing but what every command has; the methods add the rest.
const fn command(
    name: &'static str,
    arity: i64,
    flags: u32,
    categories: &'static [&'static str],
) -> Command {
    Command {
        name,
        arity,
        flags,
        keys: (0, 0, 0),
        categories,
        tips: &[],
        key_specs: &[],
        scope: Scope::Connection,
        handler: Handler::None,
        subcommands: &[],
        group: "",
        since: "",
        summary: "",
    }
}

/// A key specification over the whole of the arguments.
const fn key_spec(
    flags: &'static [&'static str],
    first: i64,
    last: i64,
    step: i64,
    notes: &'static str,
) -> KeySpec {
    KeySpec { notes, flags, first, last, step, limit: 0 }
}

impl Command {
    const fn keys(mut self, keys: (i64, i64, i64), specs: &'static [KeySpec]) -> Self {
        self.keys = keys;
        self.key_specs = specs;
        self
    }

    const fn tips(mut self, tips: &'static [&'static str]) -> Self {
        self.tips = tips;
        self
    }

    const fn data(mut self, scope: Scope, handler: DataHandler) -> Self {
        self.scope = scope;
        self.handler = Handler::Data(handler);
        self
    }

    const fn session(mut self, scope: Scope, handler: SessionHandler) -> Self {
        self.scope = scope;
        self.handler = Handler::Session(handler);
        self
    }

    const fn subcommands(mut self, subcommands: &'static [Self]) -> Self {
        self.subcommands = subcommands;
        self
    }

    const fn docs(
        mut self,
        group: &'static str,
        since: &'static str,
        summary: &'static str,
    ) -> Self {
        self.group = group;
        self.since = since;
        self.summary = summary;
        self
    }

    /// Whether any of the bits is set.
    #[inline]
    #[must_use]
    pub fn has(&self, flags: u32) -> bool {
        self.flags & flags != 0
    }

    /// Whether a request of `count` arguments has the right number of them.
    #[inline]
    #[must_use]
    pub fn takes(&self, count: usize) -> bool {
        let count = i64::try_from(count).unwrap_or(i64::MAX);
        if self.arity >= 0 { count == self.arity } else { count >= -self.arity }
    }

    /// The part of the name behind the container's.
    #[must_use]
    pub fn short_name(&self) -> &'static str {
        self.name.split_once('|').map_or(self.name, |(_, name)| name)
    }

    /// Indexes of the keys in a request of `count` arguments.
    #[inline]
    pub fn key_positions(&self, count: usize) -> impl Iterator<Item = usize> + use<> {
        let (first, last, step) = self.keys;
        let first = usize::try_from(first).unwrap_or(0);
        let end = if first == 0 {
            0
        } else if last < 0 {
            count.saturating_sub(usize::try_from(-last).unwrap_or(0)) + 1
        } else {
            usize::try_from(last).unwrap_or(0).min(count.saturating_sub(1)) + 1
        };
        (first..end).step_by(usize::try_from(step).unwrap_or(1).max(1))
    }

    fn subcommand(&self, name: &[u8]) -> Option<&'static Command> {
        self.subcommands
            .iter()
            .find(|command| command.short_name().as_bytes().eq_ignore_ascii_case(name))
    }
}

/// Longest command name in bytes.
const NAME_BYTES: usize = 15;
const SLOTS: usize = 256;
const EMPTY: u8 = u8::MAX;

/// A name in lower case, padded with zeros, its length on top; `None` where it is too long to be a command's.
#[inline]
fn folded(name: &[u8]) -> Option<u128> {
    if name.len() > NAME_BYTES {
        return None;
    }
    let mut bytes = [0; 16];
    bytes[..name.len()].copy_from_slice(name);
    bytes[NAME_BYTES] = name.len() as u8;
    Some(fold_case(u128::from_le_bytes(bytes)))
}

/// Sets bit 5 of every byte in `A..=Z`, sixteen bytes at a time.
#[inline]
const fn fold_case(word: u128) -> u128 {
    const ONES: u128 = u128::MAX / 255;
    let low = word & (ONES * 0x7f);
    // The top bit of each byte: set where the low seven bits are at least 'A', then above 'Z'.
    let at_least_a = low + ONES * (0x80 - b'A' as u128);
    let above_z = low + ONES * (0x7f - b'Z' as u128);
    let upper = at_least_a & !above_z & !word & (ONES * 0x80);
    word | upper >> 2
}

const fn slot_of(name: u128) -> usize {
    let mixed = (name as u64 ^ (name >> 64) as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 56) as usize
}

struct Index {
    slots: [u8; SLOTS],
    names: [u128; COMMANDS.len()],
}

/// Open addressing over the folded names, laid out by the compiler.
static INDEX: Index = {
    assert!(COMMANDS.len() < SLOTS / 2);
    let mut index = Index { slots: [EMPTY; SLOTS], names: [0; COMMANDS.len()] };
    let mut at = 0;
    while at < COMMANDS.len() {
        let name = COMMANDS[at].name.as_bytes();
        assert!(name.len() <= NAME_BYTES);
        let mut folded = name.len() as u128;
        folded <<= 8 * (NAME_BYTES - name.len());
        let mut byte = name.len();
        while byte > 0 {
            byte -= 1;
            folded = folded << 8 | name[byte] as u128;
        }
        assert!(folded == fold_case(folded), "names in the table are in lower case");
        index.names[at] = folded;
        let mut slot = slot_of(folded);
        while index.slots[slot] != EMPTY {
            slot = (slot + 1) % SLOTS;
        }
        index.slots[slot] = at as u8;
        at += 1;
    }
    index
};

/// The command called `name`, in any case.
#[inline]
#[must_use]
pub fn find(name: &[u8]) -> Option<&'static Command> {
    let folded = folded(name)?;
    let mut slot = slot_of(folded);
    loop {
        let at = INDEX.slots[slot];
        if at == EMPTY {
            return None;
        }
        if INDEX.names[usize::from(at)] == folded {
            return Some(&COMMANDS[usize::from(at)]);
        }
        slot = (slot + 1) % SLOTS;
    }
}

/// The command or subcommand a request names.
#[derive(Clone, Copy, Debug)]
pub enum Found {
    /// It exists.
    Command(&'static Command),
    /// The container exists, the subcommand does not.
    UnknownSubcommand(&'static Command),
    /// Nothing of that name.
    Unknown,
}

/// Finds the command of a request, subcommands included.
#[inline]
#[must_use]
pub fn resolve(args: Args<'_>) -> Found {
    match find(args.get(0)) {
        None => Found::Unknown,
        Some(command) if command.subcommands.is_empty() || args.len() < 2 => {
            Found::Command(command)
        }
        Some(container) => match container.subcommand(args.get(1)) {
            Some(command) => Found::Command(command),
            None => Found::UnknownSubcommand(container),
        },
    }
}

/// The command of a name written as `get` or `config|get`, as COMMAND INFO takes it.
#[must_use]
pub fn find_full(name: &[u8]) -> Option<&'static Command> {
    match name.iter().position(|&byte| byte == b'|') {
        None => find(name),
        Some(at) => find(&name[..at])?.subcommand(&name[at + 1..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_is_found_in_any_case_and_nothing_else_is() {
        for command in &COMMANDS {
            for name in [command.name.to_owned(), command.name.to_ascii_uppercase()] {
                assert!(std::ptr::eq(find(name.as_bytes()).unwrap(), command), "{name}");
            }
            for sub in command.subcommands {
                let full = sub.name.to_ascii_uppercase();
                assert!(std::ptr::eq(find_full(full.as_bytes()).unwrap(), sub));
            }
        }
        for name in
            ["", "ge", "gett", "get\0", "lrange", "g\x05t", "[et", "a-name-much-too-long-for-one"]
        {
            assert!(find(name.as_bytes()).is_none(), "{name:?}");
        }
    }

    #[test]
    fn case_folding_touches_letters_only() {
        for byte in 0..=255_u8 {
            let word = u128::from_le_bytes([byte; 16]);
            let expected = u128::from_le_bytes([byte.to_ascii_lowercase(); 16]);
            assert_eq!(fold_case(word), expected, "{byte}");
        }
    }

    #[test]
    fn key_positions_follow_first_last_and_step() {
        let positions = |name: &str, count| {
            find(name.as_bytes()).unwrap().key_positions(count).collect::<Vec<_>>()
        };
        assert_eq!(positions("get", 2), [1]);
        assert_eq!(positions("mget", 4), [1, 2, 3]);
        assert_eq!(positions("mset", 5), [1, 3]);
        assert_eq!(positions("rename", 3), [1, 2]);
        assert_eq!(positions("copy", 6), [1, 2]);
        assert!(positions("ping", 2).is_empty());
    }
}

//! The command table: what is known about each command before it runs.
//!
//! Names, arities, flags, key positions and categories are those Redis reports in COMMAND, so that
//! clients that read them (cluster-aware clients, redis-cli's hints) behave as with Redis.
//! A name is found by one multiplication and, nearly always, one comparison.

mod direct;
mod entries;

use crate::args::Args;
use crate::commands::{DataHandler, SessionHandler};
use crate::number::parse_i64;

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
    /// Its arguments alone tell which of them are keys: a count stands before them.
    pub const MOVABLE_KEYS: u32 = 1 << 12;
    /// Allowed while a script holds the node.
    pub const ALLOW_BUSY: u32 = 1 << 13;
    /// Nothing.
    pub const NO_FLAGS: u32 = 0;

    /// Names in the order COMMAND lists them.
    pub const NAMES: [&str; 14] = [
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
        "movablekeys",
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
    /// Index among the arguments from which on the keys are found.
    pub begin: i64,
    /// Where they are from there.
    pub find: FindKeys,
}

/// Where keys are, from the argument at which a [`KeySpec`] begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FindKeys {
    /// From there to a last key.
    Range {
        /// Index of the last key, relative to the first; negative counts from the end.
        last: i64,
        /// Arguments from one key to the next.
        step: i64,
        /// For a negative `last`: search only so large a part of the arguments (0 = all).
        limit: i64,
    },
    /// As many as the argument there says, which is the number of keys; the first one is the next argument.
    Counted {
        /// Arguments from one key to the next.
        step: i64,
    },
}

impl KeySpec {
    /// Indexes of its keys, from the first on, and the step; `None` where a count is no number of keys that
    /// the arguments can hold: the command refuses such a request before it looks at a key.
    fn stretch(&self, args: Args<'_>) -> Option<(std::ops::Range<usize>, usize)> {
        let begin = usize::try_from(self.begin).ok()?;
        match self.find {
            FindKeys::Range { last, step, .. } => {
                let last = if last < 0 {
                    args.len().checked_sub(usize::try_from(-last).ok()?)?
                } else {
                    begin + usize::try_from(last).ok()?
                };
                (last < args.len()).then_some((begin..last + 1, usize::try_from(step).ok()?.max(1)))
            }
            FindKeys::Counted { step } => {
                let step = usize::try_from(step).ok()?.max(1);
                let keys = counted_keys(args, begin, step)?;
                Some((begin + 1..begin + 1 + keys * step, step))
            }
        }
    }
}

/// The number of keys that argument `at` tells, each of which takes `step` arguments behind it; `None` where
/// it is not such a number or is more than there are.
#[must_use]
pub fn counted_keys(args: Args<'_>, at: usize, step: usize) -> Option<usize> {
    let keys = usize::try_from(parse_i64(args.get(at))?).ok().filter(|keys| *keys > 0)?;
    let needed = keys.checked_mul(step)?.checked_add(at + 1)?;
    (needed <= args.len()).then_some(keys)
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
    /// First key, last key (negative counts from the end) and step; all 0 without keys, and where keys are
    /// counted: there the specifications alone say where they are.
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
    KeySpec { notes, flags, begin: first, find: FindKeys::Range { last, step, limit: 0 } }
}

/// A specification of keys behind their number, which is argument `at`.
const fn counted_spec(flags: &'static [&'static str], at: i64, step: i64) -> KeySpec {
    KeySpec { notes: "", flags, begin: at, find: FindKeys::Counted { step } }
}

impl Command {
    const fn keys(mut self, keys: (i64, i64, i64), specs: &'static [KeySpec]) -> Self {
        self.keys = keys;
        self.key_specs = specs;
        self
    }

    /// Keys of which some stand behind their number.
    const fn counted(mut self, specs: &'static [KeySpec]) -> Self {
        self.flags |= flag::MOVABLE_KEYS;
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

    /// Whether it has keys at all.
    #[inline]
    #[must_use]
    pub fn has_keys(&self) -> bool {
        self.keys.0 != 0 || self.has(flag::MOVABLE_KEYS)
    }

    /// First key, last key and step as COMMAND shows them: of keys that are counted, those that are not.
    #[must_use]
    pub fn shown_keys(&self) -> (i64, i64, i64) {
        let ranges = self.key_specs.iter().filter_map(|spec| match spec.find {
            FindKeys::Range { last, step, .. } if self.has(flag::MOVABLE_KEYS) => {
                Some((spec.begin, if last < 0 { last } else { spec.begin + last }, step))
            }
            _ => None,
        });
        ranges.min().unwrap_or(self.keys)
    }

    /// Indexes of the keys among the arguments of a request, each once for each way in which it is used. None
    /// where a count of keys is wrong.
    #[inline]
    pub fn key_positions<'a>(&self, args: Args<'a>) -> impl Iterator<Item = usize> + use<'a> {
        let counted: &'static [KeySpec] =
            if self.has(flag::MOVABLE_KEYS) { self.key_specs } else { &[] };
        // A request whose count is wrong fails as a whole.
        let whole = counted.iter().all(|spec| spec.stretch(args).is_some());
        let counted = if whole { counted } else { &[] };
        let counted = counted.iter().filter_map(move |spec| spec.stretch(args));
        self.ranged_positions(args.len())
            .chain(counted.flat_map(|(stretch, step)| stretch.step_by(step)))
    }

    #[inline]
    fn ranged_positions(&self, count: usize) -> impl Iterator<Item = usize> + use<> {
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
    use super::flag::{DENYOOM, WRITE};
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
        assert_eq!(positions(named("get"), "get k"), [1]);
        assert_eq!(positions(named("mget"), "mget a b c"), [1, 2, 3]);
        assert_eq!(positions(named("mset"), "mset a 1 b 2"), [1, 3]);
        assert_eq!(positions(named("rename"), "rename a b"), [1, 2]);
        assert_eq!(positions(named("copy"), "copy a b db 1 replace"), [1, 2]);
        assert!(positions(named("ping"), "ping x").is_empty());
    }

    fn named(name: &str) -> &'static Command {
        find(name.as_bytes()).unwrap()
    }

    fn positions(command: &'static Command, request: &str) -> Vec<usize> {
        let mut requests = crate::args::ArgsBuffer::new();
        let words: Vec<&[u8]> = request.split(' ').map(str::as_bytes).collect();
        assert!(requests.push_words(&words));
        command.key_positions(requests.get(0)).collect()
    }

    #[test]
    fn keys_are_found_behind_their_number() {
        let msetex = named("msetex");
        assert_eq!(positions(msetex, "msetex 2 a 1 b 2 EX 10"), [2, 4]);
        assert_eq!(positions(msetex, "msetex 1 a 1 b 2"), [2]);
        assert_eq!(msetex.shown_keys(), (0, 0, 0));
        for wrong in ["0", "-1", "x", "", "3", "1.0", "9223372036854775807", "99999999999999999999"]
        {
            let request = format!("msetex {wrong} a 1 b 2");
            assert!(positions(msetex, &request).is_empty(), "{request}");
        }
    }

    #[test]
    fn counted_keys_stand_beside_others() {
        // The shapes of ZUNIONSTORE, of EVAL, and of LMPOP with a time before the number.
        const TARGET: KeySpec = key_spec(&["OW"], 1, 0, 1, "");
        const SOURCES: KeySpec = counted_spec(&["RO"], 2, 1);
        static STORE: Command =
            command("store", -4, WRITE | DENYOOM, &[]).counted(&[TARGET, SOURCES]);
        static EVAL: Command = command("eval", -3, 0, &[]).counted(&[SOURCES]);
        static POP: Command = command("pop", -5, WRITE, &[]).counted(&[SOURCES]);
        assert_eq!(positions(&STORE, "store to 2 a b WEIGHTS 1 2"), [1, 3, 4]);
        assert_eq!(STORE.shown_keys(), (1, 1, 1));
        // Such a request is refused as a whole.
        assert!(positions(&STORE, "store to 3 a b").is_empty());
        assert_eq!(positions(&EVAL, "eval return 1 a b c"), [3]);
        assert!(positions(&EVAL, "eval return 0 x").is_empty());
        assert_eq!(positions(&POP, "pop 0.5 2 a b LEFT"), [3, 4]);
        for command in [&STORE, &EVAL, &POP] {
            assert!(command.has_keys() && command.has(flag::MOVABLE_KEYS));
        }
    }
}

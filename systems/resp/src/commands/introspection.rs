//! COMMAND, OBJECT and MEMORY: what the node knows about commands and values.

use super::{Call, CommandResult, KIND_STRING};
use crate::error::CommandError;
use crate::glob;
use crate::number::parse_i64;
use crate::output::Output;
use crate::table::{self, COMMANDS, Command, FindKeys, KeySpec, flag};

/// Replies with a help text in Redis' form.
pub(super) fn help(
    call: &mut Call<'_, '_>,
    container: &str,
    subcommands: &[(&str, &str)],
) -> CommandResult {
    let out = &mut *call.out;
    out.array(3 + 2 * subcommands.len());
    out.simple(&format!("{container} <subcommand> [<arg> [value] [opt] ...]. Subcommands are:"));
    for (usage, meaning) in subcommands {
        out.simple(usage);
        out.simple(&format!("    {meaning}"));
    }
    out.simple("HELP");
    out.simple("    Print this help.");
    Ok(())
}

fn statuses<'a>(out: &mut Output, words: impl ExactSizeIterator<Item = &'a str>) {
    out.set(words.len());
    for word in words {
        out.simple(word);
    }
}

fn write_key_spec(out: &mut Output, spec: &KeySpec) {
    let noted = !spec.notes.is_empty();
    out.map(3 + usize::from(noted));
    if noted {
        out.bulk(b"notes");
        out.bulk(spec.notes.as_bytes());
    }
    out.bulk(b"flags");
    statuses(out, spec.flags.iter().copied());
    out.bulk(b"begin_search");
    out.map(2);
    out.bulk(b"type");
    out.bulk(b"index");
    out.bulk(b"spec");
    out.map(1);
    out.bulk(b"index");
    out.integer(spec.begin);
    let (kind, told) = match spec.find {
        FindKeys::Range { last, step, limit } => {
            ("range", [("lastkey", last), ("keystep", step), ("limit", limit)])
        }
        FindKeys::Counted { step } => {
            ("keynum", [("keynumidx", 0), ("firstkey", 1), ("keystep", step)])
        }
    };
    out.bulk(b"find_keys");
    out.map(2);
    out.bulk(b"type");
    out.bulk(kind.as_bytes());
    out.bulk(b"spec");
    out.map(told.len());
    for (name, value) in told {
        out.bulk(name.as_bytes());
        out.integer(value);
    }
}

fn write_command(out: &mut Output, command: &Command) {
    out.array(10);
    out.bulk(command.name.as_bytes());
    out.integer(command.arity);
    let flags: Vec<&str> = flag::NAMES
        .iter()
        .enumerate()
        .filter(|(bit, _)| command.has(1 << bit))
        .map(|(_, &name)| name)
        .collect();
    statuses(out, flags.into_iter());
    let (first, last, step) = command.shown_keys();
    out.integer(first);
    out.integer(last);
    out.integer(step);
    statuses(out, command.categories.iter().copied());
    out.set(command.tips.len());
    for tip in command.tips {
        out.bulk(tip.as_bytes());
    }
    out.set(command.key_specs.len());
    for spec in command.key_specs {
        write_key_spec(out, spec);
    }
    out.set(command.subcommands.len());
    for subcommand in command.subcommands {
        write_command(out, subcommand);
    }
}

pub fn command(call: &mut Call<'_, '_>) -> CommandResult {
    call.out.array(COMMANDS.len());
    for command in &COMMANDS {
        write_command(call.out, command);
    }
    Ok(())
}

pub fn command_count(call: &mut Call<'_, '_>) -> CommandResult {
    call.out.count(COMMANDS.len());
    Ok(())
}

pub fn command_info(call: &mut Call<'_, '_>) -> CommandResult {
    if call.args.len() == 2 {
        return command(call);
    }
    call.out.array(call.args.len() - 2);
    for name in call.args.from(2) {
        match table::find_full(name) {
            Some(command) => write_command(call.out, command),
            None => call.out.null_array(),
        }
    }
    Ok(())
}

fn write_docs(out: &mut Output, command: &Command) {
    out.bulk(command.name.as_bytes());
    let contains = !command.subcommands.is_empty();
    out.map(3 + usize::from(contains));
    for (field, value) in
        [("summary", command.summary), ("since", command.since), ("group", command.group)]
    {
        out.bulk(field.as_bytes());
        out.bulk(value.as_bytes());
    }
    if contains {
        out.bulk(b"subcommands");
        out.map(command.subcommands.len());
        for subcommand in command.subcommands {
            write_docs(out, subcommand);
        }
    }
}

pub fn command_docs(call: &mut Call<'_, '_>) -> CommandResult {
    let start = call.out.len();
    let mut documented = 0;
    let mut write = |command: &Command| {
        write_docs(call.out, command);
        documented += 1;
    };
    if call.args.len() == 2 {
        COMMANDS.iter().for_each(&mut write);
    } else {
        call.args.from(2).filter_map(table::find_full).for_each(write);
    }
    call.out.map_from(start, documented);
    Ok(())
}

pub fn command_list(call: &mut Call<'_, '_>) -> CommandResult {
    let start = call.out.len();
    let wanted: Box<dyn Fn(&Command) -> bool> = match call.args.len() {
        2 => Box::new(|_| true),
        5 if call.args.is(2, "filterby") => {
            let value = call.arg(4);
            if call.args.is(3, "pattern") {
                Box::new(move |command| glob::matches(value, command.name.as_bytes(), true))
            } else if call.args.is(3, "aclcat") {
                Box::new(move |command| {
                    let same = |name: &&str| name.as_bytes()[1..].eq_ignore_ascii_case(value);
                    command.categories.iter().any(same)
                })
            } else if call.args.is(3, "module") {
                Box::new(|_| false)
            } else {
                return Err(CommandError::Syntax);
            }
        }
        _ => return Err(CommandError::Syntax),
    };
    let mut listed = 0;
    for command in
        COMMANDS.iter().flat_map(|command| std::iter::once(command).chain(command.subcommands))
    {
        if wanted(command) {
            call.out.bulk(command.name.as_bytes());
            listed += 1;
        }
    }
    call.out.array_from(start, listed);
    Ok(())
}

pub fn command_getkeys(call: &mut Call<'_, '_>) -> CommandResult {
    let inner = call.args.skip(2);
    let table::Found::Command(command) = table::resolve(inner) else {
        return Err(CommandError::Line("ERR Invalid command specified"));
    };
    if !command.has_keys() {
        return Err(CommandError::Line("ERR The command has no key arguments"));
    }
    if !command.takes(inner.len()) {
        return Err(CommandError::Line("ERR Invalid number of arguments specified for command"));
    }
    let start = call.out.len();
    let mut found = 0;
    for position in command.key_positions(inner) {
        call.out.bulk(inner.get(position));
        found += 1;
    }
    if found == 0 {
        return Err(CommandError::Line("ERR Invalid arguments specified for command"));
    }
    call.out.array_from(start, found);
    Ok(())
}

pub fn command_help(call: &mut Call<'_, '_>) -> CommandResult {
    help(
        call,
        "COMMAND",
        &[
            ("(no subcommand)", "Describe every command."),
            ("COUNT", "Return the number of commands."),
            ("DOCS [<command> ...]", "Document commands."),
            ("GETKEYS <full command>", "Return the keys of a command."),
            ("INFO [<command> ...]", "Describe commands."),
            ("LIST [FILTERBY (MODULE|ACLCAT|PATTERN) <value>]", "Return the names of commands."),
        ],
    )
}

pub fn object_encoding(call: &mut Call<'_, '_>) -> CommandResult {
    /// Longest string that Redis keeps inside its object.
    const EMBEDDED_BYTES: u32 = 44;
    let Some(entry) = call.peek(call.arg(2))? else {
        call.out.null();
        return Ok(());
    };
    let name = if entry.kind != KIND_STRING {
        hash_encoding(call, &entry)?
    } else if entry.value_length <= 20 && call.store.with_value(&entry, parse_i64)?.is_some() {
        "int"
    } else if entry.value_length <= EMBEDDED_BYTES {
        "embstr"
    } else {
        "raw"
    };
    call.out.bulk(name.as_bytes());
    Ok(())
}

/// What Redis would hold a hash as that was always as it is now.
fn hash_encoding(
    call: &mut Call<'_, '_>,
    entry: &beeline_kv::EntryRef,
) -> Result<&'static str, CommandError> {
    const FIELDS: u64 = 128;
    const BYTES: usize = 64;
    let row = call.store.row_at(call.database, entry)?;
    let mut small = row.length <= FIELDS;
    if small {
        let key = call.arg(2);
        let all = (0, usize::MAX);
        call.store.visit_row(call.database, key, &row, all, |field, value| {
            small &= field.len().max(value.len()) <= BYTES;
        })?;
    }
    Ok(if small { "listpack" } else { "hashtable" })
}

pub fn object_refcount(call: &mut Call<'_, '_>) -> CommandResult {
    match call.peek(call.arg(2))? {
        Some(_) => call.out.integer(1),
        None => call.out.null(),
    }
    Ok(())
}

pub fn object_idletime(call: &mut Call<'_, '_>) -> CommandResult {
    match call.store.idle_seconds(call.database, call.arg(2))? {
        Some(seconds) => call.out.integer(i64::from(seconds)),
        None => call.out.null(),
    }
    Ok(())
}

pub fn object_freq(call: &mut Call<'_, '_>) -> CommandResult {
    if call.peek(call.arg(2))?.is_none() {
        call.out.null();
        return Ok(());
    }
    Err(CommandError::Line(
        "ERR An LFU maxmemory policy is not selected, access frequency not tracked. Please note \
         that when switching between policies at runtime LRU and LFU data will take some time to \
         adjust.",
    ))
}

pub fn object_help(call: &mut Call<'_, '_>) -> CommandResult {
    help(
        call,
        "OBJECT",
        &[
            ("ENCODING <key>", "Return how a value is held."),
            ("FREQ <key>", "Return how often a key is used."),
            ("IDLETIME <key>", "Return the seconds since a key was used."),
            ("REFCOUNT <key>", "Return the number of references to a value."),
        ],
    )
}

pub fn memory_usage(call: &mut Call<'_, '_>) -> CommandResult {
    /// What the index keeps per key, in bytes.
    const INDEX_BYTES: u64 = 32;
    let mut at = 3;
    while at < call.args.len() {
        // Only nested values are sampled; the option is checked and changes nothing.
        if !call.args.is(at, "samples") || at + 1 == call.args.len() {
            return Err(CommandError::Syntax);
        }
        if call.integer(at + 1)? < 0 {
            return Err(CommandError::Syntax);
        }
        at += 2;
    }
    let key = call.arg(2);
    match call.peek(key)? {
        Some(entry) => {
            let stored = beeline_kv::entry::slot_bytes_for(key.len(), entry.value_length as usize);
            call.out.integer((stored + INDEX_BYTES) as i64);
        }
        None => call.out.null(),
    }
    Ok(())
}

pub fn memory_help(call: &mut Call<'_, '_>) -> CommandResult {
    help(call, "MEMORY", &[("USAGE <key> [SAMPLES <count>]", "Estimate the memory a key takes.")])
}

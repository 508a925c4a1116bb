//! `beeline objects top`: the store, looked at again and again.

use std::collections::HashSet;
use std::io::IsTerminal as _;

use beeline_objects::{Entry, ObjectId};

use super::{StoreArguments, Summary, connect, failure, screen};
use crate::config::values::Span;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// What it takes.
#[derive(Clone, Debug, clap::Args)]
pub struct TopArguments {
    /// Time between two looks.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = crate::cli::span)]
    pub interval: Span,
    /// Looks before it ends; without it, until interrupted.
    #[arg(long, value_name = "COUNT")]
    pub count: Option<u32>,
    /// Objects shown, the largest first.
    #[arg(long, default_value_t = 20)]
    pub rows: usize,
    #[command(flatten)]
    pub store: StoreArguments,
}

/// The command.
pub fn run(arguments: &TopArguments, output: Output) -> Result<Exit, Failure> {
    let client = connect(&arguments.store)?;
    let ids = |entries: &[Entry]| entries.iter().map(|entry| entry.id).collect::<HashSet<_>>();
    let mut before = ids(&client.list().map_err(failure)?);
    let mut left = arguments.count;
    while left != Some(0) {
        std::thread::sleep(arguments.interval.0);
        let mut entries = client.list().map_err(failure)?;
        let now: HashSet<ObjectId> = ids(&entries);
        let summary = Summary::of(&entries);
        if output.json {
            output.object(&summary)?;
        } else {
            entries.sort_by_key(|entry| std::cmp::Reverse(entry.size));
            entries.truncate(arguments.rows);
            let clear = if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
            let (came, went) = (now.difference(&before).count(), before.difference(&now).count());
            let text = summary.text();
            output.bytes(
                format!("{clear}{text}\n{came} came, {went} went\n\n{}", screen(&entries))
                    .as_bytes(),
            )?;
        }
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(Exit::Done)
}

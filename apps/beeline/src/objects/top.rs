//! `beeline objects top`: the store, looked at again and again.

use std::collections::HashSet;

use beeline_objects::{Entry, ObjectId};

use super::{StoreArguments, Summary, connect, failure, screen};
use crate::config::values::Span;
use crate::exit::{Exit, Failure};
use crate::looks;
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

/// One look.
struct Look {
    ids: HashSet<ObjectId>,
    summary: Summary,
    /// As many as are shown.
    largest: Vec<Entry>,
}

/// The command.
pub fn run(arguments: &TopArguments, output: Output) -> Result<Exit, Failure> {
    let client = connect(&arguments.store)?;
    let look = || -> Result<Look, Failure> {
        let mut entries = client.list().map_err(failure)?;
        let ids = entries.iter().map(|entry| entry.id).collect();
        let summary = Summary::of(&entries);
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.size));
        entries.truncate(arguments.rows);
        Ok(Look { ids, summary, largest: entries })
    };
    looks::repeat(arguments.interval.0, arguments.count, look, |before, now, _| {
        if output.json {
            return Ok(output.object(&now.summary)?);
        }
        let came = now.ids.difference(&before.ids).count();
        let went = before.ids.difference(&now.ids).count();
        let (text, shown) = (now.summary.text(), screen(&now.largest));
        looks::screen(output, &format!("{text}\n{came} came, {went} went\n\n{shown}"))
    })
}

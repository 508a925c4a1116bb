//! `beeline kv watch`: the changes of a node's keys as they are committed.

use std::time::Duration;

use anyhow::Context as _;

use super::WatchArguments;
use super::asker::Asker;
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::Output;

/// Patience with a node that does not answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause before the node is asked again where nothing had happened.
const PAUSE: Duration = Duration::from_millis(50);

/// A change as the node tells it.
struct Change<'a> {
    version: &'a str,
    more: bool,
    database: &'a str,
    word: &'a str,
    key: &'a str,
    field: Option<&'a str>,
}

/// The command.
pub fn watch(arguments: &WatchArguments, output: Output) -> Result<Exit, Failure> {
    let mut node = Asker::open(arguments.resp_address, PATIENCE).or_exit(Exit::Unreachable)?;
    if !arguments.password.is_empty() {
        node.ask(&["AUTH", &arguments.password])?;
    }
    let mut position = arguments.from.map_or_else(|| "NOW".to_owned(), |from| from.to_string());
    let mut left = if arguments.count == 0 { u64::MAX } else { arguments.count };
    while left > 0 {
        node.renew();
        let many = left.min(1000).to_string();
        let told = node.ask(&["KV.CHANGES", &position, "COUNT", &many])?;
        let (next, changes) = changes(&told).or_exit(Exit::Failed)?;
        for change in &changes {
            say(change, output)?;
            left = left.saturating_sub(1);
            if left == 0 {
                return Ok(Exit::Done);
            }
        }
        // The node may keep more than it told at once.
        if changes.is_empty() && next == position {
            std::thread::sleep(PAUSE);
        }
        next.clone_into(&mut position);
    }
    Ok(Exit::Done)
}

/// The position to go on from, and the changes.
fn changes(told: &[String]) -> anyhow::Result<(&str, Vec<Change<'_>>)> {
    let strange = "the node answers otherwise than a Beeline node does";
    let (next, mut rest) = told.split_first().context(strange)?;
    let mut changes = Vec::new();
    while let Some((change, behind)) = rest.split_first_chunk::<5>() {
        let [version, more, database, word, key] = change;
        rest = behind;
        let mut field = None;
        if matches!(word.as_str(), "hset" | "hdel") {
            let (name, behind) = rest.split_first().context(strange)?;
            field = Some(name.as_str());
            rest = behind;
        }
        changes.push(Change { version, more: more == "1", database, word, key, field });
    }
    anyhow::ensure!(rest.is_empty(), strange);
    Ok((next, changes))
}

fn say(change: &Change<'_>, output: Output) -> Result<(), Failure> {
    if output.json {
        let number = |text: &str| text.parse::<u64>().unwrap_or(0);
        return Ok(output.object(&serde_json::json!({
            "position": number(change.version),
            "more": change.more,
            "database": number(change.database),
            "change": change.word,
            "key": change.key,
            "field": change.field,
        }))?);
    }
    let field = change.field.map(|field| format!(" {field}")).unwrap_or_default();
    let Change { version, database, word, key, .. } = change;
    Ok(output.line(format!("{version} {database} {word} {key}{field}").trim_end())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_flat_and_a_strange_one_is_refused() {
        let words = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        let told = words("12 7 0 0 set key 9 1 3 hset hash field 10 0 3 del hash");
        let (next, list) = changes(&told).unwrap();
        assert_eq!((next, list.len()), ("12", 3));
        assert_eq!((list[1].key, list[1].field, list[1].more), ("hash", Some("field"), true));
        assert_eq!((list[2].word, list[2].field), ("del", None));
        assert_eq!(changes(&words("12")).unwrap().1.len(), 0);
        assert!(changes(&words("12 7 0 0 set")).is_err());
        assert!(changes(&[]).is_err());
    }
}

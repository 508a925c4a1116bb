//! Servers that others wrote, and their clients, one in each guest: redis with its tools, nginx with curl.

use std::time::Duration;

use super::super::Rows;
use super::super::peers::{Check, SOON};
use super::{SERVER, World};
use crate::lab::error::LabError;
use crate::lab::exec::line;
use crate::lab::guest::Guest;
use crate::root;
use crate::setup::is_here;

const SCRIPT: &str = "xtask/src/lab/guest/servers.sh";
const PORT: &str = "6003";
/// Some thousand round trips through relays on emulated processors.
const LONG: Duration = Duration::from_secs(300);
/// What nginx serves, and curl fetches twice.
const FILE: u64 = 4 << 20;

/// A row for each server.
pub(super) fn run(rows: &mut Rows<'_>, world: &mut World, provider: &str) {
    type Talk = fn(&mut World) -> Check;
    let servers: [(&str, &[&str], Talk); 2] = [
        ("redis", &["redis-server", "redis-cli", "redis-benchmark"], redis),
        ("nginx", &["nginx", "curl"], nginx),
    ];
    for (name, programs, talk) in servers {
        let row = format!("{}, {provider}", programs.join(", "));
        if let Some(program) = programs.iter().find(|program| !is_here(program)) {
            rows.skip(&row, &format!("{program} is not installed; `cargo xtask setup` fetches it"));
            continue;
        }
        rows.check(&row, || {
            script(&mut world.server, &["serve", name, SERVER, PORT], SOON)?;
            let seen = talk(world);
            // Whatever was seen, so that the next one finds its port free.
            script(&mut world.server, &["stop"], SOON)?;
            seen
        });
    }
}

/// Runs the script's part `words` in `guest`: what it says.
fn script(guest: &mut Guest, words: &[&str], limit: Duration) -> Result<String, LabError> {
    let words: Vec<String> = ["sh", SCRIPT].iter().chain(words).map(|&word| word.into()).collect();
    let done = guest.run(&line(&root(), &[], &words), limit)?;
    if done.status == 0 {
        return Ok(done.output.trim().to_owned());
    }
    Err(LabError::Failed { command: words.join(" "), errors: done.errors })
}

/// What clients say, if more than `least` bytes of it went over the fabric, as both relays count.
fn over_fabric(world: &mut World, clients: &[&str], least: u64) -> Check {
    let before = counted(world)?;
    let mut said = Vec::new();
    for client in clients {
        said.push(script(&mut world.client, &[client, SERVER, PORT], LONG)?);
    }
    let after = counted(world)?;
    let [client, server] = [0, 1].map(|at| after[at].0.saturating_sub(before[at].0));
    let broken = after[0].1 + after[1].1;
    let told =
        format!("{client} bytes over the fabric at the client's relay, {server} at the other");
    Ok(if client.min(server) > least && broken == 0 {
        Ok(format!("{}; {told}", said.join("; ")))
    } else {
        Err(format!("{told}, {broken} connections broken: {}", said.join("; ")))
    })
}

/// Bytes that each guest's relay moved, and connections that broke.
fn counted(world: &mut World) -> Result<[(u64, u64); 2], LabError> {
    let mut counts = [(0, 0); 2];
    for (guest, count) in [&mut world.client, &mut world.server].into_iter().zip(&mut counts) {
        let mut of = |name| super::count(guest, name);
        *count = (of("sent_bytes")? + of("received_bytes")?, of("broken")?);
    }
    Ok(counts)
}

fn redis(world: &mut World) -> Check {
    over_fabric(world, &["load", "values"], 3_000_000)
}

fn nginx(world: &mut World) -> Check {
    let hash = script(&mut world.server, &["hash"], SOON)?;
    let fetched = over_fabric(world, &["fetch"], FILE)?;
    Ok(match fetched {
        Ok(said) if said.contains(&hash) => {
            Ok(format!("a file of {FILE} bytes, twice, as it was: {said}"))
        }
        Ok(said) => Err(format!("not the file that has the hash {hash}: {said}")),
        Err(why) => Err(why),
    })
}

//! `beeline direct servers`, `join` and `leave`: the servers of a map, and changes of it.

use std::time::Duration;

use beeline_direct_client::Dials;
use beeline_kv_direct::membership::{self, Change, MembershipError, Progress};

use super::Servers;
use crate::cli::span;
use crate::exit::{Exit, Failure};
use crate::output::{Output, table};

/// What `join` and `leave` take.
#[derive(Debug, clap::Args)]
pub struct ChangeArguments {
    /// Fabric address of the server, by which all clients and servers reach it: auto://HOST:PORT.
    pub server: String,
    #[command(flatten)]
    pub servers: Servers,
    /// How long to wait for the keys to move. They go on moving afterwards; ask again to finish.
    #[arg(long, value_name = "SPAN", default_value = "10m", value_parser = limit)]
    pub limit: Duration,
}

/// What `leave` takes.
#[derive(Debug, clap::Args)]
pub struct LeaveArguments {
    #[command(flatten)]
    pub change: ChangeArguments,
    /// The server is gone and its pairs are lost: the others hold its keys from now on, absent.
    #[arg(long)]
    pub lost: bool,
}

/// Looks, twenty milliseconds apart, after which a move that is held up is worth a line.
const HELD_UP: u32 = 25;

fn limit(text: &str) -> Result<Duration, String> {
    Ok(span(text)?.0)
}

/// A row of `beeline direct servers --json`.
#[derive(Debug, serde::Serialize)]
struct ServerRow {
    server: String,
    state: Option<u32>,
    pairs: Option<u64>,
    moved: Option<u64>,
    adopted: Option<u64>,
    note: String,
}

/// `beeline direct servers`.
pub fn list(servers: &Servers, output: Output) -> Result<Exit, Failure> {
    let mut dials = Dials::new(servers.timeout);
    let map = membership::latest(&mut dials, &servers.connect).map_err(failure)?;
    let mut names = map.ring.servers().to_vec();
    if map.is_moving() {
        names.extend(
            map.old.servers().iter().filter(|name| map.ring.position(name).is_none()).cloned(),
        );
    }
    let mut rows = Vec::new();
    for name in names {
        let reports = membership::reports(&mut dials, &name);
        let sum = |of: fn(&beeline_kv_direct::MapReport) -> u64| {
            reports.as_ref().ok().map(|reports| reports.iter().map(of).sum())
        };
        let state = |reports: &Vec<beeline_kv_direct::MapReport>| {
            reports.iter().map(|report| report.map.state).min().unwrap_or(0)
        };
        let note = match &reports {
            Err(error) => error.to_string(),
            Ok(reports) if state(reports) < map.state => {
                "does not know the map's last state".to_owned()
            }
            Ok(reports) => {
                let notes = reports.iter().map(|report| report.note.as_str());
                notes.filter(|note| !note.is_empty()).collect::<Vec<_>>().join("; ")
            }
        };
        rows.push(ServerRow {
            state: reports.as_ref().ok().map(state),
            pairs: sum(|report| report.pairs),
            moved: sum(|report| report.moved),
            adopted: sum(|report| report.adopted),
            server: name,
            note,
        });
    }
    let reached = rows.iter().all(|row| row.state.is_some());
    if output.json {
        for row in &rows {
            output.object(row)?;
        }
    } else {
        let number =
            |number: Option<u64>| number.map_or("-".to_owned(), |number| number.to_string());
        let cells: Vec<Vec<String>> = rows
            .into_iter()
            .map(|row| {
                let state = number(row.state.map(u64::from));
                let numbers = [row.pairs, row.moved, row.adopted].map(number);
                [vec![row.server, state], numbers.to_vec(), vec![row.note]].concat()
            })
            .collect();
        output.line(table(&["SERVER", "STATE", "PAIRS", "MOVED", "ADOPTED", "NOTE"], &cells))?;
        output.note(match map.state {
            0 => "these servers were told of no map: clients have to name all of them".to_owned(),
            state if map.is_moving() => format!("state {state}: keys are moving"),
            state => format!("state {state}"),
        });
    }
    Ok(if reached { Exit::Done } else { Exit::Unreachable })
}

/// `beeline direct join` and `beeline direct leave`.
pub fn change(
    arguments: &ChangeArguments,
    change: Change,
    output: Output,
) -> Result<Exit, Failure> {
    let mut dials = Dials::new(arguments.servers.timeout);
    let mut said = String::new();
    let mut held_up = 0;
    let mut progress = |progress| {
        let line = match progress {
            Progress::Begun => "begun at all servers; clients go on meanwhile".to_owned(),
            // What goes by at once is no news: a server that was told a moment later than another.
            Progress::Moving { note, .. } if !note.is_empty() && held_up < HELD_UP => {
                held_up += 1;
                return;
            }
            Progress::Moving { note, .. } if !note.is_empty() => format!("held up: {note}"),
            Progress::Moving { .. } => return held_up = 0,
            Progress::Done { moved } => {
                format!("done; {} moved", crate::output::count(moved, "pair", "pairs"))
            }
        };
        if line != said {
            output.note(&line);
            said = line;
        }
    };
    let (servers, name) = (&arguments.servers.connect, &arguments.server);
    membership::change(&mut dials, servers, change, name, arguments.limit, &mut progress)
        .map_err(failure)?;
    Ok(Exit::Done)
}

fn failure(error: MembershipError) -> Failure {
    let exit = match error {
        MembershipError::Link { .. } | MembershipError::Unfinished { .. } => Exit::Unreachable,
        MembershipError::Name { .. } | MembershipError::NoServer => Exit::Usage,
        _ => Exit::Failed,
    };
    Failure::new(exit, error)
}

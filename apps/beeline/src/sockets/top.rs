//! `beeline sockets top`: what the connections inside this host, and to other hosts, move.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use beeline_sockets::control::{Answer, Introduced, Question};
use beeline_sockets::introduce;
use serde::Serialize;

use super::status::{ask, carried, process, strange};
use crate::bench::report::number;
use crate::config::values::Span;
use crate::exit::{Exit, Failure, OrExit as _};
use crate::looks;
use crate::output::{Output, table};

/// What it takes.
#[derive(Clone, Debug, clap::Args)]
pub struct TopArguments {
    /// Time between two looks.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = crate::cli::span)]
    pub interval: Span,
    /// Looks before it ends; without it, until interrupted.
    #[arg(long, value_name = "COUNT")]
    pub count: Option<u32>,
    /// Connections shown.
    #[arg(long, default_value_t = 20)]
    pub rows: usize,
}

#[derive(Debug, Serialize)]
struct Line {
    first: String,
    first_process: u32,
    second: String,
    second_process: u32,
    to_second_bytes_per_second: f64,
    to_first_bytes_per_second: f64,
}

type Look = HashMap<(SocketAddr, SocketAddr), (Introduced, [u64; 2])>;

/// The command.
pub fn run(arguments: &TopArguments, output: Output) -> Result<Exit, Failure> {
    looks::repeat(arguments.interval.0, arguments.count, look, |before, now, time| {
        let lines = busiest(before, now, time, arguments.rows);
        if output.json {
            return Ok(lines.iter().try_for_each(|line| output.object(line))?);
        }
        looks::screen(output, &format!("{}\n", screen(&lines)))
    })
}

fn look() -> Result<Look, Failure> {
    let socket = ask(Question::Traffic)?;
    let mut look = Look::new();
    loop {
        match introduce::answer(&socket).or_exit(Exit::Unreachable)?.0 {
            Answer::Traffic(connection, moved) => {
                look.insert((connection.first, connection.second), (connection, moved));
            }
            Answer::End => break,
            _ => return Err(strange()),
        }
    }
    for (connection, moved) in carried() {
        look.insert((connection.first, connection.second), (connection, moved));
    }
    Ok(look)
}

/// The connections that moved most between two looks, `rows` of them at most.
fn busiest(before: &Look, now: &Look, time: Duration, rows: usize) -> Vec<Line> {
    let mut lines: Vec<Line> = now
        .iter()
        .map(|(ends, (connection, moved))| {
            let old = before.get(ends).map_or([0; 2], |(_, old)| *old);
            let rate = |side: usize| {
                #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
                let bytes = moved[side].saturating_sub(old[side]) as f64;
                bytes / time.as_secs_f64().max(1e-3)
            };
            Line {
                first: connection.first.to_string(),
                first_process: connection.first_process,
                second: connection.second.to_string(),
                second_process: connection.second_process,
                to_second_bytes_per_second: rate(0),
                to_first_bytes_per_second: rate(1),
            }
        })
        .collect();
    let total = |line: &Line| line.to_second_bytes_per_second + line.to_first_bytes_per_second;
    lines.sort_by(|one, other| total(other).total_cmp(&total(one)));
    lines.truncate(rows);
    lines
}

fn screen(lines: &[Line]) -> String {
    let cells: Vec<Vec<String>> = lines
        .iter()
        .map(|line| {
            vec![
                line.first.clone(),
                process(line.first_process),
                number(line.to_second_bytes_per_second / 1e6),
                number(line.to_first_bytes_per_second / 1e6),
                line.second.clone(),
                process(line.second_process),
            ]
        })
        .collect();
    table(&["ONE END", "PROCESS", "SENDS MB/s", "RECEIVES MB/s", "OTHER END", "PROCESS"], &cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_busiest_come_first_and_what_is_new_counts_from_nothing() {
        let connection = |port: u16, moved: [u64; 2]| {
            let first: SocketAddr = ([127, 0, 0, 1], port).into();
            let second: SocketAddr = ([127, 0, 0, 1], 80).into();
            let introduced = Introduced { first, first_process: 1, second, second_process: 2 };
            ((first, second), (introduced, moved))
        };
        let before = Look::from([connection(1, [1_000_000, 0]), connection(2, [5, 5])]);
        let now = Look::from([
            connection(1, [1_000_010, 0]),
            connection(2, [4_000_005, 5]),
            connection(3, [0, 100]),
        ]);
        let lines = busiest(&before, &now, Duration::from_secs(2), 2);
        let ports: Vec<&str> =
            lines.iter().filter_map(|line| line.first.split(':').nth(1)).collect();
        assert_eq!(ports, ["2", "3"]);
        assert!(screen(&lines).contains("2.00"), "{}", screen(&lines));
    }
}

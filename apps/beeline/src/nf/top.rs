//! `beeline nf top`: a running graph, looked at again and again.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use beeline_nf::live;
use beeline_nf::statistics::{COMMAND, Statistics};

use super::run::control_of;
use crate::bench::report::number;
use crate::exit::{Exit, Failure};
use crate::looks;
use crate::output::{Output, table};

/// Arguments of `top`.
#[derive(Debug, clap::Args)]
pub struct TopArguments {
    /// Source file of the graph that runs.
    pub file: PathBuf,
    /// Screens to show; without end by default.
    #[arg(long)]
    pub count: Option<u32>,
    /// Milliseconds between them.
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(10..=3_600_000))]
    pub interval: u64,
    /// Socket of the run.
    #[arg(long, value_name = "PATH")]
    pub control: Option<PathBuf>,
}

/// Runs it.
pub fn run(arguments: &TopArguments, output: Output) -> Result<Exit, Failure> {
    let control = arguments.control.clone().unwrap_or_else(|| control_of(&arguments.file));
    let look = || -> Result<Statistics, Failure> {
        let answer = live::command(&control, COMMAND)
            .with_context(|| format!("no answer at {}", control.display()))
            .map_err(|error| Failure::new(Exit::Unreachable, error))?;
        let text = answer.map_err(|why| Failure::new(Exit::Failed, anyhow::anyhow!(why)))?;
        Ok(serde_json::from_str(&text).context("the answer is no statistics")?)
    };
    let interval = Duration::from_millis(arguments.interval);
    looks::repeat(interval, arguments.count, look, |before, now, time| {
        if output.json {
            return Ok(output.object(now)?);
        }
        looks::screen(output, &screen(before, now, time.as_secs_f64()))
    })
}

fn screen(before: &Statistics, now: &Statistics, seconds: f64) -> String {
    let rate = |before: u64, now: u64| {
        let more = u32::try_from(now.saturating_sub(before)).unwrap_or(u32::MAX);
        number(f64::from(more) / seconds.max(1e-6))
    };
    let (was, is) = (&before.ports, &now.ports);
    let mut text = format!(
        "{} packets/s in, {} packets/s out, {} refused by a device, {} not whole\n",
        rate(was.received, is.received),
        rate(was.sent, is.sent),
        is.refused,
        is.malformed
    );
    let rows: Vec<Vec<String>> = before
        .channels
        .iter()
        .zip(&now.channels)
        .map(|(was, is)| {
            let fill = format!("{} of {}", is.waiting, is.depth);
            vec![is.channel.clone(), rate(was.items, is.items), is.items.to_string(), fill]
        })
        .collect();
    text.push_str(&table(&["CHANNEL", "ITEMS/S", "ITEMS", "WAIT"], &rows));
    let rows: Vec<Vec<String>> = before
        .elements
        .iter()
        .zip(&now.elements)
        .map(|(was, is)| vec![is.instance.clone(), rate(was.iterations, is.iterations)])
        .collect();
    text.push_str(&table(&["ELEMENT", "ITERATIONS/S"], &rows));
    text
}

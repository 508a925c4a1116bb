//! `beeline direct tune`: the share of the index and the inline threshold for pairs of a size.

use anyhow::Context as _;
use beeline_kv_direct_model::index::{Sizes, tune};

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Memory of the tables that are filled: shares found with it hold for larger ones.
const MEMORY_BYTES: u64 = 8 << 20;

/// What the command takes.
#[derive(Debug, clap::Args)]
pub struct TuneArguments {
    /// Bytes of pairs, key and value: a number, or least..most, 5 to 500.
    #[arg(value_name = "BYTES", value_parser = sizes)]
    pub sizes: Sizes,
    /// Percent of the memory that pairs will take, 1 to 90.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=90))]
    pub utilisation: u32,
}

fn sizes(text: &str) -> Result<Sizes, String> {
    let (least, most) = text.split_once("..").unwrap_or((text, text));
    let number = |text: &str| text.parse::<usize>().map_err(|e| format!("{text}: {e}"));
    let sizes = Sizes { least: number(least)?, most: number(most)? };
    let holds = 5 <= sizes.least && sizes.least <= sizes.most && sizes.most <= 500;
    if holds { Ok(sizes) } else { Err("choose 5 to 500, or least..most".to_owned()) }
}

/// The command.
pub fn run(arguments: &TuneArguments, output: Output) -> Result<Exit, Failure> {
    let utilisation = f64::from(arguments.utilisation) / 100.0;
    let chosen = tune(MEMORY_BYTES, arguments.sizes, utilisation).context("tables to fill")?;
    let Some(chosen) = chosen else {
        crate::output::complain(format_args!(
            "pairs of these sizes do not fit at {} percent; choose a lower --utilisation",
            arguments.utilisation
        ));
        return Ok(Exit::Failed);
    };
    // The setting is in whole percent, 90 at most: a little less than the largest that fits.
    let share = (chosen.index_permille / 10).clamp(1, 90);
    let costs = chosen.costs;
    output.line(format!(
        "direct-index-share {share}\ndirect-inline-threshold {}\n# accesses of a GET {:.2}, of a PUT {:.2}",
        chosen.inline_threshold, costs.get, costs.put
    ))?;
    Ok(Exit::Done)
}

//! `beeline bench nf`: network functions.
//!
//! Every row says where its figure comes from: *measured* on this processor, or *counted* cycles of
//! the schedule. Rows are shown as soon as they are there.

mod kernel;
mod latency;
mod link;
mod rates;

use std::time::Instant;

use beeline_ir::library;
use beeline_native::Program;
use beeline_nf::diff::all_hardware;
use beeline_nf::functions::templates;
use beeline_nf::load::{Loaded, compile};
use beeline_nf::report::report;
use beeline_passes::Options;
use serde::Serialize;

use super::BenchOptions;
use super::environment::Environment;
use super::report::{Better, Row, number};
use super::turns::pin;
use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Arguments of `bench nf`.
#[derive(Debug, clap::Args)]
pub struct NfArguments {
    #[command(flatten)]
    pub options: BenchOptions,
    /// Parts: memory (captures in memory), threads (the same on one and on two), rules (the firewall by number of rules), inserts, flows
    /// (the balancer), knee (the balancer's cycles by flows), compile, cycles (every library element),
    /// link (to host elements), pfabric (flow completion times); and, where they are asked for, as
    /// root, kernel (the firewall between interfaces beside iptables, ipset, nftables and Open
    /// vSwitch) and latency (what it adds to a packet's way).
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "PART",
        default_value = "memory,threads,rules,inserts,flows,knee,compile,cycles,link,pfabric"
    )]
    pub parts: Vec<String>,
}

/// Where a figure comes from.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Kind {
    /// On this processor.
    Measured,
    /// Cycles of the schedule.
    Counted,
    /// On this processor, through a link that is emulated at a stated pace.
    Emulated,
    /// Slots of a simulated wire.
    Simulated,
}

/// Shows rows one by one.
pub(super) struct Shown {
    output: Output,
    environment: Environment,
    rows: usize,
}

#[derive(Serialize)]
struct Line<'a> {
    bench: &'static str,
    kind: Kind,
    #[serde(flatten)]
    row: &'a Row,
    environment: &'a Environment,
}

impl Shown {
    /// Shows a row.
    pub(super) fn row(&mut self, kind: Kind, row: &Row) -> anyhow::Result<()> {
        self.rows += 1;
        if self.output.json {
            let line = Line { bench: "nf", kind, row, environment: &self.environment };
            return self.output.object(&line);
        }
        let label = match kind {
            Kind::Measured => "measured",
            Kind::Counted => "counted",
            Kind::Emulated => "emulated",
            Kind::Simulated => "simulated",
        };
        let subject = if row.subject == "beeline" { "" } else { row.subject.as_str() };
        let mut text = format!(
            "{label}  {}: {subject}{}{} {} ({}-{})",
            row.case,
            if subject.is_empty() { "" } else { " " },
            number(row.figure.median),
            row.unit,
            number(row.figure.min),
            number(row.figure.max)
        );
        if let (Some(peer), Some(theirs)) = (&row.peer, row.peer_figure) {
            text.push_str(&format!(", {peer} {} {}", number(theirs.median), row.unit));
        }
        if let Some(ratio) = row.ratio {
            text.push_str(&format!(", {:.2} times better", ratio.median));
        }
        for (name, value) in &row.beside {
            text.push_str(&format!(", {name} {value}"));
        }
        Ok(self.output.line(text)?)
    }
}

/// A text that must compile: it is ours.
pub(super) fn loaded(text: &str) -> anyhow::Result<Loaded> {
    let loaded = compile("bench.np", text.to_owned(), None);
    let said = loaded.diagnostics.render(&loaded.sources);
    anyhow::ensure!(!loaded.diagnostics.failed(), "{said}");
    Ok(loaded)
}

/// Runs it.
pub fn run(arguments: &NfArguments, output: Output) -> Result<Exit, Failure> {
    let known = [
        "memory", "threads", "rules", "inserts", "flows", "knee", "compile", "cycles", "link",
        "pfabric", "kernel", "latency",
    ];
    if let Some(part) = arguments.parts.iter().find(|part| !known.contains(&part.as_str())) {
        let error = anyhow::anyhow!("no part is named {part}: {}", known.join(", "));
        return Err(Failure::new(Exit::Usage, error));
    }
    pin(0)?;
    let mut shown = Shown { output, environment: Environment::detect(), rows: 0 };
    for part in &arguments.parts {
        match part.as_str() {
            "memory" => rates::memory(&arguments.options, &mut shown)?,
            "threads" => rates::threads(&arguments.options, &mut shown)?,
            "rules" => rates::rules(&arguments.options, &mut shown)?,
            "inserts" => rates::inserts(&arguments.options, &mut shown)?,
            "flows" => rates::flows(&arguments.options, &mut shown)?,
            "knee" => rates::knee(&arguments.options, &mut shown)?,
            "link" => link::rates(&arguments.options, &mut shown)?,
            "pfabric" => link::fabric(&arguments.options, &mut shown)?,
            "kernel" => kernel::firewalls(&arguments.options, &mut shown)?,
            "latency" => latency::latencies(&arguments.options, &mut shown)?,
            "compile" => compile_time(&arguments.options, &mut shown)?,
            _ => cycles(&arguments.options, &mut shown)?,
        }
    }
    if !output.json {
        output.line(shown.environment.line())?;
    }
    Ok(Exit::Done)
}

/// The largest templates: source to machine code, and to a schedule.
fn compile_time(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    for name in ["firewall", "balancer"] {
        let text = templates::text(name).unwrap_or_default();
        let (mut code, mut schedule) = (Vec::new(), Vec::new());
        for _ in 0..options.turns() {
            let start = Instant::now();
            let loaded = loaded(text)?;
            Program::compile(&loaded.compiled.graph)?;
            code.push(start.elapsed().as_secs_f64() * 1e3);
            let start = Instant::now();
            let loaded = self::loaded(text)?;
            all_hardware(&loaded.compiled.graph, &Options::default())?;
            schedule.push(start.elapsed().as_secs_f64() * 1e3);
        }
        for (what, figures) in [("machine code", &code), ("schedule", &schedule)] {
            let case = format!("{name}.np, source to {what}");
            let row = Row::new(case, "beeline", "ms", Better::Lower, figures);
            shown.row(Kind::Measured, &row.beside("wanted", "2,000 ms"))?;
        }
    }
    Ok(())
}

/// Every library element: cycles between items, with every pass and with none.
fn cycles(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    for (name, text) in library::files() {
        if options.quick && name != "basics.np" {
            continue;
        }
        let loaded = compile(name, text.to_owned(), None);
        for element in loaded.compiled.elements {
            let node = beeline_ir::graph::Node {
                name: element.name.clone(),
                span: element.span,
                element,
                host: false,
                verilog: false,
                signalled: false,
                id: 1,
            };
            let graph = beeline_ir::graph::Graph { nodes: vec![node], ..Default::default() };
            let Some(found) = report(&graph, &Options::default())?.pop() else { continue };
            let cycles = |count: u64| [f64::from(u32::try_from(count).unwrap_or(u32::MAX))];
            let (mine, naive) =
                (cycles(u64::from(found.report.interval)), cycles(found.naive_interval));
            let row = Row::new(found.instance, "optimised", "cycles", Better::Lower, &mine)
                .against("naive", &mine, &naive)
                .beside("depth", found.report.depth);
            shown.row(Kind::Counted, &row)?;
        }
    }
    Ok(())
}

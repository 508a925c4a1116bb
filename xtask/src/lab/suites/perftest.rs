//! perftest and the verbs provider on the same soft-RoCE device, in turns: what the provider adds.
//! And what a first and a repeated connection cost.
//!
//! Two things decide a turn on this device more than any program does, and are the same for both:
//! - who runs the device. It is kernel work that `ksoftirqd` does; where that competes with a
//!   program that spins, a turn takes a tick of the scheduler (4 ms) now and then, or always. So
//!   it goes before both programs here, as a device's own processor would.
//! - what reading a clock costs. The guest's kernel takes an emulated device for its clock; perftest
//!   reads the processor's cycle counter instead, and so does the example. Both report cycles: what
//!   perftest takes for a microsecond is what the kernel found at its start, which on emulated
//!   processors is a guess, and now and then zero.

use std::process::{Command, Stdio};
use std::time::Duration;

use super::Rows;
use crate::lab::error::LabError;
use crate::lab::guest::{Guest, Options};
use crate::root;
use crate::step::Report;

/// Turns of each program; they alternate, and so does who begins. One turn differs from the next by
/// far more than the programs do: it takes many for medians that hold.
const TURNS: usize = 21;
/// One turn, start-up included.
const BOUND: Duration = Duration::from_secs(120);
/// What is aimed at.
const RATIO: f64 = 1.15;

/// Median, least and most.
pub(super) struct Seen(f64, f64, f64);

impl Seen {
    pub(super) fn of(mut times: Vec<f64>) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |index: usize| times.get(index).copied().unwrap_or(f64::NAN);
        Self(at(times.len() / 2), at(0), at(times.len().saturating_sub(1)))
    }
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let digits = if self.0 < 100.0 { 2 } else { 0 };
        write!(f, "{:.digits$} ({:.digits$}-{:.digits$})", self.0, self.1, self.2)
    }
}

pub(super) fn run(report: &mut Report) {
    let mut rows = Rows { report, suite: "perftest" };
    let built = Command::new("cargo")
        .args(["build", "--quiet", "--release", "--package", "beeline-fabric-verbs"])
        .args(["--example", "lab"])
        .current_dir(root())
        .stdin(Stdio::null())
        .status();
    if !built.is_ok_and(|status| status.success()) {
        return rows.check("build", || Ok(Err("the example does not build".to_owned())));
    }
    let mut guest = match Guest::boot(&Options { rdma: true, ..Options::plain() }) {
        Ok(guest) => guest,
        Err(error) => return rows.check("boot", || Err(error)),
    };
    rows.check("the device goes first", || {
        let first =
            "for i in $(pgrep ksoftirqd); do chrt -f -p 1 $i || exit; done; pgrep -c ksoftirqd";
        let done = guest.run(first, BOUND)?;
        let threads = format!("{} kernel threads before all programs", done.output.trim());
        Ok(if done.status == 0 { Ok(threads) } else { Err(done.errors) })
    });
    let ours = root().join("target/release/examples/lab").display().to_string();
    for (what, bytes, rounds) in
        [("read", 8, 1000), ("write", 8, 1000), ("read", 65_536, 100), ("write", 65_536, 100)]
    {
        rows.check(&format!("{what}, {bytes} B"), || {
            compare(&mut guest, &ours, (what, bytes, rounds))
        });
    }
    rows.check("connections", || {
        let done = guest.run(&format!("{ours} connect 20"), BOUND)?;
        Ok(if done.status == 0 {
            Ok(done.output.trim().to_owned())
        } else {
            Err(format!("{done:?}"))
        })
    });
}

/// What the ratio of the medians says, given the ratios of the turns: where most of the turns say
/// the opposite, nothing is decided.
fn verdict(ratio: f64, turns: &Seen) -> &'static str {
    match (ratio <= RATIO, turns.0 <= RATIO) {
        (true, true) => "reached",
        (false, false) => "not reached",
        _ => "undecided: the turns disagree",
    }
}

/// One case, both programs in turns, each end on a processor of its own.
fn compare(
    guest: &mut Guest,
    ours: &str,
    (what, bytes, rounds): (&str, u32, u32),
) -> Result<Result<String, String>, LabError> {
    let tool = format!("ib_{what}_lat -d rxe0 -x 1 -F -C -s {bytes} -n {rounds}");
    let theirs = format!(
        "taskset -c 1 {tool} >/run/server 2>&1 & sleep 0.5; taskset -c 0 {tool} $LAB_SELF && wait"
    );
    let ours = format!("LAB_PEER_CPU=1 taskset -c 0 {ours} {what} {bytes} {rounds}");
    let (mut own, mut tools) = (Vec::new(), Vec::new());
    for turn in 0..2 * TURNS {
        // Ours, theirs, theirs, ours.
        let is_ours = turn % 4 == 0 || turn % 4 == 3;
        let done = guest.run(if is_ours { &ours } else { &theirs }, BOUND)?;
        let seen = if is_ours {
            let after = done.output.split_once("median ");
            after.and_then(|(_, rest)| rest.split(' ').next()?.parse::<f64>().ok())
        } else {
            // Bytes, iterations, least, most, typical.
            let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
            let mut lines = done.output.lines().map(words);
            lines
                .find(|words| words.first().is_some_and(|first| *first == bytes.to_string()))
                .and_then(|words| words.get(4)?.parse::<f64>().ok())
        };
        let Some(seen) = seen else { return Ok(Err(format!("{done:?}"))) };
        if is_ours { &mut own } else { &mut tools }.push(seen);
    }
    let ratios = own.iter().zip(&tools).map(|(own, tool)| own / tool).collect();
    let (own, tools, ratios) = (Seen::of(own), Seen::of(tools), Seen::of(ratios));
    let ratio = own.0 / tools.0;
    let reached = verdict(ratio, &ratios);
    Ok(Ok(format!(
        "ours {own} cycles, ib_{what}_lat {tools} cycles: ratio {ratio:.2} (of the turns {ratios}), {RATIO} \
         {reached}"
    )))
}

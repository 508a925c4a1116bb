//! Rows of results, as a table and as JSON lines.

use std::collections::BTreeMap;

use serde::Serialize;

use super::environment::Environment;
use crate::output::{Output, table};

/// Which way is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// More is better: operations per second, bytes per second.
    Higher,
    /// Less is better: latency.
    Lower,
}

/// Least, median and most of the repetitions.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Least.
    pub min: f64,
    /// Median.
    pub median: f64,
    /// Most.
    pub max: f64,
}

impl Spread {
    /// Of `figures`; all zero when there are none.
    pub fn of(figures: &[f64]) -> Self {
        let mut sorted = figures.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (Some(&min), Some(&max)) = (sorted.first(), sorted.last()) else {
            return Self { min: 0.0, median: 0.0, max: 0.0 };
        };
        let middle = sorted.len() / 2;
        let median = if sorted.len().is_multiple_of(2) {
            f64::midpoint(sorted[middle - 1], sorted[middle])
        } else {
            sorted[middle]
        };
        Self { min, median, max }
    }
}

/// A 99th percentile beside a rate, against the peer's.
#[derive(Clone, Debug, Serialize)]
pub struct Tail {
    /// "ms", "us".
    pub unit: &'static str,
    /// The subject's, one per turn.
    pub figure: Spread,
    /// The peer's.
    pub peer_figure: Spread,
    /// How many times better than the peer's, round by round: above 1 is shorter.
    pub ratio: Option<Spread>,
}

/// How many times better `mine` is than `theirs`, round by round.
fn ratio(better: Better, mine: &[f64], theirs: &[f64]) -> Option<Spread> {
    let ratios: Vec<f64> = mine
        .iter()
        .zip(theirs)
        .filter(|(mine, theirs)| **mine > 0.0 && **theirs > 0.0)
        .map(|(mine, theirs)| match better {
            Better::Higher => mine / theirs,
            Better::Lower => theirs / mine,
        })
        .collect();
    (!ratios.is_empty()).then(|| Spread::of(&ratios))
}

/// One line of a report: a subject in one case, perhaps against a peer.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What was measured: "8 B write round trip".
    pub case: String,
    /// What stands in the figures: "shm", "beeline".
    pub subject: String,
    /// "us", "GB/s", "op/s".
    pub unit: &'static str,
    /// Which way is better.
    pub better: Better,
    /// Turns taken.
    pub repetitions: usize,
    /// The subject's figures.
    pub figure: Spread,
    /// The peer in the same run.
    pub peer: Option<String>,
    /// The peer's figures.
    pub peer_figure: Option<Spread>,
    /// How many times better than the peer the subject is, round by round: above 1 is better,
    /// whichever way the unit goes.
    pub ratio: Option<Spread>,
    /// The tail of the latency in the same turns: 99 in 100 requests were answered within it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub p99: Option<Tail>,
    /// What stands beside the figure: round trips, verbs and bytes per operation, p99 ...
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub beside: BTreeMap<&'static str, String>,
    /// True where the figure comes from a simulation.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub simulated: bool,
}

impl Row {
    /// A row of the subject's figures.
    pub fn new(
        case: impl Into<String>,
        subject: impl Into<String>,
        unit: &'static str,
        better: Better,
        figures: &[f64],
    ) -> Self {
        Self {
            case: case.into(),
            subject: subject.into(),
            unit,
            better,
            repetitions: figures.len(),
            figure: Spread::of(figures),
            peer: None,
            peer_figure: None,
            ratio: None,
            p99: None,
            beside: BTreeMap::new(),
            simulated: false,
        }
    }

    /// Adds the peer: `mine` and `theirs` hold the figures of the same rounds.
    #[must_use]
    pub fn against(mut self, peer: impl Into<String>, mine: &[f64], theirs: &[f64]) -> Self {
        self.peer = Some(peer.into());
        self.peer_figure = Some(Spread::of(theirs));
        self.ratio = ratio(self.better, mine, theirs);
        self
    }

    /// Adds the 99th percentiles of the same rounds.
    #[must_use]
    pub fn p99(mut self, unit: &'static str, mine: &[f64], theirs: &[f64]) -> Self {
        self.p99 = Some(Tail {
            unit,
            figure: Spread::of(mine),
            peer_figure: Spread::of(theirs),
            ratio: ratio(Better::Lower, mine, theirs),
        });
        self
    }

    /// Adds something to stand beside the figure.
    #[must_use]
    pub fn beside(mut self, name: &'static str, value: impl ToString) -> Self {
        self.beside.insert(name, value.to_string());
        self
    }
}

/// All rows of one benchmark.
#[derive(Clone, Debug)]
pub struct Report {
    /// "fabric", "kv", "redis".
    pub bench: &'static str,
    /// Provider in use, or what stands for it.
    pub provider: String,
    /// The machine and the build.
    pub environment: Environment,
    /// The results.
    pub rows: Vec<Row>,
    /// Of these, those that are printed as JSON already.
    told: usize,
}

#[derive(Serialize)]
struct Line<'a> {
    bench: &'a str,
    provider: &'a str,
    #[serde(flatten)]
    row: &'a Row,
    environment: &'a Environment,
}

impl Report {
    /// An empty report of this machine and build.
    pub fn new(bench: &'static str, provider: impl Into<String>) -> Self {
        let environment = Environment::detect();
        Self { bench, provider: provider.into(), environment, rows: Vec::new(), told: 0 }
    }

    /// Adds a row.
    pub fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Adds a row and prints it at once: a run that is cut short loses what it had not measured.
    /// With `--json` as the line that [`Report::show`] then leaves out, else as a note.
    pub fn tell(&mut self, row: Row, output: Output) -> anyhow::Result<()> {
        if output.json {
            self.show_row(&row, output)?;
            self.told = self.rows.len() + 1;
        }
        self.rows.push(if output.json { row } else { shown(row, output) });
        Ok(())
    }

    /// One row to standard output, as a JSON line.
    pub fn show_row(&self, row: &Row, output: Output) -> anyhow::Result<()> {
        let (bench, provider, environment) = (self.bench, &self.provider, &self.environment);
        output.object(&Line { bench, provider, row, environment })
    }

    /// To standard output: JSON lines with `--json`, else a table.
    pub fn show(&self, output: Output) -> anyhow::Result<()> {
        if output.json {
            return self.rows[self.told..].iter().try_for_each(|row| self.show_row(row, output));
        }
        Ok(output.bytes(self.text().as_bytes())?)
    }

    /// The table.
    pub fn text(&self) -> String {
        // Percentiles beside rates have columns only where some row has them.
        let tails = self.rows.iter().any(|row| row.p99.is_some());
        let mut head = vec![
            "CASE",
            "SUBJECT",
            "MEDIAN",
            "MIN-MAX",
            "UNIT",
            "PEER",
            "ITS MEDIAN",
            "TIMES BETTER",
        ];
        if tails {
            head.extend(["P99", "ITS P99", "TIMES BETTER"]);
        }
        head.push("BESIDE");
        let rows: Vec<Vec<String>> = self.rows.iter().map(|row| cells(row, tails)).collect();
        let mut text = table(&head, &rows);
        let repetitions = self.rows.iter().map(|row| row.repetitions).max().unwrap_or(0);
        text.push_str(&format!(
            "\nbench {}, provider {}, {repetitions} repetitions in alternate turns\n{}\n",
            self.bench,
            self.provider,
            self.environment.line()
        ));
        text
    }
}

/// Notes a row when it is measured, for the reader that waits and for a run that is cut short; the report comes
/// at the end.
pub fn shown(row: Row, output: Output) -> Row {
    let [least, figure, most] = [row.figure.min, row.figure.median, row.figure.max].map(number);
    let (case, subject, unit) = (&row.case, &row.subject, row.unit);
    let against = match (&row.peer, row.ratio) {
        (Some(peer), Some(ratio)) => format!(", {:.2} times better than {peer}", ratio.median),
        _ => String::new(),
    };
    output.note(format!("{case}, {subject}: {figure} {unit} ({least}-{most}){against}"));
    row
}

fn cells(row: &Row, tails: bool) -> Vec<String> {
    let dash = || "-".to_owned();
    let times = |ratio: Option<Spread>| {
        ratio.map_or_else(dash, |r| format!("{:.2} ({:.2}-{:.2})", r.median, r.min, r.max))
    };
    let beside: Vec<String> =
        row.beside.iter().map(|(name, value)| format!("{name} {value}")).collect();
    let mut cells = vec![
        row.case.clone(),
        if row.simulated { format!("{} (simulated)", row.subject) } else { row.subject.clone() },
        number(row.figure.median),
        format!("{}-{}", number(row.figure.min), number(row.figure.max)),
        row.unit.to_owned(),
        row.peer.clone().unwrap_or_else(dash),
        row.peer_figure.map_or_else(dash, |figure| number(figure.median)),
        times(row.ratio),
    ];
    match &row.p99 {
        Some(tail) => cells.extend([
            format!("{} {}", number(tail.figure.median), tail.unit),
            format!("{} {}", number(tail.peer_figure.median), tail.unit),
            times(tail.ratio),
        ]),
        None if tails => cells.extend([dash(), dash(), dash()]),
        None => {}
    }
    cells.push(beside.join(", "));
    cells
}

/// Three significant digits, thousands apart.
pub fn number(value: f64) -> String {
    let digits = match value.abs() {
        0.0 => 0,
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        v if v >= 1.0 => 2,
        _ => 3,
    };
    let text = format!("{value:.digits$}");
    let (whole, fraction) =
        text.split_once('.').map_or((text.as_str(), None), |(w, f)| (w, Some(f)));
    let mut spaced = String::new();
    for (i, c) in whole.chars().enumerate() {
        if i > 0
            && (whole.len() - i).is_multiple_of(3)
            && c.is_ascii_digit()
            && !spaced.ends_with('-')
        {
            spaced.push(',');
        }
        spaced.push(c);
    }
    fraction.map_or(spaced.clone(), |fraction| format!("{spaced}.{fraction}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("test", "shm");
        report.push(
            Row::new("8 B round trip", "shm", "us", Better::Lower, &[0.5, 0.4, 0.6])
                .against("ping-pong", &[0.5, 0.4, 0.6], &[0.4, 0.4, 0.3])
                .beside("verbs", 1),
        );
        report
    }

    #[test]
    fn the_ratio_pairs_figures_of_one_round_and_above_one_is_better() {
        let ratio = report().rows[0].ratio.unwrap();
        assert!((ratio.median - 0.8).abs() < 1e-9 && (ratio.max - 1.0).abs() < 1e-9, "{ratio:?}");
        let faster =
            Row::new("x", "a", "op/s", Better::Higher, &[20.0]).against("b", &[20.0], &[10.0]);
        assert!((faster.ratio.unwrap().median - 2.0).abs() < 1e-9);
    }

    #[test]
    fn a_peer_that_measured_nothing_gives_no_ratio() {
        let row = Row::new("x", "a", "us", Better::Lower, &[1.0]).against("b", &[1.0], &[0.0]);
        assert!(row.ratio.is_none());
    }

    #[test]
    fn the_median_of_an_even_number_lies_between() {
        assert!((Spread::of(&[1.0, 3.0]).median - 2.0).abs() < 1e-9);
        assert!((Spread::of(&[]).median).abs() < 1e-9);
    }

    #[test]
    fn table_and_json_carry_figure_ratio_and_environment() {
        let report = report();
        let text = report.text();
        assert!(text.contains("8 B round trip") && text.contains("0.80 (0.50-1.00)"), "{text}");
        assert!(text.contains("3 repetitions") && text.contains("commit"), "{text}");
        let line = serde_json::to_value(Line {
            bench: report.bench,
            provider: &report.provider,
            row: &report.rows[0],
            environment: &report.environment,
        })
        .unwrap();
        assert_eq!(line["figure"]["median"], 0.5);
        assert_eq!(line["beside"]["verbs"], "1");
        assert!(line["environment"]["kernel"].is_string());
    }

    #[test]
    fn a_tail_has_columns_of_its_own_and_above_one_is_shorter() {
        let mut report = report();
        assert!(!report.text().contains("P99"));
        let row = Row::new("SET", "beeline", "op/s", Better::Higher, &[3.0])
            .against("redis", &[3.0], &[2.0])
            .p99("ms", &[0.5, 0.4], &[0.6, 0.6]);
        report.push(row);
        let text = report.text();
        assert!(
            text.contains("P99") && text.contains("0.450 ms") && text.contains("1.35 (1.20-1.50)"),
            "{text}"
        );
        let row = serde_json::to_value(&report.rows[1]).unwrap();
        assert_eq!(row["p99"]["figure"]["max"], 0.5);
        assert_eq!(row["p99"]["unit"], "ms");
        assert!(serde_json::to_value(&report.rows[0]).unwrap().get("p99").is_none());
    }

    #[test]
    fn numbers_keep_three_digits() {
        for (value, text) in [
            (0.1234, "0.123"),
            (1.5, "1.50"),
            (12.34, "12.3"),
            (1_234_567.0, "1,234,567"),
            (-1234.0, "-1,234"),
        ] {
            assert_eq!(number(value), text);
        }
    }
}

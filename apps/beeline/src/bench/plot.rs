//! A report as a picture: per row the subject's bar and the peer's with their spread, and the ratio
//! of the two on an axis that all rows share.
//!
//! Bars are scaled within a row, because rows have different units; what compares across rows is
//! the ratio, right of 1 where the subject is better. Letters are the 8x8 ones of the `font8x8`
//! crate, drawn as pixels, so that a plot needs no font on the machine.

use std::path::Path;

use anyhow::Context as _;
use font8x8::{BASIC_FONTS, UnicodeFonts as _};
use plotters::prelude::{
    BitMapBackend, Color as _, IntoDrawingArea as _, RGBColor, Rectangle, WHITE,
};

use super::report::{Report, Row, Spread, number};

type Area<'a> = plotters::drawing::DrawingArea<BitMapBackend<'a>, plotters::coord::Shift>;

const INK: RGBColor = RGBColor(0x1c, 0x24, 0x30);
const FAINT: RGBColor = RGBColor(0x77, 0x77, 0x77);
const SUBJECT: RGBColor = RGBColor(0xe0, 0xa0, 0x20);
const PEER: RGBColor = RGBColor(0xb8, 0xbe, 0xc8);

/// The ratio's colours: better, worse, neither for sure.
const BETTER: RGBColor = RGBColor(0x2a, 0x8f, 0x4f);
const WORSE: RGBColor = RGBColor(0xc0, 0x3a, 0x2b);
const GRID: RGBColor = RGBColor(0xdd, 0xe0, 0xe6);
const BAND: RGBColor = RGBColor(0xf7, 0xf8, 0xfa);

const WIDTH: i32 = 1700;
const ROW: i32 = 72;
const HEAD: i32 = 172;
const FOOT: i32 = 16;
/// Where bars begin, and the longest they get.
const BARS_AT: i32 = 580;
const BARS: f64 = 380.0;
/// Where figures are written.
const FIGURES_AT: i32 = 980;
/// Where the axis of ratios begins and how long it is: from 1/8 to 8 times better.
const RATIOS_AT: i32 = 1232;
const RATIOS: f64 = 320.0;
const DOUBLINGS: f64 = 3.0;
/// Letters of a name that fit one line.
const NAME: usize = 34;

/// Draws `report` into the PNG file `path`.
///
/// Errors: the file cannot be written, or the report is empty.
pub fn draw(report: &Report, path: &Path) -> anyhow::Result<()> {
    anyhow::ensure!(!report.rows.is_empty(), "the report has no rows to plot");
    anyhow::ensure!(
        path.extension().is_some_and(|e| e.eq_ignore_ascii_case("png")),
        "--plot {}: the picture is a PNG; let the name end in .png",
        path.display()
    );
    let rows = i32::try_from(report.rows.len()).unwrap_or(i32::MAX).min(500);
    let height = HEAD + FOOT + rows * ROW;
    // The backend reports a file it cannot write only when dropped; ask first.
    std::fs::File::create(path).with_context(|| format!("--plot {}", path.display()))?;
    let size = (WIDTH.unsigned_abs(), height.unsigned_abs());
    let backend = BitMapBackend::new(path, size);
    let area = backend.into_drawing_area();
    paint(report, &area, height).map_err(|problem| anyhow::anyhow!("drawing: {problem}"))
}

fn paint(report: &Report, area: &Area<'_>, height: i32) -> Result<(), String> {
    area.fill(&WHITE).map_err(|e| e.to_string())?;
    text(area, (20, 16), 3, INK, &format!("beeline bench {}", report.bench))?;
    let repetitions = report.rows.iter().map(|row| row.repetitions).max().unwrap_or(0);
    let taken = format!("{}; {repetitions} turns each, in alternation", report.provider);
    text(area, (20, 50), 2, FAINT, &clip(&taken, 100))?;
    text(area, (20, 74), 2, FAINT, &clip(&report.environment.line(), 103))?;
    fill(area, (BARS_AT, 114), (16, 16), SUBJECT)?;
    text(area, (BARS_AT + 24, 114), 2, INK, "measured")?;
    fill(area, (BARS_AT + 184, 114), (16, 16), PEER)?;
    text(area, (BARS_AT + 208, 114), 2, INK, "peer, same run")?;
    whisker(area, (BARS_AT, BARS_AT + 36), 146)?;
    text(area, (BARS_AT + 48, 138), 2, INK, "least to most")?;
    let rows = i32::try_from(report.rows.len()).unwrap_or(i32::MAX).min(500);
    for row in (0..rows).step_by(2) {
        fill(area, (0, HEAD + row * ROW), (WIDTH, ROW), BAND)?;
    }
    if report.rows.iter().any(|row| row.ratio.is_some()) {
        paint_axis(area, height)?;
    }
    for (i, row) in report.rows.iter().enumerate().take(500) {
        paint_row(area, row, HEAD + i32::try_from(i).unwrap_or(0) * ROW)?;
    }
    Ok(())
}

/// The axis of ratios, over all rows.
fn paint_axis(area: &Area<'_>, height: i32) -> Result<(), String> {
    text(area, (RATIOS_AT - 40, 114), 2, INK, "times better (log scale)")?;
    let marks = [
        (0.125, "1/8"),
        (0.25, "1/4"),
        (0.5, "1/2"),
        (1.0, "1"),
        (2.0, "2"),
        (4.0, "4"),
        (8.0, "8"),
    ];
    for (ratio, label) in marks {
        let x = ratio_at(ratio);
        let half = i32::try_from(label.len() * 8).unwrap_or(0);
        text(area, (x - half, 142), 2, INK, label)?;
        let (color, width) = if ratio == 1.0 { (INK, 2) } else { (GRID, 1) };
        fill(area, (x, HEAD - 8), (width, height - FOOT - HEAD + 8), color)?;
    }
    Ok(())
}

#[expect(clippy::cast_possible_truncation, reason = "clamped to the picture")]
fn ratio_at(ratio: f64) -> i32 {
    let doublings = ratio.max(f64::MIN_POSITIVE).log2().clamp(-DOUBLINGS, DOUBLINGS);
    RATIOS_AT + ((doublings + DOUBLINGS) / (2.0 * DOUBLINGS) * RATIOS) as i32
}

fn paint_row(area: &Area<'_>, row: &Row, top: i32) -> Result<(), String> {
    let (first, second) = in_two(&row.case, NAME);
    text(area, (20, top + 6), 2, INK, first)?;
    text(area, (20, top + 26), 2, INK, &clip(second, NAME))?;
    let versus = row.peer.as_ref().map_or_else(String::new, |peer| format!(" against {peer}"));
    let simulated = if row.simulated { " (simulated)" } else { "" };
    let line = format!("{}{simulated}{versus}", row.subject);
    text(area, (20, top + if second.is_empty() { 36 } else { 48 }), 2, FAINT, &clip(&line, NAME))?;
    let whole = if row.unit == "%" { 100.0 } else { 0.0 };
    let longest = row.peer_figure.map_or(whole, |peer| peer.max).max(row.figure.max);
    bar(area, top + 10, &row.figure, longest, SUBJECT)?;
    let label = format!("{} {}", short(row.figure.median), row.unit);
    text(area, (FIGURES_AT, top + 12), 2, INK, &clip(&label, 15))?;
    if let Some(peer) = &row.peer_figure {
        bar(area, top + 40, peer, longest, PEER)?;
        let label = format!("{} {}", short(peer.median), row.unit);
        text(area, (FIGURES_AT, top + 42), 2, FAINT, &clip(&label, 15))?;
    }
    let Some(ratio) = &row.ratio else { return Ok(()) };
    let middle = top + ROW / 2;
    let color = if ratio.min > 1.0 {
        BETTER
    } else if ratio.max < 1.0 {
        WORSE
    } else {
        INK
    };
    whisker(area, (ratio_at(ratio.min), ratio_at(ratio.max)), middle)?;
    fill(area, (ratio_at(ratio.median) - 5, middle - 5), (11, 11), color)?;
    text(area, (RATIOS_AT + 350, top + 28), 2, color, &format!("{:.2}", ratio.median))
}

/// Three significant digits with a suffix in place of further ones.
fn short(value: f64) -> String {
    match value {
        v if v >= 1e9 => format!("{} G", number(v / 1e9)),
        v if v >= 1e6 => format!("{} M", number(v / 1e6)),
        v if v >= 1e4 => format!("{} k", number(v / 1e3)),
        v => number(v),
    }
}

/// A filled rectangle: corner, then width and height.
fn fill(area: &Area<'_>, at: (i32, i32), size: (i32, i32), color: RGBColor) -> Result<(), String> {
    let corners = [at, (at.0 + size.0, at.1 + size.1)];
    area.draw(&Rectangle::new(corners, color.filled())).map_err(|e| e.to_string())
}

/// A line from least to most with ends that can be seen.
fn whisker(area: &Area<'_>, (from, to): (i32, i32), y: i32) -> Result<(), String> {
    fill(area, (from, y), ((to - from).max(1), 1), INK)?;
    fill(area, (from, y - 4), (1, 9), INK)?;
    fill(area, (to, y - 4), (1, 9), INK)
}

fn bar(
    area: &Area<'_>,
    top: i32,
    figure: &Spread,
    longest: f64,
    color: RGBColor,
) -> Result<(), String> {
    #[expect(clippy::cast_possible_truncation, reason = "at most BARS pixels")]
    let at = |value: f64| {
        BARS_AT + ((value / longest.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0) * BARS) as i32
    };
    fill(area, (BARS_AT, top), ((at(figure.median) - BARS_AT).max(1), 20), color)?;
    if figure.max > figure.min {
        whisker(area, (at(figure.min), at(figure.max)), top + 10)?;
    }
    Ok(())
}

fn text(
    area: &Area<'_>,
    at: (i32, i32),
    scale: i32,
    color: RGBColor,
    text: &str,
) -> Result<(), String> {
    let mut left = at.0;
    for character in text.chars() {
        let glyph = BASIC_FONTS.get(character).or_else(|| BASIC_FONTS.get('?')).unwrap_or([0; 8]);
        for (y, bits) in (0..).zip(glyph) {
            for x in (0..8).filter(|x| bits & (1 << x) != 0) {
                let (x, y) = (left + x * scale, at.1 + y * scale);
                let corners = [(x, y), (x + scale, y + scale)];
                area.draw(&Rectangle::new(corners, color.filled())).map_err(|e| e.to_string())?;
            }
        }
        left += 8 * scale;
    }
    Ok(())
}

/// `text` on two lines of at most `longest` letters, the first as long as words allow; what the
/// second has no room for is left to it.
fn in_two(text: &str, longest: usize) -> (&str, &str) {
    let Some((end, _)) = text.char_indices().nth(longest) else { return (text, "") };
    let room = &text[..end];
    let words =
        if text[end..].starts_with(' ') { room.len() } else { room.rfind(' ').unwrap_or(end) };
    (&text[..words], text[words..].trim_start())
}

fn clip(text: &str, longest: usize) -> String {
    if text.chars().count() <= longest {
        return text.to_owned();
    }
    text.chars().take(longest.saturating_sub(2)).chain("..".chars()).collect()
}

#[cfg(test)]
mod tests {
    use super::super::report::Better;
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("test", "shm");
        report.push(Row::new("8 B round trip", "shm", "us", Better::Lower, &[0.5]).against(
            "ping-pong",
            &[0.5],
            &[0.4],
        ));
        report
    }

    #[test]
    fn a_report_becomes_a_png() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("out.png");
        draw(&report(), &path).unwrap();
        let bytes = std::fs::read(&path).unwrap();
        assert!(bytes.starts_with(b"\x89PNG") && bytes.len() > 2000, "{} bytes", bytes.len());
    }

    #[test]
    fn a_long_name_takes_two_lines_and_loses_nothing() {
        assert_eq!(in_two("64 B put, dram", 34), ("64 B put, dram", ""));
        let name = "space saved, Zipf 0.99, segments of 16.0 MiB";
        assert_eq!(in_two(name, 34), ("space saved, Zipf 0.99, segments", "of 16.0 MiB"));
        assert_eq!(in_two("four five", 4), ("four", "five"));
        assert_eq!(in_two("fourfive", 4), ("four", "five"));
    }

    #[test]
    fn a_plot_that_cannot_be_written_is_an_error_that_names_the_file() {
        let error = draw(&report(), Path::new("/nonexistent/out.png")).unwrap_err();
        assert!(format!("{error:#}").contains("/nonexistent/out.png"));
        let error = draw(&report(), Path::new("out.svg")).unwrap_err();
        assert!(error.to_string().contains(".png"));
    }
}

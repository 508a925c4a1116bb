//! A report as a picture: one bar per row, the peer's beside it, the ratio written at the end.
//!
//! Bars are scaled within a row, because rows have different units; what compares across rows is
//! the ratio. Letters are the 8x8 ones of the `font8x8` crate, drawn as pixels, so that a plot
//! needs no font on the machine.

use std::path::Path;

use anyhow::Context as _;
use font8x8::{BASIC_FONTS, UnicodeFonts as _};
use plotters::prelude::{
    BitMapBackend, Color as _, IntoDrawingArea as _, RGBColor, Rectangle, WHITE,
};

use super::report::{Report, Row, number};

type Area<'a> = plotters::drawing::DrawingArea<BitMapBackend<'a>, plotters::coord::Shift>;

const INK: RGBColor = RGBColor(0x1c, 0x24, 0x30);
const FAINT: RGBColor = RGBColor(0x77, 0x77, 0x77);
const SUBJECT: RGBColor = RGBColor(0xe0, 0xa0, 0x20);
const PEER: RGBColor = RGBColor(0xb8, 0xbe, 0xc8);

const WIDTH: i32 = 1400;
const ROW: i32 = 64;
const HEAD: i32 = 70;
const FOOT: i32 = 50;
/// Where bars begin, and the longest they get.
const BARS_AT: i32 = 560;
const BARS: f64 = 420.0;

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
    text(area, (20, 20), 3, INK, &format!("beeline bench {}", report.bench))?;
    for (i, row) in report.rows.iter().enumerate().take(500) {
        let top = HEAD + i32::try_from(i).unwrap_or(0) * ROW;
        paint_row(area, row, top)?;
    }
    let stamp = format!("provider {}; {}", report.provider, report.environment.line());
    text(area, (20, height - 30), 1, FAINT, &stamp)
}

fn paint_row(area: &Area<'_>, row: &Row, top: i32) -> Result<(), String> {
    text(area, (20, top + 8), 2, INK, &clip(&row.case, 32))?;
    let versus = row.peer.as_ref().map_or_else(String::new, |peer| format!(" vs {peer}"));
    text(area, (20, top + 32), 1, FAINT, &clip(&format!("{}{versus}", row.subject), 64))?;
    let peer = row.peer_figure.map_or(0.0, |figure| figure.median);
    let longest = row.figure.median.max(peer).max(f64::MIN_POSITIVE);
    bar(area, top + 4, row.figure.median / longest, SUBJECT)?;
    if row.peer.is_some() {
        bar(area, top + 28, peer / longest, PEER)?;
    }
    let label = format!("{} {}", number(row.figure.median), row.unit);
    let end = BARS_AT + 440;
    text(area, (end, top + 8), 2, INK, &clip(&label, 14))?;
    if row.peer.is_some() {
        text(area, (end, top + 32), 1, FAINT, &format!("{} {}", number(peer), row.unit))?;
    }
    if let Some(ratio) = row.ratio {
        text(area, (end + 240, top + 8), 2, INK, &format!("x{:.2}", ratio.median))?;
        let spread = format!("{:.2} - {:.2}", ratio.min, ratio.max);
        text(area, (end + 240, top + 32), 1, FAINT, &spread)?;
    }
    Ok(())
}

fn bar(area: &Area<'_>, top: i32, share: f64, color: RGBColor) -> Result<(), String> {
    #[expect(clippy::cast_possible_truncation, reason = "at most BARS pixels")]
    let width = (share.clamp(0.0, 1.0) * BARS) as i32;
    area.draw(&Rectangle::new([(BARS_AT, top), (BARS_AT + width.max(1), top + 20)], color.filled()))
        .map_err(|e| e.to_string())
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
    fn a_plot_that_cannot_be_written_is_an_error_that_names_the_file() {
        let error = draw(&report(), Path::new("/nonexistent/out.png")).unwrap_err();
        assert!(format!("{error:#}").contains("/nonexistent/out.png"));
        let error = draw(&report(), Path::new("out.svg")).unwrap_err();
        assert!(error.to_string().contains(".png"));
    }
}

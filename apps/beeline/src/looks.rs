//! Looking again and again: what every `top` of this program does.
//!
//! A command says how it looks and how it shows a look beside the one before it; the pace, the count and
//! the screen that is drawn over are here.

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use crate::exit::{Exit, Failure};
use crate::output::Output;

/// Clears a terminal and goes to its first line.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Looks once, and then `count` times, or until interrupted, after each `interval`; each of these is
/// shown: the look before, the look, and the time between them.
pub fn repeat<L>(
    interval: Duration,
    count: Option<u32>,
    mut look: impl FnMut() -> Result<L, Failure>,
    mut show: impl FnMut(&L, &L, Duration) -> Result<(), Failure>,
) -> Result<Exit, Failure> {
    let mut before = look()?;
    let mut since = Instant::now();
    let mut left = count;
    while left != Some(0) {
        std::thread::sleep(interval);
        let now = look()?;
        let time = since.elapsed();
        since = Instant::now();
        show(&before, &now, time)?;
        before = now;
        left = left.map(|left| left - 1);
    }
    Ok(Exit::Done)
}

/// Writes a screen, over the one before where a person looks.
pub fn screen(output: Output, text: &str) -> Result<(), Failure> {
    let clear = if std::io::stdout().is_terminal() { CLEAR } else { "" };
    output.bytes(format!("{clear}{text}").as_bytes())?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_look_is_shown_once_beside_the_one_before_it_and_a_failed_one_ends_it() {
        let (mut looks, mut shown) = (0, Vec::new());
        let done = repeat(
            Duration::ZERO,
            Some(3),
            || {
                looks += 1;
                Ok(looks)
            },
            |before, now, _| {
                shown.push((*before, *now));
                Ok(())
            },
        );
        assert!(done.is_ok());
        assert_eq!((looks, shown), (4, vec![(1, 2), (2, 3), (3, 4)]));
        let mut looks = 0;
        let failed = repeat(
            Duration::ZERO,
            None,
            || {
                looks += 1;
                if looks < 3 { Ok(()) } else { Err(anyhow::anyhow!("it is gone").into()) }
            },
            |(), (), _| Ok(()),
        );
        assert!(failed.is_err() && looks == 3);
    }
}

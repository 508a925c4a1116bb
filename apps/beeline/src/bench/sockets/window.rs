//! The window alone, between two threads that spin: no proxy, no queue, no program around it.

use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Context as _;
use beeline_ntb::{Cable, Window, WindowUrl};

use super::super::turns::{online, pin};

/// Bytes of each direction.
const BYTES: usize = 4 << 20;
/// Messages under way in [`stream`].
const SLOTS: usize = 32;

fn pause() {
    if online() < 2 { std::thread::yield_now() } else { std::hint::spin_loop() }
}

/// Both ends of a fresh window, whose folder is gone with the first of the three.
fn ends() -> anyhow::Result<(tempfile::TempDir, Cable, Cable)> {
    let folder = tempfile::tempdir().context("a folder for the window")?;
    let plug = |side: usize| -> anyhow::Result<Cable> {
        let file = folder.path().join("bare");
        let url = format!("ntb://{}?side={side}&size={BYTES}", file.display());
        Ok(Cable::plug(&url.parse::<WindowUrl>()?)?)
    };
    let (one, other) = (plug(0)?, plug(1)?);
    Ok((folder, one, other))
}

/// Posts `size` bytes and a word behind them, as a packet is posted.
fn post(window: &Window, at: usize, bytes: &[u8], word: u64) {
    window.outbound.post_bytes(at + 64, bytes);
    window.outbound.fence();
    window.outbound.post_word(at, word);
    window.outbound.fence();
}

/// Waits for `word` and takes the bytes behind it.
fn take(window: &Window, at: usize, bytes: &mut [u8], word: u64) {
    while window.inbound.word(at).load(Ordering::Acquire) != word {
        pause();
    }
    window.inbound.read(at + 64, bytes);
}

/// Microseconds for `size` bytes there and back.
pub fn ping_pong(rounds: u64, size: usize) -> anyhow::Result<f64> {
    let (_folder, one, other) = ends()?;
    let rounds = rounds.max(1);
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || -> anyhow::Result<()> {
            pin(1)?;
            let mut bytes = vec![0; size];
            for round in 1..=rounds {
                take(&other.window, 0, &mut bytes, round);
                post(&other.window, 0, &bytes, round);
            }
            Ok(())
        });
        let asker = scope.spawn(move || -> anyhow::Result<f64> {
            pin(0)?;
            let mut bytes = vec![7; size];
            let began = Instant::now();
            for round in 1..=rounds {
                post(&one.window, 0, &bytes, round);
                take(&one.window, 0, &mut bytes, round);
            }
            #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
            Ok(began.elapsed().as_secs_f64() * 1e6 / rounds as f64)
        });
        let figure = asker.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))?;
        echo.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))??;
        figure
    })
}

/// Gigabytes a second, each byte copied into the window and out of it: what moves a message of this
/// size at best.
pub fn stream(rounds: u64, size: usize) -> anyhow::Result<f64> {
    let (_folder, one, other) = ends()?;
    let rounds = rounds.max(1);
    let slot = (size + 64).next_multiple_of(64);
    anyhow::ensure!(8192 + slot * SLOTS <= BYTES, "{size} bytes are too many for this window");
    let at = |round: u64| 4096 + usize::try_from(round).unwrap_or(0) % SLOTS * slot;
    std::thread::scope(|scope| {
        let reader = scope.spawn(move || -> anyhow::Result<()> {
            pin(1)?;
            let mut bytes = vec![0; size];
            for round in 1..=rounds {
                take(&other.window, at(round), &mut bytes, round);
                other.window.outbound.post_word(0, round);
                other.window.outbound.fence();
            }
            Ok(())
        });
        let writer = scope.spawn(move || -> anyhow::Result<f64> {
            pin(0)?;
            let bytes = vec![7; size];
            let began = Instant::now();
            let read = || one.window.inbound.word(0).load(Ordering::Acquire);
            for round in 1..=rounds {
                while round - read() > SLOTS as u64 - 1 {
                    pause();
                }
                post(&one.window, at(round), &bytes, round);
            }
            while read() != rounds {
                pause();
            }
            #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
            Ok((rounds * size as u64) as f64 / began.elapsed().as_secs_f64() / 1e9)
        });
        let figure = writer.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))?;
        reader.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))??;
        figure
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tiny_turn_of_each_comes_to_its_end() {
        assert!(ping_pong(50, 8).unwrap() > 0.0);
        assert!(stream(100, 4096).unwrap() > 0.0);
    }
}

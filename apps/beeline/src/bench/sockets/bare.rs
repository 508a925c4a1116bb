//! The ring alone: the same memory, headers and credits between two threads that spin, without
//! sockets, descriptors or calls of the C library around it.

use std::time::Instant;

use beeline_sockets::bare::BareEnd;
use beeline_sockets::segment::DEFAULT_RING_BYTES;

use super::super::turns::{online, pin};
use super::{BULK, Work};

fn pause() {
    if online() < 2 { std::thread::yield_now() } else { std::hint::spin_loop() }
}

fn push_all(end: &mut BareEnd, bytes: &[u8]) -> anyhow::Result<()> {
    let mut sent = 0;
    while sent < bytes.len() {
        let pushed = end.push(&bytes[sent..])?;
        sent += pushed;
        if pushed == 0 {
            pause();
        }
    }
    Ok(())
}

fn pop_some(end: &mut BareEnd, bytes: &mut [u8]) -> anyhow::Result<usize> {
    loop {
        let taken = end.pop(bytes)?;
        if taken > 0 {
            return Ok(taken);
        }
        pause();
    }
}

/// One turn: the figure in the unit of `work`.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn turn(work: Work, rounds: u64) -> anyhow::Result<f64> {
    let [mut one, mut other] = BareEnd::pair(DEFAULT_RING_BYTES)?;
    let rounds = rounds.max(1);
    let size = if work == Work::Bulk { BULK } else { 8 };
    std::thread::scope(|scope| {
        let echo = scope.spawn(move || -> anyhow::Result<()> {
            pin(1)?;
            let mut bytes = vec![0; 256 << 10];
            if work == Work::PingPong {
                for _ in 0..rounds {
                    let taken = pop_some(&mut other, &mut bytes[..8])?;
                    push_all(&mut other, &bytes[..taken])?;
                }
                return Ok(());
            }
            let mut left = rounds * size as u64;
            while left > 0 {
                left -= pop_some(&mut other, &mut bytes)? as u64;
            }
            push_all(&mut other, &[1; 8])
        });
        let asker = scope.spawn(move || -> anyhow::Result<f64> {
            pin(0)?;
            let bytes = vec![7; size];
            let mut answer = [0; 8];
            let began = Instant::now();
            for _ in 0..rounds {
                push_all(&mut one, &bytes)?;
                if work == Work::PingPong {
                    pop_some(&mut one, &mut answer)?;
                }
            }
            if work != Work::PingPong {
                pop_some(&mut one, &mut answer)?;
            }
            let seconds = began.elapsed().as_secs_f64();
            Ok(match work {
                Work::PingPong => seconds * 1e6 / rounds as f64,
                Work::Bulk => (rounds * size as u64) as f64 / seconds / 1e9,
                _ => rounds as f64 / seconds,
            })
        });
        let figure = asker.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))?;
        echo.join().map_err(|_| anyhow::anyhow!("a measuring thread panicked"))??;
        figure
    })
}

//! Alternate turns, and pinning to cores.

use anyhow::Context as _;

use crate::output::Output;

/// One contender: its name and how to take one turn. A turn returns its figure.
pub struct Contender<'a> {
    /// As in the report.
    pub name: &'a str,
    /// One turn.
    pub turn: Box<dyn FnMut() -> anyhow::Result<f64> + 'a>,
}

impl<'a> Contender<'a> {
    /// A contender.
    pub fn new(name: &'a str, turn: impl FnMut() -> anyhow::Result<f64> + 'a) -> Self {
        Self { name, turn: Box::new(turn) }
    }
}

/// Lets every contender take `turns` turns, one after the other, starting with another one each
/// round: whatever drifts (frequency, neighbours, caches) hits all alike. Returns the figures in
/// the contenders' order; those of one round stand at the same index.
///
/// Errors: the first turn that failed, with the contender's name.
pub fn alternate(
    turns: u32,
    contenders: &mut [Contender<'_>],
    output: Output,
) -> anyhow::Result<Vec<Vec<f64>>> {
    let progress = output.progress(u64::from(turns) * contenders.len() as u64, "measuring");
    let mut figures = vec![Vec::with_capacity(turns as usize); contenders.len()];
    for round in 0..turns as usize {
        for step in 0..contenders.len() {
            let i = (round + step) % contenders.len();
            let contender = &mut contenders[i];
            let figure = (contender.turn)()
                .with_context(|| format!("{}, turn {}", contender.name, round + 1))?;
            figures[i].push(figure);
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(figures)
}

/// Processors the program was given, whatever a thread of it is pinned to since.
pub fn online() -> usize {
    allowed().len()
}

fn allowed() -> &'static [usize] {
    static ALLOWED: std::sync::OnceLock<Vec<usize>> = std::sync::OnceLock::new();
    ALLOWED.get_or_init(|| {
        // The first thread is never pinned by this program: it only waits.
        let first = rustix::process::getpid();
        let set = rustix::thread::sched_getaffinity(Some(first)).unwrap_or_default();
        (0..rustix::thread::CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
    })
}

/// Keeps the calling thread, and threads it starts from now on, on one of the allowed processors:
/// the `index`-th, counted round.
///
/// Errors: the kernel refused.
pub fn pin(index: usize) -> anyhow::Result<usize> {
    let cores = allowed();
    let core = *cores.get(index % cores.len().max(1)).context("no processor is allowed")?;
    pin_to(core)?;
    Ok(core)
}

/// Keeps the calling thread, and threads it starts from now on, on `count` of the allowed processors from the
/// `first` on, counted round.
///
/// Errors: the kernel refused.
pub fn pin_to_several(first: usize, count: usize) -> anyhow::Result<()> {
    let all = allowed();
    let cores: Vec<usize> = all.iter().cycle().skip(first).take(count.max(1)).copied().collect();
    beeline_os::affinity::allow_current_thread(&cores).context("staying on some processors")
}

/// Lets the calling thread run on every processor the program was given.
///
/// Errors: the kernel refused.
pub fn unpin() -> anyhow::Result<()> {
    beeline_os::affinity::allow_current_thread(allowed()).context("leaving a processor")
}

/// The processor that [`pin`] takes for `index`, for a process started from a pinned thread.
pub fn core(index: usize) -> usize {
    let cores = allowed();
    cores.get(index % cores.len().max(1)).copied().unwrap_or(0)
}

/// Keeps the calling thread on processor `core`.
///
/// Errors: the kernel refused.
pub fn pin_to(core: usize) -> anyhow::Result<()> {
    beeline_os::affinity::pin_current_thread(core)
        .with_context(|| format!("pinning to processor {core}"))
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn contenders_take_turns_and_the_first_changes_each_round() {
        let order = RefCell::new(Vec::new());
        let turn = |name, figure| {
            let order = &order;
            Contender::new(name, move || {
                order.borrow_mut().push(name);
                Ok(figure)
            })
        };
        let figures =
            alternate(3, &mut [turn("a", 1.0), turn("b", 2.0)], Output::default()).unwrap();
        assert_eq!(figures, [[1.0; 3], [2.0; 3]]);
        assert_eq!(*order.borrow(), ["a", "b", "b", "a", "a", "b"]);
    }

    #[test]
    fn a_failed_turn_names_its_contender() {
        let error = alternate(
            1,
            &mut [Contender::new("redis", || anyhow::bail!("gone"))],
            Output::default(),
        )
        .unwrap_err();
        assert_eq!(format!("{error:#}"), "redis, turn 1: gone");
    }

    #[test]
    fn a_pinned_thread_stays_on_its_core() {
        let core = std::thread::spawn(|| {
            pin(1).map(|core| (core, beeline_os::affinity::allowed().unwrap()))
        })
        .join()
        .unwrap()
        .unwrap();
        assert_eq!(core.1, [core.0]);
    }
}

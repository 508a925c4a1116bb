//! How long the benchmark takes, on machines too where a system call is dear.
//!
//! Each case gets an equal share of the time that is left. Two short trials of its contenders tell what a turn costs
//! whatever it does (processes, connections) and what its rounds cost. Where the turns would take longer than the
//! share, all contenders do fewer rounds, by the same factor, then fewer turns; a case that finds no time left is
//! left out by name.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Rounds are scaled in thousandths.
const WHOLE: u32 = 1000;
/// Never fewer than these thousandths, nor than so many.
const LEAST: u32 = 2;
const LEAST_ROUNDS: u64 = 20;
/// What the two trials do, in thousandths.
const TRIALS: [u32; 2] = [10, 40];

/// See the module's documentation.
#[derive(Clone, Debug)]
pub struct Budget {
    end: Instant,
    cases: Arc<AtomicU32>,
    scale: Arc<AtomicU32>,
}

impl Default for Budget {
    /// No end within a day.
    fn default() -> Self {
        Self::new(Duration::from_secs(86_400), 1)
    }
}

impl Budget {
    /// So much time for so many cases, from now on.
    pub fn new(time: Duration, cases: u32) -> Self {
        let shared = |value| Arc::new(AtomicU32::new(value));
        Self { end: Instant::now() + time, cases: shared(cases), scale: shared(WHOLE) }
    }

    /// What the next case may take; `None`: there is no time left.
    pub fn share(&self) -> Option<Duration> {
        let left = self.end.saturating_duration_since(Instant::now());
        let share = left / self.cases.load(Ordering::Relaxed).max(1);
        self.skip(1);
        Some(share).filter(|share| !share.is_zero())
    }

    /// Gives back the shares of cases that are left out for other reasons.
    pub fn skip(&self, cases: u32) {
        let left = self.cases.load(Ordering::Relaxed).saturating_sub(cases);
        self.cases.store(left, Ordering::Relaxed);
    }

    /// `rounds`, as far as they fit.
    pub fn rounds(&self, rounds: u64) -> u64 {
        let scaled = rounds.saturating_mul(self.scale.load(Ordering::Relaxed).into());
        (scaled / u64::from(WHOLE)).max(LEAST_ROUNDS.min(rounds))
    }

    /// Finds the scale at which `turns` turns fit into `share`; how many of them fit. `trial` does one turn of each
    /// contender.
    ///
    /// Errors: the trial's.
    pub fn fit(
        &self,
        turns: u32,
        share: Duration,
        mut trial: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<u32> {
        let begun = Instant::now();
        let mut took = [Duration::ZERO; 2];
        for (took, scale) in took.iter_mut().zip(TRIALS) {
            self.scale.store(scale, Ordering::Relaxed);
            let begun = Instant::now();
            trial()?;
            *took = begun.elapsed();
        }
        let left = share.saturating_sub(begun.elapsed());
        let (scale, turns) = fitting(took, turns, left);
        self.scale.store(scale, Ordering::Relaxed);
        Ok(turns)
    }

    /// Whole turns again.
    pub fn reset(&self) {
        self.scale.store(WHOLE, Ordering::Relaxed);
    }
}

/// Scale and turns, from what the trials took.
fn fitting(took: [Duration; 2], turns: u32, left: Duration) -> (u32, u32) {
    let [first, second] = took.map(|took| took.as_secs_f64());
    let each = (second - first).max(0.0) / f64::from(TRIALS[1] - TRIALS[0]);
    let fixed = (first - each * f64::from(TRIALS[0])).max(0.0);
    let turn_s = left.as_secs_f64() / f64::from(turns.max(1));
    let scale = if each > 0.0 { (turn_s - fixed) / each } else { f64::from(WHOLE) };
    let scale = scale.clamp(f64::from(LEAST), f64::from(WHOLE)) as u32;
    let needs_s = fixed + each * f64::from(scale);
    let fit = if needs_s > 0.0 { left.as_secs_f64() / needs_s } else { f64::from(turns) };
    (scale, turns.min((fit + 0.001) as u32).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the trials take where a turn costs `fixed` and its rounds `whole` more, milliseconds.
    fn trials(fixed: u64, whole: u64) -> [Duration; 2] {
        TRIALS.map(|scale| Duration::from_micros(fixed * 1000 + whole * u64::from(scale)))
    }

    #[test]
    fn what_fits_is_done_whole_and_the_rest_is_cut_to_its_share() {
        let share = Duration::from_secs(6);
        assert_eq!(fitting(trials(100, 500), 3, share), (WHOLE, 3));
        // Two seconds a turn: a tenth of a second for processes, and 19 of 40 for rounds.
        let (scale, turns) = fitting(trials(100, 4000), 3, share);
        assert!((470..=476).contains(&scale) && turns == 3, "{scale}, {turns}");
        // A hundred times slower: no more than one turn of the fewest rounds.
        assert_eq!(fitting(trials(10_000, 400_000), 3, share), (LEAST, 1));
        // Turns that cost much whatever they do are fewer.
        assert_eq!(fitting(trials(2500, 100), 3, share), (LEAST, 2));
        assert_eq!(fitting([Duration::ZERO; 2], 3, share), (WHOLE, 3));
    }

    #[test]
    fn a_share_is_what_is_left_by_the_cases_that_are_left() {
        let budget = Budget::new(Duration::from_secs(1000), 10);
        budget.skip(5);
        let share = budget.share().unwrap();
        assert!((150..=200).contains(&share.as_secs()), "{share:?}");
        assert_eq!(budget.rounds(100_000), 100_000);
        budget.scale.store(5, Ordering::Relaxed);
        assert_eq!((budget.rounds(100_000), budget.rounds(1000), budget.rounds(7)), (500, 20, 7));
        assert!(Budget::new(Duration::ZERO, 3).share().is_none());
    }
}

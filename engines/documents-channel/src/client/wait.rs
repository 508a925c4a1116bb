//! A client that waits for an outcome: it polls for a while, then sleeps.

use std::time::Duration;

use beeline_fabric::WorkCompletion;

use super::{BATCH, ChannelClient, Outcome, RequestError};

/// Polls between two looks at the clock.
const LOOKS: u32 = 64;
/// Longest sleep, after which deadlines are looked at again.
const NAP: Duration = Duration::from_millis(100);

impl ChannelClient {
    /// Whether a request has its outcome, after a look at what arrived; [`ChannelClient::wait`] returns at once then.
    pub fn is_done(&mut self, index: u32) -> bool {
        self.poll();
        self.broken || !self.pending.contains_key(&index)
    }

    /// Waits for the outcome of a request: polls for `spin`, or until the thread finds its processor crowded
    /// ([`Patience`](beeline_os::patience::Patience)), then sleeps. Other outcomes stay for
    /// [`ChannelClient::take_outcome`].
    pub fn wait(&mut self, index: u32, spin: Duration) -> Outcome {
        // Taken at the first look at the clock: a reply that comes before costs none.
        let mut start = None;
        let spin = u64::try_from(spin.as_nanos()).unwrap_or(u64::MAX);
        let mut looks = 0_u32;
        let mut first = true;
        let mut polls = self.patience.begins();
        // How long the yield before the latest look took.
        let mut yielded_ns = 0;
        loop {
            let came = self.poll() > 0 || self.broken;
            if !came && !std::mem::take(&mut first) {
                looks += 1;
                polls = polls && self.patience.goes_on(std::mem::take(&mut yielded_ns));
                if !polls {
                    self.expire();
                    self.sleep(NAP);
                    first = true;
                } else if looks.is_multiple_of(LOOKS) {
                    let now = self.parts.clock.monotonic_ns();
                    let start = *start.get_or_insert(now);
                    self.expire();
                    first = true;
                    if now.saturating_sub(start) < spin {
                        std::thread::yield_now();
                        yielded_ns = self.parts.clock.monotonic_ns().saturating_sub(now);
                    } else {
                        self.sleep(NAP);
                    }
                } else {
                    std::hint::spin_loop();
                }
                continue;
            }
            let at = self.results.iter().position(|(found, _)| *found == index);
            if let Some((_, outcome)) = at.and_then(|at| self.results.remove(at)) {
                return outcome;
            }
            if !self.pending.contains_key(&index) {
                return Err(RequestError::Broken);
            }
        }
    }

    /// Sleeps until something arrives, a deadline passes or `limit` is over, and handles what arrived.
    pub fn sleep(&mut self, limit: Duration) {
        let now = self.parts.clock.monotonic_ns();
        let next = self.pending.values().map(|pending| pending.deadline_ns).min();
        let left = next.map_or(limit, |at| Duration::from_nanos(at.saturating_sub(now)).min(limit));
        let mut completions = [WorkCompletion::EMPTY; BATCH];
        self.counters.sleeps += 1;
        match self.parts.queue.wait(&mut completions, left) {
            Ok(count) => self.take_all(&completions[..count]),
            Err(_) => self.fail_all(),
        }
        self.expire();
    }
}

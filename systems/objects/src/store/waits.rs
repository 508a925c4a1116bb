//! Requests that wait, and time.
//!
//! Invariants: a number names one waiting request of its client at a time, its serial that one for
//! ever; what waits for memory is found by serial, so that a later request of the same number is
//! never taken for it.

use super::core::{Core, FETCH_AGAIN_NS, MOST_WAITING, Timer, Wait};
use super::planted::{Planted, planted};
use crate::id::ObjectId;
use crate::wire::{Operation, Request, Status};

impl Core {
    /// Notes a request that cannot be answered now. Nothing when the client has too many.
    pub(super) fn wait(&mut self, client: u32, tag: u32, request: Request) -> Option<u64> {
        let known = self.clients.get_mut(&client)?;
        if known.waiting.len() >= MOST_WAITING {
            self.answer(client, tag, Status::Limit);
            return None;
        }
        known.waiting.insert(tag);
        let after_ns = request.timeout_us.saturating_mul(1000);
        let at_ns = self.now_ns.saturating_add(after_ns);
        let timer = (at_ns < u64::MAX).then(|| self.timer(at_ns, Timer::Wait { client, tag }));
        self.sequence += 1;
        let serial = self.sequence;
        self.waits.insert((client, tag), Wait { request, timer, serial });
        Some(serial)
    }

    pub(super) fn is_waiting(&self, client: u32, tag: u32, serial: u64) -> bool {
        let any = planted(Planted::TakeAnotherRequest);
        self.waits.get(&(client, tag)).is_some_and(|wait| wait.serial == serial || any)
    }

    pub(super) fn end_wait(&mut self, client: u32, tag: u32) {
        if let Some(Wait { timer: Some(timer), .. }) = self.waits.remove(&(client, tag)) {
            self.timers.remove(&timer);
        }
        if let Some(known) = self.clients.get_mut(&client) {
            known.waiting.remove(&tag);
        }
    }

    pub(super) fn forget_waiter(&mut self, id: ObjectId, client: u32, tag: u32) {
        if let Some(waiters) = self.by_id.get_mut(&id) {
            waiters.retain(|waiter| *waiter != (client, tag));
            if waiters.is_empty() {
                self.by_id.remove(&id);
            }
        }
    }

    /// Looks for the object at other nodes after a pause, if it is still waited for and not here.
    pub(super) fn fetch_again(&mut self, id: ObjectId, pause: u64) {
        // One timer an object, however many ask for it meanwhile.
        if !self.again.insert(id) {
            return;
        }
        let pause_ns = (pause * 2).min(FETCH_AGAIN_NS.1);
        let _ = self.timer(self.now_ns + pause, Timer::FetchAgain { id, pause_ns });
    }

    /// Nothing is spilled for a while; then those that wait for memory are looked at again.
    pub(super) fn pause_spilling(&mut self, pause_ns: u64) {
        let at_ns = self.now_ns + pause_ns;
        if self.no_spill_before_ns < at_ns {
            self.no_spill_before_ns = at_ns;
            let _ = self.timer(at_ns, Timer::SpillAgain);
        }
    }

    pub(super) fn timer(&mut self, at_ns: u64, timer: Timer) -> (u64, u64) {
        self.sequence += 1;
        self.timers.insert((at_ns, self.sequence), timer);
        (at_ns, self.sequence)
    }

    /// When [`Core::tick`] has something to do.
    pub(crate) fn next_timer(&self) -> Option<u64> {
        self.timers.keys().next().map(|(at, _)| *at)
    }

    /// Time passed.
    pub(crate) fn tick(&mut self, now_ns: u64) {
        self.now_ns = now_ns;
        while let Some((&(at, sequence), &timer)) = self.timers.iter().next() {
            if at > now_ns {
                break;
            }
            self.timers.remove(&(at, sequence));
            match timer {
                Timer::Wait { client, tag } => self.time_out(client, tag),
                Timer::SpillAgain => self.memory_changed = true,
                Timer::Unmapping => {
                    self.unmapping_due_ns = None;
                    self.memory_changed = true;
                }
                Timer::FetchAgain { id, pause_ns } => {
                    self.again.remove(&id);
                    if self.by_id.contains_key(&id) {
                        if self.table.find(id).is_none() {
                            self.fetch(id, None);
                            if let Some((pause, _)) = self.fetching.get_mut(&id) {
                                *pause = pause_ns;
                            }
                        } else {
                            self.fetch_again(id, pause_ns);
                        }
                    }
                }
            }
        }
        self.forget_fed_up();
        self.feed();
    }

    fn time_out(&mut self, client: u32, tag: u32) {
        let Some(wait) = self.waits.get(&(client, tag)).copied() else { return };
        let request = wait.request;
        self.end_wait(client, tag);
        self.forget_waiter(request.id, client, tag);
        let status = match request.operation {
            Operation::Create => {
                self.fed_up += 1;
                Status::Full
            }
            Operation::Fetch => Status::Unreachable,
            _ => Status::TimedOut,
        };
        if status == Status::Full {
            self.counters.refused_creates += 1;
        } else {
            self.counters.misses += 1;
        }
        self.answer(client, tag, status);
    }
}

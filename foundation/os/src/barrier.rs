//! Asymmetric fences: the rare side pays with `membarrier`, the frequent side with nothing.
//!
//! A sleeper and a poster decide who acts by each storing one word and then loading the other's.
//! Both need a full fence between store and load. When the sleeper runs
//! [`heavy`] — a full fence on every processor that runs a registered process — the poster needs
//! only program order ([`light`]).
//!
//! Invariant: [`is_asymmetric`] is fixed for the life of the process. Two processes may rely on
//! the pair only when it is true in both; otherwise the poster uses a full fence itself.

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence, fence};

use rustix::thread::{MembarrierCommand, membarrier, membarrier_query};

/// True when this process is registered for, and may issue, `membarrier` across processes.
#[must_use]
#[inline]
pub fn is_asymmetric() -> bool {
    static REGISTERED: OnceLock<bool> = OnceLock::new();
    *REGISTERED.get_or_init(|| {
        let offered = membarrier_query();
        offered.contains_command(MembarrierCommand::GlobalExpedited)
            && membarrier(MembarrierCommand::RegisterGlobalExpedited).is_ok()
            && membarrier(MembarrierCommand::GlobalExpedited).is_ok()
    })
}

/// [`is_asymmetric`]; and registers this process again, which a checkpoint that restored it elsewhere may
/// not have done. One system call. Called before the pair is relied on with another process.
#[must_use]
pub fn renew() -> bool {
    let asymmetric = is_asymmetric();
    if asymmetric {
        // It worked in this process before, and asks for nothing that it did not have then.
        let _ = membarrier(MembarrierCommand::RegisterGlobalExpedited);
    }
    asymmetric
}

/// The rare side: a full fence here and, where [`is_asymmetric`], on every processor that runs a
/// registered process. One system call.
pub fn heavy() {
    fence(Ordering::SeqCst);
    if is_asymmetric() {
        // Cannot fail once `is_asymmetric` saw it succeed; a failure would have no remedy here,
        // and the periodic look at every queue pair bounds its effect.
        let _ = membarrier(MembarrierCommand::GlobalExpedited);
    }
}

/// The frequent side: free when `asymmetric` (the rare sides of both processes run [`heavy`] with
/// [`is_asymmetric`] true), a full fence otherwise.
#[inline(always)]
pub fn light(asymmetric: bool) {
    if !asymmetric {
        fence(Ordering::SeqCst);
    }
    compiler_fence(Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;

    /// Store buffering: with `heavy` on one side and `light` on the other, at least one side sees
    /// the other's store, in every round.
    #[test]
    fn one_of_two_sides_always_sees_the_other() {
        const ROUNDS: u32 = 2_000;
        let asymmetric = is_asymmetric();
        let (x, y) = (AtomicU32::new(0), AtomicU32::new(0));
        let (seen_by_rare, seen_by_frequent) = (AtomicU32::new(0), AtomicU32::new(0));
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for round in 1..=ROUNDS {
                    barrier.wait();
                    x.store(round, Ordering::Relaxed);
                    light(asymmetric);
                    seen_by_frequent.store(y.load(Ordering::Relaxed), Ordering::Relaxed);
                    barrier.wait();
                }
            });
            for round in 1..=ROUNDS {
                barrier.wait();
                y.store(round, Ordering::Relaxed);
                heavy();
                seen_by_rare.store(x.load(Ordering::Relaxed), Ordering::Relaxed);
                barrier.wait();
                let rare = seen_by_rare.load(Ordering::Relaxed);
                let frequent = seen_by_frequent.load(Ordering::Relaxed);
                assert!(rare == round || frequent == round, "both sides missed round {round}");
            }
        });
    }
}

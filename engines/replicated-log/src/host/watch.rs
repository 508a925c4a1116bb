//! Watching the threads of other hosts by their beats, for members that rest.
//!
//! Of each such thread the beat is read through the connection of one member, for all that follow a
//! leader there. One that stands still for as long as a leader's beats may is a thread that hangs, or a
//! process that was stopped: its memory answers all the same. Connections that break are the members' own
//! business.

use std::collections::HashMap;

use beeline_paxos::NodeId;

/// A thread that no member relied on for so many looks is forgotten.
const ABSENT: u64 = 4;
/// Connections that are tried for one look.
const TRIES: usize = 8;

#[derive(Debug)]
struct Watched {
    /// The members that rely on it, and the leader of each.
    members: HashMap<u64, NodeId>,
    beats: Option<u64>,
    /// When it was seen to move.
    progress_ns: u64,
    /// When the last member left, if there is none.
    left_ns: u64,
    /// It stood still for too long, and has not moved since.
    silent: bool,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Watch {
    threads: HashMap<u64, Watched>,
    interval_ns: u64,
    patience_ns: u64,
    looked_ns: u64,
}

impl Watch {
    pub(super) fn new(interval_ns: u64, patience_ns: u64) -> Self {
        Self { threads: HashMap::new(), interval_ns, patience_ns, looked_ns: 0 }
    }

    /// A member relies on a thread, or on none any more.
    pub(super) fn rely(
        &mut self,
        member: u64,
        before: Option<u64>,
        now: Option<(u64, NodeId)>,
        now_ns: u64,
    ) {
        let host = now.map(|(host, _)| host);
        if let Some(before) = before.filter(|before| Some(*before) != host)
            && let Some(watched) = self.threads.get_mut(&before)
        {
            watched.members.remove(&member);
            watched.left_ns = now_ns;
        }
        if let Some((host, leader)) = now {
            let (members, beats, progress_ns) = (HashMap::new(), None, now_ns);
            let new = Watched { members, beats, progress_ns, left_ns: now_ns, silent: false };
            let watched = self.threads.entry(host).or_insert(new);
            // A member that wakes for a moment, as for another's campaign, takes no patience back: it would
            // never be at its end where such moments come again and again.
            let absent_ns = now_ns.saturating_sub(watched.left_ns);
            if watched.members.is_empty() && absent_ns > ABSENT * self.interval_ns {
                (watched.silent, watched.beats, watched.progress_ns) = (false, None, now_ns);
            }
            watched.members.insert(member, leader);
        }
    }

    /// A beat was read.
    pub(super) fn heard(&mut self, host: u64, beats: u64, now_ns: u64) {
        if let Some(watched) = self.threads.get_mut(&host)
            && watched.beats.replace(beats) != Some(beats)
        {
            (watched.progress_ns, watched.silent) = (now_ns, false);
        }
    }

    /// Looks at every thread, through `read`, which tells whether a member could ask. Returns the
    /// members whose leaders' threads are silent, and those leaders; how many threads that are.
    pub(super) fn look(
        &mut self,
        now_ns: u64,
        mut read: impl FnMut(u64, NodeId) -> bool,
    ) -> (Vec<(u64, NodeId)>, u64) {
        // A pause of this thread is no other thread's silence.
        let paused_ns = now_ns.saturating_sub(self.looked_ns).saturating_sub(2 * self.interval_ns);
        let paused_ns = if self.looked_ns == 0 { 0 } else { paused_ns };
        self.looked_ns = now_ns;
        let (mut silent, mut threads) = (Vec::new(), 0);
        for watched in self.threads.values_mut() {
            watched.progress_ns = watched.progress_ns.saturating_add(paused_ns);
            if now_ns.saturating_sub(watched.progress_ns) > self.patience_ns {
                threads += u64::from(!std::mem::replace(&mut watched.silent, true));
                // Members that come to rely on it while it stands still are told at the next look.
                silent.extend(watched.members.iter().map(|(member, leader)| (*member, *leader)));
            }
            let mut members = watched.members.iter().take(TRIES);
            let _ = members.any(|(member, leader)| read(*member, *leader));
        }
        self.threads.retain(|_, watched| {
            let absent_ns = now_ns.saturating_sub(watched.left_ns);
            !watched.members.is_empty() || absent_ns <= ABSENT * self.interval_ns
        });
        (silent, threads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;
    const LEADER: NodeId = NodeId(2);

    #[test]
    fn a_thread_is_looked_at_once_for_all_and_its_silence_is_told_to_each() {
        let mut watch = Watch::new(50 * MS, 300 * MS);
        for member in 0..100 {
            watch.rely(member, None, Some((7, LEADER)), MS);
        }
        let (mut now_ns, mut reads, mut told) = (MS, 0, Vec::new());
        for beat in 0..20_u64 {
            now_ns += 50 * MS;
            let (silent, _) = watch.look(now_ns, |_, leader| {
                reads += 1;
                leader == LEADER
            });
            told.extend(silent);
            // It stands still from the tenth on.
            watch.heard(7, beat.min(10), now_ns);
        }
        assert_eq!(reads, 20, "one look each time");
        told.sort_by_key(|(member, _)| *member);
        told.dedup();
        assert_eq!(told.len(), 100);
        // One that was awake at that moment is told at once, while the beat stands still.
        for member in 0..100 {
            watch.rely(member, Some(7), None, now_ns);
        }
        watch.heard(7, 10, now_ns);
        watch.rely(100, None, Some((7, LEADER)), now_ns);
        now_ns += 50 * MS;
        assert_eq!(watch.look(now_ns, |_, _| true), (vec![(100, LEADER)], 0));
        watch.heard(7, 11, now_ns);
        now_ns += 50 * MS;
        assert_eq!(watch.look(now_ns, |_, _| true), (Vec::new(), 0), "it is back");
        watch.rely(100, Some(7), None, now_ns);
        now_ns += 250 * MS;
        watch.look(now_ns, |_, _| true);
        assert!(watch.threads.is_empty());
    }

    #[test]
    fn members_that_wake_for_a_moment_again_and_again_hear_of_a_silence_all_the_same() {
        let mut watch = Watch::new(50 * MS, 300 * MS);
        let (mut now_ns, mut told) = (MS, 0);
        for _ in 0..20 {
            now_ns += 10 * MS;
            watch.rely(1, None, Some((7, LEADER)), now_ns);
            watch.heard(7, 1, now_ns);
            now_ns += 40 * MS;
            told += watch.look(now_ns, |_, _| true).0.len();
            watch.rely(1, Some(7), None, now_ns);
        }
        assert!(told > 5, "{told}");
    }

    #[test]
    fn the_watcher_s_own_pause_is_not_the_other_s_silence() {
        let mut watch = Watch::new(50 * MS, 300 * MS);
        watch.rely(1, None, Some((7, LEADER)), MS);
        let look = |watch: &mut Watch, now_ns| watch.look(now_ns, |_, _| true).0.len();
        assert_eq!(look(&mut watch, 50 * MS), 0);
        watch.heard(7, 1, 50 * MS);
        assert_eq!(look(&mut watch, 3_000 * MS), 0, "this thread slept");
        watch.heard(7, 1, 3_000 * MS);
        assert_eq!(look(&mut watch, 3_050 * MS), 0);
        let later = (1..10).map(|look_number| look(&mut watch, (3_050 + 50 * look_number) * MS));
        assert!(later.sum::<usize>() > 0, "it is silent indeed");
    }
}

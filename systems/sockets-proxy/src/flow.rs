//! Decisions of a partition, without memory, sockets or time: how many packets may go, to whom, and
//! when a connection is over.
//!
//! *Flow control* is driven by the receiver (NTSocks 3.12): each end may have as many packets under
//! way as the other's queue has blocks; how many its program has consumed comes back on the control
//! ring once a quarter of the queue is new: those whose blocks it has given back, since a packet that is
//! granted has to find a free one (`Packets::returned`). So a queue never overflows, nothing is ever
//! dropped, and a receiver that stands still stops its own connection alone.
//!
//! A sender keeps the blocks of what is under way until then, so that a new life of the link, or of a
//! proxy, sends from where the receiver's queue ends: [`Allowance::resume`], [`Receipts::resume`].

/// The other host broke the rules of flow control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("more packets than there are credits for, or credits for packets that were never sent")]
pub struct Violation;

/// What a sender may send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    blocks: u32,
    sent: u32,
    consumed: u32,
}

impl Allowance {
    /// Nothing is under way to a queue of `blocks`.
    #[must_use]
    pub fn new(blocks: u32) -> Self {
        Self { blocks, sent: 0, consumed: 0 }
    }

    /// Packets that may go now.
    #[must_use]
    pub fn room(&self) -> u32 {
        self.blocks - self.sent.wrapping_sub(self.consumed)
    }

    /// Takes up a connection of before: the program's queue was given back up to `consumed`, and
    /// nothing is known of what is under way.
    #[must_use]
    pub fn kept(blocks: u32, consumed: u32) -> Self {
        Self { blocks, sent: consumed, consumed }
    }

    /// The receiver's queue has `delivered` packets, of which its program has consumed so many, both
    /// counted round; `put` were ever put into the sender's. From now on packets go from there on.
    ///
    /// Errors: [`Violation`]: that cannot be.
    pub fn resume(&mut self, delivered: u32, consumed: u32, put: u32) -> Result<(), Violation> {
        let most = put.wrapping_sub(self.consumed);
        let [delivered_more, consumed_more] =
            [delivered, consumed].map(|count| count.wrapping_sub(self.consumed));
        if most > self.blocks || delivered_more > most || consumed_more > delivered_more {
            return Err(Violation);
        }
        (self.sent, self.consumed) = (delivered, consumed);
        Ok(())
    }

    /// So many went.
    pub fn spend(&mut self, count: u32) {
        assert!(count <= self.room(), "no more packets go than may");
        self.sent = self.sent.wrapping_add(count);
    }

    /// The receiver says that its program has consumed so many, counted round.
    ///
    /// Errors: [`Violation`].
    pub fn credit(&mut self, consumed: u32) -> Result<(), Violation> {
        if consumed.wrapping_sub(self.consumed) > self.sent.wrapping_sub(self.consumed) {
            return Err(Violation);
        }
        self.consumed = consumed;
        Ok(())
    }

    /// Packets so far, counted round.
    #[must_use]
    pub fn sent(&self) -> u32 {
        self.sent
    }

    /// Of these, those that the other program has consumed.
    #[must_use]
    pub fn consumed(&self) -> u32 {
        self.consumed
    }
}

/// What a receiver has told its sender, and what came from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Receipts {
    blocks: u32,
    came: u32,
    told: u32,
}

impl Receipts {
    /// Nothing came, and nothing was consumed of a queue of `blocks`.
    #[must_use]
    pub fn new(blocks: u32) -> Self {
        Self { blocks, came: 0, told: 0 }
    }

    /// Takes up a connection of before: `delivered` packets are in the program's queue, of which it has
    /// consumed so many; the sender is told both.
    ///
    /// Errors: [`Violation`]: the program says that it consumed what never came.
    pub fn resume(blocks: u32, delivered: u32, consumed: u32) -> Result<Self, Violation> {
        if delivered.wrapping_sub(consumed) > blocks {
            return Err(Violation);
        }
        Ok(Self { blocks, came: delivered, told: consumed })
    }

    /// A packet came.
    ///
    /// Errors: [`Violation`]: the sender had no credit for it.
    pub fn take(&mut self) -> Result<(), Violation> {
        if self.came.wrapping_sub(self.told) >= self.blocks {
            return Err(Violation);
        }
        self.came = self.came.wrapping_add(1);
        Ok(())
    }

    /// Packets that the program has to have consumed since the sender was told last, before it is told again.
    #[inline]
    fn least(&self, eager: bool) -> u32 {
        if eager { 1 } else { (self.blocks / 4).max(1) }
    }

    /// False while [`Receipts::is_due`] cannot be true, whatever the program consumed: so few packets came. The program's
    /// position need not be looked at then.
    #[must_use]
    #[inline]
    pub fn may_be_due(&self, eager: bool) -> bool {
        self.came.wrapping_sub(self.told) >= self.least(eager)
    }

    /// True when the sender is to hear that the program has consumed so many, counted round: a quarter of
    /// the queue is new, or, where the sender is `eager`, anything.
    ///
    /// Errors: [`Violation`]: the program says that it consumed what never came. The sender must not
    /// hear that, or it would take this host for the liar.
    pub fn is_due(&self, consumed: u32, eager: bool) -> Result<bool, Violation> {
        let fresh = consumed.wrapping_sub(self.told);
        if fresh > self.came.wrapping_sub(self.told) {
            return Err(Violation);
        }
        Ok(fresh >= self.least(eager))
    }

    /// The sender was told.
    pub fn tell(&mut self, consumed: u32) {
        self.told = consumed;
    }
}

/// What is known of a connection's ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// This host's program sends no more: it said so, or the last holder closed.
    pub finished: bool,
    /// All of its packets went.
    pub is_empty: bool,
    /// A finish went to the other host.
    pub finish_sent: bool,
    /// The other host's finish came.
    pub finish_came: bool,
    /// The last holder of the placeholder is gone.
    pub is_closed: bool,
    /// Packets came that it did not read, or it asked for a break.
    pub unread: bool,
}

/// What to do about a connection's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// Nothing yet.
    Wait,
    /// Send a finish behind the data.
    Finish,
    /// Break it off: tell the other host, then let go.
    Reset,
    /// It is over at both ends.
    LetGo,
}

impl Ends {
    /// What follows.
    #[must_use]
    pub fn decide(self) -> Act {
        match self {
            // As the kernel does with bytes that no program reads any more.
            Self { is_closed: true, unread: true, .. } => Act::Reset,
            Self { finished, is_closed, is_empty: true, finish_sent: false, .. }
                if finished || is_closed =>
            {
                Act::Finish
            }
            Self { is_closed: true, finish_sent: true, finish_came: true, .. } => Act::LetGo,
            _ => Act::Wait,
        }
    }
}

/// In which order connections are served: round-robin within a priority, the highest first, and a
/// lower one after so many rounds at the latest (NTSocks 3.8, 3.16).
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// Priorities; 0 is the highest.
    pub priorities: u8,
    /// Rounds in a row for one priority while a lower one waits.
    pub rounds: u32,
    current: u8,
    /// Rounds of each priority since a lower one had its turn.
    spent: [u32; PRIORITIES],
}

/// Most priorities.
pub const PRIORITIES: usize = 8;

impl Schedule {
    /// Begins with the highest.
    #[must_use]
    pub fn new(priorities: u8, rounds: u32) -> Self {
        let most = u8::try_from(PRIORITIES).unwrap_or(u8::MAX);
        Self {
            priorities: priorities.clamp(1, most),
            rounds: rounds.max(1),
            current: 0,
            spent: [0; PRIORITIES],
        }
    }

    /// The priority to be served in this round.
    #[must_use]
    pub fn priority(&self) -> u8 {
        self.current
    }

    /// As a round in vain for this priority and each lower one.
    pub fn begin_anew(&mut self) {
        self.spent[usize::from(self.current)..].fill(0);
        self.current = 0;
    }

    /// The round moved so many packets. False when every priority was tried in vain since the last
    /// that moved anything.
    pub fn served(&mut self, packets: usize) -> bool {
        let last = self.current + 1 == self.priorities;
        let spent = &mut self.spent[usize::from(self.current)];
        if packets == 0 {
            *spent = 0;
            self.current = if last { 0 } else { self.current + 1 };
            return !last;
        }
        *spent += 1;
        if *spent >= self.rounds && !last {
            *spent = 0;
            self.current += 1;
        } else {
            self.current = 0;
        }
        true
    }
}

/// Which partition gives a connection to which: the one that moved the most bytes, if it has more
/// than one connection, to the one that moved the least, if that moved less than half as many.
#[must_use]
pub fn unequal(moved: &[u64], connections: &[usize], least: u64) -> Option<(usize, usize)> {
    let loaded = |&index: &usize| connections.get(index).is_some_and(|&count| count > 1);
    let from = (0..moved.len()).filter(loaded).max_by_key(|&index| moved[index])?;
    let to = (0..moved.len()).min_by_key(|&index| (moved[index], connections.get(index)))?;
    (from != to && moved[from] >= least && moved[from] / 2 > moved[to]).then_some((from, to))
}

/// Which partition a new connection gets: the one with the fewest, in turn among equals.
#[derive(Clone, Copy, Debug, Default)]
pub struct Placement {
    next: usize,
}

impl Placement {
    /// Among partitions with so many connections, of which none may have more than `most`.
    pub fn place(&mut self, connections: &[usize], most: usize) -> Option<usize> {
        let count = connections.len();
        let order = (0..count).map(|step| (self.next + step) % count.max(1));
        let chosen = order.min_by_key(|&index| connections[index])?;
        if connections[chosen] >= most {
            return None;
        }
        self.next = (chosen + 1) % count;
        Some(chosen)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_queue_never_overflows_and_a_sender_never_starves(
            steps in proptest::collection::vec((0_u8..3, 1_u32..20), 1..300), blocks in 4_u32..64,
        ) {
            let (mut allowance, mut receipts) = (Allowance::new(blocks), Receipts::new(blocks));
            let (mut queued, mut consumed, mut way_back) = (0_u32, 0_u32, Vec::new());
            for (kind, count) in steps {
                match kind {
                    0 => {
                        let part = count.min(allowance.room());
                        allowance.spend(part);
                        queued += part;
                        for _ in 0..part { receipts.take().unwrap(); }
                    }
                    1 => { let part = count.min(queued); queued -= part; consumed += part; }
                    _ => for told in way_back.drain(..) { allowance.credit(told).unwrap(); },
                }
                prop_assert!(queued <= blocks);
                prop_assert!(receipts.may_be_due(false) || !receipts.is_due(consumed, false).unwrap());
                if receipts.is_due(consumed, false).unwrap() { receipts.tell(consumed); way_back.push(consumed); }
            }
            for told in way_back { allowance.credit(told).unwrap(); }
            if queued == 0 { prop_assert!(allowance.room() > blocks / 2); }
        }

        #[test]
        fn credits_for_what_was_never_sent_are_refused(sent in 0_u32..64, told in any::<u32>()) {
            let mut allowance = Allowance::new(64);
            allowance.spend(sent);
            prop_assert_eq!(allowance.credit(told).is_ok(), told <= sent);
        }

        #[test]
        fn connections_are_spread_within_one(count in 1_usize..9, connections in 0_usize..100) {
            let (mut placement, mut load) = (Placement::default(), vec![0; count]);
            for _ in 0..connections {
                let place = placement.place(&load, usize::MAX).unwrap();
                load[place] += 1;
            }
            prop_assert!(load.iter().max().unwrap() - load.iter().min().unwrap() <= 1);
        }
    }

    #[test]
    fn more_packets_than_credits_and_more_consumed_than_came_are_found_out() {
        let mut receipts = Receipts::new(4);
        assert_eq!(receipts.is_due(1, false), Err(Violation));
        (0..4).for_each(|_| receipts.take().unwrap());
        assert_eq!(receipts.take(), Err(Violation));
        assert_eq!(receipts.is_due(4, false), Ok(true));
        assert_eq!(receipts.is_due(5, false), Err(Violation));
        receipts.tell(2);
        assert_eq!(receipts.is_due(2, false), Ok(false));
        assert_eq!(receipts.is_due(1, false), Err(Violation), "what was consumed stays so");
    }

    #[test]
    fn a_partition_that_has_its_quota_gets_no_more() {
        let mut placement = Placement::default();
        assert_eq!(placement.place(&[2, 2], 2), None);
        assert_eq!(placement.place(&[2, 1], 2), Some(1));
    }

    #[test]
    fn every_end_of_a_connection_leads_to_what_follows() {
        let open = Ends::default();
        for (ends, act) in [
            (open, Act::Wait),
            (Ends { finished: true, ..open }, Act::Wait),
            (Ends { finished: true, is_empty: true, ..open }, Act::Finish),
            (
                Ends {
                    finished: true,
                    is_empty: true,
                    finish_sent: true,
                    finish_came: true,
                    ..open
                },
                Act::Wait,
            ),
            (Ends { is_closed: true, ..open }, Act::Wait),
            (Ends { is_closed: true, is_empty: true, ..open }, Act::Finish),
            (Ends { is_closed: true, is_empty: true, finish_sent: true, ..open }, Act::Wait),
            (Ends { is_closed: true, finish_sent: true, finish_came: true, ..open }, Act::LetGo),
            (Ends { is_closed: true, unread: true, finish_sent: true, ..open }, Act::Reset),
            (Ends { unread: true, ..open }, Act::Wait),
        ] {
            assert_eq!(ends.decide(), act, "{ends:?}");
        }
    }

    #[test]
    fn the_highest_priority_goes_first_and_the_lowest_gets_its_share() {
        let (mut schedule, mut served) = (Schedule::new(2, 4), [0_u32; 2]);
        for _ in 0..100 {
            let priority = schedule.priority();
            served[usize::from(priority)] += 1;
            schedule.served(1);
        }
        assert_eq!(served, [80, 20]);
        // Of three, each lower one has its share of the one above.
        let (mut schedule, mut served) = (Schedule::new(3, 4), [0_u32; 3]);
        for _ in 0..210 {
            let priority = schedule.priority();
            served[usize::from(priority)] += 1;
            schedule.served(1);
        }
        assert_eq!(served, [160, 40, 10]);
        // Without anything to do at the top, the bottom has all.
        let (mut schedule, mut low) = (Schedule::new(2, 4), 0);
        for _ in 0..100 {
            let priority = schedule.priority();
            low += u32::from(priority);
            schedule.served(usize::from(priority));
        }
        assert!(low >= 49);
    }
}

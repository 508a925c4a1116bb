//! By which way objects of a size come fastest, learned while they come (spec section 3.6).
//!
//! For each power of two of size, and each of the three ways, the mean of the last times that a
//! transfer took, in which each counts at most two and a half times what the quick ones took: a way that
//! is quick at times and slow at others is not taken for a quick one, and a transfer that met a busy
//! machine changes little. A way that is little known takes its turns first; a slower one is tried now and then, so that a change is noticed. What is learned belongs
//! to one device: another link has other curves.

use std::time::Duration;

/// How an object came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// By messages and copies.
    Sent,
    /// By a one-sided read.
    Read,
    /// Over a plain socket, beside the fabric.
    Socket,
}

impl Protocol {
    const ALL: [Self; 3] = [Self::Sent, Self::Read, Self::Socket];
}

/// Where reading starts while nothing is known: near the published crossing of copies and
/// registration, less the registration, which is made once per segment here.
const FIRST_GUESS: u64 = 64 << 10;
/// Times kept of each way and size.
const KEPT: usize = 15;
/// A transfer counts at most so many times what the quicker third of them took.
const MOST_TIMES: f64 = 2.5;
/// From this size on an object is never sent, also not to look: its copies would cost more than
/// can be learned.
const LARGE: u64 = 4 << 20;
/// Transfers of each way before a size is known: of small objects, and of large ones. The first of them does
/// not count: it may have made a connection, registrations and pages.
const ENOUGH: (u32, u32) = (6, 3);
/// Every so many transfers of a size another way than the chosen one is tried, more rarely where that
/// one is far slower: looking costs some 1 % of the time for each way.
const EXPLORE: (u32, u32) = (64, 2048);
const EXPLORE_SHARE: f64 = 100.0;
/// A way that lost its place, or was tried only at first, is tried again after so many transfers, then
/// after twice as many, and so on: it may have met nothing but a busy machine.
const DOUBT: u32 = 16;
/// Another way is chosen only where it is better by this much: between two that are as good as each
/// other there is no point in changing.
const BETTER: f64 = 0.97;

/// The times of one way for objects of one size.
#[derive(Clone, Copy, Debug)]
struct Cell {
    count: u32,
    times_ns: [u64; KEPT],
    /// What a transfer takes, going by those known; without any, for ever.
    usual_ns: f64,
    /// Transfers of this size since this way was last taken.
    since: u32,
    /// How often it was taken since it lost its place.
    tries: u32,
}

impl Default for Cell {
    fn default() -> Self {
        Self { count: 0, times_ns: [0; KEPT], usual_ns: f64::INFINITY, since: 0, tries: 0 }
    }
}

impl Cell {
    fn add(&mut self, took: Duration) {
        // The second takes the first one's place.
        self.times_ns[self.count.saturating_sub(1) as usize % KEPT] =
            u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        // Counts on where it would wrap at a number whose place is the same.
        self.count = self.count.checked_add(1).unwrap_or(KEPT as u32);
        self.since = 0;
        let known = (self.count as usize - 1).clamp(1, KEPT);
        let mut times = self.times_ns;
        times[..known].sort_unstable();
        let most = times[(known - 1) / 3] as f64 * MOST_TIMES;
        let sum: f64 = times[..known].iter().map(|time| (*time as f64).min(most)).sum();
        self.usual_ns = sum / known as f64;
    }
}

/// What is known of objects of one size.
#[derive(Clone, Copy, Debug, Default)]
struct Class {
    cells: [Cell; 3],
    chosen: Option<Protocol>,
}

impl Class {
    fn cell(&self, way: Protocol) -> &Cell {
        &self.cells[way as usize]
    }
}

/// The class of objects of so many bytes: 2^class and more, and fewer than twice as many.
pub(crate) fn class(bytes: u64) -> u32 {
    63 - bytes.max(1).leading_zeros()
}

/// How objects are to come, by class: bit n is that of class n.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// They are read.
    pub read: u64,
    /// They come over a socket.
    pub socket: u64,
    /// The object is likely one of these: it may be asked for over the socket at once.
    pub socket_first: bool,
}

impl Plan {
    /// Everything is sent.
    pub(crate) const SENT: Self = Self { read: 0, socket: 0, socket_first: false };
    /// Everything is read.
    pub(crate) const READ: Self = Self { read: u64::MAX, socket: 0, socket_first: false };

    /// The classes of which the other end sends no bytes but tells the size and the place.
    pub(crate) fn asks(self) -> u64 {
        self.read | self.socket
    }

    /// Whether an object of this size comes over a socket.
    pub(crate) fn over_socket(self, bytes: u64) -> bool {
        self.socket >> class(bytes) & 1 == 1
    }
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Learner {
    classes: [Class; 64],
    /// Class of the last transfer: the next one is likely of the same.
    last: u32,
    /// What the next objects come by, without and with a socket. Of the classes, a transfer changes its
    /// own alone: to ask them all for each plan took a tenth of a small object's time.
    plans: [Plan; 2],
}

impl Default for Learner {
    fn default() -> Self {
        let classes = [Class::default(); 64];
        let mut learner = Self { classes, last: 0, plans: [Plan::default(); 2] };
        (0..64).for_each(|class| learner.settle(class));
        learner
    }
}

fn guess(class: u32) -> Protocol {
    if 1_u64 << class >= FIRST_GUESS { Protocol::Read } else { Protocol::Sent }
}

fn enough(class: u32) -> u32 {
    if 1_u64 << class >= LARGE { ENOUGH.1 } else { ENOUGH.0 }
}

/// Ways that come into question, the guess first.
fn ways(class: u32, sockets: bool) -> impl Iterator<Item = Protocol> {
    let first = guess(class);
    let others = Protocol::ALL.into_iter().filter(move |way| *way != first);
    let large = 1_u64 << class >= LARGE;
    std::iter::once(first)
        .chain(others)
        .filter(move |way| !large || *way != Protocol::Sent)
        .filter(move |way| sockets || *way != Protocol::Socket)
}

impl Learner {
    /// How the next object is to come, whichever its size; with or without a socket.
    pub(crate) fn plan(&self, sockets: bool) -> Plan {
        let plan = self.plans[usize::from(sockets)];
        Plan { socket_first: plan.socket >> self.last & 1 == 1, ..plan }
    }

    /// Plans for the objects of `class`, of which something was learned.
    fn settle(&mut self, class: u32) {
        for sockets in [false, true] {
            let next = self.next(class, sockets);
            let plan = &mut self.plans[usize::from(sockets)];
            plan.read &= !(1 << class);
            plan.socket &= !(1 << class);
            match next {
                Protocol::Sent => {}
                Protocol::Read => plan.read |= 1 << class,
                Protocol::Socket => plan.socket |= 1 << class,
            }
        }
    }

    /// The fastest way for objects of `class`, as far as known.
    fn best(&self, class: u32, sockets: bool) -> Option<Protocol> {
        let known = &self.classes[class as usize];
        let usual = |way: &Protocol| known.cell(*way).usual_ns;
        let tried = ways(class, sockets).filter(|way| known.cell(*way).count > 0);
        let best = tried.min_by(|one, other| usual(one).total_cmp(&usual(other)))?;
        let chosen = known.chosen.filter(|way| ways(class, sockets).any(|other| other == *way));
        Some(chosen.filter(|chosen| usual(&best) >= usual(chosen) * BETTER).unwrap_or(best))
    }

    /// The way that the next object of `class` comes by.
    fn next(&self, class: u32, sockets: bool) -> Protocol {
        let known = &self.classes[class as usize];
        let Some(best) = self.best(class, sockets) else { return guess(class) };
        let least = ways(class, sockets).min_by_key(|way| known.cell(*way).count).unwrap_or(best);
        if known.cell(least).count < enough(class) {
            return least;
        }
        let shortest = known.cell(best).usual_ns.max(1.0);
        let due = |way: &Protocol| {
            let cell = known.cell(*way);
            let every = EXPLORE_SHARE * (cell.usual_ns / shortest - 1.0);
            let every = (every as u32).clamp(EXPLORE.0, EXPLORE.1);
            *way != best && cell.since >= every.min(DOUBT << cell.tries.min(7))
        };
        ways(class, sockets).find(due).unwrap_or(best)
    }

    /// The smallest size from which on objects are not sent, as far as known.
    pub(crate) fn crossing(&self) -> u64 {
        let mut crossing = None;
        for class in (0..64).rev() {
            let known = &self.classes[class as usize];
            let fabric = [Protocol::Sent, Protocol::Read];
            if fabric.iter().any(|way| known.cell(*way).count < ENOUGH.0) {
                continue;
            }
            if known.chosen == Some(Protocol::Sent) {
                // Slower here: the crossing lies above.
                return crossing.unwrap_or((2_u64 << class.min(62)).max(FIRST_GUESS));
            }
            crossing = Some(1_u64 << class);
        }
        crossing.map_or(FIRST_GUESS, |crossing: u64| crossing.min(FIRST_GUESS))
    }

    /// A transfer took so long.
    pub(crate) fn learn(&mut self, bytes: u64, way: Protocol, took: Duration) {
        self.last = class(bytes);
        let known = &mut self.classes[self.last as usize];
        for cell in &mut known.cells {
            cell.since = cell.since.saturating_add(1);
        }
        let (enough, cell) = (enough(self.last), &mut known.cells[way as usize]);
        if cell.count >= enough {
            cell.tries = cell.tries.saturating_add(1);
        }
        cell.add(took);
        let best = self.best(self.last, true);
        let known = &mut self.classes[self.last as usize];
        if let Some(lost) = known.chosen.filter(|chosen| best != Some(*chosen)) {
            known.cells[lost as usize].tries = 0;
        }
        known.chosen = best;
        self.settle(self.last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use beeline_env::random::Randomness;

    /// Nanoseconds by way: of sending, of reading, over a socket.
    fn curve(bytes: u64) -> [u64; 3] {
        [2_000 + bytes / 4, 10_000 + bytes / 20, 100_000 + bytes / 40]
    }

    /// Takes one object as planned; the nanoseconds it took, and by which way.
    fn take(
        learner: &mut Learner,
        bytes: u64,
        sockets: bool,
        took: impl Fn(Protocol) -> u64,
    ) -> (u64, Protocol) {
        let plan = learner.plan(sockets);
        let way = if plan.over_socket(bytes) {
            Protocol::Socket
        } else if plan.asks() >> class(bytes) & 1 == 1 {
            Protocol::Read
        } else {
            Protocol::Sent
        };
        let ns = took(way);
        learner.learn(bytes, way, Duration::from_nanos(ns));
        (ns, way)
    }

    #[test]
    fn every_size_comes_by_its_fastest_way_and_the_others_are_tried() {
        let mut learner = Learner::default();
        let mut tried = [0_u32; 3];
        let (mut spent, mut least) = (0, 0);
        for round in 0..20_000_u32 {
            let bytes = 1_u64 << (10 + round % 14);
            let (ns, way) = take(&mut learner, bytes, true, |way| curve(bytes)[way as usize]);
            tried[way as usize] += 1;
            if round > 1000 {
                spent += ns;
                least += curve(bytes).into_iter().min().unwrap();
            }
        }
        // 2000 + b/4 = 10000 + b/20 at 40 000 bytes, 10000 + b/20 = 100000 + b/40 at 3.6 million.
        assert_eq!(learner.crossing(), 64 << 10, "{tried:?}");
        assert!(tried.iter().all(|count| *count > 500), "{tried:?}");
        assert!(spent < least * 103 / 100, "{spent} ns instead of {least}");
    }

    #[test]
    fn transfers_that_met_a_busy_machine_do_not_mislead_it() {
        let (bytes, mut wrong) = (1 << 20, 0);
        for seed in 0..100 {
            let mut chance = Randomness::new(seed);
            let mut learner = Learner::default();
            for round in 0..1000 {
                // One in six takes a hundred times as long, whichever its way.
                let busy = if chance.chance(1, 6) { 100 } else { 1 };
                let took = |way: Protocol| curve(bytes)[way as usize] * busy;
                let (_, way) = take(&mut learner, bytes, true, took);
                wrong += u32::from(round >= 100 && way != Protocol::Read);
            }
        }
        // One in 64 is a look: 1,429 come another way. With the plain mean, in a model of these rules,
        // 3,838 do where this rule has 1,437.
        assert!(wrong < 100 * 900 / 32, "{wrong} of 90000 came by another way than the fastest");
    }

    #[test]
    fn what_the_first_transfer_of_a_way_takes_does_not_count() {
        // Over the socket 300 us, the first one, which connects, ten times as long; read 350 us.
        let mut learner = Learner::default();
        let mut connected = false;
        let mut ways = [0_u32; 3];
        for _ in 0..120 {
            let first = if connected { 1 } else { 10 };
            let took = |way: Protocol| [900_000, 350_000, 300_000 * first][way as usize];
            let (_, way) = take(&mut learner, 1 << 20, true, took);
            connected |= way == Protocol::Socket;
            ways[way as usize] += 1;
        }
        assert!(ways[Protocol::Socket as usize] > 90, "sent, read, over the socket: {ways:?}");
    }

    #[test]
    fn a_way_that_is_quick_only_at_times_is_not_preferred() {
        // Socket: 280 us. Read: 200 us in seven cases of ten, else 600, which are 320.
        let (mut spent, mut transfers) = (0_u64, 0_u64);
        for seed in 0..40 {
            let mut chance = Randomness::new(seed);
            let mut learner = Learner::default();
            for round in 0..1500 {
                let read = if chance.chance(3, 10) { 600_000 } else { 200_000 };
                let took = |way: Protocol| [900_000, read, 280_000][way as usize];
                let (_, way) = take(&mut learner, 1 << 20, true, took);
                if round >= 100 {
                    spent += [900_000, 320_000, 280_000][way as usize];
                    transfers += 1;
                }
            }
        }
        let most = transfers * 280_000 * 104 / 100;
        assert!(spent < most, "{spent} ns, and with the better way alone {}", transfers * 280_000);
    }

    #[test]
    fn a_link_that_changes_is_noticed() {
        let mut learner = Learner::default();
        let bytes = 1 << 20;
        for _ in 0..200 {
            take(&mut learner, bytes, true, |way| curve(bytes)[way as usize]);
        }
        let late: Vec<Protocol> = (0..2000)
            .map(|_| take(&mut learner, bytes, true, |way| [900, 100, 400][way as usize] << 10).1)
            .collect();
        let read = late[1000..].iter().filter(|way| **way == Protocol::Read).count();
        assert!(read > 950, "{read} of 1000");
    }

    #[test]
    fn a_way_that_is_far_slower_is_tried_rarely() {
        let mut learner = Learner::default();
        let took = |way: Protocol| [1_000_000, 100_000, 900_000][way as usize];
        let (mut spent, mut others) = (0, 0);
        for round in 0..10_000 {
            let (ns, way) = take(&mut learner, 1 << 20, true, took);
            if round >= 100 {
                spent += ns;
                others += u32::from(way != Protocol::Read);
            }
        }
        // Looking costs something, and little.
        assert!(others > 0 && spent < 9_900 * 100_000 * 103 / 100, "{others} tries, {spent} ns");
    }

    #[test]
    fn large_objects_are_never_sent_and_without_a_socket_none_comes_over_it() {
        let mut learner = Learner::default();
        for round in 0..500_u32 {
            let bytes = 1_u64 << (20 + round % 6);
            let sockets = round < 250;
            let (_, way) = take(&mut learner, bytes, sockets, |way| curve(bytes)[way as usize]);
            assert!(bytes < LARGE || way != Protocol::Sent, "{bytes} bytes were sent");
            assert!(sockets || way != Protocol::Socket, "{bytes} bytes came over no socket");
        }
    }

    #[test]
    fn without_knowledge_the_published_figure_holds() {
        assert_eq!(Learner::default().crossing(), FIRST_GUESS);
        let plan = Learner::default().plan(true);
        assert_eq!(plan.asks(), u64::MAX << class(FIRST_GUESS));
        assert!(!plan.socket_first && !plan.over_socket(1 << 30));
    }

    #[test]
    fn classes_are_powers_of_two() {
        let expected = [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (1 << 20, 20), (u64::MAX, 63)];
        for (bytes, of_it) in expected {
            assert_eq!(class(bytes), of_it, "{bytes}");
        }
    }
}

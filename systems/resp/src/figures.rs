//! What each command did so far: calls, failures, and, where commands are timed, how long they took;
//! and the log of slow ones.
//!
//! An executor writes its own [`CommandFigures`]; INFO, SLOWLOG and LATENCY read those of all
//! executors from any thread. Counting takes one load and one store, no lock and no allocation.
//!
//! Of each command the first call and every [`SAMPLE`]th is timed, and every call while the slow log
//! is on (`slowlog-log-slower-than` is not negative): two looks at the clock cost as much as a tenth
//! of a short command. Figures never go back, so that their threads need no locked instruction;
//! CONFIG RESETSTAT remembers what was there.

use std::collections::{BTreeMap, VecDeque};
use std::fmt::Write as _;
use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::args::Args;
use crate::table::{COMMANDS, Command, flag};

/// Classes of durations: the first holds those up to 1 us, each next one up to twice as much.
const CLASSES: usize = 24;
/// One of so many calls of a command is timed where nothing asks for all.
pub const SAMPLE: u64 = 32;
/// Error codes counted apart; more than that are one.
const CODES: usize = 128;
/// Arguments and bytes of an argument that the slow log keeps.
const KEPT_ARGUMENTS: usize = 32;
const KEPT_BYTES: usize = 128;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds to a counter that one thread alone writes.
#[inline]
fn count(counter: &AtomicU64, amount: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(amount), Ordering::Relaxed);
}

#[derive(Debug, Default)]
struct Row {
    calls: AtomicU64,
    failed: AtomicU64,
    rejected: AtomicU64,
    timed: AtomicU64,
    microseconds: AtomicU64,
    classes: [AtomicU64; CLASSES],
}

/// Figures of one command, or of several executors together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Total {
    calls: u64,
    failed: u64,
    rejected: u64,
    timed: u64,
    microseconds: u64,
    classes: [u64; CLASSES],
}

impl Total {
    fn combine(&mut self, other: &Self, with: fn(u64, u64) -> u64) {
        self.calls = with(self.calls, other.calls);
        self.failed = with(self.failed, other.failed);
        self.rejected = with(self.rejected, other.rejected);
        self.timed = with(self.timed, other.timed);
        self.microseconds = with(self.microseconds, other.microseconds);
        for (mine, other) in self.classes.iter_mut().zip(other.classes) {
            *mine = with(*mine, other);
        }
    }

    /// Time of all calls, from those that were timed.
    fn all_microseconds(&self) -> u64 {
        let all = u128::from(self.microseconds) * u128::from(self.calls);
        u64::try_from(all / u128::from(self.timed.max(1))).unwrap_or(u64::MAX)
    }

    /// The longest duration of the class that so many thousandths of the calls do not pass, in us.
    fn quantile(&self, thousandths: u64) -> u64 {
        let all: u64 = self.classes.iter().sum();
        let wanted = (all * thousandths).div_ceil(1000);
        let mut met = 0;
        let class = self.classes.iter().position(|calls| {
            met += calls;
            met >= wanted
        });
        1 << class.unwrap_or(CLASSES - 1)
    }
}

impl Row {
    fn read(&self) -> Total {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Total {
            calls: load(&self.calls),
            failed: load(&self.failed),
            rejected: load(&self.rejected),
            timed: load(&self.timed),
            microseconds: load(&self.microseconds),
            classes: std::array::from_fn(|class| load(&self.classes[class])),
        }
    }
}

/// Every command and subcommand, in the order of their figures: the table's, then subcommands by
/// container.
fn all_commands() -> impl Iterator<Item = &'static Command> {
    COMMANDS.iter().chain(COMMANDS.iter().flat_map(|command| command.subcommands))
}

/// See the module's documentation.
#[derive(Debug)]
pub struct CommandFigures {
    rows: Box<[Row]>,
    /// Addresses of subcommands, with the place of their figures.
    subcommands: Vec<(usize, usize)>,
    errors: Mutex<BTreeMap<String, u64>>,
    pub(crate) slow: Arc<SlowLog>,
}

impl Default for CommandFigures {
    fn default() -> Self {
        Self::new(Arc::default())
    }
}

impl CommandFigures {
    /// All zero.
    #[must_use]
    pub fn new(slow: Arc<SlowLog>) -> Self {
        let rows = all_commands().map(|_| Row::default()).collect();
        let addresses = all_commands().enumerate().skip(COMMANDS.len());
        let mut subcommands: Vec<(usize, usize)> =
            addresses.map(|(place, command)| (std::ptr::from_ref(command).addr(), place)).collect();
        subcommands.sort_unstable();
        Self { rows, subcommands, errors: Mutex::default(), slow }
    }

    #[inline]
    fn row(&self, command: &Command) -> Option<&Row> {
        let address = std::ptr::from_ref(command).addr();
        let place = address.wrapping_sub(COMMANDS.as_ptr().addr()) / size_of::<Command>();
        if place < COMMANDS.len() {
            return self.rows.get(place);
        }
        let at = self.subcommands.binary_search_by_key(&address, |known| known.0).ok()?;
        self.rows.get(self.subcommands[at].1)
    }

    /// Whether the next call of a command is to be timed where nothing asks for all.
    #[inline]
    pub(crate) fn is_sample(&self, command: &Command) -> bool {
        let row = self.row(command);
        row.is_some_and(|row| row.calls.load(Ordering::Relaxed).is_multiple_of(SAMPLE))
    }

    /// A command ran.
    #[inline]
    pub(crate) fn ran(&self, command: &Command, failed: bool) {
        if let Some(row) = self.row(command) {
            count(&row.calls, 1);
            if failed {
                count(&row.failed, 1);
            }
        }
    }

    /// A command was answered with `reply` outside of this executor, by any thread.
    pub fn answered_elsewhere(&self, command: &Command, reply: &[u8]) {
        let failed = reply.first() == Some(&b'-');
        if let Some(row) = self.row(command) {
            // The executor runs none of these commands itself, so every writer of this row is here.
            row.calls.fetch_add(1, Ordering::Relaxed);
            row.failed.fetch_add(failed.into(), Ordering::Relaxed);
        }
        if failed {
            self.error(reply);
        }
    }

    /// A command was refused before it ran.
    pub(crate) fn rejected(&self, command: &Command) {
        if let Some(row) = self.row(command) {
            count(&row.rejected, 1);
        }
    }

    /// An error reply, from its code on.
    pub(crate) fn error(&self, line: &[u8]) {
        let line = line.strip_prefix(b"-").unwrap_or(line);
        let code = line.split(|byte| matches!(byte, b' ' | b'\r')).next().unwrap_or_default();
        let code = String::from_utf8_lossy(code);
        let mut errors = locked(&self.errors);
        if let Some(known) = errors.get_mut(code.as_ref()) {
            *known += 1;
        } else if errors.len() < CODES {
            errors.insert(code.into_owned(), 1);
        }
    }

    /// How long a command took that is in [`Self::ran`].
    pub(crate) fn took(&self, command: &Command, nanoseconds: u64) {
        let Some(row) = self.row(command) else { return };
        let microseconds = nanoseconds / 1000;
        count(&row.timed, 1);
        count(&row.microseconds, microseconds);
        let class = (u64::BITS - microseconds.saturating_sub(1).leading_zeros()) as usize;
        count(&row.classes[class.min(CLASSES - 1)], 1);
    }
}

/// Takes the name of a command, how often it was timed, and how many calls took at most so long.
pub type HistogramVisitor<'v> = dyn FnMut(&str, u64, &[(u64, u64)]) + 'v;

/// Figures of all executors of a node, as INFO and LATENCY show them.
#[derive(Debug, Default)]
pub struct NodeFigures {
    executors: Vec<Arc<CommandFigures>>,
    /// What was there at the latest CONFIG RESETSTAT.
    forgotten: Mutex<(Vec<Total>, BTreeMap<String, u64>)>,
    /// The log they share.
    pub slow: Arc<SlowLog>,
}

impl NodeFigures {
    /// Of so many executors.
    #[must_use]
    pub fn new(executors: usize) -> Self {
        let slow = Arc::<SlowLog>::default();
        let make = |_| Arc::new(CommandFigures::new(Arc::clone(&slow)));
        Self { executors: (0..executors).map(make).collect(), forgotten: Mutex::default(), slow }
    }

    /// Those of one executor.
    #[must_use]
    pub fn of(&self, executor: usize) -> Option<Arc<CommandFigures>> {
        self.executors.get(executor).map(Arc::clone)
    }

    fn sums(&self) -> Vec<Total> {
        let mut sums: Vec<Total> = all_commands().map(|_| Total::default()).collect();
        for figures in &self.executors {
            for (sum, row) in sums.iter_mut().zip(&figures.rows) {
                sum.combine(&row.read(), u64::wrapping_add);
            }
        }
        sums
    }

    fn errors(&self) -> BTreeMap<String, u64> {
        let mut sums = BTreeMap::new();
        for figures in &self.executors {
            for (code, count) in locked(&figures.errors).iter() {
                *sums.entry(code.clone()).or_default() += count;
            }
        }
        sums
    }

    /// What ran since the latest reset.
    fn since(&self) -> impl Iterator<Item = (&'static Command, Total)> {
        let forgotten = locked(&self.forgotten).0.clone();
        let known = forgotten.into_iter().chain(std::iter::repeat(Total::default()));
        all_commands().zip(self.sums()).zip(known).map(|((command, mut total), earlier)| {
            total.combine(&earlier, u64::saturating_sub);
            (command, total)
        })
    }

    /// From now on INFO shows what comes.
    pub fn reset(&self) {
        let now = (self.sums(), self.errors());
        *locked(&self.forgotten) = now;
    }

    /// The lines of INFO commandstats.
    pub fn write_commands(&self, out: &mut String) {
        for (command, total) in self.since().filter(|(_, total)| total.calls + total.rejected > 0) {
            let each = total.microseconds as f64 / total.timed.max(1) as f64;
            let _ = write!(
                out,
                "cmdstat_{}:calls={},usec={},usec_per_call={each:.2},rejected_calls={},\
                 failed_calls={}\r\n",
                command.name,
                total.calls,
                total.all_microseconds(),
                total.rejected,
                total.failed,
            );
        }
    }

    /// The lines of INFO latencystats.
    pub fn write_latencies(&self, out: &mut String) {
        for (command, total) in self.since().filter(|(_, total)| total.timed > 0) {
            let _ = write!(
                out,
                "latency_percentiles_usec_{}:p50={},p99={},p99.9={}\r\n",
                command.name,
                total.quantile(500),
                total.quantile(990),
                total.quantile(999),
            );
        }
    }

    /// The lines of INFO errorstats.
    pub fn write_errors(&self, out: &mut String) {
        let earlier = locked(&self.forgotten).1.clone();
        for (code, sum) in self.errors() {
            let since = sum.saturating_sub(earlier.get(&code).copied().unwrap_or(0));
            if since > 0 {
                let _ = write!(out, "errorstat_{code}:count={since}\r\n");
            }
        }
    }

    /// Calls `visit` with the name of each command that was timed, how often, and how many calls took
    /// at most so many microseconds, class by class.
    pub fn histograms(&self, visit: &mut HistogramVisitor<'_>) {
        for (command, total) in self.since().filter(|(_, total)| total.timed > 0) {
            let (mut sum, mut shown) = (0, Vec::new());
            for (class, calls) in total.classes.iter().enumerate() {
                sum += calls;
                if *calls > 0 {
                    shown.push((1 << class, sum));
                }
            }
            visit(command.name, total.timed, &shown);
        }
    }
}

/// How long the calls of a command took that were timed since the start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandTime {
    /// The command; a subcommand behind its container and a bar.
    pub name: &'static str,
    /// Calls that took at most so many microseconds and more than the class before; the last class
    /// holds longer ones too.
    pub classes: [(u64, u64); CLASSES],
    /// Time of all of them together, microseconds.
    pub microseconds: u64,
    /// All calls, timed or not.
    pub calls: u64,
}

impl NodeFigures {
    /// The times of all commands that were timed. They never go back, also where INFO forgot them.
    #[must_use]
    pub fn times(&self) -> Vec<CommandTime> {
        let timed = all_commands().zip(self.sums()).filter(|(_, total)| total.timed > 0);
        timed
            .map(|(command, total)| CommandTime {
                name: command.name,
                classes: std::array::from_fn(|class| (1 << class, total.classes[class])),
                microseconds: total.microseconds,
                calls: total.calls,
            })
            .collect()
    }
}

/// One slow command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Slow {
    pub number: u64,
    pub unix_s: u64,
    pub microseconds: u64,
    pub arguments: Vec<Vec<u8>>,
    /// The client's address and name; empty where its connection is another shard's.
    pub client: (String, Vec<u8>),
}

/// Commands that took longer than a client cares for, newest first.
#[derive(Debug)]
pub struct SlowLog {
    /// Commands at least this long are kept; negative: no command is timed.
    slower_than_us: AtomicI64,
    longest: AtomicUsize,
    kept: Mutex<(u64, VecDeque<Slow>)>,
}

impl Default for SlowLog {
    fn default() -> Self {
        Self {
            slower_than_us: AtomicI64::new(-1),
            longest: AtomicUsize::new(128),
            kept: Mutex::default(),
        }
    }
}

impl SlowLog {
    /// `slowlog-log-slower-than`, in microseconds; negative: off, and no command is timed.
    #[inline]
    #[must_use]
    pub fn slower_than_us(&self) -> i64 {
        self.slower_than_us.load(Ordering::Relaxed)
    }

    /// Sets it.
    pub fn set_slower_than_us(&self, microseconds: i64) {
        self.slower_than_us.store(microseconds, Ordering::Relaxed);
    }

    /// `slowlog-max-len`, entries kept.
    #[must_use]
    pub fn longest(&self) -> usize {
        self.longest.load(Ordering::Relaxed)
    }

    /// Sets it.
    pub fn set_longest(&self, entries: usize) {
        self.longest.store(entries, Ordering::Relaxed);
        locked(&self.kept).1.truncate(entries);
    }

    /// Keeps a command, if it was slow and is none that stays out of the log.
    pub(crate) fn note(
        &self,
        (command, args): (&Command, Args<'_>),
        (unix_s, nanoseconds): (u64, u64),
        client: impl FnOnce() -> (String, Vec<u8>),
    ) {
        let limit = u64::try_from(self.slower_than_us()).unwrap_or(u64::MAX);
        let microseconds = nanoseconds / 1000;
        if microseconds < limit || command.has(flag::SKIP_SLOWLOG) {
            return;
        }
        let arguments = match command.name {
            // They carry passwords.
            "auth" | "hello" | "config|set" => {
                vec![args.get(0).to_vec(), b"(redacted)".to_vec()]
            }
            _ => kept_arguments(args),
        };
        let mut kept = locked(&self.kept);
        let number = kept.0;
        kept.0 += 1;
        kept.1.push_front(Slow { number, unix_s, microseconds, arguments, client: client() });
        kept.1.truncate(self.longest());
    }

    pub(crate) fn newest(&self, count: usize) -> Vec<Slow> {
        locked(&self.kept).1.iter().take(count).cloned().collect()
    }

    pub(crate) fn len(&self) -> usize {
        locked(&self.kept).1.len()
    }

    pub(crate) fn clear(&self) {
        locked(&self.kept).1.clear();
    }
}

/// As Redis keeps them: the first arguments, and the first bytes of each.
fn kept_arguments(args: Args<'_>) -> Vec<Vec<u8>> {
    let shown = if args.len() > KEPT_ARGUMENTS { KEPT_ARGUMENTS - 1 } else { args.len() };
    let mut kept = Vec::with_capacity(KEPT_ARGUMENTS.min(args.len()));
    for at in 0..shown {
        let argument = args.get(at);
        let mut text = argument[..argument.len().min(KEPT_BYTES)].to_vec();
        if argument.len() > KEPT_BYTES {
            let more = argument.len() - KEPT_BYTES;
            text.extend_from_slice(format!("... ({more} more bytes)").as_bytes());
        }
        kept.push(text);
    }
    if shown < args.len() {
        kept.push(format!("... ({} more arguments)", args.len() - shown).into_bytes());
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::find_full;

    #[test]
    fn every_command_and_subcommand_has_a_row_of_its_own() {
        let figures = NodeFigures::new(2);
        let one = figures.of(0).unwrap();
        for command in all_commands() {
            one.ran(command, false);
        }
        let other = figures.of(1).unwrap();
        other.ran(find_full(b"get").unwrap(), true);
        other.rejected(find_full(b"config|get").unwrap());
        for (command, total) in figures.since() {
            let calls = if command.name == "get" { 2 } else { 1 };
            assert_eq!(total.calls, calls, "{}", command.name);
        }
        let mut out = String::new();
        figures.write_commands(&mut out);
        assert!(out.contains(
            "cmdstat_config|get:calls=1,usec=0,usec_per_call=0.00,rejected_calls=1,failed_calls=0"
        ));
        figures.reset();
        out.clear();
        figures.write_commands(&mut out);
        assert_eq!(out, "");
    }

    #[test]
    fn a_part_of_the_calls_is_timed_and_stands_for_all() {
        let figures = NodeFigures::new(1);
        let (one, get) = (figures.of(0).unwrap(), find_full(b"get").unwrap());
        let timed = (0..SAMPLE + 8)
            .filter(|_| {
                let timed = one.is_sample(get);
                one.ran(get, false);
                if timed {
                    one.took(get, 3_000);
                }
                timed
            })
            .count();
        assert_eq!(timed, 2, "the first call and the one after a round");
        let mut out = String::new();
        figures.write_commands(&mut out);
        assert!(out.contains("cmdstat_get:calls=40,usec=120,usec_per_call=3.00,"), "{out}");
        let [time] = figures.times().try_into().unwrap();
        assert_eq!(
            (time.name, time.calls, time.microseconds, time.classes[2]),
            ("get", 40, 6, (4, 2))
        );
        figures.reset();
        assert_eq!(figures.times().len(), 1, "what is scraped never goes back");
    }

    #[test]
    fn durations_fall_into_the_class_that_holds_them() {
        let figures = NodeFigures::new(1);
        let (one, get) = (figures.of(0).unwrap(), find_full(b"get").unwrap());
        for microseconds in [0, 1, 2, 3, 4, 5, 1000, u64::MAX / 1000] {
            one.took(get, microseconds * 1000);
        }
        let mut met = Vec::new();
        figures.histograms(&mut |name, calls, classes| {
            met.push((name.to_owned(), calls, classes.to_vec()));
        });
        let classes = vec![(1, 2), (2, 3), (4, 5), (8, 6), (1024, 7), (1 << 23, 8)];
        assert_eq!(met, [("get".to_owned(), 8, classes)]);
    }
}

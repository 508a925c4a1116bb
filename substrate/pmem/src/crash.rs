//! Crash images: what may stand on media when the power goes, computed from the record.
//!
//! The model, per cache line: stores reach media in program order, at any time; what a completed
//! write-back covered has reached it. So each line holds some prefix of the stores since its last
//! completed flush, independently of every other line; within one multi-word store any subset of
//! its words, as a copy loop promises no order. Words of 8 bytes are never torn.
//!
//! ```text
//!   line A:  s1 s2 │flush+fence│ s5 s6          persisted: s1 s2, then any of {}, {s5}, {s5 s6}
//!   line B:        s3 s4                        any of {}, {s3}, {s3 s4}
//! ```
//! Sets of images only grow between two fences. Looking just before every fence, and at the end,
//! therefore sees every image there is.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use beeline_env::Randomness;

use crate::record::{Event, Recorder};
use beeline_os::write_back::CACHE_LINE_BYTES as LINE_BYTES;

/// Objects by number; see [`Event`].
pub(crate) type Objects = BTreeMap<u32, Arc<Vec<u8>>>;

/// The end that is imagined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CrashKind {
    /// Power is lost: unflushed lines are on media in part.
    #[default]
    Power,
    /// The process is ended: every store made so far is there, in order.
    Process,
}

/// Bounds of an enumeration.
#[derive(Clone, Copy, Debug)]
pub struct CrashLimits {
    /// The end that is imagined.
    pub kind: CrashKind,
    /// Most images at one point; more legal ones than this are sampled.
    pub images_per_point: usize,
    /// Most points; more than this are sampled, the last always among them.
    pub points: usize,
    /// Seed of all sampling.
    pub seed: u64,
}

impl Default for CrashLimits {
    fn default() -> Self {
        Self { kind: CrashKind::Power, images_per_point: 256, points: usize::MAX, seed: 1 }
    }
}

/// How much an enumeration covered. Print it: an empty run is then visible.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CrashCounts {
    /// Places in the record looked at.
    pub points: u64,
    /// Images handed out.
    pub images: u64,
    /// Points at which every legal image of the model (words of one call in ascending or
    /// descending order) was handed out.
    pub exhaustive_points: u64,
    /// Points at which legal images were sampled.
    pub sampled_points: u64,
    /// Points passed over because of the limit.
    pub skipped_points: u64,
}

impl std::fmt::Display for CrashCounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} crash images at {} points ({} exhaustive, {} sampled, {} skipped)",
            self.images,
            self.points,
            self.exhaustive_points,
            self.sampled_points,
            self.skipped_points
        )
    }
}

/// The record of a simulated pool. Clones look at the same record.
#[derive(Clone, Debug)]
pub struct SimDevice {
    recorder: Arc<Recorder>,
    start: Arc<Objects>,
}

impl SimDevice {
    pub(crate) fn new(recorder: Arc<Recorder>, start: Objects) -> Self {
        Self { recorder, start: Arc::new(start) }
    }

    /// Notes `label` in the record. An image knows the last mark before its crash, so a test that
    /// marks what was acknowledged knows what has to be found.
    pub fn mark(&self, label: u64) {
        self.recorder.push(Event::Marked { label });
    }

    /// From now on a fence that is begun ([`crate::Persister::begin_fence`]) is done only when
    /// [`SimDevice::complete_fence`] says so, or its persister waits for it.
    pub fn hold_fences(&self) {
        self.recorder.hold_fences();
    }

    /// Completes the fence that was begun first; false where none is under way.
    pub fn complete_fence(&self) -> bool {
        self.recorder.complete_fence()
    }

    /// Events recorded so far.
    #[must_use]
    pub fn position(&self) -> usize {
        self.recorder.lock().events.len()
    }

    /// A copy of the record.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        self.recorder.lock().events.clone()
    }

    /// Everything stored so far: what a crash of the process leaves.
    #[must_use]
    pub fn image_of_everything(&self) -> CrashImage {
        let mut media = Media::new(&self.start);
        for event in self.recorder.lock().events.iter() {
            media.apply(event);
        }
        media.image_of_everything()
    }

    /// Images legal just before event number `position` (or at the end, when there are no more).
    #[must_use]
    pub fn crash_images(&self, position: usize, limits: &CrashLimits) -> Vec<CrashImage> {
        let mut media = Media::new(&self.start);
        for event in self.recorder.lock().events.iter().take(position) {
            media.apply(event);
        }
        let mut images = Vec::new();
        let _ = media.each_image(limits, |image| images.push(image.clone()));
        images
    }
}

/// Hands every legal image within `limits` to `check`, point by point in the order of the record.
/// A panic in `check` shows which: print [`CrashImage::describe`] with it.
pub fn for_each_crash_image(
    device: &SimDevice,
    limits: &CrashLimits,
    mut check: impl FnMut(&CrashImage),
) -> CrashCounts {
    let events = device.events();
    let chosen = points(&events, limits);
    let mut counts = CrashCounts { skipped_points: chosen.skipped, ..CrashCounts::default() };
    let mut media = Media::new(&device.start);
    let mut next = chosen.positions.iter().copied().peekable();
    for position in 0..=events.len() {
        if next.next_if_eq(&position).is_some() {
            counts.points += 1;
            let exhaustive = media.each_image(limits, |image| {
                counts.images += 1;
                check(image);
            });
            *if exhaustive { &mut counts.exhaustive_points } else { &mut counts.sampled_points } +=
                1;
        }
        if let Some(event) = events.get(position) {
            media.apply(event);
        }
    }
    counts
}

struct Points {
    positions: Vec<usize>,
    skipped: u64,
}

/// Where to look: just before each fence that follows a store, or after each store.
fn points(events: &[Event], limits: &CrashLimits) -> Points {
    let mut positions = Vec::new();
    let mut stored = false;
    for (position, event) in events.iter().enumerate() {
        match (limits.kind, event) {
            (CrashKind::Power, Event::Stored { .. }) => stored = true,
            (CrashKind::Power, Event::Fenced { .. }) if std::mem::take(&mut stored) => {
                positions.push(position);
            }
            (CrashKind::Process, Event::Stored { .. }) => positions.push(position),
            _ => {}
        }
    }
    positions.push(events.len());
    let mut skipped = 0;
    let most = limits.points.max(1);
    if positions.len() > most {
        skipped = (positions.len() - most) as u64;
        let mut randomness = Randomness::new(limits.seed);
        // Selection sampling: every point has the same chance, order is kept, the end stays.
        let last = positions.len() - 1;
        let (mut left, mut wanted) = (last as u64, most as u64 - 1);
        let mut index = 0;
        positions.retain(|_| {
            let keep = index == last || (left > 0 && randomness.below(left) < wanted);
            if index < last {
                left -= 1;
                wanted -= u64::from(keep);
            }
            index += 1;
            keep
        });
    }
    Points { positions, skipped }
}

/// One possible state of media after a crash. [`crate::Pool::open_image`] opens it.
#[derive(Clone, Debug)]
pub struct CrashImage {
    pub(crate) objects: Arc<Objects>,
    /// Words on top of `objects`: object, word number, value.
    pub(crate) patches: Vec<(u32, u32, u64)>,
    position: usize,
    mark: Option<u64>,
}

impl CrashImage {
    /// The crash comes just before this event of the record.
    #[must_use]
    pub fn position(&self) -> usize {
        self.position
    }

    /// Label of the last mark before the crash.
    #[must_use]
    pub fn mark(&self) -> Option<u64> {
        self.mark
    }

    /// The bytes of an object ([`crate::Pool::TABLE_OBJECT`], or segment id + 1).
    #[must_use]
    pub fn object(&self, object: u32) -> Option<Vec<u8>> {
        let mut bytes = self.objects.get(&object)?.to_vec();
        for &(patched, word, value) in &self.patches {
            let at = word as usize * 8;
            if patched == object && at + 8 <= bytes.len() {
                bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            }
        }
        Some(bytes)
    }

    /// Numbers of the objects there are.
    #[must_use]
    pub fn object_numbers(&self) -> Vec<u32> {
        self.objects.keys().copied().collect()
    }

    /// The same image with one bit turned over: damage, for tests of whoever checks for it. An
    /// object or offset that is not there changes nothing.
    #[must_use]
    pub fn with_flipped_bit(&self, object: u32, offset: usize, bit: u32) -> Self {
        let mut objects = (*self.objects).clone();
        if let Some(mut bytes) = self.object(object)
            && let Some(byte) = bytes.get_mut(offset)
        {
            *byte ^= 1 << (bit % 8);
            objects.insert(object, Arc::new(bytes));
        }
        let patches = self.patches.iter().copied().filter(|patch| patch.0 != object).collect();
        Self { objects: Arc::new(objects), patches, position: self.position, mark: self.mark }
    }

    /// Which crash this is, for a failure message.
    #[must_use]
    pub fn describe(&self) -> String {
        format!(
            "crash before event {}, last mark {:?}, unflushed words on media: {:x?}",
            self.position, self.mark, self.patches
        )
    }
}

/// A store that has not certainly reached media.
#[derive(Clone, Copy, Debug)]
struct Pending {
    word: u32,
    value: u64,
    group: u32,
}

/// Stores to one line since its last completed flush, and the write-backs under way.
#[derive(Clone, Debug, Default)]
struct Line {
    pending: Vec<Pending>,
    /// Who flushes, and how many of the pending stores the write-back covers.
    flushing: Vec<(u32, usize)>,
}

/// The words of a line that differ from what is certainly on media, by word number.
type Choice = BTreeMap<u32, u64>;

impl Line {
    /// What the line may hold: prefixes, words of the last call in ascending or descending order.
    fn choices(&self) -> Vec<Choice> {
        let mut choices = BTreeSet::new();
        let mut add = |stores: &[Pending], more: &[Pending]| {
            let both = stores.iter().chain(more);
            choices.insert(both.map(|store| (store.word, store.value)).collect::<Choice>());
        };
        for end in 0..=self.pending.len() {
            add(&self.pending[..end], &[]);
        }
        for (start, end) in self.groups() {
            for from in start + 1..end {
                add(&self.pending[..start], &self.pending[from..end]);
            }
        }
        choices.into_iter().collect()
    }

    /// Ranges of pending stores that came from one call.
    fn groups(&self) -> Vec<(usize, usize)> {
        let mut groups = Vec::new();
        let mut start = 0;
        for chunk in self.pending.chunk_by(|a, b| a.group == b.group) {
            groups.push((start, start + chunk.len()));
            start += chunk.len();
        }
        groups
    }

    /// Any legal content: whole earlier calls, any subset of one more.
    fn random(&self, randomness: &mut Randomness) -> Choice {
        let groups = self.groups();
        let whole = randomness.below(groups.len() as u64 + 1) as usize;
        let start = groups.get(whole).map_or(self.pending.len(), |&(start, _)| start);
        let mut choice: Choice =
            self.pending[..start].iter().map(|store| (store.word, store.value)).collect();
        if let Some(&(start, end)) = groups.get(whole) {
            for store in &self.pending[start..end] {
                if randomness.below(2) == 1 {
                    choice.insert(store.word, store.value);
                }
            }
        }
        choice
    }

    fn all(&self) -> Choice {
        self.pending.iter().map(|store| (store.word, store.value)).collect()
    }
}

/// Media and the stores on their way to it, at one place in the record.
#[derive(Debug)]
struct Media {
    persisted: Arc<Objects>,
    lines: BTreeMap<(u32, u32), Line>,
    position: usize,
    mark: Option<u64>,
}

const WORDS_PER_LINE: u32 = (LINE_BYTES / 8) as u32;

impl Media {
    fn new(start: &Arc<Objects>) -> Self {
        Self { persisted: Arc::clone(start), lines: BTreeMap::new(), position: 0, mark: None }
    }

    fn apply(&mut self, event: &Event) {
        self.position += 1;
        match *event {
            Event::Created { object, length_bytes } => {
                self.lines.retain(|&(held, _), _| held != object);
                Arc::make_mut(&mut self.persisted).insert(object, Arc::new(vec![0; length_bytes]));
            }
            Event::Removed { object } => {
                self.lines.retain(|&(held, _), _| held != object);
                Arc::make_mut(&mut self.persisted).remove(&object);
            }
            Event::Stored { object, word, value, group } => {
                if self.persisted.contains_key(&object) {
                    let line = self.lines.entry((object, word / WORDS_PER_LINE)).or_default();
                    line.pending.push(Pending { word, value, group });
                }
            }
            Event::Flushed { object, line, by } => {
                if let Entry::Occupied(mut line) = self.lines.entry((object, line)) {
                    let line = line.get_mut();
                    line.flushing.push((by, line.pending.len()));
                }
            }
            Event::Fenced { by } => self.complete(by),
            Event::Marked { label } => self.mark = Some(label),
        }
    }

    /// Moves what `by` flushed to media.
    fn complete(&mut self, by: u32) {
        let persisted = &mut self.persisted;
        self.lines.retain(|&(object, _), line| {
            let flushed = line.flushing.iter().filter(|flush| flush.0 == by);
            let Some(covered) = flushed.map(|flush| flush.1).max() else { return true };
            if let Some(bytes) = Arc::make_mut(persisted).get_mut(&object) {
                let bytes = Arc::make_mut(bytes);
                for store in line.pending.drain(..covered) {
                    let at = store.word as usize * 8;
                    bytes[at..at + 8].copy_from_slice(&store.value.to_le_bytes());
                }
            }
            line.flushing.retain(|flush| flush.0 != by);
            for flush in &mut line.flushing {
                flush.1 = flush.1.saturating_sub(covered);
            }
            !line.pending.is_empty()
        });
    }

    fn image(&self, choices: impl IntoIterator<Item = ((u32, u32), Choice)>) -> CrashImage {
        let patches = choices
            .into_iter()
            .flat_map(|((object, _), choice)| {
                choice.into_iter().map(move |(word, value)| (object, word, value))
            })
            .collect();
        CrashImage {
            objects: Arc::clone(&self.persisted),
            patches,
            position: self.position,
            mark: self.mark,
        }
    }

    fn image_of_everything(&self) -> CrashImage {
        self.image(self.lines.iter().map(|(&key, line)| (key, line.all())))
    }

    /// Hands out images; true when they are all there are.
    fn each_image(&self, limits: &CrashLimits, mut check: impl FnMut(&CrashImage)) -> bool {
        if limits.kind == CrashKind::Process {
            check(&self.image_of_everything());
            return true;
        }
        let most = limits.images_per_point.max(1);
        let mut product = 1_usize;
        let mut choices = Vec::new();
        for (&key, line) in &self.lines {
            // No need to list the choices of a history that is far beyond the limit.
            if product > most || line.pending.len() > most {
                product = usize::MAX;
                break;
            }
            let line = line.choices();
            product = product.saturating_mul(line.len());
            choices.push((key, line));
        }
        if product <= most {
            self.every_combination(&choices, &mut check);
            true
        } else {
            self.sample(limits, most, &mut check);
            false
        }
    }

    fn every_combination(
        &self,
        choices: &[((u32, u32), Vec<Choice>)],
        check: &mut impl FnMut(&CrashImage),
    ) {
        let mut digits = vec![0; choices.len()];
        loop {
            let picked = choices
                .iter()
                .zip(&digits)
                .map(|((key, line), &digit)| (*key, line[digit].clone()));
            check(&self.image(picked));
            let mut place = 0;
            loop {
                let Some(digit) = digits.get_mut(place) else { return };
                *digit += 1;
                if *digit < choices[place].1.len() {
                    break;
                }
                *digit = 0;
                place += 1;
            }
        }
    }

    /// The corners first (nothing, everything, one line alone, one line missing: where missing
    /// fences show), then chance.
    fn sample(&self, limits: &CrashLimits, most: usize, check: &mut impl FnMut(&CrashImage)) {
        let everything = || self.lines.iter().map(|(&key, line)| (key, line.all()));
        check(&self.image([]));
        let mut done = 1;
        if done < most {
            check(&self.image_of_everything());
            done += 1;
        }
        let mut randomness = Randomness::new(limits.seed ^ (self.position as u64).rotate_left(32));
        // Up to half of the images are corners; with many lines, chance says which.
        let corners = self.lines.len() * 2;
        let wanted = (most / 2) as u64;
        for (index, &key) in self.lines.keys().enumerate() {
            for alone in [true, false] {
                let take = corners as u64 <= wanted || randomness.below(corners as u64) < wanted;
                if take && done < most && (index > 0 || self.lines.len() > 1) {
                    check(&self.image(everything().filter(|line| (line.0 == key) == alone)));
                    done += 1;
                }
            }
        }
        while done < most {
            let picked = self.lines.iter().map(|(&key, line)| (key, line.random(&mut randomness)));
            check(&self.image(picked));
            done += 1;
        }
    }
}

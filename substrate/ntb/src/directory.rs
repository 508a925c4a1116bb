//! The first page of each direction of a device: which parts of its window are in use by what, so that several users
//! share one device.
//!
//! ```text
//!    0  magic and version
//!  128  16 words, one for each unit of the window: the part that has the unit, as its writer has it, and the number by
//!       which the writer is interrupted, with how many vectors
//! 2048  32 latches of doorbells, one a line (not of the directory: see `bells`)
//! ```
//!
//! Behind that page a window has 16 units. A *portion* is 1, 2, 4, 8 or all of them, named as `K/N` (the K-th of N, from
//! 0), with two doorbells for each unit. The end that opens a portion writes what it is into its units' words at the other
//! end, and looks whether the other end has the same there: then the two have a part in common, and else each refuses
//! the other by name. Words of units that belong to others are others' business. An end that went leaves its words;
//! the next one of that portion writes over them.
//!
//! Every word comes from the other host, so that it is decoded or refused.

use std::fmt;
use std::str::FromStr;
use std::sync::atomic::Ordering;

use crate::window::{Inbound, LINE_BYTES, Outbound};

/// Bytes of the page.
pub const PAGE_BYTES: usize = 4096;
/// Units of a window.
const UNITS: u8 = 16;
/// Doorbells of a unit.
const BELLS_OF_A_UNIT: usize = 2;
/// Doorbells of a window.
pub const BELLS: usize = UNITS as usize * BELLS_OF_A_UNIT;

const MAGIC_AT: usize = 0;
const UNITS_AT: usize = 128;
const LATCHES_AT: usize = 2048;

const _: () =
    assert!(UNITS_AT + UNITS as usize * 8 <= LATCHES_AT, "the units end before the latches");
const _: () =
    assert!(LATCHES_AT + BELLS * LINE_BYTES <= PAGE_BYTES, "the latches end with the page");

/// "BLNTD", two zeros and the version.
const MAGIC: u64 = u64::from_le_bytes(*b"BLNTD\0\0\x02");

/// Where the latch of a doorbell lies.
pub(crate) fn latch_at(bell: usize) -> usize {
    assert!(bell < BELLS, "a doorbell of the window");
    LATCHES_AT + bell * LINE_BYTES
}

/// What a part is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Packets of sockets' connections.
    Sockets,
    /// Queue pairs of the fabric.
    Fabric,
}

impl Kind {
    fn code(self) -> u8 {
        match self {
            Self::Sockets => 1,
            Self::Fabric => 2,
        }
    }

    fn of(code: u8) -> Option<Self> {
        [Self::Sockets, Self::Fabric].into_iter().find(|kind| kind.code() == code)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Sockets => "sockets",
            Self::Fabric => "fabric",
        })
    }
}

/// The K-th of N equal portions of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portion {
    index: u8,
    of: u8,
}

impl Default for Portion {
    fn default() -> Self {
        Self::WHOLE
    }
}

impl Portion {
    /// All of it.
    pub const WHOLE: Self = Self { index: 0, of: 1 };

    /// The `index`-th of `of`, from 0; `None` unless `of` is 1, 2, 4, 8 or 16 and above `index`.
    #[must_use]
    pub fn new(index: u8, of: u8) -> Option<Self> {
        (of.is_power_of_two() && of <= UNITS && index < of).then_some(Self { index, of })
    }

    /// Which, and of how many.
    #[must_use]
    pub fn numbers(self) -> (u8, u8) {
        (self.index, self.of)
    }

    fn units(self) -> std::ops::Range<usize> {
        let count = usize::from(UNITS / self.of);
        let first = usize::from(self.index) * count;
        first..first + count
    }

    /// Its first unit: no two portions in use have the same.
    #[must_use]
    pub fn first_unit(self) -> usize {
        self.units().start
    }

    /// Its doorbells.
    #[must_use]
    pub fn bells(self) -> std::ops::Range<usize> {
        let units = self.units();
        units.start * BELLS_OF_A_UNIT..units.end * BELLS_OF_A_UNIT
    }

    /// Where it lies in a direction of so many bytes: offset and length. Nothing where there is no room behind the page.
    #[must_use]
    pub fn range(self, bytes: usize) -> (usize, usize) {
        let body = bytes.saturating_sub(PAGE_BYTES) & !(LINE_BYTES - 1);
        let unit = body / usize::from(UNITS);
        let unit = unit & if unit >= 4096 { !4095 } else { !(LINE_BYTES - 1) };
        let units = self.units();
        let start = units.start * unit;
        // What does not divide by the units is the last one's.
        let end = if units.end == usize::from(UNITS) { body } else { units.end * unit };
        (PAGE_BYTES + start, end - start)
    }
}

impl fmt::Display for Portion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.of)
    }
}

impl FromStr for Portion {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, &'static str> {
        let wrong = "a part is K/N: the K-th, from 0, of 1, 2, 4, 8 or 16";
        let (index, of) = text.split_once('/').ok_or(wrong)?;
        let number = |text: &str| text.parse::<u8>().map_err(|_| wrong);
        Self::new(number(index)?, number(of)?).ok_or(wrong)
    }
}

/// How an end is interrupted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interrupted {
    /// The number of its machine.
    pub(crate) number: u16,
    /// Its first doorbells have vectors: so many.
    pub(crate) vectors: u8,
}

/// A part as its word says it: kind 1, portion 2, vectors 1, number and one 4 (0: it is not interrupted).
fn word(kind: Kind, portion: Portion, by: Option<Interrupted>) -> u64 {
    let (number, vectors) = by.map_or((0, 0), |by| (u32::from(by.number) + 1, by.vectors));
    let part = u32::from_le_bytes([kind.code(), portion.index, portion.of, vectors]);
    u64::from(part) | u64::from(number) << 32
}

/// `None` for a word that no honest end writes.
#[expect(clippy::cast_possible_truncation, reason = "the two halves")]
fn read(word: u64) -> Option<(Kind, Portion, Option<Interrupted>)> {
    let [kind, index, of, vectors] = (word as u32).to_le_bytes();
    let (by, most) = match ((word >> 32) as u32).checked_sub(1) {
        None => (None, 0),
        Some(number) => (Some(Interrupted { number: u16::try_from(number).ok()?, vectors }), BELLS),
    };
    let part = (Kind::of(kind)?, Portion::new(index, of)?, by);
    (usize::from(vectors) <= most).then_some(part)
}

/// Why a part is not shared with the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// It has another part there.
    #[error(
        "the other end has {theirs_kind} in part {theirs} there, this one {ours_kind} in part {ours}"
    )]
    Part {
        /// What the other end has there.
        theirs_kind: Kind,
        /// Where.
        theirs: Portion,
        /// What this one has.
        ours_kind: Kind,
        /// Where.
        ours: Portion,
    },
    /// It writes another directory, or none.
    #[error(
        "the other end says {word:#x} where a directory of this version says {MAGIC:#x}, or which part is whose"
    )]
    Version {
        /// As it stands there.
        word: u64,
    },
}

/// One end's hand in the directory.
#[derive(Clone, Debug)]
pub struct Directory {
    page: Inbound,
    other: Outbound,
    kind: Kind,
    portion: Portion,
    by: Option<Interrupted>,
}

impl Directory {
    /// Of the end that has `portion`, and is interrupted so.
    pub(crate) fn new(
        page: Inbound,
        other: Outbound,
        kind: Kind,
        portion: Portion,
        by: Option<Interrupted>,
    ) -> Self {
        Self { page, other, kind, portion, by }
    }

    /// Writes what this end has, again: what is written while the other end is not there is lost.
    pub fn announce(&self) {
        for unit in self.portion.units() {
            let word = word(self.kind, self.portion, self.by);
            self.other.post_word(UNITS_AT + unit * 8, word);
        }
        self.other.fence();
        self.other.post_word(MAGIC_AT, MAGIC);
        self.other.fence();
    }

    /// What the other end has in this portion instead, if so.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        // Acquire: the units' words were posted behind a fence before it.
        let magic = self.page.word(MAGIC_AT).load(Ordering::Acquire);
        if magic != 0 && magic != MAGIC {
            return Some(Refusal::Version { word: magic });
        }
        let own = (self.kind, self.portion);
        self.portion.units().find_map(|unit| {
            let word = self.page.word(UNITS_AT + unit * 8).load(Ordering::Relaxed);
            match read(word) {
                _ if word == 0 => None,
                Some((kind, portion, _)) if (kind, portion) == own => None,
                Some((theirs_kind, theirs, _)) => Some(Refusal::Part {
                    theirs_kind,
                    theirs,
                    ours_kind: self.kind,
                    ours: self.portion,
                }),
                None => Some(Refusal::Version { word }),
            }
        })
    }
}

/// How the end that writes `page` is interrupted, of the part that has `portion`.
pub(crate) fn interrupted_in(page: &Inbound, portion: Portion) -> Option<Interrupted> {
    let word = page.word(UNITS_AT + portion.first_unit() * 8).load(Ordering::Acquire);
    read(word)?.2
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use beeline_os::Mapping;
    use proptest::prelude::*;

    use super::*;
    use crate::window::Mapped;

    fn pages() -> [(Inbound, Outbound); 2] {
        let memory = Arc::new(Mapping::anonymous(2 * PAGE_BYTES).unwrap());
        [0, 1].map(|side| {
            let other = Mapped::new(Arc::clone(&memory), (1 - side) * PAGE_BYTES, PAGE_BYTES);
            let page = Inbound::new(Arc::clone(&memory), side * PAGE_BYTES, PAGE_BYTES);
            (page, Outbound::new(Arc::new(other)))
        })
    }

    fn portion(text: &str) -> Portion {
        text.parse().unwrap()
    }

    fn directory((page, other): &(Inbound, Outbound), kind: Kind, part: &str) -> Directory {
        let by = Interrupted { number: 3, vectors: 2 };
        Directory::new(page.clone(), other.clone(), kind, portion(part), Some(by))
    }

    #[test]
    fn two_users_share_a_device_and_what_differs_at_the_ends_is_refused_by_name() {
        let pages = pages();
        let [near_sockets, far_sockets] =
            pages.each_ref().map(|page| directory(page, Kind::Sockets, "0/2"));
        let [near_fabric, far_fabric] =
            pages.each_ref().map(|page| directory(page, Kind::Fabric, "1/2"));
        assert_eq!(near_sockets.refusal(), None, "the peer is not there yet");
        for directory in [&near_sockets, &far_sockets, &near_fabric, &far_fabric] {
            directory.announce();
        }
        for directory in [&near_sockets, &far_sockets, &near_fabric, &far_fabric] {
            assert_eq!(directory.refusal(), None);
        }
        let by = Interrupted { number: 3, vectors: 2 };
        assert_eq!(interrupted_in(&pages[0].0, portion("1/2")), Some(by));
        // The far end's sockets begin anew, with a quarter of the device.
        let quarter = directory(&pages[1], Kind::Sockets, "1/4");
        quarter.announce();
        let said = near_sockets.refusal().unwrap().to_string();
        assert!(said.contains("sockets in part 1/4") && said.contains("part 0/2"), "{said}");
        assert_eq!(near_fabric.refusal(), None, "the other half is not touched");
        let other_kind = directory(&pages[1], Kind::Fabric, "0/2");
        other_kind.announce();
        let said = near_sockets.refusal().unwrap().to_string();
        assert!(said.contains("has fabric in part 0/2"), "{said}");
        far_sockets.announce();
        assert_eq!(near_sockets.refusal(), None, "an end that is right again");
    }

    #[test]
    fn a_directory_of_another_version_is_refused_by_its_word() {
        let [near, far] = pages();
        let near = directory(&near, Kind::Fabric, "0/1");
        far.1.post_word(MAGIC_AT, 77);
        assert_eq!(near.refusal(), Some(Refusal::Version { word: 77 }));
    }

    proptest! {
        #[test]
        fn portions_of_a_window_do_not_overlap_and_stay_in_it(
            bytes in 0_usize..64 << 20, log in 0_u32..5,
        ) {
            let of = 1_u8 << log;
            let mut end = PAGE_BYTES;
            for index in 0..of {
                let portion = Portion::new(index, of).unwrap();
                let (at, length) = portion.range(bytes);
                prop_assert!(at >= end && at.is_multiple_of(LINE_BYTES));
                prop_assert!(length == 0 || at + length <= bytes);
                end = at + length;
                prop_assert_eq!(portion.bells().len(), BELLS / usize::from(of));
                prop_assert_eq!(portion.to_string().parse(), Ok(portion));
            }
        }

        #[test]
        fn any_word_is_refused_or_has_one_spelling(any in any::<u64>(), low in any::<u32>()) {
            for any in [any, u64::from(low & 0x1f_1f_03), u64::from(low) << 24 & 0x1_ffff_1f1f_03ff] {
                if let Some((kind, portion, by)) = read(any) {
                    prop_assert_eq!(word(kind, portion, by), any);
                }
            }
        }

        #[test]
        fn any_words_in_the_page_are_refused_or_leave_the_part_alone(
            words in proptest::collection::vec((0_usize..PAGE_BYTES / 8, any::<u64>()), 1..40),
        ) {
            let [near, far] = pages();
            let directory = directory(&near, Kind::Sockets, "1/4");
            for (at, word) in words {
                far.1.post_word(at * 8, word);
                let _ = (directory.refusal(), interrupted_in(&near.0, Portion::WHOLE));
            }
        }
    }
}

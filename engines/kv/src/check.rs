//! The offline integrity check: looks at every byte that means something.

use std::path::Path;

use beeline_pmem::{Pool, PoolOptions};

use crate::check_rows::{RowEndSeen, RowTimeSeen, malformed, named};
use crate::check_streams::{Gathered, StreamSeen};
use crate::entry::{FIRST_ENTRY, HEADER_BYTES, Header, Sealer};
use crate::segments::{FORMAT, FORMAT_PLAIN, SETTLED, SegmentState, UNTRUSTED, word};
use crate::store::{STORE_FORMAT, root};
use crate::walk;
use crate::{KvError, RecoveryReport, Store, StoreOptions};

/// A place where something is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// Segment identifier; none for the pool file.
    pub segment: Option<u32>,
    /// What and where, in words.
    pub what: String,
}

/// What a check saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckReport {
    /// Segments looked at.
    pub segments: u64,
    /// Valid entries.
    pub entries: u64,
    /// Bytes looked at.
    pub bytes: u64,
    /// What a crash explains: entries cut short, overwrites in place that did not finish.
    pub torn: u64,
    /// The store was closed in good order, so that nothing can be torn.
    pub clean: bool,
    /// Entries whose loss somebody accepted.
    pub accepted: u64,
    /// Streams, by namespace and row.
    pub streams: Vec<StreamSeen>,
    /// Services' rows that ended and wait for the collection of their keys.
    pub row_ends: Vec<RowEndSeen>,
    /// Services' rows that have a time.
    pub row_times: Vec<RowTimeSeen>,
    /// What nothing explains.
    pub damages: Vec<Damage>,
}

impl CheckReport {
    /// True when corruption was found.
    #[must_use]
    pub fn is_damaged(&self) -> bool {
        !self.damages.is_empty()
    }
}

/// Checks the store in `directory`, which no process may have open. Changes nothing.
///
/// Errors: [`KvError::Unfinished`]; the pool's, when it cannot even be opened; a damaged header is
/// among them.
pub fn check(directory: &Path) -> Result<CheckReport, KvError> {
    crate::refuse_unfinished(directory)?;
    Ok(check_pool(&Pool::inspect(directory)?))
}

/// Accepts the loss of whatever is damaged in `directory`, which no process may have open: the store
/// there opens again, with what is left. Older values, and keys that were deleted, may be among it.
///
/// Errors: as [`Store::open`], but for damage; the pool's.
pub fn repair(directory: &Path) -> Result<RecoveryReport, KvError> {
    crate::refuse_unfinished(directory)?;
    let pool = Pool::open(directory, &PoolOptions::default())?;
    let options = StoreOptions { accept_damage: true, ..StoreOptions::default() };
    Ok(Store::open(pool, options)?.2)
}

/// Checks the store in an open pool that no store uses.
#[must_use]
pub fn check_pool(pool: &Pool) -> CheckReport {
    let findings = pool.report().findings;
    let mut report = CheckReport { clean: findings.clean, ..CheckReport::default() };
    let mut damage = |segment, what: String| report.damages.push(Damage { segment, what });
    if findings.damaged_descriptors > 0 {
        damage(None, format!("{} damaged descriptors", findings.damaged_descriptors));
    }
    if findings.damaged_pages > 0 {
        damage(None, format!("{} pages of the table overwritten", findings.damaged_pages));
    }
    for path in &pool.report().set_aside {
        damage(None, format!("{} holds data and belongs to no descriptor", path.display()));
    }
    if findings.healed_descriptors > 0 {
        damage(None, format!("{} descriptors with one damaged copy", findings.healed_descriptors));
    }
    if findings.clean && findings.unequal_words > 0 {
        damage(None, format!("{} words whose copies differ", findings.unequal_words));
    }
    let segments = pool.segments();
    let format = pool.root_word(root::FORMAT);
    if format > STORE_FORMAT || (format == 0 && !segments.is_empty()) {
        damage(None, format!("format word is {format}"));
    }
    let sealer = Sealer::new(&pool.secret());
    let mut gathered = Gathered::new(pool.root_word(root::BARRIER_SYSTEM));
    let mut states = Vec::new();
    for segment in segments {
        let id = segment.id();
        let found = segment.word(word::FORMAT);
        if ![0, FORMAT_PLAIN, FORMAT].contains(&found) {
            report.damages.push(Damage {
                segment: Some(id),
                what: format!("segment format word is {found}"),
            });
            continue;
        }
        let flags = if segment.is_shared() { UNTRUSTED } else { 0 }
            | if findings.clean { SETTLED } else { 0 };
        let state = SegmentState::new(segment, 0, flags, FIRST_ENTRY, false);
        check_segment(&sealer, &state, &mut report, &mut gathered);
        states.push(state);
    }
    // Where a snapshot was taking the place of all contents, the next opening drops what is there.
    if pool.root_word(root::REPLACING) == 0 {
        gathered.find_heads(&sealer, &states);
        report.streams = gathered.streams();
        report.row_ends = gathered.rows.ends(&sealer, &states);
        report.row_times = gathered.rows.times(|namespace| gathered.since(namespace));
    }
    let lost = report.accepted > 0 || pool.root_word(root::ACCEPTED) != 0;
    for stream in report.streams.iter().filter(|stream| stream.missing > 0 && !lost) {
        let StreamSeen { namespace, missing, .. } = stream;
        let row = String::from_utf8_lossy(&stream.row).into_owned();
        let what = format!("the stream {row:?} of namespace {namespace} lacks {missing} positions");
        report.damages.push(Damage { segment: None, what });
    }
    report
}

fn check_segment(
    sealer: &Sealer,
    state: &SegmentState,
    report: &mut CheckReport,
    gathered: &mut Gathered,
) {
    let client = state.is(UNTRUSTED);
    let mut copy = Vec::new();
    let bytes = walk::bytes_of(state, &mut copy);
    let id = state.id;
    let mut wrong = Vec::new();
    let walked = walk::walk(sealer, state, bytes, |found| {
        if found.spoilt {
            return;
        }
        report.entries += 1;
        gathered.take(state.id, &found, bytes);
        // A client may write what it likes into its own segment.
        if !client {
            wrong.extend(malformed(&found, bytes));
        }
        let used = u64::from(found.offset) + found.header.used_bytes();
        let end = found.offset + found.header.slot_bytes;
        // A client's slot may hold what is left of a longer, older entry.
        if !client && bytes[used as usize..end as usize].iter().any(|byte| *byte != 0) {
            wrong.push(format!("padding of the entry at {} is not zero", found.offset));
        }
    });
    report.segments += 1;
    report.bytes += u64::from(state.length);
    if bytes[..FIRST_ENTRY as usize].iter().any(|byte| *byte != 0) && !client {
        wrong.push("bytes before the first entry are not zero".to_owned());
    }
    if client {
        report.torn += u64::from(walked.missing);
        if walked.spoilt > 0 {
            wrong.push(format!("{} entries of a client were spoilt", walked.spoilt));
        }
    } else {
        for hole in &walked.holes {
            wrong.push(format!("the entry at {hole} does not verify{}", reads(bytes, *hole)));
        }
        let unnamed = walked.missing.saturating_sub(walked.holes.len() as u32);
        if unnamed > 0 {
            wrong.push(format!("{unnamed} entries do not verify"));
        }
        if walked.missing > 0 && walked.missing == state.accepted() {
            wrong.clear();
            report.accepted += u64::from(walked.missing);
        }
        if walked.is_torn() && walked.missing == 0 {
            if report.clean && walked.dirty_end != 0 {
                wrong
                    .push(format!("bytes {}..{} belong to no entry", walked.end, walked.dirty_end));
            } else {
                report.torn += 1;
            }
        }
        let counted = state.promised();
        if report.clean && counted != walked.entries + walked.missing {
            wrong.push(format!("{} entries found, {counted} counted", walked.entries));
        }
    }
    report.damages.extend(wrong.into_iter().map(|what| Damage { segment: Some(id), what }));
}

/// What a damaged entry's key reads, where that makes sense: for people, who decide.
fn reads(bytes: &[u8], offset: u32) -> String {
    let rest = &bytes[offset as usize..];
    let Some(head) = rest.first_chunk::<{ HEADER_BYTES as usize }>() else { return String::new() };
    let header = Header::decode(head);
    let key =
        rest.get(HEADER_BYTES as usize..HEADER_BYTES as usize + usize::from(header.key_length));
    match key {
        Some(key) if header.is_plausible(rest.len() as u64) => {
            format!("; it reads as {}", named(header.namespace, key, header.is_tombstone()))
        }
        _ => String::new(),
    }
}

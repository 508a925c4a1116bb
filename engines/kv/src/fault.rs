//! Known bugs that a test can put back, to show that the suites see them. Never on in a real run:
//! the switch is a thread-local that only [`with_known_bug`] sets.

use std::cell::Cell;

/// A bug the suites must catch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KnownBug {
    /// `commit` returns without its fence.
    AcknowledgeBeforeFence,
    /// A commit that was begun counts as done.
    AcknowledgeBegun,
    /// A tombstone is dropped although older entries of its key are on media.
    DropTombstoneEarly,
    /// A victim is freed before its copies and what superseded it are persisted.
    FreeBeforePersist,
    /// The collector copies entries that are not persisted themselves, so that part of a batch
    /// can survive without the rest.
    CollectUncommitted,
    /// Recovery leaves what a crash left behind the last good entry.
    KeepTail,
    /// A superseded entry is not counted, so that its tombstone looks useless.
    ForgetStale,
    /// A dead segment is appended to before its new generation is persisted.
    ReuseBeforePersist,
    /// A dead segment gets its new generation before what superseded its entries is persisted.
    RecycleBeforePersist,
    /// A count of persisted entries is believed whatever life of the segment it is about.
    CountOfAnotherLife,
    /// What a namespace held before it was created or cleared counts as its own.
    ForgetSince,
    /// An opening does not count the fields of rows.
    ForgetFields,
    /// An expiry counts for whatever value its key has.
    ExpiryOfAnyValue,
    /// Keys expire while a snapshot replaces the contents.
    ExpireWhileReplacing,
    /// Fields of a row that ended are removed before its end is persisted.
    SweepBeforePersist,
    /// A row that a crash left without a field stays after an opening.
    KeepHollowRows,
    /// The next segment of streams is written before the former one is persisted.
    GapBetweenSegments,
    /// What a batch stored before it came to its first append stays in the other chain.
    SplitBatch,
    /// A segment whose streams were cut off in another shard's log does not remember that log.
    ForgetTruncator,
    /// A stream takes a change while its last one waits in another shard's log.
    AppendAway,
    /// An opening does not learn which rows ended.
    ForgetRowEnds,
    /// The mark of a row that ended goes before the deletions of its keys are persisted.
    UnmarkEarly,
    /// The time of a row that ended stays on media when the row's mark goes.
    KeepRowTimes,
}

impl KnownBug {
    /// Every known bug.
    pub const ALL: [Self; 23] = [
        Self::AcknowledgeBeforeFence,
        Self::AcknowledgeBegun,
        Self::DropTombstoneEarly,
        Self::FreeBeforePersist,
        Self::CollectUncommitted,
        Self::KeepTail,
        Self::ForgetStale,
        Self::ReuseBeforePersist,
        Self::RecycleBeforePersist,
        Self::CountOfAnotherLife,
        Self::ForgetSince,
        Self::ForgetFields,
        Self::ExpiryOfAnyValue,
        Self::ExpireWhileReplacing,
        Self::SweepBeforePersist,
        Self::KeepHollowRows,
        Self::GapBetweenSegments,
        Self::SplitBatch,
        Self::ForgetTruncator,
        Self::AppendAway,
        Self::ForgetRowEnds,
        Self::UnmarkEarly,
        Self::KeepRowTimes,
    ];
}

thread_local! {
    static ON: Cell<Option<KnownBug>> = const { Cell::new(None) };
}

/// True when a test put this bug back on this thread.
#[inline]
pub(crate) fn is_on(bug: KnownBug) -> bool {
    ON.with(|on| on.get() == Some(bug))
}

/// Runs `body` with a known bug put back, on this thread. For tests of the test suites.
#[doc(hidden)]
pub fn with_known_bug<R>(bug: KnownBug, body: impl FnOnce() -> R) -> R {
    ON.with(|on| on.set(Some(bug)));
    let result = body();
    ON.with(|on| on.set(None));
    result
}

//! Bugs that tests put into the store on purpose, to show that they find such.

/// One bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Planted {
    /// An object is evicted although a client holds a reference.
    EvictReferenced,
    /// An object is served before it is sealed.
    ServeUnsealed,
    /// What a client that died referenced stays referenced.
    KeepDeadReferences,
    /// What the store restores is put where another client can still write.
    WriteAmongOthers,
    /// The memory of a deleted object is free although it is referenced.
    FreeWhileReferenced,
    /// A file that could not be written counts as written.
    LoseFailedSpill,
    /// An object deleted while it is written to disk stays when that fails.
    LeakDeletedSpill,
    /// What a client had reserved when it died stays reserved.
    KeepDeadReserves,
    /// An object that is put in one request takes the identifier of another.
    PutOverAnother,
    /// A later request of the same number is taken for one that waits for memory.
    TakeAnotherRequest,
}

#[cfg(test)]
thread_local! {
    /// The bug of this thread's stores.
    pub(super) static PLANTED: std::cell::Cell<Option<Planted>> = const { std::cell::Cell::new(None) };
}

/// Whether the store has the bug.
#[cfg(test)]
pub(super) fn planted(bug: Planted) -> bool {
    PLANTED.get() == Some(bug)
}

/// It has none.
#[cfg(not(test))]
pub(super) const fn planted(_bug: Planted) -> bool {
    false
}

//! Bugs that tests put into a channel on purpose, to show that its tests find such.

/// One bug.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Planted {
    /// A client sends although no slot was given back.
    SendWithoutCredit,
    /// A slot is given back when its message comes, and not when the message is taken out.
    GiveSlotBackEarly,
    /// A piece of the granted area is free once its message is sent.
    FreePieceEarly,
    /// A destination whose request timed out is used again before the late write came.
    ReuseLateDestination,
    /// A destination is believed wherever it lies.
    BelieveDestination,
    /// The buffers of a reply are idle before its write is done.
    ReuseBufferUnderWrite,
    /// A connection that breaks takes its requests along without an outcome.
    ForgetBrokenRequests,
    /// A checksum is not looked at.
    IgnoreChecksum,
    /// An acknowledgement of what was never sent is believed.
    BelieveAcknowledgement,
    /// The rest of a long reply is kept for ever.
    KeepRestForEver,
}

#[cfg(test)]
thread_local! {
    /// The bug of this thread's channels.
    pub(crate) static PLANTED: std::cell::Cell<Option<Planted>> = const { std::cell::Cell::new(None) };
}

/// Whether the channel has the bug.
#[cfg(test)]
pub(crate) fn planted(bug: Planted) -> bool {
    PLANTED.get() == Some(bug)
}

/// It has none.
#[cfg(not(test))]
pub(crate) const fn planted(_bug: Planted) -> bool {
    false
}

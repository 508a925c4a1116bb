//! A part of a memory window as this provider uses it: the window of [`beeline_ntb`], with scratchpads in its first
//! line's words, one doorbell, and what the two ends say of the part.
//!
//! The data path writes across the link and reads its own memory, never the other way round: a
//! posted write is cheap and a remote read stalls the processor for a round trip (NTSocks 3.1).

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use beeline_ntb::handed::Handed;
use beeline_ntb::{Cable, Inbound, Outbound, Refusal};

use crate::layout::{PAD_BYTES, SCRATCHPADS};

/// The doorbell, among those of the part.
const BELL: usize = 0;

/// What holds the memory, and what comes with it.
#[derive(Debug)]
enum Held {
    /// A cable between two processes of one host.
    Handed(Arc<Handed>),
    /// A part of a window in files.
    Files(Box<Cable>),
    /// Memory of a test's.
    #[cfg(test)]
    Bare,
}

/// One link's hardware: where this side's writes go, what the peer wrote, and how to wake it.
///
/// Posted writes of one thread may become visible in any order, or not at all, until that thread's
/// next [`Window::fence`]; from then on they are visible before anything it writes later.
#[derive(Debug)]
pub(crate) struct Window {
    window: beeline_ntb::Window,
    held: Held,
}

impl From<Cable> for Window {
    fn from(cable: Cable) -> Self {
        Self { window: cable.window.clone(), held: Held::Files(Box::new(cable)) }
    }
}

impl From<Arc<Handed>> for Window {
    fn from(cable: Arc<Handed>) -> Self {
        Self { window: cable.window.clone(), held: Held::Handed(cable) }
    }
}

#[cfg(test)]
impl From<beeline_ntb::Window> for Window {
    fn from(window: beeline_ntb::Window) -> Self {
        Self { window, held: Held::Bare }
    }
}

/// The scratchpad of a window that the peer writes.
pub(crate) fn scratchpad(inbound: &Inbound, index: usize) -> u32 {
    assert!(index < SCRATCHPADS, "a scratchpad of the window");
    // Acquire: pairs with the fence the peer puts behind what the scratchpad announces.
    let word = inbound.word(index * PAD_BYTES).load(Ordering::Acquire);
    // What does not fit is nothing that a peer says.
    u32::try_from(word).unwrap_or(0)
}

impl Window {
    /// Local memory that the peer writes.
    pub(crate) fn inbound(&self) -> &Inbound {
        &self.window.inbound
    }

    /// The peer's memory for regions, which this side may write.
    pub(crate) fn memory(&self) -> Option<&Outbound> {
        match &self.held {
            Held::Handed(cable) => cable.memory(),
            _ => None,
        }
    }

    /// Posts `length` bytes to `offset` of the peer's memory.
    ///
    /// Invariant: the range lies inside the outbound window.
    ///
    /// # Safety
    ///
    /// `source` is readable for `length` bytes.
    pub(crate) unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.window.outbound.post(offset, source, length) };
    }

    /// Posts one aligned word, which becomes visible at once as a whole.
    pub(crate) fn post_word(&self, offset: usize, value: u64) {
        self.window.outbound.post_word(offset, value);
    }

    /// Posts to one of the peer's scratchpads.
    pub(crate) fn post_scratchpad(&self, index: usize, value: u32) {
        assert!(index < SCRATCHPADS, "a scratchpad of the window");
        self.post_word(index * PAD_BYTES, u64::from(value));
    }

    /// Orders earlier posted writes of this thread before later ones, and sends them on their way.
    pub(crate) fn fence(&self) {
        self.window.outbound.fence();
    }

    /// Wakes the peer, behind everything fenced. The doorbell is latched: it rings once until the
    /// peer rearms it.
    pub(crate) fn ring(&self) {
        self.window.bells.ring(BELL);
    }

    /// Readable when the peer rang; `None` where nothing can be slept on, and this end has to look
    /// now and then.
    pub(crate) fn doorbell(&self) -> Option<BorrowedFd<'_>> {
        self.window.bells.descriptor(BELL)
    }

    /// True while the peer can make that readable. Where it cannot, this end has to look too.
    pub(crate) fn is_rung(&self) -> bool {
        self.window.bells.is_rung(BELL)
    }

    /// Takes rings off the descriptor; the latch stays.
    pub(crate) fn hush(&self) {
        self.window.bells.clear(BELL);
    }

    /// Opens the latch: what the peer makes visible from now on rings. Look for what came before.
    pub(crate) fn rearm(&self) {
        self.window.bells.rearm(BELL);
    }

    /// False once the link is known to be cut.
    pub(crate) fn is_plugged(&self) -> bool {
        self.window.bells.is_plugged()
    }

    /// This side's scratchpad, as the peer last wrote it.
    pub(crate) fn scratchpad(&self, index: usize) -> u32 {
        scratchpad(self.inbound(), index)
    }

    /// Both ends say what they have, which is lost while the other one is not there.
    pub(crate) fn is_announced(&self) -> bool {
        matches!(self.held, Held::Files(_))
    }

    /// Says which part this is, where a device has several.
    pub(crate) fn announce(&self) {
        if let Held::Files(cable) = &self.held {
            cable.directory.announce();
        }
    }

    /// What the peer has in this part of the device instead, if so.
    pub(crate) fn refusal(&self) -> Option<Refusal> {
        match &self.held {
            Held::Files(cable) => cable.directory.refusal(),
            _ => None,
        }
    }
}

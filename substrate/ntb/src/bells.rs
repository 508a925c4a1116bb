//! Doorbells: of the emulation, and latches before any of them.
//!
//! A latch is what a bridge has as a mask of its doorbell register: a ring closes it, and the owner opens it again.
//! While it is closed a ring costs a look at the latch and no system call. Latches are words of the emulated device,
//! not of the window: the ringer changes them in place, which needs memory that both ends have coherently.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};

use beeline_os::doorbell::{Doorbell, Rung};

use crate::Side;
use crate::directory::latch_at;
use crate::files::{CableError, failed};
use crate::window::{Bells, Inbound};

/// Doorbells that nothing hears: sleepers look by the clock.
#[derive(Clone, Copy, Debug)]
pub struct Silent;

impl Bells for Silent {
    fn ring(&self, _: usize) {}

    fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
        None
    }

    fn clear(&self, _: usize) {}
}

/// Two named pipes beside a file for each bit. Both ends hold each pipe open for both, so that a ring is never
/// lost and never a signal, whichever end is there.
#[derive(Debug)]
pub(crate) struct Pipes {
    own: Vec<OwnedFd>,
    other: Vec<OwnedFd>,
}

fn pipe(window: &Path, side: Side, bit: usize) -> Result<OwnedFd, CableError> {
    let mut path = window.to_owned().into_os_string();
    path.push(format!(".bell-{}-{bit}", side.index()));
    let path = PathBuf::from(path);
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    let made = rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0);
    if let Err(error) = made
        && error != rustix::io::Errno::EXIST
    {
        return Err(failed("making the doorbell", &path)(error.into()));
    }
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let open = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path);
    let file: File = open.map_err(failed("opening the doorbell", &path))?;
    let about = file.metadata().map_err(failed("looking at the doorbell", &path))?;
    if !about.file_type().is_fifo() {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "it is no named pipe");
        return Err(failed("looking at the doorbell", &path)(source));
    }
    Ok(file.into())
}

impl Pipes {
    /// The pipes of `bits`, of which the first one is bit 0 here.
    pub(crate) fn open(
        window: &Path,
        side: Side,
        bits: std::ops::Range<usize>,
    ) -> Result<Self, CableError> {
        let all = |side| bits.clone().map(|bit| pipe(window, side, bit)).collect::<Result<_, _>>();
        Ok(Self { own: all(side)?, other: all(side.other())? })
    }
}

impl Bells for Pipes {
    fn ring(&self, bit: usize) {
        if let Some(pipe) = self.other.get(bit) {
            // A full pipe is readable already.
            let _ = rustix::io::write(pipe, &[1]);
        }
    }

    fn descriptor(&self, bit: usize) -> Option<BorrowedFd<'_>> {
        Some(self.own.get(bit)?.as_fd())
    }

    fn clear(&self, bit: usize) {
        let mut rings = [0; 512];
        if let Some(pipe) = self.own.get(bit) {
            // An end that rings without pause costs a bounded number of calls.
            for _ in 0..8 {
                if !rustix::io::read(pipe, &mut rings).is_ok_and(|count| count == rings.len()) {
                    break;
                }
            }
        }
    }
}

/// One doorbell between two processes of one host.
#[derive(Debug)]
pub(crate) struct Pair {
    doorbell: Doorbell,
    cut: AtomicBool,
}

impl Pair {
    pub(crate) fn new(doorbell: Doorbell) -> Self {
        Self { doorbell, cut: AtomicBool::new(false) }
    }

    /// The other end will not come.
    pub(crate) fn cut(&self) {
        self.cut.store(true, Ordering::SeqCst);
    }
}

impl Bells for Pair {
    fn ring(&self, _: usize) {
        self.doorbell.ring();
    }

    fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
        Some(self.doorbell.as_fd())
    }

    fn clear(&self, _: usize) {
        if self.doorbell.clear() == Rung::Closed {
            self.cut();
        }
    }

    fn is_plugged(&self) -> bool {
        !self.cut.load(Ordering::SeqCst)
    }
}

/// Doorbells behind latches.
#[derive(Debug)]
pub(crate) struct Latched {
    bells: Arc<dyn Bells>,
    /// The page with this end's latches, and the one with the other end's.
    own: Inbound,
    other: Inbound,
    /// Bell that is bit 0.
    first: usize,
}

impl Latched {
    pub(crate) fn new(bells: Arc<dyn Bells>, own: Inbound, other: Inbound, first: usize) -> Self {
        Self { bells, own, other, first }
    }
}

impl Bells for Latched {
    fn ring(&self, bit: usize) {
        // Sequentially consistent, against the store in `rearm` and the loads behind it: either
        // the other end sees what this one wrote before, or this one sees the latch open.
        fence(Ordering::SeqCst);
        let latch = self.other.half_word(latch_at(self.first + bit));
        if latch.swap(1, Ordering::SeqCst) == 0 {
            self.bells.ring(bit);
        }
    }

    fn descriptor(&self, bit: usize) -> Option<BorrowedFd<'_>> {
        self.bells.descriptor(bit)
    }

    fn clear(&self, bit: usize) {
        self.bells.clear(bit);
    }

    fn rearm(&self, bit: usize) {
        self.own.half_word(latch_at(self.first + bit)).store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    fn is_rung(&self, bit: usize) -> bool {
        self.bells.is_rung(bit)
    }

    fn is_plugged(&self) -> bool {
        self.bells.is_plugged()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use beeline_os::Mapping;

    use super::*;

    #[derive(Debug, Default)]
    struct Counted(AtomicUsize);

    impl Bells for Counted {
        fn ring(&self, _: usize) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn descriptor(&self, _: usize) -> Option<BorrowedFd<'_>> {
            None
        }

        fn clear(&self, _: usize) {}
    }

    #[test]
    fn a_latched_bell_rings_once_until_its_owner_opens_it_and_each_bit_by_itself() {
        let memory = Arc::new(Mapping::anonymous(8192).unwrap());
        let page = |at| Inbound::new(Arc::clone(&memory), at, 4096);
        let counted = Arc::new(Counted::default());
        let ringer = Latched::new(Arc::clone(&counted) as _, page(0), page(4096), 16);
        let owner = Latched::new(Arc::new(Silent), page(4096), page(0), 16);
        let rings = || counted.0.load(Ordering::Relaxed);
        (0..3).for_each(|_| ringer.ring(1));
        assert_eq!(rings(), 1);
        ringer.ring(0);
        assert_eq!(rings(), 2, "another bit");
        owner.rearm(1);
        (0..3).for_each(|_| ringer.ring(1));
        assert_eq!(rings(), 3);
    }
}

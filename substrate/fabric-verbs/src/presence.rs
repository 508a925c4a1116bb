//! Whether the kernel still offers a device.
//!
//! A device that is removed while it is open says so in one of two ways. Where the driver can cut
//! its users off, the kernel does, and reports a fatal event. Where it cannot (soft-RoCE), the
//! kernel takes the device's file away and then waits until everybody has closed it: no event says
//! so, and everything seems to work. So the file's folder is watched; that costs nothing while
//! nothing changes there.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

/// Room for a few events; what they say is looked up instead.
const EVENT_BYTES: usize = 1024;

/// The watch on one file.
#[derive(Debug)]
pub(crate) struct Presence {
    path: PathBuf,
    /// Inode and its file system: another file of that name is another device.
    identity: (u64, u64),
    events: OwnedFd,
}

fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::metadata(path).ok()?;
    Some((found.ino(), found.dev()))
}

impl Presence {
    /// Watches `path`; `None` where that is not possible, which costs the notice and nothing else.
    pub(crate) fn watch(path: &Path) -> Option<Self> {
        let events = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).ok()?;
        let flags = WatchFlags::DELETE | WatchFlags::MOVED_FROM | WatchFlags::ONLYDIR;
        inotify::add_watch(&events, path.parent()?, flags).ok()?;
        // Looked at once it is watched: nothing that happens later is missed.
        let identity = identity(path)?;
        Some(Self { path: path.to_owned(), identity, events })
    }

    /// Readable when something left the folder.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Whether the file is still there; clears the event.
    pub(crate) fn is_there(&self) -> bool {
        let mut events = [0_u8; EVENT_BYTES];
        while matches!(rustix::io::read(&self.events, &mut events), Ok(count) if count > 0) {}
        identity(&self.path) == Some(self.identity)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn stirs(presence: &Presence) -> bool {
        let events = presence.descriptor();
        let mut fds = [PollFd::new(&events, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    #[test]
    fn a_file_that_goes_is_noticed_and_its_successor_is_another() {
        let folder = std::env::temp_dir().join(format!("beeline-presence-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (own, other) = (folder.join("uverbs0"), folder.join("uverbs1"));
        std::fs::write(&own, "").unwrap();
        std::fs::write(&other, "").unwrap();
        let presence = Presence::watch(&own).unwrap();
        assert!(!stirs(&presence) && presence.is_there());
        std::fs::remove_file(&other).unwrap();
        assert!(stirs(&presence) && presence.is_there(), "another device went");
        assert!(!stirs(&presence), "looking clears the event");
        // Held open, so that its number is not given to the next one.
        let held = std::fs::File::open(&own).unwrap();
        std::fs::remove_file(&own).unwrap();
        assert!(stirs(&presence) && !presence.is_there());
        std::fs::write(&own, "").unwrap();
        assert!(!presence.is_there(), "one of the same name is another");
        drop(held);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn a_file_that_is_not_there_is_not_watched() {
        assert!(Presence::watch(Path::new("/nowhere/infiniband/uverbs0")).is_none());
    }
}

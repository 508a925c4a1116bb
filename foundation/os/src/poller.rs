//! Readiness of many descriptors (`epoll`), and a descriptor that wakes a sleeping thread
//! (`eventfd`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec, eventfd};
use rustix::io::Errno;

/// What to be told about a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Bytes, connections or an end can be read.
    pub readable: bool,
    /// Bytes can be written.
    pub writable: bool,
}

impl Interest {
    /// Readable only.
    pub const READ: Self = Self { readable: true, writable: false };
    /// Both.
    pub const READ_WRITE: Self = Self { readable: true, writable: true };
    /// Writable only: for a peer whose requests must wait.
    pub const WRITE: Self = Self { readable: false, writable: true };
    /// Only errors and hang-ups.
    pub const NONE: Self = Self { readable: false, writable: false };

    fn flags(self) -> EventFlags {
        let mut flags = EventFlags::empty();
        flags.set(EventFlags::IN | EventFlags::RDHUP, self.readable);
        flags.set(EventFlags::OUT, self.writable);
        flags
    }
}

/// One descriptor's news.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Readiness {
    /// As given to [`Poller::add`].
    pub token: u64,
    /// Reading makes progress (bytes, end of stream or an error).
    pub readable: bool,
    /// Writing makes progress.
    pub writable: bool,
    /// The peer is gone in both directions, or the descriptor failed.
    pub hung_up: bool,
}

/// A level-triggered set of descriptors.
pub struct Poller {
    epoll: OwnedFd,
    events: Vec<epoll::Event>,
}

// SAFETY: the event type can carry pointers, which keeps it from being `Send`; this set only ever
// stores 64-bit tokens in it.
unsafe impl Send for Poller {}

impl std::fmt::Debug for Poller {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Poller").field("epoll", &self.epoll).finish_non_exhaustive()
    }
}

impl Poller {
    /// A set that reports at most `capacity` descriptors a call.
    ///
    /// Errors: `epoll_create1`'s.
    pub fn new(capacity: usize) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        Ok(Self { epoll, events: Vec::with_capacity(capacity.max(1)) })
    }

    /// Starts watching.
    ///
    /// Errors: `epoll_ctl`'s.
    pub fn add(&self, descriptor: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, descriptor, EventData::new_u64(token), interest.flags())?)
    }

    /// Changes what is watched for.
    ///
    /// Errors: `epoll_ctl`'s.
    pub fn modify(&self, descriptor: impl AsFd, token: u64, interest: Interest) -> io::Result<()> {
        Ok(epoll::modify(&self.epoll, descriptor, EventData::new_u64(token), interest.flags())?)
    }

    /// Stops watching.
    ///
    /// Errors: `epoll_ctl`'s.
    pub fn remove(&self, descriptor: impl AsFd) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, descriptor)?)
    }

    /// Waits for news: not at all with a zero `timeout`, for ever with `None`. An interrupted wait
    /// counts as no news.
    ///
    /// Errors: `epoll_wait`'s.
    pub fn wait(&mut self, timeout: Option<Duration>) -> io::Result<usize> {
        let timeout = timeout.map(|timeout| Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(timeout.subsec_nanos()),
        });
        self.events.clear();
        let spare = rustix::buffer::spare_capacity(&mut self.events);
        match epoll::wait(&self.epoll, spare, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => Ok(self.events.len()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The `index`th piece of news of the last wait.
    #[must_use]
    pub fn readiness(&self, index: usize) -> Readiness {
        let event = self.events[index];
        let flags = event.flags;
        Readiness {
            token: event.data.u64(),
            readable: flags
                .intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR),
            writable: flags.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR),
            hung_up: flags.intersects(EventFlags::HUP | EventFlags::ERR),
        }
    }
}

impl AsFd for Poller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// A counter that makes a descriptor readable: how one thread ends another's sleep.
#[derive(Debug)]
pub struct Waker(OwnedFd);

impl Waker {
    /// A waker that has not been woken.
    ///
    /// Errors: `eventfd`'s.
    pub fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    /// Makes the descriptor readable. Cannot fail in a way that loses the wake-up: a full counter
    /// is readable already.
    pub fn wake(&self) {
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Makes the descriptor unreadable until the next wake.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8][..]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_before_the_wait_is_not_lost_and_clear_ends_it() {
        let waker = Waker::new().unwrap();
        let mut poller = Poller::new(4).unwrap();
        poller.add(&waker, 7, Interest::READ).unwrap();
        assert_eq!(poller.wait(Some(Duration::ZERO)).unwrap(), 0);
        waker.wake();
        waker.wake();
        assert_eq!(poller.wait(None).unwrap(), 1);
        assert_eq!(poller.readiness(0).token, 7);
        waker.clear();
        assert_eq!(poller.wait(Some(Duration::ZERO)).unwrap(), 0);
    }
}

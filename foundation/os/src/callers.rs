//! Accepting callers where descriptors run out.
//!
//! A listener is readable while a caller waits. When a call cannot be accepted for want of a
//! descriptor the caller stays, and a thread that asks again at once asks for ever. So strangers,
//! callers that have not proved who they are, hold a share of the process's descriptors at most;
//! the one that has been silent longest makes room for the next; and where no stranger is left to
//! go, the listener is not looked at for a while.

use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// How long callers are left waiting when there is no descriptor for another.
const PAUSE: Duration = Duration::from_millis(250);

/// How many strangers a listener keeps: `most`, and a quarter of the process's descriptors.
#[must_use]
pub fn most_strangers(most: usize) -> usize {
    let quarter = getrlimit(Resource::Nofile).current.map_or(u64::MAX, |limit| limit / 4);
    most.min(usize::try_from(quarter).unwrap_or(usize::MAX)).max(1)
}

/// What to do after a call could not be accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterFailure {
    /// No caller waits.
    Sleep,
    /// That caller is gone; try the next.
    Next,
    /// There is no descriptor or no memory for it, and it still waits: make room, or pause.
    MakeRoom,
}

/// Reads the error of an `accept` that does not block.
#[must_use]
pub fn after_failure(error: &io::Error) -> AfterFailure {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::AGAIN) => AfterFailure::Sleep,
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => AfterFailure::MakeRoom,
        Some(Errno::INTR | Errno::CONNABORTED | Errno::PROTO) => AfterFailure::Next,
        // Unknown ones must not be asked about without end either.
        _ => AfterFailure::MakeRoom,
    }
}

/// Whether a listener is looked at.
#[derive(Debug, Default)]
pub struct Pause(Option<Instant>);

impl Pause {
    /// Callers wait from now on.
    pub fn begin(&mut self) {
        self.0 = Some(Instant::now() + PAUSE);
    }

    /// True while callers wait.
    #[must_use]
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// How long they still wait: what a sleeper sleeps at most.
    #[must_use]
    pub fn left(&self) -> Option<Duration> {
        self.0.map(|until| until.saturating_duration_since(Instant::now()))
    }

    /// Ends the pause when its time is over; true when this call ended it.
    pub fn end(&mut self) -> bool {
        self.0.take_if(|until| *until <= Instant::now()).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strangers_have_a_share_of_the_descriptors() {
        assert_eq!(most_strangers(1), 1);
        let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        assert!(most_strangers(usize::MAX) as u64 <= limit / 4 + 1);
    }

    #[test]
    fn want_of_a_descriptor_is_no_reason_to_ask_at_once() {
        let error = |errno: Errno| io::Error::from(errno);
        assert_eq!(after_failure(&error(Errno::MFILE)), AfterFailure::MakeRoom);
        assert_eq!(after_failure(&error(Errno::AGAIN)), AfterFailure::Sleep);
        assert_eq!(after_failure(&error(Errno::CONNABORTED)), AfterFailure::Next);
        let mut pause = Pause::default();
        assert!(!pause.is_on() && !pause.end());
        pause.begin();
        assert!(pause.is_on() && pause.left().is_some_and(|left| left <= PAUSE));
    }
}

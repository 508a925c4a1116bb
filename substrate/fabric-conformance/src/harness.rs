//! What a provider's test supplies, and how an item of the suite ends early.

use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::panic::Location;
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use beeline_fabric::{Device, FabricError, PostError};
use rustix::event::{PollFd, PollFlags, Timespec};

/// Why an item stopped before its end.
#[derive(Debug)]
pub enum Stop {
    /// The provider or the machine lacks what the item needs.
    Skipped {
        /// What is missing, in words.
        reason: String,
    },
    /// The provider breaks the specification.
    Failed {
        /// What was seen and what should have been.
        message: String,
        /// Where in the suite.
        location: &'static Location<'static>,
    },
}

impl Stop {
    /// The item cannot run here.
    pub fn skipped(reason: impl Into<String>) -> Self {
        Self::Skipped { reason: reason.into() }
    }

    /// The provider does not do what it should.
    #[track_caller]
    pub fn failed(message: impl Into<String>) -> Self {
        Self::Failed { message: message.into(), location: Location::caller() }
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Skipped { reason } => write!(f, "skipped: {reason}"),
            Self::Failed { message, location } => write!(f, "{message} ({location})"),
        }
    }
}

impl From<FabricError> for Stop {
    #[track_caller]
    fn from(error: FabricError) -> Self {
        Self::failed(format!("unexpected error: {error}"))
    }
}

impl From<PostError> for Stop {
    #[track_caller]
    fn from(error: PostError) -> Self {
        Self::failed(format!("a post was refused: {error}"))
    }
}

impl From<io::Error> for Stop {
    #[track_caller]
    fn from(error: io::Error) -> Self {
        Self::failed(format!("unexpected system error: {error}"))
    }
}

/// What an item returns.
pub type ItemResult = Result<(), Stop>;

/// Something a provider can do, or the reason why it cannot; the reason is shown with every item
/// that is skipped for it.
pub type Support = Result<(), &'static str>;

/// What the provider under test can take part in. The defaults suit a provider on real time.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities {
    /// Peers may be other processes of this machine.
    pub peer_processes: Support,
    /// Data objects of one device may be used on several threads at a time.
    pub threads: Support,
    /// [`Harness::crash`], [`Harness::pause`] and [`Harness::resume`] work.
    pub simulated_faults: Support,
    /// A write is placed when its own completion arrives (and not only before what follows it on
    /// the queue pair).
    pub placed_before_completion: Support,
    /// A write with immediate outside its region is refused for that even when no receive is
    /// posted; else the missing receive is found first ([`beeline_fabric::Status::ReceiverNotReady`]).
    pub range_checked_before_receive: Support,
    /// A word that a gather list or a packet divides is placed at once all the same.
    pub divided_words_placed_whole: Support,
    /// Most queue pairs that two nodes can have with each other.
    pub most_connections: u64,
}

impl Default for Capabilities {
    fn default() -> Self {
        Self {
            peer_processes: Ok(()),
            threads: Ok(()),
            simulated_faults: Err("the provider runs in real time"),
            placed_before_completion: Ok(()),
            range_checked_before_receive: Ok(()),
            divided_words_placed_whole: Ok(()),
            most_connections: u64::MAX,
        }
    }
}

/// A provider under test. A value is made for each item, so nothing is shared between items;
/// a peer process makes its own.
pub trait Harness: Send + Sync {
    /// Opens a device: each call gives another node, with its own keys and numbers, that can
    /// connect to the others.
    ///
    /// Errors: the provider's.
    fn open_device(&self) -> Result<Arc<dyn Device>, Stop>;

    /// Why the machine has no device of this provider: every item is skipped for it.
    fn absent(&self) -> Option<String> {
        None
    }

    /// What the provider can take part in.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// Time since some start; virtual in simulation.
    fn now(&self) -> Duration {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed()
    }

    /// Called when nothing arrived: lets others run. Simulation takes a step here.
    fn idle(&self) {
        std::thread::sleep(Duration::from_micros(20));
    }

    /// Waits until `descriptor` is readable; false when `timeout` passed first.
    ///
    /// Errors: the system's.
    fn wait_readable(&self, descriptor: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
        let mut polled = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
        let timeout = Timespec::try_from(timeout).map_err(io::Error::other)?;
        loop {
            match rustix::event::poll(&mut polled, Some(&timeout)) {
                Ok(ready) => return Ok(ready > 0),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Ends the node of `device` at once, as `kill -9` would.
    ///
    /// Errors: [`Stop::Skipped`] where nodes are not simulated.
    fn crash(&self, _device: &Arc<dyn Device>) -> Result<(), Stop> {
        Err(Stop::skipped("nodes are not simulated"))
    }

    /// Stops the node of `device`, as SIGSTOP would.
    ///
    /// Errors: [`Stop::Skipped`] where nodes are not simulated.
    fn pause(&self, _device: &Arc<dyn Device>) -> Result<(), Stop> {
        Err(Stop::skipped("nodes are not simulated"))
    }

    /// Lets the node of `device` go on.
    ///
    /// Errors: [`Stop::Skipped`] where nodes are not simulated.
    fn resume(&self, _device: &Arc<dyn Device>) -> Result<(), Stop> {
        Err(Stop::skipped("nodes are not simulated"))
    }
}

/// A value for a message: not more than a few lines of it.
pub(crate) fn shown(value: &dyn fmt::Debug) -> String {
    let mut text = format!("{value:?}");
    if let Some((end, _)) = text.char_indices().nth(300) {
        text.truncate(end);
        text.push_str("...");
    }
    text
}

/// Fails the item unless the condition holds.
macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err($crate::harness::Stop::failed(format!($($message)+)));
        }
    };
}

/// Fails the item unless both sides are equal.
macro_rules! ensure_eq {
    ($left:expr, $right:expr, $($message:tt)+) => {{
        let (left, right) = (&$left, &$right);
        if left != right {
            let message = format!($($message)+);
            let (left, right) = ($crate::harness::shown(&left), $crate::harness::shown(&right));
            return Err($crate::harness::Stop::failed(format!(
                "{message}: saw {left}, expected {right}"
            )));
        }
    }};
}

pub(crate) use {ensure, ensure_eq};

//! How a relay reaches the others: what the edge of the program does for it, off its thread.
//!
//! Calls may take long and may block, so they are asked for and answered by [`Event`]s.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use beeline_fabric::{ConnectInfo, Device};
use beeline_os::poller::Waker;

/// Longest word of one relay to another while a link is made.
pub const MOST_HELLO_BYTES: usize = 256;

/// What the edge of the program does. Calls return at once; the outcome is an [`Event`].
pub trait Network: fmt::Debug {
    /// Agrees with the relay of `host` on a provider: [`Event::Found`].
    fn find(&self, host: usize);

    /// Carries connect data to the relay of `host`: [`Event::Joined`] with the same `link`.
    fn join(&self, host: usize, link: u64, info: ConnectInfo, hello: Vec<u8>);

    /// Asks the relay of `host` whether it made the call that `words` tell of: [`Event::Confirmed`]
    /// with the same `link`.
    fn confirm(&self, host: usize, link: u64, words: Vec<u8>);
}

/// Where the answer to a caller goes.
pub type Answer<T> = Box<dyn FnOnce(Result<T, String>) + Send>;

/// What happened on the network.
pub enum Event {
    /// The device to reach `host` with.
    Found {
        /// Which.
        host: usize,
        /// Or why not.
        device: Result<Arc<dyn Device>, String>,
    },
    /// The other relay's queue pair and its word.
    Joined {
        /// As asked.
        link: u64,
        /// Or why not.
        answer: Result<(ConnectInfo, Vec<u8>), String>,
    },
    /// What `confirm` was answered.
    Confirmed {
        /// As asked.
        link: u64,
        /// It is so.
        yes: bool,
    },
    /// Another relay calls.
    Called {
        /// To make the queue pair on.
        device: Arc<dyn Device>,
        /// Its queue pair.
        info: ConnectInfo,
        /// Its word.
        hello: Vec<u8>,
        /// How to answer.
        answer: Answer<(ConnectInfo, Vec<u8>)>,
    },
    /// Another relay wants to know whether we called it.
    Asked {
        /// What it knows of the call.
        words: Vec<u8>,
        /// How to answer.
        answer: Answer<()>,
    },
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Found { .. } => "Found",
            Self::Joined { .. } => "Joined",
            Self::Confirmed { .. } => "Confirmed",
            Self::Called { .. } => "Called",
            Self::Asked { .. } => "Asked",
        })
    }
}

/// Where events are put, from any thread. Wakes the relay.
#[derive(Clone, Debug)]
pub struct Inbox {
    sender: Sender<Event>,
    waker: Arc<Waker>,
}

impl Inbox {
    /// Puts one.
    pub fn put(&self, event: Event) {
        // A relay that is gone needs no events.
        let _ = self.sender.send(event);
        self.waker.wake();
    }
}

/// The relay's side of an [`Inbox`].
#[derive(Debug)]
pub struct Events {
    receiver: Receiver<Event>,
    waker: Arc<Waker>,
}

impl Events {
    /// The next one, if there is one.
    #[must_use]
    pub fn next(&self) -> Option<Event> {
        self.receiver.try_recv().ok()
    }

    /// Readable when there are some; cleared before they are taken.
    #[must_use]
    pub fn waker(&self) -> &Waker {
        &self.waker
    }
}

/// Both sides.
///
/// Errors: `eventfd`'s.
pub fn inbox() -> std::io::Result<(Inbox, Events)> {
    let (sender, receiver) = channel();
    let waker = Arc::new(Waker::new()?);
    Ok((Inbox { sender, waker: Arc::clone(&waker) }, Events { receiver, waker }))
}

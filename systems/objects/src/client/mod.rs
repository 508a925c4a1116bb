//! The client library: a process's connection to the store of its node.
//!
//! ```text
//!  any thread ── request ──► ring ──► store           replies wake the one thread that sleeps
//!             ◄── reply ──── ring ◄── store
//!             ── rings, where the store sleeps ──► Unix socket
//!  helper     ◄── descriptors, segments that go, listings ── Unix socket; its end: store gone
//! ```
//!
//! Invariants: a [`Client`] may be used by any number of threads; an [`Object`] holds a reference
//! in the store, and its memory mapped, until dropped; a child of `fork` gets
//! [`ObjectsError::Forked`] from every call and releases nothing of its parent's.

mod calls;
mod copying;
mod memory;
mod object;
mod small;
mod wait;

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use beeline_os::control_socket::{ControlSocket, Received};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use object::{Buffer, Object};

use crate::error::ObjectsError;
use crate::link::Link;
use crate::wire::{Entry, RECORD_BYTES, Record, RecordKind, VERSION};
use wait::Shared;

/// How a client behaves.
#[derive(Clone, Debug)]
pub struct ClientOptions {
    /// Patience with the store at the start.
    pub connect_timeout: Duration,
    /// How long a call polls for its reply before the thread sleeps.
    pub spin: Duration,
    /// Objects are sealed with a checksum, and a get verifies what has one.
    pub checksums: bool,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            spin: Duration::from_micros(20),
            checksums: false,
        }
    }
}

/// A connection to the store of this node. Cloning is cheap; the last clone ends it.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
    /// Ends the helper with the last clone.
    _helper: Arc<Helper>,
}

#[derive(Debug)]
struct Helper {
    shared: Arc<Shared>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.shared.end();
        if let Some(thread) = self.thread.take()
            && self.shared.mark.is_own_process()
        {
            let _ = thread.join();
        }
    }
}

impl Client {
    /// Connects to the store whose socket is the file `path`.
    ///
    /// Errors: [`ObjectsError::Connect`], [`ObjectsError::Version`], [`ObjectsError::System`].
    pub fn connect(path: &Path) -> Result<Self, ObjectsError> {
        Self::connect_with(path, ClientOptions::default())
    }

    /// As [`Client::connect`], with the caller's options.
    ///
    /// Errors: as [`Client::connect`].
    pub fn connect_with(path: &Path, options: ClientOptions) -> Result<Self, ObjectsError> {
        let failed = |source| ObjectsError::Connect { address: path.display().to_string(), source };
        let system = |what| move |source| ObjectsError::System { what, source };
        let socket = ControlSocket::connect_path(path).map_err(failed)?;
        let hello = Record::new(RecordKind::Hello, VERSION.into(), 0, 0);
        socket.send(&hello.encode(), &[]).map_err(failed)?;
        let (welcome, mut descriptors) = first(&socket, options.connect_timeout).map_err(failed)?;
        if welcome.kind == RecordKind::Refused {
            return Err(ObjectsError::Version { theirs: welcome.a, ours: VERSION });
        }
        let broken = ObjectsError::Protocol { what: "its welcome lacks what belongs to it" };
        if welcome.kind != RecordKind::Welcome || descriptors.len() != 1 {
            return Err(broken);
        }
        let Some(link) = descriptors.pop() else { return Err(broken) };
        let link = Link::open(link).map_err(system("mapping the rings"))?;
        let shared = Shared::new(socket, link, welcome, path, options)
            .map_err(system("preparing a connection"))?;
        let shared = Arc::new(shared);
        let of_helper = Arc::clone(&shared);
        let thread = std::thread::Builder::new()
            .name("objects-client".to_owned())
            .spawn(move || of_helper.help())
            .map_err(system("starting the connection's helper thread"))?;
        let helper = Arc::new(Helper { shared: Arc::clone(&shared), thread: Some(thread) });
        Ok(Self { shared, _helper: helper })
    }

    /// The socket's path.
    #[must_use]
    pub fn address(&self) -> &PathBuf {
        &self.shared.path
    }

    /// Names this life of the store: another number means that everything it held is gone.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.shared.welcome.b
    }

    /// Whether the store is there, and this process the one that connected.
    #[must_use]
    pub fn is_connected(&self) -> bool {
        self.shared.mark.is_own_process() && !self.shared.is_gone()
    }

    /// Every object of the store, in no order.
    ///
    /// Errors: [`ObjectsError::StoreGone`], [`ObjectsError::Forked`].
    pub fn list(&self) -> Result<Vec<Entry>, ObjectsError> {
        self.shared.list()
    }
}

/// The store's first record.
fn first(
    socket: &ControlSocket,
    patience: Duration,
) -> io::Result<(Record, Vec<std::os::fd::OwnedFd>)> {
    let bound = Timespec {
        tv_sec: i64::try_from(patience.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(patience.subsec_nanos()),
    };
    let (mut bytes, mut descriptors) = ([0; RECORD_BYTES], Vec::new());
    loop {
        if poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&bound))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        match socket.receive(&mut bytes, &mut descriptors)? {
            Received::Empty => {}
            Received::Closed => return Err(io::ErrorKind::ConnectionRefused.into()),
            Received::Record(length) => {
                let record = Record::decode(&bytes[..length]).ok_or(io::ErrorKind::InvalidData)?;
                return Ok((record, descriptors));
            }
        }
    }
}

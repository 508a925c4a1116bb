//! A listener and its connections: a task for each, on a few threads of their own.
//!
//! The documents' door and the router's are one of these each; what a connection does is theirs. A connection over
//! the limit is told so in the answer to its first message, and closed.

use std::future::Future;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use beeline_documents_query::error::{Code, QueryError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::watch;

use crate::commands::failure;
use crate::reply::Reply;
use crate::wire;

/// Stack of a thread that serves: room for the deepest pipeline of the deepest expressions.
pub(crate) const STACK: usize = 32 << 20;
/// How long a connection that is told to end may take to read what it is owed.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Connections over the limit that wait for their answer at once; more are closed without one.
const MOST_TURNED_AWAY: usize = 64;
/// How often the log tells of connections over the limit.
const TOLD: Duration = Duration::from_secs(10);

/// True once everything is to end.
pub type Stop = watch::Receiver<bool>;

/// What listens.
pub trait Served: Send + Sync + 'static {
    /// Serves a connection until it ends or is to end; connections are numbered from 1.
    fn serve(
        self: Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        number: i32,
        stop: Stop,
    ) -> impl Future<Output = std::io::Result<()>> + Send;

    /// Looks after what is kept, until it is to end.
    fn keep(self: Arc<Self>, stop: Stop) -> impl Future<Output = ()> + Send;

    /// A connection came, and is served or, where as many as may be are open, turned away.
    fn came(&self, is_served: bool) {
        let _ = is_served;
    }

    /// So many are open now.
    fn open(&self, connections: usize) {
        let _ = connections;
    }
}

/// The running listener.
#[derive(Debug)]
pub struct Listening {
    runtime: Option<Runtime>,
    stop: watch::Sender<bool>,
    address: SocketAddr,
    open: Arc<AtomicUsize>,
}

/// Counts a connection while it lives.
struct Guard<S: Served> {
    served: Arc<S>,
    open: Arc<AtomicUsize>,
}

impl<S: Served> Guard<S> {
    fn new(served: &Arc<S>, open: &Arc<AtomicUsize>) -> Self {
        served.open(open.fetch_add(1, Ordering::AcqRel) + 1);
        Self { served: Arc::clone(served), open: Arc::clone(open) }
    }
}

impl<S: Served> Drop for Guard<S> {
    fn drop(&mut self) {
        self.served.open(self.open.fetch_sub(1, Ordering::AcqRel) - 1);
    }
}

impl Listening {
    /// Listens, on threads of this name; `most` connections are served at once. Port 0 picks a free one, and
    /// `make` is told which.
    ///
    /// Errors: an address that cannot be used, threads that cannot be started.
    pub fn start<S: Served>(
        address: SocketAddr,
        (name, threads): (&str, usize),
        most: usize,
        make: impl FnOnce(SocketAddr) -> S,
    ) -> std::io::Result<(Self, Arc<S>)> {
        let listener = StdListener::bind(address)?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads.max(1))
            .thread_name(name)
            .thread_stack_size(STACK)
            .enable_all()
            .build()?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let (stop, stopped) = watch::channel(false);
        let (served, open) = (Arc::new(make(address)), Arc::<AtomicUsize>::default());
        let accepting =
            accept(listener, Arc::clone(&served), Arc::clone(&open), most, stopped.clone());
        runtime.spawn(accepting);
        runtime.spawn(Arc::clone(&served).keep(stopped));
        Ok((Self { runtime: Some(runtime), stop, address, open }, served))
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Its threads, until it is closed.
    #[must_use]
    pub fn threads(&self) -> Option<Handle> {
        self.runtime.as_ref().map(|runtime| runtime.handle().clone())
    }

    /// Ends: no new connections, commands under way are answered, then `last` is done.
    pub fn close(&mut self, last: impl FnOnce()) {
        let _ = self.stop.send(true);
        let Some(runtime) = self.runtime.take() else { return };
        let open = Arc::clone(&self.open);
        runtime.block_on(async {
            let ended = async {
                while open.load(Ordering::Acquire) > 0 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            };
            let _ = tokio::time::timeout(LAST_WORDS, ended).await;
        });
        last();
        runtime.shutdown_timeout(LAST_WORDS);
    }
}

async fn accept<S: Served>(
    listener: TcpListener,
    served: Arc<S>,
    open: Arc<AtomicUsize>,
    most: usize,
    mut stop: Stop,
) {
    let numbers = AtomicI32::new(1);
    let leaving = Arc::<AtomicUsize>::default();
    let (mut turned_away, mut told) = (0_u64, None::<Instant>);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.changed() => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors: without a pause the readable listener would burn a core.
                tracing::warn!(%error, "a MongoDB connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let is_served = open.load(Ordering::Relaxed) < most;
        served.came(is_served);
        if !is_served {
            turned_away += 1;
            if told.is_none_or(|told| told.elapsed() >= TOLD) {
                told = Some(Instant::now());
                tracing::warn!(%peer, most, turned_away, "as many MongoDB connections as may be are open");
            }
            if leaving.fetch_add(1, Ordering::Relaxed) < MOST_TURNED_AWAY {
                let leaving = Arc::clone(&leaving);
                tokio::spawn(async move {
                    let _ = tokio::time::timeout(LAST_WORDS, turn_away(stream, most)).await;
                    leaving.fetch_sub(1, Ordering::Relaxed);
                });
            } else {
                leaving.fetch_sub(1, Ordering::Relaxed);
            }
            continue;
        }
        let guard = Guard::new(&served, &open);
        let (served, stop) = (Arc::clone(&served), stop.clone());
        let number = numbers.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(async move {
            let _guard = guard;
            let _ = stream.set_nodelay(true);
            if let Err(error) = served.serve(stream, peer, number, stop).await {
                tracing::debug!(%error, %peer, "a MongoDB connection ended");
            }
        });
    }
}

/// Answers the first message of a connection over the limit, and closes it.
async fn turn_away(mut stream: TcpStream, most: usize) -> std::io::Result<()> {
    let mut input = Vec::new();
    let longest = wire::LONGEST_OF_STRANGER;
    let broken = |_| std::io::Error::from(std::io::ErrorKind::InvalidData);
    let length = loop {
        if let Some(length) = wire::length(&input, longest).map_err(broken)?
            && input.len() >= length
        {
            break length;
        }
        if stream.read_buf(&mut input).await? == 0 {
            return Ok(());
        }
    };
    let (manner, _) = wire::read(&input[..length], longest).map_err(broken)?;
    if manner.silent {
        return Ok(());
    }
    // A code that drivers take for a passing trouble: they try again.
    let error = QueryError::new(
        Code::HostUnreachable,
        format!("{most} connections are open, as many as may be; try again later"),
    );
    let mut output = Vec::new();
    wire::write(manner, 1, &Reply::Document(failure(&error)), &[], false, &mut output);
    stream.write_all(&output).await?;
    stream.shutdown().await
}

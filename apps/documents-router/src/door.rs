//! The router's listener and its connections: a task for each, on a few threads.

use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::Duration;

use beeline_documents::wire;
use bson::Document;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::watch;

use crate::router::Router;

/// Bytes read at once.
const READ: usize = 64 << 10;
/// A buffer that grew past this is given back once it is empty.
const KEPT: usize = 1 << 20;
/// Stack of a thread that serves: room for the deepest pipeline of the deepest expressions.
const STACK: usize = 32 << 20;
/// How long a connection that is told to end may take to read what it is owed.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Between two looks for cursors whose time is up.
const UPKEEP: Duration = Duration::from_secs(5);

/// The running listener.
#[derive(Debug)]
pub struct Door {
    runtime: Option<Runtime>,
    router: Arc<Router>,
    stop: watch::Sender<bool>,
    address: SocketAddr,
    open: Arc<AtomicUsize>,
}

struct Shared {
    router: Arc<Router>,
    open: Arc<AtomicUsize>,
    next: AtomicI32,
    most: usize,
    stop: watch::Receiver<bool>,
}

impl Door {
    /// Listens. Port 0 picks a free one; `most` connections are served at once.
    ///
    /// Errors: an address that cannot be used, threads that cannot be started.
    pub fn open(
        address: SocketAddr,
        router: Router,
        threads: usize,
        most: usize,
    ) -> std::io::Result<Self> {
        let listener = StdListener::bind(address)?;
        let address = listener.local_addr()?;
        listener.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(threads.max(1))
            .thread_name("router")
            .thread_stack_size(STACK)
            .enable_all()
            .build()?;
        let (stop, stopped) = watch::channel(false);
        let (router, open) = (Arc::new(router), Arc::<AtomicUsize>::default());
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(listener)?
        };
        let shared = Arc::new(Shared {
            router: Arc::clone(&router),
            open: Arc::clone(&open),
            next: AtomicI32::new(1),
            most,
            stop: stopped,
        });
        runtime.spawn(accept(listener, Arc::clone(&shared)));
        runtime.spawn(upkeep(shared));
        Ok(Self { runtime: Some(runtime), router, stop, address, open })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The router.
    #[must_use]
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// Connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Waits for something the router does.
    ///
    /// # Panics
    ///
    /// Never before [`Door::close`].
    pub fn wait<F: Future>(&self, work: F) -> Option<F::Output> {
        self.runtime.as_ref().map(|runtime| runtime.block_on(work))
    }

    /// Ends: no new connections, commands under way are answered.
    pub fn close(&mut self) {
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
        self.router.close();
        runtime.shutdown_timeout(LAST_WORDS);
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.close();
    }
}

async fn upkeep(shared: Arc<Shared>) {
    let mut stop = shared.stop.clone();
    loop {
        tokio::select! {
            () = tokio::time::sleep(UPKEEP) => {}
            _ = stop.changed() => return,
        }
        let closed = shared.router.expire().await;
        if closed > 0 {
            tracing::info!(closed, "idle cursors were closed");
        }
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut stop = shared.stop.clone();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = stop.changed() => return,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors: without a pause the readable listener would burn a core.
                tracing::warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        if shared.open.load(Ordering::Relaxed) >= shared.most {
            tracing::warn!(%peer, most = shared.most, "as many connections as may be are open");
            continue;
        }
        shared.open.fetch_add(1, Ordering::AcqRel);
        let guard = Guard(Arc::clone(&shared.open));
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let _guard = guard;
            let _ = stream.set_nodelay(true);
            if let Err(error) = serve(stream, peer, &shared).await {
                tracing::debug!(%error, %peer, "a connection ended");
            }
        });
    }
}

/// Counts a connection while it lives.
struct Guard(Arc<AtomicUsize>);

impl Drop for Guard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn broken(error: &wire::WireError) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, error.to_string())
}

async fn serve(mut stream: TcpStream, peer: SocketAddr, shared: &Shared) -> std::io::Result<()> {
    let (connection, peer) = (shared.next.fetch_add(1, Ordering::Relaxed), peer.to_string());
    let (mut input, mut output) = (Vec::new(), Vec::new());
    let mut stop = shared.stop.clone();
    let (mut reply_id, nothing) = (0_i32, Document::new());
    loop {
        let mut consumed = 0;
        loop {
            let rest = &input[consumed..];
            let length =
                wire::length(rest, wire::LONGEST_MESSAGE).map_err(|error| broken(&error))?;
            let Some(length) = length.filter(|length| rest.len() >= *length) else { break };
            let (manner, request) = wire::read(&rest[..length], wire::LONGEST_MESSAGE)
                .map_err(|error| broken(&error))?;
            consumed += length;
            let reply = shared.router.run(request, connection, &peer).await;
            if !manner.silent {
                reply_id = reply_id.wrapping_add(1);
                wire::write(manner, reply_id, &reply, &nothing, false, &mut output);
            }
            if output.len() >= KEPT {
                stream.write_all(&output).await?;
                output.clear();
            }
        }
        input.drain(..consumed);
        if !output.is_empty() {
            stream.write_all(&output).await?;
            output.clear();
        }
        if input.is_empty() && input.capacity() > KEPT {
            input = Vec::new();
        }
        if output.capacity() > KEPT * 2 {
            output = Vec::new();
        }
        if *stop.borrow() {
            return Ok(());
        }
        input.reserve(READ);
        let read = tokio::select! {
            read = stream.read_buf(&mut input) => read?,
            _ = stop.changed() => return Ok(()),
        };
        if read == 0 {
            return Ok(());
        }
    }
}

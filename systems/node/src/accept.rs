//! The thread that accepts connections and deals them out to the shards in turn.
//!
//! It sleeps in `epoll_wait` and touches no data. When descriptors run out it waits a moment
//! instead of spinning on a listener that stays readable.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_os::poller::{Interest, Poller, Waker};

const LISTENER: u64 = 0;
const STOP: u64 = 1;

/// Pause after `accept` failed for want of descriptors or memory.
const BACK_OFF: Duration = Duration::from_millis(50);
/// Pause between two complaints about it.
const WARN_EVERY: Duration = Duration::from_secs(5);

/// A running acceptor; stops when dropped.
#[derive(Debug)]
pub struct Acceptor {
    address: SocketAddr,
    stop: Arc<Waker>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Acceptor {
    /// Listens on `address` and calls `deal` with every connection.
    ///
    /// Errors: the socket's (address in use, not permitted).
    pub fn start(
        address: SocketAddr,
        mut deal: impl FnMut(TcpStream) + Send + 'static,
    ) -> io::Result<Self> {
        let listener = listen(address)?;
        let address = listener.local_addr()?;
        let stop = Arc::new(Waker::new()?);
        let stopping = Arc::new(AtomicBool::new(false));
        let mut poller = Poller::new(2)?;
        poller.add(&listener, LISTENER, Interest::READ)?;
        poller.add(stop.as_ref(), STOP, Interest::READ)?;
        let thread_stopping = Arc::clone(&stopping);
        let thread = std::thread::Builder::new().name("accept".into()).spawn(move || {
            let mut warned = None;
            loop {
                if poller.wait(None).is_err() || thread_stopping.load(Ordering::Acquire) {
                    return;
                }
                accept_all(&listener, &thread_stopping, &mut deal, &mut warned);
            }
        })?;
        Ok(Self { address, stop, stopping, thread: Some(thread) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for Acceptor {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        self.stop.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, listen, sockopt};
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, &address)?;
    listen(&socket, 4096)?;
    Ok(TcpListener::from(socket))
}

fn accept_all(
    listener: &TcpListener,
    stopping: &AtomicBool,
    deal: &mut impl FnMut(TcpStream),
    warned: &mut Option<Instant>,
) {
    // A flood of connections must not keep a node from stopping.
    while !stopping.load(Ordering::Acquire) {
        match listener.accept() {
            Ok((stream, _)) => deal(stream),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
            Err(error) => match rustix::io::Errno::from_io_error(&error) {
                Some(rustix::io::Errno::CONNABORTED | rustix::io::Errno::INTR) => {}
                _ => {
                    if warned.is_none_or(|at| at.elapsed() >= WARN_EVERY) {
                        *warned = Some(Instant::now());
                        tracing::warn!(
                            %error,
                            "cannot accept connections, clients wait; raise the limit on open \
                             files (ulimit -n, LimitNOFILE=) or lower maxclients"
                        );
                    }
                    std::thread::sleep(BACK_OFF);
                    return;
                }
            },
        }
    }
}

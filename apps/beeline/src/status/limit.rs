//! Connections of the status page: few at once, each for a bounded time.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Sleep;

/// Pause after a connection could not be accepted, for want of descriptors for instance.
const BACK_OFF: Duration = Duration::from_millis(100);

/// What all clients of the page together may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Connections served at once; more wait in the kernel, where they take no descriptor.
    pub connections: usize,
    /// From accept to the end of the answer.
    pub life: Duration,
}

impl Default for Limits {
    /// A handful of people and scrapers, whose requests take milliseconds.
    fn default() -> Self {
        Self { connections: 32, life: Duration::from_secs(10) }
    }
}

/// A listener that keeps to [`Limits`].
#[derive(Debug)]
pub struct Limited {
    listener: TcpListener,
    places: Arc<Semaphore>,
    life: Duration,
}

impl Limited {
    /// Over a listener.
    pub fn new(listener: TcpListener, limits: Limits) -> Self {
        let places = Arc::new(Semaphore::new(limits.connections));
        Self { listener, places, life: limits.life }
    }

    async fn next(&mut self) -> io::Result<(Timed, SocketAddr)> {
        let place = Arc::clone(&self.places).acquire_owned().await.map_err(io::Error::other)?;
        let (stream, address) = self.listener.accept().await?;
        let end = Box::pin(tokio::time::sleep(self.life));
        Ok((Timed { stream, end, _place: place }, address))
    }
}

impl axum::serve::Listener for Limited {
    type Io = Timed;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Timed, SocketAddr) {
        loop {
            match self.next().await {
                Ok(accepted) => return accepted,
                Err(error) => {
                    tracing::debug!(%error, "a connection to the status page was not accepted");
                    tokio::time::sleep(BACK_OFF).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that fails once its time is up, whichever end is waited for.
#[derive(Debug)]
pub struct Timed {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    _place: OwnedSemaphorePermit,
}

impl Timed {
    /// Registers for the end too: a client that does nothing wakes no task.
    fn check(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.end.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl AsyncRead for Timed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(context)?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.stream).poll_shutdown(context))?;
        Poll::Ready(Ok(()))
    }
}

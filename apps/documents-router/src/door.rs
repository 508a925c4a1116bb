//! The router's listener and its connections: a task for each, on a few threads.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use beeline_documents::listening::{Listening, Served, Stop};
use beeline_documents::wire;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use crate::router::Router;

/// Bytes read at once.
const READ: usize = 64 << 10;
/// A buffer that grew past this is given back once it is empty.
const KEPT: usize = 1 << 20;
/// Between two looks for cursors whose time is up.
const UPKEEP: Duration = Duration::from_secs(5);

/// The running listener.
#[derive(Debug)]
pub struct Door {
    listening: Listening,
    router: Arc<Router>,
}

struct Shared {
    router: Arc<Router>,
}

impl Served for Shared {
    async fn serve(
        self: Arc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        number: i32,
        stop: Stop,
    ) -> std::io::Result<()> {
        serve(stream, (peer, number), &self.router, stop).await
    }

    async fn keep(self: Arc<Self>, mut stop: Stop) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(UPKEEP) => {}
                _ = stop.changed() => return,
            }
            let closed = self.router.expire().await;
            if closed > 0 {
                tracing::info!(closed, "idle cursors were closed");
            }
        }
    }
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
        let router = Arc::new(router);
        let make = |_| Shared { router: Arc::clone(&router) };
        let (listening, _) = Listening::start(address, ("router", threads), most, make)?;
        Ok(Self { listening, router })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.listening.address()
    }

    /// The router.
    #[must_use]
    pub fn router(&self) -> &Arc<Router> {
        &self.router
    }

    /// Connections there are.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.listening.connections()
    }

    /// Waits for something the router does; `None` once the door is closed.
    pub fn wait<F: Future>(&self, work: F) -> Option<F::Output> {
        self.listening.threads().map(|threads| threads.block_on(work))
    }

    /// Ends: no new connections, commands under way are answered.
    pub fn close(&mut self) {
        let router = Arc::clone(&self.router);
        self.listening.close(|| router.close());
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.close();
    }
}

fn broken(error: &wire::WireError) -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::InvalidData, error.to_string())
}

async fn serve(
    mut stream: TcpStream,
    (peer, connection): (SocketAddr, i32),
    router: &Router,
    mut stop: Stop,
) -> std::io::Result<()> {
    let peer = peer.to_string();
    let (mut input, mut output) = (Vec::new(), Vec::new());
    let mut reply_id = 0_i32;
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
            let reply = router.run(request, connection, &peer).await;
            if !manner.silent {
                reply_id = reply_id.wrapping_add(1);
                wire::write(manner, reply_id, &reply, &[], false, &mut output);
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

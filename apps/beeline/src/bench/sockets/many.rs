//! Many connections between two processes: the one answers on all of them, the other asks on 32 at a
//! time, in turn.

use std::io::{ErrorKind, Write as _};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyhow::Context as _;
use tokio::net::{TcpListener, TcpStream};

use super::SocketsPeerArguments;

/// Round trips under way.
const AT_ONCE: usize = 32;
/// Round trips on each connection before the clock starts: enough for an end to show that it lives.
const WARM_UP: u64 = 12;

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    let _ = setrlimit(Resource::Nofile, limit);
    tokio::runtime::Builder::new_current_thread().enable_io().build().context("a runtime")
}

const MESSAGE: usize = 8;

async fn give(peer: &TcpStream) -> std::io::Result<()> {
    loop {
        match peer.try_write(&[7; MESSAGE]) {
            // So few bytes go whole.
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => peer.writable().await?,
            Err(error) => return Err(error),
        }
    }
}

/// One message; false at the end.
async fn take(peer: &TcpStream) -> std::io::Result<bool> {
    let (mut bytes, mut taken) = ([0; MESSAGE], 0);
    while taken < MESSAGE {
        match peer.try_read(&mut bytes[taken..]) {
            Ok(0) => return Ok(false),
            Ok(count) => taken += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => peer.readable().await?,
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Answers on each connection until it ends, and ends with the last.
pub fn serve(arguments: &SocketsPeerArguments) -> anyhow::Result<()> {
    runtime()?.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}", listener.local_addr()?)?;
        out.flush()?;
        let mut answering = Vec::with_capacity(arguments.connections);
        for _ in 0..arguments.connections {
            let (peer, _) = listener.accept().await?;
            peer.set_nodelay(true)?;
            answering.push(tokio::spawn(async move {
                while take(&peer).await.is_ok_and(|some| some) {
                    if give(&peer).await.is_err() {
                        return;
                    }
                }
            }));
        }
        for one in answering {
            one.await?;
        }
        Ok(())
    })
}

/// Round trips per second over all connections.
pub fn ask(arguments: &SocketsPeerArguments, address: &str) -> anyhow::Result<f64> {
    let local = tokio::task::LocalSet::new();
    local.block_on(&runtime()?, async {
        let mut all = Vec::with_capacity(arguments.connections);
        for _ in 0..arguments.connections {
            let peer = TcpStream::connect(address).await?;
            peer.set_nodelay(true)?;
            all.push(peer);
        }
        let mut shares: Vec<Vec<TcpStream>> = (0..AT_ONCE).map(|_| Vec::new()).collect();
        for (turn, peer) in all.into_iter().enumerate() {
            shares[turn % AT_ONCE].push(peer);
        }
        shares.retain(|share| !share.is_empty());
        let warm_up = WARM_UP * arguments.connections as u64;
        let shares = round(shares, warm_up).await?;
        let began = Instant::now();
        round(shares, arguments.rounds).await?;
        #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
        let figure = arguments.rounds as f64 / began.elapsed().as_secs_f64();
        Ok(figure)
    })
}

/// So many round trips, each share one at a time, from connection to connection.
async fn round(shares: Vec<Vec<TcpStream>>, rounds: u64) -> anyhow::Result<Vec<Vec<TcpStream>>> {
    let left = std::rc::Rc::new(AtomicU64::new(rounds));
    let mut asking = Vec::with_capacity(shares.len());
    for share in shares {
        let left = std::rc::Rc::clone(&left);
        asking.push(tokio::task::spawn_local(async move {
            let mut turn = 0;
            let takes = |left: u64| left.checked_sub(1);
            while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, takes).is_ok() {
                let count = share.len();
                let peer = &share[turn % count];
                give(peer).await?;
                take(peer).await?;
                turn += 1;
            }
            Ok::<_, std::io::Error>(share)
        }));
    }
    let mut shares = Vec::with_capacity(asking.len());
    for one in asking {
        shares.push(one.await??);
    }
    Ok(shares)
}

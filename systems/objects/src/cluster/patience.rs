//! How long a transfer may take in all, however its peer drips.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Bytes a second that the slowest link worth waiting for moves.
const SLOWEST: u64 = 4 << 20;

/// For an object that waits for memory here first.
pub(super) const ROOM: Duration = Duration::from_secs(10);

/// The most time a transfer of `bytes` may take where a silence of `patience` is borne.
pub(super) fn whole(patience: Duration, bytes: u64) -> Duration {
    patience.saturating_add(ROOM).saturating_add(Duration::from_secs(bytes / SLOWEST))
}

/// A socket whose every call ends by a deadline; between two bytes no more than the patience passes.
#[derive(Debug)]
pub(super) struct Bounded {
    stream: TcpStream,
    patience: Duration,
    begun: Instant,
    most: Duration,
}

impl Bounded {
    /// `first` is how long the peer may take to say what it wants.
    ///
    /// Errors: the kernel's.
    pub(super) fn new(stream: TcpStream, patience: Duration, first: Duration) -> io::Result<Self> {
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, patience, begun: Instant::now(), most: first })
    }

    /// From now on: a transfer of so many bytes.
    pub(super) fn expect(&mut self, bytes: u64) {
        self.begun = Instant::now();
        self.most = whole(self.patience, bytes);
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.most.saturating_sub(self.begun.elapsed()).min(self.patience);
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
    }
}

impl Read for Bounded {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(Some(self.left()?))?;
        self.stream.read(bytes)
    }
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicBool, Ordering};

    #[test]
    fn a_peer_that_drips_is_given_up_though_it_is_never_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (mut stream, _) = listener.accept().unwrap();
                while !over.load(Ordering::Relaxed) && stream.write_all(&[1]).is_ok() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            });
            let stream = TcpStream::connect(address).unwrap();
            let first = Duration::from_millis(200);
            let mut bounded = Bounded::new(stream, Duration::from_secs(60), first).unwrap();
            // More than drips in any time a test may take.
            let error = bounded.read_exact(&mut vec![0; 1 << 30]).unwrap_err();
            over.store(true, Ordering::Relaxed);
            let kind = error.kind();
            let expected = [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock];
            assert!(expected.contains(&kind), "{error}");
        });
    }

    #[test]
    fn large_objects_have_more_time() {
        let patience = Duration::from_secs(10);
        assert_eq!(whole(patience, 0), Duration::from_secs(20));
        assert_eq!(whole(patience, 1 << 30), Duration::from_secs(276));
    }
}

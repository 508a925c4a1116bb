//! One program at the end of a relayed connection, step by step.

use std::io::Read;
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use beeline_os::barrier;
use beeline_sockets::segment::{CLOSED_CLEANLY, STATE_GIVEN_UP, STATE_OPEN, STATE_PAIRED, Segment};
use beeline_sockets::wake;

/// A program.
#[derive(Debug)]
pub struct Program {
    /// Its side of the segment.
    pub segment: Segment,
    /// Its kernel connection; none once closed.
    pub stream: Option<TcpStream>,
    /// The connection's name at the relay.
    pub cookie: u64,
    bell: bool,
    /// Bells it rang: each would be three system calls.
    pub bells: u64,
}

/// What it found when it received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Received {
    /// So many bytes.
    Bytes(usize),
    /// Nothing yet.
    Nothing,
    /// The end: no more bytes will come.
    End,
    /// The connection was reset.
    Reset,
}

impl Program {
    /// A program with this end and this kernel connection, whose relay calls it `cookie`.
    #[must_use]
    pub fn new(segment: Segment, stream: TcpStream, cookie: u64) -> Self {
        stream.set_nonblocking(true).unwrap();
        let asymmetric = u32::from(barrier::is_asymmetric());
        segment.own().signs.asymmetric.store(asymmetric, Ordering::Relaxed);
        Self { segment, stream: Some(stream), cookie, bell: false, bells: 0 }
    }

    /// Both relays have the connection.
    #[must_use]
    pub fn is_paired(&self) -> bool {
        self.segment.state().load(Ordering::Acquire) == STATE_PAIRED
    }

    /// It was left to the kernel.
    #[must_use]
    pub fn is_given_up(&self) -> bool {
        self.segment.state().load(Ordering::Acquire) == STATE_GIVEN_UP
    }

    /// Leaves it to the kernel, if nobody has promised anything.
    pub fn give_up(&self) -> bool {
        let state = self.segment.state();
        state
            .compare_exchange(STATE_OPEN, STATE_GIVEN_UP, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// The bell, if it was rung since the last call.
    pub fn take_bell(&mut self) -> bool {
        std::mem::take(&mut self.bell)
    }

    fn ring_bell(&mut self) {
        self.bell = true;
        self.bells += 1;
    }

    fn switch(&self) {
        let signs = &self.segment.own().signs;
        if signs.switched_at.load(Ordering::Relaxed) == 0 {
            assert!(self.is_paired(), "only a paired connection leaves the kernel's stream");
            signs.switched_at.store(1, Ordering::Release);
        }
    }

    fn wake(&mut self, which: fn(&Segment) -> &AtomicU64) {
        let armed = which(&self.segment);
        let theirs = self.segment.other().signs.asymmetric.load(Ordering::Relaxed) != 0;
        let fence = || barrier::light(theirs && barrier::is_asymmetric());
        if wake::sleeps(armed, fence) != 0 && wake::take_down(armed) {
            self.switch();
            self.ring_bell();
        }
    }

    /// Sends as much of `bytes` as there is room for.
    pub fn send(&mut self, bytes: &[u8]) -> usize {
        self.switch();
        // SAFETY: a slice is readable; this thread alone works on the end.
        let sent = unsafe { self.segment.producer().push(bytes.as_ptr(), bytes.len()) };
        let sent = sent.expect("the relay never writes nonsense");
        if sent > 0 {
            self.wake(|segment| &segment.other().signs.receive_armed);
        }
        sent
    }

    /// Room for a fair amount.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.segment.producer().has_room().expect("the relay never writes nonsense")
    }

    /// Receives into `bytes`.
    pub fn receive(&mut self, bytes: &mut [u8]) -> Received {
        let other = self.segment.other();
        if other.signs.closed.load(Ordering::Acquire) == 2 {
            return Received::Reset;
        }
        let finished = other.signs.finished.load(Ordering::Acquire) != 0
            || other.signs.closed.load(Ordering::Acquire) == CLOSED_CLEANLY;
        // SAFETY: a slice is writable; this thread alone works on the end.
        let taken =
            unsafe { self.segment.consumer().pop(bytes.as_mut_ptr(), bytes.len(), 0, false) };
        // As the library answers nonsense.
        let Ok(taken) = taken else { return Received::Reset };
        if taken == 0 {
            return if finished { Received::End } else { Received::Nothing };
        }
        let waits = self.segment.other().signs.send_armed.load(Ordering::Relaxed) != 0;
        if self.segment.consumer().give_back(waits) {
            self.wake(|segment| &segment.other().signs.send_armed);
        }
        Received::Bytes(taken)
    }

    /// Goes to sleep until there are bytes (`receive`) or room: false when there are some already.
    pub fn falls_asleep(&self, receive: bool) -> bool {
        let signs = &self.segment.own().signs;
        let armed = if receive { &signs.receive_armed } else { &signs.send_armed };
        wake::arm(armed, barrier::heavy);
        let other = self.segment.other();
        let over = other.signs.closed.load(Ordering::Acquire) != 0;
        if receive {
            let finished = other.signs.finished.load(Ordering::Acquire) != 0;
            !over && !finished && !self.segment.consumer().is_ready()
        } else {
            !over && !self.has_room()
        }
    }

    /// Takes the doorbells: how many there were. An end of the stream or a reset counts as one.
    pub fn hear_doorbells(&mut self) -> usize {
        let Some(stream) = &mut self.stream else { return 0 };
        let mut bells = [0; 256];
        match stream.read(&mut bells) {
            Ok(0) => 1,
            Ok(count) => count,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => 0,
            Err(_) => 1,
        }
    }

    /// Says that nothing more comes.
    pub fn finish(&mut self) {
        self.switch();
        self.segment.own().signs.finished.store(1, Ordering::Release);
        self.wake(|segment| &segment.other().signs.receive_armed);
    }

    /// Closes, as the library does: the sign, the bell, the kernel's descriptor.
    pub fn close(&mut self, sign: u32) {
        self.segment.own().signs.closed.store(sign, Ordering::Release);
        fence(Ordering::SeqCst);
        self.ring_bell();
        self.stream = None;
    }

    /// The process ends without a word.
    pub fn die(&mut self) {
        self.stream = None;
    }

    /// How the kernel's connection ended, if it did.
    pub fn kernel_end(&mut self) -> Option<std::io::Result<()>> {
        let stream = self.stream.as_mut()?;
        let mut bells = [0; 256];
        loop {
            match stream.read(&mut bells) {
                Ok(0) => return Some(Ok(())),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return None,
                Err(error) => return Some(Err(error)),
            }
        }
    }
}

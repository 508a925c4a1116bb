//! A connection to another host as its program has it; the test plays the relay.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

mod common;

use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd as _, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};

use beeline_sockets::connection::{self, Connection};
use beeline_sockets::kernel::Errno;
use beeline_sockets::relayed::{Belfry, Heard};
use beeline_sockets::segment::{
    CLOSED_CLEANLY, CLOSED_UNREAD, STATE_GIVEN_UP, STATE_MATCHING, STATE_OPEN, STATE_PAIRED,
    Segment,
};
use beeline_sockets::{between, receive, send, table};
use common::mapped_twice;

const NOW: i32 = libc::MSG_DONTWAIT;
const NAME: u64 = 77;

/// The one name of this process, and at most one relay that hears.
struct Relay {
    bells: Option<Belfry>,
    _alone: MutexGuard<'static, ()>,
}

impl Relay {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let name = format!("beeline-test-between-{}", std::process::id());
        // Under the lock, and before anybody asks for it.
        unsafe { std::env::set_var("BEELINE_SOCKETS_MONITOR", name) };
        common::begin();
        Self { bells: Some(Belfry::bind().unwrap()), _alone: alone }
    }

    /// How often the program rang since the last time.
    fn rang(&self) -> usize {
        let mut heard = Heard::default();
        self.bells.as_ref().unwrap().hear(&mut heard);
        assert!(heard.cookies.iter().all(|&cookie| cookie == NAME), "{heard:?}");
        heard.cookies.len() + usize::from(heard.all)
    }
}

/// The program's end, the other program's kernel socket, and the relay's side of the segment.
struct Whole {
    fd: RawFd,
    connection: &'static Connection,
    /// Kept open; closed by number where a test closes.
    stream: Option<TcpStream>,
    far: TcpStream,
    relay: Segment,
}

fn whole() -> Whole {
    let [one, other] = mapped_twice(64 << 10);
    Segment::format_relayed(&one, NAME, std::process::id()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    let fd = stream.as_raw_fd();
    let connection = Box::new(Connection::new(Segment::take(one, 0).unwrap(), fd));
    assert!(connection.join());
    let connection = table::set_ours(fd, connection);
    let relay = Segment::take(other, 1).unwrap();
    Whole { fd, connection, stream: Some(stream), far, relay }
}

fn paired() -> Whole {
    let whole = whole();
    whole.relay.state().store(STATE_PAIRED, Ordering::SeqCst);
    whole
}

impl Whole {
    fn send(&self, bytes: &[u8]) -> Result<usize, Errno> {
        let base = bytes.as_ptr().cast_mut().cast();
        let pieces = [libc::iovec { iov_base: base, iov_len: bytes.len() }];
        let flags = NOW | libc::MSG_NOSIGNAL;
        unsafe { send::send(self.fd, self.connection, &pieces, flags) }
    }

    fn receive(&self) -> Result<Vec<u8>, Errno> {
        let mut bytes = vec![0; 100];
        let pieces = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 100 }];
        let count = unsafe { receive::receive(self.fd, self.connection, &pieces, NOW) }?;
        bytes.truncate(count);
        Ok(bytes)
    }

    /// As a call that waits a while.
    fn receive_patiently(&self) -> Result<Vec<u8>, Errno> {
        for _ in 0..1000 {
            match self.receive() {
                Err(Errno(libc::EAGAIN)) => std::thread::sleep(std::time::Duration::from_millis(1)),
                outcome => return outcome,
            }
        }
        Err(Errno(libc::EAGAIN))
    }

    /// The other end has switched, and sends `bytes`.
    fn far_sends(&self, bytes: &[u8]) {
        let signs = &self.relay.own().signs;
        signs.switched_at.store(1, Ordering::Release);
        let pushed = unsafe { self.relay.producer().push(bytes.as_ptr(), bytes.len()) };
        assert_eq!(pushed, Ok(bytes.len()));
    }

    fn close(&mut self) {
        connection::closing(self.fd);
        self.stream = None;
    }
}

impl Drop for Whole {
    fn drop(&mut self) {
        if self.stream.is_some() {
            self.close();
        }
    }
}

#[test]
fn a_relay_is_rung_only_when_it_sleeps_and_the_kernel_carries_nothing() {
    let relay = Relay::new();
    let whole = paired();
    assert_eq!(whole.send(b"hot"), Ok(3));
    assert_eq!(relay.rang(), 0);
    whole.relay.own().signs.receive_armed.store(1, Ordering::SeqCst);
    assert_eq!(whole.send(b"cold"), Ok(4));
    assert_eq!(whole.send(b"hot again"), Ok(9));
    assert_eq!(relay.rang(), 1);
    assert_eq!(whole.relay.own().signs.receive_armed.load(Ordering::SeqCst), 0);
    let mut bytes = [0; 100];
    let read = unsafe { whole.relay.consumer().pop(bytes.as_mut_ptr(), 100, 0, false) };
    assert_eq!((read, &bytes[..16]), (Ok(16), &b"hotcoldhot again"[..]));
    whole.far.set_nonblocking(true).unwrap();
    assert!(std::io::Read::read(&mut &whole.far, &mut bytes).is_err(), "a byte in the kernel");
}

#[test]
fn who_gives_room_back_has_switched_so_that_doorbells_are_possible() {
    let relay = Relay::new();
    let whole = paired();
    whole.relay.own().signs.send_armed.store(1, Ordering::SeqCst);
    whole.far_sends(&[7; 80]);
    assert_eq!(whole.relay.other().signs.switched_at.load(Ordering::SeqCst), 0);
    assert_eq!(whole.receive(), Ok(vec![7; 80]));
    assert_eq!(whole.relay.other().signs.switched_at.load(Ordering::SeqCst), 1);
    assert_eq!(relay.rang(), 1);
    // A relay that looks by itself rings for others all the same.
    let whole = paired();
    for _ in 0..5 {
        whole.far_sends(&[7; 8000]);
        let mut left = 8000;
        while left > 0 {
            left -= whole.receive().unwrap().len();
        }
    }
    assert_eq!(whole.relay.other().signs.switched_at.load(Ordering::SeqCst), 1);
    assert_eq!(relay.rang(), 0);
}

#[test]
fn the_kernels_end_means_what_the_other_ends_words_say() {
    let _relay = Relay::new();
    type Case = (&'static str, fn(&Segment), Result<Vec<u8>, Errno>);
    let cases: [Case; 4] = [
        ("nothing", |_| {}, Err(Errno(libc::ECONNRESET))),
        ("finished", |far| far.own().signs.finished.store(1, Ordering::SeqCst), Ok(vec![])),
        ("read", |far| far.own().signs.closed.store(CLOSED_CLEANLY, Ordering::SeqCst), Ok(vec![])),
        (
            "unread",
            |far| far.own().signs.closed.store(CLOSED_UNREAD, Ordering::SeqCst),
            Err(Errno(libc::ECONNRESET)),
        ),
    ];
    for (name, say, expected) in cases {
        let whole = paired();
        assert_eq!(whole.send(b"x"), Ok(1));
        whole.far_sends(b"last");
        say(&whole.relay);
        whole.far.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(whole.receive(), Ok(b"last".to_vec()), "{name}: bytes come before the end");
        assert_eq!(whole.receive_patiently(), expected, "{name}");
        // The reset is told once.
        assert_eq!(whole.receive(), Ok(vec![]), "{name}");
    }
}

#[test]
fn an_end_before_the_switch_is_the_end_of_the_kernels_bytes_and_no_more() {
    let _relay = Relay::new();
    let mut whole = whole();
    std::io::Write::write_all(&mut whole.far, b"early").unwrap();
    whole.far.shutdown(std::net::Shutdown::Write).unwrap();
    whole.relay.state().store(STATE_PAIRED, Ordering::SeqCst);
    // The other end is mute by now, which its relay has not told yet.
    assert_eq!(whole.receive(), Ok(b"early".to_vec()));
    assert_eq!(whole.receive(), Ok(vec![]));
    assert_eq!(whole.send(b"still here"), Ok(10));
    let mut bytes = [0; 100];
    let read = unsafe { whole.relay.consumer().pop(bytes.as_mut_ptr(), 100, 0, false) };
    assert_eq!(read, Ok(10), "it went to the kernel");
}

#[test]
fn without_a_relay_the_connection_is_reset() {
    let mut relay = Relay::new();
    let whole = paired();
    assert_eq!(whole.send(b"fine"), Ok(4));
    whole.far_sends(b"unread");
    relay.bells = None;
    whole.relay.own().signs.receive_armed.store(1, Ordering::SeqCst);
    // This one found it out.
    assert_eq!(whole.send(b"into the void"), Ok(13));
    assert_eq!(whole.send(b"more"), Err(Errno(libc::ECONNRESET)));
    assert_eq!(whole.send(b"more"), Err(Errno(libc::EPIPE)));
}

#[test]
fn a_shutdown_before_the_relays_met_leaves_the_connection_to_the_kernel() {
    let relay = Relay::new();
    let whole = whole();
    assert_eq!(connection::shutdown(whole.fd, whole.connection, libc::SHUT_WR), Ok(0));
    assert_eq!(whole.relay.state().load(Ordering::SeqCst), STATE_GIVEN_UP);
    assert!(table::ours(whole.fd).is_none());
    assert_eq!(relay.rang(), 1, "the relay lets go of the socket");
    assert_eq!(std::io::Read::read(&mut &whole.far, &mut [0; 8]).unwrap(), 0);
    // While they meet, the end says so, and stays.
    let whole = self::whole();
    whole.relay.state().store(STATE_MATCHING, Ordering::SeqCst);
    assert_eq!(connection::shutdown(whole.fd, whole.connection, libc::SHUT_WR), Ok(0));
    assert_eq!(whole.relay.state().load(Ordering::SeqCst), STATE_MATCHING);
    assert_eq!(whole.relay.other().signs.mute.load(Ordering::SeqCst), 1);
    assert!(table::ours(whole.fd).is_some());
}

#[test]
fn a_close_is_told_to_the_relay_whatever_became_of_the_connection() {
    let relay = Relay::new();
    for (state, closed) in
        [(STATE_OPEN, 0), (STATE_PAIRED, CLOSED_CLEANLY), (STATE_MATCHING, CLOSED_CLEANLY)]
    {
        let mut whole = whole();
        whole.relay.state().store(state, Ordering::SeqCst);
        whole.close();
        assert_eq!(whole.relay.other().signs.closed.load(Ordering::SeqCst), closed);
        let holders = whole.relay.holders();
        assert!(holders.processes().iter().all(|place| place.load(Ordering::SeqCst) == 0));
        assert_eq!(relay.rang(), 1, "state {state}");
        if state == STATE_OPEN {
            assert_eq!(whole.relay.state().load(Ordering::SeqCst), STATE_GIVEN_UP);
        }
    }
    let mut whole = paired();
    whole.far_sends(b"unread");
    whole.close();
    assert_eq!(whole.relay.other().signs.closed.load(Ordering::SeqCst), CLOSED_UNREAD);
}

#[test]
fn of_processes_that_share_an_end_the_last_one_closes_it() {
    let relay = Relay::new();
    let mut parent = paired();
    let holders = parent.relay.holders();
    table::before_fork();
    table::after_fork_in_parent();
    assert_eq!(holders.births(), 1);
    // The child: it arrives, and then the parent closes.
    holders.add(1_000_000);
    holders.expected_one();
    parent.close();
    assert_eq!(parent.relay.other().signs.closed.load(Ordering::SeqCst), 0);
    assert_eq!(relay.rang(), 0);
    // The other way round: the child has not run yet when the parent closes.
    let mut parent = paired();
    table::before_fork();
    table::after_fork_in_parent();
    parent.close();
    assert_eq!(parent.relay.other().signs.closed.load(Ordering::SeqCst), 0);
    assert_eq!(relay.rang(), 0);
    // A child that is gone already.
    let mut parent = paired();
    table::before_fork();
    table::after_fork_in_parent();
    between::expected_holder();
    parent.close();
    assert_eq!(parent.relay.other().signs.closed.load(Ordering::SeqCst), CLOSED_CLEANLY);
    assert_eq!(relay.rang(), 1);
    // Another program in this process has it no more; undone where there is none.
    let whole = paired();
    between::leaving_by_exec(whole.connection);
    assert_eq!(relay.rang(), 1);
    between::stayed();
    assert_eq!(relay.rang(), 1);
    assert!(!whole.relay.holders().add(std::process::id()), "it holds it again");
}

#[test]
fn an_end_waits_longer_for_another_host_than_sixty_four_calls() {
    let _relay = Relay::new();
    let mut whole = whole();
    for _ in 0..200 {
        assert_eq!(whole.send(b"x"), Ok(1));
    }
    assert_eq!(whole.relay.state().load(Ordering::SeqCst), STATE_OPEN);
    let mut bytes = [0; 200];
    std::io::Read::read_exact(&mut whole.far, &mut bytes).unwrap();
    whole.relay.state().store(STATE_PAIRED, Ordering::SeqCst);
    assert_eq!(whole.send(b"ring"), Ok(4));
    assert_eq!(whole.relay.other().signs.switched_at.load(Ordering::SeqCst), 201);
}

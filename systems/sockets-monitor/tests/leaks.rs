//! Connection after connection through a monitor: afterwards there are no more descriptors and
//! mappings than before, in the ends' process and in the monitor's (here they are one).
//!
//! `BEELINE_CONNECTIONS=n` (else 4,000; 1,000,000 with `BEELINE_DEEP=1`).

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks, clippy::expect_used)]

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use beeline_sockets::kernel::Errno;
use beeline_sockets::{connection, receive, send, table, young};
use beeline_sockets_monitor::{Monitor, Settings};

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("beeline-socket")).count()
}

fn resident_kib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// One message each way; true when both went through the rings.
fn converse(listener: &TcpListener) -> bool {
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let other = listener.accept().unwrap().0;
    let fds = [one.as_raw_fd(), other.as_raw_fd()];
    connection::connected(fds[0]);
    connection::accepted(fds[1]);
    let ours = fds.iter().all(|&fd| table::ours(fd).is_some());
    if ours {
        for (from, to) in [(0, 1), (1, 0)] {
            let mut bytes = *b"whatever";
            let piece = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: 8 }];
            let end = |side: usize| connection::find(fds[side]).unwrap();
            assert_eq!(unsafe { send::send(fds[from], end(from), &piece, 0) }, Ok(8));
            let received = unsafe { receive::receive(fds[to], end(to), &piece, 0) };
            assert!(received == Ok(8) || received == Err(Errno(libc::EINTR)), "{received:?}");
        }
    }
    for (fd, stream) in fds.into_iter().zip([one, other]) {
        connection::closing(fd);
        drop(stream);
    }
    ours
}

#[test]
fn a_long_row_of_connections_leaves_nothing_behind() {
    let deep = std::env::var_os("BEELINE_DEEP").is_some();
    let given = std::env::var("BEELINE_CONNECTIONS").ok().and_then(|text| text.parse().ok());
    let count: u32 = given.unwrap_or(if deep { 1_000_000 } else { 4_000 });
    let name = format!("beeline-test-leaks-{}", std::process::id());
    // The only test of this file: nobody reads the environment meanwhile.
    unsafe { std::env::set_var("BEELINE_SOCKETS_MONITOR", name) };
    // The monitor here waits for a processor beside other tests: it is not given up for that.
    unsafe { std::env::set_var("BEELINE_SOCKETS_PATIENCE_MS", "20000") };
    unsafe { std::env::set_var("BEELINE_SOCKETS_ASK_AFTER", "0") };
    young::begin();
    table::begin();
    let mut monitor = Monitor::begin(Settings::default()).unwrap();
    std::thread::spawn(move || monitor.run(None));
    // From port to port the pairs of addresses differ, so that none is used up.
    let listeners: Vec<_> = (1..=50)
        .map(|host| TcpListener::bind((std::net::Ipv4Addr::new(127, 0, 1, host), 0)).unwrap())
        .collect();
    let listener = |turn: u32| &listeners[turn as usize % listeners.len()];
    (0..200).for_each(|turn| assert!(converse(listener(turn)), "the monitor introduces no ends"));
    let settled = |most: usize| {
        let begun = Instant::now();
        loop {
            // A close takes back those before it.
            converse(&listeners[0]);
            let now = descriptors() + mappings();
            if now <= most || begun.elapsed() > Duration::from_secs(20) {
                return now;
            }
            // Slowly: the monitor looks for what is over every five seconds only.
            std::thread::sleep(Duration::from_millis(200));
        }
    };
    // What is kept for a while at any time.
    const SOME: usize = 80;
    let before = settled(listeners.len() + SOME);
    let (begun, memory) = (Instant::now(), resident_kib());
    let accelerated = (0..count).filter(|&turn| converse(listener(turn))).count();
    let took = begun.elapsed();
    let after = settled(before);
    let grown = resident_kib().saturating_sub(memory);
    let line = format!(
        "ran: {count} connections, {accelerated} accelerated, in {took:?}; descriptors and \
         mappings {before} before, {after} after; {grown} KiB more in memory\n"
    );
    std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
    assert!(accelerated * 100 >= count as usize * 99, "{line}");
    assert!(after <= before + SOME, "{line}");
    assert!(grown < 200 << 10, "{line}");
}

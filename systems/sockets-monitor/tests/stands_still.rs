//! A monitor that stands still: connections are asked about in vain, once.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd as _;
use std::time::{Duration, Instant};

use beeline_os::control_socket::ControlListener;
use beeline_sockets::{connection, table, young};
use beeline_sockets_monitor::{Monitor, Settings};

const MANY: usize = 500;

#[test]
fn of_many_connections_few_wait_for_a_monitor_that_stands_still() {
    let name = format!("beeline-test-still-{}", std::process::id());
    // The only test of this file: no other thread reads the environment meanwhile.
    unsafe { std::env::set_var("BEELINE_SOCKETS_MONITOR", &name) };
    table::begin();
    // As one that was stopped: the kernel takes questions for it.
    let still = ControlListener::bind(name.as_bytes()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let pair = || {
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    };
    let kept: Vec<_> = (0..MANY / 2)
        .map(|_| {
            let (one, other) = pair();
            connection::connected(one.as_raw_fd());
            connection::accepted(other.as_raw_fd());
            assert!(table::ours(one.as_raw_fd()).is_none());
            (one, other)
        })
        .collect();
    // And as many that are young when the program makes a child.
    unsafe { std::env::set_var("BEELINE_SOCKETS_ASK_AFTER", "10") };
    young::begin();
    let young: Vec<_> = (0..MANY / 2)
        .map(|_| {
            let (one, other) = pair();
            young::connected(one.as_raw_fd());
            young::accepted(other.as_raw_fd());
            (one, other)
        })
        .collect();
    young::settle_all(|_| true);
    for (one, other) in &young {
        for stream in [one, other] {
            assert!(matches!(table::kind(stream.as_raw_fd()), table::Kind::Plain));
        }
    }
    // One second on, one more; it may have taken some.
    let asked = still.waiting(2 * MANY).count();
    assert!((1..=40).contains(&asked), "{asked} questions of {MANY} connections with two ends");
    drop((kept, young, still));
    // It goes on, or another one has come: that is noticed.
    unsafe { std::env::set_var("BEELINE_SOCKETS_ASK_AFTER", "0") };
    young::begin();
    let mut monitor = Monitor::begin(Settings::default()).unwrap();
    std::thread::spawn(move || monitor.run(None));
    let begun = Instant::now();
    loop {
        let (one, other) = pair();
        connection::connected(one.as_raw_fd());
        connection::accepted(other.as_raw_fd());
        let ours = table::ours(one.as_raw_fd()).is_some();
        connection::closing(one.as_raw_fd());
        connection::closing(other.as_raw_fd());
        if ours {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "no connection is introduced again");
        std::thread::sleep(Duration::from_millis(10));
    }
}

//! The link between two devices and its callers. Skipped, with the reason, where there is no RDMA
//! device.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends where its set-up breaks")]

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use beeline_fabric::{ConnectInfo, QueuePairOptions, QueuePairState, Role, WorkRequest};
use beeline_fabric_verbs::{VerbsConfig, VerbsDevice};
use common::{BOUND, End, device, join, linked, write};

/// The link address in connection data (see the provider's `endpoint`).
fn link_address(info: &ConnectInfo) -> SocketAddr {
    let bytes = &info.0;
    assert_eq!(bytes[11], 4, "the lab's addresses are of IPv4");
    let port = u16::from_le_bytes([bytes[14], bytes[15]]);
    SocketAddr::from(([bytes[44], bytes[45], bytes[46], bytes[47]], port))
}

/// Whether the other side ends a stream within `bound`.
fn is_hung_up_on(mut stream: &TcpStream, bound: Duration) -> bool {
    stream.set_read_timeout(Some(bound)).unwrap();
    match stream.read(&mut [0; 64]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

#[test]
fn a_caller_that_names_no_queue_pair_is_hung_up_on_and_links_in_use_stay() {
    let Some((mut a, b, _turn)) = linked(QueuePairOptions::default()) else { return };
    let target = b.region(64);
    let begun = Instant::now();
    let address = link_address(&b.pair.connect_info());
    let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
    // One that says part of a frame is no better.
    (&silent[0]).write_all(b"BLVL\x01\x01").unwrap();
    for stream in &silent {
        assert!(is_hung_up_on(stream, BOUND), "a silent caller was kept");
    }
    assert!(begun.elapsed() >= Duration::from_secs(5), "a slow caller has some time");
    a.pair.post_send(&[WorkRequest::new(1, write(&target, b"still here"))]).unwrap();
    assert!(a.one().is_success());
}

/// A device that takes few links, with one end; and a device that calls it, with another.
fn full_house(max_links: usize) -> Option<(End, End, std::sync::MutexGuard<'static, ()>)> {
    let (near, turn) = device()?;
    let far = VerbsDevice::open(VerbsConfig { max_links, ..VerbsConfig::default() }).unwrap();
    let options = QueuePairOptions::default();
    let (mut a, mut b) = (End::new(&near, options), End::new(&far, options));
    join(a.pair.as_mut(), b.pair.as_mut());
    Some((a, b, turn))
}

/// One more end of `far`'s device, with its peer on a device of its own.
fn another(far: &End) -> (End, End) {
    let own = VerbsDevice::open(VerbsConfig::default()).unwrap();
    let options = QueuePairOptions::default();
    (End::new(&own, options), End::new(&far.device, options))
}

#[test]
fn where_links_are_full_the_caller_that_has_been_silent_longest_makes_room() {
    let Some((mut a, b, _turn)) = full_house(4) else { return };
    let target = b.region(64);
    let address = link_address(&b.pair.connect_info());
    let begun = Instant::now();
    // One of the four links is the first pair's.
    let silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (number, stream) in silent[..17].iter().enumerate() {
        assert!(is_hung_up_on(stream, BOUND), "caller {number} was kept");
    }
    // All of them before callers run out of time: it is the limit that ended them.
    let early = begun.elapsed() < Duration::from_secs(8);
    let kept = |stream: &TcpStream| !is_hung_up_on(stream, Duration::from_millis(20));
    assert!(!early || silent[17..].iter().all(kept), "the newest callers were not kept");
    // An honest caller gets in, at the cost of the oldest silent one.
    let (mut c, mut d) = another(&b);
    join(c.pair.as_mut(), d.pair.as_mut());
    assert!(is_hung_up_on(&silent[17], BOUND));
    let place = d.region(64);
    c.pair.post_send(&[WorkRequest::new(2, write(&place, b"let in"))]).unwrap();
    assert!(c.one().is_success());
    a.pair.post_send(&[WorkRequest::new(1, write(&target, b"still here"))]).unwrap();
    assert!(a.one().is_success(), "a link in use was ended to make room");
}

#[test]
fn where_all_links_are_in_use_a_caller_is_turned_away_and_they_stay() {
    let Some((mut a, b, _turn)) = full_house(2) else { return };
    let (mut c, mut d) = another(&b);
    join(c.pair.as_mut(), d.pair.as_mut());
    let (mut e, mut f) = another(&b);
    f.pair.connect(&e.pair.connect_info(), Role::Passive).unwrap();
    e.pair.connect(&f.pair.connect_info(), Role::Active).unwrap();
    assert!(e.pair.wait_connected(BOUND).is_err());
    assert_eq!(e.pair.state(), QueuePairState::Error);
    for (end, place) in [(&mut a, b.region(64)), (&mut c, d.region(64))] {
        end.pair.post_send(&[WorkRequest::new(1, write(&place, b"still here"))]).unwrap();
        assert!(end.one().is_success());
    }
    // Room again once one of them has left.
    drop((c, d));
    let begun = Instant::now();
    loop {
        let (mut g, mut h) = another(&b);
        h.pair.connect(&g.pair.connect_info(), Role::Passive).unwrap();
        g.pair.connect(&h.pair.connect_info(), Role::Active).unwrap();
        if g.pair.wait_connected(BOUND).is_ok() {
            break;
        }
        assert!(begun.elapsed() < BOUND, "a link that ended still counts");
    }
}

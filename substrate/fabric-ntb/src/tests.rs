//! Two links in one process, whose windows the tests can reach: missing fences, silence, reboots,
//! and peers that scribble.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use beeline_fabric_engine::stream::{Moved, Stream};
use beeline_ntb::bells::Silent;
use beeline_ntb::shim::{Combining, Disorder, Pace};
use beeline_ntb::window::{Mapped, Wire};
use beeline_ntb::{Inbound, Outbound, Side};
use beeline_os::Mapping;

use crate::channel::{Channel, ChannelStream};
use crate::layout::{Geometry, HEAD, PAD_BYTES, SCRATCHPADS, STATE, TAIL};
use crate::link::Link;
use crate::window::Window;

/// Which fences of a window are forgotten, counted from 0 once the stream is connected; `None`
/// before. The rest work.
type Forgets = fn(Option<u64>) -> bool;

/// A wire whose user forgets fences.
#[derive(Debug)]
struct Forgetful {
    wire: Arc<dyn Wire>,
    connected: AtomicBool,
    fences: AtomicU64,
    forgets: Forgets,
    /// Posted writes are lost, as they are while there is no link or no memory behind it.
    lost: AtomicBool,
}

impl Forgetful {
    fn new(wire: Arc<dyn Wire>, forgets: Forgets) -> Arc<Self> {
        let (connected, fences) = (AtomicBool::new(false), AtomicU64::new(0));
        Arc::new(Self { wire, connected, fences, forgets, lost: AtomicBool::new(false) })
    }

    fn loses(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }
}

impl Wire for Forgetful {
    fn length_bytes(&self) -> usize {
        self.wire.length_bytes()
    }
    unsafe fn post(&self, offset: usize, source: *const u8, length: usize) {
        if !self.loses() {
            // SAFETY: the caller's promise, passed on.
            unsafe { self.wire.post(offset, source, length) };
        }
    }
    fn post_word(&self, offset: usize, value: u64) {
        if !self.loses() {
            self.wire.post_word(offset, value);
        }
    }
    fn fence(&self) {
        let connected = self.connected.load(Ordering::Relaxed);
        let number = connected.then(|| self.fences.fetch_add(1, Ordering::Relaxed));
        if !(self.forgets)(number) {
            self.wire.fence();
        }
    }
}

fn geometry() -> Geometry {
    Geometry::fitting(4096, 4, usize::MAX).unwrap()
}

/// Both directions of fresh memory: what each end reads, and its wire to the other.
fn ends() -> [(Inbound, Arc<dyn Wire>); 2] {
    let bytes = geometry().window_bytes();
    let memory = Arc::new(Mapping::memfd("test", 2 * bytes).unwrap());
    [Side::First, Side::Second].map(|side| {
        let inbound = Inbound::new(Arc::clone(&memory), side.index() * bytes, bytes);
        let wire = Mapped::new(Arc::clone(&memory), side.other().index() * bytes, bytes);
        (inbound, Arc::new(wire) as Arc<dyn Wire>)
    })
}

fn window(inbound: Inbound, wire: Arc<dyn Wire>) -> Arc<Window> {
    let (outbound, bells) = (Outbound::new(wire), Arc::new(Silent));
    Arc::new(Window::from(beeline_ntb::Window { inbound, outbound, bells }))
}

/// The two windows of fresh memory.
fn windows() -> [Arc<Window>; 2] {
    ends().map(|(inbound, wire)| window(inbound, wire))
}

fn link(window: &Arc<Window>, side: Side) -> Arc<Link> {
    let node = [side.index() as u8; 16];
    Arc::new(Link::begin(Arc::clone(window), geometry(), side, node, None).unwrap())
}

/// Both ends of a link, up.
fn up(windows: &[Arc<Window>; 2]) -> [Arc<Link>; 2] {
    let links = [link(&windows[0], Side::First), link(&windows[1], Side::Second)];
    for _ in 0..3 {
        for link in &links {
            assert_eq!(link.look(), None);
        }
    }
    assert!(links.iter().all(|link| link.is_up()));
    links
}

/// A stream between the two, opened by the first.
fn streams([near, far]: &[Arc<Link>; 2]) -> [ChannelStream; 2] {
    assert!(near.reserve());
    let channel = Channel::dialled(near, [1; 16]).unwrap();
    near.wait_for_partition(&channel);
    let mut dialled = ChannelStream::new(channel);
    assert!(dialled.connected().is_none());
    let mut accepted = Vec::new();
    far.sweep(&mut accepted);
    let accepted = ChannelStream::new(accepted.pop().unwrap());
    assert!(dialled.connected().unwrap().is_ok());
    [dialled, accepted]
}

/// What `stream` has to read now.
fn read(stream: &mut ChannelStream) -> Vec<u8> {
    let mut bytes = vec![0; 8192];
    match stream.receive_bytes(&mut bytes) {
        Moved::Bytes(count) => bytes[..count].to_vec(),
        Moved::Later | Moved::Closed => Vec::new(),
    }
}

/// Sends numbered bytes through posted writes with `forgets` between the ring's code and the
/// window, and reads after every single write that arrives. `Err` with what went wrong.
fn through_posted_writes(seed: u64, forgets: Forgets) -> Result<(), &'static str> {
    let [near, far] = ends();
    let disorder = Disorder { seed, buffers: 8, pace: Pace::OnRequest };
    let posted = Arc::new(Combining::paced(near.1, disorder).unwrap());
    let deliver_all = || while posted.deliver() {};
    let forgetful = Forgetful::new(Arc::clone(&posted) as Arc<dyn Wire>, forgets);
    let wire = Arc::clone(&forgetful) as Arc<dyn Wire>;
    let windows = [window(near.0, wire), window(far.0, far.1)];
    let links = [link(&windows[0], Side::First), link(&windows[1], Side::Second)];
    for _ in 0..3 {
        links[0].look();
        deliver_all();
        links[1].look();
    }
    if !links.iter().all(|link| link.is_up()) {
        return Err("the link does not come up");
    }
    assert!(links[0].reserve());
    let channel = Channel::dialled(&links[0], [1; 16]).unwrap();
    links[0].wait_for_partition(&channel);
    let mut sender = ChannelStream::new(channel);
    let _ = sender.connected();
    deliver_all();
    let mut accepted = Vec::new();
    links[1].sweep(&mut accepted);
    let mut receiver = ChannelStream::new(accepted.pop().ok_or("the partition does not open")?);
    assert!(sender.connected().unwrap().is_ok());
    forgetful.connected.store(true, Ordering::Relaxed);
    let (mut sent, mut seen) = (0_u64, 0_u64);
    for round in 0..200_u64 {
        let words = 1 + (seed + round * 7) % 40;
        let bytes: Vec<u8> = (sent..sent + words).flat_map(|word| word.to_le_bytes()).collect();
        if sender.send_bytes(&bytes) == Moved::Bytes(bytes.len()) {
            sent += words;
        }
        loop {
            let some = posted.deliver();
            for word in read(&mut receiver).chunks(8) {
                if word != seen.to_le_bytes() {
                    return Err("bytes came before they were written");
                }
                seen += 1;
            }
            if !some {
                break;
            }
        }
        if seen != sent {
            return Err("what was sent stays behind");
        }
    }
    Ok(())
}

#[test]
fn bytes_arrive_whole_and_in_order_through_reordered_posted_writes() {
    for seed in 0..20 {
        assert_eq!(through_posted_writes(seed, |_| false), Ok(()), "seed {seed}");
    }
}

#[test]
fn a_forgotten_fence_is_caught() {
    // Sending alternates between the fence behind the bytes and the one behind the tail.
    let planted: [(&str, Forgets); 3] = [
        ("behind the bytes", |fence| fence.is_some_and(|fence| fence % 2 == 0)),
        ("behind the tail", |fence| fence.is_some_and(|fence| fence % 2 == 1)),
        ("everywhere", |_| true),
    ];
    for (place, forgets) in planted {
        let caught = (0..20).filter(|&seed| through_posted_writes(seed, forgets).is_err()).count();
        assert_eq!(caught, 20, "seeds that catch a fence forgotten {place}");
    }
}

#[test]
fn a_full_ring_waits_for_room_and_says_when_there_is_some() {
    let windows = windows();
    let links = up(&windows);
    let [mut sender, mut receiver] = streams(&links);
    let mut sent = 0;
    while let Moved::Bytes(bytes) = sender.send_bytes(&[7; 1000]) {
        sent += bytes;
    }
    assert_eq!(sent, 4096, "no more than the ring holds");
    let watch = sender.watch().unwrap();
    assert!(sender.wants_room(true));
    assert!(!watch.has_news(), "nothing was taken yet");
    assert_eq!(receiver.receive_bytes(&mut [0; 1000]), Moved::Bytes(1000));
    assert!(!watch.has_news(), "less than a quarter is not told");
    assert_eq!(receiver.receive_bytes(&mut [0; 100]), Moved::Bytes(100));
    assert!(watch.has_news(), "a quarter is");
    assert_eq!(sender.send_bytes(&[8; 8192]), Moved::Bytes(1100));
}

#[test]
fn closing_lets_the_rest_be_read_and_frees_the_partition_when_both_have() {
    let windows = windows();
    let links = up(&windows);
    for round in 0..5_u8 {
        let [mut near, mut far] = streams(&links);
        assert_eq!(near.send_bytes(&[round; 10]), Moved::Bytes(10));
        near.shut_down();
        assert_eq!(read(&mut far), [round; 10]);
        assert_eq!(far.receive_bytes(&mut [0; 8]), Moved::Closed);
        assert_eq!(far.send_bytes(b"late"), Moved::Closed);
        links[0].sweep(&mut Vec::new());
        // The other side has not closed: its partition is not given away, another is.
        assert!(links[0].reserve());
        let second = Channel::dialled(&links[0], [1; 16]).unwrap();
        assert!(links[0].assign(&second));
        drop(ChannelStream::new(second));
        drop(far);
        for link in &links {
            link.sweep(&mut Vec::new());
        }
    }
}

#[test]
fn a_heartbeat_that_stands_still_ends_the_life_of_the_link() {
    let windows = windows();
    let links = up(&windows);
    let [mut near, _far] = streams(&links);
    let short = Duration::from_millis(20);
    for _ in 0..5 {
        assert_eq!(links[1].beat(short), None);
        assert_eq!(links[0].beat(short), None);
    }
    std::thread::sleep(2 * short);
    // The second does not beat any more.
    let why = links[0].beat(short).unwrap();
    links[0].end(why);
    assert_eq!(near.send_bytes(b"lost"), Moved::Closed);
    assert_eq!(near.receive_bytes(&mut [0; 8]), Moved::Closed);
    assert!(near.connected().unwrap().is_err());
}

#[test]
fn a_peer_that_began_anew_is_noticed_and_both_come_up_again() {
    let windows = windows();
    let links = up(&windows);
    let [mut near, _far] = streams(&links);
    assert_eq!(near.send_bytes(b"of the first life"), Moved::Bytes(17));
    // The second node reboots: it knows nothing of the first life.
    let second = link(&windows[1], Side::Second);
    assert!(links[0].look().is_some(), "another epoch is seen");
    links[0].end("the peer began anew");
    assert_eq!(near.send_bytes(b"late"), Moved::Closed);
    let first = link(&windows[0], Side::First);
    for _ in 0..3 {
        assert_eq!(first.look(), None);
        assert_eq!(second.look(), None);
    }
    assert!(first.is_up() && second.is_up());
    let [mut near, mut far] = streams(&[first, second]);
    assert!(read(&mut far).is_empty(), "nothing of the first life is left");
    assert_eq!(near.send_bytes(b"second"), Moved::Bytes(6));
    assert_eq!(read(&mut far), b"second");
}

/// Looks until both are up.
fn come_up(links: &[Arc<Link>; 2]) {
    let begun = std::time::Instant::now();
    while !links.iter().all(|link| link.is_up()) {
        assert!(begun.elapsed() < Duration::from_secs(20), "both come up");
        for link in links {
            assert_eq!(link.look(), None);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_link_comes_up_whatever_was_lost_while_it_was_not_there() {
    for lost in 0..6 {
        let ends = ends().map(|(inbound, wire)| (inbound, Forgetful::new(wire, |_| false)));
        let shared = ends
            .each_ref()
            .map(|(inbound, wire)| window(inbound.clone(), Arc::clone(wire) as Arc<dyn Wire>));
        let lose = |which: [bool; 2]| {
            for ((_, wire), lost) in ends.iter().zip(which) {
                wire.lost.store(lost, Ordering::Relaxed);
            }
        };
        // Who writes into nothing while it begins; then, who while it says what it has seen.
        lose([lost & 1 != 0, lost & 2 != 0]);
        let links = [link(&shared[0], Side::First), link(&shared[1], Side::Second)];
        lose([lost == 4, lost == 5]);
        for link in &links {
            assert_eq!(link.look(), None);
        }
        lose([false; 2]);
        come_up(&links);
        let [mut near, mut far] = streams(&links);
        assert_eq!(near.send_bytes(b"there"), Moved::Bytes(5));
        // What is said again harms nothing that has begun.
        std::thread::sleep(Duration::from_millis(300));
        for link in &links {
            assert_eq!(link.look(), None);
        }
        assert_eq!(read(&mut far), b"there");
    }
}

#[test]
fn whatever_a_peer_writes_into_the_window_ends_a_channel_at_most() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for _ in 0..300 {
        let windows = windows();
        let links = up(&windows);
        let [mut near, far] = streams(&links);
        // The far side is the attacker: it writes where only the honest code would.
        let line = geometry().line(0);
        for _ in 0..20 {
            let value = match next() % 4 {
                0 => next(),
                1 => next() % 8192,
                2 => (1 << 8) | (next() % 4),
                _ => u64::MAX - next() % 16,
            };
            let place = match next() % 5 {
                0 => line + TAIL,
                1 => line + HEAD,
                2 => line + STATE,
                3 => (next() as usize % (SCRATCHPADS * PAD_BYTES)) / 8 * 8,
                _ => next() as usize % (geometry().window_bytes() / 8) * 8,
            };
            windows[1].post_word(place, value);
            let _ = near.receive_bytes(&mut [0; 300]);
            let _ = near.send_bytes(&[1; 300]);
            let _ = near.watch().unwrap().has_news();
            let _ = links[0].look();
            let _ = links[0].beat(Duration::from_secs(1));
            links[0].sweep(&mut Vec::new());
        }
        drop(far);
    }
}

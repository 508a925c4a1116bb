//! A network whose switch is this process: what members send each other arrives late, or not.
//!
//! Every namespace has a tun device whose other end is a descriptor here, and so has the test
//! itself, for its clients. Packets are held for a while of their own, so that they also overtake
//! each other, and some are lost; the kernels' TCP copes, as with any bad network.

use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_env::Randomness;

use super::Shape;
use super::network::{run, turn};

/// Members 1 to 3, and the test itself.
const PLACES: [usize; 4] = [1, 2, 3, 254];
const MTU: usize = 1500;

/// What becomes of a packet between members; those of clients pass at once.
#[derive(Debug, Default)]
pub struct Weather {
    /// Shortest time under way.
    pub delay_us: AtomicU64,
    /// At most so much more.
    pub jitter_us: AtomicU64,
    /// Lost out of a thousand.
    pub lost: AtomicU64,
    pub seen: AtomicU64,
    pub dropped: AtomicU64,
}

/// A packet and when it is due, the earliest first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Held(std::cmp::Reverse<(Instant, u64)>, usize, Vec<u8>);

/// Gone with this: devices, namespaces and threads.
#[derive(Debug)]
pub struct Switch {
    pub weather: Arc<Weather>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
    _turn: File,
}

fn space(node: usize) -> String {
    format!("beesw{node}")
}

fn device(node: usize) -> String {
    format!("beeswt{node}")
}

/// Makes a tun device, and returns the end at which its packets come out.
fn tun(name: &str) -> Option<File> {
    let file = File::options().read(true).write(true).open("/dev/net/tun").ok()?;
    // struct ifreq: sixteen bytes of name, then flags: IFF_TUN without a header of the kernel's.
    let mut request = [0_u8; 40];
    request[..name.len()].copy_from_slice(name.as_bytes());
    let flags = (libc::IFF_TUN | libc::IFF_NO_PI) as u16;
    request[16..18].copy_from_slice(&flags.to_ne_bytes());
    // SAFETY: the descriptor is open, and the request is as long as the kernel's structure.
    let made = unsafe { libc::ioctl(file.as_raw_fd(), 0x4004_54ca, request.as_mut_ptr()) };
    (made == 0).then_some(file)
}

impl Switch {
    pub fn new() -> Option<Self> {
        let turn = turn("log-switch")?;
        Self::remove();
        let stop = Arc::<AtomicBool>::default();
        let weather = Arc::<Weather>::default();
        let mut switch = Self { weather, stop, threads: Vec::new(), _turn: turn };
        let mut ends = Vec::new();
        for node in PLACES {
            let name = device(node);
            ends.push(tun(&name)?);
            let inside = if node == 254 {
                String::new()
            } else {
                let space = space(node);
                let moved = run(&format!("ip netns add {space}"))
                    && run(&format!("ip link set {name} netns {space}"));
                if !moved {
                    return None;
                }
                format!("-n {space} ")
            };
            let up = run(&format!("ip {inside}addr add 10.77.92.{node}/24 dev {name}"))
                && run(&format!("ip {inside}link set {name} mtu {MTU} up"))
                && (node == 254 || run(&format!("ip {inside}link set lo up")));
            if !up {
                return None;
            }
        }
        switch.run(ends);
        Some(switch)
    }

    fn run(&mut self, ends: Vec<File>) {
        let held = Arc::new(Mutex::new(BinaryHeap::<Held>::new()));
        for (index, end) in ends.iter().enumerate() {
            let from = PLACES[index];
            let mut end = end.try_clone().unwrap();
            let (held, stop) = (Arc::clone(&held), Arc::clone(&self.stop));
            let weather = Arc::clone(&self.weather);
            let mut random = Randomness::new(index as u64 + 1);
            self.threads.push(std::thread::spawn(move || {
                let mut packet = [0; MTU + 100];
                while let Some(length) = read(&mut end, &mut packet, &stop) {
                    // The last byte of an IPv4 packet's destination names the place.
                    let known = length >= 20 && packet[0] >> 4 == 4;
                    let to = PLACES.iter().position(|node| *node == usize::from(packet[19]));
                    let (true, Some(to)) = (known, to) else { continue };
                    let mut wait_us = 0;
                    if from != 254 && PLACES[to] != 254 {
                        let load = |value: &AtomicU64| value.load(Ordering::Relaxed);
                        weather.seen.fetch_add(1, Ordering::Relaxed);
                        if random.chance(load(&weather.lost), 1000) {
                            weather.dropped.fetch_add(1, Ordering::Relaxed);
                            continue;
                        }
                        wait_us =
                            load(&weather.delay_us) + random.below(load(&weather.jitter_us) + 1);
                    }
                    let due = Instant::now() + Duration::from_micros(wait_us);
                    let number = random.next_u64();
                    let packet = packet[..length].to_vec();
                    held.lock().unwrap().push(Held(std::cmp::Reverse((due, number)), to, packet));
                }
            }));
        }
        let stop = Arc::clone(&self.stop);
        let mut ends = ends;
        self.threads.push(std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let now = Instant::now();
                loop {
                    let mut held = held.lock().unwrap();
                    let Some(Held(due, ..)) = held.peek() else { break };
                    if due.0.0 > now {
                        break;
                    }
                    let Some(Held(_, to, packet)) = held.pop() else { break };
                    drop(held);
                    // A device that is down loses it, as a cable that is out does.
                    let _ = ends[to].write(&packet);
                }
                std::thread::sleep(Duration::from_micros(200));
            }
        }));
    }

    /// Members that live there, and talk over tcp.
    pub fn shape(&self) -> Shape {
        Shape {
            wrap: |node| ["ip", "netns", "exec", &space(node)].map(str::to_owned).to_vec(),
            host: |node| format!("10.77.92.{node}"),
            ..Shape::new("tcp")
        }
    }

    fn remove() {
        for node in PLACES {
            run(&format!("ip netns del {}", space(node)));
            run(&format!("ip link del {}", device(node)));
        }
    }
}

/// The next packet; `None` once it is to stop.
fn read(end: &mut File, packet: &mut [u8], stop: &AtomicBool) -> Option<usize> {
    loop {
        let mut wanted = libc::pollfd { fd: end.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid structure, and the descriptor is open.
        let ready = unsafe { libc::poll(&raw mut wanted, 1, 50) };
        if stop.load(Ordering::Relaxed) {
            return None;
        }
        if ready > 0
            && let Ok(length) = end.read(packet)
        {
            return Some(length);
        }
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
        Self::remove();
    }
}

//! The provider beside bare sockets, in one run: `cargo run --release --example pingpong`.
//!
//! Round trips of 8 bytes, sleeping against sleeping and spinning against spinning, and one-way
//! bandwidth of 1 MiB messages. Turns alternate; the table shows the median of the rounds and the
//! ratio to the bare socket.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement, run by hand")]

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, LocalData, MemoryRegion, Operation, QueuePair,
    QueuePairOptions, ReceiveRequest, RemoteAddress, Role, ScatterGatherEntry, WorkCompletion,
    WorkRequest,
};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_os::memory::load_u64;

const LARGE: usize = 1 << 20;
const LARGE_COUNT: usize = 3000;
const BOUND: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, PartialEq)]
enum Waiting {
    Sleeping,
    Spinning,
}

/// Runs both ends; the near end's result counts.
fn both(near: impl FnOnce() -> f64, far: impl FnOnce() + Send) -> f64 {
    std::thread::scope(|scope| {
        let far = scope.spawn(far);
        let result = near();
        far.join().unwrap();
        result
    })
}

fn sockets() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    for socket in [&near, &far] {
        socket.set_nodelay(true).unwrap();
    }
    (near, far)
}

fn read_whole(socket: &mut TcpStream, bytes: &mut [u8]) {
    let mut have = 0;
    while have < bytes.len() {
        match socket.read(&mut bytes[have..]) {
            Ok(count) => have += count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(error) => unreachable!("{error}"),
        }
    }
}

fn bare_ping_pong(waiting: Waiting, rounds: usize) -> f64 {
    let (mut near, mut far) = sockets();
    for socket in [&near, &far] {
        socket.set_nonblocking(waiting == Waiting::Spinning).unwrap();
    }
    let near = || {
        let mut word = [7; 8];
        let begun = Instant::now();
        for _ in 0..rounds {
            near.write_all(&word).unwrap();
            read_whole(&mut near, &mut word);
        }
        begun.elapsed().as_secs_f64() / rounds as f64
    };
    both(near, || {
        let mut word = [0; 8];
        for _ in 0..rounds {
            read_whole(&mut far, &mut word);
            far.write_all(&word).unwrap();
        }
    })
}

fn bare_bandwidth() -> f64 {
    let (mut near, mut far) = sockets();
    let near = || {
        let data = vec![1; LARGE];
        let begun = Instant::now();
        for _ in 0..LARGE_COUNT {
            near.write_all(&data).unwrap();
        }
        near.read_exact(&mut [0]).unwrap();
        (LARGE * LARGE_COUNT) as f64 / begun.elapsed().as_secs_f64()
    };
    both(near, || {
        let mut data = vec![0; LARGE];
        for _ in 0..LARGE_COUNT {
            far.read_exact(&mut data).unwrap();
        }
        far.write_all(&[1]).unwrap();
    })
}

struct End {
    queue: Rc<dyn CompletionQueue>,
    pair: Box<dyn QueuePair>,
    region: MemoryRegion,
    peer: RemoteAddress,
    _device: Arc<dyn Device>,
}

type Hello = (ConnectInfo, RemoteAddress);

fn end(role: Role, to: &Sender<Hello>, from: &Receiver<Hello>) -> End {
    let device = TcpDevice::open(TcpConfig::default()).unwrap();
    let domain = device.allocate_protection_domain().unwrap();
    let queue = device.create_completion_queue(1024).unwrap();
    let options = QueuePairOptions::default();
    let mut pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
    let region =
        domain.register(device.allocate_memory(2 * LARGE).unwrap(), Access::all()).unwrap();
    to.send((pair.connect_info(), region.remote_address(0))).unwrap();
    let (info, peer) = from.recv().unwrap();
    pair.connect(&info, role).unwrap();
    pair.wait_connected(BOUND).unwrap();
    End { queue, pair, region, peer, _device: device }
}

impl End {
    fn write(&mut self, value: u64, immediate: bool, signalled: bool) {
        let bytes = value.to_ne_bytes();
        let (local, remote) = (LocalData::Inline(&bytes), self.peer);
        let operation = if immediate {
            Operation::WriteWithImmediate { local, remote, immediate: 0 }
        } else {
            Operation::Write { local, remote }
        };
        self.pair.post_send(&[WorkRequest { wr_id: value, operation, signalled }]).unwrap();
    }

    fn receive(&mut self) {
        self.pair.post_receive(&[ReceiveRequest { wr_id: 0, buffer: None }]).unwrap();
    }

    fn sleep(&self) {
        let mut done = [WorkCompletion::EMPTY];
        assert_eq!(self.queue.wait(&mut done, BOUND).unwrap(), 1);
        assert!(done[0].is_success());
    }

    fn spin(&self, value: u64) {
        let mut done = [WorkCompletion::EMPTY; 4];
        while load_u64(self.region.memory().as_ref(), 0) != value {
            let count = self.queue.poll(&mut done).unwrap();
            assert!(done[..count].iter().all(WorkCompletion::is_success));
        }
    }
}

fn fabric(near: impl FnOnce(&mut End) -> f64, far: impl FnOnce(&mut End) + Send) -> f64 {
    let (to_far, from_near) = channel();
    let (to_near, from_far) = channel();
    both(
        || near(&mut end(Role::Active, &to_far, &from_far)),
        move || far(&mut end(Role::Passive, &to_near, &from_near)),
    )
}

fn fabric_ping_pong(waiting: Waiting, rounds: usize) -> f64 {
    let exchange = move |end: &mut End, first: bool| {
        if waiting == Waiting::Sleeping {
            (0..8).for_each(|_| end.receive());
        }
        let begun = Instant::now();
        for round in 1..=rounds as u64 {
            if first {
                end.write(round, waiting == Waiting::Sleeping, false);
            }
            match waiting {
                Waiting::Sleeping => {
                    end.sleep();
                    end.receive();
                }
                Waiting::Spinning => end.spin(round),
            }
            if !first {
                end.write(round, waiting == Waiting::Sleeping, false);
            }
        }
        begun.elapsed().as_secs_f64() / rounds as f64
    };
    fabric(
        move |end| exchange(end, true),
        move |end| {
            exchange(end, false);
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_millis(20) {
                end.queue.poll(&mut [WorkCompletion::EMPTY; 4]).unwrap_or(0);
            }
        },
    )
}

fn fabric_bandwidth(look: bool) -> f64 {
    fabric(
        |end| {
            let begun = Instant::now();
            let mut posted = 0_usize;
            let mut completed = 0;
            let mut done = [WorkCompletion::EMPTY; 16];
            while completed < LARGE_COUNT {
                while posted < LARGE_COUNT && posted - completed < 16 {
                    let entry = ScatterGatherEntry {
                        region: &end.region,
                        offset: LARGE as u64,
                        length: LARGE as u64,
                    };
                    let entries = [entry];
                    let local = LocalData::Gather(&entries);
                    let operation = Operation::Write { local, remote: end.peer };
                    end.pair.post_send(&[WorkRequest::new(1, operation)]).unwrap();
                    posted += 1;
                }
                let count = end.queue.wait(&mut done, BOUND).unwrap();
                assert!(count > 0 && done[..count].iter().all(WorkCompletion::is_success));
                completed += count;
            }
            let result = (LARGE * LARGE_COUNT) as f64 / begun.elapsed().as_secs_f64();
            end.write(1, true, true);
            end.sleep();
            result
        },
        move |end| {
            end.receive();
            if look {
                end.sleep();
            }
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(5) {
                let mut done = [WorkCompletion::EMPTY];
                if end.pair.state() == beeline_fabric::QueuePairState::Error {
                    break;
                }
                if look {
                    end.queue.wait(&mut done, Duration::from_millis(50)).unwrap_or(0);
                } else {
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        },
    )
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// `pingpong [sleeping|spinning|bandwidth] [bare|fabric]` runs one turn of one measurement, for
/// looking at it with other tools.
fn single(what: &str, side: &str) {
    let waiting = if what == "spinning" { Waiting::Spinning } else { Waiting::Sleeping };
    let result = match (what, side) {
        ("bandwidth", "bare") => bare_bandwidth() / 1e9,
        ("bandwidth", _) => fabric_bandwidth(true) / 1e9,
        (_, "bare") => bare_ping_pong(waiting, 20_000) * 1e6,
        _ => fabric_ping_pong(waiting, 20_000) * 1e6,
    };
    println!("{what} {side}: {result:.2}");
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let [what, side] = arguments.as_slice() {
        return single(what, side);
    }
    let repetitions = 7;
    let rounds = 20_000;
    for (name, waiting) in [("sleeping", Waiting::Sleeping), ("spinning", Waiting::Spinning)] {
        let (mut bare, mut ours) = (Vec::new(), Vec::new());
        for _ in 0..repetitions {
            bare.push(bare_ping_pong(waiting, rounds) * 1e6);
            ours.push(fabric_ping_pong(waiting, rounds) * 1e6);
        }
        let (bare, ours) = (median(bare), median(ours));
        println!("8 B, {name:9} bare {bare:7.2} us   fabric {ours:7.2} us   {:.2}", ours / bare);
    }
    let (mut bare, mut looked, mut alone) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..repetitions {
        bare.push(bare_bandwidth() / 1e9);
        looked.push(fabric_bandwidth(true) / 1e9);
        alone.push(fabric_bandwidth(false) / 1e9);
    }
    let (bare, looked, alone) = (median(bare), median(looked), median(alone));
    println!(
        "1 MiB, target waits    bare {bare:5.2} GB/s   fabric {looked:5.2} GB/s   {:.2}",
        looked / bare
    );
    println!(
        "1 MiB, target's thread bare {bare:5.2} GB/s   fabric {alone:5.2} GB/s   {:.2}",
        alone / bare
    );
}

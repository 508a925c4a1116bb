//! What this provider costs on the RDMA device of this machine, beside the device's own tools.
//!
//! ```text
//! lab write BYTES ROUNDS      half a round trip of writes that both ends look for in memory
//! lab read BYTES ROUNDS       one read
//! lab connect ROUNDS          making, connecting and dropping a queue pair: first, and again
//! ```
//!
//! `write` and `read` do what perftest's ib_write_lat and ib_read_lat do, with a process of their
//! own as the other end, and print the median, in cycles too, and the 99th percentile. Like
//! perftest they read the processor's cycle counter around each operation: in an emulated machine
//! the kernel's clock may be a device, and asking it costs as much as some operations.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a measurement prints, and ends where its set-up breaks"
)]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, LocalData, MemoryRegion, Operation,
    ProtectionDomain, QueuePair, QueuePairOptions, RemoteAddress, RemoteKey, Role,
    ScatterGatherEntry, WorkCompletion, WorkRequest,
};
use beeline_fabric_verbs::{VerbsConfig, VerbsDevice};

const BOUND: Duration = Duration::from_secs(30);

struct End {
    pair: Box<dyn QueuePair>,
    queue: Rc<dyn CompletionQueue>,
    /// Where the other end writes.
    inbox: MemoryRegion,
    /// What this end writes from and reads into.
    own: MemoryRegion,
    peer: RemoteAddress,
    inline: usize,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap())
        .collect()
}

/// Makes an end and connects it; connection data goes through a line each way.
fn connect(role: Role, bytes: usize, input: &mut impl BufRead, output: &mut impl Write) -> End {
    let device = VerbsDevice::open(VerbsConfig::default()).unwrap();
    let domain = device.allocate_protection_domain().unwrap();
    let queue = device.create_completion_queue(256).unwrap();
    let region = || {
        let memory = device.allocate_memory(bytes.max(8)).unwrap();
        domain.register(memory, Access::all()).unwrap()
    };
    let (inbox, own) = (region(), region());
    let options = QueuePairOptions::default();
    let mut pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
    writeln!(output, "{} {}", hex(&pair.connect_info().0), inbox.remote_key().0).unwrap();
    output.flush().unwrap();
    let mut line = String::new();
    input.read_line(&mut line).unwrap();
    let (info, key) = line.trim().split_once(' ').unwrap();
    pair.connect(&ConnectInfo(unhex(info)), role).unwrap();
    pair.wait_connected(BOUND).unwrap();
    let peer = RemoteAddress { key: RemoteKey(key.parse().unwrap()), offset: 0 };
    let inline = device.attributes().max_inline_bytes as usize;
    End { pair, queue, inbox, own, peer, inline }
}

impl End {
    fn byte(&self, at: usize) -> u8 {
        let place = self.inbox.memory().base().as_ptr().wrapping_add(at);
        // SAFETY: inside the region; the device writes it, hence volatile.
        unsafe { place.read_volatile() }
    }

    fn complete(&self) {
        let mut done = [WorkCompletion::EMPTY];
        // Without a pause in between, as perftest: to an emulated processor a pause is an exit.
        while self.queue.poll(&mut done).unwrap() == 0 {}
        assert!(done[0].is_success(), "{:?}", done[0]);
    }

    fn write(&mut self, bytes: usize, mark: u8) {
        beeline_os::memory::copy_in(self.own.memory().as_ref(), bytes - 1, &[mark]);
        let mut small = [0; 256];
        let entries = [ScatterGatherEntry { region: &self.own, offset: 0, length: bytes as u64 }];
        let local = if bytes <= self.inline {
            small[bytes - 1] = mark;
            LocalData::Inline(&small[..bytes])
        } else {
            LocalData::Gather(&entries)
        };
        let write = Operation::Write { local, remote: self.peer };
        self.pair.post_send(&[WorkRequest::new(1, write)]).unwrap();
    }

    fn wait_for(&self, bytes: usize, mark: u8) {
        while self.byte(bytes - 1) != mark {}
    }
}

fn other_end(arguments: &[String]) -> (Child, ChildStdin, BufReader<ChildStdout>) {
    let program = std::env::current_exe().unwrap();
    // The other end on a processor of its own, where one is named.
    let mut command = match std::env::var("LAB_PEER_CPU") {
        Ok(processor) => {
            let mut command = Command::new("taskset");
            command.args(["-c", &processor]).arg(program);
            command
        }
        Err(_) => Command::new(program),
    };
    let mut child = command
        .arg("peer")
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let input = child.stdin.take().unwrap();
    let output = BufReader::new(child.stdout.take().unwrap());
    (child, input, output)
}

/// The process at the other end.
fn peer(what: &str, bytes: usize, rounds: u32) {
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    let mut end = connect(Role::Passive, bytes, &mut input, &mut output);
    if what == "write" {
        for round in 0..rounds {
            let mark = (round % 255 + 1) as u8;
            end.wait_for(bytes, mark);
            end.write(bytes, mark);
            end.complete();
        }
    }
    // The other end leaves first.
    let _ = input.read_line(&mut String::new());
}

/// Cycles of each operation, and how many of them are a microsecond.
fn measure(what: &str, bytes: usize, rounds: u32) -> (Vec<f64>, f64) {
    let arguments = [what.to_owned(), bytes.to_string(), rounds.to_string()];
    let (mut child, mut input, mut output) = other_end(&arguments);
    let mut end = connect(Role::Active, bytes, &mut output, &mut input);
    let mut times = Vec::with_capacity(rounds as usize);
    let (whole, first) = (Instant::now(), cycles());
    for round in 0..rounds {
        let begun = cycles();
        if what == "write" {
            let mark = (round % 255 + 1) as u8;
            end.write(bytes, mark);
            end.complete();
            end.wait_for(bytes, mark);
            times.push((cycles() - begun) as f64 / 2.0);
        } else {
            let local = ScatterGatherEntry { region: &end.own, offset: 0, length: bytes as u64 };
            let read = Operation::Read { local, remote: end.peer };
            end.pair.post_send(&[WorkRequest::new(1, read)]).unwrap();
            end.complete();
            times.push((cycles() - begun) as f64);
        }
    }
    let per_us = (cycles() - first) as f64 / (whole.elapsed().as_secs_f64() * 1e6);
    drop(input);
    child.wait().unwrap();
    times.sort_by(f64::total_cmp);
    (times, per_us)
}

/// The processor's cycle counter.
fn cycles() -> u64 {
    // SAFETY: every x86-64 processor has the instruction.
    unsafe { std::arch::x86_64::_rdtsc() }
}

struct Side {
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
}

fn side(config: &VerbsConfig) -> Side {
    let device = VerbsDevice::open(config.clone()).unwrap();
    let domain = device.allocate_protection_domain().unwrap();
    let queue = device.create_completion_queue(1024).unwrap();
    Side { device, domain, queue }
}

/// One connection, made and dropped; with buffers of 1 MiB at both ends when `buffers`.
fn once(near: &Side, far: &Side, buffers: bool) -> f64 {
    let begun = Instant::now();
    let options = QueuePairOptions::default();
    let make = |side: &Side| {
        side.domain.create_queue_pair(&side.queue, &side.queue, None, options).unwrap()
    };
    let (mut a, mut b) = (make(near), make(far));
    let (info_a, info_b) = (a.connect_info(), b.connect_info());
    b.connect(&info_a, Role::Passive).unwrap();
    a.connect(&info_b, Role::Active).unwrap();
    a.wait_connected(BOUND).unwrap();
    b.wait_connected(BOUND).unwrap();
    if buffers {
        for side in [near, far] {
            let memory = side.device.allocate_memory(1 << 20).unwrap();
            side.domain.register(memory, Access::all()).unwrap();
        }
    }
    begun.elapsed().as_secs_f64() * 1e6
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn connections(rounds: u32) {
    for (name, kept) in [("kept", 16), ("not kept", 0)] {
        let config = VerbsConfig { reused_queue_pairs: kept, ..VerbsConfig::default() };
        let opened = Instant::now();
        let (near, far) = (side(&config), side(&config));
        let open = opened.elapsed().as_secs_f64() * 1e6;
        let first = once(&near, &far, true);
        let again = median((0..rounds).map(|_| once(&near, &far, false)).collect());
        println!(
            "queue pairs {name}: devices {open:.0} us, first connection with buffers {first:.0} us, \
             again {again:.0} us"
        );
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize| -> u32 { arguments[at].parse().unwrap() };
    match arguments.first().map(String::as_str) {
        Some("peer") => peer(&arguments[1], number(2) as usize, number(3)),
        Some(what @ ("write" | "read")) => {
            let (times, per_us) = measure(what, number(1) as usize, number(2));
            let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
            println!(
                "{what} {} bytes: median {:.0} cycles, {:.2} us, p99 {:.2} us",
                number(1),
                at(0.5),
                at(0.5) / per_us,
                at(0.99) / per_us
            );
        }
        Some("connect") => connections(number(1)),
        _ => println!("lab write|read BYTES ROUNDS, lab connect ROUNDS"),
    }
}

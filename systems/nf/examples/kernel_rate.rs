//! The firewall between two veth pairs, beside iptables and nftables on the same packets.
//!
//! `cargo run --release -p beeline-nf --example kernel_rate` (as root) makes three network name
//! spaces in a row. A generator writes 64-byte TCP packets into the first as fast as a packet socket
//! takes them, the middle one filters and forwards, and the last one's interface counts. No packet
//! meets a rule, so a list is asked whole. Generator, function and kernel share the machine's cores.
//! Rows are measured one after another; a row whose program or right is missing says so.

#![allow(clippy::print_stdout, reason = "an example shows its figures")]

use std::error::Error;
use std::io::Write as _;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use beeline_native::Program;
use beeline_nf::functions::templates;
use beeline_nf::live::{Surroundings, run};
use beeline_nf::load::compile;
use beeline_nf::packet_socket::Device;

type Outcome<T> = Result<T, Box<dyn Error>>;

const RULES: [u32; 4] = [1, 100, 1_000, 10_000];
const WARM_UP: Duration = Duration::from_secs(2);
const WINDOW: Duration = Duration::from_secs(3);

/// Runs a command to its end; its words.
fn do_it(command: &str) -> Outcome<String> {
    with_input(command, "")
}

fn with_input(command: &str, input: &str) -> Outcome<String> {
    let mut words = command.split_whitespace();
    let mut child = Command::new(words.next().unwrap_or_default())
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| format!("{command}: {error}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(format!("{command}: {why}").into());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Three name spaces in a row; they go with the value.
struct Row {
    first: String,
    middle: String,
    last: String,
}

impl Row {
    fn new() -> Outcome<Self> {
        let id = std::process::id();
        let name = |part: &str| format!("beeline-nf-{part}-{id}");
        let row = Self { first: name("a"), middle: name("b"), last: name("c") };
        for space in [&row.first, &row.middle, &row.last] {
            do_it(&format!("ip netns add {space}"))?;
        }
        let Self { first, middle, last } = &row;
        do_it(&format!("ip link add a0 netns {first} type veth peer name b0 netns {middle}"))?;
        do_it(&format!("ip link add b1 netns {middle} type veth peer name c1 netns {last}"))?;
        let ends = [(first, "a0", 1), (middle, "b0", 2), (middle, "b1", 3), (last, "c1", 4)];
        for (space, end, number) in ends {
            do_it(&format!("ip -n {space} link set {end} address 02:00:00:00:00:0{number}"))?;
            do_it(&format!("ip -n {space} link set {end} up"))?;
        }
        Ok(row)
    }

    /// The middle one forwards by the kernel.
    fn route(&self) -> Outcome<()> {
        let middle = &self.middle;
        do_it(&format!("ip -n {middle} address add 10.1.0.1/24 dev b0"))?;
        do_it(&format!("ip -n {middle} address add 10.2.0.1/24 dev b1"))?;
        do_it(&format!("ip -n {middle} neighbour add 10.2.0.2 lladdr 02:00:00:00:00:04 dev b1"))?;
        do_it(&format!("ip netns exec {middle} sysctl -q -w net.ipv4.ip_forward=1"))?;
        Ok(())
    }

    fn start(&self, space: &str, role: &[&str]) -> Outcome<Running> {
        let program = std::env::current_exe()?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", space]).arg(program).args(role);
        Ok(Running(command.stdout(Stdio::null()).spawn()?))
    }

    /// Packets that arrived at the end.
    fn arrived(&self) -> Outcome<u64> {
        let path = "/sys/class/net/c1/statistics/rx_packets";
        let text = do_it(&format!("ip netns exec {} cat {path}", self.last))?;
        Ok(text.trim().parse()?)
    }

    /// Packets a second at the end, and at the generator's interface.
    fn measure(&self) -> Outcome<(f64, f64)> {
        let _generator = self.start(&self.first, &["generate"])?;
        let sent = || -> Outcome<u64> {
            let path = "/sys/class/net/a0/statistics/tx_packets";
            let text = do_it(&format!("ip netns exec {} cat {path}", self.first))?;
            Ok(text.trim().parse()?)
        };
        std::thread::sleep(WARM_UP);
        let start = Instant::now();
        let (before, offered) = (self.arrived()?, sent()?);
        std::thread::sleep(WINDOW);
        let (after, offered) = (self.arrived()?, sent()? - offered);
        let seconds = start.elapsed().as_secs_f64() * 1e3;
        let per = |count: u64| f64::from(u32::try_from(count).unwrap_or(u32::MAX)) / seconds;
        Ok((per(after - before), per(offered)))
    }
}

impl Drop for Row {
    fn drop(&mut self) {
        for space in [&self.first, &self.middle, &self.last] {
            let _ = do_it(&format!("ip netns del {space}"));
        }
    }
}

/// A child that ends with the value.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Prefixes that no packet comes from.
fn sources(count: u32) -> impl Iterator<Item = String> {
    (0..count).map(|at| format!("172.{}.{}.0/24", at >> 8 & 255, at & 255))
}

/// 64-byte TCP packets to port 443, of 256 flows, for ever.
fn generate() -> Outcome<()> {
    let mut device = Device::interface("a0")?;
    let mut packet = [0_u8; 64];
    packet[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
    packet[14..24].copy_from_slice(&[0x45, 0, 0, 50, 0, 0, 0, 0, 64, 6]);
    packet[26..34].copy_from_slice(&[10, 1, 0, 2, 10, 2, 0, 2]);
    let sum: u32 = packet[14..34]
        .chunks_exact(2)
        .map(|half| u32::from(u16::from_be_bytes([half[0], half[1]])))
        .sum();
    let sum = !u16::try_from((sum & 0xffff) + (sum >> 16))?;
    packet[24..26].copy_from_slice(&sum.to_be_bytes());
    packet[36..38].copy_from_slice(&443_u16.to_be_bytes());
    packet[46] = 0x50;
    loop {
        packet[35] = packet[35].wrapping_add(1);
        device.send(&packet)?;
    }
}

/// The firewall between the middle's interfaces, for ever.
fn firewall(rules: u32) -> Outcome<()> {
    let text = templates::text("firewall").unwrap_or_default();
    let loaded = compile("firewall.np", text.to_owned(), None);
    let graph = &loaded.compiled.graph;
    let program = Program::compile(graph)?;
    let commands: Vec<String> =
        sources(rules).map(|from| format!("rules add tcp {from} -> any :443 drop")).collect();
    let ports = [("from_tor", "b0"), ("to_tor", "b1")];
    let ports = ports.map(|(port, what)| (port.to_owned(), what.to_owned()));
    let stop = AtomicBool::new(false);
    let notify = |text: &str| println!("{text}");
    let around = Surroundings { control: None, commands: &commands, notify: &notify, stop: &stop };
    run(graph, program.machines(), &ports, around)?;
    Ok(())
}

fn ours(rules: u32) -> Outcome<(f64, f64)> {
    let row = Row::new()?;
    let _firewall = row.start(&row.middle, &["firewall", &rules.to_string()])?;
    row.measure()
}

fn iptables(rules: u32) -> Outcome<(f64, f64)> {
    let row = Row::new()?;
    row.route()?;
    let mut list = "*filter\n:FORWARD ACCEPT [0:0]\n".to_owned();
    for from in sources(rules) {
        list.push_str(&format!("-A FORWARD -s {from} -p tcp --dport 443 -j DROP\n"));
    }
    list.push_str("COMMIT\n");
    with_input(&format!("ip netns exec {} iptables-restore", row.middle), &list)?;
    row.measure()
}

fn nftables(rules: u32) -> Outcome<(f64, f64)> {
    let row = Row::new()?;
    row.route()?;
    let mut list =
        "table ip bench {\nchain forward {\ntype filter hook forward priority 0; policy accept;\n"
            .to_owned();
    for from in sources(rules) {
        list.push_str(&format!("ip saddr {from} tcp dport 443 drop\n"));
    }
    list.push_str("}\n}\n");
    with_input(&format!("ip netns exec {} nft -f -", row.middle), &list)?;
    row.measure()
}

fn main() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["generate"] => return generate(),
        ["firewall", rules] => return firewall(rules.parse()?),
        _ => {}
    }
    type Contender = fn(u32) -> Outcome<(f64, f64)>;
    let contenders: [(&str, Contender); 3] =
        [("beeline", ours), ("iptables", iptables), ("nftables", nftables)];
    for rules in RULES {
        for (name, measure) in contenders {
            match measure(rules) {
                Ok((arrived, offered)) => println!(
                    "measured  {rules} rules, {name}: {arrived:.0} kpps of {offered:.0} offered"
                ),
                Err(error) => println!("skipped  {rules} rules, {name}: {error}"),
            }
        }
    }
    Ok(())
}

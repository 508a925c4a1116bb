//! The firewall between two veth pairs, beside what the kernel and Open vSwitch do with the same
//! packets.
//!
//! Three network name spaces in a row: a generator writes 64-byte TCP packets into the first as fast
//! as a packet socket takes them, the middle one filters and forwards, and the last one's interface
//! counts. No packet meets a rule, so a list is asked whole. Generator, function and kernel share the
//! machine's cores; the contenders take turns. A contender whose program, module or right is missing
//! is skipped, and the row says why.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_nf::functions::templates;
use beeline_nf::live::{self, Surroundings};
use beeline_nf::packet_socket::Device;
use beeline_nf::sides::{LinkOptions, native};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::{BenchOptions, Kind, Shown, loaded};
use crate::bench::report::{Better, Row};
use crate::bench::turns::unpin;

/// Runs a command to its end; its words.
fn told(command: &str, input: &str) -> anyhow::Result<String> {
    let mut words = command.split_whitespace();
    let mut child = Command::new(words.next().unwrap_or_default())
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {command}"))?;
    // The words are read while the input is written: neither fills its pipe.
    let stdin = child.stdin.take();
    let output = std::thread::scope(|scope| {
        let write = scope.spawn(move || match stdin {
            Some(mut stdin) => stdin.write_all(input.as_bytes()),
            None => Ok(()),
        });
        let output = child.wait_with_output();
        let _ = write.join();
        output
    })?;
    let why = String::from_utf8_lossy(&output.stderr);
    anyhow::ensure!(output.status.success(), "{command}: {}", why.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn carry_out(command: &str) -> anyhow::Result<()> {
    told(command, "").map(drop)
}

/// Three name spaces in a row; they go with the value.
pub(super) struct InARow {
    pub(super) first: String,
    middle: String,
    pub(super) last: String,
}

impl InARow {
    /// The three, not joined yet.
    fn apart() -> anyhow::Result<Self> {
        let id = std::process::id();
        let name = |part: &str| format!("beeline-nf-{part}-{id}");
        let row = Self { first: name("a"), middle: name("b"), last: name("c") };
        for space in [&row.first, &row.middle, &row.last] {
            carry_out(&format!("ip netns add {space}"))?;
        }
        Ok(row)
    }

    /// The first and the last joined, with nothing between.
    pub(super) fn alone() -> anyhow::Result<Self> {
        let row = Self::apart()?;
        let Self { first, last, .. } = &row;
        carry_out(&format!("ip link add a0 netns {first} type veth peer name c1 netns {last}"))?;
        carry_out(&format!("ip -n {first} link set a0 up"))?;
        carry_out(&format!("ip -n {last} link set c1 up"))?;
        Ok(row)
    }

    /// The first joined to the middle one, and that to the last.
    pub(super) fn new() -> anyhow::Result<Self> {
        let row = Self::apart()?;
        let Self { first, middle, last } = &row;
        carry_out(&format!("ip link add a0 netns {first} type veth peer name b0 netns {middle}"))?;
        carry_out(&format!("ip link add b1 netns {middle} type veth peer name c1 netns {last}"))?;
        let ends = [(first, "a0", 1), (middle, "b0", 2), (middle, "b1", 3), (last, "c1", 4)];
        for (space, end, number) in ends {
            carry_out(&format!("ip -n {space} link set {end} address 02:00:00:00:00:0{number}"))?;
            carry_out(&format!("ip -n {space} link set {end} up"))?;
        }
        Ok(row)
    }

    /// In the middle one.
    fn middle(&self, command: &str, input: &str) -> anyhow::Result<()> {
        told(&format!("ip netns exec {} {command}", self.middle), input).map(drop)
    }

    /// The middle one forwards by the kernel.
    fn route(&self) -> anyhow::Result<()> {
        let middle = &self.middle;
        carry_out(&format!("ip -n {middle} address add 10.1.0.1/24 dev b0"))?;
        carry_out(&format!("ip -n {middle} address add 10.2.0.1/24 dev b1"))?;
        let neighbour = "neighbour add 10.2.0.2 lladdr 02:00:00:00:00:04 dev b1";
        carry_out(&format!("ip -n {middle} {neighbour}"))?;
        self.middle("sysctl -q -w net.ipv4.ip_forward=1", "")
    }

    /// A counter of an interface.
    fn counter(space: &str, interface: &str, side: &str) -> anyhow::Result<u64> {
        let text = told(&format!("ip -n {space} -s -j link show {interface}"), "")?;
        let parsed: serde_json::Value = serde_json::from_str(&text)?;
        let packets = parsed[0]["stats64"][side]["packets"].as_u64();
        packets.with_context(|| format!("ip shows no packets of {interface}"))
    }
}

impl Drop for InARow {
    fn drop(&mut self) {
        for space in [&self.first, &self.middle, &self.last] {
            let _ = carry_out(&format!("ip netns del {space}"));
        }
    }
}

/// Moves the calling thread into a name space; the thread ends there.
pub(super) fn enter(space: &str) -> anyhow::Result<()> {
    unpin()?;
    let path = Path::new("/run/netns").join(space);
    let file = File::open(&path).with_context(|| format!("cannot open {}", path.display()))?;
    move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
        .with_context(|| format!("cannot enter {space}"))
}

/// Prefixes that no packet comes from.
fn sources(count: u32) -> impl Iterator<Item = String> {
    (0..count).map(|at| format!("172.{}.{}.0/24", at >> 8 & 255, at & 255))
}

/// A TCP packet of 64 bytes to port 443 behind the middle name space.
pub(super) fn packet() -> anyhow::Result<[u8; 64]> {
    let mut packet = [0_u8; 64];
    packet[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
    packet[14..24].copy_from_slice(&[0x45, 0, 0, 50, 0, 0, 0, 0, 64, 6]);
    packet[26..34].copy_from_slice(&[10, 1, 0, 2, 10, 2, 0, 2]);
    let halves = packet[14..34].chunks_exact(2);
    let sum: u32 = halves.map(|half| u32::from(u16::from_be_bytes([half[0], half[1]]))).sum();
    let sum = !u16::try_from((sum & 0xffff) + (sum >> 16))?;
    packet[24..26].copy_from_slice(&sum.to_be_bytes());
    packet[36..38].copy_from_slice(&443_u16.to_be_bytes());
    packet[46] = 0x50;
    Ok(packet)
}

/// Packets of 256 flows, until told to stop.
fn generate(space: &str, stop: &AtomicBool) -> anyhow::Result<()> {
    enter(space)?;
    let mut device = Device::interface("a0")?;
    let mut packet = packet()?;
    while !stop.load(Ordering::Relaxed) {
        packet[35] = packet[35].wrapping_add(1);
        let sent = device.queue(&packet);
        if let Some(error) = sent.error {
            return Err(error.into());
        }
    }
    Ok(())
}

/// The firewall between the middle's interfaces, until told to stop.
fn firewall(
    space: &str,
    express: bool,
    rules: u32,
    ready: &Path,
    stop: &AtomicBool,
) -> anyhow::Result<()> {
    enter(space)?;
    let loaded = loaded(templates::text("firewall").unwrap_or_default())?;
    let commands: Vec<String> =
        sources(rules).map(|from| format!("rules add tcp {from} -> any :443 drop")).collect();
    let ports = [("from_tor", "b0"), ("to_tor", "b1")];
    let kind = if express { "xdp:" } else { "" };
    let ports = ports.map(|(port, what)| (port.to_owned(), format!("{kind}{what}")));
    let around = Surroundings {
        control: Some(ready),
        commands: &commands,
        notify: &|_| {},
        stop,
        link: LinkOptions::default(),
        spin: live::SPIN,
        load: None,
    };
    live::run(&loaded.compiled.graph, &native, &ports, around)?;
    Ok(())
}

/// What filters and forwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Contender {
    /// A veth pair, and nothing that filters.
    Nothing,
    /// The kernel, without rules.
    Forward,
    /// Beeline, with the interfaces taken away from the kernel by AF_XDP.
    Express,
    /// Beeline, by packet sockets with rings.
    Ring,
    Iptables,
    Ipset,
    Nftables,
    OpenVSwitch,
}

impl Contender {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Nothing => "a veth pair alone",
            Self::Forward => "the kernel's forwarding",
            Self::Express => "beeline by AF_XDP",
            Self::Ring => "beeline by packet rings",
            Self::Iptables => "iptables",
            Self::Ipset => "ipset",
            Self::Nftables => "nftables",
            Self::OpenVSwitch => "Open vSwitch in user space",
        }
    }

    /// Makes the kernel do it.
    fn prepare(self, row: &InARow, rules: u32) -> anyhow::Result<()> {
        row.route()?;
        let mut list = String::new();
        match self {
            Self::Forward => Ok(()),
            Self::Iptables => {
                list.push_str("*filter\n:FORWARD ACCEPT [0:0]\n");
                for from in sources(rules) {
                    list.push_str(&format!("-A FORWARD -s {from} -p tcp --dport 443 -j DROP\n"));
                }
                list.push_str("COMMIT\n");
                row.middle("iptables-restore", &list)
            }
            Self::Ipset => {
                list.push_str("create bench hash:net maxelem 100000\n");
                for from in sources(rules) {
                    list.push_str(&format!("add bench {from}\n"));
                }
                row.middle("ipset restore", &list)?;
                let rule = "-p tcp --dport 443 -m set --match-set bench src -j DROP";
                row.middle(&format!("iptables -A FORWARD {rule}"), "")
            }
            _ => {
                list.push_str("table ip bench {\nchain forward {\n");
                list.push_str("type filter hook forward priority 0; policy accept;\n");
                for from in sources(rules) {
                    list.push_str(&format!("ip saddr {from} tcp dport 443 drop\n"));
                }
                list.push_str("}\n}\n");
                row.middle("nft -f -", &list)
            }
        }
    }
}

/// Open vSwitch in user space, in the middle name space; it ends with the value.
struct Switch<'a> {
    /// The name spaces outlive it.
    _row: &'a InARow,
    folder: tempfile::TempDir,
}

impl<'a> Switch<'a> {
    fn start(row: &'a InARow, rules: u32) -> anyhow::Result<Self> {
        let switch = Self { _row: row, folder: tempfile::tempdir()? };
        let folder = switch.folder.path().display().to_string();
        carry_out(&format!(
            "ovsdb-tool create {folder}/conf.db /usr/share/openvswitch/vswitch.ovsschema"
        ))?;
        let files = |name: &str| {
            format!(
                "--pidfile={folder}/{name}.pid --log-file={folder}/{name}.log --detach --no-chdir"
            )
        };
        let (socket, control) = (format!("{folder}/db.sock"), format!("{folder}/server.ctl"));
        row.middle(
            &format!(
                "ovsdb-server {folder}/conf.db --remote=punix:{socket} --unixctl={control} {}",
                files("server")
            ),
            "",
        )?;
        let set = |words: &str| row.middle(&format!("ovs-vsctl --db=unix:{socket} {words}"), "");
        set("--no-wait init")?;
        row.middle(
            &format!(
                "env OVS_RUNDIR={folder} ovs-vswitchd unix:{socket} --unixctl={folder}/switch.ctl {}",
                files("switch")
            ),
            "",
        )?;
        set("--timeout=20 add-br sw -- set bridge sw datapath_type=netdev")?;
        for port in ["b0", "b1"] {
            set(&format!("--timeout=20 add-port sw {port}"))?;
        }
        let mut flows = String::from("priority=1,in_port=b0,actions=output:b1\n");
        for from in sources(rules) {
            flows.push_str(&format!(
                "priority=9,tcp,in_port=b0,nw_src={from},tp_dst=443,actions=drop\n"
            ));
        }
        let list = switch.folder.path().join("flows");
        std::fs::write(&list, flows)?;
        let bridge = format!("unix:{folder}/sw.mgmt");
        row.middle(&format!("ovs-ofctl replace-flows {bridge} {}", list.display()), "")?;
        Ok(switch)
    }
}

impl Drop for Switch<'_> {
    fn drop(&mut self) {
        for name in ["switch", "server"] {
            let path = self.folder.path().join(format!("{name}.pid"));
            let pid = std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok());
            if let Some(pid) = pid.and_then(rustix::process::Pid::from_raw) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
            }
        }
    }
}

/// Thousands of packets a second that arrive at the end, and that are offered.
fn rate(options: &BenchOptions, row: &InARow) -> anyhow::Result<(f64, f64)> {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let generator = scope.spawn(|| generate(&row.first, &stop));
        let measured = (|| {
            std::thread::sleep(Duration::from_millis(options.size(1_500, 100)));
            let start = Instant::now();
            let arrived = || InARow::counter(&row.last, "c1", "rx");
            let offered = || InARow::counter(&row.first, "a0", "tx");
            let before = (arrived()?, offered()?);
            std::thread::sleep(Duration::from_millis(options.size(2_000, 100)));
            let after = (arrived()?, offered()?);
            let per = |count: u64| {
                let count = f64::from(u32::try_from(count).unwrap_or(u32::MAX));
                count / start.elapsed().as_secs_f64() / 1e3
            };
            anyhow::Ok((per(after.0 - before.0), per(after.1 - before.1)))
        })();
        stop.store(true, Ordering::Relaxed);
        match generator.join() {
            Ok(outcome) => outcome?,
            Err(_) => anyhow::bail!("the generator's thread panicked"),
        }
        measured
    })
}

/// Does something while a contender filters and forwards.
pub(super) fn around<T>(
    contender: Contender,
    row: &InARow,
    rules: u32,
    does: impl FnOnce() -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    match contender {
        Contender::Nothing => does(),
        Contender::Express | Contender::Ring => {
            let express = contender == Contender::Express;
            let stop = AtomicBool::new(false);
            let folder = tempfile::tempdir()?;
            let ready = folder.path().join("ready");
            std::thread::scope(|scope| {
                let function = scope.spawn(|| firewall(&row.middle, express, rules, &ready, &stop));
                let deadline = Instant::now() + Duration::from_secs(60);
                while !ready.exists() && !function.is_finished() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(5));
                }
                // An answer comes when the rules are in.
                let answer = live::command(&ready, "rules counters");
                let done = answer.map_err(Into::into).and_then(|_| does());
                stop.store(true, Ordering::Relaxed);
                match function.join() {
                    Ok(outcome) => outcome?,
                    Err(_) => anyhow::bail!("the firewall's thread panicked"),
                }
                done
            })
        }
        Contender::OpenVSwitch => {
            let _switch = Switch::start(row, rules)?;
            does()
        }
        kernel => {
            kernel.prepare(row, rules)?;
            does()
        }
    }
}

fn measure(contender: Contender, options: &BenchOptions, rules: u32) -> anyhow::Result<(f64, f64)> {
    let row = InARow::new()?;
    around(contender, &row, rules, || rate(options, &row))
}

/// What comes of a contender's turns.
#[derive(Default)]
struct Turns {
    arrived: Vec<f64>,
    offered: f64,
    /// Why it is left out.
    missing: Option<String>,
}

/// Every contender at every number of rules.
pub(super) fn firewalls(options: &BenchOptions, shown: &mut Shown) -> anyhow::Result<()> {
    let ours = [Contender::Express, Contender::Ring];
    let peers =
        [Contender::Iptables, Contender::Ipset, Contender::Nftables, Contender::OpenVSwitch];
    let all = [&ours[..], &peers[..]].concat();
    for rules in options.size(vec![1, 100, 1_000, 10_000], vec![1]) {
        let case = format!("firewall between veth pairs, 64 B, {rules} rules");
        let mut turns: Vec<Turns> = all.iter().map(|_| Turns::default()).collect();
        for turn in 0..options.turns() as usize {
            for step in 0..all.len() {
                let at = (step + turn) % all.len();
                if turns[at].missing.is_some() {
                    continue;
                }
                match measure(all[at], options, rules) {
                    Ok((arrived, sent)) => {
                        turns[at].arrived.push(arrived);
                        turns[at].offered = turns[at].offered.max(sent);
                    }
                    Err(error) => turns[at].missing = Some(format!("{error:#}")),
                }
            }
        }
        for (contender, of) in all.iter().zip(&turns) {
            if let Some(why) = &of.missing {
                shown.output.note(format!("skipped: {}: {why}", contender.name()));
            }
        }
        let (mine, theirs) = turns.split_at(ours.len());
        for (contender, mine) in ours.iter().zip(mine).filter(|(_, of)| of.missing.is_none()) {
            let row = || {
                Row::new(&case, contender.name(), "kpps", Better::Higher, &mine.arrived)
                    .beside("offered", format!("{:.0} kpps", mine.offered))
            };
            let there = peers.iter().zip(theirs).filter(|(_, of)| of.missing.is_none());
            let mut alone = true;
            for (peer, theirs) in there {
                alone = false;
                let row = row().against(peer.name(), &mine.arrived, &theirs.arrived);
                shown.row(Kind::Measured, &row)?;
            }
            if alone {
                shown.row(Kind::Measured, &row())?;
            }
        }
    }
    Ok(())
}

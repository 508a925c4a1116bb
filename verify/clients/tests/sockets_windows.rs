//! Unmodified programs of two hosts whose connections go through a memory window. The hosts are two
//! addresses of this one, each with a proxy and a name of its own; the window is a file.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::{Child, Stdio};
use std::time::Duration;

use beeline_verify_clients::hosts::{ADDRESSES as CABLE, Namespaces};
use beeline_verify_clients::preload::{Background, Monitor, Place, library};
use beeline_verify_clients::{bounded, eventually, free_port, need, note, program, root, said};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(60);
const ADDRESSES: [&str; 2] = ["127.78.1.2", "127.78.1.3"];

struct Proxy(Child);

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct Hosts {
    // Ended first.
    proxies: Vec<Proxy>,
    monitors: Vec<Monitor>,
    folder: tempfile::TempDir,
    places: [Place; 2],
    addresses: [&'static str; 2],
    ports: [u16; 2],
    /// Ended last.
    _namespaces: Option<Namespaces>,
}

impl Hosts {
    /// `more`: of each side's file, what stands before the peers and behind them.
    fn start(more: [[&str; 2]; 2]) -> Self {
        Self::start_over("", more)
    }

    /// `query`: more of the window's URL.
    fn start_over(query: &str, more: [[&str; 2]; 2]) -> Self {
        let ports = [free_port(), free_port()];
        let mut hosts = Self::without_proxies(Default::default(), ADDRESSES, ports, None);
        hosts.proxies = (0..2).map(|side| hosts.proxy(side, more[side], query)).collect();
        hosts
    }

    /// In network namespaces of their own, with a cable between them; `None` after saying that `test` is skipped.
    fn in_namespaces(test: &str) -> Option<Self> {
        let namespaces = Namespaces::make(test)?;
        let places = [0, 1].map(|side| namespaces.place(side));
        let mut hosts = Self::without_proxies(places, CABLE, [9090; 2], Some(namespaces));
        hosts.proxies = (0..2).map(|side| hosts.proxy(side, ["", ""], "")).collect();
        Some(hosts.up())
    }

    fn without_proxies(
        places: [Place; 2],
        addresses: [&'static str; 2],
        ports: [u16; 2],
        namespaces: Option<Namespaces>,
    ) -> Self {
        let monitors =
            places.iter().map(|place| Monitor::start_at(place.clone(), Vec::new())).collect();
        let folder = tempfile::tempdir().unwrap();
        let proxies = Vec::new();
        Self { proxies, monitors, folder, places, addresses, ports, _namespaces: namespaces }
    }

    /// What a proxy is told, and its process.
    fn proxy(&self, side: usize, more: [&str; 2], query: &str) -> Proxy {
        let other = 1 - side;
        let Self { addresses, ports, folder, .. } = self;
        let peers = folder.path().join(format!("peers-{side}.toml"));
        let text = format!(
            "addresses = [\"{}\"]\nlisten = \"{}:{}\"\n{}\n[[peers]]\nname = \"other\"\n\
             addresses = [\"{}\"]\nmonitor = \"{}:{}\"\n{}\n",
            addresses[side],
            addresses[side],
            ports[side],
            more[0],
            addresses[other],
            addresses[other],
            ports[other],
            more[1],
        );
        std::fs::write(&peers, text).unwrap();
        let file = folder.path().join("window");
        let window = format!("ntb://{}?side={side}&size=4194304{query}", file.display());
        let mut command = self.places[side].command(program());
        command.args(["sockets", "proxy", "--window", &window, "--peers"]).arg(&peers);
        command.env("BEELINE_SOCKETS_MONITOR", self.monitors[side].name()).stdin(Stdio::null());
        Proxy(command.spawn().unwrap())
    }

    fn both_up() -> Self {
        Self::start([["", ""], ["", ""]]).up()
    }

    /// Two partitions, behind write-combining buffers.
    fn two_partitions_in_disorder() -> Self {
        let two = ["partitions = 2", ""];
        Self::start_over("&disorder=7", [two, two]).up()
    }

    fn up(self) -> Self {
        for side in 0..2 {
            self.says(side, "link to other", "up");
        }
        self
    }

    fn value(&self, side: usize, row: &str) -> Option<String> {
        let status: Value = self.monitors[side].status()?;
        Some(status["proxy"][row].as_str()?.to_owned())
    }

    fn count(&self, side: usize, row: &str) -> u64 {
        self.value(side, row).and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    /// Waits until a row of the status begins so.
    fn says(&self, side: usize, row: &str, wanted: &str) {
        eventually(&format!("{row} = {wanted}"), PATIENCE, || {
            self.value(side, row)?.starts_with(wanted).then_some(())
        });
    }

    /// A counter of all partitions together.
    fn sum(&self, side: usize, row: &str) -> u64 {
        (0..2).map(|index| self.count(side, &format!("other, partition {index}: {row}"))).sum()
    }

    fn connections(&self, side: usize) -> u64 {
        self.count(side, "connections")
    }
}

fn script(mode: &str, host: &str, port: u16, more: &[&str]) -> Vec<String> {
    let path = root().join("verify/clients/python/sockets_windows.py");
    let port = port.to_string();
    let all = ["python3", &path.to_string_lossy(), mode, host, &port].map(str::to_owned);
    all.into_iter().chain(more.iter().map(|&word| word.to_owned())).collect()
}

/// Waits until something listens at `port` where the process runs.
fn listens(process: u32, port: u16) {
    eventually("a server that listens", PATIENCE, || {
        let text = std::fs::read_to_string(format!("/proc/{process}/net/tcp")).ok()?;
        text.contains(&format!(":{port:04X} 00000000:0000 0A")).then_some(())
    });
}

fn serve(hosts: &Hosts, accelerated: bool, port: u16, count: &str) -> Background {
    let words = script("serve", hosts.addresses[1], port, &[count]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let server = Background::start(&mut hosts.monitors[1].command(accelerated, &words));
    listens(server.process(), port);
    server
}

fn talk(hosts: &Hosts, accelerated: bool, port: u16) -> String {
    let words = script("talk", hosts.addresses[1], port, &[]);
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let output = bounded(&mut hosts.monitors[0].command(accelerated, &words), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_conversation_through_the_window_is_the_kernels_to_the_letter() {
    if need("a_conversation_through_the_window", "python3").is_none() {
        return;
    }
    let mut told = Vec::new();
    for hosts in [Hosts::both_up(), Hosts::two_partitions_in_disorder()] {
        for (server, client) in [(false, false), (true, true), (false, true), (true, false)] {
            let port = free_port();
            let before = hosts.sum(0, "bytes sent");
            let _server = serve(&hosts, server, port, "3");
            told.push(talk(&hosts, client, port));
            let moved = hosts.sum(0, "bytes sent") - before;
            // Through the window where both ends have the library, else by the kernel.
            assert_eq!(moved > 1 << 20, server && client, "{moved} bytes");
        }
        for side in 0..2 {
            assert_eq!(hosts.sum(side, "drops"), 0);
            eventually("no connection is left", PATIENCE, || {
                (hosts.connections(side) == 0).then_some(())
            });
        }
    }
    for other in &told[1..] {
        assert_eq!(*other, told[0]);
    }
    note(&format!("{} lines of one conversation, eight ways", told[0].lines().count()));
}

/// Accepts two connections once the file is there, and says what each was.
const LATE: &str = "import os, socket, sys, time
l = socket.socket()
l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
l.bind((sys.argv[1], int(sys.argv[2])))
l.listen()
while not os.path.exists(sys.argv[3]):
    time.sleep(0.01)
for _ in range(2):
    c, _ = l.accept()
    try:
        while True:
            data = c.recv(100)
            print(data, flush=True)
            if not data:
                break
    except OSError as error:
        print(type(error).__name__, flush=True)
";

/// Breaks one connection off before it was accepted, then makes a proper one.
const HASTY: &str = "import socket, struct, sys
def connect():
    return socket.create_connection((sys.argv[1], int(sys.argv[2])))
c = connect()
c.sendall(b'broken off')
c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
c.close()
c = connect()
c.sendall(b'whole')
c.close()
";

#[test]
fn a_connection_that_is_broken_off_in_the_backlog_is_accepted_as_the_kernels() {
    let test = "a_connection_that_is_broken_off_in_the_backlog";
    if need(test, "python3").is_none() {
        return;
    }
    let hosts = Hosts::both_up();
    let mut told = Vec::new();
    for accelerated in [false, true] {
        let port = free_port();
        let go = hosts.folder.path().join(format!("go-{accelerated}"));
        let (text, go) = (port.to_string(), go.display().to_string());
        let words = ["python3", "-c", LATE, ADDRESSES[1], &text, &go];
        let mut server = hosts.monitors[1].command(accelerated, &words);
        let server = server.stdout(Stdio::piped()).spawn().unwrap();
        listens(server.id(), port);
        let words = ["python3", "-c", HASTY, ADDRESSES[1], &text];
        let output = bounded(&mut hosts.monitors[0].command(accelerated, &words), PATIENCE);
        assert!(output.status.success(), "{}", said(&output));
        if accelerated {
            // Both are over at the first host; the second still waits to be accepted.
            eventually("the first is gone", PATIENCE, || (hosts.connections(1) == 1).then_some(()));
            assert_eq!(hosts.count(0, "connected"), 2);
        }
        std::fs::write(&go, "").unwrap();
        let output = server.wait_with_output().unwrap();
        assert!(output.status.success());
        told.push(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    assert_eq!(told[1], told[0]);
    assert!(told[0].contains("ConnectionResetError") && told[0].contains("whole"), "{}", told[0]);
    for side in 0..2 {
        eventually("no connection is left", PATIENCE, || {
            (hosts.connections(side) == 0).then_some(())
        });
    }
}

#[test]
fn hosts_of_their_own_talk_through_the_window_and_over_the_cable_while_there_is_none() {
    let test = "hosts_of_their_own_talk_through_the_window";
    if need(test, "python3").is_none() {
        return;
    }
    let Some(mut hosts) = Hosts::in_namespaces(test) else { return };
    let talked = |hosts: &Hosts| {
        let before = hosts.sum(0, "bytes sent");
        let _server = serve(hosts, true, 7000, "3");
        let told = talk(hosts, true, 7000);
        (told, hosts.sum(0, "bytes sent") - before > 1 << 20)
    };
    let (told, through_window) = talked(&hosts);
    assert!(through_window);
    // The other host's proxy goes: the kernel's connections, and the status says why.
    drop(hosts.proxies.remove(1));
    hosts.says(0, "link to other", "down: its monitor is gone");
    let (without, through_window) = talked(&hosts);
    assert_eq!(without, told);
    assert!(!through_window);
    assert_eq!(hosts.count(0, "left to the kernel: the link is down"), 3);
    assert_eq!(hosts.sum(0, "drops"), 0);
    // It comes back: the window again, by a proxy that the programs did not begin with.
    let fresh = hosts.proxy(1, ["", ""], "");
    hosts.proxies.push(fresh);
    hosts.says(0, "link to other", "up");
    let (again, through_window) = talked(&hosts);
    assert_eq!(again, told);
    assert!(through_window);
}

#[test]
fn a_program_of_the_explicit_interface_sends_and_receives_without_a_copy() {
    let test = "a_program_of_the_explicit_interface";
    if need(test, "cc").is_none() {
        return;
    }
    let hosts = Hosts::both_up();
    let program = hosts.folder.path().join("nts_sum");
    let folder = library().parent().unwrap();
    let mut compiler = std::process::Command::new("cc");
    compiler.args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-o"]).arg(&program);
    compiler.arg(root().join("examples/nts_sum.c"));
    compiler.arg("-I").arg(root().join("systems/sockets-preload/include"));
    compiler.arg("-L").arg(folder).arg("-lbeeline_sockets_preload");
    compiler.arg(format!("-Wl,-rpath,{}", folder.display()));
    let output = bounded(&mut compiler, PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    let port = free_port();
    let (text, program) = (port.to_string(), program.display().to_string());
    let words = [&program, "serve", ADDRESSES[1], &text];
    let mut server = hosts.monitors[1].command(true, &words);
    let server = server.stdout(Stdio::piped()).spawn().unwrap();
    listens(server.id(), port);
    let words = [&program, "send", ADDRESSES[1], &text, "1000000"];
    let output = bounded(&mut hosts.monitors[0].command(true, &words), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "sum 499999500000, copied 0\n");
    let output = server.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "copied 0\n");
    // One copy at each host, between blocks and window: two of each byte, where buffers cost four.
    let bytes = 8_000_000 + 8;
    for side in 0..2 {
        assert_eq!(hosts.sum(side, "bytes copied"), bytes);
    }
}

#[test]
fn redis_is_served_through_the_window_and_a_killed_client_leaves_nothing() {
    let test = "redis_is_served_through_the_window";
    if need(test, "redis-server").is_none() || need(test, "redis-benchmark").is_none() {
        return;
    }
    let hosts = Hosts::both_up();
    let port = free_port().to_string();
    let words = [
        "redis-server",
        "--port",
        &port,
        "--bind",
        ADDRESSES[1],
        "--save",
        "",
        "--protected-mode",
        "no",
    ];
    let _server = Background::start(&mut hosts.monitors[1].command(true, &words));
    let ask = |words: &[&str]| {
        let all = [&["redis-cli", "-h", ADDRESSES[1], "-p", &port], words].concat();
        bounded(&mut hosts.monitors[0].command(true, &all), PATIENCE)
    };
    eventually("redis-server", PATIENCE, || ask(&["ping"]).status.success().then_some(()));
    let load = [
        "redis-benchmark",
        "-h",
        ADDRESSES[1],
        "-p",
        &port,
        "-t",
        "set,get",
        "-n",
        "4000",
        "-c",
        "10",
        "-q",
    ];
    let output = bounded(&mut hosts.monitors[0].command(true, &load), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    assert!(hosts.count(1, "other, partition 0: packets sent") > 8000);
    let endless = [&load[..8], &["100000000", "-c", "5", "-q"]].concat();
    let mut client =
        hosts.monitors[0].command(true, &endless).stdout(Stdio::null()).spawn().unwrap();
    eventually("a load", PATIENCE, || (hosts.connections(1) >= 5).then_some(()));
    client.kill().unwrap();
    client.wait().unwrap();
    for side in 0..2 {
        eventually("no connection is left", PATIENCE, || {
            (hosts.connections(side) == 0).then_some(())
        });
    }
    assert!(ask(&["ping"]).status.success());
}

#[test]
fn a_proxy_that_is_killed_resets_its_connections_and_the_kernel_has_the_next_ones() {
    if need("a_proxy_that_is_killed", "python3").is_none() {
        return;
    }
    let mut hosts = Hosts::both_up();
    let port = free_port();
    let _server = serve(&hosts, true, port, "100");
    let hold = format!(
        "import socket\nc = socket.create_connection(('{}', {port}))\nc.sendall(b'x'); c.recv(1)\n\
         print('held', flush=True)\ntry:\n    print('end', c.recv(1))\nexcept OSError as e:\n    print('reset')\n\
         d = socket.create_connection(('{}', {port}))\nd.sendall(b'y'); print(d.recv(1))",
        ADDRESSES[1], ADDRESSES[1],
    );
    let mut command = hosts.monitors[0].command(true, &["python3", "-c", &hold]);
    let client = command.stdout(Stdio::piped()).spawn().unwrap();
    eventually("a connection", PATIENCE, || (hosts.connections(0) == 1).then_some(()));
    std::thread::sleep(Duration::from_millis(200));
    drop(hosts.proxies.remove(0));
    let output = client.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "held\nreset\nb'y'\n");
    hosts.says(1, "link to other", "down");
    eventually("no connection is left", PATIENCE, || (hosts.connections(1) == 0).then_some(()));
}

#[test]
fn two_ends_that_differ_refuse_each_other_by_name_and_rules_deny() {
    if need("two_ends_that_differ", "python3").is_none() {
        return;
    }
    let hosts = Hosts::start([["slot_bytes = 1024", ""], ["slot_bytes = 2048", ""]]);
    for (side, words) in [
        (0, "down: the other end has bytes of a slot 2048, this one 1024"),
        (1, "down: the other end has bytes of a slot 1024"),
    ] {
        hosts.says(side, "link to other", words);
    }
    drop(hosts);
    let port = free_port();
    let rule = format!("[[rules]]\nport = {port}\nallow = false");
    for denier in 0..2 {
        let mut more = [["", ""], ["", ""]];
        more[denier][1] = &rule;
        let hosts = Hosts::start(more);
        hosts.says(0, "link to other", "up");
        let _server = serve(&hosts, true, port, "1");
        let code = format!(
            "import socket\ntry:\n    socket.create_connection(('{}', {port}))\nexcept OSError as e:\n    print(type(e).__name__)",
            ADDRESSES[1]
        );
        let output =
            bounded(&mut hosts.monitors[0].command(true, &["python3", "-c", &code]), PATIENCE);
        let expected = ["PermissionError", "ConnectionRefusedError"][denier];
        assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), expected, "{}", said(&output));
        let _ = &hosts.folder;
    }
}

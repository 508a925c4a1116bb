//! Unmodified programs of two hosts whose connections go through a memory window. The hosts are two
//! addresses of this one, each with a proxy and a name of its own; the window is a file.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Stdio;
use std::time::Duration;

use beeline_verify_clients::preload::{Background, library};
use beeline_verify_clients::windows::{ADDRESSES, Hosts, listens};
use beeline_verify_clients::{bounded, ended, eventually, free_port, need, note, root, said};

const PATIENCE: Duration = Duration::from_secs(60);

fn script(mode: &str, host: &str, port: u16, more: &[&str]) -> Vec<String> {
    let path = root().join("verify/clients/python/sockets_windows.py");
    let port = port.to_string();
    let all = ["python3", &path.to_string_lossy(), mode, host, &port].map(str::to_owned);
    all.into_iter().chain(more.iter().map(|&word| word.to_owned())).collect()
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
    for hosts in [Hosts::both_up(), Hosts::two_partitions_in_disorder(), Hosts::two_threads()] {
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
    note(&format!("{} lines of one conversation, twelve ways", told[0].lines().count()));
}

#[test]
fn a_connection_within_a_host_posts_no_byte_to_the_window() {
    if need("a_connection_within_a_host", "python3").is_none() {
        return;
    }
    let hosts = Hosts::both_up();
    // Bytes of packets: words in which a link shows that it lives are posted all the while.
    let posted =
        || hosts.value(0, "other: bytes posted to the window").expect("a row of the status");
    let (own, port) = (hosts.addresses[0], free_port());
    let before = posted();
    let command = |mode: &str, more: &[&str]| {
        let words = script(mode, own, port, more);
        hosts.monitors[0].command(true, &words.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let server = Background::start(&mut command("serve", &["3"]));
    listens(server.process(), port);
    let output = bounded(&mut command("talk", &[]), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(posted(), before);
    assert_eq!(hosts.sum(0, "packets sent"), 0);
    // The same between the hosts does post.
    let port = free_port();
    let _server = serve(&hosts, true, port, "3");
    talk(&hosts, true, port);
    assert_ne!(posted(), before);
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
    let Some(mut hosts) = Hosts::in_namespaces(test, ["", ""]) else { return };
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
    // Direct: the client writes the server's host's memory itself, and no proxy copies but the answer.
    let words = [&program, "serve", ADDRESSES[1], &text];
    let mut server = hosts.monitors[1].command(true, &words);
    let server = server.stdout(Stdio::piped()).spawn().unwrap();
    listens(server.id(), port);
    let words = [&program, "direct", ADDRESSES[1], &text, "1000000"];
    let output = bounded(&mut hosts.monitors[0].command(true, &words), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "sum 499999500000, copied 0\n");
    let output = server.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "copied 0\n");
    for side in 0..2 {
        assert_eq!(hosts.sum(side, "bytes copied"), bytes + 8);
    }
    assert_eq!(hosts.count(1, "extents given to other hosts"), 1);
}

#[test]
fn an_extent_beyond_the_quota_is_refused_and_others_are_still_given() {
    let test = "an_extent_beyond_the_quota";
    if need(test, "python3").is_none() {
        return;
    }
    let tight = ["extents_of_a_process = 300000", ""];
    let hosts = Hosts::start([tight, ["extents_of_this_host = 500000", ""]]).up();
    let port = free_port();
    let text = port.to_string();
    let words = ["python3", "-c", ECHO, ADDRESSES[1], &text, "9"];
    let _server = Background::start(&mut hosts.monitors[1].command(true, &words));
    listens(_server.process(), port);
    // What stands in an extent comes by `recv`, too; ends are told apart by what they answer.
    let code = "import ctypes, errno, socket, sys
library = ctypes.CDLL(None, use_errno=True)
class Block(ctypes.Structure):
    _fields_ = [('bytes', ctypes.c_void_p), ('length', ctypes.c_size_t), ('number', ctypes.c_uint32)]
def connect():
    return socket.create_connection((sys.argv[1], int(sys.argv[2])))
def ask(c, size):
    if library.nts_extent(c.fileno(), ctypes.c_size_t(size)) == 0:
        return 'given'
    return errno.errorcode[ctypes.get_errno()]
a, b, c = connect(), connect(), connect()
print(ask(a, 400000), ask(a, 200000), ask(a, 4096), ask(b, 200000), ask(c, 4096), flush=True)
block = Block()
for word in [b'x' * 60000, b'y' * 60000, b'z' * 60000, b'w' * 60000]:
    while library.nts_extent_room(a.fileno(), ctypes.c_size_t(60000), ctypes.byref(block)) != 1:
        pass
    ctypes.memmove(block.bytes, word, 60000)
    assert library.nts_extent_send(a.fileno(), ctypes.c_size_t(60000)) == 0
    a.sendall(b'-between-')
    want, got = word + b'-between-', b''
    while len(got) < len(want):
        got += a.recv(100000)
    assert got == want
print('whole')
if len(sys.argv) > 3:
    sys.stdin.read()
";
    let words = ["python3", "-c", code, ADDRESSES[1], &text];
    let mut first = hosts.monitors[0].command(true, &[&words[..], &["stay"]].concat());
    let mut first =
        first.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("two extents", PATIENCE, || {
        (hosts.count(1, "extents given to other hosts") == 2).then_some(())
    });
    // Another process has a quota of its own, and the other host has room for one more of this size.
    let output = bounded(&mut hosts.monitors[0].command(true, &words), PATIENCE);
    let second = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(second, "ENOBUFS given EEXIST ENOBUFS given\nwhole\n", "{}", said(&output));
    drop(first.stdin.take());
    let output = first.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text, "ENOBUFS given EEXIST ENOBUFS given\nwhole\n", "{}", said(&output));
    // What was given is free again once the connections are over.
    for side in 0..2 {
        eventually("no connection is left", PATIENCE, || {
            (hosts.connections(side) == 0).then_some(())
        });
    }
    let output = bounded(&mut hosts.monitors[0].command(true, &words), PATIENCE);
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("whole\n"), "{}", said(&output));
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

/// Echoes what comes on each of the connections, at its own pace, until each ends.
const ECHO: &str = "import socket, sys, threading
l = socket.socket()
l.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
l.bind((sys.argv[1], int(sys.argv[2])))
l.listen()
def echo(c):
    while data := c.recv(50000):
        c.sendall(data)
    c.shutdown(socket.SHUT_WR)
    c.close()
threads = []
for _ in range(int(sys.argv[3])):
    c, _ = l.accept()
    threads.append(threading.Thread(target=echo, args=(c,)))
    threads[-1].start()
for thread in threads:
    thread.join()
print('echoed', flush=True)
";

/// Sends and looks at every byte that comes back, on several connections at once, until the file is there. Makes
/// another file once bytes came back on each. Ends at once where a connection breaks.
const LOOK: &str = "import os, socket, sys, threading, traceback
def pattern(at, count):
    block = bytes((i * 131 + (i >> 8)) & 255 for i in range(65536)) * 2
    out = bytearray()
    while count:
        start = at % 65536
        part = min(count, 65536)
        out += block[start:start + part]
        at += part
        count -= part
    return bytes(out)
def broken(args):
    traceback.print_exception(args.exc_type, args.exc_value, args.exc_traceback)
    sys.stderr.flush()
    os._exit(1)
threading.excepthook = broken
count = int(sys.argv[3])
flowing = threading.Barrier(count, action=lambda: open(sys.argv[5], 'w').close())
def one(size, results):
    c = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    sent, got = [0], 0
    def send():
        while not os.path.exists(sys.argv[4]):
            c.sendall(pattern(sent[0], size))
            sent[0] += size
        c.shutdown(socket.SHUT_WR)
    sender = threading.Thread(target=send)
    sender.start()
    while data := c.recv(70000):
        assert data == pattern(got, len(data)), (size, got)
        if got == 0:
            flowing.wait()
        got += len(data)
    sender.join()
    assert got == sent[0], (got, sent[0])
    results.append(got)
results, threads = [], []
for size in [7, 3000, 100000][:count]:
    threads.append(threading.Thread(target=one, args=(size, results)))
    threads[-1].start()
for thread in threads:
    thread.join()
print(len(results), sum(results))
";

fn kill(process: i32) {
    let mut command = std::process::Command::new("kill");
    assert!(command.args(["-KILL", &process.to_string()]).status().unwrap().success());
}

#[test]
fn proxies_killed_under_load_are_replaced_and_every_byte_is_there() {
    let test = "proxies_killed_under_load";
    if need(test, "python3").is_none() {
        return;
    }
    // A connection that is between two partitions when a proxy dies is lost: nothing moves here.
    let two = ["partitions = 2\nbalance = false\ngrace_seconds = 60", ""];
    let hosts = Hosts::start([two, two]).up();
    let port = free_port();
    let (text, stop) = (port.to_string(), hosts.folder.path().join("stop"));
    let stop_text = stop.display().to_string();
    let flowing = hosts.folder.path().join("flowing");
    let flowing_text = flowing.display().to_string();
    let words = ["python3", "-c", ECHO, ADDRESSES[1], &text, "3"];
    let mut server = hosts.monitors[1].command(true, &words);
    let server = server.stdout(Stdio::piped()).spawn().unwrap();
    listens(server.id(), port);
    let words = ["python3", "-c", LOOK, ADDRESSES[1], &text, "3", &stop_text, &flowing_text];
    let mut client = hosts.monitors[0].command(true, &words);
    // What breaks it is seen at once.
    let client = client.stdout(Stdio::piped()).spawn().unwrap();
    // A proxy that dies while a connection is being made leaves it to the kernel: all of them are made by now.
    eventually("bytes on three connections", PATIENCE, || flowing.exists().then_some(()));
    assert_eq!([hosts.connections(0), hosts.connections(1)], [3, 3]);
    let mut moved = 0;
    for (turn, side) in [0, 1, 1, 0].into_iter().enumerate() {
        // Bytes flow again before the next one dies.
        eventually("bytes after a death", PATIENCE, || {
            let now = hosts.sum(side, "bytes received");
            (now != std::mem::replace(&mut moved, now) && now > 0).then_some(())
        });
        let worker = hosts.worker(side);
        kill(worker);
        eventually("another proxy", PATIENCE, || {
            let value = hosts.value(side, "proxy's process")?;
            (value != worker.to_string()).then_some(())
        });
        hosts.says(0, "link to other", "up");
        let adopted = hosts.count(side, "taken over from a proxy that died");
        assert_eq!(adopted, 3, "death {turn}, of side {side}");
    }
    eventually("bytes in the end", PATIENCE, || {
        let now = hosts.sum(0, "bytes received");
        (now != std::mem::replace(&mut moved, now) && now > 0).then_some(())
    });
    std::fs::write(&stop, "").unwrap();
    let output = ended(client, "the client", PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    let output_text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output_text.starts_with("3 "), "{output_text}");
    note(&format!("four proxies killed; connections and bytes echoed: {}", output_text.trim()));
    let output = ended(server, "the server", PATIENCE);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "echoed\n");
    for side in 0..2 {
        assert_eq!(hosts.sum(side, "drops"), 0);
        eventually("no connection is left", PATIENCE, || {
            (hosts.connections(side) == 0).then_some(())
        });
    }
    // Programs that listened before are found by the proxy that came later.
    let port = free_port();
    let told = hosts.count(1, "listening sockets told of");
    // The server tells the proxy of its socket about now: either it was told and is kept, or it is told again.
    let _server = serve(&hosts, true, port, "100");
    let worker = hosts.worker(1);
    kill(worker);
    eventually("another proxy that knows of the socket", PATIENCE, || {
        let value = hosts.value(1, "proxy's process")?;
        let knows = hosts.count(1, "listening sockets told of") > told;
        (value != worker.to_string() && knows).then_some(())
    });
    hosts.says(0, "link to other", "up");
    hosts.says(1, "link to other", "up");
    let before = hosts.sum(0, "bytes sent");
    let _ = talk(&hosts, true, port);
    let moved = hosts.sum(0, "bytes sent") - before;
    let statuses = hosts.monitors.iter().map(|monitor| monitor.status());
    let statuses: Vec<_> = statuses.map(|status| status.unwrap()["proxy"].to_string()).collect();
    assert!(moved > 1 << 20, "the next connections go through it: {moved} bytes, {statuses:?}");
}

#[test]
fn quotas_of_bandwidth_memory_and_connections_bound_what_a_partition_and_a_process_have() {
    let test = "quotas_of_bandwidth_memory_and_connections";
    if need(test, "python3").is_none() {
        return;
    }
    // Two connections of 2.1 MB each fit; the limit is far below what the window carries.
    let limited = ["bytes_a_second = 4000000\nmemory_of_a_process = 4500000", ""];
    let hosts = Hosts::start([limited, ["", ""]]).up();
    let port = free_port();
    let text = port.to_string();
    let words = ["python3", "-c", ECHO, ADDRESSES[1], &text, "3"];
    let _server = Background::start(&mut hosts.monitors[1].command(true, &words));
    listens(_server.process(), port);
    let code = "import socket, sys
all = [socket.create_connection((sys.argv[1], int(sys.argv[2]))) for _ in range(3)]
got = 0
all[0].settimeout(50)
import threading
t = threading.Thread(target=lambda: all[0].sendall(b'x' * 6000000))
t.start()
while got < 6000000:
    got += len(all[0].recv(100000))
for c in all[1:]:
    c.sendall(b'y')
    assert c.recv(1) == b'y'
print('whole')
";
    let words = ["python3", "-c", code, ADDRESSES[1], &text];
    let output = bounded(&mut hosts.monitors[0].command(true, &words), PATIENCE);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "whole\n", "{}", said(&output));
    // The third is the kernel's, and the status says why; the first was slowed and lost nothing.
    assert_eq!(hosts.count(0, "left to the kernel: the memory of the process is used up"), 1);
    assert_eq!(hosts.count(0, "connected"), 2);
    assert!(hosts.sum(0, "rounds ended by the limit") > 0);
    assert_eq!(hosts.sum(1, "rounds ended by the limit"), 0);
    assert_eq!(hosts.sum(0, "bytes sent"), 6_000_001);
    drop((_server, hosts));
    // A partition of the accepting host that takes one connection: the others are the kernel's, until that one is over.
    let hosts = Hosts::start([["", ""], ["connections_per_partition = 1", ""]]).up();
    let words = ["python3", "-c", ECHO, ADDRESSES[1], &text, "4"];
    let _server = Background::start(&mut hosts.monitors[1].command(true, &words));
    listens(_server.process(), port);
    let code = "import socket, sys
def talk():
    c = socket.create_connection((sys.argv[1], int(sys.argv[2])))
    c.sendall(b'y')
    assert c.recv(1) == b'y'
    return c
all = [talk(), talk(), talk()]
print('spoken')
";
    let words = ["python3", "-c", code, ADDRESSES[1], &text];
    let output = bounded(&mut hosts.monitors[0].command(true, &words), PATIENCE);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "spoken\n", "{}", said(&output));
    assert_eq!(hosts.count(0, "connected"), 1);
    assert_eq!(hosts.count(0, "left to the kernel: no room, or no answer in time"), 2);
    assert_eq!(hosts.count(1, "refused to other hosts"), 2);
    eventually("the connection is over", PATIENCE, || (hosts.connections(1) == 0).then_some(()));
    let words =
        ["python3", "-c", &code.replace("[talk(), talk(), talk()]", "talk()"), ADDRESSES[1], &text];
    let output = bounded(&mut hosts.monitors[0].command(true, &words), PATIENCE);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "spoken\n", "{}", said(&output));
    assert_eq!(hosts.count(0, "connected"), 2);
}

#[test]
fn a_proxy_that_is_killed_resets_its_connections_and_the_kernel_has_the_next_ones() {
    if need("a_proxy_that_is_killed", "python3").is_none() {
        return;
    }
    // With its keeper; what is left waits for neither for long.
    let short = ["grace_seconds = 1", ""];
    let mut hosts = Hosts::start([short, short]).up();
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

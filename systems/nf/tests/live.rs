//! A graph between two veth pairs in this host, with a signal while packets flow.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "common/veth.rs"]
mod veth;

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_nf::functions::templates;
use beeline_nf::live::{SPIN, Surroundings, ask, command, run};
use beeline_nf::load::{compile, load};
use beeline_nf::packet_socket::Device;
use beeline_nf::sides::{LinkOptions, native};
use veth::{AtEnd, Veth};

#[test]
fn packets_pass_between_interfaces_and_a_signal_reads_the_count() {
    let id = std::process::id() % 100_000;
    let (Some(a), Some(b)) = (Veth::new(&format!("nfa{id}")), Veth::new(&format!("nfb{id}")))
    else {
        println!("skipped: this user cannot make veth devices");
        return;
    };
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/counter.np");
    let loaded = load(&path).unwrap();
    let graph = &loaded.compiled.graph;
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let ports = [("in".to_owned(), a.0.clone()), ("out".to_owned(), b.0.clone())];
    let stop = AtomicBool::new(false);
    let notify = |text: &str| println!("{text}");
    let around = Surroundings {
        control: Some(&control),
        commands: &[],
        notify: &notify,
        stop: &stop,
        link: LinkOptions::default(),
        spin: SPIN,
        load: None,
    };
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(graph, &native, &ports, around).unwrap());
        let _ends = AtEnd(|| stop.store(true, Ordering::Relaxed));
        let deadline = Instant::now() + Duration::from_secs(30);
        while !control.exists() {
            assert!(Instant::now() < deadline, "the graph did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut near = Device::interface(&format!("{}p", a.0)).unwrap();
        let mut far = Device::interface(&format!("{}p", b.0)).unwrap();
        // An address of our own, so that what the host itself sends is told apart.
        let packet = |at: u8| {
            let mut bytes = vec![at; 60 + usize::from(at)];
            bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 0x88, 0xb5]);
            bytes
        };
        for at in 0..100 {
            while !near.send(&packet(at)).unwrap() {}
        }
        let mut got = Vec::new();
        let mut buffer = vec![0; 65_536];
        while got.len() < 100 {
            assert!(Instant::now() < deadline, "{} of 100 packets", got.len());
            match far.receive(&mut buffer).unwrap() {
                Some(count) if buffer[12..14] == [0x88, 0xb5] => got.push(buffer[..count].to_vec()),
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
        assert_eq!(got, (0..100).map(packet).collect::<Vec<_>>());
        let answer = ask(&control, [1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert!(answer[1] >= 100, "{answer:?}");
        assert!(ask(&control, [9, 0, 0, 0, 0, 0, 0, 0]).is_err());
        stop.store(true, Ordering::Relaxed);
        let passed = runner.join().unwrap();
        assert!(passed.sent >= 100 && passed.signals == 1, "{passed:?}");
    });
}

/// Numbers of the packets of ours that arrive until `wanted` of them have.
fn collect(device: &mut Device, wanted: usize, deadline: Instant) -> Vec<u16> {
    let mut got = Vec::new();
    let mut buffer = vec![0; 65_536];
    while got.len() < wanted {
        assert!(Instant::now() < deadline, "{} of {wanted} packets", got.len());
        match device.receive(&mut buffer).unwrap() {
            Some(62) if buffer[..6] == [2, 0, 0, 0, 0, 9] => {
                got.push(u16::from_be_bytes([buffer[60], buffer[61]]));
            }
            Some(_) => {}
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    got
}

#[test]
fn rules_change_while_packets_flow_and_an_interface_that_disappears_is_named() {
    let id = std::process::id() % 100_000;
    let (Some(a), Some(b)) = (Veth::new(&format!("nfc{id}")), Veth::new(&format!("nfd{id}")))
    else {
        println!("skipped: this user cannot make veth devices");
        return;
    };
    let text = templates::text("firewall").unwrap().to_owned();
    let loaded = compile("firewall.np", text, None);
    let graph = &loaded.compiled.graph;
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let ports = [("from_tor".to_owned(), a.0.clone()), ("to_tor".to_owned(), b.0.clone())];
    let stop = AtomicBool::new(false);
    let packet = |number: u16, port: u16| {
        let mut bytes = vec![0; 62];
        bytes[..15].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 8, 0, 0x45]);
        bytes[17] = 48;
        bytes[22..24].copy_from_slice(&[64, 6]);
        bytes[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
        bytes[36..38].copy_from_slice(&port.to_be_bytes());
        bytes[60..62].copy_from_slice(&number.to_be_bytes());
        bytes
    };
    let before = ["rules add icmp any -> any drop".to_owned()];
    let heard = Mutex::new(Vec::new());
    let notify = |text: &str| heard.lock().unwrap().push(text.to_owned());
    let around = Surroundings {
        control: Some(&control),
        commands: &before,
        notify: &notify,
        stop: &stop,
        link: LinkOptions::default(),
        spin: SPIN,
        load: None,
    };
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(graph, &native, &ports, around));
        let _ends = AtEnd(|| stop.store(true, Ordering::Relaxed));
        let deadline = Instant::now() + Duration::from_secs(120);
        while !control.exists() {
            assert!(Instant::now() < deadline && !runner.is_finished(), "the graph did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut near = Device::interface(&format!("{}p", a.0)).unwrap();
        let mut far = Device::interface(&format!("{}p", b.0)).unwrap();
        let mut send = |number: u16, port: u16| while !near.send(&packet(number, port)).unwrap() {};
        send(1, 443);
        assert_eq!(collect(&mut far, 1, deadline), [1]);
        let said = command(&control, "rules add tcp 10.0.0.0/8 -> any :443 drop").unwrap();
        assert_eq!(said, Ok("rule 1: tcp 10.0.0.0/8 -> any :443 drop".to_owned()));
        for number in 2..100 {
            send(number, if number % 2 == 0 { 443 } else { 80 });
        }
        let odd: Vec<u16> = (2..100).filter(|number| number % 2 == 1).collect();
        assert_eq!(collect(&mut far, odd.len(), deadline), odd);
        assert!(command(&control, "rules list").unwrap().unwrap().contains("(49 packets)"));
        let text = command(&control, beeline_nf::statistics::COMMAND).unwrap().unwrap();
        let counted: beeline_nf::statistics::Statistics = serde_json::from_str(&text).unwrap();
        let gate = counted.channels.iter().find(|c| c.channel == "gate->to_tor").unwrap();
        assert!(gate.items >= 100 && gate.waiting == 0, "{text}");
        assert!(counted.ports.received >= 99 && counted.elements.len() == 8, "{text}");
        assert!(counted.elements.iter().all(|element| element.iterations >= 100), "{text}");
        let refused = command(&control, "rules add nonsense").unwrap().unwrap_err();
        assert!(refused.contains("no ->"), "{refused}");
        // Without its input the function still answers, and goes on when the interface is back.
        let name = a.0.clone();
        drop(a);
        let hears = |part: &str| {
            while !heard.lock().unwrap().iter().any(|text| text.contains(part)) {
                assert!(Instant::now() < deadline && !runner.is_finished(), "no word: {part}");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        hears(&format!("{name} has disappeared"));
        assert!(command(&control, "rules counters").unwrap().is_ok());
        let _again = Veth::new(&name).unwrap();
        hears(&format!("{name} is back"));
        let mut near = Device::interface(&format!("{name}p")).unwrap();
        while !near.send(&packet(500, 80)).unwrap() {}
        assert_eq!(collect(&mut far, 1, deadline), [500]);
        stop.store(true, Ordering::Relaxed);
        runner.join().unwrap().unwrap();
    });
}

#[test]
fn packets_longer_than_a_frame_of_the_ring_and_tagged_ones_pass_whole() {
    let id = std::process::id() % 100_000;
    let (Some(a), Some(b)) = (Veth::new(&format!("nfh{id}")), Veth::new(&format!("nfi{id}")))
    else {
        println!("skipped: this user cannot make veth devices");
        return;
    };
    for veth in [&a, &b] {
        for end in [veth.0.clone(), format!("{}p", veth.0)] {
            let words = ["link", "set", &end, "mtu", "9000"];
            assert!(std::process::Command::new("ip").args(words).status().unwrap().success());
        }
    }
    let loaded =
        compile("test.np", ".input in\n.output out\nCount :: c @\nin -> c -> out\n".into(), None);
    let graph = &loaded.compiled.graph;
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let ports = [("in".to_owned(), a.0.clone()), ("out".to_owned(), b.0.clone())];
    let stop = AtomicBool::new(false);
    let notify = |text: &str| println!("{text}");
    let around = Surroundings {
        control: Some(&control),
        commands: &[],
        notify: &notify,
        stop: &stop,
        link: LinkOptions::default(),
        spin: SPIN,
        load: None,
    };
    // Plain and tagged, around the length of a frame, and far past it.
    let packet = |length: usize, tag: bool| {
        let mut bytes: Vec<u8> = (0..length).map(|at| at.to_le_bytes()[0]).collect();
        bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 0x88, 0xb5]);
        if tag {
            bytes[12..18].copy_from_slice(&[0x81, 0, 0, 5, 0x88, 0xb5]);
        }
        bytes
    };
    let lengths = (1_960..2_060).step_by(7).chain([60, 1_514, 4_000, 9_000]);
    let wanted: Vec<Vec<u8>> =
        lengths.flat_map(|length| [packet(length, false), packet(length, true)]).collect();
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(graph, &native, &ports, around));
        let _ends = AtEnd(|| stop.store(true, Ordering::Relaxed));
        let deadline = Instant::now() + Duration::from_secs(60);
        while !control.exists() {
            assert!(Instant::now() < deadline && !runner.is_finished(), "the graph did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut near = Device::interface(&format!("{}p", a.0)).unwrap();
        let mut far = Device::ringed(&format!("{}p", b.0)).unwrap();
        let (mut got, mut bytes) = (Vec::new(), Vec::new());
        for packet in &wanted {
            while !near.send(packet).unwrap() {}
            let before = got.len();
            while got.len() == before {
                assert!(Instant::now() < deadline, "{} of {} packets", got.len(), wanted.len());
                match far.take(&mut bytes).unwrap() {
                    true if bytes[..6] == [2, 0, 0, 0, 0, 9] => got.push(bytes.clone()),
                    true => {}
                    false => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        }
        let lengths = |list: &[Vec<u8>]| list.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(lengths(&got), lengths(&wanted));
        assert!(got == wanted);
        stop.store(true, Ordering::Relaxed);
        assert_eq!(runner.join().unwrap().unwrap().missed, 0);
    });
}

#[test]
fn packets_pass_by_af_xdp_in_order_and_an_interface_made_anew_goes_on() {
    let id = std::process::id() % 100_000;
    let (Some(a), Some(b)) = (Veth::new(&format!("nfx{id}")), Veth::new(&format!("nfy{id}")))
    else {
        println!("skipped: this user cannot make veth devices");
        return;
    };
    if let Err(error) = Device::express(&a.0, None) {
        println!("skipped: {error}");
        return;
    }
    let text = ".input in\n.output out\nCount :: c @\nin -> c -> out\n".to_owned();
    let loaded = compile("test.np", text, None);
    let graph = &loaded.compiled.graph;
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let ports = [("in", &a.0), ("out", &b.0)];
    let ports = ports.map(|(port, name)| (port.to_owned(), format!("xdp:{name}")));
    let stop = AtomicBool::new(false);
    let heard = Mutex::new(Vec::new());
    let notify = |text: &str| heard.lock().unwrap().push(text.to_owned());
    let around = Surroundings {
        control: Some(&control),
        commands: &[],
        notify: &notify,
        stop: &stop,
        link: LinkOptions::default(),
        spin: SPIN,
        load: None,
    };
    let packet = |number: u16| {
        let mut bytes = vec![0; 62];
        bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 0x88, 0xb5]);
        bytes[60..62].copy_from_slice(&number.to_be_bytes());
        bytes
    };
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(graph, &native, &ports, around));
        let _ends = AtEnd(|| stop.store(true, Ordering::Relaxed));
        let deadline = Instant::now() + Duration::from_secs(120);
        while !control.exists() {
            assert!(Instant::now() < deadline && !runner.is_finished(), "the graph did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        let hears = |part: &str| {
            while !heard.lock().unwrap().iter().any(|text| text.contains(part)) {
                assert!(Instant::now() < deadline && !runner.is_finished(), "no word: {part}");
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        hears("AF_XDP");
        let mut near = Device::interface(&format!("{}p", a.0)).unwrap();
        let mut far = Device::interface(&format!("{}p", b.0)).unwrap();
        // More than the rings and the frames for sending hold, in pieces that each of them holds.
        let numbers: Vec<u16> = (0..20_000).collect();
        for piece in numbers.chunks(100) {
            for number in piece {
                while !near.send(&packet(*number)).unwrap() {}
            }
            assert_eq!(collect(&mut far, piece.len(), deadline), piece);
        }
        // What the interface takes, and the kernel's network stack does not see.
        let mut beside = Device::interface(&a.0).unwrap();
        while !near.send(&packet(7)).unwrap() {}
        assert_eq!(collect(&mut far, 1, deadline), [7]);
        let mut buffer = vec![0; 65_536];
        while let Some(count) = beside.receive(&mut buffer).unwrap() {
            assert!(count != 62 || buffer[..6] != [2, 0, 0, 0, 0, 9], "the kernel saw it, too");
        }
        let name = a.0.clone();
        drop(a);
        hears(&format!("{name} has disappeared"));
        let _again = Veth::new(&name).unwrap();
        hears(&format!("{name} is back"));
        let mut near = Device::interface(&format!("{name}p")).unwrap();
        while !near.send(&packet(500)).unwrap() {}
        assert_eq!(collect(&mut far, 1, deadline), [500]);
        let answer = ask(&control, [1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert!(answer[1] >= 20_002, "{answer:?}");
        stop.store(true, Ordering::Relaxed);
        let passed = runner.join().unwrap().unwrap();
        assert!(passed.sent >= 20_002 && passed.missed == 0, "{passed:?}");
    });
    // The program goes with the run.
    let shown = std::process::Command::new("ip").args(["link", "show", &b.0]).output().unwrap();
    assert!(!String::from_utf8_lossy(&shown.stdout).contains("xdp"), "{shown:?}");
}

/// A name space with one end of a veth pair in it, which has an address; they go with the value.
struct Apart {
    space: String,
    _veth: Veth,
}

impl Apart {
    /// None where this user cannot make one.
    fn new(veth: Veth, number: u8) -> Option<Self> {
        let (space, end) = (veth.0.clone(), format!("{}p", veth.0));
        let ip = |words: &str| {
            let mut command = std::process::Command::new("ip");
            let done = command.args(words.split(' ')).output().ok()?;
            done.status.success().then_some(())
        };
        ip(&format!("netns add {space}"))?;
        let apart = Self { space: space.clone(), _veth: veth };
        ip(&format!("link set {end} netns {space}"))?;
        ip(&format!("-n {space} address add 10.77.0.{number}/24 dev {end}"))?;
        ip(&format!("-n {space} link set {end} up"))?;
        Some(apart)
    }

    /// Moves the calling thread there.
    fn enter(&self) {
        let file = std::fs::File::open(format!("/run/netns/{}", self.space)).unwrap();
        let network = Some(rustix::thread::LinkNameSpaceType::Network);
        rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&file), network)
            .unwrap();
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        let _ = std::process::Command::new("ip").args(["netns", "del", &self.space]).output();
    }
}

#[test]
fn a_connection_of_this_host_passes_though_its_stack_left_checksums_and_cuts_to_the_device() {
    use std::io::{Read as _, Write as _};
    let id = std::process::id() % 100_000;
    let pair = |letter| Veth::new(&format!("nf{letter}{id}"));
    let (Some(a), Some(b)) = (pair('s'), pair('t')) else {
        println!("skipped: this user cannot make veth devices");
        return;
    };
    let names = (a.0.clone(), b.0.clone());
    let (Some(a), Some(b)) = (Apart::new(a, 1), Apart::new(b, 2)) else {
        println!("skipped: this user cannot make network namespaces");
        return;
    };
    let (a, b) = (&a, &b);
    let text = ".input a1\n.output a2\n.input b1\n.output b2\nCount :: there @\nCount :: back @\n\
                a1 -> there -> b2\nb1 -> back -> a2\n";
    let loaded = compile("test.np", text.to_owned(), None);
    let graph = &loaded.compiled.graph;
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let ports = [("a1", &names.0), ("a2", &names.0), ("b1", &names.1), ("b2", &names.1)];
    let ports = ports.map(|(port, name)| (port.to_owned(), name.clone()));
    let stop = AtomicBool::new(false);
    let notify = |text: &str| println!("{text}");
    let around = Surroundings {
        control: Some(&control),
        commands: &[],
        notify: &notify,
        stop: &stop,
        link: LinkOptions::default(),
        spin: SPIN,
        load: None,
    };
    const LIMIT: Option<Duration> = Some(Duration::from_secs(60));
    let sent: Vec<u8> = (0..4_000_000_u32).map(|at| (at >> 8).to_le_bytes()[0]).collect();
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(graph, &native, &ports, around));
        let _ends = AtEnd(|| stop.store(true, Ordering::Relaxed));
        let deadline = Instant::now() + Duration::from_secs(60);
        while !control.exists() {
            assert!(Instant::now() < deadline && !runner.is_finished(), "the graph did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        let (ready, listening) = std::sync::mpsc::channel();
        let server = scope.spawn(move || {
            b.enter();
            let listener = std::net::TcpListener::bind("10.77.0.2:7000").unwrap();
            ready.send(()).unwrap();
            let (mut connection, _) = listener.accept().unwrap();
            connection.set_read_timeout(LIMIT).unwrap();
            let mut got = Vec::new();
            connection.read_to_end(&mut got).unwrap();
            connection.write_all(b"whole").unwrap();
            got
        });
        listening.recv().unwrap();
        let client = scope.spawn(|| {
            a.enter();
            let address = "10.77.0.2:7000".parse().unwrap();
            let limit = Duration::from_secs(60);
            let mut connection = std::net::TcpStream::connect_timeout(&address, limit).unwrap();
            connection.set_write_timeout(LIMIT).unwrap();
            connection.set_read_timeout(LIMIT).unwrap();
            connection.write_all(&sent).unwrap();
            connection.shutdown(std::net::Shutdown::Write).unwrap();
            let mut answer = Vec::new();
            connection.read_to_end(&mut answer).unwrap();
            answer
        });
        assert_eq!(client.join().unwrap(), b"whole");
        assert!(server.join().unwrap() == sent);
        // Long segments came, or this shows nothing about their cuts.
        let packets = ask(&control, [1, 0, 0, 0, 0, 0, 0, 0]).unwrap()[1];
        assert!(packets > 0 && packets < 4_000_000 / 1_448, "{packets} packets");
        stop.store(true, Ordering::Relaxed);
        assert!(runner.join().unwrap().is_ok());
    });
}

#[test]
fn garbage_at_the_control_socket_is_answered_or_passed_over_and_signals_go_on() {
    let text = ".input in\n.output out\nCount :: c @\nin -> c -> out\n".to_owned();
    let loaded = compile("test.np", text, None);
    let graph = &loaded.compiled.graph;
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("control");
    let stop = AtomicBool::new(false);
    let load = |path: &Path| -> Result<beeline_ir::graph::Graph, String> {
        Err(format!("{} is not read here", path.display()))
    };
    let notify = |text: &str| println!("{text}");
    let around = Surroundings {
        control: Some(&control),
        commands: &[],
        notify: &notify,
        stop: &stop,
        link: LinkOptions::default(),
        spin: SPIN,
        load: Some(&load),
    };
    std::thread::scope(|scope| {
        let runner = scope.spawn(|| run(graph, &native, &[], around));
        let _ends = AtEnd(|| stop.store(true, Ordering::Relaxed));
        let deadline = Instant::now() + Duration::from_secs(60);
        while !control.exists() {
            assert!(Instant::now() < deadline && !runner.is_finished(), "the graph did not start");
            std::thread::sleep(Duration::from_millis(5));
        }
        let socket = std::os::unix::net::UnixDatagram::bind(folder.path().join("asker")).unwrap();
        let nameless = std::os::unix::net::UnixDatagram::unbound().unwrap();
        let mut seed = 5_u64;
        let mut dice = |limit: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % limit
        };
        let heads: [&[u8]; 6] =
            [b"", b"\xff\xff", b"\xff\xffreload ", b"\xff\xffreset ", b"\xff\xffrules ", &[1, 0]];
        for turn in 0..400 {
            let mut bytes = heads[usize::try_from(dice(6)).unwrap()].to_vec();
            let length = if dice(3) == 0 { 64 } else { dice(200) };
            while (bytes.len() as u64) < length {
                bytes.push(u8::try_from(dice(256)).unwrap());
            }
            let from = if turn % 5 == 0 { &nameless } else { &socket };
            // The run answers each at its own pace.
            while from.send_to(&bytes, &control).is_err() {
                assert!(Instant::now() < deadline, "the run takes nothing any more");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert!(ask(&control, [1, 0, 0, 0, 0, 0, 0, 0]).is_ok());
        // Garbage may have asked for a reload that is still being refused.
        let refused = loop {
            let answer = command(&control, "reload x.np").unwrap().unwrap_err();
            if !answer.contains("under way") {
                break answer;
            }
            assert!(Instant::now() < deadline, "a reload never ends");
            std::thread::sleep(Duration::from_millis(1));
        };
        assert!(refused.contains("not read here"), "{refused}");
        assert!(command(&control, "reset nothing").unwrap().unwrap_err().contains("no instance"));
        stop.store(true, Ordering::Relaxed);
        assert!(runner.join().unwrap().is_ok());
    });
}

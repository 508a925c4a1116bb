//! A graph between two veth pairs in this host, with a signal while packets flow.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "common/mod.rs"]
mod common;
#[path = "common/live.rs"]
mod scene;
#[path = "common/veth.rs"]
mod veth;

use std::process::Command;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use beeline_nf::functions::templates;
use beeline_nf::live::{LiveError, ask, command};
use beeline_nf::packet_socket::Device;
use beeline_nf::statistics::{COMMAND, Statistics};
use common::Dice;
use scene::{COUNTER, graph, playing};
use veth::Veth;

/// Two veth pairs, by letters of this process' own; none where this user cannot make them.
fn pairs(first: char, second: char) -> Option<(Veth, Veth)> {
    let id = std::process::id() % 100_000;
    let pair = |letter| Veth::new(&format!("nf{letter}{id}"));
    let both = pair(first).zip(pair(second));
    if both.is_none() {
        println!("skipped: this user cannot make veth devices");
    }
    both
}

/// A packet of `length` bytes between addresses of our own, so that what the host itself sends is told
/// apart.
fn packet(length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 0x88, 0xb5]);
    bytes
}

/// One of 62 bytes that ends with its number.
fn numbered(number: u16) -> Vec<u8> {
    let mut bytes = packet(62);
    bytes[60..62].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// A numbered one of TCP, to a port of 10.0.0.2.
fn to_port(number: u16, port: u16) -> Vec<u8> {
    let mut bytes = numbered(number);
    bytes[12..15].copy_from_slice(&[8, 0, 0x45]);
    bytes[17] = 48;
    bytes[22..24].copy_from_slice(&[64, 6]);
    bytes[26..34].copy_from_slice(&[10, 0, 0, 1, 10, 0, 0, 2]);
    bytes[36..38].copy_from_slice(&port.to_be_bytes());
    bytes
}

/// Random bytes of an Ethernet packet, every second one as IPv4 with whatever lengths it names.
fn garbage(dice: &mut Dice) -> Vec<u8> {
    let length = dice.of(&[14, 15, 20, 33, 34, 35, 41, 54, 59, 63, 64, 65, 300, 1_514]);
    let mut bytes: Vec<u8> = (0..length).map(|_| dice.below(256).try_into().unwrap()).collect();
    // Not ours, and to a single station.
    bytes[..2].copy_from_slice(&[6, 6]);
    if length > 24 && dice.below(2) == 0 {
        bytes[12..14].copy_from_slice(&[8, 0]);
        bytes[14] = 0x40 | bytes[14] & 15;
        bytes[23] = dice.of(&[1, 6, 17]);
    }
    bytes
}

fn send(device: &mut Device, packet: &[u8]) {
    while !device.send(packet).unwrap() {}
}

/// Numbers of the packets of ours that arrive until `wanted` of them have.
fn collect(device: &mut Device, wanted: usize) -> Vec<u16> {
    let deadline = Instant::now() + Duration::from_secs(120);
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

/// The devices at the far ends of two pairs.
fn ends(a: &Veth, b: &Veth) -> (Device, Device) {
    let end = |veth: &Veth| Device::interface(&format!("{}p", veth.0)).unwrap();
    (end(a), end(b))
}

fn ip(words: &str) -> bool {
    Command::new("ip").args(words.split(' ')).output().is_ok_and(|done| done.status.success())
}

#[test]
fn packets_pass_between_interfaces_and_a_signal_reads_the_count() {
    let Some((a, b)) = pairs('a', 'b') else { return };
    let graph = graph(include_str!("../examples/counter.np"));
    let ports = [("in", a.0.clone()), ("out", b.0.clone())];
    let passed = playing(&graph, &ports, (&[], 1), |scene| {
        let (mut near, mut far) = ends(&a, &b);
        for at in 0..100 {
            send(&mut near, &numbered(at));
        }
        assert_eq!(collect(&mut far, 100), (0..100).collect::<Vec<_>>());
        let answer = ask(&scene.control, [1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert!(answer[1] >= 100, "{answer:?}");
        assert!(ask(&scene.control, [9, 0, 0, 0, 0, 0, 0, 0]).is_err());
    });
    let passed = passed.unwrap();
    assert!(passed.sent >= 100 && passed.signals == 1, "{passed:?}");
}

#[test]
fn packets_at_an_interface_that_only_sends_let_a_run_without_work_sleep() {
    let Some((a, b)) = pairs('q', 'r') else { return };
    let graph = graph(include_str!("../examples/counter.np"));
    let ports = [("in", a.0.clone()), ("out", b.0.clone())];
    let passed = playing(&graph, &ports, (&[], 1), |scene| {
        let (mut near, mut far) = ends(&a, &b);
        for at in 0..10 {
            send(&mut far, &numbered(at));
        }
        // It has been looked at since they came.
        send(&mut near, &numbered(7));
        assert_eq!(collect(&mut far, 1), [7]);
        let iterations = || {
            let text = command(&scene.control, COMMAND).unwrap().unwrap();
            let counted: Statistics = serde_json::from_str(&text).unwrap();
            counted.elements[0].iterations
        };
        let (before, begun) = (iterations(), Instant::now());
        std::thread::sleep(Duration::from_secs(1));
        // A sleeper wakes twenty times a second and looks for 50 microseconds; a run that finds its
        // descriptors readable each time does hundreds of thousands a second.
        let (done, seconds) = (iterations() - before, begun.elapsed().as_secs() + 1);
        assert!(done < 20_000 * seconds, "{done} iterations of a run that had nothing to do");
    });
    passed.unwrap();
}

#[test]
fn rules_change_while_packets_flow_and_an_interface_that_disappears_is_named() {
    let Some((a, b)) = pairs('c', 'd') else { return };
    let graph = graph(templates::text("firewall").unwrap());
    let ports = [("from_tor", a.0.clone()), ("to_tor", b.0.clone())];
    let before = ["rules add icmp any -> any drop".to_owned()];
    let passed = playing(&graph, &ports, (&before, 1), |scene| {
        let control = &scene.control;
        let (mut near, mut far) = ends(&a, &b);
        send(&mut near, &to_port(1, 443));
        assert_eq!(collect(&mut far, 1), [1]);
        let said = command(control, "rules add tcp 10.0.0.0/8 -> any :443 drop").unwrap();
        assert_eq!(said, Ok("rule 1: tcp 10.0.0.0/8 -> any :443 drop".to_owned()));
        for number in 2..100 {
            send(&mut near, &to_port(number, if number % 2 == 0 { 443 } else { 80 }));
        }
        let odd: Vec<u16> = (2..100).filter(|number| number % 2 == 1).collect();
        assert_eq!(collect(&mut far, odd.len()), odd);
        assert!(command(control, "rules list").unwrap().unwrap().contains("(49 packets)"));
        let text = command(control, COMMAND).unwrap().unwrap();
        let counted: Statistics = serde_json::from_str(&text).unwrap();
        let gate = counted.channels.iter().find(|c| c.channel == "gate->to_tor").unwrap();
        assert!(gate.items >= 100 && gate.waiting == 0, "{text}");
        assert!(counted.ports.received >= 99 && counted.elements.len() == 8, "{text}");
        assert!(counted.elements.iter().all(|element| element.iterations >= 100), "{text}");
        let refused = command(control, "rules add nonsense").unwrap().unwrap_err();
        assert!(refused.contains("no ->"), "{refused}");
        // Without its input the function still answers, and goes on when the interface is back.
        let name = a.0.clone();
        drop(a);
        scene.hears(&format!("{name} has disappeared"));
        assert!(command(control, "rules counters").unwrap().is_ok());
        let again = Veth::new(&name).unwrap();
        scene.hears(&format!("{name} is back"));
        let (mut near, _) = ends(&again, &b);
        send(&mut near, &to_port(500, 80));
        assert_eq!(collect(&mut far, 1), [500]);
    });
    passed.unwrap();
}

#[test]
fn packets_longer_than_a_frame_of_the_ring_and_tagged_ones_pass_whole() {
    let Some((a, b)) = pairs('h', 'i') else { return };
    for veth in [&a, &b] {
        for end in [veth.0.clone(), format!("{}p", veth.0)] {
            assert!(ip(&format!("link set {end} mtu 9000")));
        }
    }
    let ports = [("in", a.0.clone()), ("out", b.0.clone())];
    // Plain and tagged, around the length of a frame, and far past it.
    let packet = |length: usize, tag: bool| {
        let mut bytes = packet(length);
        (14..length).for_each(|at| bytes[at] = at.to_le_bytes()[0]);
        if tag {
            bytes[12..18].copy_from_slice(&[0x81, 0, 0, 5, 0x88, 0xb5]);
        }
        bytes
    };
    let lengths = (1_960..2_060).step_by(7).chain([60, 1_514, 4_000, 9_000]);
    let wanted: Vec<Vec<u8>> =
        lengths.flat_map(|length| [packet(length, false), packet(length, true)]).collect();
    let passed = playing(&graph(COUNTER), &ports, (&[], 1), |scene| {
        let (mut near, _) = ends(&a, &b);
        let mut far = Device::ringed(&format!("{}p", b.0)).unwrap();
        let (mut got, mut bytes) = (Vec::new(), Vec::new());
        for packet in &wanted {
            send(&mut near, packet);
            let before = got.len();
            scene.until("the packet arrives", || {
                while far.take(&mut bytes).unwrap() {
                    if bytes[..6] == [2, 0, 0, 0, 0, 9] {
                        got.push(bytes.clone());
                    }
                }
                got.len() > before
            });
        }
        let lengths = |list: &[Vec<u8>]| list.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(lengths(&got), lengths(&wanted));
        assert!(got == wanted);
    });
    assert_eq!(passed.unwrap().missed, 0);
}

#[test]
fn packets_pass_by_af_xdp_in_order_and_an_interface_made_anew_goes_on() {
    let Some((a, b)) = pairs('x', 'y') else { return };
    if let Err(error) = Device::express(&a.0, None) {
        println!("skipped: {error}");
        return;
    }
    let ports = [("in", format!("xdp:{}", a.0)), ("out", format!("xdp:{}", b.0))];
    let shown = b.0.clone();
    let passed = playing(&graph(COUNTER), &ports, (&[], 1), |scene| {
        scene.hears("AF_XDP");
        let (mut near, mut far) = ends(&a, &b);
        // More than the rings and the frames for sending hold, in pieces that each of them holds.
        let numbers: Vec<u16> = (0..20_000).collect();
        for piece in numbers.chunks(100) {
            piece.iter().for_each(|number| send(&mut near, &numbered(*number)));
            assert_eq!(collect(&mut far, piece.len()), piece);
        }
        // What the interface takes, and the kernel's network stack does not see.
        let mut beside = Device::interface(&a.0).unwrap();
        send(&mut near, &numbered(7));
        assert_eq!(collect(&mut far, 1), [7]);
        let mut buffer = vec![0; 65_536];
        while let Some(count) = beside.receive(&mut buffer).unwrap() {
            assert!(count != 62 || buffer[..6] != [2, 0, 0, 0, 0, 9], "the kernel saw it, too");
        }
        let name = a.0.clone();
        drop(a);
        scene.hears(&format!("{name} has disappeared"));
        // There again, and another program has it, which is no reason to end.
        let other = Veth::made(&format!("{name}z")).unwrap();
        let held = Device::express(&other.0, None).unwrap();
        for end in ["", "p"] {
            assert!(ip(&format!("link set {name}z{end} name {name}{end}")));
        }
        let again = Veth(name.clone());
        scene.hears(&format!("{name} is there again, and out of reach"));
        assert!(command(&scene.control, COMMAND).unwrap().is_ok());
        drop(held);
        again.up();
        scene.hears(&format!("{name} is back"));
        let (mut near, _) = ends(&again, &b);
        send(&mut near, &numbered(500));
        assert_eq!(collect(&mut far, 1), [500]);
        let answer = ask(&scene.control, [1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        assert!(answer[1] >= 20_002, "{answer:?}");
    });
    let passed = passed.unwrap();
    assert!(passed.sent >= 20_002 && passed.missed == 0, "{passed:?}");
    // The program goes with the run.
    let shown = Command::new("ip").args(["link", "show", &shown]).output().unwrap();
    assert!(!String::from_utf8_lossy(&shown.stdout).contains("xdp"), "{shown:?}");
}

#[test]
fn a_tap_device_that_is_taken_away_is_made_anew_and_other_packets_go_on() {
    let Some((a, b)) = pairs('k', 'l') else { return };
    let tap = format!("nfm{}", std::process::id() % 100_000);
    if let Err(error) = Device::tap(&tap) {
        println!("skipped: this user has no tun devices: {error}");
        return;
    }
    let text = ".input in\n.output out\n.input tap\n.output back\nCount :: c @\nCount :: d @\n\
                in -> c -> out\ntap -> d -> back\n";
    let by_tap = format!("tap:{tap}");
    let ports =
        [("in", a.0.clone()), ("out", b.0.clone()), ("tap", by_tap.clone()), ("back", by_tap)];
    let passed = playing(&graph(text), &ports, (&[], 1), |scene| {
        let (mut near, mut far) = ends(&a, &b);
        for number in [1, 2] {
            assert!(ip(&format!("link set {tap} up")), "the device is there");
            // What the host sends there comes back.
            let mut beside = Device::interface(&tap).unwrap();
            send(&mut beside, &numbered(number));
            assert_eq!(collect(&mut beside, 1), [number]);
            if number == 1 {
                assert!(ip(&format!("link del {tap}")));
                send(&mut near, &numbered(9));
                assert_eq!(collect(&mut far, 1), [9]);
                scene.hears(&format!("{tap} is back"));
            }
        }
    });
    passed.unwrap();
}

#[test]
fn ports_named_twice_are_refused_outputs_without_one_are_told_and_files_are_left_alone() {
    let at = |port: &'static str| (port, "nowhere0".to_owned());
    let text =
        ".input in\n.output out\n.output rest\nTee :: t\nin -> t\nt[1] -> out\nt[2] -> rest\n";
    let graph = graph(text);
    let refused = playing(&graph, &[at("in"), at("in")], (&[], 1), |_| {}).unwrap_err();
    assert!(matches!(&refused, LiveError::Twice(name) if name == "in"), "{refused}");
    let told = playing(&graph, &[], (&[], 1), |scene| {
        for name in ["out", "rest"] {
            assert!(scene.heard(&format!("{name} has no interface")));
        }
    });
    told.unwrap();
    // A control socket's path that is a file of the user's.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine");
    std::fs::write(&path, "text").unwrap();
    let stop = std::sync::atomic::AtomicBool::new(true);
    let around = beeline_nf::live::Surroundings {
        control: Some(&path),
        commands: &[],
        notify: &|_| {},
        stop: &stop,
        link: beeline_nf::sides::LinkOptions::default(),
        spin: Duration::ZERO,
        load: None,
    };
    let refused = beeline_nf::live::run(&graph, &beeline_nf::sides::native, &[], around);
    assert!(matches!(refused, Err(LiveError::Control { .. })), "{refused:?}");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "text");
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
        let ip = |words: &str| ip(words).then_some(());
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
        ip(&format!("netns del {}", self.space));
    }
}

#[test]
fn a_connection_of_this_host_passes_though_its_stack_left_checksums_and_cuts_to_the_device() {
    use std::io::{Read as _, Write as _};
    let Some((a, b)) = pairs('s', 't') else { return };
    let names = (a.0.clone(), b.0.clone());
    let (Some(a), Some(b)) = (Apart::new(a, 1), Apart::new(b, 2)) else {
        println!("skipped: this user cannot make network namespaces");
        return;
    };
    let (a, b) = (&a, &b);
    let text = ".input a1\n.output a2\n.input b1\n.output b2\nCount :: there @\nCount :: back @\n\
                a1 -> there -> b2\nb1 -> back -> a2\n";
    let ports = [("a1", &names.0), ("a2", &names.0), ("b1", &names.1), ("b2", &names.1)];
    let ports = ports.map(|(port, name)| (port, name.clone()));
    const LIMIT: Option<Duration> = Some(Duration::from_secs(60));
    let sent: Vec<u8> = (0..4_000_000_u32).map(|at| (at >> 8).to_le_bytes()[0]).collect();
    let passed = playing(&graph(text), &ports, (&[], 1), |scene| {
        std::thread::scope(|scope| {
            let (ready, listening) = channel();
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
        });
        // Long segments came, or this shows nothing about their cuts.
        let packets = ask(&scene.control, [1, 0, 0, 0, 0, 0, 0, 0]).unwrap()[1];
        assert!(packets > 0 && packets < 4_000_000 / 1_448, "{packets} packets");
    });
    passed.unwrap();
}

#[test]
fn garbage_at_the_control_socket_is_answered_or_passed_over_and_signals_go_on() {
    use std::os::unix::net::UnixDatagram;
    let folder = tempfile::tempdir().unwrap();
    let passed = playing(&graph(COUNTER), &[], (&[], 1), |scene| {
        let control = &scene.control;
        let socket = UnixDatagram::bind(folder.path().join("asker")).unwrap();
        let nameless = UnixDatagram::unbound().unwrap();
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
            scene.until("the run takes requests", || from.send_to(&bytes, control).is_ok());
        }
        assert!(ask(control, [1, 0, 0, 0, 0, 0, 0, 0]).is_ok());
        // Garbage may have asked for a reload that is still being refused.
        let mut refused = String::new();
        scene.until("no reload is under way", || {
            refused = command(control, "reload x.np").unwrap().unwrap_err();
            !refused.contains("under way")
        });
        assert!(refused.contains("No such file"), "{refused}");
        assert!(command(control, "reset nothing").unwrap().unwrap_err().contains("no instance"));
    });
    passed.unwrap();
}

#[test]
fn garbage_at_every_kind_of_port_leaves_the_others_packets_whole() {
    let Some((a, b)) = pairs('r', 's') else { return };
    let graph = graph(templates::text("firewall").unwrap());
    let tap = format!("nft{}", std::process::id() % 100_000);
    let rules = ["rules add tcp 10.0.0.0/8 -> any :443 drop".to_owned()];
    for kind in ["", "xdp:", "tap:"] {
        let possible = match kind {
            "xdp:" => Device::express(&a.0, None).map(drop),
            "tap:" => Device::tap(&tap).map(drop),
            _ => Ok(()),
        };
        if let Err(error) = possible {
            println!("skipped: {error}");
            continue;
        }
        let input = if kind == "tap:" { tap.clone() } else { a.0.clone() };
        let ports = [("from_tor", format!("{kind}{input}")), ("to_tor", b.0.clone())];
        let passed = playing(&graph, &ports, (&rules, 1), |scene| {
            let (mut near, mut far) = ends(&a, &b);
            if kind == "tap:" {
                assert!(ip(&format!("link set {tap} up")), "the device is there");
                // What the host sends there is read by the graph.
                near = Device::interface(&tap).unwrap();
            }
            let mut dice = Dice(7);
            for piece in 0..20_u16 {
                for number in 0..10 {
                    (0..9).for_each(|_| send(&mut near, &garbage(&mut dice)));
                    send(&mut near, &to_port(piece * 10 + number, 80 + 363 * (number % 2)));
                }
                let even: Vec<u16> = (0..10).step_by(2).map(|number| piece * 10 + number).collect();
                assert_eq!(collect(&mut far, even.len()), even, "over {kind}");
            }
            let listed = command(&scene.control, "rules list").unwrap().unwrap();
            assert!(listed.contains("(100 packets)"), "{listed}");
        });
        passed.unwrap();
    }
}

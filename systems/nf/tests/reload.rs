//! A running graph is exchanged: state goes over, packets inside come out, what does not fit is told.

#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)]

#[path = "common/live.rs"]
mod scene;
#[path = "common/veth.rs"]
mod veth;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use beeline_nf::functions::templates;
use beeline_nf::live::{ask, command};
use beeline_nf::packet_socket::Device;
use beeline_nf::reload::{Handover, ReloadError};
use beeline_nf::sides::Plan;
use scene::{AtEnd, graph, playing};
use veth::Veth;

/// A counter that holds every packet's first flit back, so that there is always something inside.
fn counter(state: &str, extra: &str, chain: &str) -> String {
    format!(
        ".element Late (flit in -> flit out) {{\n.state {{ {state} flit held; bool full; }}\n\
         .handler {{\nif (test_input_port(in)) {{\nflit x = read_input_port(in);\n\
         if (x.sop) count++;\n{extra}\n\
         if (full) set_output_port(out, held);\nheld = x; full = !x.eop;\n\
         if (x.eop) {{ last = x; ends = true; }}\n}} else if (ends) {{\n\
         set_output_port(out, last); ends = false;\n}}\nreturn (ends ? 0 : 1);\n}}\n\
         .signal {{ ClSignal p = read_signal(); p.Sig.LParam[0] = count; set_signal(p); }}\n}}\n\
         .input in\n.output out\n{chain}\n"
    )
}

const STATE: &str = "ulong count; flit last; bool ends;";

#[test]
fn what_goes_over_and_what_does_not_is_told_by_name() {
    let old = graph(&counter(STATE, "", "Late :: a @\nCount :: b\nin -> a -> b -> out"));
    let plan = |text: &str, restart: &[&str]| {
        let restart: Vec<String> = restart.iter().map(|name| (*name).to_owned()).collect();
        Handover::plan(&old, &graph(text), &restart)
    };
    // A new variable, an instance more, another order: everything of before goes over.
    let more = "ulong count; flit last; bool ends; ulong seen;";
    let text =
        counter(more, "seen++;", "Count :: c\nCount :: b\nLate :: a @\nin -> c -> b -> a -> out");
    let handover = plan(&text, &[]).unwrap();
    assert_eq!((handover.kept.join(" "), handover.begun.join(" ")), ("b a".into(), "c".into()));
    // Another width, an array in place of a number, another element: each is named, all at once.
    let other = "uint count; flit last; bool ends[2];";
    let text = counter(other, "", "Late :: a @\nIPChecksum :: b\nin -> a -> b -> out")
        .replace("ends = true", "ends[0] = true")
        .replace("(ends)", "(ends[0])")
        .replace("ends = false", "ends[0] = false")
        .replace("ends ?", "ends[0] ?");
    let error = plan(&text, &[]).unwrap_err();
    let ReloadError::State(list) = &error else { panic!("{error}") };
    assert_eq!(list.len(), 3, "{error}");
    for part in ["a.count has 64 bits, and 32", "a.ends", "b is a Count, and a IPChecksum"] {
        assert!(error.to_string().contains(part), "{part} is not in {error}");
    }
    // By the user's word they begin anew.
    let handover = plan(&text, &["a", "b"]).unwrap();
    assert!(handover.kept.is_empty() && handover.begun.len() == 2);
    assert_eq!(plan(&text, &["x"]).unwrap_err(), ReloadError::NoSuchInstance("x".to_owned()));
    // What is no more is told.
    let handover = plan(&counter(STATE, "", "Late :: a @\nin -> a -> out"), &[]).unwrap();
    assert!(handover.told().contains("no more: b"), "{}", handover.told());
}

/// A packet of ours with a number.
fn packet(number: u32) -> Vec<u8> {
    let mut bytes = vec![0; 100];
    bytes[..14].copy_from_slice(&[2, 0, 0, 0, 0, 9, 2, 0, 0, 0, 0, 8, 0x88, 0xb5]);
    bytes[96..].copy_from_slice(&number.to_be_bytes());
    bytes
}

/// The number of one of ours.
fn number(bytes: &[u8]) -> Option<u32> {
    let ours = bytes.len() == 100 && bytes[12..14] == [0x88, 0xb5];
    ours.then(|| u32::from_be_bytes(bytes[96..].try_into().unwrap()))
}

#[test]
fn graphs_take_over_under_traffic_and_every_packet_comes_out_once_and_in_order() {
    let id = std::process::id() % 100_000;
    let (Some(a), Some(b)) = (Veth::new(&format!("nfe{id}")), Veth::new(&format!("nff{id}")))
    else {
        println!("skipped: this user cannot make veth devices");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let first = counter(STATE, "", "Late :: a @\nCount :: b @\nin -> a -> b -> out");
    let running = graph(&first);
    // The second has a host element: its packets cross the link; the third is the first again.
    let second = file(
        "second.np",
        &counter(STATE, "", "host Count :: h\nLate :: a @\nCount :: b @\nin -> a -> h -> b -> out"),
    );
    let third = file("third.np", &first);
    let wrong = file("wrong.np", &first.replace("ulong count", "uint count"));
    let broken = file("broken.np", "Count :: x\nin -> x -> ");
    let renamed = first.replace(".input in\n", ".input into\n").replace("\nin -> a", "\ninto -> a");
    let narrow = file("narrow.np", &renamed);
    let ports = [("in", a.0.clone()), ("out", b.0.clone())];
    let arrived = AtomicU32::new(0);
    let (more, sent_all) = (AtomicBool::new(true), AtomicU32::new(u32::MAX));
    let mut all = 0;
    let passed = playing(&running, &ports, (&[], 1), |scene| {
        std::thread::scope(|scope| {
            let control = &scene.control;
            let _ends = AtEnd(|| more.store(false, Ordering::Relaxed));
            // With a ring: it holds every packet that may be on the way, however slow this thread is.
            let mut far = Device::ringed(&format!("{}p", b.0)).unwrap();
            let mut near = Device::interface(&format!("{}p", a.0)).unwrap();
            let (arrived, sent_all, more) = (&arrived, &sent_all, &more);
            let receiver = scope.spawn(move || {
                let mut bytes = Vec::new();
                let mut got = 0;
                scene.until("every packet arrives", || {
                    while far.take(&mut bytes).unwrap() {
                        if let Some(number) = number(&bytes) {
                            assert_eq!(number, got, "each packet once, in order");
                            got += 1;
                            arrived.store(got, Ordering::Relaxed);
                        }
                    }
                    got >= sent_all.load(Ordering::Relaxed)
                });
                got
            });
            let sender = scope.spawn(move || {
                let mut sent = 0;
                while more.load(Ordering::Relaxed) {
                    while !near.send(&packet(sent)).unwrap() {}
                    sent += 1;
                    // Bounded: never more on the way than the rings hold, however slow the machine is.
                    scene.until("packets go on", || {
                        sent - arrived.load(Ordering::Relaxed).min(sent) < 1_000
                    });
                }
                sent_all.store(sent, Ordering::Relaxed);
                sent
            });
            let flows = |count: u32| {
                let from = arrived.load(Ordering::Relaxed);
                scene.until("packets flow", || arrived.load(Ordering::Relaxed) >= from + count);
            };
            flows(500);
            for turn in 0..6 {
                let path = if turn % 2 == 0 { &second } else { &third };
                let told = command(control, &format!("reload {path}")).unwrap().unwrap();
                assert!(told.contains("kept ") && told.contains("without packets"), "{told}");
                flows(300);
                // What does not fit is refused while packets flow, and changes nothing.
                let refused =
                    |path: &str| command(control, &format!("reload {path}")).unwrap().unwrap_err();
                assert!(refused(&wrong).contains("a.count has 64 bits, and 32"));
                assert!(refused(&broken).contains("broken.np:"));
                assert!(refused(&narrow).contains("no input named in"));
                assert!(refused("/nowhere/x.np").contains("No such file"));
            }
            more.store(false, Ordering::Relaxed);
            let sent = sender.join().unwrap();
            assert_eq!(receiver.join().unwrap(), sent);
            // The count began before the first reload: it went over each time.
            let answer = ask(control, [1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
            assert!(answer[1] >= u64::from(sent), "{answer:?} of {sent}");
            // An element set back begins at zero; another one goes on.
            assert!(command(control, "reset a").unwrap().is_ok());
            assert!(command(control, "reset nothing").unwrap().is_err());
            let answer = ask(control, [1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
            assert!(answer[1] < u64::from(sent), "{answer:?}");
            let other = ask(control, [2, 0, 0, 0, 0, 0, 0, 0]).unwrap();
            assert!(other[1] >= u64::from(sent), "{other:?}");
            let heard = scene.heard.lock().unwrap();
            assert_eq!(heard.iter().filter(|text| text.contains("reloaded")).count(), 6);
            all = sent;
        })
    });
    let passed = passed.unwrap();
    assert_eq!((passed.reloads, passed.missed, passed.malformed), (6, 0, 0));
    assert!(passed.sent >= u64::from(all), "{passed:?}");
}

#[test]
fn a_firewalls_rules_go_over_by_state_or_are_entered_anew() {
    let folder = tempfile::tempdir().unwrap();
    let text = templates::text("firewall").unwrap();
    let small = text.replace("(TABLES = 16, BITS = 10)", "(TABLES = 4, BITS = 4)");
    let same = folder.path().join("same.np");
    std::fs::write(&same, format!("// changed\n{small}")).unwrap();
    let larger = folder.path().join("larger.np");
    std::fs::write(&larger, text).unwrap();
    let running = graph(&small);
    let name = |element: &str| {
        running.nodes.iter().find(|node| node.element.name == element).unwrap().name.clone()
    };
    let before =
        ["tcp 11.0.0.0/24 -> any drop", "ip any -> 10.0.0.0/8 pass", "udp any -> any drop"]
            .map(|rule| format!("rules add {rule}"));
    // On one thread, and with the tables on others.
    assert!(Plan::threaded(&running, 3).unwrap().threads() > 1);
    for threads in [1, 3] {
        let passed = playing(&running, &[], (&before, threads), |scene| {
            let say = |text: &str| command(&scene.control, text).unwrap();
            assert!(say("rules remove 1").is_ok());
            let list = say("rules list").unwrap();
            assert!(list.starts_with("0: tcp") && list.contains("2: udp"), "{list}");
            let told = say(&format!("reload {}", same.display())).unwrap();
            assert!(!told.contains("begun"), "{told}");
            assert_eq!(say("rules list").unwrap(), list);
            // Larger tables: refused without a word, and with it the rules are entered anew.
            let refused = say(&format!("reload {}", larger.display())).unwrap_err();
            assert!(refused.contains("--restart"), "{refused}");
            let table = name("HashTCAM");
            let told = say(&format!("reload {}\n{table}", larger.display())).unwrap();
            assert!(told.contains("begun") && told.contains(&table), "{told}");
            assert_eq!(say("rules list").unwrap(), list, "the numbers stay");
            // A table set back does not lose its rules.
            assert!(say(&format!("reset {table}")).unwrap().contains(&name("FirewallVerdict")));
            assert_eq!(say("rules list").unwrap(), list);
            assert!(say("rules add tcp any -> any :5 drop").unwrap().starts_with("rule 3"));
        });
        passed.unwrap();
    }
}

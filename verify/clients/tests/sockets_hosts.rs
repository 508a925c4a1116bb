//! Unmodified programs of two hosts whose connections run over the fabric. The hosts are two network
//! namespaces with a cable between them; the relays' counters tell what did not go through the kernel.
//!
//! Skipped, with the reason, where namespaces cannot be made.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use beeline_verify_clients::hosts::{ADDRESSES, Hosts};
use beeline_verify_clients::preload::Background;
use beeline_verify_clients::{Chance, bounded, deep, eventually, need, note, number, root, said};

const PATIENCE: Duration = Duration::from_secs(60);
const PORT: u16 = 6000;
/// Every way to accelerate: server, client.
const PAIRINGS: [(bool, bool); 4] = [(true, true), (true, false), (false, true), (false, false)];

fn script() -> String {
    root().join("verify/clients/python/sockets_hosts.py").to_string_lossy().into_owned()
}

fn words(mode: &str, more: &[&str]) -> Vec<String> {
    let port = PORT.to_string();
    let all = ["python3", &script(), mode, ADDRESSES[0], &port].map(str::to_owned);
    all.into_iter().chain(more.iter().map(|&word| word.to_owned())).collect()
}

/// `mode` of the script at the first host, which all modes talk to.
fn serve(hosts: &Hosts, accelerated: bool, mode: &str, more: &[&str]) -> Background {
    let all = words(mode, more);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let mut command = hosts.hosts[0].monitor().command(accelerated, &all);
    if std::env::var_os("BEELINE_LOUD").is_some() {
        let child = command.stdin(Stdio::null()).spawn().unwrap();
        hosts.hosts[0].listening(PORT);
        return Background(child);
    }
    let server = Background::start(&mut command);
    hosts.hosts[0].listening(PORT);
    server
}

/// `mode` at the second host, to its end: what it said.
fn ask(hosts: &Hosts, accelerated: bool, mode: &str, more: &[&str]) -> String {
    let all = words(mode, more);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    hosts.hosts[1].monitor().run(accelerated, &all)
}

/// `mode` at the second host, with its lines.
fn begin(
    hosts: &Hosts,
    mode: &str,
    more: &[&str],
) -> (Child, BufReader<std::process::ChildStdout>) {
    let all = words(mode, more);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let mut command = hosts.hosts[1].monitor().command(true, &all);
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    (child, lines)
}

fn line(lines: &mut BufReader<std::process::ChildStdout>) -> String {
    let mut text = String::new();
    lines.read_line(&mut text).unwrap();
    text.trim_end().to_owned()
}

fn end(mut child: Child) {
    eventually("the end of a program", PATIENCE, || child.try_wait().unwrap());
}

/// A conversation of which all but the first words go over the fabric, if both ends are accelerated: the program says
/// words until it is told that both relays have its connection. What it said, and what each relay sent.
fn converse(
    hosts: &Hosts,
    (server, client): (bool, bool),
    mode: &str,
    more: &[&str],
) -> (String, [u64; 2]) {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let paired = || [0, 1].map(|at| hosts.hosts[at].count("paired"));
    let (earlier, before) = (paired(), hosts.sent());
    let all = words(mode, more);
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let mut command = hosts.hosts[1].monitor().command(client, &all);
    command.env("READY", &ready);
    let output = std::thread::scope(|scope| {
        let talking = scope.spawn(|| bounded(&mut command, 2 * PATIENCE));
        if server && client {
            eventually("a connection that both relays have", PATIENCE, || {
                let now = paired();
                (now[0] > earlier[0] && now[1] > earlier[1]).then_some(())
            });
        }
        std::fs::write(&ready, "").unwrap();
        talking.join().unwrap()
    });
    assert!(output.status.success(), "{mode}: {}", said(&output));
    let now = hosts.sent();
    (String::from_utf8_lossy(&output.stdout).into_owned(), [0, 1].map(|at| now[at] - before[at]))
}

fn hosts(test: &str) -> Option<Hosts> {
    need(test, "python3")?;
    Hosts::start(test, "tcp")
}

#[test]
fn both_directions_at_once_in_every_pairing_with_every_byte_looked_at() {
    let test = "both_directions_at_once_in_every_pairing_with_every_byte_looked_at";
    let Some(hosts) = hosts(test) else { return };
    let whole: u64 = if deep() { 40_000_000 } else { 6_000_000 };
    let total = whole.to_string();
    for (server, client) in PAIRINGS {
        let _server = serve(&hosts, server, "bulk_server", &[&total]);
        let (text, moved) = converse(&hosts, (server, client), "bulk", &[&total]);
        assert!(text.contains("both ways"), "{server} {client}: {text}");
        if server && client {
            assert!(moved.iter().all(|&bytes| bytes > whole / 2), "{moved:?}");
        } else {
            // Unaccelerated peers are the kernel's.
            assert_eq!(moved, [0, 0], "server {server}, client {client}");
        }
        note(&format!("{whole} bytes each way between hosts, accelerated: {server}, {client}"));
        hosts.all_let_go();
    }
}

/// TCP is not allowed here to carry anything between relays, so what they sent went through the window.
#[test]
fn connections_between_hosts_go_through_a_memory_window() {
    let test = "connections_between_hosts_go_through_a_memory_window";
    if need(test, "python3").is_none() {
        return;
    }
    let Some(hosts) = Hosts::start_with_window(test) else { return };
    let whole: u64 = if deep() { 40_000_000 } else { 6_000_000 };
    let total = whole.to_string();
    let _server = serve(&hosts, true, "bulk_server", &[&total]);
    let (text, moved) = converse(&hosts, (true, true), "bulk", &[&total]);
    assert!(text.contains("both ways"), "{text}");
    assert!(moved.iter().all(|&bytes| bytes > whole / 2), "{moved:?}");
    hosts.all_let_go();
}

#[test]
fn a_half_closed_connection_is_answered_to_its_end() {
    let test = "a_half_closed_connection_is_answered_to_its_end";
    let Some(hosts) = hosts(test) else { return };
    let _server = serve(&hosts, true, "half_server", &[]);
    let (text, moved) = converse(&hosts, (true, true), "half", &["3000000"]);
    assert!(text.contains("half and half"), "{text}");
    assert!(moved[0] > 200_000 && moved[1] > 2_000_000, "{moved:?}");
    hosts.all_let_go();
}

#[test]
fn closing_with_bytes_unread_resets_and_closing_without_delivers_the_last() {
    let test = "closing_with_bytes_unread_resets_and_closing_without_delivers_the_last";
    let Some(hosts) = hosts(test) else { return };
    {
        let _server = serve(&hosts, true, "unread_server", &[]);
        assert_eq!(ask(&hosts, true, "unread", &[]).trim(), "ECONNRESET");
    }
    let _server = serve(&hosts, true, "last_words_server", &[]);
    for _ in 0..5 {
        assert_eq!(ask(&hosts, true, "last_words", &[]).trim(), "all of it");
    }
    assert!(hosts.sent()[0] > 5_000_000, "{:?}", hosts.hosts[0].relay());
    hosts.all_let_go();
}

#[test]
fn parent_and_child_of_a_fork_write_to_one_connection() {
    let test = "parent_and_child_of_a_fork_write_to_one_connection";
    let Some(hosts) = hosts(test) else { return };
    const LINES: u64 = 20_000;
    let lines = LINES.to_string();
    let _server = serve(&hosts, true, "fork_server", &[&lines]);
    for _ in 0..2 {
        let (text, moved) = converse(&hosts, (true, true), "fork_client", &[&lines]);
        assert!(text.contains("every line of both"), "{text}");
        assert!(moved[0] > 2 * LINES * 24, "{moved:?}");
    }
    hosts.all_let_go();
}

#[test]
fn an_epoll_server_answers_many_connections() {
    let test = "an_epoll_server_answers_many_connections";
    let Some(hosts) = hosts(test) else { return };
    let _server = serve(&hosts, true, "epoll_server", &[]);
    let text = ask(&hosts, true, "many", &["150", "600"]);
    assert!(text.contains("answered"), "{text}");
    let paired = hosts.hosts[0].count("paired");
    assert!(paired >= 150, "{paired} of 150 connections");
    note(&format!("150 connections of one epoll server between hosts, {}", text.trim()));
    hosts.all_let_go();
}

#[test]
fn killed_ends_are_heard_of() {
    let test = "killed_ends_are_heard_of";
    let Some(hosts) = hosts(test) else { return };
    let _server = serve(&hosts, true, "chatter_server", &[]);
    // The server's process, in the midst of talking, and while the client only listens.
    for (mode, expected) in [("chatter", "after"), ("quiet", "end")] {
        let (child, mut lines) = begin(&hosts, mode, &["60"]);
        let server = line(&mut lines);
        let server = server.strip_prefix("server ").expect("a number").to_owned();
        if mode == "quiet" {
            assert_eq!(line(&mut lines), "warm");
        } else {
            std::thread::sleep(Duration::from_millis(700));
        }
        assert!(Command::new("kill").args(["-9", &server]).status().unwrap().success());
        let fate = line(&mut lines);
        assert!(fate.contains(expected) && !fate.contains("well"), "{mode}: {fate}");
        end(child);
        hosts.all_let_go();
    }
    // The client.
    let (mut child, mut lines) = begin(&hosts, "chatter", &["60"]);
    assert!(line(&mut lines).starts_with("server "));
    std::thread::sleep(Duration::from_millis(700));
    child.kill().unwrap();
    child.wait().unwrap();
    hosts.all_let_go();
    assert!(hosts.sent().iter().all(|&bytes| bytes > 100_000), "{:?}", hosts.sent());
}

#[test]
fn a_killed_monitor_harms_nothing_and_its_successor_finds_the_relay() {
    let test = "a_killed_monitor_harms_nothing_and_its_successor_finds_the_relay";
    let Some(mut hosts) = hosts(test) else { return };
    let _server = serve(&hosts, true, "chatter_server", &[]);
    let (child, mut lines) = begin(&hosts, "chatter", &["120"]);
    assert!(line(&mut lines).starts_with("server "));
    let more_than = |hosts: &Hosts, before: [u64; 2]| {
        eventually("both relays carry the stream", PATIENCE, || {
            let now = hosts.sent();
            (0..2).all(|at| now[at] > before[at]).then_some(())
        });
    };
    more_than(&hosts, [0, 0]);
    for at in [0, 1] {
        let host = &mut hosts.hosts[at];
        let relay = host.relay_process();
        host.monitor = host.monitor.take().map(beeline_verify_clients::preload::Monitor::restart);
        assert_eq!(host.relay_process(), relay, "another relay");
    }
    more_than(&hosts, hosts.sent());
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    let fate = line(&mut lines);
    assert!(fate.starts_with("well after"), "{fate}");
    end(child);
    // And new connections are accelerated.
    let paired = hosts.hosts[0].count("paired");
    let text = ask(&hosts, true, "chatter", &["1"]);
    assert!(text.contains("well after"), "{text}");
    assert_eq!(hosts.hosts[0].count("paired"), paired + 1);
    hosts.all_let_go();
}

#[test]
fn a_killed_relay_resets_its_connections_and_the_next_one_carries_new_ones() {
    let test = "a_killed_relay_resets_its_connections_and_the_next_one_carries_new_ones";
    let Some(mut hosts) = hosts(test) else { return };
    let _server = serve(&hosts, true, "chatter_server", &[]);
    for victim in [0, 1] {
        let (talking, mut talk) = begin(&hosts, "chatter", &["60"]);
        let (listening, mut listen) = begin(&hosts, "quiet", &["60"]);
        assert!(line(&mut talk).starts_with("server "));
        assert!(line(&mut listen).starts_with("server "));
        assert_eq!(line(&mut listen), "warm");
        std::thread::sleep(Duration::from_millis(500));
        let relay = hosts.hosts[victim].relay_process();
        assert!(Command::new("kill").args(["-9", &relay.to_string()]).status().unwrap().success());
        let fate = line(&mut talk);
        assert!(fate.starts_with("ECONNRESET") || fate.starts_with("EPIPE"), "{victim}: {fate}");
        assert_eq!(line(&mut listen), "ECONNRESET", "{victim}");
        end(talking);
        end(listening);
        eventually("another relay", PATIENCE, || {
            let process = hosts.hosts[victim].relay()?["process"].as_u64()?;
            (process != relay).then_some(())
        });
        hosts.hosts[victim].relay_process();
        eventually("a connection over the new relay", PATIENCE, || {
            let before = hosts.hosts[0].count("paired");
            let text = ask(&hosts, true, "chatter", &["1"]);
            assert!(text.contains("well after"), "{text}");
            (hosts.hosts[0].count("paired") > before).then_some(())
        });
    }
}

#[test]
fn a_reader_that_sleeps_hears_that_both_relays_were_killed() {
    let test = "a_reader_that_sleeps_hears_that_both_relays_were_killed";
    let Some(mut hosts) = hosts(test) else { return };
    let _server = serve(&hosts, true, "chatter_server", &[]);
    let (listening, mut listen) = begin(&hosts, "quiet", &["60"]);
    assert!(line(&mut listen).starts_with("server "));
    assert_eq!(line(&mut listen), "warm");
    std::thread::sleep(Duration::from_millis(500));
    let relays = [0, 1].map(|at| hosts.hosts[at].relay_process().to_string());
    assert!(Command::new("kill").arg("-9").args(&relays).status().unwrap().success());
    let (said, hears) = std::sync::mpsc::channel();
    std::thread::spawn(move || said.send(line(&mut listen)));
    assert_eq!(hears.recv_timeout(PATIENCE), Ok("ECONNRESET".to_owned()));
    end(listening);
}

#[test]
fn a_host_that_goes_away_takes_its_connections_along_and_comes_back() {
    let test = "a_host_that_goes_away_takes_its_connections_along_and_comes_back";
    let Some(hosts) = hosts(test) else { return };
    let _server = serve(&hosts, true, "chatter_server", &[]);
    let (child, mut lines) = begin(&hosts, "chatter", &["300"]);
    assert!(line(&mut lines).starts_with("server "));
    std::thread::sleep(Duration::from_millis(700));
    hosts.connect(false);
    let fate = line(&mut lines);
    assert!(!fate.contains("well"), "{fate}");
    end(child);
    hosts.connect(true);
    eventually("a connection after the cable is back", PATIENCE, || {
        let before = hosts.hosts[0].count("paired");
        let mut command = {
            let all = words("chatter", &["1"]);
            let all: Vec<&str> = all.iter().map(String::as_str).collect();
            hosts.hosts[1].monitor().command(true, &all)
        };
        let output = bounded(&mut command, PATIENCE);
        let well = String::from_utf8_lossy(&output.stdout).contains("well after");
        (well && hosts.hosts[0].count("paired") > before).then_some(())
    });
}

#[test]
fn hosts_that_are_not_configured_are_the_kernels() {
    let test = "hosts_that_are_not_configured_are_the_kernels";
    if need(test, "python3").is_none() {
        return;
    }
    for knows in [[true, false], [false, true], [false, false]] {
        let Some(hosts) = Hosts::start_with(test, "tcp", knows, 0) else { return };
        let _server = serve(&hosts, true, "bulk_server", &["3000000"]);
        let text = ask(&hosts, true, "bulk", &["3000000"]);
        assert!(text.contains("both ways"), "{knows:?}: {text}");
        assert_eq!(hosts.sent(), [0, 0], "{knows:?}");
        assert_eq!(hosts.hosts[0].count("paired"), 0);
    }
}

#[test]
fn connections_between_hosts_are_shown() {
    let test = "connections_between_hosts_are_shown";
    let Some(mut hosts) = hosts(test) else { return };
    let _server = serve(&hosts, true, "chatter_server", &[]);
    let (child, mut lines) = begin(&hosts, "chatter", &["120"]);
    assert!(line(&mut lines).starts_with("server "));
    eventually("the relays have it", PATIENCE, || {
        hosts.hosts.iter().all(|host| host.count("connections") == 1).then_some(())
    });
    let said_by = |hosts: &Hosts, words: &[&str]| {
        let output = bounded(&mut hosts.hosts[1].monitor().beeline(words), PATIENCE);
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let end_of_server = format!("{}:{PORT}", ADDRESSES[0]);
    let shown = said_by(&hosts, &["sockets", "connections"]);
    assert!(shown.contains(&end_of_server) && shown.contains("other host"), "{shown}");
    let top = said_by(&hosts, &["sockets", "top", "--count", "1", "--interval", "300ms"]);
    assert!(top.contains(&end_of_server), "{top}");
    let metrics = said_by(&hosts, &["sockets", "metrics"]);
    assert!(metrics.contains("beeline_sockets_relay_connections 1"), "{metrics}");
    let status = said_by(&hosts, &["sockets", "status"]);
    assert!(status.contains("linked hosts"), "{status}");
    // A monitor that has just begun knows of none; the relay does.
    let host = &mut hosts.hosts[1];
    host.monitor = host.monitor.take().map(beeline_verify_clients::preload::Monitor::restart);
    let shown = said_by(&hosts, &["sockets", "connections"]);
    assert!(shown.contains(&end_of_server) && shown.contains("other host"), "{shown}");
    // However long these commands took on a busy machine: the program goes on until it is told.
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    end(child);
}

/// `BEELINE_ROUNDS=n` (else 6, 40 in `deep`), `BEELINE_SEED=n`.
#[test]
fn programs_and_relays_killed_at_random_moments_leave_nothing_behind() {
    let test = "programs_and_relays_killed_at_random_moments_leave_nothing_behind";
    let Some(mut hosts) = hosts(test) else { return };
    let rounds = number("BEELINE_ROUNDS").unwrap_or(if deep() { 40 } else { 6 });
    let seed = number("BEELINE_SEED").unwrap_or(1).max(1);
    let mut chance = Chance(seed);
    let kill = |process: &str| {
        let done = Command::new("kill").args(["-9", process]).status().unwrap();
        assert!(done.success(), "kill {process}");
    };
    let _server = serve(&hosts, true, "chatter_server", &[]);
    let mut fates = [0_u64; 3];
    for round in 0..rounds {
        let before = hosts.hosts[1].count("paired");
        let mut clients: Vec<_> = (0..3)
            .map(|_| {
                let (child, mut lines) = begin(&hosts, "chatter", &["60"]);
                let server = line(&mut lines);
                (child, lines, server.strip_prefix("server ").expect("a number").to_owned())
            })
            .collect();
        // One that never left the kernel's stream would not miss a relay.
        eventually("all clients over the fabric", PATIENCE, || {
            (hosts.hosts[1].count("paired") >= before + 3).then_some(())
        });
        std::thread::sleep(Duration::from_millis(chance.below(300)));
        // Each kind at least once.
        let victim = if round < 3 { round } else { chance.below(3) };
        fates[usize::try_from(victim).unwrap()] += 1;
        match victim {
            0 => clients.iter_mut().for_each(|(child, ..)| child.kill().unwrap()),
            1 => clients.iter().for_each(|(.., server)| kill(server)),
            _ => {
                let host = &mut hosts.hosts[usize::try_from(chance.below(2)).unwrap()];
                let relay = host.relay_process();
                kill(&relay.to_string());
                eventually("another relay", PATIENCE, || {
                    let process = host.relay()?["process"].as_u64()?;
                    (process != relay).then_some(())
                });
                host.relay_process();
            }
        }
        for (child, mut lines, _) in clients {
            let fate = line(&mut lines);
            assert!(!fate.contains("well"), "seed {seed}, round {round}: {fate}");
            end(child);
        }
        hosts.all_let_go();
    }
    let text = ask(&hosts, true, "chatter", &["1"]);
    assert!(text.contains("well after"), "{text}");
    hosts.all_let_go();
    let descriptors = [0, 1].map(|at| {
        let relay = hosts.hosts[at].relay_process();
        std::fs::read_dir(format!("/proc/{relay}/fd")).map_or(0, Iterator::count)
    });
    assert!(
        descriptors.iter().all(|&count| count < 40),
        "{descriptors:?} descriptors, seed {seed}"
    );
    note(&format!(
        "{rounds} rounds of kill -9 between hosts: clients {}, servers {}, relays {}; {descriptors:?} \
         descriptors left in the relays, seed {seed}",
        fates[0], fates[1], fates[2]
    ));
}

/// Whether all threads of a process sleep, and how often they were woken or sent away so far.
fn sleep_of(process: u64) -> (bool, u64) {
    let (mut asleep, mut switches) = (true, 0);
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("it lives").flatten();
    for task in tasks {
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else { continue };
        for line in status.lines() {
            let mut words = line.split_whitespace();
            match (words.next(), words.next()) {
                (Some("State:"), state) => asleep &= state == Some("S"),
                (Some("voluntary_ctxt_switches:" | "nonvoluntary_ctxt_switches:"), Some(count)) => {
                    switches += count.parse::<u64>().expect("a number");
                }
                _ => {}
            }
        }
    }
    (asleep, switches)
}

#[test]
fn idle_connections_cost_neither_relays_nor_programs_processor_time() {
    let test = "idle_connections_cost_neither_relays_nor_programs_processor_time";
    let Some(mut hosts) = hosts(test) else { return };
    let _server = serve(&hosts, true, "chatter_server", &[]);
    let mut clients: Vec<_> = (0..6).map(|_| begin(&hosts, "quiet", &["60"])).collect();
    let mut processes = Vec::new();
    for (child, lines) in &mut clients {
        let server = line(lines);
        processes.push(server.strip_prefix("server ").and_then(|n| n.parse().ok()).unwrap());
        assert_eq!(line(lines), "warm");
        processes.push(u64::from(child.id()));
    }
    processes.extend([0, 1].map(|at| hosts.hosts[at].relay_process()));
    assert_eq!(hosts.hosts[0].count("connections"), 6);
    // Once what they were about to do is done, nothing wakes any of their threads any more.
    let look = || processes.iter().map(|&process| sleep_of(process)).collect::<Vec<_>>();
    let (mut before, mut still) = (look(), 0);
    eventually("all of them sleep on", PATIENCE, || {
        std::thread::sleep(Duration::from_millis(500));
        let now = look();
        let same = now == before && now.iter().all(|(asleep, _)| *asleep);
        still = if same { still + 1 } else { 0 };
        before = now;
        (still >= 4).then_some(())
    });
    for (mut child, _) in clients {
        child.kill().unwrap();
        child.wait().unwrap();
    }
    hosts.all_let_go();
}

//! Unmodified programs whose connections are called back to the kernel while they talk, and accelerated
//! again afterwards: inside a host, and between two.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use beeline_verify_clients::hosts::{ADDRESSES, Hosts};
use beeline_verify_clients::preload::{Background, Monitor, listening};
use beeline_verify_clients::{bounded, deep, eventually, need, note, root, said};

const PATIENCE: Duration = Duration::from_secs(60);

fn script() -> String {
    root().join("verify/clients/python/sockets_recall.py").to_string_lossy().into_owned()
}

/// A client that talks for some seconds, and its process.
struct Talk {
    child: Child,
    lines: BufReader<ChildStdout>,
    process: String,
}

impl Talk {
    fn begin(monitor: &Monitor, host: &str, port: u16, seconds: u64, seed: u64) -> Self {
        let mut talk = Self::connect(monitor, host, port, seconds, seed);
        talk.go_on();
        talk
    }

    /// As [`Talk::begin`], before the first byte: [`Talk::go_on`] follows.
    fn connect(monitor: &Monitor, host: &str, port: u16, seconds: u64, seed: u64) -> Self {
        let [port, seconds, seed] = [u64::from(port), seconds, seed].map(|word| word.to_string());
        let words = ["python3", &script(), "talk", host, &port, &seconds, &seed];
        Self::spawn(monitor.command(true, &words))
    }

    fn spawn(command: Command) -> Self {
        let mut talk = Self::spawn_server(command);
        talk.process = talk.line().strip_prefix("client ").expect("a number").to_owned();
        talk
    }

    /// One that does not say its number.
    fn spawn_server(mut command: Command) -> Self {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines, process: String::new() }
    }

    fn go_on(&mut self) {
        drop(self.child.stdin.take());
    }

    fn line(&mut self) -> String {
        let mut text = String::new();
        self.lines.read_line(&mut text).unwrap();
        text.trim_end().to_owned()
    }

    fn is_over(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }
}

/// Calls back what a process has: how many connections came, and what the command said.
fn recall(monitor: &Monitor, process: &str, hold: &str) -> (usize, String) {
    let words = ["sockets", "recall", "--json", "--pid", process, "--hold", hold];
    recall_by(&mut monitor.beeline(&words))
}

fn recall_by(command: &mut Command) -> (usize, String) {
    let output = bounded(command, PATIENCE);
    let text = said(&output);
    (text.matches("with the kernel").count(), text)
}

fn seconds() -> u64 {
    if deep() { 60 } else { 8 }
}

#[test]
fn a_conversation_called_back_again_and_again_is_whole_and_accelerated_again() {
    let test = "a_conversation_called_back_again_and_again_is_whole_and_accelerated_again";
    if need(test, "python3").is_none() {
        return;
    }
    for (way, port) in [("blocking", 6131), ("level", 6132), ("edge", 6133)] {
        let monitor = Monitor::start();
        let number = port.to_string();
        let server = ["python3", &script(), "serve", way, &number];
        let _server = Background::start(&mut monitor.command(true, &server));
        listening(port);
        let before = monitor.paired();
        let mut talk = Talk::begin(&monitor, "127.0.0.1", port, seconds(), u64::from(port));
        let (mut back, mut last) = (0, String::new());
        while !talk.is_over() {
            let (count, text) = recall(&monitor, &talk.process, "0s");
            (back, last) = (back + count, text);
            std::thread::sleep(Duration::from_millis(200));
        }
        let fate = talk.line();
        assert!(fate.starts_with("well after"), "{way}: {fate}; {back} back, last: {last}");
        let paired = monitor.paired() - before;
        note(&format!("{way}: {fate}, called back {back} times, introduced {paired} times"));
        assert!(back >= 2 && paired >= 2, "{way}: back {back}, introduced {paired}: {last}");
    }
}

#[test]
fn sets_of_many_connections_called_back_again_and_again_hear_each() {
    let test = "sets_of_many_connections_called_back_again_and_again_hear_each";
    if need(test, "python3").is_none() {
        return;
    }
    for (way, port) in [("level", 6147), ("edge", 6148)] {
        let monitor = Monitor::start();
        let number = port.to_string();
        let server = ["python3", &script(), "serve", way, &number];
        let _server = Background::start(&mut monitor.command(true, &server));
        listening(port);
        let before = monitor.paired();
        let (script, time) = (script(), seconds().to_string());
        let words = ["python3", &script, "many", "127.0.0.1", &number, &time, "7"];
        let mut talk = Talk::spawn(monitor.command(true, &words));
        talk.go_on();
        let (mut back, mut last) = (0, String::new());
        while !talk.is_over() {
            let (count, text) = recall(&monitor, &talk.process, "0s");
            (back, last) = (back + count, text);
            std::thread::sleep(Duration::from_millis(900));
        }
        let fate = talk.line();
        assert!(fate.starts_with("well after"), "{way}: {fate}; {back} back, last: {last}");
        let paired = monitor.paired() - before;
        note(&format!("{way}: {fate}, called back {back} times, introduced {paired} times"));
        assert!(back >= 100 && paired >= 200, "{way}: back {back}, introduced {paired}: {last}");
    }
}

#[test]
fn it_is_accelerated_again_where_a_thread_always_sleeps_in_it() {
    let test = "it_is_accelerated_again_where_a_thread_always_sleeps_in_it";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let server = ["python3", &script(), "serve", "blocking", "6149"];
    let _server = Background::start(&mut monitor.command(true, &server));
    listening(6149);
    let words = ["python3", &script(), "apart", "127.0.0.1", "6149", "4"];
    let mut talk = Talk::spawn(monitor.command(true, &words));
    assert_eq!(monitor.paired(), 1);
    let (count, text) = recall(&monitor, &talk.process, "0s");
    assert_eq!(count, 1, "{text}");
    talk.go_on();
    assert_eq!(talk.line(), "well");
    assert_eq!(monitor.paired(), 2);
}

#[test]
fn held_back_it_stays_with_the_kernel() {
    let test = "held_back_it_stays_with_the_kernel";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let server = ["python3", &script(), "serve", "level", "6134"];
    let _server = Background::start(&mut monitor.command(true, &server));
    listening(6134);
    let mut talk = Talk::begin(&monitor, "127.0.0.1", 6134, 4, 1);
    eventually("a way back", PATIENCE, || {
        let (count, text) = recall(&monitor, &talk.process, "60s");
        assert!(!talk.is_over(), "{text}");
        (count == 1).then_some(())
    });
    let before = monitor.paired();
    let fate = talk.line();
    let rounds = fate.strip_prefix("well after ").and_then(|rest| rest.split_whitespace().next());
    let rounds = rounds.and_then(|count| count.parse::<u32>().ok());
    // It went on for its four seconds; until it was called back there was time for a few.
    assert!(rounds.is_some_and(|rounds| rounds > 20), "{fate}");
    assert_eq!(monitor.paired(), before);
}

#[test]
fn what_is_not_accelerated_when_it_is_called_back_stays_so() {
    let test = "what_is_not_accelerated_when_it_is_called_back_stays_so";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let script = script();
    let command = |ask_after: &str, words: &[&str]| {
        let mut command = monitor.command(true, &[&["python3", script.as_str()], words].concat());
        command.env("BEELINE_SOCKETS_ASK_AFTER", ask_after);
        command
    };
    let _server = Background::start(&mut command("10", &["serve", "level", "6137"]));
    listening(6137);
    // A connection that has not asked, the same with leave to go on, and one that has asked already.
    for (ask_after, lifted, introduced) in [("10", false, 0), ("10", true, 1), ("0", false, 0)] {
        let before = monitor.paired();
        let mut talk = Talk::spawn(command(ask_after, &["talk", "127.0.0.1", "6137", "2", "7"]));
        let (count, text) = recall(&monitor, &talk.process, "60s");
        assert_eq!(count, 0, "{text}");
        if lifted {
            recall(&monitor, &talk.process, "0s");
        }
        talk.go_on();
        let fate = talk.line();
        assert!(fate.starts_with("well after"), "{fate}");
        let now = monitor.paired() - before;
        assert_eq!(now, introduced, "asked after {ask_after} calls, lifted: {lifted}");
    }
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata("/proc/self").unwrap().uid() == 0
}

#[test]
fn what_the_monitor_does_not_know_any_more_is_called_back_or_told_of() {
    let test = "what_the_monitor_does_not_know_any_more_is_called_back_or_told_of";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let server = ["python3", &script(), "serve", "blocking", "6138"];
    let _server = Background::start(&mut monitor.command(true, &server));
    listening(6138);
    let mut talk = Talk::begin(&monitor, "127.0.0.1", 6138, 5, 8);
    eventually("an introduction", PATIENCE, || (monitor.paired() == 1).then_some(()));
    let monitor = monitor.restart();
    let (count, text) = recall(&monitor, &talk.process, "0s");
    let (back, why) = (usize::from(is_root()), "accelerated still");
    assert!(count == back && text.contains(why) != is_root(), "{text}");
    assert!(!talk.is_over(), "{text}");
    let fate = talk.line();
    assert!(fate.starts_with("well after"), "{fate}; {text}");
    // It came back to ask anew.
    assert_eq!(monitor.paired(), back as u64);
}

#[test]
fn what_the_monitor_does_not_know_is_found_beside_holders_without_the_library() {
    let test = "what_the_monitor_does_not_know_is_found_beside_holders_without_the_library";
    if need(test, "python3").is_none() || !is_root() {
        return;
    }
    for (port, asks_holder) in [("6142", false), ("6143", true)] {
        let monitor = Monitor::start();
        let mut holder = Talk::spawn(monitor.command(false, &["python3", &script(), "hold"]));
        let server = ["python3", &script(), "serve", "level", port];
        let server = Background::start(&mut monitor.command(true, &server));
        listening(port.parse().unwrap());
        let words = ["python3", &script(), "crowd", "127.0.0.1", port, "1"];
        let mut talk = Talk::spawn(monitor.command(true, &words));
        assert_eq!(monitor.paired(), 1);
        let both = format!("{} {}\n", server.process(), talk.process);
        holder.child.stdin.as_mut().unwrap().write_all(both.as_bytes()).unwrap();
        assert_eq!(holder.line(), "holds");
        let monitor = monitor.restart();
        // Whose number is lower is looked at first.
        let first = if asks_holder { &holder.process } else { &talk.process };
        let mut command = monitor.beeline(&["sockets", "recall", "--json", "--pid", first]);
        let (count, text) = recall_by(command.args(["--pid", &talk.process]));
        assert_eq!(count, 1, "{text}");
        talk.go_on();
        assert_eq!(talk.line(), "well");
        holder.child.kill().unwrap();
        holder.child.wait().unwrap();
    }
}

#[test]
fn memory_of_a_connection_that_has_ended_is_nothing_to_be_called_back() {
    let test = "memory_of_a_connection_that_has_ended_is_nothing_to_be_called_back";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let server = ["python3", &script(), "serve", "blocking", "6141"];
    let server = Background::start(&mut monitor.command(true, &server));
    listening(6141);
    let plain = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = plain.local_addr().unwrap().port().to_string();
    let words = ["python3", &script(), "cut", "127.0.0.1", "6141", &port];
    let mut talk = Talk::spawn(monitor.command(true, &words));
    assert_eq!(monitor.paired(), 1);
    // Killed, it says nothing of an end.
    drop(server);
    talk.go_on();
    assert_eq!(talk.line(), "cut");
    // One that never heard of the other connection: that is the kernel's.
    let monitor = monitor.restart();
    let words = ["sockets", "recall", "--pid", &talk.process];
    let output = bounded(&mut monitor.beeline(&words), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    assert!(!talk.is_over());
    talk.child.kill().unwrap();
    talk.child.wait().unwrap();
}

#[test]
fn a_connection_whose_other_end_was_killed_is_over_and_nothing_to_be_called_back() {
    let test = "a_connection_whose_other_end_was_killed_is_over_and_nothing_to_be_called_back";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let server = ["python3", &script(), "serve", "blocking", "6142"];
    let server = Background::start(&mut monitor.command(true, &server));
    listening(6142);
    let words = ["python3", &script(), "crowd", "127.0.0.1", "6142", "4"];
    let mut talk = Talk::spawn(monitor.command(true, &words));
    assert_eq!(monitor.paired(), 4);
    drop(server);
    let words = ["sockets", "recall", "--json", "--pid", &talk.process];
    let output = bounded(&mut monitor.beeline(&words), PATIENCE);
    let text = said(&output);
    assert!(output.status.success() && text.contains("its other end was closed"), "{text}");
    assert!(!talk.is_over());
    talk.child.kill().unwrap();
    talk.child.wait().unwrap();
}

#[test]
fn a_process_with_more_connections_than_the_command_may_have_descriptors_is_called_back() {
    let test =
        "a_process_with_more_connections_than_the_command_may_have_descriptors_is_called_back";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let server = ["python3", &script(), "serve", "level", "6139"];
    let _server = Background::start(&mut monitor.command(true, &server));
    listening(6139);
    let words = ["python3", &script(), "crowd", "127.0.0.1", "6139", "80"];
    let mut talk = Talk::spawn(monitor.command(true, &words));
    assert_eq!(monitor.paired(), 80);
    let limited = format!("ulimit -n 40; exec \"$@\" --json --pid {}", talk.process);
    let words = monitor.beeline(&["sockets", "recall"]);
    let mut command = Command::new("sh");
    command.args(["-c", &limited, "sh"]).arg(words.get_program()).args(words.get_args());
    command.env("BEELINE_SOCKETS_MONITOR", monitor.name());
    let (count, text) = recall_by(&mut command);
    assert_eq!(count, 80, "{text}");
    talk.go_on();
    assert_eq!(talk.line(), "well");
}

#[test]
fn a_connection_whose_other_end_several_have_is_called_back_by_any_of_them() {
    let test = "a_connection_whose_other_end_several_have_is_called_back_by_any_of_them";
    if need(test, "python3").is_none() || !is_root() {
        return;
    }
    let monitor = Monitor::start();
    let server = ["python3", &script(), "aside", "6140"];
    let mut server = Talk::spawn_server(monitor.command(true, &server));
    assert_eq!(server.line(), "listens");
    let words = ["python3", &script(), "talk", "127.0.0.1", "6140", "3", "9"];
    let mut talk = Talk::spawn(monitor.command(true, &words));
    talk.go_on();
    assert_eq!(server.line(), "aside 0");
    eventually("an introduction", PATIENCE, || (monitor.paired() == 1).then_some(()));
    let (count, text) = recall(&monitor, &talk.process, "60s");
    assert_eq!(count, 1, "{text}");
    let fate = talk.line();
    assert!(fate.starts_with("well after"), "{fate}");
    server.child.kill().unwrap();
    server.child.wait().unwrap();
}

#[test]
fn between_hosts_a_conversation_called_back_is_whole_and_carried_again() {
    let test = "between_hosts_a_conversation_called_back_is_whole_and_carried_again";
    if need(test, "python3").is_none() {
        return;
    }
    let Some(hosts) = Hosts::start(test, "tcp") else { return };
    for (way, port) in [("blocking", 6135), ("edge", 6136)] {
        let number = port.to_string();
        let server = ["python3", &script(), "serve", way, &number, ADDRESSES[0]];
        let _server = Background::start(&mut hosts.hosts[0].monitor().command(true, &server));
        hosts.hosts[0].listening(port);
        let client = hosts.hosts[1].monitor();
        let before = hosts.hosts[1].count("paired");
        let mut talk = Talk::begin(client, ADDRESSES[0], port, seconds(), u64::from(port));
        let (mut back, mut last) = (0, String::new());
        while !talk.is_over() {
            let (count, text) = recall(client, &talk.process, "0s");
            (back, last) = (back + count, text);
            std::thread::sleep(Duration::from_millis(200));
        }
        let fate = talk.line();
        let paired = hosts.hosts[1].count("paired") - before;
        assert!(fate.starts_with("well after"), "{way}: {fate}; {back} back, last: {last}");
        note(&format!("{way}, between hosts: {fate}, back {back}, paired {paired}"));
        assert!(back >= 2 && paired >= 2, "{way}: back {back}, paired {paired}: {last}");
    }
}

#[test]
fn what_only_sleepers_use_between_hosts_is_left_to_the_kernel_and_carried_again() {
    let test = "what_only_sleepers_use_between_hosts_is_left_to_the_kernel_and_carried_again";
    if need(test, "python3").is_none() {
        return;
    }
    let Some(hosts) = Hosts::start_with(test, "tcp", [true, true], 1) else { return };
    let server = ["python3", &script(), "serve", "blocking", "6150", ADDRESSES[0]];
    let _server = Background::start(&mut hosts.hosts[0].monitor().command(true, &server));
    hosts.hosts[0].listening(6150);
    let client = hosts.hosts[1].monitor();
    let seconds = seconds().to_string();
    let words = ["python3", &script(), "apart", ADDRESSES[0], "6150", &seconds];
    let mut talk = Talk::spawn(client.command(true, &words));
    talk.go_on();
    assert_eq!(talk.line(), "well");
    hosts.all_let_go();
    let counted = |name| [0, 1].map(|at| hosts.hosts[at].count(name));
    let (recalled, sleepy, paired) = (counted("recalled"), counted("sleepy"), counted("paired"));
    note(&format!("paired {paired:?}, back {recalled:?}, for sleepers {sleepy:?}"));
    assert!(recalled.iter().chain(&paired).all(|count| *count >= 2), "{recalled:?}, {paired:?}");
    assert!(sleepy.iter().sum::<u64>() >= 2, "{sleepy:?}");
}

#[test]
fn large_pieces_between_hosts_are_carried_whoever_slept_before() {
    let test = "large_pieces_between_hosts_are_carried_whoever_slept_before";
    if need(test, "python3").is_none() {
        return;
    }
    let Some(hosts) = Hosts::start_with(test, "tcp", [true, true], 3600) else { return };
    let server = ["python3", &script(), "serve", "blocking", "6151", ADDRESSES[0]];
    let _server = Background::start(&mut hosts.hosts[0].monitor().command(true, &server));
    hosts.hosts[0].listening(6151);
    let client = hosts.hosts[1].monitor();
    let words = ["python3", &script(), "apart", ADDRESSES[0], "6151", "3", "500"];
    let mut talk = Talk::spawn(client.command(true, &words));
    talk.go_on();
    assert_eq!(talk.line(), "well");
    hosts.all_let_go();
    let [recalled, paired] = ["recalled", "paired"].map(|name| hosts.hosts[1].count(name));
    assert_eq!((recalled, paired), (1, 2));
    let sent = hosts.sent();
    assert!(sent.iter().all(|bytes| *bytes > 10_000_000), "{sent:?} of 50 MB each way");
}

#[test]
fn what_went_back_while_a_message_with_it_was_on_its_way_is_whole() {
    let test = "what_went_back_while_a_message_with_it_was_on_its_way_is_whole";
    if need(test, "python3").is_none() {
        return;
    }
    let Some(mut hosts) = Hosts::start(test, "tcp") else { return };
    let place = ["6152", ADDRESSES[0]];
    let words = ["python3", &script(), "hands_on", place[1], place[0]];
    let mut server = Talk::spawn_server(hosts.hosts[0].monitor().command(true, &words));
    assert_eq!(server.line(), "listens");
    let words = ["python3", &script(), "says", place[1], place[0]];
    let mut talk = Talk::spawn(hosts.hosts[1].monitor().command(true, &words));
    server.child.stdin.as_mut().unwrap().write_all(b"hand it on\n").unwrap();
    assert_eq!(server.line(), "handed");
    // The relay alone knows it from here on.
    let host = &mut hosts.hosts[0];
    host.monitor = host.monitor.take().map(Monitor::restart);
    let (count, text) = recall(hosts.hosts[1].monitor(), &talk.process, "60s");
    assert_eq!(count, 1, "{text}");
    talk.go_on();
    server.go_on();
    assert_eq!(server.line(), "well");
    for mut one in [server, talk] {
        eventually("an end", PATIENCE, || one.child.try_wait().unwrap());
    }
}

#[test]
fn who_cannot_be_called_back_is_told_why() {
    let test = "who_cannot_be_called_back_is_told_why";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let (_, text) = recall(&monitor, "999999999", "1s");
    assert!(text.contains("there is no process 999999999"), "{text}");
    let (_, text) = recall(&monitor, "1", "soon");
    assert!(text.contains("hold"), "{text}");
    // A process without any accelerated connection is no error.
    let mut idle = std::process::Command::new("sleep").arg("20").spawn().unwrap();
    let words = ["sockets", "recall", "--pid", &idle.id().to_string()];
    let output = bounded(&mut monitor.beeline(&words), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    idle.kill().unwrap();
    idle.wait().unwrap();
}

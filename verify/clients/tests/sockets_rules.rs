//! The kernel's rules, kept with the library: numbers, files, threads, forks, `exec`, closes; and what
//! happens where memory, descriptors or the monitor are missing.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use beeline_verify_clients::preload::{
    Background, Monitor, PATIENCE_VARIABLE, Place, library, listening,
};
use beeline_verify_clients::{bounded, eventually, free_port, need, note, root, said, skip};

const PATIENCE: Duration = Duration::from_secs(60);

fn script() -> String {
    root().join("verify/clients/python/sockets_rules.py").to_string_lossy().into_owned()
}

/// What the script says of `words`, with the library.
fn rules(monitor: &Monitor, words: &[&str]) -> String {
    let script = script();
    let all: Vec<&str> = ["python3", &script].into_iter().chain(words.iter().copied()).collect();
    monitor.run(true, &all)
}

/// The script says the same with the library as without.
fn same(test: &str, what: &str) {
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let script = script();
    for seed in ["1", "2", "3"] {
        let words = ["python3", &script, what, seed, "1200"];
        let (with, without) = (monitor.run(true, &words), monitor.run(false, &words));
        let differs = with.lines().zip(without.lines()).find(|(one, other)| one != other);
        assert_eq!(differs, None, "{what}, seed {seed}");
        assert_eq!(with.lines().count(), without.lines().count(), "{what}, seed {seed}");
        assert!(with.lines().count() > 1000, "{what}, seed {seed}");
    }
    assert!(monitor.paired() > 2, "nothing was accelerated beside it");
}

#[test]
fn numbers_are_the_lowest_free_ones_over_sockets_files_copies_and_closes() {
    same("numbers_are_the_lowest_free_ones_over_sockets_files_copies_and_closes", "numbers");
}

#[test]
fn calls_on_files_pipes_pairs_and_events_answer_as_without_the_library() {
    same("calls_on_files_pipes_pairs_and_events_answer_as_without_the_library", "files");
}

/// The script ends well with the library, with so many connections introduced.
fn ends_well(test: &str, words: &[&str], introduced: u64) {
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    note(rules(&monitor, words).trim_end());
    assert!(monitor.paired() >= introduced, "{:?}", monitor.status());
}

#[test]
fn eight_threads_on_one_socket_send_and_receive_whole_records_in_order() {
    let test = "eight_threads_on_one_socket_send_and_receive_whole_records_in_order";
    ends_well(test, &["threads", "8", "1500"], 1);
}

#[test]
fn parent_and_child_share_old_connections_and_number_new_ones_alike() {
    let test = "parent_and_child_share_old_connections_and_number_new_ones_alike";
    ends_well(test, &["forked"], 3);
}

#[test]
fn a_ring_full_at_the_close_is_read_to_its_last_byte() {
    ends_well("a_ring_full_at_the_close_is_read_to_its_last_byte", &["full"], 5);
}

#[test]
fn a_wait_with_room_for_more_than_a_million_answers_hears_what_there_is() {
    let test = "a_wait_with_room_for_more_than_a_million_answers_hears_what_there_is";
    ends_well(test, &["million"], 1);
}

#[test]
fn a_program_that_asks_for_a_signal_with_each_message_gets_them() {
    let test = "a_program_that_asks_for_a_signal_with_each_message_gets_them";
    if need(test, "python3").is_none() {
        return;
    }
    // As by default: these suites have connections change over at once.
    let monitor = Monitor::start();
    let script = script();
    let mut command = monitor.command(true, &["python3", &script, "signals", "200"]);
    let output = bounded(command.env_remove("BEELINE_SOCKETS_ASK_AFTER"), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn who_computes_keeps_nobody_from_a_connection_that_it_shares() {
    ends_well("who_computes_keeps_nobody_from_a_connection_that_it_shares", &["compute"], 1);
}

#[test]
fn sixteen_processes_on_one_processor_all_come_to_their_end() {
    ends_well(
        "sixteen_processes_on_one_processor_all_come_to_their_end",
        &["crowd", "8", "300"],
        8,
    );
}

#[test]
fn a_program_that_becomes_itself_anew_goes_on_and_what_exec_closes_is_closed() {
    let test = "a_program_that_becomes_itself_anew_goes_on_and_what_exec_closes_is_closed";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let port = free_port().to_string();
    let script = script();
    let _server =
        Background::start(&mut monitor.command(true, &["python3", &script, "echo", &port]));
    listening(port.parse().unwrap());
    assert!(rules(&monitor, &["again", &port]).contains("five programs"));
    assert_eq!(monitor.paired(), 2);
}

#[test]
fn a_process_that_never_accepts_starves_no_other_on_the_same_listener() {
    let test = "a_process_that_never_accepts_starves_no_other_on_the_same_listener";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let port = free_port().to_string();
    let script = script();
    let words = ["python3", &script, "echo", &port, "4", "1"];
    let mut command = monitor.command(true, &words);
    let server =
        Background::start(std::os::unix::process::CommandExt::process_group(&mut command, 0));
    listening(port.parse().unwrap());
    assert!(rules(&monitor, &["many", &port, "100"]).contains("all answered"));
    assert!(monitor.paired() >= 95, "{:?}", monitor.status());
    let group = format!("-{}", server.0.id());
    let ended = std::process::Command::new("kill").args(["-KILL", "--", &group]).status().unwrap();
    assert!(ended.success());
}

/// An echo server with the library, and its port.
fn echo(monitor: &Monitor) -> (Background, String) {
    let port = free_port().to_string();
    let words = ["python3", &script(), "echo", &port];
    let server = Background::start(&mut monitor.command(true, &words));
    listening(port.parse().unwrap());
    (server, port)
}

#[test]
fn out_of_descriptors_or_memory_a_connection_is_right_accelerated_or_not() {
    let test = "out_of_descriptors_or_memory_a_connection_is_right_accelerated_or_not";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let (_server, port) = echo(&monitor);
    for what in ["descriptors", "memory"] {
        assert!(rules(&monitor, &["scarce", &port, what]).contains("all right in 6"), "{what}");
    }
    // Some had room enough, and some had not.
    let status = monitor.status().unwrap();
    let asked = status["asked"].as_u64().unwrap();
    assert!(status["paired"].as_u64().unwrap() > 0 && asked > 12, "{status}");
}

#[test]
fn a_monitor_that_stands_still_delays_a_connection_and_breaks_none() {
    let test = "a_monitor_that_stands_still_delays_a_connection_and_breaks_none";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let (_server, port) = echo(&monitor);
    // Ends ask, go on without an answer, and are answered when nobody listens any more.
    for round in 0..3 {
        monitor.signal("-STOP");
        let talking = {
            let words = ["python3", &script(), "many", &port, "3"];
            let mut command = monitor.command(true, &words);
            command.env_remove(PATIENCE_VARIABLE);
            std::thread::spawn(move || bounded(&mut command, PATIENCE))
        };
        std::thread::sleep(Duration::from_millis(180 + 90 * round));
        monitor.signal("-CONT");
        let output = talking.join().unwrap();
        assert!(output.status.success(), "round {round}: {}", said(&output));
    }
    assert!(rules(&monitor, &["many", &port, "5"]).contains("all answered"));
    assert!(monitor.paired() >= 5, "{:?}", monitor.status());
}

#[test]
fn an_end_that_lost_its_answer_is_not_taken_to_be_there() {
    let test = "an_end_that_lost_its_answer_is_not_taken_to_be_there";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let process = monitor.process().to_string();
    for what in ["slow", "descriptors", "memory"] {
        let mut command = monitor.command(true, &["python3", &script(), "late", &process, what]);
        let output = bounded(command.env_remove(PATIENCE_VARIABLE), PATIENCE);
        assert!(said(&output).contains("not misled"), "{what}: {}", said(&output));
    }
    // The monitor gave each of the second ends the segment of the first.
    assert_eq!(monitor.paired(), 3);
}

#[test]
fn a_full_shared_memory_folder_matters_to_nobody() {
    let test = "a_full_shared_memory_folder_matters_to_nobody";
    if !rustix::process::geteuid().is_root() || need(test, "unshare").is_none() {
        skip(test, "wants root, for a folder of its own");
        return;
    }
    let monitor = Monitor::start();
    let (_server, port) = echo(&monitor);
    let script = script();
    let line = format!(
        "mount -t tmpfs -o size=4k none /dev/shm && head -c 9999 /dev/zero > /dev/shm/x; \
         exec python3 {script} many {port} 5"
    );
    let said = monitor.run(true, &["unshare", "-m", "sh", "-c", &line]);
    assert!(said.contains("all answered"), "{said}");
    assert_eq!(monitor.paired(), 5);
}

#[test]
fn a_denied_port_stays_with_the_kernel_however_often_it_is_asked_for() {
    let test = "a_denied_port_stays_with_the_kernel_however_often_it_is_asked_for";
    if need(test, "python3").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let port = free_port().to_string();
    let policy = folder.path().join("policy");
    let text = format!("[[rules]]\nports = \"{port}\"\naccelerate = false\n");
    std::fs::write(&policy, text).unwrap();
    let monitor = Monitor::start_at(
        Place::default(),
        vec!["--policy".into(), policy.to_string_lossy().into()],
    );
    let words = ["python3", &script(), "echo", &port];
    let _server = Background::start(&mut monitor.command(true, &words));
    listening(port.parse().unwrap());
    assert!(rules(&monitor, &["many", &port, "10"]).contains("all answered"));
    // By exec, which asks for what it inherits, there is no way around.
    assert!(rules(&monitor, &["again", &port]).contains("five programs"));
    let status = monitor.status().unwrap();
    assert_eq!(status["paired"], 0, "{status}");
    assert!(status["denied"].as_u64().unwrap() >= 20, "{status}");
    // The kernel's own rule of ports is untouched: a second listener is refused.
    let output = bounded(&mut monitor.command(true, &words), PATIENCE);
    assert!(said(&output).contains("Address already in use"), "{}", said(&output));
    let (_other, port) = echo(&monitor);
    assert!(rules(&monitor, &["many", &port, "10"]).contains("all answered"));
    assert_eq!(monitor.paired(), 10);
}

#[test]
fn another_user_is_not_answered_and_talks_through_the_kernel() {
    let test = "another_user_is_not_answered_and_talks_through_the_kernel";
    let python = std::path::Path::new("/usr/bin/python3");
    if !rustix::process::geteuid().is_root() || !python.exists() {
        skip(test, "wants root, to be somebody else, and a Python that anybody may run");
        return;
    }
    let monitor = Monitor::start();
    let (_server, port) = echo(&monitor);
    // The library and the script are where others cannot read: they go where they can.
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name).to_string_lossy().into_owned();
    std::fs::copy(library(), place("library.so")).unwrap();
    std::fs::copy(script(), place("rules.py")).unwrap();
    for path in [folder.path().to_str().unwrap(), &place("library.so"), &place("rules.py")] {
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(path, mode).unwrap();
    }
    let mut command = std::process::Command::new("setpriv");
    command.args(["--reuid", "65534", "--clear-groups", "--"]).arg(python);
    command.args([&place("rules.py"), "many", &port, "5"]);
    command.env("LD_PRELOAD", place("library.so")).env("BEELINE_SOCKETS_MONITOR", monitor.name());
    let output = bounded(&mut command, PATIENCE);
    assert!(said(&output).contains("all answered"), "{}", said(&output));
    assert_eq!(monitor.paired(), 0);
    // Its owner's programs are served as before.
    assert!(rules(&monitor, &["many", &port, "5"]).contains("all answered"));
    eventually("five of the owner's", PATIENCE, || (monitor.paired() == 5).then_some(()));
}

#[test]
fn the_units_for_systemd_are_understood_by_it() {
    let test = "the_units_for_systemd_are_understood_by_it";
    let folder = root().join("apps/beeline/systemd");
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
    let monitor = |text: &str| text.contains("ExecStart=/usr/local/bin/beeline sockets monitor\n");
    assert!(monitor(&read("beeline-sockets.service")));
    assert!(monitor(&read("beeline-sockets@.service")));
    if need(test, "systemd-analyze").is_none() {
        return;
    }
    // As they are, but for the program's place; the drop-in beside a service.
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let text = text.replace("/usr/local/bin/beeline", "/bin/true");
        std::fs::write(place.path().join(name), text).unwrap();
    };
    write("beeline-sockets.service", &read("beeline-sockets.service"));
    write("beeline-sockets@.service", &read("beeline-sockets@.service"));
    write("served.service", "[Service]\nExecStart=/bin/true\n");
    std::fs::create_dir(place.path().join("served.service.d")).unwrap();
    write("served.service.d/beeline-sockets.conf", &read("beeline-sockets.conf"));
    let verify = |unit: &str| {
        let mut command = std::process::Command::new("systemd-analyze");
        command.args(["verify", "--man=no", unit]).current_dir(place.path());
        command.env("SYSTEMD_UNIT_PATH", format!("{}:", place.path().display()));
        let output = bounded(&mut command, PATIENCE);
        (output.status.success(), said(&output))
    };
    for unit in ["./beeline-sockets.service", "./beeline-sockets@root.service", "./served.service"]
    {
        let (well, said) = verify(unit);
        let ours = said.contains("beeline-sockets") || said.contains("served");
        assert!(well && !ours, "{unit}: {said}");
    }
    // It would say so.
    write("beeline-sockets.service", "[Service]\nExecStart=/bin/true\nRestart=sometimes\n");
    assert!(verify("./beeline-sockets.service").1.contains("sometimes"));
}

//! Connections for programs without the library: by `posix_spawn`, through a shell, in a message,
//! or because nobody kept them from inheriting one. Every byte is looked at.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use beeline_verify_clients::preload::{Background, Monitor, PATIENCE_VARIABLE, listening};
use beeline_verify_clients::{bounded, free_port, need, root, said};

const PATIENCE: Duration = Duration::from_secs(60);

fn file(path: &str) -> String {
    root().join("verify/clients").join(path).to_string_lossy().into_owned()
}

/// `beside.c` as a dynamic program and as a static one.
fn compiled(test: &str, folder: &Path) -> Option<[String; 2]> {
    if need(test, "gcc").is_none() || need(test, "python3").is_none() {
        return None;
    }
    Some([("beside", &[][..]), ("beside-static", &["-static"])].map(|(name, more)| {
        let program = folder.join(name).to_string_lossy().into_owned();
        let mut command = Command::new("gcc");
        command.args(["-O1", "-w", "-o", &program]).args(more).arg(file("programs/beside.c"));
        let output = bounded(&mut command, PATIENCE);
        assert!(output.status.success(), "{}", said(&output));
        program
    }))
}

fn path_with(folder: &Path) -> String {
    format!("{}:{}", folder.display(), std::env::var("PATH").unwrap_or_default())
}

/// Many conversations with a server that hands each to a static program, as `how` says.
fn handed_over(test: &str, how: &str, more_than_twenty: &str) {
    let folder = tempfile::tempdir().unwrap();
    let Some([program, other]) = compiled(test, folder.path()) else { return };
    let script = file("python/sockets_load.py");
    // Only the server is one that hands over; its clients are accelerated, or not.
    for client in [true, false] {
        let monitor = Monitor::start();
        let port = free_port();
        let text = port.to_string();
        let mut command = monitor.command(true, &[&program, "serve", &text, how, &other]);
        let _server = Background::start(command.env("PATH", path_with(folder.path())));
        listening(port);
        for _ in 0..3 {
            let said = monitor.run(client, &["python3", &script, more_than_twenty, &text]);
            assert!(said.contains("all right"), "{how}, client {client}: {said}");
        }
        assert_eq!(monitor.paired(), if client { 3 } else { 0 }, "{how}");
    }
}

#[test]
fn a_static_program_gets_by_posix_spawn_what_it_can_read() {
    let test = "a_static_program_gets_by_posix_spawn_what_it_can_read";
    handed_over(test, "spawn", "streams");
    handed_over(test, "spawnp", "streams");
}

#[test]
fn a_static_child_of_a_fork_gets_what_it_can_read() {
    handed_over("a_static_child_of_a_fork_gets_what_it_can_read", "exec", "streams");
}

#[test]
fn a_shell_without_the_library_gets_what_it_can_read() {
    let test = "a_shell_without_the_library_gets_what_it_can_read";
    handed_over(test, "system", "shell");
    handed_over(test, "popen", "shell");
}

#[test]
fn a_static_program_gets_in_a_message_what_it_can_read() {
    handed_over("a_static_program_gets_in_a_message_what_it_can_read", "pass", "streams");
}

#[test]
fn a_static_program_that_idles_with_a_connection_takes_nothing_of_it() {
    let test = "a_static_program_that_idles_with_a_connection_takes_nothing_of_it";
    handed_over(test, "leak-exec", "streams");
    handed_over(test, "leak-spawn", "streams");
}

#[test]
fn posix_spawn_says_what_it_says_without_the_library() {
    let test = "posix_spawn_says_what_it_says_without_the_library";
    let folder = tempfile::tempdir().unwrap();
    let Some([program, other]) = compiled(test, folder.path()) else { return };
    // What is executable and nothing: ENOEXEC; what is on the path and may not be run: EACCES.
    let nonsense = folder.path().join("nonsense");
    std::fs::copy(&other, &nonsense).unwrap();
    std::fs::write(&nonsense, "no program").unwrap();
    std::fs::write(folder.path().join("beside-unreadable"), "").unwrap();
    let monitor = Monitor::start();
    let nonsense = nonsense.to_string_lossy().into_owned();
    let said = [true, false].map(|accelerated| {
        let mut command = monitor.command(accelerated, &[&program, "errors", &nonsense]);
        let output = bounded(command.env("PATH", path_with(folder.path())), PATIENCE);
        String::from_utf8_lossy(&output.stdout).into_owned()
    });
    assert_eq!(said[0], said[1]);
    let expected = "ENOENT:0 EACCES:0 EACCES:0 ENOEXEC:0 ENOENT:0 EACCES:0 children 0\n";
    assert_eq!(said[0], expected);
    assert_eq!(monitor.paired(), 1);
}

/// How many connections' ends of "beside young" were given memory, by the line that it says at its end. What it
/// started says such a line, too, before or after it, of fewer.
fn given(output: &std::process::Output) -> u32 {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let number = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|&word| word == "given")?;
        words.get(at.checked_sub(1)?)?.parse().ok()
    };
    text.lines().filter_map(number).max().unwrap_or(0)
}

#[test]
fn a_program_started_with_redirections_costs_no_connection_its_youth() {
    let test = "a_program_started_with_redirections_costs_no_connection_its_youth";
    let folder = tempfile::tempdir().unwrap();
    let Some([program, other]) = compiled(test, folder.path()) else { return };
    let monitor = Monitor::start();
    let talk = |accelerated: bool, how: &str, other: &str| {
        let mut command = monitor.command(accelerated, &[&program, "young", how, other]);
        let command = command.env_remove("BEELINE_SOCKETS_ASK_AFTER");
        let before = monitor.paired();
        let output = bounded(command, PATIENCE);
        assert!(output.status.success(), "{how} {other}: {}", said(&output));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(text, format!("young {how} 0\n"));
        (monitor.paired() - before, given(&output))
    };
    for how in ["redirect", "hand"] {
        assert_eq!(talk(false, how, &program).0, 0);
    }
    // Nothing is handed to either: each of the four asks when it has lived long enough.
    assert_eq!(talk(true, "redirect", &program), (4, 8));
    assert_eq!(talk(true, "redirect", &other), (4, 8));
    // Python starts programs by vfork, and closes in the child what they are not to have.
    let script = file("python/sockets_young.py");
    let before = monitor.paired();
    let mut command = monitor.command(true, &["python3", &script, &other]);
    let output = bounded(command.env_remove("BEELINE_SOCKETS_ASK_AFTER"), PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(monitor.paired() - before, 4);
    // The program that has the library goes on with both; for one without, they are the kernel's.
    assert_eq!(talk(true, "hand", &program).0, 4);
    assert_eq!(talk(true, "hand", &other).0, 2);
}

#[test]
fn a_connection_that_cannot_be_carried_is_not_sent() {
    let test = "a_connection_that_cannot_be_carried_is_not_sent";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let script = file("python/sockets_uncarried.py");
    let said = monitor.run(true, &["python3", &script]);
    assert_eq!(said, "refused EMFILE\nechoed\n");
    assert_eq!(monitor.paired(), 1);
}

#[test]
fn a_parent_hears_of_what_its_child_puts_into_their_set() {
    let test = "a_parent_hears_of_what_its_child_puts_into_their_set";
    if need(test, "python3").is_none() {
        return;
    }
    let monitor = Monitor::start();
    let script = file("python/sockets_child_set.py");
    for accelerated in [false, true] {
        let mut command = monitor.command(accelerated, &["python3", &script]);
        let output = bounded(command.env_remove("BEELINE_SOCKETS_ASK_AFTER"), PATIENCE);
        assert!(output.status.success(), "{}", said(&output));
    }
}

#[test]
fn parent_and_child_hear_of_what_comes_while_they_wait_on_one_set() {
    let test = "parent_and_child_hear_of_what_comes_while_they_wait_on_one_set";
    if need(test, "python3").is_none() {
        return;
    }
    let script = file("python/sockets_shared_set.py");
    // As without the library; young when the child is made; and accelerated by then.
    for (accelerated, ask_after) in [(false, None), (true, None), (true, Some("0"))] {
        for (mode, many) in [("edge", "1"), ("level", "1"), ("edge", "80")] {
            for seed in ["1", "2"] {
                let monitor = Monitor::start();
                let words = ["python3", &script, mode, many, "50", seed];
                let mut command = monitor.command(accelerated, &words);
                command.env_remove("BEELINE_SOCKETS_ASK_AFTER");
                // A `fork` asks for as many young connections as come to it in a fifth of this, and leaves the
                // others to the kernel: by default 50 ms, in which a loaded machine came to 75 of 80.
                command.env(PATIENCE_VARIABLE, "60000");
                if let Some(calls) = ask_after {
                    command.env("BEELINE_SOCKETS_ASK_AFTER", calls);
                }
                let output = bounded(&mut command, PATIENCE);
                let how = format!("{accelerated} {ask_after:?} {mode} {many} {seed}");
                assert!(output.status.success(), "{how}: {}", said(&output));
                let ours = if accelerated { many.parse().unwrap() } else { 0 };
                assert_eq!(monitor.paired(), ours, "{how}");
            }
        }
    }
}

#[test]
fn children_without_handlers_cancelled_threads_and_late_signals_break_no_stream() {
    let test = "children_without_handlers_cancelled_threads_and_late_signals";
    if need(test, "gcc").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("rare").to_string_lossy().into_owned();
    let mut command = Command::new("gcc");
    command.args(["-O1", "-Wall", "-o", &program, &file("programs/rare.c"), "-pthread"]);
    let output = bounded(&mut command, PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    for mode in ["children", "deferred", "asynchronous", "signals"] {
        for accelerated in [false, true] {
            let monitor = Monitor::start();
            let output = bounded(&mut monitor.command(accelerated, &[&program, mode]), PATIENCE);
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert_eq!(monitor.paired(), u64::from(accelerated), "{mode}");
            // Refused: POSIX lets a thread that may be cancelled at any instruction make no such call, and one
            // that is, inside a call of ours, ends its process. It never goes on with a stream that is not whole.
            let refused = std::os::unix::process::ExitStatusExt::signal(&output.status) == Some(6);
            if mode == "asynchronous" && accelerated && refused {
                assert_eq!(text, "", "{}", said(&output));
                continue;
            }
            assert_eq!(text, format!("{mode}: whole\n"), "{accelerated}: {}", said(&output));
        }
    }
}

/// `echo.go` as a static program.
fn compiled_go(test: &str, folder: &Path) -> Option<String> {
    let usual = Path::new("/usr/local/go/bin/go");
    let go = if usual.is_file() { usual.to_owned() } else { need(test, "go")? };
    let program = folder.join("echo").to_string_lossy().into_owned();
    let mut command = Command::new(go);
    command.args(["build", "-o", &program, &file("programs/echo.go")]).current_dir(folder);
    // What it has built of its own library stays for the next run; nothing is fetched.
    let cache = root().join("target/go-cache");
    command.env("GOCACHE", cache).env("CGO_ENABLED", "0").env("GOPROXY", "off");
    let output =
        bounded(command.env("GOTOOLCHAIN", "local").env("GO111MODULE", "off"), 3 * PATIENCE);
    assert!(output.status.success(), "{}", said(&output));
    Some(program)
}

#[test]
fn static_programs_of_go_talk_to_every_kind_of_peer() {
    let test = "static_programs_of_go_talk_to_every_kind_of_peer";
    let folder = tempfile::tempdir().unwrap();
    if need(test, "python3").is_none() {
        return;
    }
    let Some(go) = compiled_go(test, folder.path()) else { return };
    let script = file("python/sockets_echo.py");
    // Under `beeline run`, each of them: Go's ends are plain all the same. The other is Python,
    // accelerated or not, or Go.
    for (server_go, client_go, accelerated) in [
        (true, false, true),
        (true, false, false),
        (false, true, true),
        (false, true, false),
        (true, true, true),
    ] {
        let monitor = Monitor::start();
        let text = free_port().to_string();
        let words = if server_go {
            vec![&*go, "serve", &text]
        } else {
            vec!["python3", &script, "serve", &text]
        };
        let _server = Background::start(&mut monitor.command(server_go || accelerated, &words));
        listening(text.parse().unwrap());
        for how in ["block", "timeout", "poll"] {
            let words = if client_go {
                vec![&*go, "ask", &text, "120"]
            } else {
                vec!["python3", &script, "ask", &text, how, "120"]
            };
            let said = monitor.run(client_go || accelerated, &words);
            assert!(said.contains("echoed"), "{server_go} {client_go} {accelerated} {how}: {said}");
        }
        assert_eq!(monitor.paired(), 0);
    }
}

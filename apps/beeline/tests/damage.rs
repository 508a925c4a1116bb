//! A node on damaged data: it does not start until a person decides.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

struct Node {
    child: Child,
    resp: TcpStream,
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn serve(data: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_beeline"));
    command
        .args(["serve", "--json", "--quiet", "--shards", "1", "--resp-address", "127.0.0.1:0"])
        .args(["--http-address", "off", "--fabric-address", "off"])
        .args(["--segment-size", "1MiB", "--capacity", "64MiB", "--data"])
        .arg(data)
        .args(arguments)
        .stdout(Stdio::piped());
    command
}

fn start(data: &Path, arguments: &[&str]) -> Node {
    let mut child = serve(data, arguments).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let banner: serde_json::Value = serde_json::from_str(&line).expect("the banner is JSON");
    let resp = TcpStream::connect(banner["resp_address"].as_str().unwrap()).unwrap();
    Node { child, resp }
}

/// One command, and the first bytes of its answer.
fn ask(node: &mut Node, command: &str) -> String {
    node.resp.write_all(format!("{command}\r\n").as_bytes()).unwrap();
    let mut answer = vec![0; 64 << 10];
    let length = node.resp.read(&mut answer).unwrap();
    String::from_utf8_lossy(&answer[..length]).into_owned()
}

fn stop(mut node: Node) {
    let _ = node.resp.write_all(b"SHUTDOWN\r\n");
    assert!(node.child.wait().unwrap().success());
}

fn check(data: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_beeline"));
    command.args(["kv", "check"]).arg(data).args(arguments).output().unwrap()
}

fn flip_last(data: &Path, needle: &[u8], behind: usize) {
    let segments = fs::read_dir(data.join("segments")).unwrap();
    for path in segments.map(|entry| entry.unwrap().path()).collect::<Vec<PathBuf>>() {
        let mut bytes = fs::read(&path).unwrap();
        if let Some(at) = bytes.windows(needle.len()).rposition(|window| window == needle) {
            bytes[at + behind] ^= 1;
            fs::write(&path, bytes).unwrap();
            return;
        }
    }
    unreachable!("the entry lies in a segment");
}

fn refused(data: &Path) {
    let output = serve(data, &[]).stderr(Stdio::piped()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(4), "{said}");
    for word in ["1 acknowledged entries", "kv check --repair", "--accept-damage"] {
        assert!(said.contains(word), "{word}: {said}");
    }
}

#[test]
fn a_node_does_not_answer_older_values_from_damaged_data_until_that_is_accepted() {
    for (last, repairs) in [("SET key NEW", false), ("DEL key", false), ("SET key NEW", true)] {
        let directory = tempfile::tempdir().unwrap();
        let data = directory.path().join("data");
        let mut node = start(&data, &[]);
        assert_eq!(ask(&mut node, "SET key OLD"), "+OK\r\n");
        let answer = ask(&mut node, last);
        assert!(answer == "+OK\r\n" || answer == ":1\r\n", "{answer}");
        stop(node);
        assert_eq!(check(&data, &[]).status.code(), Some(0));
        // A deletion is the last key in the log, without a value behind it.
        let needle: &[u8] = if last.starts_with("SET") { b"keyNEW" } else { b"key" };
        flip_last(&data, needle, 2);
        let found = check(&data, &[]);
        assert_eq!(found.status.code(), Some(4));
        refused(&data);
        refused(&data);
        let mut node = if repairs {
            let repaired = check(&data, &["--repair"]);
            assert_eq!(repaired.status.code(), Some(0), "{repaired:?}");
            start(&data, &[])
        } else {
            let mut node = start(&data, &["--accept-damage", "on"]);
            let about = ask(&mut node, "INFO beeline");
            assert!(about.contains("damaged_entries:1\r\n"), "{about}");
            node
        };
        assert_eq!(ask(&mut node, "GET key"), "$3\r\nOLD\r\n", "as was decided");
        stop(node);
        stop(start(&data, &[]));
    }
}

//! The program as a person runs it: it opens its door, greets each caller, and ends in good order.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Command, Stdio};

fn program() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_beeline-greeter"));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

#[test]
fn it_greets_each_caller_until_its_input_ends_and_gives_its_port_back() {
    let mut child = program().spawn().unwrap();
    let mut banner = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut banner).unwrap();
    let address: SocketAddr = banner.strip_prefix("greeter ").unwrap().trim().parse().unwrap();
    for _ in 0..3 {
        let mut said = String::new();
        TcpStream::connect(address).unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(said, "hello\n");
    }
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    assert!(TcpStream::connect(address).is_err(), "the door is closed");
}

#[test]
fn a_taken_port_names_the_service() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let output = program().arg(&address).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(error.contains("the service greeter cannot start"), "{error}");
}

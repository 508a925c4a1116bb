//! The object store of a running node, through the command and the client library's socket.

use std::process::Output;

use beeline_verify_clients::server::PATIENCE;
use beeline_verify_clients::{Server, beeline, bounded};

fn objects(socket: &std::path::Path, arguments: &[&str]) -> Output {
    let mut command = beeline(&["objects"]);
    command.args(arguments).arg("--socket").arg(socket);
    bounded(&mut command, PATIENCE)
}

fn text(output: &Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn objects_are_put_listed_read_and_deleted_by_the_command() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    let server = Server::start(&data, &[]);
    let socket = data.join("objects.sock");
    let file = folder.path().join("file");
    let contents: Vec<u8> = (0..3_000_000_u32).map(|i| (i % 253) as u8).collect();
    std::fs::write(&file, &contents).unwrap();
    let id = text(&objects(&socket, &["put", file.to_str().unwrap()]));
    assert_eq!(id.len(), 40);
    let got = objects(&socket, &["get", &id]);
    assert!(got.status.success() && got.stdout == contents, "what came back differs");
    assert!(text(&objects(&socket, &["list"])).contains(&id));
    let stat = text(&objects(&socket, &["stat", &id, "--json"]));
    assert!(stat.contains("\"data_bytes\":3000000"), "{stat}");
    assert!(text(&objects(&socket, &["stat"])).starts_with("1 object, 2.9 MiB"));
    let taken = objects(&socket, &["put", file.to_str().unwrap(), "--id", &id]);
    assert_eq!(taken.status.code(), Some(1), "{taken:?}");
    text(&objects(&socket, &["top", "--count", "1", "--interval", "10ms"]));
    text(&objects(&socket, &["delete", &id]));
    assert_eq!(objects(&socket, &["get", &id]).status.code(), Some(1));
    assert_eq!(objects(&socket, &["delete", &id]).status.code(), Some(1));
    let missing = objects(&socket, &["fetch", &id, "--timeout", "100ms"]);
    assert_eq!(missing.status.code(), Some(3), "{missing:?}");
    drop(server);
    let gone = objects(&socket, &["list"]);
    assert_eq!(gone.status.code(), Some(3), "{gone:?}");
    assert!(String::from_utf8_lossy(&gone.stderr).contains("beeline serve"), "{gone:?}");
}

#[test]
fn the_store_can_be_left_out_and_its_settings_are_checked() {
    let folder = tempfile::tempdir().unwrap();
    let _server = Server::start(folder.path(), &["--without", "objects"]);
    assert!(!folder.path().join("objects.sock").exists());
    let said = Server::try_start(folder.path(), &["--objects-memory", "1KiB"]).unwrap_err().1;
    assert!(said.contains("objects-memory"), "{said}");
    let long = "x".repeat(120);
    let other = tempfile::tempdir().unwrap();
    let path = other.path().join(long);
    let arguments = ["--objects-socket", path.to_str().unwrap()];
    let said = Server::try_start(other.path(), &arguments).unwrap_err().1;
    assert!(said.contains("--objects-socket"), "{said}");
}

//! The document store, walked by MongoDB's own drivers as they come from their registries.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::BufRead as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use beeline_verify_clients::{
    Server, bounded, need_mongosh, need_node_mongodb, need_pymongo, note, root, said, skip,
};

const PATIENCE: Duration = Duration::from_secs(240);

fn walk(python: &Path, server: &Server, arguments: &[&str]) {
    let script = root().join("verify/clients/python/documents.py");
    let uri = format!("mongodb://{}", server.documents());
    let output = bounded(Command::new(python).arg(script).arg(uri).args(arguments), PATIENCE);
    assert!(output.status.success(), "{arguments:?}: {}\n{}", said(&output), server.complaints());
    note(String::from_utf8_lossy(&output.stdout).trim());
}

#[test]
fn pymongo_walks_every_command_and_finds_all_of_it_after_kill_9() {
    let test = "pymongo_walks_every_command_and_finds_all_of_it_after_kill_9";
    let Some(python) = need_pymongo(test) else { return };
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--shards", "2"]);
    walk(&python, &server, &["first"]);
    server.kill();
    let server = Server::start(data.path(), &["--shards", "3"]);
    walk(&python, &server, &["again"]);
    assert!(server.stop().success());
}

#[test]
fn pymongo_walks_it_compressed_at_power_durability() {
    let test = "pymongo_walks_it_compressed_at_power_durability";
    let Some(python) = need_pymongo(test) else { return };
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--durability", "power", "--shards", "1"]);
    walk(&python, &server, &["first", "zlib"]);
    server.kill();
    let server = Server::start(data.path(), &["--durability", "power", "--shards", "1"]);
    walk(&python, &server, &["again", "zlib"]);
}

#[test]
fn pymongo_shows_who_it_is_by_scram() {
    let test = "pymongo_shows_who_it_is_by_scram";
    let Some(python) = need_pymongo(test) else { return };
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--documents-authentication", "on"]);
    walk(&python, &server, &["users"]);
}

fn transactions(python: &Path, server: &Server, arguments: &[&str]) -> Command {
    let mut command = Command::new(python);
    command.arg(root().join("verify/clients/python/documents_transactions.py"));
    command.arg(format!("mongodb://{}", server.documents())).args(arguments);
    command
}

#[test]
fn pymongo_commits_transactions_and_finds_all_of_them_after_kill_9() {
    let test = "pymongo_commits_transactions_and_finds_all_of_them_after_kill_9";
    let Some(python) = need_pymongo(test) else { return };
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--shards", "2"]);
    let run = |server: &Server, phase: &[&str]| {
        let output = bounded(&mut transactions(&python, server, phase), PATIENCE);
        assert!(output.status.success(), "{phase:?}: {}\n{}", said(&output), server.complaints());
        note(String::from_utf8_lossy(&output.stdout).trim());
    };
    run(&server, &["first"]);
    server.kill();
    let server = Server::start(data.path(), &["--shards", "2"]);
    run(&server, &["again"]);
    server.kill();
    // Transfers under way when the node is killed: no half of one is there.
    let mut committed = 0;
    for _ in 0..2 {
        let server = Server::start(data.path(), &["--shards", "2"]);
        let mut load = transactions(&python, &server, &["load"]);
        let mut load = load.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut lines = std::io::BufReader::new(load.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        std::thread::sleep(Duration::from_secs(2));
        server.kill();
        let told = lines.next().unwrap().unwrap();
        committed += told.strip_prefix("committed ").unwrap().parse::<u32>().unwrap();
        assert!(load.wait().unwrap().success());
    }
    let server = Server::start(data.path(), &["--shards", "2"]);
    run(&server, &["sum", &committed.to_string()]);
    note(&format!("{committed} transfers were committed before two kills"));
}

#[test]
fn the_driver_for_node_walks_reading_writing_transactions_and_changes() {
    let test = "the_driver_for_node_walks_reading_writing_transactions_and_changes";
    let Some((node, modules)) = need_node_mongodb(test) else { return };
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path(), &["--shards", "2"]);
    let mut command = Command::new(node);
    command.env("NODE_PATH", modules).arg(root().join("verify/clients/programs/documents.js"));
    command.arg(format!("mongodb://{}", server.documents()));
    let output = bounded(&mut command, PATIENCE);
    assert!(output.status.success(), "{}\n{}", said(&output), server.complaints());
    note(String::from_utf8_lossy(&output.stdout).trim());
    assert!(server.stop().success());
}

#[test]
fn mongodbs_shell_walks_what_a_person_types() {
    let test = "mongodbs_shell_walks_what_a_person_types";
    let Some(shell) = need_mongosh(test) else { return };
    let home = tempfile::tempdir().unwrap();
    let server = Server::start(&home.path().join("data"), &["--shards", "2"]);
    let mut command = Command::new(shell);
    // It writes its settings and its log where its user is at home.
    command.env("HOME", home.path()).arg("--quiet");
    command.arg(format!("mongodb://{}/shop?directConnection=true", server.documents()));
    command.arg(root().join("verify/clients/programs/documents_shell.js"));
    let output = bounded(&mut command, PATIENCE);
    let told = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    assert!(output.status.success() && told.starts_with("fine"), "{}", said(&output));
    note(&told);
    assert!(server.stop().success());
}

/// The folder of MongoDB's tools; they are in no package registry, so a test runs them where they are installed, or
/// where `BEELINE_TEST_MONGODB_TOOLS` names them.
fn mongodb_tools() -> Option<PathBuf> {
    let named = std::env::var_os("BEELINE_TEST_MONGODB_TOOLS").map(PathBuf::from);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders = named.into_iter().chain(std::env::split_paths(&path));
    folders.find(|folder| folder.join("mongodump").is_file())
}

#[test]
fn mongodbs_tools_import_dump_and_restore_what_they_were_given() {
    let test = "mongodbs_tools_import_dump_and_restore_what_they_were_given";
    let Some(tools) = mongodb_tools() else {
        skip(test, "MongoDB's tools are not installed: no package registry has them");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&folder.path().join("data"), &["--shards", "2"]);
    let uri = format!("mongodb://{}", server.documents());
    let (lines, dump) = (folder.path().join("people.json"), folder.path().join("dump"));
    let people: String = (0..500)
        .map(|n| format!("{{\"_id\": {n}, \"name\": \"p{n}\", \"price\": {{\"$numberDecimal\": \"{n}.10\"}}}}\n"))
        .collect();
    std::fs::write(&lines, people).unwrap();
    let run = |tool: &str, arguments: &[&str]| {
        let mut command = Command::new(tools.join(tool));
        let output = bounded(command.args(["--uri", &uri]).args(arguments), PATIENCE);
        assert!(output.status.success(), "{tool}: {}\n{}", said(&output), server.complaints());
        said(&output)
    };
    let [lines, dump] = [&lines, &dump].map(|path| path.to_str().unwrap());
    let shop = ["-d", "shop", "-c", "people"];
    let told = run("mongoimport", &[&shop[..], &["--file", lines]].concat());
    assert!(told.contains("500 document(s) imported successfully"), "{told}");
    // The same again replaces them.
    let again = ["--file", lines, "--mode", "upsert"];
    run("mongoimport", &[&shop[..], &again].concat());
    run("mongodump", &["--out", dump]);
    let renamed = ["--nsFrom", "shop.*", "--nsTo", "kept.*", dump];
    let told = run("mongorestore", &renamed);
    assert!(told.contains("500 document(s) restored successfully"), "{told}");
    // Over what is there: it is dropped first.
    let told = run("mongorestore", &["--drop", dump]);
    assert!(told.contains("500 document(s) restored successfully. 0 document(s) failed"), "{told}");
    assert!(server.stop().success());
}

/// What of the published tests this server refuses by design; docs/documents.md says so.
const REFUSED: &[&str] = &[
    "collation",
    "timeseries",
    "viewOn",
    "images",
    "snapshot",
    "showExpandedEvents",
    "runCursorCommand",
    // What a transaction makes of the catalog is there at once.
    "create-collection.json",
    "create-index.json",
    // Two that write one document: the later to commit is told, at its commit.
    "errors.json: write conflict",
    "write concern error on commit",
    "run command fails with explicit secondary read preference",
    // Fail points strike commands here, and not each statement of one.
    "bulkWrite.json: All commands are retried",
    "bulkWrite.json: Both commands are retried after their first statement fails",
];

#[test]
fn the_drivers_published_specification_tests_pass() {
    let test = "the_drivers_published_specification_tests_pass";
    let Some(python) = need_pymongo(test) else { return };
    let folder = root().join("target/pymongo-source/test");
    if !folder.is_dir() {
        skip(test, "the drivers' tests are not here; `cargo xtask setup` fetches them");
        return;
    }
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(
        data.path(),
        &["--capacity", "1GiB", "--segment-size", "16MiB", "--documents-test-commands", "on"],
    );
    let suites = [
        "crud/unified",
        "collection_management",
        "index_management",
        "run_command/unified",
        "sessions",
        "change_streams/unified",
        "retryable_writes/unified",
        "retryable_reads/unified",
        "transactions/unified",
        "transactions-convenient-api/unified",
    ];
    let script = root().join("verify/clients/python/documents_spec.py");
    let uri = format!("mongodb://{}", server.documents());
    let output =
        bounded(Command::new(python).arg(script).arg(uri).arg(&folder).args(suites), PATIENCE);
    let said_all = String::from_utf8_lossy(&output.stdout);
    let failed: Vec<&str> = said_all
        .lines()
        .filter(|line| line.starts_with("FAILED"))
        .filter(|line| !REFUSED.iter().any(|word| line.contains(word)))
        .collect();
    let sum = said_all.lines().find_map(|line| line.strip_prefix("specification tests: "));
    let sum = sum.unwrap_or_else(|| panic!("the runner did not end: {}", said(&output)));
    let passed: u32 = sum.split(' ').next().and_then(|count| count.parse().ok()).unwrap_or(0);
    assert!(failed.is_empty(), "{}\n{}", failed.join("\n"), server.complaints());
    assert!(passed >= 850, "only {passed} ran: {said_all}");
    note(&format!("specification tests: {sum}"));
}

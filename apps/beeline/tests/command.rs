//! The command as scripts see it: exit codes, what goes to which stream.

#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

fn beeline(arguments: &[&str]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_beeline"))
        .args(arguments)
        .current_dir(directory.path())
        .env_clear()
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn help_and_version_are_results() {
    for flag in ["--help", "--version"] {
        let output = beeline(&[flag]);
        assert_eq!(output.status.code(), Some(0));
        assert!(text(&output.stdout).contains("beeline") || flag == "--help");
        assert!(output.stderr.is_empty());
    }
}

#[test]
fn a_usage_error_is_exit_code_2_and_leaves_standard_output_empty() {
    for arguments in [
        &["fly"][..],
        &["config", "show", "--segment-size", "5"],
        &["config", "show", "--config", "absent.toml"],
        &["config", "show", "--log", "a=b=c"],
        &["bench", "host", "--repetitions", "0"],
    ] {
        let output = beeline(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty(), "{arguments:?}");
        assert!(!output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn what_is_wrong_with_sockets_is_said_in_one_line_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let hosts = "listen = \"tcp://127.0.0.1:1\"\n[[hosts]]\naddresses = [\"10.0.0.300\"]\n\
                 relay = \"tcp://127.0.0.1:1\"\n";
    let typo = "[[rules]]\nport = \"80\"\naccelerate = false\n";
    for (name, content) in [("hosts.toml", hosts), ("policy.toml", typo), ("none.so", "text")] {
        std::fs::write(directory.path().join(name), content).unwrap();
    }
    let monitor = ["sockets", "monitor"];
    let library = "target/no/such/library.so";
    for (arguments, variable, code, named) in [
        (&[&monitor[..], &["--hosts", "hosts.toml"]].concat()[..], None, 2, "hosts.toml: line 3: "),
        (&[&monitor[..], &["--policy", "policy.toml"]].concat(), None, 2, "policy.toml: line 2: "),
        (&["sockets", "relay", "--hosts", "hosts.toml"], None, 2, "hosts.toml: line 3: "),
        (&["run", "--library", "none.so", "--", "true"], None, 2, "none.so: no library; --library"),
        (&["run", "--library", library, "--", "true"], None, 2, "; --library takes"),
        (&["run", "--", "true"], Some(("ASK_AFTER", "x")), 2, "_ASK_AFTER=x is not a number"),
        (&["sockets", "status"], Some(("MONITOR", "no-such")), 3, "`beeline run` starts one"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_beeline"));
        command.args(arguments).current_dir(directory.path()).env_clear();
        if let Some((name, value)) = variable {
            command.env(format!("BEELINE_SOCKETS_{name}"), value);
        }
        let output = command.output().unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {said}");
        assert!(said.contains(named) && said.lines().count() == 1, "{arguments:?}: {said}");
    }
}

#[test]
fn config_show_names_where_each_value_came_from() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("beeline.toml"), "[serve]\nshards = 3\npin = true\n")
        .unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_beeline"))
        .args(["config", "show", "--json", "--durability", "power"])
        .current_dir(directory.path())
        .env_clear()
        .env("BEELINE_SHARDS", "2")
        .output()
        .unwrap();
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let row = |name: &str| rows.iter().find(|row| row["name"] == name).unwrap();
    assert_eq!(row("shards")["value"], "2");
    assert_eq!(row("shards")["origin"], "environment BEELINE_SHARDS");
    assert_eq!(row("pin")["origin"], "file beeline.toml:3");
    assert_eq!(row("durability")["origin"], "flag --durability");
    assert_eq!(row("data")["origin"], "default");
}

#[test]
fn what_is_misspelt_stops_the_node_before_it_starts_and_names_what_was_meant() {
    let directory = tempfile::tempdir().unwrap();
    let file = "[serve]\nshard = 3\n[rsp]\naddress = \"off\"\n[resp]\n  maxclients = 2\n";
    std::fs::write(directory.path().join("beeline.toml"), file).unwrap();
    for arguments in [&["serve"][..], &["doctor"], &["config", "show"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_beeline"))
            .args(arguments)
            .current_dir(directory.path())
            .env_clear()
            .env("BEELINE_DURABILTY", "power")
            .output()
            .unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        for expected in [
            "beeline.toml:3:2: there is no table [rsp]; did you mean [resp]?",
            "beeline.toml:2:1: [serve] has no setting shard; did you mean shards?",
            "beeline.toml:6:3: [resp] has no setting maxclients; did you mean max-clients?",
            "BEELINE_DURABILTY: there is no setting of this name; did you mean BEELINE_DURABILITY?",
        ] {
            assert!(said.contains(expected), "{arguments:?}: {said}");
        }
        let left: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "{arguments:?} made something: {left:?}");
    }
}

#[test]
fn a_service_that_is_left_out_has_no_door_and_a_name_that_is_none_is_told_the_nearest() {
    let output = beeline(&["config", "show", "--without", "resp"]);
    let shown = text(&output.stdout);
    let address = shown.lines().find(|line| line.starts_with("address ")).unwrap();
    assert!(address.contains("off") && address.ends_with("setting without"), "{shown}");
    let output = beeline(&["serve", "--without", "resq"]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.contains("there is no service resq; did you mean resp?"), "{said}");
}

#[test]
fn run_ends_as_a_shell_does_where_there_is_no_program() {
    let directory = tempfile::tempdir().unwrap();
    let library = directory.path().join("library.so");
    std::fs::write(&library, b"\x7fELF").unwrap();
    let plain = directory.path().join("plain");
    std::fs::write(&plain, b"text").unwrap();
    for (program, code, named) in [
        ("no-such-program", 127, "give its path"),
        ("/no/such/program", 127, "is its path right?"),
        (plain.to_str().unwrap(), 126, "may be executed"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_beeline"))
            .args(["run", "--library", library.to_str().unwrap(), "--", program])
            .env_clear()
            // No monitor is started.
            .env("BEELINE_SOCKETS_MONITOR", "x".repeat(100))
            .output()
            .unwrap();
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{program}: {said}");
        assert!(said.contains(program) && said.contains(named), "{said}");
    }
}

#[test]
fn cluster_commands_say_whom_they_asked_and_what_to_change() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let address = free.to_string();
    for command in [&["status"][..], &["leave", "3"], &["snapshot"]] {
        let output = beeline(&[&["cluster"], command, &["--address", &address]].concat());
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{said}");
        assert!(said.contains(&address) && said.contains("--resp-address"), "{said}");
    }
}

#[test]
fn a_pool_with_a_damaged_magic_is_corruption() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().join("data");
    let words = data.to_str().unwrap();
    let doors = ["--resp-address", "127.0.0.1:0", "--http-address", "off", "--fabric-address"];
    let serve = || {
        let mut command = Command::new(env!("CARGO_BIN_EXE_beeline"));
        command.args(["serve", "--json", "--without", "objects,direct", "--data", words]);
        command.args(doors).args(["off", "--capacity", "64MiB", "--segment-size", "1MiB"]);
        command.env_clear().stdout(std::process::Stdio::piped());
        command.stderr(std::process::Stdio::piped());
        command
    };
    let mut node = serve().spawn().unwrap();
    let mut line = String::new();
    let out = node.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
    assert!(line.contains("ready"), "{line}");
    node.kill().unwrap();
    node.wait().unwrap();
    let file = data.join("pool.bee");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[0] ^= 1;
    std::fs::write(&file, &bytes).unwrap();
    let output = serve().output().unwrap();
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
    let output = beeline(&["kv", "check", words]);
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
}

#[test]
fn a_tiny_bench_prints_json_lines_with_their_environment() {
    let output = beeline(&["bench", "host", "--quick", "--json", "--plot", "out.png"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 5);
    for row in rows {
        assert!(row["figure"]["median"].as_f64().unwrap() > 0.0, "{row}");
        assert!(row["environment"]["commit"].is_string(), "{row}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error_message() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_beeline"))
        .args(["config", "show"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
}

#[test]
fn a_tiny_fabric_bench_measures_both_providers_against_their_limits() {
    let output = beeline(&["bench", "fabric", "--quick", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for (subject, cases) in [("shm", 10), ("tcp", 9)] {
        let of: Vec<_> = rows.iter().filter(|row| row["subject"] == subject).collect();
        assert_eq!(of.len(), cases, "{subject}");
        assert!(of.iter().filter(|row| row["ratio"].is_object()).count() >= 5, "{subject}");
    }
}

#[test]
fn a_tiny_objects_bench_measures_every_call_and_says_what_is_absent() {
    let output = beeline(&[
        "bench",
        "objects",
        "--parts",
        "local",
        "--quick",
        "--json",
        "--redis-server",
        "/nonexistent/redis",
        "--python",
        "/nonexistent/python",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stderr);
    assert!(said.contains("without redis") && said.contains("without plasma"), "{said}");
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of = |case: &str| {
        rows.iter().filter(|row| row["case"].as_str().unwrap().starts_with(case)).count()
    };
    // Two sizes; a put into memory that was used before, and into fresh memory.
    assert_eq!([of("put"), of("get"), of("delete")], [4, 2, 2]);
}

#[test]
fn bench_log_commits_fails_over_and_catches_up() {
    let directory = tempfile::tempdir().unwrap();
    let data = directory.path().to_str().unwrap();
    let output = beeline(&["bench", "log", "--quick", "--json", "--members", "3", "--data", data]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let text = text(&output.stdout);
    for case in ["commit of 8 B, 3 members", "bare memories", "16 clients", "end of the leader"] {
        assert!(text.contains(case), "{case}: {text}");
    }
    assert_eq!(std::fs::read_dir(data).unwrap().count(), 0, "the data is removed");
}

#[test]
fn a_tiny_bench_of_the_document_store_runs_every_part_over_both_transports() {
    let parts = "latency,records,connections,scan,members";
    let arguments = ["bench", "documents", "--quick", "--json", "--data", ".", "--parts", parts];
    let output = beeline(&arguments);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        rows.len(),
        4 * (1 + 3 + 3) + 6 + 4,
        "four operations in each part, six walks, four of members"
    );
    for row in &rows {
        assert_eq!((&row["provider"], &row["peer"]), (&"shm".into(), &"MongoDB wire".into()));
        assert!(row["ratio"]["median"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn the_document_store_is_measured_beside_a_server_that_does_nothing_on_as_many_cores() {
    let arguments = ["bench", "documents", "--quick", "--json", "--data", "."];
    let peers = ["--parts", "peers", "--peers", "nothing", "--server-cores", "2"];
    let output = beeline(&[&arguments[..], &peers[..]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let cases: Vec<&str> = rows.iter().map(|row| row["case"].as_str().unwrap()).collect();
    assert!(cases.len() == 2 && cases[0].starts_with("insert") && cases[1].starts_with("find"));
    for row in &rows {
        assert_eq!(row["peer"], "a server that does nothing");
        assert!(row["ratio"]["median"].as_f64().unwrap() > 0.0, "{row}");
    }
}

#[test]
fn a_tiny_bench_of_the_direct_store_runs_every_part() {
    let output = beeline(&["bench", "direct", "--quick", "--json", "--plot", "direct.png"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let against = |peer: &str| rows.iter().filter(|row| row["peer"] == peer).count();
    // Redis and memcached are left out where they are not installed.
    assert_eq!((against("BOOM"), against("memcpy"), against("distinct keys")), (4, 1, 1));
    let rates = rows.iter().filter(|row| row["peer"].is_null() && row["unit"] == "op/s").count();
    assert_eq!(rates, 28, "four mixtures by five batches and two sizes");
    let case =
        |part: &str| rows.iter().filter(|row| row["case"].as_str().unwrap().contains(part)).count();
    assert_eq!((case("offered"), case("merge of")), (16, 2));
}

#[test]
fn the_model_of_the_direct_store_puts_the_papers_values_beside_its_own() {
    let output = beeline(&["bench", "direct", "--quick", "--json", "--parts", "model"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let judged = rows.iter().filter(|row| row["peer"] == "paper");
    assert!(judged.clone().count() > 60, "tables A and B alone have 60 values");
    assert!(judged.clone().all(|row| row["beside"]["judged"].is_string()));
    let mut modelled = rows.iter().filter(|row| row["subject"] == "model");
    assert!(modelled.all(|row| row["simulated"] == true));
}

#[test]
fn direct_tune_names_settings_for_pairs_that_fit_and_refuses_what_does_not() {
    let output = beeline(&["direct", "tune", "10", "--utilisation", "40"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let lines = text(&output.stdout).to_owned();
    assert!(lines.contains("direct-inline-threshold 10\n"), "{lines}");
    let share = lines.strip_prefix("direct-index-share ").and_then(|rest| rest.lines().next());
    let share: u32 = share.and_then(|share| share.parse().ok()).unwrap();
    assert!((50..=90).contains(&share), "{lines}");
    assert_eq!(beeline(&["direct", "tune", "10", "--utilisation", "90"]).status.code(), Some(1));
    assert_eq!(beeline(&["direct", "tune", "2"]).status.code(), Some(2));
}

#[test]
fn a_tiny_kv_bench_runs_every_part() {
    let output = beeline(&["bench", "kv", "--quick", "--json", "--plot", "kv.png"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let rows: Vec<serde_json::Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let against = |peer: &str| rows.iter().filter(|row| row["peer"] == peer).count();
    assert!(against("RDMA-KV") >= 10 && against("RDMP-KV") >= 10, "{}", rows.len());
    // One round trip for BOOM, two for the two-phase protocol, whatever the machine does.
    let put = rows
        .iter()
        .find(|row| row["case"] == "32 B put" && row["peer"] == "RDMP-KV")
        .and_then(|row| row["beside"]["per operation"].as_str())
        .unwrap();
    assert!(put.starts_with("1.00 trips") && put.contains("its 2.00 trips"), "{put}");
}

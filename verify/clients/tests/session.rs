//! redis-cli, redis-py and redis-benchmark as their users run them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::process::Command;
use std::time::Duration;

use beeline_verify_clients::{Server, bounded, need, need_redis_py, root, said};

const PATIENCE: Duration = Duration::from_secs(120);

fn server(more: &[&str]) -> (tempfile::TempDir, Server) {
    let data = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let server = Server::start(data.path(), more);
    (data, server)
}

#[test]
fn a_redis_cli_session_reads_as_with_redis() {
    let Some(cli) = need("a_redis_cli_session_reads_as_with_redis", "redis-cli") else { return };
    let (_data, server) = server(&[]);
    let port = server.resp().port().to_string();
    let ask = |words: &[&str]| {
        let output = bounded(Command::new(&cli).args(["-p", &port]).args(words), PATIENCE);
        String::from_utf8_lossy(&output.stdout).trim_end().to_owned()
    };
    for (words, expected) in [
        (&["PING"][..], "PONG"),
        (&["SET", "greeting", "hello"], "OK"),
        (&["GET", "greeting"], "hello"),
        (&["APPEND", "greeting", " world"], "11"),
        (&["INCR", "n"], "1"),
        (&["INCRBY", "n", "41"], "42"),
        (&["EXPIRE", "n", "100"], "1"),
        (&["TTL", "n"], "100"),
        (&["TYPE", "n"], "string"),
        (&["DEL", "n", "absent"], "1"),
        (&["EXISTS", "n"], "0"),
        (&["MSET", "a", "1", "b", "2"], "OK"),
        (&["MGET", "a", "b", "c"], "1\n2"),
        (&["DBSIZE"], "3"),
        (&["GET"], "ERR wrong number of arguments for 'get' command"),
        (&["LPUSHX"], "ERR unknown command 'LPUSHX', with args beginning with:"),
        (&["FLUSHALL"], "OK"),
    ] {
        assert_eq!(ask(words), expected, "{words:?}");
    }
    let three = bounded(Command::new(&cli).args(["-3", "-p", &port, "HELLO"]), PATIENCE);
    assert!(said(&three).contains("redis"), "{}", said(&three));
    let info = ask(&["INFO", "server"]);
    assert!(info.contains("redis_version:7"), "{info}");
}

#[test]
fn redis_py_runs_its_users_script_over_resp2_and_resp3() {
    let test = "redis_py_runs_its_users_script_over_resp2_and_resp3";
    let Some(python) = need_redis_py(test) else { return };
    let (_data, server) = server(&["--shards", "3"]);
    for protocol in ["2", "3"] {
        let script = root().join("verify/clients/python/session.py");
        let output = bounded(
            Command::new(&python).arg(script).args([
                "--port",
                &server.resp().port().to_string(),
                "--protocol",
                protocol,
            ]),
            PATIENCE,
        );
        assert!(output.status.success(), "RESP{protocol}: {}", said(&output));
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let checks: u32 = text
            .lines()
            .find_map(|line| line.strip_suffix(" checks passed")?.parse().ok())
            .unwrap_or(0);
        assert!(checks > 100, "only {checks} checks ran: {text}");
    }
}

#[test]
fn redis_benchmark_runs_without_an_error() {
    let test = "redis_benchmark_runs_without_an_error";
    let Some(benchmark) = need(test, "redis-benchmark") else { return };
    let (_data, server) = server(&[]);
    for pipeline in ["1", "16"] {
        let output = bounded(
            Command::new(&benchmark)
                .args(["-p", &server.resp().port().to_string(), "-n", "2000", "-c", "50"])
                .args(["-P", pipeline, "-t", "ping,set,get,incr,mset", "--csv", "-r", "1000"]),
            PATIENCE,
        );
        let text = said(&output);
        assert!(output.status.success(), "{text}");
        assert!(!text.contains("Error"), "{text}");
        for name in ["PING", "SET", "GET", "INCR", "MSET"] {
            assert!(text.contains(name), "{name} is missing: {text}");
        }
    }
}

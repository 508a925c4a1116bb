//! `beeline top`: a running node, looked at again and again through its status address.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::{Map, Value};

use crate::bench::report::number;
use crate::cli::TopArguments;
use crate::config::values::human_bytes;
use crate::exit::{Exit, Failure, OrExit as _};
use crate::looks;
use crate::output::{Output, table};
use crate::serve::human_us;

/// Patience with a node that does not answer.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Commands shown.
const COMMANDS_SHOWN: usize = 12;
/// An answer is far smaller.
const LONGEST_ANSWER_BYTES: u64 = 1 << 20;

/// The command.
pub fn run(arguments: &TopArguments, output: Output) -> Result<Exit, Failure> {
    let look = || look(arguments.address).or_exit(Exit::Unreachable);
    looks::repeat(arguments.interval.0, arguments.count, look, |before, now, time| {
        if output.json {
            return Ok(output.object(now)?);
        }
        looks::screen(output, &format!("{}\n", screen(before, now, time.as_secs_f64())))
    })
}

/// One answer of `/stats.json`.
fn look(address: SocketAddr) -> anyhow::Result<Map<String, Value>> {
    let fetch = || -> std::io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect_timeout(&address, TIMEOUT)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        write!(stream, "GET /stats.json HTTP/1.0\r\nHost: {address}\r\n\r\n")?;
        let mut answer = Vec::new();
        stream.take(LONGEST_ANSWER_BYTES).read_to_end(&mut answer)?;
        Ok(answer)
    };
    let answer = fetch().map_err(|error| {
        anyhow::anyhow!(
            "no node answers at {address}: {error}; is `beeline serve` running, and is this its \
             --http-address?"
        )
    })?;
    let text = String::from_utf8_lossy(&answer);
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    match serde_json::from_str(body) {
        Ok(Value::Object(object)) => Ok(object),
        _ => anyhow::bail!("{address} answers, but not as a Beeline node does"),
    }
}

fn figure(look: &Map<String, Value>, name: &str) -> f64 {
    look.get(name).and_then(Value::as_f64).unwrap_or(0.0)
}

fn screen(before: &Map<String, Value>, now: &Map<String, Value>, seconds: f64) -> String {
    let rate = |name: &str| {
        number((figure(now, name) - figure(before, name)).max(0.0) / seconds.max(1e-3))
    };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "figures that were an integer before they were JSON"
    )]
    let whole = |name: &str| figure(now, name) as u64;
    let bytes = |name: &str| human_bytes(whole(name));
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let rows = [
        row("commands/s", rate("beeline_node_commands_total")),
        row("one-sided requests/s", rate("beeline_node_fabric_requests_total")),
        row("entries stored/s", rate("beeline_kv_stored_entries_total")),
        row("commits/s", rate("beeline_kv_commits_total")),
        row("Redis clients", whole("beeline_node_clients").to_string()),
        row("keys", whole("beeline_kv_keys").to_string()),
        row("live", bytes("beeline_kv_live_bytes")),
        row("pool used", bytes("beeline_pmem_used_bytes")),
        row("memory resident", bytes("beeline_process_resident_bytes")),
        row("processors busy", rate("beeline_process_cpu_seconds_total")),
    ];
    let node = table(&["", ""], &rows).trim_start().to_owned();
    let commands = commands(before, now, seconds);
    if commands.is_empty() {
        return node;
    }
    let head = ["SERVICE", "COMMAND", "BUSY", "P50", "P99", "P99.9"];
    format!("{node}\n{}", table(&head, &commands))
}

/// Rows of the commands that took most time between the two looks, or since the start where none did:
/// what makes the node slow now.
fn commands(
    before: &Map<String, Value>,
    now: &Map<String, Value>,
    seconds: f64,
) -> Vec<Vec<String>> {
    let list = |look: &Map<String, Value>| {
        look.get("commands").and_then(Value::as_array).cloned().unwrap_or_default()
    };
    let text = |row: &Value, name: &str| row[name].as_str().unwrap_or_default().to_owned();
    let number = |row: &Value, name: &str| row[name].as_f64().unwrap_or(0.0);
    let earlier = list(before);
    let spent = |row: &Value| {
        let same = |other: &&Value| {
            other["service"] == row["service"] && other["command"] == row["command"]
        };
        let known = earlier.iter().find(same).map_or(0.0, |known| number(known, "seconds"));
        (number(row, "seconds") - known).max(0.0)
    };
    let mut rows: Vec<(f64, Value)> = list(now).into_iter().map(|row| (spent(&row), row)).collect();
    // Stable: those of no time stay in the order of their time since the start.
    rows.sort_by(|one, other| other.0.total_cmp(&one.0));
    let shown = rows.into_iter().take(COMMANDS_SHOWN);
    shown
        .map(|(spent, row)| {
            vec![
                text(&row, "service"),
                text(&row, "command"),
                human_us(spent * 1e6 / seconds.max(1e-3)) + "/s",
                human_us(number(&row, "p50_us")),
                human_us(number(&row, "p99_us")),
                human_us(number(&row, "p999_us")),
            ]
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_differences_over_time() {
        let look = |commands: u64| {
            let value = serde_json::json!({"beeline_node_commands_total": commands});
            value.as_object().cloned().unwrap_or_default()
        };
        let text = screen(&look(100), &look(300), 2.0);
        assert!(text.lines().any(|l| l.starts_with("commands/s") && l.ends_with("100")), "{text}");
    }

    #[test]
    fn the_commands_that_take_time_now_come_first() {
        let look = |get: f64, scan: f64| {
            let row = |command: &str, seconds: f64| {
                serde_json::json!({
                    "service": "resp", "command": command, "seconds": seconds,
                    "p50_us": 1.0, "p99_us": 64.0, "p999_us": 2048.0,
                })
            };
            let value = serde_json::json!({"commands": [row("get", get), row("scan", scan)]});
            value.as_object().cloned().unwrap_or_default()
        };
        let text = screen(&look(90.0, 1.0), &look(90.1, 2.0), 2.0);
        let lines: Vec<&str> = text.lines().collect();
        let at = |command: &str| lines.iter().position(|line| line.contains(command));
        assert!(at("scan") < at("get") && at("SERVICE") < at("scan"), "{text}");
        let scan = at("scan").map_or("", |at| lines[at]);
        for cell in ["500 ms/s", "1.0 us", "64.0 us", "2.0 ms"] {
            assert!(scan.contains(cell), "{cell} is missing: {text}");
        }
    }

    #[test]
    fn a_node_that_is_not_there_is_named_with_advice() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = closed.local_addr().unwrap();
        drop(closed);
        let error = format!("{:#}", look(address).unwrap_err());
        assert!(error.contains(&address.to_string()) && error.contains("beeline serve"), "{error}");
    }
}

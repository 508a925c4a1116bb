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

/// Patience with a node that does not answer.
const TIMEOUT: Duration = Duration::from_secs(5);
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
    table(&["", ""], &rows).trim_start().to_owned()
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
    fn a_node_that_is_not_there_is_named_with_advice() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = closed.local_addr().unwrap();
        drop(closed);
        let error = format!("{:#}", look(address).unwrap_err());
        assert!(error.contains(&address.to_string()) && error.contains("beeline serve"), "{error}");
    }
}

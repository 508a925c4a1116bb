//! Programs of others, with and without user-space sockets at both ends.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::super::ports::free_port;
use super::super::report::{Better, Report};
use super::super::turns::{Contender, pin, unpin};
use super::{Part, SUBJECT, SocketsArguments, command, measure};
use crate::output::Output;

const PEER: &str = "kernel TCP";

/// A server that ends with this value.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn is_there(program: &str) -> bool {
    let mut command = Command::new(program);
    let version =
        command.arg("-v").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    version.status().is_ok()
}

pub(super) fn missing(programs: &[&str], output: Output) -> bool {
    let absent: Vec<&str> = programs.iter().copied().filter(|name| !is_there(name)).collect();
    if !absent.is_empty() {
        output.note(format!("left out: needs {}", absent.join(" and ")));
    }
    !absent.is_empty()
}

/// Starts a server on the second core and waits until it listens.
fn serve(mut command: Command, port: u16) -> anyhow::Result<Server> {
    pin(1)?;
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    unpin()?;
    let server = Server(child.context("starting a server")?);
    let began = Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        anyhow::ensure!(began.elapsed() < Duration::from_secs(10), "the server does not listen");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(server)
}

/// Runs a client on the first core; what it prints.
fn ask(mut command: Command) -> anyhow::Result<String> {
    pin(0)?;
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output();
    unpin()?;
    let output = output.context("starting a client")?;
    anyhow::ensure!(output.status.success(), "the client failed: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// redis-server with redis-benchmark.
pub fn redis(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    if missing(&["redis-server", "redis-benchmark"], output) {
        arguments.time.skip(Part::Redis.cases());
        return Ok(());
    }
    let options = &arguments.options;
    for (connections, requests) in
        [(1_u32, options.size(100_000_u64, 200)), (50, options.size(200_000, 500))]
    {
        for test in ["get", "set"] {
            let turn = |accelerated| {
                move || {
                    let requests = arguments.time.rounds(requests);
                    let port = free_port()?;
                    let text = port.to_string();
                    let mut server = command(arguments, accelerated, OsStr::new("redis-server"))?;
                    server.args(["--port", &text, "--save", "", "--appendonly", "no"]);
                    server.current_dir(std::env::temp_dir());
                    let _server = serve(server, port)?;
                    let mut client =
                        command(arguments, accelerated, OsStr::new("redis-benchmark"))?;
                    client.args(["-p", &text, "-t", test, "--csv", "-P", "1"]);
                    client.args(["-c", &connections.to_string(), "-n", &requests.to_string()]);
                    let said = ask(client)?;
                    // "GET","123456.78",...
                    let line = said.lines().find(|line| !line.starts_with("\"test\""));
                    let rate = line.and_then(|line| line.split('"').nth(3));
                    let rate = rate.and_then(|rate| rate.parse::<f64>().ok());
                    rate.with_context(|| format!("redis-benchmark said {said:?}"))
                }
            };
            let contenders =
                vec![Contender::new(SUBJECT, turn(true)), Contender::new(PEER, turn(false))];
            let test = test.to_uppercase();
            let case = format!("redis {test}, {connections} connections, -P 1");
            measure(arguments, report, output, (&case, "op/s", Better::Higher), contenders)?;
        }
    }
    Ok(())
}

/// nginx, one worker, with wrk.
pub fn nginx(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    if missing(&["nginx", "wrk"], output) {
        arguments.time.skip(Part::Nginx.cases());
        return Ok(());
    }
    let seconds = arguments.options.amount(None, 3, 1);
    for connections in [1_u32, 50] {
        for latency in [false, true] {
            // A rate, and with one connection the median answer.
            if latency && connections > 1 {
                continue;
            }
            let turn = |accelerated| {
                move || {
                    let folder = Folder::new()?;
                    let port = free_port()?;
                    let configuration = configure(&folder.0, port)?;
                    let mut server = command(arguments, accelerated, OsStr::new("nginx"))?;
                    server.arg("-p").arg(&folder.0).arg("-c").arg(configuration);
                    let _server = serve(server, port)?;
                    let mut client = command(arguments, accelerated, OsStr::new("wrk"))?;
                    client.args(["-t", "1", "-c", &connections.to_string(), "--latency"]);
                    client.args(["-d", &format!("{seconds}s")]);
                    client.arg(format!("http://127.0.0.1:{port}/small"));
                    let said = ask(client)?;
                    let sought = if latency { "50%" } else { "Requests/sec:" };
                    let line = said.lines().find(|line| line.trim_start().starts_with(sought));
                    let word = line.and_then(|line| line.split_whitespace().nth(1));
                    word.and_then(figure).with_context(|| format!("wrk said {said:?}"))
                }
            };
            let contenders =
                vec![Contender::new(SUBJECT, turn(true)), Contender::new(PEER, turn(false))];
            let (what, unit, better) = if latency {
                ("median answer", "us", Better::Lower)
            } else {
                ("requests", "op/s", Better::Higher)
            };
            let case = format!("nginx, 96 B file, {connections} connections, {what}");
            measure(arguments, report, output, (&case, unit, better), contenders)?;
        }
    }
    Ok(())
}

/// "12345.67", or "8.00us", "1.20ms" in microseconds.
pub(super) fn figure(word: &str) -> Option<f64> {
    let (digits, scale) = match word {
        word if word.ends_with("us") => (word.trim_end_matches("us"), 1.0),
        word if word.ends_with("ms") => (word.trim_end_matches("ms"), 1e3),
        word => (word, 1.0),
    };
    Some(digits.parse::<f64>().ok()? * scale)
}

/// A folder of our own, removed with this value.
struct Folder(std::path::PathBuf);

impl Folder {
    fn new() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("beeline-bench-nginx-{}", std::process::id()));
        std::fs::create_dir_all(&path)?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn configure(folder: &std::path::Path, port: u16) -> anyhow::Result<std::path::PathBuf> {
    std::fs::write(folder.join("small"), [b'x'; 96])?;
    let path = folder.join("nginx.conf");
    let own = folder.display();
    let text = format!(
        "daemon off;\nmaster_process off;\npid {own}/pid;\nerror_log /dev/null;\n\
         events {{ worker_connections 1024; }}\n\
         http {{ access_log off; keepalive_requests 100000000; client_body_temp_path {own}/a; \
         proxy_temp_path {own}/b; fastcgi_temp_path {own}/c; uwsgi_temp_path {own}/d; \
         scgi_temp_path {own}/e;\nserver {{ listen 127.0.0.1:{port}; root {own}; }} }}\n"
    );
    std::fs::write(&path, text)?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_wrk_are_read_whatever_their_unit() {
        assert_eq!(figure("8.50us"), Some(8.5));
        assert_eq!(figure("1.20ms"), Some(1200.0));
        assert_eq!(figure("101.5"), Some(101.5));
        assert_eq!(figure("soon"), None);
    }
}

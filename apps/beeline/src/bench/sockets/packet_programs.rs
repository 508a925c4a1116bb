//! Programs of others over packets: a key-value store and a file server at one host, their clients at the other,
//! against the same programs over kernel TCP.

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::super::BenchOptions;
use super::super::report::{Better, Report, Row};
use super::super::turns::{Contender, alternate, online};
use super::packets::{ADDRESSES, By, Hosts, PEER, SUBJECT};
use super::programs::{figure, missing};
use crate::output::Output;

/// A server that ends with this value.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a server at the second host, and waits until a client of the first, by the kernel, finds it.
fn serve(hosts: &Hosts<'_>, mut command: Command, port: u16) -> anyhow::Result<Server> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn();
    let server = Server(child.context("starting a server")?);
    let began = Instant::now();
    loop {
        // Seen from its own namespace: the table of sockets that listen.
        let mut look = hosts.program(1, By::Kernel, "cat")?;
        let output = look.arg("/proc/self/net/tcp").output().context("looking for the server")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        if text.contains(&format!(":{port:04X} 00000000:0000 0A")) {
            return Ok(server);
        }
        anyhow::ensure!(began.elapsed() < Duration::from_secs(10), "the server does not listen");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn ask(mut command: Command) -> anyhow::Result<String> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::null()).output();
    let output = output.context("starting a client")?;
    anyhow::ensure!(output.status.success(), "the client failed: {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn measure(
    options: &BenchOptions,
    report: &mut Report,
    output: Output,
    (case, unit, better): (String, &'static str, Better),
    turn: impl Fn(By) -> anyhow::Result<f64>,
) -> anyhow::Result<()> {
    let mut contenders = vec![
        Contender::new(SUBJECT, || turn(By::Packets)),
        Contender::new(PEER, || turn(By::Kernel)),
    ];
    let figures = alternate(options.turns(), &mut contenders, output)?;
    let row = Row::new(case, SUBJECT, unit, better, &figures[0]);
    report.push(row.against(PEER, &figures[0], &figures[1]).beside("cores", online()));
    Ok(())
}

/// redis-server with redis-benchmark, one request at a time.
pub fn redis(
    hosts: &Hosts<'_>,
    options: &BenchOptions,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    const PORT: u16 = 6390;
    if missing(&["redis-server", "redis-benchmark"], output) {
        return Ok(());
    }
    let port = PORT.to_string();
    for (test, connections) in [("get", 1_u32), ("set", 1), ("get", 20), ("set", 20)] {
        let requests = options.size(20_000_u64 * u64::from(connections.min(4)), 100).to_string();
        let turn = |by: By| {
            let mut server = hosts.program(1, by, "redis-server")?;
            server.args(["--bind", ADDRESSES[1], "--port", &port, "--protected-mode", "no"]);
            server.args(["--save", "", "--appendonly", "no"]).current_dir(std::env::temp_dir());
            let _server = serve(hosts, server, PORT)?;
            let mut client = hosts.program(0, by, "redis-benchmark")?;
            client.args(["-h", ADDRESSES[1], "-p", &port, "-t", test, "--csv", "-P", "1"]);
            client.args(["-c", &connections.to_string(), "-n", &requests]);
            let said = ask(client)?;
            let line = said.lines().find(|line| !line.starts_with("\"test\""));
            let rate = line.and_then(|line| line.split('"').nth(3));
            let rate = rate.and_then(|rate| rate.parse::<f64>().ok());
            rate.with_context(|| format!("redis-benchmark said {said:?}"))
        };
        let test = test.to_uppercase();
        let case = format!("redis {test}, {connections} connections, one request at a time");
        measure(options, report, output, (case, "op/s", Better::Higher), turn)?;
    }
    Ok(())
}

/// nginx with wrk, keep-alive, files of growing size.
pub fn nginx(
    hosts: &Hosts<'_>,
    options: &BenchOptions,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    const PORT: u16 = 8090;
    if missing(&["nginx", "wrk"], output) {
        return Ok(());
    }
    let folder = tempfile::tempdir().context("a folder for nginx")?;
    let seconds = options.amount(None, 3, 1);
    let sizes: &[usize] = if options.quick { &[8 << 10] } else { &[8 << 10, 128 << 10, 2 << 20] };
    for &size in sizes {
        let name = format!("file-{size}");
        std::fs::write(folder.path().join(&name), vec![b'x'; size])?;
        let own = folder.path().display();
        let text = format!(
            "user root;\ndaemon off;\nmaster_process off;\npid {own}/pid;\nerror_log /dev/null;\n\
             events {{ worker_connections 1024; }}\n\
             http {{ access_log off; keepalive_requests 100000000; client_body_temp_path {own}/a; \
             proxy_temp_path {own}/b; fastcgi_temp_path {own}/c; uwsgi_temp_path {own}/d; \
             scgi_temp_path {own}/e;\nserver {{ listen {}:{PORT}; root {own}; }} }}\n",
            ADDRESSES[1],
        );
        let configuration = folder.path().join("nginx.conf");
        std::fs::write(&configuration, text)?;
        let turn = |by: By| {
            let mut server = hosts.program(1, by, "nginx")?;
            server.arg("-p").arg(folder.path()).arg("-c").arg(&configuration);
            let _server = serve(hosts, server, PORT)?;
            let mut client = hosts.program(0, by, "wrk")?;
            client.args(["-t", "1", "-c", "4", "--latency", "-d", &format!("{seconds}s")]);
            client.arg(format!("http://{}:{PORT}/{name}", ADDRESSES[1]));
            let said = ask(client)?;
            let line = said.lines().find(|line| line.trim_start().starts_with("50%"));
            let word = line.and_then(|line| line.split_whitespace().nth(1));
            word.and_then(figure).with_context(|| format!("wrk said {said:?}"))
        };
        let case = format!("nginx, {} KiB file, 4 connections, median answer", size >> 10);
        measure(options, report, output, (case, "us", Better::Lower), turn)?;
    }
    Ok(())
}

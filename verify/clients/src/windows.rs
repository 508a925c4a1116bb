//! Two hosts that are joined by a memory window: addresses or network namespaces of this one, each with a
//! monitor and a proxy of its own. The window is a file.

use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::hosts::{ADDRESSES as CABLE, Namespaces, THIRD, Third};
use crate::preload::{Monitor, Place};
use crate::{eventually, free_port, program};

const PATIENCE: Duration = Duration::from_secs(60);
/// Addresses of two hosts that are none of their own.
pub const ADDRESSES: [&str; 2] = ["127.78.1.2", "127.78.1.3"];

/// A proxy and its keeper, ended together.
#[derive(Debug)]
pub struct Proxy(Child);

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Hosts that are joined by memory windows, each with a monitor and a proxy.
#[derive(Debug)]
pub struct Hosts {
    /// Ended first.
    pub proxies: Vec<Proxy>,
    /// One a host.
    pub monitors: Vec<Monitor>,
    /// Of the window and of lists of peers.
    pub folder: tempfile::TempDir,
    places: [Place; 2],
    /// Of each host.
    pub addresses: [&'static str; 2],
    ports: [u16; 2],
    /// Ended last.
    _namespaces: Option<Namespaces>,
}

impl Hosts {
    /// Two addresses of this host. `more`: of each side's file, what stands before the peers and behind them.
    #[must_use]
    pub fn start(more: [[&str; 2]; 2]) -> Self {
        Self::start_over("", more)
    }

    /// As [`Hosts::start`]; `query`: more of the window's URL.
    #[must_use]
    pub fn start_over(query: &str, more: [[&str; 2]; 2]) -> Self {
        let ports = [free_port(), free_port()];
        let places = Default::default();
        let mut hosts = Self::without_proxies(places, ADDRESSES, ports, None);
        hosts.proxies = (0..2).map(|side| hosts.proxy(side, more[side], query)).collect();
        hosts
    }

    /// In network namespaces of their own, with a cable between them; `None` after saying that `test` is skipped.
    #[must_use]
    pub fn in_namespaces(test: &str, more: [&str; 2]) -> Option<Self> {
        Self::in_namespaces_for(test, more, None)
    }

    /// As [`Hosts::in_namespaces`], where everything runs as `user`.
    ///
    /// # Panics
    ///
    /// When the folder cannot be given to that user.
    #[must_use]
    pub fn in_namespaces_for(test: &str, more: [&str; 2], user: Option<&str>) -> Option<Self> {
        let namespaces = Namespaces::make(test)?;
        let places = [0, 1].map(|side| {
            let place = namespaces.place(side);
            user.map_or(place.clone(), |user| place.with_user(user))
        });
        let mut hosts = Self::without_proxies(places, CABLE, [9090; 2], Some(namespaces));
        if let Some(user) = user {
            let mut give = std::process::Command::new("chown");
            let given = give.arg(user).arg(hosts.folder.path()).status();
            assert!(given.is_ok_and(|status| status.success()), "a folder of {user}'s");
        }
        hosts.proxies = (0..2).map(|side| hosts.proxy(side, more, "")).collect();
        Some(hosts.up())
    }

    fn without_proxies(
        places: [Place; 2],
        addresses: [&'static str; 2],
        ports: [u16; 2],
        namespaces: Option<Namespaces>,
    ) -> Self {
        let monitors =
            places.iter().map(|place| Monitor::start_at(place.clone(), Vec::new())).collect();
        let folder = tempfile::tempdir().expect("a folder");
        let proxies = Vec::new();
        Self { proxies, monitors, folder, places, addresses, ports, _namespaces: namespaces }
    }

    /// What a proxy is told, and its process.
    ///
    /// # Panics
    ///
    /// When it cannot be started.
    #[must_use]
    pub fn proxy(&self, side: usize, more: [&str; 2], query: &str) -> Proxy {
        let other = 1 - side;
        let Self { addresses, ports, folder, .. } = self;
        let peers = folder.path().join(format!("peers-{side}.toml"));
        let text = format!(
            "addresses = [\"{}\"]\nlisten = \"{}:{}\"\n{}\n[[peers]]\nname = \"other\"\n\
             addresses = [\"{}\"]\nmonitor = \"{}:{}\"\n{}\n",
            addresses[side],
            addresses[side],
            ports[side],
            more[0],
            addresses[other],
            addresses[other],
            ports[other],
            more[1],
        );
        std::fs::write(&peers, text).expect("a file");
        let file = folder.path().join("window");
        let window = format!("ntb://{}?side={side}&size=4194304{query}", file.display());
        let mut command = self.places[side].command(program());
        command.args(["sockets", "proxy", "--window", &window, "--peers"]).arg(&peers);
        command.env("BEELINE_SOCKETS_MONITOR", self.monitors[side].name()).stdin(Stdio::null());
        Proxy(command.spawn().expect("the program starts"))
    }

    /// Two addresses of this host, whose link is up.
    #[must_use]
    pub fn both_up() -> Self {
        Self::start([["", ""], ["", ""]]).up()
    }

    /// Two partitions, behind write-combining buffers.
    #[must_use]
    pub fn two_partitions_in_disorder() -> Self {
        let two = ["partitions = 2", ""];
        Self::start_over("&disorder=7", [two, two]).up()
    }

    /// Two partitions with two threads each.
    #[must_use]
    pub fn two_threads() -> Self {
        let two = ["partitions = 2\nthreads_of_a_partition = 2", ""];
        Self::start([two, two]).up()
    }

    /// Waits until the link is up.
    #[must_use]
    pub fn up(self) -> Self {
        for side in 0..2 {
            self.says(side, "link to other", "up");
        }
        self
    }

    /// A row of a proxy's status.
    #[must_use]
    pub fn value(&self, side: usize, row: &str) -> Option<String> {
        let status: Value = self.monitors[side].status()?;
        Some(status["proxy"][row].as_str()?.to_owned())
    }

    /// A number of a proxy's status; 0 where there is none.
    #[must_use]
    pub fn count(&self, side: usize, row: &str) -> u64 {
        self.value(side, row).and_then(|value| value.parse().ok()).unwrap_or(0)
    }

    /// Waits until a row of the status begins so; "up" is said of a link over which connections can be made, and of
    /// no other.
    ///
    /// # Panics
    ///
    /// When it does not in time.
    pub fn says(&self, side: usize, row: &str, wanted: &str) {
        eventually(&format!("{row} = {wanted}"), PATIENCE, || {
            let value = self.value(side, row)?;
            (value == wanted || wanted != "up" && value.starts_with(wanted)).then_some(())
        });
    }

    /// A counter of all partitions together, of which there are at most eight.
    #[must_use]
    pub fn sum(&self, side: usize, row: &str) -> u64 {
        let status = self.monitors[side].status();
        let rows = status.as_ref().and_then(|status| status["proxy"].as_object());
        let end = format!(": {row}");
        let ends = rows
            .into_iter()
            .flatten()
            .filter(|(name, _)| name.starts_with("other, partition ") && name.ends_with(&end));
        ends.filter_map(|(_, value)| value.as_str()?.parse::<u64>().ok()).sum()
    }

    /// Connections of a proxy.
    #[must_use]
    pub fn connections(&self, side: usize) -> u64 {
        self.count(side, "connections")
    }

    /// The process that carries packets, which the keeper starts again.
    ///
    /// # Panics
    ///
    /// When the proxy does not say it.
    #[must_use]
    pub fn worker(&self, side: usize) -> i32 {
        let process = self.value(side, "proxy's process").expect("a process");
        process.parse().expect("a number")
    }

    /// Where programs of a host run.
    #[must_use]
    pub fn place(&self, side: usize) -> &Place {
        &self.places[side]
    }
}

/// Three hosts in network namespaces: the first has a window to each of the others.
#[derive(Debug)]
pub struct Three {
    _proxies: Vec<Proxy>,
    monitors: Vec<Monitor>,
    _folder: tempfile::TempDir,
    addresses: [&'static str; 3],
    _namespaces: (Third, Namespaces),
}

impl Hosts {
    /// Three of them, or `None` after saying that `test` is skipped.
    ///
    /// # Panics
    ///
    /// When their links do not come up.
    #[must_use]
    pub fn three(test: &str) -> Option<Three> {
        let first = Namespaces::make(test)?;
        let third = first.third(test)?;
        let places = [first.place(0), first.place(1), third.place()];
        let addresses = [CABLE[0], CABLE[1], THIRD[1]];
        let folder = tempfile::tempdir().expect("a folder");
        let monitors: Vec<Monitor> =
            places.iter().map(|place| Monitor::start_at(place.clone(), Vec::new())).collect();
        let window = |name: &str, side: usize| {
            let file = folder.path().join(name);
            format!("ntb://{}?side={side}&size=4194304", file.display())
        };
        // The third host reaches the first at the other end of its own cable.
        let own = [CABLE[0], THIRD[0]];
        let peer = |name: &str, address: &str, window: &str| {
            format!(
                "[[peers]]\nname = \"{name}\"\naddresses = [\"{address}\"]\n\
                 monitor = \"{address}:9090\"\nwindow = \"{window}\"\n"
            )
        };
        let texts = [
            format!(
                "addresses = [\"{}\", \"{}\"]\nlisten = \"0.0.0.0:9090\"\n{}{}",
                own[0],
                own[1],
                peer("b", addresses[1], &window("to-b", 0)),
                peer("c", addresses[2], &window("to-c", 0)),
            ),
            format!(
                "addresses = [\"{0}\"]\nlisten = \"{0}:9090\"\n{1}",
                addresses[1],
                peer("a", own[0], &window("to-b", 1)),
            ),
            format!(
                "addresses = [\"{0}\"]\nlisten = \"{0}:9090\"\n{1}",
                addresses[2],
                peer("a", own[1], &window("to-c", 1)),
            ),
        ];
        let mut proxies = Vec::new();
        for (host, text) in texts.iter().enumerate() {
            let peers = folder.path().join(format!("{host}.toml"));
            std::fs::write(&peers, text).expect("a file");
            let mut command = monitors[host].beeline(&["sockets", "proxy", "--peers"]);
            let child = command.arg(&peers).stdin(Stdio::null()).spawn();
            proxies.push(Proxy(child.expect("the program starts")));
        }
        let _namespaces = (third, first);
        let all = Three { _proxies: proxies, monitors, _folder: folder, addresses, _namespaces };
        for name in ["b", "c"] {
            eventually("a link", PATIENCE, || (all.word(0, name)? == "up").then_some(()));
        }
        Some(all)
    }
}

impl Three {
    fn word(&self, host: usize, name: &str) -> Option<String> {
        let status = self.monitors[host].status()?;
        Some(status["proxy"][format!("link to {name}")].as_str()?.to_owned())
    }

    /// A program under the library.
    #[must_use]
    pub fn command(&self, host: usize, words: &[&str]) -> std::process::Command {
        self.monitors[host].command(true, words)
    }

    /// A host's own address at its cable.
    #[must_use]
    pub fn address(&self, host: usize) -> &'static str {
        self.addresses[host]
    }

    /// Where another host reaches the first.
    #[must_use]
    pub fn first_for(&self, host: usize) -> &'static str {
        if host == 2 { THIRD[0] } else { CABLE[0] }
    }

    /// A number of a proxy's status; 0 where there is none.
    #[must_use]
    pub fn count(&self, host: usize, row: &str) -> u64 {
        let status = self.monitors[host].status().unwrap_or_default();
        status["proxy"][row].as_str().and_then(|value| value.parse().ok()).unwrap_or(0)
    }
}

/// Waits until something listens at `port` where the process runs.
///
/// # Panics
///
/// When nothing does in time.
pub fn listens(process: u32, port: u16) {
    eventually("a server that listens", PATIENCE, || {
        let text = std::fs::read_to_string(format!("/proc/{process}/net/tcp")).ok()?;
        text.contains(&format!(":{port:04X} 00000000:0000 0A")).then_some(())
    });
}

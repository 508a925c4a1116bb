//! Two hosts on this one: network namespaces with a cable between them, each with a monitor and a
//! relay of its own.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::preload::{Monitor, Place};
use crate::server::PATIENCE;
use crate::{bounded, eventually, need, said, skip};

/// Addresses of the two hosts.
pub const ADDRESSES: [&str; 2] = ["10.77.0.1", "10.77.0.2"];
/// Port at which each relay is called.
const RELAY: u16 = 4791;

/// One host.
#[derive(Debug)]
pub struct Host {
    /// Its monitor, while there is one.
    pub monitor: Option<Monitor>,
    /// Its address.
    pub address: &'static str,
    namespace: String,
    /// Relays that it had: they outlive their monitors.
    relays: Vec<u64>,
}

/// Two of them, and what lies between.
#[derive(Debug)]
pub struct Hosts {
    /// The two.
    pub hosts: [Host; 2],
    _folder: TempDir,
}

fn ip(words: &[&str]) -> Result<(), String> {
    let output = bounded(Command::new("ip").args(words), PATIENCE);
    if output.status.success() { Ok(()) } else { Err(format!("ip {words:?}: {}", said(&output))) }
}

/// The namespaces, without anything in them.
fn wire(names: &[String; 2]) -> Result<(), String> {
    let [one, other] = names;
    for name in names {
        ip(&["netns", "add", name])?;
        ip(&["-n", name, "link", "set", "lo", "up"])?;
    }
    ip(&[
        "-n", one, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", other,
    ])?;
    for (name, address) in names.iter().zip(ADDRESSES) {
        ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", "cable"])?;
        ip(&["-n", name, "link", "set", "cable", "up"])?;
    }
    Ok(())
}

/// Two network namespaces with a cable between them and nothing else; ended with what runs in them.
#[derive(Debug)]
pub struct Namespaces([String; 2]);

impl Namespaces {
    /// `None` after saying that `test` is skipped. Their addresses are [`ADDRESSES`].
    #[must_use]
    pub fn make(test: &str) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        need(test, "ip")?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let names = ["a", "b"].map(|end| format!("bw{}-{count}{end}", std::process::id()));
        let all = Self(names);
        if let Err(why) = wire(&all.0) {
            skip(test, &format!("two network namespaces cannot be made: {why}"));
            return None;
        }
        Some(all)
    }

    /// Where programs of a host run.
    #[must_use]
    pub fn place(&self, at: usize) -> Place {
        Place::namespace(&self.0[at])
    }

    /// A third host with a cable of its own to the first; `None` after saying that `test` is skipped.
    #[must_use]
    pub fn third(&self, test: &str) -> Option<Third> {
        let third = Third(format!("{}c", self.0[0]));
        let wire = || -> Result<(), String> {
            ip(&["netns", "add", &third.0])?;
            let pair = ["link", "add", "cable3", "type", "veth", "peer", "name", "cable", "netns"];
            ip(&[&["-n", &self.0[0]][..], &pair, &[&third.0]].concat())?;
            let ends = [(&self.0[0], "cable3"), (&third.0, "cable")];
            for ((name, link), address) in ends.into_iter().zip(THIRD) {
                ip(&["-n", name, "addr", "add", &format!("{address}/24"), "dev", link])?;
                ip(&["-n", name, "link", "set", link, "up"])?;
            }
            ip(&["-n", &third.0, "link", "set", "lo", "up"])
        };
        if let Err(why) = wire() {
            skip(test, &format!("a third network namespace cannot be made: {why}"));
            return None;
        }
        Some(third)
    }
}

/// Addresses of the first host and the third at the cable between them.
pub const THIRD: [&str; 2] = ["10.77.1.1", "10.77.1.2"];

/// The network namespace of a third host.
#[derive(Debug)]
pub struct Third(String);

impl Third {
    /// Where its programs run.
    #[must_use]
    pub fn place(&self) -> Place {
        Place::namespace(&self.0)
    }
}

impl Drop for Third {
    fn drop(&mut self) {
        end(&self.0);
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for name in &self.0 {
            end(name);
        }
    }
}

impl Hosts {
    /// Two hosts whose monitors know of each other, or `None` after saying that `test` is skipped.
    /// `relay` is the scheme by which they reach each other ("tcp"). What only sleepers use is carried, too.
    ///
    /// # Panics
    ///
    /// When a relay does not answer.
    #[must_use]
    pub fn start(test: &str, scheme: &str) -> Option<Self> {
        Self::start_with(test, scheme, [true, true], 0)
    }

    /// As [`Hosts::start`]; where `knows` is false, the host lists no other. What only sleepers use is left to
    /// the kernel for `hold` seconds.
    ///
    /// # Panics
    ///
    /// When a relay does not answer.
    #[must_use]
    pub fn start_with(test: &str, scheme: &str, knows: [bool; 2], hold: u16) -> Option<Self> {
        let more = format!("sleepers_hold_seconds = {hold}\nover_tcp = true\n");
        Self::start_over(test, knows, &more, |_, _, address| format!("{scheme}://{address}"))
    }

    /// Two hosts with a memory window between them, in a file, and nothing else that may carry connections.
    ///
    /// # Panics
    ///
    /// When a relay does not answer.
    #[must_use]
    pub fn start_with_window(test: &str) -> Option<Self> {
        const WINDOW_BYTES: u64 = 64 << 20;
        let url = |folder: &Path, side: usize, address: String| {
            let window = folder.join("window");
            let file = File::options().create(true).append(true).open(&window).expect("a file");
            file.set_len(WINDOW_BYTES).expect("room for a window");
            format!("ntb://{address}?window={}&side={side}", window.display())
        };
        Self::start_over(test, [true, true], "", url)
    }

    /// `more` of the file with the hosts; `url` of a relay, in that of the host at its second argument.
    fn start_over(
        test: &str,
        knows: [bool; 2],
        more: &str,
        url: impl Fn(&Path, usize, String) -> String,
    ) -> Option<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        need(test, "ip")?;
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let names = ["a", "b"].map(|end| format!("bl{}-{count}{end}", std::process::id()));
        let folder = tempfile::tempdir().expect("a folder");
        let host = |at: usize| Host {
            monitor: None,
            address: ADDRESSES[at],
            namespace: names[at].clone(),
            relays: Vec::new(),
        };
        let mut all = Self { hosts: [host(0), host(1)], _folder: folder };
        if let Err(why) = wire(&names) {
            skip(test, &format!("two network namespaces cannot be made: {why}"));
            return None;
        }
        for at in 0..2 {
            let (own, peer) = (ADDRESSES[at], ADDRESSES[1 - at]);
            let relay = |host: &str| url(all._folder.path(), at, format!("{host}:{RELAY}"));
            let mut text = format!("listen = \"{}\"\n{more}", relay(own));
            if knows[at] {
                let peer_relay = relay(peer);
                text += &format!("[[hosts]]\naddresses = [\"{peer}\"]\nrelay = \"{peer_relay}\"\n");
            }
            let path = all._folder.path().join(format!("{at}.toml"));
            std::fs::write(&path, text).expect("a file");
            let place = Place::namespace(&names[at]);
            let arguments = vec!["--hosts".to_owned(), path.display().to_string()];
            all.hosts[at].monitor = Some(Monitor::start_at(place, arguments));
            all.hosts[at].relay_process();
        }
        Some(all)
    }

    /// Bytes that each relay has sent.
    #[must_use]
    pub fn sent(&self) -> [u64; 2] {
        [0, 1].map(|at| self.hosts[at].count("sent_bytes"))
    }

    /// Waits until nothing is carried any more.
    pub fn all_let_go(&self) {
        eventually("relays that have let go of everything", PATIENCE, || {
            let none = |host: &Host| host.count("connections") == 0 && host.count("waiting") == 0;
            self.hosts.iter().all(none).then_some(())
        });
    }

    /// Takes the cable away, or puts it back.
    ///
    /// # Panics
    ///
    /// When that fails.
    pub fn connect(&self, up: bool) {
        let state = if up { "up" } else { "down" };
        ip(&["-n", &self.hosts[0].namespace, "link", "set", "cable", state]).expect("a cable");
    }
}

impl Host {
    /// Its monitor.
    ///
    /// # Panics
    ///
    /// When there is none.
    #[must_use]
    pub fn monitor(&self) -> &Monitor {
        self.monitor.as_ref().expect("a monitor")
    }

    /// The relay's counters, if it answers.
    #[must_use]
    pub fn relay(&self) -> Option<Value> {
        self.monitor().status()?.get("relay").cloned()
    }

    /// One of the relay's counters.
    ///
    /// # Panics
    ///
    /// When there is no relay.
    #[must_use]
    pub fn count(&self, name: &str) -> u64 {
        let relay = eventually("a relay", PATIENCE, || self.relay());
        relay[name].as_u64().expect("a count")
    }

    /// The relay's process; remembered, so that it is ended with the host.
    ///
    /// # Panics
    ///
    /// When there is none.
    pub fn relay_process(&mut self) -> u64 {
        let process = self.count("process");
        if !self.relays.contains(&process) {
            self.relays.push(process);
        }
        process
    }

    /// Waits until somebody listens on `port`.
    pub fn listening(&self, port: u16) {
        let filter = format!("sport = :{port}");
        eventually("a listener", PATIENCE, || {
            let mut command = Place::namespace(&self.namespace).command("ss");
            let output = bounded(command.args(["-ltnH", &filter]), PATIENCE);
            (!output.stdout.is_empty()).then_some(())
        });
    }
}

/// Ends what runs in a namespace, and the namespace.
fn end(namespace: &str) {
    // What was started there lives nowhere else.
    for _ in 0..50 {
        let output = bounded(Command::new("ip").args(["netns", "pids", namespace]), PATIENCE);
        let text = String::from_utf8_lossy(&output.stdout);
        let mut left = text.split_whitespace().peekable();
        if left.peek().is_none() {
            break;
        }
        for process in left {
            let _ = Command::new("kill").args(["-9", process]).status();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = ip(&["netns", "del", namespace]);
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &mut self.hosts {
            host.monitor = None;
            end(&host.namespace);
        }
    }
}

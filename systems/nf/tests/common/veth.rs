//! Pairs of interfaces of this host.

use std::process::Command;

/// A veth pair that goes with its value.
pub struct Veth(pub String);

impl Veth {
    /// Both ends are up; none where this user cannot make one.
    pub fn new(name: &str) -> Option<Self> {
        let peer = format!("{name}p");
        let add = ["link", "add", name, "type", "veth", "peer", "name", &peer];
        let ok = Command::new("ip").args(add).output().ok()?.status.success();
        let veth = ok.then(|| Self(name.to_owned()))?;
        for end in [name, &peer] {
            Command::new("ip").args(["link", "set", end, "up"]).output().ok()?;
        }
        Some(veth)
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).output();
    }
}

/// Does something at the end of a scope, also where a test fails: a run told to stop lets the test end.
pub struct AtEnd<F: Fn()>(pub F);

impl<F: Fn()> Drop for AtEnd<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

//! Pairs of interfaces of this host.

#![allow(dead_code)]

use std::process::Command;

/// A veth pair that goes with its value.
pub struct Veth(pub String);

impl Veth {
    /// Both ends are up; none where this user cannot make one.
    pub fn new(name: &str) -> Option<Self> {
        let veth = Self::made(name)?;
        veth.up();
        Some(veth)
    }

    /// As [`Veth::new`], and both ends are down.
    pub fn made(name: &str) -> Option<Self> {
        let peer = format!("{name}p");
        let add = ["link", "add", name, "type", "veth", "peer", "name", &peer];
        let ok = Command::new("ip").args(add).output().ok()?.status.success();
        ok.then(|| Self(name.to_owned()))
    }

    /// Sets both ends up.
    pub fn up(&self) {
        for end in [self.0.clone(), format!("{}p", self.0)] {
            let _ = Command::new("ip").args(["link", "set", &end, "up"]).output();
        }
    }
}

impl Drop for Veth {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).output();
    }
}

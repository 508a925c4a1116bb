//! Which machine this is, for choosing shared memory.

use serde::{Deserialize, Serialize};

/// Hints by which two processes find out that they can share memory. They are claims: a peer that
/// lies gets a connection that does not come about.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostIdentity {
    /// The kernel's boot id; empty when unknown.
    pub boot_id: String,
    /// Inode of the network namespace (shared memory is handed over by abstract sockets, whose
    /// names live in it); 0 when unknown.
    pub network_namespace: u64,
    /// User of the process.
    pub uid: u32,
}

impl HostIdentity {
    /// This process.
    #[must_use]
    pub fn this() -> Self {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let namespace = rustix::fs::stat("/proc/self/ns/net");
        Self {
            boot_id: boot_id.map(|text| text.trim().to_owned()).unwrap_or_default(),
            network_namespace: namespace.map(|stat| stat.st_ino).unwrap_or(0),
            uid: rustix::process::getuid().as_raw(),
        }
    }

    /// True when both are known and the same kernel.
    #[must_use]
    pub fn same_host(&self, other: &Self) -> bool {
        !self.boot_id.is_empty() && self.boot_id == other.boot_id
    }

    /// True when both see the same abstract sockets.
    #[must_use]
    pub fn same_namespace(&self, other: &Self) -> bool {
        self.network_namespace != 0 && self.network_namespace == other.network_namespace
    }
}

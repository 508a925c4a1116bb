//! Which skips `check --no-skips` forgives: those of tests that this machine cannot run.
//!
//! A reason belongs to one of three kinds. What no machine of the usual class has, or a test leaves
//! out by its nature, is always forgiven. What needs a right is forgiven where a probe of our own is
//! refused that right too: a container may be root and mount nothing. What `setup` fetches is
//! forgiven where `setup` ran and could not have everything.
//!
//! A reason of no kind is shown and forgiven: the harness and a test write to one pipe, and a line
//! may be torn. That every reason in the sources has its kind is a test of this module.

use std::path::PathBuf;

use crate::setup::{self, is_here};
use crate::step::{Outcome, Row};
use crate::target;

/// Hardware or a kernel that the usual machine lacks, what a provider has not got by its nature, what
/// a test found out by trying, what runs in a guest of the lab and needs one, what `deep` runs.
const ALWAYS: [&str; 39] = [
    "holds no server for this machine",
    "`cargo xtask deep` runs it",
    "there is no device",
    "no RDMA",
    "no InfiniBand",
    "/dev/kvm",
    "MAP_SYNC",
    "DAX file system",
    "cannot promise",
    "no verbs provider",
    "a simulated world belongs to one thread",
    "a fixed window has two ends",
    "both ends of the fixed window",
    "nodes are not simulated",
    "the provider runs in real time",
    "writes linger between acknowledgement and memory",
    "a gather list has one entry here",
    "is in another host",
    "only a guest of the lab",
    "only a guest's huge pages",
    "no window between two virtual machines here",
    // A guest's system is smaller than its host, whose own suites run the same tests.
    "lab guest: ",
    // What the emulated device of the guests does otherwise, each in docs/fabric-verbs.md.
    "soft-RoCE looks for a receive before it checks the range",
    "soft-RoCE was seen to place a word",
    // A guest's files lie on a file system without a cache of its own.
    "this file system has no cache to write back",
    "this machine has loopback addresses only",
    "the limit on open files",
    "strace may not trace here",
    // Bridges, traffic control and tun devices come as modules, which not every kernel has.
    "network namespaces need root and ip",
    "links are slowed by tc",
    "tun devices and network namespaces",
    "has no tun devices",
    "the tmpfs cannot be made read-only",
    // Which Python a system brings is not for us to say.
    "Python 3.11 with numpy",
    "there is no C compiler",
    "the user postgres may not run",
    "MongoDB's tools are not installed",
    "did not open its socket within",
    // The tests ask both for a right and for a Python that another user may run.
    "wants root, to be somebody else",
];

/// What a test may need of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    Root,
    Mounts,
    LoopDisks,
    Namespaces,
    MountNamespaces,
    /// What `setup` fetches.
    Fetched,
}

/// Parts of reasons, and what the tests that say them lack.
const NEEDS: [(&str, Need); 19] = [
    ("a disk that fails needs mkfs.ext4", Need::LoopDisks),
    ("mounting a tmpfs needs root", Need::Mounts),
    ("can be mounted by root only", Need::Mounts),
    ("a file system of its own needs root", Need::Mounts),
    ("two network namespaces cannot be made", Need::Namespaces),
    ("cannot make veth devices", Need::Namespaces),
    ("cannot make network namespaces", Need::Namespaces),
    ("no mount namespaces here", Need::MountNamespaces),
    ("a second user needs root", Need::Root),
    ("wants root", Need::Root),
    ("xtask setup", Need::Fetched),
    ("xtask lab setup", Need::Fetched),
    ("redis-server does not start", Need::Fetched),
    ("there is no infiniband/verbs.h", Need::Fetched),
    ("a kernel package is not here", Need::Fetched),
    ("QEMU", Need::Fetched),
    ("the guests' programs are not there", Need::Fetched),
    ("the stress suite is not there", Need::Fetched),
    ("are not here", Need::Fetched),
];

/// What this machine lets a test do.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    root: bool,
    mounts: bool,
    loop_disks: bool,
    namespaces: bool,
    mount_namespaces: bool,
    /// `setup` ran, and whatever it fetches is here.
    fetched: bool,
}

impl Machine {
    /// Root in name, with no other right and no network, as in a container.
    #[cfg(test)]
    pub fn with_root_alone() -> Self {
        tests::BARE
    }

    /// Tries each thing.
    pub fn probe() -> Self {
        let mounted = "d=$(mktemp -d) && mount -t tmpfs -o size=1m tmpfs $d; s=$?; \
                       umount -l $d; rmdir $d; exit $s";
        let disk = "d=$(mktemp -d) && mount -t tmpfs -o size=24m tmpfs $d && \
                    truncate -s 16M $d/image && mkfs.ext4 -q -F $d/image && mkdir $d/m && \
                    mount -o loop $d/image $d/m; s=$?; umount $d/m; umount -l $d; rmdir $d; exit $s";
        let apart = "n=xtask$$; ip netns add $n && ip link add $n-a type veth peer name $n-b && \
                     ip link set $n-b netns $n && ip netns exec $n true; s=$?; \
                     ip link del $n-a; ip netns del $n; exit $s";
        let bound = "f=$(mktemp) && unshare --mount sh -c \"mount --bind $f \
                     /proc/sys/kernel/random/boot_id\"; s=$?; rm -f $f; exit $s";
        Self {
            root: shell("test $(id -u) = 0"),
            mounts: shell(mounted),
            loop_disks: is_here("mkfs.ext4") && shell(disk),
            namespaces: is_here("ip") && shell(apart),
            mount_namespaces: is_here("unshare") && shell(bound),
            fetched: std::fs::read_to_string(lacking_file()).is_ok_and(|text| text.is_empty()),
        }
    }

    fn has(&self, need: Need) -> bool {
        match need {
            Need::Root => self.root,
            Need::Mounts => self.mounts,
            Need::LoopDisks => self.loop_disks,
            Need::Namespaces => self.namespaces,
            Need::MountNamespaces => self.mount_namespaces,
            Need::Fetched => self.fetched,
        }
    }

    /// True where a test that skipped itself for `reason` could have run here.
    pub fn could_run(&self, reason: &str) -> bool {
        kind(reason).flatten().is_some_and(|need| self.has(need))
    }
}

/// `Some(None)` for what is always forgiven, `None` for a reason that is not known.
fn kind(reason: &str) -> Option<Option<Need>> {
    if ALWAYS.iter().any(|part| reason.contains(part)) {
        return Some(None);
    }
    // The suites ask for programs that `setup` leaves to the system, too.
    if let Some((before, _)) = reason.split_once(" is not installed; ")
        && !setup::fetches(before.rsplit(' ').next().unwrap_or(before))
    {
        return Some(None);
    }
    NEEDS.iter().find(|(part, _)| reason.contains(part)).map(|(_, need)| Some(*need))
}

fn shell(script: &str) -> bool {
    std::process::Command::new("sh")
        .args(["-c", script])
        .stdin(std::process::Stdio::null())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Where `setup` writes what it could not have.
fn lacking_file() -> PathBuf {
    target().join("setup-lacks")
}

/// Keeps what `setup` could not have, one row a line; an empty file says that all is here.
pub fn remember(rows: &[Row]) {
    let lacking: Vec<String> = rows
        .iter()
        .filter(|row| row.outcome() != &Outcome::Passed)
        .map(|row| format!("{}\n", row.name()))
        .collect();
    let _ = std::fs::create_dir_all(target());
    let _ = std::fs::write(lacking_file(), lacking.concat());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A container: root in name, no right to mount or to make namespaces, no network.
    pub const BARE: Machine = Machine {
        root: true,
        mounts: false,
        loop_disks: false,
        namespaces: false,
        mount_namespaces: false,
        fetched: false,
    };

    const WHOLE: Machine = Machine {
        root: true,
        mounts: true,
        loop_disks: true,
        namespaces: true,
        mount_namespaces: true,
        fetched: true,
    };

    #[test]
    fn what_a_bare_container_cannot_run_is_forgiven_there_and_nowhere_else() {
        for reason in [
            "disk: a file system can be mounted by root only",
            "skipped: mounting a tmpfs needs root",
            "full: a disk that fails needs mkfs.ext4 and a loop device",
            "hosts: two network namespaces cannot be made: ip: Operation not permitted",
            "live: this user cannot make veth devices",
            "kv: no mount namespaces here",
            "nginx_serves: nginx is not installed; `cargo xtask setup` fetches it",
            "lab: qemu-system-x86_64 is not here; run `cargo xtask lab setup`",
            "lab: the guests' kernel is not here; run `cargo xtask lab setup`",
            "crud: redis-server does not start here: No such file or directory",
            "driver: MongoDB's driver for Node is not here; `cargo xtask setup` fetches it",
        ] {
            assert!(!BARE.could_run(reason), "{reason}");
            assert!(WHOLE.could_run(reason), "{reason}");
        }
    }

    #[test]
    fn a_right_that_this_user_has_makes_no_skip_good() {
        assert!(BARE.could_run("a second user needs root"));
        let user = Machine { root: false, ..BARE };
        assert!(!user.could_run("a second user needs root"));
    }

    #[test]
    fn what_setup_never_fetches_and_what_was_torn_is_forgiven_everywhere() {
        for reason in [
            "go: go is not installed; `cargo xtask setup` fetches it",
            "ip is not installed; `cargo xtask setup` fetches it",
            "conformance::x: there is no RDMA device: load its driver",
            "power: a file pool cannot promise durability power: ask for less",
            "conformance::x: test conformance::y ... ok",
            "lab guest: beeline-pmem damage: a disk that fails needs mkfs.ext4 and a loop device",
        ] {
            assert!(!WHOLE.could_run(reason), "{reason}");
        }
    }

    /// Literal reasons of the suites: what stands behind `skipped: `, or in a call of `skip`.
    fn reasons(text: &str) -> Vec<String> {
        let mut found = Vec::new();
        for opening in ["skip(test, \"", "skipped(\"", "\"skipped: "] {
            for (at, _) in text.match_indices(opening) {
                let rest = &text[at + opening.len()..];
                let reason = rest.split(['"', '{', '\\']).next().unwrap_or_default();
                if !reason.trim().is_empty() {
                    found.push(reason.to_owned());
                }
            }
        }
        found
    }

    fn sources(folder: &std::path::Path, found: &mut Vec<(PathBuf, String)>) {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let name = entry.file_name();
            if path.is_dir() && name != "target" && name != "xtask" && name != ".git" {
                sources(&path, found);
            } else if path.extension().is_some_and(|end| end == "rs") {
                let text = std::fs::read_to_string(&path).unwrap_or_default();
                found.extend(reasons(&text).into_iter().map(|reason| (path.clone(), reason)));
            }
        }
    }

    #[test]
    fn every_reason_in_the_sources_has_its_kind() {
        let mut found = Vec::new();
        sources(&crate::root(), &mut found);
        assert!(found.len() > 40, "{} reasons", found.len());
        for (path, reason) in found {
            let path = path.display();
            assert!(
                kind(&reason).is_some(),
                "{path}: say in xtask/src/skips.rs what {reason:?} needs"
            );
        }
    }

    #[test]
    fn a_probe_leaves_nothing_behind() {
        let before = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let machine = Machine::probe();
        let after = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let ours = |text: &str| text.lines().filter(|line| line.contains("/tmp.")).count();
        assert!(ours(&after) <= ours(&before), "{machine:?}: {after}");
    }
}

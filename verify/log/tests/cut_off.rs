//! Members in network namespaces of their own, whose links are cut, and members without disk.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod real;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use real::network::Network;
use real::{Clients, Cluster, Known, Shape, eventually, skip};

const ALL: [usize; 3] = [1, 2, 3];

fn others(node: usize) -> Vec<usize> {
    ALL.into_iter().filter(|other| *other != node).collect()
}

#[test]
fn a_leader_that_is_cut_off_is_replaced_and_comes_back() {
    let test = "a_leader_that_is_cut_off_is_replaced_and_comes_back";
    let Some(network) = Network::new() else {
        return skip(test, "network namespaces need root and ip");
    };
    let shape = network.shape();
    let cluster = Cluster::new(shape, 3, 3);
    let known: Known = Arc::new(Mutex::new(cluster.clients.clone()));
    let clients = Clients::start(&known, 4);
    clients.go_on(20);
    for _ in 0..2 {
        let old = cluster.leader();
        network.cut(old);
        cluster.leader_of(&others(old));
        clients.go_on(10);
        network.heal(old);
        eventually("the old leader follows", || cluster.follows(old));
        // A follower that is cut off is missed by no member. That it unseats no leader when it comes back is
        // shown where nothing else elects: `a_follower_that_is_cut_off_comes_back_and_unseats_nobody`.
        let follower = others(cluster.leader())[0];
        network.cut(follower);
        clients.go_on(30);
        network.heal(follower);
        eventually("it follows", || cluster.follows(follower));
        clients.go_on(10);
    }
    clients.check(|| cluster.converge(&ALL));
}

/// A small file system, unmounted with this.
struct Disk(PathBuf);

impl Disk {
    fn new(path: &Path, kib: u32) -> Option<Self> {
        std::fs::create_dir_all(path).unwrap();
        let size = format!("size={kib}k");
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(path);
        let mounted = mount.output().is_ok_and(|output| output.status.success());
        mounted.then(|| Self(path.to_owned()))
    }

    fn fill(&self) -> PathBuf {
        use std::io::Write as _;
        let path = self.0.join("ballast");
        let mut file = std::fs::File::create(&path).unwrap();
        while file.write_all(&[7; 4096]).is_ok() {}
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

/// A cluster whose members 1 and 2 have small disks of their own.
fn on_small_disks(test: &str, slots: u64) -> Option<(Cluster, Vec<Disk>, tempfile::TempDir)> {
    let place = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::cold(Shape { slots, ..Shape::new("shm") }, 3, 3);
    let mut disks = Vec::new();
    for node in [1, 2] {
        let path = place.path().join(node.to_string());
        let Some(disk) = Disk::new(&path, 12 << 10) else {
            skip(test, "a file system of its own needs root");
            return None;
        };
        cluster.folders[node - 1] = path.join("member");
        disks.push(disk);
    }
    for node in ALL {
        cluster.start(node);
    }
    Some((cluster, disks, place))
}

#[test]
fn a_leader_whose_disk_is_full_stops_when_its_ring_is_and_goes_on_with_the_disk() {
    let test = "a_leader_whose_disk_is_full_stops_when_its_ring_is_and_goes_on_with_the_disk";
    let Some((cluster, disks, _place)) = on_small_disks(test, 64) else { return };
    let leader = cluster.leader();
    if leader != 1 {
        eventually("member 1 leads", || {
            let now = cluster.leader();
            (now == 1 || cluster.ask(now, "transfer 1")?.starts_with("ok")).then_some(())
        });
    }
    cluster.leader_of(&[1]);
    cluster.append(&[1], 0, 1, 0);
    let ballast = disks[0].fill();
    // No snapshot can be written, so the ring fills up; nobody is told anything false.
    let mut accepted = 1;
    eventually("the ring is full", || {
        let line = format!("append {} 0 0 {} 0", u64::MAX, accepted + 1);
        match cluster.ask(1, &line)? {
            answer if answer.starts_with("ok") => {
                accepted += 1;
                None
            }
            answer if answer.starts_with("retry") => {
                // On a loaded machine another one may have come to lead.
                if cluster.field(1, "role").as_deref() != Some("Leader") {
                    let _ = [2, 3].map(|node| cluster.ask(node, "transfer 1"));
                }
                // Half of its slots are taken at least, and snapshots failed.
                (accepted >= 32 && cluster.number(1, "failed") > 0).then_some(())
            }
            _ => None,
        }
    });
    std::fs::remove_file(ballast).unwrap();
    eventually("a snapshot is taken", || (cluster.number(1, "snapshot") > 0).then_some(()));
    cluster.append(&[1], 0, 1000, 0);
    let list = cluster.converge(&ALL).swap_remove(0);
    assert!((1..=accepted).all(|item| list.contains(&item)), "{accepted}: {list:?}");
    assert!(list.contains(&1000));
}

#[test]
fn a_voter_whose_disk_is_full_promises_nothing_until_it_has_room() {
    let test = "a_voter_whose_disk_is_full_promises_nothing_until_it_has_room";
    // Taking the log back needs room for a second one.
    let Some((mut cluster, disks, _place)) = on_small_disks(test, 1024) else { return };
    let leader = cluster.leader();
    if leader != 3 {
        eventually("member 3 leads", || {
            let now = cluster.leader();
            (now == 3 || cluster.ask(now, "transfer 3")?.starts_with("ok")).then_some(())
        });
    }
    cluster.leader_of(&[3]);
    for item in 1..=20 {
        cluster.append(&[3], 0, item, 0);
    }
    let ballast: Vec<_> = disks.iter().map(Disk::fill).collect();
    cluster.kill(3);
    let refused = |node| cluster.number(node, "fences") > 0;
    eventually("a voter cannot take its log back", || (refused(1) || refused(2)).then_some(()));
    let leads = |node| cluster.field(node, "role").as_deref() == Some("Leader");
    assert!(!leads(1) && !leads(2), "who cannot fence does not vote");
    for file in ballast {
        std::fs::remove_file(file).unwrap();
    }
    let leader = cluster.leader_of(&[1, 2]);
    cluster.append(&[leader], 0, 21, 0);
    assert_eq!(cluster.converge(&[1, 2])[0], (1..=21).collect::<Vec<_>>());
}

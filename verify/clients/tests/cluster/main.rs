//! A cluster of real processes: writes anywhere, kills, stopped members, orders, wrong settings.
#![allow(clippy::unwrap_used, clippy::panic, clippy::expect_used, reason = "helpers of tests")]

mod faults;
mod members;
mod one_sided;
mod programs;
mod rows;
mod waves;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_verify_clients::{Connection, Reply, Server, beeline, deep, eventually, note};
use rustix::process::Signal;

use members::{CLUSTER, Cluster, PATIENCE, ask, places};

/// The connection that is there, or a new one; none for now where the member takes none.
fn open_again(client: &mut Option<Connection>, address: SocketAddr) -> Option<&mut Connection> {
    if client.is_none() {
        *client = Connection::open(address).ok();
        if client.is_none() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    client.as_mut()
}

/// One client that increments its own counter at one member, and counts what it knows.
struct Writer {
    stop: Arc<AtomicBool>,
    /// Steps acknowledged so far.
    done: Arc<AtomicI64>,
    thread: JoinHandle<(i64, i64)>,
}

impl Writer {
    fn start(name: String, address: SocketAddr) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let done = Arc::new(AtomicI64::new(0));
        let count_done = Arc::clone(&done);
        let thread = std::thread::spawn(move || {
            let (mut acknowledged, mut unknown) = (0, 0);
            let mut client: Option<Connection> = None;
            while !stopped.load(Ordering::Relaxed) {
                let Some(open) = open_again(&mut client, address) else { continue };
                match open.call(&[b"INCR", name.as_bytes()]) {
                    Ok(Reply::Integer(count)) => {
                        acknowledged += 1;
                        count_done.store(acknowledged, Ordering::Relaxed);
                        assert!(count >= acknowledged, "{name}: {count} after {acknowledged}");
                        assert!(
                            count <= acknowledged + unknown,
                            "{name}: {count} after {acknowledged} and {unknown} unknown"
                        );
                    }
                    Ok(_) => unknown += 1,
                    Err(_) => {
                        unknown += 1;
                        client = None;
                    }
                }
            }
            (acknowledged, unknown)
        });
        Self { stop, done, thread }
    }

    fn end(self) -> (i64, i64) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

fn writers(cluster: &Cluster) -> Vec<Writer> {
    (0..3)
        .map(|index| Writer::start(format!("counter{index}"), cluster.places[index].resp))
        .collect()
}

/// Waits until each of these writers was acknowledged `steps` more.
fn go_on<'a>(writers: impl IntoIterator<Item = &'a Writer>, steps: i64) {
    let count = |writer: &Writer| writer.done.load(Ordering::Relaxed);
    let goals: Vec<_> = writers.into_iter().map(|writer| (writer, count(writer) + steps)).collect();
    eventually("the writers go on", PATIENCE, || {
        goals.iter().all(|(writer, goal)| count(writer) >= *goal).then_some(())
    });
}

/// Steps that writers take between two events of a test.
const SOME: i64 = 20;

/// Every member shows the same counters, and none lost an acknowledged step or took one twice.
fn check(cluster: &Cluster, ends: &[(i64, i64)]) {
    for (index, (acknowledged, unknown)) in ends.iter().enumerate() {
        let name = format!("counter{index}");
        let counts: Vec<i64> = (0..3)
            .map(|member| cluster.ask(member, &["GET", &name]).text().parse().unwrap())
            .collect();
        assert!(*acknowledged > 0, "{name} was never written");
        assert!(counts.iter().all(|count| *count == counts[0]), "{name}: {counts:?}");
        assert!(
            (*acknowledged..=acknowledged + unknown).contains(&counts[0]),
            "{name}: {counts:?}, {acknowledged} acknowledged, {unknown} unknown"
        );
    }
}

fn rounds() -> usize {
    if deep() { 12 } else { 3 }
}

fn kills(more: &[&str]) -> i64 {
    let mut cluster = Cluster::new(0, more);
    let writers = writers(&cluster);
    for round in 0..rounds() {
        go_on(&writers, SOME);
        // The leader first, then whoever comes.
        let victim = if round == 0 { cluster.leader() } else { round % 3 };
        cluster.kill(victim);
        if !round.is_multiple_of(3) {
            // The others go on without it.
            let others = writers.iter().enumerate().filter(|(index, _)| *index != victim);
            go_on(others.map(|(_, writer)| writer), SOME);
        }
        cluster.start(victim);
        cluster.leader();
    }
    go_on(&writers, SOME);
    let ends: Vec<_> = writers.into_iter().map(Writer::end).collect();
    check(&cluster, &ends);
    ends.iter().map(|(acknowledged, _)| acknowledged).sum()
}

#[test]
fn members_killed_under_load_lose_and_repeat_nothing_over_shared_memory() {
    let writes = kills(&["--log-provider", "shm"]);
    note(&format!("{writes} acknowledged writes through {} kills of members, shm", rounds()));
}

#[test]
fn members_killed_under_load_lose_and_repeat_nothing_over_tcp() {
    let writes = kills(&["--log-provider", "tcp"]);
    note(&format!("{writes} acknowledged writes through {} kills of members, tcp", rounds()));
}

#[test]
fn a_cluster_killed_as_a_whole_comes_back_with_every_acknowledged_write() {
    let mut cluster = Cluster::new(0, &[]);
    let writers = writers(&cluster);
    go_on(&writers, 3 * SOME);
    (0..3).for_each(|index| cluster.kill(index));
    (0..3).for_each(|index| cluster.start(index));
    cluster.leader();
    go_on(&writers, SOME);
    let ends: Vec<_> = writers.into_iter().map(Writer::end).collect();
    check(&cluster, &ends);
}

#[test]
fn a_stopped_follower_holds_nobody_up_and_catches_up() {
    let cluster = Cluster::new(0, &[]);
    let leader = cluster.leader();
    let follower = (leader + 1) % 3;
    cluster.members[follower].as_ref().unwrap().signal(Signal::STOP);
    let mut client = cluster.client(leader);
    for count in 1..=500 {
        assert_eq!(ask(&mut client, &["INCR", "count"]), Reply::Integer(count));
    }
    cluster.members[follower].as_ref().unwrap().signal(Signal::CONT);
    assert_eq!(cluster.ask(follower, &["GET", "count"]).text(), "500");
}

#[test]
fn a_stopped_leader_is_followed_by_another_and_agrees_when_it_wakes() {
    let cluster = Cluster::new(0, &[]);
    let first = cluster.leader();
    let other = (first + 1) % 3;
    assert!(cluster.ask(first, &["SET", "key", "old"]).is_ok());
    cluster.members[first].as_ref().unwrap().signal(Signal::STOP);
    // Held until another leads, then carried there.
    assert!(ask(&mut cluster.client(other), &["SET", "key", "new"]).is_ok());
    cluster.members[first].as_ref().unwrap().signal(Signal::CONT);
    assert_eq!(cluster.ask(first, &["GET", "key"]).text(), "new");
}

#[test]
fn members_join_and_leave_and_the_leadership_moves() {
    let mut cluster = Cluster::new(1, &[]);
    let leader = cluster.leader();
    for n in 0..200 {
        assert!(cluster.ask(n % 3, &["SET", &format!("key{n}"), &n.to_string()]).is_ok());
    }
    cluster.start(3);
    // It waits to be taken in, and answers meanwhile.
    assert!(ask(&mut cluster.client(3), &["READONLY"]).is_ok());
    let asked = (leader + 1) % 3;
    let word = cluster.places[3].word();
    assert!(cluster.order(asked, &["join", &word]).contains("member 4 is one of the cluster"));
    assert_eq!(cluster.ask(3, &["GET", "key199"]).text(), "199");
    assert!(cluster.ask(3, &["SET", "by", "four"]).is_ok());
    assert_eq!(cluster.ask(leader, &["GET", "by"]).text(), "four");

    let status = cluster.order(asked, &["status"]);
    assert!(status.contains(&format!("cluster {CLUSTER}")), "{status}");
    assert_eq!(status.lines().count(), 6, "{status}");

    assert!(cluster.order(asked, &["transfer", "4"]).contains("member 4 leads"));
    let started = Instant::now();
    while cluster.leader() != 3 {
        assert!(started.elapsed() < PATIENCE, "the leadership did not move");
    }
    assert!(cluster.order(asked, &["snapshot"]).contains("a snapshot was taken"));
    let left = cluster.places[leader].id.to_string();
    assert!(cluster.order(asked, &["leave", &left]).contains("left the cluster"));
    let started = Instant::now();
    while cluster.info(asked, "log_members") != "3" {
        assert!(started.elapsed() < PATIENCE, "the change does not arrive");
    }
    assert!(cluster.ask(asked, &["SET", "after", "all"]).is_ok());
    assert_eq!(cluster.ask(3, &["GET", "after"]).text(), "all");
}

#[test]
fn init_makes_files_that_members_start_from() {
    let home = tempfile::tempdir().unwrap();
    let places = places(1);
    let word = places[0].word();
    let directory = home.path().join("cluster");
    let path = directory.display().to_string();
    let make =
        || beeline(&["cluster", "init", "--peers", &word, "--directory", &path]).output().unwrap();
    let made = make();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let file = directory.join("node-1.toml").display().to_string();
    assert!(!make().status.success(), "a file that is there is kept");
    // Where one of several is there none is made: they would be of two clusters.
    let half = home.path().join("half");
    std::fs::create_dir(&half).unwrap();
    std::fs::write(half.join("node-2.toml"), "").unwrap();
    let two = "1=127.0.0.1:1@127.0.0.1:2,2=127.0.0.1:3@127.0.0.1:4";
    let path = half.display().to_string();
    let refused = beeline(&["cluster", "init", "--peers", two, "--directory", &path]).output();
    let said = String::from_utf8_lossy(&refused.as_ref().unwrap().stderr).into_owned();
    assert!(!refused.unwrap().status.success() && said.contains("node-2.toml"), "{said}");
    assert_eq!(std::fs::read_dir(&half).unwrap().count(), 1, "{said}");
    // One member is a cluster too.
    let data = directory.join("node-1");
    let resp = places[0].resp.to_string();
    let fabric = places[0].fabric.to_string();
    let flags = ["--config", file.as_str(), "--resp-address", &resp, "--fabric-address", &fabric];
    let server = Server::start(&data, &flags);
    let mut client = server.connect();
    assert!(ask(&mut client, &["SET", "key", "value"]).is_ok());
    assert_eq!(ask(&mut client, &["GET", "key"]).text(), "value");
}

#[test]
fn wrong_settings_are_refused_with_the_reason() {
    let mut cluster = Cluster::new(1, &[]);
    let leader = cluster.leader();
    // Another process under a member's number, with a log of its own, while the member lives.
    let (taken, spare) = (cluster.places[2], cluster.places[3]);
    let mut flags = cluster.flags(2);
    for flag in &mut flags {
        *flag = flag
            .replace(&taken.fabric.to_string(), &spare.fabric.to_string())
            .replace(&taken.resp.to_string(), &spare.resp.to_string());
    }
    let at = flags.iter().position(|word| word == "--request-timeout").unwrap();
    flags[at + 1] = "1s".to_owned();
    let words: Vec<&str> = flags.iter().map(String::as_str).collect();
    let double = Server::start(&cluster.home.path().join("double"), &words);
    let reply = ask(&mut double.connect(), &["SET", "key", "double"]);
    assert!(matches!(&reply, Reply::Error(_)), "{reply:?}");
    assert!(cluster.ask(leader, &["SET", "key", "right"]).is_ok());
    for member in 0..3 {
        assert_eq!(cluster.ask(member, &["GET", "key"]).text(), "right");
    }
    drop(double);
    // A member's data under another member's number, and under another cluster's name.
    cluster.kill(2);
    for (flag, value) in [("--node-id", "2"), ("--cluster", "1")] {
        let mut flags = cluster.flags(2);
        let at = flags.iter().position(|word| word == flag).unwrap();
        flags[at + 1] = value.to_owned();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let (status, said) = Server::try_start(&cluster.data(2), &flags).unwrap_err();
        assert_eq!(status.code(), Some(2), "{said}");
        assert!(said.contains("belongs to member 3 of cluster 5f0c31a29be4d870"), "{said}");
    }
    // A stranger's log: the right number, another cluster.
    let stranger = cluster.home.path().join("stranger");
    let mut flags = cluster.flags(2);
    let at = flags.iter().position(|word| word == "--cluster").unwrap();
    flags[at + 1] = "77".to_owned();
    let at = flags.iter().position(|word| word == "--request-timeout").unwrap();
    flags[at + 1] = "1s".to_owned();
    let words: Vec<&str> = flags.iter().map(String::as_str).collect();
    let server = Server::start(&stranger, &words);
    let reply = ask(&mut server.connect(), &["SET", "key", "stranger"]);
    assert!(reply.text().starts_with("CLUSTERDOWN"), "{reply:?}");
    drop(server);
    cluster.start(2);
    assert!(cluster.ask(2, &["SET", "key", "value"]).is_ok());
}

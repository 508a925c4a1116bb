//! What runs out or is cut short around a node: snapshots, restores, disks, descriptors, memory.
//! Each message names what to change; nothing acknowledged is lost.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use beeline_verify_clients::resp::encode;
use beeline_verify_clients::{
    Connection, Reply, Server, beeline, bounded, deep, eventually, need, note, said, skip,
};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

const PATIENCE: Duration = Duration::from_secs(120);

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"))
}

/// Stores `count` keys of 200 bytes in one pipeline.
fn fill(connection: &mut Connection, prefix: &str, count: u32) {
    let mut requests = Vec::new();
    for n in 0..count {
        let value = format!("{n}:{}", "v".repeat(200));
        requests.extend(encode(&[b"SET", format!("{prefix}:{n}").as_bytes(), value.as_bytes()]));
    }
    let writer = connection.socket().try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(move || std::io::Write::write_all(&mut &writer, &requests).unwrap());
        for n in 0..count {
            assert!(connection.reply().unwrap().is_ok(), "{prefix}:{n}");
        }
    });
}

/// Exit code and everything said by `beeline kv ...`.
fn kv(words: &[&std::ffi::OsStr]) -> (i32, String) {
    let output = bounded(beeline(&["kv"]).args(words), PATIENCE);
    (output.status.code().unwrap_or(-1), said(&output))
}

fn checks(path: &Path) -> (i32, String) {
    kv(&["check".as_ref(), path.as_os_str()])
}

fn restore(file: &Path, data: &Path) -> Command {
    let mut command = beeline(&["kv", "restore", "--segment-size", "1MiB"]);
    command.arg(file).arg(data);
    command
}

#[test]
fn a_snapshot_cut_by_kill_9_is_whole_or_the_one_before() {
    let data = directory();
    let snapshot = data.path().join("snapshot.bee");
    let rounds = if deep() { 60_u64 } else { 6 };
    let keys = 4000;
    let (mut present, mut cut) = (0, 0);
    for round in 0..rounds {
        // Without documents, which keep an entry of their own: the keys are counted below.
        let server = Server::start(data.path(), &["--shards", "2", "--without", "documents"]);
        let mut connection = server.connect();
        if round == 0 {
            fill(&mut connection, "key", keys);
        }
        assert_eq!(connection.say("DBSIZE").text(), keys.to_string(), "round {round}");
        connection.send(if round % 2 == 0 { b"SAVE\r\n" } else { b"BGSAVE\r\n" }).unwrap();
        std::thread::sleep(Duration::from_millis(round * 7 % 40));
        server.kill();
        cut += u32::from(data.path().join("snapshot.bee.partial").exists());
        if snapshot.exists() {
            present += 1;
            let (code, said) = checks(&snapshot);
            assert_eq!(code, 0, "round {round}: {said}");
            assert!(said.contains(&format!("{keys} records")), "round {round}: {said}");
        }
    }
    note(&format!("{rounds} kills during SAVE and BGSAVE: {cut} cut short, {present} files whole"));
    // What was cut short is in nobody's way.
    let server = Server::start(data.path(), &["--shards", "2"]);
    assert!(server.connect().say("SAVE").is_ok());
    assert_eq!(checks(&snapshot).0, 0);
    assert!(!data.path().join("snapshot.bee.partial").exists());
}

#[test]
fn a_restore_cut_by_kill_9_is_refused_until_it_is_repeated() {
    let data = directory();
    let keys = 6000;
    // Without documents, which keep an entry of their own: the keys are counted below.
    let server = Server::start(data.path(), &["--shards", "2", "--without", "documents"]);
    let mut connection = server.connect();
    fill(&mut connection, "key", keys);
    assert!(connection.say("SAVE").is_ok());
    let file = data.path().join("snapshot.bee");
    drop(server);
    let place = directory();
    let start = Instant::now();
    let whole = bounded(&mut restore(&file, &place.path().join("whole")), PATIENCE);
    let duration = start.elapsed();
    assert!(whole.status.success(), "{}", said(&whole));
    let rounds = if deep() { 80_u32 } else { 8 };
    let target = place.path().join("target");
    let (mut unfinished, mut finished) = (0, 0);
    for round in 0..rounds {
        let mut child =
            restore(&file, &target).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(duration.mul_f64(f64::from(round) / f64::from(rounds)));
        child.kill().unwrap();
        child.wait().unwrap();
        let (code, said) = checks(&target);
        if target.join("restore.unfinished").exists() {
            unfinished += 1;
            assert_eq!(code, 4, "round {round}: {said}");
            assert!(said.contains("kv restore"), "round {round}: {said}");
            let (status, said) = Server::try_start(&target, &[]).unwrap_err();
            assert_eq!(status.code(), Some(4), "round {round}: {said}");
            assert!(said.contains("kv restore"), "round {round}: {said}");
        } else if target.join("pool.bee").exists() {
            finished += 1;
            assert_eq!(code, 0, "round {round}: {said}");
            assert!(said.contains(&format!("{keys} entries")), "round {round}: {said}");
            std::fs::remove_dir_all(&target).unwrap();
        }
    }
    note(&format!("{rounds} kills during restores: {unfinished} unfinished, {finished} done"));
    assert!(unfinished > 0, "no restore was cut short: nothing was tested");
    let again = bounded(&mut restore(&file, &target), PATIENCE);
    assert!(again.status.success(), "{}", said(&again));
    let server = Server::start(&target, &[]);
    assert_eq!(server.connect().say("DBSIZE").text(), keys.to_string());
}

#[test]
fn a_restore_cut_while_it_cleared_its_place_is_refused_by_name() {
    let (data, place) = (directory(), directory());
    let server = Server::start(data.path(), &["--shards", "2"]);
    let mut connection = server.connect();
    fill(&mut connection, "key", 100);
    assert!(connection.say("SAVE").is_ok());
    let file = data.path().join("snapshot.bee");
    drop(server);
    // The table goes first, then the segments, the mark last.
    let target = place.path().join("target");
    assert!(bounded(&mut restore(&file, &target), PATIENCE).status.success());
    std::fs::write(target.join("restore.unfinished"), b"").unwrap();
    std::fs::remove_file(target.join("pool.bee")).unwrap();
    for segments in [true, false] {
        if !segments {
            std::fs::remove_dir_all(target.join("segments")).unwrap();
        }
        let before = std::fs::read_dir(&target).unwrap().count();
        let (code, said) = checks(&target);
        assert!(code == 4 && said.contains("kv restore"), "{code}: {said}");
        let (status, said) = Server::try_start(&target, &[]).unwrap_err();
        assert!(status.code() == Some(4) && said.contains("kv restore"), "{status}: {said}");
        assert_eq!(std::fs::read_dir(&target).unwrap().count(), before, "something was made");
    }
    assert!(bounded(&mut restore(&file, &target), PATIENCE).status.success());
    assert_eq!(Server::start(&target, &[]).connect().say("DBSIZE").text(), "100");
}

/// A file system of its own for one test.
struct Mount(std::path::PathBuf);

impl Mount {
    fn tmpfs(test: &str, place: &Path, options: &str) -> Option<Self> {
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(place);
        if !bounded(&mut mount, Duration::from_secs(10)).status.success() {
            skip(test, "a file system can be mounted by root only");
            return None;
        }
        Some(Self(place.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_fails_save_backup_and_restore_and_says_so() {
    let test = "a_full_disk_fails_save_backup_and_restore_and_says_so";
    let (data, small) = (directory(), directory());
    let Some(_small) = Mount::tmpfs(test, small.path(), "size=1m") else { return };
    let Some(_data) = Mount::tmpfs(test, data.path(), "size=12m") else { return };
    let flags = ["--capacity", "8MiB", "--shards", "1"];
    let server = Server::start(data.path(), &flags);
    let mut connection = server.connect();
    fill(&mut connection, "key", 6000);
    assert!(connection.say("SAVE").is_ok());
    let file = data.path().join("snapshot.bee");
    let before = std::fs::read(&file).unwrap();
    // Somebody else takes the rest of the disk.
    let _ = std::fs::write(data.path().join("other"), vec![1; 32 << 20]);
    let refusal = connection.say("SAVE").text();
    assert!(refusal.contains("snapshot.bee") && refusal.contains("No space left"), "{refusal}");
    assert_eq!(std::fs::read(&file).unwrap(), before, "the snapshot before was harmed");
    assert!(!data.path().join("snapshot.bee.partial").exists());
    assert_eq!(connection.say("DBSIZE").text(), "6000");
    std::fs::remove_file(data.path().join("other")).unwrap();
    assert!(connection.say("SAVE").is_ok());

    let address = server.resp().to_string();
    let target = small.path().join("backup.bee");
    let flag = "--resp-address".as_ref();
    let (code, said) = kv(&["backup".as_ref(), target.as_os_str(), flag, address.as_ref()]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("No space left"), "{said}");
    assert!(said.contains(&format!("{}.partial", target.display())), "{said}");
    assert_eq!(std::fs::read_dir(small.path()).unwrap().count(), 0, "half a backup was left");

    let place = small.path().join("restored");
    let output = bounded(&mut restore(&file, &place), PATIENCE);
    let text = beeline_verify_clients::said(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("space"), "{text}");
    assert!(!place.join("pool.bee").exists() && !place.join("restore.unfinished").exists());
}

/// The disk is full before the pool's limit is: writes are told so in Redis' words, reads go on, and
/// the node complains now and then instead of all the time.
#[test]
fn a_disk_that_is_full_before_the_pool_is_answered_with_oom_and_heals() {
    let test = "a_disk_that_is_full_before_the_pool_is_answered_with_oom_and_heals";
    let data = directory();
    let Some(_data) = Mount::tmpfs(test, data.path(), "size=8m") else { return };
    let flags = ["--capacity", "64MiB", "--shards", "2", "--without", "objects,direct"];
    let server = Server::start(data.path(), &flags);
    let mut connection = server.connect();
    assert!(connection.say("SET early 1").is_ok());
    let value = "v".repeat(20_000);
    let refused = (0..1000).find_map(|at| {
        let reply = connection.say(&format!("SET key{at} {value}"));
        (!reply.is_ok()).then(|| reply.text())
    });
    let refused = refused.expect("the disk is full");
    assert_eq!(refused, "OOM command not allowed when used memory > 'maxmemory'.");
    let (before, began) = (server.complaints().lines().count(), Instant::now());
    // Overwrites make garbage that upkeep has no room to collect.
    for at in 0..3000 {
        connection.say(&format!("SET key{} {value}", at % 100));
    }
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(connection.say("GET early").text(), "1");
    let complaints = server.complaints();
    let more = complaints.lines().count() - before;
    let most = 60 + 4 * usize::try_from(began.elapsed().as_secs()).unwrap();
    assert!(more < most, "{more} lines in {:?}: {complaints}", began.elapsed());
    // Deletions need no new segment, or find one that is kept back for them.
    assert_eq!(connection.say("FLUSHALL").text(), "OK");
    eventually("there is room again", PATIENCE, || {
        connection.say(&format!("SET again {value}")).is_ok().then_some(())
    });
}

fn pid(server: &Server) -> Option<Pid> {
    Pid::from_raw(i32::try_from(server.process()).unwrap())
}

#[test]
fn without_descriptors_clients_wait_and_the_node_neither_spins_nor_ends() {
    let data = directory();
    let server = Server::start(data.path(), &["--shards", "2"]);
    let mut early = server.connect();
    assert!(early.say("SET k v").is_ok());
    let open = std::fs::read_dir(format!("/proc/{}/fd", server.process())).unwrap().count() as u64;
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = |current| {
        prlimit(pid(&server), Resource::Nofile, Rlimit { current, maximum }).unwrap();
    };
    limit(Some(open + 10));
    let mut clients: Vec<Connection> = (0..40).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.send(b"PING\r\n").unwrap();
    }
    // The kernel completes connections that nobody accepts: the first ones answer, the others wait.
    let mut served = || {
        let info = early.say("INFO clients").text();
        let line = info.lines().find_map(|line| line.strip_prefix("connected_clients:"));
        line.unwrap().parse::<usize>().unwrap() - 1
    };
    eventually("clients take the descriptors", PATIENCE, || (served() >= 5).then_some(()));
    let ticks = server.processor_ticks();
    std::thread::sleep(Duration::from_secs(2));
    let used = server.processor_ticks() - ticks;
    assert!(used <= 40, "{used} of 200 clock ticks used while clients wait for descriptors");
    let served = served();
    assert!((5..=12).contains(&served), "{served} of 40 clients were served with 10 descriptors");
    for client in &mut clients[..served] {
        assert_eq!(client.reply().unwrap().text(), "PONG");
    }
    assert_eq!(early.say("GET k").text(), "v");
    // What needs a file says so.
    let refusal = early.say("SAVE").text();
    assert!(refusal.contains("snapshot.bee") && refusal.contains("ulimit -n"), "{refusal}");
    drop(clients);
    eventually("a place for a new client", Duration::from_secs(20), || {
        let mut late = Connection::open(server.resp()).ok()?;
        late.call(&[b"GET", b"k"]).ok().filter(|reply| reply.text() == "v")
    });
    limit(maximum);
    assert!(early.say("SAVE").is_ok());
}

#[test]
fn too_few_descriptors_at_the_start_are_named() {
    let test = "too_few_descriptors_at_the_start_are_named";
    let Some(tool) = need(test, "prlimit") else { return };
    let data = directory();
    let wrapper = [tool.to_str().unwrap(), "--nofile=16:16"];
    match Server::try_start_under(&wrapper, data.path(), &["--shards", "4"]) {
        Ok(server) => panic!("16 descriptors sufficed: {}", server.complaints()),
        Err((status, said)) => {
            assert_eq!(status.code(), Some(1), "{said}");
            assert!(said.contains("open files") || said.contains("ulimit -n"), "{said}");
        }
    }
    // The same directory is fine with enough of them.
    let server = Server::start(data.path(), &["--shards", "4"]);
    assert_eq!(server.connect().say("PING").text(), "PONG");
}

#[test]
fn a_node_without_memory_loses_nothing_it_acknowledged() {
    let data = directory();
    let server = Server::start(data.path(), &["--shards", "1"]);
    let mut connection = server.connect();
    fill(&mut connection, "before", 1000);
    let status = std::fs::read_to_string(format!("/proc/{}/statm", server.process())).unwrap();
    let pages: u64 = status.split(' ').next().unwrap().parse().unwrap();
    let limit = pages * 4096 + (24 << 20);
    prlimit(pid(&server), Resource::As, Rlimit { current: Some(limit), maximum: Some(limit) })
        .unwrap();
    // Values of half a megabyte until something gives.
    let value = vec![b'v'; 512 << 10];
    let mut accepted = 0;
    let ending = loop {
        match connection.call(&[b"SET", format!("large:{accepted}").as_bytes(), &value]) {
            Ok(reply) if reply.is_ok() => accepted += 1,
            Ok(reply) => break reply.text(),
            Err(error) => break error.to_string(),
        }
        assert!(accepted < 400, "the limit holds nobody up");
    };
    let held = Connection::open(server.resp())
        .and_then(|mut other| other.call(&[b"PING"]))
        .is_ok_and(|reply| reply.text() == "PONG");
    note(&format!(
        "{accepted} values of 512 KiB, then: {ending}; the node {}",
        if held { "went on" } else { "ended" }
    ));
    server.kill();
    let server = Server::start(data.path(), &["--shards", "1"]);
    let mut connection = server.connect();
    assert_eq!(connection.say("STRLEN before:999").text(), "204");
    for n in 0..accepted {
        let length = connection.say(&format!("STRLEN large:{n}"));
        assert_eq!(length, Reply::Integer(512 << 10), "large:{n}");
    }
}

/// Every file under `place` with its bytes.
fn contents(place: &Path) -> std::collections::BTreeMap<std::path::PathBuf, Vec<u8>> {
    let mut all = std::collections::BTreeMap::new();
    for entry in std::fs::read_dir(place).unwrap().flatten() {
        let path = entry.path();
        if path.is_dir() {
            all.extend(contents(&path));
        } else if path.is_file() {
            // Not the sockets of services.
            all.insert(path.clone(), std::fs::read(&path).unwrap());
        }
    }
    all
}

#[test]
fn a_check_changes_nothing_and_says_the_same_twice() {
    let data = directory();
    let server = Server::start(data.path(), &["--shards", "2"]);
    fill(&mut server.connect(), "key", 2000);
    let mut busy = server.connect();
    let mut requests = Vec::new();
    for n in 0..20_000 {
        requests.extend(encode(&[b"SET", format!("busy:{}", n % 50).as_bytes(), &[b'x'; 500]]));
    }
    let (code, said) = checks(data.path());
    assert_eq!(code, 1, "{said}");
    assert!(said.contains(&server.process().to_string()), "who holds it: {said}");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = busy.send(&requests);
        });
        std::thread::sleep(Duration::from_millis(30));
        server.kill();
    });
    let before = contents(data.path());
    let first = checks(data.path());
    assert_eq!(first.0, 0, "{}", first.1);
    assert!(first.1.contains("not closed in good order"), "{}", first.1);
    assert!(contents(data.path()) == before, "a check changed a file");
    assert_eq!(checks(data.path()), first);
    // On a file system that cannot be written, too.
    let test = "a_check_changes_nothing_and_says_the_same_twice";
    let mut mount = Command::new("mount");
    let bind = mount.args(["--bind", "-o", "ro"]).arg(data.path()).arg(data.path());
    if !bounded(bind, Duration::from_secs(10)).status.success() {
        return skip(test, "a file system can be mounted by root only");
    }
    let mounted = Mount(data.path().to_owned());
    assert_eq!(checks(data.path()), first);
    drop(mounted);
}

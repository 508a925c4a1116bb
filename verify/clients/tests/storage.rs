//! Full pools, full disks, damaged files, backups.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::time::Duration;

use beeline_verify_clients::{Reply, Server, beeline, bounded, said, skip};

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"))
}

/// Writes values of 64 KiB until one is refused; returns how many were accepted and the refusal.
fn fill(server: &Server, most: u64) -> (u64, String) {
    let mut connection = server.connect();
    let value = vec![b'v'; 64 << 10];
    for i in 0..most {
        match connection.call(&[b"SET", format!("fill:{i}").as_bytes(), &value]) {
            Ok(reply) if reply.is_ok() => {}
            Ok(other) => return (i, other.text()),
            Err(error) => panic!("the node ended while its pool filled: {error}"),
        }
    }
    panic!("{most} values of 64 KiB fitted");
}

/// Everything accepted is there; reads, deletions and then writes work.
fn usable(server: &Server, accepted: u64) {
    let mut connection = server.connect();
    for i in (0..accepted).step_by(7) {
        assert_eq!(connection.say(&format!("STRLEN fill:{i}")).text(), "65536", "fill:{i}");
    }
    for i in 0..accepted / 2 {
        assert_eq!(connection.say(&format!("DEL fill:{i}")).text(), "1", "fill:{i}");
    }
    // Room comes back as the collector gets there.
    beeline_verify_clients::eventually("room after deletions", Duration::from_secs(30), || {
        connection.call(&[b"SET", b"again", &vec![b'v'; 64 << 10]]).ok().filter(Reply::is_ok)
    });
}

#[test]
fn a_full_pool_refuses_writes_and_serves_everything_else() {
    let data = directory();
    let flags = ["--capacity", "16MiB", "--shards", "2"];
    let server = Server::start(data.path(), &flags);
    let (accepted, refusal) = fill(&server, 1000);
    assert!(accepted > 50, "only {accepted} values of 64 KiB fitted into 16 MiB");
    assert!(refusal.starts_with("OOM"), "{refusal}");
    server.kill();
    // Nor does a restart of the full node lose anything.
    let server = Server::start(data.path(), &flags);
    usable(&server, accepted);
}

#[test]
fn a_memory_limit_evicts_where_the_policy_says_so() {
    let data = directory();
    let flags = ["--max-memory", "4MiB", "--eviction-policy", "allkeys-lru", "--shards", "1"];
    let server = Server::start(data.path(), &flags);
    let mut connection = server.connect();
    let value = vec![b'v'; 16 << 10];
    for i in 0..1000 {
        let reply = connection.call(&[b"SET", format!("e:{i}").as_bytes(), &value]).unwrap();
        assert!(reply.is_ok(), "e:{i}: {reply:?}");
    }
    let kept: u64 = connection.say("DBSIZE").text().parse().unwrap();
    assert!((10..=512).contains(&kept), "{kept} of 1000 keys of 16 KiB kept within 4 MiB");
    assert_eq!(connection.say("EXISTS e:999").text(), "1", "the newest key was evicted");
}

#[test]
fn a_full_disk_refuses_writes_and_loses_nothing() {
    let test = "a_full_disk_refuses_writes_and_loses_nothing";
    let data = directory();
    let mut mount = std::process::Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", "size=24m", "tmpfs"]).arg(data.path());
    if !bounded(&mut mount, Duration::from_secs(10)).status.success() {
        return skip(test, "a file system can be mounted by root only");
    }
    let place = data.path().to_owned();
    let outcome = std::panic::catch_unwind(move || {
        let server = Server::start(&place, &["--capacity", "1GiB", "--shards", "1"]);
        let (accepted, refusal) = fill(&server, 1000);
        assert!(accepted > 50, "only {accepted} values of 64 KiB fitted into 24 MiB");
        assert!(refusal.starts_with("OOM") || refusal.contains("space"), "{refusal}");
        server.kill();
        let server = Server::start(&place, &["--capacity", "1GiB", "--shards", "1"]);
        let mut connection = server.connect();
        for i in 0..accepted {
            assert_eq!(connection.say(&format!("STRLEN fill:{i}")).text(), "65536", "fill:{i}");
        }
        // Somebody makes room: the same node goes on without a restart.
        let mut grow = std::process::Command::new("mount");
        grow.args(["-o", "remount,size=96m"]).arg(&place);
        let grown = bounded(&mut grow, Duration::from_secs(10));
        assert!(grown.status.success(), "{grown:?}");
        usable(&server, accepted);
    });
    let _ = bounded(
        std::process::Command::new("umount").arg("--lazy").arg(data.path()),
        Duration::from_secs(10),
    );
    if let Err(panic) = outcome {
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn a_file_that_is_no_pool_and_a_cut_pool_are_told_apart() {
    let data = directory();
    std::fs::write(data.path().join("pool.bee"), vec![b'?'; 8192]).unwrap();
    let (status, said) = Server::try_start(data.path(), &[]).unwrap_err();
    // A damaged magic looks the same: it is damage until a person says otherwise.
    assert_eq!(status.code(), Some(4), "{said}");
    assert!(said.contains("pool.bee") && said.contains("not a Beeline pool"), "{said}");

    let data = directory();
    let server = Server::start(data.path(), &[]);
    assert!(server.connect().say("SET a b").is_ok());
    assert_eq!(server.stop().code(), Some(0));
    let pool = data.path().join("pool.bee");
    let length = std::fs::metadata(&pool).unwrap().len();
    std::fs::OpenOptions::new().write(true).open(&pool).unwrap().set_len(length / 2).unwrap();
    let (status, said) = Server::try_start(data.path(), &[]).unwrap_err();
    assert_eq!(status.code(), Some(4), "{said}");
    assert!(said.contains("pool.bee") && said.contains("truncated"), "{said}");
}

/// Exit code and standard output of `beeline kv ...`.
fn kv(words: &[&std::ffi::OsStr]) -> (i32, String) {
    let mut command = beeline(&["kv"]);
    command.args(words);
    let output = bounded(&mut command, Duration::from_secs(60));
    let code = output.status.code().unwrap_or_else(|| panic!("{}", said(&output)));
    (code, said(&output))
}

#[test]
fn a_flipped_bit_is_found_and_a_good_directory_is_not_accused() {
    let data = directory();
    // Without documents, which keep an entry of their own: the entries are counted below.
    let server = Server::start(data.path(), &["--shards", "1", "--without", "documents"]);
    let mut connection = server.connect();
    for i in 0..200 {
        assert!(connection.say(&format!("SET key:{i} value:{i}")).is_ok());
    }
    assert_eq!(server.stop().code(), Some(0));
    let place = data.path().as_os_str();
    let (code, said) = kv(&["check".as_ref(), place]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("200 entries") && said.contains("0 damaged"), "{said}");
    // The segment that holds the entries: flip one bit of a value.
    let needle = b"value:137";
    let (file, at) = std::fs::read_dir(data.path().join("segments"))
        .unwrap()
        .flatten()
        .find_map(|entry| {
            let bytes = std::fs::read(entry.path()).unwrap();
            let at = bytes.windows(needle.len()).position(|window| window == needle)?;
            Some((entry.path(), at))
        })
        .expect("the value lies in a segment");
    let mut bytes = std::fs::read(&file).unwrap();
    bytes[at] ^= 0x10;
    std::fs::write(&file, bytes).unwrap();
    let (code, said) = kv(&["check".as_ref(), place]);
    assert_eq!(code, 4, "{said}");
    assert!(said.contains("DAMAGED"), "{said}");
}

/// Answers as a node does that says its data is in `directory`, and writes nothing there.
fn a_node_of_another_host(directory: &std::path::Path) -> std::net::SocketAddr {
    use std::io::{Read as _, Write as _};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let directory = directory.display().to_string();
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut request) {
            let asked = String::from_utf8_lossy(&request[..count]).into_owned();
            let bulk = |text: &str| format!("${}\r\n{text}\r\n", text.len());
            let answer = if asked.contains("CONFIG") {
                format!("*2\r\n{}{}", bulk("dir"), bulk(&directory))
            } else if asked.contains("INFO") {
                bulk("rdb_bgsave_in_progress:0\r\nrdb_last_bgsave_status:ok\r\n")
            } else {
                "+Background saving scheduled\r\n".to_owned()
            };
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    address
}

#[test]
fn a_backup_of_a_node_of_another_host_is_not_that_of_the_one_here() {
    let data = directory();
    let server = Server::start(data.path(), &[]);
    assert!(server.connect().say("SET whose mine").is_ok());
    assert!(server.connect().say("SAVE").is_ok());
    // Its directory has the name of the one here, as hosts that are set up alike have.
    let other = a_node_of_another_host(data.path()).to_string();
    let place = directory();
    let file = place.path().join("backup.bee");
    let (code, said) =
        kv(&["backup".as_ref(), file.as_os_str(), "--resp-address".as_ref(), other.as_ref()]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("wrote no snapshot there") && said.contains(&other), "{said}");
    assert_eq!(std::fs::read_dir(place.path()).unwrap().count(), 0, "something was left");
}

#[test]
fn a_backup_of_a_running_node_is_restored_whole() {
    let data = directory();
    let server = Server::start(data.path(), &["--shards", "3"]);
    let mut connection = server.connect();
    for i in 0..500 {
        assert!(connection.say(&format!("SET key:{i} value:{i}")).is_ok());
    }
    assert!(connection.say("SET soon gone EX 1000").is_ok());
    assert!(connection.say("DEL key:0").text() == "1");
    let place = directory();
    let file = place.path().join("backup.bee");
    let address = server.resp().to_string();
    let (code, said) =
        kv(&["backup".as_ref(), file.as_os_str(), "--resp-address".as_ref(), address.as_ref()]);
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("records"), "{said}");
    // Once more over the file that is there; not into a folder; not where another backup is at work.
    let again = |target: &std::path::Path, address: &str| {
        kv(&["backup".as_ref(), target.as_os_str(), "--resp-address".as_ref(), address.as_ref()])
    };
    assert_eq!(again(&file, &address).0, 0);
    let (code, said) = again(place.path(), &address);
    assert!(code == 2 && said.contains("is a directory"), "{code}: {said}");
    let partial = place.path().join("other.bee.partial");
    let held = std::fs::File::create(&partial).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let (code, said) = again(&place.path().join("other.bee"), &address);
    assert!(code == 1 && said.contains("another backup writes it"), "{code}: {said}");
    assert!(partial.exists(), "the other backup's file");
    drop(held);
    // What a backup that was killed left is taken over.
    assert_eq!(again(&place.path().join("other.bee"), &address).0, 0);
    assert!(!partial.exists());
    let (code, said) = again(&file, "127.0.0.1:1");
    assert!(code == 3 && said.contains("no node answers"), "{code}: {said}");
    // What comes later is not in it.
    assert!(connection.say("SET key:1 later").is_ok());
    let (code, said) = kv(&["check".as_ref(), file.as_os_str()]);
    assert_eq!(code, 0, "{said}");
    let restored = place.path().join("restored");
    let small = ["--segment-size".as_ref(), "1MiB".as_ref()];
    let words =
        [&["restore".as_ref(), file.as_os_str(), restored.as_os_str()][..], &small].concat();
    let (code, said) = kv(&words);
    assert_eq!(code, 0, "{said}");
    let second = Server::start(&restored, &["--shards", "2"]);
    let mut connection = second.connect();
    assert_eq!(connection.say("DBSIZE").text(), "500");
    assert_eq!(connection.say("GET key:1").text(), "value:1");
    assert_eq!(connection.say("EXISTS key:0").text(), "0");
    let left: i64 = connection.say("TTL soon").text().parse().unwrap();
    assert!((900..=1000).contains(&left), "{left}");
    // A directory that holds a pool is not restored over; a damaged file is not restored at all.
    assert_ne!(kv(&words).0, 0);
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
    assert_eq!(kv(&["check".as_ref(), file.as_os_str()]).0, 4);
    let third = place.path().join("third");
    let (code, said) = kv(&["restore".as_ref(), file.as_os_str(), third.as_os_str()]);
    assert_eq!(code, 4, "{said}");
    assert!(!third.join("pool.bee").exists(), "a damaged file left a pool behind");
}

#[test]
fn a_hash_is_whole_in_the_pool_that_a_snapshot_is_restored_into() {
    let data = directory();
    let server = Server::start(data.path(), &["--shards", "2"]);
    let mut connection = server.connect();
    for field in 0..300 {
        let line = format!("HSET hash field:{field} value:{field}");
        assert_eq!(connection.say(&line).text(), "1");
    }
    assert!(connection.say("SAVE").is_ok());
    assert_eq!(server.stop().code(), Some(0));
    let target = data.path().join("restored");
    let snapshot = data.path().join("snapshot.bee");
    // With segments of the usual 64 MiB the few of the small pool of a test are heads of shards, and
    // there is no room for a shard that has none yet.
    let small = ["--segment-size".as_ref(), "1MiB".as_ref()];
    let words = [&["restore".as_ref(), snapshot.as_os_str(), target.as_os_str()][..], &small];
    let (code, said) = kv(&words.concat());
    assert_eq!(code, 0, "{said}");
    let server = Server::start(&target, &["--shards", "3"]);
    assert!(!server.complaints().contains("too few segments"), "{}", server.complaints());
    let mut connection = server.connect();
    for field in 0..300 {
        let value = connection.say(&format!("HGET hash field:{field}"));
        assert_eq!(value.text(), format!("value:{field}"));
    }
    assert_eq!(connection.say("HSET hash field:7 other").text(), "0");
    assert_eq!(connection.say("HDEL hash field:8").text(), "1");
    assert_eq!(connection.say("HLEN hash").text(), "299");
}

#[test]
fn a_pool_with_too_few_segments_for_its_shards_is_named() {
    let data = directory();
    let flags = ["--shards", "3", "--segment-size", "1MiB", "--capacity", "7MiB"];
    let server = Server::start(data.path(), &flags);
    let said = server.complaints();
    assert!(said.contains("too few segments") && said.contains("--capacity"), "{said}");
}

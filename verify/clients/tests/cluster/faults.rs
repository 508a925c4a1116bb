//! What goes wrong around a cluster: members told to stop, damaged or foreign data, values too
//! large, pools without room, and nothing happening at all.

use std::path::{Path, PathBuf};
use std::time::Instant;

use beeline_verify_clients::resp::encode;
use beeline_verify_clients::{Reply, Server, eventually};

use super::members::{Cluster, PATIENCE, ask};
use super::{SOME, Writer, go_on};

fn others(index: usize) -> Vec<usize> {
    (0..3).filter(|other| *other != index).collect()
}

#[test]
fn a_leader_told_to_stop_hands_over_first_and_clients_of_others_see_no_error() {
    let mut cluster = Cluster::new(0, &[]);
    for _ in 0..2 {
        let leader = cluster.leader();
        let writers: Vec<Writer> = others(leader)
            .into_iter()
            .map(|index| {
                let name = format!("count{index}:{}", cluster.info(leader, "log_term"));
                Writer::start(name, cluster.places[index].resp)
            })
            .collect();
        let mut own = cluster.client(leader);
        assert!(ask(&mut own, &["SET", "at", "leader"]).is_ok());
        go_on(&writers, SOME);
        let mut stopped = cluster.members[leader].take().unwrap();
        stopped.signal(rustix::process::Signal::TERM);
        let status = stopped.wait();
        let said = stopped.complaints();
        assert!(status.success(), "{status}: {said}");
        assert!(!said.contains("no other member"), "{said}");
        // Whoever took over leads before the old one ended.
        let leads = |index: &usize| cluster.info(*index, "log_role") == "leader";
        assert!(others(leader).iter().any(leads), "{}", cluster.described());
        go_on(&writers, SOME);
        for writer in writers {
            let (acknowledged, unknown) = writer.end();
            assert!(acknowledged > 0 && unknown == 0, "{acknowledged} and {unknown} unknown");
        }
        cluster.start(leader);
        assert_eq!(cluster.ask(leader, &["GET", "at"]).text(), "leader");
    }
}

#[test]
fn a_value_longer_than_an_entry_travels_in_pieces_and_one_beyond_half_a_segment_is_refused() {
    let cluster = Cluster::new(0, &["--log-slot-size", "8KiB"]);
    cluster.leader();
    let (fits, long) = ("f".repeat(7_900), "l".repeat(600_000));
    for member in 0..3 {
        let mut client = cluster.client(member);
        assert!(ask(&mut client, &["SET", "key", &fits]).is_ok());
        let reply = ask(&mut client, &["SET", "key", &long]).text();
        assert!(reply.starts_with("ERR this command takes 600"), "{reply}");
        assert!(reply.contains("the log carries 524288"), "{reply}");
        assert!(reply.contains("segment-size"), "{reply}");
        assert_eq!(ask(&mut client, &["GET", "key"]).text(), fits);
        let large = format!("{member}").repeat(400_000);
        let key = format!("large{member}");
        assert!(ask(&mut client, &["SET", &key, &large]).is_ok());
        let read = cluster.ask((member + 1) % 3, &["GET", &key]).text();
        assert!(read == large, "{} bytes", read.len());
        // Several that fit one by one and not together travel one by one.
        let third = "t".repeat(3_000);
        for n in 0..5 {
            let key = format!("part{n}");
            client.send(&encode(&[b"SET", key.as_bytes(), third.as_bytes()])).unwrap();
        }
        for _ in 0..5 {
            assert!(client.reply().unwrap().is_ok());
        }
        assert_eq!(ask(&mut client, &["GET", "key"]).text(), fits);
    }
}

/// Nothing is proposed, so the log's time stands still: keys are hidden by the wall clock at once,
/// and deleted with the next write.
#[test]
fn keys_expire_on_an_idle_cluster_at_every_member() {
    let cluster = Cluster::new(0, &[]);
    let leader = cluster.leader();
    let mut client = cluster.client(leader);
    for n in 0..20 {
        let key = format!("short{n}");
        assert!(ask(&mut client, &["SET", &key, "value", "PX", "400"]).is_ok());
    }
    assert!(ask(&mut client, &["SET", "kept", "value"]).is_ok());
    eventually("the last of them expires", PATIENCE, || {
        (ask(&mut client, &["GET", "short19"]) == Reply::Null).then_some(())
    });
    let log = || (cluster.info(leader, "log_term"), cluster.info(leader, "log_committed"));
    let (term, committed) = log();
    for member in 0..3 {
        let mut client = cluster.client(member);
        assert_eq!(ask(&mut client, &["GET", "short7"]), Reply::Null);
        assert_eq!(ask(&mut client, &["EXISTS", "short1", "short2", "kept"]), Reply::Integer(1));
        assert_eq!(ask(&mut client, &["TTL", "short3"]), Reply::Integer(-2));
    }
    // Another leader would have begun with an entry of its own.
    assert!(log().0 != term || log().1 == committed, "reading costs no entry");
    assert!(ask(&mut client, &["SET", "one", "more"]).is_ok());
    for member in 0..3 {
        eventually("expired keys are deleted", PATIENCE, || {
            (ask(&mut cluster.client(member), &["DBSIZE"]) == Reply::Integer(2)).then_some(())
        });
    }
}

#[test]
fn a_cluster_without_room_refuses_writes_at_level_power_and_goes_on_with_room() {
    let flags = ["--durability", "power", "--capacity", "12MiB"];
    let cluster = Cluster::new(0, &flags);
    let leader = cluster.leader();
    let value = "v".repeat(16_000);
    let mut written = 0;
    let begun = Instant::now();
    let refusal = loop {
        match ask(&mut cluster.client(written % 3), &["SET", &format!("k{written}"), &value]) {
            // A change of leader on a slow disk, say. The same write again changes nothing else.
            Reply::Error(line) if line.starts_with("TRYAGAIN") && begun.elapsed() < PATIENCE => {}
            Reply::Error(line) => break line,
            _ => written += 1,
        }
        assert!(written < 2_000, "12 MiB do not hold {written} values of 16 kB");
    };
    assert!(refusal.starts_with("OOM"), "{refusal}");
    // All are there and agree; what was acknowledged is kept. The refused one may have taken effect
    // before it was asked for again.
    let keys = cluster.ask(leader, &["DBSIZE"]).text();
    assert!([written, written + 1].map(|keys| keys.to_string()).contains(&keys), "{keys}");
    for member in 0..3 {
        assert_eq!(cluster.ask(member, &["DBSIZE"]).text(), keys);
        let last = format!("k{}", written - 1);
        assert_eq!(cluster.ask(member, &["STRLEN", &last]).text(), "16000");
    }
    for n in 0..written / 2 {
        assert_eq!(cluster.ask(leader, &["DEL", &format!("k{n}")]), Reply::Integer(1));
    }
    // Room comes with the collector.
    let reply = cluster.ask(leader, &["SET", "again", &value]);
    assert!(reply.is_ok(), "{reply:?}");
    assert_eq!(cluster.ask((leader + 1) % 3, &["STRLEN", "again"]).text(), "16000");
}

/// A follower whose pool is smaller than the others': what it cannot take the leader takes from no
/// client, and no member stops.
#[test]
fn a_member_with_less_room_makes_the_cluster_refuse_early_and_does_not_stop() {
    let mut cluster = Cluster::new(0, &["--capacity", "256MiB"]);
    let small = others(cluster.leader())[0];
    cluster.kill(small);
    cluster.more = ["--capacity", "48MiB"].map(str::to_owned).to_vec();
    cluster.start(small);
    let value = "v".repeat(16_000);
    let mut written = 0;
    let begun = Instant::now();
    let refusal = loop {
        // At the members that have room.
        let member = others(small)[written % 2];
        match ask(&mut cluster.client(member), &["SET", &format!("k{written}"), &value]) {
            Reply::Error(line) if line.starts_with("TRYAGAIN") && begun.elapsed() < PATIENCE => {}
            Reply::Error(line) => break line,
            _ => written += 1,
        }
        assert!(written < 4_000, "48 MiB hold {written} values of 16 kB? {}", cluster.described());
    };
    assert!(refusal.starts_with("OOM a member of this cluster"), "{refusal}");
    let leader = cluster.leader();
    let info = ask(&mut cluster.client(leader), &["INFO", "replication"]).text();
    assert!(info.contains("room=short"), "{info}");
    for member in 0..3 {
        // Also at the one without room: it goes on.
        let last = format!("k{}", written - 1);
        assert_eq!(cluster.ask(member, &["STRLEN", &last]).text(), "16000");
    }
    for n in 0..written / 2 {
        assert_eq!(cluster.ask(leader, &["DEL", &format!("k{n}")]), Reply::Integer(1));
    }
    let reply = cluster.ask(leader, &["SET", "again", &value]);
    assert!(reply.is_ok(), "{reply:?}");
    assert_eq!(cluster.ask(small, &["STRLEN", "again"]).text(), "16000");
}

fn segment(data: &Path) -> PathBuf {
    let folder = data.join("log/log/segments");
    let files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
    files.filter(|path| path.extension().is_some_and(|end| end == "seg")).max().unwrap()
}

#[test]
fn a_member_whose_log_is_damaged_ends_and_says_so_and_the_others_go_on() {
    let mut cluster = Cluster::new(0, &[]);
    let leader = cluster.leader();
    for n in 0..40 {
        assert!(cluster.ask(leader, &["SET", &format!("key{n}"), "value"]).is_ok());
    }
    let victim = others(leader)[0];
    assert_eq!(cluster.ask(victim, &["GET", "key39"]).text(), "value");
    cluster.kill(victim);
    // One bit of an entry that this member knows to be chosen.
    let path = segment(&cluster.data(victim));
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4096 + 20 * (32 << 10) + 40] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let flags = cluster.flags(victim);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let said = match Server::try_start(&cluster.data(victim), &flags) {
        Err((status, said)) => {
            assert!(!status.success());
            said
        }
        Ok(mut server) => {
            let status = server.wait();
            assert!(!status.success(), "{status}");
            // What it writes last may be on its way still.
            eventually("the reason", PATIENCE, || {
                Some(server.complaints()).filter(|said| said.contains("must be replaced"))
            })
        }
    };
    assert!(said.contains("the entry at 20 is damaged"), "{said}");
    assert!(cluster.ask(leader, &["SET", "without", "it"]).is_ok());
    assert_eq!(cluster.ask(others(leader)[1], &["GET", "without"]).text(), "it");
}

#[test]
fn a_members_folder_of_another_version_is_refused_by_name() {
    let mut cluster = Cluster::new(0, &[]);
    let leader = cluster.leader();
    assert!(cluster.ask(leader, &["SET", "key", "value"]).is_ok());
    let victim = others(leader)[0];
    cluster.kill(victim);
    let path = cluster.data(victim).join("log/identity");
    let sound = std::fs::read(&path).unwrap();
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        let flags = cluster.flags(victim);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let (status, said) = Server::try_start(&cluster.data(victim), &flags).unwrap_err();
        assert!(!status.success());
        said
    };
    let mut newer = sound.clone();
    newer[8] = 9;
    assert!(refused(&newer).contains("version 9"), "{}", refused(&newer));
    let mut damaged = sound.clone();
    damaged[20] ^= 1;
    assert!(refused(&damaged).contains("damaged"), "{}", refused(&damaged));
    std::fs::write(&path, &sound).unwrap();
    cluster.start(victim);
    assert_eq!(cluster.ask(victim, &["GET", "key"]).text(), "value");
}

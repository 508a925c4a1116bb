//! Replicated nodes over a log in memory: what clients see, and what lasts.
#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::io::Cursor;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use beeline_node::Peer;
use beeline_replicated_log::{Position, StateMachine as _};
use beeline_replicated_service::Machine;
use common::replicas::{CLUSTER, Cluster, LIMIT, Member, ask, cluster, cluster_with, on_disk};
use common::{Client, PATIENCE};

#[test]
fn a_write_anywhere_is_read_everywhere() {
    for shards in [1, 3] {
        let (_cluster, members) = cluster(shards);
        let mut clients: Vec<_> = members.iter().map(Member::client).collect();
        for round in 0..20 {
            let writer = round % 3;
            let other = (round + 1) % 3;
            ask(&mut clients[writer], &format!("SET key{round} v{round}"), "+OK\r\n");
            let value = format!("${}\r\nv{round}\r\n", format!("v{round}").len());
            ask(&mut clients[other], &format!("GET key{round}"), &value);
            ask(&mut clients[writer], "INCR sum", &format!(":{}\r\n", round + 1));
        }
        ask(&mut clients[1], "DBSIZE", ":21\r\n");
        ask(&mut clients[2], "DEL key0 key1 key2 nosuch", ":3\r\n");
        ask(&mut clients[0], "DBSIZE", ":18\r\n");
        ask(&mut clients[1], "FLUSHALL", "+OK\r\n");
        ask(&mut clients[2], "DBSIZE", ":0\r\n");
    }
}

/// A member whose Redis door is not there, or is full, leads as well as any.
#[test]
fn followers_need_no_door_of_their_leader() {
    let (cluster, members) = cluster(2);
    for member in &mut cluster.state.lock().unwrap().members {
        member.resp_address = "nowhere:1".to_owned();
    }
    let mut client = members[2].client();
    ask(&mut client, "SET key value", "+OK\r\n");
    ask(&mut members[1].client(), "GET key", "$5\r\nvalue\r\n");
    let (_, stats) = members[2].node.as_ref().unwrap().handle().stats().replication.unwrap();
    assert!(stats.forwarded > 0, "{stats:?}");
}

#[test]
fn a_pipeline_of_reads_and_writes_takes_effect_in_its_order() {
    let (_cluster, members) = cluster(3);
    for member in &members {
        let mut client = member.client();
        let (mut requests, mut replies) = (String::new(), String::new());
        for n in 0..50 {
            let length = n.to_string().len();
            requests.push_str(&format!(
                "SET k{n} {n}\r\nGET k{n}\r\nPING\r\nINCR k{n}\r\nMGET k{n} nosuch\r\nDEL k{n}\r\n\
                 EXISTS k{n}\r\n"
            ));
            let next = (n + 1).to_string();
            replies.push_str(&format!(
                "+OK\r\n${length}\r\n{n}\r\n+PONG\r\n:{next}\r\n*2\r\n${}\r\n{next}\r\n$-1\r\n\
                 :1\r\n:0\r\n",
                next.len()
            ));
        }
        client.send(&requests);
        client.expect(&replies);
    }
}

#[test]
fn lost_answers_are_asked_for_again_and_nothing_takes_effect_twice() {
    let (cluster, members) = cluster(2);
    let mut clients: Vec<_> = members.iter().map(Member::client).collect();
    for round in 1..=60_u32 {
        cluster.state.lock().unwrap().lost = round % 3;
        let client = &mut clients[round as usize % 3];
        ask(client, "INCR sum", &format!(":{round}\r\n"));
    }
    let mut follower = members[2].client();
    ask(&mut follower, "GET sum", "$2\r\n60\r\n");
    assert!(cluster.entries() > 60, "some were proposed twice");
}

/// A hash's fields come in an order of each member's own, because generations of rows are a store's.
/// Members compare what units did, and not in which order a read within one told of it: no member is
/// taken for one that differs ([`Member`]'s end looks).
#[test]
fn replies_that_differ_between_members_are_no_divergence() {
    let (cluster, members) = cluster(2);
    let mut clients: Vec<_> = members.iter().map(Member::client).collect();
    let fields: Vec<String> = (0..30).map(|field| format!("f{field} v{field}")).collect();
    for round in 0..150 {
        // Members have had different numbers of versions by now.
        let (client, key) = (&mut clients[round % 3], round % 5);
        client.send("MULTI\r\n");
        client.expect("+OK\r\n");
        for request in [
            format!("DEL h{key}"),
            format!("HSET h{key} {}", fields.join(" ")),
            format!("HGETALL h{key}"),
        ] {
            client.send(&format!("{request}\r\n"));
            client.expect("+QUEUED\r\n");
        }
        client.send("EXEC\r\n");
        let existed = u32::from(round >= 5);
        client.expect(&format!("*3\r\n:{existed}\r\n:30\r\n*60\r\n"));
        let mut bulk = || {
            client.line();
            client.line()
        };
        let mut met: Vec<_> = (0..30).map(|_| (bulk(), bulk())).collect();
        met.sort();
        let mut expected: Vec<_> =
            (0..30).map(|field| (format!("f{field}"), format!("v{field}"))).collect();
        expected.sort();
        assert_eq!(met, expected);
    }
    assert!(cluster.entries() > 128, "two windows of positions are whole");
    members.iter().for_each(Member::catch_up);
}

#[test]
fn a_full_log_is_named_to_clients_of_every_member_at_once() {
    let (cluster, members) = cluster(2);
    cluster.state.lock().unwrap().full = true;
    for member in &members {
        let reply = member.client().ask("SET key value");
        let said = "the log is full, and no snapshot can be written: no room";
        assert!(reply.starts_with("-TRYAGAIN") && reply.contains(said), "{reply}");
        let (_, stats) = member.node.as_ref().unwrap().handle().stats().replication.unwrap();
        assert_eq!(stats.timed_out, 0, "it is not waited for");
        ask(&mut member.client(), "GET key", "$-1\r\n");
    }
    cluster.state.lock().unwrap().full = false;
    for member in &members {
        ask(&mut member.client(), "SET key value", "+OK\r\n");
    }
}

#[test]
fn while_a_member_has_no_room_every_member_refuses_what_needs_some_and_takes_the_rest() {
    let (cluster, members) = cluster(2);
    let mut clients: Vec<_> = members.iter().map(Member::client).collect();
    ask(&mut clients[0], "MSET a 1 b 2 c 3", "+OK\r\n");
    cluster.state.lock().unwrap().short = true;
    for (client, key) in clients.iter_mut().zip(["a", "b", "c"]) {
        let said = client.ask("SET key value");
        assert!(said.starts_with("-OOM a member of this cluster"), "{said}");
        assert_eq!(client.ask("MULTI"), "+OK");
        assert_eq!(client.ask("APPEND a more"), "+QUEUED");
        let said = client.ask("EXEC");
        assert!(said.starts_with("-OOM"), "{said}");
        // The transaction is over.
        ask(client, &format!("DEL {key}"), ":1\r\n");
        ask(client, "EXISTS key", ":0\r\n");
    }
    cluster.state.lock().unwrap().short = false;
    ask(&mut clients[2], "SET key value", "+OK\r\n");
}

#[test]
fn the_leadership_may_move_at_any_time() {
    let (cluster, members) = cluster(2);
    let stop = Arc::new(AtomicBool::new(false));
    let mover = {
        let (cluster, stop) = (Arc::clone(&cluster), Arc::clone(&stop));
        std::thread::spawn(move || {
            let mut turn = 0_u16;
            while !stop.load(Ordering::Relaxed) {
                cluster.lead(None);
                std::thread::sleep(Duration::from_millis(3));
                cluster.lead(Some(1 + turn % 3));
                turn += 1;
                std::thread::sleep(Duration::from_millis(12));
            }
            cluster.lead(Some(2));
        })
    };
    let writers: Vec<_> = members
        .iter()
        .map(|member| {
            let mut client = member.client();
            std::thread::spawn(move || {
                for n in 1..=100_u32 {
                    ask(&mut client, "INCR mine", ":");
                    client.line();
                    ask(&mut client, "APPEND all x", ":");
                    client.line();
                    if n % 10 == 0 {
                        ask(&mut client, "STRLEN all", ":");
                        let length: u32 = client.line().parse().unwrap();
                        assert!(length >= n, "a read misses the connection's own writes");
                    }
                }
            })
        })
        .collect();
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    stop.store(true, Ordering::Relaxed);
    mover.join().unwrap();
    for member in &members {
        let mut client = member.client();
        ask(&mut client, "GET mine", "$3\r\n300\r\n");
        ask(&mut client, "STRLEN all", ":300\r\n");
    }
}

#[test]
fn transactions_are_one_unit_and_watched_keys_are_compared_where_it_is_applied() {
    let (_cluster, members) = cluster(3);
    let mut one = members[1].client();
    let mut other = members[2].client();
    ask(&mut one, "MULTI", "+OK\r\n");
    for request in ["SET a 1", "INCR a", "SELECT 3", "SET b 2", "GET b"] {
        ask(&mut one, request, "+QUEUED\r\n");
    }
    ask(&mut one, "EXEC", "*5\r\n+OK\r\n:2\r\n+OK\r\n+OK\r\n$1\r\n2\r\n");
    ask(&mut other, "GET a", "$1\r\n2\r\n");

    ask(&mut one, "WATCH a", "+OK\r\n");
    ask(&mut other, "SET a 7", "+OK\r\n");
    ask(&mut one, "MULTI", "+OK\r\n");
    ask(&mut one, "SET a 8", "+QUEUED\r\n");
    ask(&mut one, "EXEC", "*-1\r\n");
    ask(&mut one, "GET a", "$1\r\n7\r\n");

    ask(&mut one, "WATCH a nosuch", "+OK\r\n");
    ask(&mut one, "MULTI", "+OK\r\n");
    ask(&mut one, "SET a 8", "+QUEUED\r\n");
    ask(&mut one, "EXEC", "*1\r\n+OK\r\n");
    ask(&mut other, "GET a", "$1\r\n8\r\n");

    ask(&mut one, "MULTI", "+OK\r\n");
    ask(
        &mut one,
        "CONFIG SET timeout 3",
        "-ERR 'config|set' cannot be part of a transaction in a replicated node\r\n",
    );
    ask(&mut one, "EXEC", "-EXECABORT Transaction discarded because of previous errors.\r\n");
    ask(&mut one, "MULTI", "+OK\r\n");
    ask(
        &mut one,
        "FLUSHALL",
        "-ERR 'flushall' cannot be part of a transaction in a replicated node\r\n",
    );
    ask(&mut one, "DISCARD", "+OK\r\n");
}

#[test]
fn replicas_agree_although_keys_expire() {
    let (_cluster, members) = cluster(2);
    let mut clients: Vec<_> = members.iter().map(Member::client).collect();
    for round in 0..30 {
        let key = format!("k{}", round % 5);
        ask(&mut clients[round % 3], &format!("SET {key} 1 PX {}", 1 + round % 7), "+OK\r\n");
        std::thread::sleep(Duration::from_millis(2));
        // There or not, as the log's time decides.
        clients[(round + 1) % 3].send(&format!("INCR {key}\r\nPERSIST {key}\r\n"));
        clients[(round + 1) % 3].line();
        clients[(round + 1) % 3].line();
    }
    members.iter().for_each(Member::catch_up);
    let mut values = clients.iter_mut().map(|client| {
        client.send("READONLY\r\nMGET k0 k1 k2 k3 k4\r\n");
        client.expect("+OK\r\n");
        client.reply()
    });
    let first = values.next().unwrap();
    for other in values {
        assert_eq!(other, first);
    }
    let mut client = members[1].client();
    ask(&mut client, "SET gone 1 PX 30", "+OK\r\n");
    std::thread::sleep(Duration::from_millis(40));
    ask(&mut client, "GET gone", "$-1\r\n");
    ask(&mut client, "SET slow 1 EX 100", "+OK\r\n");
    std::thread::sleep(Duration::from_millis(30));
    client.send("PTTL slow\r\n");
    let left: i64 = client.line().trim_start_matches(':').parse().unwrap();
    assert!(left < 100_000, "{left}: time goes on where nothing is written");
}

#[test]
fn without_a_leader_reads_and_writes_fail_and_stale_reads_do_not() {
    let (cluster, members) = cluster_with(2, Some(Duration::from_secs(4)));
    let mut client = members[0].client();
    ask(&mut client, "SET key value", "+OK\r\n");
    members.iter().for_each(Member::catch_up);
    cluster.lead(None);
    let down = "-CLUSTERDOWN no leader: nothing was done; try again\r\n";
    client.send("SET key other\r\nPING\r\nGET key\r\n");
    client.expect(&format!("{down}+PONG\r\n{down}"));
    let mut stale = members[2].client();
    ask(&mut stale, "READONLY", "+OK\r\n");
    ask(&mut stale, "GET key", "$5\r\nvalue\r\n");
    ask(&mut stale, "MGET key nosuch", "*2\r\n$5\r\nvalue\r\n$-1\r\n");
    cluster.lead(Some(3));
    ask(&mut client, "GET key", "$5\r\nvalue\r\n");
}

/// At the leader's own door as at any other: one request is under way, others wait behind it.
#[test]
fn requests_to_a_leader_that_cannot_commit_end_within_their_time_and_say_what_is_known() {
    let (cluster, members) = cluster_with(1, Some(Duration::from_secs(2)));
    let mut clients: Vec<_> = (0..4).map(|_| members[0].client()).collect();
    ask(&mut clients[0], "SET a 1", "+OK\r\n");
    cluster.state.lock().unwrap().silent = true;
    for (client, request) in ["SET a 2", "SET b 2", "GET a", "GET b"].into_iter().enumerate() {
        let kept = cluster.state.lock().unwrap().kept.len();
        clients[client].send(&format!("{request}\r\n"));
        // Of each kind the first one is under way before the next one comes.
        let started = Instant::now();
        while client % 2 == 0 && cluster.state.lock().unwrap().kept.len() == kept {
            assert!(started.elapsed() < PATIENCE, "{request} does not reach the log");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    let unknown =
        "-TRYAGAIN the log did not answer in time: a write may take effect all the same\r\n";
    let undone = "-TRYAGAIN the log took no more requests in time: nothing was done; try again\r\n";
    for (client, said) in clients.iter_mut().zip([unknown, undone, unknown, unknown]) {
        client.expect(said);
    }
    cluster.speak();
    ask(&mut clients[1], "SET c 2", "+OK\r\n");
    ask(&mut clients[0], "GET a", "$1\r\n2\r\n");
    ask(&mut clients[2], "GET b", "$-1\r\n");
}

#[test]
fn what_the_log_cannot_take_is_refused_with_its_reason() {
    let (cluster, members) = cluster(1);
    for member in &members {
        let mut client = member.client();
        let before = cluster.entries();
        client.send(&format!("SET key {}\r\nPING\r\n", "x".repeat(LIMIT / 2)));
        client.expect("+OK\r\n+PONG\r\n");
        // Beyond half of a segment.
        let long = array(&["SET", "key", &"x".repeat(3 << 20)]);
        client.send(&format!("{long}PING\r\n"));
        client.expect("-ERR this command takes ");
        client.line();
        client.expect("+PONG\r\n");
        assert_eq!(cluster.entries(), before + 1);
        ask(
            &mut client,
            "CONFIG SET maxmemory 1000000",
            "-ERR CONFIG SET failed (possibly related to argument 'maxmemory') - can't set \
             immutable config\r\n",
        );
    }
    let address = members[0].node.as_ref().unwrap().redis_address().unwrap().to_string();
    let patience = Duration::from_secs(5);
    let mut stranger = Peer::connect(&address, CLUSTER + 1, None, patience).unwrap();
    let refused = stranger.ask(&[b"STATUS"], Instant::now() + patience, &mut || true);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("wrong cluster: this member is of 0000000000000bee"), "{refused}");
    let mut member = Peer::connect(&address, CLUSTER, None, patience).unwrap();
    let status = member.ask(&[b"STATUS"], Instant::now() + patience, &mut || true).unwrap();
    assert!(String::from_utf8_lossy(&status).contains("role"), "{status:?}");
    // Members ask one another over fabric alone.
    let refused = member.ask(&[b"BARRIER"], Instant::now() + patience, &mut || true);
    assert_eq!(refused.unwrap_err().to_string(), "ERR unknown request of a member");
    let plain = common::start(1);
    let mut client = Client::connect(&plain);
    ask(&mut client, "READONLY", "-ERR This instance has cluster support disabled\r\n");
    client.send("BEELINE.LOG 0 STATUS\r\n");
    client.expect("-ERR unknown command 'BEELINE.LOG'");
}

#[test]
fn a_member_that_starts_again_applies_nothing_twice() {
    let directory = tempfile::tempdir().unwrap();
    let (cluster, members) = cluster(2);
    let mut client = members[0].client();
    let mut expected = 0;
    for round in 0..4 {
        let late = Member::start_with(&cluster, 9, on_disk(directory.path()), |machine| {
            assert!((machine.applied().0 > 0) == (round > 0), "what was applied is known");
            // As if the position recorded were older than the effects.
            let mut replies = Vec::new();
            let entries = cluster.state.lock().unwrap().entries.clone();
            for command in &entries[..machine.applied().0 as usize] {
                machine.apply(Position(0), command, &mut replies);
            }
        });
        for _ in 0..50 {
            client.send("INCR sum\r\nAPPEND text x\r\n");
            expected += 1;
            client.expect(&format!(":{expected}\r\n:{expected}\r\n"));
        }
        late.catch_up();
        let mut reader = late.client();
        ask(&mut reader, "READONLY", "+OK\r\n");
        ask(&mut reader, "STRLEN text", &format!(":{expected}\r\n"));
        let length = expected.to_string().len();
        ask(&mut reader, "GET sum", &format!("${length}\r\n{expected}\r\n"));
    }
}

#[test]
fn a_snapshot_makes_a_member_of_a_node_with_other_contents() {
    let (cluster, members) = cluster(2);
    let mut client = members[0].client();
    for n in 0..200 {
        ask(&mut client, &format!("SET key{n} {n}"), "+OK\r\n");
    }
    ask(&mut client, "INCR sum", ":1\r\n");
    members.iter().for_each(Member::catch_up);
    // The same state from the log alone, on a machine of its own.
    let source = tempfile::tempdir().unwrap();
    let (mut position, mut state) = (0, Vec::new());
    drop(Member::start_with(&cluster, 8, on_disk(source.path()), |machine| {
        let entries = cluster.state.lock().unwrap().entries.clone();
        for command in &entries {
            machine.apply(Position(0), command, &mut Vec::new());
        }
        position = entries.len() as u64;
        machine.flush(Position(position)).unwrap();
        machine.snapshot().unwrap()(&mut state).unwrap();
    }));
    let target = tempfile::tempdir().unwrap();
    let late = Member::start_with(&cluster, 9, on_disk(target.path()), |machine| {
        machine.restore(Position(position), &mut Cursor::new(&state)).unwrap();
        assert_eq!(machine.applied(), Position(position));
        let mut damaged = state.clone();
        damaged.truncate(state.len() / 2);
        assert!(machine.restore(Position(position), &mut Cursor::new(&damaged)).is_err());
    });
    ask(&mut client, "INCR sum", ":2\r\n");
    late.catch_up();
    let mut reader = late.client();
    ask(&mut reader, "READONLY", "+OK\r\n");
    ask(&mut reader, "GET key199", "$3\r\n199\r\n");
    ask(&mut reader, "GET sum", "$1\r\n2\r\n");
    ask(&mut reader, "DBSIZE", ":201\r\n");
}

#[test]
fn what_was_flushed_behind_an_entry_without_a_unit_is_known_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let cluster = Arc::new(Cluster::default());
    let start = |prepare: &dyn Fn(&mut Machine)| {
        drop(Member::start_with(&cluster, 9, on_disk(directory.path()), prepare));
    };
    // The log forgets entries below what was flushed, also where the last one is a no-op.
    start(&|machine| machine.flush(Position(7)).unwrap());
    start(&|machine| assert_eq!(machine.applied(), Position(7)));
}

#[test]
fn a_member_whose_log_ended_says_so_at_once_and_asks_to_be_stopped() {
    let (cluster, mut members) = cluster(2);
    let mut client = members[0].client();
    ask(&mut client, "SET key value", "+OK\r\n");
    cluster.state.lock().unwrap().stopped.push(1);
    cluster.changed.notify_all();
    let applier = members[0].applier.replace(std::thread::spawn(|| ()));
    applier.unwrap().join().unwrap();
    for request in ["GET key", "SET key other"] {
        let reply = client.ask(request);
        assert!(reply.starts_with("-MISCONF"), "{request}: {reply}");
    }
    let handle = members[0].node.as_ref().unwrap().handle();
    let asked = handle.shutdown_requested();
    let mut polled = [rustix::event::PollFd::new(&asked, rustix::event::PollFlags::IN)];
    let none = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut polled, Some(&none)).unwrap(), 1);
}

#[test]
fn a_write_that_comes_before_the_log_is_refused_only_for_now() {
    let options = beeline_node::ReplicationOptions {
        cluster: CLUSTER,
        node: 1,
        request_timeout: Duration::from_secs(20),
        ordered_commits: false,
    };
    let config = beeline_node::NodeConfig { replication: Some(options), ..common::config(2) };
    let node = beeline_node::Node::start(&config).unwrap();
    let mut client = Client::connect(&node);
    // What the log will take is not known: the node must not say that it is too much.
    let value = "v".repeat(20_000);
    client.send(&format!("SET key {value}\r\n"));
    let said = client.reply();
    assert!(said.starts_with("-TRYAGAIN"), "{said}");
    node.stop();
}

/// A request of any length: one line takes 64 KiB at most.
fn array(words: &[&str]) -> String {
    let all: String = words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
    format!("*{}\r\n{all}", words.len())
}

/// A value of `bytes` bytes that begins as no other one does.
fn value_of(name: &str, bytes: usize) -> String {
    name.chars().cycle().take(bytes).collect()
}

#[test]
fn a_command_longer_than_an_entry_travels_in_pieces_from_every_member() {
    let (cluster, members) = cluster(2);
    let mut clients: Vec<_> = members.iter().map(Member::client).collect();
    for round in 0..6 {
        let (writer, reader) = (round % 3, (round + 1) % 3);
        let value = value_of(&format!("round {round} "), 300_000 + round * 250_000);
        // Answers are lost in the middle: pieces come twice.
        cluster.state.lock().unwrap().lost = [0, 3][round / 3];
        // Short ones around it keep their places.
        let set = array(&["SET", &format!("big{round}"), &value]);
        clients[writer].send(&format!("INCR n\r\n{set}INCR n\r\n"));
        clients[writer].expect(&format!(":{}\r\n+OK\r\n:{}\r\n", 2 * round + 1, 2 * round + 2));
        assert_eq!(clients[reader].ask(&format!("GET big{round}")), value);
        ask(&mut clients[reader], &format!("STRLEN big{round}"), &format!(":{}\r\n", value.len()));
    }
    assert!(cluster.entries() > 6 * 5, "none fits an entry");
    // Half of a segment is the most.
    clients[2].send(&array(&["SET", "most", &value_of("v", 2_200_000)]));
    let said = clients[2].reply();
    assert!(said.starts_with("-ERR this command takes 2200"), "{said}");
    ask(&mut clients[1], "EXISTS most big0 big5", ":2\r\n");
    // Parts of transactions and commands of several keys are commands as well.
    let half = value_of("h", 90_000);
    clients[0].send(&array(&["MSET", "one", &half, "two", &half]));
    clients[0].expect("+OK\r\n");
    let append = array(&["APPEND", "one", &half]);
    clients[1].send(&format!("MULTI\r\n{append}STRLEN two\r\nEXEC\r\n"));
    clients[1].expect("+OK\r\n+QUEUED\r\n+QUEUED\r\n*2\r\n:180000\r\n:90000\r\n");
    members.iter().for_each(Member::catch_up);
    for member in &members {
        let (_, stats) = member.node.as_ref().unwrap().handle().stats().replication.unwrap();
        assert!(stats.pieces > 60, "{stats:?}");
    }
}

/// A member that ends between two pieces, or gets a snapshot of that moment, has the command all the
/// same.
#[test]
fn pieces_outlive_restarts_and_travel_in_snapshots() {
    let (cluster, members) = cluster(2);
    let mut client = members[0].client();
    let value = value_of("pieces ", 400_000);
    ask(&mut client, "SET before it", "+OK\r\n");
    client.send(&array(&["SET", "big", &value]));
    client.expect("+OK\r\n");
    let entries = cluster.state.lock().unwrap().entries.clone();
    assert!(entries.len() > 6, "the value takes several entries");
    for cut in 1..entries.len() {
        // A log of its own, so that nothing behind the cut comes by itself.
        let alone = Arc::new(Cluster::default());
        let directory = tempfile::tempdir().unwrap();
        let mut state = Vec::new();
        drop(Member::start_with(&alone, 9, on_disk(directory.path()), |machine| {
            for (at, command) in (1..).zip(&entries[..cut]) {
                machine.apply(Position(at), command, &mut Vec::new());
            }
            machine.flush(Position(cut as u64)).unwrap();
            machine.snapshot().unwrap()(&mut state).unwrap();
        }));
        let position = Position(cut as u64);
        let target = tempfile::tempdir().unwrap();
        for restored in [false, true] {
            let place = if restored { target.path() } else { directory.path() };
            let member = Member::start_with(&alone, 9, on_disk(place), |machine| {
                if restored {
                    machine.restore(position, &mut Cursor::new(&state)).unwrap();
                }
                assert_eq!(machine.applied(), position);
                for (at, command) in (cut as u64 + 1..).zip(&entries[cut..]) {
                    machine.apply(Position(at), command, &mut Vec::new());
                }
                machine.flush(Position(entries.len() as u64)).unwrap();
            });
            let mut reader = member.client();
            ask(&mut reader, "READONLY", "+OK\r\n");
            assert_eq!(reader.ask("GET big"), value, "cut at {cut}, restored: {restored}");
            ask(&mut reader, "DBSIZE", ":2\r\n");
        }
    }
}

/// Pieces of which the first ones are missing, as no lane proposes them, change nothing and stop nobody.
#[test]
fn a_last_piece_without_the_others_changes_nothing() {
    let (cluster, members) = cluster(2);
    let mut client = members[0].client();
    client.send(&array(&["SET", "big", &value_of("v", 200_000)]));
    client.expect("+OK\r\n");
    let mut last = cluster.state.lock().unwrap().entries.last().unwrap().clone();
    // Of another series, and a later turn of a lane that nobody has.
    last[4] = 200;
    last[48] ^= 1;
    cluster.state.lock().unwrap().entries.push(last);
    cluster.changed.notify_all();
    members.iter().for_each(Member::catch_up);
    for member in &members {
        ask(&mut member.client(), "DBSIZE", ":1\r\n");
    }
    for member in &members {
        let mut client = member.client();
        client.send(&array(&["SET", "again", &value_of("w", 200_000)]));
        client.expect("+OK\r\n");
    }
}

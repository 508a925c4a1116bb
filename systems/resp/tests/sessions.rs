//! What a connection's state does: authentication, dialects, transactions, replies switched off,
//! and the commands that ask the node.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "helpers of tests")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use beeline_env::ManualClock;
use beeline_resp::table::{COMMANDS, Command};
use beeline_resp::{
    After, ArgsBuffer, ClientInfo, Output, Pause, Plan, Remote, Route, Session, Shutdown, Version,
};
use common::Node;
use common::redis::{Redis, encode};

/// Runs requests one by one and compares each reply.
fn expect(node: &mut Node, session: &mut Session, script: &[(&str, &str)]) {
    for (request, reply) in script {
        assert_eq!(node.text(session, request), *reply, "{request}");
    }
}

#[test]
fn a_password_is_asked_for_before_anything_else() {
    let mut node = Node::new(1);
    *node.server.password.borrow_mut() = Some(b"secret".to_vec());
    let mut session = node.session();
    assert!(!session.is_authenticated());
    let denied = "-NOAUTH Authentication required.\r\n";
    let wrong = "-WRONGPASS invalid username-password pair or user is disabled.\r\n";
    expect(
        &mut node,
        &mut session,
        &[
            ("GET a", denied),
            ("GET", "-ERR wrong number of arguments for 'get' command\r\n"),
            ("nosuch", "-ERR unknown command 'nosuch', with args beginning with: \r\n"),
            ("PING", denied),
            (
                "EXEC",
                "-EXECABORT Transaction discarded because of: NOAUTH Authentication required.\r\n",
            ),
            ("AUTH nope", wrong),
            ("AUTH other secret", wrong),
            ("AUTH default secret more", "-ERR syntax error\r\n"),
            ("AUTH secret", "+OK\r\n"),
            ("GET a", "$-1\r\n"),
            ("RESET", "+RESET\r\n"),
            ("GET a", denied),
            ("AUTH default secret", "+OK\r\n"),
            ("RESET", "+RESET\r\n"),
            ("HELLO 3 AUTH default wrong", wrong),
        ],
    );
    assert!(node.text(&mut session, "HELLO 3").starts_with("-NOAUTH HELLO must be called with"));
    let hello = node.text(&mut session, "HELLO 3 AUTH default secret SETNAME me");
    assert!(hello.starts_with("%7\r\n$6\r\nserver\r\n$5\r\nredis\r\n"), "{hello}");
    expect(&mut node, &mut session, &[("CLIENT GETNAME", "$2\r\nme\r\n"), ("GET a", "_\r\n")]);
}

#[test]
fn a_session_starts_again_after_reset() {
    let mut node = Node::new(2);
    let mut session = node.session();
    expect(
        &mut node,
        &mut session,
        &[
            (
                "AUTH x",
                "-ERR AUTH <password> called without any password configured for the default user. Are you sure your configuration is correct?\r\n",
            ),
            ("AUTH default anything", "+OK\r\n"),
            ("SELECT 3", "+OK\r\n"),
            ("CLIENT SETNAME n", "+OK\r\n"),
            ("WATCH k", "+OK\r\n"),
            ("MULTI", "+OK\r\n"),
            ("SET k v", "+QUEUED\r\n"),
            ("RESET", "+RESET\r\n"),
            ("EXEC", "-ERR EXEC without MULTI\r\n"),
            ("CLIENT GETNAME", "$-1\r\n"),
            ("GET k", "$-1\r\n"),
        ],
    );
    assert_eq!((session.database(), session.version()), (0, Version::Resp2));
}

#[test]
fn a_transaction_runs_as_a_whole_or_says_why_not() {
    let mut node = Node::new(4);
    let (mut one, mut two) = (node.session(), node.session());
    expect(
        &mut node,
        &mut one,
        &[
            ("MULTI", "+OK\r\n"),
            ("MULTI", "-ERR MULTI calls can not be nested\r\n"),
            ("WATCH a", "-ERR WATCH inside MULTI is not allowed\r\n"),
            ("SET a 1", "+QUEUED\r\n"),
            ("INCR b", "+QUEUED\r\n"),
            ("SELECT 5", "+QUEUED\r\n"),
            ("MSET c 1 d 2 e 3", "+QUEUED\r\n"),
            ("APPEND e x", "+QUEUED\r\n"),
            ("INCR e", "+QUEUED\r\n"),
            ("DBSIZE", "+QUEUED\r\n"),
            (
                "EXEC",
                "*7\r\n+OK\r\n:1\r\n+OK\r\n+OK\r\n:2\r\n-ERR value is not an integer or out of range\r\n:3\r\n",
            ),
            ("GET e", "$2\r\n3x\r\n"),
            ("SELECT 0", "+OK\r\n"),
            ("MGET a b c", "*3\r\n$1\r\n1\r\n$1\r\n1\r\n$-1\r\n"),
            ("MULTI", "+OK\r\n"),
            ("NOSUCH", "-ERR unknown command 'NOSUCH', with args beginning with: \r\n"),
            ("SET a 2", "+QUEUED\r\n"),
            ("EXEC", "-EXECABORT Transaction discarded because of previous errors.\r\n"),
            ("GET a", "$1\r\n1\r\n"),
            ("MULTI", "+OK\r\n"),
            ("SAVE", "-ERR Command not allowed inside a transaction\r\n"),
            ("EXEC", "-EXECABORT Transaction discarded because of previous errors.\r\n"),
            ("DISCARD", "-ERR DISCARD without MULTI\r\n"),
        ],
    );
    // Each of these changes the watched key for the other connection.
    for (before, change) in [
        ("SET k 1", "SET k 1"),
        ("SET k 1", "DEL k"),
        ("DEL k", "SET k 1"),
        ("SET k 1", "EXPIRE k 100"),
        ("SET k 1", "APPEND k x"),
        ("SET k 1", "FLUSHALL"),
        ("SET k 1", "RENAME k other"),
        ("SET k 1", "MOVE k 9"),
    ] {
        node.text(&mut two, "FLUSHALL");
        node.text(&mut two, before);
        expect(
            &mut node,
            &mut one,
            &[("WATCH z k", "+OK\r\n"), ("MULTI", "+OK\r\n"), ("SET r 1", "+QUEUED\r\n")],
        );
        assert!(!node.text(&mut two, change).starts_with('-'));
        expect(&mut node, &mut one, &[("EXEC", "*-1\r\n"), ("GET r", "$-1\r\n")]);
    }
    // These do not.
    for change in ["GET k", "SET other 1", "EXPIRE nosuch 1", "SETNX k 2"] {
        node.text(&mut two, "SET k 1");
        node.text(&mut one, "WATCH k");
        node.text(&mut one, "MULTI");
        node.text(&mut one, "PING");
        node.text(&mut two, change);
        assert_eq!(node.text(&mut one, "EXEC"), "*1\r\n+PONG\r\n", "{change}");
    }
    // UNWATCH forgets; DISCARD too.
    for forget in ["UNWATCH", "DISCARD"] {
        node.text(&mut one, "WATCH k");
        if forget == "DISCARD" {
            node.text(&mut one, "MULTI");
        }
        node.text(&mut one, forget);
        node.text(&mut two, "SET k 2");
        node.text(&mut one, "MULTI");
        assert_eq!(node.text(&mut one, "EXEC"), "*0\r\n");
    }
}

#[test]
fn replies_can_be_switched_off() {
    let mut node = Node::new(1);
    let mut session = node.session();
    expect(
        &mut node,
        &mut session,
        &[
            ("CLIENT REPLY SKIP", ""),
            ("SET a 1", ""),
            ("GET a", "$1\r\n1\r\n"),
            ("CLIENT REPLY OFF", ""),
            ("INCR a", ""),
            ("nosuch", ""),
            ("CLIENT REPLY SKIP", ""),
            ("INCR a", ""),
            ("CLIENT REPLY ON", "+OK\r\n"),
            ("GET a", "$1\r\n3\r\n"),
        ],
    );
}

#[test]
fn idle_time_counts_from_the_last_use() {
    let clock = Arc::new(ManualClock::new(1_000_000_000_000));
    let mut node = Node::with_clock(2, clock.clone());
    let (mut session, mut quiet) = (node.session(), node.session());
    expect(&mut node, &mut session, &[("SET k v", "+OK\r\n"), ("SET old v PX 1000", "+OK\r\n")]);
    clock.advance(Duration::from_secs(7));
    let now = beeline_env::Clock::monotonic_ns(&*clock);
    node.shards.iter().for_each(|shard| shard.lock().unwrap().note_time(now));
    for request in
        ["TTL k", "TYPE k", "EXISTS k", "OBJECT ENCODING k", "OBJECT FREQ k", "MEMORY USAGE k"]
    {
        node.text(&mut session, request);
        assert_eq!(node.text(&mut session, "OBJECT IDLETIME k"), ":7\r\n", "{request}");
    }
    expect(
        &mut node,
        &mut quiet,
        &[
            ("OBJECT IDLETIME old", "$-1\r\n"),
            ("CLIENT NO-TOUCH ON", "+OK\r\n"),
            ("GET k", "$1\r\nv\r\n"),
            ("MGET k nosuch", "*2\r\n$1\r\nv\r\n$-1\r\n"),
            ("OBJECT IDLETIME k", ":7\r\n"),
            ("TOUCH k", ":1\r\n"),
            ("OBJECT IDLETIME k", ":0\r\n"),
        ],
    );
    clock.advance(Duration::from_secs(3));
    expect(
        &mut node,
        &mut session,
        &[("OBJECT IDLETIME k", ":3\r\n"), ("OBJECT IDLETIME nosuch", "$-1\r\n")],
    );
    let now = beeline_env::Clock::monotonic_ns(&*clock);
    node.shards.iter().for_each(|shard| shard.lock().unwrap().note_time(now));
    expect(&mut node, &mut session, &[("GET k", "$1\r\nv\r\n"), ("OBJECT IDLETIME k", ":0\r\n")]);
}

#[test]
fn time_passes_for_keys_as_the_clock_says() {
    let clock = Arc::new(ManualClock::new(1_000_000_000_000));
    let mut node = Node::with_clock(2, clock.clone());
    let (mut session, mut other) = (node.session(), node.session());
    expect(
        &mut node,
        &mut session,
        &[
            ("SET a 1 EX 10", "+OK\r\n"),
            ("TTL a", ":10\r\n"),
            ("PEXPIRETIME a", ":1000000010000\r\n"),
            ("EXPIRETIME a", ":1000000010\r\n"),
            ("SET b 1 PXAT 1000000000001", "+OK\r\n"),
            ("SET c 1 PXAT 999999999999", "+OK\r\n"),
            ("EXISTS a b c", ":2\r\n"),
            ("WATCH b", "+OK\r\n"),
            ("MULTI", "+OK\r\n"),
            ("EXEC", "*0\r\n"),
            ("WATCH b", "+OK\r\n"),
        ],
    );
    clock.advance(Duration::from_millis(9_400));
    expect(
        &mut node,
        &mut session,
        &[
            ("GET b", "$-1\r\n"),
            ("MULTI", "+OK\r\n"),
            ("EXEC", "*-1\r\n"),
            ("TTL a", ":1\r\n"),
            ("PTTL a", ":600\r\n"),
            ("GETEX a PERSIST", "$1\r\n1\r\n"),
            ("TTL a", ":-1\r\n"),
            ("EXPIRE a 5 GT", ":0\r\n"),
            ("EXPIRE a 5 LT", ":1\r\n"),
            ("EXPIRE a 6 GT", ":1\r\n"),
            ("SET a 2 KEEPTTL", "+OK\r\n"),
            ("INCR a", ":3\r\n"),
            ("TTL a", ":6\r\n"),
            ("SET a 2", "+OK\r\n"),
            ("TTL a", ":-1\r\n"),
            ("EXPIRE a -1", ":1\r\n"),
            ("EXISTS a", ":0\r\n"),
            ("SETEX d 0 x", "-ERR invalid expire time in 'setex' command\r\n"),
        ],
    );
    assert_eq!(node.text(&mut other, "KEYS *"), "*0\r\n");
}

#[test]
fn the_node_is_asked_for_what_it_knows() {
    let mut node = Node::new(1);
    let mut session = node.session();
    *node.server.parameters.borrow_mut() =
        vec![("maxmemory".into(), "0".into()), ("save".into(), String::new())];
    let quiet =
        ClientInfo { id: 8, address: "1.2.3.4:5".into(), user: "default", ..ClientInfo::default() };
    *node.server.clients.borrow_mut() = vec![session.snapshot(), quiet];
    expect(
        &mut node,
        &mut session,
        &[
            ("CONFIG GET max* nosuch", "*2\r\n$9\r\nmaxmemory\r\n$1\r\n0\r\n"),
            ("CONFIG SET maxmemory 100", "+OK\r\n"),
            ("CONFIG GET MAXMEMORY", "*2\r\n$9\r\nmaxmemory\r\n$3\r\n100\r\n"),
            (
                "CONFIG SET maxmemory 1 maxmemory 2",
                "-ERR CONFIG SET failed (possibly related to argument 'maxmemory') - duplicate parameter\r\n",
            ),
            ("CONFIG REWRITE", "-ERR The server is running without a config file\r\n"),
            ("CONFIG RESETSTAT", "+OK\r\n"),
            ("INFO clients", "$32\r\n# Clients\r\nconnected_clients:1\r\n\r\n"),
            ("INFO nosuch", "$0\r\n\r\n"),
            ("SAVE", "+OK\r\n"),
            ("BGSAVE", "+Background saving started\r\n"),
            ("BGSAVE", "-ERR Background save already in progress\r\n"),
            ("SAVE", "-ERR Background save already in progress\r\n"),
            ("BGSAVE SCHEDULE", "+Background saving scheduled\r\n"),
            ("LASTSAVE", ":1700000000\r\n"),
            ("CLIENT ID", ":7\r\n"),
            ("CLIENT SETINFO lib-name redis-py", "+OK\r\n"),
            ("CLIENT SETINFO foo 1", "-ERR Unrecognized option 'foo'\r\n"),
            ("CLIENT PAUSE 100 WRITE", "+OK\r\n"),
            ("CLIENT KILL ADDR 1.2.3.4:5", ":1\r\n"),
            ("CLIENT KILL ID 7", ":0\r\n"),
            ("SHUTDOWN ABORT", "-ERR No shutdown in progress.\r\n"),
            ("SHUTDOWN NOSAVE NOW", ""),
        ],
    );
    assert_eq!(node.server.resets.get(), 1);
    assert_eq!(*node.server.pauses.borrow(), [(100, Pause::Writes)]);
    let request = Shutdown { save: Some(false), now: true, force: false };
    assert_eq!(*node.server.shutdowns.borrow(), [request]);
    let info = node.text(&mut session, "INFO");
    assert!(info.contains("# Server\r\n") && info.contains("\r\n\r\n# Clients\r\n"), "{info}");
    let list = node.text(&mut session, "CLIENT LIST");
    assert!(list.contains("id=7 ") && list.contains("id=8 addr=1.2.3.4:5 "), "{list}");
    assert!(
        list.contains(" cmd=client|list ") && list.contains("lib-name=redis-py lib-ver="),
        "{list}"
    );
    let list = node.text(&mut session, "CLIENT LIST ID 8 9");
    assert!(!list.contains("id=7 ") && list.contains("id=8 "));
    // Killing oneself is allowed when asked for, and closes after the reply.
    let mut out = Output::default();
    let words: [&[u8]; 6] = [b"CLIENT", b"KILL", b"ID", b"7", b"SKIPME", b"no"];
    assert_eq!(node.run(&mut session, &words, &mut out), After::Close);
    assert_eq!(out.as_bytes(), b":1\r\n");
}

#[test]
fn the_end_of_a_connection_is_told_to_the_node() {
    let mut node = Node::new(1);
    let mut session = node.session();
    let mut out = Output::default();
    assert_eq!(node.run(&mut session, &[b"POST", b"/", b"HTTP/1.1"], &mut out), After::Hangup);
    assert!(out.is_empty(), "a browser gets no answer");
    assert_eq!(node.run(&mut session, &[b"QUIT"], &mut out), After::Close);
    assert_eq!(out.as_bytes(), b"+OK\r\n");
}

#[test]
fn routes_name_the_shards_of_all_keys() {
    let mut node = Node::new(8);
    let mut session = node.session();
    let route = |node: &Node, session: &Session, request: &str| {
        let words: Vec<&[u8]> = request.split(' ').map(str::as_bytes).collect();
        let mut buffer = ArgsBuffer::new();
        assert!(buffer.push_words(&words));
        let plan = Plan::new(session, buffer.get(0));
        (plan.route(session, &*node.store), plan.is_portable(), plan.may_write(session))
    };
    let shard = |node: &Node, database, key: &str| node.store.shard_of(database, key.as_bytes());
    let (a, b) = (shard(&node, 0, "a"), shard(&node, 0, "b"));
    assert_eq!(route(&node, &session, "GET a"), (Route::Shard(a), true, false));
    assert_eq!(route(&node, &session, "SET b 1"), (Route::Shard(b), true, true));
    assert_eq!(route(&node, &session, "WATCH a"), (Route::Shard(a), false, false));
    assert_eq!(route(&node, &session, "PING"), (Route::Here, false, false));
    assert_eq!(route(&node, &session, "GET"), (Route::Here, false, false), "refused: no key");
    assert_eq!(route(&node, &session, "DBSIZE").0, Route::All);
    assert_eq!(route(&node, &session, "KEYS *").0, Route::All);
    assert_eq!(route(&node, &session, "SCAN 0").0, Route::Shard(0));
    let keys: Vec<String> = (0..40).map(|n| format!("key{n}")).collect();
    let Route::Shards(set) = route(&node, &session, &format!("MGET {}", keys.join(" "))).0 else {
        unreachable!("forty keys lie in several shards")
    };
    assert!(keys.iter().all(|key| set.contains(shard(&node, 0, key))));
    assert!(set.iter().is_sorted());
    let needs = |route: Route, index: usize| match route {
        Route::Shard(only) => only == index,
        Route::Shards(set) => set.contains(index),
        _ => false,
    };
    let moved = route(&node, &session, "COPY a b DB 3 REPLACE").0;
    assert!(needs(moved, a) && needs(moved, shard(&node, 3, "b")));
    node.text(&mut session, "WATCH a");
    node.text(&mut session, "MULTI");
    assert_eq!(route(&node, &session, "GET b").0, Route::Here, "only queued");
    for queued in ["SELECT 4", "SET x 1", "GET y"] {
        node.text(&mut session, queued);
    }
    let (exec, portable, writes) = route(&node, &session, "EXEC");
    assert!(!portable && writes);
    for index in [a, shard(&node, 4, "x"), shard(&node, 4, "y")] {
        assert!(needs(exec, index));
    }
}

#[test]
fn a_request_run_at_another_shard_gives_the_same_reply() {
    let mut node = Node::new(1);
    let mut session = node.session();
    for request in ["SET a 5", "INCR a", "GET a", "GET nosuch", "INCRBY a x", "TYPE a", "KEYS *"] {
        let words: Vec<&[u8]> = request.split(' ').map(str::as_bytes).collect();
        let mut buffer = ArgsBuffer::new();
        assert!(buffer.push_words(&words));
        let mut remote = Output::default();
        {
            let mut shard = node.shards[0].lock().unwrap();
            let mut keyspace = beeline_kv::Keyspace::single(&mut shard);
            let (args, executor) = (buffer.get(0), &mut node.executor);
            executor.execute_remote(
                Remote { database: 0, version: Version::Resp3, touch: true },
                args,
                &mut keyspace,
                &mut remote,
                &node.server,
            );
        }
        let local = node.text(&mut session, request).replace("$-1\r\n", "_\r\n");
        let remote = String::from_utf8_lossy(remote.as_bytes()).into_owned();
        if !request.starts_with("INCR a") {
            assert_eq!(remote, local, "{request}");
        }
    }
    assert_eq!(node.text(&mut session, "GET a"), "$1\r\n7\r\n", "INCR ran twice");
    let mut buffer = ArgsBuffer::new();
    assert!(buffer.push_words(&[b"MULTI"]));
    let mut shard = node.shards[0].lock().unwrap();
    let mut keyspace = beeline_kv::Keyspace::single(&mut shard);
    let mut out = Output::default();
    let executor = &mut node.executor;
    executor.execute_remote(
        Remote { database: 0, version: Version::Resp2, touch: true },
        buffer.get(0),
        &mut keyspace,
        &mut out,
        &node.server,
    );
    assert_eq!(out.as_bytes(), b"-ERR this command needs its connection\r\n");
}

#[test]
fn a_full_store_refuses_writes_and_still_deletes() {
    let mut node = Node::with_capacity(1, 1 << 20);
    let mut session = node.session();
    let value = vec![b'x'; 10_000];
    let mut stored = 0;
    let refusal = loop {
        let key = format!("key{stored}");
        let reply = node.reply(&mut session, &[b"SET", key.as_bytes(), &value]);
        if reply != b"+OK\r\n" {
            break String::from_utf8_lossy(&reply).into_owned();
        }
        stored += 1;
        assert!(stored < 1000, "a MiB does not hold ten");
    };
    assert_eq!(refusal, "-OOM command not allowed when used memory > 'maxmemory'.\r\n");
    assert!(stored > 10);
    assert_eq!(node.text(&mut session, "STRLEN key0"), ":10000\r\n");
    assert_eq!(node.text(&mut session, "DEL key0"), ":1\r\n");
    assert_eq!(node.text(&mut session, "PING"), "+PONG\r\n");
    let large = vec![b'x'; 200_000];
    let reply = node.reply(&mut session, &[b"SET", b"k", &large]);
    assert!(
        reply.starts_with(b"-ERR a value of 200000 bytes"),
        "{}",
        String::from_utf8_lossy(&reply)
    );
}

/// Queues `requests`, runs EXEC and returns its reply.
fn transaction(node: &mut Node, session: &mut Session, requests: &[&[&[u8]]]) -> String {
    assert_eq!(node.text(session, "MULTI"), "+OK\r\n");
    for request in requests {
        assert_eq!(node.reply(session, request), b"+QUEUED\r\n");
    }
    node.text(session, "EXEC")
}

#[test]
fn a_transaction_without_room_for_all_of_it_is_refused_as_a_whole() {
    const REFUSAL: &str = "-EXECABORT Transaction discarded because of: OOM command not allowed \
                           when used memory > 'maxmemory'.\r\n";
    let value = vec![b'x'; 10_000];
    let half = vec![b'h'; 4_000];
    for shards in [1, 2] {
        let mut node = Node::with_capacity(shards, 1 << 20);
        let mut session = node.session();
        let mut stored: u64 = 0;
        while node.reply(&mut session, &[b"SET", format!("key{stored}").as_bytes(), &value])
            == b"+OK\r\n"
        {
            stored += 1;
            assert!(stored < 1000, "a MiB does not hold ten");
        }
        let size = format!(":{stored}\r\n");
        // What is small still finds room in the open segments; with what is large, it does not.
        let cases: [&[&[&[u8]]]; 7] = [
            &[&[b"SET", b"new", b"1"], &[b"SET", b"large", &[b'x'; 60_000]]],
            &[&[b"SET", b"new", b"1"], &[b"APPEND", b"key1", &[b'x'; 50_000]]],
            &[&[b"SET", b"new", b"1"], &[b"SETRANGE", b"key1", b"59000", b"x"]],
            &[&[b"INCR", b"new"], &[b"MSET", b"x", &[0; 30_000], b"y", &[0; 30_000]]],
            &[&[b"DEL", b"key0"], &[b"SET", b"x", &half], &[b"APPEND", b"x", &[0; 52_000]]],
            &[&[b"DEL", b"key0"], &[b"SET", b"x", &[0; 59_000]], &[b"EXPIRE", b"x", b"9"]],
            &[&[b"RENAME", b"key0", b"z"], &[b"SET", b"x", &[0; 59_000]]],
        ];
        for case in cases {
            let reply = transaction(&mut node, &mut session, case);
            let whole = reply == REFUSAL
                || reply
                    .starts_with("-EXECABORT Transaction discarded because of: the batch needs");
            assert!(whole, "{shards} shards: {reply}");
            assert_eq!(node.text(&mut session, "DBSIZE"), size);
            assert_eq!(node.text(&mut session, "EXISTS new x key0"), ":1\r\n");
            assert!(!session.in_transaction());
        }
        // Deletions are never refused, and make room.
        let deletions: Vec<Vec<Vec<u8>>> = (0..stored / 2)
            .map(|n| vec![b"DEL".to_vec(), format!("key{n}").into_bytes()])
            .collect();
        let words: Vec<Vec<&[u8]>> =
            deletions.iter().map(|request| request.iter().map(Vec::as_slice).collect()).collect();
        let requests: Vec<&[&[u8]]> = words.iter().map(Vec::as_slice).collect();
        let reply = transaction(&mut node, &mut session, &requests);
        assert_eq!(reply, format!("*{}\r\n{}", stored / 2, ":1\r\n".repeat(stored as usize / 2)));
        for shard in &node.shards {
            while shard.lock().unwrap().maintain(1 << 20).unwrap().did_work {}
        }
        let reply = transaction(
            &mut node,
            &mut session,
            &[&[b"SET", b"new", b"1"], &[b"SET", b"x", &half]],
        );
        assert_eq!(reply, "*2\r\n+OK\r\n+OK\r\n");
    }
}

#[test]
fn a_transaction_at_the_memory_limit_runs_whole_or_not_at_all() {
    let mut node = Node::new(2);
    let mut session = node.session();
    let value = vec![b'x'; 10_000];
    for n in 0..20 {
        let key = format!("key{n}");
        assert_eq!(node.reply(&mut session, &[b"SET", key.as_bytes(), &value]), b"+OK\r\n");
    }
    for shard in &node.shards {
        shard.lock().unwrap().tick();
    }
    node.store.set_max_memory_bytes(node.store.memory_bytes() + 25_000);
    let three: [&[&[u8]]; 3] =
        [&[b"SET", b"a", &value], &[b"SET", b"b", &value], &[b"SET", b"c", &value]];
    let reply = transaction(&mut node, &mut session, &three);
    assert!(reply.starts_with("-EXECABORT Transaction discarded because of: OOM"), "{reply}");
    assert_eq!(node.text(&mut session, "DBSIZE"), ":20\r\n");
    let reply = transaction(&mut node, &mut session, &three[..2]);
    assert_eq!(reply, "*2\r\n+OK\r\n+OK\r\n");
}

#[test]
fn a_refused_mset_leaves_nothing_behind() {
    let mut node = Node::with_capacity(2, 8 << 20);
    let mut session = node.session();
    let half = vec![b'x'; 40_000];
    let reply = node.reply(&mut session, &[b"MSET", b"a", &half, b"b", &half]);
    assert!(reply.starts_with(b"-ERR the batch needs"), "{}", String::from_utf8_lossy(&reply));
    let long = vec![b'k'; 70_000];
    let reply = node.reply(&mut session, &[b"MSET", b"a", b"1", &long, b"2"]);
    assert!(reply.starts_with(b"-ERR a key of 70000"), "{}", String::from_utf8_lossy(&reply));
    assert_eq!(node.text(&mut session, "DBSIZE"), ":0\r\n");
}

/// What COMMAND says must be what Redis says, for every command both have.
#[test]
fn command_info_is_what_redis_reports() {
    let Some(redis) = Redis::start_or_skip() else { return };
    let mut node = Node::new(1);
    let mut compared = 0;
    for version in ["2", "3"] {
        let mut theirs = redis.connect();
        let mut session = node.session();
        let hello = [b"HELLO".to_vec(), version.into()];
        theirs.send(&encode(&hello));
        theirs.reply();
        node.reply(&mut session, &[b"HELLO", version.as_bytes()]);
        let all =
            COMMANDS.iter().flat_map(|command| std::iter::once(command).chain(command.subcommands));
        for command in all {
            let newer = ["client|setinfo", "client|no-touch", "msetex"].contains(&command.name);
            let ours = ["direct.", "kv."].iter().any(|own| command.name.starts_with(own));
            if newer || ours || !command.subcommands.is_empty() {
                continue;
            }
            let request = [b"COMMAND".to_vec(), b"INFO".to_vec(), command.name.into()];
            theirs.send(&encode(&request));
            let expected = String::from_utf8_lossy(&theirs.reply()).into_owned();
            let found = node.reply(&mut session, &[b"COMMAND", b"INFO", command.name.as_bytes()]);
            assert_eq!(String::from_utf8_lossy(&found), expected, "{}", command.name);
            compared += 1;
        }
    }
    assert!(compared > 150, "{compared}");
}

#[test]
fn command_describes_everything_it_lists() {
    let mut node = Node::new(1);
    let mut session = node.session();
    let count = format!(":{}\r\n", COMMANDS.len());
    assert_eq!(node.text(&mut session, "COMMAND COUNT"), count);
    let all = node.text(&mut session, "COMMAND");
    assert!(all.starts_with(&format!("*{}\r\n*10\r\n$6\r\nappend\r\n:3\r\n", COMMANDS.len())));
    let docs = node.text(&mut session, "COMMAND DOCS get nosuch");
    assert!(docs.starts_with("*2\r\n$3\r\nget\r\n*6\r\n$7\r\nsummary\r\n"), "{docs}");
    assert_eq!(node.text(&mut session, "COMMAND INFO nosuch"), "*1\r\n*-1\r\n");
    assert_eq!(
        node.text(&mut session, "COMMAND GETKEYS MSET a 1 b 2"),
        "*2\r\n$1\r\na\r\n$1\r\nb\r\n"
    );
    let names: Vec<&Command> = COMMANDS.iter().collect();
    assert!(names.is_sorted_by_key(|command| command.name), "the table is in alphabetical order");
    for help in ["CLIENT", "COMMAND", "CONFIG", "MEMORY", "OBJECT"] {
        let text = node.text(&mut session, &format!("{help} HELP"));
        assert!(text.contains(&format!("+{help} <subcommand>")), "{text}");
        let lines = common::redis::elements(text.as_bytes()).len();
        assert!(text.starts_with(&format!("*{lines}\r\n")));
    }
}

#[test]
fn scan_meets_every_key_once_over_several_shards() {
    let mut node = Node::new(3);
    let mut session = node.session();
    for n in 0..500 {
        node.text(&mut session, &format!("SET key{n} 1"));
    }
    let mut met = Vec::new();
    let mut cursor = "0".to_owned();
    let mut calls = 0;
    loop {
        let reply = node.text(&mut session, &format!("SCAN {cursor} COUNT 7"));
        let lines: Vec<&str> = reply.split("\r\n").collect();
        cursor = lines[2].to_owned();
        met.extend(lines[4..].iter().skip(1).step_by(2).map(|&key| key.to_owned()));
        calls += 1;
        if cursor == "0" {
            break;
        }
    }
    met.sort();
    met.dedup();
    assert_eq!(met.len(), 500);
    assert!(calls > 20, "small counts give small pieces: {calls} calls");
    assert_eq!(node.text(&mut session, "SCAN 18446744073709551615"), "*2\r\n$1\r\n0\r\n*0\r\n");
}

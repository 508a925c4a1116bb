//! Clients that are slow, broken, many or hostile: each harms only itself.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use beeline_verify_clients::resp::encode;
use beeline_verify_clients::{Connection, Reply, Server, skip};

fn server(more: &[&str]) -> (tempfile::TempDir, Server) {
    let data = tempfile::tempdir().unwrap_or_else(|error| panic!("{error}"));
    let server = Server::start(data.path(), more);
    (data, server)
}

/// Sends `bytes`, then reads what comes until the end or a long pause.
fn answer(server: &Server, bytes: &[u8]) -> (String, bool) {
    let mut stream = TcpStream::connect(server.resp()).unwrap_or_else(|error| panic!("{error}"));
    let _ = stream.set_read_timeout(Some(Duration::from_secs(20)));
    let _ = stream.write_all(bytes);
    let mut said = Vec::new();
    let closed = stream.read_to_end(&mut said).is_ok();
    (String::from_utf8_lossy(&said).into_owned(), closed)
}

#[test]
fn malformed_requests_end_their_own_connection_with_an_error() {
    let (_data, server) = server(&[]);
    let mut witness = server.connect();
    for bytes in [
        &b"*1\r\n+PING\r\n"[..],
        b"*x\r\n",
        b"*1\r\n$x\r\n",
        b"*1\r\n$-5\r\n",
        b"*99999999999999999999\r\n",
        b"*2147483648\r\n",
        b"*1\r\n$999999999999\r\n",
    ] {
        let (said, closed) = answer(&server, bytes);
        let shown = String::from_utf8_lossy(bytes).into_owned();
        assert!(said.starts_with("-ERR Protocol error"), "{shown:?}: {said:?}");
        assert!(closed, "{shown:?} left its connection open");
        assert_eq!(witness.say("PING").text(), "PONG", "{shown:?} harmed another client");
    }
}

#[test]
fn an_endless_inline_request_is_refused() {
    let (_data, server) = server(&[]);
    // Little past the limit: a close with much unread input would take the error with it.
    let (said, closed) = answer(&server, &vec![b'a'; (64 << 10) + 100]);
    assert!(closed && said.contains("too big inline request"), "{said:?}");
}

#[test]
fn random_bytes_harm_nobody() {
    let (_data, server) = server(&[]);
    let mut witness = server.connect();
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    const ALPHABET: &[u8] = b"*$\r\n0123456789-+:PINGSET \0\xff";
    for _ in 0..200 {
        let bytes: Vec<u8> = (0..64)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                // Mostly bytes that mean something to the parser.
                ALPHABET[(state >> 32) as usize % ALPHABET.len()]
            })
            .collect();
        let mut stream = TcpStream::connect(server.resp()).unwrap();
        let _ = stream.write_all(&bytes);
    }
    assert_eq!(witness.say("PING").text(), "PONG");
    assert_eq!(server.connect().say("PING").text(), "PONG");
}

#[test]
fn a_request_may_arrive_one_byte_at_a_time() {
    let (_data, server) = server(&[]);
    let mut connection = server.connect();
    for byte in encode(&[b"SET", b"slow", b"sure"]) {
        connection.send(&[byte]).unwrap();
    }
    assert!(connection.reply().unwrap().is_ok());
    assert_eq!(connection.say("GET slow").text(), "sure");
}

#[test]
fn a_half_closed_client_still_gets_its_replies() {
    let (_data, server) = server(&[]);
    let mut connection = server.connect();
    let mut requests = Vec::new();
    for i in 0..100 {
        requests.extend(encode(&[b"SET", format!("half:{i}").as_bytes(), b"closed"]));
    }
    connection.send(&requests).unwrap();
    connection.socket().shutdown(Shutdown::Write).unwrap();
    for i in 0..100 {
        assert!(connection.reply().unwrap().is_ok(), "reply {i}");
    }
    assert!(connection.is_closed());
}

#[test]
fn one_reply_past_the_limit_is_an_error_that_names_the_setting() {
    let (_data, server) = server(&["--output-buffer-limit", "8MiB"]);
    let mut greedy = server.connect();
    let value = vec![b'v'; 512 << 10];
    assert!(greedy.call(&[b"SET", b"large", &value]).unwrap().is_ok());
    let words: Vec<&[u8]> =
        std::iter::once(&b"MGET"[..]).chain(std::iter::repeat_n(&b"large"[..], 128)).collect();
    let reply = greedy.call(&words).unwrap();
    assert!(reply.text().contains("client-output-buffer-limit"), "{reply:?}");
    assert_eq!(greedy.say("STRLEN large").text(), (512 << 10).to_string());
}

#[test]
fn a_client_that_does_not_read_costs_bounded_memory_and_no_other_client() {
    let (_data, server) = server(&["--output-buffer-limit", "8MiB"]);
    let mut witness = server.connect();
    let value = vec![b'v'; 64 << 10];
    assert!(witness.call(&[b"SET", b"large", &value]).unwrap().is_ok());
    let before = server.resident_bytes();
    let mut silent: Vec<Connection> = (0..4).map(|_| server.connect()).collect();
    for connection in &mut silent {
        // 256 MiB of replies asked for, none read.
        let request = encode(&[b"GET", b"large"]);
        connection.send(&request.repeat(4096)).unwrap();
    }
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        assert_eq!(witness.say("PING").text(), "PONG");
        assert_eq!(witness.say("STRLEN large").text(), (64 << 10).to_string());
        std::thread::sleep(Duration::from_millis(20));
    }
    let grown = server.resident_bytes().saturating_sub(before);
    // Four limits, and as much again for what is on its way.
    assert!(grown < 64 << 20, "{grown} bytes more for four silent clients");
}

#[test]
fn pipelined_requests_of_a_reader_that_pauses_are_all_answered() {
    let (_data, server) = server(&["--output-buffer-limit", "8MiB"]);
    let mut connection = server.connect();
    let value = vec![b'v'; 64 << 10];
    assert!(connection.call(&[b"SET", b"large", &value]).unwrap().is_ok());
    // 32 MiB of replies, more than the limit: the node has to stop reading, not close.
    let writer = connection.socket().try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        let mut writer = &writer;
        for _ in 0..512 {
            let _ = writer.write_all(&encode(&[b"GET", b"large"]));
        }
    });
    std::thread::sleep(Duration::from_secs(1));
    for i in 0..512 {
        match connection.reply() {
            Ok(Reply::Bulk(bytes)) => assert_eq!(bytes.len(), value.len(), "reply {i}"),
            other => panic!("reply {i}: {other:?}\n{}", server.complaints()),
        }
    }
    sender.join().unwrap();
}

#[test]
fn ten_thousand_connections_are_served_at_once() {
    let test = "ten_thousand_connections_are_served_at_once";
    let wanted = 10_000;
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.maximum.is_some_and(|most| most < wanted + 500) {
        skip(test, "the limit on open files is below 10,500; raise `ulimit -Hn`");
        return;
    }
    let raised = rustix::process::Rlimit { current: limit.maximum, maximum: limit.maximum };
    rustix::process::setrlimit(rustix::process::Resource::Nofile, raised).unwrap();
    let (_data, server) = server(&["--max-clients", "10000"]);
    let mut connections: Vec<Connection> = Vec::new();
    for i in 0..wanted {
        match Connection::open(server.resp()) {
            Ok(connection) => connections.push(connection),
            Err(error) => panic!("connection {i}: {error}"),
        }
    }
    for (i, connection) in connections.iter_mut().enumerate() {
        let name = format!("c:{i}");
        assert!(connection.call(&[b"SET", name.as_bytes(), b"x"]).unwrap().is_ok(), "{i}");
    }
    // One more is told so.
    let mut extra = Connection::open(server.resp()).unwrap();
    let said = extra.reply().map(|reply| reply.text()).unwrap_or_default();
    assert!(said.contains("max number of clients"), "{said:?}");
    assert_eq!(connections[0].say("DBSIZE").text(), wanted.to_string());
}

#[test]
fn clients_that_vanish_leave_nothing_behind() {
    let (_data, server) = server(&["--max-clients", "50"]);
    for _ in 0..20 {
        let mut held: Vec<Connection> = (0..40).map(|_| server.connect()).collect();
        for connection in &mut held {
            // Half a request, then gone.
            connection.send(b"*3\r\n$3\r\nSET\r\n$1\r\nk").unwrap();
        }
    }
    // All 800 were closed by their clients: 50 places must be free again soon.
    beeline_verify_clients::eventually("free places", Duration::from_secs(10), || {
        let mut connection = Connection::open(server.resp()).ok()?;
        connection.call(&[b"PING"]).ok().filter(|reply| reply.text() == "PONG")
    });
}

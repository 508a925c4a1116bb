//! What arrives over sockets and in messages.

use beeline_fabric::{ConnectInfo, FlushKind, RemoteAddress, RemoteKey};
use beeline_fabric_open::ServiceUrl;
use beeline_fabric_open::message;
use beeline_fabric_tcp::frame::{Decoder, Frame, HEADER_BYTES, Message};
use beeline_fabric_tcp::handshake::{Endpoint, GREETING_BYTES, Greeting, GreetingRole};
use beeline_kv::wire;

/// The first byte says whether checksums are mended, so that what lies behind them is reached.
fn mends(bytes: &[u8]) -> Option<(bool, &[u8])> {
    let (first, rest) = bytes.split_first()?;
    Some((first.is_multiple_of(2), rest))
}

/// A stream of frame headers: each is refused, or has exactly the spelling it came in.
pub fn tcp_frames(bytes: &[u8]) -> bool {
    let Some((mended, bytes)) = mends(bytes) else { return false };
    let mut decoder = Decoder::default();
    let mut taken = 0_u32;
    for chunk in bytes.chunks_exact(HEADER_BYTES) {
        let mut header = [0; HEADER_BYTES];
        header.copy_from_slice(chunk);
        if mended {
            header[8..12].copy_from_slice(&taken.to_le_bytes());
            let checksum = crc32c::crc32c(&header[..HEADER_BYTES - 4]);
            header[HEADER_BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
        }
        let Ok(frame) = decoder.next(&header) else { break };
        assert_eq!(frame.sequence, taken, "frames are numbered from zero");
        assert_eq!(frame.encode(), header, "a frame has one spelling");
        taken += 1;
    }
    taken > 0
}

pub fn tcp_frame_seeds() -> Vec<Vec<u8>> {
    let remote = RemoteAddress { key: RemoteKey(7), offset: 4096 };
    let messages = [
        Message::Write { remote, length: 64, immediate: None },
        Message::Read { remote, length: 64 },
        Message::Send { length: 48, immediate: Some(5) },
        Message::Send { length: 48, immediate: None },
        Message::CompareAndSwap { remote, expected: 1, desired: 2 },
        Message::FetchAndAdd { remote, addend: 1 },
        Message::Flush { remote, length: 64, kind: FlushKind::Persistent },
        Message::Acknowledge,
    ];
    let mut stream = vec![0];
    let mut seeds = Vec::new();
    for (sequence, message) in (0..).zip(messages) {
        let frame =
            Frame { sequence, request: sequence, acknowledged: 0, acknowledge: true, message };
        stream.extend_from_slice(&frame.encode());
        let mut alone = vec![0];
        alone.extend_from_slice(&Frame { sequence: 0, ..frame }.encode());
        seeds.push(alone);
    }
    seeds.push(stream);
    seeds
}

/// Greetings and endpoints.
pub fn tcp_greeting(bytes: &[u8]) -> bool {
    let Some((mended, bytes)) = mends(bytes) else { return false };
    let mut taken = false;
    if let Some(first) = bytes.first_chunk::<GREETING_BYTES>() {
        let mut greeting = *first;
        if mended {
            let checksum = crc32c::crc32c(&greeting[..GREETING_BYTES - 4]);
            greeting[GREETING_BYTES - 4..].copy_from_slice(&checksum.to_le_bytes());
        }
        if let Some(decoded) = Greeting::decode(&greeting) {
            assert_eq!(decoded.encode(), greeting, "a greeting has one spelling");
            taken = true;
        }
    }
    let mut endpoint = bytes.to_vec();
    if mended && endpoint.len() >= 48 {
        endpoint.truncate(48);
        let checksum = crc32c::crc32c(&endpoint[..44]);
        endpoint[44..].copy_from_slice(&checksum.to_le_bytes());
    }
    if let Ok(decoded) = Endpoint::decode(&ConnectInfo(endpoint)) {
        let again = Endpoint::decode(&decoded.encode());
        assert_eq!(again.expect("what we encode decodes"), decoded);
        taken = true;
    }
    taken
}

pub fn greeting_seeds() -> Vec<Vec<u8>> {
    let with_switch = |bytes: &[u8]| [&[0], bytes].concat();
    let greeting = |role| Greeting { role, target: (1, [1; 16]), source: (2, [2; 16]) }.encode();
    let endpoint = |address: &str| {
        let address = address.parse().expect("an address");
        Endpoint { address, qp_num: 3, nonce: [3; 16] }.encode().0
    };
    vec![
        with_switch(&greeting(GreetingRole::Hello)),
        with_switch(&greeting(GreetingRole::Welcome)),
        with_switch(&endpoint("127.0.0.1:4790")),
        with_switch(&endpoint("[::1]:4790")),
    ]
}

/// Questions and answers of the bootstrap exchange, and addresses a person typed.
pub fn bootstrap(bytes: &[u8]) -> bool {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = ServiceUrl::parse(text);
    }
    message::fuzz(bytes)
}

pub fn bootstrap_seeds() -> Vec<Vec<u8>> {
    let framed = |body: &str| {
        let mut bytes = b"BLBS\x01\0\0\0".to_vec();
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(body.as_bytes());
        bytes
    };
    vec![
        framed(
            r#"{"negotiate":{"service":"kv","host":{"boot_id":"b","network_namespace":1,"uid":0},"providers":["shm","tcp"],"forced":false}}"#,
        ),
        framed(
            r#"{"join":{"service":"kv","provider":"tcp","shard":0,"connect_info":"00ff","payload":"0102"}}"#,
        ),
        framed(r#"{"chosen":{"provider":"shm","reason":"same_host","shards":2,"payload":""}}"#),
        framed(r#"{"joined":{"connect_info":"00","payload":"ff"}}"#),
        framed(r#"{"refused":{"reason":"no"}}"#),
        b"auto://127.0.0.1:4790".to_vec(),
        b"tcp://[::1]:1".to_vec(),
        b"shm:///run/beeline.sock".to_vec(),
    ]
}

/// Requests, replies, handshakes, announcements and scan records of the one-sided protocols.
pub fn kv_wire(bytes: &[u8]) -> bool {
    let mut taken = false;
    if let Some(request) = wire::Request::decode(bytes) {
        assert_eq!(wire::Request::decode(&request.encode()), Some(request));
        if let Some(key) = request.key(bytes) {
            assert_eq!(key.len(), request.key_bytes as usize);
        }
        taken = true;
    }
    if let Some(reply) = wire::Reply::decode(bytes) {
        let encoded = reply.encode();
        assert_eq!(wire::Reply::decode(&encoded[..reply.encoded_bytes()]), Some(reply));
        taken = true;
    }
    if let Ok(hello) = wire::Hello::decode(bytes) {
        assert_eq!(wire::Hello::decode(&hello.encode()), Ok(hello));
        taken = true;
    }
    if let Ok(welcome) = wire::Welcome::decode(bytes) {
        assert_eq!(wire::Welcome::decode(&welcome.encode()), Ok(welcome));
        taken = true;
    }
    if let Some(word) = bytes.first_chunk() {
        let immediate = u32::from_le_bytes(*word);
        let announcement = wire::Announcement::decode(immediate);
        assert_eq!(wire::Announcement::decode(announcement.encode()), announcement);
        let _ = wire::Announcement::tag(immediate);
    }
    let _ = wire::ScanHeader::decode(bytes);
    let (mut records, mut left) = (bytes, bytes.len());
    while let Some((key, _)) = wire::pop_scan_record(&mut records) {
        assert!(records.len() + key.len() < left, "every record takes bytes");
        left = records.len();
    }
    taken
}

pub fn kv_wire_seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for (tag, kind) in (0..).zip(wire::RequestKind::ALL) {
        let mut request = wire::Request::new(kind, tag);
        request.key_bytes = 3;
        seeds.push([&request.encode()[..], b"key"].concat());
    }
    for (tag, status) in (0..).zip(wire::ReplyStatus::ALL) {
        let mut reply = wire::Reply::new(status, tag);
        seeds.push(reply.encode()[..reply.encoded_bytes()].to_vec());
        reply.place = Some(wire::Place { key: 1, offset: 64 });
        seeds.push(reply.encode()[..reply.encoded_bytes()].to_vec());
    }
    let hello = wire::Hello {
        protocol: wire::Protocol::Boom,
        window: 32,
        shard: 0,
        request_bytes: 256,
        slot_bytes: 0,
    };
    seeds.push(hello.encode().to_vec());
    let welcome = wire::Welcome {
        protocol: wire::Protocol::Oblivious,
        window: 32,
        shard: 0,
        shards: 2,
        request_bytes: 256,
        slot_bytes: 1024,
        area_key: 1,
        segment_bytes: 1 << 20,
        max_value_bytes: 1 << 19,
        hash_seed: 5,
    };
    seeds.push(welcome.encode().to_vec());
    seeds.push(wire::Welcome::refuse(wire::Refusal::Shard).to_vec());
    let mut records = Vec::new();
    wire::push_scan_record(&mut records, b"first", 0);
    wire::push_scan_record(&mut records, b"", 1);
    seeds.push(records);
    seeds
}

/// A stream of Redis requests.
pub fn resp(bytes: &[u8]) -> bool {
    beeline_resp::parser::fuzz(bytes);
    bytes.starts_with(b"*")
}

pub fn resp_seeds() -> Vec<Vec<u8>> {
    [
        &b"*1\r\n$4\r\nPING\r\n"[..],
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r\nvalue\r\n*2\r\n$3\r\nGET\r\n$1\r\nk\r\n",
        b"*0\r\n*-1\r\n*1\r\n$0\r\n\r\n",
        b"SET key \"a \\x41 \\n\" \r\nPING\r\n",
        b"*2\r\n$4\r\nECHO\r\n$12\r\nbinary\0\r\n...\xff\r\n",
        b"*5\r\n$4\r\nMGET\r\n$1\r\na\r\n$1\r\nb\r\n$1\r\nc\r\n$1\r\nd\r\n",
    ]
    .map(<[u8]>::to_vec)
    .to_vec()
}

/// A pattern and, after the first newline, a text; must end in time proportional to both.
pub fn glob(bytes: &[u8]) -> bool {
    let middle = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len() / 2);
    let (pattern, text) = bytes.split_at(middle.min(2048));
    let text = &text[..text.len().min(2048)];
    let glob = beeline_resp::glob::Glob::new(pattern);
    let matched = glob.matches(text);
    assert!(!glob.everything() || matched, "a pattern for everything matches everything");
    if let Some(literal) = glob.literal() {
        assert_eq!(matched, literal == text, "a literal matches itself alone");
    }
    matched
}

pub fn glob_seeds() -> Vec<Vec<u8>> {
    [
        &b"*\nanything"[..],
        b"user:*:[a-z]?\nuser:12:ab",
        b"\\*literal\\?\n*literal?",
        b"[^a-c]*[]]\nx]",
        b"*a*a*a*a*a*b\naaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
        b"plain\nplain",
    ]
    .map(<[u8]>::to_vec)
    .to_vec()
}

//! Seeded random commands against a real redis-server and against ours: the raw replies must be
//! the same, byte for byte, apart from what cannot be (order of keys, time that passes).
//!
//! `BEELINE_SEED=n cargo test -p beeline-resp --test differential` replays one seed.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "how much was compared, or why not")]

mod common;

use std::collections::BTreeMap;

use beeline_resp::{Output, Session};
use common::Node;
use common::redis::{Connection, Redis, elements, encode};

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }
    fn chance(&mut self, percent: usize) -> bool {
        self.below(100) < percent
    }
    fn pick<'a, T: ?Sized>(&mut self, list: &[&'a T]) -> &'a T {
        list[self.below(list.len())]
    }
}

const KEYS: &[&str] =
    &["a", "b", "c", "d", "e", "", "key:1", "key:2", "k\r\n", "long-key-name-of-some-length", "z"];
const INTEGERS: &[&str] = &[
    "0",
    "1",
    "-1",
    "2",
    "7",
    "10",
    "100",
    "-100",
    "12345678901",
    "9223372036854775807",
    "-9223372036854775808",
    "9223372036854775808",
    "abc",
    "",
    "01",
    "+1",
    " 1",
    "1.0",
    "-0",
];
const SMALL: &[&str] = &["0", "1", "-1", "2", "3", "5", "-3", "-5", "10", "-100", "100", "x", ""];
const FLOATS: &[&str] = &[
    "0.1",
    "0.2",
    "1.5",
    "-1.5",
    "3",
    "1e3",
    "1e-5",
    "-0",
    "0x10",
    "1e18",
    "1e-17",
    "inf",
    "-inf",
    "nan",
    "abc",
    "",
    " 1",
    "1e400",
    "5.0e3",
    "-0.3",
    "123456789.987654321",
    "1e4932",
    "1e5000",
    ".5",
    "5.",
    "1e",
    "+2",
];
const VALUES: &[&str] = &[
    "",
    "0",
    "1",
    "-5",
    "41",
    "9223372036854775807",
    "-9223372036854775808",
    "hello",
    "0.1",
    "10.5",
    "3.0e3",
    "x\r\ny",
    "99999999999999999999",
    "0012",
    "a much longer value that is not embedded in anything",
];
const PATTERNS: &[&str] =
    &["*", "?", "key:*", "[a-c]", "k*", "*1", "a", "nothing", "[^a]", "\\a", "", "**", "k\r\n"];
const DATABASES: &[&str] = &["0", "1", "2", "0", "1", "15", "16", "-1", "abc", "99999999999"];
const PAST_OR_FUTURE_S: &[&str] = &[
    "1",
    "-1",
    "0",
    "4000000000",
    "5000000000",
    "9223372036854775807",
    "-9223372036854775808",
    "abc",
    "9223372036854775",
];
const FUTURE_S: &[&str] =
    &["4000000000", "5000000000", "6000000123", "0", "-5", "9223372036854775807", "abc", ""];
const FUTURE_MS: &[&str] = &["4000000000000", "5000000000123", "4500000000499", "0", "-5", "abc"];
const PAST_OR_FUTURE_MS: &[&str] =
    &["1", "-1", "4000000000000", "5000000000123", "9223372036854775807", "abc"];

/// One letter stands for a class of arguments; other words for themselves.
const TEMPLATES: &[(&str, usize)] = &[
    ("SET K V", 60),
    ("SET K V O", 30),
    ("SET K V O O", 20),
    ("SET K V O O O", 6),
    ("GET K", 60),
    ("GETSET K V", 8),
    ("GETDEL K", 6),
    ("GETEX K", 4),
    ("HSET K H V", 20),
    ("HSET K H V H V", 8),
    ("HSET K H V H", 1),
    ("HMSET K H V", 3),
    ("HSETNX K H V", 5),
    ("HGET K H", 12),
    ("HMGET K H H", 5),
    ("HDEL K H", 8),
    ("HDEL K H H", 4),
    ("HLEN K", 8),
    ("HEXISTS K H", 4),
    ("HSTRLEN K H", 4),
    ("HINCRBY K H I", 8),
    ("HINCRBYFLOAT K H F", 6),
    ("HGETALL K", 5),
    ("HKEYS K", 3),
    ("HVALS K", 3),
    ("GETEX K G", 10),
    ("GETEX K G G", 3),
    ("MGET K K K", 10),
    ("MGET K", 2),
    ("MSET K V K V", 10),
    ("MSET K V K", 2),
    ("MSETNX K V K V", 8),
    ("MSETNX K V", 4),
    ("APPEND K V", 14),
    ("STRLEN K", 10),
    ("GETRANGE K R R", 14),
    ("SUBSTR K R R", 2),
    ("SETRANGE K S V", 12),
    ("INCR K", 14),
    ("DECR K", 8),
    ("INCRBY K I", 14),
    ("DECRBY K I", 10),
    ("INCRBYFLOAT K F", 24),
    ("SETNX K V", 8),
    ("SETEX K T V", 8),
    ("PSETEX K M V", 8),
    ("DEL K", 6),
    ("DEL K K K", 4),
    ("UNLINK K K", 4),
    ("EXISTS K K K", 8),
    ("EXISTS K", 4),
    ("EXPIRE K T", 8),
    ("EXPIRE K T X", 8),
    ("PEXPIRE K M", 6),
    ("PEXPIRE K M X", 4),
    ("EXPIREAT K A", 6),
    ("EXPIREAT K A X", 4),
    ("PEXPIREAT K B", 6),
    ("PEXPIREAT K B X X", 6),
    ("EXPIRE K T X X", 6),
    ("TTL K", 10),
    ("PTTL K", 10),
    ("EXPIRETIME K", 8),
    ("PEXPIRETIME K", 8),
    ("PERSIST K", 8),
    ("TYPE K", 6),
    ("KEYS P", 10),
    ("SCAN 0 COUNT 1000", 4),
    ("SCAN 0 MATCH P COUNT 1000", 6),
    ("SCAN 0 TYPE string COUNT 1000", 2),
    ("SCAN 0 TYPE hash COUNT 1000", 2),
    ("SCAN 0 COUNT S", 3),
    ("SCAN abc", 1),
    ("SCAN 0 FOO bar", 1),
    ("SCAN 0 COUNT", 1),
    ("RANDOMKEY", 2),
    ("RENAME K K", 8),
    ("RENAMENX K K", 8),
    ("COPY K K", 8),
    ("COPY K K REPLACE", 6),
    ("COPY K K DB D", 6),
    ("COPY K K DB D REPLACE", 6),
    ("COPY K K FOO", 2),
    ("TOUCH K K", 4),
    ("MOVE K D", 6),
    ("SELECT D", 8),
    ("DBSIZE", 8),
    ("FLUSHDB", 1),
    ("FLUSHALL ASYNC", 1),
    ("FLUSHDB FOO", 1),
    ("FLUSHALL", 1),
    ("PING", 3),
    ("PING V", 3),
    ("PING V V", 1),
    ("ECHO V", 4),
    ("MULTI", 14),
    ("EXEC", 20),
    ("DISCARD", 4),
    ("WATCH K K", 10),
    ("UNWATCH", 3),
    ("CLIENT SETNAME N", 2),
    ("CLIENT GETNAME", 2),
    ("CLIENT NO-EVICT on", 1),
    ("CLIENT NO-EVICT x", 1),
    ("CLIENT FOO", 1),
    ("CLIENT", 1),
    ("CLIENT REPLY foo", 1),
    ("CLIENT UNBLOCK 99999", 1),
    ("CLIENT UNBLOCK 1 FOO", 1),
    ("CLIENT PAUSE abc", 1),
    ("CLIENT PAUSE -1", 1),
    ("CLIENT PAUSE 0 FOO", 1),
    ("CLIENT KILL 1.2.3.4:5", 1),
    ("CLIENT KILL ID 0", 1),
    ("CLIENT KILL ID 99999 TYPE foo", 1),
    ("CLIENT KILL USER nobody", 1),
    ("CLIENT KILL FOO bar", 1),
    ("CLIENT LIST TYPE foo", 1),
    ("CLIENT LIST ID x", 1),
    ("CLIENT LIST FOO", 1),
    ("CONFIG FOO", 1),
    ("CONFIG GET", 1),
    ("CONFIG SET a", 1),
    ("CONFIG SET nosuch 1", 1),
    ("CONFIG", 1),
    ("CONFIG GET nosuch", 1),
    ("HELLO 4", 1),
    ("HELLO abc", 1),
    ("HELLO 3 FOO", 1),
    ("HELLO 2 AUTH nobody x", 1),
    ("AUTH x", 1),
    ("AUTH nobody x", 1),
    ("AUTH a b c", 1),
    ("OBJECT REFCOUNT nosuch", 1),
    ("OBJECT FREQ K", 2),
    ("OBJECT FOO K", 1),
    ("OBJECT ENCODING nosuch", 1),
    ("OBJECT IDLETIME nosuch", 1),
    ("MEMORY USAGE nosuch", 1),
    ("MEMORY USAGE K SAMPLES -1", 1),
    ("MEMORY USAGE K FOO", 1),
    ("MEMORY FOO", 1),
    ("COMMAND GETKEYS MSET a b c d", 1),
    ("COMMAND GETKEYS GET", 1),
    ("COMMAND GETKEYS PING x", 1),
    ("COMMAND GETKEYS nosuch x", 1),
    ("COMMAND FOO", 1),
    ("COMMAND LIST FILTERBY", 1),
    ("COMMAND LIST FILTERBY FOO x", 1),
    ("FOO", 2),
    ("FOO V V V", 3),
    ("foo V V V V V V V V", 1),
    ("SHUTDOWN FOO", 1),
    ("SHUTDOWN SAVE NOSAVE", 1),
    ("SHUTDOWN ABORT NOW", 1),
    ("BGSAVE FOO", 1),
    ("SAVE x", 1),
    ("RESET", 2),
    ("LASTSAVE x", 1),
    ("TIME x", 1),
];

/// How often, in tenths of a percent, an argument is dropped, doubled or replaced.
const SPOILED: usize = 25;

struct Generator {
    random: Random,
    total_weight: usize,
}

impl Generator {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        random.next();
        Self { random, total_weight: TEMPLATES.iter().map(|(_, weight)| weight).sum() }
    }

    fn number(&mut self, low: u64, high: u64) -> String {
        (low + self.random.next() % (high - low)).to_string()
    }

    /// Times to live are long and rarely equal, so that milliseconds between the two servers
    /// decide nothing.
    fn seconds(&mut self) -> String {
        match self.random.below(12) {
            0 => self
                .random
                .pick(&[
                    "0",
                    "-1",
                    "abc",
                    "9223372036854775807",
                    "-9223372036854775808",
                    "9223372036854775",
                ])
                .to_owned(),
            _ => self.number(10_000, 100_000_000),
        }
    }

    fn milliseconds(&mut self) -> String {
        match self.random.below(12) {
            0 => self.random.pick(&["0", "-1", "abc", "9223372036854775807", "1.5"]).to_owned(),
            _ => self.number(10_000_000, 100_000_000_000),
        }
    }

    fn expand(&mut self, word: &str, words: &mut Vec<Vec<u8>>) {
        let random = &mut self.random;
        let text = match word {
            "K" => random.pick(KEYS).to_owned(),
            "V" => random.pick(VALUES).to_owned(),
            "H" => random.pick(&["f", "g", "", "1", "field"]).to_owned(),
            "I" => random.pick(INTEGERS).to_owned(),
            "F" => random.pick(FLOATS).to_owned(),
            "S" | "R" => random.pick(SMALL).to_owned(),
            "P" => random.pick(PATTERNS).to_owned(),
            "D" => random.pick(DATABASES).to_owned(),
            "N" => random.pick(&["name", "", "na me", "other"]).to_owned(),
            "A" => random.pick(PAST_OR_FUTURE_S).to_owned(),
            "B" => random.pick(PAST_OR_FUTURE_MS).to_owned(),
            "T" => self.seconds(),
            "M" => self.milliseconds(),
            "X" => random.pick(&["NX", "xx", "GT", "lt", "foo"]).to_owned(),
            "O" => return self.set_option(words),
            "G" => return self.getex_option(words),
            other => other.to_owned(),
        };
        words.push(text.into_bytes());
    }

    fn set_option(&mut self, words: &mut Vec<Vec<u8>>) {
        match self.random.below(14) {
            0 | 1 => words.push(b"NX".to_vec()),
            2 | 3 => words.push(b"xx".to_vec()),
            4 | 5 => words.push(b"GET".to_vec()),
            6 | 7 => words.push(b"KeepTTL".to_vec()),
            8 => words.push(b"foo".to_vec()),
            9 => words.push(b"PERSIST".to_vec()),
            _ => self.time_option(words, FUTURE_S, FUTURE_MS),
        }
    }

    fn getex_option(&mut self, words: &mut Vec<Vec<u8>>) {
        match self.random.below(8) {
            0 | 1 => words.push(b"persist".to_vec()),
            2 => words.push(b"NX".to_vec()),
            _ => self.time_option(words, PAST_OR_FUTURE_S, PAST_OR_FUTURE_MS),
        }
    }

    fn time_option(&mut self, words: &mut Vec<Vec<u8>>, at_s: &[&str], at_ms: &[&str]) {
        let (name, value) = match self.random.below(4) {
            0 => ("EX", self.seconds()),
            1 => ("px", self.milliseconds()),
            2 => ("EXAT", self.random.pick(at_s).to_owned()),
            _ => ("PXAT", self.random.pick(at_ms).to_owned()),
        };
        words.push(name.into());
        if !self.random.chance(3) {
            words.push(value.into());
        }
    }

    fn request(&mut self) -> Vec<Vec<u8>> {
        let mut ticket = self.random.below(self.total_weight);
        let mut template = "PING";
        for (candidate, weight) in TEMPLATES {
            if ticket < *weight {
                template = candidate;
                break;
            }
            ticket -= weight;
        }
        let mut words = Vec::new();
        for word in template.split(' ') {
            self.expand(word, &mut words);
        }
        // Without their bad argument these would answer what differs, or do what must not be done.
        let kept = ["SHUTDOWN", "BGSAVE", "SAVE", "COMMAND", "LASTSAVE", "TIME", "HELLO", "SCAN"];
        let kept = kept.iter().chain(&["MEMORY", "RANDOMKEY", "OBJECT"]);
        let listing = words.get(1).is_some_and(|word| word == b"LIST");
        let destructive = listing || kept.clone().any(|name| words[0] == name.as_bytes());
        if !destructive && self.random.below(1000) < SPOILED {
            match self.random.below(3) {
                0 if words.len() > 1 => drop(words.pop()),
                1 => words.push(b"extra".to_vec()),
                _ => {
                    let at = self.random.below(words.len());
                    if at > 0 && !matches!(words[0].as_slice(), b"CLIENT" | b"HELLO" | b"COMMAND") {
                        words[at] = b"junk".to_vec();
                    }
                }
            }
        }
        words
    }
}

fn shown(words: &[Vec<u8>]) -> String {
    words
        .iter()
        .map(|word| format!("{:?}", String::from_utf8_lossy(word)))
        .collect::<Vec<_>>()
        .join(" ")
}

fn sorted(raw: &[u8]) -> Vec<Vec<u8>> {
    let mut list: Vec<Vec<u8>> = elements(raw).into_iter().map(<[u8]>::to_vec).collect();
    list.sort();
    list
}

fn integer(raw: &[u8]) -> Option<i64> {
    let text = std::str::from_utf8(raw).ok()?;
    text.strip_prefix(':')?.trim_end().parse().ok()
}

/// Whether two replies to `words` mean the same.
fn same(words: &[Vec<u8>], theirs: &[u8], ours: &[u8]) -> bool {
    if theirs == ours {
        return true;
    }
    match words[0].to_ascii_uppercase().as_slice() {
        // Time passes between the two.
        b"TTL" | b"EXPIRETIME" => near(theirs, ours, 2),
        b"PTTL" | b"PEXPIRETIME" => near(theirs, ours, 2000),
        b"KEYS" | b"HGETALL" | b"HKEYS" | b"HVALS" => {
            theirs[0] == ours[0] && sorted(theirs) == sorted(ours)
        }
        b"SCAN" => {
            let (theirs, ours) = (elements(theirs), elements(ours));
            theirs.len() == 2 && ours.len() == 2 && sorted(theirs[1]) == sorted(ours[1])
        }
        b"RANDOMKEY" => {
            (theirs[0] == b'$' && theirs[1] != b'-') == (ours[0] == b'$' && ours[1] != b'-')
        }
        _ => false,
    }
}

fn near(theirs: &[u8], ours: &[u8], tolerance: i64) -> bool {
    match (integer(theirs), integer(ours)) {
        (Some(theirs), Some(ours)) if theirs > 0 => (theirs - ours).abs() <= tolerance,
        _ => false,
    }
}

/// The replies inside EXEC are compared one by one, each as the reply to its own request.
fn same_exec(queued: &[Vec<Vec<u8>>], theirs: &[u8], ours: &[u8]) -> bool {
    if theirs == ours {
        return true;
    }
    if theirs[0] != b'*' || ours[0] != b'*' {
        return false;
    }
    let (theirs, ours) = (elements(theirs), elements(ours));
    theirs.len() == ours.len()
        && theirs.len() == queued.len()
        && queued
            .iter()
            .zip(theirs)
            .zip(ours)
            .all(|((words, theirs), ours)| same(words, theirs, ours))
}

fn first_difference(queued: &[Vec<Vec<u8>>], theirs: &[u8], ours: &[u8]) -> String {
    let replies = elements(theirs).into_iter().zip(elements(ours));
    let differs = queued.iter().zip(replies).find(|(words, (a, b))| !same(words, a, b));
    differs.map_or(String::new(), |(words, (theirs, ours))| {
        format!(
            "first different reply inside EXEC: {}\n  {:?}\n  {:?}",
            shown(words),
            String::from_utf8_lossy(theirs),
            String::from_utf8_lossy(ours)
        )
    })
}

/// One connection to each server.
struct Pair {
    theirs: Connection,
    ours: Session,
    queued: Vec<Vec<Vec<u8>>>,
}

/// SCAN from 0 to the end, as one reply.
fn scan_everything(node: &mut Node, session: &mut Session, words: &[&[u8]]) -> Vec<u8> {
    let mut cursor = b"0".to_vec();
    let mut keys = Vec::new();
    loop {
        let mut request = words.to_vec();
        request[1] = &cursor;
        let raw = node.reply(session, &request);
        if raw[0] != b'*' {
            return raw;
        }
        let parts = elements(&raw);
        keys.extend(elements(parts[1]).concat());
        let next = elements(parts[0])[0].split(|&byte| byte == b'\n').nth(1).unwrap();
        let next = next.strip_suffix(b"\r").unwrap().to_vec();
        if next == b"0" {
            break;
        }
        cursor = next;
    }
    let count =
        if keys.is_empty() { 0 } else { elements(&[b"*9\r\n", keys.as_slice()].concat()).len() };
    [format!("*2\r\n$1\r\n0\r\n*{count}\r\n").as_bytes(), &keys].concat()
}

fn run_seed(
    redis: &Redis,
    seed: u64,
    steps: usize,
    shards: usize,
    seen: &mut BTreeMap<Vec<u8>, [usize; 2]>,
) {
    let mut generator = Generator::new(seed);
    let mut node = Node::new(shards);
    let mut pairs: Vec<Pair> = (0..2)
        .map(|_| Pair { theirs: redis.connect(), ours: node.session(), queued: Vec::new() })
        .collect();
    pairs[0].theirs.send(&encode(&[b"FLUSHALL".to_vec()]));
    pairs[0].theirs.reply();
    if seed % 2 == 1 {
        let hello = [b"HELLO".to_vec(), b"3".to_vec()];
        pairs[1].theirs.send(&encode(&hello));
        pairs[1].theirs.reply();
        node.reply(&mut pairs[1].ours, &[b"HELLO", b"3"]);
    }
    let mut history: Vec<String> = Vec::new();
    for _ in 0..steps {
        let which = usize::from(generator.random.chance(30));
        let pair = &mut pairs[which];
        let words = generator.request();
        // Outside a transaction a cursor is followed to its end; inside, SCAN would compare
        // different stretches.
        let whole = shards == 1 && words.iter().any(|word| word == b"1000");
        if words[0] == b"SCAN" && pair.ours.in_transaction() && !whole {
            continue;
        }
        let slices: Vec<&[u8]> = words.iter().map(Vec::as_slice).collect();
        pair.theirs.send(&encode(&words));
        let theirs = pair.theirs.reply();
        let small_scan = words[0] == b"SCAN"
            && words.len() > 3
            && !words.iter().any(|word| word == b"1000")
            && theirs[0] == b'*';
        let followed = words[0] == b"SCAN" && words.get(1).is_some_and(|cursor| cursor == b"0");
        let was_open = pair.ours.in_transaction();
        let ours = if followed && !was_open {
            scan_everything(&mut node, &mut pair.ours, &slices)
        } else {
            node.reply(&mut pair.ours, &slices)
        };
        history.push(format!("{which}: {}", shown(&words)));
        let name = words[0].to_ascii_uppercase();
        let detail = if name == b"EXEC" {
            first_difference(&pair.queued, &theirs, &ours)
        } else {
            String::new()
        };
        let agree = if name == b"EXEC" {
            same_exec(&pair.queued, &theirs, &ours)
        } else {
            small_scan || same(&words, &theirs, &ours)
        };
        assert!(
            agree,
            "seed {seed}, {shards} shards: replies differ after {} requests\n{}\nredis: {:?}\nours: {:?}\n{detail}",
            history.len(),
            history[history.len().saturating_sub(25)..].join("\n"),
            String::from_utf8_lossy(&theirs[..theirs.len().min(400)]),
            String::from_utf8_lossy(&ours[..ours.len().min(400)]),
        );
        if theirs.starts_with(b"+QUEUED") {
            pair.queued.push(words);
        } else if !pair.ours.in_transaction() {
            pair.queued.clear();
        }
        let telling = !matches!(theirs[0], b'-' | b'_')
            && !theirs.starts_with(b"$-1")
            && !theirs.starts_with(b"*-1");
        seen.entry(name).or_default()[usize::from(telling)] += 1;
    }
}

#[test]
fn random_commands_get_the_replies_redis_gives() {
    let Some(redis) = Redis::start_or_skip() else { return };
    let seeds: Vec<u64> = match std::env::var("BEELINE_SEED") {
        Ok(seed) => vec![seed.parse().unwrap()],
        Err(_) => (1..=8).collect(),
    };
    let mut seen = BTreeMap::new();
    for seed in seeds {
        run_seed(&redis, seed, 4_000, if seed % 4 < 2 { 1 } else { 3 }, &mut seen);
    }
    // Agreement on errors and absent values alone would prove little.
    let (mut total, mut telling) = (0, 0);
    for [empty, full] in seen.values() {
        total += empty + full;
        telling += full;
    }
    println!("{total} replies compared, {telling} of them values; {} commands", seen.len());
    assert!(telling * 2 > total, "only {telling} of {total} replies were values");
    for name in
        ["GET", "SET", "INCRBYFLOAT", "EXEC", "COPY", "GETEX", "EXPIRE", "SCAN", "KEYS", "RENAME"]
    {
        let [_, full] = seen[name.as_bytes()];
        assert!(full > 20, "{name} gave a value only {full} times");
    }
}

/// Feeds bytes to our parser and executor as a connection would; returns all output.
fn ours_for(node: &mut Node, input: &[u8]) -> Vec<u8> {
    let mut session = node.session();
    let mut parser = beeline_resp::RequestParser::new(beeline_resp::Limits::default());
    let mut out = Output::default();
    parser.feed(input).unwrap();
    loop {
        match parser.next_request() {
            Ok(Some(args)) => {
                let words: Vec<&[u8]> = args.from(0).collect();
                if node.run(&mut session, &words, &mut out) != beeline_resp::After::Continue {
                    break;
                }
            }
            Ok(None) => break,
            Err(error) => {
                beeline_resp::reply_protocol_error(&mut session, &error, &mut out);
                break;
            }
        }
    }
    out.as_bytes().to_vec()
}

#[test]
fn mutated_byte_streams_get_the_replies_redis_gives() {
    let Some(redis) = Redis::start_or_skip() else { return };
    let pieces: &[&[u8]] = &[
        b"PING\r\n",
        b"*1\r\n$4\r\nPING\r\n",
        b"ECHO \"a b\"\r\n",
        b"ECHO 'it\\'s'\n",
        b"*2\r\n$4\r\nECHO\r\n$3\r\na\x01b\r\n",
        b"SET k v\r\n",
        b"GET k\r\n",
        b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$0\r\n\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"\r\n",
        b"ECHO \"\\x41\\n\"\r\n",
        b"*1\r\n$-1\r\n",
        b"*1\r\n:4\r\n",
        b"*x\r\n",
        b"ECHO \"a\"b\r\n",
        b"CLIENT REPLY OFF\r\n",
        b"CLIENT REPLY ON\r\n",
        b"QUIT\r\n",
        b"*2\r\n$4\r\nECHO\r\n$99999999999\r\n",
        b"MULTI\r\n",
        b"EXEC\r\n",
        b"INCR n\r\n",
        b"nosuch a b\r\n",
        b"GET\r\n",
        b"ECHO \"unclosed\r\n",
    ];
    let mut random = Random(0x1234_5678_9abc_def1);
    let mut errors = 0;
    for round in 0..1500 {
        let mut input = Vec::new();
        for _ in 0..1 + random.below(6) {
            input.extend_from_slice(random.pick(pieces));
        }
        if random.chance(60) {
            for _ in 0..1 + random.below(3) {
                let at = random.below(input.len());
                input[at] = *b"\r\n*$0159 \"'ax\x02-:\xff".get(random.below(17)).unwrap();
            }
        }
        redis.connect().finish(b"FLUSHALL\r\n");
        let mut node = Node::new(1);
        let theirs = redis.connect().finish(&input);
        let ours = ours_for(&mut node, &input);
        errors += usize::from(theirs.windows(14).any(|part| part == b"Protocol error"));
        assert_eq!(
            String::from_utf8_lossy(&ours),
            String::from_utf8_lossy(&theirs),
            "round {round}, input {:?}",
            String::from_utf8_lossy(&input)
        );
    }
    println!("1500 streams compared, {errors} with protocol errors");
    assert!(errors > 100);
}

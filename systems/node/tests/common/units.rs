//! Random units of the keys' service, and a machine that applies them one after another.

use std::ops::RangeInclusive;
use std::time::{SystemTime, UNIX_EPOCH};

use beeline_replicated_log::{Position, StateMachine as _};
use beeline_replicated_service::{LaneName, Machine, Tag, Turn, unit};

/// Lanes that units come from.
const LANES: u16 = 3;
const KEYS: u64 = 12;
const HASHES: u64 = 3;
const FIELDS: u64 = 4;

/// Xorshift, from a seed that a failure prints.
pub struct Chance(u64);

impl Chance {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 8) % bound
    }

    pub fn within(&mut self, range: RangeInclusive<u64>) -> u64 {
        range.start() + self.below(range.end() - range.start() + 1)
    }
}

fn put_commands(kind: u8, commands: &[String], out: &mut Vec<u8>) {
    out.extend_from_slice(&[kind, 2, 0, 0, 0, 0, 0, 0]);
    out.extend_from_slice(&(commands.len() as u32).to_le_bytes());
    for command in commands {
        let words: Vec<&str> = command.split(' ').collect();
        out.extend_from_slice(&(words.len() as u32).to_le_bytes());
        for word in words {
            out.extend_from_slice(&(word.len() as u32).to_le_bytes());
            out.extend_from_slice(word.as_bytes());
        }
    }
}

/// A command as it stands in a unit.
pub fn command(text: &str) -> Vec<u8> {
    let mut out = Vec::new();
    put_commands(1, &[text.to_owned()], &mut out);
    out
}

/// A transaction as it stands in a unit.
pub fn transaction(commands: &[String]) -> Vec<u8> {
    let mut out = Vec::new();
    put_commands(2, commands, &mut out);
    out
}

/// A put or a deletion of a one-sided client.
fn pair(key: &str, value: Option<&str>) -> Vec<u8> {
    let mut out = vec![3, 0, 0, u8::from(value.is_none())];
    out.extend_from_slice(&(key.len() as u32).to_le_bytes());
    out.extend_from_slice(&0_u64.to_le_bytes());
    out.extend_from_slice(key.as_bytes());
    out.extend_from_slice(value.unwrap_or_default().as_bytes());
    out
}

fn request(chance: &mut Chance) -> Vec<u8> {
    let key = format!("key{}", chance.below(KEYS));
    let other = format!("key{}", chance.below(KEYS));
    let hash = format!("hash{}", chance.below(HASHES));
    let field = format!("f{}", chance.below(FIELDS));
    let number = chance.below(1000);
    let text = match chance.below(40) {
        0..8 => format!("SET {key} {number}"),
        8..11 => format!("SET {key} {number} PX {}", 1 + chance.below(3000)),
        11..17 => format!("INCR {key}"),
        17..19 => format!("GETDEL {key}"),
        19..22 => format!("DEL {key}"),
        22..26 => format!("HSET {hash} {field} {number}"),
        26..28 => format!("HINCRBY {hash} {field} 1"),
        28 => format!("HDEL {hash} {field}"),
        29 => format!("DEL {hash}"),
        30..32 => return pair(&key, Some(&number.to_string())),
        32 => return pair(&key, None),
        33 => format!("SETNX {key} {number}"),
        34 => format!("INCRBYFLOAT {key} 0.5"),
        // What follows is applied alone.
        35 => format!("APPEND {key} x"),
        36 => format!("MSET {key} {number} {other} {number}"),
        37 => format!("PEXPIRE {key} {}", 1 + chance.below(3000)),
        38 => {
            return transaction(&[
                format!("INCR {key}"),
                format!("GET {other}"),
                format!("HLEN {hash}"),
                format!("SET {other} {number}"),
            ]);
        }
        _ => format!("RENAME {key} {other}"),
    };
    command(&text)
}

/// What looks at everything that requests change.
fn look() -> Vec<u8> {
    let keys = (0..KEYS).flat_map(|key| [format!("GET key{key}"), format!("PEXPIRETIME key{key}")]);
    let fields: String = (0..FIELDS).map(|field| format!(" f{field}")).collect();
    let hashes = (0..HASHES)
        .flat_map(|hash| [format!("HMGET hash{hash}{fields}"), format!("HLEN hash{hash}")]);
    transaction(&keys.chain(hashes).collect::<Vec<_>>())
}

fn unit_of(lane: u16, number: u64, requests: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = vec![0; unit::HEAD_BYTES];
    let lane = LaneName { service: Tag::KEYS, node: 77, lane };
    unit::put_head(&mut bytes, lane, 1, Turn { incarnation: 1, number });
    for request in requests {
        unit::put_part(&mut bytes, |out| out.extend_from_slice(request));
    }
    bytes
}

/// Units and what they answer where each is applied by itself, before the next one. The last one looks at everything.
pub struct Script {
    pub units: Vec<Vec<u8>>,
    pub replies: Vec<Vec<u8>>,
}

/// A script of `count` units, as `machine` applies it, and with what it tells other members to compare.
pub fn script(chance: &mut Chance, count: u64, machine: &mut Machine) -> Script {
    let begin_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
    let mut unix_ms = begin_ms;
    let mut numbers = [0_u64; LANES as usize];
    let mut script = Script { units: Vec::new(), replies: Vec::new() };
    for index in 0..count {
        let lane = chance.below(u64::from(LANES));
        let number = &mut numbers[lane as usize];
        // Now and then a unit is proposed twice.
        let repeats = *number > 0 && chance.below(12) == 0;
        *number += u64::from(!repeats);
        let requests: Vec<_> = match chance.below(30) {
            _ if index + 1 == count => vec![look()],
            0 => vec![command("FLUSHALL")],
            1 => vec![look()],
            _ => (0..chance.within(0..=8)).map(|_| request(chance)).collect(),
        };
        if index + 1 == count && repeats {
            *number += 1;
        }
        let mut unit = unit_of(lane as u16, *number, &requests);
        machine.stamp(&mut unit).unwrap();
        // Times go forward, and now and then back: another leader's clock.
        let back_ms = if chance.below(6) == 0 { chance.below(1500) } else { 0 };
        unix_ms = unix_ms + chance.below(400) - back_ms;
        unit[24..32].copy_from_slice(&unix_ms.to_le_bytes());
        let mut reply = Vec::new();
        let position = Position(index + 1);
        machine.apply(position, &unit, &mut reply);
        machine.flush(position).unwrap();
        script.units.push(unit);
        script.replies.push(reply);
    }
    script
}

/// Applies the units behind `from` up to `to`, a run of the log; what they answer.
///
/// Errors: the machine's, of the flush.
pub fn run(
    machine: &mut Machine,
    script: &Script,
    (from, to): (usize, usize),
) -> std::io::Result<Vec<Vec<u8>>> {
    let mut replies = vec![Vec::new(); to - from];
    let (mut later, mut settled) = (Vec::new(), Vec::new());
    for at in from..to {
        let position = Position(at as u64 + 1);
        if !machine.take(position, &script.units[at], &mut replies[at - from]) {
            later.push(at - from);
        }
    }
    machine.settle(&mut settled);
    for (at, reply) in later.into_iter().zip(settled) {
        replies[at] = reply;
    }
    machine.flush(Position(to as u64))?;
    Ok(replies)
}

/// Fails unless the unit answered as it does where units are applied one after another; `run` names the run.
#[track_caller]
pub fn assert_reply(script: &Script, at: usize, reply: &[u8], run: &str) {
    let [got, expected] =
        [reply, script.replies[at].as_slice()].map(|bytes| bytes.escape_ascii().to_string());
    assert_eq!(got, expected, "unit {at} of {run}");
}

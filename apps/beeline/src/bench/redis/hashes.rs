//! HSET of one field beside SET of one key, on one node: a hash of any length has to keep up.
//!
//! Before the turns the node holds every field and every key that a turn may write, so that each write
//! takes the place of an older one. redis-server takes turns with the longest hash.

use std::io::{BufRead as _, BufReader, BufWriter, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use anyhow::Context as _;

use super::{Load, Persistence, RedisArguments, Running};
use crate::bench::report::{Better, Report, Row};
use crate::bench::turns::{Contender, alternate};
use crate::output::Output;

/// Fields, or keys, in one command of the filling.
const AT_ONCE: u32 = 64;
/// Commands of the filling under way.
const UNDER_WAY: u32 = 64;

/// Measures HSET on hashes of these lengths and SET over as many keys as the longest has fields.
pub(super) fn measure(
    arguments: &RedisArguments,
    (beeline, redis): (&Running, &Running),
    persistence: Persistence,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let options = &arguments.options;
    let lengths: Vec<u32> =
        arguments.fields.iter().map(|&fields| options.size(fields, fields.min(5000))).collect();
    let Some(&longest) = lengths.iter().max() else { return Ok(()) };
    let requests = options.size(options.amount(arguments.requests, 400_000, 200_000), 20_000);
    let (level, peer) = persistence.words();
    for &size in &arguments.sizes {
        let value = "x".repeat(size as usize);
        for &fields in &lengths {
            fill(beeline.port, &hash(fields), "field", fields, &value)?;
        }
        fill(beeline.port, "", "key", longest, &value)?;
        fill(redis.port, &hash(longest), "field", longest, &value)?;
        for &depth in &arguments.pipeline {
            let load = Load { test: "hset", depth, size, arguments };
            let set = ["SET", "key:__rand_int__", &value].map(str::to_owned).to_vec();
            let hset = |fields: u32| {
                // One field is one name: the load's own numbers begin with 0.
                let hash = hash(fields);
                ["HSET", &hash, "field:__rand_int__", &value].map(str::to_owned).to_vec()
            };
            let turn = |port: u16, words: &[String], range: u32| {
                load.turn_of(port, requests, range, words).map(|(rate, _)| rate)
            };
            let mut contenders = vec![Contender::new("SET", || turn(beeline.port, &set, longest))];
            for &fields in &lengths {
                let words = hset(fields);
                let contender = move || turn(beeline.port, &words, fields);
                contenders.push(Contender::new("HSET", contender));
            }
            let words = hset(longest);
            contenders.push(Contender::new("redis", move || turn(redis.port, &words, longest)));
            let figures = alternate(options.turns(), &mut contenders, output)?;
            drop(contenders);
            for (&fields, mine) in lengths.iter().zip(&figures[1..]) {
                let case = format!("HSET, {fields} fields, {size} B P{depth} {level}");
                let row = Row::new(&case, "beeline", "op/s", Better::Higher, mine);
                report.tell(row.against("beeline SET", mine, &figures[0]), output)?;
                if fields == longest
                    && let Some(theirs) = figures.last()
                {
                    let row = Row::new(case, "beeline", "op/s", Better::Higher, mine);
                    report.tell(row.against(peer, mine, theirs), output)?;
                }
            }
        }
    }
    Ok(())
}

fn hash(fields: u32) -> String {
    format!("hash-of-{fields}")
}

/// Writes `count` fields of a hash, or keys where there is none, named as redis-benchmark names them.
fn fill(port: u16, hash: &str, name: &str, count: u32, value: &str) -> anyhow::Result<()> {
    let stream = TcpStream::connect(("127.0.0.1", port)).context("filling a hash")?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut replies = BufReader::new(stream.try_clone()?);
    let mut out = BufWriter::new(stream);
    let mut line = String::new();
    let mut read = |replies: &mut BufReader<TcpStream>| -> anyhow::Result<()> {
        line.clear();
        replies.read_line(&mut line).context("no reply to the filling of a hash")?;
        anyhow::ensure!(line.starts_with([':', '+']), "the filling was refused: {}", line.trim());
        Ok(())
    };
    let (mut sent, mut under_way) = (0, 0);
    while sent < count {
        let many = AT_ONCE.min(count - sent);
        let head: &[&str] = if hash.is_empty() { &["MSET"] } else { &["HSET", hash] };
        let mut command = format!("*{}\r\n", head.len() as u32 + 2 * many);
        for word in head {
            command.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        for at in sent..sent + many {
            let field = format!("{name}:{at:012}");
            command.push_str(&format!("${}\r\n{field}\r\n", field.len()));
            command.push_str(&format!("${}\r\n{value}\r\n", value.len()));
        }
        out.write_all(command.as_bytes())?;
        sent += many;
        under_way += 1;
        if under_way == UNDER_WAY || sent == count {
            out.flush()?;
            while under_way > 0 {
                read(&mut replies)?;
                under_way -= 1;
            }
        }
    }
    Ok(())
}

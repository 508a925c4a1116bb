//! The parts that vary one thing: size, pairs, connections; a remote procedure call; what a message's
//! time is made of.

use super::super::host::cache_line_ping_pong_us;
use super::super::report::{Better, Report};
use super::super::turns::Contender;
use super::{SUBJECT, SocketsArguments, Transport, Work, asker, asker_with, bare, measure};
use crate::output::Output;

const PEER: &str = "kernel TCP";

pub(super) fn bytes(size: usize) -> String {
    match size {
        0..1024 => format!("{size} B"),
        1024..0x10_0000 => format!("{} KiB", size >> 10),
        _ => format!("{} MiB", size >> 20),
    }
}

/// Round trips and sends of growing messages.
pub fn sizes(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let options = &arguments.options;
    let all = [8, 64, 512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
    let sizes = if options.quick { &all[..2] } else { &all[..] };
    for &size in sizes {
        for work in [Work::PingPong, Work::Messages] {
            // As much time for each: small ones cost a call, large ones a copy.
            let turn = |accelerated: bool| {
                let most = match (work, accelerated) {
                    (Work::PingPong, true) => 100_000,
                    (Work::PingPong, false) => 15_000,
                    (_, true) => 1_000_000,
                    (_, false) => 150_000,
                };
                let copied = (3_u64 << 30) / if work == Work::PingPong { 4 } else { 1 };
                let rounds = options.size((copied / size as u64).clamp(500, most), 50);
                let more = ["--size".to_owned(), size.to_string()];
                move || asker_with(arguments, work, Transport::Tcp, rounds, accelerated, &more)
            };
            let contenders =
                vec![Contender::new(SUBJECT, turn(true)), Contender::new(PEER, turn(false))];
            let (what, unit, better) = if work == Work::PingPong {
                ("round trip", "us", Better::Lower)
            } else {
                ("sends", "op/s", Better::Higher)
            };
            let case = format!("{} {what}", bytes(size));
            measure(arguments, report, output, (&case, unit, better), contenders)?;
        }
    }
    Ok(())
}

/// The sum of what so many pairs of processes send at once.
pub fn pairs(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    for pairs in [1_usize, 2] {
        let turn = |accelerated: bool| {
            let rounds = arguments.options.size(if accelerated { 2_000_000 } else { 300_000 }, 500);
            move || {
                std::thread::scope(|scope| {
                    let work = Work::Messages;
                    let askers: Vec<_> = (0..pairs)
                        .map(|_| {
                            scope.spawn(move || {
                                asker(arguments, work, Transport::Tcp, rounds, accelerated, false)
                            })
                        })
                        .collect();
                    let mut sum = 0.0;
                    for asker in askers {
                        sum += asker.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
                    }
                    Ok(sum)
                })
            }
        };
        let contenders =
            vec![Contender::new(SUBJECT, turn(true)), Contender::new(PEER, turn(false))];
        let case = format!("8 B sends, {pairs} pairs of processes on two cores");
        measure(arguments, report, output, (&case, "op/s", Better::Higher), contenders)?;
    }
    Ok(())
}

/// Round trips over more and more connections.
pub fn many(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let options = &arguments.options;
    let all = [1_usize, 10, 100, 1_000, 10_000];
    for &connections in if options.quick { &all[..2] } else { &all[..] } {
        let turn = |accelerated: bool| {
            let rounds = options.size(200_000, 40);
            let more = ["--connections".to_owned(), connections.to_string()];
            let work = Work::Many;
            move || asker_with(arguments, work, Transport::Tcp, rounds, accelerated, &more)
        };
        let contenders =
            vec![Contender::new(SUBJECT, turn(true)), Contender::new(PEER, turn(false))];
        let case = format!("8 B round trips over {connections} connections, 32 at a time");
        measure(arguments, report, output, (&case, "op/s", Better::Higher), contenders)?;
    }
    Ok(())
}

/// A call of 64 bytes, an answer of 512.
pub fn rpc(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let turn = |transport, accelerated: bool| {
        let rounds = arguments.options.size(if accelerated { 100_000 } else { 25_000 }, 50);
        let more = ["--size", "64", "--answer", "512"].map(str::to_owned);
        move || asker_with(arguments, Work::PingPong, transport, rounds, accelerated, &more)
    };
    let contenders = vec![
        Contender::new(SUBJECT, turn(Transport::Tcp, true)),
        Contender::new(PEER, turn(Transport::Tcp, false)),
        Contender::new("Unix socket", turn(Transport::Unix, false)),
    ];
    let case = ("remote procedure call, 64 B there and 512 B back", "us", Better::Lower);
    measure(arguments, report, output, case, contenders)
}

/// The calls alone, with both ends in one thread; the ring with two; the line that moves; and the
/// wake-up of one that sleeps.
pub fn breakdown(
    arguments: &SocketsArguments,
    report: &mut Report,
    output: Output,
) -> anyhow::Result<()> {
    let options = &arguments.options;
    let cases = [
        (Work::Alone, "calls: 8 B there and back in one thread", 200_000),
        (Work::PingPong, "calls and the way: 8 B round trip, nobody sleeps", 100_000),
        (Work::Pauses, "and a wake-up: 8 B round trip after 1 ms of silence", 1_000),
    ];
    for (work, case, rounds) in cases {
        let turn = |accelerated: bool| {
            let slow = !accelerated && work != Work::Pauses && !options.quick;
            let rounds = options.size(rounds, 20) / if slow { 4 } else { 1 };
            move || asker(arguments, work, Transport::Tcp, rounds, accelerated, false)
        };
        let mut contenders =
            vec![Contender::new(SUBJECT, turn(true)), Contender::new(PEER, turn(false))];
        if work == Work::PingPong {
            let rounds = options.size(rounds, 20);
            contenders.push(Contender::new("bare ring", move || bare::turn(work, rounds)));
            contenders.push(Contender::new("cache line", move || cache_line_ping_pong_us(rounds)));
        }
        measure(arguments, report, output, (case, "us", Better::Lower), contenders)?;
    }
    Ok(())
}

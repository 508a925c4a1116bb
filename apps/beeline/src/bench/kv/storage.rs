//! What storing costs: segment sizes, the mixed update, kinds of memory, cooperative write-back.

use beeline_kv::wire::Protocol;
use beeline_kv_client::measure_space;
use beeline_pmem::WriteBack;

use super::Bench;
use super::load::{Keys, fill, latency, rate};
use super::rig::{Rig, RigOptions};
use crate::bench::report::{Better, Row, shown};
use crate::bench::turns::{Contender, alternate};
use crate::config::values::human_bytes;

/// 1 kB puts with larger and larger segments, each against the smallest.
pub fn segments(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let sizes = bench
        .options
        .size(&[256_u32 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20][..], &[256 << 10, 1 << 20]);
    let count = bench.options.size(60_000, 50);
    let value = [7; 1024];
    let mut rigs = Vec::new();
    for segment_bytes in sizes {
        let options = RigOptions { segment_bytes: *segment_bytes, ..RigOptions::default() };
        let rig = Rig::start(bench.fabric, &options)?;
        // Every put appends, as in the paper's sweep.
        let mut client = rig.client_with(Protocol::Boom, 16, false)?;
        fill(&mut client, 16, &value)?;
        rigs.push((rig, client));
    }
    let mut grants = vec![0.0; rigs.len()];
    let mut contenders: Vec<Contender<'_>> = rigs
        .iter_mut()
        .zip(&mut grants)
        .map(|((_, client), grants)| {
            let mut keys = Keys::uniform(10_000, 5);
            Contender::new("BOOM", move || {
                let before = client.counters().grants;
                let rate = rate(client, &mut keys, count, 0, &value, 8, false)?;
                *grants = (client.counters().grants - before) as f64 / count as f64 * 1e4;
                Ok(rate)
            })
        })
        .collect();
    let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
    drop(contenders);
    let mut rows = Vec::new();
    for (i, segment_bytes) in sizes.iter().enumerate() {
        let case = format!("1 kB put, segments of {}", human_bytes(u64::from(*segment_bytes)));
        let row = Row::new(case, "BOOM", "op/s", Better::Higher, &figures[i])
            .beside("grants in 10,000 puts", format!("{:.1}", grants[i]));
        let smallest = format!("segments of {}", human_bytes(u64::from(sizes[0])));
        rows.push(shown(
            if i == 0 { row } else { row.against(smallest, &figures[i], &figures[0]) },
            bench.output,
        ));
    }
    Ok(rows)
}

/// Space the mixed update saves over 1 GB of puts, by choice of key and segment size; and the same
/// through a real client, shorter.
#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
pub fn space(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    const KEYS: u64 = 100_000;
    const VALUE: u32 = 1024;
    let puts = bench.options.size((1_u64 << 30) / u64::from(VALUE), 2_000);
    let count = bench.options.size(KEYS, 200);
    let choices: [(&str, Keys, &str); 3] = [
        ("uniform", Keys::uniform(count, 1), "none"),
        ("Zipf 0.99", Keys::zipf(count, 0.99, 1), "57.2 %"),
        ("Zipf 1.1", Keys::zipf(count, 1.1, 1), "76.5 %"),
    ];
    let mut rows = Vec::new();
    for (name, choice, paper) in &choices {
        for segment in [16_u32 << 20, 64 << 20] {
            let mut keys = choice.clone();
            let stream = (0..puts).map(|_| (keys.next(), VALUE));
            let usage = measure_space(stream, segment, 1 << 20);
            let case =
                format!("space saved, {name}, segments of {}", human_bytes(u64::from(segment)));
            rows.push(shown(
                Row::new(case, "mixed update", "%", Better::Higher, &[usage.saving() * 100.0])
                    .beside("keys", count)
                    .beside("paper", paper)
                    .beside("puts", puts),
                bench.output,
            ));
        }
    }
    let rig = Rig::start(bench.fabric, &RigOptions::default())?;
    for (name, choice, paper) in &choices {
        let mut client = rig.client(Protocol::Boom, 2)?;
        let short = puts / 8;
        let mut keys = choice.clone();
        latency(&mut client, &mut keys, short, 0, &[7; VALUE as usize])?;
        let counters = client.counters();
        let mean = counters.appended_bytes as f64 / counters.appends.max(1) as f64;
        let all = mean * (counters.appends + counters.overwrites) as f64;
        let saved = 100.0 * (1.0 - counters.appended_bytes as f64 / all.max(1.0));
        rows.push(shown(
            Row::new(
                format!("space saved by a client, {name}"),
                "mixed update",
                "%",
                Better::Higher,
                &[saved],
            )
            .beside("paper", format!("{paper} after 1 GB"))
            .beside("puts", short),
            bench.output,
        ));
    }
    Ok(rows)
}

/// Puts into memory that persists nothing, that is written back line by line, and that takes 150 ns
/// longer per line.
pub fn pools(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    for size in bench.options.size(&[64_usize, 1024, 16_384][..], &[64]) {
        let value = vec![7; *size];
        let count = bench.options.size(10_000_u64.min((64 << 20) / *size as u64), 20);
        for (name, emulated_ns) in [
            ("dram", None),
            ("written back, emulated", Some(0)),
            ("+150 ns a line, emulated", Some(150)),
        ] {
            let write_back = bench.write_back.first().copied();
            let options = RigOptions { emulated_ns, write_back, ..RigOptions::default() };
            let rig = Rig::start(bench.fabric, &options)?;
            let mut clients = Vec::new();
            for protocol in Protocol::ALL {
                let mut client = rig.client(protocol, 8)?;
                fill(&mut client, 64, &value)?;
                clients.push(client);
            }
            let mut contenders: Vec<Contender<'_>> = clients
                .iter_mut()
                .map(|client| {
                    let mut keys = Keys::uniform(64, 9);
                    let value = &value;
                    Contender::new(client.protocol().name(), move || {
                        let recorded = latency(client, &mut keys, count, 0, value)?;
                        Ok(recorded.quantile_ns(0.5) as f64 / 1e3)
                    })
                })
                .collect();
            let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
            drop(contenders);
            for (other, protocol) in Protocol::ALL.iter().enumerate().skip(1) {
                let case = format!("{size} B put, {name}");
                rows.push(shown(
                    Row::new(case, "BOOM", "us", Better::Lower, &figures[0])
                        .against(protocol.name(), &figures[0], &figures[other])
                        .beside("pool", rig.pool()),
                    bench.output,
                ));
            }
        }
    }
    Ok(rows)
}

/// What the paper measured of help, by instruction, for 4, 8 and 16 kB (BOOM §4).
fn paper_help(instruction: WriteBack) -> [&'static str; 3] {
    match instruction {
        WriteBack::Clflush => ["+25 %", "+23.5 %", "+14.8 %"],
        WriteBack::Clwb => ["0", "+6.4 %", "+24.9 %"],
        _ => ["not measured"; 3],
    }
}

/// Two clients put large values into two shards, with and without help between the shards, once for
/// each write-back instruction; then the instructions against each other.
pub fn cooperative(bench: &Bench<'_>) -> anyhow::Result<Vec<Row>> {
    let mut rows = Vec::new();
    let instructions = bench.write_back;
    let sizes = bench.options.size(&[4096_usize, 8192, 16_384][..], &[4096]);
    for (at, size) in sizes.iter().enumerate() {
        let value = vec![7; *size];
        let count = bench.options.size(4_000_u64.min((64 << 20) / *size as u64), 20);
        let mut rigs = Vec::new();
        for instruction in instructions {
            for cooperative in [true, false] {
                let options = RigOptions {
                    shards: 2,
                    emulated_ns: Some(0),
                    write_back: Some(*instruction),
                    cooperative,
                    crowded: true,
                    segment_bytes: 16 << 20,
                    capacity_bytes: 512 << 20,
                };
                rigs.push(Rig::start(bench.fabric, &options)?);
            }
        }
        let mut contenders: Vec<Contender<'_>> = rigs
            .iter()
            .map(|rig| {
                let value = &value;
                Contender::new("BOOM", move || two_clients(rig, count, value))
            })
            .collect();
        let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
        drop(contenders);
        for ((instruction, figures), rigs) in
            instructions.iter().zip(figures.chunks_exact(2)).zip(rigs.chunks_exact(2))
        {
            let total = rigs[0].stats().store.total;
            let case = format!("{size} B put, 2 clients, 2 shards, {instruction}, help on");
            let helped = total.write_backs_helped;
            let all = helped + total.write_backs_own;
            rows.push(shown(
                Row::new(case, "BOOM", "op/s", Better::Higher, &figures[0])
                    .against("help off", &figures[0], &figures[1])
                    .beside("paper", paper_help(*instruction)[at])
                    .beside("sub-tasks helped", format!("{helped} of {all}")),
                bench.output,
            ));
        }
        // Each with help on: every other contender.
        let first = instructions[0];
        for (instruction, theirs) in instructions.iter().zip(figures.iter().step_by(2)).skip(1) {
            let case = format!("{size} B put, 2 clients, 2 shards, {instruction}, help on");
            rows.push(shown(
                Row::new(case, "BOOM", "op/s", Better::Higher, theirs).against(
                    first.to_string(),
                    theirs,
                    &figures[0],
                ),
                bench.output,
            ));
        }
    }
    Ok(rows)
}

#[expect(clippy::cast_precision_loss, reason = "counts far below 2^52")]
fn two_clients(rig: &Rig, count: u64, value: &[u8]) -> anyhow::Result<f64> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..2_u64)
            .map(|index| {
                scope.spawn(move || {
                    crate::bench::turns::pin(usize::try_from(index)?)?;
                    let mut client = rig.client(Protocol::Boom, 4)?;
                    let mut keys = Keys::uniform(64, index);
                    let start = std::time::Instant::now();
                    rate(&mut client, &mut keys, count, 0, value, 2, true)?;
                    Ok::<_, anyhow::Error>(count as f64 / start.elapsed().as_secs_f64())
                })
            })
            .collect();
        let mut sum = 0.0;
        for thread in threads {
            sum += thread.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        Ok(sum)
    })
}

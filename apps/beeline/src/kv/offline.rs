//! The commands that work on files: check, backup, restore.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use beeline_kv::{KvError, SnapshotReport, StoreOptions};
use beeline_pmem::{PmemError, PoolOptions};
use rustix::fs::{FlockOperation, flock};

use super::asker::Asker;
use super::{BackupArguments, CheckArguments, RestoreArguments};
use crate::config::values::human_bytes;
use crate::exit::{Exit, Failure, OrExit as _};
use crate::output::{Output, count};

/// Gives a store's error its exit code.
fn failure(error: KvError) -> Failure {
    let exit = match &error {
        KvError::Damaged { .. }
        | KvError::DamagedData { .. }
        | KvError::DamagedPool { .. }
        | KvError::Snapshot { .. }
        | KvError::Unfinished { .. } => Exit::Corruption,
        KvError::Pmem(
            PmemError::Damaged { .. }
            | PmemError::Truncated { .. }
            | PmemError::Missing { .. }
            | PmemError::Foreign { .. },
        ) => Exit::Corruption,
        KvError::Pmem(PmemError::Options { .. }) => Exit::Usage,
        _ => Exit::Failed,
    };
    Failure::new(exit, error)
}

/// `beeline kv check`.
pub fn check(arguments: &CheckArguments, output: Output) -> Result<Exit, Failure> {
    let path = &arguments.path;
    let about = std::fs::metadata(path)
        .with_context(|| format!("{}: name a data directory or a snapshot file", path.display()))
        .or_exit(Exit::Usage)?;
    match (about.is_dir(), arguments.repair) {
        (true, false) => check_directory(path, output),
        (true, true) => {
            let before = check_directory(path, output)?;
            if before == Exit::Done { Ok(Exit::Done) } else { repair_directory(path, output) }
        }
        (false, false) => check_snapshot(path, output),
        (false, true) => {
            let problem = "--repair is for data directories; a snapshot cannot be repaired";
            Err(Failure::new(Exit::Usage, anyhow::anyhow!("{}: {problem}", path.display())))
        }
    }
}

fn check_directory(path: &Path, output: Output) -> Result<Exit, Failure> {
    let report = beeline_kv::check(path).map_err(failure)?;
    if output.json {
        let damages: Vec<_> = report
            .damages
            .iter()
            .map(|damage| serde_json::json!({"segment": damage.segment, "what": damage.what}))
            .collect();
        let streams: Vec<_> = report.streams.iter().map(stream_object).collect();
        let text = |row: &[u8]| String::from_utf8_lossy(row).into_owned();
        let row_ends: Vec<_> = report
            .row_ends
            .iter()
            .map(|end| {
                let (namespace, row, entries) = (end.namespace, text(&end.row), end.entries);
                serde_json::json!({"namespace": namespace, "row": row, "entries": entries})
            })
            .collect();
        let row_times: Vec<_> = report
            .row_times
            .iter()
            .map(|time| {
                let (namespace, row, at) = (time.namespace, text(&time.row), time.expires_at_ms);
                serde_json::json!({"namespace": namespace, "row": row, "expires_at_ms": at})
            })
            .collect();
        output.object(&serde_json::json!({
            "path": path.display().to_string(),
            "segments": report.segments,
            "entries": report.entries,
            "bytes": report.bytes,
            "torn": report.torn,
            "accepted": report.accepted,
            "clean": report.clean,
            "streams": streams,
            "row_ends": row_ends,
            "row_times": row_times,
            "damages": damages,
        }))?;
    } else {
        for damage in &report.damages {
            let place =
                damage.segment.map_or_else(|| "pool.bee".to_owned(), |s| format!("segment {s}"));
            output.line(format!("DAMAGED  {place}: {}", damage.what))?;
        }
        for stream in &report.streams {
            let row = String::from_utf8_lossy(&stream.row).into_owned();
            let row = if row.is_empty() { row } else { format!(" {row:?}") };
            output.line(format!(
                "stream {}{row}: positions {} up to {}, {}",
                stream.namespace,
                stream.first,
                stream.next,
                human_bytes(stream.bytes)
            ))?;
        }
        for end in &report.row_ends {
            let row = String::from_utf8_lossy(&end.row);
            let left = count(end.entries, "entry", "entries");
            output.line(format!("ended row {} {row:?}: {left} left", end.namespace))?;
        }
        for time in &report.row_times {
            let row = String::from_utf8_lossy(&time.row);
            let at = time.expires_at_ms;
            output.line(format!("row {} {row:?}: ends at {at} ms since 1970", time.namespace))?;
        }
        let end = if report.clean { "closed in good order" } else { "not closed in good order" };
        output.line(format!(
            "{}: {} in {}, {} looked at; {end}; {} torn, {} damaged",
            path.display(),
            count(report.entries, "entry", "entries"),
            count(report.segments, "segment", "segments"),
            human_bytes(report.bytes),
            report.torn,
            report.damages.len()
        ))?;
    }
    Ok(if report.is_damaged() { Exit::Corruption } else { Exit::Done })
}

fn stream_object(stream: &beeline_kv::StreamSeen) -> serde_json::Value {
    serde_json::json!({
        "namespace": stream.namespace,
        "row": String::from_utf8_lossy(&stream.row),
        "first": stream.first,
        "next": stream.next,
        "bytes": stream.bytes,
        "missing": stream.missing,
    })
}

fn repair_directory(path: &Path, output: Output) -> Result<Exit, Failure> {
    let report = beeline_kv::repair(path).map_err(failure)?;
    if output.json {
        output.object(&serde_json::json!({
            "path": path.display().to_string(),
            "accepted": report.damaged,
            "keys": report.keys,
        }))?;
    } else {
        let (lost, keys) = (report.damaged, count(report.keys, "key", "keys"));
        let lost = count(lost, "damaged entry", "damaged entries");
        output.line(format!("{}: {lost} given up; {keys} left", path.display()))?;
    }
    Ok(Exit::Done)
}

fn check_snapshot(path: &Path, output: Output) -> Result<Exit, Failure> {
    let report = beeline_kv::check_snapshot(path).map_err(failure)?;
    say_moved(path, "in order", report.records, report.bytes, output)?;
    Ok(Exit::Done)
}

fn say_moved(
    path: &Path,
    what: &str,
    records: u64,
    bytes: u64,
    output: Output,
) -> Result<(), Failure> {
    if output.json {
        let path = path.display().to_string();
        output.object(&serde_json::json!({"path": path, "records": records, "bytes": bytes}))?;
    } else {
        let records = count(records, "record", "records");
        output.line(format!("{}: {records} {what}, {}", path.display(), human_bytes(bytes)))?;
    }
    Ok(())
}

/// `beeline kv restore`.
pub fn restore(arguments: &RestoreArguments, output: Output) -> Result<Exit, Failure> {
    let segment_bytes = u32::try_from(arguments.segment_size.0)
        .context("--segment-size: at most 1GiB")
        .or_exit(Exit::Usage)?;
    // What it needs is known from the file, and a node opened on it later grows it as told.
    let file = std::fs::metadata(&arguments.file)
        .with_context(|| arguments.file.display().to_string())
        .or_exit(Exit::Usage)?;
    // Twice the file, because a value may waste nearly half a segment; twice that to grow.
    let capacity_bytes = file.len().saturating_mul(4).saturating_add(u64::from(segment_bytes) * 16);
    let pool = PoolOptions { segment_bytes, capacity_bytes, ..PoolOptions::default() };
    let options = StoreOptions::default();
    let ((_, _, found), report) =
        beeline_kv::restore_directory(&arguments.file, &arguments.data, &pool, options)
            .map_err(failure)?;
    // Records that others superseded or deleted are no keys.
    let path = arguments.data.display();
    if output.json {
        output.object(&serde_json::json!({
            "path": path.to_string(),
            "keys": found.keys,
            "records": report.records,
            "bytes": report.bytes,
        }))?;
    } else {
        let keys = count(found.keys, "key", "keys");
        let records = count(report.records, "record", "records");
        let bytes = human_bytes(report.bytes);
        output.line(format!("{path}: {keys} restored from {records}, {bytes}"))?;
    }
    Ok(Exit::Done)
}

/// `beeline kv backup`: asks the node for a snapshot, waits, and copies it.
pub fn backup(arguments: &BackupArguments, output: Output) -> Result<Exit, Failure> {
    let patience = arguments.timeout.0;
    // What is wrong with the target is said before the node writes a snapshot for it.
    let target = &arguments.file;
    let mut name =
        target.file_name().context("name a file to write").or_exit(Exit::Usage)?.to_owned();
    name.push(".partial");
    let temporary = target.with_file_name(name);
    if target.is_dir() {
        let problem = anyhow::anyhow!("{}: is a directory; name a file in it", target.display());
        return Err(Failure::new(Exit::Usage, problem));
    }
    let partial = claim(&temporary)?;
    let done = copy_of_node(arguments, patience, &temporary, &partial);
    if done.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    let report = done?;
    std::fs::rename(&temporary, target).with_context(|| target.display().to_string())?;
    sync_directory_of(target)?;
    say_moved(target, "written", report.records, report.bytes, output)?;
    Ok(Exit::Done)
}

/// The file that the copy goes to, which no other backup writes meanwhile.
fn claim(temporary: &Path) -> Result<File, Failure> {
    let making = || format!("making {}", temporary.display());
    loop {
        let opened = File::options().write(true).create(true).truncate(false).open(temporary);
        let file = opened.with_context(making)?;
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(Failure::from(anyhow::anyhow!(
                "{}: another backup writes it; wait for that one, or name another file",
                temporary.display()
            )));
        }
        // Another backup may have ended since, and this is its target by now.
        let held = file.metadata().with_context(making)?;
        let named = std::fs::metadata(temporary);
        if named.is_ok_and(|named| (named.dev(), named.ino()) == (held.dev(), held.ino())) {
            return Ok(file);
        }
    }
}

/// Has the node write a snapshot, and copies it to the file that was claimed.
fn copy_of_node(
    arguments: &BackupArguments,
    patience: Duration,
    temporary: &Path,
    partial: &File,
) -> Result<SnapshotReport, Failure> {
    let mut node = Asker::open(arguments.resp_address, patience).or_exit(Exit::Unreachable)?;
    if !arguments.password.is_empty() {
        node.ask(&["AUTH", &arguments.password])?;
    }
    let directory = node.ask(&["CONFIG", "GET", "dir"])?;
    let directory = PathBuf::from(directory.last().context("the node names no directory")?);
    let source = directory.join(beeline_node::SNAPSHOT_FILE_NAME);
    if !directory.is_dir() {
        let directory = directory.display();
        let problem = "the node's directory is not on this host; run backup there";
        return Err(anyhow::anyhow!("{directory}: {problem}").into());
    }
    let earlier = mark(&source);
    // In the background: it takes its barrier in a moment, and stops no shard while it writes.
    node.ask(&["BGSAVE", "SCHEDULE"])?;
    wait_for_snapshot(&mut node)?;
    // A directory of this name may be here and another node's: what lies there is not what was asked for.
    if mark(&source).is_none_or(|now| earlier == Some(now)) {
        return Err(Failure::from(anyhow::anyhow!(
            "{}: the node at {} wrote no snapshot there: it runs on another host, or sees other \
             directories; run backup where it runs",
            source.display(),
            arguments.resp_address
        )));
    }
    copy(&source, partial)
        .with_context(|| format!("copying {} to {}", source.display(), temporary.display()))?;
    beeline_kv::check_snapshot(temporary).map_err(failure)
}

/// What tells a snapshot file from the one before of its name: each is a new file.
fn mark(file: &Path) -> Option<(u64, u64, i64, i64)> {
    let about = std::fs::metadata(file).ok()?;
    Some((about.dev(), about.ino(), about.mtime(), about.mtime_nsec()))
}

/// Copies `source` into the file that was claimed, for good.
fn copy(source: &Path, mut partial: &File) -> std::io::Result<()> {
    partial.set_len(0)?;
    std::io::copy(&mut File::open(source)?, &mut partial)?;
    partial.sync_all()
}

/// A name that a file took survives a loss of power, too.
fn sync_directory_of(file: &Path) -> anyhow::Result<()> {
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .with_context(|| format!("synchronising {}", directory.display()))
}

/// Waits until the node writes no snapshot any more: the one that was asked for is whole then.
fn wait_for_snapshot(node: &mut Asker) -> Result<(), Failure> {
    loop {
        let state = node.ask(&["INFO", "persistence"])?.concat();
        let says = |line: &str| state.lines().any(|known| known.trim_end() == line);
        if says("rdb_bgsave_in_progress:0") {
            let written = says("rdb_last_bgsave_status:ok");
            let problem = "the node could not write its snapshot; its log says why";
            return if written { Ok(()) } else { Err(anyhow::anyhow!(problem).into()) };
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

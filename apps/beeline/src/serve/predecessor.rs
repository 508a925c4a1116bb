//! A node that was killed and has not quite ended: who starts the next one at once waits for it.
//!
//! A process that `kill -9` has hit gives its memory back first and its ports and its lock on the
//! data directory last, which for a large pool takes seconds. Only a process that is already ending
//! is waited for; one that runs keeps what it has, and opening says so.

use std::path::Path;
use std::time::{Duration, Instant};

use beeline_pmem::{PmemError, Pool};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// Longest wait. Memory goes back at gigabytes a second.
const PATIENCE: Duration = Duration::from_secs(30);
/// `PF_EXITING` in the flags of `/proc/PID/stat`: the kernel is taking the process apart.
const EXITING: u64 = 0x4;
/// SIGKILL in a mask of signals of `/proc/PID/status`.
const KILLED: u64 = 1 << (9 - 1);

/// Waits, [`PATIENCE`] at most, while a process that is ending holds the pool in `data`. Says
/// nothing about a pool that is held by one that runs: opening it will.
pub fn wait_for_end(data: &Path) {
    let Err(PmemError::Busy { pid: Some(pid), .. }) = Pool::check_free(data) else { return };
    let Some(process) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return };
    // Opened before it is asked about: the descriptor names this process even if the number is
    // given to another.
    let Ok(ended) = pidfd_open(process, PidfdFlags::empty()) else { return };
    if !is_ending(pid) {
        return;
    }
    tracing::info!(pid, "waiting for the node that was killed to let go of the data directory");
    let until = Instant::now() + PATIENCE;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let Ok(left) = Timespec::try_from(left) else { return };
        match poll(&mut [PollFd::new(&ended, PollFlags::IN)], Some(&left)) {
            Err(Errno::INTR) => {}
            _ => return,
        }
    }
}

/// Whether the process is being taken apart, or will be as soon as one of its threads runs.
fn is_ending(pid: u32) -> bool {
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
    let (Ok(stat), Ok(status)) = (read("stat"), read("status")) else {
        // Gone meanwhile.
        return true;
    };
    // The name, in parentheses, may hold anything.
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .map(|(_, rest)| rest.split_whitespace().collect())
        .unwrap_or_default();
    let dead = matches!(fields.first(), Some(&("Z" | "X")));
    let flags = fields.get(6).and_then(|flags| flags.parse::<u64>().ok()).unwrap_or(0);
    let killed = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")))
        .filter_map(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .any(|mask| mask & KILLED != 0);
    dead || flags & EXITING != 0 || killed
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_that_runs_is_not_ending_and_one_that_was_killed_is() {
        assert!(!is_ending(std::process::id()));
        let mut child =
            Command::new("sleep").arg("60").stdout(Stdio::null()).spawn().expect("sleep starts");
        let was_ending = is_ending(child.id());
        child.kill().expect("the child is killed");
        // Not waited for: it stays as what has ended and is not yet collected.
        let is = is_ending(child.id());
        child.wait().expect("the child is collected");
        assert!(!was_ending);
        assert!(is);
    }

    #[test]
    fn a_directory_without_a_pool_is_not_waited_for() {
        let directory = tempfile::tempdir().expect("a temporary directory");
        wait_for_end(directory.path());
    }
}

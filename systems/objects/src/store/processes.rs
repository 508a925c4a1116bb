//! Processes with clients, watched for their end: one descriptor each, however many connections the
//! process has.
//!
//! A socket tells of its end only when every copy of it is closed, and a child of the client may hold
//! one; the process itself tells when it ends.

use std::collections::{HashMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;

use beeline_os::poller::{Interest, Poller};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

#[derive(Debug)]
struct Process {
    pid: i32,
    /// Readable when the process has ended.
    descriptor: OwnedFd,
    clients: HashSet<u32>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Processes {
    known: HashMap<u32, Process>,
    by_pid: HashMap<i32, u32>,
    next: u32,
}

fn has_ended(descriptor: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let found = poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&now));
    !matches!(found, Ok(0))
}

impl Processes {
    /// Watches process `pid` for `client`, with the token that `token` makes of its number. Nothing
    /// where it cannot be watched: it is outside our process namespace, or gone.
    ///
    /// Errors: the kernel's, from watching.
    pub(super) fn join(
        &mut self,
        poller: &Poller,
        pid: i32,
        client: u32,
        token: impl Fn(u32) -> u64,
    ) -> io::Result<Option<u32>> {
        // A process that ended, and was not taken away yet, is not the one that has its number now.
        let number = self.by_pid.get(&pid).copied();
        if let Some(number) = number
            && let Some(process) = self.known.get_mut(&number)
            && !has_ended(&process.descriptor)
        {
            process.clients.insert(client);
            return Ok(Some(number));
        }
        let Ok(descriptor) = beeline_os::process::open(pid) else { return Ok(None) };
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        poller.add(&descriptor, token(number), Interest::READ)?;
        self.known.insert(number, Process { pid, descriptor, clients: HashSet::from([client]) });
        self.by_pid.insert(pid, number);
        Ok(Some(number))
    }

    /// `client` is gone; with its last one the process is no longer watched.
    pub(super) fn leave(&mut self, poller: &Poller, number: u32, client: u32) {
        let Some(process) = self.known.get_mut(&number) else { return };
        process.clients.remove(&client);
        if !process.clients.is_empty() {
            return;
        }
        let _ = poller.remove(&process.descriptor);
        let pid = process.pid;
        self.known.remove(&number);
        if self.by_pid.get(&pid) == Some(&number) {
            self.by_pid.remove(&pid);
        }
    }

    /// The clients of a process that ended.
    pub(super) fn clients(&self, number: u32) -> Vec<u32> {
        self.known
            .get(&number)
            .map_or_else(Vec::new, |process| process.clients.iter().copied().collect())
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::Duration;

    use super::*;

    #[test]
    fn connections_of_a_process_share_a_descriptor_and_a_process_that_ended_is_not_its_follower() {
        let mut poller = Poller::new(8).unwrap();
        let mut processes = Processes::default();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let token = u64::from;
        let first = processes.join(&poller, pid, 1, token).unwrap().unwrap();
        assert_eq!(processes.join(&poller, pid, 2, token).unwrap(), Some(first));
        child.kill().unwrap();
        assert_eq!(poller.wait(Some(Duration::from_secs(20))).unwrap(), 1);
        assert_eq!(poller.readiness(0).token, u64::from(first));
        // It is not waited for yet: its number still names it, as it would name a follower.
        let second = processes.join(&poller, pid, 3, token).unwrap().unwrap();
        assert_ne!(first, second);
        let mut ended = processes.clients(first);
        ended.sort_unstable();
        assert_eq!((ended, processes.clients(second)), (vec![1, 2], vec![3]));
        processes.leave(&poller, first, 1);
        processes.leave(&poller, first, 2);
        assert!(processes.clients(first).is_empty());
        assert_eq!(processes.by_pid.get(&pid), Some(&second));
        processes.leave(&poller, second, 3);
        assert!(processes.known.is_empty() && processes.by_pid.is_empty());
        child.wait().unwrap();
        assert_eq!(processes.join(&poller, pid, 4, token).unwrap(), None);
    }
}

//! Processes that are about to be moved to another host: nothing of theirs is introduced meanwhile.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Most processes; who wants more has to wait.
const MOST: usize = 256;

#[derive(Debug)]
struct One {
    process: i32,
    /// Readable once the process ended, and its number may be another's.
    handle: OwnedFd,
    until: Instant,
}

impl One {
    fn is_over(&self) -> bool {
        let mut entries = [PollFd::new(&self.handle, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.until <= Instant::now() || poll(&mut entries, Some(&now)) != Ok(0)
    }
}

/// All of them.
#[derive(Debug, Default)]
pub struct Held(Vec<One>);

impl Held {
    /// Holds the process of the `pidfd` `handle` for `time` from now; for no time, lets it go on. False
    /// when it is no process, or one in a process namespace beside ours, or there are too many.
    pub fn hold(&mut self, handle: OwnedFd, time: Duration) -> bool {
        self.0.retain(|one| !one.is_over());
        let Some(process) = process_of(&handle) else { return false };
        self.0.retain(|one| one.process != process);
        if time.is_zero() {
            return true;
        }
        let room = self.0.len() < MOST;
        if room {
            self.0.push(One { process, handle, until: Instant::now() + time });
        }
        room
    }

    /// True while `process` is held.
    pub fn has(&mut self, process: i32) -> bool {
        let place = self.0.iter().position(|one| one.process == process);
        place.is_some_and(|place| {
            let over = self.0.get(place).is_none_or(One::is_over);
            if over {
                self.0.swap_remove(place);
            }
            !over
        })
    }
}

/// The process that a `pidfd` stands for, by our numbers.
fn process_of(handle: &OwnedFd) -> Option<i32> {
    let path = format!("/proc/self/fdinfo/{}", handle.as_raw_fd());
    let text = std::fs::read_to_string(path).ok()?;
    let number = text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim();
    // -1: it ended; 0: not to be seen from here.
    number.parse().ok().filter(|process| *process > 0)
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    fn handle(process: u32) -> OwnedFd {
        let process = Pid::from_raw(i32::try_from(process).unwrap()).unwrap();
        pidfd_open(process, PidfdFlags::empty()).unwrap()
    }

    #[test]
    fn a_process_is_held_for_its_time_and_while_it_lives() {
        let (me, long) = (std::process::id(), Duration::from_secs(600));
        let mine = i32::try_from(me).unwrap();
        let mut held = Held::default();
        assert!(!held.has(mine));
        assert!(held.hold(handle(me), long) && held.has(mine) && !held.has(mine + 1));
        assert!(held.hold(handle(me), Duration::ZERO) && !held.has(mine), "lifted");
        assert!(held.hold(handle(me), Duration::from_millis(1)));
        std::thread::sleep(Duration::from_millis(5));
        assert!(!held.has(mine), "its time is over");

        let mut child = std::process::Command::new("sleep").arg("20").spawn().unwrap();
        let childs = i32::try_from(child.id()).unwrap();
        let of_child = handle(child.id());
        assert!(held.hold(of_child.try_clone().unwrap(), long) && held.has(childs));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!held.has(childs), "its number may be another's");
        assert!(!held.hold(of_child, long), "there is no such process");
        assert!(!held.hold(std::fs::File::open("/dev/null").unwrap().into(), long));
    }

    #[test]
    fn more_than_there_is_room_for_are_refused() {
        let mut held = Held::default();
        let one = |process| One {
            process,
            handle: handle(std::process::id()),
            until: Instant::now() + Duration::from_secs(600),
        };
        held.0.extend((1_000_000..).take(MOST - 1).map(one));
        let (me, long) = (std::process::id(), Duration::from_secs(600));
        assert!(held.hold(handle(me), long));
        assert!(held.hold(handle(me), long), "it has its place");
        held.0.push(one(1));
        assert!(held.hold(handle(me), Duration::ZERO), "room again");
        held.0.push(one(2));
        assert!(!held.hold(handle(me), long));
    }
}

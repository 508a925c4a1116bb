//! What `/proc` tells of the threads of this process.

use std::os::fd::RawFd;

use super::{Argument, Errno, close, enter, outcome, short_file, thread, thread_exists};

/// A thread of this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thread {
    /// The kernel's number for it.
    pub id: u32,
    /// It sleeps in the kernel by its own call, or has ended: no signal and no debugger stopped it, and it
    /// does not wait for a processor.
    pub is_asleep: bool,
    /// Processor time that it has had, in the ticks of `/proc`: a hundredth of a second each.
    pub ran_ticks: u64,
}

/// Where the name begins in an entry of a folder, behind the entry's length.
const NAME: usize = 19;
const LENGTH: usize = 16;

/// Every thread of this process but the calling one, in the order of the kernel's numbers.
///
/// Errors: the kernel's; `EMFILE` where a file of `/proc` cannot be opened at this moment.
pub fn others() -> Result<Vec<Thread>, Errno> {
    let path = c"/proc/self/task";
    let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_DIRECTORY;
    // The path is ours and ends with a zero.
    let opened = call!(libc::SYS_openat, libc::AT_FDCWD, path.as_ptr(), flags, 0)?;
    let folder = RawFd::try_from(opened).map_err(|_| Errno(libc::EBADF))?;
    let numbers = numbers(folder);
    let _ = close(folder);
    let own = thread();
    let mut threads = Vec::new();
    for id in numbers?.into_iter().filter(|id| *id != own) {
        match described(id, &short_file(&format!("/proc/self/task/{id}/stat"))) {
            Some(thread) => threads.push(thread),
            // A thread that has ended meanwhile has no file.
            None if thread_exists(id) => return Err(Errno(libc::EMFILE)),
            None => {}
        }
    }
    threads.sort_unstable_by_key(|thread| thread.id);
    Ok(threads)
}

/// The names in a folder that are numbers.
fn numbers(folder: RawFd) -> Result<Vec<u32>, Errno> {
    let nonsense = Errno(libc::EBADMSG);
    let mut numbers = Vec::new();
    let mut entries = [0_u8; 4096];
    loop {
        // The buffer is ours and as long as told.
        let read = call!(libc::SYS_getdents64, folder, entries.as_mut_ptr(), entries.len())?;
        let mut rest = entries.get(..read).unwrap_or_default();
        if rest.is_empty() {
            return Ok(numbers);
        }
        while let Some(length) = rest.get(LENGTH..LENGTH + 2) {
            let length = usize::from(u16::from_ne_bytes([length[0], length[1]]));
            let name = rest.get(NAME..length).ok_or(nonsense)?;
            let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
            numbers
                .extend(std::str::from_utf8(name).ok().and_then(|name| name.parse::<u32>().ok()));
            rest = rest.get(length..).ok_or(nonsense)?;
        }
    }
}

fn described(id: u32, status: &str) -> Option<Thread> {
    // Behind the name, which may hold anything.
    let mut words = status.rsplit(") ").next()?.split(' ');
    let state = words.next().filter(|state| !state.is_empty())?;
    let user = words.nth(10)?.parse::<u64>().ok()?;
    let system = words.next()?.parse::<u64>().ok()?;
    let is_asleep = matches!(state, "S" | "I" | "Z" | "X");
    Some(Thread { id, is_asleep, ran_ticks: user + system })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn a_line_of_proc_tells_state_and_time() {
        let line = "77 (a) S b) R 1 2 3 4 5 6 7 8 9 10 40 2 0 0 20 0 9 0 12345 1 2 3";
        let running = Thread { id: 77, is_asleep: false, ran_ticks: 42 };
        assert_eq!(described(77, line), Some(running));
        let asleep = line.replace(") R", ") S");
        assert_eq!(described(77, &asleep).map(|thread| thread.is_asleep), Some(true));
        for stopped in [") t", ") T", ") D"] {
            let line = line.replace(") R", stopped);
            assert_eq!(described(77, &line).map(|thread| thread.is_asleep), Some(false));
        }
        for cut in ["", "77 (a", "77 (a) R 1 2 3"] {
            assert_eq!(described(77, cut), None);
        }
    }

    #[test]
    fn the_other_threads_are_found_and_the_calling_one_is_not() {
        let (told, hears) = channel();
        let (end, ended) = channel::<()>();
        let others: Vec<_> = (0..200)
            .map(|_| {
                let told = told.clone();
                std::thread::spawn(move || told.send(thread()).unwrap())
            })
            .collect();
        others.into_iter().for_each(|other| other.join().unwrap());
        let sleeper = std::thread::spawn(move || {
            told.send(thread()).unwrap();
            let _ = ended.recv();
        });
        let id = hears.iter().nth(200).unwrap();
        let found = super::others().unwrap();
        assert!(found.is_sorted_by_key(|thread| thread.id));
        assert!(found.iter().any(|thread| thread.id == id));
        assert!(!found.iter().any(|found| found.id == thread()));
        drop(end);
        sleeper.join().unwrap();
    }
}

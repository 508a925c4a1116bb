//! Who will take a message from a Unix socket: programs with the library, or without.
//!
//! Asked once per message that has connections of ours with it. The kernel tells which socket is at
//! the other end (`sock_diag`), and `/proc` who has that one open and what he has loaded. Processes of other users do not
//! show; nor does who inherits the socket later. Files are read by the C library's names, which are
//! ours in a program that preloads us: not to be called under an epoll set's lock.

use std::mem::MaybeUninit;
use std::os::fd::{OwnedFd, RawFd};
use std::path::Path;

use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::kernel;

/// `SOCK_DIAG_BY_FAMILY`, the one message of this kind of question.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST`.
const REQUEST: u16 = 1;
/// `UDIAG_SHOW_PEER`, and the kind of the answer's attribute.
const SHOW_PEER: u32 = 4;
const PEER: u16 = 2;
/// Bytes of an answer before its attributes: two headers.
const HEADS: usize = 16 + 16;

/// True when somebody else who has the other end of the Unix socket `fd` lacks `library` (a path as
/// in `/proc/PID/maps`).
#[must_use]
pub fn may_lack(fd: RawFd, library: &[u8]) -> bool {
    let me = std::process::id();
    match kernel::inode(fd).and_then(peer_of) {
        Some(inode) => holders(inode).any(|process| process != me && lacks(process, library)),
        None => {
            connected_process(fd).is_some_and(|process| process != me && lacks(process, library))
        }
    }
}

/// Who connected, or made the pair: the kernel's own word, and an old one.
fn connected_process(fd: RawFd) -> Option<u32> {
    // SAFETY: the program's descriptor, borrowed for one call that only reads it.
    let socket = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let peer = socket_peercred(socket).ok()?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).ok()
}

/// The socket at the other end of the Unix socket of number `inode`.
fn peer_of(inode: u64) -> Option<u64> {
    let inode = u32::try_from(inode).ok()?;
    let mut question = Vec::with_capacity(40);
    question.extend(40_u32.to_ne_bytes());
    question.extend(BY_FAMILY.to_ne_bytes());
    question.extend(REQUEST.to_ne_bytes());
    question.extend([0; 8]);
    let unix = u8::try_from(libc::AF_UNIX).ok()?;
    question.extend([unix, 0, 0, 0]);
    // In every state, this one, whatever its cookie.
    for word in [u32::MAX, inode, SHOW_PEER, u32::MAX, u32::MAX] {
        question.extend(word.to_ne_bytes());
    }
    let socket = netlink()?;
    rustix::net::send(&socket, &question, SendFlags::empty()).ok()?;
    let mut space = [MaybeUninit::uninit(); 1024];
    let ((answer, _), _) = rustix::net::recv(&socket, &mut space[..], RecvFlags::DONTWAIT).ok()?;
    attribute(answer)
}

fn netlink() -> Option<OwnedFd> {
    const SOCK_DIAG: u32 = 4;
    let protocol = rustix::net::Protocol::from_raw(std::num::NonZeroU32::new(SOCK_DIAG)?);
    let flags = SocketFlags::CLOEXEC;
    let family = AddressFamily::NETLINK;
    rustix::net::socket_with(family, SocketType::RAW, flags, Some(protocol)).ok()
}

/// The peer's number in an answer.
fn attribute(answer: &[u8]) -> Option<u64> {
    let half =
        |at: usize| Some(u16::from_ne_bytes(answer.get(at..at.checked_add(2)?)?.try_into().ok()?));
    if half(4)? != BY_FAMILY {
        return None;
    }
    let mut at = HEADS;
    loop {
        let (length, kind) = (usize::from(half(at)?), half(at + 2)?);
        if kind == PEER {
            let word = answer.get(at + 4..at + 8)?.try_into().ok()?;
            return Some(u64::from(u32::from_ne_bytes(word)));
        }
        at += length.max(4).next_multiple_of(4);
    }
}

/// Processes, as far as we may look, that have the socket of number `inode` open.
fn holders(inode: u64) -> impl Iterator<Item = u32> {
    let name = format!("socket:[{inode}]");
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    numbers.filter(move |process| {
        let open = std::fs::read_dir(format!("/proc/{process}/fd")).into_iter().flatten();
        let mut links = open.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
        links.any(|link| link == Path::new(&name))
    })
}

fn lacks(process: u32, library: &[u8]) -> bool {
    // Gone, or not ours to look at: then it is not for us to say.
    let Ok(maps) = std::fs::read(format!("/proc/{process}/maps")) else { return false };
    !maps.is_empty() && !maps.windows(library.len().max(1)).any(|part| part == library)
}

/// The path of the file that holds the function at `place`, as in `/proc/self/maps`.
#[must_use]
pub fn file_of(place: usize) -> Option<Vec<u8>> {
    let maps = std::fs::read("/proc/self/maps").ok()?;
    let number = |text: &[u8]| usize::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok();
    maps.split(|&byte| byte == b'\n').find_map(|line| {
        let range = line.split(|&byte| byte == b' ').next()?;
        let dash = range.iter().position(|&byte| byte == b'-')?;
        let (begin, end) = (number(&range[..dash])?, number(&range[dash + 1..])?);
        let path = line.iter().position(|&byte| byte == b'/')?;
        (begin..end).contains(&place).then(|| line[path..].to_vec())
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn who_has_the_other_end_is_found_and_looked_at() {
        let (near, far) = UnixStream::pair().unwrap();
        let inode = kernel::inode(far.as_raw_fd()).unwrap();
        let Some(found) = kernel::inode(near.as_raw_fd()).and_then(peer_of) else {
            // A kernel without this kind of question: the older word is taken.
            return;
        };
        assert_eq!(found, inode);
        let me = std::process::id();
        assert!(holders(inode).any(|process| process == me));
        assert!(!may_lack(near.as_raw_fd(), b"nothing"), "nobody else has it");
        let mut child = std::process::Command::new("sleep")
            .arg("20")
            .stdin(OwnedFd::from(far))
            .spawn()
            .unwrap();
        assert!(may_lack(near.as_raw_fd(), b"/no/such/library.so"));
        assert!(!may_lack(near.as_raw_fd(), b"[stack]"));
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn answers_cut_short_are_no_answers() {
        let mut answer = vec![0; HEADS];
        answer[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
        answer.extend([5, 0, 0, 0, 1, 0, 0, 0, 8, 0, 2, 0, 7, 0, 0, 0]);
        assert_eq!(attribute(&answer), Some(7));
        (0..answer.len()).for_each(|cut| assert_eq!(attribute(&answer[..cut]), None));
        assert!(
            file_of(who_has_the_other_end_is_found_and_looked_at as *const () as usize).is_some()
        );
    }
}

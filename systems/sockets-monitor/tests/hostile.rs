//! Records and descriptors that nobody of ours would send: the monitor refuses each, keeps
//! nothing, and goes on answering.

#![allow(clippy::unwrap_used, clippy::undocumented_unsafe_blocks)]

use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use beeline_sockets::control::{Answer, Question, Status};
use beeline_sockets::introduce::{answer, ask, dial};
use beeline_sockets::young;
use beeline_sockets_monitor::{Monitor, Settings};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

fn status() -> Status {
    let socket = dial().unwrap();
    ask(&socket, Question::Status, None).unwrap();
    let Answer::Status(status) = answer(&socket).unwrap().0 else { unreachable!() };
    status
}

/// What comes back for a record with descriptors, if anything does.
fn sent(record: &[u8], with: &[BorrowedFd<'_>]) -> Option<Answer> {
    let socket = dial().unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(16))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !with.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(with)));
    }
    let slices = [std::io::IoSlice::new(record)];
    rustix::net::sendmsg(&socket, &slices, &mut control, SendFlags::NOSIGNAL).unwrap();
    answer(&socket).ok().map(|(answer, _)| answer)
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn forged_records_and_descriptors_are_refused_and_leave_nothing() {
    let name = format!("beeline-test-hostile-{}", std::process::id());
    // The only test of this file: nobody reads the environment meanwhile.
    unsafe { std::env::set_var("BEELINE_SOCKETS_MONITOR", name) };
    // The monitor here waits for a processor beside other tests: it is not given up for that.
    unsafe { std::env::set_var("BEELINE_SOCKETS_PATIENCE_MS", "20000") };
    young::begin();
    let mut monitor = Monitor::begin(Settings::default()).unwrap();
    std::thread::spawn(move || monitor.run(None));
    let before = (status(), descriptors());

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let other: OwnedFd = listener.accept().unwrap().0.into();
    let fresh = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    let file = std::fs::File::open("/dev/null").unwrap();
    let (near, _far) = std::os::unix::net::UnixStream::pair().unwrap();
    let attach = Question::Attach.encode();

    // What is no connection of the asker's: a number in the record, a listener, a file, another kind.
    assert_eq!(sent(&attach, &[]), Some(Answer::Plain));
    for fd in [listener.as_fd(), udp.as_fd(), file.as_fd(), near.as_fd()] {
        assert_eq!(sent(&attach, &[fd]), Some(Answer::Plain));
        assert_eq!(sent(&Question::Resume.encode(), &[fd]), Some(Answer::Plain));
    }
    // A process to hold that is none.
    for fd in [listener.as_fd(), file.as_fd(), near.as_fd()] {
        assert_eq!(sent(&Question::Hold { seconds: 9 }.encode(), &[fd]), None);
    }
    assert_eq!(sent(&Question::Hold { seconds: 9 }.encode(), &[]), None);
    // A way back to what was never introduced.
    assert_eq!(sent(&Question::Resume.encode(), &[one.as_fd()]), Some(Answer::Plain));
    // Many descriptors: the first counts, and none is kept.
    let many: Vec<BorrowedFd<'_>> = (0..16).map(|_| file.as_fd()).collect();
    assert!(!matches!(sent(&attach, &many), Some(Answer::Segment { .. })));
    // Records cut short, too long, of other versions and kinds, answers, and noise.
    let mut chance = 1_u64;
    let mut noise = || {
        chance ^= chance << 13;
        chance ^= chance >> 7;
        chance ^= chance << 17;
        chance
    };
    for cut in 0..attach.len() {
        assert_eq!(sent(&attach[..cut], &[fresh.as_fd()]), None);
    }
    assert_eq!(sent(&[attach.as_slice(), &[0; 100]].concat(), &[fresh.as_fd()]), None);
    for place in 0..6 {
        let mut record = attach;
        record[place] ^= 0x80;
        assert_eq!(sent(&record, &[fresh.as_fd()]), None);
    }
    assert_eq!(sent(&Answer::Segment { side: 1 }.encode(), &[fresh.as_fd()]), None);
    for _ in 0..300 {
        let record: Vec<u8> = (0..noise() % 60 + 1).map(|_| noise().to_le_bytes()[0]).collect();
        assert_eq!(sent(&record, &[fresh.as_fd()]), None);
    }
    // Callers that say nothing, or leave before they are answered.
    let silent: Vec<OwnedFd> = (0..50).map(|_| dial().unwrap()).collect();
    for _ in 0..50 {
        ask(&dial().unwrap(), Question::Connections, None).unwrap();
    }
    drop(silent);

    // None of it introduced anybody, and who is honest is served.
    let now = status();
    assert_eq!((now.paired, now.waiting, now.kept), (0, 0, 0), "{now:?}");
    assert_eq!(sent(&attach, &[one.as_fd()]), Some(Answer::Segment { side: 0 }));
    assert_eq!(sent(&attach, &[other.as_fd()]), Some(Answer::Segment { side: 1 }));
    assert_eq!(status().paired, before.0.paired + 1);
    drop((listener, one, other, fresh, udp, file, near, _far));
    let begun = std::time::Instant::now();
    // One segment is kept, and nothing else.
    while descriptors() > before.1 + 2 {
        assert!(begun.elapsed() < std::time::Duration::from_secs(20), "{}", descriptors());
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}

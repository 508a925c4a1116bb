//! Taking memory back from peers that are in the middle of something, or hostile.

use std::fs::OpenOptions;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, FabricError, LocalData, Operation, ProtectionDomain, QueuePair, ScatterGatherEntry,
    Status, WorkCompletion, WorkRequest,
};
use beeline_os::mapping::{Mapping, Protection};
use beeline_os::memory::{copy_in, copy_out, load_u64};
use beeline_os::{MemoryObject, SharedMemory, moving, reopen};
use rustix::mm::MapFlags;

use crate::config::ShmConfig;
use crate::device::DeviceHandle;
use crate::exposure::{self, Granted};
use crate::hostile_tests::{BOUND, End, connect, patient_end};
use crate::remote::inside;

fn pair() -> (End, End) {
    let device = DeviceHandle::open(ShmConfig::default()).unwrap();
    let (mut a, mut b) = (patient_end(&device, false), patient_end(&device, false));
    connect(&mut a, &mut b);
    (a, b)
}

/// Runs one request of `a` to its completion.
fn perform(a: &mut End, operation: Operation<'_>) -> WorkCompletion {
    a.pair.post_send(&[WorkRequest::new(1, operation)]).unwrap();
    let start = Instant::now();
    loop {
        if let Some(completion) = a.poll().first() {
            return *completion;
        }
        assert!(start.elapsed() < BOUND, "the request never ended");
    }
}

fn add(a: &mut End, b: &End) -> WorkCompletion {
    let region = a.region.clone();
    let local = ScatterGatherEntry { region: &region, offset: 64, length: 8 };
    perform(a, Operation::FetchAndAdd { local, remote: b.region.remote_address(64), addend: 1 })
}

#[test]
fn an_atomic_that_met_an_orphan_is_not_reported_as_done() {
    let (mut a, b) = pair();
    let before = load_u64(b.region.memory().as_ref(), 64);
    assert!(add(&mut a, &b).is_success());
    // The initiator is stopped between its last look and its operation, for longer than the owner
    // waits.
    let region = b.region.clone();
    inside::set(move || region.revoke().unwrap());
    let completion = add(&mut a, &b);
    assert_eq!(completion.status, Status::TransportError, "nobody knows what became of it");
    assert_eq!(load_u64(b.region.memory().as_ref(), 64), before.wrapping_add(1));
}

#[test]
fn an_atomic_is_counted_exactly_when_it_is_reported_as_done() {
    for _ in 0..20 {
        let (mut a, b) = pair();
        let before = load_u64(b.region.memory().as_ref(), 64);
        assert_eq!(add(&mut a, &b).status, Status::Success);
        let region = b.region.clone();
        inside::set(move || {
            // Revoked at once with the operation.
            std::thread::spawn(move || region.revoke().unwrap());
            std::thread::yield_now();
        });
        let sure = match add(&mut a, &b).status {
            Status::Success => 2,
            _ => 1,
        };
        // Until the revocation is over.
        let start = Instant::now();
        while Arc::strong_count(b.region.memory()) > 2 && start.elapsed() < BOUND {
            std::thread::yield_now();
        }
        drop(moving::tie(b.region.memory()));
        let found = load_u64(b.region.memory().as_ref(), 64).wrapping_sub(before);
        assert!(found == sure || (sure == 1 && found == 2), "{found} for {sure}");
    }
}

#[test]
fn a_write_into_a_retired_backing_is_not_reported_as_done() {
    let (mut a, b) = pair();
    let remote = b.region.remote_address(0);
    let write = || Operation::Write { local: LocalData::Inline(b"12345678"), remote };
    assert!(perform(&mut a, write()).is_success());
    // The owner ended and began anew: it moves to another backing, and no epoch reaches the peer.
    let backing = b.region.memory().descriptor().unwrap().try_clone().unwrap();
    let backing = Mapping::marked(backing, 4096, Protection::ReadWrite, MapFlags::SHARED).unwrap();
    backing.retire();
    let completion = perform(&mut a, write());
    assert_eq!(completion.status, Status::TransportError);
    assert_eq!(backing.retired().unwrap().load(Ordering::Relaxed), 1, "nobody takes it away");
}

#[test]
fn a_flush_or_a_read_of_a_retired_backing_is_not_reported_as_done() {
    for reads in [false, true] {
        let (mut a, b) = pair();
        let remote = b.region.remote_address(0);
        let region = a.region.clone();
        let local = ScatterGatherEntry { region: &region, offset: 0, length: 8 };
        let kind = beeline_fabric::FlushKind::Visible;
        let operation = || match reads {
            true => Operation::Read { local, remote },
            false => Operation::Flush { remote, length: 8, kind },
        };
        assert!(perform(&mut a, operation()).is_success());
        let backing = b.region.memory().descriptor().unwrap().try_clone().unwrap();
        Mapping::marked(backing, 4096, Protection::ReadWrite, MapFlags::SHARED).unwrap().retire();
        assert_eq!(perform(&mut a, operation()).status, Status::TransportError);
    }
}

/// A file, which knows no seals.
#[derive(Debug)]
struct FileMemory {
    mapping: Mapping,
    directory: tempfile::TempDir,
}

impl FileMemory {
    fn file(&self, name: &str) -> OwnedFd {
        let path = self.directory.path().join(name);
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(path).unwrap();
        file.set_len(4096).unwrap();
        file.into()
    }

    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mapping = Mapping::anonymous(4096).unwrap();
        let mut memory = Self { mapping, directory };
        let file = memory.file("first");
        memory.mapping = Mapping::shared(file, 4096, Protection::ReadWrite).unwrap();
        memory
    }
}

// SAFETY: the mapping lives as long as the value, page-aligned; only raw copies reach it.
unsafe impl MemoryObject for FileMemory {
    fn base(&self) -> NonNull<u8> {
        self.mapping.base()
    }

    fn length_bytes(&self) -> usize {
        4096
    }

    fn descriptor(&self) -> Option<Arc<OwnedFd>> {
        self.mapping.descriptor()
    }

    fn replace_backing(&self) -> std::io::Result<()> {
        moving::replace(self.anchor(), || {
            let file = self.file("second");
            let copy = Mapping::shared(file.try_clone()?, 4096, Protection::ReadWrite)?;
            self.mapping.copy_into(&copy);
            self.mapping.replace_with(file)?;
            Ok(())
        })
    }
}

/// What a peer that may only read gets hold of: the descriptor it was given, opened anew for
/// writing, and mapped.
fn hostile_mapping(given: &OwnedFd) -> Option<Mapping> {
    let mapped = Mapping::shared(given.try_clone().unwrap(), 4096, Protection::ReadWrite);
    assert!(mapped.is_err(), "it was opened for reading");
    let again = reopen::writable(given).ok()?;
    Mapping::shared(again, 4096, Protection::ReadWrite).ok()
}

fn scribble(mapping: &Mapping) {
    // SAFETY: a writable mapping of 4096 bytes that nobody else holds.
    unsafe { mapping.base().as_ptr().write_bytes(0xEE, 4096) };
}

fn first_bytes(memory: &Arc<dyn MemoryObject>) -> [u8; 4] {
    let mut found = [0; 4];
    copy_out(memory.as_ref(), 0, &mut found);
    found
}

fn read_only_grant(end: &End, memory: &Arc<dyn MemoryObject>) -> Granted {
    let found = || Some((Arc::clone(memory), Access::REMOTE_READ));
    exposure::grant(&end.pair.0.link, found).unwrap()
}

#[test]
fn a_hostile_reader_of_shared_memory_cannot_write_before_or_after_the_revocation() {
    let (_a, b) = pair();
    let memory: Arc<dyn MemoryObject> = Arc::new(SharedMemory::allocate("read", 4096).unwrap());
    copy_in(memory.as_ref(), 0, b"kept");
    let region = b.domain.register(Arc::clone(&memory), Access::REMOTE_READ).unwrap();
    let granted = read_only_grant(&b, &memory);
    assert!(hostile_mapping(&granted.descriptor).is_none(), "the object is sealed");
    let again = reopen::writable(&*granted.descriptor).unwrap();
    assert_eq!(rustix::io::pwrite(&again, b"evil", 0), Err(rustix::io::Errno::PERM));
    // The owner goes on storing, and no writer can be let in beside the reader.
    copy_in(memory.as_ref(), 0, b"more");
    let refused = b.domain.register(Arc::clone(&memory), Access::REMOTE_WRITE);
    assert!(matches!(refused, Err(FabricError::CannotRegister { .. })), "{refused:?}");
    region.revoke().unwrap();
    assert!(hostile_mapping(&granted.descriptor).is_none());
    assert_eq!(&first_bytes(&memory), b"more");
    drop(region);
    b.domain.register(memory, Access::REMOTE_WRITE).unwrap();
}

#[test]
fn a_hostile_reader_of_a_file_is_moved_away_from_like_a_writer() {
    let (_a, b) = pair();
    for queue_pair in [false, true] {
        let memory: Arc<dyn MemoryObject> = Arc::new(FileMemory::new());
        copy_in(memory.as_ref(), 0, b"kept");
        let region = b.domain.register(Arc::clone(&memory), Access::REMOTE_READ).unwrap();
        let granted = read_only_grant(&b, &memory);
        // Nothing but file permissions protects a file, and this peer is of our own user.
        let hostile = hostile_mapping(&granted.descriptor).unwrap();
        scribble(&hostile);
        assert_eq!(first_bytes(&memory), [0xEE; 4]);
        copy_in(memory.as_ref(), 0, b"kept");
        if queue_pair {
            exposure::take_back_from(&b.pair.0.link).unwrap();
        } else {
            region.revoke().unwrap();
        }
        scribble(&hostile);
        let again = hostile_mapping(&granted.descriptor).unwrap();
        scribble(&again);
        assert_eq!(&first_bytes(&memory), b"kept", "queue pair: {queue_pair}");
        if queue_pair {
            return;
        }
    }
}

#[test]
fn memory_that_another_provider_reaches_by_itself_is_not_moved() {
    let (mut a, b) = pair();
    let remote = b.region.remote_address(0);
    let write = Operation::Write { local: LocalData::Inline(b"x"), remote };
    assert!(perform(&mut a, write).is_success());
    let tie = moving::tie(b.region.memory());
    let error = b.region.revoke().unwrap_err();
    assert!(
        matches!(&error, FabricError::System { source, .. }
        if source.kind() == std::io::ErrorKind::ResourceBusy),
        "{error}"
    );
    drop(tie);
    b.region.revoke().unwrap();
    // And what our peers hold is not moved by another provider.
    let (mut a, b) = pair();
    let remote = b.region.remote_address(0);
    let write = Operation::Write { local: LocalData::Inline(b"x"), remote };
    assert!(perform(&mut a, write).is_success());
    assert!(b.region.memory().replace_backing().is_err());
}

#[test]
fn a_peer_cannot_put_off_the_end_of_a_request_by_changing_its_reason() {
    let (mut a, mut b) = pair();
    // No receive is posted; the peer moves its epoch now and then, so that the request waits for the
    // key, for a receive, for the key again.
    let remote = b.region.remote_address(0);
    let local = LocalData::Inline(b"x");
    let write = Operation::WriteWithImmediate { local, remote, immediate: 1 };
    a.pair.post_send(&[WorkRequest::new(1, write)]).unwrap();
    let (start, mut turn) = (Instant::now(), 0_u32);
    loop {
        if let Some(completion) = a.poll().first() {
            assert!(!completion.is_success());
            break;
        }
        b.poll();
        turn += 1;
        if turn.is_multiple_of(2) {
            b.pair.0.link.bump_epoch();
        }
        assert!(start.elapsed() < BOUND, "the request never ended");
        std::thread::sleep(Duration::from_millis(2));
    }
}

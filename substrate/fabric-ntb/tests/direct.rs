//! Memory that peers write by themselves, taken back from them.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{
    Access, CompletionQueue, Device, LocalData, MemoryRegion, Operation, ProtectionDomain,
    QueuePair, QueuePairOptions, RemoteAddress, Role, Status, WorkCompletion, WorkRequest,
};
use beeline_fabric_ntb::{NtbConfig, NtbDevice, Port};
use beeline_os::memory::copy_out;
use beeline_os::{MemoryObject, Part};

const BOUND: Duration = Duration::from_secs(20);

struct End {
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
    pair: Box<dyn QueuePair>,
}

impl End {
    fn open() -> Self {
        let port = Port::Emulated { disorder: None };
        let window_memory_bytes = 1 << 20;
        Self::on(
            NtbDevice::open(NtbConfig { port, window_memory_bytes, ..NtbConfig::default() })
                .unwrap(),
        )
    }

    fn on(device: Arc<dyn Device>) -> Self {
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(256).unwrap();
        let options = QueuePairOptions::default();
        let pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
        Self { device, domain, queue, pair }
    }

    fn write(&mut self, remote: RemoteAddress, bytes: &[u8]) -> Status {
        let write = Operation::Write { local: LocalData::Inline(bytes), remote };
        self.pair.post_send(&[WorkRequest::new(1, write)]).unwrap();
        let mut one = [WorkCompletion::EMPTY];
        assert_eq!(self.queue.wait(&mut one, BOUND).unwrap(), 1, "a completion within the bound");
        one[0].status
    }
}

fn connected() -> (End, End) {
    let (mut active, mut passive) = (End::open(), End::open());
    connect(&mut active, &mut passive);
    (active, passive)
}

fn connect(active: &mut End, passive: &mut End) {
    passive.pair.connect(&active.pair.connect_info(), Role::Passive).unwrap();
    active.pair.connect(&passive.pair.connect_info(), Role::Active).unwrap();
    active.pair.wait_connected(BOUND).unwrap();
    passive.pair.wait_connected(BOUND).unwrap();
}

fn held(memory: &dyn MemoryObject, offset: usize) -> [u8; 8] {
    let mut bytes = [0; 8];
    copy_out(memory, offset, &mut bytes);
    bytes
}

/// Writes to the region until the peer was told where it lies, and once more by itself.
fn granted(near: &mut End, region: &MemoryRegion, bytes: &[u8; 8]) {
    for _ in 0..3 {
        assert_eq!(near.write(region.remote_address(0), bytes), Status::Success);
    }
}

/// What a peer does that keeps the window and writes where it was once told to: every place that
/// looks like `bytes` in any window this process has open.
fn overwrite_in_windows(bytes: &[u8; 8]) -> usize {
    let mut found = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Ok(target) = std::fs::read_link(entry.path()) else { continue };
        let name = target.to_string_lossy().into_owned();
        // What was moved away is memory of the owner's alone.
        if !name.contains("memfd:") || name.contains("moved") {
            continue;
        }
        let open = std::fs::OpenOptions::new().read(true).write(true).open(entry.path());
        let Ok(file) = open else { continue };
        let length = file.metadata().unwrap().len();
        found += overwrite_in(&file, length, bytes);
    }
    found
}

fn overwrite_in(file: &File, length: u64, bytes: &[u8; 8]) -> usize {
    let mut contents = vec![0; usize::try_from(length).unwrap()];
    file.read_exact_at(&mut contents, 0).unwrap();
    let places = contents.chunks(4096).zip((0..).step_by(4096));
    let mut found = 0;
    for (_, at) in places.filter(|(page, _)| page.starts_with(bytes)) {
        file.write_all_at(b"HOSTILE!", at).unwrap();
        found += 1;
    }
    found
}

#[test]
fn two_granted_regions_over_one_object_are_revoked_one_by_one() {
    let (mut near, far) = connected();
    let memory = far.device.allocate_memory(8192).unwrap();
    let register = || far.domain.register(Arc::clone(&memory), Access::all()).unwrap();
    let (first, second) = (register(), register());
    granted(&mut near, &first, b"region 1");
    granted(&mut near, &second, b"region 2");
    first.revoke().unwrap();
    // The other is the peer's as before, wherever it lies now.
    granted(&mut near, &second, b"again  2");
    assert_eq!(&held(memory.as_ref(), 0), b"again  2");
    second.revoke().unwrap();
    assert_eq!(near.write(second.remote_address(0), b"too late"), Status::RemoteAccessError);
    assert_eq!(&held(memory.as_ref(), 0), b"again  2");
}

#[test]
fn a_part_that_is_deregistered_is_out_of_its_peers_reach_though_its_object_stays() {
    let (mut near, far) = connected();
    let memory = far.device.allocate_memory(8192).unwrap();
    let part = Part::new(Arc::clone(&memory), 0, 4096).unwrap();
    let region = far.domain.register(Arc::new(part), Access::all()).unwrap();
    granted(&mut near, &region, b"contents");
    drop(region);
    overwrite_in_windows(b"contents");
    assert_eq!(&held(memory.as_ref(), 0), b"contents", "a peer still writes what was its part");
}

#[test]
fn the_windows_memory_is_found_by_the_test_above() {
    let (mut near, far) = connected();
    let memory = far.device.allocate_memory(8192).unwrap();
    let region = far.domain.register(Arc::clone(&memory), Access::all()).unwrap();
    granted(&mut near, &region, b"findable");
    assert!(overwrite_in_windows(b"findable") > 0);
    assert_eq!(&held(memory.as_ref(), 0), b"HOSTILE!");
}

#[test]
fn regions_are_granted_and_taken_back_at_once_and_no_write_is_lost() {
    let (mut near, far) = connected();
    let memory = far.device.allocate_memory(8192).unwrap();
    let stays = far.domain.register(Arc::clone(&memory), Access::all()).unwrap();
    for round in 0..200_u64 {
        let goes = far.domain.register(Arc::clone(&memory), Access::all()).unwrap();
        granted(&mut near, &goes, b"whatever");
        // While the other region's owner takes it back, the peer goes on writing to this one.
        let revoker = std::thread::spawn(move || goes.revoke().unwrap());
        let remote = stays.remote_address(4096);
        assert_eq!(near.write(remote, &round.to_le_bytes()), Status::Success);
        revoker.join().unwrap();
        assert_eq!(near.write(remote.advanced(8), &round.to_le_bytes()), Status::Success);
        assert_eq!(held(memory.as_ref(), 4096), round.to_le_bytes(), "a write is lost");
        assert_eq!(held(memory.as_ref(), 4104), round.to_le_bytes(), "a write is lost");
    }
}

#[test]
fn a_queue_pair_whose_revocation_failed_is_not_said_to_be_revoked_by_the_next() {
    let (mut near, mut far) = connected();
    let memory = far.device.allocate_memory(8192).unwrap();
    let region = far.domain.register(Arc::clone(&memory), Access::all()).unwrap();
    granted(&mut near, &region, b"in reach");
    // Another region needs the memory where it is.
    let tie = beeline_os::moving::tie(&memory);
    for _ in 0..3 {
        assert!(far.pair.revoke().is_err(), "the peer can still write");
    }
    drop(tie);
    far.pair.revoke().unwrap();
    overwrite_in_windows(b"in reach");
    assert_eq!(&held(memory.as_ref(), 0), b"in reach");
    far.pair.revoke().unwrap();
}

//! Devices over a fixed window: a plain file stands for a resource file that both ends map.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, ConnectInfo, Device, LocalData, MemoryRegion, Operation,
    ProtectionDomain, QueuePair, QueuePairOptions, QueuePairState, RemoteAddress, RemoteKey, Role,
    ScatterGatherEntry, Status, WorkCompletion, WorkRequest,
};
use beeline_fabric_ntb::{FixedWindow, NtbConfig, NtbDevice, Port, Portion, Side};
use beeline_ntb::{Cable, Inbound};
use beeline_os::Mapping;
use beeline_os::memory::{copy_in, copy_out};

const BOUND: Duration = Duration::from_secs(20);
/// Tells a copy of this test binary which window to open the second end of.
const WINDOW_VARIABLE: &str = "BEELINE_NTB_TEST_WINDOW";

fn config(path: &Path, side: Side) -> NtbConfig {
    let inbound = path.to_owned();
    on_part(inbound, side, Portion::WHOLE)
}

fn on_part(inbound: std::path::PathBuf, side: Side, portion: Portion) -> NtbConfig {
    let port = Port::Fixed(FixedWindow { inbound, outbound: None, side, portion });
    NtbConfig { port, ..NtbConfig::default() }
}

fn window() -> (tempfile::TempDir, std::path::PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("window");
    std::fs::File::create(&path).unwrap().set_len(4 << 20).unwrap();
    (directory, path)
}

struct End {
    device: Arc<dyn Device>,
    domain: Arc<dyn ProtectionDomain>,
    queue: Rc<dyn CompletionQueue>,
    pair: Box<dyn QueuePair>,
}

impl End {
    fn open(path: &Path, side: Side) -> Self {
        Self::on(NtbDevice::open(config(path, side)).unwrap())
    }

    fn on(device: Arc<dyn Device>) -> Self {
        let domain = device.allocate_protection_domain().unwrap();
        let queue = device.create_completion_queue(256).unwrap();
        let options = QueuePairOptions::default();
        let pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
        Self { device, domain, queue, pair }
    }

    fn region(&self, bytes: usize) -> MemoryRegion {
        self.domain.register(self.device.allocate_memory(bytes).unwrap(), Access::all()).unwrap()
    }

    fn one(&self) -> WorkCompletion {
        let mut one = [WorkCompletion::EMPTY];
        assert_eq!(self.queue.wait(&mut one, BOUND).unwrap(), 1, "a completion within the bound");
        one[0]
    }
}

fn connect(active: &mut End, passive: &mut End) {
    passive.pair.connect(&active.pair.connect_info(), Role::Passive).unwrap();
    active.pair.connect(&passive.pair.connect_info(), Role::Active).unwrap();
    active.pair.wait_connected(BOUND).unwrap();
    passive.pair.wait_connected(BOUND).unwrap();
}

fn round_trip(near: &mut End, target: RemoteAddress) {
    let (local, length) = (near.region(1 << 20), 1_u64 << 20);
    let pattern: Vec<u8> = (0..length).map(|i| (i * 7 % 251) as u8).collect();
    copy_in(local.memory().as_ref(), 0, &pattern);
    let entry = ScatterGatherEntry { region: &local, offset: 0, length };
    let write = Operation::Write { local: LocalData::Gather(&[entry]), remote: target };
    near.pair.post_send(&[WorkRequest::new(1, write)]).unwrap();
    assert_eq!(near.one().status, Status::Success);
    copy_in(local.memory().as_ref(), 0, &vec![0; length as usize]);
    let read = Operation::Read { local: entry, remote: target };
    near.pair.post_send(&[WorkRequest::new(2, read)]).unwrap();
    assert_eq!(near.one().status, Status::Success);
    let mut seen = vec![0; length as usize];
    copy_out(local.memory().as_ref(), 0, &mut seen);
    assert!(seen == pattern, "a mebibyte there and back through rings of 64 KiB");
}

#[test]
fn two_devices_over_one_file_reach_each_other_both_ways() {
    let (_directory, path) = window();
    let (mut first, mut second) = (End::open(&path, Side::First), End::open(&path, Side::Second));
    connect(&mut first, &mut second);
    let target = second.region(1 << 20);
    round_trip(&mut first, target.remote_address(0));
    let target = first.region(1 << 20);
    round_trip(&mut second, target.remote_address(0));
    // The other end dials too, beside the first connection.
    let (mut near, mut far) = (End::on(second.device.clone()), End::on(first.device.clone()));
    connect(&mut near, &mut far);
    let target = far.region(1 << 20);
    round_trip(&mut near, target.remote_address(0));
}

#[test]
fn an_end_of_a_window_belongs_to_one_device() {
    let (_directory, path) = window();
    let first = NtbDevice::open(config(&path, Side::First)).unwrap();
    assert!(NtbDevice::open(config(&path, Side::First)).is_err());
    drop(first);
    NtbDevice::open(config(&path, Side::First)).unwrap();
    assert!(NtbDevice::open(config(&path.with_extension("missing"), Side::First)).is_err());
}

#[test]
fn a_device_and_sockets_share_one_window_and_a_part_that_overlaps_is_refused() {
    let (_directory, path) = window();
    let plug = |side: usize| {
        let url = format!("ntb://{}?side={side}&part=0/2", path.display());
        Cable::plug(&url.parse().unwrap()).unwrap()
    };
    let sockets = [plug(0), plug(1)];
    let on = |side| on_part(path.clone(), side, Portion::new(1, 2).unwrap());
    let [mut first, mut second] =
        [Side::First, Side::Second].map(|side| End::on(NtbDevice::open(on(side)).unwrap()));
    connect(&mut first, &mut second);
    let target = second.region(1 << 20);
    round_trip(&mut first, target.remote_address(0));
    for cable in &sockets {
        let mut bytes = vec![1; cable.window.length_bytes()];
        cable.window.inbound.read(0, &mut bytes);
        assert!(
            bytes.iter().all(|&byte| byte == 0),
            "nothing of the device's is in the sockets' part"
        );
        assert_eq!(cable.directory.refusal(), None);
    }
    let whole = NtbDevice::open(config(&path, Side::First)).unwrap_err().to_string();
    assert!(whole.contains("a part of it that overlaps"), "{whole}");
}

#[test]
fn connections_beyond_the_partitions_are_refused_and_freed_ones_are_used_again() {
    let (_directory, path) = window();
    let first = NtbDevice::open(config(&path, Side::First)).unwrap();
    let second = NtbDevice::open(config(&path, Side::Second)).unwrap();
    for _ in 0..3 {
        let mut pairs = Vec::new();
        loop {
            let (mut near, mut far) = (End::on(first.clone()), End::on(second.clone()));
            far.pair.connect(&near.pair.connect_info(), Role::Passive).unwrap();
            if near.pair.connect(&far.pair.connect_info(), Role::Active).is_err() {
                break;
            }
            near.pair.wait_connected(BOUND).unwrap();
            pairs.push((near, far));
        }
        assert_eq!(pairs.len(), 8, "half of the partitions that fit two mebibytes");
    }
}

#[test]
fn a_peer_that_reboots_ends_the_old_connections_and_takes_new_ones() {
    let (_directory, path) = window();
    let mut first = End::open(&path, Side::First);
    for _ in 0..3 {
        let mut second = End::open(&path, Side::Second);
        connect(&mut first, &mut second);
        let target = second.region(1 << 20);
        round_trip(&mut first, target.remote_address(0));
        // Work that waits for a receive nobody posts, when the peer goes.
        let wait = Operation::Send { local: LocalData::Inline(b"?"), immediate: None };
        first.pair.post_send(&[WorkRequest::new(9, wait)]).unwrap();
        drop((target, second));
        assert!(!first.one().is_success());
        assert_eq!(first.pair.state(), QueuePairState::Error);
        first = End::on(first.device.clone());
    }
}

#[test]
fn a_peer_that_scribbles_over_the_whole_window_breaks_its_own_connections_at_most() {
    let (_directory, path) = window();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let file = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
    // What the first end reads: the directory, scratchpads, lines, and the beginning of the first ring.
    let inbound = Mapping::shared_at(&file, 0, 20 << 10).unwrap();
    let inbound = Inbound::new(Arc::new(inbound), 0, 20 << 10);
    let mut first = End::open(&path, Side::First);
    for _ in 0..12 {
        // Whatever the last one did, the next finds a device that works.
        let mut second = End::open(&path, Side::Second);
        connect(&mut first, &mut second);
        let target = second.region(1 << 20);
        round_trip(&mut first, target.remote_address(0));
        let read = Operation::Read {
            local: ScatterGatherEntry { region: &target, offset: 0, length: 1 << 20 },
            remote: target.remote_address(0),
        };
        let _ = first.pair.post_send(&[WorkRequest::new(3, read)]);
        for _ in 0..400 {
            let value = match next() % 5 {
                0 => next(),
                1 => next() % 8192,
                2 => ((1 + next() % 3) << 8) | (next() % 4),
                3 => u64::from(u32::MAX),
                _ => u64::MAX - next() % 16,
            };
            let place = match next() % 4 {
                0 => next() % 2 * 4096 + next() % 256,
                1 => 8192 + next() % 64,
                2 => 8192 + next() % 1024,
                _ => 12288 + next() % 8192,
            };
            inbound.word(place as usize / 8 * 8).store(value, Ordering::SeqCst);
            let _ = first.queue.poll(&mut [WorkCompletion::EMPTY; 8]);
            if next() % 64 == 0 {
                // The library looks too.
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        drop(second);
        first = End::on(first.device.clone());
    }
}

/// A PCI device as sysfs shows it, with a window of 4 MiB in BAR 2 and registers in BAR 0.
fn pci_device(class: &str, enabled: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let (directory, path) = window();
    let resource = directory.path().join("resource2");
    std::fs::rename(path, &resource).unwrap();
    std::fs::write(directory.path().join("resource0"), [0; 256]).unwrap();
    std::fs::write(directory.path().join("class"), format!("{class}\n")).unwrap();
    std::fs::write(directory.path().join("enable"), format!("{enabled}\n")).unwrap();
    (directory, resource)
}

#[test]
fn a_device_that_is_no_window_is_left_alone_and_the_error_says_what_is_wrong() {
    let says = |path: &Path| {
        let error = NtbDevice::open(config(path, Side::First)).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        error
    };
    // A bridge, and the memory of virtual machines.
    // Both at once: a file's number, which an end is claimed by, may come again once it is gone.
    let devices = ["0x068000", "0x050000"].map(|class| pci_device(class, "1"));
    for (_, path) in &devices {
        NtbDevice::open(config(path, Side::First)).unwrap();
    }
    let (directory, path) = pci_device("0x050000", "1");
    assert!(says(&directory.path().join("resource4")).contains("No such file"));
    assert!(says(&directory.path().join("resource0")).contains("is this the BAR"));
    assert!(says(directory.path()).contains("directory"));
    // The same BAR with write combining is the same end.
    let combining = directory.path().join("resource2_wc");
    std::fs::hard_link(&path, &combining).unwrap();
    let first = NtbDevice::open(config(&combining, Side::First)).unwrap();
    assert!(says(&path).contains("another program"));
    drop(first);
    let (_directory, path) = pci_device("0x050000", "0");
    assert!(says(&path).contains("write 1 to"));
    let (_directory, path) = pci_device("0x020000", "1");
    assert!(says(&path).contains("0x020000"));
    assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0), "nothing was written");
}

/// The other end, in a process of its own: writes its connection data, then serves until killed.
#[test]
fn second_end_process() {
    let Ok(path) = std::env::var(WINDOW_VARIABLE) else { return };
    let path = Path::new(&path);
    let mut end = End::open(path, Side::Second);
    let region = end.region(1 << 20);
    let mut told = end.pair.connect_info().0;
    told.extend_from_slice(&region.remote_key().0.to_le_bytes());
    std::fs::write(path.with_extension("tmp"), told).unwrap();
    std::fs::rename(path.with_extension("tmp"), path.with_extension("told")).unwrap();
    let asked = path.with_extension("asked");
    while !asked.exists() {
        std::thread::sleep(Duration::from_millis(2));
    }
    end.pair.connect(&ConnectInfo(std::fs::read(asked).unwrap()), Role::Passive).unwrap();
    end.pair.wait_connected(BOUND).unwrap();
    std::thread::sleep(3 * BOUND);
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_process_is_noticed_by_its_heartbeat() {
    let (_directory, path) = window();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "second_end_process"])
        .env(WINDOW_VARIABLE, &path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut child = Killed(child);
    let mut first = End::open(&path, Side::First);
    let begun = Instant::now();
    while !path.with_extension("told").exists() {
        assert!(begun.elapsed() < BOUND, "the other process starts");
        std::thread::sleep(Duration::from_millis(2));
    }
    let mut told = std::fs::read(path.with_extension("told")).unwrap();
    let key = RemoteKey(u64::from_le_bytes(told.split_off(64).try_into().unwrap()));
    first.pair.connect(&ConnectInfo(told), Role::Active).unwrap();
    std::fs::write(path.with_extension("tmp"), first.pair.connect_info().0).unwrap();
    std::fs::rename(path.with_extension("tmp"), path.with_extension("asked")).unwrap();
    first.pair.wait_connected(BOUND).unwrap();
    round_trip(&mut first, RemoteAddress { key, offset: 0 });
    child.0.kill().unwrap();
    child.0.wait().unwrap();
    let write = Operation::Write {
        local: LocalData::Inline(b"?"),
        remote: RemoteAddress { key, offset: 0 },
    };
    first.pair.post_send(&[WorkRequest::new(1, write), WorkRequest::new(2, write)]).unwrap();
    assert_eq!(first.one().status, Status::TransportError);
    assert_eq!(first.one().status, Status::Flushed);
}

#[test]
fn a_plain_file_that_others_could_cut_short_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    let (_directory, path) = window();
    let allow = |mode| {
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        NtbDevice::open(config(&path, Side::First))
    };
    for open_to_others in [0o666, 0o620, 0o602] {
        let error = allow(open_to_others).unwrap_err().to_string();
        assert!(error.contains("chmod go-w") && error.contains("window"), "{error}");
    }
    assert!(allow(0o644).is_ok(), "one that only its owner writes");
}

#[test]
fn an_object_that_cannot_shrink_may_be_open_to_others() {
    use rustix::fs::{MemfdFlags, Mode, SealFlags, fchmod, fcntl_add_seals, memfd_create};
    let memory = memfd_create("window", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&memory, 4 << 20).unwrap();
    fchmod(&memory, Mode::from_raw_mode(0o666)).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&memory);
    let path = format!("/proc/self/fd/{number}");
    assert!(NtbDevice::open(config(Path::new(&path), Side::First)).is_err(), "not sealed yet");
    fcntl_add_seals(&memory, SealFlags::SHRINK).unwrap();
    assert!(NtbDevice::open(config(Path::new(&path), Side::First)).is_ok());
}

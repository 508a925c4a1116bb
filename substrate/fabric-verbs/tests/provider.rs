//! What is this provider's own: limits, events of the device, reuse. Skipped, with the reason,
//! where there is no RDMA device.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test ends where its set-up breaks")]

mod common;

use std::io::Write as _;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, FabricError, FlushKind, LocalData, MemoryRegion, Operation,
    QueuePairOptions, QueuePairState, ReceiveRequest, ScatterGatherEntry, Status, WorkCompletion,
    WorkRequest,
};
use beeline_fabric_verbs::{VerbsConfig, VerbsDevice, VerbsError};
use beeline_os::mapping::Protection;
use beeline_os::memory::copy_out;
use beeline_os::{Mapping, MemoryObject, Persistence};
use common::{BOUND, End, device, join, linked, write};
use rustix::mm::MapFlags;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

#[test]
fn sizes_beyond_the_device_are_refused_by_the_name_of_the_limit() {
    let Some((device, _turn)) = device() else { return };
    let most = device.attributes().max_completion_queue_depth;
    let error = device.create_completion_queue(most + 1).unwrap_err();
    assert!(error.to_string().contains("completion queue depth"), "{error}");
    let domain = device.allocate_protection_domain().unwrap();
    let queue = device.create_completion_queue(16).unwrap();
    let most = device.attributes().max_queue_depth;
    let options = QueuePairOptions { send_depth: most + 1, ..QueuePairOptions::default() };
    let error = domain.create_queue_pair(&queue, &queue, None, options).unwrap_err();
    assert!(matches!(error, FabricError::Limit { what: "send queue depth", .. }), "{error}");
}

#[test]
fn the_limit_on_pinned_memory_is_named() {
    let Some((device, _turn)) = device() else { return };
    // Capabilities are a thread's own; the limit is the process's and is put back.
    std::thread::spawn(move || {
        let domain = device.allocate_protection_domain().unwrap();
        let before = getrlimit(Resource::Memlock);
        let mut own = capabilities(None).unwrap();
        own.effective.remove(CapabilitySet::IPC_LOCK);
        own.permitted.remove(CapabilitySet::IPC_LOCK);
        set_capabilities(None, own).unwrap();
        setrlimit(Resource::Memlock, Rlimit { current: Some(1 << 20), ..before }).unwrap();
        let memory = device.allocate_memory(4 << 20).unwrap();
        let refused = domain.register(memory, Access::all());
        setrlimit(Resource::Memlock, before).unwrap();
        let error = refused.unwrap_err();
        let text = error.to_string();
        assert!(text.contains("RLIMIT_MEMLOCK") && text.contains("1048576"), "{text}");
    })
    .join()
    .unwrap();
}

#[test]
fn a_queue_pair_used_again_is_a_new_connection() {
    let Some((mut a, mut b, _turn)) = linked(QueuePairOptions::default()) else { return };
    let target = b.region(4096);
    let source = a.region(4096);
    let options = QueuePairOptions::default();
    let mut numbers = std::collections::HashSet::new();
    for round in 0..30_u64 {
        assert!(numbers.insert(a.pair.qp_num()), "numbers are not used again");
        // Left behind unfinished and unpolled every other time.
        let data = [ScatterGatherEntry { region: &source, offset: 0, length: 4096 }];
        let local = LocalData::Gather(&data);
        let operation = Operation::Write { local, remote: target.remote_address(0) };
        for _ in 0..round % 2 * 5 {
            a.pair.post_send(&[WorkRequest::new(round, operation)]).unwrap();
        }
        a.pair = a.domain.create_queue_pair(&a.queue, &a.queue, None, options).unwrap();
        b.pair = b.domain.create_queue_pair(&b.queue, &b.queue, None, options).unwrap();
        join(a.pair.as_mut(), b.pair.as_mut());
        a.pair.post_send(&[WorkRequest::new(1000 + round, write(&target, b"now"))]).unwrap();
        let done = a.one();
        assert_eq!((done.wr_id, done.status), (1000 + round, Status::Success));
        assert_eq!(done.qp_num, a.pair.qp_num());
    }
}

/// Sets the network device of the lab's guest up or down.
fn carrier(up: bool) {
    let word = if up { "up" } else { "down" };
    let tool = ["/usr/sbin/ip", "/sbin/ip", "/bin/ip"]
        .into_iter()
        .find(|path| std::path::Path::new(path).exists())
        .unwrap();
    let done = std::process::Command::new(tool).args(["link", "set", "eth0", word]).status();
    assert!(done.unwrap().success());
}

#[test]
fn a_port_that_stays_down_breaks_its_connections_and_a_later_one_works() {
    if std::env::var_os("LAB_GUEST").is_none() {
        let _ =
            writeln!(std::io::stderr(), "skipped: only a guest of the lab has a port to take down");
        return;
    }
    let options = QueuePairOptions {
        transport_timeout: Duration::from_secs(1),
        ..QueuePairOptions::default()
    };
    let Some((mut a, b, _turn)) = linked(options) else { return };
    let target = b.region(64);
    a.pair.post_send(&[WorkRequest::new(1, write(&target, b"up"))]).unwrap();
    assert!(a.one().is_success());
    carrier(false);
    let begun = Instant::now();
    while a.pair.state() != QueuePairState::Error && begun.elapsed() < BOUND {
        a.queue.poll(&mut []).unwrap();
        std::thread::sleep(Duration::from_millis(20));
    }
    let noticed = a.pair.state();
    carrier(true);
    assert_eq!(noticed, QueuePairState::Error, "the port's fall was noticed");
    drop((a, b, target, _turn));
    std::thread::sleep(Duration::from_secs(1));
    let Some((mut a, b, _turn)) = linked(QueuePairOptions::default()) else {
        panic!("the port came up again")
    };
    let target = b.region(64);
    a.pair.post_send(&[WorkRequest::new(2, write(&target, b"again"))]).unwrap();
    assert!(a.one().is_success());
}

/// A file of the DAX file system the lab's guest has, mapped as a pool's segment is.
#[derive(Debug)]
struct Dax(Mapping);

// SAFETY: the mapping stays while `self` does, is aligned to pages, and no reference to its bytes
// is handed out.
unsafe impl MemoryObject for Dax {
    fn base(&self) -> std::ptr::NonNull<u8> {
        self.0.base()
    }

    fn length_bytes(&self) -> usize {
        self.0.length_bytes()
    }

    fn persistence(&self) -> Persistence {
        Persistence::CacheLine
    }
}

/// A region on DAX memory, or the reason why this device has none.
fn on_dax(end: &End) -> Option<Result<MemoryRegion, FabricError>> {
    let Some(folder) = std::env::var_os("LAB_DAX") else {
        let _ = writeln!(std::io::stderr(), "skipped: there is no DAX file system");
        return None;
    };
    let path = std::path::Path::new(&folder).join("region");
    let mut open = std::fs::OpenOptions::new();
    let file = open.read(true).write(true).create(true).truncate(true).open(path).unwrap();
    file.set_len(1 << 20).unwrap();
    let flags = MapFlags::SHARED_VALIDATE | MapFlags::SYNC;
    let mapping = Mapping::shared_with(file.into(), 1 << 20, Protection::ReadWrite, flags).unwrap();
    Some(end.domain.register(Arc::new(Dax(mapping)), Access::all()))
}

#[test]
fn memory_of_a_dax_file_system_is_paged_on_demand_or_refused_with_the_reason() {
    let Some((mut a, b, _turn)) = linked(QueuePairOptions::default()) else { return };
    let Some(registered) = on_dax(&b) else { return };
    let name = VerbsConfig::default().device;
    let devices = beeline_fabric_verbs::discover::devices().unwrap();
    let device = devices.iter().find(|found| name.as_ref().is_none_or(|name| *name == found.name));
    let on_demand = device.unwrap().on_demand_paging;
    let target = match registered {
        Ok(target) => target,
        Err(error) => {
            let text = error.to_string();
            let named = text.contains("FOLL_LONGTERM") && text.contains("on-demand paging");
            assert!(!on_demand && named, "{text}");
            return;
        }
    };
    assert!(on_demand, "without on-demand paging the kernel refuses");
    a.pair.post_send(&[WorkRequest::new(1, write(&target, b"placed on demand"))]).unwrap();
    assert!(a.one().is_success());
    let flush = Operation::Flush {
        remote: target.remote_address(0),
        length: 16,
        kind: FlushKind::Persistent,
    };
    a.pair.post_send(&[WorkRequest::new(2, flush)]).unwrap();
    assert_eq!(a.one().status, Status::Success);
    let mut seen = [0; 16];
    copy_out(target.memory().as_ref(), 0, &mut seen);
    assert_eq!(&seen, b"placed on demand");
    let result = a.region(4096);
    let word = ScatterGatherEntry { region: &result, offset: 0, length: 8 };
    let add = Operation::FetchAndAdd { local: word, remote: target.remote_address(64), addend: 5 };
    a.pair.post_send(&[WorkRequest::new(3, add)]).unwrap();
    assert!(a.one().is_success());
    let whole = ScatterGatherEntry { region: &result, offset: 0, length: 4096 };
    let read = Operation::Read { local: whole, remote: target.remote_address(4096 * 7) };
    a.pair.post_send(&[WorkRequest::new(4, read)]).unwrap();
    assert!(a.one().is_success());
    // Revoked like any other.
    target.revoke().unwrap();
    a.pair.post_send(&[WorkRequest::new(5, write(&target, b"late"))]).unwrap();
    assert_eq!(a.one().status, Status::RemoteAccessError);
}

/// Sends an immediate from `far` and waits until the peer's device has it.
fn notify(far: &mut End, immediate: u32) {
    let nothing = LocalData::Inline(b"");
    let notice = Operation::Send { local: nothing, immediate: Some(immediate) };
    far.pair.post_send(&[WorkRequest::new(9, notice)]).unwrap();
    assert_eq!(far.one().status, Status::Success);
}

#[test]
fn a_queue_pair_used_again_reports_to_the_queues_it_is_made_with() {
    let Some((near, _turn)) = device() else { return };
    let far = VerbsDevice::open(VerbsConfig::default()).unwrap();
    let options = QueuePairOptions::default();
    let domain = near.allocate_protection_domain().unwrap();
    let sends = near.create_completion_queue(64).unwrap();
    for round in 0..6 {
        // A queue of its own each time, likely where the last one lay in memory.
        let receives = near.create_completion_queue(64).unwrap();
        let mut pair = domain.create_queue_pair(&sends, &receives, None, options).unwrap();
        let mut peer = End::new(&far, options);
        pair.post_receive(&[ReceiveRequest { wr_id: round, buffer: None }]).unwrap();
        join(pair.as_mut(), peer.pair.as_mut());
        notify(&mut peer, 7);
        let mut one = [WorkCompletion::EMPTY];
        assert_eq!(receives.wait(&mut one, BOUND).unwrap(), 1, "round {round}");
        assert_eq!((one[0].wr_id, one[0].immediate), (round, Some(7)));
    }
}

#[test]
fn what_arrived_for_a_queue_pair_that_is_gone_does_not_reach_the_next_owner() {
    let Some((near, _turn)) = device() else { return };
    let far = VerbsDevice::open(VerbsConfig::default()).unwrap();
    let options = QueuePairOptions::default();
    let domain = near.allocate_protection_domain().unwrap();
    let queue = near.create_completion_queue(64).unwrap();
    let shared = domain.create_shared_receive_queue(16).unwrap();
    let receives: Vec<_> = (0..16).map(|wr_id| ReceiveRequest { wr_id, buffer: None }).collect();
    shared.post_receive(&receives).unwrap();
    for round in 0..4 {
        let mut pair = domain.create_queue_pair(&queue, &queue, Some(&shared), options).unwrap();
        let mut peer = End::new(&far, options);
        join(pair.as_mut(), peer.pair.as_mut());
        notify(&mut peer, 2 * round);
        let mut one = [WorkCompletion::EMPTY];
        assert_eq!(queue.wait(&mut one, BOUND).unwrap(), 1);
        assert_eq!((one[0].immediate, one[0].qp_num), (Some(2 * round), pair.qp_num()));
        // Left where it is when the queue pair goes.
        notify(&mut peer, 2 * round + 1);
    }
}

/// A tool of the guest's.
fn tool(name: &str) -> std::process::Command {
    let places = ["/usr/sbin", "/sbin", "/usr/bin", "/bin"];
    let found = places.iter().map(|place| std::path::Path::new(place).join(name));
    std::process::Command::new(found.into_iter().find(|path| path.exists()).unwrap())
}

/// Everything that comes out of a queue until `count` completions are there.
fn all_of(queue: &Rc<dyn CompletionQueue>, count: usize) -> Vec<WorkCompletion> {
    let begun = Instant::now();
    let mut found = Vec::new();
    while found.len() < count && begun.elapsed() < BOUND {
        let mut some = [WorkCompletion::EMPTY; 8];
        let taken = queue.wait(&mut some, Duration::from_millis(100)).unwrap();
        found.extend_from_slice(&some[..taken]);
    }
    found
}

fn put_back() -> bool {
    let words = ["link", "add", "rxe0", "type", "rxe", "netdev", "eth0"];
    tool("rdma").args(words).status().is_ok_and(|status| status.success())
}

/// Puts the device back where a test ends early: others need it.
struct Back;

impl Drop for Back {
    fn drop(&mut self) {
        // Until the kernel has let go of the one that is being removed.
        let begun = Instant::now();
        while std::thread::panicking() && !put_back() && begun.elapsed() < BOUND {
            std::thread::sleep(Duration::from_millis(500));
        }
    }
}

#[test]
fn a_device_that_is_removed_ends_its_work_and_one_that_is_back_works() {
    if std::env::var_os("LAB_GUEST").is_none() {
        let _ = writeln!(std::io::stderr(), "skipped: only a guest of the lab loses its device");
        return;
    }
    let _back = Back;
    let Some((near, turn)) = device() else { return };
    let far = VerbsDevice::open(VerbsConfig::default()).unwrap();
    let options = QueuePairOptions {
        // Long: what ends the work is the device's going, not the peer's silence.
        receiver_not_ready_timeout: Duration::from_secs(60),
        transport_timeout: Duration::from_secs(60),
        ..QueuePairOptions::default()
    };
    // Completions of sends and of receives in queues of their own.
    let domain = near.allocate_protection_domain().unwrap();
    let sends = near.create_completion_queue(64).unwrap();
    let receives = near.create_completion_queue(64).unwrap();
    let mut pair = domain.create_queue_pair(&sends, &receives, None, options).unwrap();
    let mut peer = End::new(&far, options);
    for wr_id in 10..13 {
        pair.post_receive(&[ReceiveRequest { wr_id, buffer: None }]).unwrap();
    }
    join(pair.as_mut(), peer.pair.as_mut());
    let target = peer.region(64);
    pair.post_send(&[WorkRequest::new(1, write(&target, b"before"))]).unwrap();
    assert_eq!(all_of(&sends, 1)[0].status, Status::Success);
    // Two that wait for receives that never come.
    for wr_id in [2, 3] {
        let send = Operation::Send { local: LocalData::Inline(b"nobody"), immediate: None };
        pair.post_send(&[WorkRequest::new(wr_id, send)]).unwrap();
    }
    assert!(!near.is_lost() && !far.is_lost());
    // Where the driver cannot cut its users off, this returns when all have closed the device.
    let mut removal = tool("rdma").args(["link", "delete", "rxe0"]).spawn().unwrap();
    let sent = all_of(&sends, 2);
    let received = all_of(&receives, 3);
    let numbers = |done: &[WorkCompletion]| done.iter().map(|one| one.wr_id).collect::<Vec<_>>();
    assert_eq!((numbers(&sent), numbers(&received)), (vec![2, 3], vec![10, 11, 12]));
    assert_eq!((sent[0].status, sent[1].status), (Status::TransportError, Status::Flushed));
    assert!(received.iter().all(|done| done.status == Status::Flushed), "{received:?}");
    // Each device hears of it from its own thread.
    let lost = || near.is_lost() && far.is_lost();
    let begun = Instant::now();
    while !lost() && begun.elapsed() < BOUND {
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(lost());
    assert_eq!(pair.state(), QueuePairState::Error);
    let again = pair.post_send(&[WorkRequest::new(4, write(&target, b"late"))]);
    assert!(again.is_err(), "nothing is posted to a device that is gone");
    assert!(pair.revoke().is_ok() && target.revoke().is_ok(), "nobody reaches anything any more");
    let begun = Instant::now();
    drop((pair, peer, target, sends, receives, domain, near, far));
    while removal.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < BOUND, "something still holds the device");
        std::thread::sleep(Duration::from_millis(50));
    }
    let none = VerbsDevice::open(VerbsConfig::default());
    assert!(matches!(none, Err(VerbsError::Missing(_))), "{none:?}");
    assert!(put_back());
    std::thread::sleep(Duration::from_secs(1));
    drop(turn);
    let Some((mut a, b, _turn)) = linked(QueuePairOptions::default()) else {
        panic!("the device is back")
    };
    let target = b.region(64);
    a.pair.post_send(&[WorkRequest::new(5, write(&target, b"again"))]).unwrap();
    assert!(a.one().is_success());
}

/// Memory in huge pages.
#[derive(Debug)]
struct Huge(Mapping);

// SAFETY: as for `Dax`.
unsafe impl MemoryObject for Huge {
    fn base(&self) -> std::ptr::NonNull<u8> {
        self.0.base()
    }

    fn length_bytes(&self) -> usize {
        self.0.length_bytes()
    }
}

#[test]
fn memory_in_huge_pages_is_registered_and_reached() {
    const BYTES: usize = 4 << 20;
    if std::env::var_os("LAB_GUEST").is_none() {
        let _ = writeln!(std::io::stderr(), "skipped: only a guest's huge pages are set aside");
        return;
    }
    let Some((mut a, b, _turn)) = linked(QueuePairOptions::default()) else { return };
    std::fs::write("/proc/sys/vm/nr_hugepages", "4").unwrap();
    let flags = rustix::fs::MemfdFlags::HUGETLB | rustix::fs::MemfdFlags::HUGE_2MB;
    let file = rustix::fs::memfd_create("huge", flags).unwrap();
    rustix::fs::ftruncate(&file, BYTES as u64).unwrap();
    let mapping = Mapping::shared(file, BYTES, Protection::ReadWrite).unwrap();
    let target = b.domain.register(Arc::new(Huge(mapping)), Access::all()).unwrap();
    // Across the border of two pages.
    let remote = target.remote_address((2 << 20) - 8);
    let over = Operation::Write { local: LocalData::Inline(b"over the page's end"), remote };
    a.pair.post_send(&[WorkRequest::new(1, over)]).unwrap();
    assert!(a.one().is_success());
    let result = a.region(64);
    let local = ScatterGatherEntry { region: &result, offset: 0, length: 19 };
    a.pair.post_send(&[WorkRequest::new(2, Operation::Read { local, remote })]).unwrap();
    assert!(a.one().is_success());
    let mut seen = [0; 19];
    copy_out(result.memory().as_ref(), 0, &mut seen);
    assert_eq!(&seen, b"over the page's end");
}

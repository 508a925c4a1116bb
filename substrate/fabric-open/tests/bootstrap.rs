//! Negotiation between a served shard and clients, good and bad.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use beeline_fabric::{
    Access, CompletionQueue, Device, DeviceAttributes, FabricError, LocalData, Operation,
    ProtectionDomain, QueuePairOptions, RemoteAddress, RemoteKey, Role, WorkCompletion,
    WorkRequest,
};
use beeline_fabric_open::{
    Bootstrap, BootstrapConfig, Dialler, Incoming, OpenError, Reason, Service, open, open_window,
};

use beeline_os::memory::MemoryObject;

const BOUND: Duration = Duration::from_secs(20);

/// A server whose one shard thread accepts everybody and tells them its region's key.
struct Served {
    bootstrap: Bootstrap,
    _stop: Sender<()>,
    breaks_shm: Arc<AtomicBool>,
    shard: Option<std::thread::JoinHandle<()>>,
}

fn shard(incoming: &Receiver<Incoming>, stop: &Receiver<()>, breaks_shm: &AtomicBool) {
    let mut pairs = Vec::new();
    while !matches!(stop.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected)) {
        if let Ok(incoming) = incoming.recv_timeout(Duration::from_millis(5)) {
            if incoming.provider == "shm" && breaks_shm.load(Ordering::Relaxed) {
                incoming.reply.refuse("no shm today");
                continue;
            }
            if incoming.payload == b"unwelcome" {
                incoming.reply.refuse("go away");
                continue;
            }
            let domain = incoming.device.allocate_protection_domain().unwrap();
            let queue = incoming.device.create_completion_queue(64).unwrap();
            let memory = incoming.device.allocate_memory(4096).unwrap();
            let region = domain.register(memory, Access::all()).unwrap();
            let options = QueuePairOptions::default();
            let mut pair = domain.create_queue_pair(&queue, &queue, None, options).unwrap();
            if let Err(error) = pair.connect(&incoming.peer, Role::Passive) {
                incoming.reply.refuse(error.to_string());
                continue;
            }
            let key = region.remote_key().0.to_le_bytes().to_vec();
            incoming.reply.accept(&pair.connect_info(), key);
            pairs.push((pair, queue, region));
        }
        for (_, queue, _) in &pairs {
            let _ = queue.poll(&mut [WorkCompletion::EMPTY; 4]);
        }
    }
}

fn serve(config: BootstrapConfig, providers: &[&str]) -> Served {
    let devices =
        providers.iter().map(|provider| open(&format!("{provider}://")).unwrap()).collect();
    serve_devices(config, devices)
}

fn serve_devices(mut config: BootstrapConfig, devices: Vec<Arc<dyn Device>>) -> Served {
    config.tcp = Some(([127, 0, 0, 1], 0).into());
    let (send, receive) = channel();
    let (stop, stopped) = channel();
    let breaks_shm = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&breaks_shm);
    let shard = std::thread::spawn(move || shard(&receive, &stopped, &flag));
    let service = Service {
        name: "kv".to_owned(),
        shards: 2,
        payload: b"welcome".to_vec(),
        incoming: Box::new(move |incoming| send.send(incoming).unwrap()),
    };
    let bootstrap = Bootstrap::listen(config, devices, vec![service]).unwrap();
    Served { bootstrap, _stop: stop, breaks_shm, shard: Some(shard) }
}

impl Served {
    fn url(&self, scheme: &str) -> String {
        format!("{scheme}://{}", self.bootstrap.address().unwrap())
    }

    fn finish(mut self) {
        let shard = self.shard.take().unwrap();
        drop(self);
        shard.join().unwrap();
    }
}

/// Connects, writes and reads back; returns provider and reason.
fn visit(url: &str) -> (String, Reason) {
    let mut dialler = Dialler::new("kv", url, BOUND).unwrap();
    let mut there = dialler.establish(1, b"hello", 64, QueuePairOptions::default()).unwrap();
    assert_eq!(there.dialled.payload, b"welcome");
    assert_eq!(there.dialled.shards, 2);
    let key = RemoteKey(u64::from_le_bytes(there.payload.as_slice().try_into().unwrap()));
    let remote = RemoteAddress { key, offset: 8 };
    let write = Operation::Write { local: LocalData::Inline(b"8 bytes."), remote };
    there.pair.post_send(&[WorkRequest::new(1, write)]).unwrap();
    let mut done = [WorkCompletion::EMPTY];
    assert_eq!(there.queue.wait(&mut done, BOUND).unwrap(), 1);
    assert!(done[0].is_success(), "{:?}", done[0]);
    (there.dialled.provider, there.dialled.reason)
}

#[test]
fn tcp_can_be_insisted_on() {
    let served = serve(BootstrapConfig::default(), &["tcp"]);
    assert_eq!(visit(&served.url("tcp")), ("tcp".to_owned(), Reason::Forced));
    served.finish();
}

#[test]
fn one_host_shares_memory_and_says_so() {
    let served = serve(BootstrapConfig::default(), &["shm", "tcp"]);
    let (provider, reason) = visit(&served.url("auto"));
    assert_eq!((provider.as_str(), &reason), ("shm", &Reason::SameHost));
    assert_eq!(reason.to_string(), "both ends run on this host");
    assert_eq!(visit(&served.url("shm")), ("shm".to_owned(), Reason::Forced));
    assert_eq!(visit(&served.url("tcp")), ("tcp".to_owned(), Reason::Forced));
    served.finish();
}

#[test]
fn a_failure_of_shared_memory_falls_back_to_tcp_and_says_why() {
    let served = serve(BootstrapConfig::default(), &["shm", "tcp"]);
    served.breaks_shm.store(true, Ordering::Relaxed);
    let (provider, reason) = visit(&served.url("auto"));
    assert_eq!(provider, "tcp");
    assert!(matches!(&reason, Reason::FellBack(why) if why.contains("no shm today")), "{reason}");
    // A connection that broke later is avoided the same way, until forgiven.
    served.breaks_shm.store(false, Ordering::Relaxed);
    let mut dialler = Dialler::new("kv", &served.url("auto"), BOUND).unwrap();
    dialler.avoid("shm", "it broke");
    let dialled = dialler.dial().unwrap();
    assert_eq!(
        (dialled.provider.as_str(), &dialled.reason),
        ("tcp", &Reason::FellBack("it broke".to_owned()))
    );
    dialler.forgive();
    assert_eq!(dialler.dial().unwrap().provider, "shm");
    served.finish();
}

/// True where there is an RDMA device; says so where there is none.
fn has_rdma() -> bool {
    match open("verbs://") {
        Ok(_) => true,
        Err(reason) => {
            let _ = writeln!(std::io::stderr(), "skipped: {reason}");
            false
        }
    }
}

#[test]
fn rdma_comes_after_shared_memory_and_before_tcp_and_back_again() {
    if !has_rdma() {
        return;
    }
    let served = serve(BootstrapConfig::default(), &["shm", "verbs", "tcp"]);
    assert_eq!(visit(&served.url("auto")), ("shm".to_owned(), Reason::SameHost));
    assert_eq!(visit(&served.url("verbs")), ("verbs".to_owned(), Reason::Forced));
    let mut dialler = Dialler::new("kv", &served.url("auto"), BOUND).unwrap();
    let chosen = |dialler: &mut Dialler| {
        let dialled = dialler.dial().unwrap();
        (dialled.provider, dialled.reason)
    };
    assert_eq!(chosen(&mut dialler), ("shm".to_owned(), Reason::SameHost));
    dialler.avoid("shm", "it broke");
    assert_eq!(chosen(&mut dialler), ("verbs".to_owned(), Reason::FellBack("it broke".to_owned())));
    dialler.avoid("verbs", "the port went down");
    assert_eq!(chosen(&mut dialler).0, "tcp");
    dialler.forgive();
    assert_eq!(chosen(&mut dialler), ("shm".to_owned(), Reason::SameHost));
    served.finish();
}

#[test]
fn an_emulated_window_is_taken_by_those_who_insist() {
    let served = serve(BootstrapConfig::default(), &["ntb", "tcp"]);
    assert_eq!(visit(&served.url("ntb")), ("ntb".to_owned(), Reason::Forced));
    assert_eq!(visit(&served.url("auto")).0, "tcp");
    let url = served.url("ntb") + "?window=/dev/null";
    let error = Dialler::new("kv", &url, BOUND).unwrap().dial().unwrap_err();
    assert!(error.to_string().contains("emulates"), "{error}");
    served.finish();
}

#[test]
fn a_window_is_found_by_who_shows_in_it_and_a_wrong_one_falls_back() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        let path = folder.path().join(name);
        std::fs::File::create(&path).unwrap().set_len(10 << 20).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let (ours, other) = (file("ours"), file("other"));
    let window = open_window(&format!("ntb://{ours}")).unwrap();
    let config = BootstrapConfig { window: window.end, ..BootstrapConfig::default() };
    let devices = vec![open("shm://").unwrap(), window.device, open("tcp://").unwrap()];
    let served = serve_devices(config, devices);
    let named = |file: &str| format!("{}?window={file}", served.url("ntb"));
    assert_eq!(visit(&named(&ours)), ("ntb".to_owned(), Reason::Forced));
    assert_eq!(visit(&named(&ours)), ("ntb".to_owned(), Reason::Forced));
    let error = Dialler::new("kv", &named(&other), BOUND).unwrap().dial().unwrap_err();
    assert!(error.to_string().contains("not seen"), "{error}");
    // Without shared memory the window comes next, and a wrong one gives way with a reason.
    let chosen = |file: &str| {
        let url = format!("{}?window={file}", served.url("auto"));
        let mut dialler = Dialler::new("kv", &url, BOUND).unwrap();
        dialler.avoid("shm", "it broke");
        let there = dialler.establish(0, b"", 64, QueuePairOptions::default()).unwrap();
        (there.dialled.provider, there.dialled.reason.to_string())
    };
    assert_eq!(chosen(&ours), ("ntb".to_owned(), "fell back, because it broke".to_owned()));
    assert_ne!(chosen(&other).0, "ntb");
    served.finish();
}

#[test]
fn a_server_with_rdma_and_no_shared_memory_is_reached_by_rdma() {
    if !has_rdma() {
        return;
    }
    let served = serve(BootstrapConfig::default(), &["verbs", "tcp"]);
    let (provider, reason) = visit(&served.url("auto"));
    assert_eq!((provider.as_str(), &reason), ("verbs", &Reason::CommonRdma));
    assert_eq!(reason.to_string(), "both ends have an RDMA device");
    let mut dialler = Dialler::new("kv", &served.url("auto"), BOUND).unwrap();
    dialler.avoid("verbs", "the port went down");
    let dialled = dialler.dial().unwrap();
    assert_eq!(
        (dialled.provider.as_str(), &dialled.reason),
        ("tcp", &Reason::FellBack("the port went down".to_owned()))
    );
    dialler.forgive();
    assert_eq!(dialler.dial().unwrap().provider, "verbs");
    served.finish();
}

/// A device that can be taken away; counts what is made of it.
#[derive(Debug)]
struct Fleeting {
    inner: Arc<dyn Device>,
    lost: Arc<AtomicBool>,
    domains: Arc<AtomicU32>,
}

impl Device for Fleeting {
    fn attributes(&self) -> &DeviceAttributes {
        self.inner.attributes()
    }

    fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        self.inner.allocate_memory(length_bytes)
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        self.domains.fetch_add(1, Ordering::Relaxed);
        self.inner.allocate_protection_domain()
    }

    fn create_completion_queue(&self, depth: u32) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        self.inner.create_completion_queue(depth)
    }
}

#[test]
fn a_device_that_is_lost_is_let_go_and_one_that_is_back_is_used() {
    let (lost, domains) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
    let inner = open("tcp://").unwrap();
    let held = Arc::downgrade(&inner);
    let (flag, count) = (Arc::clone(&lost), Arc::clone(&domains));
    let device = Arc::new(Fleeting { inner, lost: flag, domains: count });
    let config = BootstrapConfig { renewed: Some("tcp://".into()), ..BootstrapConfig::default() };
    let served = serve_devices(config, vec![device]);
    assert_eq!(visit(&served.url("tcp")).0, "tcp");
    assert_eq!(domains.load(Ordering::Relaxed), 1, "the device is used while it is there");
    lost.store(true, Ordering::Relaxed);
    assert_eq!(visit(&served.url("tcp")).0, "tcp");
    assert_eq!(domains.load(Ordering::Relaxed), 1, "another was opened in its place");
    served.finish();
    assert!(held.upgrade().is_none(), "nothing keeps it");
}

#[test]
fn a_device_that_is_lost_and_not_back_is_not_offered() {
    let lost = Arc::new(AtomicBool::new(true));
    let inner = open("shm://").unwrap();
    let fleeting = Fleeting { inner, lost, domains: Arc::default() };
    // No such provider: the device never comes back.
    let config =
        BootstrapConfig { renewed: Some("nowhere://".into()), ..BootstrapConfig::default() };
    let served = serve_devices(config, vec![Arc::new(fleeting), open("tcp://").unwrap()]);
    assert_eq!(visit(&served.url("auto")).0, "tcp");
    served.finish();
}

#[test]
fn a_server_without_shared_memory_is_reached_by_tcp() {
    let served = serve(BootstrapConfig::default(), &["tcp"]);
    let (provider, reason) = visit(&served.url("auto"));
    assert_eq!(provider, "tcp");
    assert!(matches!(reason, Reason::ServerLacksSharedMemory | Reason::FellBack(_)), "{reason}");
    served.finish();
}

#[test]
fn a_unix_socket_carries_the_exchange_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("beeline.sock");
    let config = BootstrapConfig { unix: Some(path.clone()), ..BootstrapConfig::default() };
    let served = serve(config.clone(), &["tcp"]);
    assert_eq!(visit(&format!("tcp://{}", path.display())).0, "tcp");
    let other = BootstrapConfig { tcp: None, ..config };
    assert!(matches!(
        Bootstrap::listen(other, Vec::new(), Vec::new()),
        Err(OpenError::Listen { .. })
    ));
    served.finish();
    assert!(!path.exists());
}

#[test]
fn refusals_carry_the_servers_words() {
    let served = serve(BootstrapConfig::default(), &["tcp"]);
    let url = served.url("tcp");
    let mut dialler = Dialler::new("nonsense", &url, BOUND).unwrap();
    let error = dialler.dial().unwrap_err();
    assert!(error.to_string().contains("no service"), "{error}");
    let mut dialler = Dialler::new("kv", &url, BOUND).unwrap();
    let options = QueuePairOptions::default();
    let error = dialler.establish(0, b"unwelcome", 64, options).unwrap_err();
    assert!(error.to_string().contains("go away"), "{error}");
    let error = dialler.establish(2, b"", 64, options).unwrap_err();
    assert!(error.to_string().contains("shard 2"), "{error}");
    served.finish();
}

#[test]
fn a_dead_server_is_reported_in_time() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("tcp://{}", listener.local_addr().unwrap());
    let mut dialler = Dialler::new("kv", &url, Duration::from_millis(200)).unwrap();
    assert!(matches!(dialler.dial(), Err(OpenError::Unreachable { .. })));
    drop(listener);
    assert!(matches!(dialler.dial(), Err(OpenError::Unreachable { .. })));
}

/// True when the server closes the connection before the bound.
fn is_closed(stream: &mut TcpStream) -> bool {
    stream.set_read_timeout(Some(BOUND)).unwrap();
    !matches!(stream.read(&mut [0; 16]), Ok(1..))
}

#[test]
fn bad_callers_harm_nobody() {
    let config = BootstrapConfig {
        // Shorter than the patience of the callers here, and long for an honest one that waits for a
        // processor.
        caller_timeout: Duration::from_secs(3),
        max_exchanges: 8,
        ..BootstrapConfig::default()
    };
    let served = serve(config, &["tcp"]);
    let address = served.bootstrap.address().unwrap();
    // Silent ones, more than the server serves at a time.
    let mut silent: Vec<_> = (0..20).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert_eq!(visit(&served.url("tcp")).0, "tcp");
    for bytes in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"BLBS\x01\0\0\0\xff\xff\xff\xff",
        b"BLBS\x02\0\0\0\x02\0\0\0{}",
        b"BLBS\x01\0\0\0\x02\0\0\0{}",
        b"BLBS\x01\0\0\0\x05\0\0\0[[[[[",
    ] {
        let mut caller = TcpStream::connect(address).unwrap();
        caller.write_all(bytes).unwrap();
        assert!(is_closed(&mut caller));
    }
    // One that drips.
    let mut slow = TcpStream::connect(address).unwrap();
    let begun = Instant::now();
    for byte in b"BLBS\x01\0\0\0\x40\0\0\0".iter().cycle() {
        if slow.write_all(&[*byte]).is_err() || begun.elapsed() > BOUND {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(begun.elapsed() < BOUND, "a slow caller is cut off");
    assert_eq!(visit(&served.url("tcp")).0, "tcp");
    assert!(silent.iter_mut().all(is_closed));
    served.finish();
}

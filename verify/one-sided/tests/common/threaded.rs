//! Shards on threads of their own, as a node runs them.
#![allow(
    dead_code,
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "tests fail by panicking; each uses a part of the shared harness"
)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use beeline_fabric::{ConnectInfo, Device};
use beeline_kv::{Shard, Store, StoreOptions};
use beeline_kv_client::{Client, ClientError, ClientOptions, ConnectError, Connector};
use beeline_kv_server::{ServerOptions, ShardServer};
use beeline_os::poller::{Interest, Poller, Waker};
use beeline_pmem::{Pool, PoolOptions};

struct Join {
    info: ConnectInfo,
    hello: Vec<u8>,
    reply: Sender<(Option<ConnectInfo>, Vec<u8>)>,
}

/// How one shard's thread is reached.
type Door = (Mutex<Sender<Join>>, Arc<Waker>);

/// What connectors share with the server's threads.
#[derive(Clone)]
pub struct Doors(Arc<Vec<Door>>);

pub struct Server {
    pub store: Arc<Store>,
    pub doors: Doors,
    /// Turns of all loops: an idle server takes few.
    pub turns: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

/// How long a loop polls before it sleeps.
const SPIN: Duration = Duration::from_micros(200);

fn serve(
    device: Arc<dyn Device>,
    store: &Store,
    shard: &Arc<Mutex<Shard>>,
    joins: &Receiver<Join>,
    waker: &Arc<Waker>,
    stop: &AtomicBool,
    turns: &AtomicU64,
) {
    let index = shard.lock().unwrap().index() as u16;
    let options = ServerOptions { baselines: true, ..ServerOptions::default() };
    let mut server = ShardServer::new(device, store, index, options).unwrap();
    let mut poller = Poller::new(2).unwrap();
    poller.add(server.event_descriptor(), 0, Interest::READ).unwrap();
    poller.add(&**waker, 1, Interest::READ).unwrap();
    let (mut rounds, mut idle_since) = (0_u64, Instant::now());
    while !stop.load(Ordering::Relaxed) {
        turns.fetch_add(1, Ordering::Relaxed);
        let handled = {
            let mut shard = shard.lock().unwrap();
            let handled = server.poll(&mut shard).unwrap();
            if handled > 0 {
                shard.commit().unwrap();
            }
            handled
        };
        if handled > 0 || server.has_pending() {
            server.complete();
            rounds = 0;
            continue;
        }
        while let Ok(join) = joins.try_recv() {
            let admission = server.accept(store, &join.info, &join.hello);
            let _ = join.reply.send((admission.info, admission.welcome.to_vec()));
            rounds = 0;
        }
        if rounds == 0 {
            idle_since = Instant::now();
        }
        rounds += 1;
        std::hint::spin_loop();
        if !rounds.is_multiple_of(64) || idle_since.elapsed() < SPIN {
            continue;
        }
        server.arm().unwrap();
        let mut shard = shard.lock().unwrap();
        if server.poll(&mut shard).unwrap() > 0 {
            shard.commit().unwrap();
            server.complete();
            continue;
        }
        drop(shard);
        poller.wait(Some(Duration::from_secs(1))).unwrap();
        waker.clear();
        server.acknowledge().unwrap();
        rounds = 0;
    }
    let mut shard = shard.lock().unwrap();
    server.shut_down(&mut shard);
}

impl Server {
    pub fn start(device: impl Fn() -> Arc<dyn Device>, shards: usize, pool: &PoolOptions) -> Self {
        let pool = Pool::dram(pool).unwrap();
        let options = StoreOptions { shards, ..StoreOptions::default() };
        let (store, shards, _) = Store::open(pool, options).unwrap();
        Self::start_on(device, store, shards)
    }

    pub fn start_on(
        device: impl Fn() -> Arc<dyn Device>,
        store: Arc<Store>,
        shards: Vec<Arc<Mutex<Shard>>>,
    ) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let turns = Arc::new(AtomicU64::new(0));
        let (mut doors, mut threads) = (Vec::new(), Vec::new());
        for shard in shards {
            let (sender, joins) = channel();
            let waker = Arc::new(Waker::new().unwrap());
            doors.push((Mutex::new(sender), Arc::clone(&waker)));
            let (device, store) = (device(), Arc::clone(&store));
            let (stop, turns) = (Arc::clone(&stop), Arc::clone(&turns));
            threads.push(std::thread::spawn(move || {
                serve(device, &store, &shard, &joins, &waker, &stop, &turns);
            }));
        }
        Self { store, doors: Doors(Arc::new(doors)), turns, stop, threads }
    }

    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for (_, waker) in self.doors.0.iter() {
            waker.wake();
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end();
    }
}

/// Reaches the threads of a [`Server`]; with a switch that makes it fail.
pub struct Channels {
    doors: Doors,
    open: Box<dyn Fn() -> Arc<dyn Device>>,
}

impl std::fmt::Debug for Channels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Channels")
    }
}

impl Connector for Channels {
    fn device(&mut self) -> Result<Arc<dyn Device>, ConnectError> {
        Ok((self.open)())
    }

    fn exchange(
        &mut self,
        shard: u16,
        info: &ConnectInfo,
        hello: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), ConnectError> {
        let failed = |what: &str| ConnectError::Bootstrap {
            target: "the test's server".to_owned(),
            source: what.to_owned().into(),
        };
        let (reply, answer) = channel();
        let join = Join { info: info.clone(), hello: hello.to_vec(), reply };
        let (door, waker) = &self.doors.0[usize::from(shard)];
        let sent = door.lock().unwrap().send(join);
        waker.wake();
        sent.map_err(|_| failed("it has ended"))?;
        let (info, welcome) =
            answer.recv_timeout(Duration::from_secs(5)).map_err(|_| failed("no answer"))?;
        Ok((info.unwrap_or(ConnectInfo(Vec::new())), welcome))
    }
}

pub fn connect(
    doors: &Doors,
    open: impl Fn() -> Arc<dyn Device> + 'static,
    options: ClientOptions,
) -> Result<Client, ClientError> {
    Client::connect(Box::new(Channels { doors: doors.clone(), open: Box::new(open) }), options)
}

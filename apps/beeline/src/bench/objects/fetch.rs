//! Transfers between two nodes of this process, by protocol: one node has the objects, and each
//! protocol has a node of its own that fetches.

use std::net::TcpListener;
use std::path::Path;
use std::sync::{Arc, OnceLock, mpsc};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use beeline_fabric::{ConnectInfo, Device};
use beeline_fabric_open::open;
use beeline_objects::cluster::{
    Agreed, ClusterOptions, Dial, Door, Finding, Manager, Move, payload,
};
use beeline_objects::{Client, ObjectId, Store};

use super::local::{memory_for, options};
use super::{Bench, rate, size_name};
use crate::bench::report::{Better, Report, Row, Spread, number};
use crate::bench::turns::{Contender, alternate};

const WAIT: Duration = Duration::from_secs(60);

/// The baseline first, the mixed protocol last.
const PROTOCOLS: [(&str, Move); 5] = [
    ("socket, 4 KiB pieces", Move::Socket { piece_bytes: 4096 }),
    ("socket, 1 MiB pieces", Move::Socket { piece_bytes: 1 << 20 }),
    ("two-sided", Move::Sent),
    ("one-sided", Move::Read),
    ("mixed", Move::Auto),
];

/// What the serving node is reached by: its door, its device and its socket's port.
type Far = Arc<OnceLock<(Door, Arc<dyn Device>, u16)>>;

/// Reaches the serving node without a bootstrap exchange.
struct Direct {
    device: Option<Arc<dyn Device>>,
    far: Far,
}

struct Link {
    device: Arc<dyn Device>,
    door: Door,
    far: Arc<dyn Device>,
    payload: Vec<u8>,
}

impl Dial for Direct {
    fn dial(&self, _address: &str, _avoid: bool) -> Result<Box<dyn Agreed>, String> {
        let device = self.device.clone().ok_or("it dials nobody")?;
        let (door, far, port) = self.far.get().ok_or("nobody serves yet")?;
        let (door, far) = (door.clone(), Arc::clone(far));
        Ok(Box::new(Link { device, door, far, payload: payload(*port) }))
    }
}

impl Agreed for Link {
    fn device(&self) -> Arc<dyn Device> {
        Arc::clone(&self.device)
    }

    fn payload(&self) -> &[u8] {
        &self.payload
    }

    fn exchange(&self, info: &ConnectInfo) -> Result<ConnectInfo, String> {
        let (answer, answered) = mpsc::channel();
        let answer = move |outcome| drop(answer.send(outcome));
        self.door.accept(Arc::clone(&self.far), info.clone(), Box::new(answer));
        answered.recv_timeout(WAIT).map_err(|error| error.to_string())?
    }
}

/// One node.
struct Node {
    client: Client,
    manager: Manager,
    _store: Store,
}

impl Node {
    fn start(
        folder: &Path,
        memory: u64,
        moves: Move,
        dial: Direct,
        peers: Vec<String>,
    ) -> anyhow::Result<(Self, u16)> {
        std::fs::create_dir_all(folder)?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let port = listener.local_addr()?.port();
        let store = options(folder, memory);
        let socket = store.socket.clone();
        let cluster = ClusterOptions {
            store: socket.clone(),
            finding: Finding::Peers(peers),
            advertised: "127.0.0.1:1".to_owned(),
            moves,
            patience: WAIT,
            fetchers: 1,
        };
        let mut manager = None;
        let store = Store::start(store, |handle| {
            let started = Manager::start(cluster, Box::new(dial), handle.clone(), listener);
            match started {
                Ok((started, calls)) => {
                    manager = Some(Ok(started));
                    calls
                }
                Err(error) => {
                    manager = Some(Err(error));
                    Box::new(beeline_objects::Alone(handle))
                }
            }
        })?;
        let manager = manager.context("the store starts its manager")??;
        let client = Client::connect(&socket)?;
        Ok((Self { client, manager, _store: store }, port))
    }

    /// Fetches the object, and forgets it again.
    fn fetch(&self, id: ObjectId) -> anyhow::Result<Duration> {
        let start = Instant::now();
        for outcome in self.client.fetch(&[id], WAIT)? {
            outcome?;
        }
        let took = start.elapsed();
        self.client.delete(id)?;
        Ok(took)
    }
}

/// Measures, and tells each row.
pub fn measure(bench: &Bench<'_>, report: &mut Report) -> anyhow::Result<()> {
    for provider in &bench.arguments.providers {
        over(bench, provider, report).with_context(|| format!("provider {provider}"))?;
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "sizes far below 2^52")]
fn over(bench: &Bench<'_>, provider: &str, report: &mut Report) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let url = match provider {
        "tcp" => "tcp://127.0.0.1".to_owned(),
        other => format!("{other}://"),
    };
    let memory = memory_for(&bench.sizes);
    let far = Far::default();
    let alone = Direct { device: None, far: Arc::clone(&far) };
    let (serving, port) =
        Node::start(&folder.path().join("serves"), memory, Move::Auto, alone, Vec::new())?;
    let set = far.set((serving.manager.door(), open(&url)?, port));
    assert!(set.is_ok(), "one node serves");
    let mut nodes = Vec::new();
    for (number, (_, moves)) in PROTOCOLS.iter().enumerate() {
        let dial = Direct { device: Some(open(&url)?), far: Arc::clone(&far) };
        let place = folder.path().join(number.to_string());
        let (node, _) = Node::start(&place, memory, *moves, dial, vec!["127.0.0.1:1".to_owned()])?;
        nodes.push(node);
    }
    for size in &bench.sizes {
        let id = ObjectId::random().context("drawing an identifier")?;
        serving.client.put(id, &vec![5; usize::try_from(*size)?], b"", WAIT)?;
        // Connections, registrations and first pages; and what the mixed protocol learns from.
        for (node, (name, _)) in nodes.iter().zip(PROTOCOLS) {
            let rounds = if name == "mixed" { bench.options.size(24, 2) } else { 2 };
            (0..rounds).try_for_each(|_| node.fetch(id).map(drop))?;
        }
        let mut contenders: Vec<_> = nodes
            .iter()
            .zip(PROTOCOLS)
            .map(|(node, (name, _))| {
                Contender::new(name, move || rate(bench.turn, || Ok((1, node.fetch(id)?))))
            })
            .collect();
        let figures = alternate(bench.options.turns(), &mut contenders, bench.output)?;
        drop(contenders);
        serving.client.delete(id)?;
        let case = format!("fetch {} over {provider}", size_name(*size));
        let best =
            figures[..4].iter().map(|figures| Spread::of(figures).median).fold(0.0, f64::max);
        for (index, (name, _)) in PROTOCOLS.iter().enumerate() {
            let row = Row::new(&case, *name, "op/s", Better::Higher, &figures[index]);
            let bytes = row.figure.median * *size as f64 / 1e9;
            let row = row.beside("GB/s", number(bytes));
            let row = match index {
                0 => row,
                _ => row.against(PROTOCOLS[0].0, &figures[index], &figures[0]),
            };
            let row = match *name {
                "mixed" => {
                    let of_best = row.figure.median / best.max(f64::MIN_POSITIVE);
                    nodes[index].manager.publish();
                    let crossing = nodes[index].manager.metrics().objects_crossing_bytes.value();
                    row.beside("of the best", format!("{of_best:.2}"))
                        .beside("crossing", size_name(crossing))
                }
                _ => row,
            };
            report.tell(row, bench.output)?;
        }
    }
    // The fetching node ends before the serving one.
    drop(nodes);
    Ok(())
}

//! One-sided clients of a cluster: any member serves them, what they write is agreed on, what they
//! read is not stale, and what was acknowledged survives the members.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use beeline_kv::wire::Protocol;
use beeline_kv_client::{Answer, Client, ClientError, ClientOptions, Command, PutOptions};
use beeline_verify_clients::to_node::ToNode;
use beeline_verify_clients::{beeline, eventually, note};
use rustix::process::Signal;

use crate::members::{Cluster, PATIENCE};

fn options() -> ClientOptions {
    ClientOptions {
        window: 8,
        timeout: Duration::from_secs(12),
        spin: Duration::ZERO,
        ..ClientOptions::default()
    }
}

fn try_client(cluster: &[String], member: usize) -> Result<Client, ClientError> {
    Client::connect(Box::new(ToNode::new(&cluster[member], Duration::from_secs(5))), options())
}

fn urls(cluster: &Cluster, provider: &str) -> Vec<String> {
    cluster.places.iter().map(|place| format!("{provider}://{}", place.fabric)).collect()
}

#[test]
fn every_member_serves_one_sided_clients_and_redis_clients_see_the_same_keys() {
    let cluster = Cluster::new(0, &["--shards", "2", "--log-slot-size", "8KiB"]);
    cluster.leader();
    for provider in ["shm", "tcp"] {
        let urls = urls(&cluster, provider);
        let mut clients: Vec<_> = (0..3).map(|index| try_client(&urls, index).unwrap()).collect();
        let mut version = 0;
        for round in 0..12 {
            let (writer, reader) = (round % 3, (round + 1) % 3);
            let (key, value) = (format!("{provider}{round}"), format!("value {round}"));
            let client = &mut clients[writer];
            assert_eq!(client.protocol(), Protocol::Replicated);
            let put = PutOptions::default();
            let stored = client.put(0, key.as_bytes(), value.as_bytes(), put).unwrap();
            assert!(stored > version, "versions grow whoever writes");
            version = stored;
            let found = clients[reader].get(0, key.as_bytes()).unwrap().unwrap();
            assert_eq!(found, value.as_bytes());
            assert_eq!(cluster.ask(reader, &["GET", &key]).text(), value);
            assert!(cluster.ask(reader, &["SET", &key, "by redis"]).is_ok());
            assert_eq!(clients[writer].get(0, key.as_bytes()).unwrap().unwrap(), b"by redis");
        }
        // A pipeline takes effect in its order, whichever shards its keys are in.
        let client = &mut clients[1];
        let mut answers = Vec::new();
        for n in 0..4_u8 {
            let key = [b'p', n];
            let value = [b'v', n];
            let put = Command::Put {
                database: 0,
                key: &key,
                value: &value,
                options: PutOptions::default(),
            };
            client.submit(put).unwrap();
            client.submit(Command::Get { database: 0, key: &key }).unwrap();
            client.submit(Command::Delete { database: 0, key: &key }).unwrap();
            client.submit(Command::Get { database: 0, key: &key }).unwrap();
            while client.outstanding() > 0 {
                let mut deliver = |_, answer: Result<Answer<'_>, ClientError>| {
                    answers.push(match answer.unwrap() {
                        Answer::Value { bytes, .. } => bytes.to_vec(),
                        Answer::Stored { .. } => b"stored".to_vec(),
                        _ => b"missing".to_vec(),
                    });
                };
                client.wait(Duration::from_millis(50), &mut deliver).unwrap();
            }
            let expected = [&b"stored"[..], &value, b"stored", b"missing"];
            assert_eq!(answers, expected, "round {n}");
            answers.clear();
        }
        // Scans, deletions, expiry, databases, and the longest value.
        assert!(clients[0].delete(0, format!("{provider}0").as_bytes()).unwrap());
        assert!(!clients[2].delete(0, format!("{provider}0").as_bytes()).unwrap());
        let mut found = 0;
        let mut at = Some((0, 0));
        while let Some(cursor) = at {
            let page = clients[2].scan(0, cursor, 100).unwrap();
            found +=
                page.keys.iter().filter(|(key, _)| key.starts_with(provider.as_bytes())).count();
            at = page.next;
        }
        assert_eq!(found, 11);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
        let within = |ms| PutOptions { expires_at_ms: now + ms, kind: 0 };
        clients[0].put(3, b"later", b"x", within(3_600_000)).unwrap();
        clients[0].put(3, b"brief", b"x", within(700)).unwrap();
        assert_eq!(clients[1].get(3, b"later").unwrap().unwrap(), b"x");
        assert_eq!(clients[1].get(0, b"later").unwrap(), None);
        eventually("a brief value expires", PATIENCE, || {
            clients[2].get(3, b"brief").unwrap().is_none().then_some(())
        });
        assert_eq!(clients[2].get(3, b"later").unwrap().unwrap(), b"x");
        let long = vec![b'l'; 9000];
        let refused = clients[0].put(0, b"long", &long, PutOptions::default()).unwrap_err();
        assert!(refused.to_string().contains("log-slot-size"), "{refused}");
        clients[0].put(0, b"long", &long[..8000], PutOptions::default()).unwrap();
        assert_eq!(clients[1].get(0, b"long").unwrap().unwrap().len(), 8000);
    }
    // The command line.
    let url = format!("auto://{}", cluster.places[1].fabric);
    let put = beeline(&["kv", "put", "--connect", &url, "greeting", "hello"]).output().unwrap();
    assert!(put.status.success(), "{}", String::from_utf8_lossy(&put.stderr));
    let got = beeline(&["kv", "get", "--connect", &url, "greeting"]).output().unwrap();
    assert_eq!(got.stdout, b"hello", "{}", String::from_utf8_lossy(&got.stderr));
    assert_eq!(cluster.ask(0, &["GET", "greeting"]).text(), "hello");
}

/// What is known of one key of a writer: numbers ascend.
#[derive(Default)]
struct Known {
    name: String,
    /// The largest that was acknowledged, or read by anybody.
    seen: AtomicU64,
    /// The largest that was tried.
    tried: AtomicU64,
}

/// A writer's keys, the one in use and how often it was written in all. After a write whose fate is
/// unknown the writer goes on with another key: the write may still take effect, at any time, and a
/// smaller number would then follow a larger.
struct Register {
    name: String,
    current: Mutex<Arc<Known>>,
    written: AtomicU64,
}

impl Register {
    fn new(name: String) -> Self {
        let first = Known { name: format!("{name}.0"), ..Known::default() };
        Self { name, current: Mutex::new(Arc::new(first)), written: AtomicU64::new(0) }
    }

    fn current(&self) -> Arc<Known> {
        Arc::clone(&self.current.lock().unwrap())
    }

    fn next(&self, number: u64) {
        let name = format!("{}.{number}", self.name);
        *self.current.lock().unwrap() = Arc::new(Known { name, ..Known::default() });
    }
}

struct Running {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<u64>>,
}

/// One writer and one reader for each key, at members that change with every failure. A register
/// with one writer, whose values ascend, is linearizable exactly if no read is older than what was
/// acknowledged or read before it began, nor newer than what was tried before it ended.
fn run(urls: &[String], keys: &[Arc<Register>], said: &Arc<Mutex<Vec<String>>>) -> Running {
    let stop = Arc::new(AtomicBool::new(false));
    let mut threads = Vec::new();
    for (index, register) in keys.iter().enumerate() {
        for writes in [true, false] {
            let (urls, register) = (urls.to_vec(), Arc::clone(register));
            let (stop, said) = (Arc::clone(&stop), Arc::clone(said));
            threads.push(std::thread::spawn(move || {
                let (mut done, mut lost) = (0, 0);
                let mut member = index + usize::from(!writes);
                let mut client: Option<Client> = None;
                while !stop.load(Ordering::Relaxed) {
                    let Some(open) = client.as_mut() else {
                        member = (member + 1) % urls.len();
                        client = try_client(&urls, member).ok();
                        std::thread::sleep(Duration::from_millis(20));
                        continue;
                    };
                    let known = register.current();
                    let key = known.name.as_str();
                    let outcome = if writes {
                        let next = known.tried.fetch_add(1, Ordering::SeqCst) + 1;
                        let text = next.to_string();
                        let put =
                            open.put(0, key.as_bytes(), text.as_bytes(), PutOptions::default());
                        put.map(|_| {
                            known.seen.fetch_max(next, Ordering::SeqCst);
                            register.written.fetch_add(1, Ordering::SeqCst);
                        })
                    } else {
                        let least = known.seen.load(Ordering::SeqCst);
                        open.get(0, key.as_bytes()).map(|value| {
                            let text = value.map(|value| String::from_utf8(value).unwrap());
                            let found = text.map_or(0, |text| text.parse::<u64>().unwrap());
                            let most = known.tried.load(Ordering::SeqCst);
                            assert!(
                                (least..=most).contains(&found),
                                "{key}: read {found}, seen {least} before, tried {most}"
                            );
                            known.seen.fetch_max(found, Ordering::SeqCst);
                        })
                    };
                    match outcome {
                        Ok(()) => done += 1,
                        Err(error) => {
                            said.lock().unwrap().push(error.to_string());
                            client = None;
                            if writes {
                                lost += 1;
                                register.next(lost);
                            }
                        }
                    }
                }
                done
            }));
        }
    }
    Running { stop, threads }
}

#[test]
fn one_sided_clients_lose_nothing_and_read_nothing_old_while_members_die_and_stop() {
    let mut cluster = Cluster::new(0, &[]);
    cluster.leader();
    for (provider, rounds) in [("shm", 2), ("tcp", 1)] {
        let urls = urls(&cluster, provider);
        let keys: Vec<Arc<Register>> = (0..2)
            .map(|index| Arc::new(Register::new(format!("register:{provider}{index}"))))
            .collect();
        let said = Arc::default();
        let running = run(&urls, &keys, &said);
        let go_on = |cluster: &Cluster, steps: u64| {
            let count = |key: &Arc<Register>| key.written.load(Ordering::SeqCst);
            let before: Vec<u64> = keys.iter().map(count).collect();
            let started = Instant::now();
            while keys.iter().zip(&before).any(|(key, before)| count(key) < before + steps) {
                if started.elapsed() >= PATIENCE {
                    // Every member is up and goes on: this asks all.
                    panic!("{:?}\n{}", said.lock(), cluster.described());
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        for _ in 0..rounds {
            go_on(&cluster, 20);
            let leader = cluster.leader();
            cluster.kill(leader);
            go_on(&cluster, 5);
            cluster.start(leader);
            let leader = cluster.leader();
            cluster.members[leader].as_ref().unwrap().signal(Signal::STOP);
            // The others go on under another, which those ask that wait for the one that stands
            // still once they give it up.
            eventually("another leads", PATIENCE, || {
                let mut others = (0..3).filter(|other| *other != leader);
                others.any(|other| cluster.info(other, "log_role") == "leader").then_some(())
            });
            cluster.members[leader].as_ref().unwrap().signal(Signal::CONT);
        }
        // Everybody gets through again.
        go_on(&cluster, 20);
        running.stop.store(true, Ordering::Relaxed);
        let done: Vec<u64> = running.threads.into_iter().map(|t| t.join().unwrap()).collect();
        for known in keys.iter().map(|key| key.current()) {
            let (name, seen) = (&known.name, known.seen.load(Ordering::SeqCst));
            let found = cluster.ask(0, &["GET", name]).text().parse().unwrap_or(0);
            assert!(found >= seen, "{name}: {found} at the end, {seen} was seen");
        }
        note(&format!("{provider}: {done:?} puts and gets, errors {:?}", said.lock().unwrap()));
    }
}

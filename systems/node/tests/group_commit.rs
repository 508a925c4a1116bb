//! Commits at `power` on files: a shard serves on while its file is synchronised, and nothing leaves
//! before what it rests on is persisted.
//!
//! In a binary of its own: fault points are global to the process.

#![allow(clippy::unwrap_used, reason = "a test ends at its first failure")]

mod common;

use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use beeline_env::{ArmedFault, FaultAction, fault};
use beeline_kv_direct::{LocalStore, OnReply};
use beeline_node::{Node, NodeConfig};
use beeline_pmem::{Durability, PoolKind};
use common::{Client, PATIENCE, assert_quiet, config, eventually, keys_of_shards};
use tempfile::TempDir;

const SYNC: &str = "pmem.file.sync";
/// Passed by each commit that has something to persist.
const COMMIT: &str = "kv.commit.before_fence";

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// A node whose commits wait for files, and its directory.
struct OnFiles {
    node: Node,
    config: NodeConfig,
    _directory: TempDir,
    _alone: MutexGuard<'static, ()>,
}

fn on_files(shards: usize) -> OnFiles {
    let alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(shards);
    config.data_directory = directory.path().to_owned();
    config.pool.kind = Some(PoolKind::File);
    config.pool.durability = Durability::Power;
    // The machine's directory for temporary files may be in memory.
    config.pool.emulate_durability = true;
    config.pool.segment_bytes = 1 << 20;
    config.shutdown_wait = PATIENCE;
    let node = Node::start(&config).unwrap();
    let files = OnFiles { node, config, _directory: directory, _alone: alone };
    files.come_to_rest(shards);
    files
}

impl OnFiles {
    fn syncs(&self) -> u64 {
        self.node.handle().store().pool().syncs()
    }

    /// So many clients: connections are dealt to the shards in turn.
    fn clients<const N: usize>(&self) -> [Client; N] {
        std::array::from_fn(|_| {
            let mut client = Client::connect(&self.node);
            assert_eq!(client.ask("PING"), "+PONG");
            client
        })
    }

    /// Gives every shard the segment that its log begins with, and waits until upkeep has nothing to do: a shard
    /// waits while it takes a segment, and for what upkeep commits.
    fn come_to_rest(&self, shards: usize) {
        // One for each shard, so that the connections to come are dealt from the first shard on.
        let mut clients: Vec<_> = (0..shards).flat_map(|_| self.clients::<1>()).collect();
        for key in keys_of_shards(&self.node, "warm") {
            assert_eq!(clients[0].ask(&format!("SET {key} value")), "+OK");
        }
        drop(clients);
        assert_quiet(&self.node, "nothing is asked for");
    }

    /// What a later start finds.
    fn restart(self) -> (Node, TempDir, MutexGuard<'static, ()>) {
        self.node.stop();
        (Node::start(&self.config).unwrap(), self._directory, self._alone)
    }
}

/// Waits until the point was passed so often.
fn until_passed(armed: &ArmedFault, hits: u64) {
    eventually("a synchronisation begins", || armed.hits() >= hits);
}

/// Sends a request whose reply has to wait. When `other`, a client of the same shard, has its reply to a
/// request sent later, the shard has seen both.
fn send_held(client: &mut Client, request: &str, other: &mut Client) {
    client.send(&format!("{request}\r\n"));
    assert_eq!(other.ask("GET calm"), "before");
    assert!(is_silent(client), "{request} was answered");
}

/// No byte of a reply has come.
fn is_silent(client: &Client) -> bool {
    client.stream.set_nonblocking(true).unwrap();
    let peeked = client.stream.peek(&mut [0]);
    client.stream.set_nonblocking(false).unwrap();
    matches!(peeked, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn others_are_served_during_a_synchronisation_and_what_they_write_shares_the_next_one() {
    let files = on_files(1);
    let [mut writer, mut calm, mut second, mut third, mut reader, mut scanner] = files.clients();
    for key in ["calm", "key", "row"] {
        assert_eq!(writer.ask(&format!("SET {key} before")), "+OK");
    }
    let before = files.syncs();
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    writer.send("SET key after\r\n");
    until_passed(&held, 1);
    // What is persisted is shown; what is not yet waits, and so does what is behind it.
    assert_eq!(calm.ask("GET calm"), "before");
    send_held(&mut reader, "GET key", &mut calm);
    send_held(&mut second, "SET other value", &mut calm);
    send_held(&mut second, "GET calm", &mut calm);
    send_held(&mut third, "HSET hash field value", &mut calm);
    send_held(&mut scanner, "SCAN 0 COUNT 100", &mut calm);
    // A turn of its own for each of them: all of it goes to the disk at once.
    for turn in 0..20 {
        send_held(&mut third, &format!("HSET hash field {turn}"), &mut calm);
    }
    assert!(is_silent(&writer));
    // A shard that polled for the end of the synchronisation would never sleep.
    let sleeps = || files.node.handle().stats().loops.sleeps;
    let slept = sleeps();
    eventually("the shard sleeps while all wait", || {
        assert_eq!(calm.ask("GET calm"), "before");
        sleeps() > slept
    });
    drop(held);
    assert_eq!(writer.reply(), "+OK");
    assert_eq!(reader.reply(), "after");
    second.expect("+OK\r\n$6\r\nbefore\r\n");
    let replies: Vec<String> = (0..21).map(|_| third.reply()).collect();
    assert_eq!((replies[0].as_str(), replies[20].as_str()), (":1", ":0"));
    assert!(scanner.reply().contains("other"));
    assert_eq!(files.syncs() - before, 2, "one was held up, one served all that came meanwhile");
    let (node, _directory, _alone) = files.restart();
    let mut client = Client::connect(&node);
    assert_eq!(client.ask("MGET key other"), "[after,value]");
    assert_eq!(client.ask("HGET hash field"), "19");
    node.stop();
}

#[test]
fn a_failed_synchronisation_is_an_error_for_everyone_who_waits_for_it() {
    let files = on_files(1);
    let [mut writer, mut calm, mut late, mut reader, mut quick] = files.clients();
    for key in ["calm", "key"] {
        assert_eq!(writer.ask(&format!("SET {key} before")), "+OK");
    }
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    writer.send("SET key after\r\n");
    until_passed(&held, 1);
    send_held(&mut quick, "GET key", &mut calm);
    send_held(&mut late, "SET other lost", &mut calm);
    send_held(&mut reader, "GET other", &mut calm);
    // The one that is held up ends well; the next one fails.
    let failing = fault::arm(SYNC, FaultAction::Fail, 0);
    drop(held);
    // Whether the first two heard of their good end before the failure is up to chance.
    for (client, good) in [(&mut writer, "+OK"), (&mut quick, "after")] {
        let reply = client.reply();
        assert!(reply == good || reply.starts_with("-MISCONF"), "{reply}");
    }
    for client in [&mut late, &mut reader] {
        assert!(client.reply().starts_with("-MISCONF"));
        assert_eq!(client.rest(), b"");
    }
    drop(failing);
    eventually("the shard is ill", || files.node.handle().health().is_err());
    calm.send("GET calm\r\n");
    assert_eq!(calm.rest(), b"", "the shard promises nothing any more");
    files.node.stop();
}

#[test]
fn a_command_carried_to_another_shard_is_answered_when_its_file_is_synchronised() {
    let files = on_files(2);
    // Of shard 0 and shard 1 in turn.
    let [_, mut carried, _, mut calm, _, mut waiting] = files.clients();
    let keys = keys_of_shards(&files.node, "k");
    for key in ["calm", &keys[0]] {
        assert_eq!(calm.ask(&format!("SET {key} before")), "+OK");
    }
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    carried.send(&format!("SET {} after\r\n", keys[0]));
    until_passed(&held, 1);
    let carried_to = || files.node.handle().stats().loops.forwarded_commands;
    let before = carried_to();
    waiting.send(&format!("GET {}\r\n", keys[0]));
    // A parcel of its own: the replies of one parcel leave together.
    eventually("it is carried", || carried_to() > before);
    assert_eq!(calm.ask("GET calm"), "before");
    assert_eq!(calm.ask(&format!("EXISTS {}", keys_of_shards(&files.node, "other")[0])), ":0");
    assert_eq!(calm.ask("GET calm"), "before");
    assert!(is_silent(&carried) && is_silent(&waiting));
    drop(held);
    assert_eq!(carried.reply(), "+OK");
    assert_eq!(waiting.reply(), "after");
    files.node.stop();
}

#[test]
fn what_follows_in_a_pipeline_takes_effect_elsewhere_only_once_what_came_before_is_persisted() {
    let files = on_files(2);
    let [mut pipeline, mut other] = files.clients();
    let keys = keys_of_shards(&files.node, "k");
    // The file of shard 0, which has the first key, and no other one.
    let held = fault::arm(SYNC, FaultAction::HoldOnce, 0);
    pipeline.send(&format!("SET {} data\r\n", keys[0]));
    until_passed(&held, 1);
    pipeline.send(&format!("SET {} pointer\r\n", keys[1]));
    for _ in 0..20 {
        assert_eq!(other.ask(&format!("GET {}", keys[1])), "$-1");
    }
    assert!(is_silent(&pipeline));
    drop(held);
    pipeline.expect("+OK\r\n+OK\r\n");
    assert_eq!(other.ask(&format!("GET {}", keys[1])), "pointer");
    files.node.stop();
}

#[test]
fn commands_over_several_shards_run_once_what_is_under_way_in_them_is_persisted() {
    let files = on_files(2);
    let [mut first, mut second] = files.clients();
    let keys = keys_of_shards(&files.node, "k");
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    first.send(&format!("SET {} one\r\n", keys[0]));
    until_passed(&held, 1);
    let executed = || files.node.handle().stats().loops.several_shard_commands;
    let before = executed();
    let commits = fault::arm(COMMIT, FaultAction::Delay(Duration::ZERO), 0);
    second.send(&format!("MSET {} two {} two\r\n", keys[0], keys[1]));
    eventually("the command's thread waits for a commit", || commits.hits() > 0);
    assert_eq!(executed(), before, "it would rest on what is not persisted, in another log");
    assert!(is_silent(&first) && is_silent(&second));
    drop(held);
    assert_eq!(first.reply(), "+OK");
    assert_eq!(second.reply(), "+OK");
    assert_eq!(executed(), before + 1);
    assert_eq!(first.ask(&format!("MGET {} {}", keys[0], keys[1])), "[two,two]");
    files.node.stop();
}

#[test]
fn a_node_that_stops_answers_what_waits_for_a_synchronisation() {
    let files = on_files(1);
    let [mut writer, mut reader, mut calm] = files.clients();
    assert_eq!(calm.ask("SET calm before"), "+OK");
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    writer.send("SET key value\r\n");
    until_passed(&held, 1);
    send_held(&mut reader, "GET key", &mut calm);
    let (config, directory) = (files.config.clone(), files._directory);
    let address = files.node.redis_address().unwrap();
    let node = files.node;
    std::thread::scope(|scope| {
        let stop = scope.spawn(|| node.stop());
        eventually("the node stops", || TcpStream::connect(address).is_err());
        assert!(is_silent(&writer) && is_silent(&reader) && !stop.is_finished());
        drop(held);
        for (client, reply) in [(&mut writer, "+OK"), (&mut reader, "value")] {
            assert_eq!(client.reply(), reply);
            assert_eq!(client.rest(), b"");
        }
        stop.join().unwrap();
    });
    let node = Node::start(&config).unwrap();
    assert_eq!(Client::connect(&node).ask("GET key"), "value");
    node.stop();
    drop(directory);
}

#[test]
fn nothing_more_of_a_client_runs_whose_commit_failed() {
    let files = on_files(2);
    let [mut client, mut other] = files.clients();
    let key = &keys_of_shards(&files.node, "k")[0];
    let failing = fault::arm(COMMIT, FaultAction::Fail, 0);
    client.send(&format!("SET {key} lost\r\nCONFIG SET timeout 77\r\n"));
    assert!(client.reply().starts_with("-MISCONF"));
    assert_eq!(client.rest(), b"");
    drop(failing);
    assert_eq!(other.ask("CONFIG GET timeout"), "[timeout,0]");
    files.node.stop();
}

#[test]
fn a_failed_commit_refuses_the_successor_of_a_client_that_left_while_its_reply_waited() {
    let files = on_files(1);
    let [mut writer, mut calm, mut waker] = files.clients();
    assert_eq!(calm.ask("SET calm before"), "+OK");
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    let mut leaver = Client::connect(&files.node);
    // A reply that its client never reads has the peer hear of the end at once.
    leaver.send("PING\r\nSET key value\r\n");
    until_passed(&held, 1);
    leaver.stream.peek(&mut [0]).unwrap();
    let handle = files.node.handle();
    let before = handle.stats().connected_clients;
    drop(leaver);
    eventually("it is gone", || handle.stats().connected_clients < before);
    let mut successor = Client::connect(&files.node);
    assert_eq!(successor.ask("GET calm"), "before");
    let failing = fault::arm(COMMIT, FaultAction::Fail, 0);
    // Both in one turn: the one before it waits for the lock.
    handle.with_shards_changed(&[0], |_| {
        let turns = handle.stats().loops.turns;
        waker.send("PING\r\n");
        eventually("a turn begins", || handle.stats().loops.turns > turns);
        successor.send("GET calm\r\n");
        writer.send("SET other lost\r\n");
        ((), false)
    });
    assert!(writer.reply().starts_with("-MISCONF"));
    assert_eq!(successor.rest(), b"", "a turn that failed answers nobody");
    drop((failing, held));
    files.node.stop();
}

/// A direct store that answers at once, and counts.
#[derive(Debug, Default)]
struct Counting(AtomicU64);

impl LocalStore for Counting {
    fn processors(&self) -> u32 {
        1
    }

    fn submit(&self, _processor: u32, _packet: Vec<u8>, _reply_limit: usize, done: OnReply) {
        self.0.fetch_add(1, Ordering::SeqCst);
        done(None);
    }
}

#[test]
fn a_command_of_the_direct_store_waits_for_the_commit_of_what_came_before_it() {
    let files = on_files(1);
    let [mut client, mut calm] = files.clients();
    assert_eq!(calm.ask("SET calm before"), "+OK");
    let store = Arc::new(Counting::default());
    files.node.handle().serve_direct(Arc::clone(&store) as Arc<dyn LocalStore>);
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    client.send("SET key value\r\nDIRECT.GET k\r\n");
    until_passed(&held, 1);
    assert_eq!(calm.ask("GET calm"), "before");
    assert_eq!(store.0.load(Ordering::SeqCst), 0, "what came before is not persisted");
    drop(held);
    assert_eq!(client.reply(), "+OK");
    assert!(client.reply().contains("did not answer"));
    assert_eq!(store.0.load(Ordering::SeqCst), 1);
    files.node.stop();
}

#[test]
fn a_client_with_many_bytes_of_replies_that_wait_is_held_back() {
    const READS: u64 = 100;
    let files = on_files(1);
    let [mut client, mut calm] = files.clients();
    let value = "v".repeat(8 << 10);
    for request in [format!("SET large {value}"), "SET calm before".to_owned()] {
        assert_eq!(calm.ask(&request), "+OK");
    }
    let executed = || files.node.handle().stats().loops.commands;
    let before = executed();
    let held = fault::arm(SYNC, FaultAction::Hold, 0);
    client.send(&format!("SET key value\r\n{}", "GET large\r\n".repeat(READS as usize)));
    until_passed(&held, 1);
    eventually("64 KiB wait", || executed() - before >= 9);
    for _ in 0..3 {
        assert_eq!(calm.ask("GET calm"), "before");
    }
    let executed = executed() - before - 3;
    assert!((9..=10).contains(&executed), "{executed} requests were executed");
    assert!(is_silent(&client));
    drop(held);
    assert_eq!(client.reply(), "+OK");
    for _ in 0..READS {
        assert_eq!(client.reply(), value);
    }
    files.node.stop();
}

#[test]
fn a_carried_command_is_refused_whose_synchronisation_fails() {
    let files = on_files(2);
    let [_, mut carried] = files.clients();
    let key = &keys_of_shards(&files.node, "k")[0];
    let failing = fault::arm(SYNC, FaultAction::Fail, 0);
    let reply = carried.ask(&format!("SET {key} lost"));
    assert!(reply.starts_with("-MISCONF"), "{reply}");
    drop(failing);
    files.node.stop();
}

/// Segments are left, renewed and collected while commits are under way. Of what is on media at which moment the
/// crash suite tells, not a stop in good order.
#[test]
fn many_turns_over_many_segments_keep_what_they_acknowledged() {
    let files = on_files(2);
    let address = files.node.redis_address().unwrap();
    let acknowledged: Vec<Vec<(String, u64)>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..6)
            .map(|worker| {
                scope.spawn(move || {
                    let mut client = Client::to(address);
                    let mut latest = [0; 20];
                    for turn in 1..=400_u64 {
                        let slot = (turn * 7 % 20) as usize;
                        let filler = "x".repeat((turn * 131 % 9000) as usize);
                        client.send(&format!("SET {worker}:{slot} {turn}:{filler}\r\n"));
                        client.send(&format!("GET {worker}:{slot}\r\n"));
                        client.expect("+OK\r\n");
                        assert!(client.reply().starts_with(&format!("{turn}:")));
                        latest[slot] = turn;
                    }
                    (0..20).map(|slot| (format!("{worker}:{slot}"), latest[slot])).collect()
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().unwrap()).collect()
    });
    let (node, _directory, _alone) = files.restart();
    let mut client = Client::connect(&node);
    for (key, turn) in acknowledged.into_iter().flatten() {
        assert!(client.ask(&format!("GET {key}")).starts_with(&format!("{turn}:")), "{key}");
    }
    node.stop();
}

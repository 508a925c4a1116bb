//! A one-sided client that keeps a window of puts and deletes in flight.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use beeline_kv_client::{Answer, Client, ClientError, ClientOptions, Command, PutOptions, Token};
use beeline_verify_clients::to_node::ToNode;

use crate::ledger::{Ledger, Random, State};

const KEYS: u64 = 24;
const PATIENCE: Duration = Duration::from_secs(5);

/// A client of the node at `url` that does not come back once the node is gone.
pub fn connect(url: &str) -> Result<Client, ClientError> {
    let connector = ToNode::new(url, PATIENCE);
    let options = ClientOptions {
        timeout: PATIENCE,
        spin: Duration::ZERO,
        reconnect: false,
        tracked_keys: 4096,
        ..ClientOptions::default()
    };
    Client::connect(Box::new(connector), options)
}

fn is_loss(error: &ClientError) -> bool {
    error.is_outcome_unknown() || matches!(error, ClientError::NotConnected { .. })
}

/// Writes until the node is gone or `stop` is set; returns the last number used.
pub fn run(
    client: &mut Client,
    prefix: &str,
    ledger: &mut Ledger,
    random: &mut Random,
    mut next: u64,
    stop: &AtomicBool,
) -> u64 {
    let now_ms = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_millis() as u64
    };
    'batches: while !stop.load(Ordering::Relaxed) {
        let mut waiting: BTreeMap<Token, String> = BTreeMap::new();
        let mut lost = false;
        for key in 0..KEYS {
            if random.below(3) == 0 {
                continue;
            }
            next += 1;
            let name = format!("{prefix}k{key}");
            let value = random.value(next);
            let (expires_at_ms, state) = match random.below(8) {
                0 => (0, State::Absent),
                1 => (now_ms() + 20, State::Brief { value: next }),
                2 => (now_ms() + 100_000_000, State::Kept { value: next, expires: true }),
                _ => (0, State::of(next)),
            };
            let command = if state == State::Absent {
                Command::Delete { database: 0, key: name.as_bytes() }
            } else {
                let options = PutOptions { expires_at_ms, ..PutOptions::default() };
                Command::Put { database: 0, key: name.as_bytes(), value: value.as_bytes(), options }
            };
            match client.submit(command) {
                Ok(token) => {
                    ledger.sent(&name, state);
                    waiting.insert(token, name);
                }
                Err(ClientError::WindowFull { .. }) => break,
                Err(error) if is_loss(&error) => {
                    lost = true;
                    break;
                }
                Err(error) => panic!("{name}: {error}"),
            }
        }
        while !waiting.is_empty() {
            let outcome = client.wait(Duration::from_millis(100), &mut |token, answer| {
                let name = waiting.remove(&token).expect("an answer to a request of ours");
                match answer {
                    Ok(Answer::Stored { .. } | Answer::Missing) => ledger.settled(&name),
                    Err(error) if is_loss(&error) => lost = true,
                    other => panic!("{name}: {other:?}"),
                }
            });
            if outcome.is_err() {
                break 'batches;
            }
        }
        if lost {
            break;
        }
    }
    next
}

//! A client that does not give up.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use beeline_kv_client::{Client, ClientOptions, PutOptions};
use beeline_verify_clients::to_node::ToNode;

use crate::say;

/// The node's fabric address, as `tcp://HOST:PORT`.
const NODE: &str = "BEELINE_LAB_NODE";
/// What its keys begin with, where more than one client is at work; "key".
const PREFIX: &str = "BEELINE_LAB_PREFIX";
/// Keys in use.
const KEYS: u64 = 64;
/// Bound of a call. Generous: processors are emulated.
const BOUND: Duration = Duration::from_secs(5);

/// What a key may hold: the newest acknowledged stamp, and stamps whose puts failed since then.
#[derive(Debug, Default)]
struct Known {
    acknowledged: u64,
    unsure: Vec<u64>,
}

impl Known {
    fn explains(&self, shown: u64) -> bool {
        shown == self.acknowledged || self.unsure.contains(&shown)
    }
}

fn value(stamp: u64) -> Vec<u8> {
    stamp.to_le_bytes().repeat(1 + stamp as usize % 40)
}

/// The stamp a value is made of from end to end; 0 for none.
fn stamp_of(shown: Option<&[u8]>) -> Result<u64, String> {
    let Some(shown) = shown else { return Ok(0) };
    let stamp = shown.first_chunk::<8>().map_or(0, |first| u64::from_le_bytes(*first));
    if value(stamp) == shown { Ok(stamp) } else { Err(format!("{} mixed bytes", shown.len())) }
}

/// Says `ok NUMBER MS` for a put that was acknowledged and read back, `error MS TEXT` for what
/// failed, `wrong TEXT` for what must not be.
#[test]
fn client() {
    let Ok(url) = std::env::var(NODE) else { return };
    let prefix = std::env::var(PREFIX).unwrap_or_else(|_| "key".to_owned());
    let mut known: BTreeMap<u64, Known> = BTreeMap::new();
    let mut client: Option<Client> = None;
    for stamp in 1_u64.. {
        let begun = Instant::now();
        let outcome = turn((&url, &prefix), &mut client, &mut known, stamp);
        let spent_ms = begun.elapsed().as_millis();
        match outcome {
            Ok(Ok(())) => say(&format!("ok {stamp} {spent_ms}")),
            Ok(Err(wrong)) => say(&format!("wrong {wrong}")),
            Err(error) => {
                say(&format!("error {spent_ms} {error}"));
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

type Turn = Result<Result<(), String>, Box<dyn std::error::Error>>;

fn turn(
    (url, prefix): (&str, &str),
    client: &mut Option<Client>,
    known: &mut BTreeMap<u64, Known>,
    stamp: u64,
) -> Turn {
    let client = match client {
        Some(client) => client,
        None => {
            let connector = ToNode::new(url, BOUND);
            let options =
                ClientOptions { timeout: BOUND, spin: Duration::ZERO, ..ClientOptions::default() };
            client.insert(Client::connect(Box::new(connector), options)?)
        }
    };
    let key = format!("{prefix}-{}", stamp % KEYS);
    let entry = known.entry(stamp % KEYS).or_default();
    // Until its acknowledgement, the new value may be there or not.
    entry.unsure.push(stamp);
    client.put(0, key.as_bytes(), &value(stamp), PutOptions::default())?;
    *entry = Known { acknowledged: stamp, unsure: Vec::new() };
    // The one just written, and one from long ago, from before whatever broke in between.
    for number in [stamp % KEYS, (stamp + KEYS / 2) % KEYS] {
        let shown = client.get(0, format!("{prefix}-{number}").as_bytes())?;
        let expected = known.entry(number).or_default();
        match stamp_of(shown.as_deref()) {
            Ok(shown) if expected.explains(shown) => {}
            shown => return Ok(Err(format!("key-{number} shows {shown:?}, not {expected:?}"))),
        }
    }
    Ok(Ok(()))
}

//! The directory: which nodes have which object, in any RESP server.
//!
//! ```text
//! beeline:node:GENERATION   FABRIC-ADDRESS SOCKET-ADDRESS   expires, and is refreshed while it lives
//! beeline:object:ID         +GENERATION -GENERATION ...     a log, folded by the reader
//! ```
//!
//! Both are strings: `SET`, `GET`, `MGET`, `APPEND`, `EXPIRE`, `DEL` and a transaction are all the
//! directory has to know. An entry of a node that is gone means nothing: its `beeline:node:` key
//! has expired, and its next life has another generation. A log that grew long is written anew
//! under `WATCH`.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use super::resp::{Connection, Reply};
use super::{Finding, Holder, News, Shared};
use crate::id::ObjectId;

/// How long a node is believed to live without a sign.
const NODE_EXPIRY_MS: &[u8] = b"6000";
const REFRESH: Duration = Duration::from_millis(1500);
/// How long an entry stays that nobody renews, and how often it is renewed.
const ENTRY_EXPIRY_S: &[u8] = b"3600";
const RENEW: Duration = Duration::from_secs(1200);
/// Pause after the directory did not answer.
const AGAIN: Duration = Duration::from_millis(300);
/// Commands sent together.
const TOGETHER: usize = 256;
/// A log longer than this is folded.
const LONG: i64 = 2048;

fn node_key(generation: &str) -> Vec<u8> {
    format!("beeline:node:{generation}").into_bytes()
}

fn object_key(id: ObjectId) -> Vec<u8> {
    format!("beeline:object:{id}").into_bytes()
}

fn fold(log: &[u8]) -> BTreeSet<String> {
    let mut holders = BTreeSet::new();
    for word in String::from_utf8_lossy(log).split_ascii_whitespace() {
        match word.split_at_checked(1) {
            Some(("+", generation)) => drop(holders.insert(generation.to_owned())),
            Some(("-", generation)) => drop(holders.remove(generation)),
            _ => {}
        }
    }
    holders
}

fn written(holders: &BTreeSet<String>) -> Vec<u8> {
    holders.iter().map(|holder| format!("+{holder} ")).collect::<String>().into_bytes()
}

/// Looks objects up, for one thread.
pub(super) struct Lookup {
    connection: Option<Connection>,
}

impl Lookup {
    pub(super) fn new() -> Self {
        Self { connection: None }
    }

    /// The nodes that may have `id`, this one not among them.
    pub(super) fn holders(&mut self, shared: &Shared, id: ObjectId) -> Vec<Holder> {
        match &shared.options.finding {
            Finding::Peers(peers) => {
                peers.iter().map(|fabric| Holder { fabric: fabric.clone(), socket: None }).collect()
            }
            Finding::Directory { address, password } => {
                let found = self.look(shared, address, password, id);
                if let Err(error) = &found {
                    tracing::debug!(%error, "the directory does not answer");
                    self.connection = None;
                }
                found.unwrap_or_default()
            }
        }
    }

    fn look(
        &mut self,
        shared: &Shared,
        address: &str,
        password: &str,
        id: ObjectId,
    ) -> io::Result<Vec<Holder>> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            None => self.connection.insert(Connection::open(address, password)?),
        };
        let key = object_key(id);
        let log = connection.ask(&[&[b"GET", &key]])?;
        let Some(Reply::Text(log)) = log.first() else { return Ok(Vec::new()) };
        let own = generation(shared).unwrap_or_default();
        let keys: Vec<Vec<u8>> =
            fold(log).iter().filter(|holder| **holder != own).map(|h| node_key(h)).collect();
        if keys.is_empty() {
            return Ok(Vec::new());
        }
        let mut command: Vec<&[u8]> = vec![b"MGET"];
        command.extend(keys.iter().map(Vec::as_slice));
        let nodes = connection.ask(&[&command])?;
        let Some(Reply::List(nodes)) = nodes.into_iter().next() else { return Ok(Vec::new()) };
        let holder = |reply: Reply| {
            let Reply::Text(text) = reply else { return None };
            let text = String::from_utf8(text).ok()?;
            let mut words = text.split_ascii_whitespace().map(str::to_owned);
            Some(Holder { fabric: words.next()?, socket: words.next() })
        };
        Ok(nodes.into_iter().filter_map(holder).collect())
    }
}

/// This life of this store, as the directory names it.
fn generation(shared: &Shared) -> Option<String> {
    shared.client().ok().map(|client| format!("{:016x}", client.generation()))
}

/// Keeps the directory up to date, until the manager stops.
pub(super) fn announce(shared: &Shared, inbox: &Receiver<News>) {
    let Finding::Directory { address, password } = &shared.options.finding else { return };
    let mut keeper = Keeper {
        here: HashSet::new(),
        dirty: HashMap::new(),
        connection: None,
        refreshed: None,
        renewed: Instant::now(),
    };
    loop {
        match inbox.recv_timeout(AGAIN) {
            Ok(news) => {
                keeper.take(news);
                while let Ok(news) = inbox.try_recv() {
                    keeper.take(news);
                }
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if shared.stops() {
            break;
        }
        let outcome = keeper.keep(shared, address, password);
        shared.figures.directory_up.store(outcome.is_ok(), Ordering::Relaxed);
        if let Err(error) = outcome {
            if keeper.connection.take().is_some() {
                tracing::warn!(%error, address, "the directory of objects does not answer");
            }
            // It may have lost everything when it comes back.
            keeper.dirty = keeper.here.iter().map(|id| (*id, true)).collect();
            keeper.refreshed = None;
            std::thread::sleep(AGAIN);
        }
    }
    // A node that stops in order is forgotten at once.
    if let (Some(connection), Some(generation)) = (&mut keeper.connection, generation(shared)) {
        let _ = connection.ask(&[&[b"DEL", &node_key(&generation)]]);
    }
}

struct Keeper {
    here: HashSet<ObjectId>,
    /// What the directory has yet to be told.
    dirty: HashMap<ObjectId, bool>,
    connection: Option<Connection>,
    refreshed: Option<Instant>,
    renewed: Instant,
}

impl Keeper {
    fn take(&mut self, news: News) {
        match news {
            News::Announce(id) => {
                self.here.insert(id);
                self.dirty.insert(id, true);
            }
            News::Withdraw(id) => {
                self.here.remove(&id);
                self.dirty.insert(id, false);
            }
        }
    }

    fn keep(&mut self, shared: &Shared, address: &str, password: &str) -> io::Result<()> {
        let Some(generation) = generation(shared) else { return Ok(()) };
        let connection = match &mut self.connection {
            Some(connection) => connection,
            None => self.connection.insert(Connection::open(address, password)?),
        };
        if self.refreshed.is_none_or(|at| at.elapsed() >= REFRESH) {
            let host = shared.options.advertised.rsplit_once(':').map_or("", |(host, _)| host);
            let port = shared.socket_port;
            let value = format!("{} {host}:{port}", shared.options.advertised);
            let key = node_key(&generation);
            let set: &[&[u8]] = &[b"SET", &key, value.as_bytes(), b"PX", NODE_EXPIRY_MS];
            check(&connection.ask(&[set])?)?;
            self.refreshed = Some(Instant::now());
        }
        if self.renewed.elapsed() >= RENEW {
            self.renewed = Instant::now();
            self.dirty.extend(self.here.iter().map(|id| (*id, true)));
        }
        while !self.dirty.is_empty() {
            let some: Vec<(ObjectId, bool)> =
                self.dirty.iter().take(TOGETHER).map(|(id, here)| (*id, *here)).collect();
            tell(connection, &generation, &some)?;
            for (id, _) in &some {
                self.dirty.remove(id);
            }
        }
        Ok(())
    }
}

fn check(replies: &[Reply]) -> io::Result<()> {
    match replies.iter().find(|reply| matches!(reply, Reply::Error(_))) {
        Some(Reply::Error(text)) => Err(io::Error::other(text.clone())),
        _ => Ok(()),
    }
}

fn tell(
    connection: &mut Connection,
    generation: &str,
    some: &[(ObjectId, bool)],
) -> io::Result<()> {
    let words: Vec<(Vec<u8>, Vec<u8>)> = some
        .iter()
        .map(|(id, here)| {
            let sign = if *here { '+' } else { '-' };
            (object_key(*id), format!("{sign}{generation} ").into_bytes())
        })
        .collect();
    let commands: Vec<Vec<&[u8]>> = words
        .iter()
        .flat_map(|(key, word)| {
            [vec![&b"APPEND"[..], key, word], vec![&b"EXPIRE"[..], key, ENTRY_EXPIRY_S]]
        })
        .collect();
    let commands: Vec<&[&[u8]]> = commands.iter().map(Vec::as_slice).collect();
    let replies = connection.ask(&commands)?;
    check(&replies)?;
    for (index, (key, _)) in words.iter().enumerate() {
        let long = matches!(replies.get(2 * index), Some(Reply::Number(n)) if *n > LONG);
        if long || !some[index].1 {
            tidy(connection, key)?;
        }
    }
    Ok(())
}

/// Writes a log anew, unless another node writes to it meanwhile; then that node tidies.
fn tidy(connection: &mut Connection, key: &[u8]) -> io::Result<()> {
    let seen = connection.ask(&[&[b"WATCH", key], &[b"GET", key]])?;
    let Some(Reply::Text(log)) = seen.get(1) else {
        connection.ask(&[&[b"UNWATCH"]])?;
        return Ok(());
    };
    let holders = fold(log);
    let value = written(&holders);
    let replace: Vec<&[u8]> = if holders.is_empty() {
        vec![b"DEL", key]
    } else {
        vec![b"SET", key, &value, b"EX", ENTRY_EXPIRY_S]
    };
    connection.ask(&[&[b"MULTI"], &replace, &[b"EXEC"]])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_folds_to_those_that_have_the_object() {
        assert_eq!(fold(b"+a +b -a +c -x +c "), BTreeSet::from(["b".to_owned(), "c".to_owned()]));
        assert_eq!(written(&fold(b"+b -b +a ")), b"+a ");
        assert!(fold(b"").is_empty() && fold(b"nonsense +").len() == 1);
    }
}

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
/// Objects that went while the directory did not answer, and that it is told of then.
const MOST_WITHDRAWN: usize = 1 << 16;
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

/// Orders holders by a hash of the asking node, the object and the holder: of the nodes that want one
/// object, each holder is the first choice of about as many; and of the objects that one node wants.
fn spread(holders: &mut [Holder], asking: &str, id: ObjectId) {
    let rank = |holder: &Holder| {
        let words = [asking.as_bytes(), &id.0, holder.fabric.as_bytes()];
        // FNV-1a, and the last steps of MurmurHash3, without which close names have close ranks.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in words.into_iter().flat_map(|word| word.iter().chain(&[0])) {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
        hash = (hash ^ hash >> 33).wrapping_mul(0xff51_afd7_ed55_8ccd);
        hash = (hash ^ hash >> 33).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
        hash ^ hash >> 33
    };
    holders.sort_by_cached_key(rank);
}

/// Looks objects up, for one thread.
pub(super) struct Lookup {
    connection: Option<Connection>,
}

impl Lookup {
    pub(super) fn new() -> Self {
        Self { connection: None }
    }

    /// The nodes that may have `id`, this one not among them, in the order in which this node asks them.
    pub(super) fn holders(&mut self, shared: &Shared, id: ObjectId) -> Vec<Holder> {
        let mut holders = match &shared.options.finding {
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
        };
        spread(&mut holders, &shared.options.advertised, id);
        holders
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
    let mut keeper = Keeper::new();
    let mut more = false;
    loop {
        // What is left to be told waits for nothing but the node's own entry.
        let pause = if more { Duration::ZERO } else { AGAIN };
        match inbox.recv_timeout(pause) {
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
        more = matches!(outcome, Ok(true));
        if let Err(error) = outcome {
            if keeper.connection.take().is_some() {
                tracing::warn!(%error, address, "the directory of objects does not answer");
            }
            keeper.begin_anew();
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
    fn new() -> Self {
        Self {
            here: HashSet::new(),
            dirty: HashMap::new(),
            connection: None,
            refreshed: None,
            renewed: Instant::now(),
        }
    }

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

    /// The directory may have lost everything when it answers again; and what it kept may name
    /// objects that went meanwhile.
    fn begin_anew(&mut self) {
        self.dirty.retain(|_, here| !*here);
        if self.dirty.len() > MOST_WITHDRAWN {
            // Their entries expire.
            self.dirty.clear();
        }
        self.dirty.extend(self.here.iter().map(|id| (*id, true)));
        self.refreshed = None;
    }

    /// Keeps the node's entry alive and tells some of what is to be told: a long list must not outlast
    /// the entry. Whether more is to be told.
    fn keep(&mut self, shared: &Shared, address: &str, password: &str) -> io::Result<bool> {
        let Some(generation) = generation(shared) else { return Ok(false) };
        let host = shared.options.advertised.rsplit_once(':').map_or("", |(host, _)| host);
        let value = format!("{} {host}:{}", shared.options.advertised, shared.socket_port);
        self.tell_some(&generation, &value, address, password)
    }

    fn tell_some(
        &mut self,
        generation: &str,
        value: &str,
        address: &str,
        password: &str,
    ) -> io::Result<bool> {
        let connection = match &mut self.connection {
            Some(connection) => connection,
            None => self.connection.insert(Connection::open(address, password)?),
        };
        if self.refreshed.is_none_or(|at| at.elapsed() >= REFRESH) {
            let key = node_key(generation);
            let set: &[&[u8]] = &[b"SET", &key, value.as_bytes(), b"PX", NODE_EXPIRY_MS];
            check(&connection.ask(&[set])?)?;
            self.refreshed = Some(Instant::now());
        }
        if self.renewed.elapsed() >= RENEW {
            self.renewed = Instant::now();
            self.dirty.extend(self.here.iter().map(|id| (*id, true)));
        }
        let some: Vec<(ObjectId, bool)> =
            self.dirty.iter().take(TOGETHER).map(|(id, here)| (*id, *here)).collect();
        tell(connection, generation, &some)?;
        for (id, _) in &some {
            self.dirty.remove(id);
        }
        Ok(!self.dirty.is_empty())
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
    if some.is_empty() {
        return Ok(());
    }
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
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::{SocketAddr, TcpListener};

    /// A directory that says yes to everything, and has every log; what it was told, in order.
    fn directory() -> (SocketAddr, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let run = move || {
            let (stream, _) = listener.accept().unwrap();
            stream.set_nodelay(true).unwrap();
            let mut answers = stream.try_clone().unwrap();
            let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
            let mut told = Vec::new();
            while let Some(count) = lines.next() {
                let words: usize = count.trim_start_matches('*').parse().unwrap();
                let words: Vec<String> = (0..words)
                    .map(|_| {
                        lines.next().unwrap();
                        lines.next().unwrap()
                    })
                    .collect();
                let answer: &[u8] = match words[0].as_str() {
                    "APPEND" | "EXPIRE" | "DEL" => b":1\r\n",
                    "GET" => b"$2\r\n+x\r\n",
                    _ => b"+OK\r\n",
                };
                answers.write_all(answer).unwrap();
                told.push(words.join(" "));
            }
            told
        };
        (address, std::thread::spawn(run))
    }

    fn object(number: usize) -> ObjectId {
        let mut id = [0; 20];
        id[..8].copy_from_slice(&(number as u64).to_le_bytes());
        ObjectId(id)
    }

    #[test]
    fn a_long_list_of_objects_does_not_keep_the_nodes_entry_from_being_refreshed() {
        let (address, told) = directory();
        let mut keeper = Keeper::new();
        for number in 0..4 * TOGETHER {
            keeper.take(News::Withdraw(object(number)));
        }
        while !keeper.dirty.is_empty() {
            // The time to refresh has come.
            keeper.refreshed = None;
            keeper.tell_some("g", "here", &address.to_string(), "").unwrap();
        }
        drop(keeper);
        let told = told.join().unwrap();
        let refreshed = told.iter().filter(|told| told.starts_with("SET beeline:node:g ")).count();
        let withdrawn = told.iter().filter(|told| told.ends_with(" -g ")).count();
        assert_eq!((refreshed, withdrawn), (4, 4 * TOGETHER));
    }

    #[test]
    fn an_object_that_went_while_the_directory_was_away_is_withdrawn_when_it_is_back() {
        let mut keeper = Keeper::new();
        keeper.take(News::Announce(object(1)));
        keeper.take(News::Announce(object(2)));
        keeper.take(News::Withdraw(object(1)));
        keeper.begin_anew();
        let expected = HashMap::from([(object(1), false), (object(2), true)]);
        assert_eq!(keeper.dirty, expected);
        // An outage without end fills no memory.
        for number in 0..2 * MOST_WITHDRAWN {
            keeper.take(News::Withdraw(object(10 + number)));
        }
        keeper.begin_anew();
        assert_eq!(keeper.dirty, HashMap::from([(object(2), true)]));
    }

    #[test]
    fn holders_share_the_load_and_each_is_asked() {
        let names: Vec<String> = (1..=4).map(|host| format!("10.0.0.{host}:4790")).collect();
        let order = |asking: &str, number: usize| -> Vec<usize> {
            let mut holders: Vec<Holder> =
                names.iter().map(|name| Holder { fabric: name.clone(), socket: None }).collect();
            spread(&mut holders, asking, object(number));
            let place = |holder: &Holder| names.iter().position(|name| *name == holder.fabric);
            holders.iter().filter_map(place).collect()
        };
        // By object for one node, and by node for one object.
        let by_object: Vec<_> = (0..400).map(|number| order("10.0.0.9:4790", number)).collect();
        let by_node: Vec<_> =
            (0..400).map(|node| order(&format!("10.0.1.{node}:4790"), 7)).collect();
        for orders in [by_object, by_node] {
            for place in [0, 1] {
                let mut first = [0; 4];
                orders.iter().for_each(|order| first[order[place]] += 1);
                assert!(first.iter().all(|count| (70..=130).contains(count)), "{place} {first:?}");
            }
            let whole = |order: &Vec<usize>| order.iter().collect::<BTreeSet<_>>().len() == 4;
            assert!(orders.iter().all(whole), "a holder is left out");
        }
        assert_eq!(order("10.0.0.9:4790", 3), order("10.0.0.9:4790", 3));
    }

    #[test]
    fn a_log_folds_to_those_that_have_the_object() {
        assert_eq!(fold(b"+a +b -a +c -x +c "), BTreeSet::from(["b".to_owned(), "c".to_owned()]));
        assert_eq!(written(&fold(b"+b -b +a ")), b"+a ");
        assert!(fold(b"").is_empty() && fold(b"nonsense +").len() == 1);
    }
}

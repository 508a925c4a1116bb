//! A cluster under test: its processes, addresses and questions to it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use beeline_verify_clients::{Connection, Reply, Server, beeline, free_port};

/// Longest wait for anything.
pub const PATIENCE: Duration = Duration::from_secs(60);
pub const CLUSTER: &str = "5f0c31a29be4d870";

/// Where one member is found.
#[derive(Clone, Copy)]
pub struct Place {
    pub id: usize,
    pub fabric: SocketAddr,
    pub resp: SocketAddr,
}

impl Place {
    pub fn word(&self) -> String {
        format!("{}={}@{}", self.id, self.fabric, self.resp)
    }
}

/// Addresses nobody listens at just now.
pub fn places(count: usize) -> Vec<Place> {
    let free = || SocketAddr::from(([127, 0, 0, 1], free_port()));
    (1..=count).map(|id| Place { id, fabric: free(), resp: free() }).collect()
}

/// One cluster at a time: three nodes of several threads each are enough for a small machine.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

pub struct Cluster {
    pub home: tempfile::TempDir,
    pub places: Vec<Place>,
    founders: usize,
    /// Further flags of members that are started from now on.
    pub more: Vec<String>,
    /// Where members listen for MongoDB clients, if their documents are a replica set.
    pub documents: Vec<SocketAddr>,
    pub members: Vec<Option<Server>>,
    _turn: MutexGuard<'static, ()>,
}

impl Cluster {
    /// Three founders; `spare` places for who joins.
    pub fn new(spare: usize, more: &[&str]) -> Self {
        Self::start_all(spare, more, Vec::new())
    }

    /// Three founders whose documents are a replica set.
    #[allow(dead_code, reason = "the tests of replica sets use it")]
    pub fn of_documents(more: &[&str]) -> Self {
        let doors = (0..3).map(|_| SocketAddr::from(([127, 0, 0, 1], free_port()))).collect();
        Self::start_all(0, more, doors)
    }

    fn start_all(spare: usize, more: &[&str], documents: Vec<SocketAddr>) -> Self {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let places = places(3 + spare);
        let mut cluster = Self {
            home: tempfile::tempdir().unwrap(),
            members: places.iter().map(|_| None).collect(),
            places,
            founders: 3,
            more: more.iter().map(|word| (*word).to_owned()).collect(),
            documents,
            _turn: turn,
        };
        (0..3).for_each(|index| cluster.start(index));
        cluster
    }

    pub fn data(&self, index: usize) -> PathBuf {
        self.home.path().join(format!("node-{index}"))
    }

    pub fn peers(&self, index: usize) -> String {
        let founders = self.places[..self.founders].iter();
        let mut words: Vec<String> = founders.map(Place::word).collect();
        if index >= self.founders {
            words.push(self.places[index].word());
        }
        words.join(",")
    }

    pub fn flags(&self, index: usize) -> Vec<String> {
        let place = &self.places[index];
        let mut flags = vec![
            "--node-id".to_owned(),
            place.id.to_string(),
            "--cluster".to_owned(),
            CLUSTER.to_owned(),
            "--peers".to_owned(),
            self.peers(index),
            "--resp-address".to_owned(),
            place.resp.to_string(),
            "--fabric-address".to_owned(),
            place.fabric.to_string(),
            "--log-slots".to_owned(),
            "1024".to_owned(),
            "--request-timeout".to_owned(),
            "10s".to_owned(),
        ];
        if index >= self.founders {
            flags.extend(["--join".to_owned(), "on".to_owned()]);
        }
        if let Some(address) = self.documents.get(index) {
            let word =
                |(at, address): (usize, &SocketAddr)| format!("{}={address}", self.places[at].id);
            let members: Vec<String> = self.documents.iter().enumerate().map(word).collect();
            flags.extend(["--documents-members".to_owned(), members.join(",")]);
            flags.extend(["--documents-address".to_owned(), address.to_string()]);
        }
        flags.extend(self.more.iter().cloned());
        flags
    }

    pub fn start(&mut self, index: usize) {
        let flags = self.flags(index);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        self.members[index] = Some(Server::start(&self.data(index), &flags));
    }

    pub fn kill(&mut self, index: usize) {
        self.members[index].take().unwrap().kill();
    }

    pub fn client(&self, index: usize) -> Connection {
        Connection::open(self.places[index].resp).unwrap()
    }

    /// Asks a member until the reply is no error, as a client that retries does.
    pub fn ask(&self, index: usize, words: &[&str]) -> Reply {
        let started = Instant::now();
        loop {
            let reply = ask(&mut self.client(index), words);
            if !matches!(reply, Reply::Error(_)) {
                return reply;
            }
            if started.elapsed() >= PATIENCE {
                panic!("{words:?} at {index}: {}\n{}", reply.text(), self.described());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// What every member says of the log, for whoever reads a failure.
    pub fn described(&self) -> String {
        let mut text = String::new();
        for (index, member) in self.members.iter().enumerate() {
            let Some(member) = member else { continue };
            let info = ask(&mut self.client(index), &["INFO", "replication"]).text();
            text.push_str(&format!("member at {index}:\n{info}{}\n", member.complaints()));
        }
        text
    }

    /// A line of INFO replication.
    pub fn info(&self, index: usize, name: &str) -> String {
        let text = ask(&mut self.client(index), &["INFO", "replication"]).text();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("no {name} in {text}")).to_owned()
    }

    /// Index of the leader, once there is one.
    pub fn leader(&self) -> usize {
        let started = Instant::now();
        loop {
            for index in (0..self.members.len()).filter(|index| self.members[*index].is_some()) {
                if self.info(index, "log_role") == "leader" {
                    return index;
                }
            }
            assert!(started.elapsed() < PATIENCE, "nobody leads");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn order(&self, index: usize, words: &[&str]) -> String {
        let address = self.places[index].resp.to_string();
        let mut arguments = vec!["cluster", words[0], "--address", address.as_str()];
        arguments.extend(&words[1..]);
        let output = beeline(&arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{words:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }
}

pub fn ask(client: &mut Connection, words: &[&str]) -> Reply {
    let bytes: Vec<&[u8]> = words.iter().map(|word| word.as_bytes()).collect();
    client.call(&bytes).unwrap_or_else(|error| panic!("{words:?}: {error}"))
}

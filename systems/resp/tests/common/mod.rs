//! An in-memory node for tests: a store on a volatile pool, sessions, and a stand-in server.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "helpers of tests")]

pub mod redis;

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Mutex, MutexGuard};

use beeline_env::{Clock, SystemClock};
use beeline_kv::{Keyspace, Shard, Store, StoreOptions};
use beeline_pmem::{Pool, PoolOptions};
use beeline_resp::{
    AbsentWatches, After, ArgsBuffer, ClientInfo, ConfigError, Executor, KillFilter, Output, Pause,
    Plan, Route, SaveError, Server, Session, Shutdown,
};

/// A server whose every answer a test can see or set.
#[derive(Debug, Default)]
pub struct TestServer {
    pub password: RefCell<Option<Vec<u8>>>,
    pub parameters: RefCell<Vec<(String, String)>>,
    pub clients: RefCell<Vec<ClientInfo>>,
    pub killed: RefCell<Vec<KillFilter>>,
    pub pauses: RefCell<Vec<(u64, Pause)>>,
    pub saving: Cell<bool>,
    pub shutdowns: RefCell<Vec<Shutdown>>,
    pub resets: Cell<u32>,
    pub absent: AbsentWatches,
}

impl Server for TestServer {
    fn unix_us(&self) -> u64 {
        SystemClock.unix_ms() * 1000
    }
    fn redis_version(&self) -> &str {
        "7.0.15"
    }
    fn password_required(&self) -> bool {
        self.password.borrow().is_some()
    }
    fn absent_watches(&self) -> &AbsentWatches {
        &self.absent
    }
    fn authenticate(&self, user: &[u8], password: &[u8]) -> bool {
        user == b"default"
            && self.password.borrow().as_ref().is_none_or(|expected| expected == password)
    }
    fn info_sections(&self) -> &[&'static str] {
        &["server", "clients"]
    }
    fn info(&self, section: &str, out: &mut String) {
        match section {
            "server" => out.push_str("redis_version:7.0.15\r\n"),
            _ => out.push_str("connected_clients:1\r\n"),
        }
    }
    fn config(&self, visit: &mut dyn FnMut(&str, &str)) {
        for (name, value) in self.parameters.borrow().iter() {
            visit(name, value);
        }
    }
    fn config_set(&self, pairs: &[(String, String)]) -> Result<(), ConfigError> {
        let mut parameters = self.parameters.borrow_mut();
        for (name, value) in pairs {
            let known = parameters.iter_mut().find(|(known, _)| known.eq_ignore_ascii_case(name));
            match known {
                Some((_, old)) => old.clone_from(value),
                None => return Err(ConfigError::Unknown { name: name.clone() }),
            }
        }
        Ok(())
    }
    fn config_rewrite(&self) -> Result<(), String> {
        Err("The server is running without a config file".to_owned())
    }
    fn reset_statistics(&self) {
        self.resets.set(self.resets.get() + 1);
    }
    fn clients(&self, visit: &mut dyn FnMut(&ClientInfo)) {
        self.clients.borrow().iter().for_each(visit);
    }
    fn kill_clients(&self, filter: &KillFilter, _caller: u64) -> usize {
        self.killed.borrow_mut().push(filter.clone());
        self.clients.borrow().iter().filter(|client| filter.selects(client)).count()
    }
    fn pause_clients(&self, milliseconds: u64, pause: Pause) {
        self.pauses.borrow_mut().push((milliseconds, pause));
    }
    fn unpause_clients(&self) {
        self.pauses.borrow_mut().clear();
    }
    fn save(&self) -> Result<(), SaveError> {
        if self.saving.get() { Err(SaveError::InProgress) } else { Ok(()) }
    }
    fn save_in_background(&self, schedule: bool) -> Result<bool, SaveError> {
        match (self.saving.replace(true), schedule) {
            (false, _) => Ok(false),
            (true, true) => Ok(true),
            (true, false) => Err(SaveError::InProgress),
        }
    }
    fn last_save_seconds(&self) -> u64 {
        1_700_000_000
    }
    fn shutdown(&self, request: Shutdown) -> Result<(), String> {
        self.shutdowns.borrow_mut().push(request);
        Ok(())
    }
    fn abort_shutdown(&self) -> bool {
        false
    }
}

/// Shards of one store, and what runs commands on them.
pub struct Node {
    pub store: Arc<Store>,
    pub shards: Vec<Arc<Mutex<Shard>>>,
    pub executor: Executor,
    pub server: TestServer,
}

impl Node {
    pub fn new(shards: usize) -> Self {
        Self::with_clock(shards, Arc::new(SystemClock))
    }

    /// A store of `capacity_bytes` in small segments.
    pub fn with_capacity(shards: usize, capacity_bytes: u64) -> Self {
        Self::on(PoolOptions::volatile(64 << 10, capacity_bytes), shards, Arc::new(SystemClock))
    }

    pub fn with_clock(shards: usize, clock: Arc<dyn Clock>) -> Self {
        Self::on(PoolOptions::volatile(1 << 20, 1 << 30), shards, clock)
    }

    fn on(pool: PoolOptions, shards: usize, clock: Arc<dyn Clock>) -> Self {
        Self::on_pool(Pool::dram(&pool).unwrap(), shards, clock)
    }

    /// A store on any pool.
    pub fn on_pool(pool: Pool, shards: usize, clock: Arc<dyn Clock>) -> Self {
        let options = StoreOptions { shards, clock, ..StoreOptions::default() };
        let (store, shards, _) = Store::open(pool, options).unwrap();
        Self { store, shards, executor: Executor::new(), server: TestServer::default() }
    }

    pub fn session(&self) -> Session {
        Session::new(ClientInfo { id: 7, ..ClientInfo::default() }, &self.server)
    }

    /// Runs a request as a node does: with exactly the shards its route asks for.
    pub fn run(&mut self, session: &mut Session, words: &[&[u8]], out: &mut Output) -> After {
        let mut request = ArgsBuffer::new();
        assert!(request.push_words(words));
        let plan = Plan::new(session, request.get(0));
        let route = plan.route(session, &*self.store);
        let needed = |index: usize| match &route {
            Route::Here => index == 0,
            Route::Shard(shard) => index == *shard,
            Route::Shards(set) => set.contains(index),
            Route::All => true,
        };
        let mut guards: Vec<MutexGuard<'_, Shard>> = self
            .shards
            .iter()
            .enumerate()
            .filter(|(index, _)| needed(*index))
            .map(|(_, shard)| shard.lock().unwrap())
            .collect();
        let mut keyspace = match guards.as_mut_slice() {
            [only] => Keyspace::single(only),
            several => Keyspace::many(several.iter_mut().map(|guard| &mut **guard).collect(), 0),
        };
        let after = self.executor.execute(session, plan, &mut keyspace, out, &self.server);
        keyspace.commit().unwrap();
        after
    }

    /// The raw reply to a request.
    pub fn reply(&mut self, session: &mut Session, words: &[&[u8]]) -> Vec<u8> {
        let mut out = Output::default();
        let _ = self.run(session, words, &mut out);
        out.as_bytes().to_vec()
    }

    /// The reply to a request written as words with blanks between, as text.
    pub fn text(&mut self, session: &mut Session, request: &str) -> String {
        let words: Vec<&[u8]> = request.split(' ').map(str::as_bytes).collect();
        String::from_utf8_lossy(&self.reply(session, &words)).into_owned()
    }
}

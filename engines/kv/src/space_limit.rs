//! Limits of single namespaces: how many bytes the entries of one may take, and which of its keys go then.
//!
//! Every service's namespace has an [`Account`]: the bytes of its live entries, shard by shard, each
//! written by its shard's thread. A write looks at the sum before it stores anything. Where a policy says
//! which keys go, a shard evicts its own, as long as it has more than its part; one that has less
//! stores, and the others' next writes and upkeep make up for it. So a namespace with a policy stays
//! below its limit and one part of it for each shard but one; one without a policy stays below its
//! limit.
//!
//! What the index takes (some 40 bytes a key) counts for the store's limit alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use crate::options::Eviction;
use crate::shard::Shard;
use crate::shard::upkeep::{SLICES_PER_WRITE, Swept};
use crate::space::{FIRST_NAMESPACE, IN_ROWS};
use crate::stats;
use crate::store::{Store, code_of};
use crate::{Keyspace, KvError};

/// How much a namespace may hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NamespaceLimit {
    /// Most bytes of its live entries, headers and keys included; 0: the store's limits alone.
    pub max_bytes: u64,
    /// Which of its keys go when that is reached; without a policy what needs more is refused.
    pub eviction: Eviction,
}

/// Bytes of live entries in one shard, on lines of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Part(AtomicU64);

/// What the shards know together of one namespace.
#[derive(Debug)]
pub(crate) struct Account {
    parts: Box<[Part]>,
    max_bytes: AtomicU64,
    eviction: AtomicU8,
}

impl Account {
    pub fn new(shards: usize) -> Self {
        let (max_bytes, eviction) = (AtomicU64::new(0), AtomicU8::new(0));
        Self { parts: (0..shards).map(|_| Part::default()).collect(), max_bytes, eviction }
    }

    pub fn set_limit(&self, limit: NamespaceLimit) {
        self.max_bytes.store(limit.max_bytes, Ordering::Relaxed);
        self.eviction.store(code_of(limit.eviction), Ordering::Relaxed);
    }

    /// Sets what a shard holds.
    pub fn set(&self, shard: usize, bytes: u64) {
        stats::set(&self.parts[shard].0, bytes);
    }

    /// Adds to what a shard holds, or with a wrapped number takes from it.
    #[inline]
    pub fn add(&self, shard: usize, bytes: u64) {
        stats::add(&self.parts[shard].0, bytes);
    }

    fn part(&self, shard: usize) -> u64 {
        self.parts[shard].0.load(Ordering::Relaxed)
    }

    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.0.load(Ordering::Relaxed)).fold(0, u64::wrapping_add)
    }

    /// The policy, and the most bytes: of all shards, and of each before it evicts.
    fn limits(&self) -> Option<(Eviction, u64, u64)> {
        let max_bytes = self.max_bytes.load(Ordering::Relaxed);
        let code = usize::from(self.eviction.load(Ordering::Relaxed));
        let policy = Eviction::ALL.get(code).copied().unwrap_or_default();
        (max_bytes != 0).then(|| (policy, max_bytes, max_bytes / self.parts.len() as u64))
    }
}

impl Store {
    /// Bytes of the live entries of a service's namespace; `None` where there is none.
    #[must_use]
    pub fn namespace_bytes(&self, number: u32) -> Option<u64> {
        self.catalog.account(number).map(|account| account.bytes())
    }

    /// The limit of a service's namespace; `None` where there is none.
    #[must_use]
    pub fn namespace_limit(&self, number: u32) -> Option<NamespaceLimit> {
        self.catalog.get(number).map(|known| known.limit)
    }
}

impl Shard {
    /// Makes room under the namespace's own limit for `bytes` in this shard, of a batch that stores
    /// `together` in all of them.
    ///
    /// Errors: [`KvError::NamespaceFull`].
    pub(crate) fn fit_namespace(
        &mut self,
        namespace: u32,
        bytes: u64,
        together: u64,
    ) -> Result<(), KvError> {
        if namespace & !IN_ROWS < FIRST_NAMESPACE {
            return Ok(());
        }
        let Some(account) = self.spaces.account(namespace).map(Arc::clone) else { return Ok(()) };
        let Some((policy, limit, share)) = account.limits() else { return Ok(()) };
        let mut slices = 0;
        loop {
            let used = account.bytes();
            if used.saturating_add(together) <= limit {
                return Ok(());
            }
            slices += 1;
            // Keys of rows that ended are the first to go.
            if slices <= SLICES_PER_WRITE && self.sweep_row_ends(true)? == Swept::Some {
                continue;
            }
            if policy != Eviction::NoEviction {
                if together <= limit && account.part(self.index) + bytes <= share {
                    return Ok(());
                }
                if together <= limit && self.evict_one(policy, Some(namespace))? {
                    continue;
                }
            }
            let number = namespace & !IN_ROWS;
            return Err(KvError::NamespaceFull { number, used_bytes: used, limit_bytes: limit });
        }
    }

    /// Evicts some keys of namespaces that hold too much; true when there were any.
    pub(crate) fn evict_by_namespace(&mut self) -> Result<bool, KvError> {
        const KEYS: u32 = 16;
        let mut evicted = false;
        for namespace in self.spaces.extra_numbers() {
            let Some(account) = self.spaces.account(namespace).map(Arc::clone) else { continue };
            let Some((policy, limit, share)) = account.limits() else { continue };
            for _ in 0..KEYS {
                let over = account.bytes() > limit && account.part(self.index) > share;
                if policy == Eviction::NoEviction
                    || !over
                    || !self.evict_one(policy, Some(namespace))?
                {
                    break;
                }
                evicted = true;
            }
        }
        Ok(evicted)
    }
}

impl Keyspace<'_> {
    /// Sets how much a service's namespace may hold; persisted when it returns. One that holds more
    /// already loses keys by and by where there is a policy, and takes nothing more where there is none.
    ///
    /// Eviction is a member's own decision: replicas that have to agree set no policy.
    ///
    /// Errors: [`KvError::NeedsAllShards`], [`KvError::Namespace`], [`KvError::NamespaceKind`] for streams
    /// and a policy, [`KvError::PoolFull`], the pool's.
    pub fn limit_namespace(&mut self, number: u32, limit: NamespaceLimit) -> Result<(), KvError> {
        self.needs_all()?;
        let store = Arc::clone(self.store());
        let Some(mut known) = store.catalog.get(number) else {
            return Err(KvError::Namespace { number });
        };
        if known.limit == limit {
            return Ok(());
        }
        if known.options.stream && limit.eviction != Eviction::NoEviction {
            // The keys of such a namespace are the streams themselves.
            let reason = "holds streams: what they keep is an option of the namespace (keep_bytes)";
            return Err(KvError::NamespaceKind { number, reason });
        }
        known.limit = limit;
        self.note_namespace(number, &known)
    }
}

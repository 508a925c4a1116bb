//! What was asked for and what was acknowledged, and whether a store agrees with it.
//!
//! Every key has one writer, so its operations stand in an order. After a crash a key may show
//! what its last acknowledged operation left, or what any later one would have left, and nothing
//! else; of an atomic operation either everything shows or nothing.

use std::collections::BTreeMap;

/// Database and number of a key.
pub type Key = (u8, u16);

/// What an operation does to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The key holds the value of this stamp (unique) until this time (0 = for ever).
    Put { stamp: u64, expires_at_ms: u64 },
    /// The key is gone.
    Delete,
}

#[derive(Clone, Debug)]
pub struct Operation {
    pub effects: Vec<(Key, Effect)>,
    /// All of it or nothing.
    pub atomic: bool,
    /// The mark from which on it counts as acknowledged.
    pub acknowledged: Option<u64>,
}

/// What a store shows: stamp by key.
pub type Observed = BTreeMap<Key, u64>;

/// The wall clock as far as it matters: now, and the latest it ever was since the effects.
#[derive(Clone, Copy, Debug)]
pub struct Time {
    pub now_ms: u64,
    pub latest_ms: u64,
}

#[derive(Clone, Debug, Default)]
pub struct Ledger {
    /// What each key may have held at the start.
    start: BTreeMap<Key, Vec<Effect>>,
    pub operations: Vec<Operation>,
}

impl Ledger {
    /// What was observed is what counts from here on. A key that is absent because its time was
    /// past may still be on media.
    pub fn restart(&mut self, observed: &Observed, keys: impl Iterator<Item = Key>) {
        let mut start = BTreeMap::new();
        for key in keys {
            let shown = observed.get(&key).copied();
            let effects = self.candidates(key, u64::MAX).into_iter().map(|(_, effect)| effect);
            let fits = |effect: &Effect| match (*effect, shown) {
                (Effect::Put { stamp, .. }, Some(shown)) => stamp == shown,
                (Effect::Put { expires_at_ms, .. }, None) => expires_at_ms != 0,
                (Effect::Delete, shown) => shown.is_none(),
            };
            start.insert(key, effects.filter(fits).collect());
        }
        *self = Self { start, operations: Vec::new() };
    }

    /// Effects on a key with their order, the start first as 0.
    fn effects_of(&self, key: Key) -> impl Iterator<Item = (usize, Effect)> {
        let start = self.start.get(&key).cloned().unwrap_or_else(|| vec![Effect::Delete]);
        let later = self.operations.iter().enumerate().flat_map(move |(number, operation)| {
            let mine = operation.effects.iter().filter(move |(known, _)| *known == key);
            mine.map(move |(_, effect)| (number + 1, *effect))
        });
        start.into_iter().map(|effect| (0, effect)).chain(later)
    }

    fn is_acknowledged(&self, order: usize, mark: u64) -> bool {
        order > 0 && self.operations[order - 1].acknowledged.is_some_and(|at| at <= mark)
    }

    /// Effects a key may show.
    fn candidates(&self, key: Key, mark: u64) -> Vec<(usize, Effect)> {
        let mut candidates = Vec::new();
        for (order, effect) in self.effects_of(key) {
            if self.is_acknowledged(order, mark) {
                candidates.clear();
            }
            // An atomic operation may change a key twice: only the last of it can show.
            candidates.retain(|(known, _)| *known != order || order == 0);
            candidates.push((order, effect));
        }
        candidates
    }

    fn explains(effect: Effect, shown: Option<u64>, time: Time) -> bool {
        match (effect, shown) {
            (Effect::Delete, shown) => shown.is_none(),
            (Effect::Put { stamp, expires_at_ms }, Some(shown)) => {
                stamp == shown && (expires_at_ms == 0 || expires_at_ms > time.now_ms)
            }
            (Effect::Put { expires_at_ms, .. }, None) => {
                expires_at_ms != 0 && expires_at_ms <= time.latest_ms
            }
        }
    }

    /// What is wrong with what a store shows, in sentences. `keys` are all that were ever used.
    pub fn violations(
        &self,
        mark: u64,
        observed: &Observed,
        keys: impl Iterator<Item = Key>,
        time: Time,
    ) -> Vec<String> {
        let mut wrong = Vec::new();
        // The latest operation that explains what each key shows.
        let mut explained: BTreeMap<Key, usize> = BTreeMap::new();
        for key in keys {
            let shown = observed.get(&key).copied();
            let candidates = self.candidates(key, mark);
            let latest = candidates
                .iter()
                .filter(|(_, effect)| Self::explains(*effect, shown, time))
                .map(|(order, _)| *order)
                .max();
            match latest {
                Some(order) => {
                    explained.insert(key, order);
                }
                None => {
                    let past: Vec<_> = self
                        .effects_of(key)
                        .map(|(order, effect)| {
                            let known = self.is_acknowledged(order, mark);
                            format!("{}{effect:?}", if known { "acknowledged " } else { "" })
                        })
                        .collect();
                    let past = &past[past.len().saturating_sub(8)..];
                    wrong.push(format!("key {key:?} shows {shown:?}, history {past:?}, {time:?}"));
                }
            }
        }
        for (number, operation) in self.operations.iter().enumerate() {
            let order = number + 1;
            if !operation.atomic || self.is_acknowledged(order, mark) {
                continue;
            }
            let shows = operation.effects.iter().find(|(key, effect)| {
                matches!(effect, Effect::Put { stamp, .. } if observed.get(key) == Some(stamp))
            });
            let Some((witness, _)) = shows else { continue };
            for (key, _) in &operation.effects {
                if explained.get(key).is_some_and(|latest| *latest < order) {
                    let past: Vec<_> = self.effects_of(*key).collect();
                    wrong.push(format!(
                        "batch {order} {:?} shows at {witness:?} and not at {key:?}, which shows \
                         {:?} of {past:?}",
                        operation.effects,
                        observed.get(key)
                    ));
                }
            }
        }
        wrong
    }
}

#[test]
fn the_ledger_tells_lost_resurrected_and_torn_from_allowed() {
    let put = |stamp| Effect::Put { stamp, expires_at_ms: 0 };
    let operation = |effects: &[(Key, Effect)], acknowledged| Operation {
        effects: effects.to_vec(),
        atomic: effects.len() > 1,
        acknowledged,
    };
    let (a, b) = ((0, 1), (0, 2));
    let ledger = Ledger {
        start: BTreeMap::new(),
        operations: vec![
            operation(&[(a, put(1))], Some(1)),
            operation(&[(b, put(2))], Some(1)),
            operation(&[(b, Effect::Delete)], Some(2)),
            operation(&[(a, put(3)), (b, put(4))], None),
        ],
    };
    let check = |mark, shown: &[(Key, u64)]| {
        let time = Time { now_ms: 10, latest_ms: 10 };
        let observed = shown.iter().copied().collect();
        ledger.violations(mark, &observed, [a, b].into_iter(), time).len()
    };
    assert_eq!(check(2, &[(a, 1)]), 0, "nothing of the batch");
    assert_eq!(check(2, &[(a, 3), (b, 4)]), 0, "all of the batch");
    assert_eq!(check(2, &[(a, 3)]), 1, "half a batch");
    assert_eq!(check(2, &[(b, 4)]), 1, "an acknowledged put is lost");
    assert_eq!(check(2, &[(a, 1), (b, 2)]), 1, "a deleted key is back");
    assert_eq!(check(1, &[(a, 1), (b, 2)]), 0, "its deletion was not acknowledged yet");
    assert_eq!(check(2, &[(a, 9)]), 1, "a value nobody wrote");
}

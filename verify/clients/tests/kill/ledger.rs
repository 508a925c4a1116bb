//! What each key must hold after a crash: the last acknowledged state, or the one in flight.

use std::collections::BTreeMap;

use beeline_verify_clients::{Connection, Reply};

/// What a key holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Nothing.
    #[default]
    Absent,
    /// A value, perhaps with hours to live.
    Kept { value: u64, expires: bool },
    /// A value that expired before anybody looks after the crash.
    Brief { value: u64 },
}

impl State {
    /// A value without an end.
    pub fn of(value: u64) -> Self {
        Self::Kept { value, expires: false }
    }

    fn survives_as(self, found: Self) -> bool {
        match self {
            Self::Brief { .. } => found == Self::Absent,
            state => found == state,
        }
    }
}

/// What is known of one key.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fate {
    pub acknowledged: State,
    pub in_flight: Option<State>,
}

/// What is known of the keys of one client, or of all.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub fates: BTreeMap<String, Fate>,
    /// Writes acknowledged.
    pub writes: u64,
}

impl Ledger {
    /// The acknowledged state of a key.
    pub fn state(&self, name: &str) -> State {
        self.fates.get(name).map_or(State::Absent, |fate| fate.acknowledged)
    }

    /// A request is on its way.
    pub fn sent(&mut self, name: &str, state: State) {
        let fate = self.fates.entry(name.to_owned()).or_default();
        assert!(fate.in_flight.is_none(), "one request per key at a time");
        fate.in_flight = Some(state);
    }

    /// It was acknowledged.
    pub fn settled(&mut self, name: &str) {
        let fate = self.fates.get_mut(name).unwrap();
        fate.acknowledged = fate.in_flight.take().unwrap();
        self.writes += 1;
    }

    /// The part of the ledger with this prefix, its count of writes at zero.
    pub fn part(&self, prefix: &str) -> Self {
        let own = self.fates.iter().filter(|(name, _)| name.starts_with(prefix));
        Self { fates: own.map(|(name, fate)| (name.clone(), *fate)).collect(), writes: 0 }
    }

    /// Takes a part back.
    pub fn join(&mut self, part: Self) {
        self.fates.extend(part.fates);
        self.writes += part.writes;
    }

    /// Looks at every key and takes what is there as acknowledged. Returns how many it looked at.
    pub fn check(&mut self, connection: &mut Connection, round: u64) -> u64 {
        for (name, fate) in &mut self.fates {
            let found = stored(connection, name);
            let possible = fate.acknowledged.survives_as(found)
                || fate.in_flight.is_some_and(|state| state.survives_as(found));
            assert!(possible, "round {round}: {name} holds {found:?}; {fate:?}");
            *fate = Fate { acknowledged: found, in_flight: None };
        }
        self.fates.len() as u64
    }
}

/// What the node says a key holds.
pub fn stored(connection: &mut Connection, name: &str) -> State {
    let value = match connection.call(&[b"GET", name.as_bytes()]) {
        Ok(Reply::Null) => return State::Absent,
        Ok(Reply::Bulk(bytes)) => {
            let text = String::from_utf8_lossy(&bytes).into_owned();
            let number = text.split(':').next().and_then(|number| number.parse().ok());
            number.unwrap_or_else(|| panic!("{name} holds {text:?}"))
        }
        other => panic!("GET {name}: {other:?}"),
    };
    match connection.call(&[b"TTL", name.as_bytes()]) {
        Ok(Reply::Integer(-1)) => State::Kept { value, expires: false },
        Ok(Reply::Integer(left)) if left > 1000 => State::Kept { value, expires: true },
        other => panic!("TTL {name}: {other:?}"),
    }
}

/// A small generator; the seed must not be zero.
#[derive(Clone, Copy, Debug)]
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        (self.next() >> 32) % bound
    }

    /// A value that begins with its number.
    pub fn value(&mut self, number: u64) -> String {
        let padding = "x".repeat(self.below(300) as usize);
        format!("{number}:{padding}")
    }
}

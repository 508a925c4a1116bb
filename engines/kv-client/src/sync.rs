//! Blocking calls: one request, one answer.

use std::time::Duration;

use beeline_kv::wire::pop_scan_record;

use crate::client::{Answer, Client, Command};
use crate::error::ClientError;
use crate::options::PutOptions;

/// Empty polls between two looks at the clock.
const SPINS_PER_CLOCK: u32 = 32;

/// What goes with a value that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueInfo {
    /// Its version.
    pub version: u64,
    /// Its encoding; 0 is a string.
    pub kind: u8,
    /// When it expires, ms since the epoch; 0 never.
    pub expires_at_ms: u64,
}

/// One page of a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScanPage {
    /// Where the next page begins; `None` after the last.
    pub next: Option<(u16, u64)>,
    /// Keys and the encodings of their values.
    pub keys: Vec<(Vec<u8>, u8)>,
}

impl Client {
    /// Runs one command to its end. `take` sees the answer.
    fn call<T>(
        &mut self,
        command: Command<'_>,
        mut take: impl FnMut(Answer<'_>) -> T,
    ) -> Result<T, ClientError> {
        let outstanding = self.outstanding();
        if outstanding > 0 {
            return Err(ClientError::PipelineInUse { outstanding });
        }
        let token = self.submit(command)?;
        let mut outcome = None;
        let spin_ns = u64::try_from(self.options().spin.as_nanos()).unwrap_or(u64::MAX);
        let mut deliver = |completed, answer: Result<Answer<'_>, ClientError>| {
            if completed == token {
                outcome = Some(answer.map(&mut take));
            }
        };
        // Every path through `poll` ends in a delivery: an answer, a loss, or the time-out.
        let mut sleeping = spin_ns == 0;
        let (mut spins, mut spin_until) = (0_u32, None);
        while self.outstanding() > 0 {
            if sleeping {
                self.wait(Duration::from_millis(50), &mut deliver)?;
            } else if self.poll(&mut deliver)? == 0 {
                std::hint::spin_loop();
                spins = spins.wrapping_add(1);
                // An answer that comes at once costs no look at the clock.
                if spins.is_multiple_of(SPINS_PER_CLOCK) {
                    let now = self.options().clock.monotonic_ns();
                    sleeping = now >= *spin_until.get_or_insert(now.saturating_add(spin_ns));
                }
            }
        }
        outcome.unwrap_or(Err(ClientError::NotConnected { shard: 0 }))
    }

    /// As [`Client::call`], once more after a lost connection; for requests that change nothing.
    fn call_again<T>(
        &mut self,
        command: Command<'_>,
        mut take: impl FnMut(Answer<'_>) -> T,
    ) -> Result<T, ClientError> {
        match self.call(command, &mut take) {
            Err(ClientError::ConnectionLost { .. }) if self.options().reconnect => {
                self.call(command, &mut take)
            }
            other => other,
        }
    }

    /// Stores `value` under `key`; returns its version once it is persisted at the server's
    /// durability.
    ///
    /// Errors: [`ClientError`]; see [`ClientError::is_outcome_unknown`].
    pub fn put(
        &mut self,
        database: u8,
        key: &[u8],
        value: &[u8],
        options: PutOptions,
    ) -> Result<u64, ClientError> {
        let command = Command::Put { database, key, value, options };
        self.call(command, |answer| match answer {
            Answer::Stored { version } => version,
            _ => 0,
        })
    }

    /// Reads `key` into `value`, which is overwritten. `None`: there is no such key.
    ///
    /// Errors: [`ClientError`]. Tried again once when the connection was lost.
    pub fn get_into(
        &mut self,
        database: u8,
        key: &[u8],
        value: &mut Vec<u8>,
    ) -> Result<Option<ValueInfo>, ClientError> {
        self.call_again(Command::Get { database, key }, |answer| match answer {
            Answer::Value { bytes, kind, version, expires_at_ms } => {
                value.clear();
                value.extend_from_slice(bytes);
                Some(ValueInfo { version, kind, expires_at_ms })
            }
            _ => None,
        })
    }

    /// Reads `key`.
    ///
    /// Errors: as [`Client::get_into`].
    pub fn get(&mut self, database: u8, key: &[u8]) -> Result<Option<Vec<u8>>, ClientError> {
        let mut value = Vec::new();
        Ok(self.get_into(database, key, &mut value)?.map(|_| value))
    }

    /// Removes `key`; true when there was one.
    ///
    /// Errors: as [`Client::put`].
    pub fn delete(&mut self, database: u8, key: &[u8]) -> Result<bool, ClientError> {
        let command = Command::Delete { database, key };
        self.call(command, |answer| matches!(answer, Answer::Stored { .. }))
    }

    /// One page of about `count` keys from `cursor` on: `(0, 0)` begins, then
    /// [`ScanPage::next`]. A key that is there throughout a scan is met exactly once; one that
    /// comes or goes meanwhile may or may not be.
    ///
    /// Errors: as [`Client::get_into`].
    pub fn scan(
        &mut self,
        database: u8,
        (shard, cursor): (u16, u64),
        count: u32,
    ) -> Result<ScanPage, ClientError> {
        let mut keys = Vec::new();
        let next = self.call_again(Command::Scan { database, shard, cursor, count }, |answer| {
            let Answer::Keys { next, mut records, .. } = answer else { return 0 };
            keys.clear();
            while let Some((key, kind)) = pop_scan_record(&mut records) {
                keys.push((key.to_vec(), kind));
            }
            next
        })?;
        let next = match next {
            0 if shard + 1 < self.shards() => Some((shard + 1, 0)),
            0 => None,
            cursor => Some((shard, cursor)),
        };
        Ok(ScanPage { next, keys })
    }

    /// Statistics of one shard, one `name value` a line.
    ///
    /// Errors: as [`Client::get_into`].
    pub fn statistics(&mut self, shard: u16) -> Result<String, ClientError> {
        self.call_again(Command::Statistics { shard }, |answer| match answer {
            Answer::Text(text) => String::from_utf8_lossy(text).into_owned(),
            _ => String::new(),
        })
    }

    /// Waits for the shard to answer.
    ///
    /// Errors: as [`Client::get_into`].
    pub fn ping(&mut self, shard: u16) -> Result<(), ClientError> {
        self.call_again(Command::Ping { shard }, |_| ())
    }
}

//! Records of a snapshot on their way into a shard, and what the writer of a snapshot asks a shard.

use crate::KvError;
use crate::entry::TOMBSTONE;
use crate::index::STALE_UNKNOWN;
use crate::shard::Shard;
use crate::shard::log::{Chain, Draft};
use crate::snapshot::Record;

impl Shard {
    /// Stores a record of a snapshot under its own version, unless a newer one is there.
    pub(crate) fn restore_record(&mut self, record: &Record, body: &[u8]) -> Result<(), KvError> {
        if record.is_appended() {
            return self.restore_appended(record, body);
        }
        if record.namespace == crate::row_ends::ROW_ENDS {
            self.store.raise_format_for_row_ends()?;
        }
        let (key, value) = body.split_at(usize::from(record.key_length));
        let hash = self.store.place(record.namespace, key);
        if let Some(id) = self.find(record.namespace, hash, key)
            && let Some(index) = self.spaces.get(record.namespace)
        {
            let location = index.slot(id).location;
            // The segment of one that is not may be gone.
            if location.is_readable() {
                let state = self.cache.get(&self.store.table, location.segment());
                if crate::shard::read_header(state, location.offset()).version >= record.version {
                    return Ok(());
                }
            }
        }
        let draft = Draft {
            version: record.version,
            hash,
            namespace: record.namespace,
            kind: record.kind,
            flags: record.flags,
            expires_at_ms: record.expires_at_ms,
            key,
            value: &[value],
        };
        let appended = self.append(Chain::Data, &draft)?;
        self.note_expiry(record.expires_at_ms);
        self.install(record.namespace, hash, key, &appended);
        if record.flags & TOMBSTONE != 0
            && let Some(id) = self.find(record.namespace, hash, key)
        {
            // Older records of the key may still come: the deletion stays until the next opening.
            self.change_slot(record.namespace, id, |slot| slot.stale = STALE_UNKNOWN);
        }
        Ok(())
    }
}

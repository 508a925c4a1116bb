//! Keys of a row.
//!
//! | key | value |
//! |---|---|
//! | 1, name | catalog entry of a collection (BSON) |
//! | 2, collection u32, record key | document (BSON) |
//! | 3, index u32, sortable values, record key | length of the record key u32 (little-endian) |
//! | 4, optime u64 | log entry (BSON) |
//! | 5, session 16 bytes, statement | outcome of a retryable write (BSON) |
//! | 6, word | numbers of the database (BSON) |
//! | 7, optime u64 | entry of the operation log, in a member of a replica set |
//! | 8, word | what a member keeps for itself |
//!
//! Numbers in keys are big-endian. The row without a name holds the node's own: 1, name of a
//! database; 2, name of a user.
//!
//! A record key is the sortable key of `_id`; in a capped collection the number of the insertion,
//! whose order such a collection keeps.

/// The row that tells which databases there are.
pub const SYSTEM_ROW: &[u8] = b"";

/// First bytes of keys.
pub mod kind {
    /// Catalog entries; in the system's row, databases.
    pub const CATALOG: u8 = 1;
    /// Documents; in the system's row, users.
    pub const RECORD: u8 = 2;
    /// Index entries.
    pub const INDEX: u8 = 3;
    /// The log.
    pub const LOG: u8 = 4;
    /// Outcomes of retryable writes.
    pub const OUTCOME: u8 = 5;
    /// Numbers of the database.
    pub const NUMBERS: u8 = 6;
    /// The operation log of a member of a replica set ([`crate::replica::entry`]).
    pub const OPLOG: u8 = 7;
    /// What a member keeps for itself.
    pub const OWN: u8 = 8;
}

/// A key of a word.
#[must_use]
pub fn word(kind: u8, word: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(1 + word.len());
    key.push(kind);
    key.extend_from_slice(word);
    key
}

/// A key of a number and what follows.
#[must_use]
pub fn numbered(kind: u8, number: u32, rest: &[u8]) -> Vec<u8> {
    let mut key = Vec::with_capacity(5 + rest.len());
    key.push(kind);
    key.extend_from_slice(&number.to_be_bytes());
    key.extend_from_slice(rest);
    key
}

/// Bytes of a key before what follows its number.
pub const NUMBERED: usize = 5;

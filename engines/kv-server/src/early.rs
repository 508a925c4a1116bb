//! Requests of a batch, copied and decoded before the first of them is executed: what they touch is
//! asked for while there is time, and nothing is copied, decoded or hashed twice.

use beeline_kv::Shard;
use beeline_kv::wire::{REQUEST_HEADER_BYTES, Request, RequestKind};
use beeline_os::memory::copy_out;

use crate::connection::Connection;

/// Requests longer than this wait for their turn.
const EARLY_BYTES: usize = REQUEST_HEADER_BYTES + 40;

/// A request of usual length, in a private copy.
#[derive(Debug)]
pub(crate) struct Early {
    /// Which completion of the batch brought it.
    pub completion: usize,
    request: Request,
    hash: u64,
    bytes: [u8; EARLY_BYTES],
    length: usize,
}

impl Early {
    /// Takes the message of `length` bytes out of receive `index`, and asks for the index line of
    /// its key and for the lines its result goes to. `None` where it is long, malformed or
    /// without a key; whoever executes it finds out which.
    #[inline]
    pub fn take(
        connection: &mut Connection,
        shard: &Shard,
        completion: usize,
        (index, length): (u32, u64),
    ) -> Option<Self> {
        let length = usize::try_from(length).ok()?;
        if length > EARLY_BYTES.min(connection.request_bytes as usize) {
            return None;
        }
        let mut bytes = [0; EARLY_BYTES];
        let offset = index as usize * connection.request_bytes as usize;
        copy_out(connection.receives.memory().as_ref(), offset, &mut bytes[..length]);
        let request = Request::decode(&bytes[..length])?;
        let key = request.key(&bytes[..length])?;
        if !matches!(request.kind, RequestKind::Get | RequestKind::Locate) {
            return None;
        }
        let hash = shard.expect_key(request.database, key);
        if request.kind == RequestKind::Get {
            connection.expect_result(&request);
        }
        Some(Self { completion, request, hash, bytes, length })
    }

    /// Asks for the entry, now that its index line is likely there.
    #[inline]
    pub fn expect_entry(&self, shard: &mut Shard) {
        shard.expect_entry(self.request.database, self.hash);
    }

    /// The request, decoded from [`Early::bytes`].
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// The hash of its key.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// The whole message.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

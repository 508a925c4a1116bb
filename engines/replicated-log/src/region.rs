//! The protocol's own memory over memory objects.

use std::sync::Arc;

use beeline_os::memory::{MemoryObject, copy_in, copy_out, load_u64, store_u64};
use beeline_paxos::{LogMemory, Status};

/// Log region and status words.
#[derive(Clone, Debug)]
pub(crate) struct Memory {
    pub(crate) log: Arc<dyn MemoryObject>,
    pub(crate) status: Arc<dyn MemoryObject>,
}

impl LogMemory for Memory {
    fn load(&self, offset: u64, into: &mut [u8]) {
        let offset = offset as usize;
        if into.len() == 8 && offset.is_multiple_of(8) {
            into.copy_from_slice(&load_u64(self.log.as_ref(), offset).to_le_bytes());
        } else {
            copy_out(self.log.as_ref(), offset, into);
        }
    }

    fn store(&mut self, offset: u64, bytes: &[u8]) {
        let offset = offset as usize;
        match <[u8; 8]>::try_from(bytes) {
            Ok(word) if offset.is_multiple_of(8) => {
                store_u64(self.log.as_ref(), offset, u64::from_le_bytes(word));
            }
            _ => copy_in(self.log.as_ref(), offset, bytes),
        }
        self.log.stored(offset, bytes.len());
    }

    fn publish(&mut self, status: Status) {
        for (index, word) in status.words().into_iter().enumerate() {
            store_u64(self.status.as_ref(), 8 * index, word);
        }
    }
}

//! A server's own memory, as the protocol sees it.

use crate::layout::Status;

/// Own memory: the log region and the status words.
///
/// Loads copy, because the leader may be writing the log region at that moment; what was copied is
/// validated and then used. Stores need not be durable: [`crate::Command::PersistLog`] asks for
/// that.
pub trait LogMemory {
    /// Copies bytes of the log region. A load of eight aligned bytes is one load.
    fn load(&self, offset: u64, into: &mut [u8]);

    /// Stores into the log region. A store of eight aligned bytes is one store.
    fn store(&mut self, offset: u64, bytes: &[u8]);

    /// Publishes the status words, each with one store.
    fn publish(&mut self, status: Status);
}

/// Memory of the heap, for tests and examples.
#[derive(Clone, Debug, Default)]
pub struct HeapMemory {
    log: Vec<u8>,
    /// As published last.
    pub status: Status,
}

impl HeapMemory {
    /// A zeroed log region of `bytes`.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self { log: vec![0; bytes as usize], status: Status::default() }
    }
}

impl LogMemory for HeapMemory {
    fn load(&self, offset: u64, into: &mut [u8]) {
        let start = offset as usize;
        into.copy_from_slice(&self.log[start..start + into.len()]);
    }

    fn store(&mut self, offset: u64, bytes: &[u8]) {
        let start = offset as usize;
        self.log[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn publish(&mut self, status: Status) {
        self.status = status;
    }
}

//! The store as other parts of its own program reach it: packets in, replies out, nothing waits.

use std::fmt;

/// Called once with the reply, on a thread of the store's; `None` where the packet has no header or
/// its reply could be too long.
pub type OnReply = Box<dyn FnOnce(Option<Vec<u8>>) + Send>;

/// A store in this process.
pub trait LocalStore: fmt::Debug + Send + Sync {
    /// Processors; a key belongs to [`crate::processor_of`] it.
    fn processors(&self) -> u32;

    /// Puts a packet into the queue of a processor and returns at once. A store that has stopped
    /// drops `done` without calling it.
    fn submit(&self, processor: u32, packet: Vec<u8>, reply_limit: usize, done: OnReply);
}

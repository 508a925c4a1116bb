//! The answer of another service to a request of a connection.

use std::sync::Arc;

use crate::parcel::{Delivery, Origin};
use crate::shared::Shared;

/// The place of one reply. It is filled once: by [`Answer::send`], or with an error where the answer
/// is dropped, so that a service that ends leaves no connection waiting.
#[derive(Debug)]
pub struct Answer {
    shared: Arc<Shared>,
    shard: usize,
    origin: Origin,
    sent: bool,
}

/// The reply where the service went away with the request, in RESP.
const GONE: &[u8] =
    b"-ERR the service that was asked has stopped; the request may have taken effect\r\n";

impl Answer {
    pub(crate) fn new(shared: Arc<Shared>, shard: usize, origin: Origin) -> Self {
        Self { shared, shard, origin, sent: false }
    }

    /// Sends the reply, in the protocol of the connection. From any thread; does not wait.
    pub fn send(mut self, reply: Vec<u8>) {
        self.deliver(reply);
    }

    fn deliver(&mut self, reply: Vec<u8>) {
        self.sent = true;
        self.shared.doors[self.shard].deliver(Delivery::Answer { origin: self.origin, reply });
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if !self.sent {
            self.deliver(GONE.to_vec());
        }
    }
}

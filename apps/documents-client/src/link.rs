//! A channel on a thread of its own, for a caller that moves between threads.
//!
//! Members of a replica set pull their primary's log over such links.

use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::time::Duration;

use beeline_documents_channel::{ChannelClient, MessageType, RequestError};

use crate::client::Options;
use crate::error::ClientError;
use crate::transport::Road;

/// A request, and where its outcome goes.
struct Call {
    kind: MessageType,
    name: Vec<u8>,
    body: Vec<u8>,
    optimes: (u64, u64),
    timeout: Duration,
    outcome: SyncSender<Result<Vec<u8>, RequestError>>,
}

/// See the module's documentation. Its thread ends with it.
#[derive(Debug)]
pub struct Link {
    calls: Sender<Call>,
    provider: String,
}

impl Link {
    /// Connects over fabric, or not at all.
    ///
    /// Errors: the store cannot be reached so, or tells its clients to use TCP.
    pub fn connect(address: &str, options: Options) -> Result<Self, ClientError> {
        let (calls, waiting) = mpsc::channel();
        let (told, made) = mpsc::sync_channel(1);
        let address = address.to_owned();
        let spin = options.spin;
        let thread = std::thread::Builder::new().name("documents-link".to_owned());
        let spawned = thread.spawn(move || {
            let opened = Road::new(&address, &options).and_then(|mut road| {
                road.open(&options)?;
                road.into_channel()
            });
            match opened {
                Ok((mut channel, provider)) => {
                    if told.send(Ok(provider)).is_ok() {
                        carry(&mut channel, &waiting, spin);
                    }
                }
                Err(error) => drop(told.send(Err(error))),
            }
        });
        spawned.map_err(|error| ClientError::Protocol(error.to_string()))?;
        let ended = || ClientError::Protocol("the thread of a channel ended".to_owned());
        let provider = made.recv().map_err(|_| ended())??;
        Ok(Self { calls, provider })
    }

    /// What carries it, as in `shm`.
    #[must_use]
    pub fn provider(&self) -> &str {
        &self.provider
    }

    /// Sends a request and waits for its outcome; `optimes` are of requests for the log.
    ///
    /// Errors: [`RequestError`]; after any but a refusal the link is of no use.
    pub fn call(
        &self,
        kind: MessageType,
        name: &[u8],
        body: &[u8],
        optimes: (u64, u64),
        timeout: Duration,
    ) -> Result<Vec<u8>, RequestError> {
        let (outcome, ended) = mpsc::sync_channel(1);
        let (name, body) = (name.to_vec(), body.to_vec());
        let call = Call { kind, name, body, optimes, timeout, outcome };
        self.calls.send(call).map_err(|_| RequestError::NotSent)?;
        ended.recv().unwrap_or(Err(RequestError::Broken))
    }
}

fn carry(channel: &mut ChannelClient, calls: &Receiver<Call>, spin: Duration) {
    for call in calls {
        let Call { kind, name, body, optimes, timeout, outcome } = call;
        let ended = match channel.submit(kind, &name, &body, optimes, timeout) {
            Ok(index) => channel.wait(index, spin),
            Err(_) => Err(RequestError::NotSent),
        };
        let broken = channel.is_broken() || matches!(ended, Err(RequestError::TimedOut));
        let _ = outcome.send(ended);
        if broken {
            return;
        }
    }
}

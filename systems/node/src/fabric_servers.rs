//! The one-sided clients of one shard: one [`ShardServer`] per provider in use.
//!
//! Servers are made when the first client of their provider arrives, on the shard's thread, and
//! their completion queues' descriptors sit in the shard's poller, so that the loop sleeps in one
//! place.

use std::sync::Arc;

use beeline_fabric::Device;
use beeline_kv::wire::ReplyStatus;
use beeline_kv::{Shard, Store};
use beeline_kv_server::{ServerOptions, ShardServer, Wrote};
use beeline_os::poller::{Interest, Poller};

use crate::fabric_door::{FabricAccepted, FabricIncoming};
use crate::replicated::lane::OneSided;
use crate::turn::{FABRIC, WAKER, Way};

struct Served {
    device: Arc<dyn Device>,
    server: ShardServer,
    /// Its completion queue's name in the poller.
    token: u64,
    failed: bool,
}

/// See the module's documentation.
pub(crate) struct FabricServers {
    shard: usize,
    options: ServerOptions,
    served: Vec<Served>,
    next_token: u64,
    /// Events were asked for, and nothing came since.
    armed: bool,
    /// Bytes copied by servers that are gone.
    copied_before: u64,
    /// Reads whose barrier passed or failed, to be run under the shard's lock.
    passed: Vec<(OneSided, Result<(), ReplyStatus>)>,
}

impl FabricServers {
    pub(crate) fn new(shard: usize, options: ServerOptions) -> Self {
        Self {
            shard,
            options,
            served: Vec::new(),
            next_token: FABRIC,
            armed: false,
            copied_before: 0,
            passed: Vec::new(),
        }
    }

    /// Serves a client, or tells it why not. `replicated`: [`ServerOptions::replicated`].
    pub(crate) fn accept(
        &mut self,
        incoming: FabricIncoming,
        store: &Store,
        poller: &Poller,
        replicated: Result<Option<u32>, String>,
    ) {
        let reply = incoming.reply;
        match replicated {
            // The same for the node's whole life, once it is known.
            Ok(replicated) => self.options.replicated = replicated,
            Err(reason) => return reply(Err(reason)),
        }
        match self.server_for(&incoming.device, store, poller) {
            Ok(server) => {
                let admission = server.accept(store, &incoming.peer, &incoming.payload);
                self.armed = false;
                let welcome = admission.welcome.to_vec();
                reply(Ok(FabricAccepted { connect_info: admission.info, payload: welcome }));
            }
            Err(reason) => {
                tracing::warn!(shard = self.shard, reason, "cannot serve a one-sided client");
                reply(Err(reason));
            }
        }
    }

    fn server_for(
        &mut self,
        device: &Arc<dyn Device>,
        store: &Store,
        poller: &Poller,
    ) -> Result<&mut ShardServer, String> {
        let known = self.served.iter().position(|served| Arc::ptr_eq(&served.device, device));
        let index = match known {
            Some(index) => index,
            None => {
                let shard = u16::try_from(self.shard).unwrap_or(u16::MAX);
                let options = self.options.clone();
                let server = ShardServer::new(Arc::clone(device), store, shard, options)
                    .map_err(|error| error.to_string())?;
                let token = self.next_token;
                if token == WAKER {
                    return Err("too many completion queues failed; restart the node".into());
                }
                poller
                    .add(server.event_descriptor(), token, Interest::READ)
                    .map_err(|error| error.to_string())?;
                self.next_token += 1;
                let device = Arc::clone(device);
                self.served.push(Served { device, server, token, failed: false });
                self.served.len() - 1
            }
        };
        Ok(&mut self.served[index].server)
    }

    /// Executes what arrived; how many requests, where a queue that failed counts as one.
    /// `loading`: a snapshot is replacing the keys, and reads would see a part.
    pub(crate) fn poll(&mut self, shard: &mut Shard, poller: &Poller, loading: bool) -> usize {
        let mut handled = 0;
        for (reader, outcome) in std::mem::take(&mut self.passed) {
            let outcome = if loading { Err(ReplyStatus::Unavailable) } else { outcome };
            if let Some(served) = self.named(reader.server) {
                served.server.read(shard, reader.ticket, outcome);
                handled += 1;
            }
        }
        for served in &mut self.served {
            match served.server.poll(shard) {
                Ok(count) => handled += count,
                Err(error) => {
                    tracing::error!(%error, shard = self.shard, "a completion queue failed");
                    served.failed = true;
                    // What came before the failure was executed.
                    handled += 1;
                }
            }
            if served.failed {
                served.server.shut_down(shard);
                // Closing would not do: a peer may hold the descriptor open.
                let _ = poller.remove(served.server.event_descriptor());
                self.copied_before += served.server.counters().copied_bytes;
            }
        }
        self.served.retain(|served| !served.failed);
        if handled > 0 {
            self.armed = false;
        }
        handled
    }

    fn named(&mut self, server: u64) -> Option<&mut Served> {
        self.served.iter_mut().find(|served| served.token == server)
    }

    /// Hands the requests that wait for the log to the lane.
    pub(crate) fn hand_over(&mut self, way: &mut Way<'_>) {
        for served in &mut self.served {
            way.server = served.token;
            served.server.hand_over(way);
        }
    }

    /// What came of a write.
    pub(crate) fn wrote(&mut self, asker: OneSided, outcome: Result<Wrote, ReplyStatus>) {
        if let Some(served) = self.named(asker.server) {
            served.server.wrote(asker.ticket, outcome);
        }
    }

    /// What came of a barrier; its reads run at the next poll.
    pub(crate) fn passed(&mut self, reader: OneSided, outcome: Result<(), ReplyStatus>) {
        self.passed.push((reader, outcome));
    }

    /// Posts the replies of what was executed and committed.
    pub(crate) fn send_replies(&mut self) {
        self.served.iter_mut().for_each(|served| served.server.complete());
    }

    /// The commit failed: nothing that depends on it may look done.
    pub(crate) fn abandon(&mut self, shard: &mut Shard) {
        self.served.iter_mut().for_each(|served| served.server.abandon(shard));
    }

    /// Whether replies wait for room.
    pub(crate) fn has_pending(&self) -> bool {
        self.served.iter().any(|served| served.server.has_pending())
    }

    /// Asks for events. `true` when they had been asked for before and nothing came since: only
    /// then may the caller sleep.
    pub(crate) fn arm(&mut self) -> bool {
        if self.armed || self.served.is_empty() {
            return true;
        }
        for served in &mut self.served {
            if let Err(error) = served.server.arm() {
                tracing::error!(%error, shard = self.shard, "a completion queue cannot be armed");
                served.failed = true;
            }
        }
        self.armed = true;
        false
    }

    /// Whether events were asked for.
    pub(crate) fn is_armed(&self) -> bool {
        self.armed || self.served.is_empty()
    }

    /// Clears the event behind a poller token.
    pub(crate) fn acknowledge(&mut self, token: u64) {
        self.armed = false;
        if let Some(served) = self.served.iter().find(|served| served.token == token)
            && let Err(error) = served.server.acknowledge()
        {
            tracing::error!(%error, shard = self.shard, "cannot clear a fabric event");
        }
    }

    /// Ends what broken clients held.
    pub(crate) fn keep_house(&mut self, shard: &mut Shard) {
        for served in &mut self.served {
            served.server.maintain(shard);
            // A device that is gone is let go with its last client; the next poll does it.
            served.failed |= served.server.clients() == 0 && served.device.is_lost();
        }
    }

    /// Clients connected now.
    pub(crate) fn clients(&self) -> usize {
        self.served.iter().map(|served| served.server.clients()).sum()
    }

    /// Bytes copied so far for clients whose device cannot reach segments.
    pub(crate) fn copied_bytes(&self) -> u64 {
        let now: u64 = self.served.iter().map(|served| served.server.counters().copied_bytes).sum();
        self.copied_before + now
    }

    /// Disconnects everyone.
    pub(crate) fn close(&mut self, shard: &mut Shard) {
        self.served.iter_mut().for_each(|served| served.server.shut_down(shard));
    }
}

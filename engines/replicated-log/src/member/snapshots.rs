//! Snapshots on their way.

use std::fs::File;
use std::io::Seek as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use beeline_fabric::{
    Access, ConnectInfo, MemoryRegion, QueuePair, QueuePairOptions, Role, WorkCompletion,
};
use beeline_paxos::{NodeId, Position};

use super::{BULK_PATIENCE, Member, OFFER_NS};
use crate::bulk::{BULK_BYTES, CHUNK_BYTES, CHUNKS, Incoming, Outgoing, Received};
use crate::error::LogError;
use crate::frame::Content;

/// A member for which a snapshot was too much takes the next one so much later at least, and at most,
/// nanoseconds: each travels whole before it is found to be too much.
const SHORTEST_PAUSE_NS: u64 = 1_000_000_000;
const LONGEST_PAUSE_NS: u64 = 60_000_000_000;

impl Member {
    /// Where to write snapshots that arrive: [`Member::received`].
    pub fn take_snapshots(&mut self, path: PathBuf) {
        self.incoming_path = Some(path);
    }

    /// A snapshot that arrived since the last call.
    pub fn received(&mut self) -> Option<Received> {
        self.received.take()
    }

    /// Whether the file of the last one is in use: no other is taken meanwhile, and offers are answered
    /// behind it. Its sender, declined at once, would make a newer one ready again and again.
    pub(crate) fn use_received(&mut self, uses: bool) {
        self.uses_received = uses;
        if !uses {
            for (peer, attempt) in std::mem::take(&mut self.put_off) {
                self.send_frame(peer, attempt, Content::Decline, Vec::new());
            }
        }
    }

    /// Takes none for a while, longer each time: the last one that came could not be used.
    pub(crate) fn decline_snapshots(&mut self, now_ns: u64) {
        let pause_ns = (2 * self.declining.1).clamp(SHORTEST_PAUSE_NS, LONGEST_PAUSE_NS);
        self.declining = (now_ns + pause_ns, pause_ns);
    }

    /// The last one that came could be used.
    pub(crate) fn want_snapshots(&mut self) {
        self.declining = (0, 0);
    }

    /// Whether a snapshot is on its way to `peer`.
    #[must_use]
    pub fn is_sending(&self, peer: NodeId) -> bool {
        self.links.iter().any(|link| link.peer == peer && link.outgoing.is_some())
    }

    /// Offers the snapshot in `path` to `peer`, and sends it if it is wanted, while polled.
    ///
    /// Errors: [`LogError::Persist`] when the file cannot be read; [`LogError::Fabric`].
    pub fn offer_snapshot(
        &mut self,
        peer: NodeId,
        path: &Path,
        position: Position,
        now_ns: u64,
    ) -> Result<(), LogError> {
        let under_way = self.link(peer).outgoing.as_ref();
        if under_way.is_some_and(|out| now_ns.saturating_sub(out.progress_ns) < OFFER_NS) {
            return Ok(());
        }
        let file = File::open(path).map_err(LogError::Snapshot)?;
        self.offer_file(peer, file, position, now_ns)
    }

    /// Offers what is on its way to `peer` once more, from its beginning, if that one took nothing of it for a while:
    /// the offer may have been lost.
    ///
    /// Errors: as [`Member::offer_snapshot`].
    pub(crate) fn offer_again(&mut self, peer: NodeId, now_ns: u64) -> Result<(), LogError> {
        let is_late = |out: &mut Outgoing| now_ns.saturating_sub(out.progress_ns) >= OFFER_NS;
        let Some(out) = self.link(peer).outgoing.take_if(is_late) else { return Ok(()) };
        let mut file = out.file;
        file.rewind().map_err(LogError::Snapshot)?;
        self.offer_file(peer, file, out.position, now_ns)
    }

    fn offer_file(
        &mut self,
        peer: NodeId,
        file: File,
        position: Position,
        now_ns: u64,
    ) -> Result<(), LogError> {
        let length = file.metadata().map_err(LogError::Snapshot)?.len();
        let (qp, region) = self.bulk_queue_pair()?;
        self.attempt = self.attempt.wrapping_add(1);
        let attempt = self.attempt;
        let info = qp.connect_info().0;
        let chunk = self.device.attributes().max_send_bytes.min(CHUNK_BYTES);
        self.link(peer).outgoing = Some(Outgoing {
            attempt,
            qp,
            region,
            position,
            file,
            length,
            posted: 0,
            messages: 0,
            completed: 0,
            chunk,
            progress_ns: now_ns,
            buffer: Vec::new(),
        });
        self.send_frame(peer, attempt, Content::Offer { position, bytes: length }, info);
        Ok(())
    }

    /// For one snapshot, at either end.
    fn bulk_queue_pair(&self) -> Result<(Box<dyn QueuePair>, MemoryRegion), LogError> {
        self.side_queue_pair(BULK_BYTES, CHUNKS as u32, BULK_PATIENCE)
    }

    /// A queue pair beside the control one, with memory of its own for what is sent and received: `depth` messages
    /// each way, each of which the peer has to take within `patience`.
    pub(super) fn side_queue_pair(
        &self,
        bytes: usize,
        depth: u32,
        patience: Duration,
    ) -> Result<(Box<dyn QueuePair>, MemoryRegion), LogError> {
        let memory = self.device.allocate_memory(bytes)?;
        let region = self.domain.register(memory, Access::LOCAL_WRITE)?;
        let options = QueuePairOptions {
            send_depth: depth,
            receive_depth: depth,
            receiver_not_ready_timeout: patience,
            transport_timeout: patience,
            ..QueuePairOptions::default()
        };
        let qp = self.create_queue_pair(options)?;
        Ok((qp, region))
    }

    /// A peer has a snapshot for us.
    pub(super) fn on_offer(
        &mut self,
        from: NodeId,
        attempt: u32,
        position: Position,
        length: u64,
        info: Vec<u8>,
    ) -> Result<(), LogError> {
        if self.uses_received {
            self.put_off.retain(|(peer, _)| *peer != from);
            self.put_off.push((from, attempt));
            return Ok(());
        }
        let now_ns = self.ticked_ns.unwrap_or_default();
        let busy = self.received.is_some()
            || self
                .incoming
                .as_ref()
                .is_some_and(|incoming| incoming.from != from && incoming.is_alive(now_ns));
        let declines = now_ns < self.declining.0;
        let wanted = position > self.replica.committed() && length > 0 && !busy && !declines;
        let path = self.incoming_path.as_ref().filter(|_| wanted);
        let Some(file) = path.and_then(|path| File::create(path).ok()) else {
            self.send_frame(from, attempt, Content::Decline, Vec::new());
            return Ok(());
        };
        let (qp, region) = self.bulk_queue_pair()?;
        let (received, buffer) = (0, Vec::new());
        let progress_ns = now_ns;
        let mut incoming =
            Incoming { from, position, qp, region, file, length, received, progress_ns, buffer };
        for index in 0..CHUNKS {
            incoming.post_receive(index)?;
        }
        let own = incoming.qp.connect_info().0;
        if incoming.qp.connect(&ConnectInfo(info), Role::Passive).is_ok() {
            self.incoming = Some(incoming);
            self.send_frame(from, attempt, Content::Accept, own);
        }
        Ok(())
    }

    /// A piece of a snapshot arrived, or its connection broke.
    pub(super) fn on_chunk(&mut self, completion: &WorkCompletion) {
        let Some(mut incoming) = self.incoming.take() else { return };
        if !completion.is_success() {
            return;
        }
        incoming.progress_ns = self.ticked_ns.unwrap_or_default();
        match incoming.take(completion.wr_id, completion.length) {
            Ok(false) => self.incoming = Some(incoming),
            Ok(true) => {
                let Incoming { from, position, .. } = incoming;
                self.received =
                    self.incoming_path.clone().map(|path| Received { from, position, path });
            }
            // A full disk, say; it is offered again.
            Err(error) => tracing::warn!(%error, "a snapshot could not be taken"),
        }
    }

    pub(super) fn pump_snapshots(&mut self) {
        for link in &mut self.links {
            link.outgoing.take_if(|out| match out.pump() {
                Ok(more) => !more,
                Err(error) => {
                    tracing::warn!(%error, "a snapshot could not be read");
                    true
                }
            });
        }
    }
}

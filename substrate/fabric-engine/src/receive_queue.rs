//! Posted receives: a queue pair's own, or shared by several.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use beeline_fabric::{PostError, ReceiveRequest, SharedReceiveQueue};

use crate::connection::Connection;
use crate::region::{Range, RegionTable};

/// One posted receive, checked.
#[derive(Debug)]
pub(crate) struct PostedReceive {
    pub(crate) wr_id: u64,
    pub(crate) buffer: Option<Range>,
}

impl PostedReceive {
    /// Bytes it takes.
    pub(crate) fn capacity(&self) -> u64 {
        self.buffer.as_ref().map_or(0, |range| range.length as u64)
    }
}

/// Checks a request against region, domain and rights.
pub(crate) fn check_receive(
    request: &ReceiveRequest<'_>,
    regions: &RegionTable,
    domain: u64,
) -> Result<PostedReceive, PostError> {
    let buffer = match &request.buffer {
        None => None,
        Some(entry) => {
            let found = regions.local(entry.region, domain).ok_or(PostError::LocalProtection)?;
            if !found.contains(entry.offset, entry.length) || !found.is_locally_writable() {
                return Err(PostError::LocalProtection);
            }
            // Inside a mapping, so both fit in a usize.
            Some(Range {
                entry: found,
                offset: entry.offset as usize,
                length: entry.length as usize,
            })
        }
    };
    Ok(PostedReceive { wr_id: request.wr_id, buffer })
}

#[derive(Debug, Default)]
struct SharedReceives {
    posted: VecDeque<PostedReceive>,
    /// Connections whose peer was told to wait for a receive.
    waiting: Vec<Weak<Connection>>,
}

/// The part of a shared receive queue that connections reach.
#[derive(Debug)]
pub(crate) struct SharedReceiveState {
    depth: u32,
    receives: Mutex<SharedReceives>,
}

impl SharedReceiveState {
    fn lock(&self) -> MutexGuard<'_, SharedReceives> {
        self.receives.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the oldest receive, or notes that `connection` waits for one.
    pub(crate) fn take(&self, connection: &Weak<Connection>) -> Option<PostedReceive> {
        let mut receives = self.lock();
        let taken = receives.posted.pop_front();
        if taken.is_none() {
            receives.waiting.push(Weak::clone(connection));
        }
        taken
    }
}

impl SharedReceiveState {
    /// A receive that a message had taken, and that its queue pair will not complete: the next one
    /// has it. Connections that wait for one are told by the caller.
    pub(crate) fn give_back(&self, receive: PostedReceive) {
        let mut receives = self.lock();
        receives.posted.push_front(receive);
    }

    /// Connections that wait for a receive that is there.
    pub(crate) fn take_waiting(&self) -> Vec<Weak<Connection>> {
        let mut receives = self.lock();
        if receives.posted.is_empty() {
            return Vec::new();
        }
        std::mem::take(&mut receives.waiting)
    }
}

/// The application's handle.
#[derive(Debug)]
pub(crate) struct EngineSharedReceiveQueue {
    pub(crate) state: Arc<SharedReceiveState>,
    regions: Arc<RegionTable>,
    domain: u64,
}

impl EngineSharedReceiveQueue {
    pub(crate) fn new(depth: u32, regions: Arc<RegionTable>, domain: u64) -> Self {
        let posted = VecDeque::with_capacity(depth as usize);
        let receives = Mutex::new(SharedReceives { posted, waiting: Vec::new() });
        Self { state: Arc::new(SharedReceiveState { depth, receives }), regions, domain }
    }
}

impl SharedReceiveQueue for EngineSharedReceiveQueue {
    fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let waiting = {
            let mut receives = self.state.lock();
            let before = receives.posted.len();
            if before + requests.len() > self.state.depth as usize {
                return Err(PostError::QueueFull);
            }
            for request in requests {
                match check_receive(request, &self.regions, self.domain) {
                    Ok(posted) => receives.posted.push_back(posted),
                    Err(error) => {
                        receives.posted.truncate(before);
                        return Err(error);
                    }
                }
            }
            std::mem::take(&mut receives.waiting)
        };
        for connection in waiting.iter().filter_map(Weak::upgrade) {
            connection.receive_posted();
        }
        Ok(())
    }

    fn posted(&self) -> u32 {
        u32::try_from(self.state.lock().posted.len()).unwrap_or(u32::MAX)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

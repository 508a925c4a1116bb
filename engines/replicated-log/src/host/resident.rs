//! A member of a host, whatever its state machine is.

use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use beeline_fabric::WorkCompletion;
use beeline_paxos::{ClusterId, NodeId};

use crate::handle::Handle;
use crate::line::LineNews;
use crate::machine::StateMachine;
use crate::node::{Node, NodeError};
use crate::server::Ended;
use crate::shared::Beat;

/// What a thread does with each of its members.
pub(super) trait Turns {
    fn turn(&mut self, now_ns: u64) -> Result<bool, NodeError>;
    fn is_stopping(&self) -> bool;
    fn due_ns(&self, now_ns: u64, pause_ns: u64) -> Option<u64>;
    fn let_campaign(&mut self, may: bool);
    fn is_campaigning(&self) -> bool;
    fn cluster(&self) -> ClusterId;
    fn give(&mut self, completion: WorkCompletion);
    fn give_line_news(&mut self, news: LineNews);
    fn has_queue_pair(&self, qp_num: u32) -> bool;
    fn relies_on(&self) -> Option<(Beat, NodeId)>;
    fn read_beat(&mut self, peer: NodeId) -> bool;
    fn beats(&mut self) -> Vec<(NodeId, Option<u64>)>;
    fn silent(&mut self, peer: NodeId, now_ns: u64) -> Result<(), NodeError>;
    fn take_errand(&mut self) -> Option<Box<dyn FnOnce() + Send>>;
}

impl<S: StateMachine> Turns for Node<S> {
    fn turn(&mut self, now_ns: u64) -> Result<bool, NodeError> {
        Node::turn(self, now_ns)
    }

    fn is_stopping(&self) -> bool {
        Node::is_stopping(self)
    }

    fn due_ns(&self, now_ns: u64, pause_ns: u64) -> Option<u64> {
        Node::due_ns(self, now_ns, pause_ns)
    }

    fn let_campaign(&mut self, may: bool) {
        Node::let_campaign(self, may);
    }

    fn is_campaigning(&self) -> bool {
        Node::is_campaigning(self)
    }

    fn cluster(&self) -> ClusterId {
        Node::cluster(self)
    }

    fn give(&mut self, completion: WorkCompletion) {
        Node::give(self, completion);
    }

    fn give_line_news(&mut self, news: LineNews) {
        Node::give_line_news(self, news);
    }

    fn has_queue_pair(&self, qp_num: u32) -> bool {
        Node::has_queue_pair(self, qp_num)
    }

    fn relies_on(&self) -> Option<(Beat, NodeId)> {
        Node::relies_on(self)
    }

    fn read_beat(&mut self, peer: NodeId) -> bool {
        Node::read_beat(self, peer)
    }

    fn beats(&mut self) -> Vec<(NodeId, Option<u64>)> {
        Node::beats(self)
    }

    fn silent(&mut self, peer: NodeId, now_ns: u64) -> Result<(), NodeError> {
        Node::silent(self, peer, now_ns)
    }

    fn take_errand(&mut self) -> Option<Box<dyn FnOnce() + Send>> {
        Node::take_errand(self)
    }
}

/// A member on its thread.
pub(super) struct Resident {
    pub(super) node: Box<dyn Turns>,
    /// When it is to be turned next; `None`: it rests.
    pub(super) due_ns: Option<u64>,
    /// The time of its entry among those that are due; no later than `due_ns`.
    pub(super) listed_ns: Option<u64>,
    /// It stands in the list of those to be turned now.
    pub(super) is_ready: bool,
    /// It campaigned after its last turn.
    pub(super) campaigns: bool,
    /// The thread of another host that it relies on while it rests.
    pub(super) relies_on: Option<u64>,
    tells: Sender<Result<(), NodeError>>,
    /// Dropped behind the node.
    _ended: Ended,
}

impl Resident {
    pub(super) fn new<S: StateMachine + 'static>(
        node: Node<S>,
        handle: Handle,
        tells: Sender<Result<(), NodeError>>,
    ) -> Self {
        let (node, due_ns, listed_ns) = (Box::new(node), Some(0), None);
        let (is_ready, campaigns, relies_on, _ended) = (false, false, None, Ended(handle));
        Self { node, due_ns, listed_ns, is_ready, campaigns, relies_on, tells, _ended }
    }

    /// Ends the member, and tells how. One whose machine is being restored ends on the thread that this returns,
    /// when that is done: its own is shared with others.
    pub(super) fn end(self, how: Result<(), NodeError>) -> Option<JoinHandle<()>> {
        let Self { mut node, tells, _ended: ended, .. } = self;
        let errand = node.take_errand();
        drop(node);
        let waits = errand.is_some();
        let end = move || {
            errand.into_iter().for_each(|wait| wait());
            drop(ended);
            // Unless the host forgot about it.
            let _ = tells.send(how);
        };
        if !waits {
            end();
            return None;
        }
        let ending = std::thread::Builder::new().name("log-ending".to_owned()).spawn(end);
        // Without a thread the machine ends unawaited, and `Host::close` hears that the member is gone.
        ending.inspect_err(|error| tracing::error!(%error, "a member ends beside its machine")).ok()
    }
}

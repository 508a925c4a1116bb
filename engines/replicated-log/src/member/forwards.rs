//! Connections through which members ask one another to propose.
//!
//! The member that asks makes one when it first has something to ask, and lets it go when it has asked
//! nothing for a while. Its data is exchanged over the control connection: an offer, which may be
//! lost and is then made anew, and its acceptance. The other member keeps one per peer, the newest.

use beeline_fabric::{ConnectInfo, Role, WorkCompletion};
use beeline_paxos::NodeId;

use super::{Member, TRANSPORT_TIMEOUT};
use crate::error::LogError;
use crate::forward::{
    Answering, Asking, BUFFERS, CHANNEL_BYTES, Channel, FULL, Item, Kind, MOST_ANSWER_BYTES,
    MOST_ASKED, MOST_WAITING_BYTES, News,
};
use crate::frame::Content;
use crate::handle::Refusal;
use crate::link::{Control, Link};

/// An offer that was not accepted, as it or the answer was lost, is given up after this.
const OFFER_NS: u64 = 1_000_000_000;
/// A connection that is not used goes after this.
const IDLE_NS: u64 = 30_000_000_000;

impl Member {
    /// Asks `peer` for something. The connection that it goes through; what becomes of it is told by
    /// [`Member::forward_news`].
    ///
    /// Errors: [`Refusal::Unreachable`], [`Refusal::Full`]: nothing was sent, and nothing will be.
    pub(crate) fn ask(
        &mut self,
        peer: NodeId,
        (kind, number, body): (Kind, u64, Vec<u8>),
        now_ns: u64,
    ) -> Result<u64, Refusal> {
        let unreachable = Refusal::Unreachable { member: peer };
        let link = self.links.iter_mut().find(|link| link.peer == peer);
        let link = link.filter(|link| link.control.as_ref().is_some_and(Control::is_ready));
        let Some(link) = link else { return Err(unreachable) };
        let stale = link.asking.take_if(|asking| asking.channel.is_broken());
        self.end_asking(stale);
        if self.link(peer).asking.is_none() {
            let asking = self.offer_forwarding(peer, now_ns).inspect_err(
                |error| tracing::warn!(%peer, %error, "no connection to forward through"),
            );
            self.link(peer).asking = Some(asking.map_err(|_| unreachable.clone())?);
        }
        let Some(asking) = &mut self.link(peer).asking else { return Err(unreachable) };
        let waiting = asking.channel.flow.waiting_bytes() + body.len();
        if asking.unanswered >= MOST_ASKED || waiting > MOST_WAITING_BYTES {
            return Err(Refusal::Full);
        }
        asking.channel.flow.push(Item { kind, outcome: 0, number, body });
        asking.unanswered += 1;
        if asking.connected {
            asking.used_ns = now_ns;
        }
        Ok(asking.epoch)
    }

    /// Answers what came through the connection `epoch` of `peer`, if that is there still.
    pub(crate) fn answer(&mut self, peer: NodeId, epoch: u64, item: Item) {
        let link = self.links.iter_mut().find(|link| link.peer == peer);
        let answering = link.and_then(|link| link.answering.as_mut());
        if let Some(answering) = answering.filter(|answering| answering.epoch == epoch) {
            answering.unanswered = answering.unanswered.saturating_sub(1);
            answering.channel.flow.push(item);
        }
    }

    /// This answer is not waited for any more. True: the question was not even sent.
    pub(crate) fn stop_asking(&mut self, peer: NodeId, epoch: u64, number: u64) -> bool {
        let link = self.links.iter_mut().find(|link| link.peer == peer);
        let asking = link.and_then(|link| link.asking.as_mut());
        let Some(asking) = asking.filter(|asking| asking.epoch == epoch) else { return false };
        let unsent = asking.channel.flow.take_back(number);
        asking.unanswered -= usize::from(unsent);
        unsent
    }

    /// What came of forwarding since the last call.
    pub(crate) fn forward_news(&mut self) -> Option<News> {
        self.news.pop_front()
    }

    /// Gives up connections that were offered in vain, and lets those go that nothing was asked through
    /// for a while.
    pub(crate) fn let_forwards_go(&mut self, now_ns: u64) {
        for index in 0..self.links.len() {
            let ended = self.links[index].asking.take_if(|asking| {
                let since_ns = now_ns.saturating_sub(asking.used_ns);
                let in_vain = !asking.connected && since_ns >= OFFER_NS;
                in_vain || (asking.unanswered == 0 && since_ns >= IDLE_NS)
            });
            self.end_asking(ended);
        }
    }

    /// What is asked or answered through the connections of a link, that is about to be made anew, ends.
    pub(super) fn end_forwards(&mut self, peer: NodeId) {
        let link = self.link(peer);
        link.answering = None;
        let asking = link.asking.take();
        self.end_asking(asking);
    }

    fn end_asking(&mut self, asking: Option<Asking>) {
        if let Some(Asking { epoch, channel, .. }) = asking {
            self.news.push_back(News::Broken { epoch, unsent: channel.flow.unsent().collect() });
        }
    }

    fn channel(&self, most_bytes: usize) -> Result<Channel, LogError> {
        let (qp, region) =
            self.side_queue_pair(CHANNEL_BYTES, BUFFERS as u32, TRANSPORT_TIMEOUT)?;
        let most_send_bytes = self.device.attributes().max_send_bytes;
        Ok(Channel::new(qp, region, most_send_bytes, most_bytes)?)
    }

    fn offer_forwarding(&mut self, peer: NodeId, now_ns: u64) -> Result<Asking, LogError> {
        let channel = self.channel(MOST_ANSWER_BYTES)?;
        self.attempt = self.attempt.wrapping_add(1);
        self.epoch += 1;
        let (attempt, epoch) = (self.attempt, self.epoch);
        let info = channel.qp.connect_info().0;
        self.send_frame(peer, attempt, Content::Forward, info);
        let (connected, unanswered) = (false, 0);
        Ok(Asking { attempt, epoch, channel, connected, used_ns: now_ns, unanswered })
    }

    /// A peer wants to ask.
    pub(super) fn on_forward(&mut self, from: NodeId, attempt: u32, info: Vec<u8>) {
        let most_bytes = self.start.layout.max_payload_bytes();
        let mut channel = match self.channel(most_bytes) {
            Ok(channel) => channel,
            Err(error) => {
                tracing::warn!(%from, %error, "no connection for what a member forwards");
                return;
            }
        };
        let own = channel.qp.connect_info().0;
        if channel.qp.connect(&ConnectInfo(info), Role::Passive).is_ok() {
            self.epoch += 1;
            let answering = Answering { epoch: self.epoch, channel, unanswered: 0 };
            self.link(from).answering = Some(answering);
            self.send_frame(from, attempt, Content::Forwarding, own);
        }
    }

    /// A peer lets this member ask.
    pub(super) fn on_forwarding(&mut self, from: NodeId, attempt: u32, info: Vec<u8>) {
        let now_ns = self.ticked_ns.unwrap_or_default();
        let asking = self.link(from).asking.as_mut();
        let wanted = |asking: &&mut Asking| asking.attempt == attempt && !asking.connected;
        let Some(asking) = asking.filter(wanted) else { return };
        asking.connected = asking.channel.qp.connect(&ConnectInfo(info), Role::Active).is_ok();
        asking.used_ns = now_ns;
    }

    /// A completion of a connection of link `index`; false if it is of none.
    pub(super) fn on_forward_completion(
        &mut self,
        index: usize,
        completion: &WorkCompletion,
        now_ns: u64,
    ) -> bool {
        let Link { peer, asking, answering, .. } = &mut self.links[index];
        let number = completion.qp_num;
        if let Some(end) = asking.as_mut().filter(|end| end.channel.qp.qp_num() == number) {
            match end.channel.on_completion(completion) {
                Ok(Some(item)) if item.kind == Kind::Answer => {
                    end.unanswered = end.unanswered.saturating_sub(1);
                    end.used_ns = now_ns;
                    self.news.push_back(News::Answered { item });
                }
                Ok(None) => {}
                Ok(Some(_)) | Err(_) => {
                    let ended = asking.take();
                    self.end_asking(ended);
                }
            }
            return true;
        }
        if let Some(end) = answering.as_mut().filter(|end| end.channel.qp.qp_num() == number) {
            match end.channel.on_completion(completion) {
                Ok(Some(Item { kind: Kind::Answer, .. })) | Err(_) => *answering = None,
                Ok(None) => {}
                Ok(Some(item)) => {
                    let flow = &mut end.channel.flow;
                    let full = end.unanswered >= MOST_ASKED;
                    if full || flow.waiting_bytes() > MOST_WAITING_BYTES {
                        let (kind, outcome, body) = (Kind::Answer, FULL, Vec::new());
                        flow.push(Item { kind, outcome, body, ..item });
                    } else {
                        end.unanswered += 1;
                        let (from, epoch) = (*peer, end.epoch);
                        self.news.push_back(News::Asked { from, epoch, item });
                    }
                }
            }
            return true;
        }
        false
    }

    /// Sends what may be sent.
    pub(super) fn pump_forwards(&mut self) {
        for index in 0..self.links.len() {
            let link = &mut self.links[index];
            link.answering.take_if(|end| end.channel.pump().is_err());
            let ended = link.asking.take_if(|end| end.channel.pump().is_err());
            self.end_asking(ended);
        }
    }
}

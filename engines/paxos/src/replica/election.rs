//! Watching the leader, and becoming it.
//!
//! Followers watch the leader only (p. 3.4), by reading its status words. A read that fails is a
//! broken link; beats that stand still are a leader that hangs. A follower that loses the leader
//! asks first whether an election would succeed: a member that is cut off, or that alone lost the
//! leader, disturbs nobody with its terms.
//!
//! A suspicion lasts until the leader's beats go on, whatever other members answer: what they see
//! of a leader that hangs is as old as what this server saw.

use super::leader::Leader;
use super::{Replica, Role, RoleName};
use crate::event::Command;
use crate::ids::{NodeId, Position, Term};
use crate::layout::Status;
use crate::memory::LogMemory;
use crate::message::{Grant, Message};
use crate::options::{Options, ns};

/// A follower looks at its leader so often in a heartbeat.
const LOOKS: u64 = 4;

/// Campaigns that fail stretch the next by no more than two to this power.
const MOST_DOUBLINGS: u32 = 4;

/// The leader of a follower, or the candidate it voted for.
#[derive(Clone, Copy, Debug)]
struct Watched {
    id: NodeId,
    /// It has been seen to lead.
    elected: bool,
    /// It was silent for too long. Only beats that go on take that back: a leader that hangs still
    /// shows its term to whoever reads its memory.
    suspected: bool,
    /// As read last.
    beats: Option<u32>,
    progress_ns: u64,
    read_ns: u64,
    reading: bool,
    /// It says that a member is about to have no room.
    short: bool,
    /// It leads and has nothing to do: it is not looked at.
    rests: bool,
}

impl Watched {
    fn new(id: NodeId, elected: bool, now_ns: u64) -> Self {
        let (progress_ns, read_ns) = (now_ns, now_ns);
        let (suspected, beats, reading, short, rests) = (false, None, false, false, false);
        Self { id, elected, suspected, beats, progress_ns, read_ns, reading, short, rests }
    }
}

#[derive(Debug, Default)]
pub(super) struct Follower {
    /// A leader that is suspected is watched on: it may be back.
    watched: Option<Watched>,
    /// Without a leader: when to look for votes.
    campaign_ns: u64,
}

impl Follower {
    /// Follows nobody yet; gives others time.
    pub(super) fn idle(now_ns: u64, options: &Options) -> Self {
        Self { watched: None, campaign_ns: now_ns.saturating_add(ns(options.patience)) }
    }

    pub(super) fn of_candidate(id: NodeId, now_ns: u64) -> Self {
        Self { watched: Some(Watched::new(id, false, now_ns)), campaign_ns: 0 }
    }

    pub(super) fn of_leader(id: NodeId, now_ns: u64) -> Self {
        Self { watched: Some(Watched::new(id, true, now_ns)), campaign_ns: 0 }
    }

    pub(super) fn excuse(&mut self, pause_ns: u64) {
        if let Some(watched) = &mut self.watched {
            watched.progress_ns = watched.progress_ns.saturating_add(pause_ns);
        }
    }

    pub(super) fn has_short_leader(&self) -> bool {
        self.elected_leader().is_some() && self.watched.is_some_and(|watched| watched.short)
    }

    /// The beats that it saw of the one it follows; 0 where it saw none.
    pub(super) fn beats(&self) -> u32 {
        self.watched.and_then(|watched| watched.beats).unwrap_or_default()
    }

    pub(super) fn rests(&self) -> bool {
        self.watched.is_some_and(|watched| watched.rests)
    }

    /// The leader is looked at again, as one whose beats moved at this moment.
    pub(super) fn awaken(&mut self, now_ns: u64) {
        if let Some(watched) = &mut self.watched {
            (watched.rests, watched.reading) = (false, false);
            (watched.progress_ns, watched.read_ns) = (now_ns, now_ns);
        }
    }

    pub(super) fn elected_leader(&self) -> Option<NodeId> {
        let leads = |watched: &Watched| watched.elected && !watched.suspected;
        self.watched.filter(leads).map(|watched| watched.id)
    }
}

/// Asks whether an election would succeed.
#[derive(Debug)]
pub(super) struct Asking {
    term: Term,
    yes: Vec<NodeId>,
    until_ns: u64,
    /// The leader that was lost.
    suspect: Option<Watched>,
}

impl Asking {
    pub(super) fn excuse(&mut self, pause_ns: u64) {
        self.until_ns = self.until_ns.saturating_add(pause_ns);
    }
}

/// A vote that was given to this server.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ballot {
    pub(super) from: NodeId,
    pub(super) grant: Grant,
}

#[derive(Debug)]
pub(super) struct Candidate {
    term: Term,
    transfer: bool,
    votes: Vec<Ballot>,
    until_ns: u64,
}

impl Candidate {
    pub(super) fn excuse(&mut self, pause_ns: u64) {
        self.until_ns = self.until_ns.saturating_add(pause_ns);
    }
}

impl<M: LogMemory> Replica<M> {
    /// Whether it sees a leader at work. One that has been silent for half of the patience counts
    /// no more once another member, whose patience is at its end, asks for a vote: two members then
    /// agree within one patience, wherever in the heartbeat each of them looks.
    pub(super) fn has_living_leader(&self) -> bool {
        match &self.role {
            Role::Follower(Follower { watched: Some(watched), .. }) => {
                let (heartbeat_ns, patience_ns) =
                    (ns(self.options.heartbeat), ns(self.options.patience));
                let doubt_ns = (patience_ns / 2).max(heartbeat_ns + heartbeat_ns / 2);
                let silent_ns = self.now_ns.saturating_sub(watched.progress_ns);
                watched.elected && !watched.suspected && silent_ns < doubt_ns
            }
            Role::Leader(_) => true,
            _ => false,
        }
    }

    /// Whether a campaign that is due may begin; it may until this says otherwise. A program with servers of
    /// many clusters lets few of them campaign at a time: a campaign's time is short, and many at once take each
    /// other's, so that all come to nothing. One that has begun goes on, and other servers are voted for
    /// as ever.
    pub fn let_campaign(&mut self, may: bool) {
        self.may_campaign = may;
    }

    /// What [`Replica::let_campaign`] said last.
    #[must_use]
    pub fn may_campaign(&self) -> bool {
        self.may_campaign
    }

    /// Whether it campaigns, hands over, or was elected and has not completed what earlier leaders began.
    #[must_use]
    pub fn is_campaigning(&self) -> bool {
        let hands_over = matches!(&self.role, Role::Leader(leader) if leader.hands_over());
        hands_over || matches!(self.role(), RoleName::Candidate | RoleName::Recovering)
    }

    pub(super) fn tick_follower(&mut self, commands: &mut Vec<Command>) {
        let (now_ns, patience_ns) = (self.now_ns, ns(self.options.patience));
        let stretched_ns = self.stretched(patience_ns);
        match &mut self.role {
            Role::Follower(Follower { watched, campaign_ns }) => {
                if let Some(watched) = watched.as_mut().filter(|watched| !watched.suspected) {
                    let limit_ns = if watched.elected { patience_ns } else { stretched_ns };
                    if now_ns.saturating_sub(watched.progress_ns) > limit_ns {
                        self.failed_campaigns += u32::from(!watched.elected);
                        let suspect = *watched;
                        self.lose_leader(Some(suspect));
                        return;
                    }
                }
                let is_led = watched.is_some_and(|watched| !watched.suspected);
                if let Some(watched) = watched
                    && !watched.reading
                    && now_ns >= watched.read_ns
                {
                    watched.reading = true;
                    // A follower that waits for a leader hears of it soon. One that has a leader
                    // looks often enough that a silence is not taken for a late beat: what it
                    // sees moved may have moved right after it looked before.
                    let share = if watched.elected && is_led { LOOKS } else { 10 };
                    let pause_ns = ns(self.options.heartbeat) / share;
                    watched.read_ns = now_ns.saturating_add(pause_ns);
                    commands.push(Command::ReadStatus { peer: watched.id });
                }
                let may = self.may_campaign && self.promising.is_none();
                if !is_led && now_ns >= *campaign_ns && may {
                    self.ask(commands);
                }
            }
            Role::Asking(Asking { until_ns, suspect, .. }) if now_ns >= *until_ns => {
                let suspect = *suspect;
                self.lose_leader(suspect);
            }
            Role::Candidate(Candidate { until_ns, .. }) if now_ns >= *until_ns => {
                self.failed_campaigns += 1;
                self.lose_leader(None);
            }
            _ => {}
        }
    }

    /// A time of an election, doubled for every campaign that came to nothing: where votes take
    /// long, because links are slow or processors busy, there is a leader in the end.
    fn stretched(&self, limit_ns: u64) -> u64 {
        limit_ns.saturating_mul(1 << self.failed_campaigns.min(MOST_DOUBLINGS))
    }

    /// Goes on without a leader; campaigns after a random while. A `suspect` is watched on, and
    /// leads again when its beats go on.
    fn lose_leader(&mut self, suspect: Option<Watched>) {
        let spread_ns = self.stretched(ns(self.options.spread));
        let campaign_ns = self.now_ns.saturating_add(self.some_of(spread_ns));
        self.suspect(suspect, campaign_ns);
    }

    fn suspect(&mut self, suspect: Option<Watched>, campaign_ns: u64) {
        let watched = suspect.map(|watched| Watched {
            suspected: true,
            rests: false,
            reading: false,
            read_ns: self.now_ns,
            ..watched
        });
        self.role = Role::Follower(Follower { watched, campaign_ns });
        self.republish();
    }

    pub(super) fn on_watched_status(
        &mut self,
        peer: NodeId,
        status: Option<Status>,
        commands: &mut Vec<Command>,
    ) {
        let (term, now_ns) = (self.term, self.now_ns);
        let Role::Follower(Follower { watched: Some(watched), .. }) = &mut self.role else {
            return;
        };
        if watched.id != peer {
            return;
        }
        watched.reading = false;
        let lost = match status {
            Some(status) if status.term == term => {
                watched.short = status.short;
                let before = watched.beats.replace(status.beats);
                let moved = before.is_some_and(|before| before != status.beats);
                if moved || before.is_none() && !watched.suspected {
                    (watched.elected, watched.suspected) = (true, false);
                    watched.progress_ns = now_ns;
                    self.failed_campaigns = 0;
                    self.gave_way = false;
                }
                let is_news = before != Some(status.beats);
                if status.rests && watched.elected && !watched.suspected && !watched.rests {
                    watched.rests = true;
                    // The leader rests once the commit word here says all of it.
                    self.look_at_commit_word(commands);
                    self.republish();
                    return;
                }
                if is_news {
                    self.republish();
                }
                return;
            }
            // A leader that no longer leads; a candidate gets some time to win.
            Some(_) => watched.elected,
            None => true,
        };
        if lost && !watched.suspected {
            let suspect = *watched;
            self.lose_leader(Some(suspect));
        }
    }

    /// Of what runs a server there was no sign of life for as long as a leader's beats may stand still.
    pub(super) fn on_silent(&mut self, peer: NodeId) {
        let Role::Follower(follower) = &self.role else { return };
        let watched = follower.watched.filter(|watched| watched.id == peer);
        if watched.is_some_and(|watched| watched.elected && !watched.suspected) {
            self.lose_leader(watched);
        }
    }

    fn others(&self) -> impl Iterator<Item = NodeId> + use<'_, M> {
        self.configuration.members().iter().copied().filter(|id| *id != self.id)
    }

    fn ask(&mut self, commands: &mut Vec<Command>) {
        if !self.configuration.contains(self.id) {
            return;
        }
        // Another member, which has all of it, is to lead first; where none can, this one may still find it
        // in their logs.
        if self.lacks_what_was_begun() && !std::mem::replace(&mut self.gave_way, true) {
            let pause_ns = ns(self.options.patience);
            if let Role::Follower(follower) = &mut self.role {
                follower.campaign_ns = self.now_ns.saturating_add(pause_ns);
            }
            return;
        }
        let term = self.term.max(self.seen_term).next();
        let until_ns = self.now_ns.saturating_add(ns(self.options.campaign));
        let message = Message::WouldYouVote { term, committed: self.committed };
        commands.extend(self.others().map(|to| Command::Send { to, message }));
        let suspect = match &self.role {
            Role::Follower(follower) => follower.watched,
            _ => None,
        };
        self.role = Role::Asking(Asking { term, yes: vec![self.id], until_ns, suspect });
        self.count_would_votes(commands);
    }

    pub(super) fn on_would_you_vote(
        &mut self,
        from: NodeId,
        term: Term,
        committed: Position,
        commands: &mut Vec<Command>,
    ) {
        if self.is_promising() {
            return;
        }
        if term <= self.term || self.has_living_leader() || !self.can_be_led_by(committed) {
            self.refuse(from, committed, commands);
            return;
        }
        let until_ns = self.now_ns.saturating_add(ns(self.options.campaign));
        match &mut self.role {
            // Two that ask each other would both stand, and both fail: the lower one goes first.
            Role::Asking(_) if self.id < from => return,
            Role::Asking(asking) => {
                let suspect = asking.suspect;
                self.suspect(suspect, until_ns);
            }
            Role::Follower(follower) => {
                follower.campaign_ns = follower.campaign_ns.max(until_ns);
            }
            _ => {}
        }
        commands.push(Command::Send { to: from, message: Message::WouldVote { term } });
    }

    pub(super) fn on_would_vote(&mut self, from: NodeId, term: Term, commands: &mut Vec<Command>) {
        let Role::Asking(asking) = &mut self.role else { return };
        if asking.term == term && !asking.yes.contains(&from) {
            asking.yes.push(from);
            self.count_would_votes(commands);
        }
    }

    fn count_would_votes(&mut self, commands: &mut Vec<Command>) {
        let Role::Asking(asking) = &self.role else { return };
        if self.configuration.has_majority(|id| asking.yes.contains(&id)) {
            let term = asking.term;
            self.stand(term, false, commands);
        }
    }

    /// Becomes a candidate: promises itself to itself first.
    fn stand(&mut self, term: Term, transfer: bool, commands: &mut Vec<Command>) {
        if self.is_promising() || term <= self.term {
            return;
        }
        let until_ns = self.now_ns.saturating_add(self.stretched(ns(self.options.campaign)));
        self.role = Role::Candidate(Candidate { term, transfer, votes: Vec::new(), until_ns });
        self.promise(self.id, term, true, commands);
    }

    pub(super) fn on_take_over(&mut self, from: NodeId, term: Term, commands: &mut Vec<Command>) {
        let holds = self.holder.is_some_and(|holder| holder.to == from && holder.term == term);
        if holds && self.configuration.contains(self.id) && !self.lacks_what_was_begun() {
            self.stand(self.term.max(self.seen_term).next(), true, commands);
        }
    }

    pub(super) fn on_own_vote(&mut self, term: Term, grant: Grant, commands: &mut Vec<Command>) {
        let Role::Candidate(candidate) = &mut self.role else { return };
        if candidate.term != term {
            return;
        }
        candidate.votes.push(Ballot { from: self.id, grant });
        let transfer = candidate.transfer;
        let message = Message::RequestVote { term, committed: self.committed, transfer };
        commands.extend(self.others().map(|to| Command::Send { to, message }));
        self.count_votes(commands);
    }

    pub(super) fn on_vote(
        &mut self,
        from: NodeId,
        term: Term,
        grant: Grant,
        commands: &mut Vec<Command>,
    ) {
        match &mut self.role {
            Role::Candidate(candidate) if candidate.term == term => {
                candidate.votes.retain(|ballot| ballot.from != from);
                candidate.votes.push(Ballot { from, grant });
                self.count_votes(commands);
            }
            Role::Leader(leader) if leader.term == term => {
                leader.votes.retain(|ballot| ballot.from != from);
                leader.votes.push(Ballot { from, grant });
                leader.gain_access(from, grant);
                self.restart_recovery();
            }
            _ => {}
        }
    }

    fn count_votes(&mut self, commands: &mut Vec<Command>) {
        let Role::Candidate(candidate) = &mut self.role else { return };
        let votes = &candidate.votes;
        if !self.configuration.has_majority(|id| votes.iter().any(|ballot| ballot.from == id)) {
            return;
        }
        let (term, votes) = (candidate.term, std::mem::take(&mut candidate.votes));
        let leader = Leader::elected(term, self.id, self.committed, votes, self.now_ns);
        self.role = Role::Leader(Box::new(leader));
        self.follow_configuration(commands);
        self.publish(term, 0);
    }

    /// Another server sees a leader, perhaps. If it is the one that this server promised itself to,
    /// and suspects, it is looked at again: it holds this server's region and need not ask once
    /// more. It stays suspected until its beats go on, and this server asks again soon: otherwise
    /// the followers of a leader that hangs would take turns at suspecting it.
    pub(super) fn on_refused(&mut self, term: Term, commands: &mut Vec<Command>) {
        self.seen_term = self.seen_term.max(term);
        let holder = self.holder.filter(|holder| holder.term == self.term);
        if let (Role::Asking(asking), Some(holder)) = (&self.role, holder) {
            let known = asking.suspect.filter(|suspect| suspect.id == holder.to);
            let suspect = known.unwrap_or(Watched::new(holder.to, false, self.now_ns));
            let pause_ns = ns(self.options.heartbeat) / 4;
            let spread_ns = self.stretched(ns(self.options.spread));
            let pause_ns = pause_ns.saturating_add(self.some_of(spread_ns));
            self.suspect(Some(suspect), self.now_ns.saturating_add(pause_ns));
        }
        if matches!(&self.role, Role::Leader(leader) if term > leader.term) {
            self.step_down(commands);
        }
    }
}

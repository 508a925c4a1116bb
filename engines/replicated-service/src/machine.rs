//! What the log applies: units, each to the service of its tag.

use std::fmt;
use std::io::{self, Read};
use std::sync::Arc;

use beeline_replicated_log::{Position, SnapshotWriter, StateMachine};
use beeline_wire::checksum::crc32c;

use crate::digest::{Windows, outcome};
use crate::group::{Group, count};
use crate::state;
use crate::unit::{Check, LaneName, NoUnit, REPEATED, Turn, Unit, put_part};

/// A member's lanes whose latest turns are looked at when it starts. That of a later one is when a unit
/// of it comes.
const LANES: u16 = 256;

/// Which service a unit is for. A number is given once, here, and never to another service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tag(pub u16);

impl Tag {
    /// The node's keys: what the Redis door and one-sided clients write.
    pub const KEYS: Self = Self(1);
    /// Documents.
    pub const DOCUMENTS: Self = Self(2);
    /// Objects.
    pub const OBJECTS: Self = Self(3);
    /// Topics.
    pub const TOPICS: Self = Self(4);
    /// The ledger.
    pub const CHAIN: Self = Self(5);
    /// From here on: programs of users, tests and examples.
    pub const FIRST_FREE: Self = Self(1 << 15);
}

/// A service's state cannot follow the log any more: the member stops.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}")]
pub struct CannotApply {
    /// Why.
    pub reason: String,
}

impl CannotApply {
    /// For this reason.
    #[must_use]
    pub fn new(reason: impl fmt::Display) -> Self {
        Self { reason: reason.to_string() }
    }

    /// Never: the entry that could not be applied stays where it is.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }
}

/// Where a service's replies to a unit go: one per request, in order.
#[derive(Debug)]
pub struct Replies<'a> {
    out: &'a mut Vec<u8>,
    count: u64,
}

impl Replies<'_> {
    /// The next request's reply, as `write` appends it.
    pub fn put(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.count += 1;
        put_part(self.out, write);
    }
}

/// What a service does with a unit that others may follow before [`Replicated::settle`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    /// It is to be applied now, by [`Replicated::apply`], behind everything that was put off.
    Alone,
    /// There is no more place: what was put off is to be settled first, and then the service asked again.
    Full,
    /// It was put off.
    Later,
}

/// What [`Replicated::settle`] tells of a unit that was put off.
#[derive(Debug)]
pub struct Settled<'a> {
    /// Its replies, a part for each request ([`crate::unit::parts`]).
    pub replies: &'a [u8],
    /// How many requests it had.
    pub requests: u64,
    /// As [`Replicated::effects`].
    pub effects: Option<u64>,
}

/// A service whose state is replicated. Every call comes from the log's thread, but for [`Replicated::examine`] and
/// [`Replicated::restore`]: all services go to another thread for these, and come back.
///
/// Units in the log's order lead to the same state at every member, and at any moment (and to the
/// same replies, but for the order of what has none): a service uses no clock but [`Unit::unix_ms`] (of which it takes the largest so
/// far), no chance, and nothing that members keep apart, such as how much room there is.
pub trait Replicated: Send {
    /// Its tag.
    fn tag(&self) -> Tag;

    /// The newest format of its requests that it reads; it reads all before.
    fn format(&self) -> u8;

    /// Commands up to here have taken effect, durably; some of what lies behind may have, and is
    /// skipped when it comes again. Asked once.
    fn applied(&self) -> Position;

    /// Some commands up to here may have taken effect: as [`StateMachine::reached`].
    fn reached(&self) -> Position {
        self.applied()
    }

    /// A log begins behind [`Replicated::applied`]: as [`StateMachine::founded_upon`].
    ///
    /// Errors: the medium's; the member does not start.
    fn founded_upon(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// Whether [`Replicated::flush`] makes effects last in the service itself.
    fn is_durable(&self) -> bool;

    /// The latest turn of `lane` that took effect here.
    ///
    /// Errors: [`CannotApply`].
    fn last_turn(&mut self, lane: LaneName) -> Result<Turn, CannotApply>;

    /// Whether all of a unit took effect before the member's last end, although the lane's turn that the service
    /// had recorded does not say so: it is skipped. Asked once of each unit (a piece is one) beyond that turn,
    /// before anything else is done with it.
    ///
    /// Errors: [`CannotApply`].
    fn took_effect(&mut self, _position: Position, _unit: &Unit<'_>) -> Result<bool, CannotApply> {
        Ok(false)
    }

    /// Whether the unit that was applied last had taken effect in part before the member's last end. Its replies
    /// are lost, and members compare nothing of it.
    fn had_begun(&self) -> bool {
        false
    }

    /// Puts a unit off, to apply it with those that come before the next [`Replicated::settle`]; from now on
    /// `unit.turn` is its lane's latest. What it does and answers must be what it would be if each had been
    /// applied in turn.
    ///
    /// Errors: [`CannotApply`].
    fn take(&mut self, _position: Position, _unit: &Unit<'_>) -> Result<Take, CannotApply> {
        Ok(Take::Alone)
    }

    /// Applies what was put off, and tells `each` of every unit of it, in the order in which it was taken.
    ///
    /// Errors: [`CannotApply`], as from [`Replicated::apply`].
    fn settle(&mut self, _each: &mut dyn FnMut(Settled<'_>)) -> Result<(), CannotApply> {
        Ok(())
    }

    /// Applies all requests of a unit, and remembers `unit.turn` as its lane's latest. A crash before the next
    /// [`Replicated::flush`] leaves all of it or nothing; or a part that the service knows of when the unit comes
    /// again, and does not apply twice ([`Replicated::had_begun`]).
    ///
    /// Errors: [`CannotApply`]; the member stops, and nothing of the unit may be left when the
    /// service is opened next, but such a part.
    fn apply(
        &mut self,
        position: Position,
        unit: &Unit<'_>,
        replies: &mut Replies<'_>,
    ) -> Result<(), CannotApply>;

    /// Keeps a piece of a unit, durably and in snapshots, and remembers `unit.turn` as its lane's
    /// latest. The first piece of a series takes the place of whatever the lane had left.
    ///
    /// Errors: [`CannotApply`]; so from a service whose lanes cut nothing.
    fn keep_piece(&mut self, _position: Position, unit: &Unit<'_>) -> Result<(), CannotApply> {
        let service = unit.lane.service.0;
        Err(CannotApply::new(format!("service {service} keeps no pieces of units")))
    }

    /// The bytes of all pieces before `unit`, the last one; `None` unless all of them are there.
    ///
    /// Errors: [`CannotApply`].
    fn pieces(&mut self, _unit: &Unit<'_>) -> Result<Option<Vec<u8>>, CannotApply> {
        Ok(None)
    }

    /// The unit of these pieces took effect: they may go. They do so at the latest with the next
    /// series of their lane.
    ///
    /// Errors: [`CannotApply`].
    fn drop_pieces(&mut self, _unit: &Unit<'_>) -> Result<(), CannotApply> {
        Ok(())
    }

    /// A digest of what the unit just applied changed, the same wherever it changed the same:
    /// members compare it ([`GroupStats::divergences`](crate::GroupStats::divergences)). `None` from
    /// a service whose replies tell everything, and are alike at every member: these are compared
    /// then.
    fn effects(&mut self) -> Option<u64> {
        None
    }

    /// Persists what was applied; remembers that everything up to `position` was.
    ///
    /// Errors: the medium's; the member stops.
    fn flush(&mut self, position: Position) -> io::Result<()>;

    /// Whether it is about to have no room for more ([`Log::is_short`](crate::Log::is_short)).
    fn is_short(&self) -> bool {
        false
    }

    /// Whether there is room for what the unit, one beyond its lane's latest turn, may store; `index` of the service's
    /// units of that kind stand before it in the entry at `position`. While there is none the member applies
    /// nothing from that entry on, asks again and again, and does not stop. What took effect before the member's last
    /// end needs no room: the member would wait for ever for room that what follows may make.
    fn has_room_for(&mut self, _position: Position, _index: u32, _unit: &Unit<'_>) -> bool {
        true
    }

    /// Captures the state, with the lanes' latest turns, as of the last flush. Quick: what is
    /// returned writes it later, on another thread.
    ///
    /// Errors: the service's, also while it has a part of what lies behind that ([`Replicated::reached`]); the log
    /// tries again later.
    fn snapshot(&mut self) -> io::Result<SnapshotWriter>;

    /// Looks whether [`Replicated::restore`] can take this state, before anything of the old one is
    /// given up: above all, whether there is room for it. What it reads was not checked yet.
    ///
    /// Errors: why it cannot; the member goes on with the state that it has.
    fn examine(&mut self, _position: Position, _state: &mut dyn Read) -> io::Result<()> {
        Ok(())
    }

    /// Replaces state and turns by those of a snapshot that covers everything up to `position`.
    /// Before anything of the old state goes it calls [`Group::set_loading`], so that no read sees a
    /// part; the machine ends that once all services have theirs.
    ///
    /// Errors: the service's; the member stops.
    fn restore(&mut self, position: Position, state: &mut dyn Read) -> io::Result<()>;
}

/// A unit that its service put off.
struct Pending {
    position: Position,
    lane: LaneName,
    turn: Turn,
    check: Option<Check>,
    /// Of the command.
    crc: u32,
    /// Of this run of this member.
    own: bool,
}

/// The state machine of a group: its services, by tag.
pub struct Machine {
    group: Arc<Group>,
    services: Vec<Box<dyn Replicated>>,
    windows: Windows,
    /// Put off, all by one service.
    pending: Vec<Pending>,
    /// Replies to what was put off and settled already, for [`StateMachine::settle`].
    settled: Vec<Vec<u8>>,
    /// Units of one entry that services were asked about whether there is room for them.
    asked: Vec<(LaneName, Turn)>,
    failure: Option<String>,
}

impl fmt::Debug for Machine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tags: Vec<_> = self.services.iter().map(|service| service.tag()).collect();
        formatter.debug_struct("Machine").field("services", &tags).finish_non_exhaustive()
    }
}

impl Machine {
    /// For `services`, whose tags differ: the same ones at every member.
    ///
    /// Errors: [`CannotApply`]: two have one tag, or the turns of this member's lanes cannot be read.
    pub fn new(group: Arc<Group>, services: Vec<Box<dyn Replicated>>) -> Result<Self, CannotApply> {
        for (index, service) in services.iter().enumerate() {
            if services[..index].iter().any(|other| other.tag() == service.tag()) {
                return Err(CannotApply::new(format!("two services have tag {}", service.tag().0)));
            }
        }
        let mut machine = Self {
            group,
            services,
            windows: Windows::default(),
            pending: Vec::new(),
            settled: Vec::new(),
            asked: Vec::new(),
            failure: None,
        };
        machine.choose_incarnation()?;
        machine.group.set_applied(machine.position().0);
        Ok(machine)
    }

    /// A clock that was set back must not bring an incarnation that a lane of this member had: units of
    /// it would be skipped, and called done.
    fn choose_incarnation(&mut self) -> Result<(), CannotApply> {
        let node = self.group.options().node;
        for service in &mut self.services {
            for lane in 0..LANES {
                let name = LaneName { service: service.tag(), node, lane };
                let last = service.last_turn(name)?;
                if last > Turn::default() {
                    self.group.raise_incarnation(last.incarnation.saturating_add(1));
                }
            }
        }
        Ok(())
    }

    fn position(&self) -> Position {
        let positions = self.services.iter().map(|service| service.applied());
        positions.min().unwrap_or_default()
    }

    /// Applies a command, or has its service put it off: `false`. Where `later` is not allowed, none is put off.
    fn apply_or_fail(
        &mut self,
        position: Position,
        command: &[u8],
        reply: &mut Vec<u8>,
        later: bool,
    ) -> Result<bool, CannotApply> {
        let unit = match Unit::decode(command) {
            Ok(unit) => unit,
            Err(NoUnit::Malformed) => {
                // At every member alike.
                tracing::error!(bytes = command.len(), "an entry of the log is no unit; skipped");
                self.settle_pending()?;
                self.told(position, Some(outcome(crc32c(command), 0)));
                return Ok(true);
            }
            Err(NoUnit::Version(version)) => {
                let reason = format!("the log has units of version {version}: a newer build wrote");
                return Err(CannotApply::new(reason));
            }
        };
        let index = self.service_of(&unit)?;
        let service = &mut self.services[index];
        let own = self.group.options().node == unit.lane.node;
        if own {
            outgrow(&self.group, unit.turn);
        }
        let before = service.last_turn(unit.lane)?;
        if own {
            outgrow(&self.group, before);
        }
        let repeated = unit.turn <= before || service.took_effect(position, &unit)?;
        let pending = Pending {
            position,
            lane: unit.lane,
            turn: unit.turn,
            check: unit.check,
            crc: crc32c(command),
            own: own && unit.turn.incarnation == self.group.incarnation(),
        };
        if !repeated && unit.piece.is_none() {
            if self.pending.first().is_some_and(|first| first.lane.service != unit.lane.service) {
                self.settle_pending()?;
            }
            let mut take = self.services[index].take(position, &unit)?;
            if take == Take::Full {
                self.settle_pending()?;
                take = self.services[index].take(position, &unit)?;
            }
            if take == Take::Later {
                self.pending.push(pending);
                if later {
                    return Ok(false);
                }
                self.settle_pending()?;
                reply.append(&mut self.settled.pop().unwrap_or_default());
                return Ok(true);
            }
        }
        self.settle_pending()?;
        if let Some(check) = unit.check {
            compare(&self.group, &self.windows, check, position);
        }
        if repeated {
            self.skipped(position, reply);
        } else {
            self.apply_alone(index, &unit, &pending, reply)?;
        }
        Ok(true)
    }

    /// The service that a unit is for.
    fn service_of(&self, unit: &Unit<'_>) -> Result<usize, CannotApply> {
        let (service, format) = (unit.lane.service, unit.format);
        let mut services = self.services.iter();
        let found = services.position(|known| known.tag() == service && format <= known.format());
        found.ok_or_else(|| {
            let service = service.0;
            CannotApply::new(format!(
                "the log has requests of service {service} in format {format}, which this member \
                 does not serve: the same services of the same build belong to every member"
            ))
        })
    }

    /// A unit that took effect before.
    fn skipped(&mut self, position: Position, reply: &mut Vec<u8>) {
        count(&self.group.counters.repeated, 1);
        reply.clear();
        reply.extend_from_slice(&REPEATED);
        self.told(position, None);
    }

    fn apply_alone(
        &mut self,
        index: usize,
        unit: &Unit<'_>,
        pending: &Pending,
        reply: &mut Vec<u8>,
    ) -> Result<(), CannotApply> {
        let (position, service) = (pending.position, &mut self.services[index]);
        let before = match unit.piece {
            Some(piece) if piece.is_last() => service.pieces(unit)?,
            _ => None,
        };
        if unit.piece.is_some() && before.is_none() {
            // Not the last one; or one whose others are not here, which no lane proposes.
            service.keep_piece(position, unit)?;
            count(&self.group.counters.pieces, 1);
            self.told(position, Some(outcome(pending.crc, 0)));
            if pending.own {
                self.group.keep_reply(unit.lane, unit.turn.number, &[]);
            }
            return Ok(());
        }
        let whole = before.map(|mut bytes| {
            bytes.extend_from_slice(unit.bytes());
            bytes
        });
        let mut replies = Replies { out: reply, count: 0 };
        match &whole {
            Some(bytes) => {
                service.apply(position, &unit.whole(bytes), &mut replies)?;
                service.drop_pieces(unit)?;
            }
            None => service.apply(position, unit, &mut replies)?,
        }
        let (requests, effects) = (replies.count, service.effects());
        if service.had_begun() {
            self.skipped(position, reply);
            return Ok(());
        }
        let settled = Settled { replies: reply, requests, effects };
        conclude(&self.group, &mut self.windows, pending, &settled);
        Ok(())
    }

    /// Has the units that were put off applied, and keeps their replies.
    fn settle_pending(&mut self) -> Result<(), CannotApply> {
        let Some(first) = self.pending.first() else { return Ok(()) };
        let tag = first.lane.service;
        let (group, windows, settled) = (&self.group, &mut self.windows, &mut self.settled);
        let Some(service) = self.services.iter_mut().find(|service| service.tag() == tag) else {
            return Ok(());
        };
        let mut pending = self.pending.drain(..);
        let outcome = service.settle(&mut |unit| {
            let Some(pending) = pending.next() else { return };
            if let Some(check) = pending.check {
                compare(group, windows, check, pending.position);
            }
            conclude(group, windows, &pending, &unit);
            settled.push(unit.replies.to_vec());
        });
        drop(pending);
        outcome
    }

    /// The member stops.
    fn fail(&mut self, position: Position, CannotApply { reason }: CannotApply) {
        tracing::error!(
            reason,
            %position,
            "this member cannot apply what the cluster agreed on, and stops"
        );
        self.failure = Some(reason);
        self.group.fail();
    }
}

/// A unit was applied: counts it, and keeps what it answered and what it did.
fn conclude(group: &Group, windows: &mut Windows, unit: &Pending, settled: &Settled<'_>) {
    let effects = settled.effects.unwrap_or_else(|| u64::from(crc32c(settled.replies)));
    tell(group, windows, unit.position, Some(outcome(unit.crc, effects)));
    count(&group.counters.units, 1);
    count(&group.counters.requests, settled.requests);
    if unit.own {
        group.keep_reply(unit.lane, unit.turn.number, settled.replies);
    }
}

fn tell(group: &Group, windows: &mut Windows, position: Position, outcome: Option<u64>) {
    let newest = windows.newest();
    windows.applied(position.0, outcome);
    if windows.newest() != newest {
        group.set_check(windows.newest());
    }
}

impl Machine {
    fn told(&mut self, position: Position, outcome: Option<u64>) {
        tell(&self.group, &mut self.windows, position, outcome);
    }
}

/// A lane of this member had this turn. If an earlier run's clock was ahead, lanes go on behind it.
fn outgrow(group: &Group, turn: Turn) {
    if turn.incarnation > group.incarnation() {
        group.raise_incarnation(turn.incarnation.saturating_add(1));
    }
}

/// Compares what a window did here with what the leader that proposed a unit says it did there.
fn compare(group: &Group, windows: &Windows, check: Check, position: Position) {
    if windows.find(check.window).is_some_and(|digest| digest != check.digest) {
        count(&group.counters.divergences, 1);
        tracing::error!(
            window = check.window,
            %position,
            "this member's state and a leader's differ: compare them, remove the wrong member, and \
             let it join again"
        );
    }
}

impl StateMachine for Machine {
    fn apply(&mut self, position: Position, command: &[u8], reply: &mut Vec<u8>) {
        if self.failure.is_some() {
            return;
        }
        if let Err(error) = self.apply_or_fail(position, command, reply, false) {
            self.fail(position, error);
        }
    }

    fn take(&mut self, position: Position, command: &[u8], reply: &mut Vec<u8>) -> bool {
        if self.failure.is_some() {
            return true;
        }
        self.apply_or_fail(position, command, reply, true).unwrap_or_else(|error| {
            self.fail(position, error);
            true
        })
    }

    fn settle(&mut self, replies: &mut Vec<Vec<u8>>) {
        let last = self.pending.last().map(|last| last.position);
        if let (None, Some(last)) = (&self.failure, last)
            && let Err(error) = self.settle_pending()
        {
            self.fail(last, error);
        }
        replies.append(&mut self.settled);
    }

    fn flush(&mut self, applied: Position) -> io::Result<()> {
        if let Some(reason) = &self.failure {
            return Err(io::Error::other(reason.clone()));
        }
        // Also behind entries without a unit: the log forgets what lies below a position that was
        // flushed, and a member that recorded an older one would miss it after a restart.
        for service in &mut self.services {
            service.flush(applied)?;
        }
        self.group.set_applied(applied.0);
        Ok(())
    }

    fn applied(&self) -> Position {
        self.position()
    }

    fn reached(&self) -> Position {
        self.services.iter().map(|service| service.reached()).max().unwrap_or_default()
    }

    fn founded_upon(&mut self) -> io::Result<()> {
        self.services.iter_mut().try_for_each(|service| service.founded_upon())
    }

    fn is_durable(&self) -> bool {
        self.services.iter().all(|service| service.is_durable())
    }

    fn is_short(&self) -> bool {
        self.services.iter().any(|service| service.is_short())
    }

    fn stamp(&mut self, command: &mut [u8]) -> Result<(), String> {
        if Unit::decode(command).is_err() {
            return Err("no unit of a known version".to_owned());
        }
        self.group.stamp(command);
        Ok(())
    }

    /// What is no unit of a service here, or took effect before, needs none: applying it tells.
    fn has_room_for(&mut self, position: Position, index: usize, command: &[u8]) -> bool {
        if index == 0 {
            self.asked.clear();
        }
        let Ok(unit) = Unit::decode(command) else { return true };
        let lane = unit.lane;
        let mut services = self.services.iter_mut();
        let Some(service) = services.find(|service| service.tag() == lane.service) else {
            return true;
        };
        let asked = self.asked.iter().filter(|asked| asked.0 == lane).map(|asked| asked.1).max();
        // What goes wrong here is told when the unit is applied.
        let before = service.last_turn(lane).ok().max(asked);
        if before.is_some_and(|before| unit.turn <= before) {
            return true;
        }
        let before = self.asked.iter().filter(|asked| asked.0.service == lane.service).count();
        self.asked.push((lane, unit.turn));
        service.has_room_for(position, before as u32, &unit)
    }

    fn snapshot(&mut self) -> io::Result<SnapshotWriter> {
        let mut parts = Vec::new();
        for service in &mut self.services {
            parts.push((service.tag(), service.snapshot()?));
        }
        Ok(Box::new(move |out| state::write(parts, out)))
    }

    fn examine(&mut self, position: Position, reader: &mut dyn Read) -> io::Result<()> {
        let services = &mut self.services;
        state::read(reader, |tag, part| {
            let service = services.iter_mut().find(|service| service.tag() == tag);
            let unknown = || io::Error::other(format!("the snapshot has service {}", tag.0));
            service.ok_or_else(unknown)?.examine(position, part)
        })
    }

    fn restore(&mut self, position: Position, reader: &mut dyn Read) -> io::Result<()> {
        let services = &mut self.services;
        let mut restored = Vec::new();
        state::read(reader, |tag, part| {
            let service = services.iter_mut().find(|service| service.tag() == tag);
            let unknown = || io::Error::other(format!("the snapshot has service {}", tag.0));
            restored.push(tag);
            service.ok_or_else(unknown)?.restore(position, part)
        })?;
        // A service that the snapshot's member did not have yet has no state.
        for service in services.iter_mut().filter(|service| !restored.contains(&service.tag())) {
            service.restore(position, &mut io::empty())?;
        }
        self.windows.forget();
        self.group.set_check(None);
        self.group.set_applied(position.0);
        self.group.set_loading(false);
        Ok(())
    }
}

impl Drop for Machine {
    /// The log has ended, perhaps by itself: no request may wait for it any more, or be told by this
    /// member who leads.
    fn drop(&mut self) {
        self.group.fail();
    }
}

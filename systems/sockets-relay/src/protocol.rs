//! What relays say to each other about connections: offers, their answers, and records of what is
//! carried. Everything heard is hostile.

use std::net::SocketAddr;

use beeline_fabric::{RemoteAddress, RemoteKey};
use beeline_sockets::segment::{STATE_MATCHING, STATE_OPEN, STATE_PAIRED};

use crate::connection::Phase;
use crate::link::{Early, Link, Stage, Trust};
use crate::message::{Ground, Record, Records};
use crate::mirror::{Nonsense, SignsCopy};
use crate::relay::Core;

/// Most offers of a link that are kept until their end here comes.
const MOST_EARLY: usize = 1024;

fn address(ground: Ground) -> RemoteAddress {
    RemoteAddress { key: RemoteKey(ground.key), offset: ground.base }
}

/// Of two ends one offers: the one with the smaller address.
fn offers(own: SocketAddr, peer: SocketAddr) -> bool {
    own < peer
}

impl Core {
    /// Looks for the other end of a connection that waits.
    pub(crate) fn seek(&mut self, index: u32) {
        let Some(connection) = self.table.get(index) else { return };
        let (host, ends) = (connection.host, (connection.own, connection.peer));
        if offers(ends.0, ends.1) {
            let up = self
                .links()
                .find(|(_, link)| link.stage == Stage::Up && link.trust.host() == Some(host));
            match up.map(|(at, _)| at) {
                Some(at) => self.offer(index, at),
                None => self.dial(host),
            }
            return;
        }
        let of_host = |(_, link): &(usize, &Link)| link.trust.host() == Some(host);
        let known = self.links().filter(of_host).find_map(|(at, link)| {
            let place = link.early.iter().position(|early| (early.own, early.peer) == ends)?;
            Some((at, place))
        });
        if let Some((at, place)) = known
            && let Some(link) = self.link(at)
        {
            let early = link.early.swap_remove(place);
            self.promise(index, at, &early);
        } else if !self.settings.over_tcp
            && !self.links().any(|(_, link)| link.trust.host() == Some(host))
        {
            // The other one calls; but by what it would, this one is to know, too.
            self.dial(host);
        }
    }

    /// Offers a connection that waits on link `at`.
    pub(crate) fn offer(&mut self, index: u32, at: usize) {
        let name = self.table.name(index);
        let Some(connection) = self.table.get_mut(index) else { return };
        let record = Record::Offer {
            name,
            ring_bytes: connection.mirror.ring_bytes(),
            own: connection.own,
            peer: connection.peer,
        };
        connection.link = at;
        // Keeps its patience.
        connection.phase = Phase::Offered;
        if let Some(link) = self.link(at) {
            link.connections += 1;
            link.owe(0, record);
        }
    }

    /// Promises a connection that waits to the relay of link `at`, which offered it.
    fn promise(&mut self, index: u32, at: usize, early: &Early) {
        let ring_bytes = self.table.get(index).map(|one| one.mirror.ring_bytes());
        let ground =
            if ring_bytes == Some(early.ring_bytes) { self.register(index, at).ok() } else { None };
        let name = self.table.name(index);
        let promised = self.table.get_mut(index).filter(|one| {
            ground.is_some()
                && one.phase == Phase::Waiting
                && one.mirror.advance(STATE_OPEN, STATE_MATCHING)
        });
        let answer = match (promised, ground) {
            (Some(connection), Some(ground)) => {
                connection.link = at;
                connection.far = early.name;
                Record::Accept { name, ground }
            }
            _ => Record::Refuse,
        };
        if answer == Record::Refuse {
            self.forget(index);
        } else {
            self.enter(index, Phase::Promised);
            if let Some(link) = self.link(at) {
                link.connections += 1;
            }
        }
        if let Some(link) = self.link(at) {
            link.owe(early.name, answer);
        }
    }

    /// Takes in everything that a message of link `at` says.
    pub(crate) fn hear(&mut self, at: usize, message: &[u8]) {
        for record in Records::new(message) {
            let Ok((name, record)) = record else {
                tracing::debug!(link = at, "not a message");
                self.break_link(at);
                return;
            };
            if !self.hear_record(at, name, &record) {
                tracing::debug!(link = at, ?record, "out of place");
                self.break_link(at);
                return;
            }
            if self.link(at).is_none() {
                return;
            }
        }
    }

    /// One record; false when it cannot have been meant.
    fn hear_record(&mut self, at: usize, name: u64, record: &Record<'_>) -> bool {
        if let Record::Offer { name, ring_bytes, own, peer } = *record {
            // Their own is our peer.
            let since = self.now;
            self.hear_offer(at, Early { name, ring_bytes, own: peer, peer: own, since });
            return true;
        }
        let known = self.table.named(name).filter(|index| {
            self.table.get(*index).is_some_and(|one| one.link == at && one.phase != Phase::Waiting)
        });
        let Some(index) = known else {
            // Of a connection that ended meanwhile. Only one that counts on us is told so.
            if let Record::Accept { name, .. } = *record
                && let Some(link) = self.link(at)
            {
                link.owe(name, Record::Refuse);
            }
            return true;
        };
        let Some(phase) = self.table.get(index).map(|one| one.phase) else { return true };
        match (*record, phase) {
            (Record::Accept { name, ground }, Phase::Offered) => {
                self.hear_accept(index, at, name, ground);
            }
            (Record::Commit { ground }, Phase::Promised) => {
                let Some(connection) = self.table.get_mut(index) else { return true };
                connection.ground = Some(address(ground));
                let is_paired = connection.mirror.advance(STATE_MATCHING, STATE_PAIRED);
                self.paired(index);
                if !is_paired {
                    self.fault(index, Nonsense { what: "the segment's state" });
                }
            }
            (Record::Refuse, Phase::Offered | Phase::Promised) => self.forget(index),
            (Record::Ended, Phase::Ending) => self.forget(index),
            (Record::Ended, Phase::Paired) | (Record::Reset, Phase::Paired | Phase::Ending) => {
                self.hear_reset(index, *record == Record::Reset);
            }
            (
                Record::Signs { switched_at, finished, closed, mute },
                Phase::Paired | Phase::Ending,
            ) => {
                let signs = SignsCopy { switched_at, finished, closed, mute };
                self.hear_signs(index, signs);
            }
            (Record::Ring, Phase::Paired | Phase::Ending) => self.hear_ring(index),
            (Record::Recall { hold_ms, while_small }, Phase::Paired) => {
                self.hear_recall(index, hold_ms, while_small);
            }
            (Record::Drained, Phase::Paired) => self.hear_drained(index),
            (Record::Stay, Phase::Paired) => return self.hear_stay(index),
            (Record::Total { sent }, Phase::Paired) => return self.hear_total(index, sent),
            (_, Phase::Paired) => self.hear_carried(index, record),
            // What was under way when we said the end.
            (
                Record::Data { .. }
                | Record::Placed { .. }
                | Record::Credit { .. }
                | Record::Nudge
                | Record::Recall { .. }
                | Record::Stay
                | Record::Drained
                | Record::Total { .. },
                Phase::Ending,
            ) => {}
            _ => return false,
        }
        true
    }

    fn hear_offer(&mut self, at: usize, early: Early) {
        let host = self.host_of(early.peer.ip());
        let Some(link) = self.link(at) else { return };
        let trust = link.trust;
        if trust == Trust::Called
            && let Some(host) = host
        {
            link.trust = Trust::Asked(host);
            self.confirm(at, host, early.own.ip());
        }
        let fits = match trust {
            Trust::Called => host.is_some(),
            Trust::Asked(asked) | Trust::Dialled(asked) | Trust::Confirmed(asked) => {
                host == Some(asked)
            }
        };
        let waiting = self.waiting.get(&(early.own, early.peer)).copied();
        let waiting = waiting.filter(|_| trust.host().is_some());
        let waits = |core: &Self, index: u32| {
            core.table.get(index).is_some_and(|one| one.phase == Phase::Waiting)
        };
        if let Some(index) = waiting
            && fits
            && waits(self, index)
        {
            self.promise(index, at, &early);
        } else if let Some(link) = self.link(at) {
            if waiting.is_none() && fits && link.early.len() < MOST_EARLY {
                link.early.push(early);
            } else {
                link.owe(early.name, Record::Refuse);
            }
        }
    }

    /// The host at the other end of link `at` is known: what it offered is looked at.
    pub(crate) fn look_at_early(&mut self, at: usize) {
        let Some(link) = self.link(at) else { return };
        let offered = std::mem::take(&mut link.early);
        offered.into_iter().for_each(|early| self.hear_offer(at, early));
    }

    fn hear_accept(&mut self, index: u32, at: usize, far: u64, theirs: Ground) {
        let ours = self.register(index, at);
        let paired = self.table.get_mut(index).is_some_and(|connection| {
            connection.far = far;
            connection.ground = Some(address(theirs));
            ours.is_ok() && connection.mirror.advance(STATE_OPEN, STATE_PAIRED)
        });
        let answer = match ours {
            Ok(ground) if paired => Record::Commit { ground },
            _ => Record::Refuse,
        };
        if let Some(link) = self.link(at) {
            link.owe(far, answer);
        }
        if paired {
            self.paired(index);
        } else {
            self.forget(index);
        }
    }

    fn paired(&mut self, index: u32) {
        self.enter(index, Phase::Paired);
        if let Some(connection) = self.table.get(index) {
            self.waiting.remove(&(connection.own, connection.peer));
        }
        self.counters.paired += 1;
        self.heat(index);
    }

    fn hear_reset(&mut self, index: u32, wants_word: bool) {
        let Some(connection) = self.table.get_mut(index) else { return };
        connection.mirror.store_reset();
        connection.cut();
        let (at, far) = (connection.link, connection.far);
        self.counters.broken += 1;
        if wants_word && let Some(link) = self.link(at) {
            link.owe(far, Record::Ended);
        }
        self.forget(index);
    }

    fn hear_signs(&mut self, index: u32, signs: SignsCopy) {
        let Some(connection) = self.table.get_mut(index) else { return };
        if let Err(nonsense) = connection.mirror.store_signs(signs) {
            if connection.phase == Phase::Paired {
                self.fault(index, nonsense);
            }
            return;
        }
        if !signs.is_last() {
            // Room that could not be told of before the switch is remembered.
            self.touch(index, true, false);
            return;
        }
        // Nothing more comes, and nobody there reads: the rest is between the program and the
        // kernel, whose end of the stream follows once the other relay lets go.
        let (at, far) = (connection.link, connection.far);
        if let Some(link) = self.link(at) {
            link.owe(far, Record::Ended);
        }
        self.forget(index);
    }

    fn hear_ring(&mut self, index: u32) {
        let Some(connection) = self.table.get(index) else { return };
        if connection.mirror.signs_sent().switched_at == 0 {
            // Only what follows the switch is a doorbell. The other relay cannot know of one.
            return;
        }
        if connection.is_silent() {
            // The last one was sent, and whoever sleeps there heard it.
            return;
        }
        self.counters.doorbells += 1;
        if !connection.ring() && connection.phase == Phase::Paired {
            self.fault(index, Nonsense { what: "the kernel's connection" });
        }
    }

    fn hear_carried(&mut self, index: u32, record: &Record<'_>) {
        let Some(connection) = self.table.get_mut(index) else { return };
        let (stored, outcome) = match *record {
            Record::Data { position, bytes } => {
                connection.sleepy.came();
                (true, connection.mirror.publish(position, bytes))
            }
            Record::Placed { position, end, header } => {
                connection.sleepy.large();
                (true, connection.mirror.publish_placed(position, end, header))
            }
            Record::Credit { position } => (false, connection.mirror.credit(position)),
            Record::Nudge => {
                if connection.mirror.signs_sent().switched_at == 0 {
                    connection.is_nudged = true;
                    connection.mirror.arm(true);
                }
                return;
            }
            _ => (false, Err(Nonsense { what: "the order of records" })),
        };
        if let Err(nonsense) = outcome {
            self.fault(index, nonsense);
            return;
        }
        let received = connection.mirror.received();
        let more = received - connection.moved[1];
        connection.moved[1] = received;
        self.counters.received_bytes += more;
        self.touch(index, stored, !stored);
        self.heat(index);
    }
}

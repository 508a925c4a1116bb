//! What time and broken links change: ends that wait, ends that end, links that do not come up.

use std::time::Duration;

use beeline_fabric::QueuePairState;

use crate::connection::Phase;
use crate::link::{Early, Link, Stage, Trust};
use crate::message::Record;
use crate::relay::Core;

/// Times between two looks at what waits or ends.
const SWEEP: Duration = Duration::from_millis(500);
/// While queue pairs connect, nobody sleeps longer.
const CONNECTING_LOOK: Duration = Duration::from_millis(5);
/// While an end seems to be nobody's, nobody sleeps longer.
const UNHELD_LOOK: Duration = Duration::from_millis(50);
/// Longest time to make a link.
const LINK_PATIENCE: Duration = Duration::from_secs(10);
/// A host that could not be reached is left alone for so long.
pub(crate) const RETRY: Duration = Duration::from_secs(1);

impl Core {
    /// Time can change something: sleep no longer than this.
    #[must_use]
    pub fn longest_sleep(&self) -> Option<Duration> {
        if self.links().any(|(_, link)| link.stage == Stage::Connecting) {
            return Some(CONNECTING_LOOK);
        }
        if self.has_unheld() {
            return Some(UNHELD_LOOK);
        }
        self.is_timed().then_some(SWEEP)
    }

    /// Something waits that is not to wait for ever.
    pub(crate) fn is_timed(&self) -> bool {
        let settled = |link: &Link| {
            link.stage == Stage::Up && link.trust.host().is_some() && link.early.is_empty()
        };
        self.passing > 0 || self.links().any(|(_, link)| !settled(link))
    }

    /// What time changes: links that connect, ends that wait, ends that end.
    pub(crate) fn attend(&mut self) {
        for at in 0..self.links.len() {
            let now = self.now;
            let Some(link) = self.link(at) else { continue };
            let late = now.saturating_sub(link.since) > LINK_PATIENCE;
            match (link.stage, link.pair().state()) {
                (Stage::Up, _) => {}
                (Stage::Connecting, QueuePairState::ReadyToSend) => self.link_is_up(at),
                (Stage::Connecting, QueuePairState::Error) => self.break_link(at),
                _ if late => self.break_link(at),
                _ => {}
            }
        }
        if self.now.saturating_sub(self.swept_at) < SWEEP {
            return;
        }
        self.swept_at = self.now;
        let (now, patience) = (self.now, self.settings.patience);
        let mut stuck = Vec::new();
        for index in self.table.select(|one| one.phase != Phase::Paired) {
            let Some(connection) = self.table.get_mut(index) else { continue };
            let age = now.saturating_sub(connection.since);
            match connection.phase {
                Phase::Waiting | Phase::Offered
                    if age > patience || connection.mirror.is_given_up() =>
                {
                    self.forget(index);
                }
                Phase::Waiting => self.seek(index),
                // An honest relay answers at once: this link is none any more.
                Phase::Promised if age > patience => stuck.push(connection.link),
                Phase::Ending if age > self.settings.lingering => {
                    // Its memory is kept for writes under way; the kernel's connection is not.
                    connection.let_go();
                    if age > patience {
                        stuck.push(connection.link);
                    }
                }
                _ => {}
            }
        }
        for link in self.links.iter_mut().filter_map(|(_, link)| link.as_mut()) {
            let late = |early: &mut Early| now.saturating_sub(early.since) > patience;
            let late: Vec<Early> = link.early.extract_if(.., late).collect();
            late.into_iter().for_each(|early| link.owe(early.name, Record::Refuse));
        }
        let silent =
            |link: &Link| link.trust.host().is_none() && now.saturating_sub(link.since) > patience;
        let silent: Vec<_> =
            self.links().filter(|(_, link)| silent(link)).map(|(at, _)| at).collect();
        silent.into_iter().chain(stuck).for_each(|at| self.break_link(at));
    }

    /// Ends a link and what was on it.
    pub(crate) fn break_link(&mut self, at: usize) {
        let Some((generation, place)) = self.links.get_mut(at) else { return };
        let Some(link) = place.take() else { return };
        *generation = generation.wrapping_add(1);
        if let Trust::Dialled(host) = link.trust {
            self.hosts[host].is_dialling = false;
            self.hosts[host].retry_at = self.now + RETRY;
        }
        tracing::debug!(link = at, connections = link.connections, "a link ended");
        drop(link);
        for index in self.table.select(|one| one.link == at && one.phase != Phase::Waiting) {
            let Some(connection) = self.table.get_mut(index) else { continue };
            connection.link = usize::MAX;
            match connection.phase {
                Phase::Offered => {
                    self.enter(index, Phase::Waiting);
                    continue;
                }
                Phase::Paired => {
                    connection.mirror.store_reset();
                    connection.cut();
                    self.counters.broken += 1;
                }
                _ => {}
            }
            self.forget(index);
        }
    }
}

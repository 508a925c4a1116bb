//! Who has the program's end: the processes that the segment's table names, watched until they end.
//!
//! Inside a host the kernel tells the end of the last holder. Here the relay has a copy of the
//! socket, so it has to find out by itself: it keeps a process descriptor for every number in the
//! table, takes the dead out of it, and believes that nobody is left when the table stayed empty for
//! a while (an `exec` comes and goes in between; who is on its way may take longer).

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::connection::{Connection, Phase};
use crate::relay::Core;

/// An end without holders is believed to be one after so long.
const GRACE: Duration = Duration::from_millis(200);
/// And after so long where somebody was on its way.
const LONGEST_WAY: Duration = Duration::from_secs(30);

/// Processes that hold ends, and what is to be done about them.
#[derive(Debug, Default)]
pub(crate) struct Watched {
    /// Connections by process.
    by_process: HashMap<u32, Vec<u32>>,
    /// To be watched from now on.
    fresh: Vec<u32>,
    /// Nobody's any more.
    stale: Vec<u32>,
    /// Connections that nobody seems to hold, and since when.
    unheld: Vec<(u32, Duration)>,
}

/// Somebody holds the end.
fn is_held(connection: &Connection) -> bool {
    let holders = connection.mirror.segment().holders();
    holders.processes().iter().any(|place| place.load(Ordering::SeqCst) != 0)
}

impl Core {
    /// Processes to be watched from now on; [`Core::process_ended`] when they end.
    pub fn take_fresh(&mut self) -> Option<u32> {
        self.watched.fresh.pop()
    }

    /// A process could not be watched now: it is to be tried again.
    pub fn put_back_fresh(&mut self, process: u32) {
        if self.watched.by_process.contains_key(&process) {
            self.watched.fresh.push(process);
        }
    }

    /// Processes wait to be watched.
    #[must_use]
    pub fn has_fresh(&self) -> bool {
        !self.watched.fresh.is_empty()
    }

    /// Processes that need not be watched any more.
    pub fn take_stale(&mut self) -> Option<u32> {
        self.watched.stale.pop()
    }

    /// Looks who holds the end of a connection.
    pub(crate) fn look_at_holders(&mut self, index: u32) {
        let Some(connection) = self.table.get_mut(index) else { return };
        let holders = connection.mirror.segment().holders();
        let named: Vec<u32> = holders
            .processes()
            .iter()
            .map(|place| place.load(Ordering::SeqCst))
            .filter(|process| *process != 0)
            .collect();
        let gone: Vec<u32> =
            connection.holders.iter().filter(|one| !named.contains(one)).copied().collect();
        let fresh: Vec<u32> =
            named.iter().filter(|one| !connection.holders.contains(one)).copied().collect();
        let nobody = named.is_empty();
        connection.holders = named;
        for process in fresh {
            let of = self.watched.by_process.entry(process).or_default();
            if of.is_empty() {
                self.watched.stale.retain(|one| *one != process);
                self.watched.fresh.push(process);
            }
            of.push(index);
        }
        for process in gone {
            self.unwatch(process, index);
        }
        if nobody && !self.watched.unheld.iter().any(|(one, _)| *one == index) {
            self.watched.unheld.push((index, self.now));
        }
    }

    fn unwatch(&mut self, process: u32, index: u32) {
        let Some(of) = self.watched.by_process.get_mut(&process) else { return };
        of.retain(|one| *one != index);
        if of.is_empty() {
            self.watched.by_process.remove(&process);
            self.watched.fresh.retain(|one| *one != process);
            self.watched.stale.push(process);
        }
    }

    /// A connection is taken out.
    pub(crate) fn forget_holders(&mut self, index: u32, connection: &Connection) {
        for process in &connection.holders {
            self.unwatch(*process, index);
        }
        self.watched.unheld.retain(|(one, _)| *one != index);
    }

    /// A process ended: ends that nobody holds any more are closed for it, soon.
    pub fn process_ended(&mut self, process: u32) {
        for index in self.watched.by_process.remove(&process).unwrap_or_default() {
            if let Some(connection) = self.table.get(index) {
                let _ = connection.mirror.segment().holders().remove(process);
            }
            self.look_at_holders(index);
        }
    }

    /// Ends that nobody seems to hold.
    #[must_use]
    pub(crate) fn has_unheld(&self) -> bool {
        !self.watched.unheld.is_empty()
    }

    /// Believes what lasted long enough.
    pub(crate) fn attend_unheld(&mut self) {
        let now = self.now;
        let mut unheld = std::mem::take(&mut self.watched.unheld);
        unheld.retain(|(index, since)| {
            let Some(connection) = self.table.get_mut(*index) else { return false };
            if is_held(connection) || connection.mirror.signs().closed != 0 {
                return false;
            }
            let age = now.saturating_sub(*since);
            let births = connection.mirror.segment().holders().births();
            if age < GRACE || births > 0 && age < LONGEST_WAY {
                return true;
            }
            match connection.phase {
                // The other relay may have its word under way: it is told the end then.
                Phase::Promised | Phase::Paired => {
                    connection.orphan();
                    self.heat(*index);
                }
                Phase::Waiting | Phase::Offered => self.forget(*index),
                Phase::Ending => {}
            }
            false
        });
        self.watched.unheld.append(&mut unheld);
    }
}

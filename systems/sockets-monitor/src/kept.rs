//! Introduced connections, whose segments whoever gets a socket of theirs may ask for.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;

use beeline_sockets::control::Introduced;
use beeline_sockets::segment::{CLOSED_AT, STATE_AT, STATE_RETURNED, TAILS_AT};

use crate::pairing::{exists, read_word, read_words};

/// So many are kept; the oldest go first.
const MOST: usize = 4096;

/// An introduced connection.
#[derive(Debug)]
pub struct Kept {
    pub memory: OwnedFd,
    /// Of end 0 and end 1: the kernel's number of the socket, never used again, and who asked.
    pub cookies: [u64; 2],
    pub processes: [i32; 2],
    pub introduced: Introduced,
}

impl Kept {
    /// True when an end was closed, or nobody who asked is left. What the ends' processes wrote is
    /// taken for a hint: who lies loses the way back after `exec`.
    fn is_over(&self) -> bool {
        let closed = CLOSED_AT.iter().any(|&place| read_word(&self.memory, place) != Some(0));
        closed || !self.processes.iter().any(|&process| exists(process))
    }
}

/// All of them.
#[derive(Debug, Default)]
pub struct Keeping {
    /// By the order of their introduction.
    kept: BTreeMap<u64, Kept>,
    /// By socket: the connection and the side.
    by_cookie: HashMap<u64, (u64, u8)>,
    next: u64,
}

impl Keeping {
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// The segment of a socket, and which end it is.
    pub fn find(&self, cookie: u64) -> Option<(u8, &OwnedFd)> {
        let &(number, side) = self.by_cookie.get(&cookie)?;
        Some((side, &self.kept.get(&number)?.memory))
    }

    pub fn keep(&mut self, kept: Kept) {
        if self.kept.len() >= MOST
            && let Some((&oldest, _)) = self.kept.first_key_value()
        {
            self.drop(oldest);
        }
        let before: Vec<u64> =
            kept.cookies.iter().filter_map(|cookie| Some(self.by_cookie.get(cookie)?.0)).collect();
        before.into_iter().for_each(|number| self.drop(number));
        for (side, cookie) in (0..).zip(kept.cookies) {
            self.by_cookie.insert(cookie, (self.next, side));
        }
        self.kept.insert(self.next, kept);
        self.next += 1;
    }

    /// Who asks anew is to be found with the new segment only. Its other end is found with the old one
    /// until it asks, too: whoever gets that socket finds there what was not read.
    pub fn forget_returned(&mut self, cookie: u64) {
        let Some(&(number, _)) = self.by_cookie.get(&cookie) else { return };
        let Some(kept) = self.kept.get(&number) else { return };
        if read_word(&kept.memory, STATE_AT) != Some(STATE_RETURNED) {
            return;
        }
        self.by_cookie.remove(&cookie);
        if kept.cookies.iter().all(|cookie| !self.leads_to(*cookie, number)) {
            self.kept.remove(&number);
        }
    }

    /// Forgets those that are over.
    pub fn sweep(&mut self) {
        let over: Vec<u64> = self
            .kept
            .iter()
            .filter(|(_, kept)| kept.is_over())
            .map(|(&number, _)| number)
            .collect();
        over.into_iter().for_each(|number| self.drop(number));
    }

    /// What went into the rings, save of those of which an end has asked anew.
    pub fn traffic(&self) -> impl Iterator<Item = (Introduced, [u64; 2])> {
        let whole = self.kept.iter().filter(|(number, kept)| {
            kept.cookies.iter().all(|cookie| self.leads_to(*cookie, **number))
        });
        whole.map(|(_, kept)| {
            (kept.introduced, TAILS_AT.map(|place| read_words(&kept.memory, place)))
        })
    }

    fn leads_to(&self, cookie: u64, number: u64) -> bool {
        self.by_cookie.get(&cookie).is_some_and(|&(latest, _)| latest == number)
    }

    fn drop(&mut self, number: u64) {
        if let Some(kept) = self.kept.remove(&number) {
            for cookie in kept.cookies {
                // It may have been introduced anew since.
                if self.leads_to(cookie, number) {
                    self.by_cookie.remove(&cookie);
                }
            }
        }
    }
}

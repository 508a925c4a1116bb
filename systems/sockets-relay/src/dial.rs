//! Making links: who calls whom, and whether a caller is who it says.
//!
//! ```text
//! caller: find ─► Found ─► queue pair ─► join: connect data, nonce ─► Joined ─► connects, active
//! called:                    Called: queue pair, connects, passive; answers connect data, nonce
//! called: at the first offer: which host has that address? ─► confirm: both nonces, own address
//! caller:                    Asked: it did make that call, to the host that has that address
//! ```
//!
//! A caller is believed about the connections of a host only after the relay at that host's
//! configured address said that it made the call: whoever can answer there can take the host's
//! connections anyway.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use beeline_fabric::{ConnectInfo, Device, Role};

use crate::attend::RETRY;
use crate::connection::Phase;
use crate::link::{Link, Nonce, Stage, Trust};
use crate::network::{Answer, Event, MOST_HELLO_BYTES};
use crate::relay::Core;

/// Most links that a host's calls can have made: a relay needs one, and one more where it began anew.
const MOST_OF_A_HOST: usize = 4;
/// Of the records of [`crate::message`]: 2 has those of the way back, 3 how long it is for.
const VERSION: u8 = 3;
/// A host that was reached by TCP alone is looked for again after so long: it may have another way by then.
const LOOK_AGAIN: Duration = Duration::from_secs(60);
const HELLO: [u8; 8] = [b'B', b'L', b'R', b'L', VERSION, 0, 0, 0];

fn hello(nonce: &Nonce) -> Vec<u8> {
    [&HELLO[..], nonce].concat()
}

/// What a relay's greeting carries.
///
/// Errors: why there can be no link.
fn nonce_of(hello: &[u8]) -> Result<Nonce, String> {
    let wrong = || "not a relay's word".to_owned();
    match hello {
        [b'B', b'L', b'R', b'L', version, ..] if *version != VERSION => Err(format!(
            "one relay is of version {version} and the other of {VERSION}: until both are the same, \
             connections between their hosts stay with the kernel"
        )),
        _ if hello.len() > MOST_HELLO_BYTES => Err(wrong()),
        _ => hello.strip_prefix(&HELLO).and_then(|rest| rest.try_into().ok()).ok_or_else(wrong),
    }
}

fn fresh_nonce() -> Result<Nonce, String> {
    let mut nonce = [0; 16];
    getrandom::fill(&mut nonce).map_err(|error| error.to_string())?;
    Ok(nonce)
}

/// What the called one knows of a call: both nonces, and the address of its own end of a connection
/// that was offered.
fn call_words(nonces: &(Nonce, Nonce), own: IpAddr) -> Vec<u8> {
    let own = match own {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    [&HELLO[..], &nonces.0, &nonces.1, &own.octets()].concat()
}

impl Core {
    /// Begins to make a link to `host`, unless that is under way or has just failed.
    pub(crate) fn dial(&mut self, host: usize) {
        let Some(state) = self.hosts.get_mut(host) else { return };
        if !state.is_dialling && self.now >= state.retry_at {
            state.is_dialling = true;
            self.network.find(host);
        }
    }

    /// Takes in what happened on the network.
    pub fn happened(&mut self, event: Event) {
        match event {
            Event::Found { host, device: Ok(device) } if self.is_the_kernels(&device) => {
                tracing::info!(host, "a link would be TCP: connections to it stay with the kernel");
                self.dialled_in_vain(host);
                if let Some(state) = self.hosts.get_mut(host) {
                    state.over_tcp_until = self.now + LOOK_AGAIN;
                    state.retry_at = state.over_tcp_until;
                }
                let waits = |one: &crate::connection::Connection| {
                    one.phase == Phase::Waiting && one.host == host
                };
                for index in self.table.select(waits) {
                    self.counters.over_tcp += 1;
                    self.forget(index);
                }
            }
            Event::Found { host, device } => {
                let begun = device.and_then(|device| self.begin(host, &device));
                if let Err(error) = begun {
                    tracing::warn!(host, %error, "the relay of a host cannot be reached");
                    self.dialled_in_vain(host);
                }
            }
            Event::Joined { link, answer } => self.joined(link, answer),
            Event::Confirmed { link, yes } => {
                let Some(at) = self.link_named(link) else { return };
                let Some(link) = self.link(at) else { return };
                match link.trust {
                    Trust::Asked(host) if yes => {
                        let trust = Trust::Confirmed(host);
                        link.trust = trust;
                        let others =
                            |(other, link): &(usize, &Link)| *other != at && link.trust == trust;
                        self.make_room(MOST_OF_A_HOST, others);
                        self.look_at_early(at);
                        self.offer_waiting(at, host);
                    }
                    Trust::Asked(_) => self.break_link(at),
                    _ => {}
                }
            }
            Event::Called { device, info, hello, answer } => {
                let outcome = if self.is_the_kernels(&device) {
                    Err("this host's relay carries nothing over TCP (over_tcp)".to_owned())
                } else {
                    self.called(&device, &info, &hello)
                };
                if let Err(error) = &outcome {
                    tracing::warn!(%error, "a relay that called was refused");
                }
                answer(outcome);
            }
            Event::Asked { words, answer } => self.asked(&words, answer),
        }
    }

    /// A link by `device` would be the kernel's own TCP, and nothing is to be carried over that.
    fn is_the_kernels(&self, device: &Arc<dyn Device>) -> bool {
        !self.settings.over_tcp && device.attributes().provider == "tcp"
    }

    fn dialled_in_vain(&mut self, host: usize) {
        if let Some(state) = self.hosts.get_mut(host) {
            state.is_dialling = false;
            state.retry_at = self.now + RETRY;
        }
    }

    fn new_link(&mut self, device: &Arc<dyn Device>, trust: Trust) -> Result<usize, String> {
        let desk = self.desk(device).map_err(|error| error.to_string())?;
        let free = self.links.iter().position(|(_, link)| link.is_none());
        let at = free.unwrap_or(self.links.len());
        if at >= self.settings.most_links {
            return Err("as many links as there may be".to_owned());
        }
        if free.is_none() {
            self.links.push((1, None));
        }
        let queue = &self.desks[desk].queue;
        let generation = self.links[at].0;
        let link = Link::new(device, (desk, queue), (at, generation), trust, self.now)
            .map_err(|error| error.to_string())?;
        self.links[at].1 = Some(Box::new(link));
        Ok(at)
    }

    fn begin(&mut self, host: usize, device: &Arc<dyn Device>) -> Result<(), String> {
        let nonce = fresh_nonce()?;
        let at = self.new_link(device, Trust::Dialled(host))?;
        let name = self.link_name(at);
        let Some(link) = self.link(at) else { return Ok(()) };
        link.nonces.0 = nonce;
        let info = link.connect_info();
        self.network.join(host, name, info, hello(&nonce));
        Ok(())
    }

    fn joined(&mut self, link: u64, answer: Result<(ConnectInfo, Vec<u8>), String>) {
        let Some(at) = self.link_named(link) else { return };
        let Some(link) = self.link(at) else { return };
        let connected = answer.and_then(|(info, word)| {
            link.nonces.1 = nonce_of(&word)?;
            link.pair().connect(&info, Role::Active).map_err(|error| error.to_string())
        });
        match connected {
            Ok(()) => link.stage = Stage::Connecting,
            Err(error) => {
                tracing::warn!(%error, "the relay of a host refused");
                self.break_link(at);
            }
        }
    }

    /// Leaves room for one more link beside those that are `alike`: where there are as many as `most`, the
    /// oldest goes.
    fn make_room(&mut self, most: usize, alike: impl Fn(&(usize, &Link)) -> bool) {
        let oldest = self.links().filter(&alike).min_by_key(|(_, link)| link.since);
        if let Some((at, _)) = oldest
            && self.links().filter(&alike).count() >= most
        {
            self.break_link(at);
        }
    }

    fn called(
        &mut self,
        device: &Arc<dyn Device>,
        info: &ConnectInfo,
        word: &[u8],
    ) -> Result<(ConnectInfo, Vec<u8>), String> {
        let theirs = nonce_of(word)?;
        let ours = fresh_nonce()?;
        // Callers that never say anything may not keep others out.
        let most = (self.settings.most_links / 2).max(1);
        self.make_room(most, |(_, link)| link.trust.host().is_none());
        let at = self.new_link(device, Trust::Called)?;
        let Some(link) = self.link(at) else { return Err("no link".to_owned()) };
        link.nonces = (theirs, ours);
        let own = link.connect_info();
        if let Err(error) = link.pair().connect(info, Role::Passive) {
            self.break_link(at);
            return Err(error.to_string());
        }
        link.stage = Stage::Connecting;
        Ok((own, hello(&ours)))
    }

    /// Asks `host` whether it made the call of link `at`, on which it speaks of an end at `own`.
    pub(crate) fn confirm(&mut self, at: usize, host: usize, own: IpAddr) {
        let name = self.link_name(at);
        let Some(link) = self.link(at) else { return };
        let words = call_words(&link.nonces, own);
        self.network.confirm(host, name, words);
    }

    fn asked(&mut self, words: &[u8], answer: Answer<()>) {
        let yes = self.links().any(|(_, link)| {
            let Trust::Dialled(host) = link.trust else { return false };
            let addresses = self.settings.hosts.get(host).map_or(&[][..], |host| &host.addresses);
            addresses.iter().any(|own| call_words(&link.nonces, *own) == words)
        });
        answer(if yes { Ok(()) } else { Err("not this relay's call".to_owned()) });
    }

    pub(crate) fn link_is_up(&mut self, at: usize) {
        let Some(link) = self.link(at) else { return };
        link.stage = Stage::Up;
        if let Trust::Dialled(host) = link.trust {
            if let Some(state) = self.hosts.get_mut(host) {
                state.is_dialling = false;
            }
            self.offer_waiting(at, host);
        }
    }

    fn offer_waiting(&mut self, at: usize, host: usize) {
        let waiting = |one: &crate::connection::Connection| {
            one.phase == Phase::Waiting && one.host == host && one.own < one.peer
        };
        for index in self.table.select(waiting) {
            self.offer(index, at);
        }
    }
}

//! Changing the map: a server joins it, leaves it, or is given up as lost.
//!
//! ```text
//!  1. begin   the first server of the map, a server that joins, all others: state s + 1, both rings
//!  2. wait    each gives its pairs to their new servers, on its own
//!  3. end     all: state s + 2, the new ring
//! ```
//!
//! The first server decides between two changes that are begun at once: it takes one of them, and the
//! other is refused. The same change may be asked for again at any time, by any program: it goes on where
//! it was left. Servers need no program to wait for them; only the end has to be told.

use std::time::{Duration, Instant};

use crate::client::Connect;
use crate::link::{Link, LinkError};
use crate::map::{MapReport, SERVER_LIMIT, ServerMap};
use crate::mover::control;
use crate::packet::{Kind, Request, Status};
use crate::processor::moves::{FORCED, PLAIN};
use crate::ring::{HashRing, address};

/// What becomes of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It takes its share of the keys. A server of the map that was started anew takes its old place.
    Join,
    /// It gives its keys to the others.
    Leave,
    /// It is gone, and its pairs with it: the others hold its keys from now on.
    Lost,
}

/// Why the map was not changed, or not to the end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MembershipError {
    /// A server.
    #[error("{server}: {source}")]
    Link {
        /// Which.
        server: String,
        /// Why.
        #[source]
        source: LinkError,
    },
    /// None was named.
    #[error("name the servers of the map")]
    NoServer,
    /// A name no map can hold.
    #[error("{name:?} is no name of a server; one has 1 to 255 bytes, as in auto://10.0.0.1:4790")]
    Name {
        /// The name.
        name: String,
    },
    /// As many as there can be.
    #[error("a map has at most {SERVER_LIMIT} servers")]
    TooMany,
    /// Not in the map.
    #[error("{name} is no server of the map")]
    Unknown {
        /// The name.
        name: String,
    },
    /// The only one.
    #[error("{name} is the only server of the map; there is none to take its pairs")]
    Last {
        /// The name.
        name: String,
    },
    /// It holds pairs that are not the map's.
    #[error("{name} holds {pairs} pairs of its own; only an empty server can join: start it anew")]
    NotEmpty {
        /// The name.
        name: String,
        /// How many.
        pairs: u64,
    },
    /// Another change.
    #[error("another change of the map is under way: {what}; finish it by asking for it again")]
    UnderWay {
        /// Which.
        what: String,
    },
    /// A server did not take the map.
    #[error("{server} does not take the map ({status:?}): it knows state {state}; ask again")]
    Refused {
        /// Which.
        server: String,
        /// How.
        status: Status,
        /// What it knows.
        state: u32,
    },
    /// The keys did not all move in the time given.
    #[error(
        "not all keys have moved within {limit:?}: {note}; they go on moving, ask again to finish"
    )]
    Unfinished {
        /// The time given.
        limit: Duration,
        /// What holds it up.
        note: String,
    },
}

/// What happens, for a person that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The change has begun at all servers.
    Begun,
    /// Pairs that moved so far, and what holds the rest up.
    Moving {
        /// Pairs.
        moved: u64,
        /// Empty where nothing does.
        note: String,
    },
    /// The change is done; pairs that moved.
    Done {
        /// Pairs.
        moved: u64,
    },
}

struct Caller<'a> {
    connect: &'a mut dyn Connect,
}

impl Caller<'_> {
    fn links(&mut self, server: &str) -> Result<Vec<Link>, MembershipError> {
        let failed = |source| MembershipError::Link { server: server.to_owned(), source };
        let (first, processors) = self.connect.connect(server, 0).map_err(failed)?;
        let mut links = vec![first];
        for processor in 1..processors {
            links.push(self.connect.connect(server, processor).map_err(failed)?.0);
        }
        Ok(links)
    }

    fn reports(&mut self, server: &str) -> Result<Vec<MapReport>, MembershipError> {
        let failed = |source| MembershipError::Link { server: server.to_owned(), source };
        let mut links = self.links(server)?;
        links.iter_mut().map(|link| report(link).map_err(failed)).collect()
    }

    /// Tells every processor of a server.
    fn tell(&mut self, server: &str, map: &ServerMap, forced: bool) -> Result<(), MembershipError> {
        let failed = |source| MembershipError::Link { server: server.to_owned(), source };
        let bytes = map.for_server(server).encode();
        let key = if forced { FORCED } else { PLAIN };
        for mut link in self.links(server)? {
            let request = Request::control(Kind::SetMap, key, &bytes);
            let (status, _) = control(&mut link, &request).map_err(failed)?;
            if status != Status::Ok {
                let known = report(&mut link).map_err(failed)?;
                let server = server.to_owned();
                return Err(MembershipError::Refused { server, status, state: known.map.state });
            }
        }
        Ok(())
    }
}

/// What a processor says of itself.
///
/// Errors: [`LinkError`].
pub fn report(link: &mut Link) -> Result<MapReport, LinkError> {
    let (_, bytes) = control(link, &Request::control(Kind::Map, PLAIN, &[]))?;
    bytes.and_then(|bytes| MapReport::decode(&bytes)).ok_or(LinkError::Protocol)
}

/// What each processor of a server says of itself.
///
/// Errors: [`MembershipError::Link`].
pub fn reports(connect: &mut dyn Connect, server: &str) -> Result<Vec<MapReport>, MembershipError> {
    Caller { connect }.reports(server)
}

/// The latest map that one of these servers knows: of those that answer, where one is enough. Its state is
/// 0 where none knows a map: then these servers are it.
///
/// Errors: [`MembershipError`] of the first, where none answers.
pub fn latest(connect: &mut dyn Connect, servers: &[String]) -> Result<ServerMap, MembershipError> {
    let mut caller = Caller { connect };
    let (mut best, mut first) = (None::<ServerMap>, None);
    for server in servers {
        match caller.reports(server) {
            Ok(reports) => {
                for report in reports {
                    if best.as_ref().is_none_or(|best| report.map.state > best.state) {
                        best = Some(report.map);
                    }
                }
            }
            Err(error) => first = first.or(Some(error)),
        }
    }
    let mut best = match (best, first) {
        (Some(best), _) => best,
        (None, error) => return Err(error.unwrap_or(MembershipError::NoServer)),
    };
    if best.state == 0 {
        best.ring = HashRing::new(servers.iter().cloned());
    }
    Ok(best)
}

fn with(ring: &HashRing, name: &str) -> HashRing {
    HashRing::new(ring.servers().iter().cloned().chain([name.to_owned()]))
}

fn without(ring: &HashRing, name: &str) -> HashRing {
    let others = ring.servers().iter().filter(|other| address(other) != address(name));
    HashRing::new(others.cloned())
}

fn described(map: &ServerMap) -> String {
    let joins = map.ring.servers().iter().find(|name| map.old.position(name).is_none());
    let leaves = map.old.servers().iter().find(|name| map.ring.position(name).is_none());
    match (joins, leaves) {
        (Some(name), _) => format!("{name} joins"),
        (None, Some(name)) => format!("{name} leaves"),
        (None, None) => "the map is being told to its servers".to_owned(),
    }
}

/// Changes the map that `servers` belong to, of which some have to answer; all of the map's have to. Waits
/// until all keys have moved, `limit` long.
///
/// Errors: [`MembershipError`]; the same change may be asked for again.
pub fn change(
    connect: &mut dyn Connect,
    servers: &[String],
    change: Change,
    name: &str,
    limit: Duration,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), MembershipError> {
    for name in servers.iter().map(String::as_str).chain([name]) {
        if name.is_empty() || name.len() > 255 {
            return Err(MembershipError::Name { name: name.to_owned() });
        }
    }
    let known = latest(connect, servers)?;
    let mut caller = Caller { connect };
    let goal = match change {
        Change::Join => with(&known.ring, name),
        Change::Leave | Change::Lost => without(&known.ring, name),
    };
    if goal.servers().len() > SERVER_LIMIT {
        return Err(MembershipError::TooMany);
    }
    if goal.servers().is_empty() {
        return Err(MembershipError::Last { name: name.to_owned() });
    }
    if change == Change::Lost {
        return give_up(&mut caller, &known, name, goal, progress);
    }
    let moving = if known.is_moving() {
        let what = described(&known);
        let other = match change {
            Change::Join => {
                known.old.position(name).is_some() || known.ring.position(name).is_none()
            }
            _ => known.old.position(name).is_none() || known.ring.position(name).is_some(),
        };
        if other {
            return Err(MembershipError::UnderWay { what });
        }
        known
    } else {
        let there = known.ring.position(name).is_some();
        if there == (change == Change::Join) && known.state > 0 {
            // The end of an earlier change that not all were told, or a server that was started anew.
            return end(&mut caller, &known.ring, &[], known.state, progress, 0);
        }
        if !there && change == Change::Leave {
            return Err(MembershipError::Unknown { name: name.to_owned() });
        }
        let mut old = known.ring;
        if change == Change::Join {
            // Named among the servers of a map that none was told of, it still holds nothing of it.
            old = without(&old, name);
            let pairs = caller.reports(name)?.iter().map(|report| report.pairs).sum();
            if pairs > 0 {
                return Err(MembershipError::NotEmpty { name: name.to_owned(), pairs });
            }
        }
        if old.servers().is_empty() {
            return Err(MembershipError::NoServer);
        }
        ServerMap { state: known.state + 1, me: String::new(), old, ring: goal }
    };
    let everyone = with_all(&moving);
    // A change is not begun where it could not be ended.
    for server in &everyone {
        caller.reports(server)?;
    }
    // The first decides.
    let first = moving.old.servers().iter().take(1);
    let takers = moving.ring.servers().iter();
    let takers = takers.filter(|server| moving.old.position(server).is_none());
    for server in first.chain(takers).chain(&everyone) {
        if let Err(error) = caller.tell(server, &moving, false) {
            let MembershipError::Refused { server, .. } = &error else { return Err(error) };
            let theirs = caller.reports(server)?.into_iter().map(|report| report.map);
            let theirs = theirs.max_by_key(|map| map.state).unwrap_or_default();
            if theirs.state == moving.state && theirs.ring != moving.ring {
                return Err(MembershipError::UnderWay { what: described(&theirs) });
            }
            if theirs.state != moving.state + 1 || theirs.ring != moving.ring {
                return Err(error);
            }
        }
    }
    progress(Progress::Begun);
    let moved = wait(&mut caller, &moving, limit, progress)?;
    end(&mut caller, &moving.ring, &everyone, moving.state + 1, progress, moved)
}

/// The servers of both rings.
fn with_all(map: &ServerMap) -> Vec<String> {
    let both = map.old.servers().iter().chain(map.ring.servers()).cloned();
    HashRing::new(both).servers().to_vec()
}

/// Until every server of the ring that was has nothing left to give; pairs that moved.
fn wait(
    caller: &mut Caller<'_>,
    moving: &ServerMap,
    limit: Duration,
    progress: &mut dyn FnMut(Progress),
) -> Result<u64, MembershipError> {
    let until = Instant::now() + limit;
    let failed = |server: &str| {
        let server = server.to_owned();
        move |source| MembershipError::Link { server, source }
    };
    let mut links = Vec::new();
    for server in moving.old.servers() {
        links.extend(caller.links(server)?.into_iter().map(|link| (server.as_str(), link)));
    }
    loop {
        let (mut moved, mut finished, mut note) = (0, true, String::new());
        for (server, link) in &mut links {
            let report = report(link).map_err(failed(server))?;
            // One that was told the end already has moved all it had.
            if report.map.state <= moving.state {
                moved += report.moved;
                finished &= report.finished;
            }
            if !report.note.is_empty() {
                note = report.note;
            }
        }
        if finished {
            return Ok(moved);
        }
        progress(Progress::Moving { moved, note: note.clone() });
        if Instant::now() >= until {
            let note = if note.is_empty() { format!("{moved} pairs so far") } else { note };
            return Err(MembershipError::Unfinished { limit, note });
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn end(
    caller: &mut Caller<'_>,
    ring: &HashRing,
    everyone: &[String],
    state: u32,
    progress: &mut dyn FnMut(Progress),
    moved: u64,
) -> Result<(), MembershipError> {
    let map = ServerMap { state, me: String::new(), old: HashRing::default(), ring: ring.clone() };
    let everyone = if everyone.is_empty() { ring.servers() } else { everyone };
    for server in everyone {
        let told = caller.tell(server, &map, false);
        // A server that has left need not hear of it.
        if told.is_err() && ring.position(server).is_some() {
            return told;
        }
    }
    progress(Progress::Done { moved });
    Ok(())
}

/// All others hold the keys of `name` from now on, at once.
fn give_up(
    caller: &mut Caller<'_>,
    known: &ServerMap,
    name: &str,
    goal: HashRing,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), MembershipError> {
    let in_old = known.is_moving() && known.old.position(name).is_some();
    let in_new = known.ring.position(name).is_some();
    if !in_new && !in_old {
        if known.state == 0 {
            return Err(MembershipError::Unknown { name: name.to_owned() });
        }
        // Given up before, and perhaps not all were told: those that were answer that they know.
        return tell_all(caller, known, progress);
    }
    // A change that is under way between others goes on without it; its own change is over.
    let goes_on = in_old && in_new;
    let state = known.state + if goes_on || known.state.is_multiple_of(2) { 2 } else { 1 };
    let old = if goes_on { without(&known.old, name) } else { HashRing::default() };
    tell_all(caller, &ServerMap { state, me: String::new(), old, ring: goal }, progress)
}

/// Tells a map that is taken whatever was known before to all of its servers.
fn tell_all(
    caller: &mut Caller<'_>,
    map: &ServerMap,
    progress: &mut dyn FnMut(Progress),
) -> Result<(), MembershipError> {
    for server in with_all(map) {
        caller.tell(&server, map, true)?;
    }
    progress(Progress::Done { moved: 0 });
    Ok(())
}

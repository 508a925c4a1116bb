//! What outlives a proxy: a process beside it that keeps the descriptors of every connection, and what
//! the next proxy needs to know of each, and does nothing else.
//!
//! ```text
//!  keeper ── starts, starts again ──► proxy
//!    ▲ holds: memory, placeholder's end, record        │
//!    └──────────── keep, amend, forget ◄───────────────┘   one sequenced-packet socket
//! ```
//!
//! A record: eight bytes of magic and version, the entry's number, the kind, then what the proxy says; up to
//! two descriptors. The keeper looks at the number and the kind alone. While it has the proxy's end of a
//! placeholder, a program whose proxy is gone sees no hang-up; without a keeper it does.
//!
//! Invariant: what a program is given was kept before.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use beeline_os::control_socket::{ControlSocket, Received};
use beeline_sockets::packets::channel::VERSION;
use beeline_sockets::packets::protocol::{address_of, address_words};
use rustix::event::{PollFd, PollFlags};

use crate::partition::Key;

/// "BLNTKP", a zero and the version.
const MAGIC: u64 = u64::from_le_bytes(*b"BLNTKP\0\x01");
/// Longest record.
const LONGEST: usize = 512;
/// Bytes before what the proxy says.
const HEAD: usize = 24;

/// Number of the page's entry.
const PAGE: u64 = u64::MAX;
/// Of numbers of listening sockets: this bit and the inode.
const LISTENER: u64 = 1 << 63;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An entry with its descriptors.
    Keep,
    /// Its record is another one now.
    Amend,
    /// It is over.
    Forget,
    /// Every entry was told.
    All,
    /// The proxy works: if it dies, another one is to take its place.
    Works,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Keep, Self::Amend, Self::Forget, Self::All, Self::Works];

    fn decode(word: u64) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u64 == word)
    }
}

fn encode(kind: Kind, number: u64, said: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEAD + said.len());
    for word in [MAGIC, number, kind as u64] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(said);
    bytes
}

fn decode(bytes: &[u8]) -> Option<(Kind, u64, &[u8])> {
    let (head, said) = bytes.split_at_checked(HEAD)?;
    let (words, []) = head.as_chunks::<8>() else { return None };
    let [magic, number, kind] = [0, 1, 2].map(|index| u64::from_le_bytes(words[index]));
    Some((Kind::decode(kind)?, number, said)).filter(|_| magic == MAGIC)
}

/// What the next proxy needs to know of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Both programs have it: others are over when their proxy dies.
    pub established: bool,
    /// The peer's name.
    pub peer: String,
    /// Which partition carries it.
    pub partition: usize,
    /// Its ports.
    pub key: Key,
    /// The other monitor's number of it.
    pub peer_id: u64,
    /// 0: the highest.
    pub priority: u8,
    /// The connecting program's address.
    pub source: SocketAddr,
    /// The listening program's.
    pub destination: SocketAddr,
    /// The program's process; 0: not known.
    pub owner: u64,
}

impl Record {
    /// As bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let words = [
            u64::from(self.established),
            self.partition as u64,
            u64::from(self.key.own),
            u64::from(self.key.peer),
            self.peer_id,
            u64::from(self.priority),
            self.owner,
        ];
        let source = address_words(Some(self.source));
        let all = words.into_iter().chain(source).chain(address_words(Some(self.destination)));
        let mut bytes: Vec<u8> = all.flat_map(u64::to_le_bytes).collect();
        bytes.extend(self.peer.as_bytes());
        bytes
    }

    /// From bytes; `None`: they are none of this version.
    #[must_use]
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (words, peer) = bytes.split_at_checked(13 * 8)?;
        let (words, []) = words.as_chunks::<8>() else { return None };
        let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let [established, partition, own, peer_port, peer_id, priority, owner, a, b, c, d, e, f] =
            words[..]
        else {
            return None;
        };
        Some(Self {
            established: established == 1,
            peer: String::from_utf8(peer.to_vec()).ok()?,
            partition: usize::try_from(partition).ok()?,
            key: Key { own: u16::try_from(own).ok()?, peer: u16::try_from(peer_port).ok()? },
            peer_id,
            priority: u8::try_from(priority).ok()?,
            source: address_of([a, b, c])?,
            destination: address_of([d, e, f])?,
            owner,
        })
    }
}

/// A connection that a proxy had which is gone.
#[derive(Debug)]
pub struct Kept {
    /// That proxy's number of it.
    pub id: u64,
    /// What it said of it.
    pub record: Record,
    /// Its memory.
    pub memory: OwnedFd,
    /// The proxy's end of the placeholder.
    pub socket: OwnedFd,
}

/// Everything that was kept.
#[derive(Debug, Default)]
pub struct Inheritance {
    /// The page that programs have.
    pub page: Option<OwnedFd>,
    /// Connections.
    pub connections: Vec<Kept>,
    /// Listening sockets that programs told of, and the process that did.
    pub listeners: Vec<(SocketAddr, u64, u64)>,
    /// The greatest number that was kept.
    pub last: u64,
}

fn wait(socket: &ControlSocket, flags: PollFlags) -> io::Result<()> {
    loop {
        match rustix::event::poll(&mut [PollFd::new(socket, flags)], None) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Sends, and waits while the other end does not read.
fn send(socket: &ControlSocket, record: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    loop {
        match socket.send(record, descriptors) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                wait(socket, PollFlags::OUT)?;
            }
            other => return other,
        }
    }
}

/// The next record and its descriptors; `None`: the other end is gone.
fn receive(socket: &ControlSocket) -> io::Result<Option<(Vec<u8>, Vec<OwnedFd>)>> {
    let (mut record, mut descriptors) = ([0; LONGEST], Vec::new());
    loop {
        match socket.receive(&mut record, &mut descriptors)? {
            Received::Empty => wait(socket, PollFlags::IN)?,
            Received::Closed => return Ok(None),
            Received::Record(length) => return Ok(Some((record[..length].to_vec(), descriptors))),
        }
    }
}

/// The keeper, as the proxy has it.
#[derive(Debug)]
pub struct Keeper {
    socket: ControlSocket,
    process: u32,
}

impl Keeper {
    /// The keeper at the other end of `socket`, and what it has.
    ///
    /// Errors: the kernel's; `UnexpectedEof`: it is gone.
    pub fn meet(socket: ControlSocket) -> io::Result<(Self, Inheritance)> {
        let process = u32::try_from(socket.peer()?.pid).unwrap_or(0);
        let mut all = Inheritance::default();
        loop {
            let Some((bytes, mut descriptors)) = receive(&socket)? else {
                return Err(io::ErrorKind::UnexpectedEof.into());
            };
            let Some((kind, number, said)) = decode(&bytes) else {
                tracing::warn!("the keeper said what this version does not understand");
                continue;
            };
            if kind == Kind::All {
                break;
            }
            if number == PAGE {
                all.page = descriptors.pop();
            } else if number & LISTENER != 0 {
                let (words, _) = said.as_chunks::<8>();
                let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
                // The program's library speaks the version of the proxy that it told: one of another would not get what
                // is knocked for. Proxies before version 3 said none.
                if let [a, b, c, owner, version] = words[..]
                    && version == u64::from(VERSION)
                    && let Some(at) = address_of([a, b, c])
                {
                    all.listeners.push((at, number & !LISTENER, owner));
                }
            } else {
                all.last = all.last.max(number);
                let (socket, memory) = (descriptors.pop(), descriptors.pop());
                if let (Some(record), Some(memory), Some(socket)) =
                    (Record::decode(said), memory, socket)
                {
                    all.connections.push(Kept { id: number, record, memory, socket });
                }
            }
        }
        Ok((Self { socket, process }, all))
    }

    /// Its process: the name of placeholders, whichever proxy made them.
    #[must_use]
    pub fn process(&self) -> u32 {
        self.process
    }

    fn say(&self, kind: Kind, number: u64, said: &[u8], descriptors: &[BorrowedFd<'_>]) {
        if let Err(error) = send(&self.socket, &encode(kind, number, said), descriptors) {
            // It is gone, and this process is about to be.
            tracing::debug!(%error, "the keeper does not hear");
        }
    }

    /// The proxy works.
    pub fn works(&self) {
        self.say(Kind::Works, 0, &[], &[]);
    }

    /// Keeps the page.
    pub fn page(&self, page: BorrowedFd<'_>) {
        self.say(Kind::Keep, PAGE, &[], &[page]);
    }

    /// Keeps a listening socket's address and inode, and the process that told of it.
    pub fn listener(&self, at: SocketAddr, inode: u64, owner: u64) {
        let words = address_words(Some(at)).into_iter().chain([owner, u64::from(VERSION)]);
        let said: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        self.say(Kind::Keep, LISTENER | inode, &said, &[]);
    }

    /// A listening socket is gone.
    pub fn forget_listener(&self, inode: u64) {
        self.say(Kind::Forget, LISTENER | inode, &[], &[]);
    }

    /// Keeps a connection.
    pub fn keep(&self, id: u64, record: &Record, memory: BorrowedFd<'_>, socket: BorrowedFd<'_>) {
        self.say(Kind::Keep, id, &record.encode(), &[memory, socket]);
    }

    /// What is said of a connection is another now.
    pub fn amend(&self, id: u64, record: &Record) {
        self.say(Kind::Amend, id, &record.encode(), &[]);
    }

    /// A connection is over.
    pub fn forget(&self, id: u64) {
        self.say(Kind::Forget, id, &[], &[]);
    }
}

/// What the keeper's process holds.
#[derive(Debug, Default)]
pub struct Store {
    entries: BTreeMap<u64, (Vec<u8>, Vec<OwnedFd>)>,
}

impl Store {
    /// Tells a proxy everything, then keeps what it says until it is gone. True: it had begun to work.
    ///
    /// Errors: the kernel's.
    pub fn serve(&mut self, proxy: &ControlSocket) -> io::Result<bool> {
        // A proxy may die at any moment, also before it has read everything.
        let is_gone =
            |kind| matches!(kind, io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset);
        let told = self.tell(proxy);
        if let Err(error) = told
            && !is_gone(error.kind())
        {
            return Err(error);
        }
        let mut works = false;
        loop {
            let (bytes, descriptors) = match receive(proxy) {
                Ok(Some(record)) => record,
                Ok(None) => return Ok(works),
                Err(error) if is_gone(error.kind()) => return Ok(works),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    tracing::warn!("the proxy said more than a record holds");
                    continue;
                }
                Err(error) => return Err(error),
            };
            match decode(&bytes) {
                Some((Kind::Keep, number, said)) => {
                    self.entries.insert(number, (said.to_vec(), descriptors));
                }
                Some((Kind::Amend, number, said)) => {
                    if let Some(entry) = self.entries.get_mut(&number) {
                        entry.0 = said.to_vec();
                    }
                }
                Some((Kind::Forget, number, _)) => drop(self.entries.remove(&number)),
                Some((Kind::Works, ..)) => works = true,
                Some((Kind::All, ..)) | None => {}
            }
        }
    }

    fn tell(&self, proxy: &ControlSocket) -> io::Result<()> {
        for (&number, (said, descriptors)) in &self.entries {
            let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().map(AsFd::as_fd).collect();
            send(proxy, &encode(Kind::Keep, number, said), &descriptors)?;
        }
        send(proxy, &encode(Kind::All, 0, &[]), &[])
    }

    /// How many entries there are.
    #[must_use]
    pub fn count(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record() -> Record {
        Record {
            established: true,
            peer: "other".to_owned(),
            partition: 3,
            key: Key { own: 61_000, peer: 80 },
            peer_id: 17,
            priority: 2,
            source: "10.0.0.1:61000".parse().unwrap(),
            destination: "[fd00::2]:80".parse().unwrap(),
            owner: 4711,
        }
    }

    fn descriptor() -> OwnedFd {
        beeline_os::mapping::create_memfd("kept", 4096).unwrap()
    }

    #[test]
    fn what_a_dead_proxy_kept_the_next_one_inherits_and_what_it_forgot_it_does_not() {
        let (ours, theirs) = ControlSocket::pair().unwrap();
        let store = std::thread::spawn(move || {
            let mut store = Store::default();
            let works = store.serve(&ours).unwrap();
            (store, works)
        });
        let (keeper, nothing) = Keeper::meet(theirs).unwrap();
        assert!(nothing.page.is_none() && nothing.connections.is_empty());
        assert_eq!(keeper.process(), std::process::id());
        let fd = descriptor();
        keeper.page(fd.as_fd());
        keeper.works();
        for id in 1..=3 {
            keeper.keep(id, &Record { established: false, ..record() }, fd.as_fd(), fd.as_fd());
        }
        keeper.amend(2, &record());
        keeper.forget(3);
        keeper.listener("127.0.0.1:80".parse().unwrap(), 99, 5);
        keeper.listener("127.0.0.1:81".parse().unwrap(), 98, 5);
        keeper.forget_listener(98);
        // As if it were killed.
        drop(keeper);
        let (mut store, works) = store.join().unwrap();
        assert!(works);
        assert_eq!(store.count(), 4);
        let (ours, theirs) = ControlSocket::pair().unwrap();
        let again = std::thread::spawn(move || store.serve(&ours).unwrap());
        let (keeper, all) = Keeper::meet(theirs).unwrap();
        assert!(all.page.is_some());
        assert_eq!(all.listeners, [("127.0.0.1:80".parse().unwrap(), 99, 5)]);
        let known: Vec<_> =
            all.connections.iter().map(|kept| (kept.id, kept.record.established)).collect();
        assert_eq!((known, all.last), (vec![(1, false), (2, true)], 2));
        assert_eq!(all.connections[1].record, record());
        drop(keeper);
        assert!(!again.join().unwrap());
    }

    /// A keeper may be older than the proxy that it starts.
    #[test]
    fn listening_sockets_of_programs_with_a_library_of_another_version_are_not_inherited() {
        let mut store = Store::default();
        let at: SocketAddr = "127.0.0.1:80".parse().unwrap();
        let said = |versions: &[u64]| {
            let words = address_words(Some(at)).into_iter().chain([5]);
            words.chain(versions.iter().copied()).flat_map(u64::to_le_bytes).collect()
        };
        let own = u64::from(VERSION);
        for (inode, versions) in [(97, &[][..]), (98, &[own - 1][..]), (99, &[own][..])] {
            store.entries.insert(LISTENER | inode, (said(versions), Vec::new()));
        }
        let (ours, theirs) = ControlSocket::pair().unwrap();
        let served = std::thread::spawn(move || store.serve(&ours).unwrap());
        let (keeper, all) = Keeper::meet(theirs).unwrap();
        assert_eq!(all.listeners, [(at, 99, 5)]);
        drop(keeper);
        served.join().unwrap();
    }

    #[test]
    fn a_proxy_that_dies_before_it_has_read_everything_is_one_that_is_gone() {
        let mut store = Store::default();
        let fd = descriptor();
        for id in 0..40 {
            store.entries.insert(id, (record().encode(), vec![fd.try_clone().unwrap()]));
        }
        for read in [0, 1, 7] {
            let (ours, theirs) = ControlSocket::pair().unwrap();
            let told = std::thread::scope(|scope| {
                let told = scope.spawn(|| store.serve(&ours));
                for _ in 0..read {
                    receive(&theirs).unwrap().unwrap();
                }
                // As if it were killed, with records unread.
                drop(theirs);
                told.join().unwrap()
            });
            assert!(matches!(told, Ok(false)), "{told:?}");
        }
        assert_eq!(store.count(), 40);
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused_or_a_record(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(record) = Record::decode(&bytes) {
                let again = Record::decode(&record.encode());
                prop_assert_eq!(again, Some(record));
            }
            let _ = decode(&bytes);
        }
    }
}

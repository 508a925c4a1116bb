//! A member's directory.
//!
//! ```text
//! identity    who this is: written once
//! log/        a pool of one segment: the log region
//! vote/       a pool of one segment: at 0 the vote word, at 64 how often the member was opened
//! snapshot    what the log begins from
//! known       the other members' instances
//! boot        the run of the machine under which the member ran last ([`crate::boot`])
//! ```
//!
//! `identity`, little endian: magic `BEELLID\0`, version u32, node u16 and two zeroes, cluster u64,
//! instance u64, slots u64, bytes per slot u64, CRC-32C of all before u32.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use beeline_fabric::{Device, FabricError};
use beeline_os::memory::{MemoryObject, copy_in, load_u64, store_u64};
use beeline_paxos::{
    ClusterId, Configuration, Layout, LayoutError, LogMemory, NodeId, Position, Sessions, Status,
};
use beeline_pmem::{PmemError, Pool, PoolKind, PoolOptions, PoolReport};
use beeline_wire::checksum::crc32c;

use crate::boot::{self, Boot};
use crate::contact::Contact;
use crate::ground::{Ground, ThisMachine};
use crate::known::Known;
use crate::member::{Durability, MemberMemory};
use crate::snapshot::{self, Head, SnapshotError, sync_directory_of};

const MAGIC: [u8; 8] = *b"BEELLID\0";
const VERSION: u32 = 1;
const IDENTITY_BYTES: usize = 52;
const INCARNATION_OFFSET: usize = 64;
const MIN_SEGMENT_BYTES: u64 = 64 << 10;

/// Why a member's directory cannot be made or opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HomeError {
    /// There is a member in it.
    #[error("{} holds a member of a replicated log already", path.display())]
    Exists {
        /// The directory.
        path: PathBuf,
    },
    /// The file system's.
    #[error("{}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What it said.
        #[source]
        source: io::Error,
    },
    /// `identity` is not what was written.
    #[error("{}: the member's identity is damaged", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
    },
    /// `identity` is of another format.
    #[error("{}: the member has format version {found}, this program knows {VERSION}", path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// As read.
        found: u32,
    },
    /// The machine was started anew, and what the member promised did not survive that for certain.
    #[error(
        "this machine was started anew since {id} ran, and at durability `process` the member may \
         have forgotten votes and entries with that: it must not take part again. Remove it at \
         another member (beeline cluster leave), empty its data directory, and let it join. Only \
         where it was the only member, or no member kept its memory: keep the log of one, delete \
         {} there, and let the others join empty",
        path.display()
    )]
    Rebooted {
        /// Which member.
        id: NodeId,
        /// Tells under which boot it ran.
        path: PathBuf,
    },
    /// Geometry, members or a contact beyond what a log takes.
    #[error("{reason}")]
    Founding {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A pool's.
    #[error(transparent)]
    Pool(#[from] PmemError),
    /// The log's.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The snapshot's.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// Memory for the status words.
    #[error(transparent)]
    Fabric(#[from] FabricError),
}

impl HomeError {
    /// Whether another try may succeed without a person's help.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Pool(error) => error.is_retryable(),
            Self::Snapshot(error) => error.is_retryable(),
            Self::Fabric(error) => error.is_retryable(),
            _ => false,
        }
    }
}

/// What a new member begins with. Cluster, layout and sessions are the same at every member.
#[derive(Clone, Debug)]
pub struct Founding {
    /// The cluster.
    pub cluster: ClusterId,
    /// This member; never used again after its directory is lost.
    pub id: NodeId,
    /// The log's geometry; at most 1 GiB. A command fits one slot.
    pub layout: Layout,
    /// Sessions of clients that are remembered; 4096 suits most.
    pub sessions: usize,
    /// The first members of a new cluster, the same list at each of them. Empty for a server that
    /// will join.
    pub members: Vec<(NodeId, Contact)>,
}

/// A member's directory, opened: one process at a time.
#[derive(Debug)]
pub struct Home {
    directory: PathBuf,
    id: NodeId,
    cluster: ClusterId,
    instance: u64,
    incarnation: u64,
    layout: Layout,
    durability: Durability,
    report: PoolReport,
    log: Arc<dyn MemoryObject>,
    vote: Arc<dyn MemoryObject>,
    /// Keep the directories locked.
    _pools: (Pool, Pool),
}

/// Formats a log through its memory object.
struct Unformatted<'a>(&'a dyn MemoryObject);

impl LogMemory for Unformatted<'_> {
    fn load(&self, _offset: u64, _into: &mut [u8]) {}

    fn store(&mut self, offset: u64, bytes: &[u8]) {
        copy_in(self.0, offset as usize, bytes);
        self.0.stored(offset as usize, bytes.len());
    }

    fn publish(&mut self, _status: Status) {}
}

/// Moves a log region of an earlier run to memory that no peer of that run has mapped.
///
/// A leader of that run may be stopped in the middle of a copy, and go on at any time: its copy and
/// the flush behind it then succeed in the old memory. So that one is marked first. The fence
/// between the mark and the move pairs with the one between the leader's copy and its look at the
/// mark ([`Layout::retired_offset`]): the leader sees the mark, or the move takes its bytes along.
fn retire(log: &dyn MemoryObject, layout: &Layout) -> io::Result<()> {
    let at = layout.retired_offset() as usize;
    store_u64(log, at, 1);
    fence(Ordering::SeqCst);
    log.replace_backing()?;
    store_u64(log, at, 0);
    log.persist(at, 8)
}

fn pool_options(bytes: u64, durability: Durability) -> Result<PoolOptions, HomeError> {
    let bytes = bytes.next_multiple_of(4096).max(MIN_SEGMENT_BYTES);
    let segment_bytes = u32::try_from(bytes)
        .ok()
        .filter(|bytes| *bytes <= 1 << 30)
        .ok_or(HomeError::Founding { reason: "a log has at most 1 GiB" })?;
    let durability = match durability {
        Durability::Process => beeline_pmem::Durability::Process,
        Durability::Power => beeline_pmem::Durability::Power,
    };
    Ok(PoolOptions { segment_bytes, capacity_bytes: bytes, durability, ..PoolOptions::default() })
}

/// Whether a member never had another beside it, as far as its directory tells.
fn is_alone(directory: &Path, id: NodeId, cluster: ClusterId) -> Result<bool, HomeError> {
    let head = snapshot::read(&directory.join("snapshot"), cluster, |_, _| Ok(()))?;
    let met = Known::load(directory.join("known"))?.instances().count();
    Ok(head.configuration.members() == [id] && met == 0)
}

impl Home {
    /// Whether `directory` holds a member.
    #[must_use]
    pub fn exists(directory: &Path) -> bool {
        directory.join("identity").exists()
    }

    /// Makes a member. A directory that was left half made is made again.
    ///
    /// Errors: [`HomeError`].
    pub fn create(
        directory: &Path,
        founding: &Founding,
        durability: Durability,
    ) -> Result<(), HomeError> {
        Self::create_on(directory, founding, durability, &ThisMachine::default())
    }

    /// As [`Home::create`], on other ground than this machine's.
    ///
    /// Errors: as [`Home::create`].
    pub fn create_on(
        directory: &Path,
        founding: &Founding,
        durability: Durability,
        ground: &dyn Ground,
    ) -> Result<(), HomeError> {
        if Self::exists(directory) {
            return Err(HomeError::Exists { path: directory.to_owned() });
        }
        if founding.sessions == 0 {
            return Err(HomeError::Founding { reason: "a log remembers at least one session" });
        }
        if founding.members.len() > beeline_paxos::MAX_MEMBERS {
            return Err(HomeError::Founding { reason: "a cluster has at most eleven members" });
        }
        let mut members = Vec::new();
        for (id, contact) in &founding.members {
            let reason = "a contact has at most 239 bytes";
            let contact = contact.encode().ok_or(HomeError::Founding { reason })?;
            if members.iter().any(|(known, _)| known == id) {
                return Err(HomeError::Founding { reason: "two members have one node id" });
            }
            members.push((*id, contact));
        }
        let is_stranger = !members.is_empty() && members.iter().all(|(id, _)| *id != founding.id);
        if is_stranger {
            return Err(HomeError::Founding { reason: "the first members lack this server" });
        }
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| HomeError::File { path, source }
        };
        std::fs::create_dir_all(directory).map_err(file(directory))?;
        let layout = founding.layout;
        for (name, bytes) in [("log", layout.region_bytes()), ("vote", MIN_SEGMENT_BYTES)] {
            let path = directory.join(name);
            if path.exists() {
                std::fs::remove_dir_all(&path).map_err(file(&path))?;
            }
            let pool = ground.create_pool(&path, &pool_options(bytes, durability)?)?;
            let segment = pool.allocate()?;
            if name == "log" {
                layout.format(founding.cluster, &mut Unformatted(segment.as_ref()));
                segment.persist(0, 4096).map_err(file(&path))?;
            }
        }
        let head = Head {
            position: Position::NONE,
            configuration: Configuration::at(Position::NONE, members),
            sessions: Sessions::new(founding.sessions),
            has_state: false,
        };
        snapshot::write(&directory.join("snapshot"), founding.cluster, &head, |_| Ok(()))?;
        let mut identity = MAGIC.to_vec();
        identity.extend_from_slice(&VERSION.to_le_bytes());
        identity.extend_from_slice(&u32::from(founding.id.0).to_le_bytes());
        let drawn = ground.draw();
        let instance = drawn.map_err(file(Path::new("the kernel's randomness")))?;
        for word in [founding.cluster.0, instance, layout.slots(), layout.slot_bytes()] {
            identity.extend_from_slice(&word.to_le_bytes());
        }
        let check = crc32c(&identity);
        identity.extend_from_slice(&check.to_le_bytes());
        // Last: without it there is no member.
        let (path, new) = (directory.join("identity"), directory.join("identity.new"));
        let written = File::create(&new).and_then(|mut to| {
            to.write_all(&identity)?;
            to.sync_all()
        });
        written.map_err(file(&new))?;
        std::fs::rename(&new, &path).map_err(file(&path))?;
        sync_directory_of(&path).map_err(file(directory))
    }

    /// Opens a member. Memory that peers of an earlier run may still map is replaced.
    ///
    /// Errors: [`HomeError`]; [`HomeError::Rebooted`] for a member whose memory this machine's new
    /// start may have taken.
    pub fn open(directory: &Path, durability: Durability) -> Result<Self, HomeError> {
        Self::open_on(directory, durability, &ThisMachine::default())
    }

    /// As [`Home::open`], where `boot` is the machine's present run.
    ///
    /// Errors: as [`Home::open`].
    pub fn open_under(
        directory: &Path,
        durability: Durability,
        boot: &Boot,
    ) -> Result<Self, HomeError> {
        Self::open_on(directory, durability, &ThisMachine { boot: Some(boot.clone()) })
    }

    /// As [`Home::open`], on other ground than this machine's.
    ///
    /// Errors: as [`Home::open`].
    pub fn open_on(
        directory: &Path,
        durability: Durability,
        ground: &dyn Ground,
    ) -> Result<Self, HomeError> {
        let boot = &ground.boot();
        let path = directory.join("identity");
        let file = |path: &Path| {
            let path = path.to_owned();
            move |source| HomeError::File { path, source }
        };
        let bytes = std::fs::read(&path).map_err(file(&path))?;
        let damaged = || HomeError::Damaged { path: path.clone() };
        if bytes.len() < 12 || bytes[..8] != MAGIC {
            return Err(damaged());
        }
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        if word(8) != VERSION {
            return Err(HomeError::Version { path, found: word(8) });
        }
        if bytes.len() != IDENTITY_BYTES || word(48) != crc32c(&bytes[..48]) {
            return Err(damaged());
        }
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let layout = Layout::new(long(32), long(40))?;
        let (id, cluster) = (NodeId(word(12) as u16), ClusterId(long(16)));
        if !boot::has_memory(directory, boot)? {
            // A cluster of one has promised nothing to another member.
            if !is_alone(directory, id, cluster)? {
                return Err(HomeError::Rebooted { id, path: directory.join("boot") });
            }
            tracing::warn!("this machine was started anew: what was acknowledged may be lost");
        }
        let open = |name: &str, bytes: u64| {
            let pool =
                ground.open_pool(&directory.join(name), &pool_options(bytes, durability)?)?;
            let segment = pool.segments().into_iter().next().ok_or_else(damaged)?;
            Ok::<_, HomeError>((pool, segment))
        };
        let (log_pool, log) = open("log", layout.region_bytes())?;
        let (vote_pool, vote) = open("vote", MIN_SEGMENT_BYTES)?;
        let kind = log_pool.report().kind;
        if matches!(kind, PoolKind::Dax | PoolKind::File) {
            retire(log.as_ref(), &layout).map_err(file(&directory.join("log")))?;
        }
        let incarnation = load_u64(vote.as_ref(), INCARNATION_OFFSET) + 1;
        store_u64(vote.as_ref(), INCARNATION_OFFSET, incarnation);
        vote.stored(INCARNATION_OFFSET, 8);
        vote.persist(INCARNATION_OFFSET, 8).map_err(file(&directory.join("vote")))?;
        boot::note_run(directory, boot, durability)?;
        for leftover in ["incoming", "snapshot.new", "known.new", "boot.new"] {
            // What an earlier run did not finish; it does not matter if it stays.
            let _ = std::fs::remove_file(directory.join(leftover));
        }
        Ok(Self {
            directory: directory.to_owned(),
            id,
            cluster,
            instance: long(24),
            incarnation,
            layout,
            durability,
            report: log_pool.report(),
            log,
            vote,
            _pools: (log_pool, vote_pool),
        })
    }

    /// The member's name.
    #[must_use]
    pub fn id(&self) -> NodeId {
        self.id
    }

    /// Its cluster.
    #[must_use]
    pub fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Drawn when the directory was made.
    #[must_use]
    pub fn instance(&self) -> u64 {
        self.instance
    }

    /// How often it was opened.
    #[must_use]
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// The log's geometry.
    #[must_use]
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// What an acknowledged command survives.
    #[must_use]
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// The kind of durable memory behind the log.
    #[must_use]
    pub fn report(&self) -> &PoolReport {
        &self.report
    }

    /// The snapshot's file.
    #[must_use]
    pub fn snapshot_path(&self) -> PathBuf {
        self.directory.join("snapshot")
    }

    pub(crate) fn known_path(&self) -> PathBuf {
        self.directory.join("known")
    }

    pub(crate) fn new_snapshot_path(&self) -> PathBuf {
        self.directory.join("snapshot.new")
    }

    pub(crate) fn incoming_path(&self) -> PathBuf {
        self.directory.join("incoming")
    }

    /// Gives a complete, synchronised file the snapshot's name, durably.
    pub(crate) fn adopt_snapshot(&self, from: &Path) -> Result<(), HomeError> {
        let path = self.snapshot_path();
        let adopted = std::fs::rename(from, &path).and_then(|()| sync_directory_of(&path));
        adopted.map_err(|source| HomeError::File { path, source })
    }

    /// Whether the member has promised itself to no leader or candidate yet, itself included: then its
    /// log holds nothing.
    pub(crate) fn never_voted(&self) -> bool {
        load_u64(self.vote.as_ref(), 0) == 0
    }

    pub(crate) fn memory(&self, device: &Arc<dyn Device>) -> Result<MemberMemory, HomeError> {
        let status = device.allocate_memory(4096)?;
        Ok(MemberMemory { log: self.log.clone(), status, vote: self.vote.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn founding() -> Founding {
        let contact = Contact { address: "a".to_owned(), details: Vec::new() };
        Founding {
            cluster: ClusterId(5),
            id: NodeId(2),
            layout: Layout::new(16, 256).unwrap(),
            sessions: 8,
            members: vec![(NodeId(2), contact)],
        }
    }

    #[test]
    fn a_member_is_made_once_and_opened_by_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        Home::create(path, &founding(), Durability::Process).unwrap();
        let again = Home::create(path, &founding(), Durability::Process);
        assert!(matches!(again, Err(HomeError::Exists { .. })));
        let home = Home::open(path, Durability::Process).unwrap();
        assert_eq!((home.id(), home.cluster()), (NodeId(2), ClusterId(5)));
        assert_eq!(home.layout(), founding().layout);
        assert!(Home::open(path, Durability::Process).is_err(), "somebody has it open");
        let (instance, incarnation) = (home.instance(), home.incarnation());
        drop(home);
        let again = Home::open(path, Durability::Process).unwrap();
        assert_eq!((again.instance(), again.incarnation()), (instance, incarnation + 1));
    }

    #[test]
    fn a_member_whose_machine_was_started_anew_is_not_opened_where_that_takes_its_memory() {
        let (one, other) = (Boot::named("one"), Boot::named("other"));
        let contact = |at: &str| Contact { address: at.to_owned(), details: Vec::new() };
        let three = [1, 2, 3].map(|id| (NodeId(id), contact("there"))).to_vec();
        for (members, durability, opens) in [
            (three.clone(), Durability::Process, false),
            (Vec::new(), Durability::Process, false),
            (three, Durability::Power, true),
            (founding().members, Durability::Process, true),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path();
            Home::create(path, &Founding { members, ..founding() }, durability).unwrap();
            drop(Home::open_under(path, durability, &one).unwrap());
            drop(Home::open_under(path, durability, &one).unwrap());
            let opened = Home::open_under(path, durability, &other);
            assert_eq!(opened.is_ok(), opens, "{durability:?}: {opened:?}");
            if let Err(error) = opened {
                let said = error.to_string();
                assert!(said.contains("n2") && said.contains("leave"), "{said}");
                assert!(!error.is_retryable());
                // What was at `process` before is no better at `power` now.
                assert!(Home::open_under(path, Durability::Power, &other).is_err());
                std::fs::remove_file(path.join("boot")).unwrap();
                drop(Home::open_under(path, durability, &other).unwrap());
                boot::note_stop(path, &[]).unwrap();
                drop(Home::open_under(path, durability, &one).unwrap());
            }
        }
    }

    #[test]
    fn a_damaged_identity_and_impossible_members_are_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let stranger = Founding { id: NodeId(3), ..founding() };
        let refused = Home::create(path, &stranger, Durability::Process);
        assert!(matches!(refused, Err(HomeError::Founding { .. })));
        Home::create(path, &founding(), Durability::Process).unwrap();
        let identity = path.join("identity");
        let sound = std::fs::read(&identity).unwrap();
        for at in 12..sound.len() {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            std::fs::write(&identity, bytes).unwrap();
            let opened = Home::open(path, Durability::Process);
            assert!(matches!(opened, Err(HomeError::Damaged { .. })), "byte {at}");
        }
        let mut newer = sound;
        newer[8] = 9;
        std::fs::write(&identity, newer).unwrap();
        let opened = Home::open(path, Durability::Process);
        assert!(matches!(opened, Err(HomeError::Version { found: 9, .. })));
    }
}

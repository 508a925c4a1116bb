//! One-sided operations: keys, checks, and the copy itself, on the initiator's processor.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use beeline_fabric::{Access, FlushKind, MemoryRegion, RemoteAddress, RemoteKey, Status};
use beeline_os::moving::{self, Storing};
use beeline_os::{MemoryObject, Persistence, barrier, prefetch, write_back};

use crate::connection::{Blocked, Connection};
use crate::control::Command;
use crate::core::Core;
use crate::keys::{KeyState, KeyTable};
use crate::link::OpenedKey;
use crate::object::EndView;
use crate::request::{Kind, Request, copy};

/// What the first waiting request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    Key,
    Receive,
    Room,
    Flush,
}

impl Wait {
    /// How a request ends that waited too long for this.
    pub(crate) fn failure(self) -> Status {
        match self {
            Self::Receive => Status::ReceiverNotReady,
            _ => Status::TransportError,
        }
    }
}

/// Why a request did not run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    Wait(Wait),
    Fail(Status),
}

/// A file flush under way.
#[derive(Clone, Copy, Debug)]
struct FileFlush {
    epoch: u64,
    outcome: Option<bool>,
}

/// Keys opened in the present epoch.
#[derive(Debug, Default)]
pub(crate) struct Remote {
    keys: KeyTable,
    epoch: u64,
    flush: Option<FileFlush>,
}

/// The start of a checked range, and the mark of the backing it lies in. Good until the table of
/// keys changes.
#[derive(Clone, Copy, Debug)]
struct Reached {
    start: NonNull<u8>,
    mark: NonNull<AtomicU64>,
    /// Where it lies in this process.
    here: Option<Here>,
}

/// Memory of this process, held by the table of keys.
#[derive(Clone, Copy, Debug)]
struct Here {
    memory: NonNull<dyn MemoryObject>,
    offset: u64,
}

impl Here {
    /// The memory.
    ///
    /// # Safety
    ///
    /// The table of keys did not change since the key was looked up.
    unsafe fn memory(&self) -> &dyn MemoryObject {
        // SAFETY: the table holds it (caller), and hands out shared references only.
        unsafe { self.memory.as_ref() }
    }
}

impl Reached {
    /// Called before the range is stored into: in this process, leave to do so
    /// ([`moving::storing`]); dropped when it is done.
    #[inline(always)]
    fn storing(&self) -> Option<Storing> {
        // SAFETY: `Reached` is good until the table of keys changes.
        self.here.map(|here| moving::storing(unsafe { here.memory() }.anchor()))
    }

    /// Called after the range was stored into: memory of this process is told.
    #[inline(always)]
    fn stored(&self, length: usize) {
        if let Some(here) = self.here {
            #[expect(clippy::cast_possible_truncation, reason = "inside the memory")]
            // SAFETY: as in `storing`.
            unsafe { here.memory() }.stored(here.offset as usize, length);
        }
    }

    #[inline(always)]
    fn is_in_use(&self) -> bool {
        // SAFETY: a word of a mapping that the table of keys holds, and that it has held since the
        // key was looked up; reached through atomics only.
        let mark = unsafe { self.mark.as_ref() };
        // Acquire: pairs with the release in `Mapping::retire`.
        mark.load(Ordering::Acquire) == 0
    }
}

impl Remote {
    /// The answer to an open. One that was sent in an earlier epoch names a backing that may have
    /// been replaced, and is dropped.
    pub(crate) fn answered(&mut self, key: u64, epoch: u64, opened: Option<OpenedKey>) {
        if epoch == self.epoch {
            let state = opened.map_or(KeyState::Refused, |opened| KeyState::Open(opened.into()));
            self.keys.set(key, state);
        }
    }

    pub(crate) fn flushed(&mut self, succeeded: bool) {
        if let Some(flush) = &mut self.flush {
            flush.outcome = Some(succeeded);
        }
    }

    pub(crate) fn forget(&mut self) {
        self.keys.clear();
        self.flush = None;
    }

    /// Whether keys opened so far still stand for what they stood for.
    #[inline(always)]
    fn is_current(&self, peer: &EndView) -> bool {
        peer.epoch() == self.epoch
    }

    /// After a copy: whether the backing it met is the one the key stands for.
    #[inline(always)]
    fn stands(&self, connection: &Connection, reached: &Reached) -> bool {
        // Pairs with the heavy fences of `exposure::replace` and `Mapping::retire`.
        barrier::light(connection.asymmetric);
        self.is_unmoved(&connection.peer, reached)
    }

    /// [`Remote::stands`], behind a fence.
    #[inline(always)]
    fn is_unmoved(&self, peer: &EndView, reached: &Reached) -> bool {
        self.is_current(peer) && reached.is_in_use()
    }

    /// After a copy: a write that raced with a replacement of the backing is done again. The epoch
    /// tells of it while the owner lives; the mark in the backing itself also tells of an owner
    /// that ended, began anew, and moved away from us.
    #[inline(always)]
    fn confirm(
        &mut self,
        connection: &Connection,
        key: RemoteKey,
        reached: &Reached,
    ) -> Result<(), Hold> {
        if self.stands(connection, reached) { Ok(()) } else { Err(self.again(key)) }
    }

    /// What a key stands for has moved: it is asked for, and the request done, again.
    #[cold]
    fn again(&mut self, key: RemoteKey) -> Hold {
        self.keys.close(key.0);
        Hold::Wait(Wait::Key)
    }

    /// The start of a range whose key is open, after checks of rights and bounds; `None` where the
    /// key is not, or stands for something else by now.
    #[inline(always)]
    fn reach(
        &self,
        peer: &EndView,
        address: RemoteAddress,
        length: u64,
        needed: Access,
    ) -> Option<Result<Reached, Status>> {
        if !self.is_current(peer) {
            return None;
        }
        let region = self.keys.open(address.key.0)?;
        let inside = address.offset.checked_add(length).is_some_and(|end| end <= region.length);
        if !inside || !region.access.intersects(needed) {
            return Some(Err(Status::RemoteAccessError));
        }
        if needed == Access::REMOTE_WRITE {
            region.before_write(address.offset, length);
            self.keys.note_written(address.key.0, region);
        }
        // SAFETY: the offset was just checked to lie inside the mapping.
        let start = unsafe { region.base.add(offset(address)) };
        let here = region
            .here()
            .map(|memory| Here { memory: NonNull::from(memory.as_ref()), offset: address.offset });
        Some(Ok(Reached { start, mark: region.mark, here }))
    }

    /// Forgets keys that stand for something else by now.
    #[cold]
    fn renew(&mut self, connection: &Connection) {
        if !self.is_current(&connection.peer) {
            self.keys.clear();
            self.epoch = connection.peer.epoch();
        }
    }

    #[cold]
    fn open(&mut self, core: &Core, key: u64) -> Hold {
        match self.keys.find(key) {
            Some(KeyState::Refused) => Hold::Fail(Status::RemoteAccessError),
            Some(KeyState::Pending | KeyState::Open(_)) => Hold::Wait(Wait::Key),
            Some(KeyState::Closed) | None => {
                self.keys.set(key, KeyState::Pending);
                let (qp_num, epoch) = (core.link.qp_num, self.epoch);
                core.device.shared.ask(Command::Open { qp_num, key, epoch });
                Hold::Wait(Wait::Key)
            }
        }
    }

    /// Asks for the lines of a range that will be written, if its key is open.
    #[inline(always)]
    pub(crate) fn expect_write(&self, address: RemoteAddress, length: u64) {
        let Some(region) = self.keys.open(address.key.0) else { return };
        if address.offset < region.length && region.access.intersects(Access::REMOTE_WRITE) {
            let length = usize::try_from(length.min(region.length - address.offset)).unwrap_or(0);
            prefetch::for_writing(region.base.as_ptr().wrapping_add(offset(address)), length);
        }
    }

    /// The address of a checked range.
    #[inline(always)]
    fn target(
        &mut self,
        core: &Core,
        connection: &Connection,
        request: &Request<'_>,
        needed: Access,
    ) -> Result<Reached, Hold> {
        match self.reach(&connection.peer, request.remote, request.length, needed) {
            Some(Ok(reached)) => Ok(reached),
            Some(Err(status)) => Err(Hold::Fail(status)),
            None => {
                self.renew(connection);
                Err(self.open(core, request.remote.key.0))
            }
        }
    }

    /// Places `length` bytes of `source`, whose key is open and which nothing keeps from being
    /// placed; false: nothing was promised, and the long way decides what becomes of the request.
    ///
    /// # Safety
    ///
    /// `source` is valid for reads of `length` bytes.
    #[inline(always)]
    pub(crate) unsafe fn place(
        &self,
        (peer, asymmetric): (&EndView, bool),
        address: RemoteAddress,
        source: *const u8,
        length: usize,
    ) -> bool {
        let latest = self.keys.latest();
        let Some((target, mark)) = latest.range(address.key.0, address.offset, length as u64)
        else {
            // SAFETY: the caller's contract.
            return unsafe { self.place_elsewhere((peer, asymmetric), address, source, length) };
        };
        if !self.is_current(peer) {
            return false;
        }
        // SAFETY: `length` bytes from the target lie inside a region that the table of keys holds, mapped
        // writable because its rights include writing; the caller vouches for the source.
        unsafe { copy(source, target, length) };
        barrier::light(asymmetric);
        // SAFETY: a word of the same mapping (`Reached::is_in_use`).
        let mark = unsafe { mark.as_ref() };
        // Acquire: pairs with the release in `Mapping::retire`.
        self.is_current(peer) && mark.load(Ordering::Acquire) == 0
    }

    /// [`Remote::place`] in a region that is not the one written last.
    ///
    /// # Safety
    ///
    /// As for [`Remote::place`].
    #[inline(never)]
    unsafe fn place_elsewhere(
        &self,
        (peer, asymmetric): (&EndView, bool),
        address: RemoteAddress,
        source: *const u8,
        length: usize,
    ) -> bool {
        let reached = self.reach(peer, address, length as u64, Access::REMOTE_WRITE);
        let Some(Ok(target)) = reached else { return false };
        let storing = target.storing();
        if storing.is_some() && !self.is_current(peer) {
            return false;
        }
        // SAFETY: `length` bytes from the target lie inside the region, which was mapped writable
        // because its rights include writing; the caller vouches for the source.
        unsafe { copy(source, target.start.as_ptr(), length) };
        drop(storing);
        target.stored(length);
        barrier::light(asymmetric);
        self.is_unmoved(peer, &target)
    }

    /// Runs one request.
    #[inline(always)]
    pub(crate) fn execute(
        &mut self,
        core: &Core,
        connection: &mut Connection,
        request: &Request<'_>,
    ) -> Result<(), Hold> {
        let moves = if request.kind.uses_receive() { request.length } else { u64::MAX };
        connection.before_transfer(moves);
        match request.kind {
            Kind::Write => self.write(core, connection, request),
            Kind::WriteWithImmediate(immediate) => {
                // A write that must not be done fails before it waits for a receive.
                let target = self.target(core, connection, request, Access::REMOTE_WRITE)?;
                connection.check_message().map_err(|blocked| hold(connection, blocked))?;
                self.put(connection, request, &target)?;
                connection.push_written(request.length, immediate);
                Ok(())
            }
            Kind::Send(immediate) => {
                let sent = connection
                    .check_message()
                    .and_then(|()| connection.push_send(request.local, request.length, immediate));
                match sent {
                    Ok(true) => Ok(()),
                    Ok(false) => Err(Hold::Fail(Status::LengthError)),
                    Err(blocked) => Err(hold(connection, blocked)),
                }
            }
            Kind::Read => self.read(core, connection, request),
            Kind::CompareAndSwap { expected, desired } => {
                self.atomic(core, connection, request, |word| {
                    word.compare_exchange(expected, desired, Ordering::SeqCst, Ordering::SeqCst)
                        .unwrap_or_else(|found| found)
                })
            }
            Kind::FetchAndAdd { addend } => self
                .atomic(core, connection, request, |word| word.fetch_add(addend, Ordering::SeqCst)),
            Kind::Flush(kind) => self.flush(core, connection, request, kind),
        }
    }

    #[inline(always)]
    fn write(
        &mut self,
        core: &Core,
        connection: &Connection,
        request: &Request<'_>,
    ) -> Result<(), Hold> {
        let target = self.target(core, connection, request, Access::REMOTE_WRITE)?;
        self.put(connection, request, &target)
    }

    /// Places a request's bytes at a target that may be written.
    #[inline(always)]
    fn put(
        &mut self,
        connection: &Connection,
        request: &Request<'_>,
        target: &Reached,
    ) -> Result<(), Hold> {
        let storing = target.storing();
        if storing.is_some() && !self.is_current(&connection.peer) {
            return Err(Hold::Wait(Wait::Key));
        }
        // SAFETY: `length` bytes from the target lie inside the mapped region, which was mapped
        // writable because its rights include writing; local ranges were checked when posted.
        unsafe { request.local.copy_to(target.start.as_ptr()) };
        drop(storing);
        #[expect(clippy::cast_possible_truncation, reason = "inside a mapped region")]
        target.stored(request.length as usize);
        self.confirm(connection, request.remote.key, target)
    }

    #[inline(always)]
    fn read(
        &mut self,
        core: &Core,
        connection: &Connection,
        request: &Request<'_>,
    ) -> Result<(), Hold> {
        let source = self.target(core, connection, request, Access::REMOTE_READ)?;
        let Some(entry) = request.local.result() else { return Ok(()) };
        let target = local_address(entry.region, entry.offset);
        #[expect(clippy::cast_possible_truncation, reason = "inside a mapped region")]
        let length = entry.length as usize;
        let storing = moving::storing(entry.region.anchor());
        // SAFETY: both ranges were checked to lie inside their regions, which are held.
        unsafe { copy(source.start.as_ptr(), target, length) };
        drop(storing);
        self.confirm(connection, request.remote.key, &source)?;
        stored(entry.region, entry.offset, length);
        Ok(())
    }

    fn atomic(
        &mut self,
        core: &Core,
        connection: &Connection,
        request: &Request<'_>,
        act: impl FnOnce(&AtomicU64) -> u64,
    ) -> Result<(), Hold> {
        if !request.remote.offset.is_multiple_of(8) {
            return Err(Hold::Fail(Status::RemoteInvalidRequest));
        }
        let reached = self.target(core, connection, request, Access::REMOTE_ATOMIC)?;
        // SAFETY: eight bytes inside the mapping, aligned (the base to a page, the offset just
        // checked); every party reaches it through atomics or copies.
        let word = unsafe { AtomicU64::from_ptr(reached.start.as_ptr().cast()) };
        let storing = reached.storing();
        // An atomic cannot be done twice, so a replacement waits for it instead.
        connection.own.enter_atomic();
        barrier::light(connection.asymmetric);
        if !self.is_current(&connection.peer) {
            connection.own.withdraw_atomic();
            return Err(Hold::Wait(Wait::Key));
        }
        #[cfg(test)]
        inside::pause();
        let old = act(word);
        drop(storing);
        reached.stored(8);
        if !connection.own.leave_atomic(connection.asymmetric) || !reached.is_in_use() {
            // It may have met the old backing or the new one: to say that it succeeded, or to do it
            // again, would be a guess.
            return Err(Hold::Fail(Status::TransportError));
        }
        let Some(entry) = request.local.result() else { return Ok(()) };
        let target = local_address(entry.region, entry.offset);
        let storing = moving::storing(entry.region.anchor());
        // SAFETY: eight readable bytes, and eight of a region, checked when posted.
        unsafe { copy((&raw const old).cast(), target, 8) };
        drop(storing);
        stored(entry.region, entry.offset, 8);
        Ok(())
    }

    fn flush(
        &mut self,
        core: &Core,
        connection: &Connection,
        request: &Request<'_>,
        kind: FlushKind,
    ) -> Result<(), Hold> {
        let reached = self.target(core, connection, request, Access::all())?;
        if kind == FlushKind::Visible {
            // The look behind it needs one as well: this one serves both.
            fence(Ordering::SeqCst);
            let stands = self.is_unmoved(&connection.peer, &reached);
            return if stands { Ok(()) } else { Err(self.again(request.remote.key)) };
        }
        let Some(region) = self.keys.open(request.remote.key.0) else {
            return Err(Hold::Fail(Status::RemoteAccessError));
        };
        match region.persistence {
            // Saying yes would be a lie that only a power cut uncovers.
            Persistence::Volatile => Err(Hold::Fail(Status::PersistenceError)),
            Persistence::CacheLine => {
                #[expect(clippy::cast_possible_truncation, reason = "inside a mapped region")]
                let length = request.length as usize;
                let persisted = if let Some(here) = reached.here {
                    // SAFETY: as in `Reached::storing`; `region` borrows the table meanwhile.
                    let memory = unsafe { here.memory() };
                    memory.persist(offset(request.remote), length).is_ok()
                } else {
                    // SAFETY: `target` checked that the range lies inside the mapping.
                    unsafe { write_back::persist_range(reached.start.as_ptr(), length) }
                };
                if !persisted {
                    return Err(Hold::Fail(Status::PersistenceError));
                }
                self.confirm(connection, request.remote.key, &reached)
            }
            Persistence::File => {
                let descriptor = region.descriptor();
                self.flush_file(core, connection, (request.remote.key, reached), descriptor)
            }
        }
    }

    /// `fdatasync` blocks, so another thread runs it.
    fn flush_file(
        &mut self,
        core: &Core,
        connection: &Connection,
        (key, reached): (RemoteKey, Reached),
        descriptor: Option<Arc<OwnedFd>>,
    ) -> Result<(), Hold> {
        match self.flush {
            Some(FileFlush { outcome: None, .. }) => Err(Hold::Wait(Wait::Flush)),
            Some(FileFlush { epoch, outcome: Some(succeeded) }) if epoch == self.epoch => {
                self.flush = None;
                if succeeded {
                    self.confirm(connection, key, &reached)
                } else {
                    Err(Hold::Fail(Status::PersistenceError))
                }
            }
            _ => {
                let Some(descriptor) = descriptor else {
                    return Err(Hold::Fail(Status::PersistenceError));
                };
                self.flush = Some(FileFlush { epoch: self.epoch, outcome: None });
                core.device.flush_file(descriptor, Arc::clone(&core.link));
                Err(Hold::Wait(Wait::Flush))
            }
        }
    }
}

fn hold(connection: &Connection, blocked: Blocked) -> Hold {
    match blocked {
        Blocked::NoReceive => Hold::Wait(Wait::Receive),
        // A full ring in front of a shared receive queue is a receiver that is not ready.
        Blocked::NoRoom if connection.peer_shares_receives() => Hold::Wait(Wait::Receive),
        Blocked::NoRoom => Hold::Wait(Wait::Room),
        Blocked::Broken => Hold::Fail(Status::TransportError),
    }
}

#[expect(clippy::cast_possible_truncation, reason = "offsets lie inside mapped regions")]
#[inline(always)]
fn offset(address: RemoteAddress) -> usize {
    address.offset as usize
}

#[inline(always)]
fn local_address(region: &MemoryRegion, offset: u64) -> *mut u8 {
    #[expect(clippy::cast_possible_truncation, reason = "inside a mapped region")]
    let offset = offset as usize;
    // SAFETY: the range was checked against the region when the request was posted.
    unsafe { region.base().add(offset) }
}

#[inline(always)]
fn stored(region: &MemoryRegion, offset: u64, length: usize) {
    #[expect(clippy::cast_possible_truncation, reason = "inside a mapped region")]
    region.memory().stored(offset as usize, length);
}

/// A stop between an atomic's second look and its doing, for tests.
#[cfg(test)]
pub(crate) mod inside {
    use std::cell::RefCell;

    thread_local! {
        static PAUSE: RefCell<Option<Box<dyn FnOnce()>>> = const { RefCell::new(None) };
    }

    /// The next atomic of this thread runs `act` there.
    pub(crate) fn set(act: impl FnOnce() + 'static) {
        PAUSE.with(|pause| *pause.borrow_mut() = Some(Box::new(act)));
    }

    pub(super) fn pause() {
        if let Some(act) = PAUSE.with(|pause| pause.borrow_mut().take()) {
            act();
        }
    }
}

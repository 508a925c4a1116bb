//! Owners of the library's objects: one per kind, each holding what it was made from, so that
//! nothing is destroyed before what depends on it.
//!
//! libibverbs is safe to call from any thread; what must not happen is a call on a destroyed
//! object. Hence each pointer here is valid from construction until its owner's drop.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{BorrowedFd, RawFd};
use std::path::{Path, PathBuf};
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use crate::abi;
use crate::discover::text;
use crate::library::Library;

/// The result of a call that returns an error number.
fn checked(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        // Old calls return -1 and set errno.
        -1 => Err(io::Error::last_os_error()),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

fn made<T>(pointer: *mut T) -> io::Result<NonNull<T>> {
    NonNull::new(pointer).ok_or_else(io::Error::last_os_error)
}

/// The devices of the machine.
pub(crate) struct DeviceList {
    verbs: &'static Library,
    devices: NonNull<*mut abi::Device>,
    count: usize,
}

impl DeviceList {
    pub(crate) fn new(library: &'static Library) -> io::Result<Self> {
        let mut count = 0;
        // SAFETY: the pointer to `count` is valid for the call.
        let devices = made(unsafe { (library.get_device_list)(&raw mut count) })?;
        Ok(Self { verbs: library, devices, count: usize::try_from(count).unwrap_or(0) })
    }

    pub(crate) fn len(&self) -> usize {
        self.count
    }

    fn device(&self, index: usize) -> *mut abi::Device {
        assert!(index < self.count, "an index lies inside the device list");
        // SAFETY: the list has `count` entries, just checked.
        let place = unsafe { self.devices.as_ptr().add(index) };
        // SAFETY: an entry of a live list.
        unsafe { place.read() }
    }

    pub(crate) fn name(&self, index: usize) -> String {
        // SAFETY: devices of a live list stay valid, and their names are constant.
        text(unsafe { &(*self.device(index)).name })
    }

    pub(crate) fn is_infiniband_transport(&self, index: usize) -> bool {
        // SAFETY: as in `name`.
        unsafe { (*self.device(index)).transport_type == abi::TRANSPORT_IB }
    }

    pub(crate) fn open(&self, index: usize) -> io::Result<Context> {
        // SAFETY: a device of a live list.
        let raw = made(unsafe { (self.verbs.open_device)(self.device(index)) })?;
        Ok(Context { verbs: self.verbs, raw })
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: made by `get_device_list`, freed once; open contexts keep their device.
        unsafe { (self.verbs.free_device_list)(self.devices.as_ptr()) };
    }
}

/// An open device.
pub(crate) struct Context {
    verbs: &'static Library,
    raw: NonNull<abi::Context>,
}

// SAFETY: libibverbs contexts may be used from any thread; the pointer is only freed in `drop`.
unsafe impl Send for Context {}
// SAFETY: as above; calls on one context may run at the same time.
unsafe impl Sync for Context {}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").finish_non_exhaustive()
    }
}

impl Context {
    pub(crate) fn query_device(&self) -> io::Result<abi::DeviceAttr> {
        let mut attributes = MaybeUninit::<abi::DeviceAttr>::zeroed();
        // SAFETY: a live context, and room for the structure.
        checked(unsafe { (self.verbs.query_device)(self.raw.as_ptr(), attributes.as_mut_ptr()) })?;
        // SAFETY: zeroed and then filled; every bit pattern is valid.
        Ok(unsafe { attributes.assume_init() })
    }

    /// The extension before the context, when the library has it and it reaches to `field_end`
    /// bytes before its end.
    fn extension(&self) -> Option<NonNull<abi::ContextExtension>> {
        let base = self.raw.as_ptr().cast::<u8>();
        // SAFETY: the library allocates the whole context, whose size is constant.
        let compat = unsafe { base.add(abi::ABI_COMPAT_OFFSET) }.cast::<usize>();
        // SAFETY: inside the context, aligned.
        if unsafe { compat.read() } != usize::MAX {
            return None;
        }
        // SAFETY: with that mark the extension lies right before the context.
        let extension = unsafe { base.sub(size_of::<abi::ContextExtension>()) };
        let extension = extension.cast::<abi::ContextExtension>();
        // SAFETY: its last word, right before the context, is there in every version.
        let size = unsafe { (*extension).size };
        let needed = size_of::<abi::ContextExtension>() + abi::CONTEXT_BYTES;
        if size < needed { None } else { NonNull::new(extension) }
    }

    /// `None` where the library or driver has no extended query.
    pub(crate) fn query_device_ex(&self) -> Option<abi::DeviceAttrEx> {
        let extension = self.extension()?;
        // SAFETY: `extension` checked that the whole structure is there.
        let query = unsafe { (*extension.as_ptr()).query_device_ex }?;
        let mut attributes = MaybeUninit::<abi::DeviceAttrEx>::zeroed();
        // SAFETY: a live context; no input; room for the structure, whose size is told.
        let code = unsafe {
            query(
                self.raw.as_ptr(),
                std::ptr::null(),
                attributes.as_mut_ptr(),
                size_of::<abi::DeviceAttrEx>(),
            )
        };
        // SAFETY: zeroed and then filled; every bit pattern is valid.
        (code == 0).then(|| unsafe { attributes.assume_init() })
    }

    pub(crate) fn query_port(&self, port: u8) -> io::Result<abi::PortAttr> {
        let mut attributes = MaybeUninit::<abi::PortAttr>::zeroed();
        // SAFETY: a live context, and room for the structure.
        checked(unsafe {
            (self.verbs.query_port)(self.raw.as_ptr(), port, attributes.as_mut_ptr())
        })?;
        // SAFETY: zeroed and then filled; every bit pattern is valid.
        Ok(unsafe { attributes.assume_init() })
    }

    pub(crate) fn query_gid(&self, port: u8, index: c_int) -> Option<abi::Gid> {
        let mut gid = abi::Gid::default();
        // SAFETY: a live context, and room for the GID.
        let code = unsafe { (self.verbs.query_gid)(self.raw.as_ptr(), port, index, &raw mut gid) };
        (code == 0).then_some(gid)
    }

    /// The file through which the kernel offers the device, `/dev/infiniband/uverbsN`.
    pub(crate) fn node_path(&self) -> PathBuf {
        // SAFETY: a live context; the field never changes.
        let device = unsafe { (*self.raw.as_ptr()).device };
        // SAFETY: an open context keeps its device, whose name is constant.
        let name = text(unsafe { &(*device).dev_name });
        Path::new("/dev/infiniband").join(name)
    }

    /// The descriptor of asynchronous events.
    pub(crate) fn async_descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: a live context; the field never changes.
        let fd: RawFd = unsafe { (*self.raw.as_ptr()).async_fd };
        // SAFETY: the descriptor stays open as long as the context, which is borrowed.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// The next asynchronous event, if there is one; acknowledged when `look` returns, so `look`
    /// must not destroy what the event is about, nor wait for somebody who does.
    pub(crate) fn async_event<R>(&self, look: impl FnOnce(&abi::AsyncEvent) -> R) -> Option<R> {
        let mut event = abi::AsyncEvent { element: null_mut(), event_type: -1 };
        // SAFETY: a live context, and room for the event.
        let code = unsafe { (self.verbs.get_async_event)(self.raw.as_ptr(), &raw mut event) };
        if code != 0 {
            return None;
        }
        let result = look(&event);
        // SAFETY: the event came from `get_async_event` and is acknowledged once.
        unsafe { (self.verbs.ack_async_event)(&raw mut event) };
        Some(result)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by `open_device`, closed once; whatever was made from it held it.
        let _ = unsafe { (self.verbs.close_device)(self.raw.as_ptr()) };
    }
}

/// A protection domain of the device.
#[derive(Debug)]
pub(crate) struct Domain {
    pub(crate) context: Arc<Context>,
    raw: NonNull<abi::Pd>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Domain {}
// SAFETY: as for `Context`.
unsafe impl Sync for Domain {}

impl Domain {
    pub(crate) fn new(context: Arc<Context>) -> io::Result<Self> {
        // SAFETY: a live context.
        let raw = made(unsafe { (context.verbs.alloc_pd)(context.raw.as_ptr()) })?;
        Ok(Self { context, raw })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: made by `alloc_pd`; regions and queue pairs in it held it.
        let _ = unsafe { (self.context.verbs.dealloc_pd)(self.raw.as_ptr()) };
    }
}

/// A registration. Its owner keeps the memory mapped.
#[derive(Debug)]
pub(crate) struct Registration {
    domain: Arc<Domain>,
    raw: NonNull<abi::Mr>,
}

// SAFETY: as for `Context`.
unsafe impl Send for Registration {}
// SAFETY: as for `Context`.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers `length` bytes at `base` at the same address (`iova` `None`) or at one of choice.
    ///
    /// # Safety
    ///
    /// The range is mapped, and stays so until this value is dropped or `deregister` returned; the
    /// device reads and writes it meanwhile.
    pub(crate) unsafe fn new(
        domain: Arc<Domain>,
        base: *mut u8,
        length: usize,
        iova: Option<u64>,
        access: c_int,
    ) -> io::Result<Self> {
        let library = domain.context.verbs;
        let (pd, base) = (domain.raw.as_ptr(), base.cast::<c_void>());
        let raw = match iova {
            // SAFETY: a live domain and a mapped range (the caller's promise).
            None => made(unsafe { (library.reg_mr)(pd, base, length, access) })?,
            // SAFETY: as above.
            Some(iova) => made(unsafe { (library.reg_mr_iova2)(pd, base, length, iova, access) })?,
        };
        Ok(Self { domain, raw })
    }

    pub(crate) fn lkey(&self) -> u32 {
        // SAFETY: a live registration; the field never changes.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    pub(crate) fn rkey(&self) -> u32 {
        // SAFETY: as in `lkey`.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    /// Takes the registration away; after it returns the device touches the memory no more.
    ///
    /// Errors: the kernel's; the registration then lives on (and this handle is forgotten).
    pub(crate) fn deregister(self) -> io::Result<()> {
        let library = self.domain.context.verbs;
        // SAFETY: made by `reg_mr`; `self` is consumed, so this happens once.
        let code = unsafe { (library.dereg_mr)(self.raw.as_ptr()) };
        let domain = Arc::clone(&self.domain);
        // The drop would deregister once more.
        std::mem::forget(self);
        // `forget` kept one reference alive; give it back unless the registration still needs it.
        if code == 0 {
            // SAFETY: `forget` left exactly one count of this Arc behind.
            unsafe { Arc::decrement_strong_count(Arc::as_ptr(&domain)) };
        }
        checked(code)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: made by `reg_mr`, deregistered once (`deregister` forgets its handle).
        let _ = unsafe { (self.domain.context.verbs.dereg_mr)(self.raw.as_ptr()) };
    }
}

/// A completion queue and its event channel.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) context: Arc<Context>,
    channel: NonNull<abi::CompChannel>,
    raw: NonNull<abi::Cq>,
    poll_cq: abi::PollCq,
    req_notify_cq: abi::ReqNotifyCq,
}

// SAFETY: as for `Context`; only its owner's thread polls it.
unsafe impl Send for Queue {}
// SAFETY: as above.
unsafe impl Sync for Queue {}

fn missing(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, what)
}

impl Queue {
    /// `tag` comes back in asynchronous events.
    pub(crate) fn new(context: Arc<Context>, depth: u32, tag: usize) -> io::Result<Self> {
        let library = context.verbs;
        let depth = c_int::try_from(depth).map_err(|_| io::ErrorKind::InvalidInput)?;
        // SAFETY: a live context.
        let ops = unsafe { &raw const (*context.raw.as_ptr()).ops };
        // SAFETY: the driver fills its operations before the context is handed out.
        let poll_cq = unsafe { (*ops).poll_cq };
        // SAFETY: as above.
        let req_notify_cq = unsafe { (*ops).req_notify_cq };
        let poll_cq = poll_cq.ok_or_else(|| missing("the driver has no poll_cq"))?;
        let req_notify_cq =
            req_notify_cq.ok_or_else(|| missing("the driver has no req_notify_cq"))?;
        // SAFETY: a live context.
        let channel = made(unsafe { (library.create_comp_channel)(context.raw.as_ptr()) })?;
        // SAFETY: a live context and channel; vector 0 always exists.
        let raw = made(unsafe {
            (library.create_cq)(
                context.raw.as_ptr(),
                depth,
                tag as *mut c_void,
                channel.as_ptr(),
                0,
            )
        });
        let raw = match raw {
            Ok(raw) => raw,
            Err(error) => {
                // SAFETY: the channel was just made and nothing uses it.
                let _ = unsafe { (library.destroy_comp_channel)(channel.as_ptr()) };
                return Err(error);
            }
        };
        let queue = Self { context, channel, raw, poll_cq, req_notify_cq };
        rustix::io::ioctl_fionbio(queue.descriptor(), true)?;
        Ok(queue)
    }

    /// Asks for moderated events; false where the driver has none.
    pub(crate) fn moderate(&self, count: u16, period_us: u16) -> bool {
        let Some(extension) = self.context.extension() else { return false };
        // SAFETY: `extension` checked that the whole structure is there.
        let modify = unsafe { (*extension.as_ptr()).modify_cq };
        let Some(modify) = modify else { return false };
        let mut attributes = abi::ModifyCqAttr {
            attr_mask: abi::CQ_ATTR_MODERATE,
            cq_count: count,
            cq_period_us: period_us,
        };
        // SAFETY: a live queue and a filled structure.
        unsafe { modify(self.raw.as_ptr(), &raw mut attributes) == 0 }
    }

    /// Readable when an event is there.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: a live channel; the field never changes.
        let fd: RawFd = unsafe { (*self.channel.as_ptr()).fd };
        // SAFETY: the descriptor stays open as long as the channel, which is borrowed.
        unsafe { BorrowedFd::borrow_raw(fd) }
    }

    /// Moves completions into `into`; returns how many.
    ///
    /// Errors: the driver's, which are not told apart.
    pub(crate) fn poll(&self, into: &mut [abi::Wc]) -> Result<usize, ()> {
        let room = c_int::try_from(into.len()).unwrap_or(c_int::MAX);
        // SAFETY: a live queue, and room for as many completions as said.
        let count = unsafe { (self.poll_cq)(self.raw.as_ptr(), room, into.as_mut_ptr()) };
        usize::try_from(count).map_err(|_| ())
    }

    pub(crate) fn arm(&self) -> io::Result<()> {
        // SAFETY: a live queue.
        checked(unsafe { (self.req_notify_cq)(self.raw.as_ptr(), 0) })
    }

    /// Takes all events off the channel.
    pub(crate) fn drain_events(&self) {
        let library = self.context.verbs;
        let mut count = 0;
        loop {
            let (mut cq, mut tag) = (null_mut(), null_mut());
            // SAFETY: a live, non-blocking channel, and room for both results.
            let code =
                unsafe { (library.get_cq_event)(self.channel.as_ptr(), &raw mut cq, &raw mut tag) };
            if code != 0 {
                break;
            }
            count += 1;
        }
        if count > 0 {
            // SAFETY: a live queue, whose events these were: the channel has no other.
            unsafe { (library.ack_cq_events)(self.raw.as_ptr(), count) };
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        let library = self.context.verbs;
        self.drain_events();
        // SAFETY: made by `create_cq`; queue pairs held this value; all events are acknowledged.
        let _ = unsafe { (library.destroy_cq)(self.raw.as_ptr()) };
        // SAFETY: made by `create_comp_channel`; its one queue is gone.
        let _ = unsafe { (library.destroy_comp_channel)(self.channel.as_ptr()) };
    }
}

/// A shared receive queue.
#[derive(Debug)]
pub(crate) struct SharedReceives {
    pub(crate) domain: Arc<Domain>,
    raw: NonNull<abi::Srq>,
    post_srq_recv: abi::PostSrqRecv,
}

// SAFETY: as for `Context`.
unsafe impl Send for SharedReceives {}
// SAFETY: as for `Context`.
unsafe impl Sync for SharedReceives {}

impl SharedReceives {
    pub(crate) fn new(domain: Arc<Domain>, depth: u32) -> io::Result<Self> {
        let library = domain.context.verbs;
        // SAFETY: a live context whose driver filled its operations.
        let post = unsafe { (*domain.context.raw.as_ptr()).ops.post_srq_recv };
        let post_srq_recv = post.ok_or_else(|| missing("the driver has no post_srq_recv"))?;
        let mut attributes =
            abi::SrqInitAttr { srq_context: null_mut(), max_wr: depth, max_sge: 1, srq_limit: 0 };
        // SAFETY: a live domain and a filled structure.
        let raw = made(unsafe { (library.create_srq)(domain.raw.as_ptr(), &raw mut attributes) })?;
        Ok(Self { domain, raw, post_srq_recv })
    }

    /// Posts a chain of receives.
    pub(crate) fn post(&self, list: &mut [abi::RecvWr]) -> Result<(), Refused> {
        let first = list.as_mut_ptr();
        let mut bad = null_mut();
        // SAFETY: a live queue; `list` is chained by its owner, its entries' gather lists are
        // valid, and the library copies all of it before it returns.
        let code = unsafe { (self.post_srq_recv)(self.raw.as_ptr(), first, &raw mut bad) };
        refused(code, first, bad, list.len())
    }
}

impl Drop for SharedReceives {
    fn drop(&mut self) {
        // SAFETY: made by `create_srq`; queue pairs on it held this value.
        let _ = unsafe { (self.domain.context.verbs.destroy_srq)(self.raw.as_ptr()) };
    }
}

/// A list that was not posted as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    /// Entries that were posted before the one that was refused.
    pub(crate) taken: usize,
    /// The queue had no room.
    pub(crate) is_full: bool,
}

fn refused<T>(code: c_int, first: *mut T, bad: *mut T, length: usize) -> Result<(), Refused> {
    if code == 0 {
        return Ok(());
    }
    let bytes = (bad as usize).wrapping_sub(first as usize);
    let taken = (bytes / size_of::<T>()).min(length);
    // Drivers differ in its sign.
    Err(Refused { taken, is_full: code.abs() == libc::ENOMEM })
}

/// How a queue pair is made.
pub(crate) struct PairShape {
    pub(crate) send: Arc<Queue>,
    pub(crate) receive: Arc<Queue>,
    pub(crate) shared: Option<Arc<SharedReceives>>,
    pub(crate) cap: abi::QpCap,
    /// Comes back in asynchronous events.
    pub(crate) tag: usize,
}

/// A queue pair.
#[derive(Debug)]
pub(crate) struct Pair {
    pub(crate) domain: Arc<Domain>,
    raw: NonNull<abi::Qp>,
    /// What the device gave of what was asked for.
    pub(crate) cap: abi::QpCap,
    is_destroyed: bool,
    _queues: (Arc<Queue>, Arc<Queue>, Option<Arc<SharedReceives>>),
}

// SAFETY: as for `Context`; only its owner's thread posts.
unsafe impl Send for Pair {}
// SAFETY: as above.
unsafe impl Sync for Pair {}

/// A posting handle of a queue pair, for the thread that owns it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Poster {
    raw: NonNull<abi::Qp>,
    post_send: abi::PostSend,
    post_recv: abi::PostRecv,
}

impl Poster {
    /// Posts a chain of requests.
    ///
    /// # Safety
    ///
    /// The queue pair lives; `list` is chained from its first to its last entry, the gather lists
    /// its entries point to are valid, and the memory they name stays registered until the
    /// completions (inline data: until the return).
    pub(crate) unsafe fn send(&self, list: &mut [abi::SendWr]) -> Result<(), Refused> {
        let first = list.as_mut_ptr();
        let mut bad = null_mut();
        // SAFETY: the caller's promise.
        let code = unsafe { (self.post_send)(self.raw.as_ptr(), first, &raw mut bad) };
        refused(code, first, bad, list.len())
    }

    /// As [`Poster::send`], for receives.
    ///
    /// # Safety
    ///
    /// As there.
    pub(crate) unsafe fn receive(&self, list: &mut [abi::RecvWr]) -> Result<(), Refused> {
        let first = list.as_mut_ptr();
        let mut bad = null_mut();
        // SAFETY: the caller's promise.
        let code = unsafe { (self.post_recv)(self.raw.as_ptr(), first, &raw mut bad) };
        refused(code, first, bad, list.len())
    }
}

impl Pair {
    pub(crate) fn new(domain: Arc<Domain>, shape: PairShape) -> io::Result<Self> {
        let mut attributes = abi::QpInitAttr {
            qp_context: shape.tag as *mut c_void,
            send_cq: shape.send.raw.as_ptr(),
            recv_cq: shape.receive.raw.as_ptr(),
            srq: shape.shared.as_ref().map_or(null_mut(), |shared| shared.raw.as_ptr()),
            cap: shape.cap,
            qp_type: abi::QPT_RC,
            sq_sig_all: 0,
        };
        let library = domain.context.verbs;
        // SAFETY: a live domain and live queues in a filled structure.
        let raw = made(unsafe { (library.create_qp)(domain.raw.as_ptr(), &raw mut attributes) })?;
        let _queues = (shape.send, shape.receive, shape.shared);
        Ok(Self { domain, raw, cap: attributes.cap, is_destroyed: false, _queues })
    }

    /// The device's number.
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: a live queue pair; the field never changes.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    /// The data path's handle; only good while this value lives.
    pub(crate) fn poster(&self) -> io::Result<Poster> {
        // SAFETY: a live context whose driver filled its operations.
        let post_send = unsafe { (*self.domain.context.raw.as_ptr()).ops.post_send };
        // SAFETY: as above.
        let post_recv = unsafe { (*self.domain.context.raw.as_ptr()).ops.post_recv };
        Ok(Poster {
            raw: self.raw,
            post_send: post_send.ok_or_else(|| missing("the driver has no post_send"))?,
            post_recv: post_recv.ok_or_else(|| missing("the driver has no post_recv"))?,
        })
    }

    pub(crate) fn modify(&self, mut attributes: abi::QpAttr, mask: c_int) -> io::Result<()> {
        let library = self.domain.context.verbs;
        // SAFETY: a live queue pair and a filled structure.
        checked(unsafe { (library.modify_qp)(self.raw.as_ptr(), &raw mut attributes, mask) })
    }

    fn to(&self, state: c_int) -> io::Result<()> {
        let attributes = abi::QpAttr { qp_state: state, ..abi::QpAttr::default() };
        self.modify(attributes, abi::mask::STATE)
    }

    /// True when the device has it in the error state, or does not say any more.
    pub(crate) fn has_failed(&self) -> bool {
        let library = self.domain.context.verbs;
        let mut attributes = abi::QpAttr::default();
        let mut made = MaybeUninit::<abi::QpInitAttr>::zeroed();
        // SAFETY: a live queue pair, and room for both structures.
        let asked = checked(unsafe {
            (library.query_qp)(
                self.raw.as_ptr(),
                &raw mut attributes,
                abi::mask::STATE,
                made.as_mut_ptr(),
            )
        });
        asked.is_err() || attributes.qp_state == abi::qp_state::ERROR
    }

    /// Ends all work: what is outstanding is flushed.
    pub(crate) fn to_error(&self) -> io::Result<()> {
        self.to(abi::qp_state::ERROR)
    }

    /// Back to the beginning, from any state; nothing is outstanding then.
    pub(crate) fn to_reset(&self) -> io::Result<()> {
        self.to(abi::qp_state::RESET)
    }
}

impl Pair {
    /// Has the device let go of it: afterwards nothing of its old peer finds it.
    ///
    /// Errors: the kernel's, with the queue pair, which still exists. That the kernel has cut this
    /// process off a device that is gone is none.
    pub(crate) fn destroy(mut self) -> Result<(), (Self, io::Error)> {
        // SAFETY: made by `create_qp`; destroyed once, as the drop looks at the outcome.
        let code = unsafe { (self.domain.context.verbs.destroy_qp)(self.raw.as_ptr()) };
        match checked(code) {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::EIO | libc::ENODEV)) => {
                Err((self, error))
            }
            _ => {
                self.is_destroyed = true;
                Ok(())
            }
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        if !self.is_destroyed {
            // SAFETY: made by `create_qp`, and not destroyed.
            let _ = unsafe { (self.domain.context.verbs.destroy_qp)(self.raw.as_ptr()) };
        }
    }
}

/// Reads the tag of the queue pair an event is about.
pub(crate) fn tag_of_pair(event: &abi::AsyncEvent) -> usize {
    let pair = event.element.cast::<abi::Qp>();
    // SAFETY: an event about a queue pair points to it, and the library keeps it until the event
    // is acknowledged.
    unsafe { (*pair).qp_context as usize }
}

/// Reads the tag of the completion queue an event is about.
pub(crate) fn tag_of_queue(event: &abi::AsyncEvent) -> usize {
    let queue = event.element.cast::<abi::Cq>();
    // SAFETY: as in `tag_of_pair`.
    unsafe { (*queue).cq_context as usize }
}

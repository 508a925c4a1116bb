//! Reading and writing.

use std::ffi::{c_int, c_void};

use beeline_sockets::connection::{handed_on, not_handed_on, received};
use beeline_sockets::kernel::{self, Errno, Outcome};
use beeline_sockets::lane::{Lane, find, look};
use beeline_sockets::receive::MOST_PIECES;
use beeline_sockets::young::{self, Call, Way, enter};
use beeline_sockets::{carrier, introduce, receiver, table};
use libc::{iovec, mmsghdr, msghdr, off_t, size_t, sockaddr, socklen_t, ssize_t, timespec};

use crate::real::real;
use crate::{guarded, quietly, set_errno};

fn piece(bytes: *mut c_void, length: size_t) -> [iovec; 1] {
    [iovec { iov_base: bytes, iov_len: length }]
}

/// The program's list of pieces.
///
/// # Safety
///
/// `list` is an array of `count` pieces, as the program says.
unsafe fn pieces<'a>(list: *const iovec, count: usize) -> Result<&'a [iovec], Errno> {
    if count > MOST_PIECES {
        return Err(Errno(libc::EINVAL));
    }
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: the contract; `iovec` is plain, and the program does not change it meanwhile.
    Ok(unsafe { std::slice::from_raw_parts(list, count) })
}

fn take(fd: c_int, lane: Lane, pieces: &[iovec], flags: c_int) -> Outcome {
    // SAFETY: the program vouches for its buffers by calling a reading function with them.
    unsafe { lane.receive(fd, pieces, flags) }
}

fn give(fd: c_int, lane: Lane, pieces: &[iovec], flags: c_int) -> Outcome {
    // SAFETY: the program vouches for its buffers by calling a writing function with them.
    unsafe { lane.send(fd, pieces, flags) }
}

/// Urgent data is not in the stream's bytes as they are counted.
fn urgent(fd: c_int, flags: c_int) {
    if flags & libc::MSG_OOB != 0 {
        young::leave_to_kernel(fd);
    }
}

/// A call of the kernel's that moves bytes of a connection that may show by it that it lives.
fn counted<T: Copy + TryInto<isize>>(call: Call, part: impl FnOnce() -> T) -> T {
    let moved = part();
    if call.is_counted() {
        quietly(|| call.done(moved.try_into().unwrap_or(-1)));
    }
    moved
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, bytes: *mut c_void, length: size_t) -> ssize_t {
    match enter(fd) {
        Way::Ours(lane) => guarded(|| take(fd, lane, &piece(bytes, length), 0)),
        Way::Kernels(call) => counted(call, || {
            real!(read(fd, bytes, length) as fn(c_int, *mut c_void, size_t) -> ssize_t)
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __read_chk(
    fd: c_int,
    bytes: *mut c_void,
    length: size_t,
    _room: size_t,
) -> ssize_t {
    // SAFETY: the program's arguments. The check of `length` against the buffer is the one thing
    // lost here.
    unsafe { read(fd, bytes, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn readv(fd: c_int, list: *const iovec, count: c_int) -> ssize_t {
    match enter(fd) {
        Way::Ours(lane) => guarded(|| {
            let count = usize::try_from(count).map_err(|_| Errno(libc::EINVAL))?;
            // SAFETY: the program's array.
            take(fd, lane, unsafe { pieces(list, count)? }, 0)
        }),
        Way::Kernels(call) => counted(call, || {
            real!(readv(fd, list, count) as fn(c_int, *const iovec, c_int) -> ssize_t)
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recv(
    fd: c_int,
    bytes: *mut c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    match enter(fd) {
        Way::Ours(lane) => guarded(|| take(fd, lane, &piece(bytes, length), flags)),
        Way::Kernels(call) => counted(call, || {
            real!(recv(fd, bytes, length, flags) as fn(c_int, *mut c_void, size_t, c_int) -> ssize_t)
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recv_chk(
    fd: c_int,
    bytes: *mut c_void,
    length: size_t,
    _room: size_t,
    flags: c_int,
) -> ssize_t {
    // SAFETY: the program's arguments.
    unsafe { recv(fd, bytes, length, flags) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvfrom(
    fd: c_int,
    bytes: *mut c_void,
    length: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_length: *mut socklen_t,
) -> ssize_t {
    match enter(fd) {
        Way::Ours(lane) => guarded(|| {
            let outcome = take(fd, lane, &piece(bytes, length), flags);
            if outcome.is_ok() && !from.is_null() && !from_length.is_null() {
                // SAFETY: the program's place; a stream tells no address, as in the kernel.
                unsafe { *from_length = 0 };
            }
            outcome
        }),
        Way::Kernels(call) => counted(call, || {
            real!(recvfrom(fd, bytes, length, flags, from, from_length)
                as fn(c_int, *mut c_void, size_t, c_int, *mut sockaddr, *mut socklen_t) -> ssize_t)
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __recvfrom_chk(
    fd: c_int,
    bytes: *mut c_void,
    length: size_t,
    _room: size_t,
    flags: c_int,
    from: *mut sockaddr,
    from_length: *mut socklen_t,
) -> ssize_t {
    // SAFETY: the program's arguments.
    unsafe { recvfrom(fd, bytes, length, flags, from, from_length) }
}

/// Receives into one message header.
fn take_message(fd: c_int, lane: Lane, message: *mut msghdr, flags: c_int) -> Outcome {
    if message.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: the program's header, not null.
    let copy = unsafe { message.read() };
    // SAFETY: the program's array.
    let list = unsafe { pieces(copy.msg_iov, copy.msg_iovlen)? };
    let count = take(fd, lane, list, flags)?;
    let answer = msghdr { msg_namelen: 0, msg_controllen: 0, msg_flags: 0, ..copy };
    // SAFETY: as above.
    unsafe { message.write(answer) };
    Ok(count)
}

fn give_message(fd: c_int, lane: Lane, message: *const msghdr, flags: c_int) -> Outcome {
    if message.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    // SAFETY: the program's header, not null.
    let copy = unsafe { message.read() };
    // SAFETY: the program's array.
    give(fd, lane, unsafe { pieces(copy.msg_iov, copy.msg_iovlen)? }, flags)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t {
    match enter(fd) {
        Way::Ours(lane) => guarded(|| take_message(fd, lane, message, flags)),
        Way::Kernels(call) => counted(call, || {
            let count =
                real!(recvmsg(fd, message, flags) as fn(c_int, *mut msghdr, c_int) -> ssize_t);
            if count >= 0 {
                quietly(|| each_descriptor(message, received));
            }
            count
        }),
    }
}

/// The descriptors that travel with a message.
fn each_descriptor(message: *const msghdr, visit: impl Fn(c_int)) {
    // SAFETY: a place that `each_place` found; perhaps not aligned.
    each_place(message, |place| visit(unsafe { place.read_unaligned() }));
}

/// The places of the descriptors that travel with a message.
fn each_place(message: *const msghdr, visit: impl Fn(*mut c_int)) {
    // SAFETY: the program's header, which the kernel has just taken or is about to.
    let Some(header) = (unsafe { message.as_ref() }) else { return };
    if header.msg_control.is_null() || header.msg_controllen == 0 {
        return;
    }
    // SAFETY: as above; walks within `msg_controllen`.
    let mut place = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: null or within the control bytes.
    while let Some(control) = unsafe { place.as_ref() } {
        if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: computes a place behind the control header.
            let data = unsafe { libc::CMSG_DATA(place) }.cast::<c_int>();
            // SAFETY: arithmetic only.
            let empty = unsafe { libc::CMSG_LEN(0) } as usize;
            #[allow(clippy::unnecessary_cast, reason = "another width in other C libraries")]
            let length = (control.cmsg_len as usize).saturating_sub(empty);
            for index in 0..length / size_of::<c_int>() {
                // SAFETY: within the data the control header tells of.
                visit(unsafe { data.add(index) });
            }
        }
        // SAFETY: walks within `msg_controllen`.
        place = unsafe { libc::CMSG_NXTHDR(message, place) };
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: u32,
    flags: c_int,
    timeout: *mut timespec,
) -> c_int {
    match enter(fd) {
        // One message is what a stream has to give at a time; fewer than asked for is allowed.
        Way::Ours(lane) => crate::guarded_int(|| {
            if count == 0 {
                return Ok(0);
            }
            let flags = flags & !libc::MSG_WAITFORONE;
            // The header is an entry's first field.
            let message = messages.cast::<msghdr>();
            // SAFETY: the program's array has at least one entry; only an address is taken.
            let length = unsafe { &raw mut (*messages).msg_len };
            let taken = take_message(fd, lane, message, flags)?;
            // SAFETY: as above.
            unsafe { length.write(u32::try_from(taken).unwrap_or(u32::MAX)) };
            Ok(1)
        }),
        Way::Kernels(call) => counted(call, || {
            let taken = real!(recvmmsg(fd, messages, count, flags, timeout)
                as fn(c_int, *mut mmsghdr, u32, c_int, *mut timespec) -> c_int);
            for index in 0..usize::try_from(taken).unwrap_or(0) {
                // SAFETY: the kernel filled so many of the program's entries.
                let message = unsafe { messages.add(index) }.cast::<msghdr>();
                quietly(|| each_descriptor(message, received));
            }
            taken
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(fd: c_int, bytes: *const c_void, length: size_t) -> ssize_t {
    match enter(fd) {
        Way::Ours(lane) => guarded(|| give(fd, lane, &piece(bytes.cast_mut(), length), 0)),
        Way::Kernels(call) => counted(call, || {
            real!(write(fd, bytes, length) as fn(c_int, *const c_void, size_t) -> ssize_t)
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn writev(fd: c_int, list: *const iovec, count: c_int) -> ssize_t {
    match enter(fd) {
        Way::Ours(lane) => guarded(|| {
            let count = usize::try_from(count).map_err(|_| Errno(libc::EINVAL))?;
            // SAFETY: the program's array.
            give(fd, lane, unsafe { pieces(list, count)? }, 0)
        }),
        Way::Kernels(call) => counted(call, || {
            real!(writev(fd, list, count) as fn(c_int, *const iovec, c_int) -> ssize_t)
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn send(
    fd: c_int,
    bytes: *const c_void,
    length: size_t,
    flags: c_int,
) -> ssize_t {
    urgent(fd, flags);
    match enter(fd) {
        Way::Ours(lane) => guarded(|| give(fd, lane, &piece(bytes.cast_mut(), length), flags)),
        Way::Kernels(call) => counted(call, || {
            real!(send(fd, bytes, length, flags)
                as fn(c_int, *const c_void, size_t, c_int) -> ssize_t)
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendto(
    fd: c_int,
    bytes: *const c_void,
    length: size_t,
    flags: c_int,
    to: *const sockaddr,
    to_length: socklen_t,
) -> ssize_t {
    urgent(fd, flags);
    match enter(fd) {
        // A connected stream ignores the address, as in the kernel.
        Way::Ours(lane) => guarded(|| give(fd, lane, &piece(bytes.cast_mut(), length), flags)),
        Way::Kernels(call) => counted(call, || {
            real!(sendto(fd, bytes, length, flags, to, to_length)
                as fn(c_int, *const c_void, size_t, c_int, *const sockaddr, socklen_t) -> ssize_t)
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    urgent(fd, flags);
    match enter(fd) {
        Way::Ours(lane) => guarded(|| give_message(fd, lane, message, flags)),
        Way::Kernels(call) => counted(call, || {
            let mut copy = Ok(None);
            quietly(|| copy = handing_on(fd, message));
            let copy = match copy {
                Ok(copy) => copy,
                Err(Errno(error)) => {
                    set_errno(error);
                    return -1;
                }
            };
            let message = copy.as_ref().map_or(message, |copy| &raw const copy.message);
            let sent =
                real!(sendmsg(fd, message, flags) as fn(c_int, *const msghdr, c_int) -> ssize_t);
            if sent < 0 {
                quietly(|| each_descriptor(message, not_handed_on));
            }
            sent
        }),
    }
}

/// A message with other descriptors than the program's; closes them.
struct Changed {
    message: msghdr,
    /// What `message` refers to.
    _control: Vec<usize>,
    fresh: Vec<c_int>,
}

impl Drop for Changed {
    fn drop(&mut self) {
        for &fd in &self.fresh {
            let _ = kernel::close(fd);
        }
    }
}

/// A message is about to take descriptors to who reads from `fd`. For one without the library:
/// the message that has carried streams in the place of connections of ours.
///
/// Errors: why a connection cannot be carried. It would read doorbells if it got the connection itself.
fn handing_on(fd: c_int, message: *const msghdr) -> Result<Option<Changed>, Errno> {
    let ours = std::cell::RefCell::new(Vec::new());
    each_descriptor(message, |number| {
        if let Some(connection) = handed_on(number) {
            ours.borrow_mut().push((number, connection));
        }
    });
    let ours = ours.into_inner();
    if ours.is_empty() {
        return Ok(None);
    }
    let knows = |number: c_int| introduce::is_known(number);
    let lacks = crate::spawn::library().is_some_and(|library| receiver::may_lack(fd, library));
    if !lacks && ours.iter().all(|&(number, _)| knows(number)) {
        return Ok(None);
    }
    // SAFETY: the program's header, which has control bytes.
    let mut copy = unsafe { message.read() };
    #[allow(clippy::unnecessary_cast, reason = "another width in other C libraries")]
    let length = copy.msg_controllen as usize;
    let mut control = vec![0_usize; length.div_ceil(size_of::<usize>())];
    let bytes = control.as_mut_ptr().cast::<u8>();
    // SAFETY: the program's control bytes, and as much room.
    unsafe { bytes.copy_from_nonoverlapping(copy.msg_control.cast(), length) };
    copy.msg_control = bytes.cast();
    let mut changed = Changed { message: copy, _control: control, fresh: Vec::new() };
    let fresh = std::cell::RefCell::new(Vec::new());
    let carried = std::cell::RefCell::new(Vec::new());
    let refused = std::cell::Cell::new(None);
    each_place(&raw const changed.message, |place| {
        // SAFETY: within our copy; perhaps not aligned.
        let number = unsafe { place.read_unaligned() };
        let Some(&(_, connection)) = ours.iter().find(|(other, _)| *other == number) else {
            return;
        };
        if refused.get().is_some() {
            return;
        }
        if connection.stay_with_kernel(number) {
            table::forget(number);
            return;
        }
        match carrier::begin(number, connection) {
            Ok(far) => {
                not_handed_on(number);
                carried.borrow_mut().push(number);
                fresh.borrow_mut().push(far);
                // SAFETY: as above.
                unsafe { place.write_unaligned(far) };
            }
            Err(error) => refused.set(Some(error)),
        }
    });
    changed.fresh = fresh.into_inner();
    let Some(Errno(error)) = refused.get() else { return Ok(Some(changed)) };
    let carried = carried.into_inner();
    ours.iter()
        .filter(|(number, _)| !carried.contains(number))
        .for_each(|&(n, _)| not_handed_on(n));
    // `fork` says EAGAIN, which of a socket means that there will be room.
    Err(Errno(if error == libc::EAGAIN { libc::ENOMEM } else { error }))
}

/// True when one of the messages has a connection of ours with it.
fn takes_ours(messages: *mut mmsghdr, count: u32) -> bool {
    let found = std::cell::Cell::new(false);
    for index in 0..count as usize {
        // SAFETY: the program's array has `count` entries.
        let message = unsafe { messages.add(index) }.cast::<msghdr>();
        each_descriptor(message, |number| found.set(found.get() || find(number).is_some()));
    }
    found.get()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmmsg(
    fd: c_int,
    messages: *mut mmsghdr,
    count: u32,
    flags: c_int,
) -> c_int {
    match enter(fd) {
        Way::Ours(lane) => crate::guarded_int(|| {
            let mut done = 0_usize;
            for index in 0..count as usize {
                // SAFETY: the program's array has `count` entries.
                let entry = unsafe { messages.add(index) };
                // The header is an entry's first field.
                let message = entry.cast::<msghdr>();
                // SAFETY: as above; only an address is taken.
                let length = unsafe { &raw mut (*entry).msg_len };
                match give_message(fd, lane, message, flags) {
                    // SAFETY: as above.
                    Ok(sent) => unsafe { length.write(u32::try_from(sent).unwrap_or(u32::MAX)) },
                    Err(error) => return if done > 0 { Ok(done) } else { Err(error) },
                }
                done += 1;
            }
            Ok(done)
        }),
        Way::Kernels(_) if takes_ours(messages, count) => {
            // One by one, as messages that take none of ours need not.
            for index in 0..count {
                // SAFETY: the program's array has `count` entries.
                let entry = unsafe { messages.add(index as usize) };
                // SAFETY: the program's message: an entry's first field.
                let sent = unsafe { sendmsg(fd, entry.cast::<msghdr>(), flags) };
                if sent < 0 {
                    return if index > 0 { c_int::try_from(index).unwrap_or(0) } else { -1 };
                }
                // SAFETY: as above; only an address is taken.
                let length = unsafe { &raw mut (*entry).msg_len };
                // SAFETY: as above.
                unsafe { length.write(u32::try_from(sent).unwrap_or(u32::MAX)) };
            }
            c_int::try_from(count).unwrap_or(0)
        }
        Way::Kernels(call) => counted(call, || {
            real!(sendmmsg(fd, messages, count, flags)
                as fn(c_int, *mut mmsghdr, u32, c_int) -> c_int)
        }),
    }
}

/// Bytes of a file moved at a time.
const BLOCK: usize = 64 << 10;

/// `sendfile` into a connection of ours: read, then send.
fn give_file(out: c_int, lane: Lane, from: c_int, offset: *mut off_t, length: size_t) -> Outcome {
    let mut block = vec![0_u8; BLOCK.min(length)];
    let mut total = 0;
    let own = |total: usize| i64::try_from(total).unwrap_or(i64::MAX);
    let at = if offset.is_null() {
        // SAFETY: asks for the position only.
        let at = unsafe { libc::lseek(from, 0, libc::SEEK_CUR) };
        if at < 0 {
            return Err(last());
        }
        at
    } else {
        // SAFETY: the program's place.
        unsafe { *offset }
    };
    let outcome = loop {
        let most = block.len().min(length - total);
        if most == 0 {
            break Ok(());
        }
        // SAFETY: our buffer, as long as told.
        let read = unsafe { libc::pread(from, block.as_mut_ptr().cast(), most, at + own(total)) };
        let Ok(read) = usize::try_from(read) else { break Err(last()) };
        if read == 0 {
            break Ok(());
        }
        match give(out, lane, &piece(block.as_mut_ptr().cast(), read), 0) {
            Ok(sent) => {
                total += sent;
                if sent < read {
                    break Ok(());
                }
            }
            Err(error) => break Err(error),
        }
    };
    if offset.is_null() {
        // SAFETY: sets the position to behind what was sent.
        unsafe { libc::lseek(from, at + own(total), libc::SEEK_SET) };
    } else {
        // SAFETY: the program's place.
        unsafe { *offset = at + own(total) };
    }
    match outcome {
        Err(error) if total == 0 => Err(error),
        _ => Ok(total),
    }
}

fn last() -> Errno {
    Errno(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(
    out: c_int,
    from: c_int,
    offset: *mut off_t,
    length: size_t,
) -> ssize_t {
    if look(from).is_some() {
        // As for every socket.
        return guarded(|| Err(Errno(libc::EINVAL)));
    }
    match enter(out) {
        Way::Ours(lane) => guarded(|| give_file(out, lane, from, offset, length)),
        Way::Kernels(call) => counted(call, || {
            real!(sendfile(out, from, offset, length)
                as fn(c_int, c_int, *mut off_t, size_t) -> ssize_t)
        }),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(
    out: c_int,
    from: c_int,
    offset: *mut off_t,
    length: size_t,
) -> ssize_t {
    // SAFETY: the program's arguments; on 64 bits the two are one.
    unsafe { sendfile(out, from, offset, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn splice(
    from: c_int,
    from_offset: *mut i64,
    to: c_int,
    to_offset: *mut i64,
    length: size_t,
    flags: u32,
) -> ssize_t {
    if find(from).is_some() || find(to).is_some() {
        // Programs fall back to reading and writing, as for files that cannot be spliced.
        return guarded(|| Err(Errno(libc::EINVAL)));
    }
    real!(splice(from, from_offset, to, to_offset, length, flags)
        as fn(c_int, *mut i64, c_int, *mut i64, size_t, u32) -> ssize_t)
}

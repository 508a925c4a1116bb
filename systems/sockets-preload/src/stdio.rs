//! The C library's streams over connections of ours.
//!
//! A stream that `fdopen` makes reads and writes inside the C library, past the names we export. So
//! one over a connection of ours becomes a stream with functions of its own (`fopencookie`), which
//! are the exported `read`, `write` and `close`. The three standard streams are replaced the same
//! way when descriptors 0 to 2 are connections of ours: at the start of a program, and after `dup2`
//! onto one of them.
//!
//! Where C++'s streams are there, which took the standard streams for theirs before we could replace
//! them, descriptors 0 to 2 become carried streams instead: there the C library's own calls are
//! right.

use std::ffi::{c_char, c_int, c_void};

use beeline_sockets::carrier;
use beeline_sockets::connection;
use beeline_sockets::lane::{Lane, find};
use libc::{FILE, off64_t, size_t, ssize_t};

use crate::real::real_pointer;
use crate::{data, descriptors};

/// As `fopencookie` takes them.
#[repr(C)]
struct Functions {
    read: Option<unsafe extern "C" fn(*mut c_void, *mut c_char, size_t) -> ssize_t>,
    write: Option<unsafe extern "C" fn(*mut c_void, *const c_char, size_t) -> ssize_t>,
    seek: Option<unsafe extern "C" fn(*mut c_void, *mut off64_t, c_int) -> c_int>,
    close: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
}

unsafe extern "C" {
    fn fopencookie(cookie: *mut c_void, mode: *const c_char, functions: Functions) -> *mut FILE;
    fn __fpurge(stream: *mut FILE);
    static mut stdin: *mut FILE;
    static mut stdout: *mut FILE;
    static mut stderr: *mut FILE;
}

/// A stream's cookie is its descriptor's number.
fn number(cookie: *mut c_void) -> c_int {
    c_int::try_from(cookie.addr()).unwrap_or(-1)
}

unsafe extern "C" fn read(cookie: *mut c_void, bytes: *mut c_char, length: size_t) -> ssize_t {
    // SAFETY: the C library's own buffer, as long as told.
    unsafe { data::read(number(cookie), bytes.cast(), length) }
}

unsafe extern "C" fn write(cookie: *mut c_void, bytes: *const c_char, length: size_t) -> ssize_t {
    // SAFETY: as in `read`.
    unsafe { data::write(number(cookie), bytes.cast(), length) }
}

unsafe extern "C" fn close(cookie: *mut c_void) -> c_int {
    // SAFETY: the stream owns its descriptor, as one of `fdopen` does.
    unsafe { descriptors::close(number(cookie)) }
}

/// Bytes from a stream's beginning to its descriptor: 32 bits of flags and their padding, then
/// thirteen pointers. Compiled into programs since their macros read it, so it cannot change.
const DESCRIPTOR_AT: usize = 8 + 13 * size_of::<usize>();
/// What the C library puts there in a stream with functions of its own.
const NO_DESCRIPTOR: c_int = -2;

/// A stream over `fd`, or null.
///
/// # Safety
///
/// `mode` is a C string.
unsafe fn stream(fd: c_int, mode: *const c_char) -> *mut FILE {
    let cookie = std::ptr::without_provenance_mut(usize::try_from(fd).unwrap_or(usize::MAX));
    let functions =
        Functions { read: Some(read), write: Some(write), seek: None, close: Some(close) };
    // SAFETY: the contract; the functions stay loaded.
    let stream = unsafe { fopencookie(cookie, mode, functions) };
    if stream.is_null() {
        return stream;
    }
    // So that `fileno` answers. Left alone where it does not look as it must.
    // SAFETY: within a stream, which is larger.
    let place = unsafe { stream.cast::<u8>().add(DESCRIPTOR_AT) }.cast::<c_int>();
    // SAFETY: as above; aligned, since every field before it is.
    if unsafe { place.read() } == NO_DESCRIPTOR {
        // SAFETY: as above; nobody else has the stream yet.
        unsafe { place.write(fd) };
    }
    stream
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fdopen(fd: c_int, mode: *const c_char) -> *mut FILE {
    if find(fd).is_some() {
        // SAFETY: the program's string.
        return unsafe { stream(fd, mode) };
    }
    real_pointer!(fdopen(fd, mode) as fn(c_int, *const c_char) -> *mut FILE)
}

/// True when the program has C++'s standard streams.
fn has_other_streams() -> bool {
    [c"_ZSt4cout", c"_ZNSt3__14coutE"].iter().any(|name| {
        // SAFETY: a name with its end, looked for in everything that is loaded.
        !unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.is_null()
    })
}

/// Replaces the standard streams of `numbers`, as far as they are connections of ours now.
pub(crate) fn adopt(numbers: &[c_int]) {
    let standard = libc::STDIN_FILENO..=libc::STDERR_FILENO;
    let ours = |fd: &c_int| standard.contains(fd) && find(*fd).is_some();
    let numbers: Vec<c_int> = numbers.iter().copied().filter(ours).collect();
    if numbers.is_empty() || !has_other_streams() {
        return numbers.into_iter().for_each(adopt_one);
    }
    for &fd in &numbers {
        // Again for each: those that are one connection are carried as one.
        let Some(Lane::Rings(connection)) = find(fd) else {
            adopt_one(fd);
            continue;
        };
        let same = |other: &c_int| {
            connection::find(*other).is_some_and(|one| std::ptr::eq(one, connection))
        };
        let same: Vec<c_int> = numbers.iter().copied().filter(same).collect();
        let _ = carrier::replace(&same, connection);
    }
}

/// Where a stream keeps what was written to it and not yet out: from the fifth field's place to the
/// sixth's.
const WRITTEN_AT: usize = 8 + 3 * size_of::<usize>();

/// Takes what `old` holds for its descriptor over to `fresh`.
///
/// # Safety
///
/// Both are streams of the C library's.
unsafe fn take_over(old: *mut FILE, fresh: *mut FILE) {
    // SAFETY: within a stream, which is larger.
    let place = unsafe { old.cast::<u8>().add(WRITTEN_AT) }.cast::<[*const c_void; 2]>();
    // SAFETY: as above; aligned, since every field before it is.
    let [from, to] = unsafe { place.read() };
    let held = to.addr().saturating_sub(from.addr());
    if held > 0 {
        // SAFETY: the stream's buffer, as far as it was filled.
        unsafe { libc::fwrite(from, 1, held, fresh) };
        // SAFETY: a stream.
        unsafe { __fpurge(old) };
    }
}

/// Replaces the standard stream of `fd`.
fn adopt_one(fd: c_int) {
    let (place, mode) = match fd {
        libc::STDIN_FILENO => (&raw mut stdin, c"r"),
        libc::STDOUT_FILENO => (&raw mut stdout, c"w"),
        libc::STDERR_FILENO => (&raw mut stderr, c"w"),
        _ => return,
    };
    // SAFETY: a C string.
    let fresh = unsafe { stream(fd, mode.as_ptr()) };
    if fresh.is_null() {
        return;
    }
    if fd == libc::STDERR_FILENO {
        // SAFETY: a fresh stream, and no buffer.
        unsafe { libc::setvbuf(fresh, std::ptr::null_mut(), libc::_IONBF, 0) };
    }
    // SAFETY: the C library's variable, which programs may set; the old stream stays.
    let old = unsafe { place.replace(fresh) };
    if fd != libc::STDIN_FILENO && !old.is_null() {
        // SAFETY: the program's stream, and ours.
        unsafe { take_over(old, fresh) };
    }
}

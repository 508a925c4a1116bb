//! Programs that replace this one.
//!
//! The library finds the connections it knew in the program that `exec` brings. A program that
//! will not have the library (static, set-uid, without `LD_PRELOAD` in its environment) gets a
//! carried stream instead of each connection it inherits; so does any program where the monitor
//! does not know the connection any more.

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::fs::File;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use beeline_sockets::connection::Connection;
use beeline_sockets::{anew, between, carrier, introduce, kernel, table, together};

use crate::quietly;
use crate::real::real;

/// `LD_PRELOAD` as this program began with it.
static PRELOADED: OnceLock<Option<Vec<u8>>> = OnceLock::new();

/// Called by the constructor.
pub(crate) fn remember() {
    // Empty where the library was loaded in another way.
    let given = std::env::var_os("LD_PRELOAD").map(|text| text.as_bytes().to_vec());
    PRELOADED.get_or_init(|| given.filter(|text| !text.is_empty()));
}

/// As [`remember`], for who acts for a program that was preloaded so.
pub(crate) fn remember_as(preloaded: &[u8]) {
    PRELOADED.get_or_init(|| (!preloaded.is_empty()).then(|| preloaded.to_vec()));
}

/// What was remembered.
pub(crate) fn preloaded() -> Option<&'static [u8]> {
    PRELOADED.get()?.as_deref()
}

/// Interpreters of interpreters, at most; the kernel allows no more.
const DEEPEST: u32 = 4;
/// Bytes of a program that are looked at.
const HEAD: usize = 4096;

/// True when the program at `path` would load this library, if its environment says so.
fn is_dynamic(path: &Path, depth: u32) -> bool {
    let Ok(mut file) = File::open(path) else { return false };
    let Ok(about) = file.metadata() else { return false };
    let other = |bit, owner, ours| about.mode() & bit != 0 && owner != ours;
    // SAFETY: no arguments, no failure.
    let (user, group) = (unsafe { libc::geteuid() }, unsafe { libc::getegid() });
    if other(libc::S_ISUID, about.uid(), user) || other(libc::S_ISGID, about.gid(), group) {
        return false;
    }
    let mut head = Vec::with_capacity(HEAD);
    if file.by_ref().take(HEAD as u64).read_to_end(&mut head).is_err() {
        return false;
    }
    if let Some(line) = head.strip_prefix(b"#!") {
        let line = line.split(|&byte| byte == b'\n').next().unwrap_or_default().trim_ascii();
        let word = line.split(u8::is_ascii_whitespace).next().unwrap_or_default();
        return depth > 0 && is_dynamic(Path::new(OsStr::from_bytes(word)), depth - 1);
    }
    has_interpreter(&head)
}

/// True for the head of an executable of this machine's word size that asks for a loader.
fn has_interpreter(head: &[u8]) -> bool {
    const CLASS_64: u8 = 2;
    const LOADER: u32 = 3;
    let half = |at: usize| Some(u16::from_le_bytes(head.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_le_bytes(head.get(at..at + 4)?.try_into().ok()?));
    let long = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    let find = || {
        let table = usize::try_from(long(32)?).ok()?;
        let (size, count) = (usize::from(half(54)?), usize::from(half(56)?));
        (0..count)
            .map(|index| word(table.checked_add(index * size)?))
            .find(|&kind| kind == Some(LOADER))
    };
    head.starts_with(b"\x7fELF") && head.get(4) == Some(&CLASS_64) && find().is_some()
}

/// True when the environment has the library loaded where this program's own had.
///
/// # Safety
///
/// `environment` is null or a list of C strings that ends with null.
unsafe fn preloads(environment: *const *const c_char) -> bool {
    let Some(Some(ours)) = PRELOADED.get() else { return true };
    let mut place = environment;
    while !place.is_null() {
        // SAFETY: the contract: not past the null that ends the list.
        let entry = unsafe { place.read() };
        if entry.is_null() {
            return false;
        }
        // SAFETY: the contract: a C string.
        let entry = unsafe { CStr::from_ptr(entry) }.to_bytes();
        if let Some(value) = entry.strip_prefix(b"LD_PRELOAD=") {
            return value.windows(ours.len()).any(|part| part == ours);
        }
        // SAFETY: as above.
        place = unsafe { place.add(1) };
    }
    false
}

/// What a search for `name` along the program's `PATH` finds.
fn found(name: &CStr) -> Option<PathBuf> {
    let name = Path::new(OsStr::from_bytes(name.to_bytes()));
    if name.as_os_str().as_bytes().contains(&b'/') {
        return Some(name.to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    let Ok(text) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: a C string.
    path.is_file() && unsafe { libc::access(text.as_ptr(), libc::X_OK) } == 0
}

/// How a program is named.
pub(crate) enum Named {
    /// By its path.
    Path,
    /// By a name that is looked for.
    Searched,
}

/// The file of the program `name`, if it can be run.
fn file(name: &CStr, how: &Named) -> Option<PathBuf> {
    let path = match how {
        Named::Path => Some(PathBuf::from(OsStr::from_bytes(name.to_bytes()))),
        Named::Searched => found(name),
    };
    path.filter(|path| is_executable(path))
}

/// True when the program `name` will have the library.
///
/// # Safety
///
/// `name` is a C string; `environment` as for [`preloads`].
pub(crate) unsafe fn goes_on(
    name: *const c_char,
    how: &Named,
    environment: *const *const c_char,
) -> bool {
    // SAFETY: the contract.
    let file = file(unsafe { CStr::from_ptr(name) }, how);
    // SAFETY: the contract.
    file.is_some_and(|file| is_dynamic(&file, DEEPEST)) && unsafe { preloads(environment) }
}

/// Before `exec` of the program `name`.
///
/// # Safety
///
/// `name` is null or a C string; `environment` as for [`preloads`].
unsafe fn leaving_for(name: *const c_char, how: &Named, environment: *const *const c_char) {
    // SAFETY: the contract.
    if name.is_null() || file(unsafe { CStr::from_ptr(name) }, how).is_none() {
        return;
    }
    if !table::is_foreign_process() {
        anew::leaving();
    }
    beeline_sockets::young::settle_all(kernel::survives_exec);
    let mut mine: Vec<(&'static Connection, Vec<c_int>)> = Vec::new();
    let mut left: Vec<&'static Connection> = Vec::new();
    table::each(|fd, connection| {
        // The next program is to find what it has become.
        let connection = anew::settled(connection);
        if !kernel::survives_exec(fd) {
            left.push(connection);
            return;
        }
        match mine.iter_mut().find(|(known, _)| std::ptr::eq(*known, connection)) {
            Some((_, numbers)) => numbers.push(fd),
            None => mine.push((connection, vec![fd])),
        }
    });
    if table::is_foreign_process() {
        between::held_by(std::process::id());
    } else {
        let kept = |one: &&Connection| mine.iter().any(|(known, _)| std::ptr::eq(*known, *one));
        left.iter().filter(|one| !kept(one)).for_each(|one| {
            between::leaving_by_exec(one);
            together::leave(&one.segment);
        });
    }
    if mine.is_empty() {
        return;
    }
    // SAFETY: the contract.
    let goes_on = unsafe { goes_on(name, how, environment) };
    for (connection, numbers) in mine {
        if table::is_foreign_process() {
            // The parent, whose memory this child shares, has it still.
            together::join(&connection.segment);
        }
        let Some(&fd) = numbers.first() else { continue };
        // The monitor does not know it after it was restarted.
        if goes_on && introduce::is_known(fd) || connection.stay_with_kernel(fd) {
            continue;
        }
        let _ = carrier::replace(&numbers, connection);
    }
}

unsafe extern "C" {
    static environ: *const *const c_char;
}

pub(crate) fn environment() -> *const *const c_char {
    // SAFETY: the C library's variable; whoever changes it meanwhile errs without us, too.
    unsafe { environ }
}

pub(crate) type Words = *const *const c_char;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execve(path: *const c_char, words: Words, with: Words) -> c_int {
    // SAFETY: the program's arguments.
    quietly(|| unsafe { leaving_for(path, &Named::Path, with) });
    stayed(real!(execve(path, words, with) as fn(*const c_char, Words, Words) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execv(path: *const c_char, words: Words) -> c_int {
    // SAFETY: the program's arguments.
    quietly(|| unsafe { leaving_for(path, &Named::Path, environment()) });
    stayed(real!(execv(path, words) as fn(*const c_char, Words) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(name: *const c_char, words: Words) -> c_int {
    // SAFETY: the program's arguments.
    quietly(|| unsafe { leaving_for(name, &Named::Searched, environment()) });
    stayed(real!(execvp(name, words) as fn(*const c_char, Words) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvpe(name: *const c_char, words: Words, with: Words) -> c_int {
    // SAFETY: the program's arguments.
    quietly(|| unsafe { leaving_for(name, &Named::Searched, with) });
    stayed(real!(execvpe(name, words, with) as fn(*const c_char, Words, Words) -> c_int))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fexecve(fd: c_int, words: Words, with: Words) -> c_int {
    let path = CString::new(format!("/proc/self/fd/{fd}")).unwrap_or_default();
    // SAFETY: the program's arguments.
    quietly(|| unsafe { leaving_for(path.as_ptr(), &Named::Path, with) });
    stayed(real!(fexecve(fd, words, with) as fn(c_int, Words, Words) -> c_int))
}

/// The program that was to replace this one did not.
fn stayed(outcome: c_int) -> c_int {
    quietly(|| {
        if !table::is_foreign_process() {
            anew::stayed();
            between::stayed();
            // A sharer that looked meanwhile may have taken the end for its own alone.
            table::each(|_, connection| together::join(&connection.segment));
        }
    });
    outcome
}

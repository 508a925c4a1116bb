//! Programs started beside this one.
//!
//! `posix_spawn` calls `exec` inside the C library, in a child that it makes itself; `system` and
//! `popen` do the same with a shell. A child with the library finds the connections it inherits. For
//! one without, its connections have to become carried streams, in the child, after the file
//! actions and before its `exec`. So a go-between is started in its place: this library as a program
//! of its own, by the loader (its entry is [`beeline_sockets_go_between`]), which finds the
//! connections as any program with the library does, and calls our own `exec`, which sees to them.
//!
//! ```text
//! posix_spawn ──► loader, library, MONITOR REPORT PRELOADED PATH ──exec──► program
//!      ▲             │ actions and attributes are applied                   │ carried streams
//!      └── errno ────┘ over a Unix socket, if exec fails ◄──────────────────┘
//! ```

use std::ffi::{CStr, CString, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use beeline_sockets::report::{Caller, Listener};
use beeline_sockets::table::Expected;
use beeline_sockets::{between, control, introduce, kernel, receiver, table};
use libc::FILE;

use crate::actions::{self, Handed};
use crate::exec::{self, Named, Words, environment, goes_on};
use crate::quietly;
use crate::real::{real, real_pointer};

type Pointer = *const std::ffi::c_void;

/// Words before the program's name: loader, library, monitor, report, what is preloaded, path.
const OURS: usize = 6;

/// This library's file.
pub(crate) fn library() -> Option<&'static [u8]> {
    static LIBRARY: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    LIBRARY.get_or_init(|| receiver::file_of(library as *const () as usize)).as_deref()
}

/// The loader's file, if this machine's library can be started by it.
fn loader() -> Option<Vec<u8>> {
    if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        return None;
    }
    // SAFETY: a look at a word that the kernel left; 0 when it is not there.
    let place = unsafe { libc::getauxval(libc::AT_BASE) };
    receiver::file_of(usize::try_from(place).ok()?)
}

/// True when the program is this library, and this another copy of it, which its environment
/// preloads: the program acts alone.
pub(crate) fn is_beside_go_between() -> bool {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    {
        const NAME: &CStr = c"beeline_sockets_go_between";
        // SAFETY: a name with its end. The program comes first in the order of this search.
        let first = unsafe { libc::dlsym(libc::RTLD_DEFAULT, NAME.as_ptr()) };
        !first.is_null() && file_at(first) != file_at((library as *const ()).cast())
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    false
}

/// Where the file that has `place` begins in memory.
fn file_at(place: *const std::ffi::c_void) -> usize {
    // SAFETY: a plain C structure for which all zeros is a value.
    let mut about: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: an address to look for, and a place of ours.
    unsafe { libc::dladdr(place, &raw mut about) };
    about.dli_fbase.addr()
}

fn text(bytes: &[u8]) -> Option<CString> {
    CString::new(bytes).ok()
}

/// Words that begin the go-between, if there can be one.
fn beginning(report: &[u8], path: Option<&[u8]>) -> Option<[CString; OURS]> {
    let library = library().filter(|file| std::fs::File::open(OsStr::from_bytes(file)).is_ok())?;
    // A path may be empty, and then means the current folder.
    let path = path.map_or_else(Vec::new, |path| [b"=", path].concat());
    Some([
        text(&loader()?)?,
        text(library)?,
        text(control::name().as_bytes())?,
        text(report)?,
        text(exec::preloaded().unwrap_or_default())?,
        text(&path)?,
    ])
}

/// Prepares for the child what it may get: what survives `exec`, and what is `handed` to it besides. Where it
/// `goes_on` with the library, young connections ask, and the child finds those that were introduced. Else what
/// never left the kernel stays there, and true is returned when there is something that did.
fn hands_on(handed: &Handed, goes_on: impl FnOnce() -> bool) -> bool {
    let gets = |fd: c_int| handed.has(fd) || kernel::survives_exec(fd);
    let (mut young, mut ours) = (Vec::new(), Vec::new());
    table::each_young(|fd| {
        if gets(fd) {
            young.push(fd);
        }
    });
    table::each(|fd, _| {
        if gets(fd) {
            ours.push(fd);
        }
    });
    if young.is_empty() && ours.is_empty() {
        return false;
    }
    let goes_on = goes_on();
    for fd in young {
        if goes_on {
            beeline_sockets::young::settle(fd);
            ours.push(fd);
        } else {
            beeline_sockets::young::leave_to_kernel(fd);
        }
    }
    let mut hands_on = false;
    for fd in ours {
        let Some(connection) = table::ours(fd) else { continue };
        // One that the other end may still come to is found by the child as long as the monitor knows it.
        if goes_on && (connection.is_bound_for_ring() || introduce::is_known(fd)) {
            continue;
        }
        if connection.stay_with_kernel(fd) {
            table::forget(fd);
        } else {
            hands_on |= !goes_on;
        }
    }
    hands_on
}

/// Before a child is made without `fork`: it is about to share what survives, and nothing else once it runs its
/// program. True when it may get something of ours that it cannot read.
fn sharing(handed: &Handed, goes_on: impl FnOnce() -> bool) -> (bool, Expected) {
    if table::is_foreign_process() {
        return (false, Expected::default());
    }
    let hands_on = hands_on(handed, goes_on);
    let gets = |fd: c_int| handed.has(fd) || kernel::survives_exec(fd);
    let expected = table::shared_with_program(gets);
    between::expect_holder();
    (hands_on, expected)
}

/// What became of making a child.
enum Child {
    /// It runs its program.
    Made(u32),
    /// It was not made, or has ended.
    Over,
    /// It was made, and its number is not known.
    Unknown,
}

/// After making it.
fn shared(child: &Child, expected: &Expected) {
    quietly(|| {
        if table::is_foreign_process() {
            return;
        }
        if let &Child::Made(child) = child {
            between::held_by(child);
        }
        expected.outcome(match child {
            &Child::Made(child) => Some(Ok(child)),
            Child::Over => Some(Err(())),
            Child::Unknown => None,
        });
        between::expected_holder();
    });
}

/// What a call of `posix_spawn` or `posix_spawnp` was given.
struct Call {
    child: *mut libc::pid_t,
    name: *const c_char,
    how: Named,
    actions: Pointer,
    attributes: Pointer,
    words: Words,
    with: Words,
}

/// Starts the go-between if the call needs one: what `posix_spawn` is to return.
fn by_go_between(call: &Call, expected: &mut Expected) -> Option<c_int> {
    let named = !call.name.is_null() && !call.words.is_null();
    // SAFETY: the program's string and environment.
    let goes_on = || named && unsafe { goes_on(call.name, &call.how, call.with) };
    let (hands_on, shared) = sharing(&actions::handed(call.actions), goes_on);
    *expected = shared;
    if !hands_on || !named {
        return None;
    }
    let listener = Listener::new().ok()?;
    // SAFETY: the program's string.
    let name = unsafe { CStr::from_ptr(call.name) };
    let searched = matches!(call.how, Named::Searched) && !name.to_bytes().contains(&b'/');
    let path = searched.then(search_path);
    let beginning = beginning(listener.name(), path.as_deref())?;
    let mut words: Vec<*const c_char> = beginning.iter().map(|word| word.as_ptr()).collect();
    words.push(call.name);
    let mut place = call.words;
    loop {
        // SAFETY: the program's words, not past the null that ends them.
        let word = unsafe { place.read() };
        words.push(word);
        if word.is_null() {
            break;
        }
        // SAFETY: as above.
        place = unsafe { place.add(1) };
    }
    let mut child = 0;
    let error = spawn(&Call {
        child: &raw mut child,
        name: beginning[0].as_ptr(),
        how: Named::Path,
        words: words.as_ptr(),
        ..*call
    });
    if error != 0 {
        return Some(error);
    }
    if let Some(error) = listener.hear(child, beginning[0].as_bytes()) {
        // As the C library does with its own child.
        let _ = kernel::wait_for(child);
        return Some(error);
    }
    // SAFETY: the program's place, or its caller's.
    unsafe { call.child.write(child) };
    Some(0)
}

fn search_path() -> Vec<u8> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/bin:/usr/bin".into());
    path.as_bytes().to_vec()
}

fn spawn(call: &Call) -> c_int {
    let Call { child, name, actions, attributes, words, with, .. } = *call;
    match call.how {
        Named::Path => real!(posix_spawn(child, name, actions, attributes, words, with)
            as fn(*mut libc::pid_t, *const c_char, Pointer, Pointer, Words, Words) -> c_int),
        Named::Searched => real!(posix_spawnp(child, name, actions, attributes, words, with)
            as fn(*mut libc::pid_t, *const c_char, Pointer, Pointer, Words, Words) -> c_int),
    }
}

fn spawned(mut call: Call) -> c_int {
    // The program may have no use for the number; we have.
    let mut number = 0;
    if call.child.is_null() {
        call.child = &raw mut number;
    }
    let (mut outcome, mut expected) = (None, Expected::default());
    quietly(|| outcome = by_go_between(&call, &mut expected));
    let outcome = outcome.unwrap_or_else(|| spawn(&call));
    // SAFETY: the program's place, or ours, written where the call succeeded.
    let made = (outcome == 0).then(|| unsafe { call.child.read() }.unsigned_abs());
    shared(&made.map_or(Child::Over, Child::Made), &expected);
    outcome
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn(
    child: *mut libc::pid_t,
    name: *const c_char,
    actions: Pointer,
    attributes: Pointer,
    words: Words,
    with: Words,
) -> c_int {
    spawned(Call { child, name, how: Named::Path, actions, attributes, words, with })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawnp(
    child: *mut libc::pid_t,
    name: *const c_char,
    actions: Pointer,
    attributes: Pointer,
    words: Words,
    with: Words,
) -> c_int {
    spawned(Call { child, name, how: Named::Searched, actions, attributes, words, with })
}

/// A line for the shell, of a word.
fn quoted(word: &[u8]) -> Vec<u8> {
    let mut line = vec![b'\''];
    for &byte in word {
        if byte == b'\'' { line.extend(b"'\\''") } else { line.push(byte) }
    }
    line.extend(b"' ");
    line
}

/// A shell is about to run `line`. If it will not have the library: the line that has a go-between
/// run it.
fn line_by_go_between(line: *const c_char, expected: &mut Expected) -> Option<CString> {
    const SHELL: &CStr = c"/bin/sh";
    // SAFETY: the shell's name, and the program's environment.
    let goes_on = || unsafe { goes_on(SHELL.as_ptr(), &Named::Path, environment()) };
    let (hands_on, shared) = sharing(&Handed::default(), goes_on);
    *expected = shared;
    if !hands_on || line.is_null() {
        return None;
    }
    // SAFETY: the program's string.
    let line = unsafe { CStr::from_ptr(line) };
    let mut other = b"exec ".to_vec();
    for word in beginning(b"", None)? {
        other.extend(quoted(word.as_bytes()));
    }
    for word in [SHELL.to_bytes(), b"sh", b"-c", line.to_bytes()] {
        other.extend(quoted(word));
    }
    text(&other)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn system(line: *const c_char) -> c_int {
    let (mut other, mut expected) = (None, Expected::default());
    quietly(|| other = line_by_go_between(line, &mut expected));
    let line = other.as_deref().map_or(line, CStr::as_ptr);
    let outcome = real!(system(line) as fn(*const c_char) -> c_int);
    // What the shell left running has said itself that it is there.
    shared(&Child::Over, &expected);
    outcome
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn popen(line: *const c_char, mode: *const c_char) -> *mut FILE {
    let (mut other, mut expected) = (None, Expected::default());
    quietly(|| other = line_by_go_between(line, &mut expected));
    let line = other.as_deref().map_or(line, CStr::as_ptr);
    let stream = real_pointer!(popen(line, mode) as fn(*const c_char, *const c_char) -> *mut FILE);
    // Its number is the C library's secret.
    let child = if stream.is_null() { Child::Over } else { Child::Unknown };
    shared(&child, &expected);
    stream
}

/// Where the loader enters this library when it is the program: the stack is as the kernel leaves
/// it for one.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_sockets_go_between() -> ! {
    core::arch::naked_asm!("mov rdi, rsp", "and rsp, -16", "call {go}", "ud2", go = sym go_between)
}

/// As above.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn beeline_sockets_go_between() -> ! {
    core::arch::naked_asm!("mov x0, sp", "bl {go}", "brk #0", go = sym go_between)
}

unsafe extern "C" fn go_between(stack: *const *const c_char) -> ! {
    // SAFETY: the number of words, then the words, a null, and the environment.
    let count = unsafe { stack.cast::<usize>().read() };
    // SAFETY: as above.
    let words = unsafe { stack.add(1) };
    // SAFETY: as above.
    let with = unsafe { words.add(count + 1) };
    // Without the loader's own: it gave us what it was given behind its name.
    if count > OURS {
        quietly(|| go(words, with));
    }
    kernel::exit(127)
}

/// Runs the program, as far as it can be run.
fn go(words: Words, with: Words) {
    let word = |index: usize| {
        // SAFETY: below the number of words, which was looked at.
        let place = unsafe { words.add(index) };
        // SAFETY: as above.
        let word = unsafe { place.read() };
        // SAFETY: a C string.
        unsafe { CStr::from_ptr(word) }
    };
    // The library's own name stands at 0; then what `beginning` put behind it.
    let [monitor, report, preloaded, path] = [1, 2, 3, 4].map(|index| word(index).to_bytes());
    control::set_name(&String::from_utf8_lossy(monitor));
    crate::start::begin_for_another(preloaded);
    let name = word(OURS - 1);
    // SAFETY: as above: the words of the program's own, up to the null.
    let own = unsafe { words.add(OURS) };
    let caller = Caller::new(report);
    caller.tell(run(name, path, own, with));
}

/// `exec`, or `execvp` along `path` (behind `=`). The error that `posix_spawn` would have had.
fn run(name: &CStr, path: &[u8], words: Words, with: Words) -> c_int {
    // SAFETY: a string, and strings up to a null each.
    let try_one = |file: &CStr| unsafe {
        exec::execve(file.as_ptr(), words, with);
        crate::errno()
    };
    let Some(path) = path.strip_prefix(b"=") else { return try_one(name) };
    if name.is_empty() {
        return libc::ENOENT;
    }
    let mut error = libc::ENOENT;
    let mut refused = false;
    for folder in path.split(|&byte| byte == b':') {
        let file =
            PathBuf::from(OsStr::from_bytes(folder)).join(OsStr::from_bytes(name.to_bytes()));
        let Some(file) = text(file.as_os_str().as_bytes()) else { continue };
        error = try_one(&file);
        match error {
            libc::EACCES => refused = true,
            libc::ENOENT | libc::ESTALE | libc::ENOTDIR | libc::ENODEV | libc::ETIMEDOUT => {}
            _ => return error,
        }
    }
    if refused { libc::EACCES } else { error }
}

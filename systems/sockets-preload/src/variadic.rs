//! Functions of any number of arguments: `execl`, `execle`, `execlp`, and `dprintf` with its kin. The C
//! library's own call its `execve` and `write` past the names we export.
//!
//! Each begins in assembly, which puts the arguments where the calling convention's registers left
//! them into memory, as a `va_list` describes it; the rest is a function over that memory. The
//! registers are those of x86-64's System V convention, where a `va_list` is passed by its address.

use std::ffi::{c_char, c_int, c_void};

use beeline_sockets::lane::find;

use crate::real::real;
use crate::{data, exec};

/// Registers that carry integers and addresses.
const REGISTERS: usize = 6;

/// Arguments that are integers or addresses, in their order.
struct Arguments {
    registers: *const usize,
    stack: *const usize,
    next: usize,
}

impl Arguments {
    /// # Safety
    ///
    /// The caller of the function passed at least one more.
    unsafe fn next(&mut self) -> usize {
        let at = self.next;
        self.next += 1;
        if at < REGISTERS {
            // SAFETY: six words were saved there.
            let place = unsafe { self.registers.add(at) };
            // SAFETY: as above.
            return unsafe { place.read() };
        }
        // SAFETY: the contract: the caller put it there.
        let place = unsafe { self.stack.add(at - REGISTERS) };
        // SAFETY: as above.
        unsafe { place.read() }
    }

    /// The program's words up to the null that ends them.
    ///
    /// # Safety
    ///
    /// The caller passed C strings and a null.
    unsafe fn words(&mut self) -> Vec<*const c_char> {
        let mut words = Vec::new();
        loop {
            // SAFETY: the contract: not past the null.
            let word = std::ptr::with_exposed_provenance::<c_char>(unsafe { self.next() });
            words.push(word);
            if word.is_null() {
                return words;
            }
        }
    }
}

/// Saves the registers, then calls `$then` with their place and that of the arguments behind them.
macro_rules! saves_words {
    ($name:ident, $then:ident) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() -> c_int {
            core::arch::naked_asm!(
                "sub rsp, 56",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "mov rdi, rsp",
                "lea rsi, [rsp + 64]",
                "call {then}",
                "add rsp, 56",
                "ret",
                then = sym $then,
            )
        }
    };
}

saves_words!(execl, execl_saved);
saves_words!(execlp, execlp_saved);
saves_words!(execle, execle_saved);

/// What the `execl` family was called with, read so far: the rest, the program's path or name, and
/// its words up to the null.
///
/// # Safety
///
/// The places are those of a call whose arguments are a string and strings up to a null.
unsafe fn program_and_words(
    registers: *const usize,
    stack: *const usize,
) -> (Arguments, *const c_char, Vec<*const c_char>) {
    let mut rest = Arguments { registers, stack, next: 0 };
    // SAFETY: the contract: a path or name comes first.
    let program = std::ptr::with_exposed_provenance(unsafe { rest.next() });
    // SAFETY: the contract: then the words.
    let words = unsafe { rest.words() };
    (rest, program, words)
}

unsafe extern "C" fn execl_saved(registers: *const usize, stack: *const usize) -> c_int {
    // SAFETY: a call of `execl`.
    let (_, path, words) = unsafe { program_and_words(registers, stack) };
    // SAFETY: the program's path, and its words up to a null.
    unsafe { exec::execv(path, words.as_ptr()) }
}

unsafe extern "C" fn execlp_saved(registers: *const usize, stack: *const usize) -> c_int {
    // SAFETY: a call of `execlp`.
    let (_, name, words) = unsafe { program_and_words(registers, stack) };
    // SAFETY: the program's name, and its words up to a null.
    unsafe { exec::execvp(name, words.as_ptr()) }
}

unsafe extern "C" fn execle_saved(registers: *const usize, stack: *const usize) -> c_int {
    // SAFETY: a call of `execle`.
    let (mut rest, path, words) = unsafe { program_and_words(registers, stack) };
    // SAFETY: behind the null, the environment.
    let with = std::ptr::with_exposed_provenance(unsafe { rest.next() });
    // SAFETY: the program's path, its words up to a null, and its environment.
    unsafe { exec::execve(path, words.as_ptr(), with) }
}

/// Makes a `va_list` behind `$named` bytes of named arguments, and calls `$then` with the first
/// arguments and the list's address in the register `$list`.
macro_rules! saves_list {
    ($name:ident, $named:literal, $list:literal, $then:ident) => {
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() -> c_int {
            core::arch::naked_asm!(
                "sub rsp, 216",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "movaps [rsp + 48], xmm0",
                "movaps [rsp + 64], xmm1",
                "movaps [rsp + 80], xmm2",
                "movaps [rsp + 96], xmm3",
                "movaps [rsp + 112], xmm4",
                "movaps [rsp + 128], xmm5",
                "movaps [rsp + 144], xmm6",
                "movaps [rsp + 160], xmm7",
                concat!("mov dword ptr [rsp + 176], ", $named),
                "mov dword ptr [rsp + 180], 48",
                "lea rax, [rsp + 224]",
                "mov [rsp + 184], rax",
                "mov [rsp + 192], rsp",
                concat!("lea ", $list, ", [rsp + 176]"),
                "call {then}",
                "add rsp, 216",
                "ret",
                then = sym $then,
            )
        }
    };
}

saves_list!(dprintf, "16", "rdx", vdprintf);
saves_list!(__dprintf_chk, "24", "rcx", __vdprintf_chk);

unsafe extern "C" {
    fn vasprintf(text: *mut *mut c_char, format: *const c_char, list: *mut c_void) -> c_int;
    fn __vasprintf_chk(
        text: *mut *mut c_char,
        flag: c_int,
        format: *const c_char,
        list: *mut c_void,
    ) -> c_int;
}

/// Writes all of `text`, which is ours to free, as `dprintf` would.
///
/// # Safety
///
/// `text` has `length` bytes and came from `malloc`, if `length` is not negative.
unsafe fn write_all(fd: c_int, text: *mut c_char, length: c_int) -> c_int {
    let Ok(all) = usize::try_from(length) else { return -1 };
    let (mut written, mut outcome) = (0, length);
    while written < all {
        // SAFETY: `written` is below the length.
        let rest = unsafe { text.add(written) };
        // SAFETY: the rest of the text.
        let count = unsafe { data::write(fd, rest.cast(), all - written) };
        match usize::try_from(count) {
            Ok(count) => written += count,
            Err(_) => {
                outcome = -1;
                break;
            }
        }
    }
    let error = crate::errno();
    // SAFETY: the contract.
    unsafe { libc::free(text.cast()) };
    crate::set_errno(error);
    outcome
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vdprintf(fd: c_int, format: *const c_char, list: *mut c_void) -> c_int {
    if find(fd).is_none() {
        return real!(vdprintf(fd, format, list) as fn(c_int, *const c_char, *mut c_void) -> c_int);
    }
    let mut text = std::ptr::null_mut();
    // SAFETY: the program's format and arguments.
    let length = unsafe { vasprintf(&raw mut text, format, list) };
    // SAFETY: just made.
    unsafe { write_all(fd, text, length) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn __vdprintf_chk(
    fd: c_int,
    flag: c_int,
    format: *const c_char,
    list: *mut c_void,
) -> c_int {
    if find(fd).is_none() {
        return real!(__vdprintf_chk(fd, flag, format, list)
            as fn(c_int, c_int, *const c_char, *mut c_void) -> c_int);
    }
    let mut text = std::ptr::null_mut();
    // SAFETY: the program's format and arguments.
    let length = unsafe { __vasprintf_chk(&raw mut text, flag, format, list) };
    // SAFETY: just made.
    unsafe { write_all(fd, text, length) }
}

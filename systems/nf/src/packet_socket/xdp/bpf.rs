//! The program that hands an interface's packets to a socket: five instructions, and the map that
//! they look into. They are loaded through `bpf(2)`; no compiler, library or file is needed.
//!
//! Invariant: the program is attached through a link, so it goes with this process's descriptors, also
//! where the process is ended.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd};

const MAP_CREATE: i32 = 0;
const MAP_UPDATE: i32 = 2;
const PROG_LOAD: i32 = 5;
const LINK_CREATE: i32 = 28;

/// A map from a queue's number to its socket.
const MAP_OF_SOCKETS: u32 = 17;
/// A program that sees packets before the kernel's network stack.
const PROGRAM_XDP: u32 = 6;
/// Attached to an interface.
const ATTACH_XDP: u32 = 37;

/// What a packet without a socket meets: the kernel's network stack.
const PASS: i32 = 2;
/// The helper that hands a packet to a map's entry.
const REDIRECT_MAP: i32 = 51;
/// Where the context keeps the number of the packet's queue.
const QUEUE: i16 = 16;

/// The driver runs the program.
const BY_DRIVER: u32 = 1 << 2;
/// The network stack's receive path runs it, for drivers that do not.
const BY_STACK: u32 = 1 << 1;

#[repr(C)]
struct MapCreate {
    kind: u32,
    key_bytes: u32,
    value_bytes: u32,
    entries: u32,
    flags: u32,
}

#[repr(C)]
struct MapUpdate {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct ProgLoad {
    kind: u32,
    count: u32,
    instructions: u64,
    licence: u64,
    log_level: u32,
    log_bytes: u32,
    log: u64,
}

#[repr(C)]
struct LinkCreate {
    program: u32,
    interface: u32,
    kind: u32,
    flags: u32,
}

/// One instruction.
#[repr(C)]
#[derive(Clone, Copy)]
struct Instruction {
    code: u8,
    /// The written register in the lower half, the read one in the upper.
    registers: u8,
    offset: i16,
    number: i32,
}

const fn instruction(code: u8, registers: u8, offset: i16, number: i32) -> Instruction {
    Instruction { code, registers, offset, number }
}

/// Makes a call that gives a descriptor.
fn call<A>(command: i32, attributes: &A) -> io::Result<OwnedFd> {
    let length = u32::try_from(size_of::<A>()).unwrap_or(0);
    let pointer = std::ptr::from_ref(attributes);
    // SAFETY: the pointer is to `length` bytes of attributes in the kernel's layout; what they point
    // to lives past the call, by the callers below.
    let made = unsafe { libc::syscall(libc::SYS_bpf, command, pointer, length) };
    match i32::try_from(made) {
        // SAFETY: the kernel just made this descriptor, and nothing else owns it.
        Ok(made) if made >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(made) }),
        _ => Err(io::Error::last_os_error()),
    }
}

fn number(fd: &impl AsRawFd) -> u32 {
    u32::try_from(fd.as_raw_fd()).unwrap_or(u32::MAX)
}

/// A program at an interface.
#[derive(Debug)]
pub(super) struct Attached {
    map: OwnedFd,
    /// The link keeps the program, and the program the map.
    _link: OwnedFd,
    /// The driver runs it.
    pub by_driver: bool,
}

/// Attaches the program: packets of the queues below `queues` go to the sockets that
/// [`Attached::lead`] names, others to the kernel.
///
/// Errors: no right to load programs; the interface has a program already (`EBUSY`) or takes none.
pub(super) fn attach(interface: u32, queues: u32) -> io::Result<Attached> {
    let map = call(
        MAP_CREATE,
        &MapCreate {
            kind: MAP_OF_SOCKETS,
            key_bytes: 4,
            value_bytes: 4,
            entries: queues,
            flags: 0,
        },
    )?;
    let of_map = i32::try_from(number(&map)).unwrap_or(-1);
    let program = [
        // r2 = the queue's number
        instruction(0x61, 0x12, QUEUE, 0),
        // r1 = the map, of 64 bits: two places
        instruction(0x18, 0x11, 0, of_map),
        instruction(0, 0, 0, 0),
        // r3 = what becomes of a packet whose queue has no socket
        instruction(0xb7, 0x03, 0, PASS),
        instruction(0x85, 0, 0, REDIRECT_MAP),
        instruction(0x95, 0, 0, 0),
    ];
    let licence = c"MIT OR Apache-2.0";
    let program = call(
        PROG_LOAD,
        &ProgLoad {
            kind: PROGRAM_XDP,
            count: u32::try_from(program.len()).unwrap_or(0),
            instructions: program.as_ptr() as u64,
            licence: licence.as_ptr() as u64,
            log_level: 0,
            log_bytes: 0,
            log: 0,
        },
    )?;
    let link = |flags| {
        let program = number(&program);
        call(LINK_CREATE, &LinkCreate { program, interface, kind: ATTACH_XDP, flags })
    };
    match link(BY_DRIVER) {
        Ok(link) => Ok(Attached { map, _link: link, by_driver: true }),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => Err(error),
        // A driver without programs, or one that needs shorter packets for them.
        Err(_) => Ok(Attached { map, _link: link(BY_STACK)?, by_driver: false }),
    }
}

impl Attached {
    /// Leads a queue's packets to a socket.
    ///
    /// Errors: the kernel's.
    pub fn lead(&self, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        let value = number(&socket);
        let update = MapUpdate {
            map: number(&self.map),
            padding: 0,
            key: (&raw const queue) as u64,
            value: (&raw const value) as u64,
            flags: 0,
        };
        let length = u32::try_from(size_of::<MapUpdate>()).unwrap_or(0);
        let pointer = &raw const update;
        // SAFETY: the pointer is to attributes in the kernel's layout; key and value are integers of
        // four bytes, as the map was made for, and live past the call.
        let done = unsafe { libc::syscall(libc::SYS_bpf, MAP_UPDATE, pointer, length) };
        if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

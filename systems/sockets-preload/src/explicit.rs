//! The explicit interface of the packet lane (`nts_*`): blocks in the program's own hands, priorities, counts.
//!
//! Sockets are made, connected and accepted by the C library's calls, which this library answers; here is what these
//! calls cannot say. `include/nts.h` is the contract. A descriptor that is not of the packet lane gets `EOPNOTSUPP`.

use std::ffi::{c_int, c_longlong, c_void};

use beeline_sockets::kernel::{Errno, Outcome};
use beeline_sockets::packets::Connection;
use beeline_sockets::packets::blocks::Block;
use beeline_sockets::{packets, table};
use libc::size_t;

use crate::{guarded, guarded_int};

/// `nts_block` of the header.
#[repr(C)]
#[derive(Debug)]
pub struct NtsBlock {
    bytes: *mut c_void,
    length: size_t,
    number: u32,
}

fn connection(fd: c_int) -> Result<&'static Connection, Errno> {
    table::packets(fd).ok_or(Errno(libc::EOPNOTSUPP))
}

/// Writes a block to the program's place: 1, or 0 where there is none.
///
/// # Safety
///
/// `place` is null or the program's.
unsafe fn tell(block: Option<Block>, place: *mut NtsBlock) -> Outcome {
    if place.is_null() {
        return Err(Errno(libc::EFAULT));
    }
    let Some(Block { bytes, length, number }) = block else { return Ok(0) };
    let written = NtsBlock { bytes: bytes.as_ptr().cast(), length, number };
    // SAFETY: the caller's contract.
    unsafe { place.write(written) };
    Ok(1)
}

/// The number of the program's block.
///
/// # Safety
///
/// `place` is null or the program's.
unsafe fn number(place: *const NtsBlock) -> Result<u32, Errno> {
    // SAFETY: the caller's contract.
    unsafe { place.as_ref() }.map(|block| block.number).ok_or(Errno(libc::EFAULT))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_room(fd: c_int, room: *mut NtsBlock) -> c_int {
    guarded_int(|| {
        if room.is_null() {
            return Err(Errno(libc::EFAULT));
        }
        let block = connection(fd)?.room_block(fd)?;
        // SAFETY: the program's place.
        unsafe { tell(block, room) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_send_room(fd: c_int, room: *const NtsBlock, length: size_t) -> c_int {
    guarded_int(|| {
        // SAFETY: the program's place.
        let number = unsafe { number(room) }?;
        connection(fd)?.send_block(fd, number, length).map(|()| 0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_extent(fd: c_int, bytes: size_t) -> c_int {
    guarded_int(|| connection(fd)?.ask_extent(fd, bytes).map(|()| 0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_extent_room(fd: c_int, length: size_t, room: *mut NtsBlock) -> c_int {
    guarded_int(|| {
        if room.is_null() {
            return Err(Errno(libc::EFAULT));
        }
        let block = connection(fd)?.extent_block(length)?;
        // SAFETY: the program's place.
        unsafe { tell(block, room) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_extent_send(fd: c_int, length: size_t) -> c_int {
    guarded_int(|| connection(fd)?.send_extent(fd, length).map(|()| 0))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_arrived(fd: c_int, packet: *mut NtsBlock) -> c_int {
    guarded_int(|| {
        let block = connection(fd)?.arrived_block(fd)?;
        // SAFETY: the program's place.
        unsafe { tell(block, packet) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_wait(fd: c_int, packet: *mut NtsBlock) -> c_int {
    guarded_int(|| {
        if packet.is_null() {
            return Err(Errno(libc::EFAULT));
        }
        let block = connection(fd)?.wait_block(fd)?;
        // SAFETY: the program's place.
        unsafe { tell(Some(block), packet) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_release(fd: c_int, packet: *const NtsBlock) -> c_int {
    guarded_int(|| {
        // SAFETY: the program's place.
        let number = unsafe { number(packet) }?;
        connection(fd)?.give_block_back(fd, number).map(|()| 0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_conn_set_prior(fd: c_int, priority: c_int) -> c_int {
    guarded_int(|| {
        let priority = u8::try_from(priority).ok().filter(|&priority| priority < 8);
        packets::options::set_priority(fd, priority.ok_or(Errno(libc::EINVAL))?);
        Ok(0)
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_is_packets(fd: c_int) -> c_int {
    guarded_int(|| Ok(usize::from(table::packets(fd).is_some())))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn nts_copied(fd: c_int) -> c_longlong {
    let count = guarded(|| {
        let copied = connection(fd)?.copied();
        Ok(usize::try_from(copied).unwrap_or(usize::MAX))
    });
    c_longlong::try_from(count).unwrap_or(c_longlong::MAX)
}

//! Another open file description of the object behind a descriptor.
//!
//! A descriptor that is duplicated or passed to a peer keeps its file description, and with it what
//! the kernel keeps there once: the access mode, and whether a failed write-back was reported.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

/// Opens the object behind `descriptor` anew for loads only.
///
/// Errors: the system's; `NotFound` without `/proc`.
pub fn read_only(descriptor: impl AsFd) -> std::io::Result<OwnedFd> {
    reopen(descriptor, OFlags::RDONLY)
}

/// Opens the object behind `descriptor` anew for loads and stores.
///
/// Errors: as [`read_only`]; `PermissionDenied` where this process may not write the object.
pub fn writable(descriptor: impl AsFd) -> std::io::Result<OwnedFd> {
    reopen(descriptor, OFlags::RDWR)
}

fn reopen(descriptor: impl AsFd, mode: OFlags) -> std::io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", descriptor.as_fd().as_raw_fd());
    rustix::fs::open(path, mode | OFlags::CLOEXEC, Mode::empty()).map_err(Into::into)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn a_reopened_file_has_a_position_of_its_own_and_may_have_no_name() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"kept").unwrap();
        let mut again = std::fs::File::from(writable(&file).unwrap());
        let mut text = String::new();
        again.read_to_string(&mut text).unwrap();
        assert_eq!(text, "kept");
        again.write_all(b" on").unwrap();
        let mut reader = std::fs::File::from(read_only(&file).unwrap());
        text.clear();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "kept on");
        assert!(reader.write_all(b"no").is_err());
    }
}

//! Starting the kernel's write-out of a file without waiting for it.

use std::os::fd::{AsFd, AsRawFd};

/// Starts writing every dirty page of `file` to its device. A later `fdatasync` waits for what is
/// already on its way, so that several files started together are written together. Says nothing
/// about success: only `fdatasync` does.
pub fn start_write(file: impl AsFd) {
    let descriptor = file.as_fd().as_raw_fd();
    // SAFETY: the descriptor is open for the call, and the call reaches no memory of ours.
    let _ = unsafe { libc::sync_file_range(descriptor, 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_started_file_keeps_its_contents() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"kept").unwrap();
        start_write(file.as_file());
        assert_eq!(std::fs::read(file.path()).unwrap(), b"kept");
    }
}

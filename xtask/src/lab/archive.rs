//! The initial ramdisk: an uncompressed "newc" cpio archive, which is what the kernel unpacks.

use std::path::Path;

/// A directory's mode bits.
const DIRECTORY: u32 = 0o040_755;
/// A regular file that may run.
const FILE: u32 = 0o100_755;

/// An archive under construction.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    /// Adds a directory; parents come first.
    pub fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY, &[]);
    }

    /// Adds a file that may run.
    pub fn file(&mut self, name: &str, content: &[u8]) {
        self.entry(name, FILE, content);
    }

    /// Writes the archive to `path`.
    pub fn finish(mut self, path: &Path) -> std::io::Result<()> {
        self.entry("TRAILER!!!", 0, &[]);
        std::fs::write(path, self.bytes)
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.inode += 1;
        let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
        assert!(size < u32::MAX, "a file in the initial ramdisk is below 4 GiB");
        let name_size = u32::try_from(name.len() + 1).unwrap_or(u32::MAX);
        // Magic, then thirteen numbers of eight hexadecimal digits.
        self.bytes.extend_from_slice(b"070701");
        let numbers = [self.inode, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        for number in numbers {
            self.bytes.extend_from_slice(format!("{number:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_contents_start_at_multiples_of_four() {
        let mut archive = Archive::default();
        archive.directory("bin");
        archive.file("bin/hello", b"12345");
        let bytes = &archive.bytes;
        assert_eq!(bytes.len() % 4, 0);
        let second = bytes.windows(6).rposition(|window| window == b"070701").unwrap_or(0);
        assert_eq!(second % 4, 0);
        // The name ends with a zero; the content follows at the next multiple of four.
        let content = (second + 110 + "bin/hello".len() + 1).next_multiple_of(4);
        assert_eq!(&bytes[content..content + 5], b"12345");
    }
}

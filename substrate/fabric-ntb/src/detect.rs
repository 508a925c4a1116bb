//! Which bridges, and devices that can stand for one, this host has.

use std::path::{Path, PathBuf};

/// What a found device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A bridge the kernel's ntb subsystem drives.
    Bridge,
    /// The shared-memory device of a virtual machine, usable as a fixed window.
    SharedMemory,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Which kind.
    pub kind: Kind,
    /// Its name on the bus.
    pub name: String,
    /// The file to map, where there is one.
    pub window: Option<PathBuf>,
    /// It is bound to vfio-pci, from which its interrupts are had.
    pub interrupts: bool,
}

/// QEMU's shared-memory device.
const IVSHMEM: (&str, &str) = ("0x1af4", "0x1110");

fn entries(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Looks below `sys` (`/sys` on a live system).
#[must_use]
pub fn devices(sys: &Path) -> Vec<Found> {
    let mut found: Vec<_> = entries(&sys.join("bus/ntb/devices"))
        .iter()
        .map(|path| Found { kind: Kind::Bridge, name: name(path), window: None, interrupts: false })
        .collect();
    for path in entries(&sys.join("bus/pci/devices")) {
        let read = |file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
        if (read("vendor").trim(), read("device").trim()) == IVSHMEM {
            let combining = path.join("resource2_wc");
            let window = if combining.exists() { combining } else { path.join("resource2") };
            found.push(Found {
                kind: Kind::SharedMemory,
                name: name(&path),
                window: window.exists().then_some(window),
                interrupts: std::fs::read_link(path.join("driver"))
                    .is_ok_and(|driver| driver.ends_with("vfio-pci")),
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shared_memory_device_and_a_bridge_are_found() {
        let sys = tempfile::tempdir().unwrap();
        let pci = sys.path().join("bus/pci/devices/0000:00:04.0");
        let other = sys.path().join("bus/pci/devices/0000:00:05.0");
        for (path, vendor, device) in
            [(&pci, "0x1af4\n", "0x1110\n"), (&other, "0x8086\n", "0x1\n")]
        {
            std::fs::create_dir_all(path).unwrap();
            std::fs::write(path.join("vendor"), vendor).unwrap();
            std::fs::write(path.join("device"), device).unwrap();
            std::fs::write(path.join("resource2"), "").unwrap();
        }
        std::fs::create_dir_all(sys.path().join("bus/ntb/devices/0000:80:03.0")).unwrap();
        let found = devices(sys.path());
        assert_eq!(
            found.iter().map(|found| (found.kind, found.name.as_str())).collect::<Vec<_>>(),
            [(Kind::Bridge, "0000:80:03.0"), (Kind::SharedMemory, "0000:00:04.0")]
        );
        assert_eq!(found[1].window, Some(pci.join("resource2")));
        assert!(!found[1].interrupts);
        std::os::unix::fs::symlink("../drivers/vfio-pci", pci.join("driver")).unwrap();
        assert!(devices(sys.path())[1].interrupts);
        assert_eq!(devices(Path::new("/nonexistent")), []);
    }
}

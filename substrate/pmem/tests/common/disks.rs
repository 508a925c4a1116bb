//! Disks of a test's own: one in memory that can be full, and one whose writes fail.

#![allow(dead_code)]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Says why a test did not run, past the test runner's capture.
fn skipped(reason: &str) {
    let _ = std::io::stderr().write_fmt(format_args!("skipped: {reason}\n"));
}

/// A tmpfs of its own, gone with the value; none (and a reason) without the right to mount.
pub struct Tmpfs(pub tempfile::TempDir);

impl Tmpfs {
    pub fn mount(options: &str) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "tmpfs"])
            .arg(directory.path())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success());
        if !mounted {
            skipped("mounting a tmpfs needs root");
        }
        mounted.then(|| Self(directory))
    }

    pub fn remount(&self, options: &str) -> bool {
        let options = format!("remount,{options}");
        let status = Command::new("mount").args(["-o", &options]).arg(self.0.path()).status();
        status.is_ok_and(|status| status.success())
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// An ext4 whose device has no room behind it once [`FailingDisk::fail`] was called: what is
/// written back then is lost, and the kernel says so once to each open file description.
pub struct FailingDisk {
    mounted: tempfile::TempDir,
    device: Tmpfs,
}

impl FailingDisk {
    /// None, and a reason, without the right or the programs.
    pub fn mount() -> Option<Self> {
        let device = Tmpfs::mount("size=24m")?;
        let image = device.0.path().join("image");
        std::fs::File::create(&image).unwrap().set_len(64 << 20).unwrap();
        let mounted = tempfile::tempdir().unwrap();
        let run = |program: &str, args: &[&str], last: &[&Path]| {
            let mut command = Command::new(program);
            command.args(args).args(last).stdout(Stdio::null()).stderr(Stdio::null());
            command.status().is_ok_and(|status| status.success())
        };
        let made = run(
            "mkfs.ext4",
            &["-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard"],
            &[&image],
        );
        if !(made && run("mount", &["-o", "loop"], &[&image, mounted.path()])) {
            skipped("a disk that fails needs mkfs.ext4 and a loop device");
            return None;
        }
        Some(Self { mounted, device })
    }

    pub fn path(&self) -> &Path {
        self.mounted.path()
    }

    /// From now on no block is written that was not written before.
    pub fn fail(&self) {
        let mut filler = std::fs::File::create(self.device.0.path().join("filler")).unwrap();
        while filler.write_all(&[1; 4096]).is_ok() {}
    }
}

impl Drop for FailingDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.mounted.path()).status();
    }
}

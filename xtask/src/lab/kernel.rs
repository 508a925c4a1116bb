//! The guests' kernel: Debian's package, downloaded through apt and unpacked below `target/`, never
//! installed. The generic flavour has soft-RoCE, NVDIMM and the rest as modules; the cloud flavour
//! does not.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::error::LabError;
use crate::root;

/// The package whose dependency names the current kernel.
const CURRENT: &str = "linux-image-amd64";
/// Modules no guest has a device for; three quarters of the package.
const UNUSED: &[&str] = &[
    "sound",
    "drivers/gpu",
    "drivers/media",
    "drivers/net/wireless",
    "drivers/net/ethernet",
    "drivers/staging",
    "drivers/scsi",
    "drivers/iio",
    "drivers/usb",
    "drivers/hid",
    "drivers/input",
    "net/bluetooth",
];

/// What `setup` left.
#[derive(Debug)]
pub struct Kernel {
    /// The uncompressed kernel: it starts five seconds sooner than the compressed one under TCG.
    pub image: PathBuf,
    /// The folder that stands for `/lib/modules`.
    pub modules: PathBuf,
    /// The kernel's release, the folder's only entry.
    pub release: String,
}

/// Where things are kept between runs.
fn home() -> PathBuf {
    root().join("target/lab")
}

impl Kernel {
    /// The kernel `setup` fetched.
    ///
    /// Another one, of the same shape, where `BEELINE_LAB_KERNEL` names its folder.
    pub fn find() -> Result<Self, LabError> {
        let folder = match std::env::var_os("BEELINE_LAB_KERNEL") {
            Some(folder) => root().join(folder),
            None => home().join("kernel"),
        };
        let missing = || LabError::Missing {
            what: "the guests' kernel".to_owned(),
            remedy: "run `cargo xtask lab setup`".to_owned(),
        };
        let modules = folder.join("modules");
        let image = folder.join("vmlinux");
        let mut releases = std::fs::read_dir(&modules).map_err(|_| missing())?;
        let release = releases.next().and_then(Result::ok).ok_or_else(missing)?;
        let release = release.file_name().to_string_lossy().into_owned();
        if image.is_file() { Ok(Self { image, modules, release }) } else { Err(missing()) }
    }

    /// Fetches the kernel unless the right version is there; returns name and version.
    pub fn fetch() -> Result<String, LabError> {
        let folder = home().join("kernel");
        let stamp = folder.join("package");
        let here = std::fs::read_to_string(&stamp).unwrap_or_default();
        let wanted = match newest() {
            Some(wanted) => wanted,
            // Without package lists, what is here will do.
            None if Self::find().is_ok() => return Ok(here),
            None => {
                return Err(LabError::Missing {
                    what: "a kernel package".to_owned(),
                    remedy: format!("apt on a Debian system knows {CURRENT}"),
                });
            }
        };
        if here == wanted && Self::find().is_ok() {
            return Ok(wanted);
        }
        let fresh = home().join(format!("kernel.{}", std::process::id()));
        let made = unpack(&fresh, &wanted);
        if made.is_ok() {
            let _ = std::fs::remove_dir_all(&folder);
            std::fs::rename(&fresh, &folder).map_err(LabError::host("keeping the kernel"))?;
        }
        let _ = std::fs::remove_dir_all(&fresh);
        made.map(|()| wanted)
    }

    /// The files of these modules and of those they rest on, in the order in which they load.
    pub fn closure(&self, names: &[&str]) -> Result<Vec<PathBuf>, LabError> {
        let folder = self.modules.join(&self.release);
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read_to_string(&path)
                .map_err(LabError::host(format!("reading {}", path.display())))
        };
        let order = load_order(&read("modules.dep")?, &read("modules.builtin")?, names)?;
        Ok(order.iter().map(|path| folder.join(path)).collect())
    }
}

/// Name and version of the newest kernel apt knows.
fn newest() -> Option<String> {
    let ask = |arguments: &[&str]| {
        let output =
            Command::new("apt-cache").args(arguments).stdin(Stdio::null()).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let depends = ask(&["depends", "--important", CURRENT])?;
    let name = depends.lines().find_map(|line| line.trim().strip_prefix("Depends: "))?.to_owned();
    let shown = ask(&["show", "--no-all-versions", &name])?;
    let version = shown.lines().find_map(|line| line.strip_prefix("Version: "))?.to_owned();
    Some(format!("{name}={version}"))
}

fn unpack(folder: &Path, package: &str) -> Result<(), LabError> {
    let unpacked = folder.join("unpacked");
    std::fs::create_dir_all(&unpacked).map_err(LabError::host("making room for the kernel"))?;
    command(folder, "apt-get", &["--quiet", "download", package])?;
    let problem = |problem: &str| LabError::Kernel { problem: problem.to_owned() };
    let downloaded = find(folder, |name| name.ends_with(".deb"))?;
    let downloaded = downloaded.ok_or_else(|| problem("apt-get downloaded nothing"))?;
    command(folder, "dpkg", &["--extract", &downloaded.to_string_lossy(), "unpacked"])?;
    let _ = std::fs::remove_file(&downloaded);

    let compressed = find(&unpacked.join("boot"), |name| name.starts_with("vmlinuz-"))?;
    let compressed = compressed.ok_or_else(|| problem("no vmlinuz in it"))?;
    let bytes = std::fs::read(&compressed).map_err(LabError::host("reading vmlinuz"))?;
    let payload = payload(&bytes).ok_or_else(|| problem("vmlinuz holds no xz payload"))?;
    let squeezed = folder.join("vmlinux.xz");
    std::fs::write(&squeezed, payload).map_err(LabError::host("writing the payload"))?;
    command(folder, "xz", &["--decompress", "vmlinux.xz"])?;

    let modules = folder.join("modules");
    std::fs::rename(unpacked.join("lib/modules"), &modules)
        .map_err(LabError::host("finding the modules"))?;
    let release = find(&modules, |_| true)?.ok_or_else(|| problem("no modules in it"))?;
    for unused in UNUSED {
        let _ = std::fs::remove_dir_all(release.join("kernel").join(unused));
    }
    // depmod insists on the name lib/modules.
    std::fs::create_dir_all(unpacked.join("lib")).map_err(LabError::host("running depmod"))?;
    std::os::unix::fs::symlink(&modules, unpacked.join("lib/modules"))
        .map_err(LabError::host("running depmod"))?;
    let name = release.file_name().unwrap_or_default().to_string_lossy().into_owned();
    command(folder, "depmod", &["--basedir", "unpacked", &name])?;
    let _ = std::fs::remove_dir_all(&unpacked);
    std::fs::write(folder.join("package"), package).map_err(LabError::host("noting the version"))
}

fn find(folder: &Path, wanted: impl Fn(&str) -> bool) -> Result<Option<PathBuf>, LabError> {
    let doing = || format!("listing {}", folder.display());
    let entries = std::fs::read_dir(folder).map_err(LabError::host(doing()))?;
    let found = entries.flatten().find(|entry| wanted(&entry.file_name().to_string_lossy()));
    Ok(found.map(|entry| entry.path()))
}

fn command(folder: &Path, program: &str, arguments: &[&str]) -> Result<(), LabError> {
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new(program)
        .args(arguments)
        .current_dir(folder)
        // depmod is in a folder that is not on every user's path.
        .env("PATH", format!("{path}:/usr/sbin:/sbin"))
        .stdin(Stdio::null())
        .output()
        .map_err(LabError::host(format!("running {program}")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(LabError::Kernel { problem: format!("{program} failed: {said}") })
}

/// The xz stream inside a bzImage. Offsets are those of the x86 boot protocol: `setup_sects` at
/// 0x1f1, `payload_offset` at 0x248, `payload_length` at 0x24c. The last four bytes of the payload
/// are the size of what it holds, and no part of the stream.
fn payload(image: &[u8]) -> Option<&[u8]> {
    const XZ: &[u8] = b"\xfd7zXZ\0";
    let number = |at: usize| {
        let bytes = image.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let sectors = match usize::from(*image.get(0x1f1)?) {
        0 => 4,
        sectors => sectors,
    };
    let start = (sectors + 1) * 512 + number(0x248)?;
    let end = start.checked_add(number(0x24c)?)?.checked_sub(4)?;
    image.get(start..end).filter(|stream| stream.starts_with(XZ))
}

/// Orders `names` and what they rest on; `dependencies` is modules.dep, each line a path, a colon
/// and what it rests on, the lowest last.
fn load_order(dependencies: &str, built_in: &str, names: &[&str]) -> Result<Vec<String>, LabError> {
    let name = |path: &str| {
        let file = path.rsplit('/').next().unwrap_or(path);
        file.split('.').next().unwrap_or(file).replace('-', "_")
    };
    let built_in: BTreeSet<String> = built_in.lines().map(name).collect();
    let lines: BTreeMap<String, (&str, Vec<&str>)> = dependencies
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(path, rest)| (name(path), (path, rest.split_whitespace().collect())))
        .collect();
    let mut order: Vec<String> = Vec::new();
    for wanted in names {
        if built_in.contains(*wanted) {
            continue;
        }
        let Some((path, below)) = lines.get(*wanted) else {
            return Err(LabError::Kernel { problem: format!("no module {wanted} in it") });
        };
        for path in below.iter().rev().chain([path]) {
            if !order.iter().any(|known| known == path) {
                order.push((*path).to_owned());
            }
        }
    }
    Ok(order)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_load_after_what_they_rest_on_and_once() -> Result<(), LabError> {
        let dependencies = "kernel/fs/9p/9p.ko: kernel/net/9p/9pnet.ko\n\
                            kernel/net/9p/9pnet.ko:\n\
                            kernel/net/9p/9pnet-virtio.ko: kernel/net/9p/9pnet.ko kernel/v/ring.ko\n\
                            kernel/v/ring.ko:\n";
        let built_in = "kernel/fs/ext4/ext4.ko\n";
        let order = load_order(dependencies, built_in, &["9pnet_virtio", "ext4", "9p"])?;
        let files: Vec<&str> = order.iter().filter_map(|path| path.rsplit('/').next()).collect();
        assert_eq!(files, ["ring.ko", "9pnet.ko", "9pnet-virtio.ko", "9p.ko"]);
        let unknown = load_order(dependencies, built_in, &["rdma_rxe"]);
        assert!(matches!(unknown, Err(LabError::Kernel { problem }) if problem.contains("rdma")));
        Ok(())
    }

    #[test]
    fn the_payload_is_found_where_the_boot_protocol_says() {
        let mut image = vec![0_u8; 4096];
        image[0x1f1] = 2;
        image[0x248..0x24c].copy_from_slice(&100_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&20_u32.to_le_bytes());
        assert!(payload(&image).is_none(), "no stream there");
        let start = 3 * 512 + 100;
        image[start..start + 6].copy_from_slice(b"\xfd7zXZ\0");
        assert_eq!(payload(&image).map(<[u8]>::len), Some(16));
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(payload(&image).is_none(), "a length past the end");
    }
}

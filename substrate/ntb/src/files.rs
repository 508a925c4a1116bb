//! The files that a window is in: a device's resource file, or a plain file of this host; and which process has which part.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use beeline_os::Mapping;
use beeline_os::mapping::Protection;

use crate::Side;
use crate::directory::{PAGE_BYTES, Portion};

/// PCI classes of what windows are in: other bridges (the kernel's ntb drivers bind to those),
/// memory (shared between virtual machines, or behind a switch).
const WINDOW_CLASSES: [&str; 2] = ["0x0680", "0x05"];

/// `SYSFS_MAGIC`, the kind of file system that devices' resource files are in.
const SYSFS_MAGIC: u64 = 0x6265_6572;

/// A part of a window in files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// What this side reads and the other one writes.
    pub inbound: PathBuf,
    /// What this side writes. `None`: the same file holds both directions, the first side's first.
    pub outbound: Option<PathBuf>,
    /// Which end this is.
    pub side: Side,
    /// Which part of it.
    pub portion: Portion,
}

/// Why a window cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CableError {
    /// The URL is none of a window.
    #[error("{url}: {reason}; a window is ntb:///FILE?side=0 or side=1")]
    Url {
        /// As given.
        url: String,
        /// What is wrong.
        reason: &'static str,
    },
    /// The system refused.
    #[error("{action} {}: {source}", path.display())]
    System {
        /// What was tried.
        action: &'static str,
        /// With what.
        path: PathBuf,
        /// The system's word, and what it usually means.
        source: io::Error,
    },
    /// The file is too short for a window.
    #[error(
        "{}: {bytes} bytes each way are no window for this; at least {least} are",
        path.display()
    )]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Bytes of each direction.
        bytes: usize,
        /// Bytes that would do.
        least: usize,
    },
    /// The part has too few doorbells.
    #[error(
        "part {portion} of a window has {has} doorbells, and {needed} are needed: a larger part"
    )]
    Bells {
        /// Which part.
        portion: Portion,
        /// What it has.
        has: usize,
        /// What is needed.
        needed: usize,
    },
}

/// What went wrong with the file at `path`, and what that usually means.
pub(crate) fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> CableError {
    let path = path.to_owned();
    move |source| {
        let kind = source.kind();
        let meaning = match kind {
            ErrorKind::NotFound if path.starts_with("/sys") => {
                "; there is no such device, or it has no such BAR (`beeline doctor` lists windows)"
            }
            ErrorKind::PermissionDenied => "; mapping a window needs the rights of its owner",
            ErrorKind::InvalidInput if path.starts_with("/sys") => {
                "; this BAR cannot be mapped: it holds ports, or less than a page"
            }
            ErrorKind::AddrInUse => {
                "; another program of this host has this end, or a part of it that overlaps: take the other \
                 side, or another part, or end it"
            }
            _ => "",
        };
        let source = io::Error::new(kind, format!("{source}{meaning}"));
        CableError::System { action, path: path.clone(), source }
    }
}

/// Memory of one file.
pub(crate) struct Mapped {
    pub(crate) mapping: Arc<Mapping>,
    /// It is a device's, not a plain file of this host.
    pub(crate) is_a_device: bool,
}

/// Maps the file; one that is not there, or empty, is made with `make` bytes, if that is told.
pub(crate) fn map(path: &Path, make: Option<usize>) -> Result<Mapped, CableError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(make.is_some()).truncate(false).mode(0o600);
    let file = options.open(path).map_err(failed("opening the window's file", path))?;
    let meta = file.metadata().map_err(failed("asking the window's length", path))?;
    if !meta.is_file() {
        let what = "a directory, or a device without length";
        let source = io::Error::new(ErrorKind::InvalidInput, what);
        return Err(failed("opening the window's file", path)(source));
    }
    let is_a_device = check_device(path)?;
    check_length_holds(&file, &meta, path)?;
    let mut length = usize::try_from(meta.len()).unwrap_or(usize::MAX);
    if length == 0
        && let Some(make) = make
    {
        length = make;
        // Both ends may make it at the same time: they make the same.
        file.set_len(length as u64).map_err(failed("making the window", path))?;
    }
    let mapping = Mapping::shared(file.into(), length, Protection::ReadWrite)
        .map_err(|error| failed("mapping the window", path)(error.into()))?;
    mapping.forget_descriptor();
    Ok(Mapped { mapping: Arc::new(mapping), is_a_device })
}

/// Refuses a plain file that others could cut short: an access beyond its end would end this
/// process (SIGBUS), and no look beforehand helps against that. So its owner alone may be able
/// to write it, or it is sealed. A BAR's resource file has the length of the BAR, whatever is done
/// to the file.
fn check_length_holds(file: &File, meta: &Metadata, path: &Path) -> Result<(), CableError> {
    let of_a_device =
        rustix::fs::fstatfs(file).is_ok_and(|found| u64::try_from(found.f_type) == Ok(SYSFS_MAGIC));
    let sealed = rustix::fs::fcntl_get_seals(file)
        .is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK));
    let own = rustix::process::geteuid().as_raw();
    let by_others = meta.mode() & 0o022 != 0 || ![0, own].contains(&meta.uid());
    if of_a_device || sealed || !by_others {
        return Ok(());
    }
    let source = io::Error::new(
        ErrorKind::PermissionDenied,
        "others may write this plain file, and any of them that cuts it short ends this process: make it \
         yours alone (chmod go-w)",
    );
    Err(failed("looking at the window's file", path)(source))
}

/// True for the resource file of a PCI device. Refuses one that is asleep, or that is nothing a window can be in: what
/// a store does to the registers of another device is not known.
fn check_device(path: &Path) -> Result<bool, CableError> {
    let refuse = |what: String| {
        let source = io::Error::new(ErrorKind::InvalidInput, what);
        Err(failed("looking at the window's device", path)(source))
    };
    let resource = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let Some(device) = resource.parent() else { return Ok(false) };
    let read = |file: &str| {
        std::fs::read_to_string(device.join(file)).ok().map(|text| text.trim().to_owned())
    };
    let Some(class) = read("class") else { return Ok(false) };
    if !WINDOW_CLASSES.iter().any(|known| class.starts_with(known)) {
        return refuse(format!(
            "a device of PCI class {class} is neither a bridge nor memory; it is left alone"
        ));
    }
    if read("enable").is_some_and(|enabled| enabled == "0") {
        let file = device.join("enable");
        return refuse(format!("the device is not enabled: write 1 to {}", file.display()));
    }
    Ok(true)
}

/// A PCI device's resource file.
pub(crate) fn is_of_a_device(path: &Path) -> bool {
    let resource = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    resource.parent().is_some_and(|device| device.join("class").exists())
}

/// The file beside `path` through which stores are combined, where there is one.
#[must_use]
pub fn combining(path: &Path) -> Option<PathBuf> {
    let resource = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let name = format!("{}_wc", resource.file_name()?.to_string_lossy());
    let file = resource.with_file_name(name);
    (resource.with_file_name("class").exists() && file.exists()).then_some(file)
}

/// The file that stands for what `path` maps: a BAR is the same with and without write combining.
fn canonical(path: &Path) -> PathBuf {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let plain = path.to_str().and_then(|path| path.strip_suffix("_wc")).map(PathBuf::from);
    plain.filter(|plain| plain.exists()).unwrap_or(path)
}

/// A range of a file that no other program of this host has, for as long as the value lives: a lock of the open
/// file, which the kernel takes back with the process. A device's file is another one in the sysfs of another network
/// namespace, and a program there is not seen.
#[derive(Debug)]
pub(crate) struct Claim(#[expect(dead_code, reason = "held")] File);

impl Claim {
    /// Errors: [`CableError::System`]; `AddrInUse` where a program has a range that overlaps.
    pub(crate) fn take(path: &Path, offset: usize, length: usize) -> Result<Self, CableError> {
        let action = "claiming this end of the window";
        let file = OpenOptions::new().read(true).write(true).open(canonical(path));
        let file = file.map_err(failed(action, path))?;
        let narrow = |number: usize| libc::off_t::try_from(number).unwrap_or(libc::off_t::MAX);
        let range = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: narrow(offset),
            l_len: narrow(length),
            l_pid: 0,
        };
        // SAFETY: the descriptor is open, and the call reads one structure, valid for it.
        let outcome = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
        if outcome == 0 {
            return Ok(Self(file));
        }
        let error = io::Error::last_os_error();
        let taken = matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES));
        let error = if taken { io::Error::new(ErrorKind::AddrInUse, error) } else { error };
        Err(failed(action, path)(error))
    }
}

/// Bytes of each direction, as the lengths of the files have it.
pub(crate) fn bytes_each_way(inbound: &Mapping, outbound: Option<&Mapping>) -> usize {
    let shortest = match outbound {
        None => inbound.length_bytes() / 2,
        Some(outbound) => inbound.length_bytes().min(outbound.length_bytes()),
    };
    shortest / PAGE_BYTES * PAGE_BYTES
}

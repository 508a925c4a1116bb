//! The emulated window between processes of one host, also across network namespaces: one file with
//! both directions, and two named pipes beside it for each doorbell.
//!
//! ```text
//! FILE            first half: read by side 0, second half: read by side 1
//! FILE.bell-0-3   what side 0 hears when side 1 rings bit 3
//! ```
//!
//! A URL names the file and the end: `ntb:///run/window?side=0`, with `size=` for the bytes of each
//! direction when the file is to be made, and `disorder=SEED` to put the [shim](crate::shim) before
//! every write.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use beeline_os::Mapping;
use beeline_os::control_socket::ControlListener;
use beeline_os::mapping::Protection;

use crate::Side;
use crate::shim::Combining;
use crate::window::{Bells, Inbound, Mapped, Outbound, Window, Wire};

/// Doorbell bits of an emulated window.
pub const BELLS: usize = 9;
/// Write-combining buffers of a thread behind `disorder=`.
const BUFFERS: usize = 10;
/// Bytes of each direction when a window is made and none are told.
pub const DEFAULT_BYTES: usize = 32 << 20;
/// Least bytes of each direction.
const LEAST_BYTES: usize = 64 << 10;

/// Which window, and which end of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowUrl {
    /// The file that both ends map.
    pub file: PathBuf,
    /// This end.
    pub side: Side,
    /// Bytes of each direction if the file is to be made.
    pub bytes: usize,
    /// Seed of the shim, if there is to be one.
    pub disorder: Option<u64>,
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
        /// The system's word.
        source: io::Error,
    },
    /// The file is too short for a window.
    #[error("{}: {bytes} bytes each way are no window; at least {LEAST_BYTES} are", path.display())]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Bytes of each direction.
        bytes: usize,
    },
}

impl FromStr for WindowUrl {
    type Err = CableError;

    fn from_str(url: &str) -> Result<Self, CableError> {
        let bad = |reason| CableError::Url { url: url.to_owned(), reason };
        let rest =
            url.strip_prefix("ntb://").ok_or_else(|| bad("it does not begin with ntb://"))?;
        let (file, query) = rest.split_once('?').unwrap_or((rest, ""));
        if !file.starts_with('/') {
            return Err(bad("the file is not an absolute path"));
        }
        let (mut side, mut bytes, mut disorder) = (None, DEFAULT_BYTES, None);
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            match pair.split_once('=') {
                Some(("side", "0")) => side = Some(Side::First),
                Some(("side", "1")) => side = Some(Side::Second),
                Some(("size", number)) => {
                    bytes = number.parse().map_err(|_| bad("size is no number of bytes"))?;
                }
                Some(("disorder", number)) => {
                    disorder = Some(number.parse().map_err(|_| bad("disorder is no seed"))?);
                }
                _ => return Err(bad("it takes side, size and disorder")),
            }
        }
        let side = side.ok_or_else(|| bad("which side is this end?"))?;
        Ok(Self { file: file.into(), side, bytes: bytes.next_multiple_of(4096), disorder })
    }
}

/// An emulated window, plugged in at this end.
#[derive(Debug)]
pub struct Cable {
    /// This end of it.
    pub window: Window,
    /// One process has each end, for as long as this lives.
    _claim: ControlListener,
}

fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> CableError {
    let path = path.to_owned();
    move |source| CableError::System { action, path: path.clone(), source }
}

/// The file's memory. A file that another user may write could be cut short under this process, which
/// would end it, so such a one is refused.
fn map(url: &WindowUrl) -> Result<Mapping, CableError> {
    let path = &url.file;
    let open = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path);
    let file = open.map_err(failed("opening the window", path))?;
    let about = file.metadata().map_err(failed("looking at the window", path))?;
    let own = rustix::process::geteuid().as_raw();
    if about.is_file() && (about.mode() & 0o022 != 0 || ![0, own].contains(&about.uid())) {
        let source =
            io::Error::new(io::ErrorKind::PermissionDenied, "other users may cut it short");
        return Err(failed("looking at the window", path)(source));
    }
    let mut length = usize::try_from(about.len()).unwrap_or(usize::MAX);
    if length == 0 {
        length = 2 * url.bytes;
        // Both ends may make it at the same time: they make the same.
        file.set_len(length as u64).map_err(failed("making the window", path))?;
    }
    if length / 2 < LEAST_BYTES || !(length / 2).is_multiple_of(4096) {
        return Err(CableError::TooSmall { path: path.clone(), bytes: length / 2 });
    }
    let mapping = Mapping::shared(file.into(), length, Protection::ReadWrite)
        .map_err(|error| failed("mapping the window", path)(error.into()))?;
    mapping.forget_descriptor();
    Ok(mapping)
}

impl Cable {
    /// Plugs this end in. The other end need not be there.
    ///
    /// Errors: [`CableError`]; `AddrInUse` where a process of this network namespace has this end.
    pub fn plug(url: &WindowUrl) -> Result<Self, CableError> {
        let mapping = Arc::new(map(url)?);
        let half = mapping.length_bytes() / 2;
        let about =
            std::fs::metadata(&url.file).map_err(failed("looking at the window", &url.file))?;
        let name = format!("beeline-window-{}-{}-{}", about.dev(), about.ino(), url.side.index());
        let claim = ControlListener::bind(name.as_bytes())
            .map_err(failed("claiming this end of the window", &url.file))?;
        let bells = Pipes::open(url)?;
        let inbound = Inbound::new(Arc::clone(&mapping), url.side.index() * half, half);
        let mut wire: Arc<dyn Wire> =
            Arc::new(Mapped::new(mapping, url.side.other().index() * half, half));
        if let Some(seed) = url.disorder {
            wire = Arc::new(Combining::new(wire, BUFFERS, seed));
        }
        let window = Window { inbound, outbound: Outbound::new(wire), bells: Arc::new(bells) };
        Ok(Self { window, _claim: claim })
    }
}

/// A pipe for each bit and end. Both ends hold each pipe open for both, so that a ring is never
/// lost and never a signal, whichever end is there.
#[derive(Debug)]
struct Pipes {
    own: Vec<OwnedFd>,
    other: Vec<OwnedFd>,
}

fn pipe(url: &WindowUrl, side: Side, bit: usize) -> Result<OwnedFd, CableError> {
    let mut path = url.file.clone().into_os_string();
    path.push(format!(".bell-{}-{bit}", side.index()));
    let path = PathBuf::from(path);
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    let made = rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0);
    if let Err(error) = made
        && error != rustix::io::Errno::EXIST
    {
        return Err(failed("making the doorbell", &path)(error.into()));
    }
    let flags = i32::try_from(rustix::fs::OFlags::NONBLOCK.bits()).unwrap_or(0);
    let open = OpenOptions::new().read(true).write(true).custom_flags(flags).open(&path);
    let file: File = open.map_err(failed("opening the doorbell", &path))?;
    let about = file.metadata().map_err(failed("looking at the doorbell", &path))?;
    if !about.file_type().is_fifo() {
        let source = io::Error::new(io::ErrorKind::InvalidInput, "it is no named pipe");
        return Err(failed("looking at the doorbell", &path)(source));
    }
    Ok(file.into())
}

impl Pipes {
    fn open(url: &WindowUrl) -> Result<Self, CableError> {
        let all = |side| (0..BELLS).map(|bit| pipe(url, side, bit)).collect::<Result<Vec<_>, _>>();
        Ok(Self { own: all(url.side)?, other: all(url.side.other())? })
    }
}

impl Bells for Pipes {
    fn ring(&self, bit: usize) {
        if let Some(pipe) = self.other.get(bit) {
            // A full pipe is readable already.
            let _ = rustix::io::write(pipe, &[1]);
        }
    }

    fn descriptor(&self, bit: usize) -> Option<BorrowedFd<'_>> {
        Some(self.own.get(bit)?.as_fd())
    }

    fn clear(&self, bit: usize) {
        let mut rings = [0; 512];
        if let Some(pipe) = self.own.get(bit) {
            // An end that rings without pause costs a bounded number of calls.
            for _ in 0..8 {
                if !rustix::io::read(pipe, &mut rings).is_ok_and(|count| count == rings.len()) {
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_file_end_and_size_and_a_bad_one_is_refused_by_its_fault() {
        let url: WindowUrl = "ntb:///tmp/w?side=1&size=100000&disorder=7".parse().unwrap();
        assert_eq!((url.side, url.bytes, url.disorder), (Side::Second, 102_400, Some(7)));
        for (bad, part) in [
            ("shm:///tmp/w?side=1", "ntb://"),
            ("ntb://w?side=1", "absolute"),
            ("ntb:///w", "which side"),
            ("ntb:///w?side=2", "takes side"),
            ("ntb:///w?side=0&size=x", "size"),
        ] {
            let said = bad.parse::<WindowUrl>().unwrap_err().to_string();
            assert!(said.contains(part) && said.contains(bad), "{said}");
        }
    }

    #[test]
    fn what_one_end_posts_the_other_reads_and_a_ring_is_heard() {
        let folder = tempfile::tempdir().unwrap();
        let url = |side: usize| -> WindowUrl {
            let file = folder.path().join("window");
            format!("ntb://{}?side={side}&size=65536", file.display()).parse().unwrap()
        };
        let (one, other) = (Cable::plug(&url(0)).unwrap(), Cable::plug(&url(1)).unwrap());
        assert!(Cable::plug(&url(1)).is_err());
        let part = (one.window.part(4096, 4096), other.window.part(4096, 4096));
        part.0.outbound.post_word(8, 77);
        part.0.outbound.fence();
        assert_eq!(part.1.inbound.word(8).load(std::sync::atomic::Ordering::Acquire), 77);
        assert_eq!(other.window.inbound.word(4104).load(std::sync::atomic::Ordering::Acquire), 77);
        part.1.bells.ring(3);
        let bell = part.0.bells.descriptor(3).unwrap();
        let mut byte = [0; 4];
        assert_eq!(rustix::io::read(bell, &mut byte), Ok(1));
        assert!(rustix::io::read(part.0.bells.descriptor(2).unwrap(), &mut byte).is_err());
    }

    #[test]
    fn a_window_that_is_too_small_is_refused_by_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("small");
        std::fs::write(&file, vec![0; 8192]).unwrap();
        std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600))
            .unwrap();
        let url: WindowUrl = format!("ntb://{}?side=0", file.display()).parse().unwrap();
        let said = Cable::plug(&url).unwrap_err().to_string();
        assert!(said.contains("4096 bytes each way are no window"), "{said}");
    }
}

//! A window in files: the resource file of a device, or, for the emulation between processes of one host and across
//! network namespaces, a plain file with both directions and two named pipes beside it for each doorbell.
//!
//! ```text
//! FILE            first half: read by side 0, second half: read by side 1
//! FILE.bell-0-3   what side 0 hears when side 1 rings bit 3
//! ```
//!
//! A URL names the file and the end: `ntb:///run/window?side=0`, with `part=K/N` for a [part](crate::directory) of it,
//! `outbound=/FILE` where this end writes another file than it reads, `size=` for the bytes of each direction when the
//! file is to be made, and `disorder=SEED` to put the [shim](crate::shim) before every write.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use crate::Side;
use crate::bells::{Latched, Pipes, Silent};
use crate::directory::{Directory, Interrupted, Kind, PAGE_BYTES, Portion};
use crate::files::{self, CableError, Claim, Files, bytes_each_way};
use crate::interrupts::Interrupts;
use crate::shim::Combining;
use crate::window::{Bells, Inbound, Mapped, Outbound, Window, Wire};

/// Write-combining buffers of a thread behind `disorder=`.
const BUFFERS: usize = 10;
/// Bytes of each direction when a window is made and none are told.
pub const DEFAULT_BYTES: usize = 32 << 20;
/// Least bytes of each direction for sockets.
const LEAST_BYTES: usize = 64 << 10;
/// Doorbells for sockets: the link's and one for each of eight partitions.
const SOCKETS_BELLS: usize = 9;

/// Which window, and which end of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowUrl {
    /// The file that both ends map, or that this end reads.
    pub file: PathBuf,
    /// The file that this end writes, where that is another one.
    pub outbound: Option<PathBuf>,
    /// This end.
    pub side: Side,
    /// Which part of the window.
    pub portion: Portion,
    /// Bytes of each direction if the file is to be made.
    pub bytes: usize,
    /// Seed of the shim, if there is to be one.
    pub disorder: Option<u64>,
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
        let (mut outbound, mut portion) = (None, Portion::WHOLE);
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
                Some(("part", text)) => portion = text.parse().map_err(bad)?,
                Some(("outbound", path)) if path.starts_with('/') => outbound = Some(path.into()),
                _ => return Err(bad("it takes side, part, outbound=/FILE, size and disorder")),
            }
        }
        let side = side.ok_or_else(|| bad("which side is this end?"))?;
        let bytes = bytes.next_multiple_of(4096);
        Ok(Self { file: file.into(), outbound, side, portion, bytes, disorder })
    }
}

/// What the user of a part wants of it.
#[derive(Clone, Copy, Debug)]
pub struct Wants {
    /// What it is used for.
    pub kind: Kind,
    /// Doorbells.
    pub bells: usize,
    /// Named pipes stand for doorbells where there is no device: else sleepers look by the clock.
    pub pipes: bool,
    /// [Latches](crate::bells) before the doorbells.
    pub latched: bool,
    /// Least bytes of each direction.
    pub least_bytes: usize,
}

/// A part of a window, plugged in at this end.
#[derive(Debug)]
pub struct Cable {
    /// This end of it.
    pub window: Window,
    /// What the two ends say of their parts.
    pub directory: Directory,
    /// A resource file of a device: nothing can be made beside it.
    pub is_a_device: bool,
    /// One process has each part at each end, for as long as this lives.
    _claim: Claim,
}

/// This end's memory of one direction and its address in the file.
struct Halves {
    inbound: Inbound,
    outbound: (Inbound, Mapped),
    /// Where this end's inbound direction begins in its file.
    at: usize,
    bytes: usize,
    is_a_device: bool,
}

fn halves(files: &Files, make: Option<usize>) -> Result<Halves, CableError> {
    let one = files::map(&files.inbound, make.map(|each| 2 * each))?;
    let other = files.outbound.as_deref().map(|path| files::map(path, None)).transpose()?;
    let far = other.as_ref().map(|other| &other.mapping);
    let bytes = bytes_each_way(&one.mapping, far.map(AsRef::as_ref));
    let (at, far, far_at) = match far {
        None => (files.side.index() * bytes, &one.mapping, files.side.other().index() * bytes),
        Some(far) => (0, far, 0),
    };
    let far_page = Inbound::new(Arc::clone(far), far_at, bytes.min(PAGE_BYTES));
    Ok(Halves {
        inbound: Inbound::new(Arc::clone(&one.mapping), at, bytes),
        outbound: (far_page, Mapped::new(Arc::clone(far), far_at, bytes)),
        at,
        bytes,
        is_a_device: one.is_a_device,
    })
}

fn enough(files: &Files, bytes: usize, least: usize) -> Result<(usize, usize), CableError> {
    let (at, length) = files.portion.range(bytes);
    if length == 0 || length + PAGE_BYTES < least {
        let path = files.inbound.clone();
        return Err(CableError::TooSmall { path, bytes: (length + PAGE_BYTES).min(bytes), least });
    }
    Ok((at, length))
}

/// Doorbells of a part: the device's interrupts, pipes, or none.
fn bells(
    files: &Files,
    wants: Wants,
    halves: &Halves,
    page: &Inbound,
) -> Result<(Arc<dyn Bells>, Option<Interrupted>), CableError> {
    let all = files.portion.bells();
    if all.len() < wants.bells {
        let (portion, has, needed) = (files.portion, all.len(), wants.bells);
        return Err(CableError::Bells { portion, has, needed });
    }
    let bits = all.start..all.start + wants.bells;
    let mut by = None;
    let found: Arc<dyn Bells> = if wants.pipes && !halves.is_a_device {
        Arc::new(Pipes::open(&files.inbound, files.side, bits.clone())?)
    } else {
        match interrupts(files, wants, page) {
            Some(interrupts) => {
                by = Some(interrupts.interrupted());
                Arc::new(interrupts)
            }
            None => Arc::new(Silent),
        }
    };
    if wants.latched && by.is_some() {
        let pages = (page.clone(), halves.outbound.0.clone());
        return Ok((Arc::new(Latched::new(found, pages.0, pages.1, bits.start)), by));
    }
    Ok((found, by))
}

/// The interrupts of a shared-memory device that holds both directions; without them sleepers look by the clock.
fn interrupts(files: &Files, wants: Wants, page: &Inbound) -> Option<Interrupts> {
    if files.outbound.is_some() {
        return None;
    }
    let file = files.inbound.display();
    match Interrupts::open(&files.inbound, wants.bells, (page.clone(), files.portion)) {
        Ok(Some(found)) => {
            let (has, needed) = (found.vectors(), wants.bells);
            if has < needed {
                tracing::warn!(%file, has, needed, "fewer vectors than doorbells: a timer looks, too");
            }
            Some(found)
        }
        Ok(None) => None,
        Err(error) => {
            tracing::warn!(%error, %file, "no interrupts: a timer looks at the window instead");
            None
        }
    }
}

impl Cable {
    /// Plugs this end of a window for sockets in. The other end need not be there.
    ///
    /// Errors: [`CableError`]; `AddrInUse` where a process of this host has this end.
    pub fn plug(url: &WindowUrl) -> Result<Self, CableError> {
        let files = Files {
            inbound: url.file.clone(),
            outbound: url.outbound.clone(),
            side: url.side,
            portion: url.portion,
        };
        let wants = Wants {
            kind: Kind::Sockets,
            bells: SOCKETS_BELLS,
            pipes: true,
            latched: false,
            least_bytes: LEAST_BYTES,
        };
        let make = url.outbound.is_none().then_some(url.bytes);
        Self::open(&files, wants, make, url.disorder)
    }

    /// Plugs this end of a part in. `make`: a file that is not there is made with so many bytes for each direction.
    /// `disorder`: the seed of a [shim](crate::shim) before every write.
    ///
    /// Errors: [`CableError`]; `AddrInUse` where a process of this host has this end.
    pub fn open(
        files: &Files,
        wants: Wants,
        make: Option<usize>,
        disorder: Option<u64>,
    ) -> Result<Self, CableError> {
        let halves = halves(files, make)?;
        let (at, length) = enough(files, halves.bytes, wants.least_bytes)?;
        let claim = Claim::take(&files.inbound, halves.at + at, length)?;
        let page = halves.inbound.part(0, PAGE_BYTES);
        let (bells, by) = bells(files, wants, &halves, &page)?;
        let Halves { inbound, outbound: (_, wire), is_a_device, .. } = halves;
        if let Some(better) = files::combining(files.outbound.as_ref().unwrap_or(&files.inbound)) {
            let (file, better) = (files.inbound.display(), better.display());
            tracing::warn!(%file, "each store crosses the bus by itself; {better} combines them");
        }
        let mut wire: Arc<dyn Wire> = Arc::new(wire);
        if let Some(seed) = disorder {
            wire = Arc::new(Combining::new(wire, BUFFERS, seed));
        }
        let outbound = Outbound::new(wire);
        let other = outbound.part(0, PAGE_BYTES);
        let directory = Directory::new(page, other, wants.kind, files.portion, by);
        directory.announce();
        let window = Window {
            inbound: inbound.part(at, length),
            outbound: outbound.part(at, length),
            bells,
        };
        Ok(Self { window, directory, is_a_device, _claim: claim })
    }

    /// What the other end writes into a part, without a claim: only reads, so that it harms nothing, whatever the
    /// file is used for.
    ///
    /// Errors: [`CableError`] for a file that is no window.
    pub fn look(files: &Files, least_bytes: usize) -> Result<Inbound, CableError> {
        let halves = halves(files, None)?;
        let (at, length) = enough(files, halves.bytes, least_bytes)?;
        Ok(halves.inbound.part(at, length))
    }
}

/// Where something of this end's may be made beside its window; `None` beside a device.
pub(crate) fn beside(url: &WindowUrl, side: Side) -> Option<PathBuf> {
    if files::is_of_a_device(&url.file) {
        return None;
    }
    let unit = match url.portion.first_unit() {
        0 => String::new(),
        unit => format!("-{unit}"),
    };
    Some(Path::new(&format!("{}.extents-{}{unit}", url.file.display(), side.index())).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_file_end_and_size_and_a_bad_one_is_refused_by_its_fault() {
        let url: WindowUrl = "ntb:///tmp/w?side=1&size=100000&disorder=7&part=1/2".parse().unwrap();
        assert_eq!((url.side, url.bytes, url.disorder), (Side::Second, 102_400, Some(7)));
        assert_eq!((url.portion, url.outbound), (Portion::new(1, 2).unwrap(), None));
        for (bad, part) in [
            ("shm:///tmp/w?side=1", "ntb://"),
            ("ntb://w?side=1", "absolute"),
            ("ntb:///w", "which side"),
            ("ntb:///w?side=2", "takes side"),
            ("ntb:///w?side=0&part=2/2", "a part is K/N"),
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

    #[test]
    fn parts_of_one_window_are_two_users_and_one_that_overlaps_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let url = |side: usize, part: &str| -> WindowUrl {
            let file = folder.path().join("window");
            let file = file.display();
            format!("ntb://{file}?side={side}&size=1048576&part={part}").parse().unwrap()
        };
        let near = ["0/2", "1/2"].map(|part| Cable::plug(&url(0, part)).unwrap());
        let far = ["0/2", "1/2"].map(|part| Cable::plug(&url(1, part)).unwrap());
        let taken = |refused: Result<Cable, CableError>| match refused {
            Err(CableError::System { source, .. }) => {
                source.kind() == std::io::ErrorKind::AddrInUse
            }
            _ => false,
        };
        assert!(taken(Cable::plug(&url(0, "0/1"))), "the whole of it");
        for (index, [one, other]) in
            near.iter().zip(&far).map(|(one, other)| [one, other]).enumerate()
        {
            assert_eq!((one.directory.refusal(), other.directory.refusal()), (None, None));
            let length = one.window.length_bytes();
            assert!(length > (1 << 20) / 2 - (64 << 10), "{length} bytes");
            one.window.outbound.post_word(length - 8, 7 + index as u64);
            one.window.outbound.post_word(0, 70 + index as u64);
            one.window.bells.ring(3);
        }
        for (index, cable) in far.iter().enumerate() {
            let word =
                |at| cable.window.inbound.word(at).load(std::sync::atomic::Ordering::Acquire);
            let last = cable.window.length_bytes() - 8;
            assert_eq!((word(last), word(0)), (7 + index as u64, 70 + index as u64));
            let bell = cable.window.bells.descriptor(3).unwrap();
            assert_eq!(rustix::io::read(bell, &mut [0; 4]), Ok(1), "each part has its bells");
        }
        let [_, freed] = near;
        drop(freed);
        Cable::plug(&url(0, "1/2")).unwrap();
        let said = Cable::plug(&url(0, "3/4")).unwrap_err().to_string();
        assert!(said.contains("part 3/4 of a window has 8 doorbells, and 9 are needed"), "{said}");
    }
}

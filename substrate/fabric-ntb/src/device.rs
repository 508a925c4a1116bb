//! The device: opened over a port.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use beeline_fabric::{CompletionQueue, Device, DeviceAttributes, FabricError, ProtectionDomain};
use beeline_fabric_engine::{EngineDevice, random_u64};
use beeline_os::Mapping;
use beeline_os::control_socket::ControlListener;
use beeline_os::mapping::{Protection, create_memfd};
use beeline_os::memory::MemoryObject;

use crate::cable::{Socket, shared_window};
use crate::config::{FixedWindow, NtbConfig, Port};
use crate::heap::Heap;
use crate::interrupts::Interrupts;
use crate::layout::{Geometry, MAGIC, PAD_GEOMETRY, PAD_MAGIC};
use crate::link::{NodeName, announced_node};
use crate::transport::{NtbTransport, Setup};
use crate::window::{Inbound, MappedWindow, Window};

/// PCI classes of what windows are in: other bridges (the kernel's ntb drivers bind to those),
/// memory (shared between virtual machines, or behind a switch).
const WINDOW_CLASSES: [&str; 2] = ["0x0680", "0x05"];

/// `SYSFS_MAGIC`, the kind of file system that devices' resource files are in.
const SYSFS_MAGIC: u64 = 0x6265_6572;

/// The provider, opened. One thread, asleep unless needed.
#[derive(Debug)]
pub struct NtbDevice {
    engine: EngineDevice,
    node: NodeName,
}

fn random_name() -> Result<[u8; 16], FabricError> {
    let mut name = [0; 16];
    name[..8].copy_from_slice(&random_u64()?.to_le_bytes());
    name[8..].copy_from_slice(&random_u64()?.to_le_bytes());
    Ok(name)
}

/// What went wrong with the file at `path`, and what that usually means.
fn failed(action: &'static str, path: &Path) -> impl Fn(Error) -> FabricError {
    let path = path.display().to_string();
    move |source| {
        let kind = source.kind();
        let resource = path.starts_with("/sys/");
        let meaning = match kind {
            ErrorKind::NotFound if resource => {
                "; there is no such device, or it has no such BAR (`beeline doctor` lists windows)"
            }
            ErrorKind::PermissionDenied => "; mapping a window needs the rights of its owner",
            ErrorKind::InvalidInput if resource => {
                "; this BAR cannot be mapped: it holds ports, or less than a page"
            }
            ErrorKind::AddrInUse => {
                "; another program of this host has this end: take the other side, or end it"
            }
            _ => "",
        };
        let source = Error::new(kind, format!("{path}: {source}{meaning}"));
        FabricError::System { action, source }
    }
}

fn map(path: &Path) -> Result<Arc<Mapping>, FabricError> {
    let open = OpenOptions::new().read(true).write(true).open(path);
    let file = open.map_err(failed("opening the window's file", path))?;
    let meta = file.metadata().map_err(failed("asking the window's length", path))?;
    if !meta.is_file() {
        let source = Error::new(ErrorKind::InvalidInput, "a directory, or a device without length");
        return Err(failed("opening the window's file", path)(source));
    }
    check_device(path)?;
    check_length_holds(&file, &meta, path)?;
    let length = usize::try_from(meta.len()).unwrap_or(usize::MAX);
    let mapping = Mapping::shared(file.into(), length, Protection::ReadWrite)
        .map_err(|error| failed("mapping the window", path)(error.into()))?;
    mapping.forget_descriptor();
    Ok(Arc::new(mapping))
}

/// Refuses a plain file that others could cut short: an access beyond its end would end this
/// process (SIGBUS), and no look beforehand helps against that. So nobody but the owner may be able
/// to write it, or it is sealed. A BAR's resource file has the length of the BAR, whatever is done
/// to the file.
fn check_length_holds(file: &File, meta: &Metadata, path: &Path) -> Result<(), FabricError> {
    let of_a_device =
        rustix::fs::fstatfs(file).is_ok_and(|found| u64::try_from(found.f_type) == Ok(SYSFS_MAGIC));
    let sealed = rustix::fs::fcntl_get_seals(file)
        .is_ok_and(|seals| seals.contains(rustix::fs::SealFlags::SHRINK));
    let own = rustix::process::geteuid().as_raw();
    let by_others = meta.mode() & 0o022 != 0 || ![0, own].contains(&meta.uid());
    if of_a_device || sealed || !by_others {
        return Ok(());
    }
    let source = Error::new(
        ErrorKind::PermissionDenied,
        "others may write this plain file, and whoever cuts it short ends this process: make it \
         yours alone (chmod go-w)",
    );
    Err(failed("looking at the window's file", path)(source))
}

/// Refuses a PCI device that is asleep, or that is nothing a window can be in: what is written to
/// the registers of another device nobody knows.
fn check_device(path: &Path) -> Result<(), FabricError> {
    let refuse = |what: String| {
        let source = Error::new(ErrorKind::InvalidInput, what);
        Err(failed("looking at the window's device", path)(source))
    };
    let resource = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let Some(device) = resource.parent() else { return Ok(()) };
    let read = |file: &str| {
        std::fs::read_to_string(device.join(file)).ok().map(|text| text.trim().to_owned())
    };
    let Some(class) = read("class") else { return Ok(()) };
    if !WINDOW_CLASSES.iter().any(|known| class.starts_with(known)) {
        return refuse(format!(
            "a device of PCI class {class} is neither a bridge nor memory; it is left alone"
        ));
    }
    if read("enable").is_some_and(|enabled| enabled == "0") {
        let file = device.join("enable");
        return refuse(format!("the device is not enabled: write 1 to {}", file.display()));
    }
    let name = resource.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if device.join(format!("{name}_wc")).exists() {
        tracing::warn!(
            file = %path.display(),
            "each store crosses the bus by itself; {name}_wc combines them"
        );
    }
    Ok(())
}

/// The file that stands for what `path` maps: a BAR is the same with and without write combining.
fn canonical(path: &Path) -> PathBuf {
    let path = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let plain = path.to_str().and_then(|path| path.strip_suffix("_wc")).map(PathBuf::from);
    plain.filter(|plain| plain.exists()).unwrap_or(path)
}

/// Makes sure that nobody else on this host has this end of the window, for as long as the value
/// lives.
fn claim(fixed: &FixedWindow) -> Result<ControlListener, FabricError> {
    let path = &fixed.inbound;
    let file =
        std::fs::metadata(canonical(path)).map_err(failed("looking at the window's file", path))?;
    let name = format!("beeline-ntb-{}-{}-{:?}", file.dev(), file.ino(), fixed.side);
    ControlListener::bind(name.as_bytes()).map_err(failed("claiming this end of the window", path))
}

/// The interrupts of a shared-memory device that holds both windows; without them somebody looks.
fn interrupts(fixed: &FixedWindow) -> Option<Interrupts> {
    if fixed.outbound.is_some() {
        return None;
    }
    let found = Interrupts::open(&fixed.inbound);
    found.unwrap_or_else(|error| {
        let file = fixed.inbound.display();
        tracing::warn!(%error, %file, "no interrupts: a timer looks at the window instead");
        None
    })
}

/// The window of `fixed`, with as much of it as a geometry of its size uses.
fn fixed_window(
    fixed: &FixedWindow,
    config: &NtbConfig,
) -> Result<(MappedWindow, Geometry), FabricError> {
    let inbound = map(&fixed.inbound)?;
    let outbound = fixed.outbound.as_deref().map(map).transpose()?;
    let shortest = match &outbound {
        None => inbound.length_bytes() / 2 / 4096 * 4096,
        Some(outbound) => inbound.length_bytes().min(outbound.length_bytes()),
    };
    let geometry = Geometry::fitting(config.ring_bytes, config.partitions, shortest);
    let geometry = geometry.ok_or_else(|| {
        let what = format!(
            "{shortest} bytes each way hold no two rings of {} bytes; is this the BAR of the window?",
            config.ring_bytes
        );
        let source = Error::new(ErrorKind::InvalidInput, what);
        failed("dividing the window", &fixed.inbound)(source)
    })?;
    let bytes = geometry.window_bytes();
    let window = match outbound {
        None => shared_window(inbound, fixed.side, bytes, None),
        Some(outbound) => {
            let inbound = Inbound::new(inbound, 0, bytes);
            MappedWindow::new(inbound, Inbound::new(outbound, 0, bytes), None)
        }
    };
    Ok((window, geometry))
}

impl NtbDevice {
    /// Opens the device: maps the window or makes the emulation's socket, starts the library's
    /// thread.
    ///
    /// Errors: [`FabricError::System`] (no such file, not permitted, descriptor limits;
    /// `AddrInUse` when a device of this host has that end of the window already, `InvalidInput`
    /// for a window too small for two rings, or a PCI device that is no window).
    pub fn open(config: NtbConfig) -> Result<Arc<Self>, FabricError> {
        let attributes = beeline_fabric_engine::attributes(
            "ntb",
            "the target's thread makes the range persistent, then acknowledges",
        );
        let node = random_name()?;
        let mut claimed = None;
        let (geometry, disorder, socket, fixed) = match &config.port {
            Port::Emulated { disorder } => {
                let socket = Socket::open(&node, random_name()?).map_err(|source| {
                    FabricError::System { action: "listening for cables", source }
                })?;
                let geometry = Geometry::fitting(config.ring_bytes, config.partitions, usize::MAX)
                    .ok_or(FabricError::Limit { what: "partitions", requested: 0, limit: 1 })?;
                (geometry, *disorder, Some(socket), None)
            }
            Port::Fixed(fixed) => {
                claimed = Some(claim(fixed)?);
                let interrupts = interrupts(fixed);
                let (mut window, geometry) = fixed_window(fixed, &config)?;
                if let Some(interrupts) = interrupts {
                    window.set_interrupts(interrupts);
                }
                let window: Arc<dyn Window> = Arc::new(window);
                (geometry, None, None, Some((window, fixed.side)))
            }
        };
        let heap = match &config.port {
            Port::Emulated { .. } if config.window_memory_bytes > 0 => {
                let bytes = config.window_memory_bytes.next_multiple_of(4096);
                let file = create_memfd("beeline-ntb-memory", bytes).map_err(|error| {
                    let action = "making memory that peers write";
                    FabricError::System { action, source: error.into() }
                })?;
                Some(Heap::new(file, 0, bytes))
            }
            _ => None,
        };
        let silence = config.silence;
        let setup =
            Setup { attributes, node, geometry, silence, disorder, heap, socket, fixed, claimed };
        let transport = Arc::new(NtbTransport::new(setup)?);
        Ok(Arc::new(Self { engine: EngineDevice::start(transport)?, node }))
    }

    /// What this device is called at the other end of its window: random, new each time it is
    /// opened.
    #[must_use]
    pub fn node(&self) -> NodeName {
        self.node
    }
}

/// Who announces itself at the other end of a fixed window; `None` while nobody does, or somebody
/// who divides it otherwise. Only reads, so it harms no one whatever the file is used for.
///
/// Errors: [`FabricError::System`] for a file that is no window.
pub fn announced(fixed: &FixedWindow, config: &NtbConfig) -> Result<Option<NodeName>, FabricError> {
    let (window, geometry) = fixed_window(fixed, config)?;
    let there =
        window.scratchpad(PAD_MAGIC) == MAGIC && window.scratchpad(PAD_GEOMETRY) == geometry.code();
    Ok(there.then(|| announced_node(&window)))
}

impl Device for NtbDevice {
    fn attributes(&self) -> &DeviceAttributes {
        self.engine.attributes()
    }

    fn allocate_memory(&self, length_bytes: usize) -> Result<Arc<dyn MemoryObject>, FabricError> {
        self.engine.allocate_memory(length_bytes)
    }

    fn allocate_protection_domain(&self) -> Result<Arc<dyn ProtectionDomain>, FabricError> {
        self.engine.allocate_protection_domain()
    }

    fn create_completion_queue(
        &self,
        depth_entries: u32,
    ) -> Result<Rc<dyn CompletionQueue>, FabricError> {
        self.engine.create_completion_queue(depth_entries)
    }
}

//! The device: opened over a port.

use std::io::{Error, ErrorKind};
use std::rc::Rc;
use std::sync::Arc;

use beeline_fabric::{CompletionQueue, Device, DeviceAttributes, FabricError, ProtectionDomain};
use beeline_fabric_engine::{EngineDevice, random_u64};
use beeline_ntb::handed::Socket;
use beeline_ntb::{Cable, CableError, Kind, Wants};
use beeline_os::mapping::create_memfd;
use beeline_os::memory::MemoryObject;

use crate::config::{FixedWindow, NtbConfig, Port};
use crate::heap::Heap;
use crate::layout::{Geometry, MAGIC, PAD_GEOMETRY, PAD_MAGIC};
use crate::link::{NodeName, announced_node};
use crate::transport::{NtbTransport, Setup};
use crate::window::{Window, scratchpad};

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

/// Of a fixed window: one doorbell behind its latch, where the device has interrupts; a timer looks where it has none.
const WANTS: Wants =
    Wants { kind: Kind::Fabric, bells: 1, pipes: false, latched: true, least_bytes: 0 };

fn too_small(fixed: &FixedWindow, config: &NtbConfig, bytes: usize) -> FabricError {
    let what = format!(
        "{}: {bytes} bytes each way hold no two rings of {} bytes; is this the BAR of the window?",
        fixed.inbound.display(),
        config.ring_bytes
    );
    let source = Error::new(ErrorKind::InvalidInput, what);
    FabricError::System { action: "dividing the window", source }
}

fn refused<'a>(
    fixed: &'a FixedWindow,
    config: &'a NtbConfig,
) -> impl Fn(CableError) -> FabricError + 'a {
    |error| match error {
        CableError::System { action, path, source } => {
            let source = Error::new(source.kind(), format!("{}: {source}", path.display()));
            FabricError::System { action, source }
        }
        CableError::TooSmall { bytes, .. } => too_small(fixed, config, bytes),
        other => {
            let source = Error::new(ErrorKind::InvalidInput, other.to_string());
            FabricError::System { action: "opening the window", source }
        }
    }
}

/// How a part of so many bytes each way is divided.
fn division(
    fixed: &FixedWindow,
    config: &NtbConfig,
    bytes: usize,
) -> Result<Geometry, FabricError> {
    let geometry = Geometry::fitting(config.ring_bytes, config.partitions, bytes);
    geometry.ok_or_else(|| too_small(fixed, config, bytes))
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
                let cable = Cable::open(fixed, WANTS, None, None);
                let cable = cable.map_err(refused(fixed, &config))?;
                let geometry = division(fixed, &config, cable.window.length_bytes())?;
                (geometry, None, None, Some((Arc::new(Window::from(cable)), fixed.side)))
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
        let setup = Setup { attributes, node, geometry, silence, disorder, heap, socket, fixed };
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
    let inbound = Cable::look(fixed, WANTS.least_bytes).map_err(refused(fixed, config))?;
    let geometry = division(fixed, config, inbound.length_bytes())?;
    let there = scratchpad(&inbound, PAD_MAGIC) == MAGIC
        && scratchpad(&inbound, PAD_GEOMETRY) == geometry.code();
    Ok(there.then(|| announced_node(&inbound)))
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

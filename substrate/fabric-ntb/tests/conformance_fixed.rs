//! The executable specification over a fixed window: each item's own file, or the resource file
//! that `LAB_WINDOW` names (a shared-memory device of a virtual machine), then with
//! `--test-threads 1`. Both ends are devices of this process; what needs a third, or an end in
//! another process, is skipped and runs over the emulation.

#![allow(clippy::unwrap_used, reason = "a test ends where its set-up breaks")]

use std::path::PathBuf;
use std::sync::Arc;

use beeline_fabric::{Device, FabricError};
use beeline_fabric_conformance::{Capabilities, Harness, Stop};
use beeline_fabric_ntb::{FixedWindow, NtbConfig, NtbDevice, Port, Portion, Side};

struct FixedHarness {
    file: Option<tempfile::NamedTempFile>,
}

impl FixedHarness {
    fn new() -> Self {
        let file = std::env::var_os("LAB_WINDOW").is_none().then(|| {
            let file = tempfile::NamedTempFile::new().unwrap();
            file.as_file().set_len(48 << 20).unwrap();
            file
        });
        Self { file }
    }

    fn path(&self) -> PathBuf {
        match &self.file {
            Some(file) => file.path().to_owned(),
            None => std::env::var_os("LAB_WINDOW").unwrap_or_default().into(),
        }
    }
}

impl Harness for FixedHarness {
    fn open_device(&self) -> Result<Arc<dyn Device>, Stop> {
        for side in [Side::First, Side::Second] {
            let port = Port::Fixed(FixedWindow {
                inbound: self.path(),
                outbound: None,
                side,
                portion: Portion::WHOLE,
            });
            let (ring_bytes, partitions) = (16 << 10, 1024);
            let config = NtbConfig { port, ring_bytes, partitions, ..NtbConfig::default() };
            match NtbDevice::open(config) {
                Err(FabricError::System { source, .. })
                    if source.kind() == std::io::ErrorKind::AddrInUse => {}
                outcome => return Ok(outcome?),
            }
        }
        Err(Stop::skipped("a fixed window has two ends"))
    }

    fn capabilities(&self) -> Capabilities {
        let peer_processes = Err("both ends of the fixed window are in this process");
        let threads = Err("a fixed window has two ends");
        // Each end opens half of the partitions of a window.
        let most_connections = 512;
        Capabilities { peer_processes, threads, most_connections, ..Capabilities::default() }
    }
}

beeline_fabric_conformance::conformance_suite!(FixedHarness::new());

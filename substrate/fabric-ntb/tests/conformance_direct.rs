//! The executable specification where registered memory lies in the window and peers write it by
//! themselves, through posted writes that are reordered.

use std::sync::Arc;

use beeline_fabric::Device;
use beeline_fabric_conformance::{Harness, Stop};
use beeline_fabric_ntb::{Disorder, NtbConfig, NtbDevice, Port};

struct DirectHarness;

impl Harness for DirectHarness {
    fn open_device(&self) -> Result<Arc<dyn Device>, Stop> {
        let disorder = Some(Disorder::default());
        Ok(NtbDevice::open(NtbConfig {
            port: Port::Emulated { disorder },
            window_memory_bytes: 256 << 20,
            ..NtbConfig::default()
        })?)
    }
}

beeline_fabric_conformance::conformance_suite!(DirectHarness);

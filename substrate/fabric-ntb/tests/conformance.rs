//! The executable specification over the emulation, in order and with posted writes reordered.

use std::sync::Arc;

use beeline_fabric::Device;
use beeline_fabric_conformance::{Harness, Stop};
use beeline_fabric_ntb::{NtbConfig, NtbDevice};

struct NtbHarness;

impl Harness for NtbHarness {
    fn open_device(&self) -> Result<Arc<dyn Device>, Stop> {
        Ok(NtbDevice::open(NtbConfig::default())?)
    }
}

beeline_fabric_conformance::conformance_suite!(NtbHarness);

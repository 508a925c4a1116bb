//! The executable specification with posted writes that combine, overtake each other and stay
//! behind until a fence, as hardware's may.

use std::sync::Arc;

use beeline_fabric::Device;
use beeline_fabric_conformance::{Harness, Stop};
use beeline_fabric_ntb::{Disorder, NtbConfig, NtbDevice, Port};

struct PostedHarness;

impl Harness for PostedHarness {
    fn open_device(&self) -> Result<Arc<dyn Device>, Stop> {
        let disorder = Some(Disorder::default());
        let config = NtbConfig { port: Port::Emulated { disorder }, ..NtbConfig::default() };
        Ok(NtbDevice::open(config)?)
    }
}

beeline_fabric_conformance::conformance_suite!(PostedHarness);

//! The executable specification over loopback.

use std::sync::Arc;

use beeline_fabric::Device;
use beeline_fabric_conformance::{Harness, Stop};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};

struct TcpHarness;

impl Harness for TcpHarness {
    fn open_device(&self) -> Result<Arc<dyn Device>, Stop> {
        Ok(TcpDevice::open(TcpConfig::default())?)
    }
}

beeline_fabric_conformance::conformance_suite!(TcpHarness);

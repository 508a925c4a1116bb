//! The provider passes the executable specification of fabric.

use std::sync::Arc;

use beeline_fabric::Device;
use beeline_fabric_conformance::{Harness, Stop};
use beeline_fabric_shm::{ShmConfig, ShmDevice};

struct Shm;

impl Harness for Shm {
    fn open_device(&self) -> Result<Arc<dyn Device>, Stop> {
        Ok(ShmDevice::open(ShmConfig::default())?)
    }
}

beeline_fabric_conformance::conformance_suite!(Shm);

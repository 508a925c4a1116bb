//! The device for one process passes the executable specification of fabric.

use std::sync::Arc;

use beeline_fabric::Device;
use beeline_fabric_conformance::{Capabilities, Harness, Stop};
use beeline_fabric_shm::{ShmConfig, ShmDevice};

struct InProcess;

impl Harness for InProcess {
    fn open_device(&self) -> Result<Arc<dyn Device>, Stop> {
        Ok(ShmDevice::in_process(ShmConfig::default())?)
    }

    fn capabilities(&self) -> Capabilities {
        let peer_processes = Err("the device is for peers in its own process");
        Capabilities { peer_processes, ..Capabilities::default() }
    }
}

beeline_fabric_conformance::conformance_suite!(InProcess);

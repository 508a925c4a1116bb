//! The executable specification over the RDMA device of this machine: soft-RoCE will do.

use std::sync::Arc;

use beeline_fabric::Device;
use beeline_fabric_conformance::{Capabilities, Harness, Stop};
use beeline_fabric_verbs::{VerbsConfig, VerbsDevice, VerbsError};

struct VerbsHarness;

impl Harness for VerbsHarness {
    fn absent(&self) -> Option<String> {
        match VerbsDevice::open(VerbsConfig::default()) {
            Err(VerbsError::Missing(missing)) => Some(missing.to_string()),
            _ => None,
        }
    }

    fn open_device(&self) -> Result<Arc<dyn Device>, Stop> {
        // The suite's durable memory survives by decree, and so does the way to it.
        let config = VerbsConfig { reads_reach_persistence: true, ..VerbsConfig::default() };
        VerbsDevice::open(config).map_err(|error| match error {
            VerbsError::Fabric(error) => error.into(),
            other => Stop::failed(other.to_string()),
        })
    }

    /// Deviations of soft-RoCE, which is what runs this suite where there is no card.
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            range_checked_before_receive: Err(
                "soft-RoCE looks for a receive before it checks the range of a write with immediate",
            ),
            divided_words_placed_whole: Err(
                "soft-RoCE was seen to place a word that two entries divide in two steps",
            ),
            ..Capabilities::default()
        }
    }
}

beeline_fabric_conformance::conformance_suite!(VerbsHarness);

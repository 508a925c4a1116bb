//! The executable specification over simulated networks of several tempers.

mod common;

use beeline_fabric_sim::SimOptions;
use common::SimHarness;

mod orderly {
    use super::*;
    beeline_fabric_conformance::conformance_suite!(SimHarness::new(1, SimOptions::default()));
}

mod lossy {
    use super::*;
    beeline_fabric_conformance::conformance_suite!(SimHarness::new(2, SimOptions::lossy()));
}

mod slow_placement {
    use super::*;
    beeline_fabric_conformance::conformance_suite!(SimHarness::new(
        3,
        SimOptions::slow_placement()
    ));
}

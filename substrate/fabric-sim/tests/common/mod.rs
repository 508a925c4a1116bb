//! The harness of the specification over a simulated world.

#![allow(clippy::unwrap_used, reason = "a test ends where its harness breaks")]

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use beeline_fabric::Device;
use beeline_fabric_conformance::{Capabilities, Harness, Stop};
use beeline_fabric_sim::{SimDevice, SimOptions, SimWorld};

/// A world of its own for each item.
pub struct SimHarness {
    world: SimWorld,
    slow_placement: bool,
    next_node: AtomicU32,
    devices: Mutex<Vec<Arc<SimDevice>>>,
}

impl SimHarness {
    pub fn new(seed: u64, options: SimOptions) -> Self {
        Self {
            slow_placement: options.slow_placement_ns.is_some(),
            world: SimWorld::new(seed, options),
            next_node: AtomicU32::new(1),
            devices: Mutex::new(Vec::new()),
        }
    }

    fn node(&self, device: &Arc<dyn Device>) -> u32 {
        let devices = self.devices.lock().unwrap();
        let same =
            |known: &&Arc<SimDevice>| std::ptr::addr_eq(Arc::as_ptr(known), Arc::as_ptr(device));
        devices.iter().find(same).unwrap().node()
    }
}

impl Harness for SimHarness {
    fn open_device(&self) -> Result<Arc<dyn Device>, Stop> {
        let device = self.world.device(self.next_node.fetch_add(1, Ordering::Relaxed));
        self.devices.lock().unwrap().push(Arc::clone(&device));
        Ok(device)
    }

    fn capabilities(&self) -> Capabilities {
        let slow = "writes linger between acknowledgement and memory";
        Capabilities {
            peer_processes: Err("simulated nodes live in one process"),
            threads: Err("a simulated world belongs to one thread"),
            simulated_faults: Ok(()),
            placed_before_completion: if self.slow_placement { Err(slow) } else { Ok(()) },
            ..Capabilities::default()
        }
    }

    fn now(&self) -> Duration {
        Duration::from_nanos(self.world.now_ns())
    }

    fn idle(&self) {
        self.world.step_within(Duration::from_micros(200));
    }

    fn wait_readable(&self, descriptor: BorrowedFd<'_>, timeout: Duration) -> io::Result<bool> {
        let readable = || {
            use rustix::event::{PollFd, PollFlags, Timespec, poll};
            let mut polled = [PollFd::from_borrowed_fd(descriptor, PollFlags::IN)];
            poll(&mut polled, Some(&Timespec::default())).unwrap() > 0
        };
        Ok(self.world.run_until(timeout, readable))
    }

    fn crash(&self, device: &Arc<dyn Device>) -> Result<(), Stop> {
        self.world.crash(self.node(device));
        Ok(())
    }

    fn pause(&self, device: &Arc<dyn Device>) -> Result<(), Stop> {
        self.world.pause(self.node(device));
        Ok(())
    }

    fn resume(&self, device: &Arc<dyn Device>) -> Result<(), Stop> {
        self.world.resume(self.node(device));
        Ok(())
    }
}

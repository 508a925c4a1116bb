//! The threads of a partition run on the processors that they were given, one or two of them.

#![cfg(all(target_os = "linux", not(miri)))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use beeline_ntb::window::Mapped;
use beeline_ntb::{Inbound, Outbound, Window};
use beeline_os::Mapping;
use beeline_os::poller::Waker;
use beeline_sockets::packets::page::Page;
use beeline_sockets_proxy::flow::Schedule;
use beeline_sockets_proxy::geometry::Geometry;
use beeline_sockets_proxy::partition::Partition;
use beeline_sockets_proxy::thread::{Mailbox, Place, start};
use common::{BLOCKS, LENGTH, SLOT, Silent};

const PATIENCE: Duration = Duration::from_secs(60);

/// Processors on which the thread of this process with that name may run, as the kernel says.
fn allowed(name: &str) -> Option<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let paths = tasks.filter_map(|task| Some(task.ok()?.path()));
    let is_it = |path: &std::path::PathBuf| {
        std::fs::read_to_string(path.join("comm")).is_ok_and(|comm| comm.trim_end() == name)
    };
    let status = std::fs::read_to_string(paths.into_iter().find(is_it)?.join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    Some(line.trim().to_owned())
}

#[test]
fn each_thread_of_a_partition_stays_on_its_processor() {
    let all = beeline_os::affinity::allowed().unwrap();
    let cores = [all[0], all[all.len() - 1]];
    let geometry = Geometry::dividing(LENGTH, 1, SLOT, BLOCKS).unwrap();
    let (at, bytes) = geometry.partition(0);
    for threads in [1, 2] {
        let mapping = Arc::new(Mapping::anonymous(2 * LENGTH).unwrap());
        let wire = Mapped::new(Arc::clone(&mapping), LENGTH, LENGTH);
        let inbound = Inbound::new(mapping, 0, LENGTH);
        let outbound = Outbound::new(Arc::new(wire));
        let window = Window { inbound, outbound, bells: Arc::new(Silent) }.part(at, bytes);
        let schedule = Schedule::new(8, 4);
        let parts = if threads == 1 {
            (Partition::new(window.clone(), geometry, schedule, 1), None)
        } else {
            let (partition, receiver) = Partition::shared(window.clone(), geometry, schedule, 1);
            (partition, Some(receiver))
        };
        let running = start(
            parts,
            window,
            1,
            Place { link: threads, partition: 0 },
            Arc::new(Page::create().unwrap()),
            0,
            Arc::new(Mailbox::new(Arc::new(Waker::new().unwrap()))),
            (None, cores.map(Some)),
        )
        .unwrap();
        let names = [format!("ntp-{threads}-0"), format!("ntp-{threads}-0-rx")];
        for (name, core) in names.iter().zip(cores).take(threads) {
            let begun = Instant::now();
            while allowed(name) != Some(core.to_string()) {
                assert!(begun.elapsed() < PATIENCE, "{name}: {:?}, not {core}", allowed(name));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        assert_eq!(allowed(&names[1]).is_some(), threads == 2);
        drop(running);
    }
}

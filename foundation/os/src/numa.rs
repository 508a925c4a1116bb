//! Which processors belong to which memory, as `/sys` tells.
//!
//! Place: beside [`crate::affinity`], which keeps a thread on the processors found here.

use std::io;
use std::path::Path;

const NODES: &str = "/sys/devices/system/node";

/// A memory node and its processors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub number: usize,
    /// Processors, ascending; none for a node of memory alone.
    pub processors: Vec<usize>,
}

/// The memory nodes of this machine, ascending; empty where the kernel knows of none.
///
/// Errors: the kernel's; `InvalidData` for a list that is none.
pub fn nodes() -> io::Result<Vec<Node>> {
    nodes_in(Path::new(NODES))
}

fn nodes_in(folder: &Path) -> io::Result<Vec<Node>> {
    let online = match std::fs::read_to_string(folder.join("online")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        text => list(&text?)?,
    };
    let node = |number: usize| {
        let path = folder.join(format!("node{number}/cpulist"));
        Ok(Node { number, processors: list(&std::fs::read_to_string(path)?)? })
    };
    online.into_iter().map(node).collect()
}

/// The node that the device behind a network interface or an RDMA device is attached to: `device` is a
/// folder of `/sys/class`. Nothing where the device has none.
#[must_use]
pub fn of_device(device: &Path) -> Option<usize> {
    // -1 where the bus does not say.
    std::fs::read_to_string(device.join("device/numa_node")).ok()?.trim().parse().ok()
}

/// Numbers as the kernel lists them: `0-3,8`.
fn list(text: &str) -> io::Result<Vec<usize>> {
    let bad = || io::Error::new(io::ErrorKind::InvalidData, format!("no list: {text:?}"));
    let number = |text: &str| text.parse::<usize>().map_err(|_| bad());
    let mut numbers = Vec::new();
    for part in text.trim().split(',').filter(|part| !part.is_empty()) {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if last < first || last - first > 1 << 16 {
            return Err(bad());
        }
        numbers.extend(first..=last);
    }
    Ok(numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_lists_are_read() {
        assert_eq!(list("0-2,5\n").unwrap(), [0, 1, 2, 5]);
        assert_eq!(list("\n").unwrap(), [0; 0]);
        for text in ["a", "3-1", "0-", "-", "0-99999999999"] {
            assert!(list(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_machine_of_two_nodes_is_read_and_one_without_has_none() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(nodes_in(folder.path()).unwrap(), []);
        std::fs::write(folder.path().join("online"), "0-1\n").unwrap();
        for (number, processors) in [(0, "0-1,4\n"), (1, "\n")] {
            let node = folder.path().join(format!("node{number}"));
            std::fs::create_dir(&node).unwrap();
            std::fs::write(node.join("cpulist"), processors).unwrap();
        }
        let found = nodes_in(folder.path()).unwrap();
        let node = |number, processors| Node { number, processors };
        assert_eq!(found, [node(0, vec![0, 1, 4]), node(1, vec![])]);
        let device = folder.path().join("mlx5_0");
        assert_eq!(of_device(&device), None);
        std::fs::create_dir_all(device.join("device")).unwrap();
        std::fs::write(device.join("device/numa_node"), "-1\n").unwrap();
        assert_eq!(of_device(&device), None);
        std::fs::write(device.join("device/numa_node"), "1\n").unwrap();
        assert_eq!(of_device(&device), Some(1));
    }

    #[test]
    fn every_processor_of_this_thread_is_in_a_node_where_there_are_nodes() {
        let nodes = nodes().unwrap();
        let known: Vec<usize> = nodes.into_iter().flat_map(|node| node.processors).collect();
        for processor in crate::affinity::allowed().unwrap() {
            assert!(known.is_empty() || known.contains(&processor), "{processor}");
        }
    }
}

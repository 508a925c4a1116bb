//! Which processors a service keeps to: those of the memory node its network card is attached to.

use std::path::Path;

use beeline_os::numa::{Node, of_device};

use crate::config::Numa;

/// Processors to keep to, and the node they belong to; nothing where any may be used.
///
/// Errors: a node that is not here, or without processors that this process may use.
pub fn choose(wanted: Numa) -> Result<Option<Node>, String> {
    let nodes = beeline_os::numa::nodes().map_err(|error| format!("NUMA nodes: {error}"))?;
    let allowed = beeline_os::affinity::allowed().map_err(|error| error.to_string())?;
    among(wanted, nodes, &allowed, || of_cards(Path::new("/sys/class")))
}

fn among(
    wanted: Numa,
    nodes: Vec<Node>,
    allowed: &[usize],
    cards: impl FnOnce() -> Option<usize>,
) -> Result<Option<Node>, String> {
    let usable = |mut node: Node| {
        node.processors.retain(|processor| allowed.contains(processor));
        (!node.processors.is_empty()).then_some(node)
    };
    let numbers: Vec<String> = nodes.iter().map(|node| node.number.to_string()).collect();
    let nodes: Vec<Node> = nodes.into_iter().filter_map(usable).collect();
    match wanted {
        Numa::Off => Ok(None),
        // With one node every choice is the same.
        Numa::Auto if nodes.len() < 2 => Ok(None),
        Numa::Auto => {
            let number = cards();
            Ok(nodes.into_iter().find(|node| Some(node.number) == number))
        }
        Numa::Node(number) => {
            let number = number as usize;
            let found = nodes.into_iter().find(|node| node.number == number);
            let here = if numbers.is_empty() { "none".to_owned() } else { numbers.join(", ") };
            found.map(Some).ok_or_else(|| {
                format!(
                    "there is no NUMA node {number} with processors for this process; nodes here: \
                     {here}; choose one of them with --objects-numa, or off"
                )
            })
        }
    }
}

/// The node of the RDMA devices, else of the network cards, where all agree.
fn of_cards(classes: &Path) -> Option<usize> {
    ["infiniband", "net"].iter().find_map(|class| {
        let devices = std::fs::read_dir(classes.join(class)).ok()?.flatten();
        let mut nodes: Vec<usize> =
            devices.filter_map(|device| of_device(&device.path())).collect();
        nodes.dedup();
        match nodes[..] {
            [node] => Some(node),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two() -> Vec<Node> {
        let node = |number, processors| Node { number, processors };
        vec![node(0, vec![0, 1]), node(1, vec![2, 3])]
    }

    #[test]
    fn the_cards_node_is_taken_and_nothing_where_there_is_no_choice() {
        let choose = |wanted, nodes, cards: Option<usize>| {
            among(wanted, nodes, &[0, 1, 3], || cards).map(|node| node.map(|node| node.processors))
        };
        assert_eq!(choose(Numa::Auto, two(), Some(1)), Ok(Some(vec![3])));
        assert_eq!(choose(Numa::Auto, two(), None), Ok(None));
        assert_eq!(choose(Numa::Auto, two()[..1].to_vec(), Some(0)), Ok(None));
        assert_eq!(choose(Numa::Auto, Vec::new(), None), Ok(None));
        assert_eq!(choose(Numa::Off, two(), Some(1)), Ok(None));
        assert_eq!(choose(Numa::Node(0), two(), Some(1)), Ok(Some(vec![0, 1])));
        let error = choose(Numa::Node(7), two(), None).unwrap_err();
        assert!(error.contains("nodes here: 0, 1"), "{error}");
        assert!(
            among(Numa::Node(1), two(), &[0], || None).is_err(),
            "no processor of it is allowed"
        );
    }

    #[test]
    fn cards_on_two_nodes_decide_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let card = |class: &str, name: &str, node: &str| {
            let device = folder.path().join(class).join(name).join("device");
            std::fs::create_dir_all(&device).unwrap();
            std::fs::write(device.join("numa_node"), node).unwrap();
        };
        assert_eq!(of_cards(folder.path()), None);
        card("net", "eth0", "1\n");
        assert_eq!(of_cards(folder.path()), Some(1));
        card("net", "eth1", "0\n");
        assert_eq!(of_cards(folder.path()), None);
        card("infiniband", "mlx5_0", "0\n");
        assert_eq!(of_cards(folder.path()), Some(0));
    }
}

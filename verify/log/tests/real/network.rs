//! Network namespaces, one per member, on one bridge or on a switch of the test's own.

use std::fs::File;
use std::process::Command;

use super::Shape;

const ALL: [usize; 3] = [1, 2, 3];

/// Runs a command; whether it ended well.
pub fn run(words: &str) -> bool {
    let mut words = words.split_whitespace();
    let output = Command::new(words.next().unwrap()).args(words).output();
    output.is_ok_and(|output| output.status.success())
}

/// Names of devices are one per machine: another run of these tests waits for its turn, which ends
/// with the file.
pub fn turn(name: &str) -> Option<File> {
    let turn = File::create(std::env::temp_dir().join(format!("beeline-{name}.lock"))).ok()?;
    turn.lock().ok()?;
    Some(turn)
}

/// Three namespaces on one bridge, gone with this.
#[derive(Debug)]
pub struct Network {
    _turn: File,
}

pub fn namespace(node: usize) -> String {
    format!("beelog{}", node)
}

impl Network {
    pub fn new() -> Option<Self> {
        let turn = turn("log-network")?;
        // What a run that was killed left behind.
        Self::remove();
        let network = Self { _turn: turn };
        let mut fine = run("ip link add beelogbr type bridge")
            && run("ip addr add 10.77.91.254/24 dev beelogbr")
            && run("ip link set beelogbr up");
        for node in ALL {
            let name = namespace(node);
            fine = fine
                && run(&format!("ip netns add {name}"))
                && run(&format!("ip link add beelogv{node} type veth peer name eth0 netns {name}"))
                && run(&format!("ip link set beelogv{node} master beelogbr up"))
                && run(&format!("ip -n {name} addr add 10.77.91.{node}/24 dev eth0"))
                && run(&format!("ip -n {name} link set eth0 up"))
                && run(&format!("ip -n {name} link set lo up"));
        }
        fine.then_some(network)
    }

    fn remove() {
        for node in ALL {
            run(&format!("ip netns del {}", namespace(node)));
            run(&format!("ip link del beelogv{node}"));
        }
        run("ip link del beelogbr");
    }

    /// Members that live there, and talk over tcp.
    pub fn shape(&self) -> Shape {
        Shape {
            wrap: |node| ["ip", "netns", "exec", &namespace(node)].map(str::to_owned).to_vec(),
            host: |node| format!("10.77.91.{node}"),
            ..Shape::new("tcp")
        }
    }

    /// Lets a member send and receive so much per second, and hold back what is more for so long.
    /// False where the kernel has no such queue.
    pub fn narrow(&self, node: usize, rate: &str) -> bool {
        let queue = format!("root tbf rate {rate} burst 8kb latency 100ms");
        run(&format!("tc qdisc replace dev beelogv{node} {queue}"))
            && run(&format!("tc -n {} qdisc replace dev eth0 {queue}", namespace(node)))
    }

    /// Takes that back.
    pub fn widen(&self, node: usize) {
        run(&format!("tc qdisc del dev beelogv{node} root"));
        run(&format!("tc -n {} qdisc del dev eth0 root", namespace(node)));
    }

    /// Cuts a member off from everybody, clients included.
    pub fn cut(&self, node: usize) {
        assert!(run(&format!("ip link set beelogv{node} down")));
    }

    pub fn heal(&self, node: usize) {
        assert!(run(&format!("ip link set beelogv{node} up")));
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        Self::remove();
    }
}

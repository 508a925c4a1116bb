//! What a monitor says of itself.

use std::sync::atomic::Ordering;

use crate::monitor::Monitor;
use crate::partition::Counters;

impl Monitor {
    /// What `beeline sockets status` shows: a name and a value a line.
    #[must_use]
    pub fn status(&self) -> Vec<String> {
        let mut lines = vec![
            format!("proxy's process={}", std::process::id()),
            format!("up, seconds={}", self.begun.elapsed().as_secs()),
            format!("listening sockets told of={}", self.listeners.count()),
            format!("connections={}", self.connections.len()),
            format!("connected={}", self.tally.connected),
            format!("accepted={}", self.tally.accepted),
            format!("refused to other hosts={}", self.tally.refused),
            format!("denied={}", self.tally.denied),
            format!("found again after exec={}", self.tally.resumed),
            format!("taken over from a proxy that died={}", self.tally.adopted),
            format!("broken off in a take-over={}", self.tally.not_adopted),
            format!("went on after a new life of the link={}", self.tally.continued),
            format!("moved between partitions={}", self.tally.moved),
            format!("extents given to other hosts={}", self.tally.extents),
            format!("extents refused={}", self.tally.extents_refused),
        ];
        for (why, count) in &self.tally.fallbacks {
            lines.push(format!("left to the kernel: {why}={count}"));
        }
        for remote in &self.remotes {
            let name = &remote.peer.name;
            let state = if remote.is_usable() {
                "up".to_owned()
            } else if remote.is_up() {
                "up, its monitor not reached".to_owned()
            } else {
                format!("down: {}", remote.reason)
            };
            lines.push(format!("link to {name}={state}"));
            let geometry = &remote.geometry;
            let (slot, ring) = (geometry.slot_bytes, geometry.ring_bytes / geometry.slot_bytes);
            lines.push(format!("{name}: slots of a ring={ring} of {slot} bytes"));
            let [bytes, posts] = remote.written();
            lines.push(format!("{name}: bytes posted to the window={bytes}"));
            lines.push(format!("{name}: posts to the window={posts}"));
            for (index, partition) in remote.partitions.iter().enumerate() {
                let count = |of: fn(&Counters) -> &std::sync::atomic::AtomicU64| {
                    of(&partition.counters).load(Ordering::Relaxed)
                };
                let rows: [(&str, u64); 16] = [
                    ("connections", count(|all| &all.connections)),
                    ("packets sent", count(|all| &all.sent_packets)),
                    ("bytes sent", count(|all| &all.sent_bytes)),
                    ("packets received", count(|all| &all.received_packets)),
                    ("bytes received", count(|all| &all.received_bytes)),
                    ("bytes copied", partition.counters.copied_bytes()),
                    ("drops", count(|all| &all.drops)),
                    ("packets of unknown connections", count(|all| &all.strays)),
                    ("sync requests", count(|all| &all.sync_requests)),
                    ("credits sent", count(|all| &all.credits)),
                    ("rings to programs", count(|all| &all.bells)),
                    ("sleeps", count(|all| &all.sleeps)),
                    ("connections broken off", count(|all| &all.resets)),
                    ("turns with work", count(|all| &all.turns)),
                    ("connections moved here", count(|all| &all.moves)),
                    ("rounds ended by the limit", count(|all| &all.limited)),
                ];
                lines.extend(
                    rows.iter()
                        .map(|(row, value)| format!("{name}, partition {index}: {row}={value}")),
                );
            }
        }
        lines
    }
}

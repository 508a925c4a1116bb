//! Limits of the process and of its control group.

use rustix::process::{Resource, getrlimit};

use super::{Finding, Verdict, read};
use crate::config::ServeConfig;
use crate::config::values::human_bytes;

pub fn probe(config: &ServeConfig, findings: &mut Vec<Finding>) {
    findings.push(open_files(config.resp.max_clients.0));
    findings.push(locked_memory());
    findings.push(memory_maps());
    findings.push(backlog());
    findings.push(processor_share());
    findings.push(memory_limit());
}

fn open_files(clients: u32) -> Finding {
    let limit = getrlimit(Resource::Nofile);
    // Segments, sockets of peers, epoll and the rest.
    let wanted = u64::from(clients) + 1024;
    let maximum = limit.maximum.unwrap_or(u64::MAX);
    let seen = format!(
        "{} now, {} at most; {clients} clients want {wanted}",
        limit.current.map_or_else(|| "unlimited".to_owned(), |n| n.to_string()),
        limit.maximum.map_or_else(|| "unlimited".to_owned(), |n| n.to_string()),
    );
    if maximum >= wanted {
        return Finding::ok("open files", seen);
    }
    Finding::advise(
        "open files",
        Verdict::CouldBeFaster,
        seen,
        format!(
            "raise the hard limit (`ulimit -Hn {wanted}`, LimitNOFILE={wanted}) or lower --resp-max-clients"
        ),
    )
}

fn locked_memory() -> Finding {
    let limit = getrlimit(Resource::Memlock).maximum;
    let seen = limit.map_or_else(|| "unlimited".to_owned(), human_bytes);
    if limit.is_none_or(|bytes| bytes >= 64 << 20) {
        return Finding::ok("locked memory", seen);
    }
    Finding::advise(
        "locked memory",
        Verdict::CouldBeFaster,
        seen,
        "RDMA devices lock what they register; `ulimit -l unlimited` (LimitMEMLOCK=infinity)",
    )
}

fn memory_maps() -> Finding {
    let limit = read("/proc/sys/vm/max_map_count").and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    // One map per segment here and one per segment a peer grants us.
    if limit >= 65_530 {
        return Finding::ok("memory maps", format!("{limit} per process"));
    }
    Finding::advise(
        "memory maps",
        Verdict::CouldBeFaster,
        format!("{limit} per process"),
        "each segment takes one; `sysctl -w vm.max_map_count=262144`, or a larger --segment-size",
    )
}

fn backlog() -> Finding {
    let limit =
        read("/proc/sys/net/core/somaxconn").and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    if limit >= 1024 {
        return Finding::ok("listen backlog", limit.to_string());
    }
    Finding::advise(
        "listen backlog",
        Verdict::CouldBeFaster,
        limit.to_string(),
        "a burst of new clients waits for retries; `sysctl -w net.core.somaxconn=4096`",
    )
}

/// A file of this process's control group, version 2.
fn control_group(file: &str) -> Option<String> {
    let own = read("/proc/self/cgroup")?;
    let path = own.lines().find_map(|line| line.strip_prefix("0::"))?.to_owned();
    read(&format!("/sys/fs/cgroup{}/{file}", path.trim_end_matches('/')))
        .or_else(|| read(&format!("/sys/fs/cgroup/{file}")))
}

fn processor_share() -> Finding {
    let Some(text) = control_group("cpu.max") else {
        return Finding::ok("processor share", "no control-group limit");
    };
    let mut words = text.split(' ');
    let quota = words.next().and_then(|w| w.parse::<u64>().ok());
    let period = words.next().and_then(|w| w.parse::<u64>().ok()).unwrap_or(100_000).max(1);
    match quota {
        None => Finding::ok("processor share", "no control-group limit"),
        Some(quota) => Finding::advise(
            "processor share",
            Verdict::CouldBeFaster,
            format!("{} % of one core", quota * 100 / period),
            "a throttled shard stalls for the rest of its period; raise cpu.max, or set --shards to the share",
        ),
    }
}

fn memory_limit() -> Finding {
    match control_group("memory.max").and_then(|text| text.parse::<u64>().ok()) {
        None => Finding::ok("memory limit", "no control-group limit"),
        Some(bytes) => Finding::advise(
            "memory limit",
            Verdict::CouldBeFaster,
            human_bytes(bytes),
            "pages of the pool count against it; set --max-memory well below, or raise memory.max",
        ),
    }
}

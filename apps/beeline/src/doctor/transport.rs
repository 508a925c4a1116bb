//! Fabric providers and why each is usable or not; ports.

use std::net::TcpListener;

use super::{Finding, Verdict};
use crate::config::ServeConfig;
use crate::config::values::Door;

pub fn probe(config: &ServeConfig, findings: &mut Vec<Finding>) {
    findings.push(shm());
    findings.push(tcp());
    findings.push(rdma());
    findings.push(windows());
    for (what, door) in [
        ("RESP port", config.resp_address),
        ("status port", config.http_address),
        ("fabric port", config.fabric_address),
    ] {
        findings.extend(port(what, door));
    }
}

fn shm() -> Finding {
    match beeline_os::probe::memfd().and_then(|()| beeline_os::probe::pidfd()) {
        Ok(()) => {
            Finding::ok("fabric shm", "usable: peers on this host, no system call per operation")
        }
        Err(error) => Finding::advise(
            "fabric shm",
            Verdict::Missing,
            format!("not usable: {error}"),
            "it needs memfd and pidfd, Linux 5.3 or later; peers on this host fall back to tcp",
        ),
    }
}

fn tcp() -> Finding {
    Finding::ok("fabric tcp", "usable: peers anywhere; operations run on a thread at the target")
}

fn names(directory: &str) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn rdma() -> Finding {
    let devices = names("/sys/class/infiniband");
    if devices.is_empty() {
        return Finding::advise(
            "RDMA devices",
            Verdict::Missing,
            "none in /sys/class/infiniband",
            "a NIC with RDMA, or `rdma link add rxe0 type rxe netdev eth0` to try it in software; \
             this version has no verbs provider yet",
        );
    }
    Finding::advise(
        "RDMA devices",
        Verdict::CouldBeFaster,
        devices.join(", "),
        "this version has no verbs provider yet; hosts are connected through tcp",
    )
}

fn windows() -> Finding {
    let devices = names("/sys/bus/ntb/devices");
    if devices.is_empty() {
        return Finding::advise(
            "PCIe windows (NTB)",
            Verdict::Missing,
            "none in /sys/bus/ntb/devices",
            "a non-transparent bridge between hosts; this version has no ntb provider yet",
        );
    }
    Finding::advise(
        "PCIe windows (NTB)",
        Verdict::CouldBeFaster,
        devices.join(", "),
        "this version has no ntb provider yet; hosts are connected through tcp",
    )
}

fn port(what: &'static str, door: Door) -> Option<Finding> {
    let address = door.0?;
    Some(match TcpListener::bind(address) {
        Ok(_) => Finding::ok(what, format!("{address} is free")),
        Err(error) => Finding::advise(
            what,
            Verdict::Broken,
            format!("{address}: {error}"),
            "a node may be running there already; stop it, or choose another address",
        ),
    })
}

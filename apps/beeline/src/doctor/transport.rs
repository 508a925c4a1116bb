//! Fabric providers and why each is usable or not; ports.

use std::net::TcpListener;

use super::{Finding, Verdict};
use crate::config::ServeConfig;
use crate::config::values::Door;

pub fn probe(config: &ServeConfig, findings: &mut Vec<Finding>) {
    findings.push(provider(
        "fabric shm",
        "shm://",
        "peers on this host",
        "it needs memfd, pidfd and Unix sockets; peers on this host fall back to tcp",
    ));
    findings.push(provider(
        "fabric tcp",
        "tcp://",
        "peers anywhere",
        "it needs a free port on loopback; look at the limits on open files and ports",
    ));
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

/// Opens each provider as `serve` would.
fn provider(what: &'static str, url: &str, usable: &str, advice: &str) -> Finding {
    match beeline_fabric_open::open(url) {
        Ok(device) => {
            let attributes = device.attributes();
            let side = if attributes.one_sided {
                "no code runs at the target"
            } else {
                "a thread runs at the target"
            };
            let flush = attributes.persistent_flush;
            Finding::ok(what, format!("usable: {usable}; {side}; persistent flush: {flush}"))
        }
        Err(error) => {
            Finding::advise(what, Verdict::Missing, format!("not usable: {error}"), advice)
        }
    }
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

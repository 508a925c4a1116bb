//! Fabric providers and why each is usable or not; ports.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::path::Path;

use beeline_pmem::{PmemError, Pool};

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
    findings.push(provider(
        "fabric ntb",
        "ntb://",
        "peers behind a memory window, emulated on this host",
        "it needs memfd, timerfd and Unix sockets",
    ));
    findings.push(rdma());
    findings.push(windows());
    let node_runs = matches!(Pool::check_free(&config.data), Err(PmemError::Busy { .. }));
    for (what, door) in [
        ("RESP port", config.resp.address),
        ("status port", config.http_address),
        ("fabric port", config.fabric_address),
    ] {
        findings.extend(port(what, door, node_runs));
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

fn rdma() -> Finding {
    use beeline_fabric_open::rdma::devices;

    let what = "fabric verbs (RDMA)";
    match devices() {
        // What is missing names its remedy.
        Err(missing) => Finding::advise(
            what,
            Verdict::Optional,
            missing.to_string(),
            "hosts are connected through tcp",
        ),
        Ok(found) => {
            let words: Vec<_> = found
                .iter()
                .map(|device| match &device.choice {
                    Ok(choice) => {
                        let flush = if device.native_flush.1 {
                            "; persistent flush: a read behind the writes (its own FLUSH is not used)"
                        } else {
                            "; persistent flush: a read behind the writes"
                        };
                        let dax = if device.on_demand_paging {
                            "registered in place (on-demand paging)"
                        } else {
                            "copied through ordinary memory (no on-demand paging)"
                        };
                        let name = &device.name;
                        format!("{name}: usable, {choice}{flush}; entries of DAX pools are {dax}")
                    }
                    Err(missing) => missing.to_string(),
                })
                .collect();
            let seen = words.join("; ");
            if found.iter().any(|device| device.choice.is_ok()) {
                Finding::ok(
                    what,
                    format!("{seen}; serve it with --fabric-address on an address of its link"),
                )
            } else {
                let advice = "hosts are connected through tcp until a port is usable";
                Finding::advise(what, Verdict::CouldBeFaster, seen, advice)
            }
        }
    }
}

fn windows() -> Finding {
    use beeline_fabric_open::windows::{Kind, devices};

    let what = "PCIe windows (NTB)";
    let found = devices(Path::new("/sys"));
    let usable = found.iter().find_map(|device| Some((device.window.as_ref()?, device.interrupts)));
    if let Some((file, interrupts)) = usable {
        let woken = if interrupts {
            "woken by its interrupts"
        } else {
            "looked at by a timer, unless it has interrupts and is bound to vfio-pci"
        };
        let file = file.display();
        return Finding::ok(
            what,
            format!(
                "a shared-memory device, {woken}; serve it with --fabric-window {file}, and clients \
                 find it by themselves"
            ),
        );
    }
    if found.iter().any(|device| device.kind == Kind::Bridge) {
        let names: Vec<_> = found.into_iter().map(|device| device.name).collect();
        return Finding::advise(
            what,
            Verdict::CouldBeFaster,
            names.join(", "),
            "serve it with --fabric-window \
             '/INBOUND?outbound=/sys/bus/pci/devices/…/resource2_wc&side=0', where INBOUND maps the \
             memory behind the other end's window",
        );
    }
    Finding::advise(
        what,
        Verdict::Optional,
        "no bridge in /sys/bus/ntb/devices, no shared-memory device on the PCI bus",
        "a non-transparent bridge between hosts, or `-device ivshmem-plain` between virtual \
         machines; ntb:// emulates one between processes of this host",
    )
}

fn port(what: &'static str, door: Door, node_runs: bool) -> Option<Finding> {
    let address = door.0?;
    Some(match TcpListener::bind(address) {
        Ok(_) => Finding::ok(what, format!("{address} is free")),
        Err(error) if node_runs && error.kind() == ErrorKind::AddrInUse => {
            Finding::ok(what, format!("{address} is in use; a node runs on the data directory"))
        }
        Err(error) => Finding::advise(
            what,
            Verdict::Broken,
            format!("{address}: {error}"),
            "a node may be running there already; stop it, or choose another address",
        ),
    })
}

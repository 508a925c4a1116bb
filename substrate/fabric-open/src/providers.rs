//! From URL to device.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use beeline_fabric::{Device, FabricError};
use beeline_fabric_ntb::{Disorder, FixedWindow, NtbConfig, Pace, Port, Portion, Side};
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_fabric_sim::{SimOptions, SimWorld};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};
use beeline_fabric_verbs::{VerbsConfig, VerbsDevice, VerbsError};

use crate::error::OpenError;
use crate::url::split;

/// Providers this build has, best first, with what each is for.
pub const PROVIDERS: &[(&str, &str)] = &[
    ("shm", "shared memory, on one host"),
    ("process", "memory of this process, for services that talk to themselves"),
    ("ntb", "a memory window between hosts; emulated on one host"),
    ("verbs", "RDMA between hosts: InfiniBand, RoCE, soft-RoCE; through rdma-core"),
    ("tcp", "a library thread at the target; works everywhere"),
    ("sim", "virtual time, seeded; for simulation"),
];

/// Opens a device:
///
/// - `shm://`
/// - `process://`: for peers in this process
/// - `tcp://` (loopback, any port), `tcp://ADDRESS[:PORT]`, with `?advertise=ADDRESS` when peers
///   reach this host by another one
/// - `verbs://` (the first RDMA device with an active port), `verbs://DEVICE`, with `?port=N`,
///   `&gid=N` (index), `&address=ADDRESS` (the one of its addresses to use) and `&durable=1` (the
///   user vouches that what leaves the card reaches durable memory)
/// - `ntb://` (emulated between processes of this host), with `?memory_mib=N` for memory that peers
///   write by themselves; with `?seed=N[&delay_us=N]` posted writes are reordered and delayed;
///   `ntb:///FILE?side=0` or `1`, a fixed window in a file that holds
///   both ends' halves, and with `&outbound=/FILE` in two files; `&part=K/N`: the K-th of N parts of it
/// - `sim://seed=N[&node=N]`: one node of a world of its own
///
/// Errors: [`OpenError::Url`], [`OpenError::Fabric`]; [`OpenError::Rdma`] in words that say what
/// this machine lacks.
pub fn open(url: &str) -> Result<Arc<dyn Device>, OpenError> {
    let bad = |reason| OpenError::Url { url: url.to_owned(), reason };
    let (scheme, rest) = split(url).ok_or_else(|| bad("it has no scheme"))?;
    match scheme {
        "shm" if rest.is_empty() => open_shm(),
        "process" if rest.is_empty() => Ok(ShmDevice::in_process(ShmConfig::default())?),
        "shm" | "process" => Err(bad("shm:// and process:// take nothing")),
        "tcp" => Ok(TcpDevice::open(tcp_config(rest).map_err(bad)?)?),
        "verbs" => open_verbs(verbs_config(rest).map_err(bad)?),
        "ntb" => Ok(crate::window::device(ntb_config(rest).map_err(bad)?)?),
        "sim" => {
            let (seed, node) = sim_numbers(rest).map_err(bad)?;
            Ok(SimWorld::new(seed, SimOptions::default()).device(node))
        }
        _ => Err(bad("unknown provider")),
    }
}

fn open_shm() -> Result<Arc<dyn Device>, OpenError> {
    Ok(ShmDevice::open(ShmConfig::default())?)
}

fn open_verbs(config: VerbsConfig) -> Result<Arc<dyn Device>, OpenError> {
    VerbsDevice::open(config).map_err(|error| match error {
        VerbsError::Missing(missing) => OpenError::Rdma(missing),
        VerbsError::Fabric(error) => OpenError::Fabric(error),
        other => OpenError::Fabric(FabricError::System {
            action: "opening an RDMA device",
            source: std::io::Error::other(other.to_string()),
        }),
    })
}

fn verbs_config(rest: &str) -> Result<VerbsConfig, &'static str> {
    let mut config = VerbsConfig::default();
    let (device, query) = rest.split_once('?').unwrap_or((rest, ""));
    let device = device.trim_end_matches('/');
    if !device.is_empty() {
        config.device = Some(device.to_owned());
    }
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("port", value)) => {
                config.port = Some(value.parse().map_err(|_| "port is a number from 1 to 255")?);
            }
            Some(("gid", value)) => {
                let index = value.parse().map_err(|_| "gid is an index from 0 to 255")?;
                config.gid_index = Some(index);
            }
            Some(("address", ip)) => {
                config.address = Some(ip.parse().map_err(|_| "address takes an IP address")?);
            }
            Some(("durable", "0")) => config.reads_reach_persistence = false,
            Some(("durable", "1")) => config.reads_reach_persistence = true,
            Some(("durable", _)) => return Err("durable is 0 or 1"),
            _ => return Err("verbs:// takes port, gid, address and durable"),
        }
    }
    Ok(config)
}

fn tcp_config(rest: &str) -> Result<TcpConfig, &'static str> {
    let mut config = TcpConfig::default();
    let (address, query) = rest.split_once('?').unwrap_or((rest, ""));
    let address = address.trim_end_matches('/');
    if !address.is_empty() {
        config.bind = match address.parse::<SocketAddr>() {
            Ok(address) => address,
            Err(_) => {
                let ip: IpAddr = address
                    .trim_matches(['[', ']'])
                    .parse()
                    .map_err(|_| "a device binds to an IP address, perhaps with a port")?;
                SocketAddr::new(ip, 0)
            }
        };
    }
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("advertise", ip)) => {
                config.advertise = Some(ip.parse().map_err(|_| "advertise takes an IP address")?);
            }
            _ => return Err("the only parameter is advertise"),
        }
    }
    Ok(config)
}

pub(crate) fn ntb_config(rest: &str) -> Result<NtbConfig, &'static str> {
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (mut disorder, mut side, mut outbound, mut memory) = (None, None, None, 0);
    let mut portion = None;
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').ok_or("a parameter has a value")?;
        let number =
            || value.parse::<u64>().map_err(|_| "seed, delay_us, memory_mib and side are numbers");
        match name {
            "seed" => disorder.get_or_insert_with(Disorder::default).seed = number()?,
            "delay_us" => {
                let delay = std::time::Duration::from_micros(number()?);
                disorder.get_or_insert_with(Disorder::default).pace = Pace::After(delay);
            }
            "side" => {
                side = Some(match number()? {
                    0 => Side::First,
                    1 => Side::Second,
                    _ => return Err("a side is 0 or 1"),
                });
            }
            "memory_mib" => memory = number()?,
            "outbound" => outbound = Some(value.into()),
            "part" => portion = Some(value.parse::<Portion>()?),
            _ => {
                return Err(
                    "the parameters are seed, delay_us, memory_mib, side, outbound and part",
                );
            }
        }
    }
    let port = match (path, side, outbound, disorder) {
        ("", None, None, disorder) if portion.is_none() => Port::Emulated { disorder },
        ("", ..) => return Err("side, part and outbound belong to a window's file"),
        (_, Some(side), outbound, None) if path.starts_with('/') => {
            let portion = portion.unwrap_or_default();
            Port::Fixed(FixedWindow { inbound: path.into(), outbound, side, portion })
        }
        (_, None, ..) => return Err("a window's file needs side=0 or side=1"),
        _ => return Err("a window's file is an absolute path; only the emulation is disordered"),
    };
    let window_memory_bytes = usize::try_from(memory.saturating_mul(1 << 20)).unwrap_or(usize::MAX);
    if memory > 1 << 20 || (memory > 0 && matches!(port, Port::Fixed(_))) {
        return Err("memory_mib belongs to the emulation, up to 1048576");
    }
    Ok(NtbConfig { port, window_memory_bytes, ..NtbConfig::default() })
}

fn sim_numbers(rest: &str) -> Result<(u64, u32), &'static str> {
    let (mut seed, mut node) = (None, 1);
    for pair in rest.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("seed", value)) => {
                seed = Some(value.parse().map_err(|_| "seed is a number")?);
            }
            Some(("node", value)) => node = value.parse().map_err(|_| "node is a number")?,
            _ => return Err("sim:// takes seed and node"),
        }
    }
    Ok((seed.ok_or("sim:// needs a seed")?, node))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_rdma_device_claims_durability_only_where_its_url_says_so() {
        assert!(!verbs_config("rxe0?port=1").unwrap().reads_reach_persistence);
        assert!(verbs_config("rxe0?port=1&durable=1").unwrap().reads_reach_persistence);
        assert!(verbs_config("?durable=yes").is_err());
    }

    #[test]
    fn devices_open_by_url() {
        assert_eq!(open("shm://").unwrap().attributes().provider, "shm");
        assert_eq!(open("process://").unwrap().attributes().provider, "process");
        assert_eq!(open("tcp://").unwrap().attributes().provider, "tcp");
        assert_eq!(open("tcp://127.0.0.1").unwrap().attributes().provider, "tcp");
        assert_eq!(
            open("tcp://127.0.0.1:0?advertise=10.0.0.1").unwrap().attributes().provider,
            "tcp"
        );
        assert_eq!(open("ntb://?seed=3&delay_us=10").unwrap().attributes().provider, "ntb");
        assert_eq!(open("sim://seed=3&node=2").unwrap().attributes().provider, "sim");
        for url in [
            "tcp://host",
            "process://n1",
            "sim://",
            "sim://seed=x",
            "verbs://rxe0?door=1",
            "verbs://?port=x",
            "tcp",
            "tcp://?x=1",
            "ntb://?x=1",
            "ntb:///f",
            "ntb://?side=0",
            "ntb://?part=0/2",
            "ntb:///f?side=0&part=2/2",
            "ntb://f?side=0",
        ] {
            assert!(matches!(open(url), Err(OpenError::Url { .. })), "{url}");
        }
    }
}

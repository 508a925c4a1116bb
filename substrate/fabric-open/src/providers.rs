//! From URL to device.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use beeline_fabric::Device;
use beeline_fabric_shm::{ShmConfig, ShmDevice};
use beeline_fabric_sim::{SimOptions, SimWorld};
use beeline_fabric_tcp::{TcpConfig, TcpDevice};

use crate::error::OpenError;
use crate::url::split;

/// Providers this build has, best first, with what each is for.
pub const PROVIDERS: &[(&str, &str)] = &[
    ("shm", "shared memory, on one host"),
    ("tcp", "a library thread at the target; works everywhere"),
    ("sim", "virtual time, seeded; for simulation"),
];

/// Opens a device:
///
/// - `shm://`
/// - `tcp://` (loopback, any port), `tcp://ADDRESS[:PORT]`, with `?advertise=ADDRESS` when peers
///   reach this host by another one
/// - `sim://seed=N[&node=N]`: one node of a world of its own
///
/// Errors: [`OpenError::Url`], [`OpenError::Fabric`].
pub fn open(url: &str) -> Result<Arc<dyn Device>, OpenError> {
    let bad = |reason| OpenError::Url { url: url.to_owned(), reason };
    let (scheme, rest) = split(url).ok_or_else(|| bad("it has no scheme"))?;
    match scheme {
        "shm" if rest.is_empty() => open_shm(),
        "shm" => Err(bad("shm:// takes nothing")),
        "tcp" => Ok(TcpDevice::open(tcp_config(rest).map_err(bad)?)?),
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
    fn devices_open_by_url() {
        assert_eq!(open("shm://").unwrap().attributes().provider, "shm");
        assert_eq!(open("tcp://").unwrap().attributes().provider, "tcp");
        assert_eq!(open("tcp://127.0.0.1").unwrap().attributes().provider, "tcp");
        assert_eq!(
            open("tcp://127.0.0.1:0?advertise=10.0.0.1").unwrap().attributes().provider,
            "tcp"
        );
        assert_eq!(open("sim://seed=3&node=2").unwrap().attributes().provider, "sim");
        for url in ["tcp://host", "sim://", "sim://seed=x", "verbs://", "tcp", "tcp://?x=1"] {
            assert!(matches!(open(url), Err(OpenError::Url { .. })), "{url}");
        }
    }
}

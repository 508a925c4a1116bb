//! Devices, their ports, their addresses: what is there, and which is used.
//!
//! The kind of a GID (RoCE v1 or v2) and its network device are read from sysfs, where every
//! kernel with RDMA has them; the GID itself comes from the library.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use crate::abi::{self, Gid};
use crate::handle::{Context, DeviceList};
use crate::library::{Missing, load};
use crate::options::{VerbsConfig, mtu_bytes};

/// What a GID is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GidKind {
    /// InfiniBand, or RoCE v1 (not routable).
    InfiniBandOrRoceV1,
    /// RoCE v2: UDP over IP.
    RoceV2,
}

/// One address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GidEntry {
    /// Place in the port's table.
    pub index: u8,
    /// Kind.
    pub kind: GidKind,
    /// Raw bytes, network order.
    pub raw: [u8; 16],
}

impl GidEntry {
    /// The IP address it stands for: IPv4-mapped ones as IPv4.
    #[must_use]
    pub fn ip(&self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.raw);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    fn is_link_local(&self) -> bool {
        self.raw[0] == 0xfe && self.raw[1] & 0xc0 == 0x80
    }
}

/// What kind of network a port is on; two ends need the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkLayer {
    /// InfiniBand.
    InfiniBand,
    /// Ethernet: RoCE.
    Ethernet,
}

/// One port of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortReport {
    /// From 1.
    pub number: u8,
    /// True when packets flow.
    pub active: bool,
    /// Its network; `None` for one this provider cannot use.
    pub link_layer: Option<LinkLayer>,
    /// Active path MTU, bytes.
    pub mtu_bytes: u32,
    /// Addresses, empty ones left out.
    pub gids: Vec<GidEntry>,
    pub(crate) lid: u16,
    pub(crate) max_message_bytes: u32,
    pub(crate) mtu: u8,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    /// Its name.
    pub name: String,
    /// Its ports.
    pub ports: Vec<PortReport>,
    /// Deepest queue, requests.
    pub max_queue_depth: u32,
    /// Most memory regions.
    pub max_regions: u32,
    /// The device's own FLUSH operation: visible, persistent.
    pub native_flush: (bool, bool),
    /// Registers memory that the kernel does not pin, such as that of a DAX file system (on-demand
    /// paging), in a way that can be relied on: soft-RoCE's cannot.
    pub on_demand_paging: bool,
    /// Completion events can be moderated.
    pub moderation: bool,
    /// The port and address that would be used, or why none.
    pub choice: Result<String, Missing>,
}

fn gid_kind(device: &str, port: u8, index: u16) -> GidKind {
    let path = format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}");
    match std::fs::read_to_string(Path::new(&path)) {
        Ok(text) if text.trim() == "RoCE v2" => GidKind::RoceV2,
        _ => GidKind::InfiniBandOrRoceV1,
    }
}

/// Reads a port and its addresses; `None` when the port does not answer.
pub(crate) fn port(context: &Context, name: &str, number: u8) -> Option<PortReport> {
    let attributes = context.query_port(number).ok()?;
    let mut gids = Vec::new();
    // Tables are a few hundred entries long at most, most of them empty.
    for index in 0..u16::try_from(attributes.gid_tbl_len.clamp(0, 256)).unwrap_or(0) {
        let Some(Gid(raw)) = context.query_gid(number, index.into()) else { continue };
        let Ok(short) = u8::try_from(index) else { break };
        if raw == [0; 16] {
            continue;
        }
        gids.push(GidEntry { index: short, kind: gid_kind(name, number, index), raw });
    }
    Some(PortReport {
        number,
        active: attributes.state == abi::PORT_ACTIVE,
        link_layer: match attributes.link_layer {
            abi::LINK_ETHERNET => Some(LinkLayer::Ethernet),
            // Old drivers leave it unspecified on InfiniBand.
            0 | abi::LINK_INFINIBAND => Some(LinkLayer::InfiniBand),
            _ => None,
        },
        mtu_bytes: mtu_bytes(attributes.active_mtu),
        gids,
        lid: attributes.lid,
        max_message_bytes: attributes.max_msg_sz,
        mtu: u8::try_from(attributes.active_mtu).unwrap_or(1),
    })
}

/// The address to use on a port.
///
/// On Ethernet, best first: the RoCE v2 entry of `wanted`; of any IPv4 address; of an IPv6 address
/// that is not link-local; any RoCE v2. RoCE v1 is not used unless its index is given.
pub(crate) fn choose_gid(
    port: &PortReport,
    config: &VerbsConfig,
) -> Result<GidEntry, &'static str> {
    if let Some(index) = config.gid_index {
        let given = port.gids.iter().find(|gid| gid.index == index);
        return given.copied().ok_or("its GID table has nothing at the index asked for");
    }
    if port.link_layer == Some(LinkLayer::InfiniBand) {
        return port.gids.first().copied().ok_or("its GID table is empty");
    }
    let worth = |gid: &GidEntry| match gid.ip() {
        ip if Some(ip) == config.address => 3,
        IpAddr::V4(_) => 2,
        IpAddr::V6(_) if !gid.is_link_local() => 1,
        IpAddr::V6(_) => 0,
    };
    let best = port
        .gids
        .iter()
        .filter(|gid| gid.kind == GidKind::RoceV2)
        .rev()
        .max_by_key(|gid| worth(gid))
        .copied()
        .ok_or("it has no RoCE v2 address: give its network device an IP address")?;
    if config.address.is_some_and(|wanted| wanted != best.ip()) {
        return Err("none of its RoCE v2 addresses is the one asked for");
    }
    Ok(best)
}

/// The port and address of a device, by the configuration.
pub(crate) fn choose(
    name: &str,
    ports: &[PortReport],
    config: &VerbsConfig,
) -> Result<(PortReport, GidEntry), Missing> {
    let refused = |reason: String| Missing::Port { device: name.to_owned(), reason };
    let mut reasons = Vec::new();
    for port in ports {
        if config.port.is_some_and(|wanted| wanted != port.number) {
            continue;
        }
        let reason = if !port.active {
            "it is not active"
        } else if port.link_layer.is_none() {
            "it is on a network that is neither InfiniBand nor Ethernet"
        } else {
            match choose_gid(port, config) {
                Ok(gid) => return Ok((port.clone(), gid)),
                Err(reason) => reason,
            }
        };
        reasons.push(format!("port {}: {reason}", port.number));
    }
    if reasons.is_empty() {
        reasons.push("it has no such port".to_owned());
    }
    Err(refused(reasons.join("; ")))
}

fn report(context: &Context, name: &str) -> DeviceReport {
    let attributes = context.query_device();
    let (max_queue_depth, max_regions, count) = match &attributes {
        Ok(found) => (found.max_qp_wr, found.max_mr, found.phys_port_cnt),
        Err(_) => (0, 0, 1),
    };
    let ports: Vec<_> = (1..=count).filter_map(|number| port(context, name, number)).collect();
    let extended = context.query_device_ex();
    let flags = extended.as_ref().map_or(0, |found| found.device_cap_flags_ex);
    let chosen = choose(name, &ports, &VerbsConfig::default());
    let choice = chosen.map(|(port, gid)| {
        format!("port {}, GID {} ({}), MTU {}", port.number, gid.index, gid.ip(), port.mtu_bytes)
    });
    DeviceReport {
        name: name.to_owned(),
        ports,
        max_queue_depth: u32::try_from(max_queue_depth).unwrap_or(0),
        max_regions: u32::try_from(max_regions).unwrap_or(0),
        on_demand_paging: extended.as_ref().is_some_and(|found| found.pages_on_demand()),
        native_flush: (flags & abi::CAP_FLUSH_GLOBAL != 0, flags & abi::CAP_FLUSH_PERSISTENT != 0),
        moderation: extended.is_some_and(|found| found.max_cq_count > 0),
        choice,
    }
}

/// Every RDMA device of this machine.
///
/// Errors: [`Missing`]: no library, no device.
pub fn devices() -> Result<Vec<DeviceReport>, Missing> {
    let library = load()?;
    let list = DeviceList::new(library).map_err(|_| Missing::Device)?;
    let mut reports = Vec::new();
    for index in 0..list.len() {
        let name = list.name(index);
        match list.open(index) {
            Ok(context) => reports.push(report(&context, &name)),
            Err(error) => reports.push(DeviceReport {
                name: name.clone(),
                ports: Vec::new(),
                max_queue_depth: 0,
                max_regions: 0,
                native_flush: (false, false),
                on_demand_paging: false,
                moderation: false,
                choice: Err(Missing::Port { device: name, reason: error.to_string() }),
            }),
        }
    }
    if reports.is_empty() { Err(Missing::Device) } else { Ok(reports) }
}

/// A C string of a fixed field.
pub(crate) fn text(bytes: &[std::ffi::c_char]) -> String {
    let bytes: Vec<u8> = bytes.iter().map(|&byte| byte.cast_unsigned()).collect();
    match CStr::from_bytes_until_nul(&bytes) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    }
}

/// True for an address a peer on another machine could not use.
pub(crate) fn needs_filling(ip: IpAddr) -> bool {
    match ip {
        IpAddr::V4(ip) => ip == Ipv4Addr::UNSPECIFIED,
        IpAddr::V6(ip) => ip.is_unspecified() || ip.is_unicast_link_local(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(index: u8, kind: GidKind, ip: &str) -> GidEntry {
        let raw = match ip.parse().unwrap() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
            IpAddr::V6(ip) => ip.octets(),
        };
        GidEntry { index, kind, raw }
    }

    fn roce(gids: Vec<GidEntry>) -> PortReport {
        PortReport {
            number: 1,
            active: true,
            link_layer: Some(LinkLayer::Ethernet),
            mtu_bytes: 1024,
            gids,
            lid: 0,
            max_message_bytes: 1 << 30,
            mtu: 3,
        }
    }

    #[test]
    fn the_routable_ipv4_address_of_roce_v2_wins() {
        let (v1, v2) = (GidKind::InfiniBandOrRoceV1, GidKind::RoceV2);
        let port = roce(vec![
            gid(0, v1, "fe80::1"),
            gid(1, v2, "fe80::1"),
            gid(2, v1, "10.0.0.1"),
            gid(3, v2, "10.0.0.1"),
            gid(4, v2, "2001:db8::1"),
            gid(5, v2, "10.0.0.2"),
        ]);
        let pick = |config: &VerbsConfig| choose_gid(&port, config).map(|gid| gid.index);
        assert_eq!(pick(&VerbsConfig::default()), Ok(3));
        let second = Some("10.0.0.2".parse().unwrap());
        assert_eq!(pick(&VerbsConfig { address: second, ..VerbsConfig::default() }), Ok(5));
        let foreign = Some("10.0.0.3".parse().unwrap());
        assert!(pick(&VerbsConfig { address: foreign, ..VerbsConfig::default() }).is_err());
        assert_eq!(pick(&VerbsConfig { gid_index: Some(0), ..VerbsConfig::default() }), Ok(0));
        assert!(pick(&VerbsConfig { gid_index: Some(9), ..VerbsConfig::default() }).is_err());
    }

    #[test]
    fn a_refusal_says_what_each_port_lacks() {
        let mut down = roce(vec![gid(0, GidKind::RoceV2, "10.0.0.1")]);
        down.active = false;
        let bare = PortReport { number: 2, ..roce(Vec::new()) };
        let ports = [down, bare];
        let error = choose("mlx5_0", &ports, &VerbsConfig::default()).unwrap_err().to_string();
        assert!(error.contains("mlx5_0") && error.contains("port 1: it is not active"), "{error}");
        assert!(error.contains("port 2: it has no RoCE v2 address"), "{error}");
        let config = VerbsConfig { port: Some(7), ..VerbsConfig::default() };
        let error = choose("mlx5_0", &ports, &config).unwrap_err().to_string();
        assert!(error.contains("no such port"), "{error}");
    }
}

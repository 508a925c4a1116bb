//! A long TCP segment as several packets, where a sender left that to its device.
//!
//! This host's own network stack hands a device (a veth pair, say) up to 64 KiB of a connection as one
//! packet. The next interface takes no more than its MTU, so what goes out is cut here.

use super::checksum::{complete, folded, sum};

const FIN_PUSH: u8 = 0x09;
const REDUCED: u8 = 0x80;

/// Calls `each` with packets whose network part has at most `mtu` bytes; false, without a call, where
/// the packet is no TCP segment over IPv4 or over IPv6 without extension headers, or is short enough.
pub(super) fn segments(packet: &[u8], mtu: usize, mut each: impl FnMut(&[u8])) -> bool {
    let Some(parts) = Parts::of(packet) else { return false };
    let heads = parts.payload - parts.network;
    let most = mtu.saturating_sub(heads);
    if parts.end - parts.network <= mtu || most == 0 {
        return false;
    }
    let payload = &packet[parts.payload..parts.end];
    let count = payload.len().div_ceil(most);
    let mut made = Vec::with_capacity(parts.network + mtu);
    for (at, chunk) in payload.chunks(most).enumerate() {
        made.clear();
        made.extend_from_slice(&packet[..parts.payload]);
        made.extend_from_slice(chunk);
        let ip = &mut made[parts.network..];
        let length = u16::try_from(heads + chunk.len()).unwrap_or(u16::MAX);
        let number = u16::try_from(at).unwrap_or(0);
        if parts.first_version {
            ip[2..4].copy_from_slice(&length.to_be_bytes());
            let id = u16::from_be_bytes([ip[4], ip[5]]).wrapping_add(number);
            ip[4..6].copy_from_slice(&id.to_be_bytes());
            ip[10..12].fill(0);
            let checksum = !folded(sum(&ip[..parts.transport - parts.network]));
            ip[10..12].copy_from_slice(&checksum.to_be_bytes());
        } else {
            ip[4..6].copy_from_slice(&(length - 40).to_be_bytes());
        }
        let tcp = &mut made[parts.transport..];
        let before = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
        let sequence = before.wrapping_add(u32::try_from(at * most).unwrap_or(0));
        tcp[4..8].copy_from_slice(&sequence.to_be_bytes());
        if at + 1 < count {
            tcp[13] &= !FIN_PUSH;
        }
        if at > 0 {
            tcp[13] &= !REDUCED;
        }
        complete(&mut made);
        each(&made);
    }
    true
}

/// Where the parts of a TCP segment begin, and where it ends.
struct Parts {
    /// IPv4, not IPv6.
    first_version: bool,
    network: usize,
    transport: usize,
    payload: usize,
    end: usize,
}

impl Parts {
    fn of(packet: &[u8]) -> Option<Self> {
        let half = |at: usize| {
            packet.get(at..at + 2).map(|pair| usize::from(u16::from_be_bytes([pair[0], pair[1]])))
        };
        let mut at = 12;
        while let 0x8100 | 0x88a8 = half(at)? {
            at += 4;
        }
        let network = at + 2;
        let ip = packet.get(network..)?;
        let (first_version, protocol, head, length) = match half(at)? {
            0x0800 => (true, *ip.get(9)?, usize::from(ip[0] & 15) * 4, half(network + 2)?),
            0x86dd => (false, *ip.get(6)?, 40, 40 + half(network + 4)?),
            _ => return None,
        };
        let transport = network + head;
        let payload = transport + usize::from(*packet.get(transport + 12)? >> 4) * 4;
        let end = network + length;
        let whole = head >= 20 && payload >= transport + 20 && payload < end && end <= packet.len();
        (protocol == 6 && whole).then_some(Self { first_version, network, transport, payload, end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A segment of `bytes` payload bytes over IPv4, tagged or not; PSH, ACK and CWR are set.
    fn segment(bytes: usize, tag: bool) -> Vec<u8> {
        let mut packet = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1];
        if tag {
            packet.extend([0x81, 0, 0, 7]);
        }
        packet.extend([8, 0, 0x45, 0]);
        packet.extend(u16::try_from(40 + bytes).unwrap().to_be_bytes());
        packet.extend([0, 9, 0x40, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        packet.extend([0, 80, 1, 0, 0xff, 0xff, 0xff, 0, 0, 0, 0, 1, 0x50, 0x98, 1, 0, 0, 0, 0, 0]);
        packet.extend((0..bytes).map(|at| at.to_le_bytes()[0]));
        packet
    }

    #[test]
    fn a_long_segment_becomes_packets_that_join_to_it_again() {
        for tag in [false, true] {
            let long = segment(5_000, tag);
            let network = if tag { 18 } else { 14 };
            let mut made = Vec::new();
            assert!(segments(&long, 1_500, |packet| made.push(packet.to_vec())));
            assert_eq!(made.len(), 4);
            let mut payload = Vec::new();
            for (at, packet) in made.iter().enumerate() {
                let (ip, tcp) = (&packet[network..], &packet[network + 20..]);
                assert!(ip.len() <= 1_500);
                assert_eq!(usize::from(u16::from_be_bytes([ip[2], ip[3]])), ip.len());
                assert_eq!(ip[5], 9 + u8::try_from(at).unwrap());
                assert_eq!(folded(sum(&ip[..20])), 0xffff, "the header adds up");
                let pseudo = sum(&ip[12..20]) + 6 + tcp.len() as u64;
                assert_eq!(folded(pseudo + sum(tcp)), 0xffff, "the segment adds up");
                let sequence = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
                let wanted = 0xffff_ff00_u32.wrapping_add(u32::try_from(payload.len()).unwrap());
                assert_eq!(sequence, wanted);
                let (first, last) = (at == 0, at == 3);
                assert_eq!(tcp[13], 0x10 | if first { 0x80 } else { 0 } | if last { 8 } else { 0 });
                payload.extend_from_slice(&tcp[20..]);
            }
            assert_eq!(payload, long[network + 40..]);
        }
    }

    #[test]
    fn what_fits_and_what_is_no_whole_segment_is_left_alone() {
        let never = |_: &[u8]| panic!("nothing is to be cut");
        assert!(!segments(&segment(1_460, false), 1_500, never));
        let long = segment(5_000, false);
        for cut in (0..60).chain([long.len() - 1]) {
            assert!(!segments(&long[..cut], 1_500, never), "cut at {cut}");
        }
        let mut udp = long.clone();
        udp[23] = 17;
        assert!(!segments(&udp, 1_500, never));
        // A header longer than the MTU.
        assert!(!segments(&long, 40, never));
    }
}

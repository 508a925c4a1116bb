//! The checksum that a sender left to its device.
//!
//! A packet from this host's own network stack (through a veth pair, say) has no TCP or UDP checksum
//! yet: the stack leaves it to the device, and says so beside the packet. What goes out again by a
//! packet socket says nothing any more, so the receiver would drop the packet.

/// Adds up 16-bit words; a last byte stands in the upper half.
pub(super) fn sum(bytes: &[u8]) -> u64 {
    let (pairs, rest) = bytes.as_chunks::<2>();
    let whole: u64 = pairs.iter().map(|pair| u64::from(u16::from_be_bytes(*pair))).sum();
    whole + rest.first().map_or(0, |last| u64::from(*last) << 8)
}

/// Their sum with the carries added.
pub(super) fn folded(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(0)
}

const TCP: u8 = 6;
const UDP: u8 = 17;

/// Writes the TCP or UDP checksum of a packet over IPv4, or over IPv6 without extension headers; any
/// other packet stays as it is.
pub(super) fn complete(packet: &mut [u8]) {
    let half = |packet: &[u8], at: usize| {
        packet.get(at..at + 2).map(|pair| usize::from(u16::from_be_bytes([pair[0], pair[1]])))
    };
    let mut at = 12;
    while let Some(0x8100 | 0x88a8) = half(packet, at) {
        at += 4;
    }
    let kind = half(packet, at);
    let network = at + 2;
    let Some(ip) = packet.get(network..) else { return };
    let (protocol, first, end, addresses) = match kind {
        Some(0x0800) if ip.len() >= 20 => {
            let first = usize::from(ip[0] & 15) * 4;
            (ip[9], first, usize::from(u16::from_be_bytes([ip[2], ip[3]])), sum(&ip[12..20]))
        }
        Some(0x86dd) if ip.len() >= 40 => {
            let end = 40 + usize::from(u16::from_be_bytes([ip[4], ip[5]]));
            (ip[6], 40, end, sum(&ip[8..40]))
        }
        _ => return,
    };
    let place = match protocol {
        TCP => 16,
        UDP => 6,
        _ => return,
    };
    let Some(segment) = packet.get_mut(network + first..network + end) else { return };
    let length = segment.len() as u64;
    let Some(field) = segment.get_mut(place..place + 2) else { return };
    field.fill(0);
    let all = addresses + u64::from(protocol) + length + sum(segment);
    let checksum = match !folded(all) {
        // Zero says that there is none.
        0 if protocol == UDP => 0xffff,
        checksum => checksum,
    };
    segment[place..place + 2].copy_from_slice(&checksum.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A TCP packet with a checksum of the kernel's: an ACK of a connection over loopback.
    const ACK: [u8; 66] = [
        0x02, 0x00, 0x00, 0x00, 0x00, 0x02, 0x02, 0x00, 0x00, 0x00, 0x00, 0x01, 0x08, 0x00, 0x45,
        0x00, 0x00, 0x34, 0x1c, 0x46, 0x40, 0x00, 0x40, 0x06, 0x20, 0x7c, 0x7f, 0x00, 0x00, 0x01,
        0x7f, 0x00, 0x00, 0x01, 0x30, 0x39, 0x00, 0x50, 0x00, 0x00, 0x00, 0x01, 0x00, 0x00, 0x00,
        0x02, 0x80, 0x10, 0x02, 0x00, 0x00, 0x00, 0x00, 0x00, 0x01, 0x01, 0x08, 0x0a, 0x00, 0x00,
        0x00, 0x03, 0x00, 0x00, 0x00, 0x04,
    ];

    /// True where the checksum adds up over IPv4 with a header of 20 bytes behind `at` bytes.
    fn right(packet: &[u8], at: usize) -> bool {
        let ip = &packet[at..];
        let end = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
        let pseudo = sum(&ip[12..20]) + u64::from(ip[9]) + (end - 20) as u64;
        folded(pseudo + sum(&ip[20..end])) == 0xffff
    }

    #[test]
    fn a_completed_packet_adds_up_tagged_or_padded_too() {
        let mut packet = ACK.to_vec();
        assert!(!right(&packet, 14));
        complete(&mut packet);
        assert!(right(&packet, 14));
        // A tag before, and padding behind that does not count.
        let mut tagged = ACK.to_vec();
        tagged.splice(12..12, [0x81, 0, 0, 5]);
        tagged.extend([0xaa; 7]);
        complete(&mut tagged);
        assert!(right(&tagged, 18));
        assert_eq!(tagged[18..70], packet[14..]);
        let mut udp = ACK.to_vec();
        udp[23] = UDP;
        complete(&mut udp);
        assert!(right(&udp, 14));
    }

    #[test]
    fn a_packet_cut_anywhere_or_of_another_kind_stays_within_its_bytes() {
        for cut in 0..ACK.len() {
            let mut packet = ACK[..cut].to_vec();
            complete(&mut packet);
            assert_eq!(packet.len(), cut);
            assert_eq!(packet, ACK[..cut], "cut at {cut}");
        }
        let mut other = ACK;
        other[12..14].copy_from_slice(&[0x88, 0xb5]);
        let before = other;
        complete(&mut other);
        assert_eq!(other, before);
    }
}

//! Rules of the firewall: their text, what they mean, and the masked keys they become.
//!
//! `[PROTOCOL] FROM [:PORTS] -> TO [:PORTS] ACTION`: a protocol is tcp, udp, icmp, any or a number;
//! an address is any, an address, or a prefix; ports are one or a range `A-B`; an action is pass or
//! drop. Among rules the one that was listed first wins.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

/// A rule's text is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{wrong}: a rule is like 'tcp 10.0.0.0/8 -> any :443 drop'")]
pub struct RuleError {
    /// What.
    pub wrong: String,
}

/// What the parser finds in a packet: host byte order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Source address.
    pub source: u32,
    /// Destination address.
    pub destination: u32,
    /// Source port above, destination port below.
    pub ports: u32,
    /// IP protocol.
    pub protocol: u8,
}

impl Key {
    /// Both bit by bit.
    #[must_use]
    pub fn and(self, mask: Self) -> Self {
        Self {
            source: self.source & mask.source,
            destination: self.destination & mask.destination,
            ports: self.ports & mask.ports,
            protocol: self.protocol & mask.protocol,
        }
    }

    /// Every bit set.
    pub const ALL: Self =
        Self { source: u32::MAX, destination: u32::MAX, ports: u32::MAX, protocol: u8::MAX };

    /// The library's `mix`: Jenkins' lookup3 over three words.
    #[must_use]
    pub fn mix(self, seed: u32) -> u32 {
        let s = 0xdead_beef_u32.wrapping_add(seed).wrapping_add(u32::from(self.protocol) << 16);
        let mut a = self.source.wrapping_add(s);
        let mut b = self.destination.wrapping_add(s);
        let mut c = self.ports.wrapping_add(s);
        c = (c ^ b).wrapping_sub(b.rotate_left(14));
        a = (a ^ c).wrapping_sub(c.rotate_left(11));
        b = (b ^ a).wrapping_sub(a.rotate_left(25));
        c = (c ^ b).wrapping_sub(b.rotate_left(16));
        a = (a ^ c).wrapping_sub(c.rotate_left(4));
        b = (b ^ a).wrapping_sub(a.rotate_left(14));
        (c ^ b).wrapping_sub(b.rotate_left(24))
    }

    /// Byte `at` of 13, as the TCAM cuts the key.
    #[must_use]
    pub fn byte(self, at: usize) -> u8 {
        let [a, b] = [self.source.to_le_bytes(), self.destination.to_le_bytes()];
        let ports = self.ports.to_le_bytes();
        match at {
            0..4 => a[at],
            4..8 => b[at - 4],
            8 => ports[2],
            9 => ports[3],
            10 => ports[0],
            11 => ports[1],
            _ => self.protocol,
        }
    }
}

/// Keys that agree with `value` where `mask` has ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Masked {
    /// Which bits count.
    pub mask: Key,
    /// What they are; zero elsewhere.
    pub value: Key,
}

/// An address and how many of its bits count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The address; zeros past the length.
    pub address: u32,
    /// Bits from the left.
    pub length: u8,
}

impl Prefix {
    /// Every address.
    pub const ANY: Self = Self { address: 0, length: 0 };

    /// Ones where the prefix counts.
    #[must_use]
    pub fn mask(self) -> u32 {
        u32::MAX.checked_shl(32 - u32::from(self.length)).unwrap_or(0)
    }

    fn covers(self, address: u32) -> bool {
        address & self.mask() == self.address
    }
}

impl FromStr for Prefix {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        if text == "any" {
            return Ok(Self::ANY);
        }
        let wrong = || RuleError { wrong: format!("{text} is no address") };
        let (address, length) = text.split_once('/').unwrap_or((text, "32"));
        let address = u32::from(address.parse::<Ipv4Addr>().map_err(|_| wrong())?);
        let length = length.parse().ok().filter(|length| *length <= 32).ok_or_else(wrong)?;
        let mut prefix = Self { address, length };
        prefix.address &= prefix.mask();
        Ok(prefix)
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.length {
            0 => f.write_str("any"),
            32 => write!(f, "{}", Ipv4Addr::from(self.address)),
            length => write!(f, "{}/{length}", Ipv4Addr::from(self.address)),
        }
    }
}

/// First and last.
pub type Ports = (u16, u16);

/// One rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// IP protocol; every one without.
    pub protocol: Option<u8>,
    /// From where.
    pub source: Prefix,
    /// From which ports; every one without.
    pub source_ports: Option<Ports>,
    /// To where.
    pub destination: Prefix,
    /// To which ports; every one without.
    pub destination_ports: Option<Ports>,
    /// What becomes of the packet.
    pub drop: bool,
}

const TCP: u8 = 6;
const UDP: u8 = 17;

impl Rule {
    /// True for a packet the rule names.
    #[must_use]
    pub fn matches(&self, key: Key) -> bool {
        let [high, low] = [key.ports >> 16, key.ports & 0xffff];
        let within = |ports: Option<Ports>, port: u32| {
            ports.is_none_or(|(first, last)| (u32::from(first)..=u32::from(last)).contains(&port))
        };
        let has_ports = self.source_ports.is_some() || self.destination_ports.is_some();
        let protocol = match self.protocol {
            Some(protocol) => protocol == key.protocol,
            None => !has_ports || key.protocol == TCP || key.protocol == UDP,
        };
        protocol
            && self.source.covers(key.source)
            && self.destination.covers(key.destination)
            && within(self.source_ports, high)
            && within(self.destination_ports, low)
    }

    /// The masked keys that together name what the rule names, none of them twice.
    #[must_use]
    pub fn masked(&self) -> Vec<Masked> {
        let has_ports = self.source_ports.is_some() || self.destination_ports.is_some();
        let protocols: Vec<(u8, u8)> = match self.protocol {
            Some(protocol) => vec![(u8::MAX, protocol)],
            None if has_ports => vec![(u8::MAX, TCP), (u8::MAX, UDP)],
            None => vec![(0, 0)],
        };
        let mut all = Vec::new();
        for (protocol_mask, protocol) in protocols {
            for (source_mask, source_port) in blocks(self.source_ports) {
                for (destination_mask, destination_port) in blocks(self.destination_ports) {
                    let join = |high: u16, low: u16| u32::from(high) << 16 | u32::from(low);
                    all.push(Masked {
                        mask: Key {
                            source: self.source.mask(),
                            destination: self.destination.mask(),
                            ports: join(source_mask, destination_mask),
                            protocol: protocol_mask,
                        },
                        value: Key {
                            source: self.source.address,
                            destination: self.destination.address,
                            ports: join(source_port, destination_port),
                            protocol,
                        },
                    });
                }
            }
        }
        all
    }
}

/// A range as aligned blocks: mask and value of each.
fn blocks(ports: Option<Ports>) -> Vec<(u16, u16)> {
    let Some((first, last)) = ports else { return vec![(0, 0)] };
    let (mut at, last) = (u32::from(first), u32::from(last));
    let mut all = Vec::new();
    while at <= last {
        let aligned = if at == 0 { 16 } else { at.trailing_zeros().min(16) };
        let size = (0..=aligned).rev().find(|size| at + (1 << size) - 1 <= last).unwrap_or(0);
        let mask = !((1_u32 << size) - 1) & 0xffff;
        all.push((mask.try_into().unwrap_or(u16::MAX), at.try_into().unwrap_or(u16::MAX)));
        at += 1 << size;
    }
    all
}

impl FromStr for Rule {
    type Err = RuleError;

    fn from_str(text: &str) -> Result<Self, RuleError> {
        let wrong = |wrong: String| RuleError { wrong };
        let (left, right) =
            text.split_once("->").ok_or_else(|| wrong(format!("'{text}' has no ->")))?;
        let (right, action) =
            right.trim().rsplit_once(char::is_whitespace).unwrap_or(("", right.trim()));
        let drop = match action {
            "drop" => true,
            "pass" => false,
            other => return Err(wrong(format!("'{other}' is neither pass nor drop"))),
        };
        let mut words: Vec<&str> = left.split_whitespace().collect();
        let number = |word: &str| !word.is_empty() && word.bytes().all(|b| b.is_ascii_digit());
        let protocol = match words.first().copied() {
            Some("tcp") => Some(Some(TCP)),
            Some("udp") => Some(Some(UDP)),
            Some("icmp") => Some(Some(1)),
            Some("ip") => Some(None),
            // 'any' alone is the address; before one it is the protocol.
            Some("any") => (words.len() > 1 && !words[1].starts_with(':')).then_some(None),
            Some(word) if number(word) => {
                let parsed = word.parse().map_err(|_| wrong(format!("{word} is no protocol")))?;
                Some(Some(parsed))
            }
            _ => None,
        };
        if protocol.is_some() {
            words.remove(0);
        }
        let protocol = protocol.flatten();
        let (source, source_ports) = end(&words)?;
        let right: Vec<&str> = right.split_whitespace().collect();
        let (destination, destination_ports) = end(&right)?;
        let ports = source_ports.is_some() || destination_ports.is_some();
        if ports && protocol.is_some_and(|protocol| protocol != TCP && protocol != UDP) {
            return Err(wrong("ports need tcp or udp".to_owned()));
        }
        Ok(Self { protocol, source, source_ports, destination, destination_ports, drop })
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.protocol {
            Some(TCP) => f.write_str("tcp ")?,
            Some(UDP) => f.write_str("udp ")?,
            Some(1) => f.write_str("icmp ")?,
            Some(other) => write!(f, "{other} ")?,
            None => f.write_str("ip ")?,
        }
        let ports = |f: &mut fmt::Formatter<'_>, ports: Option<Ports>| match ports {
            None => Ok(()),
            Some((first, last)) if first == last => write!(f, " :{first}"),
            Some((first, last)) => write!(f, " :{first}-{last}"),
        };
        write!(f, "{}", self.source)?;
        ports(f, self.source_ports)?;
        write!(f, " -> {}", self.destination)?;
        ports(f, self.destination_ports)?;
        f.write_str(if self.drop { " drop" } else { " pass" })
    }
}

/// An address, ports, both or nothing.
fn end(words: &[&str]) -> Result<(Prefix, Option<Ports>), RuleError> {
    let (mut address, mut ports) = (None, None);
    for word in words {
        match word.strip_prefix(':') {
            Some(range) if ports.is_none() => ports = Some(range_of(range)?),
            None if address.is_none() => address = Some(word.parse()?),
            _ => return Err(RuleError { wrong: format!("{word} is one word too many") }),
        }
    }
    Ok((address.unwrap_or(Prefix::ANY), ports))
}

fn range_of(text: &str) -> Result<Ports, RuleError> {
    let wrong = || RuleError { wrong: format!(":{text} is no port or range of ports") };
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let first: u16 = first.parse().map_err(|_| wrong())?;
    let last: u16 = last.parse().map_err(|_| wrong())?;
    if first > last { Err(wrong()) } else { Ok((first, last)) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test ends at what must not be")]
mod tests {
    use super::*;

    #[test]
    fn a_rule_is_shown_as_it_was_written() {
        for text in [
            "tcp 10.0.0.0/8 -> any :443 drop",
            "udp any :53 -> 192.168.1.1 pass",
            "ip any -> 10.0.0.0/9 drop",
            "icmp 1.2.3.4 -> any pass",
            "47 any -> any drop",
            "ip any :1000-2000 -> any :80-81 drop",
        ] {
            assert_eq!(text.parse::<Rule>().unwrap().to_string(), text);
        }
        let short: Rule = "any -> 10.1.2.3/16 drop".parse().unwrap();
        assert_eq!(short.to_string(), "ip any -> 10.1.0.0/16 drop");
        assert_eq!("any any -> any drop".parse::<Rule>(), "any -> any drop".parse());
    }

    #[test]
    fn what_is_wrong_with_a_rule_is_said() {
        for (text, part) in [
            ("tcp any any :443 drop", "no ->"),
            ("tcp any -> any :443 jump", "'jump'"),
            ("tcp 10.0.0.0/33 -> any drop", "10.0.0.0/33"),
            ("tcp any -> any :90-80 drop", ":90-80"),
            ("icmp any -> any :80 drop", "tcp or udp"),
            ("tcp any any -> any drop", "too many"),
            ("999 any -> any drop", "999"),
        ] {
            let error = text.parse::<Rule>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn the_masked_keys_of_a_range_are_the_range() {
        for (first, last) in [(0, 65_535), (1, 65_534), (443, 443), (1_000, 2_000), (0, 0)] {
            let rule = Rule {
                protocol: None,
                source: Prefix::ANY,
                source_ports: None,
                destination: Prefix::ANY,
                destination_ports: Some((first, last)),
                drop: true,
            };
            let masked = rule.masked();
            for port in 0..=u16::MAX {
                for protocol in [1, 6, 17] {
                    let key = Key { ports: u32::from(port), protocol, ..Key::default() };
                    let found = masked.iter().filter(|m| key.and(m.mask) == m.value).count();
                    assert_eq!(found, usize::from(rule.matches(key)), "{port} in {first}-{last}");
                }
            }
        }
    }
}

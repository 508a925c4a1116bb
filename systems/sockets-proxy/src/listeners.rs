//! Which programs with the library listen on this host.
//!
//! The library tells of a socket that listens: its address and its inode. That the very socket still
//! listens the kernel says (`/proc/net/tcp`), so that a program without the library that takes the
//! port later is never knocked at.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Most that are known.
const MOST: usize = 65_536;

/// What the libraries told: address, inode, and the process that told.
#[derive(Debug, Default)]
pub struct Listeners(Vec<(SocketAddr, u64, u64)>);

/// One listening socket, as the kernel tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    at: SocketAddr,
    inode: u64,
}

/// The kernel's words of 32 bits, each in the machine's order.
fn host(text: &str) -> Option<IpAddr> {
    let word =
        |at: usize| u32::from_str_radix(text.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
    match text.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0; 16];
            for (index, place) in bytes.chunks_exact_mut(4).enumerate() {
                place.copy_from_slice(&word(index * 8)?);
            }
            Some(IpAddr::from(Ipv6Addr::from(bytes)).to_canonical())
        }
        _ => None,
    }
}

fn row(line: &str) -> Option<Row> {
    let mut fields = line.split_ascii_whitespace();
    let (address, port) = fields.nth(1)?.split_once(':')?;
    if fields.nth(1)? != "0A" {
        return None;
    }
    let at = SocketAddr::new(host(address)?, u16::from_str_radix(port, 16).ok()?);
    Some(Row { at, inode: fields.nth(5)?.parse().ok()? })
}

fn rows() -> Vec<Row> {
    let read = |file| std::fs::read_to_string(file).unwrap_or_default();
    let text = read("/proc/self/net/tcp") + &read("/proc/self/net/tcp6");
    text.lines().filter_map(row).collect()
}

/// True for a socket at `at` that takes connections to `to`.
fn takes(at: SocketAddr, to: SocketAddr) -> bool {
    at.port() == to.port() && (at.ip() == to.ip() || at.ip().is_unspecified())
}

impl Listeners {
    /// A program with the library listens.
    pub fn add(&mut self, at: SocketAddr, inode: u64, owner: u64) {
        self.0.retain(|&(_, known, _)| known != inode);
        if self.0.len() >= MOST {
            self.0.remove(0);
        }
        self.0.push((at, inode, owner));
    }

    /// How many are known, also of those that are gone.
    #[must_use]
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// The process that told of a socket of a program with the library that takes connections to
    /// `to`; those that listen no more are forgotten, and `gone` is told their inodes.
    pub fn takes(&mut self, to: SocketAddr, mut gone: impl FnMut(u64)) -> Option<u64> {
        if !self.0.iter().any(|&(at, ..)| takes(at, to)) {
            return None;
        }
        let rows = rows();
        self.0.retain(|&(at, inode, _)| {
            let stays = !takes(at, to) || rows.iter().any(|row| row.inode == inode);
            if !stays {
                gone(inode);
            }
            stays
        });
        // Of several with one port the more exact has the connection.
        let exact = |row: &&Row| row.at.ip() == to.ip() && takes(row.at, to);
        let mut owners: Vec<_> = rows.iter().filter(exact).collect();
        if owners.is_empty() {
            owners = rows.iter().filter(|row| takes(row.at, to)).collect();
        }
        let known = |row: &&Row| self.0.iter().find(|&&(_, inode, _)| inode == row.inode);
        owners.iter().find_map(known).map(|&(.., owner)| owner)
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::AsFd as _;

    use super::*;

    fn inode(listener: &TcpListener) -> u64 {
        rustix::fs::fstat(listener.as_fd()).unwrap().st_ino
    }

    #[test]
    fn only_the_very_socket_that_was_told_of_counts() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let mut listeners = Listeners::default();
        assert_eq!(listeners.takes(at, |_| {}), None);
        listeners.add(at, inode(&listener) + 1_000_000, 7);
        let mut gone = Vec::new();
        assert_eq!(listeners.takes(at, |inode| gone.push(inode)), None, "another listens there");
        assert_eq!((listeners.count(), gone), (0, vec![inode(&listener) + 1_000_000]));
        listeners.add(at, inode(&listener), 7);
        assert_eq!(listeners.takes(at, |_| {}), Some(7));
        drop(listener);
        assert_eq!(listeners.takes(at, |_| {}), None, "it listens no more");
    }

    #[test]
    fn a_socket_for_every_address_takes_connections_to_one() {
        let listener = TcpListener::bind("[::]:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mut listeners = Listeners::default();
        listeners.add(SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port), inode(&listener), 7);
        let to = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
        assert_eq!(listeners.takes(to, |_| {}), Some(7));
    }
}

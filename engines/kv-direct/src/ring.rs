//! Many servers, one map: which server, and which of its processors, a key belongs to.
//!
//! Consistent hashing: each server has points on a circle of hashes, a key belongs to the next point.
//! A server that joins takes about its share of the keys, from all others alike, and no key moves
//! between the others.
//!
//! Source: spec/kv-direct.md 2 (many-to-one virtualisation), 7.2.

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Points of each server on the circle.
const POINTS: u64 = 160;
/// Seeds of the three uses of the hash, apart from each other and from the tables'.
const KEY_SEED: u64 = 0x6b65_7973;
const POINT_SEED: u64 = 0x706f_696e;
const PART_SEED: u64 = 0x7061_7274;

/// What of a server's name says where it is: `auto://host:1` and `tcp://host:1` are one server.
#[must_use]
pub fn address(name: &str) -> &str {
    name.split_once("://").map_or(name, |(_, address)| address)
}

/// The servers of one map, by their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HashRing {
    servers: Vec<String>,
    /// Hash and server, in the order of the hashes.
    points: Vec<(u64, u32)>,
}

impl HashRing {
    /// A ring of these servers. Their order does not matter to where keys belong.
    #[must_use]
    pub fn new(servers: impl IntoIterator<Item = String>) -> Self {
        let mut servers: Vec<String> = servers.into_iter().collect();
        servers.sort_unstable_by(|a, b| address(a).cmp(address(b)));
        servers.dedup_by(|a, b| address(a) == address(b));
        let mut points: Vec<(u64, u32)> = servers
            .iter()
            .enumerate()
            .flat_map(|(index, name)| {
                let base = xxh3_64_with_seed(address(name).as_bytes(), POINT_SEED);
                (0..POINTS).map(move |point| {
                    let hash = xxh3_64_with_seed(&point.to_le_bytes(), base);
                    (hash, index as u32)
                })
            })
            .collect();
        points.sort_unstable();
        Self { servers, points }
    }

    /// The servers, in the order of their addresses.
    #[must_use]
    pub fn servers(&self) -> &[String] {
        &self.servers
    }

    /// The place of a server in [`HashRing::servers`].
    #[must_use]
    pub fn position(&self, name: &str) -> Option<usize> {
        let address = address(name);
        self.servers.iter().position(|server| self::address(server) == address)
    }

    /// The server of a key: its place in [`HashRing::servers`]; `None` where there is none.
    #[must_use]
    #[inline]
    pub fn server_of(&self, key: &[u8]) -> Option<usize> {
        if self.servers.len() == 1 {
            return Some(0);
        }
        let hash = xxh3_64_with_seed(key, KEY_SEED);
        let at = self.points.partition_point(|(point, _)| *point < hash);
        let (_, server) = self.points.get(at).or(self.points.first())?;
        Some(*server as usize)
    }
}

/// The processor of a key among the `processors` of its server, which own disjoint memory.
#[must_use]
#[inline]
pub fn processor_of(key: &[u8], processors: u32) -> u32 {
    if processors <= 1 {
        return 0;
    }
    let hash = xxh3_64_with_seed(key, PART_SEED);
    ((u128::from(hash) * u128::from(processors)) >> 64) as u32
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn ring(servers: usize) -> HashRing {
        HashRing::new((0..servers).map(|server| format!("10.0.0.{server}:4790")))
    }

    #[test]
    fn a_server_that_joins_takes_its_share_and_moves_nothing_else() {
        for servers in [2, 5, 9] {
            let (before, after) = (ring(servers), ring(servers + 1));
            let joined = format!("10.0.0.{servers}:4790");
            let mut moved = 0;
            let keys = 20_000_u32;
            for key in 0..keys {
                let key = key.to_le_bytes();
                let was = &before.servers()[before.server_of(&key).unwrap()];
                let is = &after.servers()[after.server_of(&key).unwrap()];
                if was != is {
                    assert_eq!(is, &joined, "keys move to the new server only");
                    moved += 1;
                }
            }
            let fair = keys / (servers as u32 + 1);
            assert!((fair * 7 / 10..fair * 13 / 10).contains(&moved), "{moved} of {keys} moved");
        }
    }

    #[test]
    fn the_order_of_the_servers_does_not_matter() {
        let one = HashRing::new(["a", "b", "c"].map(str::to_owned));
        let other = HashRing::new(["c", "a", "b", "a"].map(str::to_owned));
        assert_eq!(one, other);
        let named =
            |scheme: &str| HashRing::new([format!("{scheme}://a:1"), format!("{scheme}://b:1")]);
        let (auto, tcp) = (named("auto"), named("tcp"));
        for key in 0..100_u32 {
            assert_eq!(auto.server_of(&key.to_le_bytes()), tcp.server_of(&key.to_le_bytes()));
        }
        assert_eq!(auto.position("shm://b:1"), Some(1));
        assert_eq!(HashRing::default().server_of(b"key"), None);
    }

    #[test]
    fn processors_share_keys_evenly_and_independently_of_servers() {
        let ring = ring(4);
        let mut counts = [[0_u32; 3]; 4];
        for key in 0..60_000_u32 {
            let key = key.to_le_bytes();
            counts[ring.server_of(&key).unwrap()][processor_of(&key, 3) as usize] += 1;
        }
        for server in counts {
            let total: u32 = server.iter().sum();
            assert!(server.iter().all(|part| (total / 4..total / 2).contains(part)), "{server:?}");
        }
    }
}

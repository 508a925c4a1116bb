//! The share of memory that may be cached in the card's own: which addresses, and how large a share.
//!
//! Source: spec/kv-direct.md 5.6.

/// Whether the line of this address may be cached, where a share `ratio` of all may. The hash treats index
/// and dynamic area alike.
#[must_use]
pub fn is_cacheable(line: u64, ratio: f64) -> bool {
    // The finaliser of splitmix64: neighbours are as far apart as any two.
    let mut hash = line.wrapping_add(0x9e37_79b9_7f4a_7c15);
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^= hash >> 31;
    ((hash >> 11) as f64) < ratio * (1_u64 << 53) as f64
}

/// Hit rate under Zipf, by the paper's formula: not clipped at 1.
#[must_use]
pub fn zipf_hit_rate(share: f64, ratio: f64, pairs: f64) -> f64 {
    (share * pairs).ln() / (ratio * pairs).ln()
}

/// The share of memory to cache that keeps both paths equally busy: the solution of
/// `l / r = 1 - l * h(l)`, 1 at most. `speeds` is the card memory's throughput over PCIe's, `share` the
/// card memory's size over the host's.
#[must_use]
pub fn optimal_ratio(speeds: f64, share: f64, pairs: f64) -> f64 {
    let excess = |l: f64| l / speeds - 1.0 + l * zipf_hit_rate(share, l, pairs);
    let (mut low, mut high) = (1e-6, 1.0);
    if excess(high) <= 0.0 {
        return 1.0;
    }
    for _ in 0..80 {
        let middle = f64::midpoint(low, high);
        if excess(middle) > 0.0 { high = middle } else { low = middle }
    }
    low
}

/// Throughput with that share over throughput with memory split once and for all.
#[must_use]
pub fn gain_over_partitioning(speeds: f64, share: f64, pairs: f64) -> f64 {
    speeds / optimal_ratio(speeds, share, pairs) / (1.0 + share.min(speeds))
}

/// Rows and columns of the paper's tables.
pub const SPEEDS: [f64; 5] = [0.5, 1.0, 2.0, 4.0, 8.0];
/// Columns.
pub const SHARES: [f64; 6] = [1.0 / 1024.0, 1.0 / 256.0, 1.0 / 64.0, 1.0 / 16.0, 1.0 / 4.0, 1.0];
/// Pairs with which the paper's tables come out.
pub const PAIRS: f64 = 1e10;
/// Table A: the best share.
pub const TABLE_A: [[f64; 6]; 5] = [
    [0.366, 0.358, 0.350, 0.342, 0.335, 0.327],
    [0.583, 0.562, 0.543, 0.525, 0.508, 0.492],
    [0.830, 0.789, 0.752, 0.718, 0.687, 0.658],
    [1.0, 0.991, 0.933, 0.881, 0.835, 0.793],
    [1.0, 1.0, 1.0, 0.995, 0.937, 0.885],
];
/// Table B: the gain.
pub const TABLE_B: [[f64; 6]; 5] = [
    [1.36, 1.39, 1.40, 1.37, 1.19, 1.02],
    [1.71, 1.77, 1.81, 1.79, 1.57, 1.01],
    [2.40, 2.52, 2.62, 2.62, 2.33, 1.52],
    [3.99, 4.02, 4.22, 4.27, 3.83, 2.52],
    [7.99, 7.97, 7.87, 7.56, 6.83, 4.52],
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_solver_gives_both_tables_of_the_paper() {
        for (row, speeds) in SPEEDS.into_iter().enumerate() {
            for (column, share) in SHARES.into_iter().enumerate() {
                let found = optimal_ratio(speeds, share, PAIRS);
                let gap = (found - TABLE_A[row][column]).abs();
                assert!(gap <= 0.001, "A[{row}][{column}]: {found}");
                let gain = gain_over_partitioning(speeds, share, PAIRS);
                let gap = (gain - TABLE_B[row][column]).abs();
                assert!(gap <= 0.0101, "B[{row}][{column}]: {gain}");
            }
        }
    }

    #[test]
    fn the_share_of_cacheable_lines_is_the_ratio_in_every_part_of_memory() {
        for ratio in [0.1, 0.5, 0.6] {
            for part in [0..200_000_u64, 1 << 30..(1 << 30) + 200_000] {
                let lines = part.end - part.start;
                let cached = part.filter(|line| is_cacheable(*line, ratio)).count();
                let share = cached as f64 / lines as f64;
                assert!((share - ratio).abs() < 0.01, "{share} where {ratio} is wanted");
            }
        }
        assert!(is_cacheable(7, 1.0) && !is_cacheable(7, 0.0));
    }
}

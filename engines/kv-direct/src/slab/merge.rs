//! Joining free neighbours into larger blocks: by a bitmap, or by sorting addresses.
//!
//! Both join naturally aligned buddies only, so a block of 2^n bytes stays at a multiple of 2^n, and
//! both give the same set. The daemon sorts; the bitmap is the paper's first variant and the check of
//! the second.
//!
//! Source: spec/kv-direct.md 5.2, "Merge".

use crate::slab::{CLASSES, Class, Entry};

/// Joins `free` by a bitmap of units over `units` of memory; random accesses, one core.
#[must_use]
pub fn by_bitmap(free: &[Entry], units: u32) -> Vec<Entry> {
    let mut bits = vec![0_u64; units.div_ceil(64) as usize];
    for entry in free {
        for unit in entry.unit..entry.unit + entry.class.units() {
            bits[unit as usize / 64] |= 1 << (unit % 64);
        }
    }
    let mut joined = Vec::new();
    for class in Class::all().rev() {
        let size = class.units();
        // The largest class is 64 units: one word of the bitmap, so a block never spans two.
        let mask = if size == 64 { u64::MAX } else { (1 << size) - 1 };
        for unit in (0..units / size * size).step_by(size as usize) {
            let word = &mut bits[unit as usize / 64];
            if *word >> (unit % 64) & mask == mask {
                *word &= !(mask << (unit % 64));
                joined.push(Entry { unit, class });
            }
        }
    }
    joined.sort_unstable();
    joined
}

const _: () = assert!(1 << (CLASSES - 1) == 64);

/// Joins `free` by sorting addresses with `threads` threads, class by class.
#[must_use]
pub fn by_sorting(free: &[Entry], threads: usize) -> Vec<Entry> {
    let mut joined = Vec::new();
    let mut promoted: Vec<u32> = Vec::new();
    for class in Class::all() {
        let mut units: Vec<u32> = std::mem::take(&mut promoted);
        units.extend(free.iter().filter(|e| e.class == class).map(|e| e.unit));
        radix_sort(&mut units, threads);
        let size = class.units();
        let last = class.index() == CLASSES - 1;
        let mut at = 0;
        while let Some(&unit) = units.get(at) {
            let buddy =
                !last && unit % (2 * size) == 0 && units.get(at + 1) == Some(&(unit + size));
            if buddy {
                promoted.push(unit);
                at += 2;
            } else {
                joined.push(Entry { unit, class });
                at += 1;
            }
        }
    }
    joined.sort_unstable();
    joined
}

const DIGIT_BITS: u32 = 11;
const DIGITS: usize = 1 << DIGIT_BITS;
/// Below this a comparison sort is as fast.
const SMALL: usize = 1 << 12;

/// Sorts by digits of eleven bits: the numbers are cut into a part for each thread by their highest
/// digit's rank, and each thread sorts its part.
pub fn radix_sort(numbers: &mut Vec<u32>, threads: usize) {
    if numbers.len() < SMALL {
        numbers.sort_unstable();
        return;
    }
    if threads <= 1 {
        let mut scratch = vec![0; numbers.len()];
        sort_part(numbers, &mut scratch);
        return;
    }
    // Bounds of the parts: equal shares of a sample.
    let mut sample: Vec<u32> =
        numbers.iter().step_by((numbers.len() / 1024).max(1)).copied().collect();
    sample.sort_unstable();
    let bound = |part: usize| sample[(part * sample.len() / threads).min(sample.len() - 1)];
    let bounds: Vec<u32> = (1..threads).map(bound).collect();
    let mut parts: Vec<Vec<u32>> = (0..threads).map(|_| Vec::new()).collect();
    for &number in numbers.iter() {
        parts[bounds.partition_point(|&bound| bound <= number)].push(number);
    }
    std::thread::scope(|scope| {
        for part in &mut parts {
            scope.spawn(move || {
                let mut scratch = vec![0; part.len()];
                sort_part(part, &mut scratch);
            });
        }
    });
    numbers.clear();
    numbers.extend(parts.into_iter().flatten());
}

fn sort_part(numbers: &mut [u32], scratch: &mut [u32]) {
    let digit = |number: u32, pass: u32| (number >> (pass * DIGIT_BITS)) as usize & (DIGITS - 1);
    let (mut from, mut to) = (numbers, scratch);
    for pass in 0..3 {
        let mut places = [0_usize; DIGITS];
        for &number in from.iter() {
            places[digit(number, pass)] += 1;
        }
        let mut sum = 0;
        for place in &mut places {
            sum += std::mem::replace(place, sum);
        }
        for &number in from.iter() {
            let place = &mut places[digit(number, pass)];
            to[*place] = number;
            *place += 1;
        }
        std::mem::swap(&mut from, &mut to);
    }
    // Three passes end in the scratch space.
    to.copy_from_slice(from);
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn both_ways_give_the_same_blocks(
            carved in proptest::collection::vec((0_usize..CLASSES, any::<u64>()), 1..40),
            threads in 1_usize..4,
        ) {
            // Whole blocks of the largest class, each carved to one class, some of it free.
            let mut free = Vec::new();
            for (block, (class, taken)) in carved.iter().enumerate() {
                let class = Class::new(*class);
                let base = block as u32 * 64;
                for (i, unit) in (base..base + 64).step_by(class.units() as usize).enumerate() {
                    if taken >> i & 1 == 0 {
                        free.push(Entry { unit, class });
                    }
                }
            }
            let units = carved.len() as u32 * 64;
            let sorted = by_sorting(&free, threads);
            prop_assert_eq!(&sorted, &by_bitmap(&free, units));
            let bytes = |list: &[Entry]| list.iter().map(|e| e.class.bytes()).sum::<usize>();
            prop_assert_eq!(bytes(&sorted), bytes(&free));
            prop_assert!(sorted.iter().all(|e| e.unit % e.class.units() == 0));
        }
    }

    #[test]
    fn sorting_by_digits_sorts() {
        for threads in [1, 3] {
            let mut state = 7_u64;
            let mut numbers: Vec<u32> = (0..50_000)
                .map(|_| {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (state >> 33) as u32
                })
                .collect();
            let mut expected = numbers.clone();
            expected.sort_unstable();
            radix_sort(&mut numbers, threads);
            assert_eq!(numbers, expected);
        }
    }
}

//! Numbers of requests: the keys under which replies come back.

use crate::message::Immediate;

/// Hands out indices; skips the reserved codes and those still in use.
#[derive(Clone, Debug, Default)]
pub struct Indices {
    next: u32,
}

impl Indices {
    /// Begins at `next`.
    #[must_use]
    pub fn from(next: u32) -> Self {
        Self { next }
    }

    /// The next index that is not `in_use`. At least one has to be free.
    pub fn take(&mut self, in_use: impl Fn(u32) -> bool) -> u32 {
        loop {
            if self.next > Immediate::LAST_INDEX {
                self.next = 0;
            }
            let index = self.next;
            self.next = index.wrapping_add(1);
            if !in_use(index) {
                return index;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_wrap_below_the_reserved_codes_and_skip_those_in_use() {
        let mut indices = Indices::from(0xFFFF_FFFC);
        let in_use = |index: u32| index == 0xFFFF_FFFD || index == 1;
        let taken: Vec<u32> = (0..4).map(|_| indices.take(in_use)).collect();
        assert_eq!(taken, [0xFFFF_FFFC, 0, 2, 3]);
        assert_eq!(Indices::from(u32::MAX).take(|_| false), 0);
    }
}

//! Loops over slices, compiled for the widest vectors that the processor has: chosen while the program
//! runs, so that one program serves every processor.

/// Work whose loops the compiler makes vector code of.
pub trait Wide {
    /// Of the work.
    type Output;

    /// Does it. Make it `#[inline(always)]`: only what becomes a part of its caller is compiled for the
    /// vectors of that.
    fn run(self) -> Self::Output;
}

/// Does the work with the widest vectors that there are. Costs a load and a branch.
#[inline]
pub fn widest<W: Wide>(work: W) -> W::Output {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor was just asked whether it has what the function is compiled for.
        return unsafe { with_avx2(work) };
    }
    work.run()
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx2")]
fn with_avx2<W: Wide>(work: W) -> W::Output {
    work.run()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sum<'a>(&'a [u8]);

    impl Wide for Sum<'_> {
        type Output = u64;

        #[inline(always)]
        fn run(self) -> u64 {
            self.0.iter().map(|byte| u64::from(*byte)).sum()
        }
    }

    #[test]
    fn the_work_is_the_same_whatever_it_is_compiled_for() {
        let bytes: Vec<u8> = (0..1000).map(|at| (at * 7) as u8).collect();
        for end in [0, 1, 31, 32, 33, 1000] {
            assert_eq!(widest(Sum(&bytes[..end])), Sum(&bytes[..end]).run());
        }
    }
}

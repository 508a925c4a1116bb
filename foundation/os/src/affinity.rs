//! Which processors a thread runs on.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// Keeps the calling thread on processor `cpu`.
///
/// Errors: the kernel's, for a processor that does not exist or is not allowed.
pub fn pin_current_thread(cpu: usize) -> std::io::Result<()> {
    if cpu >= CpuSet::MAX_CPU {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(cpu);
    Ok(sched_setaffinity(None, &set)?)
}

/// Lets the calling thread run on the processors `cpus`.
///
/// Errors: the kernel's, when none of them is allowed.
pub fn allow_current_thread(cpus: &[usize]) -> std::io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().filter(|cpu| **cpu < CpuSet::MAX_CPU).for_each(|cpu| set.set(*cpu));
    Ok(sched_setaffinity(None, &set)?)
}

/// Processors the calling thread may run on, ascending.
///
/// Errors: the kernel's.
pub fn allowed() -> std::io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| set.is_set(cpu)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_is_allowed_one_processor() {
        std::thread::spawn(|| {
            let last = *allowed().unwrap().last().unwrap();
            pin_current_thread(last).unwrap();
            assert_eq!(allowed().unwrap(), [last]);
            allow_current_thread(&[last, usize::MAX]).unwrap();
            assert_eq!(allowed().unwrap(), [last]);
            assert!(allow_current_thread(&[]).is_err());
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_processor_that_cannot_exist_is_refused() {
        assert!(pin_current_thread(usize::MAX).is_err());
    }
}

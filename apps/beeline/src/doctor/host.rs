//! Processor, clock, huge pages, and the kernel facilities the shared-memory provider uses.

use super::{Finding, Verdict, read};

pub fn probe(findings: &mut Vec<Finding>) {
    let info = read("/proc/cpuinfo").unwrap_or_default();
    findings.push(processor(&info));
    findings.push(write_back());
    findings.push(clock());
    findings.push(governor());
    findings.push(transparent_huge_pages());
    findings.extend(facilities());
}

/// The processor's name as the kernel reports it.
pub fn processor_name(info: &str) -> String {
    field(info, "model name").unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

fn field(info: &str, name: &str) -> Option<String> {
    let line = info.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn processor(info: &str) -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let seen = format!("{}, {cores} usable", processor_name(info));
    if cores == 1 {
        return Finding::advise(
            "processor",
            Verdict::CouldBeFaster,
            seen,
            "one core serves clients and node in turns; two or more let them run side by side",
        );
    }
    Finding::ok("processor", seen)
}

fn write_back() -> Finding {
    use beeline_os::write_back::WriteBack;
    match WriteBack::detect() {
        found @ (WriteBack::Clwb | WriteBack::DcCvap) => {
            Finding::ok("cache-line write-back", found.name())
        }
        WriteBack::None => Finding::advise(
            "cache-line write-back",
            Verdict::Missing,
            "none known for this processor",
            "dax pools need clwb, clflushopt or clflush; use --pool file",
        ),
        found => Finding::advise(
            "cache-line write-back",
            Verdict::CouldBeFaster,
            found.name(),
            "this instruction throws the line out of the cache; a processor with clwb keeps it",
        ),
    }
}

fn clock() -> Finding {
    let path = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    let source = read(path).unwrap_or_else(|| "unknown".to_owned());
    let fast = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"];
    if fast.contains(&source.as_str()) {
        return Finding::ok("clock source", source);
    }
    Finding::advise(
        "clock source",
        Verdict::CouldBeFaster,
        source,
        "reading the time costs a system call here; boot with clocksource=tsc if the machine's is stable",
    )
}

fn governor() -> Finding {
    match read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").as_deref() {
        None => Finding::ok("frequency governor", "fixed, or the hypervisor's"),
        Some("performance") => Finding::ok("frequency governor", "performance"),
        Some(other) => Finding::advise(
            "frequency governor",
            Verdict::CouldBeFaster,
            other,
            "wake-ups wait for the clock to rise; `cpupower frequency-set -g performance`",
        ),
    }
}

fn transparent_huge_pages() -> Finding {
    let chosen = |path| {
        let text = read(path)?;
        let start = text.find('[')?;
        let end = text.find(']')?;
        Some(text[start + 1..end].to_owned())
    };
    let private = chosen("/sys/kernel/mm/transparent_hugepage/enabled");
    let shared = chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
    let word = |choice: &Option<String>| choice.clone().unwrap_or_else(|| "unknown".to_owned());
    let seen = format!("{} for private, {} for shared memory", word(&private), word(&shared));
    if matches!(shared.as_deref(), Some("always" | "advise" | "within_size")) {
        return Finding::ok("transparent huge pages", seen);
    }
    Finding::advise(
        "transparent huge pages",
        Verdict::CouldBeFaster,
        seen,
        "`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled` lets dram pools and fabric memory use them",
    )
}

fn facilities() -> Vec<Finding> {
    use beeline_os::probe;
    let judge = |what, answer: Result<(), rustix::io::Errno>, advice: &str| match answer {
        Ok(()) => Finding::ok(what, "available"),
        Err(error) => Finding::advise(what, Verdict::Missing, error.to_string(), advice),
    };
    vec![
        judge(
            "memfd",
            probe::memfd(),
            "the shm provider and dram pools need it: Linux 3.17 or later",
        ),
        judge(
            "pidfd",
            probe::pidfd(),
            "the shm provider sees a dead peer through it: Linux 5.3 or later",
        ),
        judge(
            "io_uring",
            probe::io_uring(),
            "not used by this version; kernel.io_uring_disabled=0 would allow it",
        ),
        judge(
            "userfaultfd",
            probe::userfaultfd(),
            "not used by this version; vm.unprivileged_userfaultfd=1 would allow it",
        ),
    ]
}

//! `lab`: small virtual machines with the devices this machine lacks.
//!
//! - `lab setup` fetches QEMU, the guests' kernel and the tools.
//! - `lab exec` runs one program of the host's in a fresh guest.
//! - `lab run` runs suites and prints the table.
//!
//! Guests run on emulated processors (TCG): what they show is behaviour, never speed. See
//! `docs/lab.md`.

mod archive;
mod bell;
mod error;
mod exec;
mod guest;
mod kernel;
pub mod suites;

use std::process::ExitCode;

use crate::setup::is_here;
use crate::step::Report;

/// What `lab` does.
#[derive(Debug, clap::Subcommand)]
pub enum LabTask {
    /// Fetch QEMU, the guests' kernel and the tools, all through apt.
    Setup,
    /// Run a program built or installed here in a fresh guest, and exit as it does.
    Exec(exec::ExecArguments),
    /// Run suites in guests; all of them where none is named.
    Run(suites::RunArguments),
}

/// Programs the lab runs, here or in a guest, and Debian's packages that have them.
pub const PROGRAMS: &[(&str, &str)] = &[
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("busybox", "busybox-static"),
    ("setpriv", "util-linux"),
    ("depmod", "kmod"),
    ("xz", "xz-utils"),
    ("mkfs.ext4", "e2fsprogs"),
    ("rdma", "iproute2"),
    ("ibv_devinfo", "ibverbs-utils"),
    ("ibv_devinfo", "ibverbs-providers"),
    ("ibv_devinfo", "rdma-core"),
    ("ib_write_lat", "perftest"),
    ("rping", "rdmacm-utils"),
    ("ndctl", "ndctl"),
];

/// The command.
pub fn run(task: &LabTask) -> ExitCode {
    match task {
        LabTask::Setup => {
            let mut report = Report::default();
            setup(&mut report);
            report.finish()
        }
        LabTask::Exec(arguments) => exec::run(arguments),
        LabTask::Run(arguments) => suites::run(arguments).finish(),
    }
}

/// Fetches what the lab needs.
pub fn setup(report: &mut Report) {
    crate::setup::programs(report, "programs of the lab", PROGRAMS);
    crate::setup::programs(report, "programs that move programs", suites::migrate::PROGRAMS);
    match kernel::Kernel::fetch() {
        Ok(package) => {
            report.done("guests' kernel", &package);
        }
        Err(error) => report.skip("guests' kernel", &error.to_string()),
    }
}

/// Why no guest can boot here; `None` where one can.
pub fn lacking() -> Option<String> {
    let missing = PROGRAMS.iter().find(|(program, _)| !is_here(program));
    if let Some((program, _)) = missing {
        return Some(format!("{program} is not here; run `cargo xtask lab setup`"));
    }
    kernel::Kernel::find().err().map(|error| error.to_string())
}

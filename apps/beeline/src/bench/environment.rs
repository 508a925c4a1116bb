//! What a measurement was taken on: without it a figure means nothing.

use serde::Serialize;

/// The machine and the build.
#[derive(Clone, Debug, Serialize)]
pub struct Environment {
    /// Processor model.
    pub cpu: String,
    /// Processors this process may use.
    pub cores: usize,
    /// Kernel release.
    pub kernel: String,
    /// Commit this program was built from.
    pub commit: &'static str,
    /// False for a build without optimisation, whose figures mean nothing.
    pub optimised: bool,
}

impl Environment {
    /// This machine, this build.
    pub fn detect() -> Self {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let uname = rustix::system::uname();
        Self {
            cpu: crate::doctor::processor_name(&info),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: uname.release().to_string_lossy().into_owned(),
            commit: env!("BUILD_COMMIT"),
            optimised: !cfg!(debug_assertions),
        }
    }

    /// One line.
    pub fn line(&self) -> String {
        let build = if self.optimised { "" } else { ", DEBUG BUILD: figures mean nothing" };
        format!(
            "{}, {} cores, Linux {}, commit {}{build}",
            self.cpu, self.cores, self.kernel, self.commit
        )
    }
}

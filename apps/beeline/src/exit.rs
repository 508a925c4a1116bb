//! Exit codes, and errors that carry one. The table in `docs/errors.md` is this one.

use std::fmt;

/// How the command ended, as scripts see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// The command did what it was asked.
    Done,
    /// It could not.
    Failed,
    /// The arguments, the environment or the configuration file are wrong; nothing was started.
    Usage,
    /// A server did not answer, or not in time.
    Unreachable,
    /// A check found damage.
    Corruption,
    /// `run`: the program is there and cannot be executed.
    NotExecutable,
    /// `run`: there is no such program.
    NoProgram,
    /// The user stopped it.
    Interrupted,
}

impl Exit {
    /// Every code with its meaning.
    pub const TABLE: [(Exit, &'static str); 8] = [
        (Exit::Done, "done"),
        (Exit::Failed, "failed"),
        (Exit::Usage, "usage: arguments, environment or configuration file are wrong"),
        (Exit::Unreachable, "unreachable, or no answer in time"),
        (Exit::Corruption, "corruption found"),
        (Exit::NotExecutable, "`run`: the program cannot be executed"),
        (Exit::NoProgram, "`run`: there is no such program"),
        (Exit::Interrupted, "interrupted"),
    ];

    /// The number.
    pub fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::Usage => 2,
            Self::Unreachable => 3,
            Self::Corruption => 4,
            Self::NotExecutable => 126,
            Self::NoProgram => 127,
            Self::Interrupted => 130,
        }
    }
}

/// An error and the exit code it leads to.
#[derive(Debug)]
pub struct Failure {
    /// The code.
    pub exit: Exit,
    /// What happened, outermost first.
    pub error: anyhow::Error,
}

impl Failure {
    /// A failure with `exit`.
    pub fn new(exit: Exit, error: impl Into<anyhow::Error>) -> Self {
        Self { exit, error: error.into() }
    }

    /// True when the reader of our output went away (`beeline ... | head`): not worth a message.
    pub fn is_broken_pipe(&self) -> bool {
        self.error.chain().any(|cause| {
            cause
                .downcast_ref::<std::io::Error>()
                .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // A cause that its consequence already quotes is not repeated.
        let mut said = String::new();
        for cause in self.error.chain() {
            let text = cause.to_string();
            if said.is_empty() {
                said = text;
            } else if !said.contains(&text) {
                said.push_str(": ");
                said.push_str(&text);
            }
        }
        f.write_str(&said)
    }
}

impl<E: Into<anyhow::Error>> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(Exit::Failed, error)
    }
}

/// Gives an error its exit code.
pub trait OrExit<T> {
    /// On error, the command ends with `exit`.
    fn or_exit(self, exit: Exit) -> Result<T, Failure>;
}

impl<T, E: Into<anyhow::Error>> OrExit<T> for Result<T, E> {
    fn or_exit(self, exit: Exit) -> Result<T, Failure> {
        self.map_err(|error| Failure::new(exit, error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_codes_are_the_documented_ones() {
        let codes: Vec<u8> = Exit::TABLE.iter().map(|(exit, _)| exit.code()).collect();
        assert_eq!(codes, [0, 1, 2, 3, 4, 126, 127, 130]);
        let document = include_str!("../../../docs/errors.md");
        for (exit, meaning) in Exit::TABLE {
            let row = format!("| {} | {meaning} |", exit.code());
            assert!(document.contains(&row), "docs/errors.md lacks: {row}");
        }
    }

    #[test]
    fn a_cause_is_told_once() {
        let cause = anyhow::anyhow!("disk full");
        let quoting = cause.context("writing x failed: disk full").context("backup");
        assert_eq!(Failure::from(quoting).to_string(), "backup: writing x failed: disk full");
        let plain = anyhow::anyhow!("disk full").context("backup");
        assert_eq!(Failure::from(plain).to_string(), "backup: disk full");
    }

    #[test]
    fn a_closed_pipe_is_told_apart() {
        let broken = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        assert!(Failure::from(anyhow::Error::from(broken).context("writing")).is_broken_pipe());
        assert!(!Failure::from(anyhow::anyhow!("other")).is_broken_pipe());
    }
}

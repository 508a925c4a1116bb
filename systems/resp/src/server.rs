//! What commands ask of the node that runs them.
//!
//! Everything here may be slow: no command on the data path calls it, but for the clock where a
//! relative time to live is set.

use crate::absent::AbsentWatches;
use crate::session::ClientInfo;

/// Why a configuration parameter was not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No parameter of this name.
    #[error("unknown parameter '{name}'")]
    Unknown {
        /// The name as given.
        name: String,
    },
    /// It exists and is fixed while the node runs.
    #[error("can't set immutable config '{name}'")]
    Immutable {
        /// The name as given.
        name: String,
    },
    /// The value is not one of those it takes.
    #[error("parameter '{name}': {reason}")]
    Invalid {
        /// The name as given.
        name: String,
        /// What it takes.
        reason: String,
    },
}

impl ConfigError {
    /// The same call fails again.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        false
    }

    /// The reply, as Redis words it.
    pub(crate) fn line(&self) -> String {
        match self {
            Self::Unknown { name } => {
                format!("ERR Unknown option or number of arguments for CONFIG SET - '{name}'")
            }
            Self::Immutable { name } => format!(
                "ERR CONFIG SET failed (possibly related to argument '{name}') - can't set immutable config"
            ),
            Self::Invalid { name, reason } => {
                format!("ERR CONFIG SET failed (possibly related to argument '{name}') - {reason}")
            }
        }
    }
}

/// Why a snapshot was not begun or not finished.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// One is being written.
    #[error("Background save already in progress")]
    InProgress,
    /// It failed, or the node cannot write snapshots; the text says why.
    #[error("{0}")]
    Failed(String),
}

impl SaveError {
    /// Whether trying again later can help.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::InProgress)
    }
}

/// What SHUTDOWN was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shutdown {
    /// `Some(true)`: with a snapshot. `Some(false)`: without. `None`: as configured.
    pub save: Option<bool>,
    /// Do not wait for anything.
    pub now: bool,
    /// Go on although something failed.
    pub force: bool,
}

/// Which commands CLIENT PAUSE holds back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// All.
    All,
    /// Those that change data.
    Writes,
}

/// Which connections CLIENT KILL ends: those that fulfil every condition given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KillFilter {
    /// Its number.
    pub id: Option<u64>,
    /// Its remote `address:port`.
    pub address: Option<String>,
    /// Its local `address:port`.
    pub local_address: Option<String>,
    /// Its user.
    pub user: Option<String>,
    /// Its type: `normal`, `master`, `replica` or `pubsub`.
    pub kind: Option<String>,
    /// Leave the caller alone.
    pub skip: Option<u64>,
}

impl KillFilter {
    /// Whether `client` fulfils every condition.
    #[must_use]
    pub fn selects(&self, client: &ClientInfo) -> bool {
        let same = |wanted: &Option<String>, found: &str| {
            wanted.as_deref().is_none_or(|wanted| wanted == found)
        };
        self.id.is_none_or(|id| id == client.id)
            && self.skip != Some(client.id)
            && same(&self.address, &client.address)
            && same(&self.local_address, &client.local_address)
            && same(&self.user, client.user)
            && same(&self.kind, "normal")
    }
}

/// The node, as commands see it.
pub trait Server {
    /// Wall-clock time in microseconds since 1970.
    fn unix_us(&self) -> u64;

    /// The Redis version whose behaviour is promised, such as `7.2.0`; shown by HELLO and INFO.
    fn redis_version(&self) -> &str;

    /// Whether a new connection must authenticate.
    fn password_required(&self) -> bool;

    /// Whether the keys are those of a replicated log, which every change goes through.
    fn is_replicated(&self) -> bool {
        false
    }

    /// What commands did so far, at all of the node's executors; `None`: not kept.
    fn figures(&self) -> Option<&crate::figures::NodeFigures> {
        None
    }

    /// The keys that sessions watch and that are absent.
    fn absent_watches(&self) -> &AbsentWatches;

    /// Whether `password` is `user`'s.
    fn authenticate(&self, user: &[u8], password: &[u8]) -> bool;

    /// Names of the sections of INFO, in order.
    fn info_sections(&self) -> &[&'static str];

    /// Appends the fields of one section as `name:value\r\n` lines.
    fn info(&self, section: &str, out: &mut String);

    /// Calls `visit` with the name and value of every parameter.
    fn config(&self, visit: &mut dyn FnMut(&str, &str));

    /// Changes parameters, all or none.
    ///
    /// Errors: [`ConfigError`], and nothing was changed.
    fn config_set(&self, pairs: &[(String, String)]) -> Result<(), ConfigError>;

    /// Writes the configuration to the file it was read from.
    ///
    /// Errors: the text of the reply, behind its code `ERR`.
    fn config_rewrite(&self) -> Result<(), String>;

    /// Sets the counters shown by INFO to zero.
    fn reset_statistics(&self);

    /// Calls `visit` with every connection of the node, the caller's included.
    fn clients(&self, visit: &mut dyn FnMut(&ClientInfo));

    /// Ends the connections that `filter` selects, but for the one numbered `caller`, which ends
    /// itself; returns how many were selected, the caller included.
    fn kill_clients(&self, filter: &KillFilter, caller: u64) -> usize;

    /// Holds commands back for `milliseconds` from now.
    fn pause_clients(&self, milliseconds: u64, pause: Pause);

    /// Ends a pause.
    fn unpause_clients(&self);

    /// Writes a snapshot and waits for it.
    ///
    /// Errors: [`SaveError`].
    fn save(&self) -> Result<(), SaveError>;

    /// Begins a snapshot. With `schedule`, one that is being written is followed by another, and
    /// `Ok(true)` says so.
    ///
    /// Errors: [`SaveError`].
    fn save_in_background(&self, schedule: bool) -> Result<bool, SaveError>;

    /// Unix seconds of the latest snapshot, or of the node's start.
    fn last_save_seconds(&self) -> u64;

    /// Begins to stop the node; replies already owed may still be sent.
    ///
    /// Errors: the text of the reply, behind its code `ERR`; the node goes on.
    fn shutdown(&self, request: Shutdown) -> Result<(), String>;

    /// Calls off a shutdown that has not finished. `false`: there is none.
    fn abort_shutdown(&self) -> bool;
}

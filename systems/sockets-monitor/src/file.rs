//! Why a file that configures the monitor is not taken: the policy, or the list of hosts.

use std::net::IpAddr;

use beeline_sockets::control::LONGEST_HOLD_SECONDS;
use serde::de::DeserializeOwned;

/// Why a file was not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// Not TOML, other keys than the file has, or an address that is none.
    #[error("line {line}: {what}")]
    Text {
        /// Counted from 1.
        line: usize,
        /// In words, without line breaks.
        what: String,
    },
    /// Neither a port nor a range of them.
    #[error("rule {rule}: ports = {text:?} is neither a port nor a range such as \"8000-8099\"")]
    Ports {
        /// Counted from 1.
        rule: usize,
        /// As it stands in the file.
        text: String,
    },
    /// Not of the form of a place on the fabric.
    #[error("{text:?} is no place on the fabric such as \"tcp://10.0.0.1:4791\"")]
    Place {
        /// As it stands in the file.
        text: String,
    },
    /// A host that no connection can lead to.
    #[error("host {host}: no addresses")]
    Nowhere {
        /// Counted from 1.
        host: usize,
    },
    /// One address, two hosts.
    #[error("host {host}: {address} stands there already")]
    Twice {
        /// Counted from 1.
        host: usize,
        /// Which.
        address: IpAddr,
    },
    /// Longer than anything is left to the kernel.
    #[error("sleepers_hold_seconds = {seconds} is more than {LONGEST_HOLD_SECONDS}")]
    Hold {
        /// As it stands in the file.
        seconds: u16,
    },
}

/// The settings that `text` holds.
///
/// Errors: [`FileError::Text`].
pub(crate) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, FileError> {
    toml::from_str(text).map_err(|error: toml::de::Error| {
        let before = text.get(..error.span().map_or(0, |span| span.start)).unwrap_or(text);
        let line = before.bytes().filter(|&byte| byte == b'\n').count() + 1;
        FileError::Text { line, what: error.message().replace('\n', ", ") }
    })
}

impl FileError {
    /// True when trying again can help without changing anything.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        false
    }
}

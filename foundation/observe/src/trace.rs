//! Where log lines go and which are wanted.
//!
//! Lines go to standard error, so that results on standard output stay clean. Levels: `error`
//! needs a person, `warn` healed itself, `info` marks life events, `debug` a decision, `trace` a
//! message. `BEELINE_LOG` holds a filter such as `info,beeline_kv=debug` and wins over the level
//! asked for on the command line.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};

/// Environment variable that holds the filter.
pub const FILTER_VARIABLE: &str = "BEELINE_LOG";

/// What [`init`] sets up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceOptions {
    /// Filter used where `BEELINE_LOG` is not set.
    pub filter: String,
}

impl Default for TraceOptions {
    fn default() -> Self {
        Self { filter: "info".to_owned() }
    }
}

/// Why tracing could not be set up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The filter does not parse.
    #[error("{origin}: {filter:?} is no log filter (examples: info; warn,beeline_kv=debug)")]
    BadFilter {
        /// Where the filter came from.
        origin: &'static str,
        /// The filter.
        filter: String,
        /// What is wrong with it.
        #[source]
        source: tracing_subscriber::filter::ParseError,
    },
    /// This process has a subscriber already.
    #[error("log lines already have a destination in this process")]
    AlreadySet {
        /// The library's word for it.
        #[source]
        source: TryInitError,
    },
}

impl TraceError {
    /// True when the same call can succeed later: never.
    #[must_use]
    pub fn retry_may_help(&self) -> bool {
        false
    }
}

/// Sends this process's log lines to standard error, once per process.
///
/// Errors: [`TraceError`].
pub fn init(options: &TraceOptions) -> Result<(), TraceError> {
    let from_environment = std::env::var(FILTER_VARIABLE).ok().filter(|f| !f.is_empty());
    let filter = choose(from_environment, options)?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(true)
        .finish()
        .try_init()
        .map_err(|source| TraceError::AlreadySet { source })
}

fn choose(
    from_environment: Option<String>,
    options: &TraceOptions,
) -> Result<EnvFilter, TraceError> {
    let (origin, filter) = match from_environment {
        Some(filter) => (FILTER_VARIABLE, filter),
        None => ("the log filter", options.filter.clone()),
    };
    EnvFilter::builder().parse(&filter).map_err(|source| TraceError::BadFilter {
        origin,
        filter,
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_wins_over_the_option() {
        let chosen = choose(Some("beeline_kv=trace".to_owned()), &TraceOptions::default()).unwrap();
        assert_eq!(chosen.to_string(), "beeline_kv=trace");
        let chosen = choose(None, &TraceOptions::default()).unwrap();
        assert_eq!(chosen.to_string(), "info");
    }

    #[test]
    fn a_bad_filter_is_named_with_its_origin() {
        let error = choose(Some("beeline=loud".to_owned()), &TraceOptions::default()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("BEELINE_LOG") && text.contains("loud"), "{text}");
        assert!(!error.retry_may_help());
    }
}

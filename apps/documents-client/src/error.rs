//! Why a command has no result.

use std::time::Duration;

use bson::{Bson, Document};

/// See the module's documentation.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The store refused; the code is MongoDB's.
    #[error("{message} (code {code}, {name})")]
    Command {
        /// MongoDB's number.
        code: i32,
        /// MongoDB's name of it.
        name: String,
        /// The store's words.
        message: String,
        /// As in `TransientTransactionError`.
        labels: Vec<String>,
    },
    /// A document was not written; the code is MongoDB's.
    #[error("document {index} was not written: {message} (code {code})")]
    Write {
        /// Its place among those of the command.
        index: usize,
        /// MongoDB's number.
        code: i32,
        /// The store's words.
        message: String,
        /// Documents that were written.
        written: i64,
    },
    /// No transport reaches the store.
    #[error(
        "the document store at {address} cannot be reached: {reason}; start it with `beeline serve`"
    )]
    Unreachable {
        /// As given.
        address: String,
        /// Why, over each transport.
        reason: String,
    },
    /// The time was up; whether the command was executed is unknown.
    #[error("no reply within {limit:?}; whether the command was executed is unknown")]
    TimedOut {
        /// The bound.
        limit: Duration,
    },
    /// The connection broke under a command that cannot be sent again.
    #[error("{reason}; whether the command was executed is unknown, and it cannot be sent again")]
    OutcomeUnknown {
        /// What happened.
        reason: String,
    },
    /// The store's answer is none, or the command is no document.
    #[error("the answer of the document store cannot be read: {0}")]
    Protocol(String),
    /// An address that is none.
    #[error("{address:?} is no address of a document store: {reason}")]
    Address {
        /// As given.
        address: String,
        /// What is wrong with it.
        reason: String,
    },
}

impl ClientError {
    /// A channel's refusal.
    pub(crate) fn refused(code: u32, message: String) -> Self {
        Self::Command { code: code as i32, name: String::new(), message, labels: Vec::new() }
    }

    /// MongoDB's code, where the store gave one.
    #[must_use]
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Command { code, .. } | Self::Write { code, .. } => Some(*code),
            _ => None,
        }
    }

    /// True when the same call may succeed later.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Command { labels, .. } => labels
                .iter()
                .any(|label| label.starts_with("Transient") || label.starts_with("Retryable")),
            _ => false,
        }
    }
}

fn integer(document: &Document, field: &str) -> i64 {
    match document.get(field) {
        Some(Bson::Int32(value)) => i64::from(*value),
        Some(Bson::Int64(value)) => *value,
        Some(Bson::Double(value)) => *value as i64,
        _ => 0,
    }
}

/// A reply, unless it says that the command failed.
pub(crate) fn check_command(reply: Document) -> Result<Document, ClientError> {
    if integer(&reply, "ok") != 1 {
        let labels = reply.get_array("errorLabels").into_iter().flatten();
        return Err(ClientError::Command {
            code: integer(&reply, "code") as i32,
            name: reply.get_str("codeName").unwrap_or_default().to_owned(),
            message: reply.get_str("errmsg").unwrap_or("the store gave no reason").to_owned(),
            labels: labels.filter_map(Bson::as_str).map(str::to_owned).collect(),
        });
    }
    Ok(reply)
}

/// A reply, unless it says that the write of a document failed.
pub(crate) fn check_writes(reply: Document) -> Result<Document, ClientError> {
    let first = reply.get_array("writeErrors").ok().and_then(|all| all.first());
    if let Some(Bson::Document(first)) = first {
        return Err(ClientError::Write {
            index: integer(first, "index") as usize,
            code: integer(first, "code") as i32,
            message: first.get_str("errmsg").unwrap_or_default().to_owned(),
            written: integer(&reply, "n"),
        });
    }
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn replies_that_failed_are_errors_with_mongodbs_codes() {
        let check = |reply| check_command(reply).and_then(check_writes);
        assert!(check(doc! { "ok": 1.0, "n": 1 }).is_ok());
        let refused = check(
            doc! { "ok": 0.0, "code": 112, "codeName": "WriteConflict", "errmsg": "no", "errorLabels": ["TransientTransactionError"] },
        );
        let refused = refused.unwrap_err();
        assert!(refused.is_retryable() && refused.code() == Some(112), "{refused}");
        let errors = doc! { "ok": 1.0, "n": 2, "writeErrors": [{ "index": 2, "code": 11000, "errmsg": "E11000" }] };
        let error = check(errors).unwrap_err();
        assert_eq!(error.code(), Some(11000));
        assert!(matches!(error, ClientError::Write { index: 2, written: 2, .. }));
    }
}

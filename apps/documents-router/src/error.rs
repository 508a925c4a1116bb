//! Why a command is refused: MongoDB's code and words, whichever end refused it.

use beeline_documents_client::ClientError;
use beeline_documents_query::error::{Code, QueryError};
use bson::{Document, doc};

/// A refusal, as a client reads it.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message} (code {code})")]
pub struct Refusal {
    /// MongoDB's number.
    pub code: i32,
    /// MongoDB's word.
    pub name: String,
    /// One sentence.
    pub message: String,
    /// What drivers decide by.
    pub labels: Vec<String>,
}

/// A result of the router.
pub type Result<T, E = Refusal> = std::result::Result<T, E>;

impl Refusal {
    /// A refusal of the router's own.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        let (name, message) = (code.name().to_owned(), message.into());
        Self { code: code as i32, name, message, labels: Vec::new() }
    }

    /// What a shard's client says, of the shard of this name.
    #[must_use]
    pub fn of_shard(shard: &str, error: ClientError, retryable: bool) -> Self {
        let label = |mut refusal: Self| {
            if retryable {
                refusal.labels.push("RetryableWriteError".to_owned());
            }
            refusal
        };
        match error {
            ClientError::Command { code, name, message, labels } => {
                Self { code, name, message, labels }
            }
            ClientError::Unreachable { .. } => label(Self::new(
                Code::FailedToSatisfyReadPreference,
                format!(
                    "Could not find host matching read preference {{ mode: \"primary\" }} for set {shard}: {error}"
                ),
            )),
            ClientError::TimedOut { .. } => {
                label(Self::new(Code::NetworkTimeout, format!("shard {shard}: {error}")))
            }
            error => label(Self::new(Code::HostUnreachable, format!("shard {shard}: {error}"))),
        }
    }

    /// As a reply.
    #[must_use]
    pub fn reply(&self) -> Document {
        let mut reply =
            doc! { "ok": 0.0, "errmsg": &self.message, "code": self.code, "codeName": &self.name };
        if !self.labels.is_empty() {
            reply.insert("errorLabels", self.labels.clone());
        }
        reply
    }
}

impl From<QueryError> for Refusal {
    fn from(error: QueryError) -> Self {
        Self::new(error.code, error.message)
    }
}

/// A refusal as a failed result.
///
/// Errors: always.
pub fn refuse<T>(code: Code, message: impl Into<String>) -> Result<T> {
    Err(Refusal::new(code, message))
}

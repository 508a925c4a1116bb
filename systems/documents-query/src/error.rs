//! Why a command is refused: MongoDB's codes, in one table.
//!
//! Invariant: a driver decides by the code what to do next (retry, give up, look for another
//! primary), so a code is only ever used with its published meaning.

macro_rules! codes {
    ($($name:ident = $code:literal),* $(,)?) => {
        /// A published MongoDB error code.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs, reason = "the names are MongoDB's own words")]
        pub enum Code { $($name = $code),* }

        impl Code {
            /// Every code this crate and the door use.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The word that stands beside the code in a reply.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => match $code { 15000.. => concat!("Location", $code), _ => published(stringify!($name)) }),* }
            }
        }
    };
}

codes! {
    InternalError = 1, BadValue = 2, NoSuchKey = 4, SnapshotUnavailable = 246, UserExists = 51003, MechanismUnavailable = 334, InvalidResumeToken = 260, MergeWithoutIndex = 51183, MergeShape = 51132, MergeStageNoMatchingDocument = 13113, DistinctTooBig = 17217, ChangeStreamsMissing = 40573, NoSuchField = 40414, UnknownField = 40415, DuplicateField = 40413, DuplicateSection = 40433, BelowMinimum = 51024, ApiStrictError = 323, ApiVersionError = 322, ApiDeprecationError = 324, HostUnreachable = 6, FailedToParse = 9,
    UserNotFound = 11, UnsupportedFormat = 12, Unauthorized = 13, TypeMismatch = 14,
    Overflow = 15, InvalidLength = 16, DatabaseDiffersInCase = 13297, ProtocolError = 17, AuthenticationFailed = 18,
    IllegalOperation = 20, NamespaceNotFound = 26, IndexNotFound = 27, PathNotViable = 28,
    NonConformantBson = 22, CannotCreateIndex = 67, IndexAlreadyExists = 68,
    ConflictingUpdateOperators = 40, CursorNotFound = 43, QueryPlanKilled = 175, QueryExceededMemory = 292, NamespaceExists = 48,
    MaxTimeMsExpired = 50, DollarPrefixedFieldName = 52, InvalidIdField = 53,
    NotSingleValueField = 54, EmptyFieldName = 56, DottedFieldName = 57, CommandNotFound = 59,
    ImmutableField = 66, InvalidOptions = 72, InvalidNamespace = 73, WriteConcernFailed = 64,
    WriteConflict = 112, ConflictingOperationInProgress = 117, CommandNotSupported = 115,
    DocumentValidationFailure = 121, IndexOptionsConflict = 85, IndexKeySpecsConflict = 86,
    UnknownReplWriteConcern = 79, UnsatisfiableWriteConcern = 100, OperationFailed = 96, DivideByZero = 4848401,
    ExceededMemoryLimit = 146, CommandNotSupportedOnView = 166, NoSuchTransaction = 251,
    TransactionTooOld = 225, TransactionCommitted = 256, OperationNotSupportedInTransaction = 263,
    TransactionTooLarge = 257, ChangeStreamFatalError = 280, ChangeStreamHistoryLost = 286,
    NoReplicationEnabled = 76, NotYetInitialized = 94, Interrupted = 11601, CursorInUse = 321,
    IncompleteTransactionHistory = 217, NotWritablePrimary = 10107, InterruptedAtShutdown = 11600,
    NotPrimaryNoSecondaryOk = 13435, NotPrimaryOrSecondary = 13436, PrimarySteppedDown = 189,
    InterruptedDueToReplStateChange = 11602,
    BsonObjectTooLarge = 10334, DuplicateKey = 11000, ClientDisconnect = 279,
    InvalidUuid = 207, OutOfDiskSpace = 14031, ConversionFailure = 241, InvalidIndexSpecificationOption = 197,
    FailPointEnabled = 6500, ExpressionUnknown = 168, ParallelArrays = 171, CannotIndexArray = 16766, StageUnknown = 40324, StageShape = 40323,
    GroupShape = 15955, GroupAccumulator = 15952, GroupField = 40234, UnknownVariable = 17276,
    ExpressionArity = 16020, RemoveOnly = 31253, ProjectionMixed = 31254, PathCollision = 31249,
    UpdatePathCollision = 31250,
    ShardKeyNotFound = 61, ShardNotFound = 70, NetworkTimeout = 89, NamespaceNotSharded = 118,
    FailedToSatisfyReadPreference = 133, StaleConfig = 13388,
    SliceShape = 28724, UnitNeeded = 15958, UnwindShape = 28808, ShapeOfMatch = 15959, CountShape = 40156,
    FacetShape = 40169, BucketShape = 40198, OverflowInSum = 28701, IndexInformationTooLarge = 17280, ServerError = 17282,
}

/// A code's name as MongoDB spells it, where that is not the name's spelling here.
fn published(name: &'static str) -> &'static str {
    match name {
        "MaxTimeMsExpired" => "MaxTimeMSExpired",
        "NonConformantBson" => "NonConformantBSON",
        "BsonObjectTooLarge" => "BSONObjectTooLarge",
        "InvalidUuid" => "InvalidUUID",
        "ApiStrictError" => "APIStrictError",
        "ApiVersionError" => "APIVersionError",
        "ApiDeprecationError" => "APIDeprecationError",
        other => other,
    }
}

/// What is refused, and why.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct QueryError {
    /// MongoDB's code.
    pub code: Code,
    /// One sentence that names the value at fault.
    pub message: String,
    /// Fields a reply carries beside the code (as `keyPattern` of a duplicate key).
    pub info: Option<Box<bson::Document>>,
}

impl QueryError {
    /// An error.
    #[must_use]
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), info: None }
    }

    /// The same with fields beside it.
    #[must_use]
    pub fn with(mut self, info: bson::Document) -> Self {
        self.info = Some(Box::new(info));
        self
    }
}

/// A result of this crate.
pub type Result<T, E = QueryError> = std::result::Result<T, E>;

/// An error as a failed result.
///
/// Errors: always.
pub fn fail<T>(code: Code, message: impl Into<String>) -> Result<T> {
    Err(QueryError::new(code, message))
}

/// [`Code::BadValue`] as a failed result.
///
/// Errors: always.
pub fn bad<T>(message: impl Into<String>) -> Result<T> {
    fail(Code::BadValue, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_are_told_apart() {
        let numbers: std::collections::BTreeSet<i32> =
            Code::ALL.iter().map(|code| *code as i32).collect();
        assert_eq!(numbers.len(), Code::ALL.len());
        assert_eq!(Code::DuplicateKey.name(), "DuplicateKey");
        assert_eq!(Code::StageUnknown.name(), "Location40324");
    }
}

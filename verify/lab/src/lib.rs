//! Programs that the guests of the lab run against each other; see `tests/guests`.

#![forbid(unsafe_code)]

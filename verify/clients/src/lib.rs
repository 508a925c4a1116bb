//! Real, unmodified clients against the real command.

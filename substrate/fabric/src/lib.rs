//! Verbs: the traits and types of one-sided communication. Performs no I/O.

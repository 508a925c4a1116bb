//! Bounded codecs and checksums.

//! From URL or negotiation to a fabric provider.

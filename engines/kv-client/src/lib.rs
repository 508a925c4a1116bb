//! One-sided key-value client: BOOM and its two baselines.

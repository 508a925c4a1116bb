//! One-sided key-value protocols, server side: BOOM and its two baselines.

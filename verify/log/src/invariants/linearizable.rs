//! Clients' histories are those of one list per key.

use std::collections::BTreeMap;

use super::Violation;
use crate::linear::{Call, is_linearizable};
use crate::machine::Key;

/// Keys are independent, so each history is checked alone.
pub(crate) fn check_history(calls: &BTreeMap<Key, Vec<Call>>) -> Result<(), Violation> {
    for (key, calls) in calls {
        if !is_linearizable(calls) {
            let mut calls = calls.clone();
            calls.sort_by_key(|call| call.from_ns);
            let what = format!("no order explains list {key}: {calls:#?}");
            return Err(Violation::new("linearizable", what));
        }
    }
    Ok(())
}

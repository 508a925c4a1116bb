//! What must hold in every run, a file each.
//!
//! | file | invariant | specification |
//! |---|---|---|
//! | `one_value` | no two servers apply different entries at one position | p. 3.2 |
//! | `durable_commit` | a leader's commit is durable at f + 1 members at that moment | p. 3.2 |
//! | `never_lost` | what a client was answered is there at the end, everywhere | p. 3.3 |
//! | `fenced` | nothing of a term below a server's promise changes its log region | p. 3.3 |
//! | `exactly_once` | no append takes effect twice, anywhere, at any time | section 5 |
//! | `linearizable` | clients' histories are those of one list per key | section 6 |

mod durable_commit;
mod exactly_once;
mod fenced;
mod linearizable;
mod never_lost;
mod one_value;

pub(crate) use durable_commit::check_commit;
pub(crate) use exactly_once::check_machine;
pub(crate) use fenced::Fences;
pub(crate) use linearizable::check_history;
pub(crate) use never_lost::check_end;
pub(crate) use one_value::Values;

/// An invariant that did not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Which: a file's name, or `liveness`.
    pub invariant: &'static str,
    /// What was seen.
    pub what: String,
}

impl Violation {
    pub(crate) fn new(invariant: &'static str, what: String) -> Self {
        Self { invariant, what }
    }
}

//! The direct store's commands: not Redis', named like a module's.

use super::flag::{DENYOOM, FAST, NO_MULTI, READONLY, WRITE};
use super::{Command, Scope, command};
use crate::direct::unavailable;

const fn direct(name: &'static str, arity: i64, flags: u32, summary: &'static str) -> Command {
    command(name, arity, flags | FAST | NO_MULTI, &["@fast"])
        .data(Scope::Elsewhere, unavailable)
        .docs("direct", "7.2.0", summary)
}

pub(super) const ADD: Command =
    direct("direct.add", -3, WRITE, "Adds to a number of the direct store");
pub(super) const CAS: Command =
    direct("direct.cas", -4, WRITE, "Stores a number where another one is expected");
pub(super) const DEL: Command = direct("direct.del", 2, WRITE, "Removes a pair");
pub(super) const FILTER: Command =
    direct("direct.filter", -2, READONLY, "Returns the numbers of a vector that are not zero");
pub(super) const GET: Command = direct("direct.get", 2, READONLY, "Returns a value");
pub(super) const PUT: Command =
    direct("direct.put", -3, WRITE | DENYOOM, "Stores a pair of the direct store");
pub(super) const REDUCE: Command =
    direct("direct.reduce", -3, READONLY, "Folds a vector into one number");
pub(super) const VADD: Command =
    direct("direct.vadd", -3, WRITE, "Adds to each number of a vector");

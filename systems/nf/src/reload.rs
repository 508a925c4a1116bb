//! A running graph is exchanged for another one: which state goes over, and why not.
//!
//! An instance keeps its state where the new graph has an instance of its name and element. Variables
//! and memories go over by their names; their types must be equal. What is new begins as it would at
//! the start. An instance that shall begin anew is named by the user.

use beeline_ir::graph::Graph;
use beeline_ir::interpreter::Frame;
use beeline_ir::tree::{Element, Mem, VarKind};

/// A graph cannot take the place of the one that runs; that one goes on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReloadError {
    /// State that has no place.
    #[error("{}; name an instance with --restart to let it begin anew", .0.join("; "))]
    State(Vec<String>),
    /// A name after `--restart`.
    #[error("the new graph has no instance {0} to restart")]
    NoSuchInstance(String),
    /// An item that has no place.
    #[error("{0} holds an item at its input {1}, which the new {0} does not have in that width")]
    Item(String, String),
}

/// What goes over into a node.
#[derive(Clone, Debug)]
struct Transfer {
    /// The node in the running graph.
    from: usize,
    /// Variables there and here.
    vars: Vec<(usize, usize)>,
    /// Memories there and here.
    mems: Vec<(usize, usize)>,
}

/// How a graph takes over from another.
#[derive(Clone, Debug)]
pub struct Handover {
    transfers: Vec<Option<Transfer>>,
    /// Instances that keep their state.
    pub kept: Vec<String>,
    /// Instances that begin.
    pub begun: Vec<String>,
    /// Instances, variables and memories that are no more.
    pub gone: Vec<String>,
}

fn described(mem: &Mem) -> String {
    let sizes: String = mem.dimensions.iter().map(|size| format!("[{size}]")).collect();
    format!("{}{sizes} of {} bits", mem.name, mem.bits)
}

/// The state of one element that another of its name takes over.
fn transfer(
    (from, old): (usize, &Element),
    new: &Element,
    instance: &str,
    (wrong, gone): (&mut Vec<String>, &mut Vec<String>),
) -> Transfer {
    let mut transfer = Transfer { from, vars: Vec::new(), mems: Vec::new() };
    for (at, var) in old.vars.iter().enumerate().filter(|(_, var)| var.kind != VarKind::Local) {
        let same = |other: &beeline_ir::tree::Var| other.name == var.name && other.kind == var.kind;
        match new.vars.iter().position(same) {
            Some(to) if new.vars[to].bits == var.bits => transfer.vars.push((at, to)),
            // A port's item is looked at when the graph is empty.
            _ if var.kind == VarKind::Port => {}
            Some(to) => wrong.push(format!(
                "{instance}.{} has {} bits, and {} in the new file",
                var.name, var.bits, new.vars[to].bits
            )),
            None if new.mems.iter().any(|mem| mem.name == var.name) => {
                wrong.push(format!("{instance}.{} is an array in the new file", var.name));
            }
            None => gone.push(format!("{instance}.{}", var.name)),
        }
    }
    for (at, mem) in old.mems.iter().enumerate().filter(|(_, mem)| !mem.constant) {
        let Some(to) = new.mems.iter().position(|other| other.name == mem.name) else {
            if new.vars.iter().any(|var| var.kind == VarKind::State && var.name == mem.name) {
                wrong.push(format!("{instance}.{} is no array in the new file", mem.name));
            } else {
                gone.push(format!("{instance}.{}", mem.name));
            }
            continue;
        };
        let other = &new.mems[to];
        let equal = (&mem.dimensions, mem.bits, &mem.fields)
            == (&other.dimensions, other.bits, &other.fields)
            && !other.constant;
        if equal {
            transfer.mems.push((at, to));
        } else {
            let (was, is) = (described(mem), described(other));
            wrong.push(format!("{instance}.{was} is {is} with other fields in the new file"));
        }
    }
    transfer
}

impl Handover {
    /// How `new` takes over from `old`; instances of `restart` begin anew.
    ///
    /// Errors: every piece of state without a place, in one list.
    pub fn plan(old: &Graph, new: &Graph, restart: &[String]) -> Result<Self, ReloadError> {
        for name in restart {
            if new.node_named(name).is_none() {
                return Err(ReloadError::NoSuchInstance(name.clone()));
            }
        }
        let mut wrong = Vec::new();
        let (mut kept, mut begun, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        let mut transfers = Vec::new();
        for node in &new.nodes {
            let name = &node.name;
            let from = old.node_named(name).filter(|_| !restart.contains(name));
            let Some(from) = from else {
                begun.push(name.clone());
                transfers.push(None);
                continue;
            };
            let before = &old.nodes[from].element;
            if before.name != node.element.name {
                let (was, is) = (&before.name, &node.element.name);
                wrong.push(format!("{name} is a {was}, and a {is} in the new file"));
                transfers.push(None);
                continue;
            }
            let places = (&mut wrong, &mut gone);
            transfers.push(Some(transfer((from, before), &node.element, name, places)));
            kept.push(name.clone());
        }
        let is_no_more = |node: &&beeline_ir::graph::Node| new.node_named(&node.name).is_none();
        gone.extend(old.nodes.iter().filter(is_no_more).map(|node| node.name.clone()));
        if wrong.is_empty() {
            Ok(Self { transfers, kept, begun, gone })
        } else {
            Err(ReloadError::State(wrong))
        }
    }

    /// True where a node of the new graph keeps what it knew.
    #[must_use]
    pub fn keeps(&self, node: usize) -> bool {
        self.transfers[node].is_some()
    }

    /// Looks for items in the buffers of inputs that the new elements do not have.
    ///
    /// Errors: the first one.
    pub fn check_inputs(
        &self,
        old: &Graph,
        frame: &dyn Fn(usize) -> Option<Frame>,
    ) -> Result<(), ReloadError> {
        for (node, described) in old.nodes.iter().enumerate() {
            let element = &described.element;
            let Some(frame) = frame(node) else { continue };
            for (port, (flag, data)) in element.in_valid.iter().zip(&element.in_data).enumerate() {
                if frame.low(*flag) == 0 {
                    continue;
                }
                let goes = |transfer: &Transfer| {
                    transfer.from == node
                        && transfer.vars.iter().any(|(from, _)| *from == data.0 as usize)
                };
                if !self.transfers.iter().flatten().any(goes) {
                    let input = element.inputs[port].name.clone();
                    return Err(ReloadError::Item(described.name.clone(), input));
                }
            }
        }
        Ok(())
    }

    /// Writes what a node keeps into its frame, which has begun.
    fn apply(&self, node: usize, element: &Element, old: &[Frame], frame: &mut Frame) {
        let Some(transfer) = &self.transfers[node] else { return };
        let Some(before) = old.get(transfer.from) else { return };
        for (from, to) in &transfer.vars {
            let words = beeline_ir::tree::words(element.vars[*to].bits);
            let (from, to) = (before.var_at[*from], frame.var_at[*to]);
            frame.words[to..to + words].copy_from_slice(&before.words[from..from + words]);
        }
        for (from, to) in &transfer.mems {
            frame.mems[*to].clone_from(&before.mems[*from]);
        }
    }

    /// What became of the state, for people.
    #[must_use]
    pub fn told(&self) -> String {
        let list = |what: &str, names: &[String]| {
            if names.is_empty() { String::new() } else { format!("; {what} {}", names.join(", ")) }
        };
        let kept = if self.kept.is_empty() { "nothing".to_owned() } else { self.kept.join(", ") };
        format!("kept {kept}{}{}", list("begun", &self.begun), list("no more:", &self.gone))
    }
}

/// The state that goes over.
#[derive(Clone, Debug)]
pub struct Carried {
    /// How.
    pub handover: Handover,
    /// The frames of the graph that ran.
    pub frames: Vec<Frame>,
}

impl Carried {
    /// Writes what a node keeps into its frame, which has begun.
    pub fn apply(&self, node: usize, element: &Element, frame: &mut Frame) {
        self.handover.apply(node, element, &self.frames, frame);
    }
}

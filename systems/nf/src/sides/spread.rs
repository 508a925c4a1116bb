//! Which elements more threads run.
//!
//! The elements in topological order are cut into rows, one a thread, so that the longest row is as
//! short as can be; the caller's thread, which also serves the world's ends, has the first one. A
//! thread is taken only where that pays: each item then crosses a ring.
//!
//! A graph means the same on more threads where each element's outputs follow from the order of items
//! on each of its inputs alone. One that asks which of several inputs has an item sees another order,
//! as it does in hardware.

use beeline_ir::graph::Graph;
use beeline_ir::tree::{Stmt, words};

/// Most threads.
pub const MOST: usize = 16;

/// What it costs to bring an item in from the world and out again, in statements.
const WORLD: u64 = 60;
/// What it costs a thread that its items cross to another one and back, in statements.
const CROSSING: u64 = 40;
/// A cut is taken where the longest row is shorter than so many hundredths of the whole.
const PAYS: u64 = 75;
/// Turns of a loop whose number is not known.
const TURNS: u64 = 8;

/// Which worker runs each node, and how many workers there are: the `host` elements have one, and as
/// many more are taken as pay, so that at most `threads` run the others.
#[must_use]
pub fn spread(graph: &Graph, threads: usize) -> (Vec<Option<usize>>, usize) {
    let mut workers = usize::from(graph.nodes.iter().any(|node| node.host));
    let mut away: Vec<Option<usize>> =
        graph.nodes.iter().map(|node| node.host.then_some(0)).collect();
    let row: Vec<usize> =
        graph.topological().into_iter().filter(|node| !graph.nodes[*node].host).collect();
    let weights: Vec<u64> =
        row.iter().map(|node| weight(&graph.nodes[*node].element.handler)).collect();
    let whole = WORLD + weights.iter().sum::<u64>();
    let ends = cut(&weights, threads.clamp(1, MOST));
    let mut longest = 0;
    let mut first = 0;
    for (part, end) in ends.iter().enumerate() {
        let beside = CROSSING + if part == 0 { WORLD } else { 0 };
        longest = longest.max(beside + weights[first..*end].iter().sum::<u64>());
        first = *end;
    }
    if longest * 100 < whole * PAYS {
        for rows in ends.windows(2).filter(|rows| rows[0] < rows[1]) {
            for node in &row[rows[0]..rows[1]] {
                away[*node] = Some(workers);
            }
            workers += 1;
        }
    }
    (away, workers)
}

/// Ends of at most `parts` rows of the weights whose longest, with the world beside the first, is as
/// short as can be; a row may be empty.
fn cut(weights: &[u64], parts: usize) -> Vec<usize> {
    let fits = |most: u64| -> Option<Vec<usize>> {
        let mut ends = Vec::new();
        let (mut at, mut inside) = (0, WORLD);
        while ends.len() < parts {
            while at < weights.len() && inside + weights[at] <= most {
                inside += weights[at];
                at += 1;
            }
            ends.push(at);
            inside = 0;
        }
        (at == weights.len()).then_some(ends)
    };
    let (mut low, mut high) = (0, WORLD + weights.iter().sum::<u64>());
    while low < high {
        let middle = low + (high - low) / 2;
        if fits(middle).is_some() { high = middle } else { low = middle + 1 }
    }
    fits(high).unwrap_or_else(|| vec![weights.len(); parts])
}

/// Statements that a handler runs, roughly: both sides of a branch, every turn of a loop, a word of a
/// copy each.
fn weight(block: &[Stmt]) -> u64 {
    let of = |stmt: &Stmt| match stmt {
        Stmt::If { then, otherwise, .. } => 1 + weight(then) + weight(otherwise),
        Stmt::Loop { body, info, .. } => {
            weight(body).saturating_mul(info.bound.map_or(TURNS, u64::from))
        }
        Stmt::Scope { body, .. } | Stmt::Async(body) => weight(body),
        Stmt::Copy { bits, .. } | Stmt::Read { bits, .. } | Stmt::Write { bits, .. } => {
            words(*bits) as u64
        }
        _ => 1,
    };
    block.iter().map(of).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_even_as_can_be_with_the_world_beside_the_first() {
        assert_eq!(cut(&[100, 100, 100], 1), [3]);
        assert_eq!(cut(&[10, 100, 100], 3), [1, 2, 3]);
        // The world alone, where the first element is the heaviest.
        assert_eq!(cut(&[500, 10, 10], 2), [0, 3]);
        assert_eq!(cut(&[], 4), [0; 4]);
    }
}

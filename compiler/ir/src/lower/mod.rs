//! From the syntax tree to the typed tree.
//!
//! [`compile`] collects what a file, its imports and the library declare, lowers the element of each
//! instance with its parameters as constants, and checks the graph. Functions are inlined; a branch
//! whose condition is constant is lowered alone, so that templates end.

mod builtins;
mod element;
mod evaluate;
mod expressions;
mod graph;
mod loops;
mod statements;
mod types;
mod world;

use beeline_syntax::{Diagnostics, FileId, Sources};

use crate::graph::Graph;
use crate::tree::Element;

/// Gives the text of an imported file; none where there is no such file.
pub type Loader<'a> = &'a mut dyn FnMut(&str) -> Option<String>;

/// What a file compiles to.
#[derive(Debug, Default)]
pub struct Compiled {
    /// The graph; nothing is in it where the file has none or is wrong.
    pub graph: Graph,
    /// Each element the file itself declares, with its default parameters.
    pub elements: Vec<Element>,
}

/// Compiles `file` and what it imports.
///
/// Errors are in `found`: where [`Diagnostics::failed`], the result is not for running.
pub fn compile(
    sources: &mut Sources,
    file: FileId,
    loader: Loader<'_>,
    found: &mut Diagnostics,
) -> Compiled {
    let (world, unit) = world::collect(sources, file, loader, found);
    let mut elements = Vec::new();
    for declared in &unit.elements {
        if let Some(element) = element::lower(&world, declared, &[], found) {
            elements.push(element);
        }
    }
    let mut graph = graph::lower(&world, &unit, found);
    for element in elements.iter_mut().chain(graph.nodes.iter_mut().map(|node| &mut node.element)) {
        element.lines = lines(sources, element.span);
    }
    Compiled { graph, elements }
}

/// Lines that say something.
fn lines(sources: &Sources, span: beeline_syntax::Span) -> u32 {
    let text = sources.text(span.file);
    let part = text.get(span.start as usize..span.end as usize).unwrap_or("");
    let says = |line: &&str| !line.trim().is_empty() && !line.trim().starts_with("//");
    u32::try_from(part.lines().filter(says).count()).unwrap_or(u32::MAX)
}

//! What operations keep in memory: counted, and bounded for one operation and for the node.
//!
//! Invariant: what a [`Lease`] holds is given back when the lease is dropped, however the operation
//! ends. Sizes are estimates of what values take, never below the length of their strings.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bson::{Bson, Document};

use crate::check::DEEPEST;
use crate::error::{Code, Result, fail};

/// Most bytes one operation may keep, as MongoDB.
pub const MOST_OF_OPERATION: usize = 100 << 20;
/// Most bytes of one value that an expression makes.
const MOST_OF_VALUE: usize = 64 << 20;

/// A bound, and how much of it is used.
#[derive(Debug)]
pub struct Memory {
    used: AtomicUsize,
    most: usize,
    node: Option<Arc<Memory>>,
}

impl Memory {
    /// All operations of a node together.
    #[must_use]
    pub fn of_node(most: usize) -> Arc<Self> {
        Arc::new(Self { used: AtomicUsize::new(0), most, node: None })
    }

    /// One operation of a node.
    #[must_use]
    pub fn of_operation(node: &Arc<Self>) -> Arc<Self> {
        let node = Some(Arc::clone(node));
        Arc::new(Self { used: AtomicUsize::new(0), most: MOST_OF_OPERATION, node })
    }

    /// One operation that stands alone.
    #[must_use]
    pub fn alone() -> Arc<Self> {
        Self::of_node(MOST_OF_OPERATION)
    }

    /// Bytes in use.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: usize) -> Result<()> {
        let before = self.used.fetch_add(bytes, Ordering::Relaxed);
        let taken = if before.saturating_add(bytes) <= self.most {
            self.node.as_ref().map_or(Ok(()), |node| node.take(bytes))
        } else if self.node.is_some() || self.most == MOST_OF_OPERATION {
            fail(
                Code::QueryExceededMemory,
                format!(
                    "Exceeded memory limit of {} bytes for one operation, which keeps nothing on disk; an index, a limit or a narrower filter would avoid it",
                    self.most
                ),
            )
        } else {
            fail(
                Code::ExceededMemoryLimit,
                format!(
                    "the operations of this node together would keep more than {} bytes; try again when fewer are open",
                    self.most
                ),
            )
        };
        if taken.is_err() {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
        taken
    }

    fn give(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(node) = &self.node {
            node.give(bytes);
        }
    }
}

/// Bytes that something keeps.
#[derive(Debug, Default)]
pub struct Lease {
    memory: Option<Arc<Memory>>,
    bytes: usize,
}

impl Clone for Lease {
    /// A copy holds nothing: what is copied is a stage before its first document.
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl Lease {
    /// Nothing yet, of an operation.
    #[must_use]
    pub fn of(memory: &Arc<Memory>) -> Self {
        Self { memory: Some(Arc::clone(memory)), bytes: 0 }
    }

    /// So many bytes more. `memory` is asked for with the first of them.
    ///
    /// Errors: [`Code::QueryExceededMemory`], [`Code::ExceededMemoryLimit`]; nothing was taken then.
    pub fn grow(&mut self, bytes: usize, memory: impl FnOnce() -> Arc<Memory>) -> Result<()> {
        self.memory.get_or_insert_with(memory).take(bytes)?;
        self.bytes += bytes;
        Ok(())
    }

    /// So many bytes less.
    pub fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        if let Some(memory) = &self.memory {
            memory.give(bytes);
            self.bytes -= bytes;
        }
    }

    /// No more than so many bytes.
    pub fn shrink_to(&mut self, bytes: usize) {
        self.shrink(self.bytes.saturating_sub(bytes));
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.shrink_to(0);
    }
}

/// About how many bytes a document takes in memory.
#[must_use]
pub fn size_of(document: &Document) -> usize {
    document.iter().map(|(name, value)| name.len() + 64 + size_of_value(value)).sum()
}

/// About how many bytes a value takes beside the place it lies in.
#[must_use]
pub fn size_of_value(value: &Bson) -> usize {
    match value {
        Bson::String(text) => text.len(),
        Bson::Document(inner) => size_of(inner),
        Bson::Array(all) => all.iter().map(|value| 32 + size_of_value(value)).sum(),
        Bson::Binary(binary) => binary.bytes.len(),
        _ => 0,
    }
}

/// Adds a value up; `None` when it is too deep or too large.
fn measure(value: &Bson, left: usize, sum: &mut usize) -> Option<()> {
    let own = match value {
        Bson::String(text) => text.len(),
        Bson::Binary(binary) => binary.bytes.len(),
        Bson::Array(all) => all.len().saturating_mul(32),
        Bson::Document(inner) => inner.len().saturating_mul(64),
        _ => 0,
    };
    *sum = sum.saturating_add(own);
    if *sum > MOST_OF_VALUE {
        return None;
    }
    match value {
        Bson::Array(all) if left > 0 => {
            all.iter().try_for_each(|value| measure(value, left - 1, sum))
        }
        Bson::Document(inner) if left > 0 => {
            inner.iter().try_for_each(|(_, value)| measure(value, left - 1, sum))
        }
        Bson::Array(_) | Bson::Document(_) => None,
        _ => Some(()),
    }
}

/// A value that an expression made, if it is not too deep and not too large: expressions of a few
/// bytes can make values that would overflow the stack or fill memory.
///
/// Errors: [`Code::Overflow`], [`Code::ExceededMemoryLimit`].
pub fn bounded(value: Bson) -> Result<Bson> {
    let mut sum = 0;
    if matches!(value, Bson::Array(_) | Bson::Document(_) | Bson::String(_))
        && measure(&value, DEEPEST, &mut sum).is_none()
    {
        drop_deep(value);
        if sum > MOST_OF_VALUE {
            return fail(
                Code::ExceededMemoryLimit,
                format!("an expression would make a value larger than {MOST_OF_VALUE} bytes"),
            );
        }
        return fail(
            Code::Overflow,
            format!("an expression would make a value that is nested deeper than {DEEPEST}"),
        );
    }
    Ok(value)
}

/// Drops a value without recursion.
fn drop_deep(value: Bson) {
    let mut left = vec![value];
    while let Some(value) = left.pop() {
        match value {
            Bson::Array(all) => left.extend(all),
            Bson::Document(inner) => left.extend(inner.into_iter().map(|(_, value)| value)),
            _ => {}
        }
    }
}

/// Refuses a document that is nested too deeply to be stored or sent.
///
/// Errors: [`Code::Overflow`].
pub fn check_nesting(document: &Document) -> Result<()> {
    fn fits(value: &Bson, left: usize) -> bool {
        match value {
            Bson::Array(all) => left > 0 && all.iter().all(|value| fits(value, left - 1)),
            Bson::Document(inner) => {
                left > 0 && inner.iter().all(|(_, value)| fits(value, left - 1))
            }
            _ => true,
        }
    }
    if document.iter().all(|(_, value)| fits(value, DEEPEST - 1)) {
        return Ok(());
    }
    fail(Code::Overflow, format!("a document would be nested deeper than {DEEPEST}"))
}

#[cfg(test)]
mod tests {
    use bson::doc;

    use super::*;

    #[test]
    fn an_operation_is_bounded_and_gives_back_what_it_kept() {
        let node = Memory::of_node(MOST_OF_OPERATION + (MOST_OF_OPERATION >> 1));
        let (first, second) = (Memory::of_operation(&node), Memory::of_operation(&node));
        let mut lease = Lease::of(&first);
        lease.grow(MOST_OF_OPERATION, Memory::alone).unwrap();
        let refused = lease.grow(1, Memory::alone).unwrap_err();
        assert_eq!(refused.code, Code::QueryExceededMemory);
        let mut other = Lease::of(&second);
        let refused = other.grow(MOST_OF_OPERATION, Memory::alone).unwrap_err();
        assert_eq!(refused.code, Code::ExceededMemoryLimit);
        assert_eq!((second.used(), node.used()), (0, MOST_OF_OPERATION));
        lease.shrink_to(10);
        assert_eq!((first.used(), node.used()), (10, 10));
        drop(lease);
        assert_eq!((first.used(), node.used()), (0, 0));
        other.grow(MOST_OF_OPERATION, Memory::alone).unwrap();
    }

    #[test]
    fn a_document_as_deep_as_the_wire_brings_it_is_the_deepest() {
        let nest = |levels: usize| {
            let mut document = doc! {};
            for _ in 1..levels {
                document = doc! { "a": document };
            }
            document
        };
        for levels in [1, DEEPEST, DEEPEST + 1] {
            let deep = nest(levels);
            let wire = crate::check::document(&deep.to_vec().unwrap());
            assert_eq!(check_nesting(&deep).is_ok(), wire.is_ok(), "{levels}");
            assert_eq!(check_nesting(&deep).is_ok(), levels <= DEEPEST, "{levels}");
            assert_eq!(bounded(Bson::Document(deep)).is_ok(), levels <= DEEPEST, "{levels}");
        }
    }
}

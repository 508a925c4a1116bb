//! The executable specification of fabric.
//!
//! Place: `substrate`, a development dependency of every provider. A provider is finished when
//! [`conformance_suite!`] passes unchanged over it. The items of [`suite`] read as the
//! specification: each is named by the sentence it checks.
//!
//! ```ignore
//! struct MyProvider;
//! impl Harness for MyProvider {
//!     fn open_device(&self) -> Result<Arc<dyn Device>, Stop> { ... }
//! }
//! beeline_fabric_conformance::conformance_suite!(MyProvider);
//! ```
//!
//! Decisions where the traits leave room, taken from verbs:
//! - any completion other than success leaves its queue pair in the error state; later requests
//!   and posted receives of that queue pair are flushed, in post order, each with a completion;
//! - after a refused access or an over-long message both ends are in the error state within a
//!   bounded time; a receive that was too short completes with `LengthError` at the receiver;
//! - one-sided operations complete although the target never polls;
//! - a request that fails produces its completion even when posted unsignalled;
//! - peers that vanish end outstanding requests with `TransportError` or `Flushed`;
//! - what an overrun completion queue held may be lost, silently losing completions is not
//!   allowed: the queue reports the overrun from then on.
//!
//! Peers that must be able to die or stop are real processes where the provider has them: the test
//! binary runs itself again, and the test `conformance_peer_process` becomes the peer
//! (see [`process`]). Set `BEELINE_DEEP=1` for the long forms.
//!
//! With `BEELINE_CONFORMANCE_FAR=HOST:PORT` every second node of an item and all its peer processes
//! are in another host, where the same test binary runs its test `conformance_peer_process` with
//! `BEELINE_CONFORMANCE_AGENT=PORT`: every item then has one end on each.

pub mod context;
mod far;
pub mod harness;
pub mod process;
pub mod suite;

pub use context::Context;
pub use harness::{Capabilities, Harness, ItemResult, Stop, Support};

/// One item of the specification.
pub type Item = fn(&Context<'_>) -> ItemResult;

/// Looks up an item by its name.
#[must_use]
pub fn item(name: &str) -> Option<Item> {
    suite::ITEMS.iter().find(|(known, _)| *known == name).map(|(_, item)| *item)
}

/// Runs one item; the body of each test that [`conformance_suite!`] makes. A skipped item is
/// reported on standard error with its reason, past the test runner's capture.
///
/// Panics when the provider fails the item.
#[allow(clippy::panic, reason = "a failed item fails the test it is the body of")]
pub fn run_item(harness: &dyn Harness, module: &'static str, name: &str) {
    let found = item(name);
    assert!(found.is_some(), "the suite has an item called {name}");
    let Some(item) = found else { return };
    far::begin_item();
    let outcome = match harness.absent() {
        Some(reason) => Err(Stop::Skipped { reason }),
        None => item(&Context::new(harness, module)),
    };
    match outcome {
        Ok(()) => {}
        Err(Stop::Skipped { reason }) => {
            use std::io::Write as _;
            let _ = writeln!(std::io::stderr(), "{module}::{name} ... skipped: {reason}");
        }
        Err(failed) => panic!("{failed}"),
    }
}

/// Makes one test per item of the suite, and the one that turns into a peer process.
///
/// `$harness` is an expression that makes a [`Harness`]; it is evaluated once per item.
#[macro_export]
macro_rules! conformance_suite {
    ($harness:expr) => {
        /// Does nothing in the test run; is the peer when an item runs this binary again.
        #[test]
        fn conformance_peer_process() {
            $crate::process::peer_main(&$harness, module_path!());
        }

        $crate::conformance_items!([$crate::conformance_test], ($harness));
    };
}

/// Makes the tests of one harness from the list of items.
#[doc(hidden)]
#[macro_export]
macro_rules! conformance_test {
    (($harness:expr) $($group:ident { $($name:ident),+ $(,)? })+) => {
        $($(
            #[test]
            fn $name() {
                $crate::run_item(&$harness, module_path!(), stringify!($name));
            }
        )+)+
    };
}
